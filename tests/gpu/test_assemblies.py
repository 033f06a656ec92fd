"""Published GPU assemblies (sparse-syrk, MO-ALS, BALS) against float64 NumPy, on an emulated device and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from hybridmf.device.cuda import DeviceSpec
from hybridmf.formats import BalsMatrix, reorder
from hybridmf.gpu import bals
from hybridmf.gpu import mo_als as mo_als_module
from hybridmf.gpu import sparse_syrk as sparse_syrk_module
from hybridmf.gpu.bals import BalsLocalConfig
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.gpu.mo_als import MoAlsConfig, mo_als, mo_als_with
from hybridmf.gpu.sparse_syrk import PublishedSyrkConfig, SyrkConfig, sparse_syrk, sparse_syrk_published
from hybridmf.plan import assemblies as plan_assemblies
from hybridmf.plan.assemblies import BalsConfig
from support.builds import RANKS, builds_of
from support.marks import mostly_exhaustive

H200 = DeviceSpec("H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 140 << 30, 140 << 30)
TURING = DeviceSpec("Turing", 0, (7, 5), 72, 64 << 10, 6 << 20, 24 << 30, 24 << 30)

ALPHA, UNOBSERVED = 0.7, 0.4

KINDS = ("explicit", "offsets", "implicit")

on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
"""For problems too large to emulate."""

# ---------------------------------------------------------------------------------------------------- problems


class Problem:
    """Factors with NaN in their padding, entries of segments, and the sums in float64."""

    def __init__(self, rank, lengths, dtype=np.float32, kind="explicit", n_fixed=37, seed=0, spread=0) -> None:
        rng = np.random.default_rng(seed)
        self.rank, self.dtype, self.kind = rank, np.dtype(dtype), kind
        self.lengths = np.asarray(lengths, dtype=np.int64)
        step = 16 // self.dtype.itemsize
        self.factors = np.full((n_fixed, -(-rank // step) * step + step), np.nan, dtype=dtype)
        self.factors[:, :rank] = rng.normal(size=(n_fixed, rank))
        nnz = int(self.lengths.sum()) + spread
        self.indices = rng.integers(0, n_fixed, nnz).astype(np.int32)
        self.ratings = rng.normal(size=nnz).astype(dtype)
        self.offsets = rng.normal(size=n_fixed).astype(dtype) if kind == "offsets" else None
        begins = np.cumsum(self.lengths) - self.lengths + spread
        slots = rng.permutation(len(self.lengths))
        self.segments = np.column_stack((slots, begins, begins + self.lengths)).astype(np.int64)

    def entries(self, device):
        offsets = None if self.offsets is None else device.upload(self.offsets)
        implicit = self.kind == "implicit"
        arrays = device.upload(self.indices), device.upload(self.ratings), offsets
        return DeviceEntries(*arrays, implicit, alpha=ALPHA, unobserved_weight=UNOBSERVED)

    def weights(self, indices, ratings):
        """(outer, linear) of entries in float64, by the definition."""
        ratings = ratings.astype(np.float64)
        if self.kind == "implicit":
            confidence = 1 + ALPHA * np.abs(ratings)
            return confidence - UNOBSERVED, confidence * (ratings > 0)
        offsets = 0 if self.offsets is None else self.offsets[indices].astype(np.float64)
        return np.ones(len(ratings)), ratings - offsets

    def expected(self, indices, ratings):
        """(matrix, rhs, sum of the absolute terms of both) of some entries."""
        y = self.factors[indices, : self.rank].astype(np.float64)
        outer, linear = self.weights(indices, ratings)
        size = np.abs(y)
        return (y.T * outer) @ y, y.T @ linear, (size.T * np.abs(outer)) @ size, size.T @ np.abs(linear)

    def check(self, slot, matrix, rhs, indices, ratings):
        """The lower triangle and the right-hand side; rounding may not exceed a few units of the absolute sums."""
        want_matrix, want_rhs, size_matrix, size_rhs = self.expected(indices, ratings)
        below = np.tril_indices(self.rank)
        units = 4 + np.sqrt(len(indices))
        close_to(f"matrix {slot}", matrix[below], want_matrix[below], units * size_matrix[below], self.dtype)
        close_to(f"rhs {slot}", rhs, want_rhs, units * size_rhs, self.dtype)


def close_to(what, got, want, scale, dtype):
    wrong = ~(np.abs(got.astype(np.float64) - want) <= np.finfo(dtype).eps * scale)
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} wrong, first {got[wrong][0]} for {want[wrong][0]}"


def run(device, problem, launch, **options):
    """Sums of every segment by `launch`, checked; as NumPy arrays."""
    n_slots, rank = len(problem.segments), problem.rank
    matrices = device.empty((n_slots, rank, rank), problem.dtype)
    rhs = device.empty((n_slots, rank), problem.dtype)
    factors, segments = device.upload(problem.factors), device.upload(problem.segments)
    launch(device, (matrices, rhs), factors, problem.entries(device), segments, **options)
    matrices, rhs = device.download(matrices), device.download(rhs)
    for slot, begin, end in problem.segments:
        entries = slice(begin, end)
        problem.check(slot, matrices[slot], rhs[slot], problem.indices[entries], problem.ratings[entries])
    return matrices, rhs


def awkward(size):
    """Lengths around the entries that a kernel stages at a time."""
    return [0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1, 0, 2]


# ---------------------------------------------------------------------------------------------------- over segments

CASES = [
    (1, np.float32, "explicit"),
    (7, np.float32, "implicit"),
    (16, np.float32, "offsets"),
    (15, np.float64, "implicit"),
    (31, np.float32, "explicit"),
    (32, np.float32, "explicit"),
    (33, np.float64, "offsets"),
    (65, np.float32, "explicit"),
    (100, np.float32, "implicit"),
]

USUAL_CASES = [case for case in CASES if case[0] in (7, 16, 33)]

LARGE_RANKS = (63, 64, 96, 97, 127, 128, 200, 256, 512)


@pytest.mark.parametrize(("rank", "dtype", "kind"), mostly_exhaustive(CASES, USUAL_CASES))
def test_sparse_syrk_sums_segments(device, rank, dtype, kind):
    config = SyrkConfig.default(rank, np.dtype(dtype).itemsize, device.spec)
    run(device, Problem(rank, awkward(config.kb), dtype, kind, spread=3), sparse_syrk)


@pytest.mark.parametrize(("rank", "dtype", "kind"), mostly_exhaustive(CASES, USUAL_CASES))
def test_sparse_syrk_as_printed_sums_rows(device, rank, dtype, kind):
    run(device, Problem(rank, awkward(8), dtype, kind, spread=3), sparse_syrk_published)


def test_sparse_syrk_as_printed_without_right_hand_sides(device):
    problem, sums = Problem(20, awkward(8), np.float32, "explicit"), {}
    for with_rhs in (True, False):
        matrices, rhs = device.zeros((9, 20, 20), np.float32), device.zeros((9, 20), np.float32)
        arguments = device.upload(problem.factors), problem.entries(device), device.upload(problem.segments)
        sparse_syrk_published(device, (matrices, rhs), *arguments, WITH_RHS=with_rhs)
        sums[with_rhs] = device.download(matrices), device.download(rhs)
    np.testing.assert_array_equal(np.tril(sums[True][0]), np.tril(sums[False][0]))
    assert sums[True][1].any() and not sums[False][1].any()


@pytest.mark.parametrize("rank", [8, 32, 48, 64, 80, 100, 128, 200])
def test_sparse_syrk_as_printed_satisfies_the_paper_s_constraints(rank):
    config = PublishedSyrkConfig.default(rank, 4, H200)
    assert config.nb % config.dx == config.nb % config.dy == config.kb % config.dy == config.threads % 32 == 0
    assert config.tiles == (3 if rank > 128 else 1) and config.nb < rank + 16


PUBLISHED_CONFIGS = [
    PublishedSyrkConfig(20, 4, nb=12, kb=8, dx=4, dy=4),  # kb is a multiple of dy, as section VIII requires
    PublishedSyrkConfig(20, 4, nb=16, kb=8, dx=8, dy=16),
    PublishedSyrkConfig(20, 8, nb=20, kb=5, dx=4, dy=5),
]


@pytest.mark.parametrize("config", PUBLISHED_CONFIGS, ids=str)
def test_sparse_syrk_as_printed_configurations_agree(device, config):
    dtype = np.float32 if config.itemsize == 4 else np.float64
    run(device, Problem(20, awkward(config.kb), dtype, "implicit"), sparse_syrk_published, config=config)


@pytest.mark.parametrize(("rank", "dtype", "kind"), mostly_exhaustive(CASES, USUAL_CASES))
def test_mo_als_sums_segments(device, rank, dtype, kind):
    config = MoAlsConfig.default(rank, np.dtype(dtype).itemsize, device.spec)
    run(device, Problem(rank, awkward(config.bin), dtype, kind, spread=3), mo_als)


@on_a_gpu
@pytest.mark.parametrize("launch", [sparse_syrk, mo_als])
@pytest.mark.parametrize("rank", LARGE_RANKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_large_systems(device, launch, rank, dtype, kind):
    run(device, Problem(rank, [*awkward(32), 700], dtype, kind, n_fixed=900), launch)


@on_a_gpu
@pytest.mark.parametrize("launch", [sparse_syrk, mo_als])
def test_many_segments_and_a_giant_one_give_the_same_bits_again(device, launch):
    lengths = np.concatenate([[300_000], np.random.default_rng(1).integers(0, 60, 70_000)])
    problem = Problem(8, lengths, n_fixed=1000)
    first, second = (run(device, problem, launch) for _ in range(2))
    below = np.tril_indices(8)
    np.testing.assert_array_equal(first[0][:, below[0], below[1]], second[0][:, below[0], below[1]])
    np.testing.assert_array_equal(first[1], second[1])


SYRK_CONFIGS = [
    SyrkConfig(20, 4, nb=16, kb=16, dx=8, dy=8),  # Gates' kind: four sums a thread
    SyrkConfig(20, 4, nb=16, kb=8, dx=4, dy=4, dz=4, stages=3),
    SyrkConfig(20, 4, nb=20, kb=6, dx=4, dy=4, dz=2, stages=4),  # 5 x 5 sums
    SyrkConfig(20, 4, nb=24, kb=40, dx=4, dy=8),
    SyrkConfig(20, 4, nb=4, kb=32, dx=2, dy=2, dz=16),
    SyrkConfig(20, 8, nb=8, kb=8, dx=4, dy=4, dz=2, stages=3),
    SyrkConfig(20, 8, nb=20, kb=4, dx=10, dy=20, dz=4),
]


@pytest.mark.parametrize("config", mostly_exhaustive(SYRK_CONFIGS, SYRK_CONFIGS[1:6:2]), ids=str)
def test_sparse_syrk_configurations_agree(device, config):
    dtype = np.float32 if config.itemsize == 4 else np.float64
    run(device, Problem(20, awkward(config.kb), dtype, "implicit"), sparse_syrk, config=config)


@pytest.mark.parametrize("rank", mostly_exhaustive((5, 16, 48, 73, 88, 96), (5, 48)))
def test_sparse_syrk_as_it_ships(device, rank):
    """The configurations of the H200's table, two of them at ranks near those that were timed."""
    config = SyrkConfig.default(rank, 4, H200)
    assert config != SyrkConfig.rule(rank, 4, H200)
    lengths = [0, 1, config.kb - 1, config.kb, 3 * config.kb + 1]
    run(device, Problem(rank, lengths, np.float32, "implicit"), sparse_syrk, config=config)


MO_ALS_CONFIGS = [
    MoAlsConfig(20, 4, tile=4, bin=9, groups=3, part_tiles=4),  # four parts, the last one not full
    MoAlsConfig(20, 4, tile=8, bin=30, groups=5, part_tiles=6),
    MoAlsConfig(20, 4, tile=8, bin=5, groups=5, part_tiles=5),
    MoAlsConfig(20, 8, tile=2, bin=7, groups=1, part_tiles=55),
    MoAlsConfig(20, 8, tile=4, bin=14, groups=7, part_tiles=15),
]


@pytest.mark.parametrize("config", mostly_exhaustive(MO_ALS_CONFIGS, MO_ALS_CONFIGS[::4]), ids=str)
def test_mo_als_configurations_agree(device, config):
    dtype = np.float32 if config.itemsize == 4 else np.float64
    run(device, Problem(20, awkward(config.bin), dtype, "implicit"), mo_als, config=config)


@pytest.mark.parametrize(("read_only", "registers"), [(False, True), (True, False), (False, False)])
def test_mo_als_switches_agree(device, read_only, registers):
    problem = Problem(21, awkward(9), np.float32, "offsets")
    run(device, problem, mo_als_with(read_only=read_only, registers=registers))


@pytest.mark.parametrize("launch", [sparse_syrk, mo_als])
def test_no_segments_launch_nothing(device, launch):
    run(device, Problem(4, []), launch)
    if device.spec.name == "emulated":
        assert not device.launches


# ---------------------------------------------------------------------------------------------------- over tiles


def power_law(m, n, density, seed=0, dtype=np.float32):
    """Rows and columns of very different degrees, some empty, some tiles vacant; reordered, so that tiles differ."""
    rng = np.random.default_rng(seed)
    chance = density * np.outer(8 * rng.random(m) ** 4, 4 * rng.random(n) ** 3)
    mask = rng.random((m, n)) < chance
    mask[m // 2] = mask[:, n // 3] = False
    rows, columns = np.nonzero(mask)
    values = rng.normal(size=len(rows)).astype(dtype)
    return reorder(sp.csr_array((values, (rows, columns)), shape=(m, n))).matrix


def run_tiles(device, matrix, rank, tile_rows, tile_cols, kind="explicit", first_block=0, n_blocks=None, **options):
    """Sums of the rows of some row blocks by `bals`, checked."""
    problem = Problem(rank, [0], matrix.dtype, kind, n_fixed=matrix.shape[1])
    problem.indices, problem.ratings = np.zeros(0, np.int32), np.zeros(0, matrix.dtype)  # those of the tiles are read
    tiles = bals.upload_tiles(device, BalsMatrix.from_csr(matrix, tile_rows, tile_cols))
    blocks = -(-matrix.shape[0] // tile_rows)
    n_blocks = blocks - first_block if n_blocks is None else n_blocks
    rows = range(first_block * tile_rows, min((first_block + n_blocks) * tile_rows, matrix.shape[0]))
    matrices = device.empty((len(rows), rank, rank), matrix.dtype)
    rhs = device.empty((len(rows), rank), matrix.dtype)
    arguments = device.upload(problem.factors), problem.entries(device)
    those = bals.RowBlocks(first_block, n_blocks, len(rows))
    bals.bals(device, (matrices, rhs), *arguments, those, tiles=tiles, **options)
    matrices, rhs = device.download(matrices), device.download(rhs)
    for slot, row in enumerate(rows):
        entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
        problem.check(slot, matrices[slot], rhs[slot], matrix.indices[entries], matrix.data[entries])
    return matrices, rhs


BALS_CASES = [
    # rank, dtype, kind, (tile_rows, tile_cols)
    (1, np.float32, "explicit", (16, 8)),
    (7, np.float32, "offsets", (11, 100)),
    (31, np.float32, "implicit", (60, 12)),
    (32, np.float32, "offsets", (32, 24)),
    (33, np.float64, "explicit", (9, 30)),
    (65, np.float32, "explicit", (8, 16)),
]


@pytest.mark.parametrize("variant", ["chip", "local"])
@pytest.mark.parametrize(
    ("rank", "dtype", "kind", "tile"), mostly_exhaustive(BALS_CASES, BALS_CASES[1:6:3] + BALS_CASES[2:3])
)
def test_bals_sums_rows(device, variant, rank, dtype, kind, tile):
    matrix = power_law(61, 50, 0.15, dtype=dtype)
    run_tiles(device, matrix, rank, *tile, kind, config=variant)


@pytest.mark.parametrize("variant", ["chip", "local"])
def test_bals_sums_batches_of_row_blocks(device, variant):
    matrix = power_law(61, 50, 0.15)
    whole, rhs = run_tiles(device, matrix, 7, 16, 20, config=variant)
    below = np.tril_indices(7)
    for first, count in ((0, 1), (1, 2), (3, 1)):
        part, part_rhs = run_tiles(device, matrix, 7, 16, 20, first_block=first, n_blocks=count, config=variant)
        rows = slice(first * 16, (first + count) * 16)
        np.testing.assert_array_equal(part[:, below[0], below[1]], whole[rows][:, below[0], below[1]])
        np.testing.assert_array_equal(part_rhs, rhs[rows])
    run_tiles(device, matrix, 7, 16, 20, first_block=4, n_blocks=0, config=variant)


BALS_CONFIGS = [
    BalsConfig(20, 4, tile=4, rows=5, part_tiles=15, capacity=12),
    BalsConfig(20, 4, tile=4, rows=7, part_tiles=4, capacity=12, buffers=1),  # four parts, the last one not full
    BalsConfig(20, 4, tile=8, rows=13, part_tiles=6, capacity=30, lanes=4, window=4),
    BalsConfig(20, 4, tile=8, rows=1, part_tiles=6, capacity=200, lanes=32, window=32),
    BalsConfig(20, 4, tile=8, rows=40, part_tiles=5, capacity=12, lanes=1, window=3, buffers=1),
    BalsConfig(20, 8, tile=2, rows=3, part_tiles=55, capacity=50, lanes=16, window=16),
]


@pytest.mark.parametrize("config", mostly_exhaustive(BALS_CONFIGS, BALS_CONFIGS[1:6:2]), ids=str)
def test_bals_configurations_agree(device, config):
    matrix = power_law(45, 70, 0.2, dtype=np.float32 if config.itemsize == 4 else np.float64)
    run_tiles(device, matrix, 20, 19, 12, "implicit", config=config)


BALS_LOCAL_CONFIGS = [
    BalsLocalConfig(20, 4, 19, 12, nb=8, dx=2, dy=4, dz=8),
    BalsLocalConfig(20, 8, 19, 12, nb=20, dx=5, dy=2, dz=32),
    BalsLocalConfig(20, 4, 40, 12, nb=20, dx=2, dy=2, dz=4),  # 1,050 sums a thread: in local memory
    BalsLocalConfig(20, 4, 37, 12, nb=4, dx=4, dy=4, dz=4, blocks_per_sm=2),
]


@pytest.mark.parametrize("config", BALS_LOCAL_CONFIGS, ids=str)
def test_bals_local_configurations_agree(device, config):
    assert config.in_registers == (config.sums < 100)
    matrix = power_law(45, 70, 0.2, dtype=np.float32 if config.itemsize == 4 else np.float64)
    run_tiles(device, matrix, 20, config.tile_rows, 12, "implicit", config=config)


def test_bals_gives_the_same_without_skipping_vacant_tiles(device):
    matrix = power_law(61, 50, 0.05)
    assert BalsMatrix.from_csr(matrix, 16, 10).statistics()["vacant_tiles"] > 0
    plain, all_tiles = (
        run_tiles(device, matrix, 7, 16, 10, config="local", skip_vacant=skip_vacant) for skip_vacant in (True, False)
    )
    below = np.tril_indices(7)
    np.testing.assert_array_equal(plain[0][:, below[0], below[1]], all_tiles[0][:, below[0], below[1]])
    np.testing.assert_array_equal(plain[1], all_tiles[1])
    with pytest.raises(ValueError, match='skip_vacant=False needs config="local"'):
        run_tiles(device, matrix, 7, 16, 10, skip_vacant=False)


def test_bals_with_full_tiles_and_without_entries(device):
    full = sp.csr_array(np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32))
    config = BalsConfig(4, 4, tile=4, rows=4, part_tiles=1, capacity=20)  # 40 entries a row: several lists a stage
    run_tiles(device, full, 4, 9, 20, config=config)
    run_tiles(device, sp.csr_array((9, 40), dtype=np.float32), 4, 9, 20, config=config)


@on_a_gpu
@pytest.mark.parametrize("variant", ["chip", "local"])
@pytest.mark.parametrize("rank", [8, 32, 64, 100, 128, 200, 256, 512])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_bals_of_large_systems(device, variant, rank, dtype, kind):
    matrix = power_law(300, 700, 0.1, dtype=dtype)
    tile = plan_assemblies.bals_tile_sizes(rank, np.dtype(dtype).itemsize, device.spec)
    if variant == "local":
        tile = tile[0], min(tile[1], 64)
    run_tiles(device, matrix, rank, *tile, kind, config=variant)


@on_a_gpu
@pytest.mark.parametrize("variant", ["chip", "local"])
def test_bals_with_the_paper_s_tiles_gives_the_same_bits_again(device, variant):
    matrix = power_law(3000, 2000, 0.05)
    first, second = (run_tiles(device, matrix, 32, 256, 192, config=variant) for _ in range(2))
    below = np.tril_indices(32)
    np.testing.assert_array_equal(first[0][:, below[0], below[1]], second[0][:, below[0], below[1]])
    np.testing.assert_array_equal(first[1], second[1])


# ---------------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("spec", [H200, TURING], ids=lambda spec: spec.name)
@pytest.mark.parametrize("itemsize", [4, 8])
def test_default_configurations_fit(spec, itemsize):
    for rank in (*range(1, 140), 200, 256, 512, 1000):
        SyrkConfig.default(rank, itemsize, spec).require_fit(spec)
        PublishedSyrkConfig.default(rank, itemsize, spec).require_fit(spec)
        for registers in (True, False):
            config = MoAlsConfig.default(rank, itemsize, spec, registers=registers)
            config.require_fit(spec)
            assert registers or config.groups == 1
        tile_rows, tile_cols = plan_assemblies.bals_tile_sizes(rank, itemsize, spec)
        config = BalsConfig.default(rank, itemsize, spec, tile_cols=tile_cols)
        config.require_fit(spec)
        assert tile_rows == config.rows and 1 <= tile_cols <= config.capacity
        BalsLocalConfig.default(rank, itemsize, spec, tile_cols=tile_cols).require_fit(spec)


def test_default_builds_name_kernels_once():
    builds = [build for module in (sparse_syrk_module, mo_als_module, bals) for build in builds_of(module, H200)]
    assert {(file, name) for file, name, _ in builds} == {
        (f"{name}.cu", name) for name in ("sparse_syrk", "sparse_syrk_published", "mo_als", "bals")
    }
    assert len({(name, *constants.items()) for _, name, constants in builds}) == len(builds)
    assert {constants["RANK"] for _, name, constants in builds if name == "mo_als"} == set(RANKS)


SYRK = SyrkConfig(32, 4, nb=32, kb=32, dx=4, dy=4, dz=2)
PRINTED = PublishedSyrkConfig(32, 4, nb=32, kb=8, dx=16, dy=16)
MO_ALS = MoAlsConfig(32, 4, tile=8, bin=12, groups=3, part_tiles=10)
BALS = BalsConfig(32, 4, tile=8, rows=25, part_tiles=10, capacity=200)
BALS_LOCAL = BalsLocalConfig(32, 4, 256, 192, nb=16, dx=4, dy=4, dz=64)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SYRK, {"nb": 0}, r"nb must be an integer >= 1, got 0"),
        (SYRK, {"nb": 2.0}, r"nb must be an integer >= 1, got 2\.0"),
        (SYRK, {"itemsize": 2}, r"itemsize must be 4 .* got 2"),
        (SYRK, {"nb": 34}, r"nb=34 must be a multiple of dx=4 and dy=4"),
        (SYRK, {"kb": 3}, r"kb=3 must be a multiple of dz=2"),
        (SYRK, {"kb": 6, "dz": 6}, r"dz=6 must be a power of two"),
        (SYRK, {"nb": 6, "dx": 6, "dy": 6}, r"nb=6 must be a multiple of 4 items"),
        (SYRK, {"nb": 64, "dx": 32, "dy": 32}, r"dx \* dy \* dz = 2048 threads are more than the 1024"),
        (SYRK, {"dz": 1}, r"= 16 threads must be a multiple of 32"),
        (SYRK, {"nb": 256, "dx": 32, "dy": 1, "dz": 1}, r"32 threads are too few to copy the 64 x 16 bytes"),
        (SYRK, {"stages": 1}, r"stages=1 must be at least 2"),
        (SYRK, {"nb": 96}, r"576 sums of 4 bytes a thread need 576 registers, more than 128"),
        (SYRK, {"blocks_per_sm": 32}, r"blocks_per_sm=32 blocks of 32 threads leave 64 registers a thread"),
        (PRINTED, {"nb": 24}, r"nb=24 must be a multiple of dx=16 and dy=16"),
        (PRINTED, {"kb": 12}, r"kb=12 must be a multiple of dy=16, or a part of it"),
        (PRINTED, {"nb": 64, "dx": 64, "dy": 32}, r"dx \* dy = 2048 threads are more than the 1024"),
        (PRINTED, {"nb": 192}, r"144 sums of 4 bytes a thread need 144 registers"),
        (MO_ALS, {"tile": 6}, r"tile=6 must be a multiple of 4 items"),
        (MO_ALS, {"part_tiles": 11}, r"part_tiles=11 exceeds the 10 there are"),
        (MO_ALS, {"bin": 13}, r"bin=13 must be a multiple of groups=3"),
        (MO_ALS, {"groups": 120, "bin": 120}, r"= 1216 threads are more than"),
        (MO_ALS, {"bin": 33}, r"bin=33 must not exceed the 32 threads"),
        (MO_ALS, {"rank": 512}, r"32 threads are too few to load the 128 x 16 bytes"),
        (MO_ALS, {"tile": 12, "part_tiles": 6}, r"144 sums of 4 bytes"),
        (MO_ALS, {"blocks_per_sm": 20}, r"blocks_per_sm=20 blocks of 32 threads"),
        (BALS, {"tile": 6}, r"tile=6 must be a multiple of 4 items"),
        (BALS, {"part_tiles": 11}, r"part_tiles=11 exceeds the 10 there are"),
        (BALS, {"buffers": 3}, r"buffers must be 1 or 2, got 3"),
        (BALS, {"lanes": 12}, r"lanes=12 must be a power of two"),
        (BALS, {"window": 12}, r"window=12 must be a multiple of lanes=8"),
        (BALS, {"rows": 103}, r"= 1056 threads are more than"),
        (BALS, {"blocks_per_sm": 3}, r"blocks_per_sm=3 blocks of 256 threads leave 80 registers a thread"),
        (BALS_LOCAL, {"nb": 18}, r"nb=18 must be a multiple of dx=4 and dy=4"),
        (BALS_LOCAL, {"nb": 6, "dx": 2, "dy": 2}, r"nb=6 must be a multiple of 4 items"),
        (BALS_LOCAL, {"dz": 65}, r"= 1040 threads are more than"),
        (BALS_LOCAL, {"rank": 1500, "nb": 4}, r"nb=4 gives 70500 tiles, more than 65535"),
    ],
)
def test_impossible_configurations_give_the_reason(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_more_parts_than_a_grid_has():
    with pytest.raises(ValueError, match=r"part_tiles=8 gives 122063 parts, over 65535"):
        BalsConfig(5587, 4, tile=4, rows=1, part_tiles=8, capacity=1)


def test_configurations_too_large_for_a_device():
    with pytest.raises(ValueError, match=r"need 66560 bytes of shared memory a block, Turing has 65536"):
        replace(SYRK, nb=64, kb=64, dx=8, dy=8, rank=100).require_fit(TURING)
    with pytest.raises(ValueError, match=r"tile_cols=192 factor rows of rank 128 do not fit in 65536 .* <= 1"):
        BalsConfig.default(128, 4, TURING, tile_cols=192)
    with pytest.raises(ValueError, match=r"tile_cols=2016 columns of nb=4 factors do not fit .* use tile_cols <= 2015"):
        BalsLocalConfig.default(128, 4, TURING, tile_cols=2016)


# ---------------------------------------------------------------------------------------------------- wrong arguments


def emulated():
    from support.emulated import EmulatedDevice

    return EmulatedDevice()


@pytest.mark.parametrize("launch", [sparse_syrk, mo_als])
def test_arrays_that_kernels_cannot_read(launch):
    device, problem = emulated(), Problem(4, [2, 1], kind="offsets")
    matrices, rhs = device.empty((2, 4, 4), np.float32), device.empty((2, 4), np.float32)
    good = {
        "sums": (matrices, rhs),
        "factors": problem.factors,
        "entries": problem.entries(device),
        "segments": problem.segments,
    }
    bad = {
        "matrices must be float32": {"sums": (device.empty((2, 4, 5), np.float32), rhs)},
        "rhs must be float32": {"sums": (matrices, device.empty((3, 4), np.float32))},
        "factors must have rows of at least rank=4 columns": {"factors": problem.factors[:, :3].copy()},
        "and a multiple of 16 bytes; got 5 columns of float32": {"factors": problem.factors[:, :5].copy()},
        "factors must be float32": {"factors": problem.factors.astype(np.float64)},
        "indices must be int32": {"entries": replace(good["entries"], indices=problem.indices.astype(np.int64))},
        "ratings must be float32": {"entries": replace(good["entries"], ratings=problem.ratings[:-1])},
        "offsets must be float32": {"entries": replace(good["entries"], offsets=problem.offsets[:-1])},
        "segments must be int64": {"segments": problem.segments.astype(np.int32)},
    }
    launch(device, **good)
    for message, changes in bad.items():
        with pytest.raises(TypeError, match=message):
            launch(device, **(good | changes))
    device.owns = lambda array: array is not problem.segments
    with pytest.raises(TypeError, match=r"segments is a numpy\.ndarray, not an array on emulated"):
        launch(device, **good)


def test_configurations_for_something_else():
    device, problem = emulated(), Problem(4, [2])
    with pytest.raises(ValueError, match=r"config is for rank 32 and items of 4 bytes; these have rank 4 and 4 bytes"):
        run(device, problem, sparse_syrk, config=SYRK)
    with pytest.raises(ValueError, match=r"config is for rank 32"):
        run(device, problem, mo_als, config=MO_ALS)
    with pytest.raises(ValueError, match=r"registers=False needs groups=1, .* got groups=3"):
        replace(MO_ALS, registers=False)
    config = SyrkConfig(1452, 4, nb=4, kb=32, dx=2, dy=2, dz=8)
    with pytest.raises(ValueError, match=r"nb=4 gives 66066 tiles, more than 65535"):
        run(device, Problem(1452, [1], n_fixed=2), sparse_syrk, config=config)


def test_tiles_that_kernels_cannot_read():
    device, matrix = emulated(), power_law(20, 30, 0.1)
    good = {"rank": 4, "tile_rows": 8, "tile_cols": 10}
    for message, changes in {
        r"blocks.first=2 and blocks.count=2 are not within the 3 row blocks": {"first_block": 2, "n_blocks": 2},
        r"blocks.first=-1": {"first_block": -1, "n_blocks": 1},
        r"config is for rank 32": {"config": BALS},
        r"config is for tiles of 256 x 192, these are 8 x 10": {
            "config": replace(BALS_LOCAL, rank=4),
        },
        r"capacity=9 factor rows cannot hold those of a tile of tile_cols=10": {
            "config": BalsConfig(4, 4, tile=4, rows=1, part_tiles=1, capacity=9)
        },
        r'config must be a configuration, "chip" or "local", got \'chips\'': {"config": "chips"},
    }.items():
        with pytest.raises(ValueError, match=message):
            run_tiles(device, matrix, **(good | changes))

    problem = Problem(4, [1], n_fixed=30, kind="offsets")
    tiles = bals.upload_tiles(device, BalsMatrix.from_csr(matrix, 8, 10))
    matrices, rhs = device.empty((20, 4, 4), np.float32), device.empty((20, 4), np.float32)
    arguments = {
        "sums": (matrices, rhs),
        "factors": problem.factors,
        "entries_of_tiles": problem.entries(device),
        "tiles": tiles,
        "blocks": bals.RowBlocks.of(tiles, 0, 3),
    }
    bals.bals(device, **arguments)
    with pytest.raises(ValueError, match=r"blocks.rows=24 is not the number of rows of these blocks, 20"):
        bals.bals(device, **(arguments | {"blocks": bals.RowBlocks(0, 3, 24)}))
    with pytest.raises(ValueError, match=r"factors has 29 rows; tiles has 30 columns"):
        bals.bals(device, **(arguments | {"factors": problem.factors[:29]}))
    for name, changes in {
        "matrices": {"sums": (matrices[:19], rhs)},
        "rhs": {"sums": (matrices, rhs[:19])},
        "ratings": {"entries_of_tiles": replace(problem.entries(device), ratings=problem.ratings.astype(np.float64))},
        "offsets": {"entries_of_tiles": replace(problem.entries(device), offsets=problem.offsets[:29])},
        "tiles.tile_ptr": {"tiles": replace(tiles, tile_ptr=tiles.tile_ptr[1:])},
        "tiles.seg_ptr": {"tiles": replace(tiles, seg_ptr=tiles.seg_ptr[1:])},
        "tiles.tile_colidx": {"tiles": replace(tiles, tile_colidx=tiles.tile_colidx.astype(np.int64))},
        "tiles.seg_colidx": {"tiles": replace(tiles, seg_colidx=tiles.seg_colidx[1:])},
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be"):
            bals.bals(device, **(arguments | changes))
