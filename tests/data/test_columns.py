"""Which column is what, in files and frames alike; tables of entries passed as matrices; lists; bounded reading."""

from __future__ import annotations

import gzip
import io
import logging
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.triplets import are_entries, named_like_entries
from hybridmf.data import lines as _lines
from hybridmf.data import text as _text
from hybridmf.data.columns import resolve_columns
from hybridmf.errors import DuplicateEntriesError, MemoryBudgetError, RatingsError
from support.ratings import planted

ROWS = [("u1", "i9", 4.0, 881250949), ("u2", "i9", 1.5, 891717742), ("u1", "i7", 3.0, 878887116)]


def triplets(ratings: Any) -> dict[tuple[Any, Any], float]:
    coo = ratings.user_items.tocoo()
    labels = ratings.user_ids[coo.row].tolist(), ratings.item_ids[coo.col].tolist()
    return dict(zip(zip(*labels, strict=True), coo.data.tolist(), strict=True))


EXPECTED = {(user, item): value for user, item, value, _ in ROWS}


def table(header: str) -> str:
    """Text of `ROWS` under a header whose columns are users (u), items (i), values (v), times (t) or other texts (x).

    Written as name/kind, with commas between.
    """
    columns = [column.rsplit("/", 1) for column in header.split(",")]
    kinds = {"u": 0, "i": 1, "v": 2, "t": 3}
    lines = [",".join(name for name, _ in columns)]
    lines += [",".join(str(row[kinds[kind]]) if kind in kinds else "x" for _, kind in columns) for row in ROWS]
    return "\n".join(lines) + "\n"


def write(folder: Path, text: str | bytes, name: str = "ratings.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def parquet(path: Path, text: str) -> Path:
    pd = pytest.importorskip("pandas")
    pd.read_csv(io.StringIO(text)).to_parquet(path)
    return path


# -------------------------------------------------------------------------------------------------------------- columns

PUBLIC = {
    "MovieLens": "userId/u,movieId/i,rating/v,timestamp/t",
    "goodbooks": "book_id/i,user_id/u,rating/v",
    "Book-Crossing": "User-ID/u,ISBN/i,Book-Rating/v",
    "Last.fm": "userID/u,artistID/i,weight/v",
    "Million Song": "user/u,song/i,play_count/v",
    "Amazon reviews": "reviewerID/u,asin/i,reviewText/x,overall/v,unixReviewTime/t",
    "Amazon fine foods": "ProductId/i,UserId/u,Score/v,Time/t",
    "Amazon customers": "marketplace/x,customer_id/u,review_id/x,product_id/i,star_rating/v,review_date/t",
    "Yelp": "review_id/x,user_id/u,business_id/i,stars/v,useful/x,date/t",
    "Netflix": "movie_id/i,customer_id/u,rating/v,date/t",
    "MyAnimeList": "username/u,anime_id/i,my_score/v",
    "BeerAdvocate": "brewery_name/x,review_time/t,review_overall/v,review_profilename/u,beer_beerid/i",
    "RecBole": "timestamp:float/t,item_id:token/i,user_id:token/u,rating:float/v",
    "with an index": "/x,user_id/u,item_id/i,rating/v",
    "capitals": "RATING/v,USER ID/u,ITEM ID/i",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_headers_of_public_data_sets(name, tmp_path):
    text = table(PUBLIC[name])
    path = write(tmp_path, text)
    assert triplets(hmf.Ratings.from_file(path)) == EXPECTED
    assert triplets(hmf.convert(path, tmp_path / "store").to_ratings()) == EXPECTED
    if name in ("MovieLens", "Netflix", "RecBole", "with an index", "capitals"):  # whose readers find columns alike
        assert triplets(hmf.Ratings.from_file(parquet(tmp_path / "r.parquet", text))) == EXPECTED
        assert triplets(hmf.convert(tmp_path / "r.parquet", tmp_path / "store2").to_ratings()) == EXPECTED


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
@pytest.mark.parametrize("header", ["book_id/i,user_id/u,rating/v", "Stars/v,date/t,ISBN/i,Reader/u"])
def test_frames_use_the_same_names(library, header):
    pd = pytest.importorskip("pandas")
    frame: Any = pd.read_csv(io.StringIO(table(header)))
    if library == "polars":
        frame = pytest.importorskip("polars").DataFrame({name: frame[name].tolist() for name in frame})
    if library == "pyarrow":
        frame = pytest.importorskip("pyarrow").table({name: frame[name].tolist() for name in frame})
    assert triplets(hmf.Ratings.from_frame(frame)) == EXPECTED


def test_times_are_no_values(tmp_path):
    text = table("user/u,item/i,timestamp/t")
    ones = dict.fromkeys(EXPECTED, 1.0)
    assert triplets(hmf.Ratings.from_file(write(tmp_path, text))) == ones
    assert triplets(hmf.Ratings.from_frame(pytest.importorskip("pandas").read_csv(io.StringIO(text)))) == ones


UNCLEAR = {
    "thing/i,user_id/u,rating/v": r"holds the items is unclear.*column 1, .* is 'user_id'.*'thing'.*user= and item=",
    "item/i,who/u,rating/v": r"column holds the users is unclear.*column 0, .* is 'item'.*'who'.*user= and item=",
    "user/u,member/u,item/i,rating/v": r"could hold the users by their names: 'user', 'member'; pass user=",
    "user/u,song_id/i,artist_id/i,plays/v": r"could hold the items by their names: 'song_id', 'artist_id'; pass item=",
    "user/u,item/i,stars/v,plays/v": r"could hold the values by their names: 'stars', 'plays'; pass value=",
    "user/u,item/i,session_id/v": r"which column holds the values is unclear.*'session_id' could be.*value=None makes",
    "user/u,time/t,latitude/v,longitude/v,location id/i": r"values is unclear.*'latitude', 'longitude' could be",
}


@pytest.mark.parametrize("header", UNCLEAR)
def test_ambiguous_names_are_refused(header, tmp_path):
    text = table(header)
    path = write(tmp_path, text)
    for read in (hmf.Ratings.from_file, lambda path, **options: hmf.convert(path, tmp_path / "store", **options)):
        with pytest.raises(RatingsError, match=UNCLEAR[header]):
            read(path)
        with pytest.raises(RatingsError, match=UNCLEAR[header]):
            read(parquet(tmp_path / "r.parquet", text))
    assert not (tmp_path / "store").exists()


def test_arguments_override_names(tmp_path):
    text = table("thing/i,user_id/u,rating/v,item/x")
    path = write(tmp_path, text)
    for options in ({"user": "user_id", "item": "thing"}, {"user": 1, "item": 0}, {"item": "thing"}, {"item": 0}):
        assert triplets(hmf.Ratings.from_file(path, **options)) == EXPECTED
        assert triplets(hmf.convert(path, tmp_path / "store", overwrite=True, **options).to_ratings()) == EXPECTED
        frame = pytest.importorskip("pandas").read_csv(path)
        assert triplets(hmf.Ratings.from_frame(frame, **options)) == EXPECTED
    swapped = hmf.Ratings.from_file(path, user="thing", item="user_id", value=None)
    assert triplets(swapped) == {(item, user): 1 for user, item in EXPECTED}


def test_without_recognized_names_places_decide_and_are_logged(tmp_path, caplog):
    text = table("who/u,what/i,much/v")
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert triplets(hmf.Ratings.from_file(write(tmp_path, text))) == EXPECTED
    assert "user = column 0 'who', item = column 1 'what', value = column 2 'much'" in caplog.text
    frame = pytest.importorskip("pandas").read_csv(io.StringIO(text))
    with pytest.raises(RatingsError, match=r"frame: which column holds the users is unclear.*'who', 'what', 'much'"):
        hmf.Ratings.from_frame(frame)


def test_a_used_column_is_not_used_twice():
    with pytest.raises(RatingsError, match="no column has a name that says items, and column 1 is taken"):
        resolve_columns("f", ("a", "b", "rating"), 3, user="b")
    with pytest.raises(RatingsError, match="items is unclear: there is no column 1"):
        resolve_columns("f", ("user",), 1)
    with pytest.raises(RatingsError, match="3 columns named 'x'"):
        resolve_columns("f", ("x", "x", "x"), 3, user="x")


def test_columns_that_share_a_name():
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pd.DataFrame([["a", "x", 1.0, 2.0]], columns=["user", "item", "rating", "rating"])
    with pytest.raises(RatingsError, match=r"frame has 2 columns named 'rating'; .*rename or drop one"):
        hmf.Ratings.from_frame(frame)
    arrays = [pa.array([each]) for each in frame.iloc[0]]
    with pytest.raises(RatingsError, match="frame has 2 columns named 'rating'"):
        hmf.Ratings.from_frame(pa.Table.from_arrays(arrays, names=list(frame.columns)))


def test_parquet_columns_that_share_a_name(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shared = pa.Table.from_arrays([pa.array(["a"]), pa.array(["x"]), pa.array(["y"])], names=["user", "item", "item"])
    pq.write_table(shared, tmp_path / "r.parquet")
    with pytest.raises(RatingsError, match=r"r.parquet has 2 columns named 'item'"):
        hmf.Ratings.from_file(tmp_path / "r.parquet")


@pytest.mark.parametrize("first", ["song,reader", "ann,game"])
def test_labels_that_look_like_names_are_no_header(first, tmp_path):
    """One such word may be a label; both together are a header."""
    ratings = hmf.Ratings.from_file(write(tmp_path, f"{first}\nbob,brazil\n"))
    assert ratings.nnz == (1 if first == "song,reader" else 2)


# ------------------------------------------------------------------------------------- entries passed as a matrix


def entries(n_users: int = 30, n_items: int = 20, nnz: int = 200, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    cells = rng.permutation(n_users * n_items)[:nnz]
    return np.column_stack((*np.divmod(cells, n_items), rng.integers(1, 6, nnz), rng.integers(10**9, 2 * 10**9, nnz)))


SMALL = {"factors": 2, "iterations": 1, "num_threads": 1, "device": "cpu"}


@pytest.mark.parametrize("width", [2, 3, 4])
def test_an_array_of_entries_is_no_matrix(width):
    array = entries()[:, :width]
    assert hmf.Ratings(sp.csr_array(array)).n_items == width  # the intended argument can be passed
    model = hmf.ExplicitALS(**SMALL).fit(planted(20, width, 0.9))
    for call in (
        hmf.ExplicitALS(**SMALL).fit, hmf.ImplicitALS(**SMALL).fit,
        hmf.metrics.PopularityRecommender().fit, model.transform,
        model.score, model.objective, hmf.Ratings, hmf.Ratings.from_matrix, hmf.split,
        lambda matrix: hmf.evaluate(model, matrix),
        lambda matrix: model.partial_fit_users(np.arange(len(matrix)), matrix),
    ):  # fmt: skip
        for passed in (array, array.astype(float), array.T, tuple(array.T)):
            with pytest.raises(RatingsError, match=r"from_coo.*from_frame.*scipy.sparse.csr_array"):
                call(passed)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
@pytest.mark.parametrize(
    "names", [("userId", "movieId", "rating"), ("asin", "reviewerID"), ("stars", "ts", "user", "item")]
)
def test_a_frame_of_entries_is_read_by_estimators_and_is_no_matrix(library, names):
    data = {name: [1, 2, 3] for name in names}
    make = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}[library]
    frame = getattr(pytest.importorskip(library), make)(data)
    model = hmf.ExplicitALS(**SMALL, random_state=0).fit(frame)
    expected = hmf.ExplicitALS(**SMALL, random_state=0).fit(hmf.Ratings.from_frame(frame))
    np.testing.assert_array_equal(model.user_factors, expected.user_factors)
    assert model.item_ids.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(model.transform(frame), expected.transform(hmf.Ratings.from_frame(frame)))
    assert model.score(frame) == expected.score(hmf.Ratings.from_frame(frame))
    for call in (hmf.Ratings, hmf.Ratings.from_matrix):
        with pytest.raises(RatingsError, match=r"one entry in each row.*Ratings.from_frame.*scipy.sparse.csr_array"):
            call(frame)
    positions = hmf.ExplicitALS(**SMALL).fit(planted(20, len(names), 0.9))
    with pytest.raises(RatingsError, match="item labels and the model only positions"):
        positions.transform(frame)


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        (("user_id", "item_id", "rating", "ts", "event", "x"), True),
        (("user", "item", "rating", "ts", "event"), False),
        (("user", "item"), True),
        (("item", "rating"), False),
    ],
)
def test_wide_frames_are_entries_by_names_of_ids(names, entries):
    assert named_like_entries(names) is entries


def test_a_sample_of_many_ratings_is_recognized_by_its_large_ids():
    rng = np.random.default_rng(0)
    sample = np.column_stack((rng.integers(1, 6041, 50), rng.integers(1, 3953, 50), rng.integers(1, 6, 50)))
    assert are_entries(sample)
    assert not are_entries(sample[:19])
    assert not are_entries(sample[:, :2])


def test_some_entries_may_repeat():
    array = entries(nnz=400)
    assert are_entries(np.concatenate((array, array[:4])))


@pytest.mark.realdata
def test_real_ratings_are_entries(data_dir):
    for path in (data_dir / "ml-100k" / "u.data.gz", data_dir / "lastfm-2k" / "user_artists.dat.gz"):
        array = np.loadtxt(path, skiprows=1)
        for rows in (array, array[:1000], array[np.random.default_rng(0).permutation(len(array))[:20000]]):
            assert are_entries(rows)


# a law of chance, which one of a thousand small matrices breaks: the same examples each time
@settings(max_examples=60)
@given(
    st.integers(1, 300), st.integers(2, 4), st.sampled_from([2, 6, 11, 101]), st.floats(0.05, 1), st.integers(0, 2**31)
)
def test_ratings_of_a_few_items_are_a_matrix(rows, columns, scale, density, seed):
    """Whole ratings of any scale, independent between items or not, observed or not."""
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, scale, (rows, columns)) * (rng.random((rows, columns)) < density)
    assert not are_entries(matrix)
    matrix[:, 1] = matrix[:, 0]
    assert not are_entries(matrix)


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(3),
        np.arange(12.0).reshape(4, 3),
        np.arange(300).reshape(100, 3),
        np.random.default_rng(0).random((200, 3)),
        np.random.default_rng(0).normal(size=(200, 2)) * 1000,
        np.random.default_rng(0).poisson(3, (500, 3)),
        np.random.default_rng(0).geometric(0.01, (500, 3)),  # play counts up to hundreds
        np.full((5, 2), np.nan),
        np.array([["a", "b"]]),
        np.zeros((0, 3)),
    ],
)
def test_small_matrices_are_no_entries(matrix):
    assert not are_entries(matrix)


def test_frames_with_item_names():
    assert not named_like_entries(["Alien", "Brazil", "rating"])
    assert not named_like_entries(["user", "customer", "rating"])
    assert not named_like_entries(["user", "item", "count", "cat", "dog"])  # words of a text, for example
    frame = pytest.importorskip("pandas").DataFrame(planted(20, 3, 0.9).toarray(), columns=["Alien", "Brazil", "Heat"])
    assert hmf.ExplicitALS(**SMALL).fit(frame).n_items == 3


# ----------------------------------------------------------------------------------------------------------- duplicates


def test_duplicates_are_counted(tmp_path):
    rows = [("a", "x", 1), ("a", "x", 2), ("b", "y", 5), ("b", "y", 5), ("b", "y", 5), ("c", "z", 1), ("c", "w", 2)]
    text = "".join(f"{u},{i},{v}\n" for u, i, v in rows)
    found = "2 pairs repeat, 1 of them with different values"
    path = write(tmp_path, text)
    for call in (
        lambda: hmf.Ratings.from_file(path),
        lambda: hmf.convert(path, tmp_path / "store", slab_bytes=8),  # each user in a bucket of its own
        lambda: hmf.Ratings.from_coo(*zip(*rows, strict=True)),
        lambda: hmf.Ratings.from_matrix(sp.coo_array(([1, 2, 5, 5, 5, 1], ([0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 2])))),
        lambda: hmf.ExplicitALS(**SMALL).fit(sp.csr_array(([1, 2, 5, 5, 5.0], [0, 0, 1, 1, 1], [0, 2, 5]))),
    ):
        with pytest.raises(DuplicateEntriesError, match=f'{found}. Merge them with duplicates="sum", "mean", "first"'):
            call()
    with pytest.raises(DuplicateEntriesError, match="1 pair repeats, 0 of them"):
        hmf.Ratings.from_coo(["a", "a"], ["x", "x"], [3, 3])


def test_the_first_of_duplicates_everywhere(tmp_path):
    rows = [("b", "y", 5.0), ("a", "x", 3.0), ("b", "y", 2.0), ("a", "x", 4.0)]
    expected = {("a", "x"): 3, ("b", "y"): 5}
    path = write(tmp_path, "".join(f"{u},{i},{v}\n" for u, i, v in rows))
    columns = dict(zip(("user", "item", "rating"), zip(*rows, strict=True), strict=True))
    frame = pytest.importorskip("pandas").DataFrame(columns)
    assert triplets(hmf.Ratings.from_coo(*columns.values(), duplicates="first")) == expected
    assert triplets(hmf.Ratings.from_frame(frame, duplicates="first")) == expected
    assert triplets(hmf.Ratings.from_file(path, duplicates="first")) == expected
    assert triplets(hmf.convert(path, tmp_path / "store", duplicates="first").to_ratings()) == expected


# ---------------------------------------------------------------------------------------------------------------- lists

LISTS = {(0, 7): 1, (0, 20): 1, (0, 9): 1, (3, 7): 1, (12, 20): 1, (12, 4): 1}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("0 7 20 9\n3 7\n12 20 4 \n5\n", {}),
        ("0\t7,20,9\n3\t7\n12\t20,4\n5\t\n", {}),
        ("0, 7, 20, 9\n\n# note\n3, 7\n12, 20, 4\n", {}),
        ("user items\n0 7 20 9\n3 7\n12 20 4\n", {"header": True}),
        ("0;7;20;9\n3;7\n12;20;4;\n", {"separator": ";", "value": None}),
        ("0 7 20\n0 9\n3 7\n12 20 4", {"separator": " "}),
    ],
)
def test_lists_of_items(text, options, tmp_path):
    path = write(tmp_path, text, "train.txt")
    ratings = hmf.Ratings.from_file(path, format="lists", **options)
    assert triplets(ratings) == LISTS
    assert ratings.user_ids.dtype == ratings.item_ids.dtype == np.int64
    store = hmf.convert(path, tmp_path / "store", format="lists", slab_bytes=8, **options)
    assert triplets(store.to_ratings()) == LISTS
    packed = write(tmp_path, gzip.compress(text.encode()), "packed")
    assert triplets(hmf.Ratings.from_file(packed, format="lists", **options)) == LISTS


def test_lists_of_text(tmp_path):
    ratings = hmf.Ratings.from_file(write(tmp_path, "ann -0 0\nbob 007\n"), format="lists")
    assert triplets(ratings) == {("ann", "-0"): 1, ("ann", "0"): 1, ("bob", "007"): 1}


@pytest.mark.parametrize(
    ("text", "options", "error", "words"),
    [
        ("1 2 3\n4 5 6 5\n", {}, DuplicateEntriesError, r"user 4, item 5\): line 2, values 1 and 1"),
        ("1 2 3\n4 5\n1 2\n", {}, DuplicateEntriesError, r"user 1, item 2\): lines 1 and 3"),
        ("1\n2\n", {}, RatingsError, "holds no ratings: no line has an item after its user"),
        ("\n", {}, RatingsError, "only blank lines"),
        ("1 2\n", {"user": 1}, ValueError, r'user=1 names a column, and lines of format="lists" have none'),
        ("1 2\n", {"value": "rating"}, ValueError, "value='rating' names a column"),
        ("1 2\n", {"separator": 3}, TypeError, "separator must be a string"),
    ],
)
def test_lists_that_cannot_be_used(text, options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        hmf.Ratings.from_file(write(tmp_path, text), format="lists", **options)


@pytest.mark.parametrize(
    "text",
    [
        "0 7 20 9\n3 7\n12 20 4\n13 1 2 3 4\n14\n",  # no width is usual
        "0 7 20\n3 7 8\n12 20 4\n13 1 2 3 4\n",  # three fields are
        "0,7,20,9\n3,7\n12,20,4\n13,1,2,3,4\n",
        "0\t7 20 9\n3\t7\n12\t20 4\n",
        "0\t7,20,9\n3\t7\n12\t20,4\n",
    ],
)
def test_files_of_lists_are_named(text, tmp_path):
    with pytest.raises(RatingsError, match=r'(unequal numbers of fields|several items in a field).*format="lists"'):
        hmf.Ratings.from_file(write(tmp_path, text))


# ------------------------------------------------------------------------------------------------------------ exact ids


@pytest.mark.parametrize(
    ("odd", "separator", "side"),  # each spelling and each separator on both sides
    [
        (odd, separator, (j + k) % 2)
        for j, odd in enumerate(["-0", "007", "+1", "-01", "00"])
        for k, separator in enumerate([",", "::", "\t", " ", " \t"])
    ],
)
def test_ids_are_distinguished_by_their_text(odd, separator, side, tmp_path):
    rows = [["0", "0", "5"], ["1", "1", "4"], ["7", "7", "3"], ["-1", "-1", "2"], ["8", "8", "1"]]
    rows[-1][side] = odd
    path = write(tmp_path, "".join(separator.join(row) + "\n" for row in rows), "r.txt")
    for ratings in (hmf.Ratings.from_file(path), hmf.convert(path, tmp_path / "store").to_ratings()):
        ids = (ratings.user_ids, ratings.item_ids)
        assert sorted(ids[side].tolist()) == sorted(row[side] for row in rows)
        assert sorted(ids[1 - side].tolist()) == [-1, 0, 1, 7, 8]


# --------------------------------------------------------------------------------------------------------------- memory


@settings(max_examples=40)
@given(st.text(st.sampled_from("a,1 \t\n\n\n"), max_size=60))
def test_numbered_lines_are_those_of_the_text(text):
    lines = _lines.Lines(_lines.bounded_lines(io.StringIO(text)), "f", None)
    found = [(lines.last, line) for line in lines]
    every = enumerate(io.StringIO(text), 1)
    assert found == [(number, line) for number, line in every if line.strip()]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_blocks_hold_whole_lines(size):
    text = "\n\n1,2,3\n\n   \n\n\n4,5,6\n7,8,9"
    numbers, blocks = zip(*_lines.line_blocks(io.StringIO(text), "f", size), strict=True)
    for number, block in zip(numbers, blocks, strict=True):
        assert "\n".join(text.split("\n")[number - 1 :]).startswith(block)
    assert not any(block.isspace() for block in blocks)
    assert "".join("".join(blocks).split()) == "".join(text.split())
    assert all(block.endswith("\n") for block in blocks[:-1])


LONG = {
    "text": ("1,2,3\n\n1,3,{}\n", {}),
    "text with a long first line": ("{},3\n", {}),
    "text of labels": ("a,2,3\nb,{},4\n", {}),
    "lists": ("1 2 3\n\n1 {}\n", {"format": "lists"}),
    "mtx": ("%%MatrixMarket matrix coordinate real general\n\n2 {} 3\n", {}),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("block", [8, 1 << 16])
def test_a_line_without_end_is_refused(kind, block, tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "MAX_LINE", 1000)
    monkeypatch.setattr(_text, "BLOCK_CHARS", block)
    text, options = LONG[kind]
    number = text[: text.index("{")].count("\n") + 1
    path = write(tmp_path, gzip.compress(text.format("9" * 3000).encode()), "r.gz")
    for read in (hmf.Ratings.from_file, lambda path, **options: hmf.convert(path, tmp_path / "store", **options)):
        with pytest.raises(RatingsError, match=rf"r.gz, line {number} has more than 1,000 characters"):
            read(path, **options)


def test_a_long_line_of_a_matrix_is_refused_by_convert(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "MAX_LINE", 1000)
    text = f"%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 {'9' * 3000000}\n"
    with pytest.raises(RatingsError, match=r"r.mtx, line 3 has more than 1,000 characters"):
        hmf.convert(write(tmp_path, text, "r.mtx"), tmp_path / "store", memory_limit="1MiB")


def test_a_packed_line_without_end_takes_little_memory(tmp_path):
    path = write(tmp_path, gzip.compress(b"1,2,3\n1,3," + b"9" * 10**8 + b"\n", 1), "r.gz")
    tracemalloc.start()
    try:
        with pytest.raises(RatingsError, match="line 2 has more than 16,777,216 characters"):
            hmf.Ratings.from_file(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 10**7
    finally:
        tracemalloc.stop()


def test_blank_lines_are_passed_over(tmp_path, monkeypatch):
    """Python sees each line with text and no blank one, and numbers stay right."""
    text = "\n" * 200_000 + "a,x,1\n" + "\n" * 200_000 + "b,y,oops\n"
    path = write(tmp_path, gzip.compress(text.encode()), "r.gz")
    seen = []
    original = _lines.Lines.__next__
    monkeypatch.setattr(_lines.Lines, "__next__", lambda lines: seen.append(original(lines)) or seen[-1])
    with pytest.raises(RatingsError, match="line 400002 has the value 'oops'"):
        hmf.Ratings.from_file(path)
    assert set(seen) == {"a,x,1\n", "b,y,oops\n"}
    blocks = list(_lines.line_blocks(io.StringIO("\n" * 10_000 + "1,2,3\n"), "f", 100))
    assert blocks == [(10_001, "1,2,3\n")]
    path = write(tmp_path, gzip.compress(("\n" * 200_000 + "1,2,3\n").encode()), "integers.gz")
    assert triplets(hmf.Ratings.from_file(path)) == {(1, 2): 3}


def test_arrays_of_an_archive_are_measured_before_they_are_loaded(tmp_path, monkeypatch):
    """A few packed bytes may unpack to more than there is memory."""
    path = tmp_path / "r.npz"
    hmf.Ratings(np.eye(3)).save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (members | {"data.npy": header.getvalue() + bytes(1000)}).items():
            archive.writestr(name, content)
    monkeypatch.setattr(np, "load", None)  # nothing is loaded
    with pytest.raises(MemoryBudgetError, match=r"r.npz has 4,000,000,0\d\d bytes? of arrays|r.npz has .* of arrays"):
        hmf.Ratings.from_file(path)


def test_arrays_that_fit_are_loaded(tmp_path, monkeypatch):
    path = tmp_path / "r.npz"
    ratings = hmf.Ratings(planted(), user_ids=[f"u{k}" for k in range(60)])
    ratings.save(path)
    needed = sum(part.nbytes for part in (ratings.user_items.data, ratings.user_items.indices))
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: needed // 2)
    with pytest.raises(MemoryBudgetError, match=r"r.npz has .* of arrays by its header.*convert text, Parquet"):
        hmf.Ratings.from_file(path)
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 10 * needed)
    assert hmf.Ratings.from_file(path).nnz == ratings.nnz


def test_a_separator_that_separates_nothing(tmp_path):
    with pytest.raises(RatingsError, match="single column; pass separator="):
        hmf.Ratings.from_file(write(tmp_path, "user,item\n1,2\n"), separator="|")
