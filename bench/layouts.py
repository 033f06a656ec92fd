"""Layouts: building them, compared with SciPy, and the speed-up of the exact solver from degree order and BALS tiles.

    python bench/layouts.py                          building: ML-20M shape, 2 threads (under 2 minutes)
    python bench/layouts.py --task reorder           the rule of reorder="auto": all shapes and ranks (about 5 minutes)
    python bench/layouts.py --profile quick          both on the ML-1M shape (under 1 minute)

"reorder" times an iteration of the exact solver on CSR (assembly "simd") and on BALS tiles ("bals"), on rows and
columns as they come and in degree order, over ranks and shapes; the answers must be the same. It is the measurement
beside the rule of ``reorder="auto"`` (hybridmf/plan/make.py). Permuting the factors in and out of every half sweep is
counted, ordering the matrix once is shown beside it.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import click
import numpy as np
import rivals
from common import SHAPES, alternate, median, record, synthetic

import hybridmf as hmf
from hybridmf import formats

PROFILES: dict[str, dict[str, tuple[tuple[str, ...], int]]] = {
    "quick": {"build": (("ml-1m",), 5), "reorder": (("ml-1m",), 3)},
    "full": {"build": (("ml-20m",), 7), "reorder": (("ml-1m", "ml-10m", "epinions"), 5)},
}
"""Shapes and repeats of each task."""

RANKS = (16, 32, 64, 128)

VARIANTS = {
    "simd": {"assembly": "simd", "reorder": "none"},
    "simd, reordered": {"assembly": "simd", "reorder": "both"},
    "bals": {"assembly": "bals", "reorder": "none"},
    "bals, reordered": {"assembly": "bals", "reorder": "both"},
}

SAME_OBJECTIVE = 1e-4
"""Relative difference of objectives that rounding explains: the variants start from the same factors."""


def run_build(shape: str, threads: int, repeats: int) -> None:
    """Transposition, BALS builder and degree reordering against SciPy's tocsc, on one sorted CSR matrix."""
    matrix = synthetic(shape)
    bals = formats.BalsMatrix.from_csr(matrix, num_threads=threads)
    back, transposed, columns = bals.to_csr(), formats.transpose(matrix, num_threads=threads), matrix.tocsc()
    assert np.array_equal(back.indices, matrix.indices) and np.array_equal(back.data, matrix.data)
    assert np.array_equal(transposed.indices, columns.indices) and np.array_equal(transposed.data, columns.data)
    seconds = alternate(
        {
            "scipy tocsc (1 thread)": matrix.tocsc,
            "transpose": lambda: formats.transpose(matrix, num_threads=threads),
            "BALS build 256 x 192": lambda: formats.BalsMatrix.from_csr(matrix, num_threads=threads),
            "reorder rows and columns": lambda: formats.reorder(matrix, num_threads=threads),
        },
        repeats,
    )
    base = median(seconds["scipy tocsc (1 thread)"])
    click.echo(f"{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads")
    for name, values in seconds.items():
        click.echo(f"{name:26s} {median(values):8.3f} s   {median(values) / base:6.2f} of tocsc")
    record(
        "layouts",
        {
            "bench": "layouts",
            "shape": shape,
            "nnz": int(matrix.nnz),
            "threads": threads,
            "seconds": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "ratio_to_tocsc": {name: median(values) / base for name, values in seconds.items()},
            "bals": {key: float(value) for key, value in bals.statistics().items()},
        },
    )


def run_reorder(shape: str, ranks: tuple[int, ...], threads: int, repeats: int) -> None:
    """Seconds per iteration of CSR and BALS, as it comes and in degree order, one line for each rank."""
    matrix = synthetic(shape)
    started = time.perf_counter()
    formats.reorder(matrix, num_threads=threads)
    ordering = time.perf_counter() - started
    click.echo(
        f"\n{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads; explicit, "
        f"exact, seconds per iteration; ordering the matrix once: {ordering:.3f} s"
    )
    click.echo(
        f"{'f':>4s} {'tile':>11s}" + "".join(f"{name:>17s}" for name in VARIANTS)
        + "   gain of order: simd   bals   column loads left: bals   reordered"
    )  # fmt: skip
    for f in ranks:
        solvers = {name: make_solver(matrix, f, threads, **options) for name, options in VARIANTS.items()}
        seconds = alternate({name: solver.step for name, solver in solvers.items()}, repeats)
        judge = rivals.Judge(explicit_model(f, threads), matrix)
        losses = {name: judge.loss(solver.factors()) for name, solver in solvers.items()}
        assert max(losses.values()) <= (1 + SAME_OBJECTIVE) * min(losses.values()), losses
        medians = {name: median(values) for name, values in seconds.items()}
        gains = {name: medians[name] / medians[f"{name}, reordered"] for name in ("simd", "bals")}
        left = {name: column_loads_left(solvers[name]) for name in ("bals", "bals, reordered")}
        plan = solvers["bals"].plan
        click.echo(
            f"{f:4d} {f'{plan.tile_rows} x {plan.tile_cols}':>11s}"
            + "".join(f"{value:17.4f}" for value in medians.values())
            + f"{gains['simd']:23.2f} {gains['bals']:6.2f} {left['bals']:25.0%} {left['bals, reordered']:11.0%}"
        )
        record(
            "layouts",
            {
                "bench": "layouts", "task": "reorder", "shape": shape, "nnz": int(matrix.nnz), "factors": f,
                "threads": threads, "tile": [plan.tile_rows, plan.tile_cols], "seconds_to_order": ordering,
                "seconds_per_iteration": medians,
                "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
                "gain_of_order": gains, "column_loads_left": left, "objective": losses,
            },
        )  # fmt: skip
        del solvers
        gc.collect()


def explicit_model(f: int, threads: int, **options: Any) -> hmf.ExplicitALS:
    """ALS-WR; the speed-up from an order does not depend on the feedback."""
    return hmf.ExplicitALS(
        f, biases=False, regularization=0.05, regularization_scaling="count", num_threads=threads, device="cpu",
        random_state=0, **options,
    )  # fmt: skip


def make_solver(matrix: Any, f: int, threads: int, **options: Any) -> rivals.Ours:
    """One of the variants, ready to step."""
    return rivals.Ours(explicit_model(f, threads, **options), matrix)


def column_loads_left(solver: rivals.Ours) -> float:
    """Columns a tile stages for each entry it holds, over both half sweeps: 1 without any reuse."""
    tiles = [half.bals for half in solver.solver.halves.values()]
    return sum(len(each.tile_colidx) for each in tiles) / sum(each.nnz for each in tiles)


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(PROFILES)), help="Default: full, task build.")
@click.option("--task", type=click.Choice(list(PROFILES["full"])), multiple=True, help="Default: the profile's.")
@click.option("--shape", type=click.Choice(list(SHAPES)), multiple=True, help="Default: the profile's.")
@click.option("--factors", type=int, multiple=True, default=RANKS, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", type=int, help="Default: the profile's.")
def main(
    profile: str | None, task: tuple[str, ...], shape: tuple[str, ...], factors: tuple[int, ...], threads: int,
    repeats: int | None,
) -> None:  # fmt: skip
    tasks = task or (("build",) if profile is None else tuple(PROFILES[profile]))
    for name in tasks:
        shapes, times = PROFILES[profile or "full"][name]
        for each in shape or shapes:
            if name == "build":
                run_build(each, threads, repeats or times)
            else:
                run_reorder(each, factors, threads, repeats or times)


if __name__ == "__main__":
    main()
