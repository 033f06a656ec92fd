"""ALS on one GPU: whole iterations, batched Cholesky, published assemblies, top-K, and the errors of each precision.

    python bench/gpu.py                                    quick: figures of docs/performance.md, under 4 minutes
    python bench/gpu.py --profile full                     more ranks, shapes and precisions
    python bench/gpu.py --task als --shape netflix

Tasks: "als", full iterations (item half sweep, user half sweep, Gram matrices included) with the factors on the device,
their train RMSE or objective after a few iterations, and the set-up before; "cholesky", factorization and solve of
systems in global memory, beside torch and cuSolverDx if they are installed; "syrk" and "bals", the published assemblies
of the users' normal equations, rows and columns as they come and by degree; "topk", top 10 with filter from factors on
the device; "precision", the error of a half sweep against float64 and its effect on RMSE and objective; "subspace",
iALS++ beside the exact solver with many factors, in seconds to equal objective.

A handful of rows is compared with float64 NumPy on the same data before anything is timed, and a wrong answer is not
reported: its case is named at the end and the exit code is 1. Times are CUDA events, the median of five after a
warm-up. TFLOP/s counts useful work, nnz f (f + 1) a half sweep and f^3/3 + 2 f^2 a solve (2 f^2 a step and one more for
CG); TB/s counts gathered factors, or the lower triangles of systems. "of floor" is the shortest time that gathers,
multiplications or writes would allow, each by itself at its measured rate (see `floor_ms`), over the time.

torch and cuSolverDx run in the same process. What the published kernels of cuMF, Gates, BALS and cuMF_SGD took is
quoted (quoted.py); those figures are no part of these lines. How the data are drawn: gpu_data.py.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import click
import cusolverdx
import numpy as np
import scipy.sparse as sp
from common import ROOT, median, record
from gpu_data import GPU_SHAPES, synthetic_gpu, tasteful_gpu

from hybridmf.core.objective import SIDES, Factors, Objective, Side, other_side
from hybridmf.core.validate import csr_arrays, make_csr
from hybridmf.device.cuda import CudaDevice, open_device
from hybridmf.errors import DeviceError
from hybridmf.formats import BalsMatrix, reorder, transpose
from hybridmf.gpu import bals, cholesky_any
from hybridmf.gpu.factors import DeviceFactors, to_device
from hybridmf.gpu.half import HalfSweep, SegmentedRows
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.gpu.mo_als import mo_als
from hybridmf.gpu.sparse_syrk import sparse_syrk, sparse_syrk_published
from hybridmf.gpu.topk import PackedItems, top_k_on_device
from hybridmf.plan import assemblies as plan_assemblies
from hybridmf.plan.als import ALS
from hybridmf.plan.als_gpu import GPU_SEGMENT, WHOLE_ROW
from hybridmf.plan.fused import table_width
from hybridmf.plan.half_sweep import PUBLISHED_BATCH
from hybridmf.plan.make import make_plan
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Plan, Settings
from hybridmf.ranks.gpu_rank import GpuWorker
from hybridmf.ranks.su_als import RankALS, one_device

OBJECTIVES = {
    "explicit": Objective.explicit(0.05, "count", False),
    "implicit": Objective.implicit(0.01, "none", 1.0, 1.0),
}

TOLERANCES = {"float32": 3e-5, "bf16x3": 1e-4, "float16": 3e-3, "tf32": 3e-3, "bf16": 2e-2}
"""Largest residual |Ax - b| / (|A| |x| + |b|) of a solved row: about ten times the expected one."""

SUMS_TOLERANCE = 2e-5
"""The same for an element of a float32 sum over thousands of entries, of the largest element."""

QUALITY_ITERATIONS = 5
"""Iterations from the same start after which RMSE or objective of two precisions are compared."""

FITTED_ITERATIONS = 3
"""Iterations of implicit ALS that the fitted factors of the top-K task come from."""

COPY_TBPS = 4.24
PINNED_TBPS = 0.055
"""Copies within the device, and from pinned host memory to it."""

GATHER_TBPS = {64: (9.3, 7.0), 100: (11.4, 5.4), 128: (11.7, 5.9)}
"""Gathered rows of f factors, one warp a row: from a table in L2, and from one of 200 MB."""

TFLOPS = {"ffma": 51.0, "float32": 100.0, "float16": 286.0, "tf32": 286.0, "bf16": 548.0, "bf16x3": 183.0}
"""Plain multiply-adds; normal equations on tensor cores: 2.0e12 flops (Netflix shape, f = 100) in 20 ms as three
products and in 7 ms in tf32, bf16 faster than tf32 as in a matrix product (803 to 419)."""

HALF_PRODUCT_TFLOPS = 803.0
"""A matrix product of 16-bit numbers."""

Step = Callable[[], Any]


# ------------------------------------------------------------------------------------------ what only CUDA has


def array_module(device: Any) -> Any:
    """CuPy, or NumPy where the device is emulated."""
    if not isinstance(device, CudaDevice):
        return np
    import cupy

    return cupy


def mark(device: Any) -> Any:
    """A mark between two pieces of work; `elapsed_ms` of two of them is the time between."""
    xp = array_module(device)
    if xp is np:
        return time.perf_counter()
    event = xp.cuda.Event()
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds between two marks."""
    if isinstance(start, float):
        return 1e3 * (end - start)
    import cupy

    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))


def gpu_stamp(device: Any) -> dict[str, Any]:
    """GPU, driver, CUDA, CuPy and kernel sources that a figure belongs to."""
    gpu = {"name": device.spec.name}
    xp = array_module(device)
    if xp is not np:
        version = xp.cuda.runtime.runtimeGetVersion()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        gpu |= {"driver": driver_version(), "cuda": cuda, "cupy": xp.__version__}
    return {"gpu": gpu, "cuda_sha256": cuda_sha256()}


def release(device: Any) -> None:
    """Release cached device memory, since torch has its own allocator."""
    xp = array_module(device)
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()


def driver_version() -> str:
    """Version of the NVIDIA driver, empty if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        return ""
    return lines[0] if lines else ""


def cuda_sha256() -> str:
    """sha256 of all files of cuda/, concatenated in byte order of their names."""
    paths = (path for path in (ROOT / "cuda").iterdir() if path.is_file())
    files = sorted(paths, key=lambda path: os.fsencode(path.name))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def timed(device: Any, steps: Sequence[Step], repeats: int, prepare: Step | None = None) -> list[list[float]]:
    """Milliseconds of each step in each of `repeats` rounds after one to warm up; `prepare` is not timed."""
    rounds = []
    for _ in range(repeats + 1):
        if prepare is not None:
            prepare()
        marks = [mark(device)]
        for step in steps:
            step()
            marks.append(mark(device))
        rounds.append([elapsed_ms(a, b) for a, b in itertools.pairwise(marks)])
    return rounds[1:]


def wall_ms(device: Any, run: Step, repeats: int) -> list[float]:
    """Milliseconds of work that is mostly the host's; no warm-up."""
    times = []
    for _ in range(repeats):
        device.synchronize()
        started = time.perf_counter()
        run()
        device.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return times


# ------------------------------------------------------------------------------------------ rows, data, session


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes
    ----------
    task, name, shape : str
    factors : int
    times : list of float
        Milliseconds of each repeat.
    flops, gathered : float
        Useful operations; bytes that are gathered or read.
    floor_ms : float or None
    rival : str
    rival_ms : float or None
    error : float or None
        Error found by the preceding check.
    more : dict
        Further fields of the line.
    """

    task: str
    name: str
    shape: str
    factors: int
    times: list[float]
    flops: float = 0.0
    gathered: float = 0.0
    floor_ms: float | None = None
    rival: str = ""
    rival_ms: float | None = None
    error: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Median of the repeats."""
        return median(self.times)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the rival."""
        return self.rival_ms / self.ms if self.rival_ms else None

    @property
    def of_floor(self) -> float | None:
        """The floor's part of the time."""
        return self.floor_ms / self.ms if self.floor_ms else None

    def line(self) -> dict[str, Any]:
        """Fields for the results."""
        return {
            "bench": "gpu", "task": self.task, "name": self.name, "shape": self.shape, "factors": self.factors,
            "ms": self.ms, "spread": [min(self.times), max(self.times)], "repeats": len(self.times),
            "tflops": self.flops / self.ms / 1e9, "tbps": self.gathered / self.ms / 1e9, "floor_ms": self.floor_ms,
            "of_floor": self.of_floor, "rival": self.rival or None, "rival_ms": self.rival_ms, "ratio": self.ratio,
            "error": self.error,
        } | self.more  # fmt: skip

    def text(self) -> str:
        """A line of the table."""
        rival = f"{self.rival_ms:9.2f} {self.ratio:7.2f}" if self.rival_ms and self.ratio else " " * 17
        floor = f"{self.of_floor:8.0%}" if self.of_floor else " " * 8
        error = f"{self.error:9.1e}" if self.error is not None else " " * 9
        rate = f"{self.flops / self.ms / 1e9:9.1f}" if self.flops else " " * 9
        bandwidth = f"{self.gathered / self.ms / 1e9:7.2f}" if self.gathered else " " * 7
        more = ", ".join(f"{key} {short(value)}" for key, value in self.more.items() if key != "nnz")
        where = f"{self.task:10s} {self.shape:8s} {self.factors:4d} {self.name:44s}"
        return f"{where} {self.ms:9.3f} {rate} {bandwidth} {floor} {rival} {error}  {more}".rstrip()


HEADER = (
    f"{'task':10s} {'shape':8s} {'f':>4s} {'what':44s} {'ms':>9s} {'TFLOP/s':>9s} {'TB/s':>7s} {'of floor':>8s} "
    f"{'rival ms':>9s} {'faster':>7s} {'error':>9s}"
)


def short(value: Any) -> str:
    """A value in a few characters."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Data:
    """Ratings in both orientations.

    Attributes
    ----------
    name : str
    user, item : csr_array
    """

    name: str
    user: sp.csr_array
    item: sp.csr_array

    @classmethod
    def draw(cls, shape: str, feedback: str) -> Data:
        """Draw a shape on the GPU; the transpose is made on the host."""
        user = synthetic_gpu(shape, implicit=feedback == "implicit")
        return cls(shape, user, transpose(user))

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.user.data)


class WrongAnswerError(Exception):
    """An error found by a check exceeds its tolerance."""


@dataclass
class Session:
    """State shared by the tasks: the device, drawn data, rows, failures."""

    device: Any
    repeats: int = 5
    draw: Callable[[str, str], Data] = Data.draw
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    drawn: dict[tuple[str, str], Data] = field(default_factory=dict)
    swept: dict[Any, Sweeps] = field(default_factory=dict)
    exact: dict[tuple[str, str, int], float] = field(default_factory=dict)

    def data(self, shape: str, feedback: str = "explicit") -> Data:
        """Ratings of a shape, drawn once."""
        if (shape, feedback) not in self.drawn:
            started = time.perf_counter()
            self.drawn[shape, feedback] = data = self.draw(shape, feedback)
            m, n = data.user.shape
            seconds = time.perf_counter() - started
            click.echo(f"{shape}, {feedback}: {m:,} x {n:,}, {data.nnz:,} entries; {seconds:.1f} s")
        return self.drawn[shape, feedback]

    def sweeps(self, shape: str, feedback: str, factors: int, options: tuple[tuple[str, str], ...] = ()) -> Sweeps:
        """Half sweeps of a shape and rank as at the start, ratings on the device; the last ones are kept."""
        key = (shape, feedback, factors, options)
        if key not in self.swept:
            self.swept.clear()
            data = self.data(shape, feedback)
            self.swept[key] = Sweeps.start(self.device, data, feedback, factors, **dict(options))
        return copy.copy(self.swept[key])

    def report(self, row: Row) -> None:
        """Keep a row, print it, append it to bench/results/gpu.jsonl."""
        self.rows.append(row)
        click.echo(row.text())
        line = row.line() | self.stamp
        try:
            record("gpu", line)
        except FileNotFoundError as error:  # git is not installed: the line must not be lost
            click.echo(f"not recorded ({error}): {json.dumps(line)}")

    @functools.cached_property
    def stamp(self) -> dict[str, Any]:
        """Fields of every line about GPU and kernels."""
        return gpu_stamp(self.device)

    def require(self, error: float, tolerance: float) -> float:
        """The error, if it is within its tolerance."""
        if not error <= tolerance:
            raise WrongAnswerError(f"error {error:.2e} is beyond {tolerance:.0e}: not measured")
        return error

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A case that fails or is wrong is named at the end, and the others are measured nevertheless."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, WrongAnswerError):
                traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            click.echo(f"FAILED {self.failures[-1]}")


def table_rate(table_bytes: float, factors: int) -> float:
    """TB/s of gathers from a table of that size; ranks between the measured ones take the nearest."""
    nearest = min(GATHER_TBPS, key=lambda rank: abs(rank - factors))
    cached, far = GATHER_TBPS[nearest]
    return cached if table_bytes <= 60 << 20 else far


def gather_ms(nnz: int, fixed: int, factors: int) -> float:
    """Milliseconds that the gathers of a half sweep take at least; `fixed` rows in the table."""
    return 4.0 * nnz * factors / table_rate(4.0 * fixed * factors, factors) / 1e9


def floor_ms(flops: float, rate: str, *others: float) -> float:
    """The slowest of what can overlap: multiplications at a rate of TFLOPS, and other milliseconds."""
    return max(flops / TFLOPS[rate] / 1e9, *others)


# ------------------------------------------------------------------------------------------ ALS


@dataclass(frozen=True)
class AlsCase:
    """A full iteration to be timed."""

    shape: str
    feedback: str
    factors: int
    precision: str = "float32"
    solver: str = "cholesky"
    row_form: str = "auto"

    @property
    def name(self) -> str:
        """In the table."""
        solver = "exact" if self.solver == "cholesky" else f"CG {CG_STEPS}"
        return f"{self.feedback} {solver} {self.precision}" + (" primal" if self.row_form == "primal" else "")

    @property
    def group(self) -> tuple[str, str, int]:
        """Cases that start from the same factors."""
        return self.shape, self.feedback, self.factors

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of the plan that decide how the rows are divided among kernels."""
        return ("solver", self.solver), ("row_form", self.row_form)


CG_STEPS = 6
"""Steps of cuMF's published code."""


def explicit_cases(shape: str, factors: int, precisions: Sequence[str]) -> list[AlsCase]:
    """Exact in each precision, then CG."""
    exact = [AlsCase(shape, "explicit", factors, precision) for precision in precisions]
    return exact + [AlsCase(shape, "explicit", factors, precision, "cg") for precision in ("bf16", "tf32")]


def implicit_cases(shape: str, factors: int, *precisions: str) -> list[AlsCase]:
    """Exact in each precision."""
    return [AlsCase(shape, "implicit", factors, precision) for precision in precisions]


def both_forms(shape: str, feedback: str, factors: int) -> list[AlsCase]:
    """Exact with short rows in the dual form, and all rows in the primal form."""
    return [AlsCase(shape, feedback, factors, row_form=form) for form in ("auto", "primal")]


ALS_CASES = {
    "quick": [
        *explicit_cases("netflix", 100, ("float32", "bf16x3", "tf32", "bf16")),
        *implicit_cases("netflix", 64, "float32", "bf16x3"),
        *implicit_cases("netflix", 128, "float32", "bf16x3"),
        *implicit_cases("netflix", 32, "float32"),
        *implicit_cases("msd", 64, "float32"),
        *implicit_cases("msd", 128, "float32"),
        *both_forms("shop", "implicit", 128),
    ],
}
ALS_CASES["full"] = [
    *explicit_cases("netflix", 100, ("float32", "bf16x3", "tf32", "bf16", "float16")),
    *explicit_cases("ml-20m", 100, ("float32", "bf16x3")),
    *(case for f in (32, 64, 128) for case in explicit_cases("netflix", f, ("float32", "bf16x3"))[:2]),
    *implicit_cases("netflix", 64, "float32", "bf16x3", "tf32", "bf16"),
    *implicit_cases("netflix", 128, "float32", "bf16x3", "tf32", "bf16"),
    *(case for f in (32, 80, 96) for case in implicit_cases("netflix", f, "float32", "bf16x3")),
    *implicit_cases("msd", 64, "float32", "bf16x3"),
    *implicit_cases("msd", 128, "float32", "bf16x3"),
    *(case for f in (64, 128) for shape in ("shop", "msd", "netflix") for case in both_forms(shape, "implicit", f)),
    *both_forms("netflix", "explicit", 100),
    *both_forms("netflix", "explicit", 128),
]


def als_plan(data: Data, feedback: str, factors: int, **options: Any) -> Plan:
    """The plan of a fit on the GPU."""
    asked = {
        "factors": factors, "solver": "cholesky", "cg_steps": CG_STEPS, "assembly": "auto", "reorder": "none",
        "precision": "float32", "dtype": "float32", "num_threads": None, "device": "cuda", "block_size": 16,
        "method": ALS,
    }  # fmt: skip
    return make_plan(OBJECTIVES[feedback], Settings.check(**(asked | options)), data.user.shape, data.nnz)


@dataclass
class Sweeps:
    """Two half sweeps and the current factors, all on the device."""

    data: Data
    feedback: str
    halves: dict[Side, HalfSweep]
    factors: dict[Side, DeviceFactors]
    seconds: float = 0.0

    @classmethod
    def start(cls, device: Any, data: Data, feedback: str, factors: int, **options: Any) -> Sweeps:
        """Ratings uploaded, factors as a fit draws them; says how long the constructors took."""
        plan, objective = als_plan(data, feedback, factors, **options), OBJECTIVES[feedback]
        started = time.perf_counter()
        matrices = {side: in_dtype(getattr(data, side), plan.dtype) for side in SIDES}
        halves = {side: HalfSweep(device, side, matrices[side], objective, plan) for side in SIDES}
        device.synchronize()
        seconds = time.perf_counter() - started
        degrees, real = (halves["user"].degrees, halves["item"].degrees), np.dtype(plan.dtype).type
        state = initial_state(*degrees, factors, real, objective, 0.0, 0)
        width = table_width(factors, np.dtype(plan.dtype))
        return cls(
            data, feedback, halves, {side: to_device(device, state.side(side), width) for side in SIDES}, seconds
        )

    def planned(self, **changes: Any) -> Sweeps:
        """The same ratings and factors with another solver or precision, for which nothing is uploaded."""
        halves = {side: copy.copy(half) for side, half in self.halves.items()}
        for half in halves.values():
            half.plan = half.plan.changed(**changes)
        return replace(self, halves=halves, factors=dict(self.factors))

    def solve(self, side: Side) -> None:
        """One half sweep."""
        solved = self.halves[side].solve(self.factors[other_side(side)], 0.0, self.factors[side])
        self.factors = self.factors | {side: solved}

    def iterate(self, iterations: int) -> Sweeps:
        """Full iterations, items first."""
        for _ in range(iterations):
            self.solve("item")
            self.solve("user")
        return self

    def quality(self) -> float:
        """Train RMSE of explicit feedback, the objective of implicit feedback, by the device in float64."""
        half = self.halves["user"]
        if self.feedback == "explicit":
            half = copy.copy(half)
            half.objective = replace(half.objective, regularization=0.0)  # leaves the squared errors
        degrees = self.halves["item"].degrees
        total = objective_value(half, self.factors, {"user": half.degrees, "item": degrees})
        return float(np.sqrt(total / self.data.nnz)) if self.feedback == "explicit" else total

    def flops(self, side: Side) -> float:
        """Useful work of a half sweep."""
        plan = self.halves[side].plan
        f, rows = plan.rank, int(np.count_nonzero(self.halves[side].degrees))
        solve = 2.0 * (plan.cg_steps + 1) * f * f if plan.solver == "cg" else f**3 / 3 + 2.0 * f * f
        return float(self.data.nnz) * f * (f + 1) + rows * solve

    def floor(self, side: Side) -> float:
        """Least milliseconds of a half sweep."""
        plan = self.halves[side].plan
        fixed = self.data.user.shape[1 if side == "user" else 0]
        rate = plan.precision if plan.assembly == "fused" else "ffma"
        return floor_ms(self.flops(side), rate, gather_ms(self.data.nnz, fixed, plan.rank))


def objective_value(half: HalfSweep, factors: dict[Side, DeviceFactors], degrees: dict[Side, np.ndarray]) -> float:
    """The objective of a model without biases, losses and sums in float64; `half` is the users' half sweep."""
    device, objective, unobserved = half.device, half.objective, 0.0
    with device.active():
        total = float(half.losses(factors["user"], factors["item"], 0.0).sum())
        if objective.is_implicit:
            grams = [factors[side].exact_gram(device) for side in SIDES]
            unobserved = objective.unobserved_weight * float(np.sum(grams[0] * grams[1]))
        penalties = [factors[side].penalty(device, objective, side, degrees[side]) for side in SIDES]
        return total + (unobserved + sum(penalties))


def in_dtype(matrix: sp.csr_array, dtype: str) -> sp.csr_array:
    """The matrix with values of a type; SciPy's astype would widen the indices too."""
    indptr, indices, values = csr_arrays(matrix)
    return make_csr(indptr, indices, values.astype(dtype, copy=False), matrix.shape)


def handful(degrees: np.ndarray) -> np.ndarray:
    """Rows to check: the longest, the shortest and some between."""
    order = np.argsort(-degrees, kind="stable")[: int(np.count_nonzero(degrees))]
    return np.unique(order[np.linspace(0, len(order) - 1, 7).astype(int)])


def host_gram(matrix: np.ndarray) -> np.ndarray:
    """F^T F in float64, in pieces."""
    parts = (matrix[start : start + 65536].astype(np.float64) for start in range(0, len(matrix), 65536))
    return sum((part.T @ part for part in parts), np.zeros((matrix.shape[1],) * 2))


def normal_equations(
    matrix: sp.csr_array, row: int, fixed: np.ndarray, objective: Objective, gram: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(A, b) of a row in float64; `gram` is that of all of `fixed`."""
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    y, r = fixed[matrix.indices[part]].astype(np.float64), matrix.data[part].astype(np.float64)
    ridge = objective.regularization.user * len(r) ** objective.scaling.user * np.eye(fixed.shape[1])
    if gram is None:
        return y.T @ y + ridge, y.T @ r
    confidence = 1 + objective.alpha * np.abs(r)
    weighted = (confidence - objective.unobserved_weight)[:, None] * y
    return objective.unobserved_weight * gram + y.T @ weighted + ridge, y.T @ (confidence * (r > 0))


def residual(A: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """|Ax - b| / (|A| |x| + |b|); as is, NaN is no number below any tolerance."""
    norm = np.linalg.norm
    return float(norm(A @ x - b) / (norm(A, 2) * norm(x) + norm(b)))


def check_half(sweeps: Sweeps, side: Side) -> float:
    """Largest residual of a handful of rows after a half sweep of `side`."""
    half, fixed = sweeps.halves[side], sweeps.factors[other_side(side)].matrix
    sweeps.solve(side)
    rows = handful(half.degrees)
    solved = half.device.download(sweeps.factors[side].table[half.device.upload(rows)])[:, : half.plan.rank]
    gram = host_gram(fixed) if half.objective.is_implicit else None
    matrix = getattr(sweeps.data, side)
    systems = (normal_equations(matrix, row, fixed, half.objective, gram) for row in rows)
    errors = [residual(A, x.astype(np.float64), b) for (A, b), x in zip(systems, solved, strict=True)]
    return float(np.max(errors))


def check_sweeps(sweeps: Sweeps) -> float:
    """The same for both half sweeps; CG goes on until it has converged, which shows the same systems."""
    plan = sweeps.halves["user"].plan
    patient = sweeps.planned(cg_steps=4 * plan.rank) if plan.solver == "cg" else sweeps.planned()
    return max(check_half(patient, "item"), check_half(patient, "user"))


def run_als(session: Session, profile: str, shape: str | None) -> None:
    """Time full iterations; cases of one group follow each other, the exact float32 one first."""
    cases = [case for case in ALS_CASES[profile] if shape in (None, case.shape)]
    set_up: set[str] = set()
    for case in cases:
        with session.case(f"als, {case.shape}, {case.factors}, {case.name}"):
            sweeps = session.sweeps(*case.group, case.options)
            if case.shape not in set_up:
                set_up.add(case.shape)
                report_set_up(session, sweeps)
            measure_als(session, case, sweeps.planned(precision=case.precision))


def measure_als(session: Session, case: AlsCase, sweeps: Sweeps) -> None:
    """Check, then quality from the same start, then time."""
    error = session.require(check_sweeps(sweeps), TOLERANCES[case.precision])
    quality = sweeps.planned().iterate(QUALITY_ITERATIONS).quality()
    if (case.precision, case.solver) == ("float32", "cholesky"):
        session.exact[case.group] = quality
    more: dict[str, Any] = {"rmse" if case.feedback == "explicit" else "objective": quality}
    if case.group in session.exact:
        more["above_exact"] = quality / session.exact[case.group] - 1
    rounds = timed(session.device, [lambda: sweeps.solve("item"), lambda: sweeps.solve("user")], session.repeats)
    item_ms, user_ms = (median(list(times)) for times in zip(*rounds, strict=True))
    session.report(
        Row(
            "als", case.name, case.shape, case.factors, [sum(times) for times in rounds],
            sum(sweeps.flops(side) for side in SIDES), 2.0 * sweeps.data.nnz * 4 * case.factors,
            sum(sweeps.floor(side) for side in SIDES), "", None, error,
            {"item_ms": item_ms, "user_ms": user_ms} | more | {"nnz": sweeps.data.nnz},
        )
    )  # fmt: skip


def report_set_up(session: Session, sweeps: Sweeps) -> None:
    """What comes before the first iteration: uploads of both orientations, and the constructors as a whole."""
    data, device = sweeps.data, session.device
    arrays = [array for m in (data.user, data.item) for array in (m.indptr.astype(np.int64), m.indices, m.data)]
    times = wall_ms(device, lambda: [device.upload(array) for array in arrays], 3)
    size = float(sum(array.nbytes for array in arrays))
    floor = size / PINNED_TBPS / 1e9
    more = {"nnz": data.nnz}
    rank = sweeps.halves["user"].plan.rank
    name = "upload of both orientations"
    session.report(Row("set-up", name, data.name, rank, times, gathered=size, floor_ms=floor, more=more))
    name = "constructors of both half sweeps"
    session.report(Row("set-up", name, data.name, rank, [1e3 * sweeps.seconds], gathered=size, more=more))


# ------------------------------------------------------------------------------------------ Cholesky

CHOLESKY_CASES = {
    "quick": [(32, 65536), (64, 65536), (96, 65536), (100, 65536), (128, 65536), (256, 16384), (512, 4096)],
    "full": [(16, 65536), (32, 65536), (64, 65536), (80, 65536), (96, 65536), (100, 65536), (128, 65536), (200, 16384),
             (256, 16384), (512, 4096)],
}  # fmt: skip
"""(rank, systems)."""

DISTINCT_SYSTEMS = 4096
"""Distinct systems; the others repeat them, which changes the time of no kernel."""


def random_systems(device: Any, n: int, rank: int) -> tuple[Any, Any]:
    """Positive definite matrices and right-hand sides, float32, on the device."""
    random = array_module(device).random.default_rng(0)
    rows = random.standard_normal((min(n, DISTINCT_SYSTEMS), rank, rank), dtype=np.float32)
    matrices = device.matmul(rows, rows.transpose(0, 2, 1))
    matrices /= np.float32(rank)
    matrices += device.upload(0.5 * np.eye(rank, dtype=np.float32))
    repeated = device.upload(np.arange(n) % len(rows))
    return matrices[repeated], random.standard_normal((n, rank), dtype=np.float32)


def check_systems(device: Any, matrices: Any, rhs: Any, solutions: Any) -> float:
    """Largest residual of a handful of systems."""
    picked = device.upload(np.unique(np.linspace(0, len(rhs) - 1, 7).astype(np.int64)))
    arrays = (device.download(array[picked]).astype(np.float64) for array in (matrices, rhs, solutions))
    return float(np.max([residual(A, x, b) for A, b, x in zip(*arrays, strict=True)]))


def run_cholesky(session: Session, profile: str, shape: str | None) -> None:
    """Factorization and solve of systems in global memory, ours and the rivals' in one run."""
    for rank, n in CHOLESKY_CASES[profile]:
        with session.case(f"cholesky, {rank}"):
            measure_cholesky(session, rank, n)


def measure_cholesky(session: Session, rank: int, n: int) -> None:
    """One rank; matrices are restored before each repeat, since ours destroys them."""
    device = session.device
    matrices, rhs = random_systems(device, n, rank)
    work, solutions = device.empty((n, rank, rank), np.float32), device.zeros((n, rank), np.float32)
    status, slots = device.zeros(n, np.int32), device.upload(np.arange(n + 1, dtype=np.int64))
    rows = device.upload(np.arange(n, dtype=np.int32))
    device.synchronize()

    def ours() -> None:
        cholesky_any.cholesky_solve(device, solutions, status, (work, rhs), slots, rows, 4.8e-7)

    def restore() -> None:
        work[...] = matrices

    restore()
    ours()
    if bool(status.any()):
        raise WrongAnswerError("a system is said not to be positive definite")
    error = session.require(check_systems(device, matrices, rhs, solutions), TOLERANCES["float32"])
    times = [each[0] for each in timed(device, [ours], session.repeats, restore)]
    rival, rival_ms, more = "", None, dict[str, Any](systems=n)
    for library, solver in (("torch", torch_cholesky), ("cusolverdx", cusolverdx.solver)):
        run = None if array_module(device) is np else solver(matrices, rhs)
        if run is None:
            continue
        session.require(check_systems(device, matrices, rhs, run()), TOLERANCES["float32"])
        rival_times = [each[0] for each in timed(device, [run], session.repeats)]
        more[f"{library}_spread"] = [min(rival_times), max(rival_times)]
        if library == "torch":
            rival, rival_ms = "torch, same run", median(rival_times)
        else:
            more["cusolverdx_ms"] = median(rival_times)
            more["cusolverdx_settings"] = cusolverdx.SETTINGS[rank]
    flops, read = n * (rank**3 / 3 + 2.0 * rank**2), 4.0 * n * (rank * (rank + 1) / 2 + 2 * rank)
    floor = floor_ms(flops, "ffma", read / COPY_TBPS / 1e9)
    name = f"Cholesky and solve of {n:,} systems"
    session.report(Row("cholesky", name, "-", rank, times, flops, read, floor, rival, rival_ms, error, more))


def torch_cholesky(matrices: Any, rhs: Any) -> Step | None:
    """The same work by torch on the same memory, as CuPy arrays again; None without torch or its GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import cupy
    import torch

    if not torch.cuda.is_available():
        return None
    A, b = torch.as_tensor(matrices, device="cuda"), torch.as_tensor(rhs, device="cuda")[:, :, None]

    def run() -> Any:
        x = torch.cholesky_solve(b, torch.linalg.cholesky(A))
        return cupy.asarray(x)[:, :, 0]

    return run


# ------------------------------------------------------------------------------------------ published assemblies

PUBLISHED_TILE = (256, 192)
"""Of BALS's published kernel, whose times are quoted (quoted.py)."""

Methods = tuple[str, ...]

ORDERS = ("given", "by degree")

ROW_METHODS: Methods = ("sparse_syrk", "mo_als")

HERMITIAN_CASES: dict[str, list[tuple[str, tuple[int, ...], Methods]]] = {
    "quick": [("netflix", (32,), (*ROW_METHODS, "bals chip", "bals local", "bals chip own")),
              ("netflix", (64,), (*ROW_METHODS, "bals chip own"))],
    "full": [(shape, (32, 64), (*ROW_METHODS, "bals chip", "bals local", "bals chip own"))
             for shape in ("netflix", "ml-20m", "msd")],
}  # fmt: skip
"""Shape, ranks and methods; "own": tiles of the size that our kernel likes, 256 x 192 otherwise."""


@dataclass
class Hermitians:
    """Sums of the users' normal equations: inputs on the device, and room for the results of any method."""

    device: Any
    matrix: sp.csr_array
    factors: int
    entries: DeviceEntries
    pieces: SegmentedRows
    table: Any
    host_table: np.ndarray
    matrices: Any
    rhs: Any
    tiles: dict[tuple[int, int], tuple[bals.BalsTiles, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, device: Any, matrix: sp.csr_array, factors: int) -> Hermitians:
        """Upload ratings and random factors."""
        degrees = np.diff(matrix.indptr)
        order = np.argsort(-degrees, kind="stable")[: int(np.count_nonzero(degrees))]
        pieces = SegmentedRows.cut(matrix.indptr.astype(np.int64), order, GPU_SEGMENT)
        rng = np.random.default_rng(0)
        table = np.zeros((matrix.shape[1], table_width(factors, np.float32)), np.float32)
        table[:, :factors] = np.abs(rng.standard_normal((len(table), factors), dtype=np.float32)) / np.sqrt(factors)
        slots = max(len(degrees), len(pieces.segments))
        room = device.zeros((slots, factors, factors), np.float32), device.zeros((slots, factors), np.float32)
        entries = DeviceEntries(device.upload(matrix.indices), device.upload(matrix.data))
        return cls(device, matrix, factors, entries, pieces, device.upload(table), table, *room)

    def by_rows(self, method: str) -> tuple[Step, dict[str, Any]]:
        """A method that sums segments of rows; results in slots of `pieces`."""
        assemble = sparse_syrk if method == "sparse_syrk" else mo_als
        segments, slots = self.device.upload(self.pieces.segments), len(self.pieces.segments)
        out = self.matrices[:slots], self.rhs[:slots]
        return lambda: assemble(self.device, out, self.table, self.entries, segments), {}

    def in_order(self) -> Hermitians:
        """The same with whole rows in the given order, as Gates' kernel is printed."""
        indptr = self.matrix.indptr.astype(np.int64)
        return replace(
            self, pieces=SegmentedRows.cut(indptr, np.flatnonzero(np.diff(indptr)), WHOLE_ROW, in_order=True)
        )

    def as_printed(self, config: Any = None, *, with_rhs: bool = True) -> tuple[Step, dict[str, Any]]:
        """Gates' kernel as printed, in batches of the paper's size; for what `in_order` returns."""
        batches = []
        for begin in range(0, len(self.pieces.segments), PUBLISHED_BATCH):
            segments = self.pieces.segments[begin : begin + PUBLISHED_BATCH].copy()
            segments[:, 0] -= begin
            end = begin + len(segments)
            batches.append(((self.matrices[begin:end], self.rhs[begin:end]), self.device.upload(segments)))

        constants = {} if with_rhs else {"WITH_RHS": False}

        def run() -> None:
            for out, segments in batches:
                sparse_syrk_published(self.device, out, self.table, self.entries, segments, config, **constants)

        return run, {}

    def by_tiles(self, method: str) -> tuple[Step, dict[str, Any]]:
        """A variant of BALS; results in order of the rows."""
        spec, rows = self.device.spec, self.matrix.shape[0]
        size = plan_assemblies.bals_tile_sizes(self.factors, 4, spec) if method.endswith("own") else PUBLISHED_TILE
        tiles, more = self._tiled(size)
        out = self.matrices[:rows], self.rhs[:rows]
        variant: Any = "local" if "local" in method else "chip"
        blocks = bals.RowBlocks.of(tiles, 0, -(-rows // size[0]))

        def run() -> None:
            bals.bals(self.device, out, self.table, self.entries, blocks, variant, tiles=tiles)

        return run, more

    def _tiled(self, size: tuple[int, int]) -> tuple[bals.BalsTiles, dict[str, Any]]:
        """Tiles of a size on the device, built once, and what building them took."""
        if size not in self.tiles:
            started = time.perf_counter()
            matrix = BalsMatrix.from_csr(self.matrix, *size)
            seconds, reuse = time.perf_counter() - started, matrix.nnz / max(1, len(matrix.tile_colidx))
            more = {"tile": list(size), "build_s": seconds, "reuse": reuse}
            self.tiles[size] = bals.upload_tiles(self.device, matrix), more
        tiles, more = self.tiles[size]
        return tiles, dict(more)

    def slots_of(self, row: int, tiled: bool) -> np.ndarray:
        """Where the sums of a row are."""
        if tiled:
            return np.array([row])
        place = int(np.flatnonzero(self.pieces.rows == row)[0])
        return np.arange(self.pieces.slots[place], self.pieces.slots[place + 1])

    def error(self, tiled: bool) -> float:
        """Largest error of a handful of rows, of each matrix's or right-hand side's largest element."""
        worst = 0.0
        for row in handful(np.diff(self.matrix.indptr)):
            slots = self.device.upload(self.slots_of(row, tiled))
            A, b = (
                self.device.download(array[slots]).sum(axis=0, dtype=np.float64) for array in (self.matrices, self.rhs)
            )
            objective = replace(OBJECTIVES["explicit"], regularization=0.0)
            wanted = normal_equations(self.matrix, row, self.host_table[:, : self.factors], objective, None)
            errors = (
                np.abs(np.tril(A - wanted[0])).max() / wanted[0].max(),
                np.abs(b - wanted[1]).max() / wanted[1].max(),
            )
            worst = float(np.max([worst, *errors]))
        return worst


def run_syrk(session: Session, profile: str, shape: str | None) -> None:
    """Published assemblies that go row by row."""
    run_hermitians(session, profile, shape, "syrk")


def run_bals(session: Session, profile: str, shape: str | None) -> None:
    """Variants of BALS."""
    run_hermitians(session, profile, shape, "bals")


def run_hermitians(session: Session, profile: str, shape: str | None, task: str) -> None:
    """Hermitians of the user side, with rows and columns as they come and by degree."""
    for where, ranks, methods in HERMITIAN_CASES[profile]:
        chosen = [method for method in methods if (method in ROW_METHODS) == (task == "syrk")]
        for order, factors in itertools.product(ORDERS, ranks):
            if shape in (None, where):
                with session.case(f"{task}, {where}, {factors}, {order}"):
                    prepared = Hermitians.prepare(session.device, ordered(session, where, order), factors)
                    for method in chosen:
                        measure_hermitians(session, prepared, where, order, method)


def ordered(session: Session, shape: str, order: str) -> sp.csr_array:
    """The users' matrix, its rows and columns by degree if so asked; kept beside the drawn data."""
    if order == "given":
        return session.data(shape).user
    key = (shape, order)
    if key not in session.drawn:
        data = session.data(shape)
        started = time.perf_counter()
        session.drawn[key] = replace(data, user=reorder(data.user).matrix)
        click.echo(f"{shape}: rows and columns by degree; {time.perf_counter() - started:.1f} s on the host")
    return session.drawn[key].user


def measure_hermitians(session: Session, prepared: Hermitians, shape: str, order: str, method: str) -> None:
    """One method: summed once and checked, then timed."""
    device, tiled, factors = session.device, method.startswith("bals"), prepared.factors
    with session.case(f"{method}, {shape}, {factors}, {order}"):
        for array in (prepared.matrices, prepared.rhs):
            array.fill(np.nan)  # what another method left must not pass for an answer
        device.synchronize()
        run, more = prepared.by_tiles(method) if tiled else prepared.by_rows(method)
        run()
        error = session.require(prepared.error(tiled), SUMS_TOLERANCE)
        times = [each[0] for each in timed(device, [run], session.repeats)]
        nnz, (rows, fixed) = len(prepared.matrix.data), prepared.matrix.shape
        flops = float(nnz) * factors * (factors + 1)
        written = 4.0 * rows * factors * (factors + 1) / COPY_TBPS / 1e9
        floor = floor_ms(flops, "ffma", gather_ms(nnz, fixed, factors), written)
        row = (flops, 4.0 * nnz * factors, floor, "", None, error, more | {"nnz": nnz})
        session.report(Row("bals" if tiled else "syrk", f"{method}, {order}", shape, factors, times, *row))


# ------------------------------------------------------------------------------------------ top-K

TOPK_N = 10

TOPK_CASES = {
    "quick": [("netflix", 128), ("msd", 128)],
    "full": [("netflix", 64), ("netflix", 128), ("msd", 64), ("msd", 128)],
}
"""(shape, rank)."""


def random_factors(session: Session, data: Data, factors: int) -> tuple[Any, Any]:
    """Random directions; norms of users log-normal, norms of items by the fourth root of their number of entries."""
    random = np.random.default_rng(0)
    tables = []
    for norm in (random.lognormal(0.0, 0.4, data.user.shape[0]), np.diff(data.item.indptr).astype(np.float64) ** 0.25):
        table = random.standard_normal((len(norm), factors), dtype=np.float32)
        table *= (norm / np.sqrt(factors)).astype(np.float32)[:, None]
        tables.append(session.device.upload(table))
    return tables[0], tables[1]


def fitted_factors(session: Session, data: Data, factors: int) -> tuple[Any, Any]:
    """Factors after a few iterations of implicit ALS on the same data."""
    sweeps = session.sweeps(data.name, "implicit", factors).planned().iterate(FITTED_ITERATIONS)
    tables = (sweeps.factors[side].table[:, :factors] for side in SIDES)
    user, item = (array_module(session.device).ascontiguousarray(table) for table in tables)
    return user, item


FACTORS = {"random, norms decay": random_factors, "fitted": fitted_factors}


def run_topk(session: Session, profile: str, shape: str | None) -> None:
    """Top 10 with filter for all users, all on the device."""
    for where, factors in TOPK_CASES[profile]:
        for kind in FACTORS:
            if shape in (None, where):
                with session.case(f"topk, {where}, {factors}, {kind}"):
                    measure_topk(session, where, factors, kind)


def measure_topk(session: Session, shape: str, factors: int, kind: str) -> None:
    """One kind of factors: packed, checked, timed."""
    device, data = session.device, session.data(shape, "implicit")
    users, items = FACTORS[kind](session, data, factors)
    pack_times = wall_ms(device, lambda: PackedItems(device, items), 2)
    packed = PackedItems(device, items)
    seen = device.upload(data.user.indptr.astype(np.int64)), device.upload(data.user.indices)
    found: list[Any] = []

    def run() -> None:
        found[:] = top_k_on_device(device, users, packed, TOPK_N, *seen)

    run()
    error = session.require(check_topk(device, data, users, items, *found), TOLERANCES["float32"])
    times = [each[0] for each in timed(device, [run], session.repeats)]
    (m, n), nnz = data.user.shape, data.nnz
    flops = 2.0 * m * n * factors
    more = {"users_per_second": m / median(times) * 1e3, "pack_ms": min(pack_times), "items": n, "nnz": nnz}
    floor = flops / HALF_PRODUCT_TFLOPS / 1e9
    name = f"top {TOPK_N} filtered, {kind}"
    session.report(Row("topk", name, shape, factors, times, flops, 0.0, floor, "", None, error, more))


def check_topk(device: Any, data: Data, users: Any, items: Any, ids: Any, scores: Any) -> float:
    """For a handful of users: scores against float64, no item of the history, no better item left out.

    Returns
    -------
    float
        Largest deviation, of the largest |user| |item|.
    """
    rows = handful(np.diff(data.user.indptr))
    picked = device.upload(rows)
    table = device.download(items).astype(np.float64)
    longest = np.sqrt(np.einsum("ij,ij->i", table, table).max())
    worst = 0.0
    parts: list[np.ndarray] = [device.download(array[picked]) for array in (users, ids, scores)]
    for row, user, best, score in zip(rows, *parts, strict=True):
        exact = table @ user.astype(np.float64)
        seen = data.user.indices[data.user.indptr[row] : data.user.indptr[row + 1]]
        found = best >= 0
        wanted = min(len(best), len(exact) - len(seen))
        if np.isin(best, seen).any() or len(set(best[found])) != wanted:
            raise WrongAnswerError(f"user {row}: items that were seen, doubled or missing in {best}")
        exact[seen] = -np.inf
        top = np.sort(exact)[::-1][:wanted]
        deviation = np.max(np.abs([score[found] - exact[best[found]], exact[best[found]] - top]), initial=0.0)
        worst = float(np.max([worst, deviation / (longest * np.linalg.norm(user.astype(np.float64)))]))
    return worst


# ------------------------------------------------------------------------------------------ precision

PRECISION_CASES = {
    "quick": [("ml-20m", feedback, 64) for feedback in OBJECTIVES],
    "full": [("ml-20m", feedback, factors) for feedback in OBJECTIVES for factors in (32, 64, 128)],
}

PRECISIONS = ("float32", "bf16x3", "tf32", "float16", "bf16")


def run_precision(session: Session, profile: str, shape: str | None) -> None:
    """Each precision against float64: one half sweep, and RMSE or objective after a few iterations."""
    cases = [(shape or where, feedback, factors) for where, feedback, factors in PRECISION_CASES[profile]]
    for where, feedback, factors in cases:
        with session.case(f"precision, {where}, {feedback}, {factors}"):
            measure_precisions(session, where, feedback, factors)


def measure_precisions(session: Session, shape: str, feedback: str, factors: int) -> None:
    """All precisions of one problem; "plain float32" is Gates' kernel, which multiplies and adds in float32."""
    device, data = session.device, session.data(shape, feedback)
    exact = Sweeps.start(device, data, feedback, factors, dtype="float64")
    session.require(check_sweeps(exact), 1e-11)
    best = exact.planned().iterate(QUALITY_ITERATIONS).quality()
    start = session.sweeps(shape, feedback, factors, (("row_form", "primal"),))
    warm = start.planned().iterate(2)
    width = table_width(factors, np.float64)
    exact.factors = {side: widened(device, warm.factors[side], width) for side in SIDES}
    exact.solve("user")
    reference = exact.factors["user"].matrix
    del exact
    plain = Sweeps.start(device, data, feedback, factors, assembly="sparse_syrk")
    runs = {"plain float32": plain} | {precision: start.planned(precision=precision) for precision in PRECISIONS}
    for name, sweeps in runs.items():
        with session.case(f"precision, {shape}, {feedback}, {factors}, {name}"):
            measure_precision(session, name, sweeps, warm, reference, best)


def widened(device: Any, factors: DeviceFactors, width: int) -> DeviceFactors:
    """Factors in float64."""
    return to_device(device, Factors(factors.matrix.astype(np.float64)), width)


def measure_precision(
    session: Session, name: str, sweeps: Sweeps, warm: Sweeps, reference: np.ndarray, best: float
) -> None:
    """One precision: the users' half sweep from given factors against `reference`, then iterations from the start."""
    session.require(check_sweeps(sweeps), TOLERANCES[name.removeprefix("plain ")])
    quality = sweeps.planned().iterate(QUALITY_ITERATIONS).quality()
    sweeps = replace(sweeps, factors=dict(warm.factors))
    times = [each[0] for each in timed(session.device, [lambda: sweeps.solve("user")], session.repeats)]
    found, filled = sweeps.factors["user"].matrix, sweeps.halves["user"].degrees > 0
    difference = np.linalg.norm(found[filled] - reference[filled], axis=1)
    errors = difference / np.maximum(np.linalg.norm(reference[filled], axis=1), np.finfo(np.float32).tiny)
    rank, nnz = sweeps.halves["user"].plan.rank, sweeps.data.nnz
    measure = "rmse" if sweeps.feedback == "explicit" else "objective"
    more = {"largest_error": float(errors.max()), "median_error": float(np.median(errors)), measure: quality,
            "above_float64": quality / best - 1, "nnz": nnz}  # fmt: skip
    rms = float(np.sqrt(np.mean(errors**2)))
    label = f"{sweeps.feedback} user half sweep, {name}"
    work = (sweeps.flops("user"), 4.0 * nnz * rank, sweeps.floor("user"))
    session.report(Row("precision", label, sweeps.data.name, rank, times, *work, error=rms, more=more))


# ------------------------------------------------------------------------------------------ subspaces

TASTES = Objective.implicit(0.1, "none", 3.0, 0.1)
"""Objective of the subspace task, on data with tastes."""

SUBSPACE_CASES = {"quick": [("ml-20m", 256), ("ml-20m", 512), ("msd", 256)]}
SUBSPACE_CASES["full"] = [*SUBSPACE_CASES["quick"], ("msd", 512), ("netflix", 256)]

EXACT_ITERATIONS = 6
"""Iterations of the exact solver, whose objectives the subspace solver has to reach."""

BLOCK_SIZES = (32, 64)


def run_subspace(session: Session, profile: str, shape: str | None) -> None:
    """Seconds to the objectives of the exact solver."""
    for name, cases in itertools.groupby(SUBSPACE_CASES[profile], key=lambda case: case[0]):
        if shape not in (None, name):
            continue
        user = tasteful_gpu(name)
        data = Data(name, user, transpose(user))
        for _, factors in cases:
            with session.case(f"subspace, {name}, {factors}"):
                measure_subspace(session, data, factors)
        release(session.device)


def measure_subspace(session: Session, data: Data, factors: int) -> None:
    """The exact solver, then subspaces of each size until they are below its last objective."""
    exact_ms, goals = path_of(session.device, data, factors, lambda values: len(values) < EXACT_ITERATIONS)
    rank = {"nnz": data.nnz, "objectives": goals}
    session.report(Row("subspace", "implicit exact", data.name, factors, exact_ms[1:], more=rank))
    for size in BLOCK_SIZES:
        options = {"solver": "subspace", "block_size": size}
        ms, values = path_of(
            session.device, data, factors, lambda values: values[-1] > goals[-1] and len(values) < 40, **options
        )
        reached = [next((k for k, value in enumerate(values, 1) if value <= goal), 0) for goal in goals]
        one, exact = median(ms[1:]), median(exact_ms[1:])
        times = [(k + 1) * exact / (steps * one) if steps else 0.0 for k, steps in enumerate(reached)]
        more = {"nnz": data.nnz, "objectives": values, "iterations_to": reached, "times_faster_to": times}
        name = f"implicit subspaces of {size}"
        session.report(Row("subspace", name, data.name, factors, ms[1:], rival="exact", rival_ms=exact, more=more))


def path_of(
    device: Any, data: Data, factors: int, goes_on: Callable[[list[float]], bool], **options: Any
) -> tuple[list[float], list[float]]:
    """Milliseconds of each iteration, the first of which compiles, and the objectives after them."""
    asked = {
        "factors": factors,
        "device": "cuda",
        "dtype": "float32",
        "num_threads": None,
        "reorder": "none",
        "method": ALS,
    }
    plan = make_plan(TASTES, Settings.check(**(asked | options)), data.user.shape, data.nnz)
    degrees = np.diff(data.user.indptr), np.diff(data.item.indptr)
    state = initial_state(*degrees, factors, np.float32, TASTES, 0.0, 0)
    solver = RankALS(worker=GpuWorker(device), objective=TASTES, **one_device(data.user, data.item, plan, state))
    ms: list[float] = []
    values: list[float] = []
    while not values or goes_on(values):
        ms += wall_ms(device, lambda: [solver.update(side) for side in ("item", "user")], 1)
        values.append(solver.objective_value())
    return ms, values


# ------------------------------------------------------------------------------------------ command line

TASKS: dict[str, Callable[[Session, str, str | None], None]] = {
    "als": run_als,
    "topk": run_topk,
    "precision": run_precision,
    "cholesky": run_cholesky,
    "syrk": run_syrk,
    "bals": run_bals,
    "subspace": run_subspace,
}


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(ALS_CASES)), default="quick", show_default=True)
@click.option("--task", type=click.Choice(list(TASKS)), multiple=True, help="Default: all.")
@click.option("--shape", type=click.Choice(list(GPU_SHAPES)), help="Only this shape; Cholesky has none.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def main(profile: str, task: tuple[str, ...], shape: str | None, repeats: int) -> None:
    try:
        session = Session(open_device(), repeats)
    except DeviceError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{session.device.spec}\n{HEADER}")
    started = time.perf_counter()
    for name in task or TASKS:
        with session.case(name):
            TASKS[name](session, profile, shape)
        session.swept.clear()
        release(session.device)
        click.echo(f"-- {name}: {time.perf_counter() - started:.0f} s since the start")
    click.echo("\n" + HEADER)
    for row in session.rows:
        click.echo(row.text())
    if session.failures:
        raise SystemExit("\n".join(["", "not measured:", *session.failures]))


if __name__ == "__main__":
    main()
