"""Types of a plan: checked settings, the plan itself, facts about the data, estimates, and devices by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar, overload

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, Side
from ..core.system import mib, parse_bytes
from ..core.validate import MAX_FACTORS, check_bool, check_choice, check_int, check_threads
from ..data.store import StoreMatrix
from ..device.cuda import DeviceSpec
from ..native import _als
from .fused import table_width
from .grid import Grid
from .half_sweep import Place
from .machine import CpuRates, Machine
from .ranks import ScalePlan

CPU_ASSEMBLIES = ("simd", "rank1", "blas3", "bals")

GPU_ASSEMBLIES = ("fused", "sparse_syrk", "mo_als", "bals")

VARIANTS = {
    "bals_local": ("bals", "local"),
    "mo_als_global": ("mo_als", "global"),
    "mo_als_uncached": ("mo_als", "uncached"),
    "mo_als_plain": ("mo_als", "plain"),
}
"""Published ways to run a GPU's assembly, beside the best one: assembly and variant by name. BALS with its sums where
the paper's mapping to threads puts them; MO-ALS without its registers (fig. 7), read-only path (fig. 8), or both."""

ASSEMBLIES = ("auto", *CPU_ASSEMBLIES, *GPU_ASSEMBLIES[:-1], *VARIANTS)

GPU_SOLVERS = ("cholesky", "cg")

SOLVERS = ("cholesky", "cg", "subspace")

PRECISIONS = ("float32", "bf16x3", "tf32", "bf16", "float16")

DTYPES = ("float32", "float64")

REORDERINGS = ("auto", "none", "rows", "columns", "both")

REDUCTIONS = ("auto", "parallel", "two_phase", "root")
"""How GPUs add up sums over a split fixed side; "auto" is "parallel"."""

MAX_CG_STEPS = 10_000
"""Exact arithmetic would need `factors` steps, 2048 at most."""

BATCH_FLOPS = 1e10
"""Work of one kernel call per thread, a few tenths of a second: how long Ctrl-C may have to wait."""

T = TypeVar("T")


@dataclass(frozen=True)
class CpuWork:
    """Work of an iteration on the CPU, in float32.

    Attributes
    ----------
    seconds : float
        Of one core.
    regions : float
        Parallel regions.
    new_tables : float
        Factors that are written to new memory, as a share of all.
    longest : float
        Seconds of the longest chain of updates that no two threads can share.
    """

    seconds: float
    regions: float
    new_tables: float = 1.0
    longest: float = 0.0


class Method(Protocol):
    """How a model computes; a frozen dataclass of checked hyperparameters, which plans and prices itself."""

    kind: ClassVar[str]
    """Key of the rates that depend on it in `hybridmf.plan.machine`."""
    entry_seconds: ClassVar[float]
    """Seconds on any device to prepare an entry for the method, beyond its check and transposition."""
    streams: ClassVar[bool]
    """Whether ratings may come slab by slab; memory then depends on the longest rows."""

    def names(self, plan: Plan) -> tuple[str, str]:
        """Assembly, "" where the method has none, and what runs, in a word or two."""

    def describe(self, plan: Plan) -> str:
        """What runs, in a few words."""

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        """Decide what `base` (sizes, dtype, threads) leaves open. `spec`: the GPU that was found or asked for."""

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work of one iteration."""

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Factors and residuals that one iteration reads and writes, by count: caches serve part of them."""

    def cpu_setup(self, plan: Plan, rates: CpuRates) -> dict[str, float]:
        """Seconds of what is prepared on the CPU before the first iteration, by purpose."""

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Work of one iteration on the CPU."""

    def gpu_setup(self, plan: Plan) -> dict[str, float]:
        """Seconds of what is prepared for a GPU beyond what all methods need, by purpose."""

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        """Seconds of one iteration on the GPU that `machine` has the rates of."""

    def row_cost(self, plan: Plan) -> float:
        """What solving a row costs beside its entries, in entries; ranks get rows of equal cost."""


@dataclass(frozen=True)
class Settings:
    """Checked hyperparameters of how to compute (what to compute is the Objective)."""

    factors: int
    solver: str
    cg_steps: int
    assembly: str
    reorder: str
    precision: str
    dtype: str
    num_threads: int
    device: str | tuple[str, ...]
    block_size: int
    balance: bool
    reduction: str
    gpu_memory_limit: int | None
    iterations: int
    method: Method | None = None

    @classmethod
    def check(
        cls,
        *,
        factors: Any,
        dtype: Any,
        num_threads: Any,
        device: Any,
        iterations: Any = 15,
        precision: Any = "float32",
        gpu_memory_limit: Any = None,
        solver: Any = "cholesky",
        cg_steps: Any = 3,
        assembly: Any = "auto",
        reorder: Any = "none",
        block_size: Any = 32,
        balance: Any = False,
        reduction: Any = "auto",
        method: Method | None = None,
    ) -> Settings:
        """Judge each hyperparameter by itself; the plan judges combinations. `method` is checked already."""
        if isinstance(reorder, (bool, np.bool_)):
            reorder = "both" if reorder else "none"
        return cls(
            factors=check_int("factors", factors, 1, MAX_FACTORS),
            solver=check_choice("solver", solver, SOLVERS),
            cg_steps=check_int("cg_steps", cg_steps, 1, MAX_CG_STEPS),
            assembly=check_choice("assembly", assembly, ASSEMBLIES),
            reorder=check_choice("reorder", reorder, REORDERINGS),
            precision=check_choice("precision", precision, PRECISIONS),
            dtype=check_choice("dtype", _dtype_name(dtype), DTYPES),
            num_threads=check_threads(num_threads),
            device=check_device(device),
            block_size=check_int("block_size", block_size, 1, MAX_FACTORS),
            balance=check_bool("balance", balance),
            reduction=check_choice("reduction", reduction, REDUCTIONS),
            gpu_memory_limit=None if gpu_memory_limit is None else parse_bytes("gpu_memory_limit", gpu_memory_limit),
            iterations=check_int("iterations", iterations, 1),
            method=method,
        )


def _dtype_name(dtype: Any) -> Any:
    """Name of a type; what is none (np.dtype(None) would be float64) comes back for `check_choice` to refuse."""
    if isinstance(dtype, (type, np.dtype)):
        with suppress(TypeError):
            return np.dtype(dtype).name
    return dtype


@dataclass(frozen=True)
class Sizes:
    """What is factorized.

    Attributes
    ----------
    n_users, n_items, nnz, factors : int
    rank : int
        Columns of the systems that are solved: `factors`, plus one for a bias.
    feedback : {"explicit", "implicit"}
    dtype : {"float32", "float64"}
    facts : Facts or None
        What is known of the degrees of the data.
    """

    n_users: int
    n_items: int
    nnz: int
    factors: int
    rank: int
    feedback: str
    dtype: str
    facts: Facts | None = field(default=None, compare=False, repr=False)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize

    @property
    def longest(self) -> tuple[int, int]:
        """Entries of the longest user and of the longest item; 0 where that is unknown."""
        return (0, 0) if self.facts is None else (self.facts.longest_user, self.facts.longest_item)

    @property
    def filled_rows(self) -> int:
        """Rows of both sides that have entries: a bound, or their number where degrees are known."""
        rows = self.n_users + self.n_items - (0 if self.facts is None else self.facts.empty)
        return min(rows, min(self.n_users, self.nnz) + min(self.n_items, self.nnz))

    @property
    def table_bytes(self) -> tuple[int, int]:
        """Bytes of the users' and of the items' factors."""
        return self.n_users * self.rank * self.itemsize, self.n_items * self.rank * self.itemsize


@dataclass(frozen=True)
class Placement:
    """Where it runs, and where ratings and factors are between half sweeps; `Plan` describes the attributes."""

    device: str
    reason: str
    num_threads: int
    gpu: DeviceSpec | None = None
    devices: tuple[str, ...] = ()
    reduction: str = "parallel"
    streamed: str = ""
    slab: int = 0
    resident: bool = False
    scale: ScalePlan | None = None
    scratch: tuple[str, ...] = ()

    @property
    def device_name(self) -> str:
        """All devices."""
        return "+".join(self.devices) if self.devices else self.device

    @property
    def grids(self) -> dict[Side, Grid]:
        """How each half sweep spreads over ranks; model parallel if nothing was planned."""
        if self.scale is not None:
            return self.scale.grids
        grid = Grid(1, max(1, len(self.devices)))
        return {"user": grid, "item": grid}

    @property
    def factors_on(self) -> Place:
        """Where factors are between half sweeps."""
        return "device" if self.scale is None else self.scale.factors


@dataclass(frozen=True)
class Kernels:
    """What runs there; `Plan` describes the attributes."""

    method: Method
    solver: str
    cg_steps: int
    block_size: int
    assembly: str
    reorder: str
    precision: str
    instruction_set: str
    balance: bool = False
    variant: str = ""
    tile_rows: int = 0
    tile_cols: int = 0
    batch_flops: float = BATCH_FLOPS
    segment: int = 0
    batch_slots: int = 0


@dataclass(frozen=True)
class Prediction:
    """What it takes; `Plan` describes the attributes."""

    bytes: dict[str, int] = field(default_factory=dict)
    estimates: tuple[Estimate, ...] = field(default=(), compare=False, repr=False)

    @property
    def total_bytes(self) -> int:
        """Peak memory, the sum of `bytes`."""
        return sum(self.bytes.values())


class _Part(Generic[T]):
    """A public attribute of a plan that one of its parts holds."""

    def __init__(self, read: Callable[[Plan], T]) -> None:
        self.read = read

    @overload
    def __get__(self, plan: None, owner: type[Plan]) -> _Part[T]: ...

    @overload
    def __get__(self, plan: Plan, owner: type[Plan]) -> T: ...

    def __get__(self, plan: Plan | None, owner: type[Plan]) -> _Part[T] | T:
        return self if plan is None else self.read(plan)


@dataclass(frozen=True)
class Plan:
    """Every size and choice of one run, in four parts; ``print(plan)`` shows it.

    Attributes
    ----------
    problem : Sizes
        Sizes: `n_users`, `n_items`, `nnz`, `factors`, `rank`, `feedback`, `dtype`, `facts`.
    placement : Placement
        Devices, and where ratings and factors are: `device`, `reason`, `devices`, `gpu`, `num_threads`, `streamed`,
        `slab`, `resident`, `scale`, `scratch`.
    kernels : Kernels
        `method`, `solver`, `cg_steps`, `block_size`, `assembly`, `variant`, `reorder`, `precision`, `balance`,
        `instruction_set`, `tile_rows`, `tile_cols`, `batch_flops`, `segment`, `batch_slots`.
    estimate : Prediction
        `bytes`, `estimates`.
    notes : tuple of str
        What a reader should know about the choices.
    device, reason : str
        Where it runs and why.
    n_users, n_items, nnz, factors : int
        Sizes of the problem.
    rank : int
        Columns of the systems that are solved: `factors`, plus one for a bias.
    solver, assembly, reorder, precision, dtype : str
        What was decided; never "auto".
    cg_steps, block_size, num_threads : int
    balance : bool
    instruction_set : str
        Vector kernels in use.
    variant : str
        Of the assembly, as in `VARIANTS`; usually empty.
    tile_rows, tile_cols : int
        BALS tile (0 for other assemblies).
    batch_flops : float
        Work of one kernel call; Ctrl-C is answered between calls.
    gpu : DeviceSpec or None
        The GPU, as it was when the plan was made.
    segment, batch_slots : int
        On a GPU: entries above which a row is split, and systems (or segments of them) in memory at a time.
    bytes : dict of str to int
        Memory by purpose, at the peak.
    method : Method
        ALS, SGD or CCD++; `solver`, `assembly` and `reorder` say nothing where it is not ALS.
    streamed : {"", "host", "disk"}
        Where ratings come from slab by slab in each half sweep: a store that is not loaded, or, on a GPU, the memory
        of the host. Empty: they stay where the work is done.
    slab : int
        Entries of the largest slab, or what they are cut to; 0 where nothing is streamed.
    resident : bool
        The slabs of a store stay on the GPU once they were read.
    devices : tuple of str
        Of each rank, where there are several; `device` is then the first, which serves the fitted model.
    reduction : {"parallel", "two_phase", "root"}
        How GPUs add up sums over a split fixed side.
    scale : ScalePlan or None
        How ALS spreads over several GPUs; on one, in which parts factors come that do not stay there.
    scratch : tuple of str
        Folders for files of factors that fit neither on a GPU nor in the memory of the host, the one to use first.
    facts : Facts or None
        What is known of the degrees of the data.
    estimates : tuple of Estimate
        What this plan and the other ways to compute are predicted to take; the chosen one first.
    """

    problem: Sizes
    placement: Placement
    kernels: Kernels
    estimate: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    n_users = _Part(lambda plan: plan.problem.n_users)
    n_items = _Part(lambda plan: plan.problem.n_items)
    nnz = _Part(lambda plan: plan.problem.nnz)
    factors = _Part(lambda plan: plan.problem.factors)
    rank = _Part(lambda plan: plan.problem.rank)
    feedback = _Part(lambda plan: plan.problem.feedback)
    dtype = _Part(lambda plan: plan.problem.dtype)
    facts = _Part(lambda plan: plan.problem.facts)
    device = _Part(lambda plan: plan.placement.device)
    device_name = _Part(lambda plan: plan.placement.device_name)
    reason = _Part(lambda plan: plan.placement.reason)
    devices = _Part(lambda plan: plan.placement.devices)
    reduction = _Part(lambda plan: plan.placement.reduction)
    gpu = _Part(lambda plan: plan.placement.gpu)
    num_threads = _Part(lambda plan: plan.placement.num_threads)
    streamed = _Part(lambda plan: plan.placement.streamed)
    slab = _Part(lambda plan: plan.placement.slab)
    resident = _Part(lambda plan: plan.placement.resident)
    scale = _Part(lambda plan: plan.placement.scale)
    grids = _Part(lambda plan: plan.placement.grids)
    factors_on = _Part(lambda plan: plan.placement.factors_on)
    scratch = _Part(lambda plan: plan.placement.scratch)
    method = _Part(lambda plan: plan.kernels.method)
    solver = _Part(lambda plan: plan.kernels.solver)
    cg_steps = _Part(lambda plan: plan.kernels.cg_steps)
    block_size = _Part(lambda plan: plan.kernels.block_size)
    assembly = _Part(lambda plan: plan.kernels.assembly)
    variant = _Part(lambda plan: plan.kernels.variant)
    reorder = _Part(lambda plan: plan.kernels.reorder)
    precision = _Part(lambda plan: plan.kernels.precision)
    balance = _Part(lambda plan: plan.kernels.balance)
    instruction_set = _Part(lambda plan: plan.kernels.instruction_set)
    tile_rows = _Part(lambda plan: plan.kernels.tile_rows)
    tile_cols = _Part(lambda plan: plan.kernels.tile_cols)
    batch_flops = _Part(lambda plan: plan.kernels.batch_flops)
    segment = _Part(lambda plan: plan.kernels.segment)
    batch_slots = _Part(lambda plan: plan.kernels.batch_slots)
    bytes = _Part(lambda plan: plan.estimate.bytes)
    total_bytes = _Part(lambda plan: plan.estimate.total_bytes)
    estimates = _Part(lambda plan: plan.estimate.estimates)

    def changed(self, **values: Any) -> Plan:
        """Return the plan with other values of public attributes, each in the part that holds it."""
        parts: dict[str, Any] = {}
        for name in ("problem", "placement", "kernels", "estimate"):
            part = getattr(self, name)
            held = {one.name for one in fields(part)} & values.keys()
            if held:
                parts[name] = replace(part, **{one: values.pop(one) for one in held})
        return replace(self, **parts, **values)

    @property
    def factors_on_host(self) -> bool:
        """Whether factors are in the memory of the host, and on a GPU only while they are worked with."""
        return self.factors_on == "host"

    @property
    def offloaded(self) -> bool:
        """Whether factors are in the memory of the host or in files, and on a GPU only while they are worked with."""
        return self.factors_on != "device"

    def tables_of(self, side: Side) -> int:
        """Tables of a side's factors that a fit has at a time where they are offloaded: new ones beside the last ones.

        To balance makes new ones of both sides, of which the items' are replaced while the last ones are still there.
        """
        return 3 if self.balance and side == "item" else 2

    @property
    def offloaded_bytes(self) -> int:
        """Of the factors of both sides, new and old, where they are offloaded."""
        rows = self.tables_of("user") * self.n_users + self.tables_of("item") * self.n_items
        if self.devices:
            rows += len(self.devices) * max(self.n_users, self.n_items)  # gathered by each rank
        return rows * table_width(self.rank, self.dtype) * self.problem.itemsize

    @property
    def host_bytes(self) -> int:
        """Memory of the host that factors take which stay there: those of a half sweep beside the ones before."""
        return self.offloaded_bytes if self.factors_on == "host" else 0

    @property
    def disk_bytes(self) -> int:
        """The same of files, where factors are on disk."""
        return self.offloaded_bytes if self.factors_on == "disk" else 0

    @property
    def row_cost(self) -> float:
        """What solving a row costs beside its entries, in entries; ranks get rows of equal cost."""
        return self.method.row_cost(self)

    @property
    def asks_for_degrees(self) -> bool:
        """Whether its memory depends on the longest item, whose degree is unknown: ratings come in whole rows."""
        if self.gpu is None or not self.method.streams or self.problem.longest[1]:
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
        """Whether assembly and Gram matrix are the published ones, which go through BLAS."""
        return self.assembly in ("rank1", "blas3")

    @property
    def flops_per_iteration(self) -> float:
        """Useful work of one iteration."""
        return self.method.flops_per_iteration(self)

    @property
    def bytes_per_iteration(self) -> float:
        """Bytes moved by count, whatever caches serve."""
        return self.method.bytes_per_iteration(self)

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
        if self.host_bytes:
            lines.append(f"host      {mib(self.host_bytes)}: factors, old and new; they come to the GPU in parts")
        if self.disk_bytes:
            lines.append(
                f"disk      {mib(self.disk_bytes)} in {self.scratch[0]!r}: factors, old and new; they come to the GPU "
                "in parts"
            )
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


def instruction_set_notes() -> list[str]:
    """A note if HYBRIDMF_ISA asks for kernels that do not exist or cannot run here."""
    wanted, used = os.environ.get("HYBRIDMF_ISA", ""), _als.instruction_set()
    if wanted in ("", used):
        return []
    known = "avx512, avx2, portable"
    return [f"HYBRIDMF_ISA={wanted!r} names no kernels this processor can run (known: {known}); using {used}"]


PIECE = 1 << 22
"""Entries whose columns are counted at a time: NumPy widens what it counts."""


@dataclass(frozen=True)
class Facts:
    """What is known of the degrees, where there are data and not only their sizes.

    Attributes
    ----------
    longest_user, longest_item : int
        Entries of the longest row of either side; 0 where they have not been counted.
    empty : int
        Rows without entries that have been found, which no solver touches.
    positions : (int, int)
        Which user and which item are the longest; -1 where they have not been counted.
    """

    longest_user: int = 0
    longest_item: int = 0
    empty: int = 0
    positions: tuple[int, int] = field(default=(-1, -1), compare=False)

    @classmethod
    def of(cls, matrix: sp.csr_array | StoreMatrix, *, items: bool = False) -> Facts:
        """Of ratings, shape (n_users, n_items).

        The rows' cost nothing, the columns' (`items`) a pass over all entries, unless a store has counted them.
        """
        return cls.of_degrees(np.diff(matrix.indptr), _item_degrees(matrix) if items else None)

    @classmethod
    def of_degrees(cls, users: np.ndarray, items: np.ndarray | None = None) -> Facts:
        """Of the entries of each user, and of each item where they have been counted."""
        longest, empty, positions = [0, 0], 0, [-1, -1]
        for k, degrees in enumerate((users, items)):
            if degrees is not None and len(degrees):
                positions[k] = int(degrees.argmax())
                longest[k] = int(degrees[positions[k]])
                empty += int(np.count_nonzero(degrees == 0))
        return cls(longest[0], longest[1], empty, (positions[0], positions[1]))


def _item_degrees(matrix: sp.csr_array | StoreMatrix) -> np.ndarray:
    if not hasattr(matrix, "indices"):
        return matrix.transposed().degrees
    degrees = np.zeros(matrix.shape[1], dtype=np.int64)
    for start in range(0, matrix.nnz, PIECE):
        degrees += np.bincount(matrix.indices[start : start + PIECE], minlength=matrix.shape[1])
    return degrees


DEVICES = '"auto", "cpu", "cuda" or "cuda:N", or a list such as ["cuda:0", "cuda:1"]'

MAX_CPU_RANKS = 64
"""Most ranks on the CPU: they are there to try out, and each talks to each other."""


def check_device(device: object) -> str | tuple[str, ...]:
    """A device's name, or the names of several (one a rank; the CPU may be named more than once), judged.

    Raises
    ------
    TypeError, ValueError
    """
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
    """What one way to compute is predicted to take.

    Attributes
    ----------
    device, assembly, solver, precision : str
        `assembly` is "" where the method has none; `solver` then says what runs.
    seconds_per_iteration, setup_seconds, total_seconds : float
        Of the iterations asked for; 0 where it is not feasible.
    bytes : int
        Memory at the peak.
    why_not : str
        Why it cannot be; "" if it can.
    chosen : bool
    asked : bool
        Whether it computes what was asked for: the solver and precision of the request.
    """

    device: str
    assembly: str
    solver: str
    precision: str
    seconds_per_iteration: float = 0.0
    setup_seconds: float = 0.0
    total_seconds: float = 0.0
    bytes: int = 0
    why_not: str = ""
    chosen: bool = False
    asked: bool = True

    @property
    def feasible(self) -> bool:
        """Whether it can be done at all."""
        return not self.why_not

    @property
    def name(self) -> str:
        """Device, solver, assembly and precision, in a few words."""
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
    """What a printed plan says of its estimates: all that was asked for, and the fastest of the rest."""
    wanted = [one for one in estimates if one.asked or one.chosen]
    rest = [one for one in estimates if one not in wanted and one.feasible]
    lines = [str(one) for one in wanted]
    if rest:
        lines.append(f"otherwise {min(rest, key=lambda one: one.total_seconds)}")
    return lines
