"""Validation of matrices: errors name argument, value and expectation; valid input becomes canonical CSR."""

from __future__ import annotations

import logging
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core import validate as _validate
from hybridmf.core.validate import (
    as_csr,
    check_nonempty,
    check_shape,
    csr_arrays,
    from_triplets,
    index_pointer_dtype,
    make_csr,
)
from hybridmf.errors import DuplicateEntriesError, HybridMFError, RatingsError
from support.messages import says
from support.ratings import planted

INF, NAN = float("inf"), float("nan")


def corrupted(**arrays) -> sp.csr_array:
    """A 3 x 4 CSR matrix with 5 entries, some of its arrays replaced behind SciPy's back."""
    matrix = sp.csr_array(np.array([[1, 2, 0, 0], [0, 0, 3, 0], [4, 0, 0, 5]], dtype=np.float32))
    for name, values in arrays.items():
        setattr(matrix, name, values)
    return matrix


# ------------------------------------------------------------------------------------------- objects that are no matrix


@pytest.mark.parametrize(
    ("matrix", "kind", "parts"),
    [
        (None, RatingsError, ("plays must be a sparse or dense matrix", "NoneType of 0 dimension(s)")),
        ("abc", RatingsError, ("plays must be a sparse or dense matrix of shape (n_users, n_items)", "str")),
        ([1, 2], RatingsError, ("plays must be a sparse or dense matrix", "list of 1 dimension(s)")),
        (np.zeros((2, 2, 2)), RatingsError, ("plays must be", "ndarray of 3 dimension(s)")),
        (sp.coo_array(np.array([1.0, 2.0])), RatingsError, ("plays must have 2 dimensions", "shape (2,)")),
        (np.ones((2, 2), dtype=complex), TypeError, ("plays has complex values (dtype complex128)", "real ratings")),
        (sp.csr_array(np.eye(2) * 1j), TypeError, ("plays has complex values", "real ratings")),
        ([["a", "b"]], TypeError, ("plays has dtype <U1", "real numbers")),
        (np.zeros((1, 1), dtype="M8[s]"), TypeError, ("plays has dtype datetime64[s]",)),
        (np.array([[1, "x"]], dtype=object), TypeError, ("plays has dtype object", "'x'", "real ratings")),
        (np.array([[1, 1j]], dtype=object), TypeError, ("plays has dtype object", "complex", "real ratings")),
    ],
)
def test_things_that_are_no_rating_matrix(matrix, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        as_csr(matrix, name="plays")


def test_object_values_that_are_numbers_are_taken():
    dense = np.array([[1, 0], [True, Fraction(5, 2)]], dtype=object)
    np.testing.assert_array_equal(as_csr(dense).toarray(), [[1, 0], [1, 2.5]])
    np.testing.assert_array_equal(
        as_csr(corrupted(data=np.array([1, 2.0, np.int8(3), 4, 5], dtype=object))).data, [1, 2, 3, 4, 5]
    )
    coo = sp.coo_array(planted())
    coo.data = coo.data.astype(object)
    assert abs(as_csr(coo) - planted()).max() == 0


@pytest.mark.parametrize("value", ["three", [3], 3j])
def test_object_values_that_are_no_numbers_are_refused(value):
    data = np.empty(5, dtype=object)
    data[:] = [1, 2, value, 4, 5]
    for matrix in (corrupted(data=data), sp.csc_array(corrupted())):
        matrix.data = data
        with pytest.raises(TypeError, match=says("user_items has dtype object", "pass real ratings")):
            as_csr(matrix)


# ------------------------------------------------------------------------------------------------------ corrupt CSR


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"indptr": np.array([0, 4, 2, 5])}, ("indptr falls from 4 to 2 at position 1",)),
        ({"indptr": np.array([0, 2, 3, 9])}, ("indptr ends at 9, but there are 5 indices and 5 values",)),
        ({"indptr": np.array([1, 2, 3, 5])}, ("indptr has 4 elements starting at 1", "expected 4 starting at 0")),
        ({"indptr": np.array([-1, 2, 3, 5])}, ("indptr has 4 elements starting at -1", "expected 4 starting at 0")),
        ({"indptr": np.array([0, 2, 5])}, ("indptr has 3 elements starting at 0", "expected 4 starting at 0")),
        ({"indptr": np.array([], dtype=int)}, ("indptr has 0 elements starting at none",)),
        ({"indptr": np.array([[0, 2, 3, 5]])}, ("indptr, indices and data must be vectors",)),
        ({"indices": np.array([[0, 1, 2, 0, 3]])}, ("indptr, indices and data must be vectors",)),
        ({"data": np.ones((5, 1))}, ("indptr, indices and data must be vectors",)),
        ({"indices": np.array([0, 1, 2])}, ("indptr ends at 5, but there are 3 indices and 5 values",)),
        ({"data": np.ones(2)}, ("indptr ends at 5, but there are 5 indices and 2 values",)),
        ({"indices": np.array([0.0, 1, 2, 0, 3])}, ("indices have dtype float64, expected integers",)),
        (
            {"indices": np.array([0, 1, -3, 0, 3])},
            ("a negative column index (-3 at entry 2)", "0 <= index < n_items=4"),
        ),
        ({"indices": np.array([0, 1, 2, 0, 4])}, ("the column index 4 (out of range at entry 4)", "< n_items=4")),
        ({"indices": np.array([0, 2**40, 2, 0, 3])}, ("the column index 1099511627776 (out of range at entry 1)",)),
        ({"indices": np.array([0, 2**63 + 1, 2, 0, 3], dtype=np.uint64)}, ("(out of range at entry 1)",)),
    ],
)
def test_corrupt_csr_is_refused(arrays, parts):
    with pytest.raises(RatingsError, match=says("ratings", *parts)):
        as_csr(corrupted(**arrays), name="ratings")


def test_corrupt_csr_reaches_every_method_as_a_refusal():
    bad = corrupted(indices=np.array([0, 1, 2, 0, 99], dtype=np.int32))
    model = hmf.ExplicitALS(biases=False, factors=1, iterations=1, device="cpu").fit(corrupted())
    calls = {
        "user_items": (model.fit, model.transform, model.objective, model.score, lambda m: model.recommend(0, m)),
        "users": (model.predict,),
        "rows": (lambda m: model.partial_fit_users([0, 1, 2], m),),
        "cols": (lambda m: model.partial_fit_items([0, 1, 2, 3], m),),
        "validation": (lambda m: model.fit(corrupted(), validation=m),),
    }
    for name, methods in calls.items():
        for method in methods:
            with pytest.raises(RatingsError, match=says(name, "column index 99", "n_items=4")):
                method(bad)


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"indices": np.array([0, 2, 0, 1, 3])}, ("the row index 3 (out of range at entry 4)", "< n_users=3")),
        ({"indices": np.array([0, 2, -1, 1, 2])}, ("a negative row index (-1 at entry 2)", "< n_users=3")),
        ({"indptr": np.array([0, 2, 1, 4, 5])}, ("indptr falls from 2 to 1 at position 1",)),
        ({"indptr": np.array([0, 2, 3, 5])}, ("indptr has 4 elements", "expected 5 starting at 0")),
    ],
)
def test_corrupt_csc_is_refused_by_rows(arrays, parts):
    matrix = sp.csc_array(corrupted())
    for name, values in arrays.items():
        setattr(matrix, name, values)
    with pytest.raises(RatingsError, match=says("user_items", *parts)):
        as_csr(matrix)


@pytest.mark.parametrize(
    ("coords", "parts"),
    [
        (([0, 3], [0, 1]), ("row index 3 at entry 1 is out of range; expected 0 <= index < n_users=3",)),
        (([0, -1], [0, 1]), ("row index -1 at entry 1 is out of range", "n_users=3")),
        (([0, 1], [4, 1]), ("column index 4 at entry 0 is out of range; expected 0 <= index < n_items=4",)),
        (([0, 1], [0]), ("2 row indices, 1 column indices and 2 values",)),
    ],
)
def test_corrupt_coo_is_refused(coords, parts):
    matrix = sp.coo_array((3, 4), dtype=np.float32)
    matrix.coords, matrix.data = tuple(map(np.array, coords)), np.ones(2)
    with pytest.raises(RatingsError, match=says("user_items", *parts)):
        as_csr(matrix)


def test_triplets_that_are_no_integer_vectors_are_refused():
    with pytest.raises(TypeError, match=says("ratings row index must be integers, got dtype float64")):
        from_triplets([0.0], [0], [1.0], (1, 1))
    with pytest.raises(RatingsError, match=says("ratings column index must be one-dimensional, got shape (1, 1)")):
        from_triplets([0], [[0]], [1.0], (1, 1))
    with pytest.raises(TypeError, match=says("ratings has dtype <U1")):
        from_triplets([0], [0], ["a"], (1, 1))
    with pytest.raises(TypeError, match=says("ratings has dtype object", "'a'")):
        from_triplets([0], [0], np.array(["a"], dtype=object), (1, 1))


def test_a_falling_unsigned_indptr_is_refused():
    with pytest.raises(RatingsError, match=says("indptr falls from 3 to 1")):
        as_csr(corrupted(indptr=np.array([0, 3, 1, 5], dtype=np.uint64)))


def test_a_float_indptr_is_refused():
    with pytest.raises(RatingsError, match=says("user_items is corrupt: indptr has dtype float64, expected integers")):
        as_csr(corrupted(indptr=np.array([0, 2.5, 3.5, 5])))


def test_shapes_beyond_int32_are_refused():
    matrix = sp.coo_array(([1.0], ([0], [0])), shape=(1, 2**31))
    with pytest.raises(RatingsError, match=says("user_items has shape (1, 2147483648)", "at most 2147483647")):
        as_csr(matrix)


def test_room_after_the_last_entry_is_ignored():
    """SciPy allows longer index and data arrays than indptr uses."""
    loose = corrupted(indices=np.array([0, 1, 2, 0, 3, 77]), data=np.array([1, 2, 3, 4, 5, np.nan], dtype=np.float32))
    np.testing.assert_array_equal(as_csr(loose).toarray(), corrupted().toarray())


# ----------------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("layout", [sp.csr_array, sp.csc_array, sp.coo_array, sp.lil_array, np.asarray])
def test_values_must_be_finite(layout, value):
    dense = np.arange(1.0, 13.0).reshape(3, 4)
    dense[1, 2] = value
    with pytest.raises(RatingsError, match=says("user_items has the value", str(value), "row 1, column 2", "finite")):
        as_csr(layout(dense))


@pytest.mark.parametrize("layout", [sp.csr_array, sp.csc_array, sp.coo_array, np.asarray])
def test_values_must_fit_the_type_of_the_model(layout):
    dense = np.array([[1.0, 2.0], [3.0, -1e39]])
    with pytest.raises(RatingsError, match=says("value -1e+39, which overflows float32", "row 1, column 1")):
        as_csr(layout(dense))
    assert as_csr(layout(dense), dtype=np.float64).data[-1] == -1e39


# ------------------------------------------------------------------------------------------------------- empty ones


def test_fit_refuses_empty_matrices():
    model = hmf.ExplicitALS(factors=2, device="cpu")
    for shape in ((0, 5), (5, 0), (0, 0)):
        with pytest.raises(RatingsError, match=says(f"user_items has shape {shape}", "one user (row) and one item")):
            model.fit(sp.csr_array(shape, dtype=np.float32))
        with pytest.raises(ValueError, match=r"0 (sample|feature)\(s\)"):  # scikit-learn's words
            model.fit(np.zeros(shape))
    for nothing in (sp.csr_array((4, 5), dtype=np.float32), np.zeros((4, 5))):
        with pytest.raises(RatingsError, match=says("user_items of shape (4, 5) has no entries")):
            model.fit(nothing)


def test_check_nonempty_passes_one_entry():
    check_nonempty(sp.csr_array(np.ones((1, 1))), "user_items")


def test_implicit_feedback_of_explicit_zeros_only_has_no_entries():
    zeros = corrupted(data=np.zeros(5, dtype=np.float32))
    with pytest.raises(RatingsError, match=says("user_items of shape (3, 4) has no entries")):
        hmf.ImplicitALS(factors=2, device="cpu").fit(zeros)
    hmf.ExplicitALS(biases=False, factors=2, iterations=1, device="cpu").fit(zeros)


# -------------------------------------------------------------------------------------------------------- duplicates


def with_duplicates(layout: str):
    """Values 5, 1 (in this order) for (0, 1), 2, 7, 3 for (2, 0), and a single 4 for (1, 2), columns out of order."""
    rows, columns, values = [2, 0, 2, 1, 0, 2], [0, 1, 0, 2, 1, 0], [2.0, 5.0, 7.0, 4.0, 1.0, 3.0]
    if layout == "coo":
        return sp.coo_array((values, (rows, columns)), shape=(3, 3))
    if layout == "csr":
        return sp.csr_array(([5.0, 1, 4, 2, 7, 3], [1, 1, 2, 0, 0, 0], [0, 2, 3, 6]), shape=(3, 3))
    return sp.csc_array(([2.0, 7, 3, 5, 1, 4], [2, 2, 2, 0, 0, 1], [0, 3, 5, 6]), shape=(3, 3))


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize(("rule", "merged"), [("sum", (6, 12)), ("mean", (3, 4)), ("last", (1, 3)), ("max", (5, 7))])
def test_merge_rules(layout, rule, merged):
    matrix = as_csr(with_duplicates(layout), duplicates=rule)
    np.testing.assert_array_equal(matrix.toarray(), [[0, merged[0], 0], [0, 0, 4], [merged[1], 0, 0]])
    assert matrix.nnz == 3
    assert matrix.dtype == np.float32


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_duplicates_are_an_error_that_says_how_to_merge_them(layout):
    parts = (
        "user_items has more than one entry for the pair (row 0, column 1)", "values 5 and 1", 'duplicates="sum"',
        "fit, which has no such argument, takes Ratings.from_matrix(..., duplicates=...)",
    )  # fmt: skip
    with pytest.raises(DuplicateEntriesError, match=says(*parts)) as caught:
        as_csr(with_duplicates(layout))
    assert isinstance(caught.value, (RatingsError, HybridMFError, ValueError))
    with pytest.raises(DuplicateEntriesError, match=says(*parts)):
        hmf.ExplicitALS(biases=False, factors=1, device="cpu").fit(with_duplicates(layout))


def test_duplicates_in_an_unsorted_row_and_of_booleans():
    unsorted = sp.csr_array(([1.0, 2, 3], [2, 0, 2], [0, 3]), shape=(1, 3))
    with pytest.raises(DuplicateEntriesError, match=says("(row 0, column 2)", "values 1 and 3")):
        as_csr(unsorted)
    flags = sp.csr_array((np.ones(2, dtype=bool), [1, 1], [0, 2]), shape=(1, 3))
    with pytest.raises(DuplicateEntriesError, match=says("(row 0, column 1)", "values 1 and 1")):
        as_csr(flags)
    assert as_csr(flags, duplicates="sum").data == [2]


@pytest.mark.parametrize("rule", ["add", None, "SUM", True])
def test_unknown_merge_rules_are_refused(rule):
    expected = says("duplicates must be one of 'error', 'sum', 'mean', 'first', 'last', 'max'; got", repr(rule))
    with pytest.raises(ValueError, match=expected):
        as_csr(planted(), duplicates=rule)
    with pytest.raises(ValueError, match=expected):
        from_triplets([0], [0], [1.0], (1, 1), duplicates=rule)


def test_a_sum_that_overflows_is_refused():
    matrix = sp.coo_array(([3e38, 3e38], ([0, 0], [1, 1])), shape=(1, 2))
    with pytest.raises(RatingsError, match=says("value 6e+38, which overflows float32 at row 0, column 1")):
        as_csr(matrix, duplicates="sum")


TRIPLETS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(-8, 8)), max_size=25)
MERGE = {"sum": sum, "mean": lambda v: sum(v) / len(v), "last": lambda v: v[-1], "max": max}


@settings(max_examples=60)
@given(TRIPLETS, st.sampled_from(sorted(MERGE)), st.booleans())
def test_merging_is_a_dictionary_of_lists(triplets, rule, drop_zeros):
    pairs: dict[tuple[int, int], list[int]] = {}
    for row, column, value in triplets:
        pairs.setdefault((row, column), []).append(value)
    expected = {pair: np.float32(MERGE[rule](values)) for pair, values in pairs.items()}
    if drop_zeros:
        expected = {pair: value for pair, value in expected.items() if value != 0}
    rows, columns, values = np.array(triplets, dtype=np.int64).reshape(-1, 3).T
    by_row, by_column = np.argsort(rows, kind="stable"), np.argsort(columns, kind="stable")
    ends = [np.append(0, np.cumsum(np.bincount(ids, minlength=n))) for ids, n in ((rows, 5), (columns, 6))]
    layouts = (
        sp.coo_array((values, (rows, columns)), shape=(5, 6)),
        sp.csr_array((values[by_row], columns[by_row], ends[0]), shape=(5, 6)),
        sp.csc_array((values[by_column], rows[by_column], ends[1]), shape=(5, 6)),
    )
    for layout in layouts:
        matrix = as_csr(layout, duplicates=rule, drop_zeros=drop_zeros)
        coo = matrix.tocoo()
        assert dict(zip(zip(coo.row.tolist(), coo.col.tolist(), strict=True), coo.data, strict=True)) == expected
        assert_canonical(matrix, np.float32)


# --------------------------------------------------------------------------------------------------- what passes


def assert_canonical(matrix: sp.csr_array, dtype) -> None:
    fresh = sp.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    assert isinstance(matrix, sp.csr_array)
    assert matrix.dtype == dtype
    assert matrix.indices.dtype == np.int32
    assert matrix.data.flags.c_contiguous
    assert matrix.indices.flags.c_contiguous
    assert fresh.has_canonical_format
    assert matrix.has_canonical_format


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "layout",
    [sp.csr_array, sp.csc_array, sp.coo_array, sp.lil_array, sp.dok_array, sp.dia_array, sp.csr_matrix, sp.coo_matrix],
)
def test_every_layout_gives_the_same_matrix(layout, dtype):
    matrix = as_csr(layout(planted()), dtype=dtype)
    assert_canonical(matrix, dtype)
    np.testing.assert_array_equal(matrix.toarray(), planted().toarray())
    assert matrix.nnz == planted().nnz


def test_padding_is_not_feedback():
    for padded in (sp.bsr_array(planted(), blocksize=(2, 2)), sp.dia_array(planted())):
        stored = padded.data.copy()
        assert as_csr(padded).nnz == planted().nnz
        np.testing.assert_array_equal(padded.data, stored)


@pytest.mark.parametrize("layout", [sp.csr_array, sp.csc_array, sp.coo_array])
def test_explicit_zeros_are_feedback(layout):
    assert as_csr(layout(corrupted(data=np.array([1, 0, 3, 0, 5.0])))).nnz == 5


@pytest.mark.parametrize("kind", ["?", "i1", "u8", "f2", "f8", ">f4", "g"])
def test_every_real_value_type(kind):
    values = np.array([1, 0, 1, 1, 1]).astype(kind)
    result = as_csr(corrupted(data=values))
    assert_canonical(result, np.float32)
    np.testing.assert_array_equal(result.data, [1, 0, 1, 1, 1])


@pytest.mark.parametrize("kind", ["i8", "u8", "i2", ">i4"])
def test_every_index_type(kind):
    plain = corrupted()
    result = as_csr(corrupted(indices=plain.indices.astype(kind), indptr=plain.indptr.astype(kind)))
    assert_canonical(result, np.float32)
    np.testing.assert_array_equal(result.toarray(), plain.toarray())


def test_read_only_arrays_are_fine_and_never_written_to():
    for layout in (sp.csr_array, sp.csc_array, sp.coo_array):
        matrix = layout(planted())
        for array in (matrix.data, *(getattr(matrix, name) for name in ("indices", "indptr") if hasattr(matrix, name))):
            array.flags.writeable = False
        model = hmf.ExplicitALS(biases=False, factors=2, iterations=1, random_state=0, device="cpu").fit(matrix)
        model.partial_fit_items([0], sp.csc_array(matrix)[:, [0]])
        assert model.recommend(0, user_items=sp.csr_array(matrix))[0].shape == (10,)


def test_the_input_is_unchanged():
    shuffled = unsorted_copy(planted())
    before = [array.copy() for array in (shuffled.data, shuffled.indices, shuffled.indptr)]
    hmf.ExplicitALS(biases=False, factors=2, iterations=1, device="cpu").fit(shuffled)
    for array, copy in zip((shuffled.data, shuffled.indices, shuffled.indptr), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def unsorted_copy(matrix: sp.csr_array, seed: int = 0) -> sp.csr_array:
    """The same entries with the columns of each row shuffled, without SciPy's flag for it."""
    rng, shuffled = np.random.default_rng(seed), matrix.copy()
    for start, stop in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True):
        order = start + rng.permutation(stop - start)
        shuffled.indices[start:stop], shuffled.data[start:stop] = matrix.indices[order], matrix.data[order]
    return shuffled


@pytest.mark.parametrize("flag", [True, False])
def test_unsorted_rows_give_the_same_model(flag, caplog):
    shuffled = unsorted_copy(planted())
    shuffled.has_sorted_indices = shuffled.has_canonical_format = flag  # a lie, or the truth: neither is relied on
    with caplog.at_level(logging.DEBUG, "hybridmf"):
        model = hmf.ImplicitALS(factors=3, iterations=2, random_state=0, device="cpu").fit(shuffled)
    assert "user_items: column indices are not sorted" in caplog.text
    sorted_model = hmf.ImplicitALS(factors=3, iterations=2, random_state=0, device="cpu").fit(planted())
    np.testing.assert_array_equal(model.user_factors_, sorted_model.user_factors_)
    np.testing.assert_array_equal(model.transform(shuffled), sorted_model.transform(planted()))
    expected = sorted_model.recommend([3, 5])[0]
    for seen in (None, shuffled, shuffled[[3, 5]]):
        np.testing.assert_array_equal(model.recommend([3, 5], seen)[0], expected)


def test_drop_zeros_keeps_the_others():
    matrix = corrupted(data=np.array([1, 0, 3, -0.0, 5], dtype=np.float32))
    assert as_csr(matrix).nnz == 5
    dropped = as_csr(matrix, drop_zeros=True)
    np.testing.assert_array_equal(dropped.data, [1, 3, 5])
    np.testing.assert_array_equal(dropped.indptr, [0, 1, 2, 3])
    assert_canonical(dropped, np.float32)


def test_zeros_of_a_dense_matrix_are_absent():
    assert as_csr(np.array([[0.0, -0.0], [2, 0]])).nnz == 1
    assert as_csr(np.array([[False, True]])).nnz == 1


# --------------------------------------------------------------------------------------------------- orientation


def test_check_shape_names_axes_and_offers_the_transpose():
    matrix = sp.csr_array((4, 6))
    check_shape("plays", matrix, (4, None), ("n_users", "n_items"))
    check_shape("plays", matrix, (None, None), ("n_users", "n_items"))
    with pytest.raises(
        RatingsError,
        match=says(
            "plays has shape (4, 6); expected (n_users=6, n_items=4): ",
            "rows are users and columns are items, pass plays.T",
        ),
    ):
        check_shape("plays", matrix, (6, 4), ("n_users", "n_items"))
    with pytest.raises(
        RatingsError, match=says("plays has shape (4, 6); expected (n_users, n_items=4)", "pass plays.T")
    ):
        check_shape("plays", matrix, (None, 4), ("n_users", "n_items"))
    with pytest.raises(RatingsError, match=says(": rows are users asked for and columns are items, pass plays.T")):
        check_shape("plays", matrix, (6, 4), ("number of users asked for", "n_items"))
    with pytest.raises(RatingsError, match=r"plays has shape \(4, 6\); expected \(n_users=5, n_items=5\)$"):
        check_shape("plays", matrix, (5, 5), ("n_users", "n_items"))


# ------------------------------------------------------------------------------------------------ large nnz, layouts


def test_the_index_limit_is_one_constant(monkeypatch):
    assert index_pointer_dtype(2**31 - 1) is np.int32
    assert index_pointer_dtype(2**31) is np.int64
    monkeypatch.setattr(_validate, "INT32_LIMIT", 4)
    matrix = as_csr(corrupted())
    assert matrix.indptr.dtype == np.int64
    assert matrix.indices.dtype == np.int32
    pointer, indices, _ = csr_arrays(matrix)
    assert (pointer.dtype, indices.dtype) == (np.int64, np.int32)


def test_make_csr_marks_its_result_canonical():
    matrix = make_csr(np.array([0, 1, 2]), np.array([1, 0], dtype=np.int32), np.ones(2), (2, 2))
    assert matrix.has_canonical_format
    np.testing.assert_array_equal(matrix.toarray(), [[0, 1], [1, 0]])
