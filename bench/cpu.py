"""ALS, time to a good objective and top-K on the CPU beside every peer that is installed, in turn, on the same data.

    python bench/cpu.py                                      quick: ML-1M shape, all tasks, under 3 minutes on 2 cores
    python bench/cpu.py --profile full                       the tables of docs/performance.md
    python bench/cpu.py --profile full --task scaling --threads 1,2,4,8,16

Tasks: "als", seconds per iteration; "target", seconds to within 2 % (implicit) or 1 % (explicit) of the best objective,
set-up included; "topk"; "scaling", our exact solver over threads; "short", our exact solver on a shop's feedback, where
most rows have fewer entries than factors, in the form chosen for each row and in the primal form, beside CG of the
peers. Peers, and how to build them: README.md beside this file. Equal rank, lambda, alpha, CG steps and threads; how
objectives map: rivals.py.

Answers are checked. Methods called exact must leave an exact half sweep nothing to gain (EXACT_SLACK), approximate
ones little (APPROXIMATE_SLACK), or the run stops. GFLOP/s counts nnz f (f + 1) a half sweep and f^3/3 + 2 f^2 a solve,
and is compared with sgemm measured in the same run.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import rivals
from common import SHAPES, alternate, median, record, sgemm_rate, shop, synthetic, synthetic_counts

import hybridmf as hmf

EXPLICIT = {"regularization": 0.05, "regularization_scaling": "count"}
IMPLICIT = {"regularization": 0.01, "alpha": 1.0}

EXACT_SLACK = 1e-4
"""Share of the objective an exact half sweep may still gain where a method claims to be exact: rounding."""

APPROXIMATE_SLACK = 0.2
"""The same for CG and iALS++ after a few iterations; enough to notice another lambda, alpha or weight."""

CMFREC_EXACT_RANK = 64
"""Highest rank of cmfrec's exact solver here: at 128 it takes half a minute an iteration and changes no ranking."""

LONG_RUN = 100
"""Iterations of exact ALS after which the objective is the best, and at which the search for a target gives up."""

INTERPOLATIONS = 3
"""Whole fits spent on narrowing down how many iterations such a peer needs; each costs as much as the result."""

WITHIN = {"implicit": 0.02, "explicit": 0.01}
"""How near to the best objective the "target" task asks for."""

PROFILES: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {
    "quick": {
        "als": ("ml-1m", (32, 64), 3),
        "target": ("ml-1m", (64,), 3),
        "topk": ("ml-1m", (64,), 3),
        "scaling": ("ml-1m", (64,), 3),
        "short": ("shop", (64, 128), 3),
    },
    "full": {
        "als": ("ml-10m", (32, 64, 128), 3),
        "target": ("ml-10m", (64,), 3),
        "topk": ("ml-20m", (64,), 5),
        "scaling": ("ml-20m", (64,), 5),
        "short": ("shop", (64, 128), 7),
    },
}
"""Shape, ranks and repeats of each task."""

Maker = Callable[[], Any]
"""Makes a solver of rivals.py, set-up included."""


def our_model(kind: str, f: int, threads: int, **options: Any) -> hmf.ImplicitALS | hmf.ExplicitALS:
    """Our estimator of a kind of feedback, with the lambda and alpha every peer gets."""
    common = {"num_threads": threads, "device": "cpu", "random_state": 0}
    if kind == "implicit":
        return hmf.ImplicitALS(f, **IMPLICIT, **common, **options)
    return hmf.ExplicitALS(f, biases=False, **EXPLICIT, **common, **options)


def our_maker(kind: str, matrix: Any, f: int, threads: int) -> Callable[..., Maker]:
    """Makes makers of our solver from its options."""
    return lambda **options: lambda: rivals.Ours(our_model(kind, f, threads, **options), matrix)


def implicit_methods(matrix: Any, f: int, threads: int) -> dict[str, dict[str, Maker]]:
    """Groups of methods that do the same work on implicit feedback; ours first."""
    ours = our_maker("implicit", matrix, f, threads)
    peer = implicit_peer(matrix, f, threads)
    groups: dict[str, dict[str, Maker]] = {
        "implicit exact": {"simd": ours(), "blas3": ours(assembly="blas3"), "bals": ours(assembly="bals")},
        "implicit CG, 3 steps": {"cg": ours(solver="cg", cg_steps=3)},
        "implicit iALS++, 32": {"subspace": ours(solver="subspace", block_size=32)},
    }
    if rivals.installed("implicit"):
        groups["implicit exact"]["implicit"] = peer(rivals.Implicit, False)
        groups["implicit CG, 3 steps"]["implicit"] = peer(rivals.Implicit, True)
    if rivals.installed("irspack"):
        groups["implicit exact"]["irspack"] = peer(rivals.Irspack, "CHOLESKY")
        groups["implicit CG, 3 steps"]["irspack"] = peer(rivals.Irspack, "CG")
        groups["implicit iALS++, 32"]["irspack"] = peer(rivals.Irspack, "IALSPP")
    if rivals.installed("buffalo"):
        if f < rivals.BUFFALO_SUBSPACE_RANK:
            groups["implicit exact"]["buffalo"] = peer(rivals.Buffalo, "llt")
            groups["implicit CG, 3 steps"]["buffalo"] = peer(rivals.Buffalo, "manual_cg")
        groups["implicit iALS++, 32"]["buffalo"] = peer(rivals.Buffalo, "ialspp")
    if rivals.installed("rusket"):
        groups["implicit exact"]["rusket"] = peer(rivals.Rusket, False)
        groups["implicit CG, 3 steps"]["rusket"] = peer(rivals.Rusket, True)
    if f <= 32:  # one block is the exact solver
        del groups["implicit iALS++, 32"]
    return groups


def implicit_peer(matrix: Any, f: int, threads: int) -> Callable[..., Maker]:
    """Makes makers of a peer of implicit feedback from its class and options."""
    return lambda cls, *options: (
        lambda: cls(matrix, f, IMPLICIT["regularization"], IMPLICIT["alpha"], threads, *options)
    )


def explicit_methods(matrix: Any, f: int, threads: int) -> dict[str, dict[str, Maker]]:
    """The same for explicit feedback."""
    ours = our_maker("explicit", matrix, f, threads)
    lam = EXPLICIT["regularization"]
    groups: dict[str, dict[str, Maker]] = {
        "explicit exact": {"simd": ours(), "blas3": ours(assembly="blas3"), "bals": ours(assembly="bals")},
        "explicit CG, 3 steps": {"cg": ours(solver="cg", cg_steps=3)},
    }
    if rivals.installed("lenskit"):
        data = rivals.LenskitData(matrix)
        groups["explicit exact"]["lenskit"] = lambda: rivals.Lenskit(data, f, lam)
    if rivals.installed("cmfrec"):
        if f <= CMFREC_EXACT_RANK:
            groups["explicit exact"]["cmfrec"] = lambda: rivals.Cmfrec(matrix, f, lam, threads, False)
        groups["explicit CG, 3 steps"]["cmfrec"] = lambda: rivals.Cmfrec(matrix, f, lam, threads, True)
    return groups


METHODS = {"implicit": implicit_methods, "explicit": explicit_methods}


# ------------------------------------------------------------------------------------------ seconds per iteration


def run_als(
    shape: str, factors: tuple[int, ...], threads: int, repeats: int, feedback: tuple[str, ...], scale: float
) -> None:
    """Time every group of methods and record a line for each."""
    matrix = synthetic(shape, scale=scale)
    if scale != 1:
        shape = f"{shape} x {scale:g}"
    ceiling = sgemm_rate(threads)
    click.echo(
        f"{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads; "
        f"sgemm {ceiling:.0f} GFLOP/s, {sgemm_rate(1):.0f} on one"
    )
    for f in factors:
        for kind in feedback:
            judge = rivals.Judge(our_model(kind, f, threads), matrix)
            for group, makers in METHODS[kind](matrix, f, threads).items():
                run_group(shape, matrix, f, threads, repeats, group, makers, ceiling, judge)


def run_short(factors: tuple[int, ...], threads: int, repeats: int, feedback: tuple[str, ...]) -> None:
    """Time our exact solver on short rows, in both forms, beside the peers' CG."""
    matrix = shop()
    ceiling = sgemm_rate(threads)
    for f, kind in ((f, kind) for f in factors for kind in feedback):
        ours = our_maker(kind, matrix, f, threads)
        makers = {"auto": ours(), "primal": ours(row_form="primal")}
        if kind == "implicit":
            peer = implicit_peer(matrix, f, threads)
            if rivals.installed("implicit"):
                makers["implicit"] = peer(rivals.Implicit, True)
            if rivals.installed("irspack"):
                makers["irspack"] = peer(rivals.Irspack, "CG")
            if rivals.installed("rusket"):
                makers["rusket"] = peer(rivals.Rusket, True)
        judge = rivals.Judge(our_model(kind, f, threads), matrix)
        run_group("shop", matrix, f, threads, repeats, f"{kind}, short rows", makers, ceiling, judge)


def run_group(
    shape: str, matrix: Any, f: int, threads: int, repeats: int, group: str, makers: dict[str, Maker], ceiling: float,
    judge: rivals.Judge,
) -> None:  # fmt: skip
    """One group: the same iterations of each method in turn, then their objectives."""
    solvers = {name: make() for name, make in makers.items()}
    runs = {name: getattr(solver, "step", None) or solver.seconds_per_iteration for name, solver in solvers.items()}
    seconds = alternate(runs, repeats)
    losses, slack = {}, {}
    for name, solver in solvers.items():
        if hasattr(solver, "fit"):
            solver.fit(repeats + 1)  # as many iterations as the others have done
        losses[name], slack[name] = judge.loss(solver.factors()), judge.slack(solver.factors())
    exact = "exact" in group
    check_answers(slack, EXACT_SLACK if exact else APPROXIMATE_SLACK)
    fastest_rival = min((median(seconds[name]) for name in seconds if name in rivals.PEERS), default=None)
    plan = solvers[next(iter(solvers))].plan
    click.echo(
        f"\n{group}, f = {f}\n"
        f"{'':10s} s / iteration   fastest rival / this   GFLOP/s   of sgemm     objective     slack"
    )
    rates = {}
    for name, values in seconds.items():
        ratio = f"{fastest_rival / median(values):22.2f}" if fastest_rival else " " * 22
        rates[name] = plan.flops_per_iteration / median(values) / 1e9
        rate = f"{rates[name]:9.1f} {rates[name] / ceiling:9.0%}" if exact else " " * 19
        click.echo(f"{name:10s} {median(values):13.4f} {ratio} {rate} {losses[name]:13.6g} {slack[name]:9.1e}")
    record(
        "cpu",
        {
            "bench": "cpu", "task": group, "shape": shape, "nnz": int(matrix.nnz), "factors": f, "threads": threads,
            "seconds_per_iteration": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "objective": losses, "slack": slack, "gflops": rates if exact else None, "sgemm_gflops": ceiling,
            "versions_of_rivals": versions(),
        },
    )  # fmt: skip
    del solvers, runs
    gc.collect()


def check_answers(slack: dict[str, float], tolerance: float) -> None:
    """Stop if a method does not minimize our objective."""
    wrong = {name: value for name, value in slack.items() if not value <= tolerance}
    if wrong:
        raise SystemExit(f"an exact half sweep lowers the objective by more than {tolerance:g} of it: {wrong}")


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    from importlib.metadata import version

    return {name: version(name) for name in rivals.PEERS if rivals.installed(name)}


# ------------------------------------------------------------------------------------------ seconds to an objective


@dataclass
class Contestant:
    """A way to a good objective.

    Attributes
    ----------
    fit : callable
        ``fit(iterations)``: all that is timed, from the library's own input format to factors.
    make : callable, optional
        A stepwise twin of `fit`, which finds the number of iterations in one run.
    give_up : int
        Iterations after which it is not waited for any longer.
    """

    fit: Callable[[int], Any]
    make: Maker | None = None
    give_up: int = LONG_RUN
    objectives: dict[int, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    @classmethod
    def stepwise(cls, make: Maker) -> Contestant:
        """A peer that goes step by step."""

        def fit(iterations: int) -> Any:
            solver = make()
            for _ in range(iterations):
                solver.step()
            return solver

        return cls(fit, make)

    @classmethod
    def ours(cls, kind: str, matrix: Any, f: int, threads: int, **options: Any) -> Contestant:
        """Our estimator as users call it."""
        return cls(
            lambda iterations: our_model(kind, f, threads, iterations=iterations, **options).fit(matrix),
            our_maker(kind, matrix, f, threads)(**options),
        )

    def iterations_to(self, target: float, judge: rivals.Judge) -> int | None:
        """Fewest iterations to an objective of `target`, none if `give_up` do not suffice; records what it sees."""
        if self.make is not None:
            solver = self.make()
            for iteration in range(1, self.give_up + 1):
                started = time.perf_counter()
                solver.step()
                self.step_seconds.append(time.perf_counter() - started)
                self.objectives[iteration] = judge.loss(solver.factors())
                if self.objectives[iteration] <= target:
                    return iteration
            return None
        return self._search(target, judge)

    def _search(self, target: float, judge: rivals.Judge) -> int | None:
        """The same for peers that only fit as a whole: doubled until it suffices, then interpolated a few times."""
        failed, reached = 0, 1
        while not self._reaches(reached, target, judge):
            failed, reached = reached, 2 * reached
            if failed >= self.give_up:
                return None
        for _ in range(INTERPOLATIONS):
            if reached - failed <= 1:
                break
            # the logarithm of the objective as linear in that of the number of iterations
            above, below = (np.log(self.objectives[count] / target) for count in (failed, reached))
            guess = int(np.ceil(failed * (reached / failed) ** (above / (above - below))))
            guess = min(max(guess, failed + 1), reached - 1)
            if self._reaches(guess, target, judge):
                reached = guess
            else:
                failed = guess
        seconds = [_seconds(lambda count=count: self.fit(count)) for count in (1, reached)]
        self.step_seconds = [(seconds[1] - seconds[0]) / max(1, reached - 1)]
        return reached

    def loss_after(self, iterations: int, judge: rivals.Judge) -> float:
        """The final objective: recorded if the fit goes step by step, else that of one more fit, which may vary."""
        return self.objectives[iterations] if self.make else judge.loss(self.fit(iterations).factors())

    def _reaches(self, iterations: int, target: float, judge: rivals.Judge) -> bool:
        self.objectives[iterations] = judge.loss(self.fit(iterations).factors())
        return self.objectives[iterations] <= target


def implicit_contestants(matrix: Any, f: int, threads: int) -> dict[str, Contestant]:
    """Ways to a good implicit objective; ours first."""
    peer = implicit_peer(matrix, f, threads)
    contestants = {
        "ours, exact": Contestant.ours("implicit", matrix, f, threads),
        "ours, CG 3": Contestant.ours("implicit", matrix, f, threads, solver="cg", cg_steps=3),
        "ours, CG 2": Contestant.ours("implicit", matrix, f, threads, solver="cg", cg_steps=2),
        "ours, CG 3 balanced": Contestant.ours("implicit", matrix, f, threads, solver="cg", cg_steps=3, balance=True),
        "ours, subspace 16": Contestant.ours("implicit", matrix, f, threads, solver="subspace", block_size=16),
    }
    if rivals.installed("irspack"):
        for name, solver in (("exact", "CHOLESKY"), ("CG 3", "CG"), ("iALS++ 32", "IALSPP")):
            contestants[f"irspack, {name}"] = Contestant.stepwise(peer(rivals.Irspack, solver))
    if rivals.installed("implicit"):
        contestants["implicit, CG 3"] = Contestant.stepwise(peer(rivals.Implicit, True))
    if rivals.installed("rusket"):
        contestants["rusket, CG 3"] = Contestant(lambda iterations: peer(rivals.Rusket, True)().fit(iterations))
    if rivals.installed("buffalo") and f < rivals.BUFFALO_SUBSPACE_RANK:
        contestants["buffalo, CG 3"] = Contestant.stepwise(peer(rivals.Buffalo, "manual_cg"))
    return contestants


def explicit_contestants(matrix: Any, f: int, threads: int) -> dict[str, Contestant]:
    """Ways to a good explicit objective; ours first."""
    lam = EXPLICIT["regularization"]
    contestants = {
        "ours, exact": Contestant.ours("explicit", matrix, f, threads),
        "ours, CG 3": Contestant.ours("explicit", matrix, f, threads, solver="cg", cg_steps=3),
        "ours, exact balanced": Contestant.ours("explicit", matrix, f, threads, balance=True),
        "ours, CG 3 balanced": Contestant.ours("explicit", matrix, f, threads, solver="cg", cg_steps=3, balance=True),
    }
    if rivals.installed("lenskit"):
        data = rivals.LenskitData(matrix)
        contestants["lenskit, exact"] = Contestant.stepwise(lambda: rivals.Lenskit(data, f, lam))
    if rivals.installed("cmfrec"):
        contestants["cmfrec, CG 3"] = Contestant(rivals.Cmfrec(matrix, f, lam, threads, True).fit)
    if rivals.installed("libmf"):
        for rate in (0.1, 0.15):  # its default, and one that got there faster
            name = f"LIBMF, rate {rate:g}"
            contestants[name] = Contestant(rivals.Libmf(matrix, f, lam, threads, rate).fit)
    return contestants


CONTESTANTS = {"implicit": implicit_contestants, "explicit": explicit_contestants}


def run_target(shape: str, f: int, threads: int, repeats: int, feedback: tuple[str, ...]) -> None:
    """Seconds to near the best objective, from the input format of each library, everything after it included."""
    for kind in feedback:
        matrix = synthetic_counts(shape) if kind == "implicit" else synthetic(shape)
        judge = rivals.Judge(our_model(kind, f, threads), matrix)
        reference = our_maker(kind, matrix, f, threads)(balance=True)()  # the lowest of all methods
        for _ in range(LONG_RUN):
            reference.step()
        best = judge.loss(reference.factors())
        target = (1 + WITHIN[kind]) * best
        del reference
        contestants = CONTESTANTS[kind](matrix, f, threads)
        counts = {name: each.iterations_to(target, judge) for name, each in contestants.items()}
        report_target(shape, matrix, kind, f, threads, repeats, judge, best, contestants, counts)


def report_target(
    shape: str, matrix: Any, kind: str, f: int, threads: int, repeats: int, judge: rivals.Judge, best: float,
    contestants: dict[str, Contestant], counts: dict[str, int | None],
) -> None:  # fmt: skip
    """Time the fits with the iterations found, in turn, and record a line."""
    runs = {
        name: lambda each=contestants[name], count=count: each.fit(count) for name, count in counts.items() if count
    }
    seconds = alternate({name: lambda run=run: float(_seconds(run)) for name, run in runs.items()}, repeats)
    excess = {name: contestants[name].loss_after(counts[name], judge) / best - 1 for name in runs}
    rival = min((median(values) for name, values in seconds.items() if not name.startswith("ours")), default=None)
    task = f"{kind}, seconds to within {WITHIN[kind]:.0%} of the best objective"
    click.echo(
        f"\n{task}, {shape}, f = {f}, {threads} threads; best {best:.6g} after {LONG_RUN} exact iterations\n"
        f"{'':20s} iterations  s / iteration   seconds   fastest rival / this   above best"
    )
    for name, count in counts.items():
        if count is None:
            above = min(contestants[name].objectives.values()) / best - 1
            click.echo(f"{name:20s} not within {LONG_RUN} iterations: {above:.1%} above the best")
            continue
        ratio = f"{rival / median(seconds[name]):22.2f}" if rival else " " * 22
        click.echo(
            f"{name:20s} {count:10d} {median(contestants[name].step_seconds):14.4f} {median(seconds[name]):9.3f} "
            f"{ratio} {excess[name]:12.2%}"
        )
    record(
        "cpu",
        {
            "bench": "cpu", "task": task, "shape": shape, "nnz": int(matrix.nnz), "factors": f, "threads": threads,
            "best_objective": best, "iterations": counts,
            "seconds": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "seconds_per_iteration": {name: median(each.step_seconds) for name, each in contestants.items()
                                      if each.step_seconds},
            "above_best": excess,
            "objective_by_iteration": {name: each.objectives for name, each in contestants.items()},
            "versions_of_rivals": versions(), "libmf_rebuilt": libmf_rebuilt() if kind == "explicit" else None,
        },
    )  # fmt: skip


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def libmf_rebuilt() -> bool | None:
    """Whether LIBMF is the build of README.md; None without LIBMF."""
    if not rivals.installed("libmf"):
        return None
    return rivals.Libmf(synthetic("ml-1m")[:10], 8, 0.1, 1).is_rebuilt()


# ------------------------------------------------------------------------------------------ top-K and scaling


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
        f"\ntop 10 of {matrix.shape[1]:,} items, filtered, for {matrix.shape[0]:,} users, f = {f}, {threads} threads"
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


def run_scaling(
    shape: str, factors: tuple[int, ...], counts: tuple[int, ...], repeats: int, feedback: tuple[str, ...]
) -> None:
    """Our exact solver on several numbers of threads."""
    matrix = synthetic(shape)
    for kind, f in ((kind, f) for kind in feedback for f in factors):
        runs = {f"{count}": rivals.Ours(our_model(kind, f, count), matrix).step for count in counts}
        seconds = alternate(runs, repeats)
        one = median(seconds[f"{counts[0]}"]) * counts[0]  # as good as one thread, if one is not asked for
        click.echo(f"\nscaling, {kind} exact, {shape}, f = {f}")
        for name, values in seconds.items():
            click.echo(f"{name:>3s} threads {median(values):9.4f} s / iteration   {one / median(values):6.2f} x")
        record(
            "cpu",
            {
                "bench": "cpu", "task": f"scaling, {kind} exact", "shape": shape, "nnz": int(matrix.nnz), "factors": f,
                "seconds_per_iteration": {name: median(values) for name, values in seconds.items()},
                "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
                "speedup": {name: one / median(values) for name, values in seconds.items()},
            },
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ command line


def thread_counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Counts of "1,2,4", ascending."""
    try:
        return tuple(sorted({int(count) for count in value.split(",")}))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="quick", show_default=True)
@click.option("--task", type=click.Choice(list(PROFILES["quick"])), multiple=True, help="Default: all.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="Default: the profile's.")
@click.option("--factors", type=int, multiple=True, help="Default: the profile's.")
@click.option("--feedback", type=click.Choice(list(METHODS)), multiple=True, default=tuple(METHODS), show_default=True)
@click.option("--threads", default="2", callback=thread_counts, show_default=True,
              help="The highest is used; scaling takes each, powers of two up to all cores if it is one.")  # fmt: skip
@click.option("--repeats", type=int, help="Default: the profile's.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Share of a shape's users and items, of als.")
def main(
    profile: str, task: tuple[str, ...], shape: str | None, factors: tuple[int, ...], feedback: tuple[str, ...],
    threads: tuple[int, ...], repeats: int | None, scale: float,
) -> None:  # fmt: skip
    most = threads[-1]
    os.environ.setdefault("LK_NUM_THREADS", str(most))
    for name in task or PROFILES[profile]:
        its_shape, its_factors, its_repeats = PROFILES[profile][name]
        where, ranks, times = shape or its_shape, factors or its_factors, repeats or its_repeats
        if name == "als":
            run_als(where, ranks, most, times, feedback, scale)
        elif name == "short":
            run_short(ranks, most, times, feedback)
        elif name == "scaling":
            cores = hmf.config()["cores"]
            powers = tuple(count for count in (1, 2, 4, 8, 16, 32, 64) if count <= cores)
            run_scaling(where, ranks, threads if len(threads) > 1 else powers, times, feedback)
        else:
            for f in ranks:
                if name == "target":
                    run_target(where, f, most, times, feedback)
                else:
                    run_topk(where, f, most, times)


if __name__ == "__main__":
    main()
