"""ALS on the CPU beside `implicit`: the same confidence matrix, rank, lambda, iterations and threads, in turn.

    python bench/als_cpu.py                          quick: ML-1M shape, f = 32, 64, 128 (about 3 minutes on 2 cores)
    python bench/als_cpu.py --shape ml-10m --factors 64

Both solve exactly; the objective after the timed iterations is computed by one function for both and must agree to
1 %. `implicit` counts confidence as alpha r, so it is given 1 + alpha r.
"""

from __future__ import annotations

import warnings
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import SHAPES, median, record, sgemm_rate, synthetic
from threadpoolctl import threadpool_limits

import hybridmf as hmf
from hybridmf._objective import Factors, State

OPTIONS = {"regularization": 0.01, "alpha": 1.0}
METHODS = {
    "rank1": {"assembly": "rank1"},
    "blas3": {"assembly": "blas3"},
    "bals": {"assembly": "bals"},
    "auto": {},
    "cg, 3 steps": {"solver": "cg", "cg_steps": 3},
}


def ours(matrix: sp.csr_array, factors: int, threads: int, iterations: int, method: dict[str, Any]) -> Any:
    """A fitted model; its history has the seconds of each iteration."""
    model = hmf.ImplicitALS(
        factors, iterations=iterations, num_threads=threads, device="cpu", random_state=0, **OPTIONS, **method
    )
    return model.fit(matrix)


def peer(confidence: sp.csr_matrix, factors: int, threads: int, iterations: int, use_cg: bool) -> tuple[Any, list[float]]:
    """`implicit`'s model and the seconds of each iteration."""
    from implicit.cpu.als import AlternatingLeastSquares

    seconds: list[float] = []
    model = AlternatingLeastSquares(
        factors=factors, regularization=OPTIONS["regularization"], alpha=1.0, iterations=iterations, use_cg=use_cg,
        num_threads=threads, random_state=0,
    )  # fmt: skip
    with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(confidence, show_progress=False, callback=lambda iteration, elapsed, loss: seconds.append(elapsed))
    return model, seconds


def objective_of(model: Any, other: Any, matrix: sp.csr_array) -> float:
    """Our objective at the peer's factors."""
    model._state = State(
        Factors(np.ascontiguousarray(other.user_factors)), Factors(np.ascontiguousarray(other.item_factors))
    )
    return model.objective(matrix)


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="ml-1m", show_default=True)
@click.option("--factors", type=int, multiple=True, default=(32, 64, 128), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--iterations", default=3, show_default=True, help="Per run; each method runs --repeats times.")
@click.option("--repeats", default=3, show_default=True)
def main(shape: str, factors: tuple[int, ...], threads: int, iterations: int, repeats: int) -> None:
    matrix = synthetic(shape)
    confidence = sp.csr_matrix(matrix, copy=True)
    confidence.data = 1 + OPTIONS["alpha"] * confidence.data
    ceiling = sgemm_rate(threads)
    click.echo(f"{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads; "
               f"sgemm {ceiling:.0f} GFLOP/s")  # fmt: skip
    for f in factors:
        seconds: dict[str, list[float]] = {}
        losses: dict[str, float] = {}
        for _ in range(repeats):
            for name, method in METHODS.items():
                model = ours(matrix, f, threads, iterations, method)
                seconds.setdefault(name, []).extend(record["seconds"] for record in model.history_)
                losses[name] = model.objective(matrix)
            one = ours(matrix, f, 1, 1, {})
            seconds.setdefault("auto, 1 thread", []).extend(record["seconds"] for record in one.history_)
            for name, use_cg in (("implicit, Cholesky", False), ("implicit, cg", True)):
                other, elapsed = peer(confidence, f, threads, iterations, use_cg)
                seconds.setdefault(name, []).extend(elapsed)
                losses[name] = objective_of(model, other, matrix)
        assert abs(losses["auto"] / losses["implicit, Cholesky"] - 1) < 0.01, losses
        base = median(seconds["implicit, Cholesky"])
        work = one.plan_.flops_per_iteration
        click.echo(f"\nf = {f}{'':20s} s / iteration   times implicit's exact   GFLOP/s   of sgemm   objective")
        for name, values in seconds.items():
            exact = "cg" not in name and "1 thread" not in name
            rate = f"{work / median(values) / 1e9:9.1f} {work / median(values) / 1e9 / ceiling:9.0%}" if exact else " " * 19
            loss = f"{losses[name]:.6g}" if name in losses else ""
            click.echo(f"{name:24s} {median(values):14.4f} {base / median(values):24.2f}   {rate}   {loss}")
        record(
            "als_cpu",
            {
                "bench": "als_cpu", "shape": shape, "nnz": int(matrix.nnz), "factors": f, "threads": threads,
                "seconds_per_iteration": {name: median(values) for name, values in seconds.items()},
                "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
                "objective": losses, "sgemm_gflops": ceiling, "flops_per_iteration": work,
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
