"""MSGD's evidence again (Li, Li, An, Li, IEEE TPDS 2017): figs. 9 to 16.

    python bench/paper_msgd.py                                 on the CPU: ML-1M shape; about a minute on 2 cores
    python bench/paper_msgd.py --profile full                  on the CPU: ML-10M's shape, r up to 512
    python bench/paper_msgd.py --device cuda                   ML-20M's shape, on a GPU and the CPU beside it
    python bench/paper_msgd.py --device cuda --profile full    Netflix's as well
    python bench/paper_msgd.py --render                        docs/evidence/msgd.md from bench/results/paper_msgd.jsonl

Tasks on the CPU: "sequential" (fig. 9), an epoch of plain SGD and of MSGD on one core over the rank r; "cores" (fig.
15), an iteration of each method on 1, 2, 4 ... cores. On a GPU: "reduction" (fig. 10), the paper's kernel with and
without barriers in the last steps of a product; "transfer" (fig. 11), an epoch beside the copies to the GPU and back;
"speedup" (figs. 12 and 13), the paper's kernel with 4 to 32 blocks a multiprocessor, and what fits run, over MSGD on
one core; "ordering" (fig. 16), an epoch of the four combinations of orientations. On both: "convergence" (fig. 14),
test RMSE over seconds. The paper's kernel is bench/msgd_blocks.cu: a block of r threads moves a row. Its result is
compared with float64 before it is timed. "ordering" has four variants: the kernels of fits as a fit launches them, with
blocks for long rows in every centralized pass, without any, and the paper's kernels (Algs. 2 and 3 as printed).
"occupancy" (Table 1): registers and shared memory from the compiler, and the blocks that they leave room for.

"convergence" is in float64, as in the paper, unless --precision float32 is given; batch-Hogwild is in float32 in any
case. Methods with a learning rate race at each of the multiples of their default in `RATES`, and the page shows the one
that first reaches the RMSE that all methods reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import paper_common
from common import alternate, median
from gpu import release, timed, wall_ms
from paper_common import Line, Recorder
from paper_race import Split, draw_race, iterate, make_solver, race, race_table, seconds_to, usual

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Side, other_side
from hybridmf.core.validate import csr_arrays
from hybridmf.gpu.launch import constant_texts, program, source_text
from hybridmf.gpu.sgd import LAYOUTS, THREADS, BlockedConfig, GpuEpochs
from hybridmf.plan.epochs import GridBlock, terms_at
from hybridmf.plan.sgd import DEFAULT_RATES, LONG_ROW, stored_width

NAME = "paper_msgd"
LAMBDA = 0.05
KERNEL = Path(__file__).with_name("msgd_blocks.cu")

BLOCKS_PER_SM = (4, 8, 16, 32)
"""The paper's 52 to 416 blocks on 13 multiprocessors, and 60 to 480 on 15."""

CHECKED_ENTRIES = 2000
"""Rows of up to so many entries are repeated in float64."""

TOLERANCE = 2e-4
"""Of a row after so many updates in float32, of its largest element."""

RATES = (0.5, 1.0, 2.0)
"""Learning rates of "convergence", in multiples of the default."""

COLUMN_BLOCKS_PER_SM = 2
"""Blocks of Alg. 2 on a multiprocessor, all of which must be resident: 1,024 threads at r = 512."""

NEVER = 1 << 40
"""Length of a long row that no row has."""


@dataclass(frozen=True)
class Profile:
    """What is measured on what.

    Attributes
    ----------
    shapes : tuple of (str, float)
        Name and scale.
    ranks : tuple of int
        The paper's r.
    factors : int
        Of "convergence" and "cores".
    epochs : int
    seconds : float
        A method's clock in "convergence".
    repeats : int
    budget : float
        Seconds of the whole command.
    """

    shapes: tuple[tuple[str, float], ...]
    ranks: tuple[int, ...]
    factors: int
    epochs: int
    seconds: float
    repeats: int
    budget: float


RANKS = (32, 64, 128, 256, 512)
PROFILES = {
    ("cpu", "quick"): Profile((("ml-1m", 1.0),), (32, 64, 128), 32, 15, 5.0, 2, 150.0),
    ("cpu", "full"): Profile((("ml-10m", 1.0),), RANKS, 128, 30, 10.0, 2, 240.0),
    ("cuda", "quick"): Profile((("ml-20m", 1.0),), RANKS, 128, 20, 5.0, 2, 130.0),
    ("cuda", "full"): Profile((("ml-20m", 1.0), ("netflix", 1.0)), RANKS, 128, 30, 40.0, 3, 900.0),
}


@dataclass
class Session:
    """What the tasks share."""

    recorder: Recorder
    device: Any
    data: Split
    profile: Profile
    threads: int
    precision: str = "float64"

    def note(self, task: str, line: Line) -> None:
        """Record a line of the data at hand."""
        self.recorder.note(task, self.data.line | line)

    def case(self, name: str, run: Callable[[], None]) -> None:
        """Run what there is time for; failures are named at the end."""
        whole = f"{name}, {self.data.name}"
        if self.recorder.has_time(whole):
            with self.recorder.case(whole):
                run()
            if self.device is not None:
                release(self.device)


def sgd(r: int, device: str, **options: Any) -> hmf.SGD:
    """A model of rank r at the defaults of its schedule."""
    return hmf.SGD(r, **({"regularization": LAMBDA, "biases": False, "device": device, "random_state": 0} | options))


def epoch_ms_cpu(models: dict[str, Any], data: Split, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of iterations of each model, in turn."""
    solvers = {name: make_solver(model, data) for name, model in models.items()}
    runs = {name: (lambda solver=solver: iterate(solver)) for name, solver in solvers.items()}
    return {name: [1e3 * value for value in values] for name, values in alternate(runs, repeats).items()}


# ------------------------------------------------------------------------------------------ fig. 9


def run_sequential(session: Session) -> None:
    """Plain SGD (Hogwild! on one thread) and MSGD, one core."""
    for r in session.profile.ranks:
        session.case(f"sequential, {r}", lambda r=r: measure_sequential(session, r))  # type: ignore[misc]


def measure_sequential(session: Session, r: int) -> None:
    """One rank."""
    models = {
        "SGD": sgd(r, "cpu", schedule="hogwild", num_threads=1),
        "MSGD": sgd(r, "cpu", schedule="msgd", num_threads=1),
    }
    times = epoch_ms_cpu(models, session.data, session.profile.repeats)
    found = {name: paper_common.spread(values) for name, values in times.items()}
    session.note("sequential", {"factors": r, "ms": found})
    click.echo(f"sequential, r = {r}: SGD {found['SGD']['median']:.1f} ms, MSGD {found['MSGD']['median']:.1f} ms")


def one_core_ms(session: Session, r: int) -> float:
    """Milliseconds of an epoch of MSGD on one core, measured once."""
    if r not in ONE_CORE:
        solver = make_solver(sgd(r, "cpu", schedule="msgd", num_threads=1), session.data)
        started = time.perf_counter()
        iterate(solver)  # seconds long: no warm-up
        ONE_CORE[r] = 1e3 * (time.perf_counter() - started)
    return ONE_CORE[r]


ONE_CORE: dict[int, float] = {}
"""Milliseconds by rank, of the data at hand."""

# ------------------------------------------------------------------------------------------ the paper's kernel


def kernel_source() -> str:
    """The kernel's text with its header in place."""
    return KERNEL.read_text().replace('#include "common.cuh"', source_text("common.cuh"))


def kernel_constants(r: int, warp_sync: bool) -> tuple[str, ...]:
    """Of the paper's kernels."""
    return constant_texts({"RANK": r, "WARP_SYNC": warp_sync, "REAL": np.dtype(np.float32)})


class BlockedEpoch:
    """An epoch by the paper's kernels: the items with the users fixed, then the users.

    Attributes
    ----------
    tables : dict of arrays, shape (n, r)
    ordering : str
        As of `SGD`: a pass is Alg. 3 where it iterates over the rows that it updates, otherwise Alg. 2.
    """

    def __init__(self, device: Any, data: Split, r: int, warp_sync: bool, ordering: str = "mixed") -> None:
        self.device, self.r, self.data, self.ordering = device, r, data, LAYOUTS[ordering]
        self.kernels = {
            name: device.kernel(kernel_source(), name, kernel_constants(r, warp_sync))
            for name in ("msgd_blocks", "msgd_columns")
        }
        self.arrived = device.zeros(1, np.uint64)
        model = sgd(r, "cuda", schedule="msgd")
        solver: Any = make_solver(model, data)
        self.rate = terms_at(solver.method, solver.objective, 0.0, 0).rate
        self.start = {side: solver.state.side(side).matrix for side in SIDES}
        self.tables = {side: device.upload(np.ascontiguousarray(self.start[side])) for side in SIDES}
        self.layouts = {}
        for side in SIDES:
            indptr, indices, ratings = csr_arrays(getattr(data, side))
            arrays = (indices, ratings, np.asarray(indptr, dtype=np.int64))
            self.layouts[side] = tuple(map(device.upload, arrays))

    def one_pass(self, side: Side, blocks: int) -> None:
        """All rows of a side; `blocks`: of Alg. 3."""
        moved, fixed, walked = self.tables[side], self.tables[other_side(side)], self.ordering[side]
        rates = (np.float32(self.rate), np.float32(1 - self.rate * LAMBDA))
        given = (moved, fixed, *self.layouts[walked])
        if walked == side:
            self.kernels["msgd_blocks"]((blocks,), (self.r,), (*given, np.int32(len(moved)), *rates), 4 * self.r)
            return
        self.arrived[...] = 0
        blocks = min(blocks, int(COLUMN_BLOCKS_PER_SM * self.device.spec.multiprocessors))
        arguments = (*given, np.int32(len(fixed)), *rates, self.arrived)
        self.kernels["msgd_columns"]((blocks,), (self.r,), arguments, 4 * self.r)

    def run(self, blocks: int) -> None:
        """An epoch."""
        self.one_pass("item", blocks)
        self.one_pass("user", blocks)

    def check(self, blocks: int) -> float:
        """Error of some items after their first pass, repeated in float64.

        Raises
        ------
        RuntimeError
            It is beyond `TOLERANCE`.
        """
        self.one_pass("item", blocks)
        matrix, users = self.data.item, self.start["user"].astype(np.float64)
        degrees = np.diff(matrix.indptr)
        rows = np.flatnonzero((degrees > 0) & (degrees <= CHECKED_ENTRIES))
        chosen = rows[np.argsort(degrees[rows])][np.linspace(0, len(rows) - 1, 5).astype(int)]
        moved = self.device.download(self.tables["item"][self.device.upload(chosen)])
        worst = 0.0
        for row, found in zip(chosen, moved, strict=True):
            v = self.start["item"][row].astype(np.float64)
            part = slice(matrix.indptr[row], matrix.indptr[row + 1])
            for user, rating in zip(matrix.indices[part], matrix.data[part], strict=True):
                v = (1 - self.rate * LAMBDA) * v + self.rate * (float(rating) - v @ users[user]) * users[user]
            worst = max(worst, float(np.abs(found - v).max() / np.abs(v).max()))
        if not worst <= TOLERANCE:
            raise RuntimeError(f"rows of the paper's kernel are off by {worst:.1e}, beyond {TOLERANCE:.0e}")
        return worst


def run_reduction(session: Session) -> None:
    """Barriers in all steps, and in all but the last five."""
    if session.device is None:
        return
    for r in session.profile.ranks:
        session.case(f"reduction, {r}", lambda r=r: measure_reduction(session, r))  # type: ignore[misc]


def measure_reduction(session: Session, r: int) -> None:
    """One rank, 16 blocks a multiprocessor (fewer would leave it idle at small r)."""
    found = {}
    blocks = 16 * session.device.spec.multiprocessors
    for name, warp_sync in (("log2(r) barriers", False), ("log2(r) - 5 barriers", True)):
        epoch = BlockedEpoch(session.device, session.data, r, warp_sync)
        error = epoch.check(blocks)
        times = timed(session.device, [lambda epoch=epoch: epoch.run(blocks)], session.profile.repeats)  # type: ignore[misc]
        found[name] = paper_common.spread([ms for (ms,) in times])
    session.note("reduction", {"factors": r, "ms": found, "blocks": blocks, "error": error})
    click.echo(f"reduction, r = {r}: " + ", ".join(f"{name} {ms['median']:.1f} ms" for name, ms in found.items()))


def run_speedup(session: Session) -> None:
    """The paper's kernel over the number of blocks, and ours, over one core."""
    if session.device is None:
        return
    for r in session.profile.ranks:
        session.case(f"speedup, {r}", lambda r=r: measure_speedup(session, r))  # type: ignore[misc]


def measure_speedup(session: Session, r: int) -> None:
    """One rank."""
    base = one_core_ms(session, r)
    epoch = BlockedEpoch(session.device, session.data, r, True)
    found = {}
    for each in BLOCKS_PER_SM:
        blocks = each * session.device.spec.multiprocessors
        if each == BLOCKS_PER_SM[0]:
            epoch.check(blocks)
        times = timed(session.device, [lambda blocks=blocks: epoch.run(blocks)], session.profile.repeats)  # type: ignore[misc]
        found[str(blocks)] = median([ms for (ms,) in times])
    ours = median(epoch_ms_gpu(session, r))
    session.note("speedup", {"factors": r, "one_core_ms": base, "blocks_ms": found, "ours_ms": ours})
    texts = [f"{blocks} blocks {base / ms:.0f}" for blocks, ms in found.items()]
    click.echo(f"speedup over one core, r = {r}: {', '.join(texts)}, ours {base / ours:.0f}")


def epoch_ms_gpu(session: Session, r: int, ordering: str = "mixed", long_row: int | None = None) -> list[float]:
    """Milliseconds of epochs as a fit runs them; `long_row`: that of `GpuEpochs`."""
    solver: Any = make_solver(sgd(r, "cuda", schedule="msgd", ordering=ordering), session.data)
    if long_row is not None:
        blocks: list[GridBlock] = [{"user": session.data.user, "item": session.data.item}]
        solver.kernels = GpuEpochs(session.device, blocks, solver.objective, solver.plan, long_row)
    return [ms for (ms,) in timed(session.device, [lambda: iterate(solver)], session.profile.repeats)]


# ------------------------------------------------------------------------------------------ figs. 11 and 16


def run_transfer(session: Session) -> None:
    """Both orientations and the factors to the GPU, the factors back, and an epoch; page-locked memory and other."""
    if session.device is None:
        return
    for r in session.profile.ranks:
        session.case(f"transfer, {r}", lambda r=r: measure_transfer(session, r))  # type: ignore[misc]


def measure_transfer(session: Session, r: int) -> None:
    """One rank."""
    device, data = session.device, session.data
    arrays = [np.asarray(array) for side in SIDES for array in csr_arrays(getattr(data, side))]
    factors = [np.zeros((rows, r), np.float32) for rows in data.user.shape]
    on_device = [device.upload(array) for array in factors]
    steps = [
        lambda: [device.upload(array) for array in arrays + factors],
        lambda: [device.download(array) for array in on_device],
    ]
    rounds = timed(device, steps, session.profile.repeats)
    there, back = (median(list(times)) for times in zip(*rounds, strict=True))
    locked = page_locked_ms(device, [array.copy() for array in arrays + factors], len(factors), session.profile.repeats)
    size = sum(array.nbytes for array in arrays + factors)
    epoch = median(epoch_ms_gpu(session, r))
    found = {"to_gpu_ms": there, "back_ms": back, "pinned_to_gpu_ms": locked[0], "pinned_back_ms": locked[1]}
    session.note("transfer", {"factors": r, **found, "epoch_ms": epoch, "bytes": size})
    click.echo(
        f"transfer, r = {r}: to the GPU {there:.1f} ms ({locked[0]:.1f} page-locked), back {back:.1f} ms "
        f"({locked[1]:.1f}), an epoch {epoch:.1f} ms"
    )


def page_locked_ms(device: Any, arrays: list[np.ndarray], returned: int, repeats: int) -> tuple[float, float]:
    """Milliseconds to copy page-locked arrays to the GPU, and the last `returned` of them back."""
    copier = device.copier()
    for array in arrays:
        copier.pin(array)
    targets = [device.upload(array) for array in arrays]
    device.synchronize()
    pairs = [(target.reshape(-1), array.reshape(-1)) for target, array in zip(targets, arrays, strict=True)]

    def to_gpu() -> None:
        for target, array in pairs:
            copier.copy(target, array)
        copier.synchronize()

    def back() -> None:
        for target, array in pairs[-returned:]:
            copier.fetch(array, target)
        copier.synchronize()

    times = []
    for run in (to_gpu, back):
        times.append(median(wall_ms(device, run, repeats + 1)[1:]))
    return times[0], times[1]


ORDERINGS = {
    "user": "U and V by users",
    "item": "U and V by items",
    "crossed": "U by items, V by users",
    "mixed": "U by users, V by items",
}
"""`SGD(ordering=)` in the paper's words (6.4): U are users' factors; a side that is walked by itself is centralized."""


VARIANTS = {
    "fits": "as fits run them",
    "blocked": "long rows in blocks",
    "teams": "a team for each row",
    "published": "Algs. 2 and 3 as printed",
}
"""Kernels of "ordering". Fits have blocks of threads for long rows in the ordering "mixed"."""


def run_ordering(session: Session) -> None:
    """Epochs of the four combinations, by each variant of the kernels."""
    if session.device is None:
        return
    for r in session.profile.ranks:
        session.case(f"ordering, {r}", lambda r=r: measure_ordering(session, r))  # type: ignore[misc]


def measure_ordering(session: Session, r: int) -> None:
    """One rank."""
    for variant in VARIANTS:
        found = {name: median(ordering_ms(session, r, name, variant)) for name in ORDERINGS}
        session.note("ordering", {"factors": r, "variant": variant, "ms": found})
        texts = [f"{name} {ms:.1f} ms" for name, ms in found.items()]
        click.echo(f"ordering, r = {r}, {VARIANTS[variant]}: {', '.join(texts)}")


def ordering_ms(session: Session, r: int, ordering: str, variant: str) -> list[float]:
    """Milliseconds of epochs of a variant."""
    if variant != "published":
        long_row = {"fits": None, "blocked": LONG_ROW, "teams": NEVER}[variant]
        return epoch_ms_gpu(session, r, ordering, long_row)
    epoch, blocks = (
        BlockedEpoch(session.device, session.data, r, True, ordering),
        16 * session.device.spec.multiprocessors,
    )
    epoch.check(blocks)
    return [ms for (ms,) in timed(session.device, [lambda: epoch.run(blocks)], session.profile.repeats)]


# ------------------------------------------------------------------------------------------ Table 1


def run_occupancy(session: Session) -> None:
    """Resources of the kernels from the compiler."""
    if session.device is None:
        return
    for r in session.profile.ranks:
        session.case(f"occupancy, {r}", lambda r=r: measure_occupancy(session, r))  # type: ignore[misc]


def measure_occupancy(session: Session, r: int) -> None:
    """The paper's kernel and ours of short rows, one rank."""
    device = session.device
    ld = stored_width(r, np.float32)
    constants = {"REAL": np.dtype(np.float32), "HAS_BIASES": False} | BlockedConfig.rule(ld, 4, device.spec).constants
    kernels = {
        "published": ((kernel_source(), "msgd_blocks", kernel_constants(r, True)), r, 4 * r),
        "fits": (program("msgd.cu", "centralized", **constants), THREADS, 0),
    }
    for variant, (found, threads, shared) in kernels.items():
        used = device.resources(*found)
        blocks = resident_blocks(threads, used.registers, shared, device.spec.shared_bytes)
        line = {"factors": r, "variant": variant, "threads_per_block": threads, "registers": used.registers,
                "local_bytes": used.local_bytes, "shared_bytes": shared, "blocks_per_sm": blocks}  # fmt: skip
        session.note("occupancy", line)
        click.echo(
            f"occupancy, r = {r}, {variant}: {used.registers} registers, {blocks} blocks of {threads} threads, "
            f"{100 * blocks * threads / SM_THREADS:.0f} %"
        )


SM_THREADS, SM_BLOCKS, SM_REGISTERS = 2048, 32, 65536
"""Of a multiprocessor of compute capability 8.0, 9.0 or 10.0."""


def resident_blocks(threads: int, registers: int, shared: int, shared_bytes: int) -> int:
    """Blocks of a kernel that fit on a multiprocessor; registers are given to warps by 256."""
    warps = -(-threads // 32)
    by_registers = SM_REGISTERS // (warps * (-(-max(1, registers) * 32 // 256) * 256))
    by_shared = shared_bytes // (shared + 1024)  # CUDA reserves 1 KB of a block
    return min(SM_BLOCKS, SM_THREADS // threads, by_registers, by_shared)


# ------------------------------------------------------------------------------------------ figs. 14 and 15


def methods(session: Session, threads: int, precision: str = "float32") -> dict[str, Any]:
    """Every method on the CPU, by its name in the paper where it has one."""
    f = session.profile.factors
    common: dict[str, Any] = {
        "regularization": LAMBDA,
        "biases": False,
        "dtype": precision,
        "device": "cpu",
        "random_state": 0,
        "num_threads": threads,
    }
    return {
        "MSGD": hmf.SGD(f, **common, schedule="msgd"),
        "Hogwild!": hmf.SGD(f, **common, schedule="hogwild"),
        "DSGD": hmf.SGD(f, **common, schedule="blocks"),
        "FPSGD": hmf.SGD(f, **common, schedule="blocks", deterministic=False),
        "CCD++": hmf.CCD(f, **common),
        "ALS": hmf.ExplicitALS(f, **common),
    }


def run_convergence(session: Session) -> None:
    """Test RMSE over seconds: all cores, and a GPU where there is one."""
    f, profile = session.profile.factors, session.profile
    on_cpu = methods(session, session.threads, session.precision)
    models: dict[str, Any] = {}
    if session.device is not None:
        gpu: dict[str, Any] = {"regularization": LAMBDA, "biases": False, "device": "cuda", "random_state": 0}
        exact = gpu | {"dtype": session.precision}
        models = {
            "CUMSGD": hmf.SGD(f, **exact, schedule="msgd"),
            "batch-Hogwild, GPU": hmf.SGD(f, **gpu, schedule="batch_hogwild"),
            "CCD++, GPU": hmf.CCD(f, **exact),
            "ALS, GPU": hmf.ExplicitALS(f, **exact),
        }
    models |= {f"{name}, CPU": model for name, model in on_cpu.items()}
    for name, model in models.items():
        for rate in RATES if isinstance(model, hmf.SGD) else (None,):
            session.case(
                f"convergence, {name}" + (f" at {rate:g} times the default rate" if rate else ""),
                lambda name=name, model=model, rate=rate: measure_race(session, name, model, rate),  # type: ignore[misc]
            )
    click.echo(f"each up to {profile.epochs} iterations or {profile.seconds:g} s")


def measure_race(session: Session, name: str, model: Any, rate: float | None = None) -> None:
    """One method, at a multiple of its default learning rate."""
    line = {"factors": session.profile.factors, "threads": session.threads, "method": name}
    line |= {"race": session.precision, "precision": str(model.dtype)}
    if rate is not None:
        model.learning_rate = rate * DEFAULT_RATES[model.rate_schedule]
        line["rate"] = model.learning_rate
    found = race(model, session.data, session.profile.epochs, session.profile.seconds)
    session.note("convergence", line | found)
    lowest = min(found["rmse"], default=float("nan"))
    at = "" if rate is None else f" at rate {model.learning_rate:g}"
    click.echo(f"{name + at:36s} {usual(found['seconds']):9.4f} s / iteration, test RMSE {lowest:.4f}")


def run_cores(session: Session) -> None:
    """Iterations of every method on more and more cores."""
    counts = [2**k for k in range(12) if 2**k < session.threads] + [session.threads]
    for threads in counts:
        session.case(f"cores, {threads}", lambda threads=threads: measure_cores(session, threads))  # type: ignore[misc]


def measure_cores(session: Session, threads: int) -> None:
    """One number of threads."""
    times = epoch_ms_cpu(methods(session, threads), session.data, session.profile.repeats)
    found = {name: paper_common.spread(values) for name, values in times.items()}
    session.note("cores", {"factors": session.profile.factors, "threads": threads, "ms": found})
    texts = [f"{name} {ms['median']:.0f}" for name, ms in found.items()]
    click.echo(f"{threads} cores, ms: {', '.join(texts)}")


# ------------------------------------------------------------------------------------------ the page


def render(folder: Path) -> None:
    """Tables and plots of msgd.md."""
    lines = paper_common.read_lines(NAME)
    parts: dict[str, Callable[[list[Line]], str]] = {
        "sequential": sequential_part, "reduction": reduction_part, "transfer": transfer_part,
        "speedup": speedup_part, "cores": cores_part, "ordering": ordering_part, "convergence": convergence_part,
        "occupancy": occupancy_part,
    }  # fmt: skip
    sections = {}
    for task, part in parts.items():
        keys = ("shape", "scale", "factors", "method", "threads", "variant", "race", "rate")
        chosen = paper_common.select(lines, task, *keys)
        if any("race" in line for line in chosen):  # earlier races had one rate, in float32
            chosen = [line for line in chosen if "race" in line]
        groups = paper_common.by_hardware(chosen)
        texts = []
        for hardware, group in groups.items():
            by_shape: dict[str, list[Line]] = {}
            for line in group:
                by_shape.setdefault(title_of(line), []).append(line)
            bodies = [f"{title}:\n\n{part(each)}" for title, each in by_shape.items()]
            texts.append("\n\n".join([f"**{hardware}**", *bodies, *plot(task, hardware, by_shape, folder)]))
        sections[task] = "\n\n".join(texts)
    paper_common.fill(folder / "msgd.md", sections)


def title_of(line: Line) -> str:
    """The data of a line."""
    m, n = line["size"]
    return f"{paper_common.label(line)}, {m:,} x {n:,}, {line['nnz']:,} ratings"


def plot(task: str, hardware: str, groups: dict[str, list[Line]], folder: Path) -> list[str]:
    """The plot of a task, if it has one."""
    name = f"msgd-{task}-{paper_common.slug(hardware)}.svg"
    if task == "convergence":
        draw_race(folder / name, [(title.split(",")[0], fastest(group)) for title, group in groups.items()])
        return [paper_common.picture(name, "Test RMSE over seconds")]
    if task == "cores":
        draw_cores(folder / name, groups)
        return [paper_common.picture(name, "Speedup over one core by cores")]
    return []


def draw_cores(path: Path, groups: dict[str, list[Line]]) -> None:
    """Speedup over one core, a panel for each data set."""
    with paper_common.figure(path, 4.2 * len(groups), 3.2) as drawing:
        for panel, (title, lines) in zip(
            drawing.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
        ):
            cores = [line["threads"] for line in lines]
            for method, first in lines[0]["ms"].items():
                speedups = [first["median"] / line["ms"][method]["median"] for line in lines]
                panel.plot(cores, speedups, marker=".", label=method)
            panel.plot(cores, cores, color="0.8", linewidth=1)
            panel.set_title(title.split(",")[0], fontsize=8)
            panel.set_xlabel("cores")
            panel.set_ylabel("times one core")
            panel.legend(fontsize=6)


def sequential_part(lines: list[Line]) -> str:
    """Fig. 9."""
    rows = [
        [line["factors"], f"{line['ms']['SGD']['median']:.1f}", f"{line['ms']['MSGD']['median']:.1f}",
         f"{line['ms']['MSGD']['median'] / line['ms']['SGD']['median']:.2f}"]
        for line in lines
    ]  # fmt: skip
    return paper_common.table(["r", "SGD, ms an epoch", "MSGD, ms an epoch", "MSGD / SGD"], rows)


def reduction_part(lines: list[Line]) -> str:
    """Fig. 10."""
    names = list(lines[0]["ms"])
    rows = []
    for line in lines:
        before, after = (line["ms"][name]["median"] for name in names)
        rows.append([line["factors"], f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}"])
    return paper_common.table(["r", *(f"{name}, ms" for name in names), "before / after"], rows)


def transfer_part(lines: list[Line]) -> str:
    """Fig. 11."""
    rows = []
    for line in lines:
        for memory, prefix in (("pageable", ""), ("page-locked", "pinned_")):
            if f"{prefix}back_ms" in line:
                there, back, epoch = line[f"{prefix}to_gpu_ms"], line[f"{prefix}back_ms"], line["epoch_ms"]
                numbers = (f"{value:.1f}" for value in (there, back, epoch))
                rows.append([line["factors"], memory, *numbers, f"{epoch / (there + back):.2f}"])
    header = ["r", "memory of the host", "to the GPU, ms", "back, ms", "epoch, ms", "epoch / copies"]
    return paper_common.table(header, rows)


def speedup_part(lines: list[Line]) -> str:
    """Figs. 12 and 13."""
    blocks = list(lines[0]["blocks_ms"])
    rows = [
        [line["factors"], f"{line['one_core_ms']:,.0f}",
         *(f"{line['one_core_ms'] / line['blocks_ms'][each]:.0f}" for each in blocks),
         f"{line['one_core_ms'] / line['ours_ms']:.0f}"]
        for line in lines
    ]  # fmt: skip
    return paper_common.table(["r", "one core, ms", *(f"{each} blocks" for each in blocks), "ours"], rows)


def cores_part(lines: list[Line]) -> str:
    """Fig. 15."""
    names = list(lines[0]["ms"])
    rows = []
    for line in lines:
        speedups = [
            f"{line['ms'][name]['median']:.0f} ({lines[0]['ms'][name]['median'] / line['ms'][name]['median']:.1f} x)"
            for name in names
        ]
        rows.append([line["threads"], *speedups])
    return paper_common.table(["cores", *(f"{name}, ms" for name in names)], rows)


def ordering_part(lines: list[Line]) -> str:
    """Fig. 16."""
    lines = [line for line in lines if "variant" in line] or lines  # older lines are of fits, and have none
    rows = [
        [line["factors"], VARIANTS[line.get("variant", "fits")], *(f"{line['ms'][name]:.1f}" for name in ORDERINGS)]
        for line in sorted(lines, key=lambda line: (line["factors"], list(VARIANTS).index(line.get("variant", "fits"))))
    ]
    return paper_common.table(["r", "kernels", *(f"{text}, ms" for text in ORDERINGS.values())], rows)


def occupancy_part(lines: list[Line]) -> str:
    """Table 1."""
    rows = []
    for line in sorted(lines, key=lambda line: (line["variant"], line["factors"]), reverse=False):
        threads = line["blocks_per_sm"] * line["threads_per_block"]
        rows.append(
            [VARIANTS[line["variant"]], line["factors"], line["threads_per_block"], line["registers"],
             line["shared_bytes"], threads, threads // 32, line["blocks_per_sm"], f"{100 * threads / SM_THREADS:.0f} %"]
        )  # fmt: skip
    header = ["kernels", "r", "threads of a block", "registers of a thread", "shared memory of a block, bytes",
              "threads of a multiprocessor", "warps", "blocks", "occupancy"]  # fmt: skip
    return paper_common.table(header, rows)


def race_of(lines: list[Line]) -> list[Line]:
    """The lines of one race: in float64 if there is any; older lines are in float32, and do not say so."""
    races = {line.get("race", "") for line in lines}
    return [line for line in lines if line.get("race", "") == max(races)]


def common_rmse(lines: list[Line]) -> float:
    """The lowest RMSE that every method reaches, at its best rate."""
    lowest: dict[str, float] = {}
    for line in lines:
        for rmse in line["rmse"]:
            lowest[line["method"]] = min(rmse, lowest.get(line["method"], float("inf")))
    return max(lowest.values(), default=float("nan"))


def fastest(lines: list[Line]) -> list[Line]:
    """Of each method the line of the rate that first reaches the common RMSE."""
    lines = race_of(lines)
    aim, found = common_rmse(lines), {}
    for line in lines:
        reached = seconds_to(line, aim)
        key = float("inf") if reached is None else reached
        if line["method"] not in found or key < found[line["method"]][0]:
            found[line["method"]] = (key, line)
    return [line for _, line in found.values()]


def convergence_part(lines: list[Line]) -> str:
    """Fig. 14: the paper's comparison, seconds to an RMSE that all reach, above the one to the best RMSE."""
    chosen, aim = fastest(lines), common_rmse(race_of(lines))
    rows = []
    for line in chosen:
        reached = seconds_to(line, aim)
        rate = f"{line['rate']:g}" if "rate" in line else "-"
        rows.append(
            [line["method"], line.get("precision", "float32"), rate, "-" if reached is None else f"{reached:.3g}"]
        )
    header = ["method", "precision", "learning rate", f"s to {aim:.4f}, which all reach"]
    text = f"r = {lines[0]['factors']}, {lines[0]['threads']} CPU threads"
    return f"{text}\n\n{paper_common.table(header, rows)}\n\n{race_table(chosen)}"


# ------------------------------------------------------------------------------------------ command

TASKS: dict[str, Callable[[Session], None]] = {
    "convergence": run_convergence, "sequential": run_sequential, "cores": run_cores, "speedup": run_speedup,
    "ordering": run_ordering, "reduction": run_reduction, "transfer": run_transfer, "occupancy": run_occupancy,
}  # fmt: skip
USUAL_TASKS = {"cpu": ("convergence", "sequential", "cores"),
               "cuda": ("convergence", "speedup", "ordering", "reduction", "transfer", "occupancy")}  # fmt: skip
"""Without --task; in order of weight, for a budget may end."""


def run(recorder: Recorder, device: Any, profile: Profile, tasks: Sequence[str], threads: int, precision: str) -> None:
    """All tasks on all data."""
    for shape, scale in profile.shapes:
        if recorder.has_time(shape):
            ONE_CORE.clear()
            session = Session(recorder, device, Split.of(shape, scale), profile, threads, precision)
            for task in tasks:
                TASKS[task](session)


@click.command(help=__doc__)
@paper_common.options(TASKS, render)
@paper_common.data_options
@paper_common.threads_option
@click.option(
    "--precision",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help='Of "convergence".',
)
def main(
    device: str, profile: str, tasks: tuple[str, ...], budget: float | None, shape: str | None, scale: float,
    factors: int | None, threads: int, precision: str,
) -> None:  # fmt: skip
    chosen = PROFILES[device, profile]
    if shape:
        chosen = replace(chosen, shapes=((shape, scale),))
    if factors:
        chosen = replace(chosen, factors=factors, ranks=(factors,))
    recorder, opened = Recorder.begin(NAME, device, budget or chosen.budget)
    run(recorder, opened, chosen, tasks or USUAL_TASKS[device], threads, precision)
    recorder.finish()


if __name__ == "__main__":
    main()
