"""Text through pyarrow: what the other readers return, or nothing."""

from __future__ import annotations

import builtins
import gzip
import importlib
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.files import read_head
from hybridmf.data import arrow_text, readers, text
from hybridmf.data._spelling import only_in_pairs
from hybridmf.data.layout import FileOptions
from hybridmf.errors import RatingsError
from support.reading import assert_canonical, read, triplets, write

conversion = importlib.import_module("hybridmf.data.convert")  # hybridmf.convert is the function

pl = pytest.importorskip("polars")

MANY = settings(max_examples=50)

ODD_FIELDS = (
    "007", "-0", "-07", "+7", "0x7", "0X1F", "-0x7", "1e3", "1.0", "0", "-5", " 7", "7 ", "\t7", "", " ", "a b", "#x",
    '"7"', '"a,b"', 'a"b', "nan", "NaN", "inf", "-inf", "null", "NA", "N/A", "true", "1_0", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "18446744073709551616", "99999999999999999999", "é", "Łódź",
    "\xa07", "7\u2003", "\x1c7", "7\x1f", "٣", "::", ":", "\ufeff",
)  # fmt: skip
ODD_VALUES = (
    "5.", ".5", "-.5", "1e2", "1E+2", "1e-400", "5e-324", "1e400", "3.5e38", "3.4028234663852886e38", "-0", "-0.0",
    "00.5", "+4", "1e", "0x1p3", "1,5", "0.1000000000000000055511151231257827", "123456789012345678901234567890",
    "infinity", "1d5", "1f",
)  # fmt: skip


def layout_of(path, separator=None, header="auto", comment="#"):
    return text.find_layout(
        str(path), read_head(str(path)), FileOptions(separator=separator, header=header, comment=comment)
    )


def outcome(read, layout):
    """Labels with their types, entries in their order; or the message of the error."""
    try:
        found = read(layout)
    except RatingsError as error:
        return str(error)
    if found is None:
        return None
    (users, user_ids), (items, item_ids), values = found
    assert values.dtype == np.float64
    parts = user_ids, user_ids.dtype, users, item_ids, item_ids.dtype, items, values.view(np.int64)
    return [part.tolist() if isinstance(part, np.ndarray) else str(part) for part in parts]


numbers = st.integers(0, 30).map(str) | st.integers(-(2**63), 2**63 - 1).map(str)
words = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=4)
plain_words = st.text("abcé xyz019", min_size=1, max_size=3).map(lambda word: f"w{word}w")
floats = st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr) | st.integers(-5, 5).map(str)
odd = st.sampled_from(ODD_FIELDS) | words


@st.composite
def files(draw):
    separator = draw(st.sampled_from([",", "\t", ";", "|", " ", "::", "||", ", ", "é"]))
    ids = [draw(st.sampled_from([numbers, numbers, plain_words])) for _ in range(2)]
    more = [[], [numbers], [plain_words], [floats]][draw(st.integers(0, 3))]
    rows = draw(st.lists(st.tuples(*ids, floats, *more).map(list), min_size=1, max_size=12))
    for _ in range(draw(st.integers(0, 2))):  # irregular fields, and fields too many or too few
        row = draw(st.sampled_from(rows))
        place = draw(st.integers(0, len(row)))
        if place == len(row):
            row.append(draw(odd))
        elif draw(st.integers(0, 5)):
            row[place] = draw(odd | st.sampled_from(ODD_VALUES))
        else:
            row.pop(place)
    lines = [separator.join(row) for row in rows]
    if draw(st.booleans()):
        names = draw(st.sampled_from([["user", "item", "rating"], ['"user"', '"item"', '"rating"']]))
        lines.insert(0, separator.join([*names, "more"][: 3 + len(more)] if more else names))
    if not draw(st.integers(0, 3)):
        line = draw(st.sampled_from(["", "  ", "# note", " # note", "\t", "\xa0", '"']))
        lines.insert(draw(st.integers(0, len(lines))), line)
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    content = end.join(lines) + (end if draw(st.booleans()) else "")
    content = draw(st.sampled_from(["", "", "\ufeff"])) + content
    encoded = content.encode(draw(st.sampled_from(["utf-8", "utf-8", "latin-1"])), errors="ignore")
    return separator, gzip.compress(encoded) if not draw(st.integers(0, 4)) else encoded


@MANY
@given(files(), st.booleans(), st.sampled_from([5, 20, 1 << 24]))
def test_files_are_read_alike_or_not_at_all(tmp_path, file, found, size):
    separator, content = file
    path = write(tmp_path, content)
    try:
        layout = layout_of(path, None if found else separator)
    except RatingsError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_text.chunks, "__defaults__", (None, None, size))
        fast = outcome(text._read_regular, layout)
        patch.setattr(text, "BLOCK_CHARS", min(size, 1 << 16))
        plain = outcome(text._read_records, layout)
        patch.setattr(text, "_plain_columns", lambda block, layout: None)
        assert plain == outcome(text._read_records, layout)  # line by line
    event("declined" if fast is None else "read")
    assert fast is None or fast == plain


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("separator", [",", " ", "::"])
def test_an_odd_field_is_read_alike_or_not_at_all(tmp_path, place, separator):
    for field in ODD_FIELDS if place != 2 else ODD_FIELDS + ODD_VALUES:
        rows = [["1", "10", "5", "8"], ["2", "11", "4.5", "9"], ["1", "12", "3", "7"]]
        rows[1][place] = field
        path = write(tmp_path, "".join(separator.join(row) + "\n" for row in rows))
        for comment in ("#", None) if "#" in field or not place else ("#",):
            layout = layout_of(path, separator, False, comment)
            fast = outcome(text._read_regular, layout)
            assert fast is None or fast == outcome(text._read_records, layout)


REGULAR = {
    "integers": "userId,movieId,rating\n3,4,1\n1,20,5\n3,20,0.5\n",
    "quoted header": '"userId","movieId","rating"\n3,4,1\n1,20,5\n3,20,0.5\n',
    "signs and zeros": "3,0,-0.5\r\n-1,20,5\r\n0,0,0\r\n",
    "labels": "ann,007,1\nbob,-0,5\nann,+7,2\n",
    "mixed": "1,x,1\n2,y,2\n",
    "colons": "3::4::1::88\n1::20::5::99\n",
    "blanks": "3 4 1\n1 20 5\n",
    "tabs": "3\t4\t1\t2020-01-01 10:00\n1\t20\t5\t2020-01-01 10:00",
    "titles": "3,4,1,Łódź\n1,20,5,The Heat\n",
    "without values": "3,4\n1,20\n",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", REGULAR)
def test_regular_files_are_read_by_pyarrow(tmp_path, kind, packed, monkeypatch):
    content = ("\ufeff" + REGULAR[kind]).encode()
    path = write(tmp_path, gzip.compress(content) if packed else content)
    layout = layout_of(path)
    assert outcome(text._read_regular, layout) == outcome(text._read_records, layout) != None  # noqa: E711
    monkeypatch.setattr(text, "_read_records", None)
    assert_canonical(hmf.Ratings.from_file(path).user_items)


def test_ids_of_a_file_take_half_the_memory_where_they_fit(tmp_path):
    for label, kind in (("2147483647", np.int32), ("2147483648", np.int64), ("-2147483649", np.int64)):
        chunks = arrow_text.chunks(layout_of(write(tmp_path, f"3,4,1\n{label},20,5\n")), size=8)
        users, items, _ = text.join_chunks(chunks)
        assert users.dtype == kind and users.tolist() == [3, int(label)] and items.dtype == np.int32


def test_small_files_do_not_import_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_text, "SMALLEST", 20)
    monkeypatch.setattr(arrow_text, "_parse", None)
    assert len(triplets(read(tmp_path, "1,2,3\n1,3,4\n"))) == 2
    with pytest.raises(TypeError):
        read(tmp_path, "1,2,3\n1,3,4\n1,4,5\n1,5,5\n")


def test_without_pyarrow_the_other_readers_read(tmp_path, monkeypatch):
    def without(name, *args, importer=builtins.__import__, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return importer(name, *args, **kwargs)

    expected = triplets(read(tmp_path, REGULAR["integers"]))
    monkeypatch.setattr(builtins, "__import__", without)
    assert text._read_regular(layout_of(write(tmp_path, REGULAR["integers"]))) is None
    assert triplets(read(tmp_path, REGULAR["integers"])) == expected
    assert triplets(read(tmp_path, REGULAR["labels"])) == {("ann", "007"): 1, ("bob", "-0"): 5, ("ann", "+7"): 2}


def test_a_late_error_is_reported_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_text.chunks, "__defaults__", (None, None, 16))
    rows = [f"{k},{k},1\n" for k in range(1, 200)]
    with pytest.raises(RatingsError, match="line 200 has the value 'x', which is not a number"):
        read(tmp_path, "".join([*rows, "1,5,x\n"]))
    with pytest.raises(RatingsError, match="lines 7 and 200"):
        read(tmp_path, "".join([*rows, "7,7,1\n"]))


@pytest.mark.parametrize("kind", REGULAR)
def test_conversions_read_by_pyarrow(tmp_path, kind, monkeypatch):
    path = write(tmp_path, REGULAR[kind])
    expected = hmf.Ratings.from_file(path)
    monkeypatch.setattr(conversion, "record_chunks", lambda *_, **__: pytest.fail("not read by pyarrow"))
    store = hmf.convert(path, tmp_path / "store")
    assert np.array_equal(expected.user_items.toarray(), store.to_ratings().user_items.toarray())
    assert store.user_ids.tolist() == expected.user_ids.tolist() and store.user_ids.dtype == expected.user_ids.dtype
    assert store.item_ids.tolist() == expected.item_ids.tolist()


def test_conversions_with_little_memory_do_not_use_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path, next(iter(REGULAR.values())))
    expected = hmf.Ratings.from_file(path)
    monkeypatch.setattr(arrow_text, "_parse", None)
    store = hmf.convert(path, tmp_path / "store", memory_limit="64MiB")
    assert np.array_equal(expected.user_items.toarray(), store.to_ratings().user_items.toarray())


def test_narrow_ids_widen_where_they_have_to(tmp_path):
    layout = layout_of(write(tmp_path, "3,4,1\n5,6,2\n2147483648,20,5\n7,-8,1\n"))
    chunks = [chunk for chunk in arrow_text.chunks(layout, size=8, narrow=True) if chunk is not None]
    kinds = [users.dtype for users, *_ in chunks]
    assert kinds[0] == np.int32 and kinds[-1] == np.int64
    assert np.concatenate([users for users, *_ in chunks]).tolist() == [3, 5, 2147483648, 7]
    assert np.concatenate([items for _, items, *_ in chunks]).tolist() == [4, 6, 20, -8]


@MANY
@given(st.lists(st.lists(st.text("ab\0é", min_size=1, max_size=20)), max_size=4))
def test_labels_get_the_codes_of_a_dictionary(blocks):
    expected, table = {}, {}
    codes = arrow_text.codes_into(table)
    for block in blocks:
        found = codes(pa.chunked_array([block[:3], block[3:]], pa.string()))
        assert found.tolist() == [expected.setdefault(label, len(expected)) for label in block]
        assert list(table.items()) == list(expected.items())


@MANY
@given(st.text(":a\n", max_size=40))
def test_bytes_that_stand_in_pairs(words):
    expected = all(len(colons) == 2 for colons in re.findall(":+", words))
    assert only_in_pairs(words.encode(), b":") == expected


@pytest.mark.parametrize("title", ["Heat", "Star Wars: IV", "x:"])
def test_doubled_separators_are_not_copied_where_fields_have_none_of_them(tmp_path, title, monkeypatch):
    layout = layout_of(write(tmp_path, f"3::4::1::{title}\n1::20::5::Up\n"))
    found = []
    monkeypatch.setattr(arrow_text, "_parse", lambda block, delimiter, *rest: found.append(delimiter))
    assert text._read_regular(layout) is None
    assert set(found) == {b"\x1f" if ":" in title else b":"}
    monkeypatch.undo()
    assert outcome(text._read_regular, layout) == outcome(text._read_records, layout)


@pytest.mark.parametrize(
    "make",
    [
        lambda columns: pd.DataFrame(columns),
        lambda columns: pd.DataFrame(columns, dtype=object),
        lambda columns: pl.DataFrame(columns).slice(1),
        lambda columns: pa.concat_tables([pa.table(columns).slice(2, 2), pa.table(columns).slice(5)]),
    ],
    ids=["pandas", "objects", "polars", "pyarrow"],
)
def test_frames_of_many_strings_give_the_ratings_of_their_lists(make, monkeypatch):
    words = ["b", "é", "", "a\0", "10", "9", "b" * 300, "z"]
    frame = make({"user": words, "item": words[::-1], "rating": np.arange(1.0, 9)})
    expected = hmf.Ratings.from_frame(frame, missing="keep")
    monkeypatch.setattr(readers, "MANY_STRINGS", 0)
    monkeypatch.setattr(readers, "_frame_ids", None)
    found = hmf.Ratings.from_frame(frame, missing="keep")
    assert triplets(found) == triplets(expected)
    assert found.user_ids.tolist() == expected.user_ids.tolist() and found.user_ids.dtype == expected.user_ids.dtype


def test_strings_that_are_not_unicode_are_labels_too(monkeypatch):
    monkeypatch.setattr(readers, "MANY_STRINGS", 0)
    frame = pd.DataFrame({"user": ["\ud800", "a"], "item": ["x", "y"], "rating": [1.0, 2.0]}, dtype=object)
    assert triplets(hmf.Ratings.from_frame(frame)) == {("\ud800", "x"): 1, ("a", "y"): 2}
