"""`evaluate` of a model that was fitted on a GPU: the GPU ranks, and the values are the CPU's."""

from __future__ import annotations

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.gpu import topk
from support.ratings import planted

TRAIN, TEST = hmf.split(hmf.Ratings.from_matrix(planted()), 0.3, random_state=0)
METRICS = ("ndcg@5", "recall@5", "map@3", "mrr@5", "hit_rate@2", "novelty@5", "coverage@5", "auc")


@pytest.mark.parametrize("enough", [True, False])
def test_a_gpu_ranks_where_the_work_is_large_enough(enough, gpu, monkeypatch):
    model = hmf.ImplicitALS(6, alpha=3.0, iterations=3, random_state=0, device="cuda").fit(TRAIN)
    calls = []

    def counted(device, users, *arguments, **options):
        calls.append(len(users))
        return top_k(device, users, *arguments, **options)

    top_k = topk.top_k
    monkeypatch.setattr(topk, "top_k", counted)
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", 0 if enough else 1e9)
    found = hmf.evaluate(model, TEST, train=TRAIN, metrics=METRICS)
    assert calls == ([found.n_users] if enough else [])  # all users in one call
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", np.inf)
    expected = hmf.evaluate(model, TEST, train=TRAIN, metrics=METRICS)
    assert found == pytest.approx(expected, rel=1e-12)
    for name in METRICS:
        if name in expected.per_user:
            np.testing.assert_allclose(found.per_user[name], expected.per_user[name], rtol=1e-12)
