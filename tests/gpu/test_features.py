"""Features of items and users in fits on GPUs: against the CPU, every assembly, solver, rank and precision."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.device import cuda
from support.host_factors import HOST_LIMIT, MATRIX, TURNS_LIMIT
from support.ratings import planted

RATINGS = planted(40, 30, 0.35)
RNG = np.random.default_rng(5)
FEATURES = {
    "item_features": np.column_stack([RNG.random((30, 4)) < 0.4, RNG.normal(size=30)]).astype(np.float32),
    "user_features": (RNG.random((40, 3)) < 0.5).astype(np.float32),
}
ONES = np.ones((30, 1), np.float32)
IMPLICIT = {"regularization": 0.5, "alpha": 2.0, "unobserved_weight": 0.3}
CASES = {
    "implicit": (hmf.ImplicitALS, IMPLICIT),
    "biases": (hmf.ExplicitALS, {"regularization": (0.3, 0.5), "regularization_scaling": 0.5}),
    "balance": (hmf.ImplicitALS, IMPLICIT | {"balance": True}),
    "cg": (hmf.ImplicitALS, IMPLICIT | {"solver": "cg", "cg_steps": 12}),
    "cg-biases": (hmf.ExplicitALS, {"regularization": 0.5, "solver": "cg", "cg_steps": 12}),
    "rank-90": (hmf.ImplicitALS, IMPLICIT | {"factors": 90}),
    "sparse_syrk": (hmf.ImplicitALS, IMPLICIT | {"assembly": "sparse_syrk"}),
    "mo_als": (hmf.ExplicitALS, {"regularization": 0.5, "assembly": "mo_als"}),
    "bals": (hmf.ExplicitALS, {"regularization": 0.5, "assembly": "bals"}),
    "subspace": (hmf.ExplicitALS, {"regularization": 0.5, "solver": "subspace", "block_size": 4}),
    "float64": (hmf.ImplicitALS, IMPLICIT | {"dtype": "float64"}),
}


def factors_of(kind) -> int:
    """Seven with a bias, for which most kernels are compiled by other tests."""
    return 6 if kind is hmf.ExplicitALS else 7


def fitted(case, device):
    """A fit that tests only look at."""
    return fitted_on(case, device, cuda.open_device().spec.name if device == "cuda" else device)


@functools.cache
def fitted_on(case, device, name):
    kind, given = CASES[case]
    options = {"assembly": "auto"} if device == "cpu" else {}
    common = {"factors": factors_of(kind), "device": device, "random_state": 3, "iterations": 2}
    return kind(**(common | given | options)).fit(RATINGS, **FEATURES)


OF_FEATURES = 4_000
"""Bytes that limits allow for features of MATRIX."""


@pytest.mark.parametrize("case", sorted(CASES))
def test_fit_agrees_with_the_cpu(case, gpu):
    on_gpu, on_cpu = fitted(case, "cuda"), fitted(case, "cpu")
    scores = [model.user_factors @ model.item_factors.T for model in (on_gpu, on_cpu)]
    assert np.abs(scores[0] - scores[1]).max() < 2e-3 * np.abs(scores[1]).max()
    assert on_gpu.objective(RATINGS) == pytest.approx(on_cpu.objective(RATINGS), rel=1e-4)
    empty = np.flatnonzero(np.bincount(RATINGS.indices, minlength=30) == 0)
    assert len(empty) and on_gpu.item_factors[empty].any(axis=1).all()


def test_long_rows_are_pulled_too(gpu):
    ratings = planted(600, 12, 0.6)
    features = (RNG.random((12, 3)) < 0.5).astype(np.float32)
    models = [
        hmf.ImplicitALS(factors=7, device=device, random_state=3, iterations=2, **IMPLICIT).fit(
            ratings, item_features=features
        )
        for device in ("cuda", "cpu")
    ]
    scores = [model.user_factors @ model.item_factors.T for model in models]
    assert np.abs(scores[0] - scores[1]).max() < 2e-3 * np.abs(scores[1]).max()


@pytest.mark.parametrize("count", [2, 3])
def test_several_gpus_agree_with_the_cpu(gpus, count):
    kind, given = CASES["biases"]
    model = kind(factors=6, device=gpus(count), random_state=3, iterations=2, **given).fit(RATINGS, **FEATURES)
    assert model.objective(RATINGS) == pytest.approx(fitted("biases", "cpu").objective(RATINGS), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_form": "dual"}, 'row_form="dual" does not apply on a GPU with features'),
    ],
)
def test_what_gpus_do_not_combine_is_refused(gpu, options, message):
    with pytest.raises(ValueError, match=message):
        hmf.ImplicitALS(factors=6, device="cuda", **options).fit(RATINGS, **FEATURES)


@pytest.mark.parametrize("case", ["implicit", "biases", "rank-90", "subspace", "bals"])
def test_fold_in_takes_a_pull(backend, case):
    from hybridmf.core.regression import joined
    from hybridmf.model.described import ridge_of
    from hybridmf.model.engine import engine_for
    from hybridmf.plan.solver import Given

    model = fitted(case, backend)
    learned, rows = model._fitted(), np.flatnonzero(np.diff(RATINGS.indptr))
    engine, vectors = engine_for(learned.plan), joined(learned.state.vectors["user"]).astype(np.float64)
    degrees = np.diff(RATINGS.indptr)
    scale = learned.objective.row_scale("user", degrees)[:, None]
    pull = scale * (FEATURES["user_features"] @ vectors) * ridge_of(learned, "user")
    gram = engine.gram("user", learned.solved("item"), learned.objective)
    solved_for = ("user", as_csr(RATINGS, drop_zeros=True), learned.objective)
    fixed = (learned.solved("item"), learned.state.mean, None)
    folded = [engine.fold_in(*solved_for, Given(*fixed, gram, each)) for each in (pull.astype(np.float32), None)]
    system = np.abs(folded[0].matrix[rows] - folded[1].matrix[rows]).max()
    assert system > 1e-3 and np.isfinite(folded[0].matrix).all()
    cpu = engine_for(learned.plan.changed(gpu=None, device="cpu", assembly="simd", dual_sides=()))
    gram = cpu.gram("user", learned.solved("item"), learned.objective)
    other = cpu.fold_in(*solved_for, Given(*fixed, gram, pull.astype(np.float32)))
    assert folded[0].matrix[rows] == pytest.approx(other.matrix[rows], rel=1e-3, abs=1e-3)


LARGE = planted(100, 40, 0.6)
LARGE_LIMIT = 36_000
"""Too little for the entries of LARGE."""
OF_LARGE = {"item_features": np.random.default_rng(0).random((40, 2)).astype(np.float32)}


@pytest.mark.usefixtures("tiny_gpu")
@pytest.mark.parametrize("case", ["implicit", "biases", "cg", "mo_als"])
def test_ratings_that_exceed_a_gpu_are_streamed(gpu, case):
    kind, given = CASES[case]
    models = [
        kind(**({"factors": factors_of(kind), "random_state": 3, "iterations": 2} | given | options)).fit(
            LARGE, **OF_LARGE
        )
        for options in ({"device": "cuda", "gpu_memory_limit": LARGE_LIMIT}, {"device": "cpu", "assembly": "auto"})
    ]
    assert models[0].plan_.streamed
    scores = [model.user_factors @ model.item_factors.T for model in models]
    assert np.abs(scores[0] - scores[1]).max() < 5e-3 * np.abs(scores[1]).max()


@pytest.mark.usefixtures("tiny_gpu")
@pytest.mark.parametrize(
    ("case", "stored", "limit"),
    [
        ("implicit", True, HOST_LIMIT),
        ("implicit", False, TURNS_LIMIT),
        ("biases", False, HOST_LIMIT),
        ("cg", False, TURNS_LIMIT),
        ("cg-biases", False, HOST_LIMIT),
        ("cg-biases", True, TURNS_LIMIT),
    ],
)
def test_factors_that_exceed_a_gpu_stay_on_the_host(gpu, case, limit, stored, tmp_path):
    kind, given = CASES[case]
    ratings = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=960) if stored else MATRIX
    features = {
        "item_features": (RNG.random((30, 3)) < 0.5).astype(np.float32),
        "user_features": (RNG.random((50, 3)) < 0.5).astype(np.float32),
    }
    models = [
        kind(**({"factors": factors_of(kind), "random_state": 3, "iterations": 2} | given | options)).fit(
            each, **features
        )
        for each, options in (
            (ratings, {"device": "cuda", "gpu_memory_limit": limit + OF_FEATURES}),
            (MATRIX, {"device": "cpu", "assembly": "auto"}),
        )
    ]
    assert models[0].plan_.offloaded
    assert (max(half.turns for half in models[0].plan_.scale.halves.values()) > 1) == (limit == TURNS_LIMIT)
    scores = [model.user_factors @ model.item_factors.T for model in models]
    assert np.abs(scores[0] - scores[1]).max() < 5e-3 * np.abs(scores[1]).max()
    assert models[0].objective(MATRIX) == pytest.approx(models[1].objective(MATRIX), rel=1e-4)


@pytest.mark.usefixtures("tiny_gpu")
def test_a_store_with_features_of_further_rows_is_streamed(gpu, tmp_path):
    names = [f"i{k}" for k in range(LARGE.shape[1])]
    ratings = hmf.Ratings.from_matrix(LARGE, item_ids=names)
    features = hmf.Features(RNG.random((43, 2)), labels=[*names[::-1], "x", "y", "z"])
    store = hmf.convert(ratings, tmp_path / "store", slab_bytes=2000)
    kind, given = CASES["biases"]
    models = [
        kind(**({"factors": 6, "random_state": 3, "iterations": 2} | given | options)).fit(each, item_features=features)
        for each, options in (
            (store, {"device": "cuda", "gpu_memory_limit": LARGE_LIMIT}),
            (ratings, {"device": "cpu"}),
        )
    ]
    assert models[0].plan_.streamed and models[0].item_ids_.tolist() == models[1].item_ids_.tolist()
    for items in (np.full(100, 42), np.arange(100) % 40):
        scores = [model.predict(np.arange(100), items) for model in models]
        np.testing.assert_allclose(*scores, rtol=5e-3)


@pytest.mark.usefixtures("tiny_gpu")
def test_factors_in_files_refuse_features(gpu, monkeypatch, tmp_path):
    from hybridmf.core import scratch, system

    monkeypatch.setenv(scratch.SCRATCH_DIR, str(tmp_path))
    monkeypatch.setattr(scratch, "IN_MEMORY", ())
    monkeypatch.setattr(system, "available_memory", lambda: 4_000)
    with pytest.raises(ValueError, match=r"item_features: .* the plan keeps them in files"):
        hmf.ImplicitALS(6, device="cuda", gpu_memory_limit=HOST_LIMIT).fit(MATRIX, item_features=ONES)


@pytest.mark.usefixtures("tiny_gpu")
def test_factors_on_the_host_refuse_features_on_several_gpus(gpus):
    model = hmf.ImplicitALS(6, device=gpus(2), gpu_memory_limit=HOST_LIMIT)
    with pytest.raises(ValueError, match=r"item_features: .* the plan splits them over GPUs or keeps them on the host"):
        model.fit(MATRIX, item_features=ONES)


def test_sides_without_features_keep_the_dual_form(gpu):
    model = hmf.ImplicitALS(factors=32, device="cuda", random_state=3, iterations=2, **IMPLICIT)
    plain, described = (
        model.fit(RATINGS, **features).plan_.dual_sides
        for features in ({}, {"item_features": FEATURES["item_features"]})
    )
    assert plain == ("user", "item") and described == ("user",)
    on_cpu = hmf.ImplicitALS(factors=32, device="cpu", random_state=3, iterations=2, **IMPLICIT)
    on_cpu.fit(RATINGS, item_features=FEATURES["item_features"])
    scores = [each.user_factors @ each.item_factors.T for each in (model, on_cpu)]
    assert np.abs(scores[0] - scores[1]).max() < 2e-3 * np.abs(scores[1]).max()
