"""Rating files: delimited text, Matrix Market, npz, Parquet."""

from __future__ import annotations

import builtins
import gzip
import io
import zipfile

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.data import text as _text
from hybridmf.data.layout import FileOptions
from hybridmf.errors import DuplicateEntriesError, MemoryBudgetError, RatingsError
from hybridmf.ratings import Ratings
from support.reading import QUICK, assert_canonical, read, triplets, write

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
        ("title.csv", '3,4,1,"Heat, The"\n1,20,5,"a ""b"" c"\n3,20,3.5,x\n'),
        ("blank.csv", "3,4,1\n   \n1,20,5\n3,20,3.5\n"),
        ("empty-last.csv", "3,4,1,\n1,20,5,\n3,20,3.5,\n"),
    ],
)
def test_text_in_its_many_forms(tmp_path, name, text):
    ratings = read(tmp_path, text, name)
    assert triplets(ratings) == EXPECTED
    assert ratings.user_ids.dtype == ratings.item_ids.dtype == np.int64
    assert_canonical(ratings.user_items)
    packed = write(tmp_path, gzip.compress(text.encode()), "packed")  # detected by content, not by its name
    assert triplets(Ratings.from_file(packed)) == EXPECTED


def test_a_block_with_a_fault_leaves_the_others_plain(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "BLOCK_CHARS", 16)
    original, seen = _text._csv_records, []
    monkeypatch.setattr(_text, "_csv_records", lambda *given: seen.append(given) or original(*given))
    rows = [f"{k},{k},1\n" for k in range(200)]
    rows[100] = '100,"100" ,1\n'
    with pytest.raises(RatingsError, match="line 101 has a field that goes on after its closing quotation mark"):
        read(tmp_path, "".join(rows))
    assert len(seen) == 1
    rows[100:102] = ["100,100,x\n", "101,101\n"]
    with pytest.raises(RatingsError, match="line 101 has the value 'x'"):
        read(tmp_path, "".join(rows))


@pytest.mark.parametrize("block", [1, 7, 16])
def test_blocks_of_any_size_read_the_same(tmp_path, monkeypatch, block):
    monkeypatch.setattr(_text, "BLOCK_CHARS", block)
    monkeypatch.setattr(_text, "_csv_records", None)  # lines are plain
    text = "  \n# c\n  \n\nuser::item::rating\n\n3::4::1\n\n\n\n#\n1::20::5\n3::20::3.5\n\n"
    assert triplets(read(tmp_path, text)) == EXPECTED


def test_plain_lines_are_split_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "_csv_records", None)
    for name, text in [
        ("a.dat", "3::4::1::88\n1::20::5::99\n3::20::3.5::88\n"),
        ("b.csv", "userId,movieId,rating,title\n3,4,1,Heat\n1,20,5,Żółw # 1\n3,20,3.5,\n"),
        ("c.txt", "3 4  1\n 1 20 5 \n3\t20 3.5\n"),
        ("d.csv", '"u","i","r"\n"3","4","1"\n"1","20","5"\n3,20,3.5\n'),
        ("e.csv", '3,4,1,"Heat, The"\n1,20,5,"a ""b"" c"\n3,20,3.5,x\n'),
    ]:
        assert triplets(read(tmp_path, text, name)) == EXPECTED


@pytest.mark.parametrize("separator", ["::", ",", "\t", " ", ";", "||", "\x1f"])
@settings(max_examples=15)  # of each separator
@given(
    pairs=st.dictionaries(
        st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), st.integers(0, 9)),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=8,
    )
)
def test_lines_are_split_alike_at_once_and_one_by_one(tmp_path, separator, pairs):
    text = "".join(separator.join([str(u), str(i), repr(v)]) + "\n" for (u, i), v in pairs.items())
    path = write(tmp_path, text, "pairs.txt")
    layout = _text.find_layout(
        str(path), text.encode(), FileOptions(separator=separator, header=False, user=0, item=1, value=2)
    )
    both = [list(_text._columns(layout, (0, 1, 2)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_text, "_plain_columns", lambda block, layout: None)
        both.append(list(_text._columns(layout, (0, 1, 2))))
    assert both[0] == both[1]
    assert triplets(Ratings.from_file(path, separator=separator)) == pairs


@QUICK
@given(
    rows=st.dictionaries(
        st.tuples(
            *[
                st.text(
                    st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="\\"), min_size=1
                ).map(str.strip)
            ]
            * 2
        ),
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
    how = {"separator": ",", "header": False, "user": 0, "item": 1}  # "nan" looks like a number, "NULL" is kept
    ratings = read(tmp_path, buffer.getvalue(), **how, comment=None, missing="keep")
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
        ('a,b,3\nc,"d,4\ne,f,5\n', {}, "line 2 has a quotation mark that is not closed in this line.*quote=None"),
        ('a,b,3\nc,"' + "d" * 140_000 + '",5\n', {}, r"line 2 cannot be split into fields \(field larger"),
        ("", {}, "is empty"),
        ("\n  \n# c\n", {}, "no ratings, only blank lines or comments"),
        ("user,item,rating\n", {}, "no ratings, only a header"),
        ("1,2,3\n", {"header": True}, "no ratings, only a header"),
        ("user,item,rating,when\n", {"timestamp": "when"}, "no ratings, only a header"),
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
        match=r"format must be one of 'auto', 'text', 'csv', 'tsv', 'lists', 'jsonl', 'mtx', .*; got 'dat'",
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
        read(tmp_path, 'a,"x\ny",1\nb,z,1\na,"x\ny",2\n', quote='"')


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
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 2**28)
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
    with pytest.raises(TypeError, match=r"user_ids has labels of type tuple; a .npz file holds strings"):
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
