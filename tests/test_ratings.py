"""Ratings: constructors, readers, labels, duplicates, splits. Mistakes are tested by the words a user would read."""

from __future__ import annotations

import builtins
import gzip
import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridmf.data import text as _text
from hybridmf.errors import DuplicateEntriesError, HybridMFError, MemoryBudgetError, RatingsError, UnknownLabelError
from hybridmf.ratings import Ratings, split

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def triplets(ratings):
    """{(user label, item label): value}, labels being positions where there are none."""
    coo = ratings.user_items.tocoo()
    users = coo.row if ratings.user_ids is None else ratings.user_ids[coo.row]
    items = coo.col if ratings.item_ids is None else ratings.item_ids[coo.col]
    return dict(zip(zip(users.tolist(), items.tolist(), strict=True), coo.data.tolist(), strict=True))


def write(folder, text, name="ratings.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


def read(folder, text, name="ratings.csv", **options):
    return Ratings.from_file(write(folder, text, name), **options)


def assert_canonical(matrix, dtype=np.float32):
    assert isinstance(matrix, sp.csr_array)
    assert matrix.dtype == dtype and matrix.indices.dtype == np.int32
    fresh = sp.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)  # forgets cached flags
    assert fresh.has_sorted_indices and fresh.has_canonical_format


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
    with pytest.raises(RatingsError, match=r"column 'user' of frame has no id \(nan\) at row 1"):
        Ratings.from_frame(pl.DataFrame({"user": [1.0, np.nan], "item": [1, 2]}))
    with pytest.raises(ValueError, match="duplicates must be one of"):
        Ratings.from_frame(frame, duplicates="keep")


# ---------------------------------------------------------------------------------------------------------- text files

EXPECTED = {(1, 20): 5, (3, 20): 3.5, (3, 4): 1}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("u.data", "3\t4\t1\t88\n1\t20\t5\t99\n3\t20\t3.5\t88\n"),
        ("ratings.dat", "3::4::1::88\n1::20::5::99\n3::20::3.5::88\n"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n3,4,1,88\n1,20,5,99\n3,20,3.5,88\n"),
        ("ratings.csv", "3,4,1\n1,20,5\n3,20,3.5"),
        ("crlf.csv", "userId,movieId,rating\r\n3,4,1\r\n1,20,5\r\n3,20,3.5\r\n"),
        ("mac.csv", "3,4,1\r1,20,5\r3,20,3.5\r"),
        ("bom.csv", "\ufeffu,i,r\n3,4,1\n1,20,5\n3,20,3.5\n"),
        ("bom2.csv", "\ufeff3,4,1\n1,20,5\n3,20,3.5\n"),
        ("semicolon.csv", "u;i;r\n3;4;1\n1;20;5\n3;20;3.5\n"),
        ("bars.txt", "3|4|1\n1|20|5\n3|20|3.5\n"),
        ("spaces.txt", "3 4  1\n 1 20 5 \n3\t20 3.5\n"),
        ("padded.csv", "3, 4, 1\n1, 20 ,5\n3,20 , 3.5\n"),
        ("comments.csv", "# made by hand\n\n3,4,1\n  # more\n1,20,5\n\n3,20,3.5\n\n\n"),
        ("header.tsv", "\n# note\nuser\titem\trating\n\n3\t4\t1\n1\t20\t5\n3\t20\t3.5\n"),
        ("quoted.csv", '"u","i","r"\n"3","4","1"\n"1","20","5"\n"3","20","3.5"\n'),
        ("title.csv", '3,4,1,"Heat, The"\n1,20,5,"a\nb"\n3,20,3.5,x\n'),
        ("blank.csv", "3,4,1\n   \n1,20,5\n3,20,3.5\n"),
        ("empty-last.csv", "3,4,1,\n1,20,5,\n3,20,3.5,\n"),
    ],
)
def test_text_in_its_many_forms(tmp_path, name, text):
    ratings = read(tmp_path, text, name)
    assert triplets(ratings) == EXPECTED
    assert ratings.user_ids.dtype == ratings.item_ids.dtype == np.int64
    assert_canonical(ratings.user_items)
    packed = write(tmp_path, gzip.compress(text.encode()), "packed")  # told by content, not by its name
    assert triplets(Ratings.from_file(packed)) == EXPECTED


@pytest.mark.parametrize("block", [1, 7, 16])
def test_blocks_of_any_size_read_the_same(tmp_path, monkeypatch, block):
    monkeypatch.setattr(_text, "BLOCK_CHARS", block)
    monkeypatch.setattr(_text, "_read_records", None)  # the fast path alone
    text = "  \n# c\n  \n\nuser::item::rating\n\n3::4::1\n\n\n\n#\n1::20::5\n3::20::3.5\n\n"
    assert triplets(read(tmp_path, text)) == EXPECTED


def test_regular_integer_files_take_the_fast_path(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "_read_records", None)
    for name, text in [
        ("a.dat", "3::4::1::88\n1::20::5::99\n3::20::3.5::88\n"),
        ("b.csv", "userId,movieId,rating,title\n3,4,1,Heat\n1,20,5,Żółw # 1\n3,20,3.5,\n"),
        ("c.txt", "3 4  1\n 1 20 5 \n3\t20 3.5\n"),
    ]:
        assert triplets(read(tmp_path, text, name)) == EXPECTED


@pytest.mark.parametrize("separator", ["::", ",", "\t", " ", ";", "||", "\x1f"])
@QUICK
@given(
    pairs=st.dictionaries(
        st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), st.integers(0, 9)),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=8,
    )
)
def test_both_paths_agree(tmp_path, separator, pairs):
    text = "".join(separator.join([str(u), str(i), repr(v)]) + "\n" for (u, i), v in pairs.items())
    path = write(tmp_path, text, "pairs.txt")
    layout = _text.find_layout(str(path), text.encode(), separator, False, (0, 1, 2), None, "#")
    fast = _text._read_integers(layout)
    (users, user_ids), (items, item_ids), values = _text._read_records(layout)
    if "+" not in text and not re.search(r"(^|\W)-?0\d", text):
        assert fast is not None
        assert fast[0].tolist() == user_ids[users].tolist() and fast[1].tolist() == item_ids[items].tolist()
        assert fast[2].tolist() == values.tolist()
    assert triplets(Ratings.from_file(path, separator=separator)) == pairs


@QUICK
@given(
    rows=st.dictionaries(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).map(str.strip)] * 2),
        st.integers(-5, 5),
        min_size=1,
        max_size=6,
    )
)
def test_any_labels_survive_csv(tmp_path, rows):
    import csv

    rows = {pair: value for pair, value in rows.items() if all(pair)}
    if not rows:
        return
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows([u, i, v] for (u, i), v in rows.items())
    ratings = read(tmp_path, buffer.getvalue(), separator=",", header=False, comment=None)
    assert {(str(u), str(i)): v for (u, i), v in triplets(ratings).items()} == rows


@pytest.mark.parametrize(
    "odd", ["007", "+7", "1.0", "1e3", "B00X", "99999999999999999999", "1_0", "12345678901234567890123"]
)
def test_one_odd_id_makes_strings_of_its_column(tmp_path, odd):
    ratings = read(tmp_path, f"1,7,5\n2,{odd},4\n")
    assert ratings.user_ids.tolist() == [1, 2]
    assert sorted(ratings.item_ids.tolist()) == sorted(["7", odd])


def test_columns_by_number_and_name(tmp_path):
    text = "when,song,who,plays\n1,x,ann,3\n2,y,bob,4\n"
    expected = {("ann", "x"): 3, ("bob", "y"): 4}
    assert triplets(read(tmp_path, text, user="who", item="song", value="plays")) == expected
    assert triplets(read(tmp_path, text, user=2, item=1, value=3)) == expected
    assert triplets(read(tmp_path, text, user="who", item=1, value=None)) == dict.fromkeys(expected, 1)
    assert triplets(read(tmp_path, text.split("\n", 1)[1], user=2, item=1, value=3, header=False)) == expected


@pytest.mark.parametrize("text", ["1,7\n2,7\n", "user,item\n1,7\n2,7\n", "reader,novel\n1,7\n2,7\n", "1 7\n2 7\n"])
def test_two_columns(tmp_path, text):
    assert triplets(read(tmp_path, text)) == {(1, 7): 1, (2, 7): 1}


def test_headers(tmp_path):
    assert triplets(read(tmp_path, "ann,x\nbob,y\n")) == {("ann", "x"): 1, ("bob", "y"): 1}
    assert triplets(read(tmp_path, "user_id,x\nbob,y\n")) == {("bob", "y"): 1}
    assert triplets(read(tmp_path, "ann,x\nbob,y\n", header=True)) == {("bob", "y"): 1}
    assert triplets(read(tmp_path, "1,2,3\n4,5,6\n", header=True)) == {(4, 5): 6}
    assert triplets(read(tmp_path, "a,b,c,d\n1,2,3,4\n", value=None)) == {(1, 2): 1}


def test_formats_by_name(tmp_path):
    assert triplets(read(tmp_path, "1;2,3\n4;5,6\n", format="csv")) == {("1;2", 3): 1, ("4;5", 6): 1}
    assert triplets(read(tmp_path, "a b\tc,d\t3\n", format="tsv")) == {("a b", "c,d"): 3}
    assert triplets(read(tmp_path, "1::2::3\n", "x.mtx", format="text")) == {(1, 2): 3}


def test_separators(tmp_path):
    assert triplets(read(tmp_path, "a--b--3\n", separator="--")) == {("a", "b"): 3}
    blanks = triplets(read(tmp_path, "ann smith,book one\nbob jones,book two\n"))
    assert blanks == {("ann smith", "book one"): 1, ("bob jones", "book two"): 1}
    assert triplets(read(tmp_path, "a,1::b::3\nc,2::d::4\n")) == {("a,1", "b"): 3, ("c,2", "d"): 4}
    assert triplets(read(tmp_path, "5::6::7\n1\x1f2::3::4\n")) == {("5", 6): 7, ("1\x1f2", 3): 4}
    with pytest.raises(RatingsError, match=r"no separator in '12345'; tried '::'.*separator="):
        read(tmp_path, "12345\n67890\n")
    with pytest.raises(RatingsError, match="no separator"):
        read(tmp_path, "x" * 200_000)  # longer than the csv module takes
    with pytest.raises(ValueError, match="separator must be"):
        read(tmp_path, "1,2\n", separator='"')
    with pytest.raises(TypeError, match="separator must be a string"):
        read(tmp_path, "1,2\n", separator=1)


def test_encodings(tmp_path):
    text = "user,item,rating\nJosé,Amélie,5\n"
    expected = {("José", "Amélie"): 5}
    for encoding in ("utf-8", "utf-16", "utf-8-sig"):
        assert triplets(Ratings.from_file(write(tmp_path, text, encoding=encoding))) == expected
    path = write(tmp_path, text, encoding="latin-1")
    assert triplets(Ratings.from_file(path, encoding="latin-1")) == expected
    with pytest.raises(RatingsError, match=r'line 2 is not valid utf-8.*encoding="latin-1"'):
        Ratings.from_file(path)
    for unknown in ("utf-99", "base64"):
        with pytest.raises(ValueError, match=f"encoding='{unknown}' is no text encoding"):
            Ratings.from_file(path, encoding=unknown)
    path = write(tmp_path, text, encoding="utf-16-le")
    assert triplets(Ratings.from_file(path, encoding="utf-16-le")) == expected
    with pytest.raises(RatingsError, match=r"ratings.csv is not valid utf-16-le"):
        Ratings.from_file(write(tmp_path, b"1\0,\0002\0,\0003\0\n\0x"), encoding="utf-16-le")


def test_undecodable_byte_far_down(tmp_path):
    with pytest.raises(RatingsError, match="line 101 is not valid"):
        read(tmp_path, b"1,2,3\n" * 100 + b"1,\xff,3\n")


def test_comments_may_be_data(tmp_path):
    text = "#tag,x,1\nb,y,2\n"
    assert triplets(read(tmp_path, text, comment=None)) == {("#tag", "x"): 1, ("b", "y"): 2}
    assert triplets(read(tmp_path, text)) == {("b", "y"): 2}
    assert triplets(read(tmp_path, "% c\n1,2,3\n", comment="%")) == {(1, 2): 3}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "1,2,3\n4,5,6\n7,8\n",
            {},
            r"line 3 has 2 fields: '7,8'; expected 3 fields separated by ',' \(columns from 0: user=0",
        ),
        ("1::2::3::9\n4::5::6\n", {}, "line 2 has 3 fields: '4::5::6'; expected 4 fields separated by '::'"),
        ("1,2,3\n4\n7,8,9\n", {}, "line 2 has 1 field: '4'"),
        ("1 2 3\n4 5 6 7\n1 2 9\n", {}, "line 2 has 4 fields.*separated by white space"),
        ("# x\n\nu,i,r\n1,2,x\n", {}, "line 4 has the value 'x', which is not a number.*: '1,2,x'"),
        ("1,2,3\n4,5,\n", {}, "line 2 has the value '', which is not a number"),
        ("1,2,1_0\n", {}, "line 1 has the value '1_0'"),
        ("1;2;3,5\n1;3;4,5\n", {}, "line 1 has the value '3,5'"),
        ("1,2,3\r\n4,5,nan\r\n", {}, "line 2 has the value 'nan'; values must be finite"),
        ("1,2,inf\n", {}, "line 1 has the value 'inf'"),
        ("1,2,3\n1,3,-1e39\n", {}, "line 2 has the value '-1e39'; values must be finite float32"),
        ("a,b,3\n,d,4\n", {}, "line 2 has no user"),
        ("a,b,3\nc, ,4\n", {}, "line 2 has no item"),
        ("1,2,3," + "x" * 100 + "\n1,2\n1,3,4,5\n", {}, "line 2 has 2 fields"),
        ("1,2,y" + "x" * 100 + "\n", {}, r"line 1 has the value 'y.*x\.\.\.'"),
        ('a,b,3\nc,"d,4\ne,f,5\n', {}, "line 2 has 2 fields.*It runs to line 3: is a quote left open"),
        ('a,b,3\nc,"' + "d" * 140_000 + '",5\n', {}, r"line 2 cannot be split into fields \(field larger"),
        ("", {}, "is empty"),
        ("\n  \n# c\n", {}, "no ratings, only blank lines or comments"),
        ("user,item,rating\n", {}, "no ratings, only a header"),
        ("1,2,3\n", {"header": True}, "no ratings, only a header"),
        ("u,i,r,t\n1,2,3\n4,5,6\n", {}, r"header has 4 fields, \['u', 'i', 'r', 't'\], but the lines below have 3"),
        ("u,i,r\n1,2,3\n", {"value": "stars"}, r"no column 'stars' \(value='stars'\); its columns are 'u', 'i', 'r'"),
        ("1,2,3\n", {"value": 3}, r"3 columns, none for value=3 \(they count from 0\); value=None makes"),
        ("1,2,3\n", {"user": 7}, r"3 columns, none for user=7"),
        (b"\x00\x01\x02", {}, "is not text .it has a zero byte at 0"),
    ],
)
def test_bad_text(tmp_path, text, options, words):
    with pytest.raises(RatingsError, match=words) as caught:
        read(tmp_path, text, **options)
    assert "ratings.csv" in str(caught.value)


def test_bad_arguments(tmp_path):
    path = write(tmp_path, "1,2,3\n")
    with pytest.raises(
        ValueError,
        match="format must be one of 'auto', 'text', 'csv', 'tsv', 'lists', 'mtx', 'npz', 'parquet'; got 'dat'",
    ):
        Ratings.from_file(path, format="dat")
    with pytest.raises(ValueError, match="duplicates must be one of"):
        Ratings.from_file(path, duplicates="median")
    with pytest.raises(ValueError, match="header must be one of"):
        Ratings.from_file(path, header="yes")
    with pytest.raises(ValueError, match="'rating' is given by name, but header=False"):
        Ratings.from_file(path, value="rating", header=False)
    with pytest.raises(ValueError, match="different columns"):
        Ratings.from_file(path, item=0)
    with pytest.raises(ValueError, match="user must satisfy user >= 0"):
        Ratings.from_file(path, user=-1)
    with pytest.raises(TypeError, match="value must be an integer"):
        Ratings.from_file(path, value=2.0)
    with pytest.raises(FileNotFoundError, match="nope"):
        Ratings.from_file(tmp_path / "nope.csv")
    with pytest.raises(IsADirectoryError, match="got a directory"):
        Ratings.from_file(tmp_path)
    with pytest.raises(TypeError):
        Ratings.from_file(None)


def test_file_duplicates_name_both_lines(tmp_path):
    text = "# c\nu,i,r\n1,2,3\n\n4,5,6\n1,2,9\n4,5,6\n"
    with pytest.raises(
        DuplicateEntriesError, match=r"ratings.csv has more.*user 1, item 2\): lines 3 and 6, values 3 and 9"
    ):
        read(tmp_path, text)
    with pytest.raises(DuplicateEntriesError, match=r"user 'a', item 'x\\ny'\): lines 1 and 4"):
        read(tmp_path, 'a,"x\ny",1\nb,z,1\na,"x\ny",1\n')


def test_damaged_gzip(tmp_path):
    lines = "".join(f"{k},{k * 7919 % 1000003},{k % 5}\n" for k in range(30_000))
    packed = gzip.compress(lines.encode())
    assert Ratings.from_file(write(tmp_path, packed)).nnz == 30_000
    for cut in (len(packed) - 4, len(packed) // 2, 12):
        with pytest.raises(RatingsError, match="is truncated"):
            Ratings.from_file(write(tmp_path, packed[:cut]))
    for bad in (packed[:-8] + b"\0" * 8, packed[:100] + b"\xff" * 50 + packed[150:]):
        with pytest.raises(RatingsError, match="corrupt gzip"):
            Ratings.from_file(write(tmp_path, bad))


# -------------------------------------------------------------------------------------------------- MatrixMarket, .npz


@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        ("coordinate real general", "2 3 2\n1 3 2.5\n2 1 1\n", {(0, 2): 2.5, (1, 0): 1}),
        ("coordinate integer general", "% note\n2 3 2\n1 3 2\n2 1 0\n", {(0, 2): 2, (1, 0): 0}),
        ("coordinate pattern general", "2 3 2\n1 3\n2 1\n", {(0, 2): 1, (1, 0): 1}),
        ("coordinate real symmetric", "2 2 2\n1 1 4\n2 1 3\n", {(0, 0): 4, (1, 0): 3, (0, 1): 3}),
        ("array real general", "2 2\n1\n0\n0\n2\n", {(0, 0): 1, (1, 1): 2}),
    ],
)
def test_matrix_market(tmp_path, head, body, expected):
    text = f"%%MatrixMarket matrix {head}\n{body}"
    ratings = read(tmp_path, text, "any.name")
    assert triplets(ratings) == expected and ratings.user_ids is None
    assert triplets(Ratings.from_file(write(tmp_path, gzip.compress(text.encode()), "m.mtx.gz"))) == expected


def test_matrix_market_by_scipy(tmp_path):
    matrix = sp.coo_array(np.random.default_rng(0).random((5, 4)).round(1).astype(np.float32))
    scipy.io.mmwrite(tmp_path / "m.mtx", matrix, precision=9)
    assert np.array_equal(Ratings.from_file(tmp_path / "m.mtx").user_items.toarray(), matrix.toarray())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%%MatrixMarket vector coordinate real general\n3 1\n1 1\n", "cannot be read as MatrixMarket: Vector"),
        ("%%MatrixMarket matrix coordinate real general\n-2 2 1\n1 1 1\n", "its header says -2 rows, 2 columns, 1 "),
        ("%%MatrixMarket matrix coordinate real general\n2 x 1\n1 1 1\n", "cannot be read as MatrixMarket: Invalid"),
        ("%%MatrixMarket matrix coordinate real general\n", "cannot be read as MatrixMarket"),
        ("%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 2\n", "complex values"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n", "cannot be read as MatrixMarket.*runcated"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1\n", "cannot be read as MatrixMarket.*Line 3"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 nan\n", "m.mtx: matrix has the value nan"),
        ("1 2 3\n", "line 1 must start with %%MatrixMarket"),
    ],
)
def test_bad_matrix_market(tmp_path, text, words):
    with pytest.raises(RatingsError, match=words):
        read(tmp_path, text, "m.mtx")


@pytest.mark.parametrize(
    ("head", "entries"),
    [("coordinate real general\n3 3 20000000", "20,000,000"), ("array real general\n50000 3000", "150,000,000")],
)
def test_entries_that_do_not_fit_into_memory_are_refused_before(tmp_path, monkeypatch, head, entries):
    monkeypatch.setattr("hybridmf.data.readers.available_memory", lambda: 2**28)
    with pytest.raises(MemoryBudgetError, match=f"m.mtx has {entries} entries by its header.*256 MiB are free"):
        read(tmp_path, f"%%MatrixMarket matrix {head}\n1 1 5\n", "m.mtx")


def test_matrix_market_duplicates_and_truncation(tmp_path):
    text = "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n1 1 2\n"
    with pytest.raises(DuplicateEntriesError, match=r"m.mtx: ratings has more than one entry"):
        read(tmp_path, text, "m.mtx")
    assert triplets(read(tmp_path, text, "m.mtx", duplicates="sum")) == {(0, 0): 3}
    body = "".join(f"{k} {k} {k * 7919 % 1000003}\n" for k in range(1, 20_001))
    packed = gzip.compress(f"%%MatrixMarket matrix coordinate integer general\n20000 20000 20000\n{body}".encode())
    assert Ratings.from_file(write(tmp_path, packed, "m.mtx.gz")).nnz == 20_000
    with pytest.raises(RatingsError, match="is truncated"):
        Ratings.from_file(write(tmp_path, packed[:-6], "m.mtx.gz"))


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia", "bsr"])
def test_scipy_npz(tmp_path, form):
    matrix = sp.csr_matrix([[0, 2.0], [1, 0]]).asformat(form)
    sp.save_npz(tmp_path / "m.npz", matrix)
    assert triplets(Ratings.from_file(tmp_path / "m.npz")) == {(0, 1): 2, (1, 0): 1}


@pytest.mark.parametrize(
    "ids",
    [(None, None), (["ann", "bób"], [5, 3]), (["x" * 1000, "y"], None), ([1.5, 2.5], np.array([b"a", b"b"]))],
)
def test_save_and_load(tmp_path, ids):
    ratings = Ratings(np.array([[0, 2.5], [1, 0]]), *ids)
    ratings.save(tmp_path / "saved")
    loaded = Ratings.from_file(tmp_path / "saved")
    assert triplets(loaded) == triplets(ratings)
    for ours, theirs in ((loaded.user_ids, ratings.user_ids), (loaded.item_ids, ratings.item_ids)):
        assert (ours is None) == (theirs is None) and (ours is None or ours.tolist() == theirs.tolist())
    assert_canonical(loaded.user_items)
    assert (sp.load_npz(tmp_path / "saved") != ratings.user_items).nnz == 0


def test_save_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "r.npz"
    Ratings(np.eye(2)).save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Ratings(np.eye(3)).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["r.npz"]


def test_save_to_a_place_that_is_none(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; give the name of a file"):
        Ratings(np.eye(2)).save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder '.*nowhere' of path '.*r.npz' does not exist"):
        Ratings(np.eye(2)).save(tmp_path / "nowhere" / "r.npz")
    assert list(tmp_path.iterdir()) == []


def test_saved_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    Ratings(np.eye(2)).save(tmp_path / "r.npz")
    assert (tmp_path / "r.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_labels_that_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match="user_ids has labels of type tuple; only numbers and strings"):
        Ratings(np.eye(1), [("a", 1)]).save(tmp_path / "r.npz")
    assert list(tmp_path.iterdir()) == []


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (builtins.exec, ("raise SystemExit('pickle was executed')",))

    matrix = sp.csr_array(np.eye(1, dtype=np.float32))
    parts = {"format": np.array(b"csr"), "shape": np.array((1, 1)), "indptr": matrix.indptr, "indices": matrix.indices}
    for extra in ({"data": np.array([Bomb()])}, {"data": matrix.data, "user_ids": np.array([Bomb()], dtype=object)}):
        np.savez(tmp_path / "bomb.npz", **(parts | extra), allow_pickle=True)
        with pytest.raises(RatingsError, match=r"cannot be read as .npz") as caught:
            Ratings.from_file(tmp_path / "bomb.npz")
        assert caught.value.__cause__ is not None


def test_bad_npz(tmp_path):
    path = tmp_path / "r.npz"
    Ratings(np.eye(50), np.arange(50)).save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:200] + b"\xff" * 40 + whole[240:]):
        path.write_bytes(damaged)
        with pytest.raises(RatingsError, match=r"cannot be read as .npz") as caught:
            Ratings.from_file(path)
        assert caught.value.__cause__ is not None
    path.write_bytes(b"1,2,3\n")
    with pytest.raises(RatingsError, match=r"is no .npz file"):
        Ratings.from_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "1::2::3")
    with pytest.raises(RatingsError, match=r"holds no sparse matrix but ml-1m/ratings.dat.*unpack"):
        Ratings.from_file(path)
    np.savez(path, user_ids=np.array(["a"]), **saved_parts(np.eye(2)))
    with pytest.raises(RatingsError, match=r"r.npz: user_ids has 1 labels"):
        Ratings.from_file(path)
    np.savez(path, **(saved_parts(np.eye(2)) | {"indices": np.array([0, 7])}))
    with pytest.raises(RatingsError, match=r"r.npz"):
        Ratings.from_file(path)


def saved_parts(dense):
    csr = sp.csr_array(dense)
    shape = np.array(csr.shape)
    return {"format": np.array(b"csr"), "shape": shape, "indptr": csr.indptr, "indices": csr.indices, "data": csr.data}


# ------------------------------------------------------------------------------------------------------------- Parquet


def parquet(folder, data):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(data), folder / "r.bin")
    return folder / "r.bin"


def test_parquet(tmp_path):
    path = parquet(tmp_path, {"u": [7, 3], "i": ["x", "y"], "r": [1.5, 2], "t": [0, 0]})
    expected = {(7, "x"): 1.5, (3, "y"): 2}
    assert triplets(Ratings.from_file(path)) == expected
    assert triplets(Ratings.from_file(path, user="u", item="i", value="r")) == expected
    assert triplets(Ratings.from_file(path, user="i", item="u", value=None)) == {("x", 7): 1, ("y", 3): 1}
    assert triplets(Ratings.from_file(parquet(tmp_path, {"u": [7], "i": ["x"]}))) == {(7, "x"): 1}


def test_bad_parquet(tmp_path):
    path = parquet(tmp_path, {"u": [7, 3], "i": ["x", None], "r": [1.5, 2]})
    with pytest.raises(RatingsError, match=r"column 'i' of .*r.bin is null at row 1"):
        Ratings.from_file(path)
    with pytest.raises(RatingsError, match=r"no column 'w'.*'u', 'i', 'r'"):
        Ratings.from_file(path, value="w")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RatingsError, match="cannot be read as Parquet") as caught:
        Ratings.from_file(path)
    assert caught.value.__cause__ is not None
    with pytest.raises(RatingsError, match="cannot be read as Parquet"):
        read(tmp_path, "1,2,3\n", "r.parquet")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        read(tmp_path, b"PAR1", "r.parquet")


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
    page = Path(__file__).parents[1] / "docs" / "data.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)


def test_ids_taken_for_positions_do_not_exhaust_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
