"""Cost of ratings or factors outside of the device's memory: milliseconds per iteration.

    python bench/out_of_core.py                        on a GPU, Netflix's shape: about 2 minutes on an H200
    python bench/out_of_core.py --away factors         factors on the host or in files, MSD's shape: a minute on an H200
    python bench/out_of_core.py --device cpu           on the CPU, ML-10M's shape: about 2 minutes on 2 cores
    python bench/out_of_core.py --profile full         more ranks, implicit feedback too
    python bench/out_of_core.py --folder /fast/disk    where the store, or files of factors, go (removed at the end)

Alternatives take turns on the same factors: all ratings in the device's memory; slabs from the memory of the host;
slabs of a store on the disk, which the page cache serves where it is large enough (`--cold` drops the files from it
before each iteration, by POSIX_FADV_DONTNEED). All rows are in the primal form, which is the one of slabs. Before
anything is timed, one iteration of each has to end with the same bits. "ratio" is against the ratings in the device's
memory.

With `--away factors` one alternative has a limit of memory below what the factors need, so that they come from the host
as a whole in each half sweep, one has them in files of `--folder` under the same limit, as on a host without room for
them, and one a limit below either side, so that parts of the users take turns. Each first runs an iteration with
HYBRIDMF_GPU_MEMORY_LIMIT at its limit, which no allocation may pass. The first two have to end with the same bits as a
fit in the GPU's memory, the last with its objective to five digits and its factors to rounding. The page cache serves
what it has room for of the files: where the machine has much memory, that is all of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from common import alternate, median, record, synthetic, synthetic_counts

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.objective import State
from hybridmf.core.scratch import SCRATCH_DIR, find_room
from hybridmf.data.store import StoreMatrix
from hybridmf.device.cuda import MEMORY_LIMIT
from hybridmf.errors import DeviceError
from hybridmf.model.training import LocalRatings
from hybridmf.plan.als_gpu import STREAM_SLAB
from hybridmf.plan.make import make_plan
from hybridmf.plan.solver import Solver
from hybridmf.plan.types import Plan

CASES = {
    "quick": [("explicit", 100)],
    "full": [("explicit", 64), ("explicit", 100), ("implicit", 64), ("implicit", 100)],
}
CPU_FACTORS = 32
AWAY_SHAPE = "msd"
"""Where factors are away: many users and items for its entries, so that factors are most of the problem."""
SHAPES = {"cuda": "netflix", "cpu": "ml-10m"}


def model_of(feedback: str, factors: int, device: str) -> Any:
    """The estimator that is measured. Slabs have no rows in the dual form, so those in memory are not to have any."""
    cls = hmf.ExplicitALS if feedback == "explicit" else hmf.ImplicitALS
    return cls(factors, device=device, row_form="primal", random_state=0)


def data_of(feedback: str, shape: str, device: str) -> Any:
    """Ratings of a shape, CSR."""
    if device == "cpu":
        return synthetic(shape) if feedback == "explicit" else synthetic_counts(shape)
    from gpu_data import synthetic_gpu

    return synthetic_gpu(shape, implicit=feedback == "implicit")


def plans(model: Any, store: StoreMatrix) -> dict[str, Plan]:
    """The plan of each alternative, with the choices that limited memory would force."""
    objective, settings = model._objective(), model._settings()
    memory = make_plan(objective, settings, store.shape, store.nnz)
    disk = make_plan(objective, settings, store.shape, store.nnz, slab=store.largest_slab)
    if memory.gpu is None:
        return {"memory": memory, "disk": disk}
    streamed = disk.changed(streamed="disk", resident=False, slab=store.largest_slab)
    host = memory.changed(streamed="host", slab=STREAM_SLAB)
    return {"memory": memory, "host": host, "disk": streamed}


def solvers(
    model: Any, matrix: Any, store: StoreMatrix, chosen: dict[str, Plan]
) -> tuple[dict[str, Solver], dict[str, float]]:
    """A solver of each alternative at the same initial factors, and the seconds it took to set up."""
    found, seconds = {}, {}
    for name, plan in chosen.items():
        ratings = LocalRatings(model, store.store if name == "disk" else matrix).on_host(plan)
        state = model._initial_state(ratings, plan, model._objective())
        started = time.perf_counter()
        found[name] = model._solver(plan, model._objective(), ratings, state, 0)
        seconds[name] = time.perf_counter() - started
    return found, seconds


def iterate(solver: Solver) -> None:
    """One iteration, to its end."""
    common.iterate(solver)
    device = getattr(solver, "device", None)
    if device is not None:
        device.synchronize()


def same_bits(found: dict[str, Solver]) -> None:
    """One iteration each; raise unless all have the same factors."""
    for solver in found.values():
        iterate(solver)
    first, *others = (solver.state for solver in found.values())
    for name, other in zip(list(found)[1:], others, strict=True):
        same = [np.array_equal(first.side(side).matrix, other.side(side).matrix) for side in ("user", "item")]
        if not all(same):
            raise click.ClickException(f"slabs from {name} give other factors than ratings in memory: not measured")


def forget(folder: Path) -> None:
    """Drop the files of a store from the page cache, so that they come from the disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(feedback: str, factors: int, device: str, shape: str, folder: str, repeats: int, cold: bool) -> None:
    """One case: convert, check, time, print, record."""
    matrix, model = data_of(feedback, shape, device), model_of(feedback, factors, device)
    with tempfile.TemporaryDirectory(dir=folder, prefix="hybridmf-bench-") as place:
        started = time.perf_counter()
        store = hmf.convert(matrix, Path(place) / "store")
        converted = time.perf_counter() - started
        stored = StoreMatrix(store, "user", np.float32, feedback == "implicit")
        chosen = plans(model, stored)
        found, set_up = solvers(model, matrix, stored, chosen)
        same_bits(found)
        runs: dict[str, Callable[[], Any]] = {name: lambda s=solver: iterate(s) for name, solver in found.items()}  # type: ignore[misc]
        if cold:

            def from_the_disk() -> float:
                forget(store.path)
                begun = time.perf_counter()
                iterate(found["disk"])
                return time.perf_counter() - begun

            runs["disk, cold"] = from_the_disk
        seconds = alternate(runs, repeats)
    base = median(seconds["memory"])
    spec = chosen["memory"].gpu
    for name, times in seconds.items():
        one, slab = median(times), chosen[name.split(",")[0]].slab
        click.echo(f"{shape:8} {feedback:8} {factors:4}  {name:10} {1e3 * one:9.1f} ms  ratio {one / base:5.2f}")
        line = {
            "task": "out of core", "device": device if spec is None else str(spec), "shape": shape, "nnz": matrix.nnz,
            "feedback": feedback, "factors": factors, "from": name, "ms": [1e3 * each for each in times],
            "ratio": one / base, "bytes_per_iteration": 16 * matrix.nnz, "slab": slab,
            "set_up_s": set_up.get(name), "convert_s": converted,
        }  # fmt: skip
        record("out_of_core", line)


def limits_of(matrix: Any, plan: Plan) -> dict[str, int]:
    """Bytes that a fit with factors on the GPU cannot do with, and ones in which not even the users' have room."""
    width = -(-plan.rank // 4) * 16
    users, items = (rows * width for rows in matrix.shape)
    whole = int(0.9 * (users + items + max(users, items)))
    return {"factors": whole, "factors-on-disk": whole, "turns": int(0.6 * max(users, items))}


def limited_plan(model: Any, matrix: Any, limit: int | None) -> Plan:
    """The plan of a fit on a GPU with this much memory."""
    model.set_params(gpu_memory_limit=limit)
    return make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz)


def disk_plan(model: Any, matrix: Any, limit: int, folder: str) -> Plan:
    """The same if the factors exceed host memory and fit in `folder`."""
    needed, measured = limited_plan(model, matrix, limit).host_bytes, system.available_memory
    with environment(SCRATCH_DIR, folder):
        try:
            system.available_memory = lambda: needed - 1
            plan = limited_plan(model, matrix, limit)
        finally:
            system.available_memory = measured
    if plan.factors_on != "disk":
        raise click.ClickException(
            f"{folder!r} cannot have files of factors, give --folder: {find_room([folder], 0)[1]}"
        )
    return plan


def run_enforced(model: Any, matrix: Any, plan: Plan, limit: int) -> None:
    """One iteration in which no allocation may pass the limit."""
    with environment(MEMORY_LIMIT, str(limit)):
        iterate(solver_from(model, matrix, plan))


def solver_from(model: Any, matrix: Any, plan: Plan) -> Solver:
    """The solver of a plan."""
    ratings, objective = LocalRatings(model, matrix).on_host(plan), model._objective()
    return model._solver(plan, objective, ratings, model._initial_state(ratings, plan, objective), 0)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def differences(name: str, expected: tuple[State, float], found: tuple[State, float]) -> dict[str, float]:
    """Relative errors of objective and factors; raise if they are more than they should be."""
    errors = {"objective": abs(found[1] / expected[1] - 1)}
    for side in ("user", "item"):
        one, other = (result[0].side(side).matrix for result in (expected, found))  # type: ignore[arg-type]
        errors[side] = float(np.linalg.norm(other - one) / np.linalg.norm(one))
    near = max(errors.values()) == 0 if name != "turns" else errors["objective"] < 1e-5 and max(errors.values()) < 1e-2
    if not near:
        raise click.ClickException(f"factors away, {name}: relative errors {errors}: not measured")
    return errors


def seconds_of(solver: Solver, repeats: int) -> list[float]:
    """Of so many iterations."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        iterate(solver)
        found.append(time.perf_counter() - started)
    return found


def measure_factors(feedback: str, factors: int, shape: str, folder: str, repeats: int) -> None:
    """Factors in the GPU's memory, on the host, in files, and on the host in turns: check, time, print, record."""
    matrix, model = data_of(feedback, shape, "cuda"), model_of(feedback, factors, "cuda")
    memory = limited_plan(model, matrix, None)
    limits = limits_of(matrix, memory)
    chosen = {"memory": memory} | {name: limited_plan(model, matrix, limit) for name, limit in limits.items()}
    chosen["factors-on-disk"] = disk_plan(model, matrix, limits["factors-on-disk"], folder)
    for name, limit in limits.items():
        turns = [half.turns for half in chosen[name].scale.halves.values()] if chosen[name].offloaded else []
        if not turns or (max(turns) > 1) != (name == "turns"):
            raise click.ClickException(f"{name}: {limit} bytes have another plan:\n{chosen[name]}")
        run_enforced(model, matrix, chosen[name], limit)
    expected: Any = None
    base = 0.0
    for name, plan in chosen.items():  # one after the other: memory of the host is page-locked for one of them
        started = time.perf_counter()
        solver = solver_from(model, matrix, plan)
        set_up = time.perf_counter() - started
        iterate(solver)
        found = solver.state.on_host(), solver.objective_value()
        expected = expected or found
        errors, each = differences(name, expected, found), seconds_of(solver, repeats)
        del solver, found
        one = median(each)
        base = base or one
        click.echo(f"{shape:8} {feedback:8} {factors:4}  {name:10} {1e3 * one:9.1f} ms  ratio {one / base:5.2f}")
        line = {
            "task": "factors away", "device": str(plan.gpu), "shape": shape, "nnz": matrix.nnz, "feedback": feedback,
            "factors": factors, "from": name, "ms": [1e3 * second for second in each], "ratio": one / base,
            "limit": limits.get(name), "planned_bytes": plan.total_bytes, "host_bytes": plan.host_bytes,
            "disk_bytes": plan.disk_bytes,
            "set_up_s": set_up, "errors": errors, "predicted_s": None if plan.scale is None else plan.scale.seconds,
        }  # fmt: skip
        record("out_of_core", line)


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(CASES)), default="quick", show_default=True)
@click.option("--device", type=click.Choice(list(SHAPES)), default="cuda", show_default=True)
@click.option("--shape", help="Of bench/common.py on the CPU, of bench/gpu_data.py on a GPU.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False), help="[default: the system's temporary one]")
@click.option("--cold", is_flag=True, help="Also with the files out of the page cache.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--away", type=click.Choice(["ratings", "factors"]), default="ratings", show_default=True)
def main(profile: str, device: str, shape: str | None, folder: str | None, cold: bool, repeats: int, away: str) -> None:
    if away == "factors" and device == "cpu":
        raise click.UsageError("factors are away from GPUs only; use --device cuda")
    for feedback, factors in CASES[profile]:
        try:
            if away == "factors":
                measure_factors(feedback, factors, shape or AWAY_SHAPE, folder or tempfile.gettempdir(), repeats)
                continue
            rank = CPU_FACTORS if device == "cpu" else factors
            place = folder or tempfile.gettempdir()
            measure(feedback, rank, device, shape or SHAPES[device], place, repeats, cold)
        except DeviceError as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
