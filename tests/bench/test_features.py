"""The benchmark of features, bench/features.py: its data, what it measures, and its report."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from support.checkout import ROOT


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import features

    monkeypatch.setattr(features, "RESULTS", tmp_path)
    monkeypatch.setitem(features.record.__globals__, "RESULTS", tmp_path)
    return features


def write_films(folder):
    (folder / "ml-1m").mkdir()
    lines = ["1::Laura (1944)::Film-Noir|Mystery", "2::Gilda (1946)::Film-Noir", "3::Untitled::Drama"]
    (folder / "ml-1m" / "movies.dat").write_text("\n".join(lines), encoding="latin-1")
    ratings = "1::1::5\n1::2::4\n2::2::3\n2::3::1\n"
    (folder / "ml-1m" / "ratings_no_timestamps.dat.gz").write_text(ratings)


def test_features_of_films(bench, tmp_path):
    write_films(tmp_path)
    data = bench.read(tmp_path, "ml-1m", "genres and years")
    assert data.names == ["genre:Drama", "genre:Film-Noir", "genre:Mystery", "year:1940", "year:1945"]
    assert data.features.toarray().tolist() == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert bench.read(tmp_path, "ml-1m", "genres").names == data.names[:3]


def made():
    rng = np.random.default_rng(0)
    kinds = np.arange(40) % 3
    taste = rng.random((60, 3))[:, kinds]
    cells = (rng.random((60, 40)) < 0.7 * taste) * rng.integers(4, 6, (60, 40))
    labels = {"user_ids": np.arange(60), "item_ids": np.arange(100, 140)}
    return hmf.Ratings.from_matrix(cells, **labels), sp.csr_array(np.eye(3, dtype=np.float32)[kinds])


def test_held_out_items_have_no_training_entries(bench):
    ratings, _ = made()
    train, test = bench.held_out(ratings, 0)
    counts = [np.bincount(part.user_items.indices, minlength=40) for part in (train, test)]
    assert np.count_nonzero(counts[0] == 0) == 8 and np.all(counts[1][counts[0] == 0] > 0)
    assert train.nnz + test.nnz == ratings.nnz


def test_a_comparison_is_recorded_and_reported(bench, tmp_path):
    ratings, features = made()
    data = bench.Data(ratings, features, ["a", "b", "c"])
    chosen = {name: method for name, method in bench.METHODS.items() if method.package == "hybridmf"}
    bench.compare("made up", "kinds", data, chosen, trials=4, seed=0)
    lines = [json.loads(text) for text in (tmp_path / "features.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == list(chosen)
    found = {line["method"]: line["ndcg@10"] for line in lines}
    assert found["ImplicitALS"]["cold items among cold"] > found["popularity"]["cold items among cold"]
    assert found["ImplicitALS"]["cold items"] > 10 * found["ImplicitALS without features"]["cold items"]
    report = bench.report()
    assert report.count("|") > 20 and "**made up, kinds**" in report and "| ImplicitALS |" in report


def test_later_trials_are_near_the_best(bench, monkeypatch):
    space = {"a": bench.Between(0.1, 100), "b": bench.OneOf(("x", "y"))}
    given = []

    def values(method, train, test, data, settings, seed):
        given.append(settings)
        return dict.fromkeys(bench.PARTS, 1.0) | {"warm items": -abs(np.log(settings["a"] / 20))}, 1.0

    monkeypatch.setattr(bench, "values_of", values)
    monkeypatch.setattr(bench, "record", lambda *_: None)
    monkeypatch.setattr(bench.click, "echo", lambda *_: None)
    ratings, features = made()
    data = bench.Data(ratings, features, ["a", "b", "c"])
    bench.compare("made up", "kinds", data, {"m": bench.Method(bench.ours, space)}, trials=10, seed=0)
    first, later = given[:5], given[5:10]
    best = min(first, key=lambda each: abs(np.log(each["a"] / 20)))
    assert all(best["a"] / bench.NEAR**2 < each["a"] < best["a"] * bench.NEAR**2 for each in later)
    assert max(each["a"] for each in first) / min(each["a"] for each in first) > 30
    assert abs(np.log(given[-1]["a"] / 20)) <= abs(np.log(best["a"] / 20))


def test_scores_are_ranked_as_they_are(bench):
    train = hmf.Ratings.from_matrix(np.array([[1, 0, 0, 0]]))
    model = bench.Scores(np.array([[9.0, 1, 3, 2]]), train)
    seen = train.user_items
    assert model.recommend(np.array([0]), seen, 4)[0].tolist() == [[2, 3, 1, -1]]
    assert model.recommend(np.array([0]), seen, 2, items=np.array([1, 3]))[0].tolist() == [[3, 1]]


def test_planted_features_follow_the_users(bench):
    ratings, _ = made()
    features = bench.planted(ratings, tables=6, values=5)
    assert features.shape == (40, 30) and np.all(np.diff(features.indptr) == 6)
    alike = (features @ features.T).toarray()
    same = np.arange(40)[:, None] % 3 == np.arange(40) % 3
    np.fill_diagonal(same, False)
    assert alike[same].mean() > alike[~same].mean()


def test_iterations_are_recorded(bench, tmp_path):
    bench.iterations("cpu", "ml-1m", 0.05, 8, 1)
    lines = [json.loads(text) for text in (tmp_path / "features.jsonl").read_text().splitlines()]
    assert [line["feedback"] for line in lines] == ["implicit", "explicit"]
    assert all(line["seconds"]["with"] > 0 and line["task"] == "iteration" for line in lines)
