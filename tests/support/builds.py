"""The builds of every kernel that the tests compile: ``(file, kernel, constants)`` of default configurations.

For sm_90 all compile without spilled registers and stack frame, except ``UNROLLED=0``: the mapping of the paper on BALS
keeps sums in local memory if a thread has more of them than registers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from hybridmf.device.cuda import DeviceSpec
from hybridmf.gpu import (
    arrays,
    bals,
    ccd,
    cholesky_any,
    dual,
    features,
    fused,
    gram,
    losses,
    matrix,
    mo_als,
    nonnegative,
    predictions,
    rows,
    sgd,
    sparse_syrk,
    topk,
)
from hybridmf.gpu.factors import to_device
from hybridmf.plan.ccd import SEGMENT

Build: TypeAlias = "tuple[str, str, dict[str, Any]]"

FUSED_KERNELS = ("solve_rows", "assemble_segments", "solve_partials")

RANKS = (8, 16, 32, 64, 96, 100, 128, 200, 256, 512)

ENTRIES = ((4, False, False), (4, True, False), (4, False, True), (8, True, True))
"""(itemsize, implicit, offsets) of the published assemblies."""


def arrays_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for kernel, constants in (
        ("copy_block", {}),
        ("gather_rows", {"ROW": "int"}),
        ("fill_block", {"REAL": "float"}),
        ("add_value", {"REAL": "double", "SOURCE": "float"}),
    ):
        yield arrays.SOURCE, kernel, constants | {"THREADS": arrays.THREADS}


def assembly_builds(name: str, config_of: Callable[[int, int], Any], ranks: Sequence[int]) -> Iterator[Build]:
    """The default configurations of a published assembly."""
    seen = set()
    for rank in ranks:
        for itemsize, implicit, offsets in ENTRIES:
            entries = {"REAL": np.dtype(f"f{itemsize}"), "IMPLICIT": implicit, "HAS_OFFSETS": offsets}
            constants = config_of(rank, itemsize).constants | entries
            if tuple(constants.values()) not in seen:
                seen.add(tuple(constants.values()))
                yield f"{name}.cu", name, constants


def bals_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for choose in (bals.BalsConfig.default, bals.BalsLocalConfig.default, bals.BalsLocalConfig.published):
        yield from assembly_builds("bals", functools.partial(choose, spec=spec), ranks)


def ccd_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    helpers = ("combine", "cut_rows", "place", "subtract_products", "squared_errors", "transpose")
    for real, staged in itertools.product((np.float32, np.float64), (True, False)) if ranks else ():
        dtype = np.dtype(real)
        name = {"REAL": {4: "float", 8: "double"}[dtype.itemsize]}
        # kernels that gather two or three vectors also exist for one
        for gathered, vectors in ((3, 3), (2, 2), (3, 1), (2, 1)) if staged else ((3, 3), (2, 2), (1, 1)):
            config = ccd.CcdConfig(False, 16, 1, SEGMENT, 1, 256)
            if staged:  # the tile size of the build is that of the device; its value does not change registers
                chosen = ccd.CcdConfig.choose(1, 1, 1, gathered, dtype, spec)
                config = ccd.CcdConfig(True, 4096, 1, SEGMENT, 1, chosen.threads)
            for kernel in ("rank_one",) if staged else ("rank_one", "interleave"):
                yield "ccd.cu", kernel, config.constants_for(vectors, dtype) | name
        for kernel in helpers:
            yield "ccd.cu", kernel, name | {"STAGED": int(staged)}


def cholesky_any_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for rank in ranks:
        for itemsize in (4, 8):
            for has_gram in (False, True):
                yield "complete.cu", "complete", cholesky_any._complete_constants(rank, itemsize, has_gram)
            config = cholesky_any.CholeskyConfig.default(rank, itemsize, spec)
            yield "cholesky_any.cu", config.kernel, config.constants
            fastest = cholesky_any.config_for(rank, f"f{itemsize}", spec)
            if fastest.file != "cholesky_any.cu":
                yield fastest.build
            yield "cg_any.cu", "cg", cholesky_any.CgConfig.default(rank, itemsize, spec).constants


def draw_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for real in ("float", "double"):
        for has_rows in (0, 1):
            yield "draw.cu", "draw_rows", {"REAL": real, "HAS_ROWS": has_rows, "THREADS": arrays.THREADS}


def dual_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for rank in ranks:
        for size in dual.GPU_SIZES:
            for implicit, biased in ((False, False), (False, True), (True, False)):
                if size <= rank:
                    yield "dual_rows.cu", "dual_rows", dual.dual_constants(size, rank, implicit, biased, biased)
        for kernel in ("inverse_root", "to_basis", "from_basis"):
            yield "basis.cu", kernel, dual.basis_constants(rank)


def features_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for rank in ranks:
        for dtype in ("float32", "float64") if rank == 64 else ("float32",):
            for name in ("feature_pieces", "feature_totals", "feature_vectors", "feature_pull", "add_pull"):
                yield features.SOURCE, name, features.constants(rank, 4 * -(-rank // 4), dtype)


def fused_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    """Every precision and solver for rank 64, the default ones for the others."""
    for rank in ranks:
        precisions = tuple(fused.PRECISION_CODES) if rank == 64 else ("float32",)
        if fused.summed_by_warpgroups(rank, "bf16x3", "cholesky", spec):
            precisions += ("bf16x3",)
        solvers = tuple(fused.SOLVER_CODES) if rank == 64 else ("cholesky",)
        for implicit, offsets in ((False, False), (False, True), (True, False)):
            for precision in precisions:
                for solver in solvers:
                    config = fused.FusedConfig.default(rank, spec, precision, solver)
                    choices = fused.choices_of(config, precision, solver, spec)
                    kind = fused.Kind(precision, solver, implicit, offsets)
                    # each with its own warps
                    if choices["by_warpgroups"] or config.assembling(precision, solver) != config:
                        yield from fused.builds(config, kind, **choices)
                        continue
                    yield "fused_als.cu", "assemble_segments", fused.build_constants(config, kind)
        if fused.solved_apart(rank, "cholesky"):  # but not by conjugate gradients
            config = fused.FusedConfig.default(rank, spec, "bf16", "cg")
            choices = fused.choices_of(config, "bf16", "cg", spec)
            yield from fused.builds(config, fused.Kind("bf16", "cg"), **choices)
        config = fused.FusedConfig.default(rank, spec)
        for implicit in (False, True) if rank in (32, 64) else ():
            choices = fused.choices_of(config, "float32", "cholesky", spec)
            kind = fused.Kind("float32", "cholesky", implicit)
            yield from fused.builds(config, kind._replace(residual=True), **choices)
            constants = fused.build_constants(config, kind)
            yield "fused_als.cu", "solve_rows", constants | {"PULLED": True}
        if config.solved_by_sums("cholesky"):
            tiles = fused.WideTilesConfig.rule(rank, spec, sums=True)
            yield "cholesky_sums.cu", "cholesky_sums", tiles.sums_constants(config.width)
        for precision in fused.OPERAND_BYTES:
            yield "split.cu", "split_table", fused.split_constants(config, precision)


def gram_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for kernel, real in (("gram", np.float32), ("gram", np.float64), ("gram_tensor", np.float32)):
        yield "gram.cu", kernel, {"REAL": np.dtype(real)}


def losses_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for factors in ranks:
        for real in ("float", "double"):
            shape = {"REAL": real, "FACTORS": factors, "LD": factors}
            yield "losses.cu", "row_squares", shape
            for implicit, offsets in ((0, 0), (0, 1), (1, 0)):
                yield "losses.cu", "segment_losses", shape | {"IMPLICIT": implicit, "HAS_OFFSETS": offsets}


def matrix_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for kernel in ("count_columns", "column_places", "scatter_entries", "count_faults"):
        for real in ("float", "double"):
            yield "transpose.cu", kernel, {"REAL": real, "THREADS": matrix.THREADS}


def mo_als_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    return assembly_builds("mo_als", lambda rank, size: mo_als.MoAlsConfig.default(rank, size, spec), ranks)


def nonnegative_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for rank in ranks:
        if rank <= nonnegative.MAX_TILED_RANK and spec.capability >= (8, 0):
            yield nonnegative.NonnegativeConfig.of_tiles(rank).build
        for itemsize in (4, 8):
            yield nonnegative.NonnegativeConfig.of_matrices(rank, itemsize, spec).build


def predictions_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for itemsize in (4, 8):
        for lanes in (1, 2, 4, 8, 16, 32):
            yield (
                "predictions.cu",
                "add_products",
                predictions.product_constants(lanes * 16 // itemsize, f"f{itemsize}"),
            )


def rows_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for real, itemsize in (("float", 4), ("double", 8)):
        for vector in (1, 16 // itemsize):
            yield "rows.cu", "add_pieces", {"REAL": real, "VECTOR": vector, "THREADS": rows.THREADS}
    yield "rows.cu", "row_range", {"REAL": "float", "THREADS": rows.THREADS}
    yield "rows.cu", "clip_segments", {"THREADS": rows.THREADS}


def sgd_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for factors in ranks:
        for biases in (False, True):
            for real in (np.dtype(np.float32), np.dtype(np.float64)):
                ld = sgd.stored_width(factors, real)
                config = sgd.BlockedConfig.rule(ld, real.itemsize, spec)
                for kernel in ("centralized", "centralized_narrow", "blocked", "decentralized"):
                    yield "msgd.cu", kernel, {"REAL": real, "HAS_BIASES": biases} | config.constants
                fastest = sgd.BlockedConfig.fastest(ld, real.itemsize, spec)
                if fastest != config and real == np.float32 and not biases:  # for several GPUs; the code is the same
                    yield "msgd.cu", "blocked", {"REAL": real, "HAS_BIASES": biases} | fastest.constants
                if real == np.float32 and spec.capability >= (8, 0):
                    narrow = sgd.BlockedConfig.rule(sgd.stored_width(factors, np.float16), real.itemsize, spec, 2)
                    for kernel in ("centralized", "centralized_narrow", "blocked"):
                        yield "msgd.cu", kernel, {"REAL": real, "HAS_BIASES": biases} | narrow.constants
            for stored in (np.dtype(np.float16), np.dtype(np.float32)):
                ld = sgd.stored_width(factors, stored)
                chosen = sgd.HogwildConfig.rule(spec, ld, stored.itemsize, biases)
                constants = chosen.constants_for(ld, stored.itemsize == 2, biases)
                yield "batch_hogwild.cu", "batch_hogwild", constants


def sparse_syrk_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    yield from assembly_builds(
        "sparse_syrk", lambda rank, size: sparse_syrk.SyrkConfig.default(rank, size, spec), ranks
    )
    yield from assembly_builds(
        "sparse_syrk_published", lambda rank, size: sparse_syrk.PublishedSyrkConfig.default(rank, size, spec), ranks
    )
    residual = {"REAL": np.dtype("f8"), "IMPLICIT": True, "HAS_OFFSETS": False, "RESIDUAL": True}
    yield "sparse_syrk.cu", "sparse_syrk", sparse_syrk.SyrkConfig.default(32, 8, spec).constants | residual


def topk_builds(spec: DeviceSpec, ranks: Sequence[int]) -> Iterator[Build]:
    for padded in sorted({topk.round_up(rank, 16) for rank in ranks}):
        yield topk.SOURCE, "group_max", topk.GroupMaxConfig.rule(padded).constants
    if spec.capability >= (8, 0):
        for padded in sorted({topk.round_up(rank, 32) for rank in ranks}):
            yield topk.SOURCE, "group_max", topk.GroupMaxConfig.rule(padded, True).constants
    packing = ("row_norms", "pack_panels", "prepare_items")
    serving = ("prepare_users", "mark_seen", "score_rows", "drop_seen", "sort_rows")
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        for name in packing + serving:
            yield topk.SOURCE, name, topk._constants(dtype)
        for kept in topk.LIST_SIZES:
            for name in ("prune", "select_best"):
                yield topk.SOURCE, name, topk._constants(dtype, kept)


BUILDS: dict[Any, tuple[Callable[[DeviceSpec, Sequence[int]], Iterator[Build]], Sequence[int]]] = {
    arrays: (arrays_builds, RANKS),
    bals: (bals_builds, RANKS),
    ccd: (ccd_builds, (64,)),
    cholesky_any: (cholesky_any_builds, RANKS),
    to_device: (draw_builds, RANKS),
    dual: (dual_builds, (32, 64, 100, 128)),
    features: (features_builds, (10, 64)),
    fused: (fused_builds, RANKS[:7]),
    gram: (gram_builds, RANKS),
    losses: (losses_builds, RANKS),
    matrix: (matrix_builds, RANKS),
    mo_als: (mo_als_builds, RANKS),
    nonnegative: (nonnegative_builds, RANKS),
    predictions: (predictions_builds, RANKS),
    rows: (rows_builds, RANKS),
    sgd: (sgd_builds, RANKS),
    sparse_syrk: (sparse_syrk_builds, RANKS),
    topk: (topk_builds, RANKS),
}
"""By module or launcher: its builds for ranks, and the ranks that it has builds for."""


def builds_of(module: Any, spec: DeviceSpec, ranks: Sequence[int] | None = None) -> Iterator[Build]:
    """Builds of a module's launchers on a device; ranks None stands for all it knows."""
    builds, known = BUILDS[module]
    return builds(spec, known if ranks is None else tuple(rank for rank in ranks if rank in known))
