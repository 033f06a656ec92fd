"""Cold items and users: held out whole, and evaluated apart from warm ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.metrics import Parts, PopularityRecommender, evaluate, ndcg_at_k, recall_at_k
from support.messages import says
from support.ratings import planted


class Fixed:
    """Ranks by given scores; takes candidates only if it is told to."""

    def __init__(self, scores, counts):
        self.scores, (self.n_users, self.n_items) = scores, scores.shape
        self.item_counts_, self.calls = counts, []

    def recommend(self, users, user_items=None, N=10, filter_already_liked_items=True, items=None):
        self.calls.append(len(users))
        scores = self.scores[users].copy()
        if user_items is not None:
            scores[user_items.toarray() != 0] = -np.inf
        if items is not None:
            scores[:, np.setdiff1d(np.arange(self.n_items), items)] = -np.inf
        ids = np.argsort(-scores, axis=1, kind="stable")
        ids[np.take_along_axis(scores, ids, 1) == -np.inf] = -1
        return ids[:, :N], None

    def predict(self, users, items):
        return self.scores[users, items]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    ratings = sp.csr_array((rng.random((60, 30)) < 0.4) * 1.0)
    train, test = hmf.split(ratings, 0.3, random_state=0)
    train = sp.csr_array(train.toarray() * (np.arange(30) >= 8) * (np.arange(60) < 50)[:, None])
    return train, test, rng.random((60, 30))


def dense_part(scores, train, test, columns, candidates, k=5):
    """Rankings and relevant items of every user, by plain loops."""
    lists = []
    for user in range(len(scores)):
        open_ = [i for i in candidates if not train[[user], [i]].item()]
        lists.append(sorted(open_, key=lambda i: -scores[user, i])[:k])
    padded = np.array([row + [-1] * (k - len(row)) for row in lists])
    keep = np.zeros(test.shape[1])
    keep[columns] = 1
    return padded, sp.csr_array(test.toarray() * keep)


def test_parts_are_those_of_plain_loops(data):
    train, test, scores = data
    counts = np.diff(train.tocsc().indptr)
    model = Fixed(scores, counts)
    found = evaluate(model, test, train=train, metrics=("ndcg@5", "recall@5", "rmse"),
                     include_cold=True)  # fmt: skip
    everything, warm, cold = np.arange(30), np.flatnonzero(counts), np.flatnonzero(counts == 0)
    wanted = {
        "warm items": (warm, warm),
        "cold items": (cold, everything),
        "cold items among cold": (cold, cold),
    }
    for part, (columns, candidates) in wanted.items():
        rankings, relevant = dense_part(scores, train, test, columns, candidates)
        for name, metric in (("ndcg@5", ndcg_at_k), ("recall@5", recall_at_k)):
            assert found.apart[part][name] == pytest.approx(np.nanmean(metric(rankings, relevant, 5))), (part, name)
        entries = relevant.tocoo()
        errors = entries.data - scores[entries.row, entries.col]
        assert found.apart[part]["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)))
    rankings, relevant = dense_part(scores, train, test, everything, everything)
    users = np.arange(60) < 50
    for part, rows in (("warm users", users), ("cold users", ~users)):
        values = ndcg_at_k(rankings, relevant, 5)[rows]
        assert found.apart[part]["ndcg@5"] == pytest.approx(np.nanmean(values))
    assert list(found.apart) == [*wanted, "warm users", "cold users"]
    ranked = [found.apart[part].n_users for part in ("warm items", "cold items among cold")]
    assert sum(model.calls) == len(found.users) + sum(ranked)  # once for each set of candidates


def test_without_candidates_cold_items_are_ranked_among_all_only(data):
    train, test, scores = data

    class Simple(Fixed):
        def recommend(self, users, user_items=None, N=10, filter_already_liked_items=True):
            return super().recommend(users, user_items, N)

    found = evaluate(Simple(scores, None), test, train=train, metrics="ndcg@5", include_cold=True)
    assert list(found.apart) == ["warm items", "cold items", "warm users", "cold users"]
    assert evaluate(Simple(scores, None), test, train=train, metrics="ndcg@5").apart == {}
    lists = evaluate(np.argsort(-scores, axis=1), test, train=train, metrics="ndcg@5", include_cold=True)
    assert lists.apart["cold items"]["ndcg@5"] > 0 and "cold items among cold" not in lists.apart


def test_tables(data):
    pytest.importorskip("pandas")
    train, test, scores = data
    models = {"popularity": PopularityRecommender().fit(train), "fixed": Fixed(scores, None)}
    found = evaluate(models, test, train=train, metrics=("ndcg@5", "coverage@5"), include_cold=True)
    parts = found["fixed"].apart
    assert isinstance(parts, Parts) and "part" in str(parts) and "among cold" in str(parts)
    frame = parts.to_frame()
    assert list(frame.columns) == ["part", "metric", "value", "low", "high", "n_users"] and len(frame) == 2 * len(parts)
    assert found.apart["cold items"]["fixed"] == parts["cold items"]
    assert "over popularity" in str(found.apart["cold items among cold"])
    assert str(Parts()).startswith("part") and "<table>" in parts._repr_html_()


def test_auc_is_left_out_of_the_parts(data):
    train, test, _ = data
    model = hmf.ImplicitALS(factors=2, iterations=2, device="cpu", random_state=0).fit(train)
    found = evaluate(model, test, train=train, metrics=("auc", "ndcg@5"), include_cold=True)
    assert "auc" in found and all(list(part) == ["ndcg@5"] for part in found.apart.values())
    assert evaluate(model, test, train=train, metrics="auc", include_cold=True).apart == {}


def test_refusals(data):
    train, test, scores = data
    with pytest.raises(TypeError, match=says("include_cold must be True or False")):
        evaluate(Fixed(scores, None), test, train=train, include_cold=1)
    with pytest.raises(ValueError, match=says("include_cold=True needs train=")):
        evaluate(Fixed(scores, None), test, include_cold=True)


@pytest.mark.parametrize("by", ["item", "user"])
@pytest.mark.parametrize("size", [0.3, 7])
def test_items_and_users_are_held_out_whole(by, size):
    ratings = hmf.Ratings(planted(40, 50), item_ids=[f"i{k}" for k in range(50)])
    train, test = ratings.split(size, 0, by=by)
    axis = int(by == "item")
    counts = [np.bincount(part.user_items.nonzero()[axis], minlength=part.shape[axis]) for part in (train, test)]
    used = np.bincount(ratings.user_items.nonzero()[axis], minlength=ratings.shape[axis]) > 0
    assert not np.any((counts[0] > 0) & (counts[1] > 0))  # no leak: none of them has training entries
    assert np.count_nonzero(counts[1]) == (7 if size == 7 else round(0.3 * np.count_nonzero(used)))
    assert np.array_equal((counts[0] > 0) | (counts[1] > 0), used)
    assert train.shape == test.shape == ratings.shape and train.nnz + test.nnz == ratings.nnz
    again = ratings.split(size, 0, by=by)
    assert (again[1].user_items != test.user_items).nnz == 0


def test_a_split_leaves_items_to_train_on():
    with pytest.raises(ValueError, match=says("test_size=50 takes 50 of", "items with entries and leaves none")):
        hmf.split(sp.csr_array(np.ones((3, 50))), 50, by="item")
