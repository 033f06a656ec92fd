"""Types of a plan: checked settings, the plan itself, facts about the data, estimates, and devices by name."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, Side
from ..core.system import mib, parse_bytes
from ..core.table import html_facts
from ..core.validate import MAX_FACTORS, check_bool, check_choice, check_int, check_threads
from ..data.store import StoreMatrix
from ..device.cuda import DeviceSpec
from ..native import _als
from .fused import solved_apart, table_width
from .grid import Grid

if TYPE_CHECKING:
    from .machine import CpuRates, Machine

CPU_ASSEMBLIES = ("simd", "rank1", "blas3", "bals")
GPU_ASSEMBLIES = ("fused", "sparse_syrk", "mo_als", "bals")

VARIANTS = {
    "blas3_published": ("blas3", "published"),
    "sparse_syrk_published": ("sparse_syrk", "published"),
    "bals_local": ("bals", "local"),
    "mo_als_global": ("mo_als", "global"),
    "mo_als_uncached": ("mo_als", "uncached"),
    "mo_als_plain": ("mo_als", "plain"),
}
"""Published variants of assemblies: assembly and variant by name. Gates' Level-3 BLAS as printed: gemm, 200 rows at a
time in the given order. Their kernel as printed: one stage, whole rows, batches of `PUBLISHED_BATCH` systems, and a
Cholesky without tensor cores. BALS with the paper's mapping of sums to threads. MO-ALS without register accumulators
(fig. 7), without the read-only cache (fig. 8), or without both."""

ASSEMBLIES = ("auto", *CPU_ASSEMBLIES, *GPU_ASSEMBLIES[:-1], *VARIANTS)
SOLVERS = ("cholesky", "cg", "subspace")

NONNEGATIVE = "nonnegative"
"""Solver of the plan in place of "cholesky" if factors have to be nonnegative: exact, too, by coordinate descent."""

PRECISIONS = ("float32", "bf16x3", "tf32", "bf16", "float16")
DTYPES = ("float32", "float64")
REORDERINGS = ("auto", "none", "rows", "columns", "both")
ROW_FORMS = ("auto", "primal", "dual")

REDUCTIONS = ("auto", "parallel", "two_phase", "root")
"""Reductions of partial sums over a split fixed side; "auto" is "parallel"."""

Place = Literal["device", "host", "disk"]  # location of ratings or factors between half sweeps

MAX_CG_STEPS = 10_000  # in exact arithmetic CG converges in `factors` steps, at most 2048
BATCH_FLOPS = 1e10  # work of one kernel call per thread, a few tenths of a second, which bounds the delay of Ctrl-C


@dataclass(frozen=True)
class CpuWork:
    """Work of an iteration on the CPU, in float32."""

    seconds: float  # core seconds
    regions: float  # number of parallel regions
    new_tables: float = 1.0  # share of the factors that is written to newly allocated memory
    longest: float = 0.0  # seconds of the longest sequential chain of updates


class Method(Protocol):
    """Optimization method of a model: a frozen dataclass of validated hyperparameters that plans and prices itself.

    Derive from it for the defaults.
    """

    kind: ClassVar[str]  # key of the rates of the method in `hybridmf.plan.machine`
    entry_seconds: ClassVar[float]
    """Seconds on any device to prepare an entry for the method, beyond validation and transposition."""
    streams: ClassVar[bool]  # whether ratings may come slab by slab; memory then depends on the longest rows

    def names(self, plan: Plan) -> tuple[str, str]:
        """Assembly ("" if the method has none) and short name of the algorithm."""

    def describe(self, plan: Plan) -> str:
        """Short description of the algorithm."""

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        """Complete the plan `base` (sizes, dtype, threads). `spec`: the GPU that was found or requested."""

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work of one iteration."""

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Bytes of factors and residuals that one iteration reads and writes; caches serve part of them."""

    def cpu_setup(self, plan: Plan, rates: CpuRates) -> dict[str, float]:
        """Seconds of set-up on the CPU before the first iteration, by purpose."""
        return {}

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Work of one iteration on the CPU."""

    def gpu_setup(self, plan: Plan) -> dict[str, float]:
        """Seconds of set-up for a GPU beyond that of all methods, by purpose."""
        return {}

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        """Seconds of one iteration on the GPU whose rates `machine` has."""

    def row_cost(self, plan: Plan) -> float:
        """Cost of solving a row beyond that of its entries, in entries; ranks get ranges of equal cost."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyperparameters of the computation; `Objective` has those of the problem.

    `check` validates all but `method` and `frozen`, which are already valid; the plan validates combinations.
    """

    factors: int
    dtype: str
    num_threads: int
    device: str | tuple[str, ...]
    method: Method
    iterations: int = 15
    precision: str = "float32"
    gpu_memory_limit: int | None = None
    solver: str = "cholesky"
    cg_steps: int = 3
    assembly: str = "auto"
    reorder: str = "none"
    block_size: int = 32
    balance: bool = False
    row_form: str = "auto"
    reduction: str = "auto"
    nonnegative: bool = False
    frozen: Side | None = None
    weighted: bool = False  # whether explicit ratings have weights
    features: tuple[tuple[Side, int, int], ...] = ()
    """Sides with features, their number, and the entries of their matrix."""

    @classmethod
    def check(cls, **given: Any) -> Settings:
        """Validate hyperparameters in the forms users may give: None, text for bytes, or a list of devices."""
        asked: Any = cls(**given)
        solver = check_choice("solver", asked.solver, SOLVERS)
        if check_bool("nonnegative", asked.nonnegative) and solver != "cholesky":
            raise ValueError(
                f'nonnegative=True has a solver of its own, for the exact minimum; use solver="cholesky" (the '
                f"default) in place of solver={solver!r}"
            )
        reorder, limit = asked.reorder, asked.gpu_memory_limit
        if isinstance(reorder, (bool, np.bool_)):
            reorder = "both" if reorder else "none"
        return replace(
            asked,
            factors=check_int("factors", asked.factors, 1, MAX_FACTORS),
            dtype=check_dtype(asked.dtype),
            num_threads=check_threads(asked.num_threads),
            device=check_device(asked.device),
            iterations=check_int("iterations", asked.iterations, 1),
            precision=check_choice("precision", asked.precision, PRECISIONS),
            gpu_memory_limit=None if limit is None else parse_bytes("gpu_memory_limit", limit),
            solver=solver,
            cg_steps=check_int("cg_steps", asked.cg_steps, 1, MAX_CG_STEPS),
            assembly=check_choice("assembly", asked.assembly, ASSEMBLIES),
            reorder=check_choice("reorder", reorder, REORDERINGS),
            block_size=check_int("block_size", asked.block_size, 1, MAX_FACTORS),
            balance=check_bool("balance", asked.balance),
            row_form=check_choice("row_form", asked.row_form, ROW_FORMS),
            reduction=check_choice("reduction", asked.reduction, REDUCTIONS),
            nonnegative=bool(asked.nonnegative),
        )

    @property
    def planned_solver(self) -> str:
        """The solver of a plan; nonnegative factors have a separate one."""
        return NONNEGATIVE if self.nonnegative else self.solver


def check_dtype(dtype: Any) -> str:
    """Name of a dtype of factors and values, given as name, type or dtype (None, NumPy's float64, is refused)."""
    if isinstance(dtype, (type, np.dtype)):
        with suppress(TypeError):
            dtype = np.dtype(dtype).name
    return str(check_choice("dtype", dtype, DTYPES))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every size and choice of one run; ``print(plan)`` shows it.

    Attributes
    ----------
    n_users, n_items, nnz, factors : int
        Sizes of the problem.
    rank : int
        Columns of the systems: `factors`, plus one for a bias.
    feedback : {"explicit", "implicit"}
    dtype : {"float32", "float64"}
    method : Method
        ALS, SGD or CCD++; `solver`, `assembly` and `reorder` apply to ALS only.
    solver, assembly, reorder, precision : str
        The choices made; never "auto".
    cg_steps, block_size, num_threads : int
    instruction_set : str
        Instruction set of the vector kernels.
    device, reason : str
        Device of the fit, and the reason for it.
    facts : DegreeFacts or None
        Known properties of the degrees.
    gpu : DeviceSpec or None
        Properties of the GPU when the plan was made.
    devices : tuple of str
        Devices of the ranks, if there are several; `device` is the first of them and serves the fitted model.
    reduction : {"parallel", "two_phase", "root"}
        Reduction of partial sums over a split fixed side.
    streamed : {"", "host", "disk"}
        Source of ratings that are streamed slab by slab in each half sweep: a store on disk, or host memory for a GPU.
        Empty if ratings stay in the memory of the device.
    slab : int
        Entries of the largest slab; 0 if nothing is streamed.
    resident : bool
        Whether the slabs of a store stay on the GPU after they are read.
    scale : ScalePlan or None
        Partition of ALS over several GPUs, or of offloaded factors on one GPU (`hybridmf.plan.partitions`).
    scratch : tuple of str
        Folders for files of factors that fit neither on a GPU nor in host memory, preferred folder first.
    balance : bool
    frozen : {"user", "item"} or None
        Side that keeps its factors.
    weighted : bool
        Whether explicit ratings have weights.
    features : tuple of (side, int, int)
        Sides with features, their number, and the entries of their matrix.
    row_form : {"auto", "primal", "dual"}
        Requested form of short rows.
    dual_sides : tuple of {"user", "item"}
        Sides whose short rows are solved in the dual form; see `hybridmf.plan.row_forms`.
    variant : str
        Variant of the assembly, one of `VARIANTS`; usually empty.
    tile_rows, tile_cols : int
        BALS tile (0 for other assemblies).
    batch_flops : float
        Work of one kernel call; Ctrl-C takes effect between calls.
    segment, batch_slots : int
        On a GPU: entries above which a row is split, and number of systems (or segments of them) in memory at a time.
    bytes : dict of str to int
        Peak memory by purpose.
    decisive : tuple of Estimate
        Estimates that the choice of the device depended on.
    alternatives : callable or None
        Prices the alternatives.
    notes : tuple of str
        Remarks about the choices.
    """

    n_users: int
    n_items: int
    nnz: int
    factors: int
    rank: int
    feedback: str
    dtype: str
    method: Method
    solver: str
    assembly: str
    reorder: str
    precision: str
    cg_steps: int
    block_size: int
    num_threads: int
    instruction_set: str
    device: str = "cpu"
    reason: str = ""
    facts: DegreeFacts | None = field(default=None, compare=False, repr=False)
    gpu: DeviceSpec | None = None
    devices: tuple[str, ...] = ()
    reduction: str = "parallel"
    streamed: str = ""
    slab: int = 0
    resident: bool = False
    scale: Any = None
    scratch: tuple[str, ...] = ()
    balance: bool = False
    frozen: Side | None = None
    weighted: bool = False
    features: tuple[tuple[Side, int, int], ...] = ()
    row_form: str = "auto"
    dual_sides: tuple[Side, ...] = ()
    variant: str = ""
    tile_rows: int = 0
    tile_cols: int = 0
    batch_flops: float = BATCH_FLOPS
    segment: int = 0
    batch_slots: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    decisive: tuple[Estimate, ...] = field(default=(), compare=False, repr=False)
    alternatives: Callable[[], tuple[Estimate, ...]] | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    def changed(self, **values: Any) -> Plan:
        """Copy of the plan with other values."""
        return replace(self, **values)

    @functools.cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """Predictions for this plan, first, and its alternatives, which are priced here: no choice depends on them."""
        return self.decisive if self.alternatives is None else self.alternatives()

    @property
    def total_bytes(self) -> int:
        """Peak memory, the sum of `bytes`."""
        return sum(self.bytes.values())

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize

    @property
    def longest(self) -> tuple[int, int]:
        """Entries of the longest user and of the longest item; 0 if unknown."""
        return (0, 0) if self.facts is None else (self.facts.longest_user, self.facts.longest_item)

    def rows(self, side: Side) -> int:
        """Rows of a side."""
        return self.n_users if side == "user" else self.n_items

    def longest_row(self, side: Side) -> int:
        """Entries of the longest row of a side; 0 if unknown."""
        return self.longest[0 if side == "user" else 1]

    @property
    def filled_rows(self) -> int:
        """Rows of both sides with entries: their number if degrees are known, else an upper bound."""
        rows = self.n_users + self.n_items - (0 if self.facts is None else self.facts.empty)
        return min(rows, min(self.n_users, self.nnz) + min(self.n_items, self.nnz))

    @property
    def table_bytes(self) -> tuple[int, int]:
        """Bytes of the users' and of the items' factors."""
        return self.n_users * self.rank * self.itemsize, self.n_items * self.rank * self.itemsize

    @property
    def device_name(self) -> str:
        """All devices."""
        return "+".join(self.devices) if self.devices else self.device

    @property
    def grids(self) -> dict[Side, Grid]:
        """Grid of ranks of each half sweep; model parallel if none was planned."""
        if self.scale is not None:
            return self.scale.grids
        grid = Grid(1, max(1, len(self.devices)))
        return {"user": grid, "item": grid}

    @property
    def factors_on(self) -> Place:
        """Location of factors between half sweeps."""
        return "device" if self.scale is None else self.scale.factors

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First column, and the column after the last, of each block of coordinates."""
        size = self.system_rank
        return [(first, min(first + size, self.rank)) for first in range(0, self.rank, size)]

    @property
    def system_rank(self) -> int:
        """Order of the largest systems: `rank`, or the size of a block of coordinates if that is smaller."""
        return min(self.rank, self.block_size) if self.solver == "subspace" else self.rank

    @property
    def factors_on_host(self) -> bool:
        """Whether factors are in host memory, and on a GPU only while they are used."""
        return self.factors_on == "host"

    @property
    def offloaded(self) -> bool:
        """Whether factors are in host memory or in files, and on a GPU only while they are used."""
        return self.factors_on != "device"

    @property
    def ratings_on_device(self) -> bool:
        """Whether GPUs have all ratings in memory, whole rows in the order of the input, and need them nowhere else."""
        if self.gpu is None or self.streamed or self.offloaded or self.method.kind != "als":
            return False
        # the layout of BALS is built on the host
        if self.reorder != "none" or self.assembly == "bals":
            return False
        return not self.devices or self._transposed_together

    @property
    def _transposed_together(self) -> bool:
        """Whether several GPUs can transpose ratings, with up to twice the memory of both orientations.

        A GPU may have more entries than the mean, which `bytes` are for.
        """
        assert self.gpu is not None
        whole = all(grid.splits == 1 for grid in self.grids.values())
        stacked = len(self.devices) * self.n_items < 2**31  # rows of hybridmf.ranks.dealt are int32
        return whole and stacked and 3 * self.bytes.get("ratings", 0) <= self.gpu.free_bytes

    def tables_of(self, side: Side) -> int:
        """Number of tables of a side's offloaded factors that exist at a time: new ones and previous ones.

        Balancing creates new tables of both sides; item factors are replaced while the previous ones still exist.
        """
        return 3 if self.balance and side == "item" else 2

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of offloaded factors of both sides, new and old."""
        rows = self.tables_of("user") * self.n_users + self.tables_of("item") * self.n_items
        if self.devices:
            rows += len(self.devices) * max(self.n_users, self.n_items)  # gathered by each rank
        return rows * table_width(self.rank, self.dtype) * self.itemsize

    @property
    def host_bytes(self) -> int:
        """Host memory of offloaded factors: those of the current half sweep and the previous ones."""
        return self.offloaded_bytes if self.factors_on == "host" else 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of offloaded factors in files."""
        return self.offloaded_bytes if self.factors_on == "disk" else 0

    @property
    def row_cost(self) -> float:
        """Cost of solving a row beyond that of its entries, in entries; ranks get ranges of equal cost."""
        return self.method.row_cost(self)

    @property
    def asks_for_degrees(self) -> bool:
        """Whether memory depends on the unknown degree of the longest item, since slabs hold whole rows."""
        if self.gpu is None or not self.method.streams or self.longest[1]:
            return False
        most = min(self.nnz, self.n_users)
        in_slabs = self.streamed != "" and not self.resident and (self.scale is not None or self.slab < most)
        return in_slabs or self.batch_slots * self.segment < most

    @property
    def assembly_name(self) -> str:
        """Assembly and variant as `Settings` names them."""
        return f"{self.assembly}_{self.variant}" if self.variant else self.assembly

    @property
    def uses_blas(self) -> bool:
        """Whether assembly and Gram matrix use the published algorithms, which call BLAS."""
        return self.assembly in ("rank1", "blas3")

    @property
    def solved_apart(self) -> bool:
        """Whether sums of all rows, not only of long ones, go through a GPU's memory before they are solved."""
        return self.assembly != "fused" or self.solver == NONNEGATIVE or solved_apart(self.system_rank, self.solver)

    @property
    def flops_per_iteration(self) -> float:
        """Useful work of one iteration."""
        return self.method.flops_per_iteration(self)

    @property
    def bytes_per_iteration(self) -> float:
        """Bytes read and written, including those served by caches."""
        return self.method.bytes_per_iteration(self)

    def _repr_html_(self) -> str:
        lines = str(self).splitlines()  # names take ten columns
        return html_facts("Plan", [(line[:10].strip(), line[10:]) for line in lines])

    def __str__(self) -> str:
        lines = [
            f"device    {self.device_name}: {self.reason}",
            f"problem   {self.n_users:,} users x {self.n_items:,} items, {self.nnz:,} entries, "
            f"{self.feedback} feedback",
            f"factors   {self.factors} in {self.dtype}",
            f"solver    {self.method.describe(self)}",
            f"kernels   {self._kernels()}",
            f"work      {self.flops_per_iteration / 1e9:,.1f} GFLOP per iteration",
            f"memory    {mib(self.total_bytes)}{' on each' if self.devices and self.scale else ''}: "
            + ", ".join(f"{name} {mib(size)}" for name, size in self.bytes.items()),
        ]
        if self.streamed:
            once = ", once: they stay on the GPU" if self.resident else ""
            lines.append(f"streamed  from {self.streamed} in slabs of up to {self.slab:,} entries{once}")
        lines += [f"estimate  {text}" for text in estimate_lines(self.estimates)]
        if self.offloaded:
            where = f" in {self.scratch[0]!r}" if self.factors_on == "disk" else ""
            size = f"{self.factors_on:10s}{mib(self.offloaded_bytes)}{where}"
            lines.append(f"{size}: factors, old and new; they come to the GPU in parts")
        if self.scale is not None:
            lines += [str(half) for half in self.scale.halves.values()]
            if self.reduction != "parallel":
                lines.append(f"reduction {self.reduction}")
            lines.append(f"predicted {self.scale.seconds:.3g} s per iteration")
        elif self.devices and self.method.streams:
            grid = self.grids["user"]
            lines.append(f"ranks     {grid.splits} x {grid.groups}: each solves its rows with the whole fixed side")
        return "\n".join(lines + [f"note      {note}" for note in self.notes])

    def _kernels(self) -> str:
        if self.gpu is None:
            return f"{self.instruction_set} on {self.num_threads} threads"
        if not self.segment:
            return f"{self.gpu}, {self.precision}"
        return (
            f"{self.gpu}, {self.precision} products, rows cut after {self.segment:,} entries, "
            f"{self.batch_slots:,} systems at a time"
        )


def memory_lacks(plan: Plan) -> str:
    """Message if the plan needs more memory than its GPU has free; empty if it fits."""
    if plan.gpu is None or plan.total_bytes <= plan.gpu.free_bytes:
        return ""
    parts = ", ".join(f"{name} {mib(size)}" for name, size in plan.bytes.items())
    return (
        f"the fit needs about {mib(plan.total_bytes)} on {plan.gpu.name} and {mib(plan.gpu.free_bytes)} are free "
        f"({parts})"
    )


def instruction_set_notes() -> list[str]:
    """A note if HYBRIDMF_ISA asks for kernels that do not exist or cannot run here."""
    wanted, used = os.environ.get("HYBRIDMF_ISA", ""), _als.instruction_set()
    if wanted in ("", used):
        return []
    known = "avx512, avx2, neon, portable"
    return [f"HYBRIDMF_ISA={wanted!r} names no kernels this processor can run (known: {known}); using {used}"]


PIECE = 1 << 22  # entries whose columns are counted at a time, since NumPy converts them to a wider type


@dataclass(frozen=True)
class DegreeFacts:
    """Known properties of the degrees of given data."""

    longest_user: int = 0
    longest_item: int = 0  # entries of the longest row of either side; 0 if not counted
    empty: int = 0  # known rows without entries, which solvers skip
    positions: tuple[int, int] = field(default=(-1, -1), compare=False)
    """Positions of the longest user and the longest item; -1 if not counted."""

    @classmethod
    def of(cls, matrix: sp.csr_array | StoreMatrix, *, items: bool = False) -> DegreeFacts:
        """Properties of ratings, shape (n_users, n_items).

        Row degrees are free; column degrees (`items`) need a pass over all entries, unless a store has them.
        """
        counted = None
        if items and hasattr(matrix, "indices"):
            counted = np.zeros(matrix.shape[1], dtype=np.int64)
            for start in range(0, matrix.nnz, PIECE):
                counted += np.bincount(matrix.indices[start : start + PIECE], minlength=matrix.shape[1])
        elif items:
            counted = matrix.transposed().degrees
        return cls.of_degrees(np.diff(matrix.indptr), counted)

    @classmethod
    def of_degrees(cls, users: np.ndarray, items: np.ndarray | None = None) -> DegreeFacts:
        """Properties from the degrees of users and, if counted, of items."""
        longest, empty, positions = [0, 0], 0, [-1, -1]
        for k, degrees in enumerate((users, items)):
            if degrees is not None and len(degrees):
                positions[k] = int(degrees.argmax())
                longest[k] = int(degrees[positions[k]])
                empty += int(np.count_nonzero(degrees == 0))
        return cls(longest[0], longest[1], empty, (positions[0], positions[1]))


DEVICES = '"auto", "cpu", "cuda" or "cuda:N", or a list such as ["cuda:0", "cuda:1"]'
MAX_CPU_RANKS = 64  # most ranks on the CPU: they are meant for testing, and each communicates with all others


def check_device(device: object) -> str | tuple[str, ...]:
    """Validated name of a device, or names of several (one for each rank; the CPU may occur more than once)."""
    if isinstance(device, (list, tuple)):
        return _check_ranks(device)
    if not isinstance(device, str):
        raise TypeError(f"device must be {DEVICES}, got {type(device).__name__} {device!r}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ValueError(f"device must be {DEVICES}; got {device!r}")
    return device


def _check_ranks(devices: list[object] | tuple[object, ...]) -> tuple[str, ...]:
    names = [name if isinstance(name, str) else "" for name in devices]
    if not names or not all(re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in names):
        raise ValueError(f'device, a list of devices, holds "cpu", "cuda" or "cuda:N", once a rank; got {devices!r}')
    names = ["cuda:0" if name == "cuda" else name for name in names]
    if len({name == "cpu" for name in names}) > 1:
        raise ValueError(f"device={devices!r} mixes CPU and GPUs; name devices of one kind")
    gpus = [name for name in names if name != "cpu"]
    if len(names) - len(gpus) > MAX_CPU_RANKS:
        raise ValueError(
            f"device names the CPU {len(names)} times; at most {MAX_CPU_RANKS} ranks share it, and one is as fast: "
            'use device="cpu", which takes all cores'
        )
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"device={devices!r} names a GPU twice; name each once")
    return tuple(names)


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory of one combination of device, assembly, solver and precision."""

    device: str
    assembly: str  # "" if the method has none
    solver: str  # or the algorithm of such a method
    precision: str
    seconds_per_iteration: float = 0.0
    setup_seconds: float = 0.0
    total_seconds: float = 0.0  # for the requested iterations
    bytes: int = 0  # peak memory
    why_not: str = ""  # reason why it is infeasible; "" if feasible
    chosen: bool = False
    asked: bool = True  # whether it has the requested solver and precision

    @property
    def feasible(self) -> bool:
        """Whether the combination can run."""
        return not self.why_not

    @property
    def name(self) -> str:
        """Device, solver, assembly and precision as text."""
        words = [self.solver, self.assembly, "" if self.precision == "float32" else self.precision]
        return f"{self.device} " + ", ".join(word for word in words if word)

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.name}: {self.why_not}"
        return (
            f"{self.name}: {seconds_text(self.total_seconds)} = {seconds_text(self.setup_seconds)} set-up + "
            f"{seconds_text(self.seconds_per_iteration)} an iteration; {self.bytes / 2**20:,.1f} MiB"
        )


def seconds_text(seconds: float) -> str:
    """Three digits with a unit: "12.3 ms"."""
    for limit, unit, factor in ((1e-3, "us", 1e6), (1.0, "ms", 1e3)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def estimate_lines(estimates: tuple[Estimate, ...]) -> list[str]:
    """Lines of a printed plan about its estimates: all requested combinations, and the fastest of the others."""
    wanted = [one for one in estimates if one.asked or one.chosen]
    rest = [one for one in estimates if one not in wanted and one.feasible]
    lines = [str(one) for one in wanted]
    if rest:
        lines.append(f"otherwise {min(rest, key=lambda one: one.total_seconds)}")
    return lines
