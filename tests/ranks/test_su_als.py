"""SU-ALS: ranks on threads give the factors of one device, on every grid, with every solver; and stop together."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.cli import main
from hybridmf.core.objective import SIDES, Factors, State
from hybridmf.data.slabs import InMemory
from hybridmf.errors import CommunicatorError, NotPositiveDefiniteError, RatingsError
from hybridmf.formats import transpose
from hybridmf.model.training import LocalRatings
from hybridmf.plan.grid import Grid, RankLayout
from hybridmf.plan.make import make_plan
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Plan
from hybridmf.ranks.batches import BATCH_BYTES, batch_rows
from hybridmf.ranks.cpu_rank import CpuWorker
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.reduction import make_reduction
from hybridmf.ranks.su_als import RankALS
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.threads import run_ranks
from support.ranks import assert_close, both, one_device, sweeps
from support.ratings import planted
from support.solvers import iterate

MODELS: dict[str, Callable[..., Any]] = {
    "explicit": lambda **more: hmf.ExplicitALS(biases=False, factors=5, regularization=0.05, **more),
    "explicit plain": lambda **more: hmf.ExplicitALS(
        biases=False, factors=9, regularization=0.3, regularization_scaling="none", **more
    ),
    "biases": lambda **more: hmf.ExplicitALS(factors=4, regularization=0.1, biases=True, **more),
    "cg": lambda **more: hmf.ExplicitALS(factors=5, solver="cg", cg_steps=4, biases=True, **more),
    "implicit": lambda **more: hmf.ImplicitALS(factors=6, alpha=3.0, regularization=0.1, **more),
    "implicit weighted": lambda **more: hmf.ImplicitALS(
        factors=6, alpha=0.2, unobserved_weight=1.7, regularization=2.0, regularization_scaling="count", **more
    ),
    "implicit cg": lambda **more: hmf.ImplicitALS(factors=6, alpha=3.0, solver="cg", **more),
    "cg float64": lambda **more: hmf.ExplicitALS(
        factors=5, solver="cg", cg_steps=4, biases=True, dtype="float64", **more
    ),
    "float64": lambda **more: hmf.ImplicitALS(factors=6, alpha=3.0, dtype="float64", **more),
}
GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
"""Of layouts; CPU ranks take those of one split."""


def problem(name: str, matrix: sp.csr_array, ranks: int, **more: Any) -> tuple[Any, Plan, sp.csr_array, State]:
    """(model, plan, matrix as the solvers take it, state to start from)."""
    model = MODELS[name](device=["cpu"] * ranks if ranks > 1 else "cpu", random_state=0, num_threads=2, **more)
    checked = model._check_matrix(matrix)
    plan = make_plan(model._objective(), model._settings(), checked.shape, checked.nnz)
    state = model._initial_state(LocalRatings(model, checked).on_host(plan), plan, model._objective())
    return model, plan, checked, state


def multi(name: str, matrix: sp.csr_array, grids: dict[str, Grid]) -> MultiALS:
    model, plan, checked, state = problem(name, matrix, grids["user"].size)
    return MultiALS(checked, transpose(checked, num_threads=1), model._objective(), plan, state, grids=grids)


def single(name: str, matrix: sp.csr_array) -> RankALS:
    model, plan, checked, state = problem(name, matrix, 1)
    return one_device(checked, transpose(checked, num_threads=1), model._objective(), plan, state)


# ------------------------------------------------------------------------------------------------------------ factors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_factors_of_one(name: str, ranks: int, ratings_matrix: sp.csr_array) -> None:
    """The same bits: each rank does with the whole fixed side what one device does."""
    solver, alone = multi(name, ratings_matrix, both((1, ranks))), single(name, ratings_matrix)
    ours, theirs = sweeps(solver), sweeps(alone)
    for side in SIDES:
        np.testing.assert_array_equal(ours.side(side).matrix, theirs.side(side).matrix)
        np.testing.assert_array_equal(ours.side(side).bias, theirs.side(side).bias)
    np.testing.assert_allclose(solver.objective_value(), alone.objective_value(), rtol=1e-9)


def test_more_ranks_than_rows() -> None:
    matrix = planted(5, 3, density=0.7)
    for name in ("biases", "implicit"):
        assert_close(sweeps(multi(name, matrix, both((1, 8)))), sweeps(single(name, matrix)), 0)


@settings(max_examples=15)
@given(
    st.integers(1, 25), st.integers(1, 25), st.floats(0.05, 0.9), st.integers(1, 4),
    st.sampled_from(["explicit", "implicit"]),
)  # fmt: skip
def test_any_shape_on_any_number_of_ranks(m: int, n: int, density: float, ranks: int, name: str) -> None:
    matrix = sp.random_array((m, n), density=density, rng=np.random.default_rng(m * n)).tocsr()
    matrix.data = matrix.data + 1
    if not matrix.nnz:
        return
    assert_close(sweeps(multi(name, matrix, both((1, ranks))), 1), sweeps(single(name, matrix), 1), 0)


# ---------------------------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("name", MODELS)
def test_estimators_take_lists(name: str, ratings_matrix: sp.csr_array) -> None:
    alone = MODELS[name](device="cpu", random_state=0, iterations=3).fit(ratings_matrix)
    model = MODELS[name](device=["cpu", "cpu", "cpu"], random_state=0, iterations=3).fit(ratings_matrix)
    np.testing.assert_array_equal(model.user_factors_, alone.user_factors_)
    np.testing.assert_array_equal(model.item_factors_, alone.item_factors_)
    assert model.device_ == "cpu+cpu+cpu" and model.plan_.devices == ("cpu",) * 3
    np.testing.assert_array_equal(model.recommend(1, N=3)[0], alone.recommend(1, N=3)[0])
    assert "1 x 3: each" in str(model.plan_)
    np.testing.assert_allclose(model.objective(ratings_matrix), alone.objective(ratings_matrix))
    n_users, factors = model.user_factors_.shape
    assert model.transform(ratings_matrix).shape == (n_users, factors + (model.user_bias_ is not None))


@pytest.mark.parametrize("more", [{"assembly": "bals"}, {"reorder": "both"}, {"assembly": "blas3"}])
def test_layouts_and_orders(more: dict[str, Any], ratings_matrix: sp.csr_array) -> None:
    alone = MODELS["biases"](device="cpu", random_state=0, iterations=2, **more).fit(ratings_matrix)
    model = MODELS["biases"](device=["cpu"] * 3, random_state=0, iterations=2, **more).fit(ratings_matrix)
    np.testing.assert_allclose(model.user_factors_, alone.user_factors_, atol=1e-4)
    np.testing.assert_allclose(model.item_bias_, alone.item_bias_, atol=1e-4)


def test_balance_and_callback(ratings_matrix: sp.csr_array) -> None:
    records: dict[int, list[float]] = {}
    for ranks in (1, 3):
        seen: list[float] = []
        MODELS["implicit"](device=["cpu"] * ranks, random_state=0, iterations=3, balance=True).fit(
            ratings_matrix, callback=lambda model, record, seen=seen: seen.append(record["objective"])
        )
        records[ranks] = seen
    np.testing.assert_allclose(records[3], records[1], rtol=1e-5)
    assert len(records[1]) == 3


def test_subspace_over_ranks(ratings_matrix: sp.csr_array) -> None:
    options = {"factors": 8, "solver": "subspace", "block_size": 4, "iterations": 2, "random_state": 0}
    alone = hmf.ImplicitALS(device="cpu", **options).fit(ratings_matrix)
    model = hmf.ImplicitALS(device=["cpu", "cpu"], **options).fit(ratings_matrix)
    np.testing.assert_array_equal(model.user_factors_, alone.user_factors_)


def test_saved_and_loaded(tmp_path: Any, ratings_matrix: sp.csr_array) -> None:
    model = MODELS["explicit"](device=["cpu", "cpu"], random_state=0, iterations=2).fit(ratings_matrix)
    model.save(tmp_path / "model.safetensors")
    loaded = hmf.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.user_factors_, model.user_factors_)
    assert loaded.device_ == "cpu+cpu" and loaded.device == ["cpu", "cpu"]


# ------------------------------------------------------------------------------------------------------------ failures


def test_row_that_fails_is_named_and_stops_all_ranks(ratings_matrix: sp.csr_array) -> None:
    """One rank's system is not positive definite: its error comes out, with the row as the input counts it."""
    matrix = ratings_matrix.copy()
    model, plan, checked, state = problem("explicit", matrix, 3)
    objective = replace(model._objective(), regularization=0.0)
    degrees = np.diff(checked.indptr), np.bincount(checked.indices, minlength=checked.shape[1])
    state = initial_state(*degrees, plan.factors, np.float32, objective, state.mean, 0)  # both sides: users come first
    solver = MultiALS(checked, transpose(checked, num_threads=1), objective, plan, state)
    alone_plan = plan.changed(devices=())
    alone = one_device(checked, transpose(checked, num_threads=1), objective, alone_plan, state)
    before = solver.state.on_host()
    with pytest.raises(NotPositiveDefiniteError) as theirs:
        alone.update("user")
    with pytest.raises(NotPositiveDefiniteError) as ours:
        solver.update("user")
    rows = np.flatnonzero(np.diff(checked.indptr) < 5)
    assert ours.value.side == "user" and ours.value.row in rows and theirs.value.row in rows
    assert_close(solver.state.on_host(), before, 0)
    with pytest.raises(CommunicatorError, match="failed"):
        solver.update("item")


def test_nan_on_one_rank(ratings_matrix: sp.csr_array) -> None:
    solver = multi("explicit", ratings_matrix, both((1, 2)))
    matrix = solver.ranks[1].own["item"].matrix.copy()
    matrix[0] = np.nan
    solver.ranks[1].own["item"] = Factors(matrix)
    with pytest.raises((hmf.errors.NonFiniteError, NotPositiveDefiniteError)):
        solver.update("user")


def rank_of(comm: Any, layout: RankLayout, matrix: sp.csr_array, columns: int | None = None, **changes: Any) -> RankALS:
    model, plan, checked, state = problem("explicit", matrix, 2)
    both_ways = {"user": checked, "item": transpose(checked, num_threads=1)}
    own = {}
    for side in SIDES:
        first, last = layout.own(side, comm.rank)
        own[side] = Factors(state.side(side).matrix[first:last])
    blocks = {side: layout.cut(side, comm.rank, InMemory(both_ways[side])) for side in SIDES}
    if columns is not None:
        blocks["user"] = InMemory(blocks["user"].csr[:, :columns])
    plan = plan.changed(**changes)
    start, worker = State(own["user"], own["item"]), CpuWorker(plan.num_threads)
    return RankALS(comm, layout, blocks, model._objective(), plan, start, worker)


def layout_of(matrix: sp.csr_array, grid: tuple[int, int]) -> RankLayout:
    degrees = {"user": np.diff(matrix.indptr), "item": np.bincount(matrix.indices, minlength=matrix.shape[1])}
    return RankLayout.even(degrees, both(grid), 1.0)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_rank_with_other_data(grid: tuple[int, int], ratings_matrix: sp.csr_array) -> None:
    layout = layout_of(ratings_matrix, grid)
    other = ratings_matrix.copy()
    other.data[::7] += 1

    def function(comm: Any) -> None:
        rank_of(comm, layout, other if comm.rank else ratings_matrix)

    with pytest.raises(CommunicatorError, match="different data"):
        run_ranks(2, function)


def test_rank_with_another_plan(ratings_matrix: sp.csr_array) -> None:
    layout = layout_of(ratings_matrix, (1, 2))
    with pytest.raises(CommunicatorError, match="rank 1 has another layout, objective or plan than rank 0"):
        run_ranks(2, lambda comm: rank_of(comm, layout, ratings_matrix, cg_steps=3 + comm.rank))


def test_ranks_by_themselves(ratings_matrix: sp.csr_array) -> None:
    """The program of a rank needs no coordinator."""
    layout = layout_of(ratings_matrix, (1, 2))

    def function(comm: Any) -> tuple[np.ndarray, float]:
        rank = rank_of(comm, layout, ratings_matrix)
        iterate(rank)
        users, value = rank.state.user.matrix, rank.objective_value()
        rank.balance()
        np.testing.assert_allclose(rank.objective_value(), value, rtol=0.5)
        rank.close()
        return users, value

    parts, values = zip(*run_ranks(2, function), strict=True)
    alone = single("explicit", ratings_matrix)
    assert_close(State(Factors(np.concatenate(parts)), sweeps(alone, 1).item), alone.state)
    np.testing.assert_allclose(values, alone.objective_value(), rtol=1e-5)


def test_bad_calls(ratings_matrix: sp.csr_array) -> None:
    layout = layout_of(ratings_matrix, (1, 2))
    with pytest.raises(ValueError, match="the layout is of 2 ranks, the communicator of 1"):
        rank_of(Single(), layout, ratings_matrix)
    with pytest.raises(RatingsError, match=r"by user have shape \(60, 39\), the layout is of \(60, 40\)"):
        run_ranks(2, lambda comm: rank_of(comm, layout, ratings_matrix[:, :-1]))
    with pytest.raises(RatingsError, match=r"user block of rank . has shape .* cut it with RankLayout.cut"):
        run_ranks(2, lambda comm: rank_of(comm, layout, ratings_matrix, columns=-1))
    with pytest.raises(ValueError, match="same number of ranks"):
        RankLayout(layout.bounds, {"user": Grid(1, 2), "item": Grid(3, 1)})
    with pytest.raises(ValueError, match="at least 1 x 1"):
        Grid(0, 2)
    with pytest.raises(ValueError, match="'two_phase' needs the socket of each GPU"):
        make_reduction("two_phase", Single(), None)
    with pytest.raises(ValueError, match="reduction must be"):
        make_reduction("three", Single(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many ranks on each socket"):
        run_ranks(3, lambda comm: make_reduction("two_phase", comm, [0, 1, 1]))


def test_ctrl_c_keeps_the_last_half_sweep(monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array) -> None:
    """Interrupted while ranks solve the users of the second iteration."""
    users, resume, before = itertools.count(), threading.Event(), set(threading.enumerate())
    solve = RankALS.solve

    def slow(self: RankALS, side: Any) -> Any:
        if side == "user" and next(users) >= 2:
            if self.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 20
            while not resume.is_set() and time.monotonic() < deadline:
                with contextlib.suppress(Exception):
                    self.worker.check()  # type: ignore[attr-defined]
                    time.sleep(0.01)
                    continue
                resume.set()
        return solve(self, side)

    monkeypatch.setattr(RankALS, "solve", slow)
    model = MODELS["explicit"](device=["cpu", "cpu"], random_state=0, iterations=5)
    with pytest.raises(KeyboardInterrupt):
        model.fit(ratings_matrix)
    resume.set()
    assert not rank_threads(before)
    assert model.n_iter_ == 1
    monkeypatch.undo()
    alone = single("explicit", ratings_matrix)
    sweeps(alone, 1)
    alone.update("item")
    np.testing.assert_array_equal(model.item_factors_, alone.state.item.matrix)
    np.testing.assert_array_equal(model.user_factors_, alone.state.user.matrix)


def rank_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the threads of ranks that have come since; those that are about to end get a moment."""
    deadline = time.monotonic() + 10
    while names := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("hybridmf rank")]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return names


@pytest.mark.parametrize("ended_by", [None, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["als", "sgd"])
def test_threads_of_ranks_end_with_the_fit(
    kind: str, ended_by: Any, monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array
) -> None:
    """However the fit ends, and although somebody still has its solver and what was raised."""
    before = set(threading.enumerate())
    gc.disable()  # unclosed objects must not be found by chance
    try:
        model = MODELS["explicit"]() if kind == "als" else hmf.SGD(factors=4)
        model.set_params(device=["cpu", "cpu"], random_state=0, iterations=2)
        solvers, make = [], type(model)._solver
        monkeypatch.setattr(type(model), "_solver", lambda *at, **by: solvers.append(make(*at, **by)) or solvers[0])

        def end(model: Any, record: Any) -> None:
            if ended_by is not None:
                raise ended_by("as told")

        if ended_by is None:
            model.fit(ratings_matrix, callback=end)
        else:
            with pytest.raises(ended_by, match="as told"):
                model.fit(ratings_matrix, callback=end)
        assert not rank_threads(before)
        state = solvers[0].state.on_host()
        np.testing.assert_array_equal(model.user_factors_, state.user.matrix)
        solvers[0].close()  # once more
        if kind == "als":
            with pytest.raises(CommunicatorError, match="the ranks were closed; make another solver"):
                solvers[0].update("user")
    finally:
        gc.enable()


def test_threads_of_ranks_that_cannot_begin_end(ratings_matrix: sp.csr_array) -> None:
    before = set(threading.enumerate())
    model, plan, checked, state = problem("explicit", ratings_matrix, 2)

    def no_worker(communicator: Any) -> Any:
        raise MemoryError("no room for a rank")

    arguments = (checked, transpose(checked, num_threads=1), model._objective(), plan, state)
    with pytest.raises(MemoryError, match="no room") as raised:
        MultiALS(*arguments, make_worker=no_worker)
    assert raised.value is not None and not rank_threads(before)


# ------------------------------------------------------------------------------------------------------------ layouts


@settings(max_examples=30)
@given(st.integers(0, 30), st.integers(1, 20), st.sampled_from(GRIDS), st.integers(0, 3))
def test_blocks_cover_the_matrix_once(m: int, n: int, grid: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = sp.random_array((m, n), density=0.3, rng=rng).tocsr()
    matrix.sort_indices()
    layout = layout_of(matrix, grid)
    whole = np.zeros((m, n))
    for rank in range(layout.size):
        block = layout.cut("user", rank, InMemory(sp.csr_array(matrix))).csr
        rows = np.concatenate([np.arange(a, b) for a, b in layout.ranges("user", rank)])
        first, last = layout.columns("user", rank)
        whole[np.ix_(rows, np.arange(first, last))] += block.toarray()
        assert layout.own("user", rank) in layout.ranges("user", rank)
    np.testing.assert_array_equal(whole, matrix.toarray())


def test_batches_fit_and_leave_something_to_overlap() -> None:
    plan = make_plan(
        MODELS["explicit"]()._objective(), MODELS["explicit"](device=["cpu"] * 2)._settings(), (10, 10), 50
    )
    assert batch_rows(plan.changed(batch_slots=14_000), 2, 10**6) == 1000
    large = plan.changed(batch_slots=10**9)
    assert batch_rows(large, 2, 4 * 10**7) == 10**7
    few = batch_rows(large, 2, 100)  # not worth while to cut
    sums = 2 * few * plan.rank * (plan.rank + 1) // 2 * 4
    assert BATCH_BYTES <= sums < 1.1 * BATCH_BYTES
    assert batch_rows(plan.changed(batch_slots=1), 2, 100) == 1


# ----------------------------------------------------------------------------------------------- compare, command line


@pytest.mark.usefixtures("small_product")
def test_compare_takes_lists() -> None:
    model = MODELS["explicit"](iterations=2)
    result = hmf.compare("ml-1m", {"als": model}, devices=["cpu", ["cpu", "cpu"]], scale=0.01)
    assert [run.device for run in result.runs] == ["cpu", "cpu+cpu"]
    assert result.agree and result.factor_differences["als", "cpu+cpu"] == 0
    assert "cpu+cpu" in str(result)


@pytest.mark.usefixtures("small_product")
def test_command_line_takes_lists(tmp_path: Any, ratings_matrix: sp.csr_array) -> None:
    entries = ratings_matrix.tocoo()
    lines = [f"{u},{i},{v}" for u, i, v in zip(entries.row, entries.col, entries.data, strict=True)]
    (tmp_path / "r.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    arguments = ["fit", str(tmp_path / "r.csv"), "-o", str(tmp_path / "m.safetensors"), "--factors", "4"]
    done = CliRunner().invoke(main, [*arguments, "--device", "cpu,cpu", "--iterations", "2", "--test-size", "0"])
    assert done.exit_code == 0, done.output
    assert "cpu+cpu" in done.output and hmf.load(tmp_path / "m.safetensors").device == ["cpu", "cpu"]
    done = CliRunner().invoke(main, [*arguments, "--device", "cpu,gpu", "--iterations", "2"])
    assert done.exit_code == 2 and "device, a list of devices, holds" in done.output
    devices = ["--device", "cpu", "--device", "cpu,cpu", "--method", "als", "--method", "sgd-msgd"]
    done = CliRunner().invoke(
        main, ["compare", "ml-1m", "--scale", "0.01", "--factors", "4", "--iterations", "2", *devices]
    )
    assert done.exit_code == 0, done.output
    assert "cpu+cpu" in done.output
