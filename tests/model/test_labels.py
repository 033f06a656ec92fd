"""Labels at serving time, and recommendations as frames and files."""

from __future__ import annotations

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import hybridmf as hmf
from hybridmf.core import frames
from hybridmf.core.progress import progress_bar
from hybridmf.errors import UnknownLabelError
from hybridmf.model import tables
from support.messages import says
from support.ratings import planted
from support.served_models import EMPTY_USER, N_ITEMS, M, fitted, labelled, make

pl = pytest.importorskip("polars")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "model.safetensors"
    make("implicit").fit(labelled()).save(path)
    return hmf.load(path)


def names(ids):
    return np.array([None if k < 0 else f"i{k}" for k in ids.ravel()], dtype=object).reshape(ids.shape)


def test_a_loaded_model_translates_labels(model):
    assert model.user_index("u7") == 7
    np.testing.assert_array_equal(model.item_index(["i3", "i1"]), [3, 1])
    np.testing.assert_array_equal(model.user_ids, [f"u{k}" for k in range(M)])
    np.testing.assert_array_equal(model.item_ids, model.item_ids_)
    with pytest.raises(UnknownLabelError, match="unknown user label 'zoe'"):
        model.user_index("zoe")
    plain = fitted("implicit")
    assert plain.user_ids is None is plain.item_ids
    assert plain.item_index(4) == 4
    with pytest.raises(ValueError, match="labels has 40 at position 0"):
        plain.item_index(N_ITEMS)


def test_labels_in_and_out(model):
    users, candidates = [5, EMPTY_USER, 2], np.arange(0, N_ITEMS, 3)
    options = {"N": 16, "filter_items": [3, 6], "items": candidates}
    ids, scores = model.recommend(users, **options)
    by_label = options | {"filter_items": ["i3", "i6"], "items": [f"i{k}" for k in candidates]}
    found, values = model.recommend([f"u{k}" for k in users], labels=True, **by_label)
    assert found.dtype == object and None in found and isinstance(found[0, 0], str)
    np.testing.assert_array_equal(found, names(ids))
    np.testing.assert_array_equal(values, scores)
    one, _ = model.recommend("u5", labels=True, **by_label)
    np.testing.assert_array_equal(one, found[0])
    for several in (dict.fromkeys(["u5"]), iter(["u5"]), {"u5"}):
        np.testing.assert_array_equal(model.recommend(several, labels=True, **by_label)[0], found[:1])
    rows = labelled(planted(M, N_ITEMS, seed=3))
    again, _ = model.recommend("u5", rows, labels=True, recalculate_user=True)
    np.testing.assert_array_equal(again, model.recommend_new(rows, labels=True)[0][5])
    similar, _ = model.similar_items("i3", N=4, labels=True)
    np.testing.assert_array_equal(similar, names(model.similar_items(3, N=4)[0]))
    assert similar[0] == "i3"
    assert model.similar_users(["u1", "u2"], N=2, labels=True)[0][:, 0].tolist() == ["u1", "u2"]
    for call in (
        lambda: model.recommend("zoe", labels=True),
        lambda: model.recommend(0, labels=True),
        lambda: model.similar_items(3, labels=True),
    ):
        with pytest.raises(UnknownLabelError, match=r"userid: unknown user label|itemid: unknown item label"):
            call()


def test_integer_labels_are_not_positions():
    ratings = labelled(users=np.arange(M) + 1, items=np.arange(N_ITEMS) + 10)
    model = make("implicit").fit(ratings)
    found, scores = model.recommend(6, labels=True)
    ids, expected = model.recommend(5)
    assert found.tolist() == (ids + 10).tolist() and type(found[0]) is int
    np.testing.assert_array_equal(scores, expected)


def test_without_labels_positions_are_the_labels():
    model = fitted("implicit")
    assert model.recommend(5, labels=True)[0].tolist() == model.recommend(5)[0].tolist()
    assert model.recommend_table([5], N=3)["item"].tolist() == model.recommend(5, N=3)[0].tolist()


def expected_rows(model, **options):
    ids, scores = model.recommend(np.arange(M), **options)
    return [
        (f"u{user}", rank, f"i{item}", score)
        for user in range(M)
        for rank, (item, score) in enumerate(zip(ids[user], scores[user], strict=True), 1)
        if item >= 0
    ]


def rows_of(frame):
    columns = nw.from_native(frame).to_dict(as_series=False)
    assert list(columns) == ["user", "rank", "item", "score"]
    return list(zip(*columns.values(), strict=True))


@pytest.mark.parametrize("backend", frames.KINDS)
def test_tables_hold_what_recommend_returns(model, backend, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "BLOCK_USERS", 7)
    options = {"N": 35, "items": np.arange(N_ITEMS - 4)}  # more than some users have left
    by_label = options | {"items": [f"i{k}" for k in range(N_ITEMS - 4)]}
    expected = expected_rows(model, **options)
    assert len(expected) < 35 * M
    everybody = model.recommend_all(backend=backend, **by_label)
    assert frames.kind_of(everybody) == backend
    assert rows_of(everybody) == expected
    some = model.recommend_table(["u9", "u2"], backend=backend, **by_label)
    assert rows_of(some) == [row for user in ("u9", "u2") for row in expected if row[0] == user]
    for name, read in (("top.parquet", pa.parquet.read_table), ("top.arrow", pa.feather.read_table)):
        assert model.recommend_all(tmp_path / name, **by_label) is None
        assert rows_of(read(tmp_path / name)) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["top.arrow", "top.parquet"]
    assert model.recommend_table(["u9", "u2"], path=tmp_path / "top.parquet", **by_label) is None
    assert rows_of(pa.parquet.read_table(tmp_path / "top.parquet")) == rows_of(some)
    positions = model.recommend_all(backend=backend, labels=False, **options)
    assert [f"i{row[2]}" for row in rows_of(positions)] == [row[2] for row in expected]
    assert rows_of(model.recommend_table([], backend=backend)) == []


def test_seen_items_in_tables(model, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK_USERS", 7)
    other = planted(M, N_ITEMS, density=0.5, seed=8)
    for seen in (other, labelled(other)):
        table = model.recommend_table(user_items=seen, N=N_ITEMS)
        assert rows_of(table) == expected_rows(model, user_items=other, N=N_ITEMS)
    table = model.recommend_all(filter_already_liked_items=False, cold_users="mask", N=3)
    assert rows_of(table) == expected_rows(model, filter_already_liked_items=False, cold_users="mask", N=3)


def test_frames_are_of_the_kind_that_came_in(model, tmp_path):
    frame = pl.DataFrame({"user": ["a", "a", "b"], "item": ["x", "y", "x"]})
    options = {"factors": 1, "iterations": 1, "random_state": 0, "device": "cpu"}
    own = hmf.ImplicitALS(**options).fit(hmf.split(hmf.Ratings.from_frame(frame), 1, random_state=0)[0])
    own.save(tmp_path / "model.safetensors")
    for each in (own, hmf.load(tmp_path / "model.safetensors")):
        assert frames.kind_of(each.recommend_all()) == "polars"
    assert frames.kind_of(own.recommend_table(pd.Series(["a"]))) == "pandas"
    assert frames.kind_of(model.recommend_table(pl.Series(["u1"]))) == "polars"
    assert frames.kind_of(model.recommend_table("u1")) == "pandas"


def test_tables_refuse(model, tmp_path, monkeypatch):
    for call, kind, parts in (
        (lambda: model.recommend_all(tmp_path / "top.csv"), ValueError, ("path must end in one of .parquet",)),
        (lambda: model.recommend_all(backend="dask"), ValueError, ("backend must be one of 'pandas', 'polars'",)),
        (lambda: model.recommend_table("zoe"), UnknownLabelError, ("userid: unknown user label 'zoe'",)),
        (lambda: model.recommend_table(N=0), ValueError, ("N must satisfy 1 <= N",)),
    ):
        with pytest.raises(kind, match=says(*parts)):
            call()
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="a data frame needs one of pandas, polars, pyarrow"):
        model.recommend_all()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"writing .*top.parquet needs pyarrow"):
        model.recommend_all(tmp_path / "top.parquet")


def test_a_model_saved_without_seen_items_needs_them(tmp_path, model):
    model.save(tmp_path / "model", include_seen=False)
    bare = hmf.load(tmp_path / "model")
    with pytest.raises(ValueError, match="pass user_items"):
        bare.recommend_all()
    assert rows_of(bare.recommend_all(user_items=planted())) == rows_of(model.recommend_all())


def test_a_progress_bar_counts_users(model, monkeypatch):
    bars = []

    def record(total, shown, **options):
        bars.append((total, shown, options["unit"]))
        return progress_bar(total, False, **options)

    monkeypatch.setattr(tables, "progress_bar", record)
    model.recommend_all(show_progress=True)
    assert bars == [(M, True, "user")]
