"""Fits whose data stay on a GPU take at most the memory of their plans, and most of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.devices import Tracked
from support.half_sweeps import FITS
from support.ratings import planted

RATINGS = planted(300, 200, 0.1)
RNG = np.random.default_rng(0)
FEATURES = {"item_features": (RNG.random((200, 12)) < 0.3).astype(np.float32)}
WEIGHTS = {"weights": RNG.uniform(0.5, 2.0, RATINGS.nnz)}


@pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        ("explicit", {}, {}),
        ("implicit", {"row_form": "primal"}, {}),
        ("implicit", {"row_form": "dual", "factors": 40}, {}),
        ("biases", {"assembly": "sparse_syrk"}, {}),
        ("implicit", {"assembly": "mo_als", "solver": "cg"}, {}),
        ("biases", {"assembly": "bals"}, {}),
        ("explicit", {"solver": "subspace", "block_size": 4}, {}),
        ("explicit", {}, WEIGHTS),
        ("biases", {}, WEIGHTS),
        ("explicit", {}, FEATURES),
        ("biases", {"solver": "cg"}, FEATURES),
        ("biases", {}, WEIGHTS | FEATURES),
    ],
)
def test_memory_on_the_gpu_stays_within_the_plan(
    kind: str, options: dict[str, Any], given: dict[str, Any], gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu.spec.name != "emulated":
        pytest.skip("the pool of a GPU keeps what was given back")
    cls, usual = FITS[kind]
    tracked = Tracked(gpu, monkeypatch)
    model = cls(**(usual | {"iterations": 2, "random_state": 0, "device": "cuda"} | options)).fit(RATINGS, **given)
    assert model.plan_.ratings_on_device or options.get("assembly") == "bals"
    assert 0.75 * model.plan_.total_bytes < tracked.peak <= model.plan_.total_bytes
