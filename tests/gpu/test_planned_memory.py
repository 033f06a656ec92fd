"""Fits whose data stay on a GPU take at most the memory of their plans, and most of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from support.devices import Tracked
from support.half_sweeps import FITS
from support.ratings import planted

RATINGS = planted(120, 90, 0.15)
LARGE = planted(300, 200, 0.1)
"""For plans that leave out a few hundred bytes, which show on small problems only."""
RNG = np.random.default_rng(0)
FEATURES = {"item_features": (RNG.random((90, 12)) < 0.3).astype(np.float32)}
OF_LARGE = {"item_features": (RNG.random((200, 12)) < 0.3).astype(np.float32)}
WEIGHTS = {"weights": RNG.uniform(0.5, 2.0, RATINGS.nnz)}


@pytest.mark.parametrize(
    ("kind", "options", "ratings", "given"),
    [
        ("explicit", {}, RATINGS, {}),
        ("implicit", {"row_form": "primal"}, RATINGS, {}),
        ("implicit", {"row_form": "dual", "factors": 32}, RATINGS, {}),
        ("biases", {"assembly": "sparse_syrk"}, RATINGS, {}),
        ("implicit", {"assembly": "mo_als", "solver": "cg"}, LARGE, {}),
        ("biases", {"assembly": "bals"}, RATINGS, {}),
        ("explicit", {"solver": "subspace", "block_size": 4}, RATINGS, {}),
        ("explicit", {}, RATINGS, WEIGHTS),
        ("biases", {}, RATINGS, WEIGHTS),
        ("explicit", {}, LARGE, OF_LARGE),
        ("biases", {"solver": "cg"}, RATINGS, FEATURES),
        ("biases", {}, RATINGS, WEIGHTS | FEATURES),
    ],
)
def test_memory_on_the_gpu_stays_within_the_plan(
    kind: str,
    options: dict[str, Any],
    ratings: sp.csr_array,
    given: dict[str, Any],
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if gpu.spec.name != "emulated":
        pytest.skip("the pool of a GPU keeps what was given back")
    cls, usual = FITS[kind]
    tracked = Tracked(gpu, monkeypatch)
    model = cls(**(usual | {"iterations": 2, "random_state": 0, "device": "cuda"} | options)).fit(ratings, **given)
    assert model.plan_.ratings_on_device or options.get("assembly") == "bals"
    assert 0.75 * model.plan_.total_bytes < tracked.peak <= model.plan_.total_bytes
