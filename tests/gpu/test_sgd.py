"""SGD on a GPU against the float64 reference, update by update, and its laws; also on the emulated device."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Factors, Objective, Side, State, Terms
from hybridmf.core.validate import as_csr
from hybridmf.errors import DivergedError
from hybridmf.formats import transpose
from hybridmf.gpu import sgd
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.gpu.sgd import (
    Bins,
    BlockedConfig,
    FactorRows,
    GpuEpochs,
    HogwildConfig,
    HogwildEntries,
    Walk,
    crowded_rows,
    even_ranges,
    make_runs,
)
from hybridmf.plan import sgd as plan_sgd
from hybridmf.plan.epochs import EpochSolver, degrees_of, terms_at
from hybridmf.plan.make import make_plan
from hybridmf.plan.sgd import SgdMethod, stored_width
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Settings
from support import emulated, msgd, reference
from support.devices import on_a_gpu
from support.emulated import EmulatedDevice
from support.marks import exhaustive
from support.ratings import planted, rows_of
from support.sgd_states import arrays, relative_error
from support.solvers import iterate

LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 0, 2, 47, 48, 49, 70)
"""Entries of rows around rings (8) and chunks (4, 8, 16, 32), and more than one of these, beside empty rows."""

TERMS = Terms(rate=0.05, regularization=0.1, mean=0.7, bias_rate=0.08, bias_regularization=0.3)

SMALL = planted(24, 16, 0.4)
"""What whole fits here are of; user 12 and item 5 have no entries."""

TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-14}
"""Largest error relative to the largest factor, after rows of up to 70 updates."""


class Pass:
    """A pass over the rows of one side: entries, factors, and what the reference makes of them."""

    def __init__(self, device, matrix, rank: int, dtype=np.float32, biases=False, seed=0) -> None:
        self.device, self.matrix, self.rank = device, as_csr(matrix, dtype=dtype), rank
        rng = np.random.default_rng(seed)
        self.read = self.dtype = np.dtype(dtype)
        self.terms = TERMS._replace(mean=TERMS.mean if biases else 0.0)
        self.factors = [self._draw(rng, n, biases) for n in matrix.shape]
        self.walk = Walk.upload(device, self.matrix)

    def _draw(self, rng, n: int, biases: bool) -> Factors:
        bias = 0.1 * rng.standard_normal(n).astype(self.dtype) if biases else None
        return Factors((rng.standard_normal((n, self.rank)) / np.sqrt(self.rank)).astype(self.dtype), bias)

    def rows(self, factors: Factors) -> FactorRows:
        padded = np.zeros((len(factors), stored_width(self.rank, self.read)), dtype=self.dtype)
        padded[:, : self.rank] = factors.matrix
        return FactorRows(
            self.device.upload(padded), None if factors.bias is None else self.device.upload(factors.bias)
        )

    def expected(self, side: int = 0) -> tuple[Factors, np.ndarray]:
        """Rows (0) or columns (1) moved by the reference, and each one's sum of squared errors."""
        users, items = (Factors(f.matrix.astype(float), f.bias) for f in self.factors)
        state = State(users, items, self.terms.mean)
        coo = self.matrix.tocoo()
        indices = coo.row, coo.col
        loss = np.zeros(self.matrix.shape[side])
        order = np.lexsort((indices[1 - side], indices[side]))
        state = reference._copied(state, 0)
        moved, fixed = (state.user, state.item)[:: 1 if side == 0 else -1]
        for k in order:
            pair = indices[0][k], indices[1][k]
            error = reference._error(state, *pair, float(coo.data[k]))
            loss[pair[side]] += error**2
            other = fixed.matrix[pair[1 - side]]
            reference._move(moved, pair[side], error, other, self.terms)
        return moved, loss

    def compare(self, moved: FactorRows, losses, side: int = 0, tasks=None) -> None:
        """Factors, biases, zeros of the padding and losses."""
        expected, loss = self.expected(side)
        matrix = self.device.download(moved.matrix)
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(matrix[:, : self.rank], expected.matrix, rtol=0, atol=tolerance * 2)
        assert not matrix[:, self.rank :].any()
        if expected.bias is not None:
            np.testing.assert_allclose(self.device.download(moved.bias), expected.bias, rtol=0, atol=tolerance * 4)
        losses = self.device.download(losses)
        if tasks is not None:
            np.testing.assert_allclose(losses, loss[tasks], rtol=tolerance * 10)
        assert losses.sum() == pytest.approx(loss.sum(), rel=tolerance * 10)


def longest_first(matrix) -> np.ndarray:
    degrees = np.diff(matrix.indptr)
    return np.argsort(-degrees, kind="stable")[: np.count_nonzero(degrees)].astype(np.int32)


# ---------------------------------------------------------------------------------------------------- MSGD kernels


def narrow(device, *operands):
    """`centralized_narrow` takes many rows; here it takes any number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgd, "NARROW_WARPS", 0)
        return msgd.centralized(device, *operands)


def check_walk(
    device, kernel, rank, dtype=np.float32, biases=False, lengths=LENGTHS, n_columns=80, read=None, **options
) -> None:
    """A kernel that walks the rows it moves."""
    problem = Pass(device, rows_of(lengths, n_columns), rank, dtype, biases)
    if read is not None:
        problem.read = np.dtype(read)
        problem.factors[1].matrix[...] = problem.factors[1].matrix.astype(read)
    moved, fixed = map(problem.rows, problem.factors)
    if read is not None:
        fixed = FactorRows(fixed.matrix.astype(read), fixed.bias)
    before = device.download(fixed.matrix)
    tasks = longest_first(problem.matrix)
    losses = kernel(device, moved, fixed, problem.walk, device.upload(tasks), problem.terms, **options)
    problem.compare(moved, losses, tasks=tasks)
    np.testing.assert_array_equal(device.download(fixed.matrix), before)


@pytest.mark.parametrize("kernel", [msgd.centralized, narrow, msgd.blocked])
@pytest.mark.parametrize(
    ("dtype", "biases"),
    [(np.float32, True), (np.float64, False), exhaustive(np.float32, False), exhaustive(np.float64, True)],
)
def test_rows_walk_their_entries(device, kernel, dtype, biases):
    check_walk(device, kernel, 7, dtype, biases)


@pytest.mark.parametrize("kernel", [msgd.centralized, narrow, msgd.blocked])
@pytest.mark.parametrize("rank", [1, 33, exhaustive(100)])
def test_every_width(device, kernel, rank):
    check_walk(device, kernel, rank, lengths=(0, 1, 17, 33, 9))


@pytest.mark.parametrize("kernel", [msgd.centralized, narrow, msgd.blocked])
@pytest.mark.parametrize(
    ("rank", "biases"),
    [(7, True), (33, False), *(exhaustive(*case) for case in ((7, False), (33, True), (100, False), (100, True)))],
)
def test_fixed_rows_in_float16(device, kernel, rank, biases):
    """The same updates of float32 rows from a float16 table."""
    check_walk(device, kernel, rank, biases=biases, read=np.float16)


@pytest.mark.parametrize(("helpers", "slots"), [(1, 3), exhaustive(3, 8)])
def test_chunks_of_fixed_rows_in_float16(device, helpers, slots):
    config = BlockedConfig(stored_width(20, np.float16), 4, 16, helpers, slots, 2)
    lengths = (1, 16, 48, 49, 70, 190)
    check_walk(device, msgd.blocked, 20, lengths=lengths, n_columns=200, read=np.float16, config=config)


@on_a_gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kernel", [msgd.centralized, narrow, msgd.blocked])
@pytest.mark.parametrize("rank", [1, 8, 16, 32, 64, 100, 128, 200, 256, 400, 512])
def test_every_width_of_fixed_rows_in_float16(device, kernel, rank, biases):
    check_walk(device, kernel, rank, biases=biases, read=np.float16)


@on_a_gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", [msgd.centralized, narrow, msgd.blocked])
@pytest.mark.parametrize("rank", [1, 2, 5, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 400, 512])
def test_every_width_on_a_gpu(device, kernel, rank, dtype, biases):
    check_walk(device, kernel, rank, dtype, biases)


@pytest.mark.parametrize(
    ("chunk", "helpers", "slots", "dtype"),
    [
        exhaustive(16, 2, 4, np.float32), (16, 1, 3, np.float64), exhaustive(16, 7, 9, np.float32),
        (8, 3, 5, np.float32), exhaustive(8, 2, 4, np.float64), exhaustive(4, 3, 5, np.float32),
        exhaustive(4, 1, 3, np.float64),
        exhaustive(4, 24, 26, np.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("biases", [exhaustive(False), True])
def test_chunks_helpers_and_slots(device, chunk, helpers, slots, dtype, biases):
    """Down to the fewest slots with which walker and helpers do not wait for each other."""
    config = BlockedConfig(stored_width(20, dtype), np.dtype(dtype).itemsize, chunk, helpers, slots)
    check_walk(device, msgd.blocked, 20, dtype, biases, lengths=(1, 4, 48, 49, 70, 190), n_columns=200, config=config)


@pytest.mark.parametrize(
    ("rank", "n", "kernel"), [(33, 5, "centralized_narrow"), (33, 4, "centralized"), (7, 20, "centralized_narrow")]
)
def test_many_rows_have_half_the_lanes(monkeypatch, rank, n, kernel):
    """From a number of warps on: rank 33 has 8 lanes instead of 16; the lanes of rank 7 are few, with either kernel."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = EmulatedDevice()
    monkeypatch.setattr(sgd, "NARROW_WARPS", 40 / (32 * device.spec.multiprocessors))
    check_walk(device, msgd.centralized, rank, lengths=(3,) * n)
    assert device.launches == [kernel]


@pytest.mark.parametrize(("dtype", "biases"), [(np.float32, True), exhaustive(np.float64, False)])
@pytest.mark.parametrize("n_bins", [1, 2])
@pytest.mark.parametrize("n_ranges", [1, 3])
def test_a_block_walks_several_rows_in_several_ranges(device, dtype, biases, n_bins, n_ranges):
    """Its chunks take their slots in turn, whichever row they are of, and a range may have no entries."""
    lengths = np.array([190, 70, 49, 48, 16, 1, 0])
    problem = Pass(device, rows_of(lengths, 200), 20, dtype, biases)
    walk = Walk.upload(device, problem.matrix, n_ranges)
    assert walk.n_ranges == n_ranges
    tasks = np.arange(len(lengths), dtype=np.int32)
    bins = Bins.balance(device, tasks, lengths, n_bins)
    for config in (None, BlockedConfig(stored_width(20, dtype), np.dtype(dtype).itemsize, 4, 3, 6)):
        moved, fixed = map(problem.rows, problem.factors)
        losses = msgd.blocked(device, moved, fixed, walk, bins, problem.terms, config)
        problem.compare(moved, losses, tasks=device.download(bins.rows))


def test_rows_are_balanced_among_bins(device):
    bins = Bins.balance(device, np.array([4, 2, 9, 7, 1], dtype=np.int32), np.array([10, 8, 5, 4, 3]), 2)
    np.testing.assert_array_equal(device.download(bins.rows), [4, 7, 2, 9, 1])  # 10 + 4 and 8 + 5 + 3
    np.testing.assert_array_equal(device.download(bins.first), [0, 2, 5])
    few = Bins.balance(device, np.array([3], dtype=np.int32), np.array([10]), 132)
    np.testing.assert_array_equal(device.download(few.first), [0, 1])


def test_a_long_row_without_entries(device):
    """Nothing is prepared for it, so that nothing may be waited for."""
    problem = Pass(device, rows_of((0, 3), 10), 6)
    moved, fixed = map(problem.rows, problem.factors)
    tasks = np.array([0, 1], dtype=np.int32)
    losses = msgd.blocked(device, moved, fixed, problem.walk, device.upload(tasks), problem.terms)
    problem.compare(moved, losses, tasks=tasks)


@pytest.mark.parametrize("helpers", [exhaustive(1), 4])
def test_rows_that_are_read_twice(device, helpers):
    """Too wide to be kept in registers between product and update; more chunks than slots."""
    config = BlockedConfig(stored_width(260, np.float32), 4, 8, helpers, helpers + 2)
    check_walk(device, msgd.blocked, 260, lengths=(100, 7), n_columns=120, config=config)


def test_steps_that_overshoot(device):
    """Errors alternate in sign: rate |u|^2 between 1 and 2, where (1 + M)^-1 is as large as in any stable walk."""
    problem = Pass(device, rows_of((60, 33), 80), 5)
    problem.terms = problem.terms._replace(rate=0.9)
    user = problem.factors[1].matrix[0]
    problem.factors[1].matrix[...] = user * np.sqrt(1.6 / 0.9) / np.linalg.norm(user)
    expected, loss = problem.expected()
    tasks = longest_first(problem.matrix)
    for kernel in (msgd.centralized, msgd.blocked):
        moved, fixed = map(problem.rows, problem.factors)
        losses = kernel(device, moved, fixed, problem.walk, device.upload(tasks), problem.terms)
        np.testing.assert_allclose(device.download(moved.matrix)[:, :5], expected.matrix, rtol=0, atol=2e-5)
        np.testing.assert_allclose(device.download(losses), loss[tasks], rtol=2e-5)


def test_blocked_configs_fit(device):
    """The longest chunks on an H200, shorter ones where shared memory is small."""
    chosen = [BlockedConfig.rule(ld, 4, device.spec) for ld in (32, 128, 512)]
    assert all(config.shared_bytes <= device.spec.shared_bytes for config in chosen)
    small = replace(device.spec, shared_bytes=64 * 1024)
    assert BlockedConfig.rule(128, 4, small).shared_bytes <= 64 * 1024
    assert BlockedConfig.rule(128, 4, replace(small, shared_bytes=1)).chunk == 4


@pytest.mark.parametrize(
    ("dtype", "biases"),
    [(np.float32, True), (np.float64, False), (np.float32, False), exhaustive(np.float64, True)],
)
def test_columns_move_while_rows_are_walked(device, dtype, biases):
    problem = Pass(device, rows_of(LENGTHS, 80), 7, dtype, biases)
    fixed, moved = map(problem.rows, problem.factors)
    bounds = device.upload(np.array([0, 1, 50, 50, 80], dtype=np.int32))
    losses = msgd.decentralized(device, moved, fixed, problem.walk, bounds, problem.terms)
    problem.compare(moved, losses, side=1)


@pytest.mark.parametrize(("rank", "shape"), [(1, (300, 9)), (33, (260, 4)), (33, (3, 70)), exhaustive(100, (3, 70))])
def test_decentralized_tiles_and_lists(device, rank, shape):
    """More rows than a block searches at a time, more entries than its list holds, a row of many entries."""
    rng = np.random.default_rng(0)
    dense = rng.integers(1, 6, shape) * (rng.random(shape) < 0.9)
    problem = Pass(device, sp.csr_array(dense.astype(float)), rank)
    problem.terms = problem.terms._replace(rate=0.01)
    fixed, moved = map(problem.rows, problem.factors)
    bounds = device.upload(np.array([0, shape[1]], dtype=np.int32))
    losses = msgd.decentralized(device, moved, fixed, problem.walk, bounds, problem.terms)
    problem.compare(moved, losses, side=1)


def test_even_ranges():
    bounds = even_ranges(np.array([5, 0, 1, 1, 1, 100, 2, 0]), 3)
    assert bounds.dtype == np.int32
    assert bounds[0] == 0
    assert bounds[-1] == 8
    assert np.all(np.diff(bounds) > 0)
    assert len(even_ranges(np.ones(100, dtype=int), 10)) == 11
    np.testing.assert_array_equal(even_ranges(np.array([3]), 5), [0, 1])


@pytest.mark.parametrize("kernel", ["centralized", "blocked", "decentralized"])
def test_sub_blocks(device, kernel):
    """Rows 5 to 13 and columns 10 to 49 of a matrix, by tables that start there."""
    matrix = as_csr(rows_of(LENGTHS, 80), dtype=np.float32)
    part = as_csr(sp.csr_array(matrix.toarray()[5:14, 10:50]), dtype=np.float32)
    problem = Pass(device, part, 5)
    starts, stops = (
        np.array([np.searchsorted(matrix.indices[a:b], c) + a for a, b in pairwise(matrix.indptr)]) for c in (10, 50)
    )
    begins, ends = (device.upload(bounds[None, 5:14].astype(np.int64)) for bounds in (starts, stops))
    walk = Walk(device.upload(matrix.indices), device.upload(matrix.data), begins, ends, first=10)
    rows, columns = map(problem.rows, problem.factors)
    if kernel == "decentralized":
        bounds = device.upload(np.array([0, 11, 40], dtype=np.int32))
        problem.compare(columns, msgd.decentralized(device, columns, rows, walk, bounds, problem.terms), side=1)
    else:
        tasks = longest_first(part)
        losses = getattr(msgd, kernel)(device, rows, columns, walk, device.upload(tasks), problem.terms)
        problem.compare(rows, losses, tasks=tasks)


def test_a_diverged_row_does_not_spoil_others(device):
    problem = Pass(device, rows_of((5, 20, 3), 30), 6)
    problem.factors[0].matrix[1] = np.inf
    for kernel in (msgd.centralized, msgd.blocked):
        moved, fixed = map(problem.rows, problem.factors)
        losses = kernel(device, moved, fixed, problem.walk, device.upload(np.arange(3, dtype=np.int32)), problem.terms)
        np.testing.assert_array_equal(np.isfinite(device.download(losses)), [True, False, True])
        np.testing.assert_array_equal(np.isfinite(device.download(moved.matrix)[:, :6]).all(axis=1), [1, 0, 1])


# ---------------------------------------------------------------------------------------------------- batch-Hogwild


def hogwild_epoch(
    device, matrix, rank, stored, workers, biases=False, ordered=False, longest=plan_sgd.RUN, batch=sgd.BATCH
):
    """(held, walked) rows and loss after an epoch, and the state of the reference for the same order of entries."""
    problem = Pass(device, matrix, rank, np.float32, biases)
    rng = None if ordered else np.random.default_rng(3)
    entries = HogwildEntries.upload(device, problem.matrix, transpose(problem.matrix), longest, rng)
    width = stored_width(rank, stored)
    rows = []
    for factors in problem.factors:
        padded = np.zeros((len(factors), width), dtype=stored)
        padded[:, :rank] = factors.matrix
        rows.append(FactorRows(device.upload(padded), None if factors.bias is None else device.upload(factors.bias)))
    blocks = HogwildConfig.blocks_for(width, np.dtype(stored).itemsize, biases)
    config = HogwildConfig(blocks, workers, longest, batch)
    losses = device.empty(config.blocks(width, np.dtype(stored).itemsize), np.float64)
    schedule: Any = SimpleNamespace(device=device, held="user", entries=entries, config=config)
    work: dict[Side, FactorRows] = {"user": rows[0], "item": rows[1]}
    sgd.BatchHogwild.launch_pass(schedule, None, work, problem.terms, losses)
    users, items, ratings = entries_of(device, entries)
    start = State(*(Factors(f.matrix.astype(stored), f.bias) for f in problem.factors), problem.terms.mean)
    expected = reference.sgd_entries(users, items, ratings, start, problem.terms)
    loss = float(device.download(losses).sum())
    ours = State(*(downloaded(device, r, rank) for r in rows), problem.terms.mean)
    return ours, expected, loss, (problem, users, items, ratings)


def downloaded(device, rows: FactorRows, rank: int) -> Factors:
    matrix = device.download(rows.matrix)
    assert not matrix[:, rank:].any()
    return Factors(matrix[:, :rank].astype(np.float32), None if rows.bias is None else device.download(rows.bias))


def entries_of(device, entries: HogwildEntries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and ratings in the order in which one worker processes them."""
    indices, ratings, crowded, runs = (device.download(array) for array in vars(entries).values())
    users, items, values = [], [], []
    for begin, owner_and_count in runs:
        owner, count = int(owner_and_count) >> 32, int(owner_and_count) & 0xFFFFFFFF
        met, given = indices[begin : begin + count], ratings[begin : begin + count]
        if owner < 0:
            users.append(met)
            items.append(np.full(count, ~owner))
        else:
            met, given = met[crowded[met] == 0], given[crowded[met] == 0]
            users.append(np.full(len(met), owner))
            items.append(met)
        values.append(given)
    return np.concatenate(users), np.concatenate(items), np.concatenate(values)


def test_runs():
    matrix = rows_of(LENGTHS, 80)
    runs = make_runs(matrix.indptr, 8)
    owners, counts = runs[:, 1] >> 32, runs[:, 1] & 0xFFFFFFFF
    assert counts.max() == 8 and counts.sum() == matrix.nnz
    assert np.array_equal(runs[:, 0], np.cumsum(counts) - counts)
    assert np.array_equal(np.bincount(owners, counts, len(LENGTHS)), np.diff(matrix.indptr))


def test_crowded_rows():
    """At least 1 / 2400 of the entries and 16 of them, at most half of all together, the fullest rows first."""
    assert crowded_rows(np.array([1000, 0, 1600, 20, 15, *[1] * 3000])).tolist() == [0, 2, 3]
    assert crowded_rows(np.array([1000, 0, 1600, 20, 15])).tolist() == [0, 3]  # 1,600 are more than half
    assert crowded_rows(np.array([1000, 1600, 1500])).tolist() == [1]
    assert crowded_rows(np.array([51_000, *[300] * 163])).tolist() == list(range(1, 164))  # not the one with half
    assert crowded_rows(np.array([50] * 2399)).tolist() == list(range(1199))
    assert crowded_rows(np.array([50] * 2401)).tolist() == []
    assert crowded_rows(np.zeros(3, dtype=int)).tolist() == []


def popular() -> sp.csr_array:
    """Rows of LENGTHS, 80 columns, of which the first ten are in most rows: crowded."""
    rng = np.random.default_rng(5)
    weights = np.where(np.arange(80) < 10, 40.0, 1.0)
    columns = [np.sort(rng.choice(80, n, replace=False, p=weights / weights.sum())) for n in LENGTHS]
    values = rng.integers(1, 6, sum(LENGTHS)).astype(np.float32)
    return sp.csr_array((values, np.concatenate(columns), np.concatenate(([0], np.cumsum(LENGTHS)))), shape=(20, 80))


@pytest.mark.parametrize("ordered", [False, True])
def test_each_entry_is_in_one_run(device, monkeypatch, ordered):
    monkeypatch.setattr(sgd, "RUN", 8)
    matrix = popular()
    rng = None if ordered else np.random.default_rng(0)
    entries = HogwildEntries.upload(device, matrix, transpose(matrix), 16, rng)
    users, items, ratings = entries_of(device, entries)
    assert len(users) == matrix.nnz and device.download(entries.crowded).any()
    assert (sp.csr_array((ratings, (users, items)), shape=matrix.shape) != matrix).nnz == 0
    runs = device.download(entries.runs)
    assert np.all(np.diff(runs[:, 0]) > 0) == ordered
    other = HogwildEntries.upload(device, matrix, transpose(matrix), 16, np.random.default_rng(1))
    assert np.any(device.download(other.runs) != runs)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rank", [3, 33])
def test_one_worker_is_the_reference_update_by_update(device, rank, biases):
    ours, expected, loss, (problem, users, items, ratings) = hogwild_epoch(
        device, rows_of(LENGTHS, 80), rank, np.float32, 1, biases
    )
    assert relative_error(ours, expected) < 5e-6
    state, total = reference._copied(State(*problem.factors, problem.terms.mean), 0), 0.0
    for entry in zip(users, items, ratings.astype(float), strict=True):
        total += reference._error(state, *entry) ** 2
        state = reference.sgd_entries(*(np.array([value]) for value in entry), state, problem.terms)
    assert loss == pytest.approx(total, rel=1e-5)


@on_a_gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
@pytest.mark.parametrize("rank", [1, 5, 8, 16, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256, 512])
def test_every_width_of_one_worker(device, rank, stored, biases):
    ours, expected, _, _ = hogwild_epoch(device, rows_of(LENGTHS, 80), rank, stored, 1, biases)
    assert relative_error(ours, expected) < (5e-6 if stored == np.float32 else 2e-2)


@pytest.mark.parametrize("rank", [6, 40])
def test_float16_storage(device, rank):
    """Each update rounds to 11 bits."""
    ours, expected, loss, _ = hogwild_epoch(device, rows_of(LENGTHS, 80), rank, np.float16, 1)
    assert relative_error(ours, expected) < 2e-2
    assert math.isfinite(loss)
    assert all(np.array_equal(a, a.astype(np.float16)) for a in arrays(ours))


@pytest.mark.parametrize(("longest", "batch"), [(16, 5), (32, 1), (64, 8)])
def test_longer_runs_and_other_batches(device, longest, batch):
    ours, expected, _, _ = hogwild_epoch(device, rows_of(LENGTHS, 80), 5, np.float32, 1, longest=longest, batch=batch)
    assert relative_error(ours, expected) < 5e-6


def test_configurations_that_cannot_work():
    for change, message in (({"run": 12}, "run must be 8"), ({"batch": 0}, "batch must"), ({"n_workers": 0}, "n_work")):
        with pytest.raises(ValueError, match=message):
            HogwildConfig(**{"blocks_per_sm": 3, "n_workers": 1} | change)
    for chunk, helpers in ((5, 1), (64, 1), (16, 0), (4, 25)):
        with pytest.raises(ValueError, match=r"chunk must be 4, 8 or 16|helpers must be"):
            BlockedConfig(32, 4, chunk, helpers, 40)
    with pytest.raises(ValueError, match=r"slots must be at least helpers \+ 2"):
        BlockedConfig(32, 4, 16, 3, 4)


@pytest.mark.parametrize("crowd", [2.0, 1 / 2400])
def test_a_row_twice_in_a_row(device, monkeypatch, crowd):
    """The row of the next run is read ahead, unless it is the one at hand."""
    monkeypatch.setattr(sgd, "CROWDED", crowd)
    monkeypatch.setattr(sgd, "RUN", 8)
    matrix = rows_of((40, 3), 80)
    if crowd < 1:  # 40 rows with the first of 80 columns, which has less than half of the entries
        rows, columns = np.repeat(np.arange(40), 3), (np.arange(40)[:, None] + [0, 1, 2]) % 79 + 1
        columns[:, 0] = 0
        values = np.random.default_rng(2).integers(1, 6, 120).astype(np.float32)
        matrix = sp.csr_array((values, (rows, columns.reshape(-1))), shape=(100, 80))
    matrix = as_csr(matrix, dtype="float32")
    entries = HogwildEntries.upload(device, matrix, transpose(matrix), 8)
    owners = device.download(entries.runs)[:, 1] >> 32
    assert np.any((owners[1:] == owners[:-1]) & ((owners[1:] < 0) == (crowd < 1)))
    ours, expected, _, _ = hogwild_epoch(device, matrix, 4, np.float32, 1, True, ordered=True, longest=8)
    assert relative_error(ours, expected) < 5e-6


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rank", [3, 33])
def test_crowded_rows_have_their_own_runs(device, monkeypatch, rank, biases):
    """Without them, the same epoch has another order, so that factors differ in more than rounding."""
    monkeypatch.setattr(sgd, "RUN", 8)
    own, expected, _, (_, users, _, _) = hogwild_epoch(device, popular(), rank, np.float32, 1, biases)
    assert relative_error(own, expected) < 5e-6
    monkeypatch.setattr(sgd, "CROWDED", 2.0)
    plain, expected, _, (_, others, _, _) = hogwild_epoch(device, popular(), rank, np.float32, 1, biases)
    assert relative_error(plain, expected) < 5e-6
    assert not np.array_equal(users, others) and np.array_equal(np.sort(users), np.sort(others))
    assert relative_error(own, plain) > 1e-4


def test_a_held_row_after_a_crowded_row_that_walked_it(device, monkeypatch):
    """The held row of the next run was read ahead, before the run of the crowded row updated it."""
    monkeypatch.setattr(sgd, "RUN", 8)
    upload = HogwildEntries.upload.__func__

    def alternating(cls, *args):
        entries = upload(cls, *args)
        runs = device.download(entries.runs)
        owners = runs[:, 1] >> 32
        held, crowded = np.flatnonzero(owners >= 0), np.flatnonzero(owners < 0)
        mixed = [place for pair in itertools.zip_longest(crowded, held[: len(crowded)]) for place in pair]
        return replace(entries, runs=device.upload(runs[[*mixed, *held[len(crowded) :]]]))

    monkeypatch.setattr(HogwildEntries, "upload", classmethod(alternating))
    for biases in (False, True):
        ours, expected, _, _ = hogwild_epoch(device, popular(), 5, np.float32, 1, biases, ordered=True)
        assert relative_error(ours, expected) < 5e-6


@pytest.mark.parametrize("workers", [2, 7, 70])
def test_workers_receive_every_entry_once(device, workers):
    """No two rows and no two columns meet, so that chance has no say."""
    n = 150
    values = np.random.default_rng(0).integers(1, 6, n).astype(float)
    matrix = sp.csr_array((values, np.arange(n), np.arange(n + 1)), shape=(n, n))
    ours, expected, _, _ = hogwild_epoch(device, matrix, 6, np.float32, workers, True)
    assert relative_error(ours, expected) < 5e-6


def test_workers_of_a_device(device):
    """Few on small problems; as many as a device holds on large ones."""
    spec = replace(device.spec, multiprocessors=132)
    most = HogwildConfig.rule(spec, 128, 2, False)
    assert most.limited(99_000_000) == most == HogwildConfig(5, 5 * 132 * 8)
    assert HogwildConfig.rule(spec, 128, 4, True).limited(10**9) == HogwildConfig(3, 3 * 132 * 4)
    assert HogwildConfig.rule(spec, 32, 2, False).limited(10**6).n_workers == 10**6 // sgd.WORKER_ENTRIES
    assert HogwildConfig.rule(spec, 32, 2, False).limited(3).n_workers == 1


# ---------------------------------------------------------------------------------------------------- passes


class LateSecondStream(EmulatedDevice):
    """What is launched beside the rest begins only once it is waited for: as late as streams allow."""

    def __init__(self) -> None:
        super().__init__()
        self.forked = False
        self.waiting: list[Any] = []

    def fork(self) -> None:
        self.forked = True

    def prepare(self, *arguments: Any) -> Any:
        now = super().prepare(*arguments)

        def launch(beside: bool = False) -> None:
            assert self.forked >= beside
            self.waiting.append(now) if beside else now()

        return launch

    def join(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()
        self.forked = False


def one_pass(schedule: sgd.Msgd, side: Any, work: dict[Any, Any]) -> float:
    losses = schedule.device.empty(schedule.n_losses(side), np.float64)
    schedule.launch_pass(side, work, TERMS, losses)
    return float(losses.sum())


@pytest.mark.parametrize("long_row", [1, 7, 1000])
def test_long_rows_beside_the_others(long_row):
    """The same bits, and nothing is left to do behind a pass; only where there are rows of both kinds."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    results = []
    for device, beside in ((EmulatedDevice(), False), (LateSecondStream(), True)):
        problem = Pass(device, SMALL, 5)
        matrices = {"user": problem.matrix, "item": transpose(problem.matrix)}
        schedule = sgd.Msgd(device, matrices, "mixed", 5, long_row, beside)
        work = dict(zip(SIDES, map(problem.rows, problem.factors), strict=True))
        losses = [one_pass(schedule, side, work) for side in ("item", "user", "item")]
        assert not getattr(device, "waiting", [])
        results.append((losses, *(work[side].matrix for side in ("user", "item")), device.launches))
    (losses, *factors, launches), (late_losses, *late_factors, late_launches) = results
    assert late_losses == losses
    for ours, theirs in zip(late_factors, factors, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    both = ["centralized", "blocked"] * 3
    assert late_launches == (both if long_row == 7 else launches)
    assert launches == {1: ["blocked"] * 3, 7: both[::-1], 1000: ["centralized"] * 3}[long_row]


@pytest.mark.parametrize(("ranks", "biases"), [(1, False), (2, True), exhaustive(1, True), exhaustive(2, False)])
def test_rows_walk_range_after_range(monkeypatch, device, biases, ranks):
    """The fixed rows of a range stay in the cache; the updates and their order are those of a walk through all."""
    monkeypatch.setattr(plan_sgd, "RANGE_OF_L2", 1e-9)
    monkeypatch.setattr(plan_sgd, "RANGE_ENTRIES", 1)
    problem = Pass(device, rows_of(LENGTHS, 80), 5, biases=biases)
    matrices = {"user": problem.matrix, "item": transpose(problem.matrix)}
    schedule = sgd.Msgd(device, matrices, "mixed", 5, 30, ranks=ranks)
    work = dict(zip(SIDES, map(problem.rows, problem.factors), strict=True))
    losses = device.empty(schedule.n_losses("user"), np.float64)
    if device.spec.name == "emulated":
        device.launches.clear()
    schedule.launch_pass("user", work, problem.terms, losses)
    problem.compare(work["user"], losses)
    count = plan_sgd.MOST_RANGES // ranks
    assert schedule.walks["user"].n_ranges == count
    assert len(losses) == count * np.count_nonzero(np.diff(problem.matrix.indptr))
    if device.spec.name == "emulated":
        assert device.launches == ["blocked"] + ["centralized"] * count


def test_the_longest_rows_of_a_shared_epoch_are_walked_fastest(device):
    """A step of several GPUs ends with its longest walk; alone, a GPU has others to do meanwhile."""
    matrix = as_csr(rows_of((90, 50, 44, 31, 9, 0), 100), dtype=np.float32)
    matrices = {"user": matrix, "item": transpose(matrix)}
    fastest, rule = (choose(64, 4, device.spec) for choose in (BlockedConfig.fastest, BlockedConfig.rule))
    for ranks, config in ((1, rule), (2, fastest)):
        assert sgd.Msgd(device, matrices, "mixed", 64, 30, ranks=ranks)._kernels._config == config
    assert fastest.helpers > rule.helpers
    if device.spec.name == "emulated":
        assert (rule.per_sm(device.spec), fastest.per_sm(device.spec)) == (2, 1)


def test_ranges_fit_the_cache():
    l2 = 60 << 20
    netflix, users = (17_770, 480_189), (480_189, 17_770)
    assert [plan_sgd.range_count(netflix, 99_072_112, 4 * f, l2) for f in (16, 32, 64, 128)] == [2, 4, 8, 8]
    assert plan_sgd.range_count(netflix, 99_072_112, 512, l2, most=4) == 4
    assert plan_sgd.range_count(users, 99_072_112, 512, l2) == 1  # all items fit
    assert plan_sgd.range_count((3_706, 6_040), 1_000_209, 512, l2) == 1
    assert plan_sgd.range_count((10**6, 10**6), 10**8, 512, l2) == 1  # rows of 100 entries
    assert plan_sgd.range_count((0, 10), 0, 512, l2) == 1


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 12), max_size=4))
@settings(max_examples=50)
def test_bounds_of_ranges(seed, columns):
    rng = np.random.default_rng(seed)
    matrix = as_csr(sp.random_array((7, 12), density=rng.random(), rng=rng, format="csr"), dtype=np.float32)
    bounds = sgd.column_bounds(matrix, np.sort(columns))
    for row, (begin, end) in enumerate(pairwise(matrix.indptr)):
        wanted = [begin + np.searchsorted(matrix.indices[begin:end], column) for column in sorted(columns)]
        assert bounds[:, row].tolist() == [begin, *wanted, end]


def test_an_interrupted_pass_leaves_no_concurrent_work(monkeypatch):
    """Who gives back the rows that are moved waits for the first stream only."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = LateSecondStream()
    problem = Pass(device, SMALL, 5)
    schedule = sgd.Msgd(device, {"user": problem.matrix, "item": transpose(problem.matrix)}, "mixed", 5, 7)
    work = dict(zip(SIDES, map(problem.rows, problem.factors), strict=True))

    def interrupted() -> None:
        assert device.waiting
        raise KeyboardInterrupt

    monkeypatch.setattr(sgd.MsgdKernels, "centralized", lambda *_: [interrupted])
    with pytest.raises(KeyboardInterrupt):
        one_pass(schedule, "item", work)
    assert not device.waiting


# ---------------------------------------------------------------------------------------------------- solver


def method_of(schedule="msgd", ordering="mixed", rate_schedule="power", learning_rate=0.05, decay=None) -> SgdMethod:
    known = ordering if ordering in ("user", "item", "mixed") else "mixed"
    method = SgdMethod.check(schedule, known, rate_schedule, learning_rate, decay, True)
    return replace(method, ordering=ordering, seed_bits=7)


def solver_on(
    device, matrix, method, rank=5, *, biases=False, completed=0, state=None, precision="float32", long_row=None
):
    objective = Objective.explicit(0.05, "count", biases)
    settings = Settings.check(
        factors=rank,
        dtype=matrix.dtype,
        num_threads=1,
        device="cpu",
        iterations=1,
        method=replace(method, schedule="msgd", ordering="mixed"),
    )
    plan = make_plan(objective, settings, matrix.shape, matrix.nnz).changed(
        gpu=device.spec, precision=precision, method=method
    )
    if state is None:
        degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
        mean = float(matrix.data.mean())
        state = initial_state(*degrees, rank, matrix.dtype.type, objective, mean, 0)
    block = {"user": matrix, "item": transpose(matrix)}
    kernels = GpuEpochs(device, [block], objective, plan, long_row)
    return EpochSolver(kernels, objective, plan, state, degrees_of(block), completed)


def run(solver: EpochSolver, epochs: int) -> State:
    iterate(solver, epochs)
    return solver.state.on_host()


@pytest.mark.parametrize("held", ["user", "item"])
def test_memory_of_runs_is_within_what_is_planned(device, monkeypatch, held):
    monkeypatch.setattr(sgd, "RUN", 8)
    matrix = as_csr(popular() if held == "item" else transpose(as_csr(popular(), dtype="float32")), dtype="float32")
    solver = solver_on(device, matrix, method_of("batch_hogwild"))
    assert solver.kernels.schedules[0].held == held
    entries = solver.kernels.schedules[0].entries
    taken = sum(array.nbytes for array in vars(entries).values()) + 8 * (max(matrix.shape) + 1)
    assert taken <= solver.method._gpu_bytes(solver.plan)["ratings"] <= 1.5 * taken


@pytest.mark.parametrize("where", ["table", "bias"])
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinite_values_are_found(dtype, bad, where, device):
    def side(rows: int, value: float | None) -> DeviceFactors:
        table, bias = np.ones((rows, 8), dtype), np.ones(rows, dtype)
        if value is not None and rows:
            (table if where == "table" else bias)[(rows - 1, 5) if where == "table" else rows - 1] = value
        return DeviceFactors(device, device.upload(table), 5, device.upload(bias))

    with device.active():
        kernels: Any = SimpleNamespace(device=device, _sums=device.zeros(1, np.float64), passes=(None,))
        for sides in ((side(0, None), side(37, bad)), (side(3, bad), side(37, None))):
            assert GpuEpochs.begin_result(kernels, *sides)() == (0.0, bad is None)


@pytest.mark.parametrize("ordering", sgd.LAYOUTS)
@pytest.mark.parametrize("biases", [False, True])
def test_orderings_are_msgd(device, ordering, biases, monkeypatch):
    monkeypatch.setattr(sgd, "LONG_ROW", 9)
    matrix, method = as_csr(SMALL, dtype="float32"), method_of(ordering=ordering)
    solver = solver_on(device, matrix, method, biases=biases)
    expected, state = solver.state.on_host(), run(solver, 2)
    for epoch in range(2):
        expected = reference.msgd(matrix, expected, terms_at(method, solver.objective, expected.mean, epoch))
    assert relative_error(state, expected) < 3e-6
    names = {"user": ("decentralized", "centralized"), "item": ("centralized", "decentralized")}
    names |= {"mixed": ("blocked", "centralized"), "crossed": ("decentralized",)}
    if device.spec.name == "emulated":
        assert set(device.launches) - {"row_range", "draw_rows", "copy_block", "fill_block"} == set(names[ordering])
    assert len(solver.kernels.schedules[0].walks) == (1 if ordering in ("user", "item") else 2)


@pytest.mark.parametrize("ordering", sgd.LAYOUTS)
@pytest.mark.parametrize("long_row", [4, 1 << 40])
def test_long_rows_of_every_ordering(device, ordering, long_row):
    """Given a length, the centralized passes of every ordering have blocks for long rows, and none beyond it."""
    matrix, method = as_csr(SMALL, dtype="float32"), method_of(ordering=ordering)
    solver = solver_on(device, matrix, method, biases=True, long_row=long_row)
    assert solver.kernels.long_row == long_row
    expected, state = solver.state.on_host(), run(solver, 1)
    expected = reference.msgd(matrix, expected, terms_at(method, solver.objective, expected.mean, 0))
    assert relative_error(state, expected) < 3e-6
    if device.spec.name == "emulated":
        assert ("blocked" in device.launches) == (long_row == 4 and ordering != "crossed")


@pytest.mark.parametrize("rank", [3, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tables_of_a_biased_model(device, rank, dtype):
    """A constant 1 beside the factors, wherever padding puts it, and rows without entries stay zero."""
    matrix = as_csr(SMALL, dtype=dtype)
    solver = solver_on(device, matrix, method_of(), rank, biases=True)
    state = run(solver, 1)
    for side in ("user", "item"):
        table = device.download(solver.state.side(side).table)
        np.testing.assert_array_equal(table[:, rank], 1)
        assert not table[:, rank + 1 :].any()
    assert not state.user.matrix[12].any()
    assert not state.item.matrix[5].any()
    assert state.user.bias[12] == state.item.bias[5] == 0
    assert state.user.matrix.dtype == dtype


@pytest.mark.parametrize("ordering", ["user", "item", "mixed"])
def test_objective(device, ordering):
    matrix = as_csr(SMALL, dtype="float32")
    solver = solver_on(device, matrix, method_of(ordering=ordering), biases=True)
    state = run(solver, 1)
    assert solver.objective_value() == pytest.approx(
        reference.objective_value(matrix, state, solver.objective), rel=1e-6
    )
    assert solver.objective_value() == solver.objective_value()


@pytest.mark.parametrize(
    ("schedule", "ordering", "precision"),
    [
        ("msgd", "mixed", "float32"),
        ("msgd", "mixed", "float16"),
        ("msgd", "crossed", "float32"),
        ("batch_hogwild", "mixed", "float16"),
    ],
)
def test_reruns_and_resumed_runs_have_the_same_bits(device, schedule, ordering, precision):
    """Batch-Hogwild only where nothing meets: with one worker."""
    matrix, method = as_csr(SMALL, dtype="float32"), method_of(schedule, ordering)
    states = [run(solver_on(device, matrix, method, precision=precision), 3) for _ in range(2)]
    half = run(solver_on(device, matrix, method, precision=precision), 1)
    states.append(run(solver_on(device, matrix, method, state=half, completed=1, precision=precision), 2))
    for state in states[1:]:
        for ours, theirs in zip(arrays(state), arrays(states[0]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_state_is_never_written_to(device):
    solver = solver_on(device, as_csr(SMALL, dtype="float32"), method_of(), biases=True)
    start = solver.state
    kept = [
        device.download(table).copy() for side in (start.user, start.item) for table in (side.table, side.device_bias)
    ]
    run(solver, 1)
    for table, before in zip((start.user.table, start.user.device_bias, start.item.table), kept, strict=False):
        np.testing.assert_array_equal(device.download(table), before)
    assert solver.state.user is not start.user


@pytest.mark.parametrize(
    ("tall", "precision"),
    [(True, "float32"), (False, "float16"), exhaustive(False, "float32"), exhaustive(True, "float16")],
)
def test_batch_hogwild_learns(device, precision, tall, monkeypatch):
    """Rows of the larger side are held; several workers, blocks one after the other where emulated."""
    monkeypatch.setattr(sgd, "WORKER_ENTRIES", 32)
    matrix = as_csr(SMALL if tall else sp.csr_array(SMALL.T), dtype="float32")
    solver = solver_on(device, matrix, method_of("batch_hogwild"), biases=True, precision=precision)
    assert solver.kernels.schedules[0].held == ("user" if tall else "item")
    start = solver.objective_value()
    run(solver, 8)
    assert solver.objective_value() < 0.6 * start


def test_a_diverging_run_keeps_the_last_valid_factors(device):
    matrix = as_csr(SMALL, dtype="float32")
    for schedule in ("msgd", "batch_hogwild"):
        solver = solver_on(device, matrix, method_of(schedule, rate_schedule="constant"))
        run(solver, 1)
        sound = solver.state
        solver.method = replace(solver.method, learning_rate=9.0)
        with pytest.raises(DivergedError, match=r"iteration 2.*learning_rate=9"):
            run(solver, 30)
        assert solver.state.user is sound.user
        assert solver.state.item is sound.item


def test_a_rising_loss_is_divergence(device):
    solver = solver_on(device, as_csr(SMALL, dtype="float32"), method_of())
    solver.best = 1e-3
    with pytest.raises(DivergedError, match=r"the sum of squared errors rose from 0\.001 to"):
        run(solver, 1)


def test_factors_that_overflow_with_the_last_update(device):
    """The errors are finite; what the last one makes of a row is not."""
    matrix = as_csr(sp.csr_array(np.array([[1e18]])), dtype="float32")
    state = State(Factors(np.zeros((1, 1), np.float32)), Factors(np.array([[1e21]], np.float32)))
    solver = solver_on(device, matrix, method_of(rate_schedule="constant", learning_rate=9.0), 1, state=state)
    with pytest.raises(DivergedError, match=r"factors became infinite or NaN"):
        run(solver, 1)


# ---------------------------------------------------------------------------------------------------- estimator


@pytest.mark.parametrize("biases", [False, True])
def test_gpu_equals_cpu(gpu, biases):
    given = {"factors": 6, "iterations": 3, "biases": biases, "random_state": 0, "learning_rate": 0.05}
    ours = hmf.SGD(**given, device="cuda").fit(SMALL)
    theirs = hmf.SGD(**given, device="cpu").fit(SMALL)
    assert ours.device_.startswith("cuda")
    np.testing.assert_allclose(ours.user_factors, theirs.user_factors, rtol=0, atol=3e-6)
    np.testing.assert_allclose(ours.item_factors, theirs.item_factors, rtol=0, atol=3e-6)
    np.testing.assert_allclose(ours.predict([0, 1], [0, 1]), theirs.predict([0, 1], [0, 1]), rtol=1e-5)


@pytest.mark.parametrize("schedule", ["msgd", "batch_hogwild"])
def test_services_of_a_fit(gpu, schedule, tmp_path):
    """Validation, fold-in by a biased model, resuming, saving."""
    given = {"factors": 4, "biases": True, "random_state": 0, "device": "cuda", "schedule": schedule}
    seen = []
    model = hmf.SGD(**given, iterations=4)
    model.fit(SMALL, validation=SMALL, checkpoint=tmp_path, callback=lambda m, r: seen.append(m.transform(SMALL)))
    assert [record["iteration"] for record in model.history_] == [1, 2, 3, 4]
    assert model.history_[-1]["rmse"] < model.history_[0]["rmse"]
    assert all(np.isfinite(factors).all() for factors in seen)
    np.testing.assert_allclose(seen[-1], model.transform(SMALL), rtol=1e-5, atol=1e-6)
    resumed = hmf.SGD(**given, iterations=5).fit(SMALL, resume_from=tmp_path)
    assert resumed.n_iter_ == 5
    ids, _ = model.recommend(0, N=3)
    assert len(ids) == 3
    model.save(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(hmf.load(tmp_path / "model.safetensors").user_factors, model.user_factors)


@on_a_gpu
@pytest.mark.realdata
@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "msgd"},
        {"schedule": "msgd", "ordering": "user"},
        {"schedule": "msgd", "ordering": "item"},
        {"schedule": "batch_hogwild"},
        {"schedule": "batch_hogwild", "precision": "float16"},
    ],
)
def test_movielens(gpu, data_dir, given):
    ratings = hmf.Ratings.from_file(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz")
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    model = hmf.SGD(32, device="cuda", random_state=0, **given).fit(train)
    assert hmf.evaluate(model, test, metrics=("rmse",))["rmse"] <= 0.87
