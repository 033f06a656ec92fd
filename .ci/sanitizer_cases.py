"""Every GPU kernel once or more on small problems: what compute-sanitizer runs (.ci/gpu calls it under each tool)."""

from __future__ import annotations

import itertools

import numpy as np
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective, State, Terms
from hybridmf.device.cuda import Device, open_device
from hybridmf.formats import transpose
from hybridmf.gpu import ccd, cholesky_any, rows, sgd, topk
from hybridmf.plan import ccd_gpu


def ratings(m: int = 50, n: int = 300) -> sp.csr_array:
    """Rows around the borders of chunks, empty ones, and one with every item."""
    rng = np.random.default_rng(0)
    lengths = np.resize([0, 1, 7, 15, 16, 17, 31, 32, 33, 64], m)
    lengths[-1] = n
    rows = np.repeat(np.arange(m), lengths)
    columns = np.concatenate([rng.choice(n, k, replace=False) for k in lengths])
    values = rng.integers(1, 6, len(rows)).astype(np.float32)
    return hmf.Ratings.from_matrix(sp.csr_array((values, (rows, columns)), shape=(m, n))).user_items


def main() -> None:
    """Fits of every assembly and solver, systems, top-N."""
    matrix = ratings()
    cases = [
        *itertools.product((7, 33, 64, 100), ("fused",), ("cholesky", "cg"), ("float32",)),
        *itertools.product((33,), ("fused",), ("cholesky",), ("bf16x3", "tf32", "bf16", "float16")),
        *itertools.product((20,), ("sparse_syrk", "mo_als", "bals"), ("cholesky", "cg"), ("float32",)),
        (70, "sparse_syrk", "cholesky", "float32"),
        (80, "fused", "cholesky", "float32"),
        (90, "fused", "cholesky", "float32"),
        (120, "fused", "cholesky", "float32"),
        (120, "fused", "cholesky", "bf16x3"),
        (100, "fused", "cg", "bf16"),
        (140, "auto", "cholesky", "float32"),
    ]
    for rank, assembly, solver, precision in cases:
        common = {
            "iterations": 1,
            "assembly": assembly,
            "solver": solver,
            "precision": precision,
            "device": "cuda",
            "random_state": 0,
        }
        hmf.ImplicitALS(rank, **common).fit(matrix).objective(matrix)
        hmf.ExplicitALS(rank - 1, biases=True, **common).fit(matrix)
    hmf.ImplicitALS(100, iterations=1, nonnegative=True, device="cuda", random_state=0).fit(matrix)
    for inner, dtype, biases in ((1, "float32", False), (2, "float64", False), (1, "float32", True)):
        model = hmf.CCD(3, iterations=1, inner_iterations=inner, dtype=dtype, biases=biases, device="cuda")
        model.fit(matrix).objective(matrix)
    sgd_cases(matrix)
    device = open_device()
    long_rows(device, matrix)
    rng = np.random.default_rng(1)
    for rank, dtype in ((20, np.float32), (60, np.float32), (40, np.float64), (200, np.float32), (300, np.float32)):
        solve_systems(device, rng, rank, dtype)
    ccd_layouts(device, matrix)
    add_pieces(device)
    users = rng.standard_normal((70, 20)).astype(np.float32)
    items = rng.standard_normal((300, 20)).astype(np.float32)
    for n in (5, 200):
        topk.top_k(device, users[:50], items, n, seen=matrix)
    device.synchronize()
    print("all kernels ran")


def sgd_cases(matrix: sp.csr_array) -> None:
    """Every schedule, layout and storage of SGD; rows from 16 entries on count as long, and two workers race."""
    sgd.LONG_ROW, sgd.ROUNDS = 16, 50
    common = {"iterations": 1, "device": "cuda", "random_state": 0}
    for rank, ordering, dtype in (
        *itertools.product((7, 33, 200), ("mixed",), ("float32", "float64")),
        *itertools.product((20,), ("user", "item"), ("float32",)),
    ):
        hmf.SGD(rank, ordering=ordering, dtype=dtype, **common).fit(matrix)
        hmf.SGD(rank, ordering=ordering, dtype=dtype, biases=True, **common).fit(matrix).objective(matrix)
    for rank, precision, biases in itertools.product((6, 140), ("float32", "float16"), (False, True)):
        hmf.SGD(rank, schedule="batch_hogwild", precision=precision, biases=biases, **common).fit(matrix)
    for rank, biases in itertools.product((7, 40), (False, True)):
        hmf.SGD(rank, schedule="msgd", precision="float16", biases=biases, **common).fit(matrix)
    sgd.NARROW_WARPS = 0
    for rank, precision in itertools.product((40, 128), ("float32", "float16")):
        hmf.SGD(rank, schedule="msgd", precision=precision, **common).fit(matrix)


def long_rows(device: Device, matrix: sp.csr_array, rank: int = 20) -> None:
    """Blocks that walk several rows, range by range."""
    rng = np.random.default_rng(3)
    moved, fixed = (sgd.FactorRows(device.upload(rng.random((n, rank), dtype=np.float32))) for n in matrix.shape)
    lengths = np.diff(matrix.indptr)
    order = np.argsort(-lengths).astype(np.int32)
    bins = sgd.Bins.balance(device, order, lengths[order], 3)
    sgd.blocked(device, moved, fixed, sgd.Walk.upload(device, matrix, 3), bins, Terms(0.01, 0.05, 0.0, 0.0, 0.0))


def add_pieces(device: Device) -> None:
    """Rows in several pieces, in one and in none, of whole 16 bytes and not."""
    at, slots = (device.upload(np.array(values)) for values in ([0, 2], [4, 7, 7]))
    for length, dtype in ((5, np.float32), (64, np.float32), (64, np.float64)):
        rows.add_pieces(device, device.upload(np.ones((7, length), dtype)), at, slots)


def ccd_layouts(device: Device, matrix: sp.csr_array, rank: int = 3) -> None:
    """CCD++ iterations over tiles, and gathering from global memory."""
    rng = np.random.default_rng(2)
    plan = hmf.plan(matrix, hmf.CCD(rank, inner_iterations=2, device="cuda"))
    state = State(*(Factors(rng.random((n, rank), dtype=np.float32)) for n in matrix.shape))
    for staged, tile in ((True, 36), (False, 16)):
        configs = {
            side: ccd_gpu.CcdConfig(staged, tile, -(-n // 32) if staged else 1, segment=64, blocks=5, threads=128)
            for side, n in (("user", matrix.shape[1]), ("item", matrix.shape[0]))
        }
        objective = Objective.explicit(0.1, "count", False)
        solver = ccd.GpuCCD(device, matrix, transpose(matrix), objective, plan, state, configs)
        list(solver.sweep())
        solver.objective_value()


def solve_systems(device: object, rng: np.random.Generator, rank: int, dtype: type, n: int = 3) -> None:
    """A batch of positive definite systems through the general Cholesky."""
    factors = rng.standard_normal((n, rank + 5, rank))
    matrices = (factors.transpose(0, 2, 1) @ factors + np.eye(rank)).astype(dtype)
    sums = tuple(device.upload(a) for a in (matrices, rng.standard_normal((n, rank)).astype(dtype)))
    slots, rows = device.upload(np.arange(n + 1)), device.upload(np.arange(n, dtype=np.int32))
    solutions, status = device.zeros((n, rank), dtype), device.zeros(n, np.int32)
    cholesky_any.cholesky_solve(device, solutions, status, sums, slots, rows, 1e-6)
    assert not device.download(status).any()


if __name__ == "__main__":
    main()
