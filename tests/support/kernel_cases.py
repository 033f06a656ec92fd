"""Every GPU kernel once or more on small problems, by name.

compute-sanitizer runs them on a GPU (.ci/sanitizer_cases.py), tests/gpu/test_schedules.py on the emulator under random
schedules and, with ThreadSanitizer, under CUDA's happens-before edges alone (.ci/races).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective, State, Terms
from hybridmf.device import cuda
from hybridmf.formats import transpose
from hybridmf.gpu import ccd, cholesky_any, fused, rows, sgd, topk
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.plan.ccd import CcdConfig
from hybridmf.plan.fused import FusedConfig
from support import msgd
from support.solvers import iterate

Arrays = list[np.ndarray]
Case = Callable[[], Arrays]

BY_DESIGN = ("sgd-hogwild",)
"""Starts of the names of cases whose results depend on the schedule: workers overwrite each other's rows (cuMF_SGD)."""


@functools.cache
def ratings(m: int = 50, n: int = 300) -> sp.csr_array:
    """Rows around the borders of chunks, empty ones, and one with every item."""
    rng = np.random.default_rng(0)
    lengths = np.resize([0, 1, 7, 15, 16, 17, 31, 32, 33, 64], m)
    lengths[-1] = n
    users = np.repeat(np.arange(m), lengths)
    columns = np.concatenate([rng.choice(n, k, replace=False) for k in lengths])
    values = rng.integers(1, 6, len(users)).astype(np.float32)
    return hmf.Ratings.from_matrix(sp.csr_array((values, (users, columns)), shape=(m, n))).user_items


def factors_of(model: Any) -> Arrays:
    """All that a fit has learned."""
    biases = [getattr(model, name, None) for name in ("user_biases_", "item_biases_")]
    return [model.user_factors, model.item_factors, *(b for b in biases if b is not None)]


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Other limits, so that small problems take the ways of large ones."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def als(kind: str, rank: int, matrix: sp.csr_array | None = None, **options: Any) -> Arrays:
    """A fit of systems of order `rank`."""
    implicit: Any = {"alpha": 1.0} | options  # without it, values do not matter
    model: Any = hmf.ImplicitALS(rank, **implicit) if kind == "implicit" else hmf.ExplicitALS(rank - 1, **options)
    matrix = ratings() if matrix is None else matrix
    arrays = factors_of(model.fit(matrix))
    return [*arrays, np.array([model.objective(matrix)])] if kind == "implicit" else arrays


def described(kind: str, rank: int, dtype: str) -> Arrays:
    """A fit with features of both sides."""
    matrix, rng = ratings(), np.random.default_rng(8)
    model: Any = hmf.ImplicitALS(rank) if kind == "implicit" else hmf.ExplicitALS(rank - 1)
    model.set_params(iterations=2, device="cuda", random_state=0, dtype=dtype)
    users, items = (rng.random((n, 9), dtype=np.float32) for n in matrix.shape)
    return factors_of(model.fit(matrix, user_features=users, item_features=items * (items > 0.5)))


def als_cases() -> Iterator[tuple[str, Case]]:
    """Fits of every assembly, solver and precision."""
    common = {"iterations": 1, "device": "cuda", "random_state": 0}
    shown = [
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
    for (rank, assembly, solver, precision), kind in itertools.product(shown, ("implicit", "explicit")):
        options = common | {"assembly": assembly, "solver": solver, "precision": precision}
        yield f"als-{kind}-{rank}-{assembly}-{solver}-{precision}", functools.partial(als, kind, rank, **options)
    for assembly in ("mo_als_global", "mo_als_uncached", "mo_als_plain", "bals_local", "sparse_syrk_published"):
        yield f"als-implicit-20-{assembly}", functools.partial(als, "implicit", 20, assembly=assembly, **common)
    for rank, block in ((40, 16), (150, 64)):
        options = common | {"solver": "subspace", "block_size": block}
        yield f"als-implicit-{rank}-subspace", functools.partial(als, "implicit", rank, **options)
    for rank in (20, 100, 140):
        yield f"als-implicit-{rank}-nonnegative", functools.partial(als, "implicit", rank, nonnegative=True, **common)
    yield "als-explicit-30-float64", functools.partial(als, "explicit", 30, dtype="float64", **common)
    for rank, form in ((48, "dual"), (90, "auto"), (90, "primal")):
        yield f"als-implicit-{rank}-{form}", functools.partial(als, "implicit", rank, row_form=form, **common)
    for kind, rank, dtype in (("implicit", 33, "float32"), ("explicit", 90, "float32"), ("explicit", 20, "float64")):
        yield f"als-{kind}-{rank}-{dtype}-features", functools.partial(described, kind, rank, dtype)


def warpgroups(rank: int, precision: str, offsets: bool) -> Arrays:
    """Sums of segments long enough for every buffer of cuda/warpgroup_sums.cu to be used again by other warps."""
    device, rng = cuda.open_device(), np.random.default_rng(4)
    lengths = np.array([900, 65, 33, 32, 31, 1, 0])
    factors = np.zeros((40, -rank % 4 + rank), np.float32)
    factors[:, :rank] = rng.standard_normal((40, rank))
    given = {"offsets": device.upload(rng.standard_normal(40).astype(np.float32))} if offsets else {}
    entries = DeviceEntries(
        device.upload(rng.integers(0, 40, lengths.sum()).astype(np.int32)),
        device.upload(rng.random(lengths.sum(), dtype=np.float32)),
        implicit=not offsets,
        **given,
    )
    kernels = fused.FusedKernels(device, FusedConfig.rule(rank), precision, "cholesky", largest=4.0)
    ends = np.cumsum(lengths)
    segments = np.column_stack((np.arange(len(lengths)), ends - lengths, ends)).astype(np.int64)
    sums = kernels.empty(len(lengths))
    sums[0][...] = 0  # elements above the diagonal are not written
    kernels.assemble(sums, kernels.operand(device.upload(factors)), entries, device.upload(segments))
    return [device.download(sums[0])]


def warpgroup_cases() -> Iterator[tuple[str, Case]]:
    """Both arithmetics, with and without offsets."""
    for rank, precision, offsets in ((100, "bf16x3", True), (112, "float32", True), (128, "bf16x3", False)):
        name = f"warpgroups-{rank}-{precision}-{'offsets' if offsets else 'implicit'}"
        yield name, functools.partial(warpgroups, rank, precision, offsets)


def ccd_fit(inner: int, dtype: str, biases: bool) -> Arrays:
    """A fit of CCD++."""
    model = hmf.CCD(3, iterations=1, inner_iterations=inner, dtype=dtype, biases=biases, device="cuda", random_state=0)
    arrays = factors_of(model.fit(ratings()))
    return [*arrays, np.array([model.objective(ratings())])]


def ccd_layout(staged: bool, tile: int, rank: int = 3) -> Arrays:
    """CCD++ iterations over tiles, or gathering from global memory."""
    matrix, device, rng = ratings(), cuda.open_device(), np.random.default_rng(2)
    plan = hmf.plan(matrix, hmf.CCD(rank, inner_iterations=2, biases=False, device="cuda"))
    state = State(*(Factors(rng.random((n, rank), dtype=np.float32)) for n in matrix.shape))
    configs = {
        side: CcdConfig(staged, tile, -(-n // 32) if staged else 1, segment=64, blocks=5, threads=128)
        for side, n in (("user", matrix.shape[1]), ("item", matrix.shape[0]))
    }
    objective = Objective.explicit(0.1, "count", False)
    solver = ccd.GpuCCD(device, matrix, transpose(matrix), objective, plan, state, configs)
    iterate(solver)
    return [
        *(np.asarray(getattr(solver.state, side).matrix) for side in ("user", "item")),
        np.array([solver.objective_value()]),
    ]


def ccd_cases() -> Iterator[tuple[str, Case]]:
    """Layouts, inner iterations, biases."""
    for inner, dtype, biases in ((1, "float32", False), (2, "float64", False), (1, "float32", True)):
        yield f"ccd-{inner}-{dtype}-{'biases' if biases else 'plain'}", functools.partial(ccd_fit, inner, dtype, biases)
    for staged, tile in ((True, 36), (False, 16)):
        yield f"ccd-{'staged' if staged else 'gathered'}", functools.partial(ccd_layout, staged, tile)


def sgd_fit(rank: int, narrow: bool = False, **options: Any) -> Arrays:
    """A fit of SGD; rows from 16 entries on count as long."""
    limits = {"LONG_ROW": 16} | ({"NARROW_WARPS": 0} if narrow else {})
    with changed(sgd, **limits):
        model = hmf.SGD(rank, iterations=1, device="cuda", random_state=0, **{"biases": False} | options)
        arrays = factors_of(model.fit(ratings()))
        return [*arrays, np.array([model.objective(ratings())])]


def sgd_cases() -> Iterator[tuple[str, Case]]:
    """Every schedule, layout and storage of SGD."""
    for (rank, ordering, dtype), biases in itertools.product(
        (
            *itertools.product((7, 33, 200), ("mixed",), ("float32", "float64")),
            *itertools.product((20,), ("user", "item"), ("float32",)),
        ),
        (False, True),
    ):
        name = f"sgd-msgd-{rank}-{ordering}-{dtype}-{'biases' if biases else 'plain'}"
        yield name, functools.partial(sgd_fit, rank, ordering=ordering, dtype=dtype, biases=biases)
    for rank, precision, biases in itertools.product((6, 140), ("float32", "float16"), (False, True)):
        name = f"sgd-hogwild-{rank}-{precision}-{'biases' if biases else 'plain'}"
        yield name, functools.partial(sgd_fit, rank, schedule="batch_hogwild", precision=precision, biases=biases)
    for rank, biases in itertools.product((7, 40), (False, True)):
        name = f"sgd-msgd-{rank}-float16-{'biases' if biases else 'plain'}"
        yield name, functools.partial(sgd_fit, rank, precision="float16", biases=biases)
    for rank, precision in itertools.product((40, 128), ("float32", "float16")):
        yield f"sgd-narrow-{rank}-{precision}", functools.partial(sgd_fit, rank, narrow=True, precision=precision)


def long_rows(rank: int = 20) -> Arrays:
    """Blocks that walk several rows, range by range."""
    matrix, device, rng = ratings(), cuda.open_device(), np.random.default_rng(3)
    moved, fixed = (sgd.FactorRows(device.upload(rng.random((n, rank), dtype=np.float32))) for n in matrix.shape)
    lengths = np.diff(matrix.indptr)
    order = np.argsort(-lengths).astype(np.int32)
    bins = sgd.Bins.balance(device, order, lengths[order], 3)
    msgd.blocked(device, moved, fixed, sgd.Walk.upload(device, matrix, 3), bins, Terms(0.01, 0.05, 0.0, 0.0, 0.0))
    return [device.download(moved.matrix)]


def add_pieces(length: int, dtype: type) -> Arrays:
    """Rows in several pieces, in one and in none, of whole 16 bytes and not."""
    device, rng = cuda.open_device(), np.random.default_rng(5)
    at, slots = (device.upload(np.array(values)) for values in ([0, 2], [4, 7, 7]))
    sums = device.upload(rng.random((7, length)).astype(dtype))
    rows.add_pieces(device, sums, at, slots)
    return [device.download(sums)]


def systems(rank: int, dtype: type, n: int = 3) -> Arrays:
    """A batch of positive definite systems through the general Cholesky."""
    device, rng = cuda.open_device(), np.random.default_rng(1)
    factors = rng.standard_normal((n, rank + 5, rank))
    matrices = (factors.transpose(0, 2, 1) @ factors + np.eye(rank)).astype(dtype)
    sums = tuple(device.upload(a) for a in (matrices, rng.standard_normal((n, rank)).astype(dtype)))
    slots, order = device.upload(np.arange(n + 1)), device.upload(np.arange(n, dtype=np.int32))
    solutions, status = device.zeros((n, rank), dtype), device.zeros(n, np.int32)
    cholesky_any.cholesky_solve(device, solutions, status, sums, slots, order, 1e-6)
    assert not device.download(status).any()
    return [device.download(solutions)]


def best(n: int, filtered: bool) -> Arrays:
    """Top-N of a few users."""
    device, rng, seen = cuda.open_device(), np.random.default_rng(6), ratings()
    users, items = (rng.standard_normal((rows, 20)).astype(np.float32) for rows in seen.shape)
    return [np.asarray(a) for a in topk.top_k(device, users, items, n, seen=seen if filtered else None)]


def other_cases() -> Iterator[tuple[str, Case]]:
    """Long rows, pieces, systems, top-N."""
    yield "long-rows", long_rows
    for length, dtype in ((5, np.float32), (64, np.float32), (64, np.float64)):
        yield f"pieces-{length}-{dtype.__name__}", functools.partial(add_pieces, length, dtype)
    for rank, dtype in ((20, np.float32), (60, np.float32), (40, np.float64), (200, np.float32), (300, np.float32)):
        yield f"systems-{rank}-{dtype.__name__}", functools.partial(systems, rank, dtype)
    for n, filtered in ((5, True), (120, True), (5, False)):
        yield f"top-{n}-{'filtered' if filtered else 'all'}", functools.partial(best, n, filtered)


CASES: dict[str, Case] = dict(itertools.chain(als_cases(), warpgroup_cases(), ccd_cases(), sgd_cases(), other_cases()))
