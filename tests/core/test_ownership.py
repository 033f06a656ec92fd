"""Arrays that a caller can still change never reach a kernel, and masked elements are no values."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import formats
from hybridmf.core.validate import as_csr, check_ids, from_triplets, frozen, owned
from hybridmf.errors import RatingsError
from support.ratings import planted

ESTIMATORS = (hmf.ExplicitALS, hmf.ImplicitALS, hmf.SGD, hmf.CCD)
FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")
ARRAYS = ("indptr", "indices", "data", "row", "col")
WILD = 2**31 - 1
"""An index that no matrix here has: a kernel that reads it reads far outside of its arrays."""


def arrays_of(matrix: sp.sparray) -> list[np.ndarray]:
    return [getattr(matrix, name) for name in ARRAYS if hasattr(matrix, name)]


def spoil(matrix: sp.sparray) -> None:
    """Overwrite all arrays of a matrix with what crashes a kernel."""
    for array in arrays_of(matrix):
        array[:] = WILD


def estimator(cls, **parameters):
    return cls(factors=3, iterations=3, random_state=0, device="cpu", num_threads=1, **parameters)


# ------------------------------------------------------------------------------------------- owned and frozen arrays


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64, np.int8])
@pytest.mark.parametrize("size", [0, 5])
def test_frozen_arrays_never_become_writable(dtype, size):
    array = frozen(np.arange(size, dtype=dtype))
    assert array.dtype == dtype and array.tolist() == list(range(size)) and type(array) is np.ndarray
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    assert owned(array) is array and owned(array, dtype) is array
    assert np.shares_memory(owned(array[1:4]), array) == (size > 0)


def test_owned_copies_what_a_caller_may_write_to():
    mine = np.arange(5)
    read_only = mine.view()
    read_only.setflags(write=False)
    lent = np.asarray(memoryview(mine).toreadonly())
    for array in (mine, read_only, lent):
        assert not np.shares_memory(owned(array), mine)
    assert owned(frozen(np.arange(5)), np.int32).dtype == np.int32
    assert owned(frozen(np.arange(5))[::2]).flags.c_contiguous


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sorted_", [True, False])
def test_a_checked_matrix_shares_nothing_with_its_source(layout, dtype, sorted_):
    matrix = planted().astype(np.float64).asformat(layout)
    if layout == "csr" and not sorted_:
        for start, stop in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True):
            matrix.indices[start:stop] = matrix.indices[start:stop][::-1].copy()
        matrix.has_sorted_indices = False
    checked = as_csr(matrix, dtype=dtype)
    for given in arrays_of(matrix):
        assert not any(np.shares_memory(given, array) for array in arrays_of(checked) if array.size)
    assert not any(array.flags.writeable for array in arrays_of(checked))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_triplets_are_copied(dtype):
    rows, columns = np.array([0, 0, 1], dtype=np.int32), np.array([0, 2, 1], dtype=np.int32)
    values = np.array([1, 2, 3], dtype=dtype)
    checked = from_triplets(rows, columns, values, (2, 3), dtype=dtype)
    assert not any(np.shares_memory(a, b) for a in (columns, values) for b in (checked.indices, checked.data))


def test_arrays_of_the_library_are_not_copied_again():
    ratings = hmf.Ratings(planted())
    assert np.shares_memory(as_csr(ratings).data, ratings.user_items.data)
    model = estimator(hmf.ExplicitALS).fit(ratings)
    assert np.shares_memory(model._learned.seen.indices, ratings.user_items.indices)
    train, _ = hmf.split(ratings, random_state=0)
    assert np.shares_memory(hmf.Ratings(train).user_items.indices, train.user_items.indices)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("index", [2**32 + 1, 2**40])
def test_indices_that_wrap_around_in_32_bits_are_out_of_range(dtype, index):
    """The low halves of these are valid columns."""
    matrix = sp.csr_array(np.ones((2, 2), dtype=np.float32))
    matrix.indices = np.array([0, index, 0, 1]).astype(dtype)
    with pytest.raises(RatingsError, match=rf"index {index} \(out of range at entry 1"):
        as_csr(matrix)
    with pytest.raises(RatingsError, match=rf"column index {index} at entry 1 is out of range"):
        from_triplets(np.zeros(2, np.int64), matrix.indices[:2], np.ones(2), (1, 2))


# ------------------------------------------------------------------------------------------------- changed meanwhile


@pytest.mark.parametrize("cls", ESTIMATORS)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_a_callback_may_change_the_matrix_that_is_fitted(cls, layout):
    matrix, held_out = planted().asformat(layout), planted(seed=5).asformat(layout)

    def callback(model, record):
        spoil(matrix)
        spoil(held_out)

    model = estimator(cls).fit(matrix, validation=held_out, callback=callback)
    expected = estimator(cls).fit(planted(), validation=planted(seed=5), callback=lambda model, record: None)
    np.testing.assert_array_equal(model.user_factors, expected.user_factors)
    assert [row["objective"] for row in model.history_] == [row["objective"] for row in expected.history_]
    np.testing.assert_array_equal(model.recommend([0, 1])[0], expected.recommend([0, 1])[0])


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_ratings_do_not_follow_their_source(layout):
    source = planted().astype(np.float32).asformat(layout)
    ratings = hmf.Ratings(source)
    spoil(source)
    np.testing.assert_array_equal(ratings.item_users.toarray(), planted().astype(np.float32).toarray().T)


def test_the_matrix_of_ratings_is_read_only():
    ratings = hmf.Ratings(planted())
    for matrix in (ratings.user_items, ratings.item_users):
        for array in arrays_of(matrix):
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)


def test_arrays_put_into_the_matrix_of_ratings_are_checked():
    ratings = hmf.Ratings(planted())
    ratings.user_items.indices = np.full(ratings.nnz, WILD, dtype=np.int32)
    with pytest.raises(RatingsError, match=f"the column index {WILD}"):
        ratings.item_users
    with pytest.raises(RatingsError, match=f"the column index {WILD}"):
        estimator(hmf.ExplicitALS).fit(ratings)


@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
def test_scipy_works_on_the_matrix_of_ratings():
    ratings, plain = hmf.Ratings(planted()), planted()
    matrix = ratings.user_items
    matrix.sort_indices()
    matrix.sum_duplicates()
    for same in (matrix * 2, matrix + matrix, matrix.multiply(2)):
        np.testing.assert_allclose(same.toarray(), 2 * plain.toarray(), rtol=1e-6)
    np.testing.assert_allclose(matrix[[3, 1]].toarray(), plain.toarray()[[3, 1]], rtol=1e-6)
    np.testing.assert_allclose((matrix.T @ matrix).toarray(), (plain.T @ plain).toarray(), rtol=1e-5)
    for change in (matrix.eliminate_zeros, lambda: matrix.__imul__(2), lambda: matrix.__setitem__((0, 0), 7)):
        before = matrix.toarray()
        with pytest.raises(ValueError, match=r"(?i)read-only|not writeable"):
            change()
        np.testing.assert_array_equal(matrix.toarray(), before)
    copy = matrix.copy()
    copy.data[:] = 1  # a copy is the caller's
    assert ratings.user_items.data.max() > 1


@pytest.mark.parametrize("mmap_mode", ["pickle", None, "r", "r+", "c"])
def test_pickled_ratings_own_their_arrays_again(mmap_mode, tmp_path):
    ratings = hmf.Ratings(planted(), user_ids=[f"u{k}" for k in range(60)])
    if mmap_mode == "pickle":
        again = pickle.loads(pickle.dumps(ratings))
    else:
        joblib.dump(ratings, tmp_path / "ratings")
        again = joblib.load(tmp_path / "ratings", mmap_mode=mmap_mode)
    assert not any(array.flags.writeable or isinstance(array, np.memmap) for array in arrays_of(again.user_items))
    np.testing.assert_array_equal(again.item_users.toarray(), ratings.item_users.toarray())
    assert again.user_ids.tolist() == ratings.user_ids.tolist() and again.user_index("u3") == 3


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_learned_factors_are_set_as_a_whole_and_keep_their_shape(cls):
    model = estimator(cls).fit(planted())
    for side in ("user_factors_", "item_factors_"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(model, side)[0] = 5
        getattr(model, side).shape = getattr(model, side).shape[::-1]
    assert model.user_factors_.shape == (60, 3) and model.item_factors_.shape == (40, 3)
    model.set_factors(np.full((60, 3), 5), np.full((40, 3), 5))
    predicted = model.predict(0, 0, clip=False)
    assert model.user_bias_ is not None or predicted == 75


# ----------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("indptr", "says"),
    [
        ([0, 2**40, 2**40, 5], "indptr falls"),
        ([0, 1, 2, 2**40], f"ends at {2**40}, but there are 5 indices"),
        ([0, -5, 3, 5], "indptr falls from 0 to -5"),
        ([3, 3, 4, 5], "starting at 3"),
        ([0, 5], "2 elements"),
        ([0.0, 1, 2, 5], "indptr has dtype float64"),
        ([[0, 1, 2, 5]], "must be vectors"),
    ],
)
def test_degree_order_checks_the_pointer(indptr, says):
    matrix = sp.csr_array(np.array([[1, 2, 0, 0], [0, 0, 3, 0], [4, 0, 0, 5]], dtype=np.float32))
    assert formats.degree_order(matrix).tolist() == [0, 2, 1]
    assert formats.degree_order(hmf.Ratings(matrix)).tolist() == [0, 2, 1]
    matrix.indptr = np.array(indptr)
    with pytest.raises(RatingsError, match=says):
        formats.degree_order(matrix)


@pytest.mark.parametrize("other", [np.eye(3), sp.csc_array(np.eye(3)), None])
def test_degree_order_requires_csr(other):
    with pytest.raises(TypeError, match="csr must be a CSR matrix or Ratings"):
        formats.degree_order(other)


def bals_arrays() -> dict:
    """The fields of a BalsMatrix of 7 x 9, several row blocks and tile columns, as arrays to spoil."""
    mask = np.random.default_rng(0).random((7, 9)) < 0.5
    bals = formats.BalsMatrix.from_csr(sp.csr_array(mask.astype(np.float32)), 3, 4)
    names = ("values", "tile_colidx", "tile_ptr", "seg_colidx", "seg_ptr", "shape", "tile_rows", "tile_cols")
    return {name: np.array(value) if np.ndim(value := getattr(bals, name)) == 1 else value for name in names} | {
        "shape": bals.shape
    }


def test_bals_arrays_from_elsewhere_are_copied_and_checked():
    given = bals_arrays()
    bals = formats.BalsMatrix(**given)
    expected = bals.to_csr().toarray()
    for name in ("values", "tile_colidx", "tile_ptr", "seg_colidx", "seg_ptr"):
        given[name][:] = 77
    np.testing.assert_array_equal(bals.to_csr().toarray(), expected)
    with pytest.raises(AttributeError):
        bals.seg_ptr = given["seg_ptr"]
    with pytest.raises(ValueError, match="read-only"):
        bals.tile_ptr[0] = 9
    again = pickle.loads(pickle.dumps(bals))
    np.testing.assert_array_equal(again.to_csr().toarray(), expected)
    assert not again.seg_ptr.flags.writeable


def put(position: int, value: int):
    def change(array):
        array[position] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("values", lambda array: array[:-1], RatingsError, "seg_colidx has"),
        ("values", lambda array: array.astype(np.int32), TypeError, "values must be a vector of float32 or float64"),
        ("values", lambda array: np.ma.array(array, mask=True), RatingsError, "values is masked"),
        ("tile_colidx", put(0, 8), RatingsError, "column outside its tile"),
        ("tile_colidx", put(-1, 9), RatingsError, "column outside its tile"),
        ("tile_colidx", put(0, -1), RatingsError, "column outside its tile"),
        ("tile_colidx", lambda array: array[:-1], RatingsError, "tile_ptr must ascend"),
        ("tile_colidx", lambda array: array[::-1].copy(), RatingsError, "column outside its tile"),
        ("tile_colidx", lambda array: np.array([1, 0, *array[2:]], np.int32), RatingsError, "must ascend"),
        ("tile_ptr", put(0, 1), RatingsError, "tile_ptr must ascend from 0"),
        ("tile_ptr", put(2, 2**30), RatingsError, "tile_ptr must ascend from 0"),
        ("tile_ptr", lambda array: array[:-1], RatingsError, "tile_ptr has 9 elements, expected 10"),
        ("seg_colidx", put(0, -1), RatingsError, "position beyond the columns"),
        ("seg_colidx", put(0, 4), RatingsError, "position beyond the columns"),
        ("seg_ptr", put(3, -1), RatingsError, "seg_ptr must ascend"),
        ("seg_ptr", lambda array: array[None], TypeError, "seg_ptr must be a vector"),
        ("shape", lambda _: (7, 90), RatingsError, "expected"),
        ("shape", lambda _: (2**31 - 1, 9), RatingsError, "expected"),
        ("shape", lambda _: (7, -1), ValueError, "shape"),
        ("shape", lambda _: (7, 9, 1), ValueError, "shape"),
        ("tile_rows", lambda _: 0, ValueError, "tile_rows"),
        ("tile_rows", lambda _: 2, RatingsError, "expected"),
        ("tile_cols", lambda _: 3.0, TypeError, "tile_cols"),
    ],
)
def test_inconsistent_bals_arrays_are_refused(name, change, error, says):
    given = bals_arrays()
    given[name] = change(given[name])
    with pytest.raises(error, match=says):
        formats.BalsMatrix(**given)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (3, 3)])
def test_empty_bals_arrays_are_consistent(shape):
    bals = formats.BalsMatrix.from_csr(sp.csr_array(shape, dtype=np.float32), 2, 2)
    assert pickle.loads(pickle.dumps(bals)).to_csr().shape == shape


# ----------------------------------------------------------------------------------------------------------- masked


def test_masked_cells_are_absent_entries():
    dense = planted().toarray()
    hidden = np.zeros(dense.shape, dtype=bool)
    hidden[::3, ::2] = True
    masked = np.ma.array(np.where(hidden, np.nan, dense), mask=hidden)
    expected = hmf.Ratings(np.where(hidden, 0, dense))
    for ratings in (
        hmf.Ratings(masked),
        hmf.Ratings.from_matrix(masked),
        hmf.Ratings(np.ma.array(masked, dtype=object)),
    ):
        np.testing.assert_array_equal(ratings.user_items.toarray(), expected.user_items.toarray())
        assert ratings.nnz == expected.nnz
    model, reference = (estimator(hmf.ExplicitALS).fit(given) for given in (masked, expected))
    np.testing.assert_array_equal(model.user_factors, reference.user_factors)
    np.testing.assert_array_equal(model.transform(masked), reference.transform(expected))
    np.testing.assert_array_equal(model.recommend(0)[0], reference.recommend(0)[0])
    evaluated = [hmf.evaluate(reference, test, metrics=("rmse",)) for test in (masked, expected)]
    assert evaluated[0] == evaluated[1]


def test_values_beside_the_mask_are_checked():
    masked = np.ma.array([[np.nan, 1.0], [2.0, 3.0]], mask=[[False, False], [True, False]])
    with pytest.raises(ValueError, match=r"NaN|finite"):
        estimator(hmf.ExplicitALS).fit(masked)
    with pytest.raises(RatingsError, match="row 0, column 0"):
        hmf.Ratings(masked)
    with pytest.raises(TypeError, match="complex"):
        hmf.Ratings(np.ma.array([[1j]], mask=[[True]]))


@pytest.mark.parametrize("name", ["users", "items", "values"])
def test_masked_triplets_are_refused(name):
    given = {"users": np.array([0, 1, 2]), "items": np.array([0, 1, 1]), "values": np.array([1.0, 2.0, 3.0])}
    given[name] = np.ma.array(given[name], mask=[False, True, True])
    with pytest.raises(RatingsError, match=rf"{name} is masked at position 1 \(and 1 more\)"):
        hmf.Ratings.from_coo(**given)
    given[name].mask = False
    assert hmf.Ratings.from_coo(**given).nnz == 3


@pytest.mark.parametrize("name", ["indptr", "indices", "data"])
def test_masked_arrays_of_a_sparse_matrix_are_refused(name):
    matrix = sp.csr_array(np.eye(3, dtype=np.float32))
    setattr(matrix, name, np.ma.array(getattr(matrix, name), mask=[1] + [0] * (len(getattr(matrix, name)) - 1)))
    with pytest.raises(RatingsError, match=rf"user_items.{name} is masked at position 0"):
        as_csr(matrix)


def test_masked_positions_and_labels_are_refused():
    with pytest.raises(RatingsError, match="userid is masked at position 1"):
        check_ids("userid", np.ma.array([0, 1], mask=[False, True]), 2, "n_users")
    with pytest.raises(RatingsError, match="user_ids is masked at position 1"):
        hmf.Ratings(np.eye(2), user_ids=np.ma.array([7, 8], mask=[False, True]))


# ------------------------------------------------------------------------------------------------------- odd matrices


@pytest.mark.parametrize(
    "spoil_lists",
    [
        lambda lists: lists.data.__setitem__(0, [1.0]),
        lambda lists: lists.rows.__setitem__(0, None),
        lambda lists: setattr(lists, "rows", lists.rows[:3]),
    ],
)
def test_lists_that_contradict_each_other_are_refused(spoil_lists):
    lists = planted().tolil()
    spoil_lists(lists)
    with pytest.raises(RatingsError, match="a list of equal length for each row"):
        as_csr(lists)
