"""The same program started once a rank: the ranks fit together."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import CommunicatorError, DeviceError
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.threads import run_ranks
from support.mpi import run_job
from support.ratings import planted

SMALL = {"factors": 3, "random_state": 0, "device": "cpu", "num_threads": 1}

PROGRAM = """
import os, signal
from mpi4py import MPI
from support.ratings import planted
import hybridmf as hmf
rank = MPI.COMM_WORLD.rank
if KILLED == rank:
    from hybridmf.cpu.als import HalfSweep
    solve, calls = HalfSweep.steps, []
    def solve_or_die(*arguments, **options):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return solve(*arguments, **options)
    HalfSweep.steps = solve_or_die
if WATCHED:
    OPTIONS |= {"validation": planted(seed=1), "callback": lambda model, record: record["iteration"] == WATCHED}
model = hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=5), planted(), **OPTIONS)
assert (model is None) == (rank > 0)
if model is not None:
    model.save(MODEL)
"""


def run(
    size: int, model: Path, *, killed: int = -1, watched: int = 0, small: dict[str, Any] = SMALL, **options: Any
) -> subprocess.CompletedProcess[str]:
    return run_job(size, PROGRAM, SMALL=small, MODEL=str(model), KILLED=killed, WATCHED=watched, OPTIONS=options)


@pytest.mark.gpu
def test_processes_with_a_gpu_each_fit_together(tmp_path):
    from hybridmf.device.cuda import device_count
    from hybridmf.plan.dispatch import gpu_status

    if not gpu_status()[0] or device_count() < 2:
        pytest.skip("fewer than two GPUs")
    job = run(2, tmp_path / "model", small=SMALL | {"device": "cuda"})
    assert job.returncode == 0, job.stderr
    found = hmf.load(tmp_path / "model")
    expected = hmf.ExplicitALS(biases=False, **SMALL, iterations=5).fit(planted())
    assert found.objective(planted()) == pytest.approx(expected.objective(planted()), rel=1e-5)
    # a user with few entries has an ill-conditioned system, whose rounding errors grow over the iterations
    np.testing.assert_allclose(found.user_factors, expected.user_factors, rtol=2e-2, atol=2e-3)


def test_a_killed_process_ends_the_job_and_the_run_resumes(tmp_path):
    """In its third iteration, with a checkpoint of the second or the first; not only after the timeout of 600 s.

    The processes of the second job fit, measure and stop together.
    """
    folder = str(tmp_path / "run")
    assert run(2, tmp_path / "model", killed=1, checkpoint=folder).returncode != 0
    assert hmf.scale.has_checkpoints(folder)
    job = run(2, tmp_path / "model", watched=4, checkpoint=folder, resume_from=folder)
    assert job.returncode == 0, job.stderr
    found = hmf.load(tmp_path / "model")
    expected = hmf.ExplicitALS(biases=False, **SMALL, iterations=4).fit(planted(), validation=planted(seed=1))
    np.testing.assert_array_equal(found.user_factors, expected.user_factors)
    rmse = {record["iteration"]: record["rmse"] for record in expected.history_}
    measured = [record for record in found.history_ if "rmse" in record]
    assert len(measured) >= 2 and found.n_iter_ == 4
    assert [record["rmse"] for record in measured] == pytest.approx([rmse[record["iteration"]] for record in measured])


def test_arguments_of_ranks(tmp_path):
    labelled = hmf.Ratings.from_matrix(planted(), user_ids=[f"u{k}" for k in range(60)])
    expected = hmf.ExplicitALS(biases=False, **SMALL).fit(planted())
    triplets = planted().tocoo()
    lines = (f"{u},{i},{v}" for u, i, v in zip(*triplets.coords, triplets.data, strict=True))
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    for ratings in (planted(), labelled):
        model = run_ranks(
            2, lambda c, given=ratings: hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL), given, c), timeout=30
        )[0]
        np.testing.assert_array_equal(model.user_factors, expected.user_factors)
    assert model.user_ids_.tolist() == labelled.user_ids.tolist()
    alone = hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL), tmp_path / "ratings.csv", Single())
    assert alone.n_users == 59  # one of them has no ratings
    with pytest.raises(TypeError, match=r"ratings must be the path of a store or file, a Store, .* got int"):
        hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL), 3, Single())
    for model in (None, "als", hmf.ExplicitALS):
        with pytest.raises(TypeError, match="model must be an estimator"):
            hmf.scale.fit(model, planted(), Single())


@pytest.mark.parametrize("frozen", ["user", "item"])
def test_ranks_keep_a_side(frozen, tmp_path):
    """As one process does, and one after the other: a run of theirs resumes with the same factors alone."""
    trained = hmf.ImplicitALS(**SMALL, alpha=3.0, iterations=2).fit(planted())

    def model(init=trained, **options):
        return hmf.ImplicitALS(**SMALL | options, alpha=3.0, regularization=5.0, iterations=4, init=init)

    def of_ranks(make, **options):
        return run_ranks(2, lambda c: hmf.scale.fit(make(), planted(), c, freeze=frozen, **options), timeout=30)[0]

    for options, iterations in (({}, 1), ({"solver": "cg"}, 4)):
        expected = model(**options).fit(planted(), freeze=frozen)
        found = of_ranks(lambda options=options: model(**options), checkpoint=tmp_path / str(iterations))
        assert found.n_iter_ == expected.n_iter_ == iterations
        for side in ("user", "item"):
            ours, theirs = (one._learned.state.side(side).matrix for one in (found, expected))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        kept = found._learned.state.side(frozen).matrix
        np.testing.assert_array_equal(kept, trained._learned.state.side(frozen).matrix)
    other = hmf.ImplicitALS(**SMALL, iterations=1).fit(planted())
    with pytest.raises(ValueError, match=f"resume_from holds other {frozen} factors than init"):
        of_ranks(lambda: model(other), checkpoint=tmp_path / "1", resume_from=tmp_path / "1")
    with pytest.raises(ValueError, match=f"freeze='{frozen}' keeps the {frozen} factors that init gives"):
        of_ranks(lambda: model(None))


def test_ranks_have_weights(tmp_path):
    plays, rng = planted(), np.random.default_rng(0)
    weights = sp.csr_array((rng.uniform(0.05, 4, plays.nnz).astype("f4"), plays.indices, plays.indptr), plays.shape)
    labelled = hmf.Ratings.from_matrix(weights, item_ids=[f"i{k}" for k in range(40)])
    ratings = hmf.Ratings.from_matrix(plays, item_ids=[f"i{k}" for k in range(40)])

    def model(**options):
        return hmf.ImplicitALS(**SMALL, regularization=0.3, iterations=3, **options)

    expected = model().fit(plays, weights=weights, callback=lambda *_: None)
    for given, beside in ((plays, weights), (ratings, labelled)):
        found = run_ranks(
            2, lambda c, g=given, w=beside: hmf.scale.fit(model(), g, c, weights=w, track_objective=True), timeout=30
        )[0]
        np.testing.assert_allclose(found.user_factors, expected.user_factors, rtol=1e-4, atol=1e-6)
        assert found.history_[-1]["objective"] == pytest.approx(expected.history_[-1]["objective"], rel=1e-5)
        assert found.objective(plays) == pytest.approx(expected.objective(plays), rel=1e-5)
    for path, matrix in (("plays.csv", plays), ("weights.csv", weights)):
        triplets = matrix.tocoo()
        lines = (f"{u},{i},{v}" for u, i, v in zip(*triplets.coords, triplets.data, strict=True))
        (tmp_path / path).write_text("\n".join(lines) + "\n")
    found = hmf.scale.fit(model(), tmp_path / "plays.csv", Single(), weights=tmp_path / "weights.csv")
    files = (hmf.Ratings.from_file(tmp_path / name) for name in ("plays.csv", "weights.csv"))
    expected = model().fit(next(files), weights=next(files))
    np.testing.assert_allclose(found.user_factors, expected.user_factors, rtol=1e-4, atol=1e-6)
    store = hmf.convert(ratings, tmp_path / "store")
    with pytest.raises(TypeError, match=r"weights need ratings in memory.*fit store.to_ratings\(\)"):
        hmf.scale.fit(model(), store, Single(), weights=weights)
    with pytest.raises(
        TypeError, match=r"features: ranks that read a store .* fit store.to_ratings\(\), or the store in one"
    ):
        hmf.scale.fit(model(), store, Single(), item_features=np.ones((plays.shape[1], 1)))
    with pytest.raises(ValueError, match="weights of explicit ratings are not available on ranks"):
        hmf.scale.fit(hmf.ExplicitALS(**SMALL), plays, Single(), weights=weights)


def test_devices_of_ranks(monkeypatch):
    options = SMALL | {"device": "cuda:1"}
    with pytest.raises(ValueError, match=r"device='cuda:1': ranks choose their GPU by their number on the node"):
        hmf.scale.fit(hmf.ExplicitALS(biases=False, **options), planted(), Single())

    def none():
        raise DeviceError("there is no NVIDIA driver")

    monkeypatch.setattr("hybridmf.device.cuda.device_count", none)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL | {"device": "cuda"}), planted(), Single())
    model = hmf.scale.fit(hmf.ExplicitALS(biases=False, **SMALL | {"device": "auto"}), planted(), Single())
    assert model.device_ == "cpu"


def test_ranks_have_features():
    plays, rng = planted(), np.random.default_rng(4)
    features = {"item_features": rng.random((40, 3)), "user_features": (rng.random((60, 4)) < 0.3).astype(np.float32)}
    make = partial(hmf.ExplicitALS, factors=4, iterations=3, device="cpu", random_state=0)
    expected = make().fit(plays, **features)

    def run(communicator):
        return hmf.scale.fit(make(), plays, communicator, track_objective=True, **features)

    for size in (1, 3):
        found = run_ranks(size, run, timeout=60)[0]
        np.testing.assert_allclose(found.user_factors, expected.user_factors, rtol=1e-3, atol=1e-4)
        assert found.objective(plays) == pytest.approx(expected.objective(plays), rel=1e-5)
        assert found.history_[-1]["objective"] == pytest.approx(expected.objective(plays), rel=1e-5)

    def other(communicator):
        changed = {name: each + communicator.rank for name, each in features.items()}
        return hmf.scale.fit(make(), plays, communicator, **changed)

    with pytest.raises(CommunicatorError, match="another layout, objective or plan"):
        run_ranks(2, other, timeout=60)
