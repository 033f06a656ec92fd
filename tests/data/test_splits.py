"""Timestamps, row filters, and splits: by entries, users and time; leave-k-out, folds, grid search over entries."""

from __future__ import annotations

import gzip
import pickle

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.model_selection import GridSearchCV, KFold

import hybridmf as hmf
from hybridmf.data import arrow_text, text
from hybridmf.errors import DuplicateEntriesError, RatingsError
from support.messages import says
from support.ratings import planted
from support.reading import read, triplets, write

pl = pytest.importorskip("polars")

# ---------------------------------------------------------------------------------------------------------- timestamps


def times(ratings):
    """{(user label, item label): time}."""
    of = ratings.with_values(np.arange(ratings.nnz))
    return {pair: ratings.timestamps[int(place)] for pair, place in triplets(of).items()}


DAT = "1::1193::5::978300760\n2::661::3::978302109\n1::2::3::978300001\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratings.dat", DAT),  # MovieLens 1M and 10M
        ("u.data", DAT.replace("::", "\t")),  # 100K
        ("ratings.csv", "userId,movieId,rating,timestamp\n" + DAT.replace("::", ",")),  # 20M and later
        ("odd.csv", "when,rating,userId,movieId\n978300760,5,1,1193\n978302109,3,2,661\n978300001,3,1,2\n"),
    ],
)
def test_movielens_files_keep_their_times(tmp_path, name, text):
    options = {"timestamp": "when"} if name == "odd.csv" else {}
    ratings = read(tmp_path, text, name, **options)
    assert times(ratings) == {(1, 1193): 978300760, (2, 661): 978302109, (1, 2): 978300001}
    assert ratings.timestamps.dtype == np.int64
    assert read(tmp_path, text, name, timestamp=None).timestamps is None
    packed = write(tmp_path, gzip.compress(text.encode()), name + ".gz")
    np.testing.assert_array_equal(hmf.Ratings.from_file(packed, **options).timestamps, ratings.timestamps)


@pytest.mark.parametrize(("user", "item"), [("1", "2"), ("ann", "x"), ('"ann"', "x")])  # one reader each
def test_nanoseconds_of_text_are_exact(tmp_path, user, item):
    exact = [1_700_000_000_123_456_789, 1_700_000_000_123_456_790]
    text = f"user,item,timestamp\n{user},{item},{exact[0]}\n7,8,{exact[1]}\n"
    assert sorted(read(tmp_path, text, value=None, timestamp="timestamp").timestamps.tolist()) == exact
    with pytest.raises(RatingsError, match=says("looks like times")):
        read(tmp_path, f"1,10,{exact[0]}\n2,20,{exact[1]}\n")
    hexadecimal = "user,item,timestamp\n1,10,0x10\n2,20,17\n"
    with pytest.raises(RatingsError, match=says("neither numbers nor dates")):
        read(tmp_path, hexadecimal, value=None, timestamp="timestamp")


def test_times_in_the_place_of_values_are_refused(tmp_path):
    log = "1,10,978300760\n2,20,978300001\n"
    with pytest.raises(RatingsError, match=says("column 2", "looks like times (978300760)", "value=None, timestamp=2")):
        read(tmp_path, log)
    assert times(read(tmp_path, log, value=None, timestamp=2)) == {(1, 10): 978300760, (2, 20): 978300001}
    assert read(tmp_path, log, value=2).user_items.data.min() > 9e8
    assert read(tmp_path, log + "3,30,5\n").nnz == 3


@pytest.mark.parametrize("label", ["", "u"])
def test_fast_and_slow_readers_keep_the_same_times(tmp_path, monkeypatch, label):
    rng = np.random.default_rng(0)
    pairs = rng.permutation(2500)[:900]
    rows = [f"{label}{p // 50},i{p % 50},{p % 5},{10**9 + 7 * k}" for k, p in enumerate(pairs.tolist())]
    path = write(tmp_path, "user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    slow = hmf.Ratings.from_file(path)
    monkeypatch.setattr(arrow_text, "SMALLEST", 1)
    fast = hmf.Ratings.from_file(path)
    np.testing.assert_array_equal(fast.timestamps, slow.timestamps)
    assert (
        times(slow)[(f"{label}{pairs[3] // 50}" if label else int(pairs[3] // 50), f"i{pairs[3] % 50}")] == 10**9 + 21
    )


@pytest.mark.parametrize("user", ["{}", "u{}", '"{}"'], ids=["integers", "labels", "quoted"])
@pytest.mark.parametrize("fast", [True, False])
def test_times_are_read_with_the_entries(tmp_path, monkeypatch, user, fast):
    rows = [f"{user.format(k)},{k % 7},{k % 5},{10**9 + 7 * k}" for k in range(1, 60)]
    path = write(tmp_path, "user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    monkeypatch.setattr(arrow_text, "SMALLEST", 1 if fast else 1 << 40)
    read = []
    for module, name in ((arrow_text, "_parse"), (text, "_plain_columns")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, name=name, original=original: read.append(name) or original(*given)
        )
    ratings = hmf.Ratings.from_file(path)
    assert times(ratings)[("u8" if user == "u{}" else 8, 1)] == 10**9 + 56
    assert read == (["_parse"] if fast and user != '"{}"' else ["_plain_columns"])  # pyarrow takes no quotes


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "datetime64[s]", "datetime64[ns]"])
def test_times_keep_their_bits_in_any_order(dtype):
    rng = np.random.default_rng(0)
    pairs = rng.permutation(600)[:300]
    given = (rng.integers(-(2**31), 2**31, 300) / (2.5 if dtype.startswith("float") else 1)).astype(dtype)
    if dtype == "int64":
        given[:] = rng.integers(-(2**63), 2**63 - 1, 300)
    ratings = hmf.Ratings.from_coo(pairs // 20, pairs % 20, timestamps=given)
    np.testing.assert_array_equal(ratings.timestamps, given[np.argsort(pairs)])
    assert ratings.timestamps.dtype == {"int32": "int64", "float32": "float64"}.get(dtype, dtype)


def test_one_odd_time_leaves_the_entries_to_pyarrow(tmp_path, monkeypatch):
    rows = [f"{k},{k % 7},1,{'soon' if k == 55 else 10**9}" for k in range(60)]
    path = write(tmp_path, "user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    monkeypatch.setattr(arrow_text, "SMALLEST", 1)
    with pytest.raises(RatingsError, match=says("column 3 (timestamp) is neither numbers nor dates")):
        hmf.Ratings.from_file(path, timestamp="timestamp")
    monkeypatch.setattr(text, "_read_records", None)
    assert hmf.Ratings.from_file(path, timestamp=None).nnz == 60


@pytest.mark.parametrize("form", ["{date}", "{date}T{clock}", "{date} {clock}.25", "{date}T{clock}Z", " {date}"])
def test_fast_and_slow_readers_keep_the_same_dates(tmp_path, monkeypatch, form):
    rows = [f"{k},{k},1,{form.format(date=f'2024-02-{k + 1:02d}', clock=f'10:00:{k:02d}')}" for k in range(29)]
    path = write(tmp_path, "user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    slow = hmf.Ratings.from_file(path).timestamps
    monkeypatch.setattr(arrow_text, "SMALLEST", 1)
    if form.strip("Z ") == form:  # pyarrow takes neither zones nor blanks
        monkeypatch.setattr(text, "_columns", None)
    fast = hmf.Ratings.from_file(path).timestamps
    assert slow is not None and fast.dtype == slow.dtype
    np.testing.assert_array_equal(fast, slow)


def test_dates_beyond_nanoseconds_keep_their_order(tmp_path):
    dates = ["2020-01-01T00:00:00.5", "9999-12-31", "1500-01-01"]  # datetime64[ns] wraps around from 1677 and 2262 on
    frame = pd.DataFrame({"user": list("abc"), "item": list("xyz"), "date": dates})
    frame.to_csv(tmp_path / "r.csv", index=False)
    objects = frame.assign(date=np.array(dates, "datetime64[us]").astype(object))
    for ratings in (
        hmf.Ratings.from_file(tmp_path / "r.csv"),
        hmf.Ratings.from_frame(frame),
        hmf.Ratings.from_frame(objects),
    ):
        assert ratings.timestamps.astype("datetime64[ms]").tolist() == objects["date"].tolist()
        assert triplets(hmf.split(ratings, 1, by="time")[1]) == {("b", "y"): 1}


@pytest.mark.parametrize("given", [["978300760", "978300761.5"], np.array([978300760, 978300761.5], object)])
def test_numbers_in_columns_of_objects_are_numbers(given):
    frame = pd.DataFrame({"user": list("ab"), "item": list("xy"), "timestamp": given})
    assert hmf.Ratings.from_frame(frame).timestamps.tolist() == [978300760, 978300761.5]


def test_times_that_no_array_holds_are_refused():
    large = np.array([1, 2**63], np.uint64)
    with pytest.raises(RatingsError, match=says("timestamps has 9223372036854775808 at entry 1", "below 2**63")):
        hmf.Ratings.from_coo([0, 1], [0, 1], timestamps=large)
    with pytest.raises(TypeError, match=says("timestamps must be numbers or datetime64", "pandas.to_datetime")):
        hmf.Ratings.from_coo([0, 1], [0, 1], timestamps=[pd.Timestamp("2020-01-01", tz="UTC")] * 2)
    frame = pd.DataFrame({"user": list("ab"), "item": list("xy"), "when": ["2020-01-01", "soon"]})
    with pytest.raises(
        RatingsError, match=says("column 'when' of frame is neither numbers nor dates", "timestamp=None")
    ):
        hmf.Ratings.from_frame(frame, value=None, timestamp="when")


def test_times_of_parts_are_joined_or_refused():
    number, second, late, fine = (
        hmf.Ratings.from_coo([0], [k], timestamps=np.array([time], dtype))
        for k, (time, dtype) in enumerate(
            [(5, "i8"), ("2020", "datetime64[s]"), ("9000", "datetime64[s]"), ("2021", "datetime64[ns]")]
        )
    )
    joined = hmf.Ratings.concat([second, fine]).timestamps
    assert joined.astype("datetime64[Y]").astype(str).tolist() == ["2020", "2021"]
    with pytest.raises(RatingsError, match=says("timestamps are dates in part 1 and numbers in part 0")):
        hmf.Ratings.concat([number, second])
    with pytest.raises(RatingsError, match=says("timestamps of part 0 go beyond datetime64[ns]", "datetime64[us]")):
        hmf.Ratings.concat([late, fine])


def test_dates_are_times(tmp_path):
    dates = "user,item,date\na,x,2024-01-02\nb,y,2024-01-03T10:00:00\n"
    ratings = read(tmp_path, dates)
    assert times(ratings)["b", "y"] == np.datetime64("2024-01-03T10:00:00")
    unclear = "user,item,date\na,x,May 4\nb,y,May 5\n"
    assert read(tmp_path, unclear).timestamps is None
    with pytest.raises(RatingsError, match=says("column 2 (timestamp) is neither numbers nor dates", "timestamp=None")):
        read(tmp_path, unclear, timestamp="date")
    assert read(tmp_path, "user,item,time,date\na,x,1,2\n", value=None).timestamps is None  # which one is unclear


def test_four_columns_without_a_header_are_times_only_if_they_look_like_it(tmp_path):
    assert read(tmp_path, "1,2,5,17\n2,1,4,12\n").timestamps is None
    assert read(tmp_path, "1,2,5,17\n2,1,4,12\n", timestamp=3).timestamps.tolist() == [17, 12]


def test_times_of_frames():
    data = {"user": ["b", "a", "a"], "item": ["x", "y", "x"], "timestamp": [30, 20, 10]}
    for frame in (pd.DataFrame(data), pl.DataFrame(data), pl.DataFrame(data).lazy()):
        ratings = hmf.Ratings.from_frame(frame)
        assert times(ratings) == {("b", "x"): 30, ("a", "y"): 20, ("a", "x"): 10}
    days = pd.DataFrame(data | {"timestamp": pd.to_datetime(["2024-01-03", "2024-01-02", "2024-01-01"])})
    assert times(hmf.Ratings.from_frame(days))["a", "x"] == np.datetime64("2024-01-01")
    gaps = pd.DataFrame(data | {"timestamp": [30, None, 10]})
    assert hmf.Ratings.from_frame(gaps).timestamps is None
    with pytest.raises(RatingsError, match="column 'timestamp' of frame is null at row 1"):
        hmf.Ratings.from_frame(gaps, timestamp="timestamp")
    with pytest.raises(ValueError, match="user, item and timestamp must be different columns"):
        hmf.Ratings.from_frame(days, timestamp="item")


def test_times_of_parquet_and_of_saved_ratings(tmp_path):
    frame = pd.DataFrame({"user": ["b", "a"], "item": ["x", "y"], "rating": [1.0, 2.0], "timestamp": [30, 20]})
    frame.to_parquet(tmp_path / "ratings.parquet")
    ratings = hmf.Ratings.from_file(tmp_path / "ratings.parquet")
    assert times(ratings) == {("b", "x"): 30, ("a", "y"): 20}
    ratings.save(tmp_path / "ratings.npz")
    for same in (hmf.Ratings.from_file(tmp_path / "ratings.npz"), pickle.loads(pickle.dumps(ratings))):
        assert times(same) == times(ratings)
    with pytest.raises(ValueError, match="which has no columns that timestamp= could name"):
        hmf.Ratings.from_file(tmp_path / "ratings.npz", timestamp=3)


@pytest.mark.parametrize(("rule", "time"), [("first", 5), ("last", 3), ("sum", 9), ("mean", 9), ("max", 9)])
def test_times_of_merged_entries(rule, time):
    ratings = hmf.Ratings.from_coo([1, 0, 1, 1], [0, 0, 0, 0], [2, 7, 8, 1], timestamps=[5, 1, 9, 3], duplicates=rule)
    assert times(ratings) == {(0, 0): 1, (1, 0): time}


def test_times_that_are_none():
    with pytest.raises(RatingsError, match="timestamps has 1 elements; expected one for each of 2"):
        hmf.Ratings.from_coo([0, 1], [0, 0], timestamps=[1])
    with pytest.raises(RatingsError, match="timestamps has no time at entry 1"):
        hmf.Ratings.from_coo([0, 1], [0, 0], timestamps=[1.0, np.nan])
    with pytest.raises(TypeError, match="timestamps must be numbers or datetime64"):
        hmf.Ratings.from_coo([0, 1], [0, 0], timestamps=["1", "2"])
    with pytest.raises(DuplicateEntriesError):
        hmf.Ratings.from_coo([0, 0], [0, 0], timestamps=[1, 2])


# --------------------------------------------------------------------------------------------------------- row filters

LOG = "user,item,behavior,seconds\na,x,play,30\nb,y,view,\na,y,play,5\nc,x,buy,1\nb,x,play,9\n"


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"behavior": "play"}, [("a", "x"), ("a", "y"), ("b", "x")]),
        ({"behavior": ["buy", "view"]}, [("b", "y"), ("c", "x")]),
        ({2: {"play"}, "user": "a"}, [("a", "x"), ("a", "y")]),
        ({"item": lambda items: items == "x"}, [("a", "x"), ("c", "x"), ("b", "x")]),
    ],
)
def test_row_filters(tmp_path, where, kept):
    path = write(tmp_path, LOG)
    frame = pd.read_csv(path)
    frame.to_parquet(tmp_path / "log.parquet")
    for ratings in (
        hmf.Ratings.from_file(path, value=None, where=where),
        hmf.Ratings.from_frame(frame, value=None, where=where),
        hmf.Ratings.from_frame(pl.read_csv(path), value=None, where=where),
        hmf.Ratings.from_file(tmp_path / "log.parquet", value=None, where=where),
    ):
        assert set(triplets(ratings)) == set(kept)
        assert ratings.user_ids.tolist() == sorted({user for user, _ in kept})
        assert ratings.item_ids.tolist() == sorted({item for _, item in kept})


def test_filters_of_numbers_come_before_other_checks(tmp_path):
    path = write(tmp_path, LOG)
    frame = pd.read_csv(path)
    played = hmf.Ratings.from_frame(frame, value="seconds", where={"behavior": "play"})  # others have no seconds
    assert triplets(played) == {("a", "x"): 30, ("a", "y"): 5, ("b", "x"): 9}
    whole = "user,item,seconds\na,x,30\nb,y,5\nb,x,9.0\n"
    for where in ({"seconds": [30, 9]}, {"seconds": lambda seconds: seconds > 5}):
        assert triplets(read(tmp_path, whole, where=where, value="seconds")) == {("a", "x"): 30, ("b", "x"): 9}
    with pytest.raises(DuplicateEntriesError, match="lines 2 and 5"):
        read(tmp_path, "user,item,kind\na,x,p\na,x,q\nb,x,q\na,x,p\n", value=None, where={"kind": "p"})


@pytest.mark.parametrize("kind", [int, str])
def test_row_filters_compare_large_integers_exactly(tmp_path, kind):
    first = 2**60 + 1
    frame = pd.DataFrame({"user": [kind(first + k) for k in range(3)], "item": list("xyz")})
    frame.to_csv(tmp_path / "log.csv", index=False)
    wanted = [first + 1, str(first + 1), [float(2**62), first + 1, 1.5], lambda users: users == kind(first + 1)]
    for where in wanted[: 4 if kind is int else 3]:
        found = hmf.Ratings.from_frame(frame, where={"user": where})
        assert found.user_ids.tolist() == [kind(first + 1)]
        if not callable(where):
            found = hmf.Ratings.from_file(tmp_path / "log.csv", where={"user": where})
            assert found.user_ids.tolist() == [first + 1]
    for where in ("2.0", 2, 2.0):
        counts = frame.assign(rating=[1, 2, 3])
        assert hmf.Ratings.from_frame(counts, where={"rating": where}).item_ids.tolist() == ["y"]


@pytest.mark.parametrize(
    ("where", "kind", "parts"),
    [
        ({"kind": "play"}, RatingsError, ("has no column 'kind' (where=)", "'behavior'")),
        ({"behavior": "sing"}, RatingsError, ("where= keeps none of 5 rows", "'behavior'", "'buy', 'play', 'view'")),
        ("play", TypeError, ("where must be a mapping from columns to values",)),
        ({"behavior": lambda column: [1, 2]}, TypeError, ("where['behavior'] must return one True or False",)),
        ({9: "play"}, ValueError, ("where must satisfy 0 <= where <= 3, got 9",)),
    ],
)
def test_filters_that_cannot_be_used(tmp_path, where, kind, parts):
    path = write(tmp_path, LOG)
    for make in (
        lambda: hmf.Ratings.from_file(path, value=None, where=where),
        lambda: hmf.Ratings.from_frame(pd.read_csv(path), value=None, where=where),
    ):
        with pytest.raises(kind, match=says(*parts)):
            make()


# -------------------------------------------------------------------------------------------------------------- splits


def timed(seed=0, shape=(12, 9)):
    matrix = planted(*shape, density=0.5, seed=seed)
    coo = matrix.tocoo()
    clock = np.random.default_rng(seed).permutation(matrix.nnz)
    return hmf.Ratings.from_coo([f"u{k:02d}" for k in coo.row], [f"i{k}" for k in coo.col], coo.data, timestamps=clock)


def assert_parts(ratings, train, test):
    """Each entry is in one part, with its value and its time; labels and shape stay."""
    for part in (train, test):
        assert part.shape == ratings.shape and part.user_ids is ratings.user_ids and part.item_ids is ratings.item_ids
    assert triplets(train) | triplets(test) == triplets(ratings)
    assert times(train) | times(test) == times(ratings)
    assert train.nnz + test.nnz == ratings.nnz


def test_split_by_time():
    ratings = timed()
    train, test = hmf.split(ratings, 0.25, by="time")
    assert_parts(ratings, train, test)
    assert test.nnz == round(ratings.nnz * 0.25)
    assert train.timestamps.max() < test.timestamps.min()
    assert ratings.split(3, by="time")[1].timestamps.tolist() != []


@pytest.mark.parametrize("by", ["time", "last"])
@pytest.mark.parametrize("times", [np.int64, "datetime64[s]"])
def test_ties_in_time_are_broken_by_the_seed(by, times):
    """Not by position: items of low positions would never be held out. Later entries still come first."""
    n_users, n_items = 200, 6
    users, items = np.repeat(np.arange(n_users), n_items), np.tile(np.arange(n_items), n_users)
    stamps = (1_700_000_000 + 60 * (items >= 2)).astype(np.int64).astype(times)  # items 2 to 5 at one time
    ratings = hmf.Ratings.from_coo(users, items, timestamps=stamps)
    size = 1 if by == "last" else n_users
    parts = [hmf.split(ratings, size, random_state=seed, by=by)[1].user_items.toarray() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0], parts[2])
    held = parts[0].sum(axis=0)
    assert held[:2].tolist() == [0, 0] and held.sum() == n_users
    assert np.all(np.abs(held[2:] - n_users / 4) < 4 * np.sqrt(n_users * 3 / 16))


@pytest.mark.parametrize("size", [1, 2, 0.3])
def test_split_by_the_last_entries_of_each_user(size):
    ratings = timed()
    train, test = hmf.split(ratings, size, by="last")
    assert_parts(ratings, train, test)
    for user in range(ratings.n_users):
        entries = np.sort(ratings[[user]].timestamps)
        held = np.sort(test[[user]].timestamps)
        count = len(entries)
        expected = (size if count > size else 0) if isinstance(size, int) else int(np.floor(count * size + 1e-9))
        np.testing.assert_array_equal(held, entries[count - expected :])


def test_split_by_user():
    ratings = timed()
    train, test = hmf.split(ratings, 0.25, random_state=0, by="user")
    assert_parts(ratings, train, test)
    users = np.diff(test.user_items.indptr) > 0
    full = np.diff(ratings.user_items.indptr)
    assert users.sum() == round(0.25 * np.count_nonzero(full))
    np.testing.assert_array_equal(np.diff(train.user_items.indptr), np.where(users, 0, full))
    again = hmf.split(ratings.user_items, 0.25, random_state=0, by="user")[1]
    np.testing.assert_array_equal(again.toarray(), test.user_items.toarray())


def test_leave_k_out():
    ratings = timed()
    for k in (1, 3):
        train, test = hmf.leave_k_out(ratings, k, random_state=0)
        assert_parts(ratings, train, test)
        degrees = np.diff(ratings.user_items.indptr)
        np.testing.assert_array_equal(np.diff(test.user_items.indptr), np.where(degrees > k, k, 0))
    drawn = {hmf.leave_k_out(ratings, 1, random_state=seed)[1].user_items.indices.tobytes() for seed in range(5)}
    assert len(drawn) == 5
    with pytest.raises(RatingsError, match="k=99 takes no entry"):
        hmf.leave_k_out(ratings, 99)


def test_k_fold():
    ratings = timed()
    folds = list(hmf.k_fold(ratings, 4, random_state=0))
    assert len(folds) == 4
    for train, test in folds:
        assert_parts(ratings, train, test)
        assert test.nnz in (ratings.nnz // 4, ratings.nnz // 4 + 1)
    assert sum(test.user_items for _, test in folds).nnz == ratings.nnz
    matrices = list(hmf.k_fold(ratings.user_items, 4, random_state=0))
    assert sp.issparse(matrices[0][0]) and matrices[1][1].nnz == folds[1][1].nnz


def test_a_frame_is_split_as_its_ratings():
    frame = pl.DataFrame({"user": list("aabb"), "item": list("xyxy"), "timestamp": [1, 2, 3, 4]})
    train, test = hmf.split(frame, 1, by="last")
    assert triplets(test) == {("a", "y"): 1, ("b", "y"): 1} and train.frame_kind == "polars"


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (lambda r: hmf.split(r, by="day"), ValueError, ("by must be one of 'random', 'user', 'item', 'time', 'last'",)),
        (
            lambda r: hmf.split(r.user_items, by="time"),
            ValueError,
            ("by='time' needs the time", "timestamp="),
        ),
        (lambda r: hmf.split(r, 12, by="user"), RatingsError, ("test_size=12 takes 12 of", "users with entries")),
        (lambda r: hmf.split(r, 99, by="last"), RatingsError, ("test_size=99 takes no entry of any user",)),
        (lambda r: hmf.split(r, 1.5, by="last"), ValueError, ("test_size must be a share below 1",)),
        (lambda r: hmf.leave_k_out(r, 0), ValueError, ("k must satisfy k >= 1",)),
        (lambda r: hmf.k_fold(r, 1), ValueError, ("n_splits must satisfy n_splits >= 2",)),
        (lambda r: hmf.k_fold(r, 10**6), RatingsError, ("n_splits=1000000 folds need as many entries",)),
    ],
)
def test_splits_that_cannot_be_made(call, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        call(timed())


@pytest.mark.parametrize("labelled", [True, False])
def test_grid_search_over_entries(labelled):
    ratings = timed(shape=(30, 20))
    ratings = ratings if labelled else hmf.Ratings(ratings.user_items)
    model = hmf.ExplicitALS(factors=2, iterations=2, random_state=0, device="cpu", num_threads=1)
    folds = KFold(3, shuffle=True, random_state=0)
    search = GridSearchCV(model, {"regularization": [0.05, 0.2]}, cv=folds).fit(ratings.entries)
    expected = []
    for train, test in folds.split(np.arange(ratings.nnz)):
        fitted = hmf.ExplicitALS(**model.get_params()).set_params(regularization=0.05).fit(ratings.entries[train])
        expected.append(fitted.score(ratings.entries[test], users="training"))
    first = search.cv_results_["params"].index({"regularization": 0.05})
    np.testing.assert_allclose([search.cv_results_[f"split{k}_test_score"][first] for k in range(3)], expected)
    assert search.best_estimator_.n_users == ratings.n_users
    assert len(ratings.entries) == ratings.nnz
