"""SGD on several ranks: against the float64 twin of the cyclic order, over every transport, and through `fit`."""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Factors, Objective, State
from hybridmf.core.validate import as_csr, csr_arrays
from hybridmf.cpu.sgd import CpuEpochs
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import CommunicatorError, DeviceError, DivergedError, ModelFileError
from hybridmf.formats import transpose
from hybridmf.gpu import sgd as gpu_sgd
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.gpu.sgd import GpuEpochs
from hybridmf.plan import sgd as _sgd_method
from hybridmf.plan.epochs import EpochSolver, degrees_of, sums_width, terms_at
from hybridmf.plan.make import make_plan
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Settings
from hybridmf.ranks import mcumsgd
from hybridmf.ranks.dealt import deal
from hybridmf.ranks.group import JoinedFactors
from hybridmf.ranks.mcumsgd import MultiSGD, RankSGD, cut_share, share_layout
from hybridmf.ranks.transport import threads as scale_threads
from hybridmf.ranks.transport.communicator import Single, check_agreement
from hybridmf.ranks.transport.threads import run_ranks
from support import emulated, late_gpus, reference
from support.checkout import ROOT
from support.fake_nccl import wait_until
from support.ranks import need_gpus
from support.ratings import planted
from support.sgd_states import arrays, assert_same_bits, method_of, relative_error, solver_of
from support.solvers import iterate

GPU = DeviceSpec("H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 140 << 30, 140 << 30)
WALK = ("indices", "ratings", "begins", "ends")
RATE_SCHEDULES = ["power", "rpcs", "adagrad"]

DEVICE = "cpu"
"""Of the ranks; "cuda" means GPUs that `emulate` emulates."""


def problem(matrix, method, rank=5, *, biases=False, threads=2, ranks=2, device=None):
    """What a solver is made of: matrix, objective, plan, state. `device`: default: DEVICE, of all ranks."""
    matrix = as_csr(matrix, dtype=matrix.dtype)
    objective = Objective.explicit(0.05, "count", biases)
    checked = Settings.check(
        factors=rank, dtype=matrix.dtype, num_threads=threads, device=["cpu"], iterations=1, method=method
    )
    plan = make_plan(objective, checked, matrix.shape, matrix.nnz).changed(devices=(device or DEVICE,) * ranks)
    degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    mean = float(matrix.data.mean())
    return matrix, objective, plan, initial_state(*degrees, rank, matrix.dtype.type, objective, mean, 0)


def multi(matrix, method, completed=0, state=None, order="passes", **options) -> MultiSGD:
    matrix, objective, plan, start = problem(matrix, replace(method, order=order), **options)
    return MultiSGD(matrix, transpose(matrix), objective, plan, state or start, completed)


def twin(matrix, method, state: State, ranks: int, epochs: int, order: str = "passes", objective=None) -> State:
    """The same epochs in float64, one rank after the other."""
    matrix = as_csr(matrix, dtype=matrix.dtype)
    plan = problem(matrix, replace(method, order=order), state.user.matrix.shape[1])[2]
    layout, popular = shares(matrix, ranks, plan)
    bounds, width = layout.bounds, sums_width(method, state.user.matrix.shape[1])
    for epoch in range(epochs):
        objective = objective or Objective.explicit(0.05, "count", state.user.bias is not None)
        terms = {side: terms_at(method, objective, state.mean, epoch, side) for side in SIDES}
        state = reference.mcumsgd(matrix, state, terms, bounds["user"], bounds["item"], width, order, popular)
    return state


def run(solver, epochs: int, states=None) -> State:
    """Some epochs; the states before each go into `states`."""
    for _ in range(epochs):
        if states is not None:
            states.append(solver.state)
        iterate(solver)
    return solver.state


def emulate(monkeypatch):
    """Let ranks have GPUs whose kernels the emulator runs."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    monkeypatch.setattr(mcumsgd, "open_device", lambda name: emulated.EmulatedDevice())
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cuda")


@pytest.fixture(params=["cpu", "emulated"])
def backend(request, monkeypatch):
    """CPU ranks; and GPU ranks whose kernels the emulator runs: in float64 with biases, each compiles for seconds."""
    if request.param == "emulated":
        if request.node.callspec.params.get("biases") is False:
            pytest.skip("the kernels without biases are tested by themselves")
        emulate(monkeypatch)
        monkeypatch.setattr(gpu_sgd, "LONG_ROW", 12)  # all kernels have work
    return request.param


# --------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("order", _sgd_method.ORDERS)
def test_the_cyclic_order(backend, order, ranks, biases, ratings_matrix):
    method = method_of()
    solver = multi(ratings_matrix.astype(np.float64), method, ranks=ranks, biases=biases, order=order)
    start = solver.state
    state = run(solver, 2)
    assert relative_error(state, twin(ratings_matrix, method, start, ranks, 2, order)) < 1e-12
    solver.close()


@pytest.fixture(params=["some", "all"])
def popular(request, monkeypatch):
    """Items with a pace of their own: a third of them, some in each range, or all, so that no other ones are left."""
    few = {"some": 13, "all": 0}[request.param]
    for name, value in {"MIN_POPULAR": few, "WALK": 1e9, "MOST_WALKS": 1e9}.items():
        monkeypatch.setattr(mcumsgd, name, value)
    return request.param


@pytest.mark.parametrize(("ranks", "biases"), [(2, False), (2, True), (3, True), (4, True)])
def test_popular_items_are_handed_on(backend, ranks, biases, popular, ratings_matrix):
    """Beside the steps, from rank to rank; users meet them last. The objective includes their entries."""
    method, matrix = method_of(), ratings_matrix.astype(np.float64)
    solver = multi(matrix, method, ranks=ranks, biases=biases)
    items = np.flatnonzero(np.bincount(matrix.indices))
    found, bounds = solver.ranks[0].popular, solver.ranks[0].layout.bounds["item"]
    if popular == "all":
        assert found.tolist() == items.tolist()
    else:
        counts = np.histogram(found, bounds)[0]
        assert counts.all() and (counts < np.diff(bounds)).all()
    start = solver.state
    state = run(solver, 3).on_host()
    assert relative_error(state, twin(matrix, method, start, ranks, 3)) < 1e-12
    expected = reference.objective_value(matrix, state, solver.ranks[0].objective)
    assert solver.objective_value() == pytest.approx(expected, rel=1e-12)
    solver.close()


@pytest.mark.parametrize("rate_schedule", RATE_SCHEDULES)
def test_sums_of_squares_of_popular_items(rate_schedule, popular, ratings_matrix):
    """They are handed on and kept between epochs and fits: an epoch and another one are two."""
    method, matrix = method_of(rate_schedule=rate_schedule), ratings_matrix.astype(np.float64)
    solver = multi(matrix, method, ranks=3, biases=True)
    start, middle = solver.state, run(solver, 1).on_host()
    assert relative_error(run(solver, 1), twin(matrix, method, start, 3, 2)) < 1e-12
    again = multi(matrix, method, completed=1, state=middle, ranks=3, biases=True)
    assert_same_bits(run(again, 1).on_host(), solver.state.on_host())


def test_popular_items_over_a_communicator(popular, ratings_matrix):
    """Each rank by itself gives the bits of the ranks of one solver; its state has its own items, popular ones, too."""
    parts = problem(ratings_matrix, method_of(), biases=True, ranks=3)
    together = multi(ratings_matrix, method_of(), biases=True, ranks=3)
    expected, value = run(together, 2).on_host(), together.objective_value()
    found = run_ranks(3, lambda c: spmd(c, parts))
    users, items = (JoinedFactors([state.side(side) for state, _ in found]) for side in SIDES)
    assert_same_bits(State(users, items), State(expected.user, expected.item))
    assert [each for _, each in found] == [value] * 3


def test_which_items_are_popular(monkeypatch):
    """Those whose walk takes longer than the rest of a step, as many as walk at a time; none on one rank."""
    degrees = np.r_[np.full(15_000, 3_000), 190_000, 70_000, 150_000]

    def popular(degrees, size):
        plan = problem(planted(), method_of())[2]
        return mcumsgd.popular_items(degrees, size, plan).tolist()

    assert popular(degrees, 2) == [15_000, 15_002]
    assert popular(degrees, 3) == [15_000, 15_001, 15_002]
    assert not popular(degrees, 1)
    monkeypatch.setattr(mcumsgd, "MOST_WALKS", 0.55)
    assert popular(degrees, 3) == [15_000]
    assert popular(degrees, 4) == [15_000, 15_001, 15_002]
    assert not popular(degrees // 6, 3)  # a step more would take longer
    assert not popular(np.empty(0, np.int64), 4)


@pytest.mark.parametrize(("ranks", "order"), [(1, "passes"), (2, "blocks")])
def test_one_rank_and_blocks_have_no_popular_items(ranks, order, popular, ratings_matrix):
    solver = multi(ratings_matrix, method_of(), ranks=ranks, order=order)
    assert not len(solver.ranks[0].popular)
    solver.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_lambdas_of_users_and_of_items(backend, ranks, ratings_matrix):
    """MSGD eq. 1: each side has its own, on one device and on several; the objective has both."""
    matrix, method = ratings_matrix.astype(np.float64), method_of()
    given, _, plan, start = problem(matrix, method, biases=True, ranks=ranks)
    objective = Objective.explicit((0.4, 0.02), "count", True, (0.3, 0.01))
    solver = MultiSGD(given, transpose(given), objective, plan, start, 0)
    state = run(solver, 2).on_host()
    assert relative_error(state, twin(matrix, method, start, ranks, 2, objective=objective)) < 1e-12
    swapped = Objective.explicit((0.02, 0.4), "count", True, (0.3, 0.01))
    assert relative_error(state, twin(matrix, method, start, ranks, 2, objective=swapped)) > 1e-4
    expected = reference.objective_value(matrix, state, objective)
    assert solver.objective_value() == pytest.approx(expected, rel=1e-12)
    solver.close()


def test_an_epoch_of_several_ranks_converges_like_an_epoch_of_one_device(monkeypatch):
    """Items walk long here. In Alg. 4's order each range of users gets factors of its own, and RMSEs are far apart."""
    for name, value in {"WALK": 1e9, "MOST_WALKS": 12}.items():
        monkeypatch.setattr(mcumsgd, name, value)
    matrix = planted(3000, 60, 0.5, 4, seed=1)

    def rmse_after_six(ranks, order):
        solver = multi(matrix, method_of(learning_rate=0.03), rank=8, ranks=ranks, order=order)
        state, entries = run(solver, 6).on_host(), matrix.tocoo()
        scores = state.mean + np.einsum("ij,ij->i", state.user.matrix[entries.row], state.item.matrix[entries.col])
        return np.sqrt(np.mean((entries.data - scores) ** 2))

    alone = rmse_after_six(1, "passes")
    for ranks, fewest in ((2, 1e9), (3, 1e9), (4, 1e9), (2, 1), (4, 1)):  # without and with popular items
        monkeypatch.setattr(mcumsgd, "MIN_POPULAR", fewest)
        assert rmse_after_six(ranks, "passes") == pytest.approx(alone, rel=0.05), (ranks, fewest)
    assert rmse_after_six(2, "blocks") > 2 * alone


@pytest.mark.parametrize("order", _sgd_method.ORDERS)
def test_a_fit_takes_the_order_by_name(order, backend, ratings_matrix, monkeypatch):
    """The factors are those of the float64 twin of that order, from the factors that the fit starts from."""
    options = {"factors": 5, "biases": True, "iterations": 2, "random_state": 0, "dtype": "float64", "order": order}
    given, make = [], mcumsgd.MultiSGD

    def on_devices(*arguments):
        given.append(arguments)
        return make(*arguments[:3], arguments[3].changed(devices=(DEVICE,) * 3), *arguments[4:])

    monkeypatch.setattr(mcumsgd, "MultiSGD", on_devices)
    model = hmf.SGD(device=["cpu"] * 3, **options).fit(ratings_matrix)
    ((_, _, objective, plan, start, _),) = given
    assert plan.method.order == order and (", order blocks;" in str(model.plan_)) == (order == "blocks")
    expected = twin(ratings_matrix, plan.method, start, 3, 2, order, objective)
    np.testing.assert_allclose(model.user_factors_, expected.user.matrix, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.item_factors_, expected.item.matrix, rtol=1e-5, atol=1e-6)


def test_an_order_needs_several_devices(ratings_matrix):
    with pytest.raises(ValueError, match="order must be one of 'passes', 'blocks'; got 'block'"):
        hmf.SGD(order="block").fit(ratings_matrix)
    with pytest.raises(ValueError, match=r"order='blocks' is the order .* got device='cpu'; use a list such as"):
        hmf.SGD(order="blocks", device="cpu").fit(ratings_matrix)


@pytest.mark.parametrize("rate_schedule", RATE_SCHEDULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", _sgd_method.ORDERS)
def test_sums_of_squares_travel(order, rate_schedule, dtype):
    method, matrix = method_of(rate_schedule=rate_schedule), planted().astype(dtype)
    solver = multi(matrix, method, rank=11, biases=True, ranks=3, order=order)
    start = solver.state
    expected = twin(matrix, method, start, 3, 2, order)
    assert relative_error(run(solver, 2), expected) < (1e-12 if dtype == np.float64 else 2e-5)
    assert (expected.user.squares is not None) == (rate_schedule != "power")


@pytest.mark.parametrize("ordering", ["user", "item", "crossed"])
def test_orderings_on_gpu_ranks(backend, ordering, popular, ratings_matrix):
    if backend == "cpu":
        pytest.skip("orderings are a GPU's")
    method = replace(method_of(), ordering=ordering)
    solver = multi(ratings_matrix.astype(np.float64), method, biases=True)
    start = solver.state
    assert relative_error(run(solver, 2), twin(ratings_matrix, method, start, 2, 2)) < 1e-12


@pytest.mark.parametrize("rate_schedule", RATE_SCHEDULES)
def test_one_rank_is_the_single_device(rate_schedule, ratings_matrix):
    method = method_of(rate_schedule=rate_schedule)
    alone = run(solver_of(ratings_matrix, method, 5, biases=True, threads=2), 3)
    solver = multi(ratings_matrix, method, ranks=1, biases=True)
    assert_same_bits(run(solver, 3), alone)


def test_one_gpu_rank_is_the_single_device(backend, ratings_matrix):
    if backend == "cpu":
        pytest.skip("done above")
    from support import emulated

    method = method_of()
    ratings_matrix = ratings_matrix.astype(np.float64)
    matrix, objective, plan, state = problem(ratings_matrix, method, biases=True, ranks=1)
    block = {"user": matrix, "item": transpose(matrix)}
    kernels = GpuEpochs(emulated.EmulatedDevice(), [block], objective, plan)
    alone = EpochSolver(kernels, objective, plan, state, degrees_of(block))
    solver = multi(ratings_matrix, method, ranks=1, biases=True)
    for both in range(2):
        iterate(alone), iterate(solver)
        assert_same_bits(solver.state.on_host(), alone.state.on_host())
        assert solver.objective_value() == pytest.approx(alone.objective_value(), rel=1e-12), both


def test_any_number_of_threads_gives_the_same_bits(ratings_matrix):
    states = [run(multi(ratings_matrix, method_of(), threads=threads), 2) for threads in (1, 2, 5)]
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


@pytest.mark.parametrize("shape", [(3, 2), (1, 40), (40, 1)])
def test_more_ranks_than_rows(backend, shape):
    """Ranks without users or items, blocks without ratings."""
    dense = np.random.default_rng(1).integers(1, 6, shape).astype(float)
    method = method_of(learning_rate=0.01)
    solver = multi(sp.csr_array(dense), method, ranks=4, biases=True)
    start = solver.state
    state = run(solver, 2)
    assert relative_error(state, twin(sp.csr_array(dense), method, start, 4, 2)) < 1e-12
    assert np.isfinite(solver.objective_value())


@pytest.mark.parametrize("biases", [False, True])
def test_objective(backend, biases, ratings_matrix):
    matrix = ratings_matrix.astype(np.float64)
    solver = multi(matrix, method_of(), biases=biases, ranks=3)
    run(solver, 1)
    expected = reference.objective_value(matrix, solver.state.on_host(), solver.ranks[0].objective)
    assert solver.objective_value() == pytest.approx(expected, rel=1e-12)


# --------------------------------------------------------------------------------------------- shares


def shares(matrix, ranks, plan):
    degrees = {"user": np.diff(matrix.indptr), "item": np.bincount(matrix.indices, minlength=matrix.shape[1])}
    popular = mcumsgd.popular_items(degrees["item"], ranks, plan)
    return share_layout(degrees, ranks, popular), popular


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_shares_hold_every_rating_once(ranks, ratings_matrix):
    matrix, _, plan, _ = problem(ratings_matrix, method_of())
    layout, popular = shares(matrix, ranks, plan)
    rows = []
    for rank in range(ranks):
        blocks = cut_share(matrix, layout, rank, popular, 1)
        for block in blocks:
            assert (block["user"] != block["item"].T).nnz == 0
        rows.append(sp.hstack([block["user"] for block in blocks]))
    assert (sp.csr_array(sp.vstack(rows)) != matrix).nnz == 0
    sizes = [part.nnz for part in rows]
    assert max(sizes) - min(sizes) <= 2 * np.diff(matrix.indptr).max()


def test_shares_with_popular_items(ratings_matrix):
    """Their entries are in a block of their own, in parts again, and their rows empty in that of their range."""
    matrix = as_csr(ratings_matrix)
    popular = np.array([0, 1, 5, 22, 23, 39])
    layout = share_layout({"user": np.diff(matrix.indptr), "item": np.full(40, 2)}, 3, popular)
    dense, rest = matrix.toarray(), matrix.toarray()
    rest[:, popular] = 0
    for rank in range(3):
        *blocks, last = (cut := cut_share(matrix, layout, rank, popular, 1))[:4]
        users = slice(*layout.own("user", rank))
        parts = [dense[users][:, items] for items in ([0, 1], [5, 22], [23, 39])]
        assert all(np.array_equal(block["user"].toarray(), part) for block, part in zip(cut[4:], parts, strict=True))
        np.testing.assert_array_equal(last["user"].toarray(), dense[users][:, popular])
        for other, block in enumerate(blocks):
            np.testing.assert_array_equal(block["user"].toarray(), rest[users, slice(*layout.own("item", other))])
        for block in cut:
            assert (block["user"] != block["item"].T).nnz == 0


def test_joined_factors():
    whole = Factors(np.arange(12.0).reshape(6, 2), np.arange(6.0), Factors(np.ones((6, 2)), np.zeros(6)))
    parts = [whole.part(slice(a, b)) for a, b in ((0, 2), (2, 2), (2, 6))]
    joined = JoinedFactors(parts)
    assert len(joined) == 6
    assert_same_bits(State(joined, joined), State(whole, whole))
    assert joined.on_host() is joined.on_host()
    import pickle

    again = pickle.loads(pickle.dumps(joined))
    assert type(again) is Factors
    assert_same_bits(State(again, again), State(whole, whole))
    plain = JoinedFactors([Factors(np.ones((1, 2)))])
    assert plain.bias is None
    assert plain.squares is None


@pytest.mark.parametrize("biases", [False, True])
def test_factors_on_devices_are_copied_once(biases):
    """To their place among those of the other ranks if their rows have no padding."""
    copied: list[tuple[int, ...]] = []

    class Device:
        def download(self, array, target=None, **options):
            copied.append(array.shape)
            return array.copy() if target is None else np.copyto(target, array)

    table = np.arange(24, dtype=np.float32).reshape(6, 4)
    bias = np.arange(6, dtype=np.float32)
    parts = [
        DeviceFactors(Device(), table[rows], 3 if biases else 4, bias[rows] if biases else None)
        for rows in (slice(0, 2), slice(2, 6))
    ]
    joined = JoinedFactors(parts)
    np.testing.assert_array_equal(joined.matrix, table[:, :3] if biases else table)
    if biases:
        np.testing.assert_array_equal(joined.bias, bias)
    else:
        assert joined.bias is None
    assert sorted(copied) == sorted([(2, 4), (4, 4)] + [(2,), (4,)] * biases)


# --------------------------------------------------------------------------------------------- transports, overlap


def spmd(communicator, parts, epochs=2, **changes):
    matrix, objective, plan, state = parts
    worker = RankSGD(communicator, matrix, objective, plan, state, **changes)
    for _ in range(epochs):
        iterate(worker)
    return worker.state, worker.objective_value()


def test_a_single_communicator(ratings_matrix):
    parts = problem(ratings_matrix, method_of())
    state, _ = spmd(Single(), parts)
    alone = run(solver_of(ratings_matrix, method_of(), 5), 2)
    assert_same_bits(state, alone)


@pytest.mark.parametrize(("order", "first"), [("passes", 2), ("blocks", 1)])
def test_items_travel_while_users_move(monkeypatch, order, first, ratings_matrix):
    """Rank 0 moves users only once rank 1 has its items: the sends do not wait for the users.

    By "passes" a range of items arrives before any users move, and the second one then.
    """
    arrived, arrivals = threading.Event(), []
    original = CpuEpochs.move

    def move(self, block, side, *given):
        if side == "user" and threading.current_thread().name == "hybridmf rank 0":
            assert arrived.wait(20)
        original(self, block, side, *given)

    received = CpuEpochs.arrived

    def note(self, *moved):
        if threading.current_thread().name == "hybridmf rank 1":
            arrivals.append(1)
            if len(arrivals) == first:
                arrived.set()
        return received(self, *moved)

    monkeypatch.setattr(CpuEpochs, "move", move)
    monkeypatch.setattr(CpuEpochs, "arrived", note)
    solver = multi(ratings_matrix, method_of(), order=order)
    run(solver, 1)
    assert len(arrivals) == 2


def test_one_thread_launches_the_steps_of_all_gpus_in_turn(monkeypatch, ratings_matrix):
    """Each step of all ranks before the next one of any, so that no GPU waits long for its first kernel."""
    emulate(monkeypatch)
    original, moves = GpuEpochs.move, []

    def move(self, block, side, *given):
        assert threading.current_thread() is threading.main_thread()
        moves.append((solver.ranks.index(next(rank for rank in solver.ranks if rank.kernels is self)), block, side))
        original(self, block, side, *given)

    monkeypatch.setattr(GpuEpochs, "move", move)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), biases=True, ranks=3)
    run(solver, 1)
    items = [(rank, (rank + step) % 3, "item") for step in range(2) for rank in range(3)]
    assert moves[:6] == items
    last = [[(rank, (rank + 2) % 3, side) for rank in range(3)] for side in ("item", "user")]
    assert moves[6:9] == last[0] and set(moves[9:12]) >= {last[1][0]}
    assert len(moves) == 2 * 9


def test_walks_of_popular_items_are_launched_first_and_at_half_the_pace(popular, monkeypatch, ratings_matrix):
    """The rest waits last on these; their copies come in turn with those of other items, which take half as long."""
    emulate(monkeypatch)
    original, moves = GpuEpochs.move, []

    def move(self, block, side, *given):
        moves.append((self, (block, side)))
        original(self, block, side, *given)

    monkeypatch.setattr(GpuEpochs, "move", move)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), biases=True, ranks=3)
    run(solver, 1)
    assert [each for _, each in moves[:3]] == [(4 + rank, "item") for rank in range(3)]
    expected = [(4, "item"), (0, "item"), (1, "item"), (6, "item"), (2, "item"), (2, "user"), (0, "user")]
    expected += [(5, "item"), (1, "user"), (3, "user")]  # part 2, which rank 1 has begun, and all popular items
    assert [each for kernels, each in moves if kernels is solver.ranks[0].kernels] == expected
    solver.close()


@pytest.mark.parametrize(
    ("ranks", "order", "popular", "biases"),
    [
        *((ranks, "passes", popular, True) for ranks in (2, 3) for popular in ("some", "all")),
        *((ranks, "blocks", "some", True) for ranks in (2, 3)),  # where no items are popular
        # biases are one more array of each copy
        (2, "passes", "some", False),
        (2, "blocks", "some", False),
    ],
    indirect=["popular"],
)
def test_streams_of_gpus_run_in_any_order(ranks, order, biases, popular, monkeypatch, ratings_matrix):
    """Kernels and copies on the streams of all GPUs: any order that the events between them allow gives the factors."""
    emulate(monkeypatch)
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 12)
    matrix, method, begin_result = ratings_matrix.astype(np.float64), method_of(), GpuEpochs.begin_result
    _, _, _, start = problem(matrix, method, biases=biases)
    expected = twin(matrix, method, start, ranks, 3, order)
    # two ranks need more than six to find each event that is left out
    for seed in range(12 if ranks == 2 else 6):
        streams, numbers = late_gpus.Streams(seed), count()
        opened = lambda name, streams=streams, numbers=numbers: late_gpus.LateGpu(next(numbers), streams)  # noqa: E731
        monkeypatch.setattr(mcumsgd, "open_device", opened)

        def result(kernels, *sides, streams=streams):
            streams.wait_for(kernels.device.current)  # array arithmetic, which runs at once, reads the sums
            return begin_result(kernels, *sides)

        monkeypatch.setattr(GpuEpochs, "begin_result", result)
        solver = multi(matrix, method, ranks=ranks, biases=biases, order=order)
        streams.drain()
        for _ in range(3):  # the first epoch, which is recorded, and two repeats
            state = run(solver, 1)
            # the next one may overwrite what an epoch reads
            assert not any(streams.waiting.values()), "the host has not waited for all work of the epoch"
        assert relative_error(state.on_host(), expected) < 1e-12, seed
        solver.close()


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_pass_depends_on_no_later_pass_of_the_sender(epochs, monkeypatch, ratings_matrix):
    """In new launches and in repeated ones: while a rank updates its next items, those that it has sent are updated."""
    emulate(monkeypatch)
    streams, numbers, begin_result = late_gpus.Streams(1), count(), GpuEpochs.begin_result
    monkeypatch.setattr(mcumsgd, "open_device", lambda name: late_gpus.LateGpu(next(numbers), streams))
    solver, checked = multi(ratings_matrix.astype(np.float64), method_of(), ranks=3, biases=True), []

    def check(*given):
        if solver.ranks[0].epoch == epochs and not checked:  # all passes are queued
            passes = [[one for one in streams.kernels if one[0] == (rank, "main")] for rank in range(3)]
            passes = [[one for one in own if streams.kernels[one].startswith("centralized")] for own in passes]
            for rank, own in enumerate(passes):
                sender = passes[(rank + 1) % 3]
                for step in range(1, 3):
                    behind = streams.behind(*own[step])
                    checked.append(sender[step - 1] in behind and sender[step] not in behind)
        streams.drain()
        return begin_result(*given)

    monkeypatch.setattr(GpuEpochs, "begin_result", check)
    streams.drain()
    run(solver, epochs)
    streams.drain()
    streams.kernels.clear()
    solver.solve(None)
    assert checked == [True] * 6


@pytest.mark.parametrize(
    ("order", "popular"), [("passes", "some"), ("passes", "all"), ("blocks", "some")], indirect=["popular"]
)
@pytest.mark.parametrize("biases", [False, True])
def test_repeated_launches_give_the_bits_of_new_ones(order, biases, popular, monkeypatch, ratings_matrix):
    """With another learning rate and other memory of the users in each epoch; nothing is chosen again in Python."""
    emulate(monkeypatch)
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 12)
    method, moves, move = method_of(rate_schedule="geometric", decay=0.5), [], GpuEpochs.move
    monkeypatch.setattr(GpuEpochs, "move", lambda *given: moves.append(1) or move(*given))
    given = (ratings_matrix.astype(np.float64), method)
    repeated, anew = (multi(*given, order=order, ranks=3, biases=biases) for _ in range(2))
    run(repeated, 1)
    first = len(moves)
    run(repeated, 3)
    assert len(moves) == first
    monkeypatch.setattr(GpuEpochs, "is_repeatable", False)
    run(anew, 4)
    assert len(moves) == 5 * first
    assert_same_bits(repeated.state.on_host(), anew.state.on_host())


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("is_popular", [False, True])
def test_repeated_launches_do_not_write_to_states(is_popular, biases, monkeypatch, ratings_matrix):
    """Which a caller keeps: the best so far, those of a checkpoint."""
    emulate(monkeypatch)
    if is_popular:
        monkeypatch.setattr(mcumsgd, "MIN_POPULAR", 13)
        monkeypatch.setattr(mcumsgd, "WALK", 1e9)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=biases)
    states, copies = [], []
    for _ in range(4):
        run(solver, 1)
        sides = [rank.state.side(side) for rank in solver.ranks for side in SIDES]
        sides += [rank._popular for rank in solver.ranks if is_popular]
        states.append([array for side in sides for array in side.arrays])
        copies.append([array.copy() for array in states[-1]])
    for state, copy in zip(states, copies, strict=True):
        for array, expected in zip(state, copy, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_repeated_launches_keep_no_users(monkeypatch, ratings_matrix):
    """Of the recorded epoch: a table of all users."""
    emulate(monkeypatch)
    rows, copies = [], GpuEpochs.copies

    def made(*given):
        made = copies(*given)
        if len(given) == 2:
            rows.append(weakref.ref(made))
        return made

    monkeypatch.setattr(GpuEpochs, "copies", made)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=True)
    run(solver, 1)
    gc.collect()
    assert len(rows) == 2 and not any(row() for row in rows)


@pytest.mark.parametrize("fewest", [13, 1e9])
def test_another_state_is_read_by_repeated_launches(fewest, monkeypatch, ratings_matrix):
    """An epoch that is not kept is repeated from the same state, with and without popular items."""
    emulate(monkeypatch)
    monkeypatch.setattr(mcumsgd, "MIN_POPULAR", fewest)
    monkeypatch.setattr(mcumsgd, "WALK", 1e9)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=True)
    run(solver, 2)
    once, again = (solver.solve(None) for _ in range(2))
    for (one, loss), (other, other_loss) in zip(once, again, strict=True):
        assert_same_bits(one.on_host(), other.on_host())
        assert loss == other_loss


@pytest.mark.parametrize("biases", [False, True])
def test_launches_are_recorded_again_on_another_stream(biases, popular, monkeypatch, ratings_matrix):
    """And the new recording has the users of each epoch, too."""
    emulate(monkeypatch)
    moves, move = [], GpuEpochs.move
    monkeypatch.setattr(GpuEpochs, "move", lambda *given: moves.append(1) or move(*given))
    solver, other = (multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=biases) for _ in range(2))
    run(solver, 2)
    first = len(moves)
    monkeypatch.setattr(emulated.EmulatedDevice, "current_stream", lambda self: 7)
    run(solver, 1)
    assert len(moves) == 2 * first
    run(solver, 2)
    assert len(moves) == 2 * first
    assert_same_bits(solver.state.on_host(), run(other, 5).on_host())


@pytest.mark.parametrize("epochs", [0, 1])
def test_ctrl_c_between_launches_leaves_the_last_epoch(epochs, popular, monkeypatch, ratings_matrix):
    """Of all GPUs, in the first epoch and in one that repeats its launches; the solver cannot go on."""
    emulate(monkeypatch)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), biases=True, ranks=3)
    run(solver, epochs)
    before, ranks = solver.state, [rank.state for rank in solver.ranks]
    moves, waited = [], []
    interrupted, name = (emulated.np, "copyto") if epochs else (GpuEpochs, "move")
    original = getattr(interrupted, name)

    def move(*given):
        moves.append(1)
        if len(moves) == 8:
            raise KeyboardInterrupt
        original(*given)

    monkeypatch.setattr(interrupted, name, move)
    monkeypatch.setattr(solver.peers, "_wait_for_all", lambda: waited.append(1))
    with pytest.raises(KeyboardInterrupt):
        iterate(solver)
    assert waited == [1]
    assert solver.state is before and all(rank.state is state for rank, state in zip(solver.ranks, ranks, strict=True))
    with pytest.raises(CommunicatorError, match="stopped by KeyboardInterrupt"):
        iterate(solver)
    solver.close()


def test_no_epoch_after_the_first_chooses_configurations(monkeypatch, ratings_matrix):
    """Configurations are looked up once: ranks are threads, which wait for each other while one computes in Python."""
    emulate(monkeypatch)
    found, looked_up = gpu_sgd.BlockedConfig.fastest, []
    counted = classmethod(lambda cls, *sizes: looked_up.append(1) or found(*sizes))
    monkeypatch.setattr(gpu_sgd.BlockedConfig, "fastest", counted)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), biases=True)
    run(solver, 1)
    assert looked_up
    looked_up.clear()
    run(solver, 1)
    assert not looked_up


def test_long_rows_of_a_block(monkeypatch, ratings_matrix):
    """From fewer entries on several ranks: 1 / ranks^2. Rows that are short in any case have no block of the GPU."""
    from support import emulated

    matrix, objective, plan, _ = problem(ratings_matrix, method_of())
    layout, popular = shares(matrix, 4, plan)
    blocks = cut_share(matrix, layout, 0, popular, 1)
    rows = [GpuEpochs(emulated.EmulatedDevice(), blocks[:n], objective, plan).long_row for n in (1, 2, 4)]
    assert rows == [gpu_sgd.LONG_ROW, gpu_sgd.LONG_ROW * 3 // 8, gpu_sgd.LONG_ROW * 3 // 32]
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 2 * gpu_sgd.SHORTEST_LONG_ROW)
    backend = GpuEpochs(emulated.EmulatedDevice(), blocks, objective, plan)
    assert backend.long_row == gpu_sgd.SHORTEST_LONG_ROW


def test_popular_items_have_a_thread_block_each(popular, ratings_matrix):
    """Up to half of all; the other long rows have the rest."""
    from support import emulated

    matrix, objective, plan, _ = problem(ratings_matrix, method_of())
    layout, items = shares(matrix, 2, plan)
    blocks = cut_share(matrix, layout, 0, items, 1)
    for multiprocessors in (1, 12, 132):
        device = emulated.EmulatedDevice(multiprocessors=multiprocessors)
        kernels = GpuEpochs(device, blocks, objective, plan, long_row=1, ranks=2)
        most = kernels.schedules[2]._kernels._config.per_sm(device.spec) * multiprocessors
        bins = [schedule.long.get("item") if schedule else None for schedule in kernels.schedules]
        used = [0 if each is None else len(each.first) - 1 for each in bins]
        rows = [np.count_nonzero(np.diff(block["item"].indptr)) for block in blocks]
        left = max(1, most - min(max(rows[3:]), most // 2))
        assert used[:2] == [min(count, left) for count in rows[:2]]
        assert used[3:] == [min(count, max(1, most // 2)) for count in rows[3:]]


def test_walks_of_popular_items_have_multiprocessors_alone(monkeypatch, ratings_matrix):
    """By their shared memory; blocks of other long rows leave room for those of short ones."""
    emulate(monkeypatch)
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 4)
    monkeypatch.setattr(mcumsgd, "MIN_POPULAR", 13)
    monkeypatch.setattr(mcumsgd, "WALK", 1e9)
    prepare, given = emulated.EmulatedDevice.prepare, Counter()

    def noted(self, program, grid, block, arguments, shared_bytes=0):
        if program[1] == "blocked":
            given[shared_bytes == self.spec.shared_bytes] += 1
        return prepare(self, program, grid, block, arguments, shared_bytes)

    monkeypatch.setattr(emulated.EmulatedDevice, "prepare", noted)
    solver = multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=True)
    run(solver, 1)
    assert given[True] == 4 and given[False] > 4  # two ranges on two ranks


@pytest.mark.parametrize("shape", [(800, 20), (20, 800)])
def test_gpus_cut_their_shares(shape, monkeypatch):
    """With the arrays of blocks that the host has cut and transposed; rows of one side have ranges of columns."""
    for name, value in {"MIN_POPULAR": 0, "WALK": 3e5, "MOST_WALKS": 7}.items():
        monkeypatch.setattr(mcumsgd, name, value)
    emulate(monkeypatch)
    matrix, objective, plan, _ = problem(planted(*shape, 0.6, 4, seed=1), method_of(), rank=64)
    layout, popular = shares(matrix, 3, plan)
    assert 1 < len(popular) < shape[1]
    device = emulated.EmulatedDevice()
    device.spec = replace(device.spec, l2_bytes=1 << 16)
    dealt = deal([device] * 3, matrix.shape, *csr_arrays(matrix), 0.0)
    for rank in range(3):
        parts = [each.parts[rank] for each in dealt]
        found, expected = [
            GpuEpochs(device, blocks, objective, plan, ranks=3)
            for blocks in (
                mcumsgd.cut_dealt(device, *dealt, layout, rank, popular, plan),
                cut_share(matrix, layout, rank, popular, 1),
            )
        ]
        assert [each.parts[rank].indices for each in dealt] == [None, None], parts  # their memory is free
        schedules = list(zip(found.schedules, expected.schedules, strict=True))
        assert max(walk.n_ranges for ours, _ in schedules if ours is not None for walk in ours.walks.values()) > 1
        assert all((ours is None) == (theirs is None) for ours, theirs in schedules)
        assert [list(ours.walks) for ours, _ in schedules if ours is not None][-1] == ["item"]  # nothing else is kept
        for ours, theirs in (pair for pair in schedules if pair[0] is not None):
            assert list(ours.walks) == list(theirs.walks)
            for side, name in itertools.product(ours.walks, WALK):
                np.testing.assert_array_equal(*(getattr(each.walks[side], name) for each in (ours, theirs)))


def test_the_bench_compares_with_the_solver_that_a_fit_has(monkeypatch):
    """Speed-ups are over its first variant; half and double long rows are not what is measured anyway."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("mcumsgd")
    usual = bench.Variant(0)
    assert usual.beside == inspect.signature(gpu_sgd.Msgd).parameters["beside"].default
    assert next(bench.variants([1, 2], ("passes",), (), one=True)) == usual
    for variant in bench.all_variants([1, 2, 4]):
        if variant.long_row is not None:
            assert variant.long_row in (gpu_sgd.long_row_of(variant.ranks) // 2, gpu_sgd.long_row_of(variant.ranks) * 2)


def test_the_bench_makes_the_solver_of_a_fit_on_several_ranks(monkeypatch, ratings_matrix):
    """The same factors after an epoch; the learning rate follows the scale of the ratings, which is not 1 here."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("mcumsgd")
    matrix = as_csr(10 * ratings_matrix, dtype="float32")
    cpu = hmf.SGD(4, regularization=0.05, biases=False, device="cpu", random_state=0)
    monkeypatch.setattr(bench.Start, "model", cpu)
    devices = ["cpu", "cpu"]
    solver = bench.Start(bench.Data("x", matrix, transpose(matrix), ()), 4).solver(devices, bench.Variant(2))
    bench.epochs(solver, 1)
    fitted = hmf.SGD(4, regularization=0.05, biases=False, device=devices, random_state=0, iterations=1).fit(matrix)
    np.testing.assert_array_equal(solver.state.on_host().user.matrix, fitted.user_factors_)
    solver.close()


# --------------------------------------------------------------------------------------------- failures


def test_the_bench_times_the_passes_of_repeated_launches(monkeypatch, ratings_matrix):
    """Events around each pass are recorded with its launches; the epoch of the times is a repeat."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("mcumsgd")
    emulate(monkeypatch)
    recorded: Counter[int] = Counter()

    class Event:
        def record(self, stream):
            recorded[id(self)] += 1

    elapsed = lambda begin, end: float(recorded[id(begin)] == recorded[id(end)] == 2)  # noqa: E731
    cuda = SimpleNamespace(Event=Event, get_current_stream=lambda: None, get_elapsed_time=elapsed)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    solver = multi(ratings_matrix.astype(np.float64), method_of(), ranks=2, biases=True)
    run(solver, 2)
    found = bench.passes_of_an_epoch(solver)
    assert (found["item"], found["user"]) == (2, 2) and found["launch"] > 0


def test_ranks_must_be_given_the_same(ratings_matrix):
    other = ratings_matrix.copy()
    other.data[3] += 1
    parts = [problem(matrix, method_of()) for matrix in (ratings_matrix, other)]
    with pytest.raises(CommunicatorError, match="rank 1 was given another data than rank 0"):
        run_ranks(2, lambda c: spmd(c, parts[c.rank]))
    parts = [problem(ratings_matrix, method_of(learning_rate=rate)) for rate in (0.01, 0.02)]
    with pytest.raises(CommunicatorError, match="rank 1 was given another method"):
        run_ranks(2, lambda c: spmd(c, parts[c.rank]))
    with pytest.raises(CommunicatorError, match="another number of completed epochs"):
        run_ranks(2, lambda c: spmd(c, parts[0], completed=c.rank))
    check_agreement(Single(), {"data": 3})


@pytest.mark.parametrize("rate", [1.0, 8.0])
def test_divergence_is_found_by_all_ranks(backend, rate, ratings_matrix):
    method = method_of(rate_schedule="constant", learning_rate=rate)
    solver = multi(ratings_matrix.astype(np.float64), method, ranks=3, biases=True)
    states = []
    with pytest.raises(DivergedError, match=r"SGD diverged in iteration \d+.*try learning_rate="):
        run(solver, 20, states)
    assert len(states) < 20
    assert solver.state is states[-1]
    assert all(np.isfinite(array).all() for array in arrays(solver.state.on_host()))
    with pytest.raises(CommunicatorError, match="DivergedError"):
        iterate(solver)


def test_factors_that_become_infinite_are_found(monkeypatch, ratings_matrix):
    monkeypatch.setattr(CpuEpochs, "is_finite", lambda self, factors: len(factors) == 60)
    solver = multi(ratings_matrix, method_of(), ranks=1)
    with pytest.raises(DivergedError, match="factors became infinite or NaN"):
        iterate(solver)


def test_nan_on_one_rank_only(ratings_matrix):
    solver = multi(ratings_matrix, method_of(), ranks=3)
    run(solver, 1)
    before = solver.state
    solver.ranks[2].state.user.matrix[0, 0] = np.nan
    with pytest.raises(DivergedError, match="infinite or NaN"):
        iterate(solver)
    assert solver.state is before


def test_a_failure_of_one_rank_is_raised_unchanged(monkeypatch, ratings_matrix):
    original, moves = CpuEpochs.move, Counter()

    def move(self, block, side, *given):
        rank = threading.current_thread().name
        moves[rank] += 1
        if moves[rank] > 2 * 3 and side == "user" and rank == "hybridmf rank 1":  # in the second epoch
            raise MemoryError("rank 1 is out of memory")
        original(self, block, side, *given)

    monkeypatch.setattr(CpuEpochs, "move", move)
    model = hmf.SGD(factors=4, iterations=5, device=["cpu"] * 3, num_threads=3, random_state=0)
    started = time.monotonic()
    with pytest.raises(MemoryError, match="rank 1 is out of memory"):
        model.fit(ratings_matrix)
    assert time.monotonic() - started < 60
    assert model.n_iter_ == 1
    assert model.user_factors_.shape == (60, 4)


def test_ctrl_c_leaves_the_last_epoch(monkeypatch, ratings_matrix):
    original, moves = CpuEpochs.move, Counter()

    def move(self, block, side, *given):
        rank = threading.current_thread().name
        moves[rank] += 1
        if moves[rank] > 2 * 4:  # in the third epoch
            if rank == "hybridmf rank 1":
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        original(self, block, side, *given)

    model = hmf.SGD(factors=4, iterations=2, device=["cpu", "cpu"], random_state=0).fit(ratings_matrix)
    monkeypatch.setattr(CpuEpochs, "move", move)
    stopped = hmf.SGD(factors=4, iterations=9, device=["cpu", "cpu"], random_state=0)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(ratings_matrix)
    assert stopped.n_iter_ == 2
    np.testing.assert_array_equal(stopped.user_factors_, model.user_factors_)
    np.testing.assert_array_equal(stopped.item_factors_, model.item_factors_)


def test_threads_end_with_the_solver(ratings_matrix):
    before = set(threading.enumerate())
    solver = multi(ratings_matrix, method_of())
    run(solver, 1)
    mine = set(threading.enumerate()) - before
    assert {"hybridmf rank 0", "hybridmf rank 1"} <= {thread.name for thread in mine}
    del solver
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_a_rank_that_holds_the_solver_last_does_not_wait_for_itself(monkeypatch, ratings_matrix):
    """Nobody closed it, and its end comes on a thread of its own."""
    before, gone = set(threading.enumerate()), threading.Event()
    finish = scale_threads._Outcome.finish

    def later(self, rank, *answer):
        finish(self, rank, *answer)
        gone.wait(20)

    solver = multi(ratings_matrix, method_of())
    mine = set(threading.enumerate()) - before
    monkeypatch.setattr(scale_threads._Outcome, "finish", later)
    run(solver, 1)
    del solver
    gone.set()
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)
    wait_until(lambda: not scale_threads._running)


@pytest.mark.parametrize("error", [CommunicatorError("no answer"), DeviceError("no answer")])
def test_a_rank_that_does_not_close_cleanly_is_logged(error, monkeypatch, caplog, ratings_matrix):
    def refuse():
        raise error

    solver = multi(ratings_matrix, method_of())
    monkeypatch.setattr(solver.group.communicators[1], "close", refuse)
    with nullcontext() if isinstance(error, CommunicatorError) else pytest.raises(DeviceError, match="no answer"):
        solver.close()
    assert "rank 1 did not close cleanly: no answer" in caplog.text
    solver.close()


# --------------------------------------------------------------------------------------------- the estimator


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"], ("cpu", "cpu", "cpu")])
def test_fit(devices, ratings_matrix):
    seen = []
    model = hmf.SGD(factors=5, iterations=6, device=devices, num_threads=2, biases=True, random_state=3)
    model.fit(ratings_matrix, validation=ratings_matrix, callback=lambda m, record: seen.append(m.predict(0, 0)))
    objectives = [record["objective"] for record in model.history_]
    assert objectives[-1] < objectives[0]
    assert model.objective(ratings_matrix) == pytest.approx(objectives[-1], rel=1e-6)
    assert len(set(map(float, seen))) == 6
    assert model.plan_.devices == tuple(devices)
    assert f"{len(devices)} ranks on cpu" in str(model.plan_)
    assert model.recommend(0, N=3)[0].shape == (3,)
    assert type(model._learned.state.user) is Factors
    alone = hmf.SGD(factors=5, iterations=6, device="cpu", biases=True, random_state=3).fit(ratings_matrix)
    assert model.score(ratings_matrix) == pytest.approx(alone.score(ratings_matrix), rel=0.05)
    if len(devices) == 1:
        np.testing.assert_array_equal(model.user_factors_, alone.user_factors_)


@pytest.mark.parametrize("rate_schedule", ["power", "adagrad"])
def test_resume(tmp_path, rate_schedule, ratings_matrix):
    options = {"factors": 4, "device": ["cpu", "cpu"], "rate_schedule": rate_schedule, "random_state": 1}
    whole = hmf.SGD(iterations=4, **options).fit(ratings_matrix)
    hmf.SGD(iterations=2, **options).fit(ratings_matrix, checkpoint=tmp_path)
    again = hmf.SGD(iterations=4, **options).fit(ratings_matrix, resume_from=tmp_path)
    np.testing.assert_array_equal(again.item_factors_, whole.item_factors_)
    if rate_schedule == "power":
        with pytest.raises(ModelFileError, match="holds no sums of squares"):
            multi(ratings_matrix, method_of(rate_schedule="adagrad"), completed=2)


def test_save_and_load(tmp_path, ratings_matrix):
    model = hmf.SGD(factors=4, iterations=2, device=["cpu", "cpu"], random_state=1).fit(ratings_matrix)
    model.save(tmp_path / "model")
    again = hmf.load(tmp_path / "model")
    np.testing.assert_array_equal(again.user_factors_, model.user_factors_)
    np.testing.assert_array_equal(again.recommend(3)[0], model.recommend(3)[0])


@pytest.mark.parametrize("schedule", ["hogwild", "blocks", "batch_hogwild"])
def test_other_schedules_run_on_one_device(schedule, ratings_matrix):
    model = hmf.SGD(schedule=schedule, device=["cpu", "cpu"])
    with pytest.raises(ValueError, match=rf"schedule='{schedule}' runs on one device.*use schedule='msgd'"):
        model.fit(ratings_matrix)


def test_ccd_runs_on_one_device(ratings_matrix):
    with pytest.raises(ValueError, match="CCD runs on one device; name one, or use ALS or SGD on several"):
        hmf.CCD(device=["cpu", "cpu"]).fit(ratings_matrix)


def plan_of(monkeypatch, found=GPU, devices=("cuda:0", "cuda:1"), **changes):
    def find(name):
        if found is None:
            raise DeviceError(f"no {name}")
        index = int(name.split(":")[1])
        return replace(found, index=index, free_bytes=found.free_bytes >> index), "asked for"

    monkeypatch.setattr(_sgd_method.dispatch, "find_gpu", find)
    model = hmf.SGD(**{"factors": 64, "device": list(devices), **changes})
    return hmf.plan(shape=(480_189, 17_770), nnz=99_072_112, model=model)


def test_plans_of_gpus(monkeypatch):
    plan = plan_of(monkeypatch)
    assert (plan.device, plan.devices) == ("cuda:0", ("cuda:0", "cuda:1"))
    assert plan.gpu.free_bytes == GPU.free_bytes // 2  # of the smaller one
    alone = plan_of(monkeypatch, devices=("cuda:0",))
    assert plan.total_bytes < 0.6 * alone.total_bytes
    eight = plan_of(monkeypatch, devices=[f"cuda:{index}" for index in range(8)], biases=False)
    rest = eight.bytes["factors"] - eight.method._gpu_bytes(eight)["factors"] // 8
    assert rest >= 17_770 * eight.rank * 4  # each GPU has room for all items
    assert "2 ranks on cuda:0, cuda:1" in str(plan)
    with pytest.raises(DeviceError, match="no cuda:0"):
        plan_of(monkeypatch, None)
    with pytest.raises(ValueError, match=r"rate_schedule='adagrad' runs on the CPU only; use CPU ranks"):
        plan_of(monkeypatch, rate_schedule="adagrad")


# --------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("order", "beside"), [("passes", True), ("passes", False), ("blocks", True)])
def test_the_cyclic_order_on_gpus(order, beside, ranks, biases, ratings_matrix, monkeypatch):
    need_gpus(ranks)
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 12)
    method = replace(method_of(), order=order)
    matrix, objective, plan, state = problem(ratings_matrix.astype(np.float64), method, biases=biases, ranks=ranks)
    plan = plan.changed(devices=tuple(f"cuda:{rank}" for rank in range(ranks)))
    solver = MultiSGD(matrix, transpose(matrix), objective, plan, state, 0, beside=beside)
    result = run(solver, 3).on_host()
    assert relative_error(result, twin(matrix, method_of(), state, ranks, 3, order)) < 1e-12
    expected = reference.objective_value(matrix, result, objective)
    assert solver.objective_value() == pytest.approx(expected, rel=1e-12)
    solver.close()


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_popular_items_on_gpus(ranks, biases, popular, ratings_matrix, monkeypatch):
    """Many epochs, whose streams have no fixed order."""
    need_gpus(ranks)
    monkeypatch.setattr(gpu_sgd, "LONG_ROW", 12)
    matrix, objective, plan, state = problem(ratings_matrix.astype(np.float64), method_of(), biases=biases)
    plan = plan.changed(devices=tuple(f"cuda:{rank}" for rank in range(ranks)))
    solver = MultiSGD(matrix, transpose(matrix), objective, plan, state, 0)
    result = run(solver, 8).on_host()
    assert relative_error(result, twin(matrix, method_of(), state, ranks, 8)) < 1e-11
    expected = reference.objective_value(matrix, result, objective)
    assert solver.objective_value() == pytest.approx(expected, rel=1e-12)
    solver.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_fit_on_gpus(ranks):
    """Many entries, many epochs: the items that travel are those that were moved. CPU ranks go the same way."""
    need_gpus(ranks)
    matrix = planted(3000, 500, 0.1, 4, seed=1)
    options = {"factors": 20, "iterations": 8, "biases": True, "random_state": 0}
    model = hmf.SGD(device=[f"cuda:{rank}" for rank in range(ranks)], **options).fit(matrix)
    twin_model = hmf.SGD(device=["cpu"] * ranks, **options).fit(matrix)
    for ours, theirs in ((model.user_factors_, twin_model.user_factors_), (model.item_bias_, twin_model.item_bias_)):
        np.testing.assert_allclose(ours, theirs, atol=5e-3)
    again = hmf.SGD(device=[f"cuda:{rank}" for rank in range(ranks)], **options).fit(matrix)
    np.testing.assert_array_equal(again.user_factors_, model.user_factors_)
    assert model.recommend(0, N=5)[0].shape == (5,)


@pytest.mark.gpu
def test_divergence_on_gpus(ratings_matrix):
    need_gpus(2)
    model = hmf.SGD(factors=8, device=["cuda:0", "cuda:1"], rate_schedule="constant", learning_rate=8.0, random_state=0)
    with pytest.raises(DivergedError, match="SGD diverged in iteration"):
        model.fit(ratings_matrix)


@pytest.mark.gpu
def test_memory_of_one_gpu_only(monkeypatch, ratings_matrix):
    """Rank 1 runs out of memory in the second epoch: the model keeps the first."""
    from hybridmf.errors import DeviceMemoryError

    need_gpus(2)
    original = GpuEpochs.copies

    def copies(self, *given):
        if self.device.spec.index == 1 and calls.append(1) is None and len(calls) > 2:
            self.device.empty(1 << 46, np.uint8)
        return original(self, *given)

    calls: list[int] = []
    monkeypatch.setattr(GpuEpochs, "copies", copies)
    model = hmf.SGD(factors=8, device=["cuda:0", "cuda:1"], iterations=5, random_state=0)
    with pytest.raises(DeviceMemoryError, match="cuda:1 is out of memory"):
        model.fit(ratings_matrix)
    assert model.n_iter_ == 1
    assert np.isfinite(model.user_factors_).all()
