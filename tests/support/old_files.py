"""Files in tests/fixtures that earlier versions wrote: the ratings behind them, and facts to compare with.

Each folder of tests/fixtures is of one version and complete: ``ratings.csv`` has the ratings, ``expected.json`` the
facts as they were before the files were written.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.model.files import jsonable
from support.checkout import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
RATINGS, EXPECTED = "ratings.csv", "expected.json"
SHAPE = (24, 18)
"""Users and items of ``ratings.csv``."""

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of what is computed from stored factors: other instruction sets round differently."""

FIT_TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}
"""Of predictions after several iterations, where rounding adds up: 8e-4 between AVX-512 and portable code."""

SOME_USERS = [0, 7, 22]


def folders() -> list[Path]:
    return sorted(path.parent for path in FIXTURES.glob(f"*/{EXPECTED}"))


@functools.cache
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / EXPECTED).read_text(encoding="utf-8"))


def cases(part: str) -> Iterator[Any]:
    """(folder, name, case) of each file of a part, of all versions, as parameters of a test."""
    for folder in folders():
        for name, case in expected(folder)[part].items():
            yield pytest.param(folder, name, case, id=f"{folder.name}-{name}")


# ------------------------------------------------------------------------------------------------------------ ratings


@functools.cache
def columns(folder: Path) -> dict[str, np.ndarray]:
    """Columns of ``ratings.csv``."""
    path = folder / RATINGS
    names = path.read_text(encoding="utf-8").split("\n", 1)[0].split(",")
    return dict(zip(names, np.loadtxt(path, delimiter=",", skiprows=1, unpack=True), strict=True))


def matrix_of(folder: Path, values: str, dtype: str = "float32") -> sp.csr_array:
    """The ratings with one of their columns as values, or with values derived from the stars."""
    table = columns(folder)
    stars = table["stars"]
    derived = {"ones": np.ones_like(stars), "signed": stars - 2.75, "zeros": np.where(stars > 4, 0, stars)}
    data = (table | derived)[values].astype(dtype)
    return sp.csr_array((data, (table["user"].astype(int), table["item"].astype(int))), shape=SHAPE)


def data_of(folder: Path, case: dict[str, Any]) -> Any:
    """What a fit of a case gets: a store, ratings with labels, or a matrix."""
    if "store" in case:
        return hmf.Store.open(folder / "stores" / case["store"])
    matrix = matrix_of(folder, case["values"], case.get("dtype", "float32"))
    labels = {name: case.get(name) for name in ("user_ids", "item_ids")}
    return hmf.Ratings.from_matrix(matrix, **labels) if any(labels.values()) else matrix


def weights_of(folder: Path, case: dict[str, Any]) -> sp.csr_array | None:
    return matrix_of(folder, case["weights"]) if "weights" in case else None


# -------------------------------------------------------------------------------------------------------------- facts


def crc(array: np.ndarray | None) -> str | None:
    return None if array is None else f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


def facts_of(model: Any, *, seen: bool = True) -> dict[str, Any]:
    """Facts about a fitted model, as JSON values; `seen`: also those that follow from the items seen by users."""
    items = np.arange(model.n_items)
    ids, scores = model.recommend(SOME_USERS, N=8, filter_already_liked_items=seen)
    row = np.zeros((1, model.n_items))
    row[0, [1, 5, 9]] = 4.0, 2.0, 5.0
    facts = {
        "class": type(model).__name__,
        "params": jsonable(model.get_params(deep=False)),
        "shape": [model.n_users, model.n_items],
        "dtype": model.user_factors_.dtype.name,
        "n_iter": model.n_iter_,
        "history": [sorted(record) for record in model.history_],
        "mean": model.mean_,
        "nnz": model.plan_.nnz,
        "user_ids": plain(model.user_ids_),
        "item_ids": plain(model.item_ids_),
        "item_counts": model.item_counts_.tolist(),
        "frame_kind": model._learned.frame_kind,
        "value_range": plain(model._learned.value_range),
        "crc32": {
            name: crc(getattr(model, name)) for name in ("user_factors_", "item_factors_", "user_bias_", "item_bias_")
        },
        "sums": [float(np.sum(each, dtype=np.float64)) for each in (model.user_factors_, model.item_factors_)],
        "recommended": ids.tolist(),
        "scores": rounded(scores),
        "similar": model.similar_items(2, N=5)[0].tolist(),
        "predicted": rounded(model.predict(np.zeros_like(items), items)),
        "folded_in": rounded(model.transform(row)),
        "objective": model.objective(_few_entries(model)),
    }
    if model.user_ids_ is not None:
        found, _ = model.recommend(model.user_ids_[7], N=3, labels=True, filter_already_liked_items=seen)
        facts["labels"] = found.tolist()
    if model._learned.features:
        facts["features"] = {
            "names": {side: known.features.names for side, known in model._learned.features.items()},
            "crc32": [crc(model.user_feature_vectors_), crc(model.item_feature_vectors_)],
            "cold": {side: known.cold.tolist() for side, known in model._learned.features.items()},
            "recommended": model.recommend(SOME_USERS, N=30, include_cold=True)[0].tolist(),
            "encoded": rounded(model.item_features_.encode({"year": 1960, "genre": ["b"]}).matrix.toarray()),
        }
    if seen and model._learned.values is not None:
        found = model.explain(7, int(ids[1, 0]), N=3)
        facts["explained"] = [found.score, found.ids.tolist(), rounded(found.contributions)]
    return facts


def finished_facts(model: Any) -> dict[str, Any]:
    """Facts about a resumed fit at its end."""
    users = np.array([0, 7, 15, 22]).repeat(3)
    items = np.array([0, 8, 17] * 4)
    return {
        "n_iter": model.n_iter_,
        "history": [sorted(record) for record in model.history_],
        "predicted": rounded(model.predict(users, items, clip=False)),
    }


def store_facts(store: Any) -> dict[str, Any]:
    """Facts about a store."""
    return {
        "shape": list(store.shape),
        "nnz": store.nnz,
        "checksum": store.checksum,
        "bounds": {side: [slab.stop for slab in store.slabs(side)] for side in ("user", "item")},
        "user_ids": plain(store.user_ids),
        "item_ids": plain(store.item_ids),
    }


def implicit_facts(model: Any, matrix: sp.csr_array) -> dict[str, Any]:
    """Facts about an estimator with the interface of `implicit`."""
    ids, scores = model.recommend(np.array(SOME_USERS), matrix[SOME_USERS], N=5)
    names = ("factors", "regularization", "alpha", "iterations", "use_cg", "random_state")
    return {
        "params": {name: getattr(model, name) for name in names},
        "dtype": np.dtype(model.dtype).name,
        "crc32": {name: crc(getattr(model, name)) for name in ("user_factors", "item_factors")},
        "recommended": ids.tolist(),
        "scores": rounded(scores),
        "recalculated": rounded(model.recalculate_user(0, matrix[[0]])),
    }


def _few_entries(model: Any) -> sp.csr_array:
    """A fixed matrix to evaluate an objective on."""
    users, items = np.arange(model.n_users), np.arange(model.n_users) * 7 % model.n_items
    return sp.csr_array((1.0 + users % 5, (users, items)), shape=(model.n_users, model.n_items))


def rounded(values: np.ndarray) -> list[Any]:
    """Floats as short JSON, more exact than the comparison; None for the scores of empty places."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def plain(values: Any) -> list[Any] | None:
    return None if values is None else np.asarray(values).tolist()


def assert_facts(found: Any, wanted: Any, where: str = "", tolerance: Mapping[str, float] = TOLERANCE) -> None:
    """Compare facts: floats up to rounding, all else exactly. Later versions may have more facts."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            assert name in found, f"{where}: no {name}"
            assert_facts(found[name], value, f"{where}/{name}", tolerance)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_facts(one, other, f"{where}/{k}", tolerance)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(found, wanted, **tolerance, err_msg=where)
    else:
        assert type(found) is type(wanted) and found == wanted, f"{where}: {found!r}, expected {wanted!r}"
