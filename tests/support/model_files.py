"""Small models of each kind, and changes of their files."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

import hybridmf as hmf
from support.ratings import planted

M, N_ITEMS = 60, 40
KINDS = {
    "explicit": (hmf.ExplicitALS, {"biases": False}),
    "biases": (hmf.ExplicitALS, {"biases": True}),
    "biases64": (hmf.ExplicitALS, {"biases": True, "dtype": "float64"}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "implicit-cg": (hmf.ImplicitALS, {"alpha": 3.0, "solver": "cg"}),
    "subspace": (hmf.ImplicitALS, {"solver": "subspace", "block_size": 2}),
    "bals": (hmf.ExplicitALS, {"biases": False, "assembly": "bals"}),
}


def make(kind: str = "explicit", **options):
    cls, own = KINDS[kind]
    common = {"factors": 3, "iterations": 5, "random_state": 0, "device": "cpu", "num_threads": 1}
    return cls(**(common | own | options))


@functools.cache
def fitted(kind: str = "explicit", labels: bool = False):
    """A model of `planted()`, fitted once and changed by no test."""
    ratings = planted()
    if labels:
        ids = [f"u{k}" for k in range(M)], np.arange(100, 100 + N_ITEMS)
        ratings = hmf.Ratings.from_matrix(ratings, user_ids=ids[0], item_ids=ids[1])
    return make(kind).fit(ratings)


def read_parts(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def alter(path: Path, *, drop=(), state=(), params=(), tensors=(), checksums=None, **metadata) -> Path:
    """Change parts of a file: entries of its JSON, tensors, plain metadata; None removes."""
    header, content = read_parts(path)
    for key, change in (("state", dict(state)), ("params", dict(params))):
        merged = json.loads(header[key]) | change
        header[key] = json.dumps({name: value for name, value in merged.items() if value is not None})
    content = {name: array for name, array in (content | dict(tensors)).items() if name not in drop}
    changed = header | metadata | {"checksums": checksums}  # checksums of what it was would tell at once
    header = {name: text for name, text in changed.items() if text is not None}
    safetensors.numpy.save_file(content, path, header)
    return path


def assert_equal_models(one, other) -> None:
    for side in ("user", "item"):
        ours, theirs = one._learned.state.side(side), other._learned.state.side(side)
        np.testing.assert_array_equal(ours.matrix, theirs.matrix)
        assert ours.matrix.dtype == theirs.matrix.dtype
        np.testing.assert_equal(ours.bias, theirs.bias)
    assert one.mean_ == other.mean_
    assert (one.n_iter_, one.n_features_in_, one.device_) == (other.n_iter_, other.n_features_in_, other.device_)
    assert one.history_ == other.history_
    np.testing.assert_equal((one.user_ids_, one.item_ids_), (other.user_ids_, other.item_ids_))
