"""ALS and top-K on the CPU beside every peer that is installed: same data, rank, lambda, alpha, threads, in turn.

    python bench/cpu.py                                     quick: ML-1M shape (about 3 minutes on 2 cores)
    python bench/cpu.py --shape ml-10m                      the table of docs/performance.md (about 15 minutes)
    python bench/cpu.py --task topk --shape ml-20m --factors 64
    python bench/cpu.py --task scaling --shape ml-10m --factors 64

Peers: implicit, irspack, lenskit (pip install implicit irspack lenskit). After the timed iterations one function
computes the objective of each; methods of one group that differ by more than 5 % stop the run. GFLOP/s counts
nnz f (f + 1) a half sweep and f^3/3 + 2 f^2 a solve, and is compared with sgemm measured in the same run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import rivals
from common import SHAPES, alternate, median, record, sgemm_rate, synthetic

import hybridmf as hmf

EXPLICIT = {"regularization": 0.05, "regularization_scaling": "count"}
IMPLICIT = {"regularization": 0.01, "alpha": 1.0}


def implicit_methods(matrix: Any, f: int, threads: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Groups of methods that do the same work on implicit feedback; ours first."""
    common = {"num_threads": threads, "device": "cpu", "random_state": 0}

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: rivals.Ours(hmf.ImplicitALS(f, **IMPLICIT, **common, **options), matrix)

    def peer(cls: Any, *options: Any) -> Callable[[], Any]:
        return lambda: cls(matrix, f, IMPLICIT["regularization"], IMPLICIT["alpha"], threads, *options)

    groups: dict[str, dict[str, Callable[[], Any]]] = {
        "implicit exact": {"simd": ours(), "blas3": ours(assembly="blas3"), "bals": ours(assembly="bals")},
        "implicit CG, 3 steps": {"cg": ours(solver="cg", cg_steps=3)},
        "implicit iALS++, 32": {"subspace": ours(solver="subspace", block_size=32)} if f > 32 else {},
    }
    if rivals.installed("implicit"):
        groups["implicit exact"]["implicit"] = peer(rivals.Implicit, False)
        groups["implicit CG, 3 steps"]["implicit"] = peer(rivals.Implicit, True)
    if rivals.installed("irspack"):
        groups["implicit exact"]["irspack"] = peer(rivals.Irspack, "CHOLESKY")
        groups["implicit CG, 3 steps"]["irspack"] = peer(rivals.Irspack, "CG")
        if f > 32:
            groups["implicit iALS++, 32"]["irspack"] = peer(rivals.Irspack, "IALSPP")
    return {name: group for name, group in groups.items() if group}


def explicit_methods(matrix: Any, f: int, threads: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """The same for explicit feedback."""
    common = {"num_threads": threads, "device": "cpu", "random_state": 0}

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: rivals.Ours(hmf.ExplicitALS(f, **EXPLICIT, **common, **options), matrix)

    groups = {
        "explicit exact": {"simd": ours(), "blas3": ours(assembly="blas3"), "bals": ours(assembly="bals")},
        "explicit CG, 3 steps": {"cg": ours(solver="cg", cg_steps=3)},
    }
    if rivals.installed("lenskit"):
        groups["explicit exact"]["lenskit"] = lambda: rivals.Lenskit(matrix, f, EXPLICIT["regularization"])
    return groups


def run_als(shape: str, factors: tuple[int, ...], threads: int, repeats: int, feedback: tuple[str, ...]) -> None:
    """Time every group of methods and record a line for each."""
    matrix = synthetic(shape)
    ceiling = sgemm_rate(threads)
    click.echo(
        f"{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads; "
        f"sgemm {ceiling:.0f} GFLOP/s, {sgemm_rate(1):.0f} on one"
    )
    for f in factors:
        for kind, methods in (("implicit", implicit_methods), ("explicit", explicit_methods)):
            if kind not in feedback:
                continue
            for group, makers in methods(matrix, f, threads).items():
                run_group(shape, matrix, f, threads, repeats, kind, group, makers, ceiling)


def run_group(
    shape: str, matrix: Any, f: int, threads: int, repeats: int, kind: str, group: str,
    makers: dict[str, Callable[[], Any]], ceiling: float,
) -> None:  # fmt: skip
    """One group: the same iterations of each method in turn, then their objectives."""
    solvers = {name: make() for name, make in makers.items()}
    seconds = alternate({name: solver.step for name, solver in solvers.items()}, repeats)
    judge = hmf.ImplicitALS(f, **IMPLICIT) if kind == "implicit" else hmf.ExplicitALS(f, **EXPLICIT)
    losses = {}
    for name, solver in solvers.items():
        data = getattr(solver, "residuals", matrix)
        if data is not matrix:  # lenskit learns residuals: judge ours on the same ones
            twin = rivals.Ours(
                hmf.ExplicitALS(f, **EXPLICIT, num_threads=threads, random_state=0), hmf.Ratings(data).user_items
            )
            for _ in range(repeats + 1):
                twin.step()
            losses["simd on lenskit's residuals"] = rivals.objective(judge, twin.factors(), data)
        losses[name] = rivals.objective(judge, solver.factors(), data)
    check_agreement(losses)
    fastest_rival = min(
        (median(seconds[name]) for name in seconds if name in ("implicit", "irspack", "lenskit")), default=None
    )
    plan = solvers[next(iter(solvers))].plan
    exact = "exact" in group
    click.echo(f"\n{group}, f = {f}\n{'':10s} s / iteration   fastest rival / this   GFLOP/s   of sgemm     objective")
    rates = {}
    for name, values in seconds.items():
        ratio = f"{fastest_rival / median(values):22.2f}" if fastest_rival else " " * 22
        rates[name] = plan.flops_per_iteration / median(values) / 1e9
        rate = f"{rates[name]:9.1f} {rates[name] / ceiling:9.0%}" if exact else " " * 19
        click.echo(f"{name:10s} {median(values):13.4f} {ratio} {rate} {losses[name]:13.6g}")
    record(
        "cpu",
        {
            "bench": "cpu", "task": group, "shape": shape, "nnz": int(matrix.nnz), "factors": f, "threads": threads,
            "seconds_per_iteration": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "objective": losses, "gflops": rates if exact else None, "sgemm_gflops": ceiling,
            "versions_of_rivals": versions(),
        },
    )  # fmt: skip
    del solvers
    gc.collect()


def check_agreement(losses: dict[str, float]) -> None:
    """Stop if methods of a group do not minimize the same thing."""
    residual = {name for name in losses if name in ("lenskit", "simd on lenskit's residuals")}
    for group in (residual, set(losses) - residual):
        values = [losses[name] for name in group]
        if values and max(values) > 1.05 * min(values):
            raise SystemExit(f"objectives differ by more than 5 %: {losses}")


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    from importlib.metadata import version

    return {name: version(name) for name in ("implicit", "irspack", "lenskit") if rivals.installed(name)}


def run_topk(shape: str, f: int, threads: int, repeats: int) -> None:
    """Top-10 with filter for all users from factors of the same fitted model."""
    matrix = synthetic(shape)
    model = hmf.ImplicitALS(f, **IMPLICIT, iterations=5, num_threads=threads, random_state=0, device="cpu").fit(matrix)
    everybody = np.arange(matrix.shape[0])
    runs: dict[str, Callable[[], Any]] = {"hybridmf": lambda: model.recommend(everybody, matrix, N=10)}
    users, items = model.user_factors, model.item_factors

    def bare_product() -> None:
        for start in range(0, len(users), 4096):
            users[start : start + 4096] @ items.T

    runs["sgemm alone"] = bare_product
    if rivals.installed("implicit"):
        import scipy.sparse as sp
        from implicit.cpu.topk import topk

        pattern = sp.csr_matrix(matrix)

        def implicit_topk() -> Any:
            from threadpoolctl import threadpool_limits

            with threadpool_limits(1, user_api="blas"):
                return topk(items, users, 10, filter_query_items=pattern, num_threads=threads)

        ids, _ = model.recommend(everybody[:2000], matrix[:2000], N=10)
        with np.errstate(all="ignore"):
            theirs, _ = topk(items, users[:2000], 10, filter_query_items=pattern[:2000], num_threads=threads)
        same = float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, theirs, strict=True)]))
        assert same > 0.999, same
        runs["implicit"] = implicit_topk
    seconds = alternate(runs, repeats)
    click.echo(
        f"top 10 of {matrix.shape[1]:,} items, filtered, for {matrix.shape[0]:,} users, f = {f}, {threads} threads"
    )
    for name, values in seconds.items():
        click.echo(f"{name:12s} {median(values):8.3f} s {len(users) / median(values):12,.0f} users/s")
    record(
        "cpu",
        {
            "bench": "cpu", "task": "top 10, filtered", "shape": shape, "factors": f, "threads": threads,
            "seconds": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "versions_of_rivals": versions(),
        },
    )  # fmt: skip


def run_scaling(shape: str, factors: tuple[int, ...], repeats: int) -> None:
    """Our exact solver on 1, 2, 4, ... threads."""
    matrix = synthetic(shape)
    cores = hmf.config()["cores"]
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= cores]
    for f in factors:
        runs = {}
        for count in counts:
            model = hmf.ImplicitALS(f, **IMPLICIT, num_threads=count, device="cpu", random_state=0)
            runs[f"{count}"] = rivals.Ours(model, matrix).step
        seconds = alternate(runs, repeats)
        one = median(seconds["1"])
        for name, values in seconds.items():
            click.echo(
                f"f = {f}  {name:>3s} threads {median(values):9.4f} s / iteration   {one / median(values):6.2f} x"
            )
        record(
            "cpu",
            {
                "bench": "cpu", "task": "scaling, implicit exact", "shape": shape, "nnz": int(matrix.nnz), "factors": f,
                "seconds_per_iteration": {name: median(values) for name, values in seconds.items()},
                "speedup": {name: one / median(values) for name, values in seconds.items()},
            },
        )  # fmt: skip


@click.command(help=__doc__)
@click.option("--task", type=click.Choice(["als", "topk", "scaling"]), default="als", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="ml-1m", show_default=True)
@click.option("--factors", type=int, multiple=True, default=(32, 64, 128), show_default=True)
@click.option("--feedback", multiple=True, default=("implicit", "explicit"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(
    task: str, shape: str, factors: tuple[int, ...], feedback: tuple[str, ...], threads: int, repeats: int
) -> None:
    os.environ.setdefault("LK_NUM_THREADS", str(threads))
    if task == "als":
        run_als(shape, factors, threads, repeats, feedback)
    elif task == "topk":
        run_topk(shape, factors[0] if len(factors) == 1 else 64, threads, repeats)
    else:
        run_scaling(shape, factors, repeats)


if __name__ == "__main__":
    main()
