"""CCD++ on a GPU against the float64 reference and the CPU; the same bodies on the emulated device."""

from __future__ import annotations

import importlib
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Objective, State
from hybridmf.core.validate import as_csr
from hybridmf.cpu.ccd import CpuCCD
from hybridmf.errors import DeviceMemoryError, NonFiniteError
from hybridmf.formats import transpose
from hybridmf.gpu import ccd
from hybridmf.gpu.ccd import CcdEntries, GpuCCD, PieceLayout
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.plan import ccd as ccd_plan
from hybridmf.plan.ccd import CcdConfig, CcdMethod
from hybridmf.plan.start import initial_state
from support import reference
from support.half_sweeps import plan_for, random_factors, relative_error
from support.marks import exhaustive
from support.ratings import planted
from support.solvers import iterate
from support.states import grown

LENGTHS = (0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0, 300, 7)
"""Entries of users around quads (4), short pieces (64) and segments (128), empty ones, one with every item."""

N_ITEMS = 301
"""The last one has no entries."""

CONFIGS = {
    "chosen": None,
    "one tile": CcdConfig(staged=True, tile=512, n_tiles=1, segment=256, blocks=1, threads=32),
    "tiles": CcdConfig(staged=True, tile=100, n_tiles=1, segment=64, blocks=5, threads=64),
    "gathered": CcdConfig(staged=False, tile=16, n_tiles=1, segment=128, blocks=4, threads=64),
}

on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
"""For problems too large to emulate."""

COUNT = Objective.explicit(0.05, "count", False)
BIASED = Objective.explicit(0.05, 0.5, True, 0.3)
OBJECTIVES = {"factors alone": COUNT, "biases": BIASED}
objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def uneven(dtype="float32", seed: int = 0) -> sp.csr_array:
    """Ratings with rows of LENGTHS."""
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(N_ITEMS - 1, length, replace=False)) for length in LENGTHS]
    indptr = np.concatenate(([0], np.cumsum(LENGTHS)))
    values = rng.integers(1, 6, indptr[-1]).astype(dtype)
    matrix = sp.csr_array((values, np.concatenate(columns), indptr), shape=(len(LENGTHS), N_ITEMS))
    return as_csr(matrix, dtype=dtype)


def start_of(matrix, rank: int, objective: Objective = COUNT) -> State:
    """Factors that need not be positive, and biases if there are any; zeros where there are no entries."""
    users, items = (
        random_factors(n, rank, matrix.dtype, objective.biases, seed)
        for n, seed in zip(matrix.shape, (1, 2), strict=True)
    )
    degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    for side, counts in zip((users, items), degrees, strict=True):
        for array in (side.matrix, side.bias):
            if array is not None:
                array[counts == 0] = 0
    return State(users, items, float(matrix.data.mean()) if objective.biases and matrix.nnz else 0.0)


def configs_for(name: str, matrix) -> dict | None:
    """The layouts of both sides."""
    config = CONFIGS[name]
    if config is None:
        return None
    fixed = {"user": matrix.shape[1], "item": matrix.shape[0]}
    return {
        side: config if name != "tiles" else replace(config, n_tiles=-(-fixed[side] // config.usable(matrix.dtype)))
        for side in SIDES
    }


def solver(device, matrix, state, objective=COUNT, inner=1, nonnegative=False, config="tiles") -> GpuCCD:
    method = CcdMethod(inner, nonnegative)
    rank = state.user.matrix.shape[1]
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=rank, dtype=matrix.dtype.name, method=method)
    arguments = (matrix, transpose(matrix), objective, plan, state)
    return GpuCCD(device, *arguments, configs=configs_for(config, matrix))


def swept(one, iterations: int = 1):
    """The solver after some iterations."""
    iterate(one, iterations)
    return one


def assert_close(state: State, expected: State, tolerance: float) -> None:
    assert state.mean == expected.mean
    for side in SIDES:
        assert relative_error(state.side(side).matrix, expected.side(side).matrix) < tolerance
        assert (state.side(side).bias is None) == (expected.side(side).bias is None)
        if expected.side(side).bias is not None:
            assert relative_error(state.side(side).bias, expected.side(side).bias) < tolerance


# ---------------------------------------------------------------------------------------------------- factors


@pytest.mark.parametrize(
    ("rank", "inner", "nonnegative", "config", "name"),
    [
        *((2, 3, True, config, name) for config in CONFIGS for name in OBJECTIVES),
        (1, 1, False, "tiles", "factors alone"),
        (1, 1, False, "gathered", "biases"),
        (5, 1, False, "chosen", "factors alone"),
        (5, 1, False, "one tile", "biases"),
        (5, 1, False, "tiles", "biases"),
        (5, 1, False, "gathered", "factors alone"),
    ],
)
def test_iterations_equal_the_reference(device, rank, inner, nonnegative, config, name):
    matrix, objective = uneven(), OBJECTIVES[name]
    start = start_of(matrix, rank, objective)
    one = swept(solver(device, matrix, start, objective, inner, nonnegative, config), 2)
    expected = reference.ccd(matrix, start, objective, 2, inner, nonnegative)
    assert_close(one.state, expected, 1e-4 if objective.biases else 2e-5)
    assert not nonnegative or min(one.state.side(side).matrix.min() for side in SIDES) >= 0


@pytest.mark.parametrize("config", ["one tile", exhaustive("tiles"), "gathered"])
@objectives
def test_float64(device, config, objective):
    matrix = uneven("float64")
    start = start_of(matrix, 3, objective)
    one = swept(solver(device, matrix, start, objective, inner=2, config=config), 2)
    assert one.state.user.matrix.dtype == np.float64
    assert_close(one.state, reference.ccd(matrix, start, objective, 2, 2), 1e-11)


@pytest.mark.parametrize("lambda_b", [0.0, 0.3])
@pytest.mark.parametrize("scaling", ["none", 0.5, "count"])
def test_penalty_of_biases(device, lambda_b, scaling):
    matrix, objective = uneven("float64"), Objective.explicit(0.2, scaling, True, lambda_b)
    start = start_of(matrix, 2, objective)
    one = swept(solver(device, matrix, start, objective, config="one tile"))
    expected = reference.ccd(matrix, start, objective, 1)
    assert_close(one.state, expected, 1e-11)
    assert one.objective_value() == pytest.approx(reference.objective_value(matrix, expected, objective), rel=1e-11)


@pytest.mark.parametrize("scaling", ["none", 0.5])
def test_scaling_of_the_penalty(device, scaling):
    matrix, objective = uneven(), Objective.explicit(2.0, scaling, False)
    start = start_of(matrix, 2)
    one = swept(solver(device, matrix, start, objective))
    assert_close(one.state, reference.ccd(matrix, start, objective, 1), 2e-5)


@pytest.mark.parametrize("config", ["tiles", "gathered"])
def test_without_penalty_what_meets_zeros_is_zero(device, config):
    """An undetermined coordinate is 0 / 0."""
    matrix, objective = uneven(), Objective.explicit(0.0, "none", False)
    start = start_of(matrix, 2)
    start.user.matrix[:, 1] = 0
    state = swept(solver(device, matrix, start, objective, config=config)).state
    assert not state.user.matrix[:, 1].any() and not state.item.matrix[:, 1].any()
    assert_close(state, reference.ccd(matrix, start, objective, 1), 2e-5)


def test_rows_without_entries_become_zero(device):
    matrix = uneven()
    start = start_of(matrix, 2, BIASED)
    start.user.matrix[0] = start.item.matrix[-1] = start.user.bias[0] = start.item.bias[-1] = 7
    state = swept(solver(device, matrix, start, BIASED)).state
    assert not state.user.matrix[0].any() and not state.item.matrix[-1].any()
    assert state.user.bias[0] == state.item.bias[-1] == 0 and state.user.bias[1] != 0
    assert np.isfinite(state.user.matrix).all() and np.isfinite(state.item.matrix).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1)])
def test_small_shapes(device, shape):
    matrix = as_csr(sp.csr_array(np.arange(1.0, 1 + np.prod(shape)).reshape(shape)), dtype="float32")
    start = start_of(matrix, 2)
    for config in ("chosen", "gathered"):
        one = swept(solver(device, matrix, start, config=config))
        assert_close(one.state, reference.ccd(matrix, start, COUNT, 1), 2e-5)


def test_no_entries_at_all(device):
    matrix = as_csr(sp.csr_array((3, 4), dtype=np.float32), dtype="float32")
    one = swept(solver(device, matrix, start_of(matrix, 2)))
    assert not one.state.user.matrix.any() and not one.state.item.matrix.any()
    assert one.objective_value() == 0


@objectives
def test_equals_the_cpu_to_rounding(device, objective):
    matrix = as_csr(planted(), dtype="float32")
    state = start_of(matrix, 5, objective)
    one = solver(device, matrix, state, objective, inner=2, config="chosen")
    other = CpuCCD(matrix, transpose(matrix), objective, one.plan, state)
    assert_close(swept(one, 3).state, swept(other, 3).state, 2e-4 if objective.biases else 5e-5)
    assert one.objective_value() == pytest.approx(other.objective_value(), rel=1e-5)


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(60_000, 500), (90_000, 70_000)])
def test_large_problems(device, shape, dtype):
    """Several tiles of users, with rows that are split; and rows too short for tiles."""
    rng = np.random.default_rng(0)
    rows, columns = (rng.integers(0, n, 4_000_000) for n in shape)
    ones = sp.csr_array((np.ones(len(rows), dtype), (rows, columns)), shape=shape)
    ones.data = rng.integers(1, 6, ones.nnz).astype(dtype)
    matrix = as_csr(ones, dtype=dtype)
    start = start_of(matrix, 3)
    one = swept(solver(device, matrix, start, inner=2, config="chosen"))
    assert one.entries["item"].config.staged == (shape[1] == 500)
    assert_close(one.state, reference.ccd(matrix, start, COUNT, 1, 2), 1e-4 if dtype == "float32" else 1e-11)
    again = swept(solver(device, matrix, start, inner=2, config="chosen"))
    assert all(np.array_equal(one.state.side(side).matrix, again.state.side(side).matrix) for side in SIDES)


@on_a_gpu
@pytest.mark.realdata
def test_movielens_equals_the_cpu(device, data_dir):
    ratings = hmf.Ratings.from_file(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz")
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    options = {"factors": 32, "regularization": 0.05, "iterations": 15, "random_state": 0}
    on_gpu, on_cpu = (hmf.CCD(device=name, **options).fit(train) for name in ("cuda", "cpu"))
    assert on_gpu.objective(train) == pytest.approx(on_cpu.objective(train), rel=1e-3)
    assert on_gpu.score(test) == pytest.approx(on_cpu.score(test), abs=1e-3)


# ---------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("config", ["tiles", "gathered"])
@objectives
def test_a_rerun_and_a_resumed_run_give_the_same_bits(device, config, objective):
    matrix = uneven()
    start = start_of(matrix, 3, objective)
    first = swept(solver(device, matrix, start, objective, config=config), 2).state
    again = swept(solver(device, matrix, start, objective, config=config), 1).state.on_host()
    resumed = swept(solver(device, matrix, again, objective, config=config), 1).state
    for side in SIDES:
        assert np.array_equal(first.side(side).matrix, resumed.side(side).matrix)
        if objective.biases:
            assert np.array_equal(first.side(side).bias, resumed.side(side).bias)


@pytest.mark.parametrize(
    ("config", "blocks", "threads"),
    [
        ("tiles", 1, 32), ("tiles", 40, 64), ("gathered", 40, 64),
        exhaustive("tiles", 3, 128), exhaustive("gathered", 3, 128), exhaustive("gathered", 1, 32),
    ],
)  # fmt: skip
def test_the_division_into_blocks_does_not_change_the_bits(device, monkeypatch, config, blocks, threads):
    matrix = uneven()
    start = start_of(matrix, 2)
    expected = swept(solver(device, matrix, start, config=config)).state
    monkeypatch.setitem(CONFIGS, config, replace(CONFIGS[config], blocks=blocks, threads=threads))
    state = swept(solver(device, matrix, start, config=config)).state
    assert all(np.array_equal(expected.side(side).matrix, state.side(side).matrix) for side in SIDES)


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_partial_sums_of_split_rows(device, lanes):
    """Rows of several pieces, combined by more lanes than most of them have."""
    matrix = uneven()
    start = start_of(matrix, 2)
    one = solver(device, matrix, start, config="tiles")
    assert [entries.combining_lanes for entries in one.entries.values()] == [8, 8]
    for entries in one.entries.values():
        entries.combining_lanes = lanes
    assert_close(swept(one, 2).state, reference.ccd(matrix, start, COUNT, 2, 1), 2e-5)


@pytest.mark.parametrize("config", ["one tile", "tiles", "gathered"])
@objectives
def test_both_copies_of_the_residual_have_the_same_bits(device, config, objective):
    matrix = uneven()
    one = swept(solver(device, matrix, start_of(matrix, 3, objective), objective, inner=2, config=config))
    residuals = {side: residual_of(one, side) for side in SIDES}
    assert np.array_equal(residuals["user"], residuals["item"].T)
    assert np.count_nonzero(residuals["user"]) > matrix.nnz * 0.9


@pytest.mark.parametrize("config", ["one tile", "tiles", "gathered"])
@objectives
def test_residual_is_what_the_factors_leave(device, config, objective):
    """Before the last factor's new product goes, at the end of an iteration."""
    matrix = uneven("float64")
    one = swept(solver(device, matrix, start_of(matrix, 3, objective), objective, config=config))
    users, items = (one.state.side(side) for side in SIDES)
    predicted = users.matrix[:, :-1] @ items.matrix[:, :-1].T
    if objective.biases:
        predicted += one.state.mean + users.bias[:, None] + items.bias
    expected = matrix.toarray() - np.where(matrix.toarray() != 0, predicted, 0)
    assert np.allclose(residual_of(one, "user"), expected, atol=1e-12)


def residual_of(one: GpuCCD, side) -> np.ndarray:
    """A copy of the residual as a dense matrix."""
    entries, download = one.entries[side], one.device.download
    dense = np.zeros((entries.n_rows, entries.n_fixed))
    indices, residuals = download(entries.indices).astype(np.int64), download(entries.residuals)
    for (first, quads, row, _), base in zip(download(entries.pieces), download(entries.bases), strict=True):
        place = np.arange(4 * first, 4 * (first + quads))
        place = place[indices[place] != entries.zero]
        dense[row, base + indices[place]] = residuals[place]
    return dense


@pytest.mark.parametrize(
    ("nonnegative", "objective"), [(False, COUNT), (True, BIASED)], ids=["factors alone", "nonnegative-biases"]
)
def test_the_objective_never_rises(device, nonnegative, objective):
    matrix = as_csr(planted(), dtype="float32")
    degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    mean = float(matrix.data.mean())
    state = initial_state(*degrees, 4, np.float32, objective, mean, 0)
    one = solver(device, matrix, state, objective, nonnegative=nonnegative, config="chosen")
    values = [one.objective_value()]
    for _ in range(5):
        swept(one)
        values.append(one.objective_value())
    assert np.all(np.diff(values) <= 1e-6 * values[0])
    assert values[-1] < values[0] / 2


@pytest.mark.parametrize("biases", [False, True])
def test_objective_is_that_of_the_definition(device, biases):
    matrix, objective = uneven(), Objective.explicit(0.3, 0.5, biases, 0.2)
    state = start_of(matrix, 5, objective)
    for config in CONFIGS:
        one = solver(device, matrix, state, objective, config=config)
        expected = reference.objective_value(matrix, state, objective)
        # the sum of mean and user bias is rounded to float32
        assert one.objective_value() == pytest.approx(expected, rel=1e-7 if biases else 1e-9)


@objectives
def test_no_constant_breaks_the_scale_of_the_ratings(device, objective):
    """Ratings and lambda times 2^20, from a start times 2^10: no bit of a factor differs but for that power."""
    matrix, root = uneven(), np.float32(2**10)
    scaled = replace(objective, regularization=objective.regularization.user * float(root) ** 2)
    start = start_of(matrix, 3, objective)
    one = swept(solver(device, matrix, start, objective, inner=2))
    more = as_csr(matrix * root**2, dtype="float32")
    other = swept(solver(device, more, grown(start, float(root)), scaled, inner=2))
    for side in SIDES:
        ours, expected = other.state.side(side), grown(one.state, float(root)).side(side)
        assert np.array_equal(ours.matrix, expected.matrix)
        assert not objective.biases or np.array_equal(ours.bias, expected.bias)


@objectives
def test_state_stays_on_the_device_and_is_never_written_to(device, objective):
    matrix = uneven()
    one = swept(solver(device, matrix, start_of(matrix, 5, objective), objective))
    before = one.state
    copy = before.user.matrix.copy()
    assert isinstance(before.user, DeviceFactors) and before.user.table.shape == (len(LENGTHS), 8)
    beside = device.download(before.user.table)[:, 5:]
    assert np.array_equal(beside, np.tile([float(objective.biases), 0, 0], (len(LENGTHS), 1)))
    bias = device.download(before.user.device_bias).copy() if objective.biases else None
    swept(one)
    assert np.array_equal(device.download(before.user.table)[:, :5], copy)
    assert not np.array_equal(one.state.user.matrix, copy)
    if objective.biases:
        assert np.array_equal(device.download(before.user.device_bias), bias)
        assert not np.array_equal(one.state.user.bias, bias)


def test_factors_that_overflow_are_an_error_and_leave_the_state(device):
    matrix = uneven()
    one = solver(device, matrix, start_of(matrix, 2))
    before = one.state
    one.entries["user"].ratings[0] = np.inf
    with pytest.raises(NonFiniteError, match=r"factor \d of (user|item) \d+ became infinite or NaN; .*0\.05"):
        swept(one)
    assert one.state is before


def test_a_bias_that_overflows_is_an_error(device):
    matrix = uneven()
    one = solver(device, matrix, start_of(matrix, 2, BIASED), BIASED, nonnegative=True)
    one.entries["user"].ratings[0] = np.inf
    with pytest.raises(NonFiniteError, match=r"bias of user \d+ became infinite or NaN; .*bias_regularization .*0\.3"):
        swept(one)


@pytest.mark.parametrize("biases", [False, True])
def test_estimator(device, monkeypatch, biases):
    if device.spec.name == "emulated":
        monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
        monkeypatch.setattr(
            importlib.import_module("hybridmf.plan.dispatch"), "find_gpu", lambda asked: (device.spec, "asked for")
        )
    matrix = planted()
    options = {"factors": 3, "iterations": 2, "random_state": 0, "inner_iterations": 2, "biases": biases}
    on_gpu = hmf.CCD(device="cuda", **options).fit(matrix)
    on_cpu = hmf.CCD(device="cpu", **options).fit(matrix)
    assert on_gpu.device_.startswith("cuda:")
    assert_close(on_gpu._learned.state, on_cpu._learned.state, 3e-4 if biases else 1e-4)
    pairs = np.arange(40), np.arange(40)
    np.testing.assert_allclose(on_gpu.predict(*pairs), on_cpu.predict(*pairs), rtol=1e-3)
    assert on_gpu.objective(matrix) == pytest.approx(on_cpu.objective(matrix), rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (17, 300), (300, 17)])
@pytest.mark.parametrize(
    ("dtype", "objective"), [("float32", BIASED), ("float64", COUNT)], ids=["float32-biases", "float64-factors alone"]
)
def test_memory_is_within_what_is_planned(device, monkeypatch, shape, dtype, objective):
    if device.spec.name != "emulated":
        pytest.skip("allocations are counted where they are emulated")
    matrix = as_csr(sp.random_array(shape, density=0.4, random_state=0, format="csr"), dtype=dtype)
    live, peak = {}, [0]
    original = device.empty

    def counted(shape, dtype):
        array = original(shape, dtype)
        live[id(array)] = array.nbytes
        weakref.finalize(array, live.pop, id(array))
        peak[0] = max(peak[0], sum(live.values()))
        return array

    monkeypatch.setattr(device, "empty", counted)
    one = swept(solver(device, matrix, start_of(matrix, 5, objective), objective, config="chosen"), 2)
    planned = ccd_plan.memory_bytes(*shape, matrix.nnz, 5, dtype, device.spec, objective.biases)
    assert peak[0] <= sum(planned.values()) <= 2 * peak[0] + 1000
    assert one.entries["user"].residuals.nbytes <= planned["residual"] / 2 + 100


# ---------------------------------------------------------------------------------------------------- layout


def test_rows_that_come_in_chunks_lie_where_they_would(device, monkeypatch):
    matrix = uneven()
    state = start_of(matrix, 2)
    whole = solver(device, matrix, state).entries["item"]
    monkeypatch.setattr(ccd_plan, "CHUNK_ENTRIES", 100)
    chunks = solver(device, matrix, state).entries["item"]
    for name in ("indices", "ratings", "pieces", "bases"):
        assert np.array_equal(device.download(getattr(whole, name)), device.download(getattr(chunks, name)))


def test_chunks_cover_all_entries(monkeypatch):
    monkeypatch.setattr(ccd_plan, "CHUNK_ENTRIES", 10)
    indptr = np.array([0, 0, 0, 25, 25, 30, 31, 35, 36, 36, 60, 60])
    chunks = list(ccd._chunks(indptr))
    assert [int(indptr[stop] - indptr[start]) for start, stop in chunks] == [25, 10, 1, 24]
    covered = np.concatenate([np.arange(*indptr[list(chunk)]) for chunk in chunks])
    assert np.array_equal(covered, np.arange(60))
    assert not list(ccd._chunks(np.zeros(4, dtype=np.int64)))


@pytest.mark.parametrize("seed", range(4))
def test_layout_has_each_entry_once(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 400, (20, 3)) * rng.integers(0, 2, (20, 3))
    begins = np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    layout = PieceLayout.cut(begins, counts, 128)
    first, quads, rows, slots = layout.pieces.T
    covered = np.sort(np.concatenate([np.arange(b, b + n) for b, n in layout.sources]))
    assert np.array_equal(covered, np.arange(counts.sum()))
    assert np.array_equal(first, np.cumsum(quads) - quads) and quads.sum() == layout.n_quads
    assert layout.sources[:, 1].max() <= 128
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(layout.n_slots))
    for row, slot, n, _ in layout.split:
        assert n > 1 and np.array_equal(np.sort(slots[rows == row]), np.arange(slot, slot + n))
    assert np.all(slots[~np.isin(rows, layout.split[:, 0])] == -1)


@pytest.mark.parametrize("warps", [1, 3])
@pytest.mark.parametrize("blocks", [1, 2, 7, 1000])
def test_blocks_divide_the_pieces(blocks, warps):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 1200, (50, 4)) * (rng.random((50, 4)) < 0.8)
    layout = PieceLayout.cut(np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1), counts, 256)
    parts, first_part = layout.divide(blocks, warps)
    n_blocks = min(blocks, len(layout.pieces))
    assert len(first_part) == n_blocks + 1
    assert first_part[0] == 0 and first_part[-1] == len(parts) and np.all(np.diff(first_part) >= 0)
    times, work = np.zeros(len(layout.pieces), dtype=int), np.zeros(n_blocks)
    for block, (a, b) in enumerate(pairwise(first_part)):
        for tile, begin, end, lanes, rank, team, *unused in parts[a:b]:
            assert 0 <= rank < team <= n_blocks and not any(unused)
            assert np.all(layout.tiles[begin:end] == tile)
            assert np.all(ccd.lanes_of(layout.pieces[begin:end, 1]) <= lanes)
            # the turns of the kernel
            turn = (np.arange(begin, end) - begin) // (warps * (32 // lanes))
            mine = begin + np.flatnonzero(turn % team == rank)
            times[mine] += 1
            work[block] += np.sum(layout.pieces[mine, 1] + ccd.PIECE_WORK)
    assert np.all(times == 1)
    if blocks == 7:
        assert parts[:, 5].max() > 1
        assert work.max() < 1.2 * work.mean()


def test_a_block_at_a_border_of_tiles_shares_both():
    """Two and a half blocks' work in each of two tiles: the third block has a part of either."""
    counts = np.full((100, 2), 256)
    layout = PieceLayout.cut(np.arange(0, 51200, 512), counts, 256)
    parts, first_part = layout.divide(5, 1)
    tiles = [set(parts[a:b, 0].tolist()) for a, b in pairwise(first_part)]
    assert tiles == [{0}, {0}, {0, 1}, {1}, {1}]
    assert [set(parts[a:b, 5].tolist()) for a, b in pairwise(first_part)] == [{3, 2}, {3, 2}, {3}, {3, 2}, {3, 2}]


@pytest.mark.parametrize(("warps", "team"), [(1, 4), (8, 1)])
def test_blocks_take_turns_if_there_are_many_rounds(warps, team):
    """Otherwise the last round would leave most warps without work."""
    layout = PieceLayout.cut(np.arange(0, 25600, 256), np.full((100, 1), 256), 256)
    parts, first_part = layout.divide(4, warps)
    assert set(parts[:, 5].tolist()) == {team}
    pieces = (parts[:, 2] - parts[:, 1]) / parts[:, 5]
    assert np.all(np.abs(pieces - 25) <= 1) and first_part.tolist() == [0, 1, 2, 3, 4]


def test_no_pieces():
    layout = PieceLayout.cut(np.zeros(3, dtype=np.int64), np.zeros((3, 2), dtype=np.int64), 256)
    parts, first_part = layout.divide(4, 2)
    assert parts.shape == (0, 8) and first_part.tolist() == [0, 0]


@pytest.mark.parametrize("segment", [0, 257])
def test_segments_that_a_warp_does_not_read_together(segment):
    with pytest.raises(ValueError, match="segment must be"):
        CcdConfig(True, 100, 1, segment, 1, 32)


@pytest.mark.parametrize(("pieces", "lanes"), [(2, 8), (8, 8), (9, 16), (16, 16), (17, 32)])
def test_lanes_that_combine_a_row_are_as_many_as_its_pieces(device, pieces, lanes):
    matrix = as_csr(sp.csr_array(np.ones((2, 8 * pieces), dtype=np.float32)), dtype="float32")
    config = CcdConfig(staged=False, tile=16, n_tiles=1, segment=8, blocks=2, threads=32)
    assert CcdEntries(device, "user", matrix, COUNT, config).combining_lanes == lanes


def test_too_many_entries_for_the_kernels(monkeypatch):
    monkeypatch.setattr(ccd, "MAX_QUADS", 10)
    with pytest.raises(DeviceMemoryError, match="41 entries are more than one GPU takes here"):
        PieceLayout.cut(np.array([0]), np.array([[41]]), 2048)


def test_the_chosen_configurations():
    from support.devices import SPECS

    netflix = (480_189, 17_770, 99_072_112)
    users = CcdConfig.choose(*netflix, 3, np.float32, SPECS[90])
    items = CcdConfig.choose(netflix[1], netflix[0], netflix[2], 2, np.float32, SPECS[90])
    assert (users.staged, users.n_tiles, items.staged, items.n_tiles) == (True, 1, True, 17)
    assert 3 * 4 * users.tile <= SPECS[90].shared_bytes and 2 * 4 * items.tile <= SPECS[90].shared_bytes
    assert not CcdConfig.choose(1_019_318, 384_546, 48_373_586, 3, np.float32, SPECS[90]).staged
    assert CcdConfig.choose(100, 70_000, 3_000_000, 1, np.float32, SPECS[90]).usable(np.float32) < 65_536
