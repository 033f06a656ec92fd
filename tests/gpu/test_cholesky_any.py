"""Batches of explicit systems on a GPU: completed from partial sums, solved by Cholesky or conjugate gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from hybridmf.device.cuda import DeviceSpec
from hybridmf.gpu import cholesky_any
from hybridmf.gpu.cholesky_any import CgConfig, CholeskyConfig, WideTilesConfig
from hybridmf.gpu.launch import source_text
from support import reference
from support.builds import RANKS, builds_of
from support.marks import exhaustive, mostly_exhaustive

FLOATS = (np.float32, np.float64)

# (rank, dtype): a warp a system up to 32, then one panel, several panels, ranks that no vector width divides
SHAPES = [(1, np.float32), (7, np.float32), (32, np.float32), (33, np.float32), (65, np.float32), (100, np.float32)]
SHAPES += [(8, np.float64), (31, np.float64), (33, np.float64), (64, np.float64), (65, np.float64)]
USUAL_SHAPES = [(7, np.float32), (33, np.float32), (31, np.float64), (65, np.float64)]

# Beyond what the emulator does in a moment; the launches a GPU makes of them are the production path.
LARGE = [(rank, dtype) for dtype in FLOATS for rank in (63, 127, 128, 129, 192, 200, 256, 257, 320, 512, 1000, 2048)]

CONFIGS = {
    "matrix": CholeskyConfig(70, 4, 0, 16, 4, 4, False),
    "matrix, odd rank": CholeskyConfig(65, 4, 0, 8, 8, 4, False),
    "matrix, wide panels": CholeskyConfig(100, 4, 0, 16, 4, 8, False),
    "matrix, float64": CholeskyConfig(70, 8, 0, 16, 4, 4, False),
    "matrix, tiny": CholeskyConfig(5, 4, 0, 8, 4, 4, False),
    "resident, wide panels": CholeskyConfig(130, 4, 0, 16, 9, 8, True),
    "resident, tall": CholeskyConfig(70, 8, 0, 32, 3, 4, True),
    "resident, tiny": CholeskyConfig(5, 8, 0, 8, 1, 4, True),
}


def spec(shared_kib: int, capability: tuple[int, int] = (9, 0)) -> DeviceSpec:
    return DeviceSpec("some GPU", 0, capability, 132, shared_kib * 1024, 60 << 20, 1 << 36, 1 << 36)


GPUS = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Largest shared memory of a block, in KiB."""


def systems(n: int, rank: int, dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Well-behaved matrices and right-hand sides."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, rank, rank + 3))
    matrices = rows @ rows.transpose(0, 2, 1) + np.eye(rank)
    return matrices.astype(dtype), rng.normal(size=(n, rank)).astype(dtype)


def lower(matrices: np.ndarray) -> np.ndarray:
    """NaN above the diagonal: nobody may read there."""
    return np.where(np.tri(matrices.shape[-1], dtype=bool), matrices, matrices.dtype.type(np.nan))


def epsilon(dtype: Any) -> float:
    return 4 * float(np.finfo(dtype).eps)


def solve(
    device: Any, matrices: np.ndarray, rhs: np.ndarray, config: CholeskyConfig | None = None, rows: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Solutions and status, one slot a system."""
    n, rank = rhs.shape
    solutions = device.upload(np.full((n, rank), 7, dtype=rhs.dtype))
    status = device.upload(np.full(n, 99, dtype=np.int32))
    rows = np.arange(n, dtype=np.int32) if rows is None else rows
    sums = (device.upload(lower(matrices)), device.upload(rhs))
    slots, rows = device.upload(np.arange(n + 1)), device.upload(rows)
    cholesky_any.cholesky_solve(device, solutions, status, sums, slots, rows, epsilon(rhs.dtype), config)
    return device.download(solutions), device.download(status)


def scaled_residual(matrices: np.ndarray, rhs: np.ndarray, solutions: np.ndarray) -> float:
    """MAGMA's |Ax - b| / (n |A| |x|), the largest of the batch, in units of rounding."""
    A, b, x = (array.astype(np.float64) for array in (matrices, rhs, solutions))
    residuals = np.abs(np.einsum("kij,kj->ki", A, x) - b).max(axis=1)
    norms = np.abs(A).sum(axis=2).max(axis=1) * np.abs(x).max(axis=1)
    return float((residuals / (rhs.shape[1] * norms)).max() / np.finfo(rhs.dtype).eps)


def test_scaled_residual_sees_a_wrong_element() -> None:
    matrices, rhs = systems(2, 33, np.float32)
    solutions = np.linalg.solve(matrices.astype(np.float64), rhs[..., None].astype(np.float64))[..., 0]
    assert scaled_residual(matrices, rhs, solutions) < 1e-3
    solutions[1, 32] *= 1 + 1e-3
    assert scaled_residual(matrices, rhs, solutions) > 1


# ---------------------------------------------------------------------------------------------------- Cholesky


@pytest.mark.parametrize(("rank", "dtype"), mostly_exhaustive(SHAPES, USUAL_SHAPES))
def test_solutions(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(5, rank, dtype)
    solutions, status = solve(device, matrices, rhs)
    assert not status.any()
    assert scaled_residual(matrices, rhs, solutions) < 2
    again, _ = solve(device, matrices, rhs)
    assert np.array_equal(solutions, again)


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "dtype"), LARGE)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_solutions_of_large_systems(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(300 if rank <= 256 else 40, rank, dtype)
    solutions, status = solve(device, matrices, rhs)
    assert not status.any()
    assert scaled_residual(matrices, rhs, solutions) < 1
    again, _ = solve(device, matrices, rhs)
    assert np.array_equal(solutions, again)


@pytest.mark.parametrize(
    "name",
    mostly_exhaustive(CONFIGS, ("matrix, odd rank", "matrix, float64", "resident, wide panels", "resident, tiny")),
)
def test_every_way_to_hold_the_factor(device: Any, name: str) -> None:
    config = CONFIGS[name]
    matrices, rhs = systems(3, config.rank, np.dtype(f"f{config.itemsize}"))
    matrices[1, config.rank // 2, config.rank // 2] = -1
    solutions, status = solve(device, matrices, rhs, config)
    assert status.tolist() == [0, config.rank // 2 + 1, 0]
    assert scaled_residual(matrices[::2], rhs[::2], solutions[::2]) < 2
    assert not solutions[1].any()
    again, _ = solve(device, matrices, rhs, config)
    assert np.array_equal(solutions, again)


@pytest.mark.parametrize("rank", [65, exhaustive(96), exhaustive(97), exhaustive(100), 128])
def test_systems_of_four_warps(device: Any, rank: int) -> None:
    """An odd rank, an even one and a multiple of 16; systems of very different sizes, and one with a bad pivot."""
    assert isinstance(cholesky_any.config_for(rank, np.float32, device.spec), WideTilesConfig)
    matrices, rhs = systems(4, rank, np.float32)
    matrices *= np.float32(10.0) ** np.arange(-8, 8, 4, dtype=np.float32)[:, None, None]
    bad = rank * 9 // 10
    matrices[1, bad, bad] *= -1
    solutions, status = solve(device, matrices, rhs)
    assert status.tolist() == [0, bad + 1, 0, 0]
    assert not solutions[1].any()
    good = [0, 2, 3]
    assert scaled_residual(matrices[good], rhs[good], solutions[good]) < 1
    blocks, _ = solve(device, matrices, rhs, CholeskyConfig.default(rank, 4, device.spec))
    np.testing.assert_allclose(solutions, blocks, rtol=1e-3, atol=1e-4 * np.abs(blocks).max())
    assert np.array_equal(solve(device, matrices, rhs)[0], solutions)

    found, codes = device.upload(np.full((3, rank), 7, np.float32)), device.upload(np.full(3, 99, np.int32))
    slots, rows = np.array([0, 1, 1, 4]), np.array([2, 0, 1], np.int32)  # the second system has no slots
    sums = (device.upload(lower(matrices[[0, 2, 0, 0]])), device.upload(rhs[[0, 2, 0, 0]]))
    cholesky_any.cholesky_solve(
        device, found, codes, sums, device.upload(slots), device.upload(rows), epsilon(np.float32)
    )
    np.testing.assert_array_equal(device.download(found), [np.zeros(rank), solutions[2], solutions[0]])
    assert not device.download(codes).any()


@pytest.mark.parametrize(
    ("rank", "blocks"),
    [
        (80, {(7, 5): 3, (8, 0): 7, (8, 6): 5, (9, 0): 7, (10, 0): 7, (12, 0): 5}),
        (100, {(7, 5): 2, (8, 0): 5, (8, 6): 3, (9, 0): 6, (10, 0): 6, (12, 0): 3}),
        (128, {(7, 5): 1, (8, 0): 4, (8, 6): 2, (9, 0): 5, (10, 0): 5, (12, 0): 2}),
    ],
)
def test_systems_of_four_warps_fill_shared_memory(rank: int, blocks: dict[tuple[int, int], int]) -> None:
    found = {capability: WideTilesConfig.rule(rank, spec(kib)).blocks_per_sm for capability, kib in GPUS.items()}
    assert found == blocks
    assert all(WideTilesConfig(rank).shared_bytes * blocks[each] < kib * 1024 for each, kib in GPUS.items())


def test_little_shared_memory(device: Any) -> None:
    config = CholeskyConfig.default(100, 4, spec(20))
    assert not config.resident and config.shared_bytes <= 20 * 1024
    matrices, rhs = systems(2, 100, np.float32)
    solutions, status = solve(device, matrices, rhs, config)
    assert not status.any() and scaled_residual(matrices, rhs, solutions) < 2


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32), (65, np.float64)])
def test_indefinite_systems_report_the_minor_lapack_reports(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(rank + 2, rank, dtype)
    for k in range(rank):  # the minor that fails
        matrices[k + 1, k, k] = -matrices[k + 1, k, k] if k % 2 else 0
    expected = [scipy.linalg.lapack.dpotrf(matrix, lower=True)[1] for matrix in matrices]
    solutions, status = solve(device, matrices, rhs)
    assert status.tolist() == expected == [0, *range(1, rank + 1), 0]
    assert not solutions[1:-1].any()
    alone, _ = solve(device, matrices[[0, -1]], rhs[[0, -1]])
    assert np.array_equal(solutions[[0, -1]], alone)  # undisturbed


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32), (65, np.float64)])
def test_singular_systems(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(4, rank, dtype)
    matrices[0] = 0
    for k, (i, j) in ((1, (0, rank - 1)), (2, (1, 4))):  # coordinates that are the same
        matrices[k] = np.eye(rank)
        matrices[k, i, j] = matrices[k, j, i] = 1
    solutions, status = solve(device, matrices, rhs)
    assert status.tolist() == [1, rank, 5, 0]
    assert not solutions[:3].any() and scaled_residual(matrices[3:], rhs[3:], solutions[3:]) < 2


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32), (65, np.float64)])
def test_pivots_that_are_all_rounding_are_singular(device: Any, rank: int, dtype: Any) -> None:
    """The CPU's rule: at or below epsilon times the diagonal element before elimination."""
    matrices, rhs = np.tile(np.eye(rank, dtype=dtype), (3, 1, 1)), np.ones((3, rank), dtype=dtype)
    matrices[:, 3, 1] = 1
    for k, factor in enumerate((0.5, 1.0, 4.0)):
        matrices[k, 3, 3] = 1 + factor * epsilon(dtype)
    _, status = solve(device, matrices, rhs)
    assert status.tolist() == [4, 0 if matrices[1, 3, 3] - 1 > epsilon(dtype) * matrices[1, 3, 3] else 4, 0]


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32), (65, np.float64)])
def test_values_that_are_not_finite(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(6, rank, dtype)
    tiny = np.finfo(dtype).tiny
    matrices[1, 4, 4] = np.nan
    matrices[2, 5, 2] = np.nan
    matrices[3, 6, 6] = np.inf
    matrices[4], rhs[4] = np.eye(rank) * tiny, 1 / tiny  # overflows
    rhs[5, 3] = np.nan
    solutions, status = solve(device, matrices, rhs)
    assert status.tolist() == [0, -1, -1, -1, -1, -1]
    assert not solutions[1:].any() and solutions[0].all()


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32), (65, np.float64)])
def test_huge_and_tiny_scales(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(3, rank, dtype)
    power = 100 if dtype == np.float32 else 1000
    scale = np.array([2.0**power, 2.0**-power, 1]).astype(dtype)
    solutions, status = solve(device, matrices * scale[:, None, None], rhs)
    plain, _ = solve(device, matrices, rhs)
    assert not status.any()
    assert np.allclose(solutions * scale[:, None], plain, rtol=64 * epsilon(dtype), atol=0)
    # unequal scales of the coordinates: Cholesky does not mind
    d = (2.0 ** np.linspace(-power / 4, power / 4, rank)).astype(dtype)
    solutions, status = solve(device, matrices * d[:, None] * d, rhs)
    assert not status.any()
    expected = solve(device, matrices, rhs / d)[0]
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert np.all(np.abs(solutions * d - expected) <= 1e3 * epsilon(dtype) * largest)


@pytest.mark.parametrize(("rank", "dtype"), [(7, np.float32), (33, np.float32)])
def test_where_systems_are_and_where_solutions_go(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs = systems(7, rank, dtype)
    slots, rows = np.array([0, 2, 2, 3, 7]), np.array([4, 0, 5, 2], dtype=np.int32)  # the second has no slots
    solutions = device.upload(np.full((6, rank + 2), 7, dtype=dtype))
    status = device.upload(np.full(6, 99, dtype=np.int32))
    A, b, at, to = (device.upload(array) for array in (lower(matrices), rhs, slots, rows))
    cholesky_any.cholesky_solve(device, solutions, status, (A, b), at, to, epsilon(dtype))
    got, codes = device.download(solutions), device.download(status)
    assert codes.tolist() == [0, 99, 0, 99, 0, 0]
    assert (got[[1, 3]] == 7).all() and (got[:, rank:] == 7).all() and not got[0, :rank].any()
    first = [0, 2, 3]
    assert scaled_residual(matrices[first], rhs[first], got[[4, 5, 2], :rank]) < 2


# ---------------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("rank", "dtype"), [exhaustive(1, np.float32), (7, np.float64), exhaustive(32, np.float32), (65, np.float32)]
)
@pytest.mark.parametrize("has_gram", [False, True])
def test_complete(device: Any, rank: int, dtype: Any, has_gram: bool) -> None:
    rng = np.random.default_rng(rank)
    slots = np.array([0, 1, 4, 4, 5, 15])
    parts, sums = systems(15, rank, dtype)
    gram = systems(1, rank, dtype, seed=1)[0][0] if has_gram else None
    ridge, scale = rng.random(rank).astype(dtype), rng.random(5).astype(dtype)

    def run() -> tuple[np.ndarray, np.ndarray]:
        matrices, rhs = device.upload(lower(parts)), device.upload(sums)
        on_device = None if gram is None else device.upload(lower(gram))
        arrays = (device.upload(slots), on_device, device.upload(ridge), device.upload(scale))
        cholesky_any.complete(device, matrices, rhs, *arrays)
        return device.download(matrices), device.download(rhs)

    matrices, rhs = run()
    triangle = np.tri(rank, dtype=bool)
    for k in (0, 1, 3, 4):
        mine = slice(slots[k], slots[k + 1])
        A = parts[mine].astype(np.float64).sum(axis=0) + np.diag(scale[k] * ridge.astype(np.float64))
        A += 0 if gram is None else gram
        tolerance = {"rtol": 0, "atol": 8 * epsilon(dtype) * np.abs(A).max()}
        assert np.allclose(matrices[slots[k]][triangle], A[triangle], **tolerance)
        assert np.allclose(rhs[slots[k]], sums[mine].astype(np.float64).sum(axis=0), rtol=0, atol=32 * epsilon(dtype))
        assert np.array_equal(matrices[slots[k] + 1 : slots[k + 1]], lower(parts)[slots[k] + 1 : slots[k + 1]], True)
    assert np.isnan(matrices[:, ~triangle]).all()
    again = run()
    assert np.array_equal(matrices, again[0], True) and np.array_equal(rhs, again[1])


def test_complete_and_solve(device: Any) -> None:
    rank, slots, rows = 33, np.array([0, 3, 4]), np.array([1, 0], dtype=np.int32)
    parts, sums = systems(4, rank, np.float32)
    ridge, scale = np.full(rank, 0.5, dtype=np.float32), np.array([2, 3], dtype=np.float32)
    matrices, rhs, at = device.upload(lower(parts)), device.upload(sums), device.upload(slots)
    cholesky_any.complete(device, matrices, rhs, at, None, device.upload(ridge), device.upload(scale))
    solutions, status = device.zeros((2, rank), np.float32), device.zeros(2, np.int32)
    cholesky_any.cholesky_solve(
        device, solutions, status, (matrices, rhs), at, device.upload(rows), epsilon(np.float32)
    )
    whole = np.stack([parts[3] + 1.5 * np.eye(rank), parts[:3].sum(axis=0) + np.eye(rank)]).astype(np.float32)
    b = np.stack([sums[3], sums[:3].sum(axis=0)])
    assert not device.download(status).any()
    assert scaled_residual(whole, b, device.download(solutions)) < 4


# ---------------------------------------------------------------------------------------------------- CG

CG_SHAPES = [(1, np.float32), (33, np.float32), (100, np.float32), (32, np.float64), (65, np.float64)]


def cg(
    device: Any, matrices: np.ndarray, rhs: np.ndarray, start: np.ndarray, steps: int, config: CgConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Solutions and status, one slot a system."""
    n = len(rhs)
    solutions, status = device.upload(start), device.upload(np.full(n, 99, dtype=np.int32))
    arrays = (lower(matrices), rhs, np.arange(n + 1), np.arange(n, dtype=np.int32))
    A, b, at, to = (device.upload(array) for array in arrays)
    cholesky_any.cg_solve(device, solutions, status, (A, b), at, to, steps, config)
    return device.download(solutions), device.download(status)


def gentle(n: int, rank: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices of small condition, right-hand sides, starts."""
    matrices, rhs = systems(n, rank, dtype)
    matrices = (matrices / rank + 2 * np.eye(rank)).astype(dtype)
    return matrices, rhs, np.random.default_rng(3).normal(size=rhs.shape).astype(dtype)


@pytest.mark.parametrize(("rank", "dtype"), mostly_exhaustive(CG_SHAPES, CG_SHAPES[1::3]))
def test_cg_takes_the_textbook_steps(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs, start = gentle(3, rank, dtype)
    for steps in (0, 1, 3):
        solutions, status = cg(device, matrices, rhs, start, steps)
        expected = [reference.conjugate_gradient(*system, steps) for system in zip(matrices, rhs, start, strict=True)]
        assert not status.any()
        assert np.allclose(solutions, expected, rtol=0, atol=100 * epsilon(dtype))
    assert np.array_equal(solutions, cg(device, matrices, rhs, start, steps)[0])


@pytest.mark.parametrize("config", [CgConfig(65, 8, 2, False, 1), CgConfig(100, 4, 8, False, 1)])
def test_cg_without_a_copy_of_the_matrix(device: Any, config: CgConfig) -> None:
    matrices, rhs, start = gentle(3, config.rank, np.dtype(f"f{config.itemsize}"))
    solutions, status = cg(device, matrices, rhs, start, 3, config)
    assert not status.any()
    assert np.allclose(solutions, cg(device, matrices, rhs, start, 3)[0], rtol=0, atol=100 * epsilon(rhs.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "dtype"), [case for case in LARGE if case[0] not in (63, 192)])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cg_on_large_systems(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs, start = gentle(20, rank, dtype)
    solutions, status = cg(device, matrices, rhs, start, 3)
    expected = [reference.conjugate_gradient(*system, 3) for system in zip(matrices, rhs, start, strict=True)]
    assert not status.any()
    assert np.allclose(solutions, expected, rtol=0, atol=100 * epsilon(dtype))
    assert np.array_equal(solutions, cg(device, matrices, rhs, start, 3)[0])


@pytest.mark.parametrize(("rank", "dtype"), [(33, np.float32), (65, np.float64)])
def test_cg_stops_where_nothing_is_left_to_do(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs, start = gentle(4, rank, dtype)
    rhs[1] = start[1] = 0  # the residual is zero from the start
    matrices[2], start[2] = np.eye(rank), 0  # one step is exact
    rhs[3], start[3] = 1e-35 if dtype == np.float32 else 1e-160, 0  # its square underflows
    solutions, status = cg(device, matrices, rhs, start, 40)
    assert not status.any()
    before, after = (np.linalg.norm(rhs[0] - matrices[0].astype(np.float64) @ x[0]) for x in (start, solutions))
    assert after < (1e-5 if dtype == np.float32 else 1e-10) * before
    assert not solutions[1].any() and np.array_equal(solutions[2], rhs[2]) and not solutions[3].any()


@pytest.mark.parametrize(("rank", "dtype"), [(33, np.float32), (65, np.float64)])
def test_cg_failures(device: Any, rank: int, dtype: Any) -> None:
    matrices, rhs, start = gentle(5, rank, dtype)
    matrices[1] = -np.eye(rank)
    matrices[2, 4, 3] = np.nan
    rhs[3, 0] = np.inf
    matrices[4], rhs[4], start[4] = np.eye(rank) * 1e-30, 1e20, 0  # the solution overflows in float32 only
    solutions, status = cg(device, matrices, rhs, start, 3)
    overflows = dtype == np.float32
    assert status.tolist() == [0, -2, -1, -1, -1 if overflows else 0]
    assert not solutions[1:4].any() and solutions[4].any() != overflows and solutions[0].all()


def test_cg_of_a_system_without_slots(device: Any) -> None:
    matrices, rhs, start = gentle(1, 33, np.float32)
    solutions, status = device.upload(np.repeat(start, 2, axis=0)), device.upload(np.full(2, 99, dtype=np.int32))
    arrays = (matrices, rhs, np.array([0, 0, 1]), np.array([1, 0], dtype=np.int32))
    A, b, at, to = (device.upload(array) for array in arrays)
    cholesky_any.cg_solve(device, solutions, status, (A, b), at, to, 3)
    got = device.download(solutions)
    assert not device.download(status).any() and not got[1].any()
    assert np.array_equal(got[:1], cg(device, matrices, rhs, start, 3)[0])


# ---------------------------------------------------------------------------------------------------- arguments


def test_empty_batches(device: Any) -> None:
    matrices, rhs = device.empty((0, 9, 9), np.float32), device.empty((0, 9), np.float32)
    slots, rows = device.upload(np.zeros(1, dtype=np.int64)), device.empty(0, np.int32)
    solutions, status = device.zeros((3, 9), np.float32), device.zeros(3, np.int32)
    ridge, scale = device.zeros(9, np.float32), device.empty(0, np.float32)
    cholesky_any.complete(device, matrices, rhs, slots, None, ridge, scale)
    cholesky_any.cholesky_solve(device, solutions, status, (matrices, rhs), slots, rows, 1e-6)
    cholesky_any.cg_solve(device, solutions, status, (matrices, rhs), slots, rows, 3)
    assert not device.download(solutions).any() and not device.download(status).any()


WRONG = {
    "matrices": np.zeros((2, 3, 4), np.float32),
    "rhs": np.zeros((2, 3), np.float64),
    "slots": np.zeros(3, np.int32),
    "rows": np.zeros(2, np.int64),
    "solutions": np.zeros((2, 2), np.float32),
    "status": np.zeros(3, np.int32),
    "ridge": np.zeros(4, np.float32),
    "scale": np.zeros(3, np.float32),
    "gram": np.zeros((4, 4), np.float32),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(device: Any, name: str) -> None:
    arrays = {
        "matrices": np.zeros((2, 3, 3), np.float32),
        "rhs": np.zeros((2, 3), np.float32),
        "slots": np.arange(3),
        "rows": np.arange(2, dtype=np.int32),
        "solutions": np.zeros((2, 3), np.float32),
        "status": np.zeros(2, np.int32),
        "ridge": np.zeros(3, np.float32),
        "scale": np.zeros(2, np.float32),
        "gram": np.zeros((3, 3), np.float32),
    }
    a = {key: device.upload(value) for key, value in (arrays | {name: WRONG[name]}).items()}
    if name in ("ridge", "scale", "gram"):
        with pytest.raises(TypeError, match=name):
            cholesky_any.complete(device, *(a[k] for k in ("matrices", "rhs", "slots", "gram", "ridge", "scale")))
        return
    batch = {key: a[key] for key in ("solutions", "status", "slots", "rows")} | {"sums": (a["matrices"], a["rhs"])}
    with pytest.raises(TypeError, match=name):
        cholesky_any.cholesky_solve(device, pivot_epsilon=1e-6, **batch)
    with pytest.raises(TypeError, match=name):
        cholesky_any.cg_solve(device, steps=3, **batch)


def test_slots_must_not_be_empty(device: Any) -> None:
    matrices, rhs = device.zeros((1, 3, 3), np.float32), device.zeros((1, 3), np.float32)
    ridge, scale = device.zeros(3, np.float32), device.empty(0, np.float32)
    with pytest.raises(TypeError, match="slots must have one element more"):
        cholesky_any.complete(device, matrices, rhs, device.empty(0, np.int64), None, ridge, scale)


def test_arrays_must_be_on_the_device(device: Any) -> None:
    matrices, rhs, slots = device.zeros((1, 3, 3), np.float32), device.zeros((1, 3), np.float32), [0, 1]
    with pytest.raises(TypeError, match="slots is a"):
        cholesky_any.complete(device, matrices, rhs, slots, None, rhs[0], rhs[0, :1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"rank": 4096}, "rank must be in 1 ... 2049"),
        ({"itemsize": 2}, "itemsize must be 4"),
        ({"systems": 4}, "systems=4 a block need rank <= 32"),
        ({"rank": 32, "systems": 33}, "systems=33 warps are more"),
        ({"row_threads": 12}, "row_threads must be 8, 16 or 32"),
        ({"tile_columns": 3}, "tile_columns must be a multiple of 4"),
        ({"tile_rows": 4}, "tile_rows=4 must be 5"),
        ({"tile_rows": 5, "resident": False}, "must be a multiple of the 32 columns"),
    ],
)
def test_configurations_that_cannot_work(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "rank": 70,
        "itemsize": 4,
        "systems": 0,
        "row_threads": 16,
        "tile_rows": 5,
        "tile_columns": 4,
    }
    CholeskyConfig(**good)
    with pytest.raises(ValueError, match=message):
        CholeskyConfig(**(good | change))


@pytest.mark.parametrize("capability", GPUS)
def test_defaults_fit_every_gpu(capability: tuple[int, int]) -> None:
    gpu = spec(GPUS[capability], capability)
    around = [16 * k + j for k in range(9, 19) for j in (-1, 0, 1)]  # multiples of the tiles
    for itemsize in (4, 8):
        for rank in (*range(1, 133), *around, 511, 512, 513, 1024, 2048, 2049):
            for config in (CholeskyConfig.default(rank, itemsize, gpu), CgConfig.default(rank, itemsize, gpu)):
                assert config.rank == rank and config.itemsize == itemsize
                assert config.shared_bytes <= gpu.shared_bytes
                assert config.blocks_per_sm >= 1 and config.threads % 32 == 0 and config.threads <= 256


def test_defaults_keep_the_factor_where_they_can() -> None:
    gpu = spec(227)
    for rank in (33, 64, 100, 128, 129, 200, 256):
        assert CholeskyConfig.default(rank, 4, gpu).resident
    assert not CholeskyConfig.default(512, 4, gpu).resident
    assert CholeskyConfig.default(256, 4, gpu).blocks_per_sm == 2
    assert not CholeskyConfig.default(256, 4, spec(64)).resident
    assert CgConfig.default(128, 4, gpu).resident and not CgConfig.default(512, 4, gpu).resident


def test_a_device_without_memory() -> None:
    for config in (CholeskyConfig, CgConfig):
        with pytest.raises(
            ValueError, match=r"systems of rank 2048 need \d+ bytes of shared memory a block, some GPU has 4096"
        ):
            config.default(2048, 8, spec(4))


def test_default_builds() -> None:
    builds = list(builds_of(cholesky_any, spec(227)))
    assert {(file, name) for file, name, _ in builds} == {
        ("complete.cu", "complete"),
        ("cholesky_any.cu", "cholesky_warp"),
        ("cholesky_any.cu", "cholesky_block"),
        ("cholesky.cu", "cholesky_tiles"),
        ("cholesky_sums.cu", "cholesky_matrices"),
        ("cg_any.cu", "cg"),
    }
    assert {constants["RANK"] for _, _, constants in builds} == set(RANKS)
    for file, name, constants in builds:
        text = source_text(file)
        assert f"{name}(" in text
        assert all(f"#ifndef {key}\n" in text or key == "SHARED_BYTES" for key in constants)


def test_configurations_are_plain_values() -> None:
    config = CholeskyConfig.default(100, 4, spec(227))
    assert dataclasses.replace(config) == config and hash(config) == hash(dataclasses.replace(config))
