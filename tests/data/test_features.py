"""Features: from frames and matrices, their names, and their alignment with ratings by label."""

from __future__ import annotations

import datetime
import gzip
import json
import logging
from decimal import Decimal

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.data.features import align_features
from hybridmf.errors import MemoryBudgetError, RatingsError, UnknownLabelError
from support.messages import says

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

FILMS = {
    "movieId": [10, 20, 30, 40],
    "year": [1940, 1950, 1960, 1970],
    "genre": [["noir", "crime", "noir"], ["noir"], [], ["drama"]],
    "country": ["us", "fr", None, "us"],
    "family": [True, False, False, True],
}
NAMES = ["year", "genre:crime", "genre:drama", "genre:noir", "country:fr", "country:us", "family"]
YEARS = (np.array(FILMS["year"]) - 1955) / np.std(FILMS["year"])
CELLS = np.column_stack([YEARS, [[1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0], [0] * 6, [0, 1, 0, 0, 1, 1]]])
KINDS = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "lazy": pl.LazyFrame, "pyarrow": pa.table}


def films(**changes):
    return pd.DataFrame({**FILMS, **changes})


def aligned(value, labels=(10, 20, 30, 40), argument="item_features"):
    ids = None if labels is None else np.array(labels)
    return align_features(argument, value, ids, 4 if labels is None else len(ids))


# ------------------------------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize("kind", KINDS)
def test_frame(kind):
    features = hmf.Features.from_frame(KINDS[kind](FILMS))
    assert features.names == NAMES and features.labels.tolist() == FILMS["movieId"] and len(features) == 4
    np.testing.assert_allclose(features.matrix.toarray(), CELLS, rtol=1e-6)
    assert features.matrix.dtype == np.float32 and not features.matrix.data.flags.writeable
    assert [column["kind"] for column in features.columns] == ["number", "tags", "category", "boolean"]
    assert repr(features) == "Features(4 rows, 7 features)"


def test_numbers_as_they_are():
    features = hmf.Features.from_frame(films(), columns=["year", "family"], standardize=False)
    np.testing.assert_array_equal(features.matrix.toarray()[:, 0], FILMS["year"])
    assert features.names == ["year", "family"]


@pytest.mark.parametrize("text", ["noir|crime|noir", " noir | crime |"])
def test_text_of_tags(text):
    frame = films(genre=[text, "noir", "", "drama"])
    for separator in ("|", {"genre": "|"}):
        features = hmf.Features.from_frame(frame, separator=separator)
        np.testing.assert_allclose(features.matrix.toarray(), CELLS, rtol=1e-6)
        assert features.names == NAMES


def test_joined_tags_are_not_taken_for_categories():
    frame = films(genre=["noir|crime", "noir", "noir", "drama"])
    with pytest.raises(RatingsError, match=says("'genre' of frame has 1 values such as 'noir|crime'", "separator='|'")):
        hmf.Features.from_frame(frame)
    assert "genre:noir|crime" in hmf.Features.from_frame(frame, categories=["genre"]).names
    for texts, way_out in (
        (["noir, crime", "noir", "crime", "noir, crime"], "pass separator=','"),
        (["noir;crime", "noir", "crime", "crime;noir"], "pass separator=';'"),
        (["['noir', 'crime']", "['noir']", "['crime']", ""], "ast.literal_eval"),
    ):
        with pytest.raises(RatingsError, match=says("look like several tags", way_out)):
            hmf.Features.from_frame(films(genre=texts))
    names = hmf.Features.from_frame(films(genre=["Paris, Texas", "Rome, Georgia", "Cairo, Illinois", "Rome"])).names
    assert "genre:Paris, Texas" in names  # whose parts are no tags: they do not repeat


def test_codes_as_categories():
    features = hmf.Features.from_frame(films(), columns=["year"], categories=["year"])
    assert features.names == ["year:1940", "year:1950", "year:1960", "year:1970"]
    np.testing.assert_array_equal(features.matrix.toarray(), np.eye(4))
    floats = hmf.Features.from_frame(films(year=[1940.0, 1950.5, np.nan, 1970]), columns=["year"], categories=["year"])
    assert floats.names == ["year:1940", "year:1950.5", "year:1970"]


def test_objects_of_pandas():
    frame = films(
        country=pd.Categorical(["us", "fr", None, "us"]),
        genre=[("crime", "noir"), {"noir"}, np.array([]), ["drama", None]],
        year=[Decimal(year) for year in FILMS["year"]],
    )
    np.testing.assert_allclose(hmf.Features.from_frame(frame).matrix.toarray(), CELLS, rtol=1e-6)


def test_integers_as_tags():
    assert hmf.Features.from_frame(films(genre=[[18, 27], [18], [], [3]])).names[1:4] == [
        "genre:18",
        "genre:27",
        "genre:3",
    ]


# ------------------------------------------------------------------------------------------------------------- labels


def test_label_column():
    frame = films().rename(columns={"movieId": "artikel"})
    message = says("which column holds the labels of its rows is unclear", "'artikel', 'year'", "label=")
    with pytest.raises(RatingsError, match=message):
        hmf.Features.from_frame(frame)
    for label in ("artikel", 0):
        assert hmf.Features.from_frame(frame, label=label).labels.tolist() == FILMS["movieId"]
    assert hmf.Features.from_frame(frame, label=None, columns=["year"]).labels is None
    with pytest.raises(RatingsError, match=says("no column 'id' (label='id')", "'artikel'")):
        hmf.Features.from_frame(frame, label="id")
    for name in (("year", "mean"), None):
        with pytest.raises(RatingsError, match=says(f"no column {name!r} (columns={name!r})", "'artikel', 'year'")):
            hmf.Features.from_frame(frame, label=None, columns=[name])
    both = films(user_id=list("abcd"))
    with pytest.raises(RatingsError, match=says("2 columns that could hold the labels", "'movieId', 'user_id'")):
        hmf.Features.from_frame(both)
    assert aligned(both.drop(columns="genre")).labels.tolist() == FILMS["movieId"]
    assert hmf.Features.from_frame(films(artist=list("abca"))).labels.tolist() == FILMS["movieId"]


def test_index_of_pandas():
    indexed = films().set_index("movieId")
    assert hmf.Features.from_frame(indexed).labels.tolist() == FILMS["movieId"]
    text = films().drop(columns="movieId").set_axis(list("abcd"))
    assert hmf.Features.from_frame(text).labels.tolist() == list("abcd")
    with pytest.raises(RatingsError, match="which column holds the labels"):  # what a filter left of a default index
        hmf.Features.from_frame(films().drop(columns="movieId")[[True, False, True, True]])


def test_null_labels():
    with pytest.raises(RatingsError, match=says("'movieId' of frame, its labels, is null in 2 of 4 rows", "row 1")):
        hmf.Features.from_frame(films(movieId=["a", None, None, "b"]))


def test_repeated_labels():
    frame = films(movieId=[10, 20, 10, 40])
    with pytest.raises(RatingsError, match=says("4 rows of 3 labels (rows 0 and 2 have 10)", 'duplicates="merge"')):
        hmf.Features.from_frame(frame)
    merged = hmf.Features.from_frame(frame, duplicates="merge", standardize=False)
    assert merged.labels.tolist() == [10, 20, 40]
    np.testing.assert_array_equal(merged.matrix.toarray()[0], [1950, 1, 0, 1, 0, 1, 1])


# ---------------------------------------------------------------------------------------------------------- bad frames


BAD = {
    "nan": ({"year": [1, np.nan, np.nan, 4]}, RatingsError, ("'year' of frame is null in 2 of 4 rows", "row 1")),
    "inf": ({"year": [1, 2, np.inf, 4]}, RatingsError, ("'year' of frame has 1 values that are no finite", "inf")),
    "null boolean": ({"family": [True, None, True, False]}, RatingsError, ("'family' of frame is null in 1 of 4",)),
    "dates": ({"year": pd.to_datetime(["2020"] * 4)}, TypeError, ("'year' of frame has dates", "such as the year")),
    "objects": ({"year": [datetime.date(2020, 1, 1)] * 4}, TypeError, ("'year' of frame has dates",)),
    "mixed": ({"year": [1, "a", 2, 3]}, TypeError, ("'year' of frame has values of the types category, number",)),
    "mappings": ({"year": [{}, {}, {}, {}]}, TypeError, ("'year' of frame",)),
    "vectors": ({"genre": [[0.5, 1]] * 4}, TypeError, ("lists of float", "numpy.stack")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_columns(case):
    changes, error, parts = BAD[case]
    with pytest.raises(error, match=says(*parts)):
        hmf.Features.from_frame(films(**changes))


def test_a_feature_for_each_row_is_refused():
    many = pd.DataFrame({"item": range(100), "title": [f"film {k}" for k in range(100)], "year": [1, 2] * 50})
    message = says("'title' of frame has 100 different values among 100", "columns=", "categories=['title']")
    with pytest.raises(RatingsError, match=message):
        hmf.Features.from_frame(many)
    assert len(hmf.Features.from_frame(many, categories=["title"]).names) == 101


def test_more_entries_than_memory(monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 100)
    with pytest.raises(MemoryBudgetError, match=says("frame has 14 entries of 7 features", "columns=")):
        hmf.Features.from_frame(films())


def test_constant_columns(caplog):
    with caplog.at_level(logging.WARNING, "hybridmf"):
        features = hmf.Features.from_frame(films(year=[7, 7, 7, 7]))
    assert features.names == NAMES[1:] and "left out the feature 'year', which is 7 in all rows" in caplog.text
    with pytest.raises(RatingsError, match="no feature that differs between its 4 rows"):
        hmf.Features.from_frame(films(year=[7, 7, 7, 7]), columns=["year"])
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.Features([[1, 0, 0], [1, 0, 3]], names=list("abc"))
    assert "matrix: 2 of 3 features are the same in all 2 rows and say nothing ('a', 'b')" in caplog.text


def test_other_mistakes():
    for arguments, error, parts in (
        ({"columns": "year"}, TypeError, ("columns must be a sequence", "['year']")),
        ({"columns": ["yaer"]}, RatingsError, ("no column 'yaer' (columns='yaer')",)),
        ({"columns": ["movieId"]}, RatingsError, ("columns names 'movieId', which holds the labels",)),
        ({"categories": ["yaer"]}, RatingsError, ("no column 'yaer' (categories='yaer')",)),
        ({"separator": {"yaer": "|"}}, RatingsError, ("no column 'yaer' (separator='yaer')",)),
        ({"separator": {"movieId": "|"}}, RatingsError, ("separator names 'movieId', which is none of the columns",)),
        ({"separator": ""}, TypeError, ("separator must be text",)),
        ({"duplicates": "sum"}, ValueError, ("duplicates must be one of 'error', 'merge'",)),
        ({"standardize": 1}, TypeError, ("standardize must be True or False",)),
    ):
        with pytest.raises(error, match=says(*parts)):
            hmf.Features.from_frame(films(), **arguments)
    for frame, error, parts in (
        (films().head(0), RatingsError, ("0 rows",)),
        (films()[["movieId"]], RatingsError, ("frame has 4 rows", "0 of them features")),
        (np.eye(3), TypeError, ("frame must be a pandas, polars or pyarrow table, got ndarray",)),
        (pd.concat([films(), films()[["year"]]], axis=1), RatingsError, ("2 columns named 'year'",)),
        (films(**{"a": list("xyxy"), "a:x": [True, False, True, False]}), RatingsError, ("repeat", "'a:x'")),
    ):
        with pytest.raises(error, match=says(*parts)):
            hmf.Features.from_frame(frame)


# ------------------------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_array, sp.csc_matrix, sp.coo_array, sp.lil_array, sp.dia_array])
def test_matrix(kind):
    cells = np.array([[1, 0, 2], [0, 3, 0]])
    features = hmf.Features(kind(cells), names=["a", "b", 3], labels=["x", "y"])
    np.testing.assert_array_equal(features.matrix.toarray(), cells)
    assert features.names == ["a", "b", "3"] and features.labels.tolist() == ["x", "y"]
    assert hmf.Features(kind(cells)).names == ["0", "1", "2"]


def test_bad_matrices():
    for arguments, error, parts in (
        (([[1, np.nan], [np.nan, 2]],), RatingsError, ("matrix has 2 values that are no finite", "row 0, column 1")),
        ((sp.csr_array([[1, np.inf]]),), RatingsError, ("matrix has 1 values that are no finite",)),
        (([[1e300, 1]],), RatingsError, ("matrix has 1 values that are no finite float32",)),
        (([1, 2],), RatingsError, ("must be a matrix of shape (rows, features), got 1 dimension",)),
        (([["a", "b"]],), TypeError, ("Features.from_frame",)),
        ((np.eye(2), ["a", "a"]), RatingsError, ("1 names of features repeat, such as 'a'",)),
        ((np.eye(2), ["a"]), RatingsError, ("names has 1 elements; expected one for each of 2 features",)),
        ((np.eye(2), "ab"), TypeError, ("names must be a sequence",)),
        ((np.eye(3)[:2], None, list("abc")), ValueError, ("labels has 3 elements", "matrix.T")),
        ((np.eye(2), None, list("aa")), ValueError, ("labels has repeated labels",)),
        ((np.ma.masked_equal(np.eye(2), 0),), RatingsError, ("matrix has 2 masked values",)),
    ):
        with pytest.raises(error, match=says(*parts)):
            hmf.Features(*arguments)


# ------------------------------------------------------------------------------------------------------------ alignment


def test_rows_follow_the_labels_and_cold_rows_follow_them(caplog):
    with caplog.at_level(logging.INFO, "hybridmf"):
        features = aligned(films(), labels=[30, 99, 10])
    assert features.labels.tolist() == [30, 99, 10, 20, 40] and features.names == NAMES
    np.testing.assert_allclose(features.matrix.toarray(), CELLS[[2, 2, 0, 1, 3]] * [[1], [0], [1], [1], [1]], rtol=1e-6)
    assert "item_features has features of 2 of 3 items of the ratings (none of 99), and of 2 items" in caplog.text
    assert caplog.records[-1].levelno == logging.INFO
    with caplog.at_level(logging.INFO, "hybridmf"):
        aligned(films(), labels=[1, 2, 10])
    assert caplog.records[-1].levelno == logging.WARNING


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_alignment_is_by_label(data):
    ids = st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True)
    ratings, rows = data.draw(ids), data.draw(ids)
    labels = np.array([f"i{k}" for k in ratings])
    values = hmf.Features([[k + 1, -k] for k in rows], labels=[f"i{k}" for k in rows])
    if not set(ratings) & set(rows):
        with pytest.raises(UnknownLabelError):
            align_features("item_features", values, labels, len(labels))
        return
    found = align_features("item_features", values, labels, len(labels))
    wanted = {f"i{k}": [k + 1, -k] for k in rows}
    assert found.labels[: len(labels)].tolist() == labels.tolist()
    assert sorted(found.labels.tolist()) == sorted({*labels.tolist(), *wanted})
    for label, row in zip(found.labels.tolist(), found.matrix.toarray().tolist(), strict=True):
        assert row == wanted.get(label, [0, 0])


def test_positions():
    cells = np.arange(8.0).reshape(4, 2)
    for labels in (None, [0, 1, 2, 3]):
        features = aligned(cells, labels)
        np.testing.assert_array_equal(features.matrix.toarray(), cells)
        assert (features.labels is None) == (labels is None)
    assert aligned(hmf.Features(cells, labels=[0, 1, 2, 3]), None).labels is None


WRONG = {
    "transposed": (
        np.ones((3, 4)),
        None,
        ("shape (3, 4); expected a row for each of n_items=4", "item_features.T"),
    ),
    "few rows": (np.ones((3, 2)), None, ("has shape (3, 2); expected a row for each of n_items=4", "labels=")),
    "more rows": (np.ones((6, 2)), None, ("has shape (6, 2)", "Ratings.from_coo(..., shape=)")),
    "labels of ratings alone": (np.eye(4), list("abcd"), ("the ratings have item labels", "labels=ratings.item_ids")),
    "transposed, too": (np.ones((3, 4)), list("abcd"), ("the ratings have item labels", "looks transposed")),
    "labels of features alone": (films(), None, ("item_features has item labels", "the ratings only positions")),
    "no match": (films(), [1, 2, 3], ("features of 0 of 3 items", "none of its 4 labels (such as 10, 20, 30, ...)")),
    "types": (films(), list("abcd"), ("items are of type", "labels meet only if they have one type")),
    "empty": (np.ones((0, 3)), None, ("has shape (0, 3): it needs at least one item and one feature",)),
    "no label column": (
        films().drop(columns="movieId"),
        [1, 2],
        ("unclear: no name says items", "from_frame"),
    ),
    "nan": (np.full((4, 2), np.nan), None, ("item_features has 8 values that are no finite",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_match(case):
    value, labels, parts = WRONG[case]
    with pytest.raises(RatingsError, match=says(*parts)):
        aligned(value, labels)


def test_other_kinds():
    for value in ([[1, 2]], "genres.csv", {"a": 1}, hmf.Ratings([[1, 2]])):
        with pytest.raises(TypeError, match=says("user_features must be a data frame", "n_users, n_features")):
            aligned(value, None, "user_features")


# ----------------------------------------------------------------------------------------------------------- other rows


def test_encoding_of_other_rows(caplog):
    features = hmf.Features.from_frame(films())
    row = {"year": 1945, "genre": ["noir", "western"], "country": "it", "family": True}
    with caplog.at_level(logging.WARNING, "hybridmf"):
        one = features.encode(row)
    wanted = [(1945 - 1955) / np.std(FILMS["year"]), 0, 0, 1, 0, 0, 1]
    np.testing.assert_allclose(one.matrix.toarray(), [wanted], rtol=1e-6)
    assert "features: 2 of 5 features left out, unknown to the model ('genre:western', 'country:it')" in caplog.text
    frame = pl.DataFrame({"movieId": [7], **{name: [value] for name, value in reversed(row.items())}})
    many = features.encode(frame)
    np.testing.assert_array_equal(many.matrix.toarray(), one.matrix.toarray())
    assert many.names == NAMES and many.labels.tolist() == [7]
    named = features.encode(hmf.Features([[1, 1945, 1]], names=["family", "year", "genre:noir"]))
    np.testing.assert_array_equal(named.matrix.toarray(), one.matrix.toarray())
    for same in (features, films(), hmf.Features.from_frame(films(), standardize=False)):
        np.testing.assert_allclose(features.encode(same).matrix.toarray(), CELLS, atol=1e-6)
    raw = hmf.Features.from_frame(films(), standardize=False).matrix
    np.testing.assert_allclose(features.encode(raw).matrix.toarray(), CELLS, rtol=1e-6)
    # few rows, with a mean of their own
    np.testing.assert_allclose(
        features.encode(hmf.Features.from_frame(films()[1:3])).matrix.toarray()[:, 0], YEARS[1:3]
    )


ROW = {"year": 1945, "genre": None, "country": None, "family": True}


def test_encoding_refuses():
    features, plain = hmf.Features.from_frame(films()), hmf.Features(np.eye(3))
    for known, rows, error, parts in (
        (features, ROW | {"year": np.nan}, RatingsError, ("'year' of features is null in 1 of 1 rows",)),
        (features, ROW | {"family": None}, RatingsError, ("'family' of features is null in 1 of 1 rows",)),
        (features, {"year": 1945}, RatingsError, ("lacks the columns 'genre', 'country', 'family'", "'year'")),
        (features, films(year=list("abcd")), RatingsError, ("'year' of features", "kind category", "number")),
        (features, films(country=[["us"]] * 4), RatingsError, ("'country' of features", "kind tags", "category")),
        (features, hmf.Features([[1]], names=["a"]), UnknownLabelError, ("none of its 1 features ('a') is among",)),
        (features, np.ones((1, 6)), RatingsError, ("has shape (1, 6); expected 7 features",)),
        (features, np.ones((7, 2)), RatingsError, ("has shape (7, 2)", "features.T")),
        (plain, {"a": 1}, TypeError, ("features is a dict", "3 columns")),
    ):
        with pytest.raises(error, match=says(*parts)):
            known.encode(rows)


def test_no_tag_is_no_entry():
    features = hmf.Features.from_frame(films(), columns=["genre"])
    assert features.encode({"genre": []}).matrix.shape == (1, 3) and features.encode({"genre": None}).matrix.nnz == 0
    with pytest.raises(UnknownLabelError, match=says("none of its 1 features ('genre:western') is among the 3")):
        features.encode({"genre": ["western"]})


def test_coding_survives_json():
    features = hmf.Features.from_frame(films(genre=["noir|crime", "noir", "", "drama"]), separator="|")
    coding = json.loads(json.dumps(features.coding()))
    restored = hmf.Features.from_coding(coding)
    assert len(restored) == 0 and restored.names == NAMES and restored.columns == features.columns
    row = {"year": 1945, "genre": "noir|drama", "country": "fr", "family": True}
    np.testing.assert_array_equal(restored.encode(row).matrix.toarray(), features.encode(row).matrix.toarray())
    for key, value in (("shift", [1]), ("scale", [0] * 7), ("columns", [{"name": "a", "kind": "b"}])):
        with pytest.raises(ValueError, match=r"features|kinds"):
            hmf.Features.from_coding({**coding, key: value})


# --------------------------------------------------------------------------------------------------------------- files

LINES = [
    "movieId{0}title{0}genre{0}year{0}family{0}country",
    "10{0}Laura{0}noir/crime{0}1940{0}true{0}us",
    "20{0}Détour{0}noir{0}1950{0}false{0}fr",
    "30{0}Rififi{0}{0}1960{0}false{0}",
    "40{0}Gilda{0}drama{0}1970{0}true{0}us",
]
COLUMNS = ["genre", "year", "family", "country"]


def assert_films(features):
    assert features.labels.tolist() == FILMS["movieId"] and sorted(features.names) == sorted(NAMES)
    cells = features.matrix.toarray()[:, [features.names.index(name) for name in NAMES]]
    np.testing.assert_allclose(cells, CELLS, rtol=1e-6)


@pytest.mark.parametrize("mark", ["::", "\t", "|", ";", ","])
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "latin-1"])
def test_text_files(tmp_path, mark, coding):
    text = "\n".join(LINES).format(mark) + "\n"
    path = tmp_path / "films.txt"
    path.write_bytes(text.encode(coding))
    assert_films(hmf.Features.from_file(path, columns=COLUMNS, separator="/"))
    packed = tmp_path / "films.txt.gz"
    packed.write_bytes(gzip.compress(text.encode(coding)))
    assert_films(hmf.Features.from_file(packed, columns=COLUMNS, separator={"genre": "/"}, field_separator=mark))


def test_titles_of_a_file_are_what_it_says(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text('movieId,title\n10,"Laura, or not"\n20,7\n', encoding="latin-1")
    assert hmf.Features.from_file(path).names == ["title:7", "title:Laura, or not"]
    path.write_text("movieId,code\n010,1.5\n20,NA\n")
    with pytest.raises(RatingsError, match=says("'code'", "is null in 1 of 2 rows (the first is row 1)")):
        hmf.Features.from_file(path)
    path.write_text("movieId,code\n010,1.5\n20,2.5\n")
    assert hmf.Features.from_file(path).labels.tolist() == ["010", "20"]  # as in ratings
    path.write_text("movieId,code,other\n1,007,.5\n2,10,-1e3\n")
    assert hmf.Features.from_file(path).names == ["code:007", "code:10", "other"]


def test_parquet_and_json_lines(tmp_path):
    pl.DataFrame(FILMS).write_parquet(tmp_path / "films.parquet")
    assert_films(hmf.Features.from_file(tmp_path / "films.parquet"))
    rows = "\n".join(json.dumps(row) for row in pl.DataFrame(FILMS).to_dicts())
    (tmp_path / "films.jsonl").write_text(rows)
    assert_films(hmf.Features.from_file(tmp_path / "films.jsonl"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("\n \n", ("films.csv is empty",)),
        ("movieId\n1\n", ("no separator in its first line, 'movieId'",)),
        ("movieId,year\n1,1990\n2\n", ("row 3 has 1 fields", "names 2 columns ('movieId', 'year')", "','")),
        ("movieId,year,year\n1,2,3\n", ("2 columns named 'year'",)),
        ("movieId,year\n", ("0 rows",)),
        ('movieId,year\n1,"' + "x" * 200_000, ("films.csv cannot be read as CSV", "field larger")),
    ],
    ids=["empty", "no separator", "fields", "names", "no rows", "quote"],
)
def test_bad_files(tmp_path, text, parts):
    path = tmp_path / "films.csv"
    path.write_text(text)
    with pytest.raises(RatingsError, match=says(*parts)):
        hmf.Features.from_file(path)


def test_a_matrix_in_a_file_has_no_names(tmp_path):
    path = tmp_path / "matrix.npz"
    sp.save_npz(path, sp.csr_array(np.eye(3)))
    with pytest.raises(RatingsError, match=says("is a matrix without names", "Features(matrix)")):
        hmf.Features.from_file(path)
