"""Files that could be read in several ways are refused, or read with a warning."""

from __future__ import annotations

import datetime
import gc
import gzip
import importlib
import io
import json
import os
import pickle
import tracemalloc
import warnings
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hybridmf as hmf
from hybridmf.data import labels, readers, text
from hybridmf.errors import DuplicateEntriesError, RatingsError
from support.reading import read, triplets, write


def from_file(path, folder, **options):
    return hmf.Ratings.from_file(path, **options)


def from_store(path, folder, **options):
    return hmf.convert(path, folder / "store", **options).to_ratings()


pl = pytest.importorskip("polars")

both = pytest.mark.parametrize("reader", [from_file, from_store])


# --------------------------------------------------------------------------------------------------------------- quotes


@both
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('a,x,3\nb,"y,4\nc,"z,5\n', "line 2 has a field that goes on|line 2 has a quotation mark that is not closed"),
        ('a,x,3\nb,"y\nz",4\n', "line 2 has a quotation mark that is not closed in this line"),
        ('a,x,3\nb,"y"z,4\n', "line 2 has a field that goes on after its closing quotation mark"),
        ('a\tx\t3\nb\t"y" z\t4\n', "line 2 has a field that goes on after its closing quotation mark"),
        ('a,x,3\nb,"say \\"hi\\", you",4\n', r"line 2.*escape=\"\\\\\""),
        ('a,x,3\n"C:\\",b,4\n', r"line 2 has a backslash before a quotation mark.*escape="),
        ('"user,item,rating\na,x,3\nb,y,4\n', "line 1 has a quotation mark that is not closed"),
        ('1,2,3,"open\n4,5,6,x"\n7,8,9,y\n', "line 1 has a quotation mark that is not closed"),
    ],
)
def test_quotes_that_cross_a_line_or_a_field_are_refused(reader, content, words, tmp_path):
    with pytest.raises(RatingsError, match=f"(?s)({words}).*quote=None.*quote='\"'"):
        reader(write(tmp_path, content), tmp_path)


@both
@pytest.mark.parametrize(
    ("content", "options", "items"),
    [
        ('a,x,3\nb,"y\nz",4\n', {"quote": '"'}, ["x", "y\nz"]),
        ('a,"x",3\nb,"y,4\n', {"quote": None}, ['"x"', '"y']),
        ("a,x,3\nb,'y,z',4\n", {"quote": "'"}, ["x", "y,z"]),
        ('a,x,3\nb,"say \\"hi\\", you",4\n', {"escape": "\\"}, ['say "hi", you', "x"]),
        ("a,x,3\nb,y\\,z,4\n", {"escape": "\\", "quote": None}, ["x", "y,z"]),
        ('a,"x ""q""",3\nb,"y,z",4\n', {}, ['x "q"', "y,z"]),
        ('a\tAC"DC\t3\nb\t12" mix\t4\n', {}, ['12" mix', 'AC"DC']),
        ('a::"x::3\nb::"y::4\n', {}, ['"x', '"y']),
    ],
)
def test_quotes_are_read_as_asked(reader, content, options, items, tmp_path):
    assert reader(write(tmp_path, content), tmp_path, **options).item_ids.tolist() == items


def test_integer_ids_beside_literal_quotes_take_the_fast_path(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_records", None)
    assert read(tmp_path, '1,2,3,"a\n4,5,6,b"\n', quote=None).nnz == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quote": "''"}, "quote must be one character, None or auto"),
        ({"escape": ""}, "escape must be one character or None"),
        ({"quote": "'", "separator": "::"}, "need a separator of one character"),
        ({"missing": "ignore"}, "missing must be one of"),
    ],
)
def test_wrong_options_of_quotes_and_missing_ids(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, "1::2::3\n", **options)


# ---------------------------------------------------------------------------------------------------------- missing ids

GAPS = "user,item,rating\n1,2,3\nNULL,3,4\n4,,4\n5,6,5\n"


@both
@pytest.mark.parametrize("word", ["", "NULL", "null", "None", "NA", "nan", "\\N"])
def test_missing_ids_are_counted_and_refused(reader, word, tmp_path):
    path = write(tmp_path, GAPS.replace("NULL", word))
    with pytest.raises(RatingsError, match=r'line 3 has no user .*; 2 of 4 entries have.*missing="drop".*"keep"'):
        reader(path, tmp_path)


@both
def test_missing_ids_are_dropped_or_kept(reader, tmp_path, caplog):
    path = write(tmp_path, GAPS)
    ratings = reader(path, tmp_path, missing="drop")
    assert triplets(ratings) == {(1, 2): 3, (5, 6): 5} and ratings.user_ids.tolist() == [1, 5]
    assert "left out 2 of 4 entries" in caplog.text
    kept = hmf.Ratings.from_file(path, missing="keep")
    assert triplets(kept) == {("1", "2"): 3, ("NULL", "3"): 4, ("4", ""): 4, ("5", "6"): 5}


@both
def test_lines_of_repeats_among_dropped_entries(reader, tmp_path):
    with pytest.raises(DuplicateEntriesError, match="lines 5 and 6"):
        reader(write(tmp_path, GAPS + "5,6,1\n"), tmp_path, missing="drop")
    with pytest.raises(RatingsError, match="holds no ratings: each of its 1 entries"):
        reader(write(tmp_path, "user,item\nNA,3\n", "gone.csv"), tmp_path, missing="drop")


@both
def test_missing_ids_of_lists(reader, tmp_path):
    path = write(tmp_path, "1 2 3\nnull 2 4\n")
    with pytest.raises(RatingsError, match="line 2 has no user"):
        reader(path, tmp_path, format="lists")
    assert reader(path, tmp_path, format="lists", missing="drop").item_ids.tolist() == [2, 3]


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table], ids=["pandas", "polars", "pyarrow"])
def test_missing_ids_of_frames(make, tmp_path):
    frame = make({"user": ["a", "None", None, "d"], "item": ["x", "y", "z", "w"]})
    with pytest.raises(RatingsError, match=r"row 1 has no user .'None'.; 2 of 4 entries"):
        hmf.Ratings.from_frame(frame)
    with pytest.raises(RatingsError, match=r'null at row 2.*missing="drop"'):
        hmf.Ratings.from_frame(frame, missing="keep")
    assert hmf.Ratings.from_frame(frame, missing="drop").user_ids.tolist() == ["a", "d"]
    assert hmf.Ratings.from_frame(frame, where={"item": ["x", "w"]}).user_ids.tolist() == ["a", "d"]
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"user": ["a", "None", None, "d"], "item": ["x", "y", "z", "w"]}), path)
    assert hmf.Ratings.from_file(path, missing="drop").user_ids.tolist() == ["a", "d"]
    assert from_store(path, tmp_path, missing="drop").user_ids.tolist() == ["a", "d"]
    with pytest.raises(RatingsError, match="row 1 has no user"):
        hmf.Ratings.from_file(path)


def test_empty_ids_of_frames_are_missing():
    frame = pd.DataFrame({"user": ["", "b", "c"], "item": ["x", "y", ""]})
    with pytest.raises(RatingsError, match=r"row 0 has no user .''.; 2 of 3 entries"):
        hmf.Ratings.from_frame(frame)
    assert hmf.Ratings.from_frame(frame, missing="drop").user_ids.tolist() == ["b"]
    assert hmf.Ratings.from_frame(frame, missing="keep").user_ids.tolist() == ["", "b", "c"]


def test_numbers_among_dates_are_no_times(caplog):
    """NumPy takes them for microseconds."""
    times = np.array([datetime.date(2020, 1, 1), 1433221332], dtype=object)
    frame = pd.DataFrame({"user": [1, 2], "item": [1, 2], "rating": [1, 2], "time": times})
    assert hmf.Ratings.from_frame(frame).timestamps is None and "it has numbers and dates" in caplog.text


@pytest.mark.parametrize("several", [iter, pd.Series, pd.Index, pl.Series, dict.fromkeys, lambda ids: range(1, 3)])
def test_filters_take_any_collection(several):
    frame = pd.DataFrame({"user": [1, 2, 3], "item": [1, 2, 3]})
    assert hmf.Ratings.from_frame(frame, where={"user": several([1, 2])}).user_ids.tolist() == [1, 2]


def test_a_chunk_of_parquet_without_ids_is_left_out(tmp_path, monkeypatch, caplog):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"user": [None] * 9 + [1, 2, None], "item": [3] * 12, "rating": [1.0] * 12}), path)
    convert = importlib.import_module("hybridmf.data.convert")
    original = convert._parquet
    monkeypatch.setattr(convert, "_parquet", lambda path, options, _: original(path, options, 4))
    assert hmf.convert(path, tmp_path / "store", missing="drop").user_ids.tolist() == [1, 2]
    assert [text for text in caplog.messages if "left out" in text] == [
        f"{path}: left out 10 of 12 entries, which have no user or no item"
    ]
    pq.write_table(pa.table({"user": pa.array([None] * 9, pa.int64()), "item": [3] * 9}), path)
    with pytest.raises(RatingsError, match="holds no ratings: each of its 9 entries has no user or no item"):
        hmf.convert(path, tmp_path / "none", missing="drop")


def test_categories_of_words_for_missing_values():
    frame = pd.DataFrame({"user": pd.Categorical(["a", "NULL"]), "item": [1, 2]})
    assert hmf.Ratings.from_frame(frame, missing="drop").user_ids.tolist() == ["a"]


def test_rows_are_filtered_before_missing_ids_and_values_are_judged(tmp_path):
    log = "user,item,rating,kind,date\n1,2,3,v,2020-01-01\nNULL,3,4,w,2020-01-02\n3,,4,w,2020-01-02\n"
    log += "5,5,x,w,2020-01-02\n7,1,2,v,2020-01-03\n"
    ratings = read(tmp_path, log, where={"kind": "v"})
    assert triplets(ratings) == {(1, 2): 3, (7, 1): 2} and ratings.user_ids.dtype == np.int64
    assert ratings.timestamps.dtype.kind == "M"
    with pytest.raises(DuplicateEntriesError, match="lines 2 and 7"):
        read(tmp_path, log + "1,2,4,v,2020-01-01\n", where={"kind": "v"})


# ------------------------------------------------------------------------------------------------------- without header


def check_ins(separator="\t"):
    rows = [
        (u, f"2010-10-{k + 10}T23:5{u}:27Z", f"{30 + k / 7:.6f}", f"{-97 - u / 9:.6f}", 22847 + k)
        for u in range(5)
        for k in range(4)
    ]
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


@both
def test_times_as_items_are_refused_with_the_arguments_that_settle_it(reader, tmp_path):
    path = write(tmp_path, check_ins())
    with pytest.raises(
        RatingsError, match=r"column 1, where items.*like times.*user=0, item=4, value=None, timestamp=1"
    ):
        reader(path, tmp_path)
    assert reader(path, tmp_path, user=0, item=4, value=None).shape == (5, 4)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [(u, i, f"{30 + u / 7:.6f}", f"{i / 9:.6f}") for u in range(5) for i in range(3)],
            "column 2.*like coordinates",
        ),
        ([(u, f"{i / 3:.2f}", 4) for u in range(5) for i in range(1, 3)], "column 1.*like fractions"),
        (
            [(1511544070 + 60 * k, k % 3, 4) for k in range(9)],
            "column 0.*like times.*user=1, item=2, value=None, timestamp=0",
        ),
        ([(k, 1511544070000 + 60 * k, 4) for k in range(9)], "column 1.*like times"),
        ([(k, k, "2020-01-02") for k in range(9)], "column 2.*like times.*value=None, timestamp=2"),
    ],
)
def test_places_that_hold_something_else_are_refused(rows, words, tmp_path):
    with pytest.raises(RatingsError, match=f"has no header, and {words}"):
        read(tmp_path, "".join(",".join(map(str, row)) + "\n" for row in rows))


@both
def test_ids_of_categories_as_values_are_refused(reader, tmp_path):
    path = write(tmp_path, "".join(f"{k % 50},{k},{2_000_000 + 7 * k}\n" for k in range(1100)))
    with pytest.raises(RatingsError, match=r"column 2, where values are expected, looks like ids.*value=2"):
        reader(path, tmp_path)
    assert reader(path, tmp_path, value=2).nnz == 1100
    plays = "".join(f"u{k % 50},{k},{k * 2000 + 1 if k < 170 else k % 90}\n" for k in range(1100))
    assert hmf.Ratings.from_file(write(tmp_path, plays, "plays.csv")).user_items.max() > 300_000


@both
@pytest.mark.parametrize("content", ["1,2,3\n4,5,6\n", "1,2\n1,3\n", "a,b,c\n1,2,3\n"])
def test_every_guess_is_a_warning(reader, content, tmp_path, caplog):
    reader(write(tmp_path, content), tmp_path)
    assert [r.levelname for r in caplog.records if "a guess by places: user = column 0" in r.getMessage()] == [
        "WARNING"
    ]
    caplog.clear()
    hmf.Ratings.from_file(write(tmp_path, "user,item\n1,2\n", "named.csv"))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


# ---------------------------------------------------------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([f"2020-01-{k + 1:02d} 10:00:00 CET" for k in range(60)], "'2020-01-01 10:00:00 CET' at entry 0"),
        ([f"12/{k + 1}/2010 8:26" for k in range(60)], "'12/1/2010 8:26'"),
        (["" if k == 3 else 10**9 for k in range(60)], "'' at entry 3; 1 of 49 are empty"),
        (["" if k == 55 else 10**9 for k in range(60)], "'' at entry 55; 1 of 60 are empty"),
        (["2020-01-01" if k % 2 else 10**9 for k in range(60)], "column 3 has numbers and dates"),
    ],
)
def test_times_that_cannot_be_read_are_a_warning(times, words, tmp_path, caplog):
    rows = "".join(f"u{k},i,1,{time}\n" for k, time in enumerate(times))
    assert read(tmp_path, f"user,item,plays,timestamp\n{rows}").timestamps is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert words in warning and "timestamp=None" in warning


@pytest.mark.parametrize("more", ["", ",x"], ids=["four columns", "five"])
@pytest.mark.parametrize("where", [None, {0: [1, 2]}])
def test_dates_in_the_fourth_column_without_a_header_are_times(more, where, tmp_path):
    rows = "".join(f"{k},{k + 1},3,2024-01-0{k} 10:00:00{more}\n" for k in range(1, 4))
    ratings = hmf.Ratings.from_file(write(tmp_path, rows), where=where)
    days = [f"2024-01-0{k}" for k in ((1, 2, 3) if where is None else where[0])]
    assert ratings.timestamps.astype("datetime64[D]").astype(str).tolist() == days
    assert hmf.Ratings.from_file(write(tmp_path, rows), timestamp=None).timestamps is None


@pytest.mark.parametrize(
    "date",
    ["31/12/2024", "12-31-2024 08:26", "31 Dec 2024", "Dec 31; 2024", "Tue Dec 31 22:19:45 PDT 2024", "2024/12/31"],
)
def test_dates_of_other_forms_without_a_header_are_refused(date, tmp_path):
    path = write(tmp_path, "".join(f"{k},{k + 1},3,{date}\n" for k in range(1, 9)) + "9,9,3,\n")
    with pytest.raises(RatingsError, match=r"column 3 looks like times.*timestamp=None to do without"):
        hmf.Ratings.from_file(path)
    assert hmf.Ratings.from_file(path, timestamp=None).timestamps is None
    hmf.convert(path, tmp_path / "store")  # which has no times


def test_other_fourth_columns_without_a_header_are_no_times(tmp_path):
    for field in ("may be", "Dec", "3/4", "2024-x", "Maria 12 (2001)"):
        path = write(tmp_path, "".join(f"{k},{k + 1},3,{field}\n" for k in range(1, 9)))
        assert hmf.Ratings.from_file(path).timestamps is None


def test_times_of_frames_that_cannot_be_read_are_a_warning(caplog):
    frame = pd.DataFrame({"user": [1], "item": [2], "timestamp": ["12/1/2010 8:26"]})
    assert hmf.Ratings.from_frame(frame).timestamps is None
    assert "12/1/2010" in caplog.text and "WARNING" in caplog.text


@pytest.mark.parametrize("pyarrow", [True, False])
def test_the_end_of_time_is_no_time_of_the_past(pyarrow, tmp_path, monkeypatch):
    if not pyarrow:
        monkeypatch.setattr(text.arrow_text, "SMALLEST", 1 << 30)
    ratings = read(tmp_path, "user,item,rating,date\n1,2,3,2020-01-01\n1,3,4,9999-12-31\n")
    assert ratings.timestamps.astype("datetime64[D]").astype(str).tolist() == ["2020-01-01", "9999-12-31"]


def test_dates_beyond_a_unit_where_numpy_raises(monkeypatch):
    class Raising(np.ndarray):
        def astype(self, *args, **kwargs):
            raise OverflowError

    far = np.array(["9999-12-31"], dtype="datetime64[us]").view(Raising)
    with pytest.raises(RatingsError, match="timestamps of part 1 go beyond"):
        labels.joined_times([np.array(["2020-01-01"], dtype="datetime64[ns]"), far])


# -------------------------------------------------------------------------------------------------------------- formats


@both
def test_json_lines_are_read_by_name(reader, tmp_path):
    lines = [
        {"user_id": "a", "item_id": "b", "rating": 3, "note": {"x": 1}},
        {"item_id": "c", "user_id": "d", "rating": 4},
    ]
    path = write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "r.json")
    assert triplets(reader(path, tmp_path)) == {("a", "b"): 3, ("d", "c"): 4}
    assert triplets(hmf.Ratings.from_file(path, format="jsonl", value=None, where={"rating": 4})) == {("d", "c"): 1}
    with pytest.raises(RatingsError, match="cannot be read as JSON lines"):
        read(tmp_path, '{"user": 1, "item": 2}\n{"user": 1, "it', "cut.jsonl")


def test_json_lines_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.json", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        read(tmp_path, '{"user": 1, "item": 2}\n')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12345\n", "a Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>404,1,2</body></html>\n", "an HTML page"),
        (b'[{"user_id": "a", "item_id": "b"},\n {"user_id": "c", "item_id": "b"}]\n', "one JSON array"),
        (pickle.dumps({"a": 1}), "a pickle, which is never loaded"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"x" * 257 + b"ustar\0", "a tar archive"),
    ],
)
def test_contents_that_are_no_ratings_are_named(content, words, tmp_path):
    with pytest.raises(RatingsError, match=f"ratings.csv is {words}"):
        read(tmp_path, content)


def test_archives_of_ratings_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.writestr("u.data", "1,2,3")
    with pytest.raises(RatingsError, match=r"is a ZIP archive that holds no sparse matrix but u.data.*unpack"):
        hmf.Ratings.from_file(tmp_path / "ml.zip")


# -------------------------------------------------------------------------------------------------------------- repeats


@both
def test_rows_that_repeat_whole_are_merged_with_a_note(reader, tmp_path, caplog):
    path = write(tmp_path, "user,item,rating\na,x,3\nb,y,4\na,x,3\na,x,3\n")
    assert triplets(reader(path, tmp_path)) == {("a", "x"): 3, ("b", "y"): 4}
    assert "merged 2 rows that repeat another row whole" in caplog.text


def test_rows_of_frames_that_repeat_whole(caplog):
    frame = pd.DataFrame({"user": [1, 1, 2], "item": [1, 1, 1], "rating": [3.0, 3, 4], "timestamp": [5, 5, 6]})
    assert hmf.Ratings.from_frame(frame).timestamps.tolist() == [5, 6] and "merged 1 rows" in caplog.text
    frame["timestamp"] = [5, 7, 6]  # another time is another event
    with pytest.raises(DuplicateEntriesError, match="rows 0 and 1"):
        hmf.Ratings.from_frame(frame)


@both
def test_conflicts_and_repeats_of_a_log_stay_errors(reader, tmp_path):
    path = write(tmp_path, "user,item,rating\na,x,3\na,x,3\nb,y,1\na,x,5\n")
    with pytest.raises(DuplicateEntriesError, match=r'lines 2 and 5, values 3 and 5.*"last" or "mean" suit ratings'):
        reader(path, tmp_path)
    for content in ("user,item\na,x\na,x\n", "user,item,plays\na,x,1\na,x,1\n"):
        with pytest.raises(DuplicateEntriesError, match='"sum" counts them'):
            reader(write(tmp_path, content), tmp_path)


# --------------------------------------------------------------------------------------------------------------- frames


def test_strings_in_several_chunks_of_arrow(monkeypatch):
    monkeypatch.setattr(readers, "MANY_STRINGS", 0)
    strings = pd.StringDtype("pyarrow")
    parts = [
        pd.DataFrame({"user": pd.array(list(ids), strings), "item": pd.array(["x", "y"], strings)})
        for ids in ("ab", "ac")
    ]
    parts = [part.assign(item=[f"{k}x", f"{k}y"]).astype({"item": strings}) for k, part in enumerate(parts)]
    ratings = hmf.Ratings.from_frame(pd.concat(parts, ignore_index=True))
    assert set(triplets(ratings)) == {("a", "0x"), ("b", "0y"), ("a", "1x"), ("c", "1y")}


# ------------------------------------------------------------------------------------------ several files, file objects


def test_files_are_read_as_one(tmp_path, monkeypatch):
    folder = tmp_path / "log"
    folder.mkdir()
    first = write(folder, "user,item,plays,kind\n101,a,1,v\n102,b,2,v\n", "1.csv")
    second = write(folder, "user,item,plays,kind\n101,b,3,v\nguest,a,4,w\n", "2.csv")
    expected = {("101", "a"): 1, ("102", "b"): 2, ("101", "b"): 3, ("guest", "a"): 4}
    for path in ([first, second], folder / "*.csv", [str(folder / "[12].csv")]):
        assert triplets(hmf.Ratings.from_file(path)) == expected
    assert triplets(hmf.Ratings.from_file([first, second], where={"kind": "w"})) == {("guest", "a"): 4}
    with pytest.raises(RatingsError, match="where= keeps none"):
        hmf.Ratings.from_file([first, second], where={"kind": "x"})
    with pytest.raises(DuplicateEntriesError, match=r"1.csv, line 2 and .*3.csv, line 2, values 1 and 7"):
        hmf.Ratings.from_file([first, second, write(folder, "user,item,plays\n101,a,7\n", "3.csv")])
    with pytest.raises(FileNotFoundError, match="no file matches"):
        hmf.Ratings.from_file(folder / "*.tsv")
    with pytest.raises(FileNotFoundError, match="empty list"):
        hmf.Ratings.from_file([])
    hmf.Ratings.from_file(first).save(folder / "r.npz")
    with pytest.raises(RatingsError, match=r"is a matrix.*Ratings.concat"):
        hmf.Ratings.from_file([first, folder / "r.npz"])


def test_files_with_a_long_label_are_joined_without_padding_the_others(tmp_path):
    ids = write(tmp_path, "user,item,plays\n" + "".join(f"{k},1,2\n" for k in range(500)), "ids.csv")
    names = "".join(f"u{k},1,2\n" for k in range(500))
    labels = write(tmp_path, f"user,item,plays\n{'x' * 50_000},1,2\n{names}", "labels.csv")
    tracemalloc.start()
    try:
        ratings = hmf.Ratings.from_file([ids, labels])
        assert tracemalloc.get_traced_memory()[1] < 50e6  # 100e6 for 500 padded labels
    finally:
        tracemalloc.stop()
    assert ratings.shape == (1001, 1)
    assert ratings.user_ids.dtype == object


def test_folders_of_parquet_parts_are_read_as_one(tmp_path):
    folder = tmp_path / "parts" / "day=1"
    folder.mkdir(parents=True)
    (tmp_path / "parts" / "_SUCCESS").touch()
    parts = [{"user": [1, 2], "item": ["x", "y"], "timestamp": [1, 2]}, {"user": [2], "item": ["x"], "timestamp": [3]}]
    for k, part in enumerate([*parts, {"user": pa.array([], pa.int64()), "item": pa.array([], pa.string())}]):
        pq.write_table(pa.table(part), folder / f"part-{k}.parquet")
    ratings = hmf.Ratings.from_file(tmp_path / "parts")
    assert triplets(ratings) == {(1, "x"): 1, (2, "y"): 1, (2, "x"): 1}
    assert sorted(ratings.timestamps.tolist()) == [1, 2, 3]
    pq.write_table(pa.table({"user": ["a"], "item": ["x"]}), folder / "part-9.parquet")
    with pytest.raises(RatingsError, match=r"users are of type int64 in .*part-0.parquet and of type str in"):
        hmf.Ratings.from_file(tmp_path / "parts")
    with pytest.raises(RatingsError, match="hold no ratings"):
        hmf.Ratings.from_file([folder / "part-2.parquet"])
    (tmp_path / "none").mkdir()
    with pytest.raises(IsADirectoryError):
        hmf.Ratings.from_file(tmp_path / "none")


def write_parts(folder, **parts):
    """One Parquet file in each folder of a partition."""
    for name, data in parts.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(data), folder / name / "part-0.parquet")


@pytest.mark.parametrize("pattern", [".", "year=*", "**/*.parquet"])
@both
def test_columns_in_the_names_of_folders(reader, pattern, tmp_path):
    """Hive and Spark leave the columns of a partition out of the files: arguments name them, and roles take them."""
    folder = tmp_path / "by year"
    first, second = {"user": [1, 2], "item": [5, 6]}, {"user": [1], "item": [6]}
    write_parts(folder, **{"year=2023": first, "year=2024": second})
    (folder / "_delta_log").mkdir()
    pq.write_table(pa.table({"user": [9], "item": [9]}), folder / "_delta_log" / "1.checkpoint.parquet")
    path = folder / pattern if pattern != "**/*.parquet" else folder / "year=*" / "*.parquet"
    assert triplets(reader(path, tmp_path / "a")) == {(1, 5): 1, (2, 6): 1, (1, 6): 1}
    named = reader(path, tmp_path / "b", item="year", duplicates="sum")
    assert triplets(named) == {(1, 2023): 1, (2, 2023): 1, (1, 2024): 1}
    assert triplets(reader(path, tmp_path / "c", value="year")) == {(1, 5): 2023, (2, 6): 2023, (1, 6): 2024}
    for year in (2024, "2024", [2024]):
        assert triplets(hmf.Ratings.from_file(path, where={"year": year})) == {(1, 6): 1}
    assert triplets(reader(folder / "year=2023" / "part-0.parquet", tmp_path / "d", value="year")) == {
        (1, 5): 2023, (2, 6): 2023,
    }  # fmt: skip
    timed = hmf.Ratings.from_file(path, timestamp="year")
    assert sorted(timed.timestamps.tolist()) == [2023, 2023, 2024] and set(timed.user_items.data) == {1}
    with pytest.raises(RatingsError, match="no column 'month'"):
        hmf.Ratings.from_file(path, where={"month": 1})


def test_roles_in_the_names_of_folders(tmp_path):
    rows = {"user": [1, 2], "item": [5, 6]}
    write_parts(tmp_path / "ratings", **{"rating=3": rows, "rating=5": {"user": [1], "item": [6]}})
    assert triplets(hmf.Ratings.from_file(tmp_path / "ratings")) == {(1, 5): 3, (2, 6): 3, (1, 6): 5}
    assert triplets(hmf.convert(tmp_path / "ratings" / "rating=3", tmp_path / "s").to_ratings()) == {
        (1, 5): 3,
        (2, 6): 3,
    }
    null = {"user=__HIVE_DEFAULT_PARTITION__": {"item": ["x"]}, "user=a%20b": {"item": ["y"]}}
    write_parts(tmp_path / "users", **null)
    with pytest.raises(RatingsError, match=r"column 'user' of .* is null"):
        hmf.Ratings.from_file(tmp_path / "users")
    assert triplets(hmf.Ratings.from_file(tmp_path / "users", missing="drop")) == {("a b", "y"): 1}
    write_parts(tmp_path / "plain", **{"n=4": {"a": [1], "b": [2]}})  # its place says nothing
    assert triplets(hmf.Ratings.from_file(tmp_path / "plain")) == {(1, 2): 1}


def test_files_become_one_store(tmp_path):
    first = write(tmp_path, "user,item,plays\n1,a,1\n2,b,2\n", "1.csv")
    second = write(tmp_path, "user,item,plays\n1,b,3\n", "2.csv")
    for k, source in enumerate(([first, second], (str(first), second), tmp_path / "[12].csv")):
        assert triplets(from_store(source, tmp_path / str(k))) == {(1, "a"): 1, (2, "b"): 2, (1, "b"): 3}
    assert not (tmp_path / "missing").exists()
    with pytest.raises(FileNotFoundError, match="empty list"):
        hmf.convert([], tmp_path / "missing")


@pytest.mark.parametrize("wrap", [io.BytesIO, lambda content: io.StringIO(content.decode())])
def test_file_objects_are_read(wrap):
    assert triplets(hmf.Ratings.from_file(wrap(b"user,item,rating\n1,2,3\n"))) == {(1, 2): 3}
    with pytest.raises(RatingsError, match=r"^(Bytes|String)IO, line 2 has the value 'x'"):
        hmf.Ratings.from_file(wrap(b"user,item,rating\n1,2,x\n"))


def test_binary_file_objects_are_read(tmp_path):
    stream = io.BytesIO()
    pq.write_table(pa.table({"user": [1], "item": [2]}), stream)
    stream.seek(0)
    assert triplets(hmf.Ratings.from_file(stream)) == {(1, 2): 1}
    path = write(tmp_path, "user,item,rating\n1,2,x\n")
    with open(path, "rb") as file, pytest.raises(RatingsError, match=r"^ratings.csv, line 2"):
        hmf.Ratings.from_file(file)


def test_advice_for_frames_of_estimators_names_from_frame():
    for frame, words in (
        ({"user": ["a", None], "item": ["x", "y"]}, "missing="),
        ({"user": ["a"] * 2, "item": ["x"] * 2}, "sum"),
    ):
        with pytest.raises(RatingsError, match=rf"{words}.*\(arguments of Ratings.from_frame"):
            hmf.ImplicitALS(factors=2).fit(pd.DataFrame(frame))


# -------------------------------------------------------------------------------------- numbers that are not as written


BIG = 2**53


@pytest.mark.parametrize(
    "ids",
    [
        np.array([BIG, BIG + 2, 1.0]),
        np.array([2**24, 2**24 + 2, 1], np.float32),
        np.array([1.0, np.inf, 2.0]),
    ],
)
@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame, pa.table])
def test_ids_that_floating_point_numbers_merge_are_refused(ids, kind):
    frame = kind({"user_id": ids, "item_id": [1, 2, 3], "rating": [3.0, 4.0, 5.0]})
    with pytest.raises(RatingsError, match=r"column 'user_id' .*floating-point.*read the column as text or integers"):
        hmf.Ratings.from_frame(frame)


def test_ids_beyond_float64_are_refused_where_nulls_made_floats(tmp_path):
    ids = [9007199254740993, None, 9007199254740992]
    frame = pd.DataFrame({"user_id": ids, "item_id": [1, 2, 1]}, dtype=float)
    with pytest.raises(RatingsError, match="floating-point"):
        hmf.Ratings.from_frame(frame, missing="drop")
    exact = hmf.Ratings.from_frame(frame.assign(user_id=pd.array(ids, dtype="Int64")), missing="drop")
    assert exact.user_ids.tolist() == [BIG, BIG + 1]
    lines = "".join(f'{{"user_id": {2**64 - k}, "item_id": {k}}}\n' for k in (1, 2))  # pyarrow reads float64
    with pytest.raises(RatingsError, match="floating-point"):
        hmf.Ratings.from_file(write(tmp_path, lines, "a.jsonl"))


def test_floating_point_ids_that_are_exact_are_labels():
    assert hmf.Ratings.from_frame(pd.DataFrame({"user_id": [BIG - 1.0, 1.5], "item_id": [1, 1]})).n_users == 2


@pytest.mark.parametrize("value", ["3,5", "1,234", "1 234", "1.234,5", "1'234.5"])
def test_the_error_for_numbers_with_commas_names_a_reader(value, tmp_path):
    path = write(tmp_path, f"user;item;rating\n1;2;{value}\n", "a.csv")
    with pytest.raises(RatingsError, match='decimal=","'):
        hmf.Ratings.from_file(path)
    with pytest.raises(TypeError, match='decimal=","'):
        hmf.Ratings.from_frame(pd.read_csv(path, sep=";"))


@pytest.mark.parametrize("value", ["", "NULL"])
def test_the_error_for_values_that_are_missing_names_where(value, tmp_path):
    path = write(tmp_path, f"user,item,rating\n1,2,{value}\n1,3,4\n", "a.csv")
    with pytest.raises(RatingsError, match=r"where=\{column: function\}"):
        hmf.Ratings.from_file(path)
    kept = hmf.Ratings.from_file(path, where={"rating": lambda texts: texts != value})
    assert triplets(kept) == {(1, 3): 4}


# ------------------------------------------------------------------------------------------------------ lines and files


@both
def test_comments_that_could_be_entries_are_counted(reader, tmp_path, caplog):
    content = "# user,item,rating\nuser,item,rating\n#1,x,3\n1,x,2\n  #2,y,5\n# made by,hand\n"
    kept = reader(write(tmp_path, content), tmp_path)
    assert triplets(kept) == {(1, "x"): 2}
    said = [message for message in caplog.messages if "skipped" in message]
    assert len(said) == 1 and "skipped 2 lines" in said[0] and "'#1,x,3'" in said[0] and "comment=None" in said[0]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_byte_order_marks_say_the_encoding(encoding, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("user,item,rating\n1,2,3\n2,é,4\n".encode(encoding))
    assert triplets(hmf.Ratings.from_file(path)) == {(1, "2"): 3, (2, "é"): 4}


def test_a_header_without_the_name_of_row_numbers(tmp_path):
    with pytest.raises(RatingsError, match="name each column"):
        hmf.Ratings.from_file(write(tmp_path, "user,item,rating\n0,1,2,3\n1,2,2,4\n"))


def archive(*names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name in names:
            file.writestr(name, "xl/")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (archive("[Content_Types].xml", "xl/workbook.xml"), "Excel workbook.*pandas.read_excel"),
        (archive("ratings.csv"), "ZIP archive.*unpack"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "pandas.read_excel"),
        (gzip.compress(gzip.compress(b"1,2,3\n", mtime=0), mtime=0), "packed twice"),  # xdist compares names of tests
    ],
)
def test_packed_and_office_files_are_named(content, words, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(RatingsError, match=words):
        hmf.Ratings.from_file(path)


def test_a_damaged_archive_is_closed(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(archive("a.npy")[:40])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(RatingsError, match="cannot be read as"):
            hmf.Ratings.from_file(path)
        gc.collect()


def test_ids_in_the_index_of_a_frame_are_named():
    frame = pd.DataFrame({"user_id": [1], "item_id": [2], "rating": [3]}).set_index(["user_id", "item_id"])
    with pytest.raises(RatingsError, match=r"reset_index\(\)"):
        hmf.Ratings.from_frame(frame)


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="pyarrow before 16")
def test_string_views_are_ids():
    table = pa.table({"user_id": pa.array(["a", "b"], pa.string_view()), "item_id": [1, 2]})
    assert hmf.Ratings.from_frame(table).user_ids.tolist() == ["a", "b"]


def test_pipes_are_refused_whose_beginning_would_be_read_twice():
    for reader in (hmf.Ratings.from_file, hmf.Features.from_file):
        end, start = os.pipe()
        os.write(start, b"user,item,rating\nu1,i1,3\n")
        os.close(start)
        with pytest.raises(RatingsError, match=f"/dev/fd/{end} is a pipe, and files are read more than once"):
            reader(f"/dev/fd/{end}")
        os.close(end)


def test_files_with_and_without_values_are_reported(tmp_path, caplog):
    paths = [write(tmp_path, "user,item,rating\n1,2,5\n", "a.csv"), write(tmp_path, "user,item\n3,4\n", "b.csv")]
    assert triplets(hmf.Ratings.from_file(paths)) == {(1, 2): 5, (3, 4): 1}
    assert "some files have no values, so that each of their entries counts 1" in caplog.text


@pytest.mark.parametrize(("other", "twice"), [("7.0", True), ("8.0", False)])
def test_ids_with_and_without_a_point_are_reported(other, twice, tmp_path, caplog):
    """pandas writes integers of a column with gaps as 7.0; the same user would count as two."""
    paths = [write(tmp_path, f"user,item,rating\n{user},2,5\n", f"{user}.csv") for user in ("7", other)]
    assert hmf.Ratings.from_file(paths).user_ids.tolist() == ["7", other]
    assert ("user ids: 1 are there without .0, too, and count as others: '7.0'" in caplog.text) == twice
