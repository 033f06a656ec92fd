"""Ratings from arrays, matrices and frames; labels, duplicates, splits."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from hybridmf import ExplicitALS, Features, PreparedRatings
from hybridmf.errors import DuplicateEntriesError, HybridMFError, MemoryBudgetError, RatingsError, UnknownLabelError
from hybridmf.ratings import Ratings, split
from support.checkout import ROOT
from support.messages import says
from support.reading import QUICK, assert_canonical, read, triplets

# ------------------------------------------------------------------------------------------------------------ from_coo


def test_integers_are_positions():
    ratings = Ratings.from_coo([2, 0, 2], [1, 3, 0], [5, 4, 3])
    assert ratings.shape == (3, 4) and ratings.nnz == 3
    assert ratings.user_ids is None and ratings.item_ids is None
    assert triplets(ratings) == {(0, 3): 4, (2, 0): 3, (2, 1): 5}
    assert_canonical(ratings.user_items)


def test_values_default_to_one_and_shape_may_be_partial():
    ratings = Ratings.from_coo(np.array([0, 1], np.uint8), np.array([0, 1]), shape=(None, 5))
    assert ratings.shape == (2, 5) and ratings.user_items.data.tolist() == [1, 1]
    assert Ratings.from_coo([], [], shape=(3, 4)).shape == (3, 4)
    assert Ratings.from_coo([], []).shape == (0, 0)


@pytest.mark.parametrize("kind", [list, np.array, lambda x: np.array(x, dtype=object)])
def test_strings_are_labels_in_sorted_order(kind):
    ratings = Ratings.from_coo(kind(["bob", "ann", "bob"]), kind(["y", "x", "x"]), [1, 2, 3])
    assert ratings.user_ids.tolist() == ["ann", "bob"] and ratings.item_ids.tolist() == ["x", "y"]
    assert triplets(ratings) == {("ann", "x"): 2, ("bob", "x"): 3, ("bob", "y"): 1}


def test_object_integers_are_labels():
    ratings = Ratings.from_coo(np.array([70, 7], dtype=object), [0, 1])
    assert ratings.user_ids.dtype == np.int64 and ratings.user_ids.tolist() == [7, 70]
    assert ratings.item_ids is None


def test_given_labels_keep_their_order():
    ratings = Ratings.from_coo(["b", "a"], [0, 1], user_ids=["c", "b", "a"], item_ids=["p", "q"])
    assert ratings.shape == (3, 2)
    assert triplets(ratings) == {("b", "p"): 1, ("a", "q"): 1}
    assert Ratings.from_coo(["b"], [0], user_ids=iter(["b", "a"]), shape=(2, 1)).user_ids.tolist() == ["b", "a"]


def test_tuples_and_mixed_numbers_survive_as_labels():
    ratings = Ratings.from_coo([("a", 1), ("b", 2)], [0, 1])
    assert ratings.user_ids.tolist() == [("a", 1), ("b", 2)]
    assert ratings.user_index(("b", 2)) == 1
    assert ratings.user_index([("b", 2), ("a", 1)]).tolist() == [1, 0]
    assert triplets(Ratings.from_coo([0, 1], [0, 0], [1, 2.5])) == {(0, 0): 1, (1, 0): 2.5}


@pytest.mark.parametrize("labels", [[True, 1], [1, True, 2], ["a", False, 0], [True, 1.0]])
def test_truth_values_among_numbers_are_refused_as_labels(labels):
    with pytest.raises(TypeError, match=says("users mixes labels of bool with others", "True equals 1")):
        Ratings.from_coo(labels, range(len(labels)))


def test_long_labels_are_not_padded():
    ratings = Ratings.from_coo(["a" * 1000, "b"], [0, 1])
    assert ratings.user_ids.dtype == object and ratings.user_index("b") == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"users": [0], "items": [0, 1]}, RatingsError, "equally long, got 1, 2 and 1"),
        ({"users": [0], "items": [0], "values": [1, 2]}, RatingsError, "got 1, 1 and 2"),
        ({"users": "ann", "items": [0]}, TypeError, "users must be a vector, got 'ann'"),
        ({"users": 3, "items": [0]}, TypeError, "users must be a vector, got 3"),
        ({"users": np.zeros((2, 2), int), "items": [0, 0]}, RatingsError, "users must be one-dimensional"),
        ({"users": [0.5], "items": [0]}, TypeError, r"users has dtype float64.*users.astype\(int\)"),
        ({"users": [True], "items": [0]}, TypeError, "users has dtype bool"),
        ({"users": [-1], "items": [0]}, RatingsError, "-1 at entry 0"),
        ({"users": [0], "items": [5], "shape": (1, 5)}, RatingsError, "column index 5.*n_items=5"),
        ({"users": [2**31 - 1], "items": [0]}, RatingsError, r"users has 2147483647 at entry 0.*astype\(object\)"),
        ({"users": [0], "items": [0], "shape": 3}, ValueError, "shape must be"),
        ({"users": [0], "items": [0], "shape": (1, -1)}, ValueError, r"shape\[1\]"),
        ({"users": ["a"], "items": [0], "shape": (2, 1)}, RatingsError, "shape says 2 users, but there are 1 labels"),
        (
            {"users": ["a"], "items": [0], "user_ids": ["b"]},
            RatingsError,
            "label 'a' at entry 0, which is not among the 1 user",
        ),
        ({"users": ["a"], "items": [0], "user_ids": ["b", "b"]}, ValueError, "user_ids has repeated labels"),
        ({"users": [0], "items": [0], "user_ids": ["a", "b"], "shape": (1, 1)}, ValueError, "user_ids has 2 labels"),
        ({"users": [0], "items": [0], "user_ids": {"a": 0}}, TypeError, "must be a sequence.* in order, got a dict"),
        ({"users": [0], "items": [0], "user_ids": {"a"}}, TypeError, "must be a sequence.* in order, got a set"),
        ({"users": ["a"], "items": [0], "user_ids": {"a": 0}}, TypeError, "must be a sequence.* in order, got a dict"),
        (
            {"users": [0], "items": [0], "user_ids": [["a"]]},
            TypeError,
            "user_ids has labels that cannot be used as dict",
        ),
        ({"users": [0], "items": [0], "user_ids": [None]}, ValueError, r"user_ids has no label \(None\) at position 0"),
        ({"users": [0, 1], "items": [0, 0], "user_ids": [1.0, np.nan]}, ValueError, r"no label \(nan\) at position 1"),
        ({"users": ["a", None], "items": [0, 1]}, RatingsError, r"users has no id \(None\) at entry 1"),
        ({"users": ["a", float("nan")], "items": [0, 1]}, RatingsError, r"users has no id \(nan\) at entry 1"),
        ({"users": ["a", 1], "items": [0, 1]}, TypeError, r"no order \(int, str\)"),
        ({"users": [["a"], ["b"]], "items": [0, 1]}, TypeError, "dictionary keys"),
        ({"users": [0], "items": [0], "values": ["5"]}, TypeError, "real numbers"),
        ({"users": [0], "items": [0], "values": [np.nan]}, RatingsError, "nan at entry 0"),
        ({"users": [0], "items": [0], "duplicates": "median"}, ValueError, "duplicates must be one of"),
    ],
)
def test_from_coo_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        Ratings.from_coo(**arguments)


def test_integers_of_128_bits_are_labels():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"user": pl.Series([2**100, 1], dtype=pl.Int128), "item": ["x", "y"]})
    assert triplets(Ratings.from_frame(frame)) == {(2**100, "x"): 1, (1, "y"): 1}


def test_ratings_of_ratings_keep_labels():
    ratings = Ratings.from_coo(["b", "a"], ["x", "y"], [1, 2], timestamps=[5, 6])
    for again in (Ratings(ratings), Ratings.from_matrix(ratings)):
        assert triplets(again) == triplets(ratings) and again.timestamps.tolist() == [6, 5]
    renamed = Ratings.from_matrix(ratings, user_ids=["c", "d"])
    assert triplets(renamed) == {("c", "y"): 2, ("d", "x"): 1}
    assert Ratings(PreparedRatings(ratings)).user_ids.tolist() == ["a", "b"]


def test_pandas_na_is_a_missing_label():
    pd = pytest.importorskip("pandas")
    with pytest.raises(RatingsError, match="at entry 1"):
        Ratings.from_coo(pd.Series(["a", pd.NA], dtype="string"), [0, 1])


# ---------------------------------------------------------------------------------------------------------- duplicates


def test_duplicates_are_named_by_label_in_input_order():
    with pytest.raises(DuplicateEntriesError) as caught:
        Ratings.from_coo(["z", "b", "z", "a", "a"], ["x", "x", "x", "y", "y"], [1, 2, 3, 4, 5])
    text = str(caught.value)
    assert "(user 'z', item 'x'): entries 0 and 2, values 1 and 3" in text
    assert 'duplicates="sum", "mean", "first", "last" or "max"' in text


def test_duplicates_without_labels_are_named_by_position():
    with pytest.raises(DuplicateEntriesError, match=r"user at position 1, item at position 2\): entries 0 and 1"):
        Ratings.from_coo([1, 1], [2, 2])


@pytest.mark.parametrize(("rule", "value"), [("sum", 9), ("mean", 3), ("first", 3), ("last", 2), ("max", 4)])
def test_duplicates_merge(rule, value, tmp_path):
    expected = {("a", "x"): value, ("b", "x"): 1}
    users, items, values = ["a", "b", "a", "a"], ["x"] * 4, [3, 1, 4, 2]
    assert triplets(Ratings.from_coo(users, items, values, duplicates=rule)) == expected
    text = "".join(f"{u},{i},{v}\n" for u, i, v in zip(users, items, values, strict=True))
    assert triplets(read(tmp_path, text, duplicates=rule)) == expected
    coo = sp.coo_array((values, ([0, 1, 0, 0], [0, 0, 0, 0])), shape=(2, 1))
    merged = Ratings.from_matrix(coo, user_ids=["a", "b"], item_ids=["x"], duplicates=rule)
    assert triplets(merged) == expected


def test_matrix_duplicates_are_named_by_label():
    csr = sp.csr_array((np.ones(3, np.float32), [0, 1, 1], [0, 0, 3]), shape=(2, 2))
    with pytest.raises(DuplicateEntriesError, match=r"user 'b', item 1\)"):
        Ratings.from_matrix(csr, user_ids=["a", "b"], item_ids=[0, 1])


# --------------------------------------------------------------------------------------------------------- from_matrix


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dia", "bsr", "dok"])
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix])
def test_matrices_of_any_format(form, kind):
    dense = np.array([[0, 2, 0], [1, 0, 3]])
    ratings = Ratings.from_matrix(kind(dense).asformat(form), user_ids=["a", "b"])
    assert ratings.user_items.toarray().tolist() == dense.tolist()
    assert ratings.user_ids.tolist() == ["a", "b"] and ratings.item_ids is None
    assert_canonical(ratings.user_items)


def test_dense_matrix_and_constructor():
    assert triplets(Ratings.from_matrix([[0, 2], [1, 0]])) == {(0, 1): 2, (1, 0): 1}
    assert triplets(Ratings(np.eye(2), ["a", "b"], ["x", "y"])) == {("a", "x"): 1, ("b", "y"): 1}


def test_explicit_zeros_are_entries(tmp_path):
    assert Ratings.from_coo([0, 1], [0, 0], [0, 1]).nnz == 2
    assert Ratings.from_matrix(sp.coo_array(([0.0, 1.0], ([0, 1], [0, 0])))).nnz == 2
    assert read(tmp_path, "1,1,0\n2,1,1\n").nnz == 2


def test_label_count_must_match():
    with pytest.raises(ValueError, match="item_ids has 3 labels; expected one for each of 2"):
        Ratings.from_matrix(np.eye(2), item_ids=["a", "b", "c"])


@pytest.mark.parametrize("kind", [list, iter, lambda labels: (label for label in labels)])
def test_labels_may_be_tuples_and_come_from_a_generator(kind):
    pairs = [("a", 1), ("b", 2)]
    ratings = Ratings(np.eye(2), kind(pairs), kind(["x", "y"]))
    assert ratings.user_ids.dtype == object and ratings.user_ids.tolist() == pairs
    assert ratings.item_ids.tolist() == ["x", "y"] and ratings.user_index(("b", 2)) == 1
    assert Ratings.from_coo([0, 1], [0, 1], user_ids=kind(pairs)).user_ids.tolist() == pairs
    with pytest.raises(ValueError, match="user_ids has repeated labels"):
        Ratings(np.eye(2), kind([("a", 1), ("a", 1)]))
    with pytest.raises(ValueError, match="user_ids has 2 labels; expected one for each of 3"):
        Ratings(np.eye(3), kind(pairs))


def test_from_matrix_names_its_argument():
    with pytest.raises(RatingsError, match="matrix has the value nan"):
        Ratings.from_matrix(np.array([[np.nan, 1]]))


# -------------------------------------------------------------------------------------------------- properties, labels


def test_item_users_is_the_transpose_and_cached():
    ratings = Ratings.from_coo([0, 1, 1], [2, 0, 2], [1, 2, 3])
    transpose = ratings.item_users
    assert transpose is ratings.item_users and transpose.shape == (3, 2)
    assert_canonical(transpose)
    assert (transpose.toarray() == ratings.user_items.toarray().T).all()


def test_index_of_labels():
    ratings = Ratings.from_coo(["a", "b"], np.array([30, 10], dtype=object))
    assert ratings.user_index("b") == 1 and isinstance(ratings.user_index("b"), int)
    positions = ratings.item_index(np.array([30, 10, 30]))
    assert positions.dtype == np.int64 and positions.tolist() == [1, 0, 1]
    assert ratings.item_index(np.int32(30)) == 1 and ratings.user_index(np.str_("a")) == 0
    assert ratings.user_index([]).tolist() == []
    assert ratings.user_index(np.array("b")) == 1


def test_unknown_labels():
    ratings = Ratings.from_coo(["a", "b"], np.array([30, 10], dtype=object))
    with pytest.raises(KeyError) as caught:
        ratings.user_index(["a", "zoe", "yan"])
    assert isinstance(caught.value, UnknownLabelError) and isinstance(caught.value, HybridMFError)
    assert str(caught.value).startswith("unknown user label 'zoe' (and 1 more); there are 2 user labels of type str")
    with pytest.raises(KeyError, match=r"unknown item label '30'; .* of type int64, such as 10, 30"):
        ratings.item_index("30")
    with pytest.raises(KeyError, match="unknown user label None"):
        ratings.user_index(None)


def test_index_without_labels_checks_positions():
    ratings = Ratings.from_coo([0, 1], [0, 4])
    assert ratings.item_index(4) == 4 and isinstance(ratings.item_index(4), int)
    assert ratings.item_index([4, 0]).dtype == np.int64
    with pytest.raises(ValueError, match="n_items=5"):
        ratings.item_index(5)
    with pytest.raises(TypeError, match="must be integers"):
        ratings.user_index("ann")


def test_repr():
    text = repr(Ratings.from_coo(["a", "b"], [0, 1], [1, 4.5]))
    assert text == "Ratings(2 users x 2 items, 2 entries (50 %), values 1 to 4.5; user ids: str, item ids: positions)"
    assert (
        repr(Ratings.from_coo([], []))
        == "Ratings(0 users x 0 items, 0 entries; user ids: positions, item ids: positions)"
    )


# ---------------------------------------------------------------------------------------------------------- from_frame


def frames():
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    return {
        "pandas": pd.DataFrame,
        "polars": pl.DataFrame,
        "lazy": pl.LazyFrame,
        "pyarrow": pa.table,
        "pandas-arrow": lambda d: pd.DataFrame(d).convert_dtypes(dtype_backend="pyarrow"),
        "pandas-nullable": lambda d: pd.DataFrame(d).convert_dtypes(),
        "pandas-index": lambda d: pd.DataFrame(d, index=[9] * len(next(iter(d.values())))),
    }


KINDS = ["pandas", "polars", "lazy", "pyarrow", "pandas-arrow", "pandas-nullable", "pandas-index"]


@pytest.mark.parametrize("kind", KINDS)
def test_frames(kind):
    frame = frames()[kind]({"n": [9, 9, 9], "u": [70, 7, 70], "i": ["y", "x", "x"], "r": [1.5, 2.0, 3.0]})
    ratings = Ratings.from_frame(frame, user="u", item="i", value="r")
    assert triplets(ratings) == {(7, "x"): 2, (70, "x"): 3, (70, "y"): 1.5}
    assert ratings.user_ids.dtype == np.int64 and ratings.user_ids.tolist() == [7, 70]
    assert ratings.item_ids.dtype.kind == "U"
    assert set(triplets(Ratings.from_frame(frame, user="u", item="i", value=None)).values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["user", "item", "rating"])
def test_null_names_the_row(kind, column):
    data = {"user": ["a", "b", "c"], "item": [1, 2, 3], "rating": [1.0, 2.0, 3.0]} | {column: [None, None, None]}
    data[column] = ["a", "b", None] if column == "user" else [1, 2, None]
    with pytest.raises(RatingsError, match=f"column '{column}' of frame is null at row 2"):
        Ratings.from_frame(frames()[kind](data))


def test_categories_dates_and_floats_as_ids():
    import datetime

    import pandas as pd
    import polars as pl

    day = datetime.date(2024, 1, 2)
    frame = pl.DataFrame({"user": pl.Series(["b", "a"], dtype=pl.Categorical), "item": [day, day]})
    ratings = Ratings.from_frame(frame)
    assert ratings.user_ids.tolist() == ["a", "b"] and ratings.item_index(day) == 0
    frame = pd.DataFrame({"user": pd.Categorical([3, 2]), "item": [2.0, 1.0]})
    ratings = Ratings.from_frame(frame)
    assert triplets(ratings) == {(2, 1.0): 1, (3, 2.0): 1} and ratings.item_ids.dtype == np.float64


def test_wide_integer_ids():
    pd = pytest.importorskip("pandas")
    ids = np.array([2**63 + 1, 5], dtype=np.uint64)
    ratings = Ratings.from_frame(pd.DataFrame({"user": ids, "item": [-(2**62), 2**62]}))
    assert triplets(ratings) == {(5, 2**62): 1, (2**63 + 1, -(2**62)): 1}
    assert Ratings.from_frame(pd.DataFrame({"user": ids[:0], "item": ids[:0]})).shape == (0, 0)


def test_frame_of_two_columns_has_ones_but_a_missing_value_column_is_an_error():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"user": ["a"], "item": ["x"]})
    assert triplets(Ratings.from_frame(frame)) == {("a", "x"): 1}
    with pytest.raises(
        RatingsError, match=r"which column holds the values is unclear.*'user', 'item', 'sentiment'.*value=None"
    ):
        Ratings.from_frame(frame.assign(sentiment=1))


def test_frame_refusals():
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    frame = pd.DataFrame({"user": ["a", "a"], "item": ["x", "x"], "rating": [1, 2]})
    with pytest.raises(RatingsError, match=r"no column 'who' \(user='who'\); its columns are 'user', 'item', 'rating'"):
        Ratings.from_frame(frame, user="who")
    with pytest.raises(ValueError, match=r"different columns, got columns \{'user': 0, 'item': 0}"):
        Ratings.from_frame(frame, user="user", item="user")
    with pytest.raises(DuplicateEntriesError, match=r"user 'a', item 'x'\): rows 0 and 1, values 1 and 2"):
        Ratings.from_frame(frame)
    with pytest.raises(TypeError, match="frame must be a pandas, polars or pyarrow table, got ndarray"):
        Ratings.from_frame(np.eye(2))
    with pytest.raises(RatingsError, match="column 'rating' of frame has the value inf at row 0"):
        Ratings.from_frame(frame.assign(rating=[np.inf, 1]))
    with pytest.raises(RatingsError, match="has the value 1e\\+39 at row 1"):
        Ratings.from_frame(frame.assign(rating=[1, 1e39]))
    with pytest.raises(TypeError, match="column 'rating' of frame holds no real numbers"):
        Ratings.from_frame(frame.assign(rating=["good", "bad"]))
    with pytest.raises(TypeError, match=r"no real numbers .its dtype is datetime64"):
        Ratings.from_frame(frame.assign(rating=pd.Timestamp(0)))
    with pytest.raises(RatingsError, match="column 'user' of frame is null at row 1; 1 of 2 rows"):
        Ratings.from_frame(pl.DataFrame({"user": [1.0, np.nan], "item": [1, 2]}))
    with pytest.raises(ValueError, match="duplicates must be one of"):
        Ratings.from_frame(frame, duplicates="keep")


# --------------------------------------------------------------------------------------------------------------- split


@st.composite
def matrices(draw):
    n_users, n_items = draw(st.integers(1, 6)), draw(st.integers(2, 7))
    cells = draw(st.sets(st.integers(0, n_users * n_items - 1), min_size=2))
    rows, columns = np.divmod(np.array(sorted(cells)), n_items)
    values = draw(st.lists(st.integers(-2, 2), min_size=len(cells), max_size=len(cells)))  # explicit zeros among them
    return Ratings.from_coo(rows, columns, values, shape=(n_users, n_items))


@QUICK
@given(ratings=matrices(), share=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_split_laws(ratings, share, seed):
    count = max(1, round(ratings.nnz * share))
    if count >= ratings.nnz:
        with pytest.raises(RatingsError, match="leaves none to train on"):
            split(ratings, share, seed)
        return
    train, test = split(ratings, share, seed)
    assert test.nnz == count and train.shape == test.shape == ratings.shape
    parts = triplets(train), triplets(test)
    assert not parts[0].keys() & parts[1].keys() and parts[0] | parts[1] == triplets(ratings)
    assert_canonical(train.user_items)
    assert_canonical(test.user_items)
    assert triplets(split(ratings, share, seed)[1]) == parts[1]
    assert triplets(ratings.split(count, seed)[1]) == parts[1]


def test_split_keeps_labels():
    ratings = Ratings.from_coo(["a", "b", "c"], ["x", "y", "z"])
    for part in ratings.split(1, 0):
        assert isinstance(part, Ratings) and part.nnz in (1, 2)
        assert part.user_ids.tolist() == ["a", "b", "c"] and part.item_ids.tolist() == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, np.float32),
        (np.int8, np.float32),
        (bool, np.float32),
        (np.float64, np.float64),
        (np.int64, np.float64),
    ],
)
def test_split_of_a_matrix(dtype, expected):
    matrix = sp.csc_matrix(np.arange(1, 13).reshape(3, 4).astype(dtype))
    before = matrix.copy()
    train, test = split(matrix, 0.25, np.random.default_rng(3))
    assert test.nnz == 3
    assert_canonical(train, expected)
    assert_canonical(test, expected)
    assert np.array_equal((train + test).toarray(), matrix.toarray().astype(expected))
    assert (before != matrix).nnz == 0


def test_split_of_a_dense_matrix_is_exact():
    train, test = split([[1.1, 0], [2.2, 3.3]], 1, 0)
    assert test.nnz == 1 and np.array_equal((train + test).toarray(), [[1.1, 0], [2.2, 3.3]])


def test_split_is_random_and_even():
    matrix = sp.csr_array(np.ones((20, 50), np.float32))
    tests = [split(matrix, 0.3, seed)[1] for seed in range(60)]
    rate = sum(test.toarray() for test in tests) / 60
    assert rate.min() > 0.02 and rate.max() < 0.7 and rate.mean() == pytest.approx(0.3)
    assert (split(matrix, 0.3)[1] != split(matrix, 0.3)[1]).nnz > 0


def test_split_beyond_int32(monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.INT32_LIMIT", 9)
    train, test = split(sp.csr_array(np.ones((4, 5), np.float32)), 0.25, 0)
    assert train.indptr.dtype == np.int64 and test.indptr.dtype == np.int32 and test.nnz == 5


@pytest.mark.parametrize("size", [0, 1.0, 1.5, -0.1, 0.0, -3, float("nan"), True, "half", None])
def test_bad_test_size(size):
    with pytest.raises((ValueError, TypeError), match="test_size must"):
        split(np.ones((2, 3)), size)


def test_split_needs_two_entries():
    with pytest.raises(RatingsError, match="takes 1 of 1 entries and leaves none"):
        split(np.eye(1))
    with pytest.raises(TypeError, match="random_state must be"):
        split(np.eye(3), 1, "seed")


# --------------------------------------------------------------------------------------------------- real data, manual


@pytest.mark.realdata
def test_movielens_and_lastfm(data_dir):
    small = Ratings.from_file(data_dir / "ml-100k" / "u.data.gz")
    assert small.shape == (943, 1682) and small.nnz == 100_000
    assert small.user_ids.tolist() == list(range(1, 944)) and triplets(small)[196, 242] == 3
    assert np.bincount(small.user_items.data.astype(int)).tolist() == [0, 6110, 11370, 27145, 34174, 21201]
    large = Ratings.from_file(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz")
    assert large.shape == (6040, 3706) and large.nnz == 1_000_209
    assert large.user_items.data.mean(dtype=float) == pytest.approx(3.581564, abs=1e-6)
    plays = Ratings.from_file(data_dir / "lastfm-2k" / "user_artists.dat.gz")
    assert plays.shape == (1892, 17632) and plays.nnz == 92_834
    assert plays.user_items.data.sum(dtype=float) == 69_183_975


@pytest.mark.realdata
def test_names_in_latin1(data_dir):
    films = data_dir / "ml-1m" / "movies.dat"
    options = {"user": 0, "item": 1, "value": None, "header": False}
    with pytest.raises(RatingsError, match=r"movies.dat, line \d+ is not valid utf-8"):
        Ratings.from_file(films, **options)
    assert Ratings.from_file(films, encoding="latin-1", **options).nnz == 3883


def test_examples_of_the_page_run(tmp_path, monkeypatch):
    page = ROOT / "docs" / "data.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)


def test_ids_passed_as_positions_do_not_exhaust_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of 31 bits as a position asks for two billion rows; the message says where ids go."""
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 10**10)
    message = r"has positions for 2,000,000,001 users and 3 items.*Ratings\.from_frame, or an object array"
    with pytest.raises(MemoryBudgetError, match=message):
        Ratings.from_coo([2_000_000_000, 5], [0, 2], [1.0, 2.0])
    coordinates = sp.coo_array(([1.0], ([2_000_000_000], [2])), shape=(2_000_000_001, 3))
    with pytest.raises(MemoryBudgetError, match=message):
        Ratings.from_matrix(coordinates)
    labels = Ratings.from_coo(np.array([2_000_000_000, 5], dtype=object), [0, 2], [1.0, 2.0])
    assert labels.shape == (2, 3)


@pytest.mark.parametrize("ids", [np.array(["a", "b"]), np.array([5, 6]), np.array(["a", 7], dtype=object)])
def test_labels_cannot_be_changed(ids):
    """They belong to models as well: with a label changed, these would answer for other users and items."""
    expected = ids.tolist()
    ratings = Ratings.from_matrix(np.eye(2), user_ids=ids, item_ids=ids)
    model = ExplicitALS(2, iterations=1).fit(ratings)
    features = Features(np.eye(2), labels=ids)
    ids[:] = ids[::-1].copy()
    by_label = Ratings.from_coo(ids.astype(object), ["x", "y"], user_ids=ids)
    assert ids.flags.writeable
    for found in (ratings.user_ids, ratings.item_ids, model.item_ids_, features.labels):
        assert found.tolist() == expected
    for found in (ratings.user_ids, by_label.user_ids, by_label.item_ids):
        with pytest.raises(ValueError, match="read-only"):
            found[0] = found[1]


def test_positions_that_could_be_labels_are_told(caplog):
    Ratings.from_coo([0, 1], [0, 1], user_ids=[1, 2], item_ids=[0, 1])
    assert not caplog.records
    Ratings.from_coo([1, 2], [0, 1], user_ids=[1, 2, 3])
    assert "users are integers, which are positions, and all of them are among user_ids, too" in caplog.text


@pytest.mark.parametrize("key", [None, [[0, 1]], (0, 1)])
def test_selections_are_of_one_axis(key):
    ratings = Ratings(np.eye(3))
    for each in (ratings, ratings.entries):
        with pytest.raises(TypeError, match="indexed by users alone"):
            each[key]


def test_entries_are_not_drawn_twice():
    """As a bootstrap sample would; they would count once."""
    with pytest.raises(ValueError, match="the index repeats some"):
        Ratings(np.eye(3)).entries[[0, 2, 0]]


def test_values_in_the_order_of_a_frame_are_refused():
    ratings = Ratings.from_coo([1, 0], [0, 1], [1.0, 2.0])
    with pytest.raises(TypeError, match=r"values is a series.*value=\)"):
        ratings.with_values(pd.Series([1.0, 2.0]))
    assert ratings.with_values(lambda values: pd.Series(values) + 1).user_items.data.tolist() == [3, 2]


def test_times_of_some_parts_are_dropped_aloud(caplog):
    parts = [Ratings.from_coo(["a"], ["x"]), Ratings.from_coo(["b"], ["x"], timestamps=[5])]
    assert Ratings.concat(parts).timestamps is None
    assert "timestamps are not kept: only 1 of 2 parts have them" in caplog.text


@pytest.mark.parametrize("several", [[[1, 2], [3]], [Ratings(np.eye(2))] * 2])
def test_several_matrices_are_no_matrix(several):
    with pytest.raises(RatingsError, match=r"ratings must be one matrix of shape.*got a list of"):
        split(several, 0.5)
