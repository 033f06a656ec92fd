"""Weights of entries: given, read, merged, kept with their entries, and by age."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.errors import DuplicateEntriesError, RatingsError
from support.messages import says

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pq = pytest.importorskip("pyarrow.parquet")

USERS, ITEMS, VALUES, TIMES = list("abacb"), list("xxyzz"), [5, 3, 4, 1, 2], [10, 20, 30, 40, 50]
WEIGHTS = [1.0, 0.5, 2.0, 4.0, 0.25]
BY_PAIR = dict(zip(zip(USERS, ITEMS, strict=True), WEIGHTS, strict=True))


def small(**changes):
    return hmf.Ratings.from_coo(USERS, ITEMS, VALUES, **{"timestamps": TIMES, "weights": WEIGHTS} | changes)


def weights_by_pair(ratings):
    frame = ratings.to_frame("polars")
    return {(user, item): weight for user, item, weight in frame.select("user", "item", "weight").iter_rows()}


# ------------------------------------------------------------------------------------------------------------- sources


def test_in_the_order_of_the_entries():
    ratings = small()
    assert weights_by_pair(ratings) == BY_PAIR and ratings.weights.dtype == np.float32
    assert weights_by_pair(small(weights=None).with_weights(ratings.weights)) == BY_PAIR
    assert small(weights=None).weights is None and ratings.with_weights(None).weights is None
    assert "weight" not in small(weights=None).to_frame("polars").columns


FRAME = {"user": USERS, "item": ITEMS, "weight": WEIGHTS, "value": VALUES}


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame, pl.LazyFrame])
def test_column_of_a_frame(kind):
    assert weights_by_pair(hmf.Ratings.from_frame(kind(FRAME), weight="weight")) == BY_PAIR
    plain = hmf.Ratings.from_frame(kind({name: FRAME[name] for name in ("user", "item", "weight")}), weight="weight")
    assert weights_by_pair(plain) == BY_PAIR and set(plain.user_items.data) == {1}
    kept = hmf.Ratings.from_frame(kind(FRAME), weight=2, where={"item": ["x", "y"]})
    assert weights_by_pair(kept) == {pair: weight for pair, weight in BY_PAIR.items() if pair[1] != "z"}


def rows_of(frame, order):
    return [[frame[name][k] for name in order] for k in range(5)]


@pytest.mark.parametrize("compression", [".csv", ".csv.gz"])
def test_column_of_text(tmp_path, compression):
    path = tmp_path / f"ratings{compression}"
    pd.DataFrame(FRAME).to_csv(path, index=False)
    assert weights_by_pair(hmf.Ratings.from_file(path, weight="weight")) == BY_PAIR
    some = hmf.Ratings.from_file(path, weight="weight", where={"item": "x"})
    assert weights_by_pair(some) == {pair: weight for pair, weight in BY_PAIR.items() if pair[1] == "x"}
    pd.DataFrame(FRAME)[["user", "item", "value", "weight"]].to_csv(path, index=False, header=False)
    assert weights_by_pair(hmf.Ratings.from_file(path, weight=3)) == BY_PAIR
    pd.DataFrame(FRAME)[["user", "item", "weight"]].to_csv(path, index=False, header=False)
    assert weights_by_pair(hmf.Ratings.from_file(path, weight=2)) == BY_PAIR


def test_columns_of_parquet_and_json(tmp_path):
    frame = pl.DataFrame(FRAME)
    frame.write_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in frame.to_dicts()))
    for name in ("a.parquet", "a.jsonl"):
        assert weights_by_pair(hmf.Ratings.from_file(tmp_path / name, weight="weight")) == BY_PAIR
    parts = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for path, rows in zip(parts, (frame[:2], frame[2:]), strict=True):
        rows.write_csv(path)
    assert weights_by_pair(hmf.Ratings.from_file(parts, weight="weight")) == BY_PAIR


def test_weights_of_rows_that_are_left_out_are_not_read(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,value,weight\na,x,1,2\n,x,1,none\nb,y,1,nan\n")
    ratings = hmf.Ratings.from_file(path, weight="weight", missing="drop", where={"item": "x"})
    assert weights_by_pair(ratings) == {("a", "x"): 2}


def test_bad_weights(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,value,weight\na,x,1,2\nb,y,1,heavy\n")
    np.savez(tmp_path / "a.npz", a=1)
    for call, error, parts in (
        (lambda: small(weights=[1, 2]), RatingsError, ("weights has 2 elements; expected one for each of 5",)),
        (lambda: small(weights=[1, 0, -1, 2, 3]), RatingsError, ("weights has 2 of 5 values", "0 at entry 1")),
        (lambda: small(weights=[1, np.nan, 1, 2, 3]), RatingsError, ("weights has 1 of 5 values", "nan at entry 1")),
        (lambda: small(weights=[1, 1e39, 1, 2, 1e-60]), RatingsError, ("weights has 2 of 5 values",)),
        (lambda: small(weights=list("abcde")), TypeError, ("weights must be numbers",)),
        (lambda: small().with_weights(np.ones((5, 1))), RatingsError, ("weights must be one-dimensional",)),
        (
            lambda: hmf.Ratings.from_file(path, weight="weight"),
            RatingsError,
            ("'weight'", "1 of 2 values", "'heavy' at entry 1"),
        ),
        (lambda: hmf.Ratings.from_file(path, weight="w"), RatingsError, ("no column 'w' (weight='w')",)),
        (lambda: hmf.Ratings.from_file(path, weight="value", value="value"), ValueError, ("different columns",)),
        (lambda: hmf.Ratings.from_file(path, weight=1, format="lists"), ValueError, ("weight= could name",)),
        (lambda: hmf.convert(small(), tmp_path / "store"), RatingsError, ("stores do not hold", "with_weights(None)")),
        (lambda: hmf.Ratings.from_frame(pd.DataFrame(FRAME)), RatingsError, ("2 columns that could hold the values",)),
    ):
        with pytest.raises(error, match=says(*parts)):
            call()


# -------------------------------------------------------------------------------------------------------------- merging


def merged(rule, values=(2, 4, 9), weights=(1.0, 3.0, 7.0)):
    ratings = hmf.Ratings.from_coo([0, 0, 1], [0, 0, 0], list(values), weights=list(weights), duplicates=rule)
    return ratings.user_items.data.tolist(), ratings.weights.tolist()


def test_series_are_paired_by_their_index():
    frame = pd.DataFrame({"user": USERS, "item": ITEMS, "rating": VALUES, "w": WEIGHTS})
    columns = [frame[name] for name in ("user", "item", "rating")]
    whole = hmf.Ratings.from_coo(*columns, weights=frame["w"])
    assert weights_by_pair(whole) == BY_PAIR
    for turned in (frame["w"][::-1], frame["w"][:4]):
        with pytest.raises(RatingsError, match="users and weights are series with different indexes"):
            hmf.Ratings.from_coo(*columns, weights=turned)
    model = hmf.ExplicitALS(2, iterations=1).fit(whole)
    for call in (lambda *pairs: model.predict(*pairs, labels=True), hmf.metrics.rmse):
        with pytest.raises(RatingsError, match="are series with different indexes"):
            call(columns[0], columns[1][::-1])
    # rows of a frame are not in the order of the entries
    for ratings, weights in ((whole.with_weights(None), frame["w"]), (frame[["user", "item", "rating"]], WEIGHTS)):
        with pytest.raises(TypeError, match=r"weights is a (series|vector)"):
            hmf.ExplicitALS(2).fit(ratings, weights=weights)
    for series in (frame["w"], pl.Series(WEIGHTS)):
        with pytest.raises(TypeError, match=r"weights is a series.*Ratings.from_frame\(frame, weight=\)"):
            whole.with_weights(series)
    with pytest.raises(RatingsError, match="weights is masked at position 1"):
        hmf.ExplicitALS(2).fit(small(weights=None), weights=np.ma.masked_less(WEIGHTS, 1))


def test_merged_entries():
    assert merged("mean") == ([3.5, 9], [4, 7])
    assert merged("sum") == ([6, 9], [pytest.approx((2 * 1 + 4 * 3) / 6), 7])
    assert merged("first") == ([2, 9], [1, 7])
    assert merged("last") == ([4, 9], [3, 7])
    assert merged("max") == ([4, 9], [3, 7])
    assert merged("max", (4, 4, 9), (3.0, 1.0, 7.0)) == ([4, 9], [3, 7])
    assert merged("sum", (0, 0, 9)) == ([0, 9], [2, 7])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 8)), min_size=1, max_size=6), st.floats(-3, 3))
def test_the_mean_keeps_differences_of_squared_errors(entries, prediction):
    values, weights = np.array(entries, dtype=float).T
    ratings = hmf.Ratings.from_coo([0] * len(values), [0] * len(values), values, weights=weights, duplicates="mean")
    mean, weight = float(ratings.user_items.data[0]), float(ratings.weights[0])

    def rise(value, heavy):  # of the error, from a prediction of 0
        return np.sum(heavy * ((value - prediction) ** 2 - value**2))

    assert rise(mean, weight) == pytest.approx(rise(values, weights), rel=1e-5, abs=1e-4)


def test_repeated_rows():
    twice = {name: column + column[:1] for name, column in FRAME.items()}
    assert weights_by_pair(hmf.Ratings.from_frame(pd.DataFrame(twice), weight="weight")) == BY_PAIR
    twice["weight"] = [*WEIGHTS, 3.0]  # another observation
    with pytest.raises(DuplicateEntriesError, match=rf"rows 0 and 5, weights {WEIGHTS[0]:g} and 3, values"):
        hmf.Ratings.from_frame(pd.DataFrame(twice), weight="weight")


# -------------------------------------------------------------------------------------------------- with their entries


def test_weights_stay_with_their_entries(tmp_path):
    ratings = small()
    path = tmp_path / "ratings.npz"
    ratings.save(path)
    for same in (hmf.Ratings.from_file(path), hmf.Ratings(ratings), ratings[[2, 0, 1]], ratings.with_values(np.log1p)):
        assert weights_by_pair(same) == BY_PAIR
    frame = ratings.to_frame("pandas")
    assert weights_by_pair(hmf.Ratings.from_frame(frame, weight="weight")) == BY_PAIR
    core = hmf.Ratings.from_coo(list("aabbc"), list("xyxyz"), weights=[1, 2, 3, 4, 5]).k_core(2)
    assert weights_by_pair(core) == {("a", "x"): 1, ("a", "y"): 2, ("b", "x"): 3, ("b", "y"): 4}
    for train, test in (ratings.split(0.4, 0), ratings.split(0.4, 0, by="time"), hmf.leave_k_out(ratings, 1, 0)):
        parts = [weights_by_pair(part) for part in (train, test)]
        assert parts[0] | parts[1] == BY_PAIR and len(parts[0]) + len(parts[1]) == 5
    assert weights_by_pair(ratings.entries[[1, 3]]).items() <= BY_PAIR.items()
    assert weights_by_pair(ratings.binarize(4)) == {("a", "x"): 1, ("a", "y"): 2}
    assert ratings.bm25_weight().weights is ratings.weights


def test_concat():
    more = hmf.Ratings.from_coo(["d"], ["x"])
    joined = hmf.Ratings.concat([more, small()])
    assert weights_by_pair(joined) == BY_PAIR | {("d", "x"): 1}
    assert hmf.Ratings.concat([more, small(weights=None)]).weights is None


# ------------------------------------------------------------------------------------------------------------------ age


def test_time_decay(caplog):
    ratings = small(weights=None)
    by_pair = dict(zip(BY_PAIR, 0.5 ** ((50 - np.array(TIMES)) / 20), strict=True))
    assert weights_by_pair(ratings.time_decay(20)) == pytest.approx(by_pair)
    later = weights_by_pair(ratings.time_decay(20, now=70))
    assert later == pytest.approx({pair: weight / 2 for pair, weight in by_pair.items()})
    both = weights_by_pair(small().time_decay(20))
    assert both == pytest.approx({pair: weight * BY_PAIR[pair] for pair, weight in by_pair.items()})
    assert ratings.time_decay(20).user_items.data.tolist() == ratings.user_items.data.tolist()
    assert not caplog.records
    assert ratings.time_decay(0.01).weights.min() == np.float32(1e-6)
    assert "4 of 5 entries are so old that they weigh 1e-06; half_life=0.01" in caplog.text


def test_time_decay_of_dates():
    days = np.array(TIMES, dtype="timedelta64[D]") + np.datetime64("2026-01-01")
    ratings = small(weights=None, timestamps=days)
    by_pair = dict(zip(BY_PAIR, 0.5 ** ((50 - np.array(TIMES)) / 20), strict=True))
    for half_life in (np.timedelta64(20, "D"), datetime.timedelta(days=20), pd.Timedelta(days=20)):
        for now in (None, "2026-02-20", days[-1], datetime.datetime(2026, 2, 20)):
            assert weights_by_pair(ratings.time_decay(half_life, now=now)) == pytest.approx(by_pair)


def test_time_decay_refuses():
    numbers, dates = small(), small(timestamps=np.array(TIMES, dtype="M8[D]"))
    month = np.timedelta64(30, "D")
    for ratings, arguments, error, parts in (
        (small(timestamps=None), (20,), ValueError, ("time_decay needs the time of each entry",)),
        (numbers, (0,), ValueError, ("half_life must be > 0",)),
        (numbers, ("20",), TypeError, ("half_life must be a real number",)),
        (numbers, (month,), TypeError, ("half_life must be a number in the unit of timestamps",)),
        (dates, (20,), TypeError, ("half_life must be a timedelta", "numpy.timedelta64(30, 'D')")),
        (dates, (np.timedelta64(1, "M"),), TypeError, ("half_life must have a fixed length",)),
        (dates, (-month,), ValueError, ("half_life in microseconds must be > 0",)),
        (dates, (np.timedelta64("NaT"),), ValueError, ("half_life in microseconds must be finite",)),
        (numbers, (20, 30), ValueError, ("now=30 is before 2 of 5 timestamps, the latest of which is 50",)),
        (dates, (month, "soon"), TypeError, ("now must be a date", "'soon'")),
        (dates, (month, 30), TypeError, ("now must be a date",)),
    ):
        with pytest.raises(error, match=says(*parts)):
            ratings.time_decay(arguments[0], now=arguments[1] if len(arguments) > 1 else None)


def test_dates_written_as_numbers_have_no_age():
    days = np.array([20240131, 20240201, 20251231])
    ratings = hmf.Ratings.from_coo([0, 1, 2], [0, 0, 0], timestamps=days)
    with pytest.raises(ValueError, match=r"look like dates.*to_datetime"):
        ratings.time_decay(half_life=30)
    seconds = hmf.Ratings.from_coo([0, 1, 2], [0, 0, 0], timestamps=np.array([20240131, 20240199, 20251231]))
    assert seconds.time_decay(half_life=30).weights[-1] == 1
