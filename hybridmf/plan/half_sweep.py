"""Memory and time of a half sweep on several GPUs or with offloaded factors: cuMF eq. 8 extended to our memory layout.

The functions depend on sizes and machine constants only, so they can plan for hypothetical machines. A half sweep cuts
the fixed side into p parts and the rows to solve into q parts (cuMF Algorithm 3). The p parts are distributed over the
GPUs of a group; if there are fewer GPUs than parts, the GPUs load parts in turn (elasticity, cuMF 4.4). Groups process
different row parts in parallel, and each group processes its row parts sequentially, in waves.

A GPU holds, in bytes a cell i and with the rows padded to w cells (cuMF eq. 8 counts ``f`` and ``f^2`` cells instead)

    n/p w i            a part of the fixed side; twice if the next part is loaded concurrently
    n/p 16 ceil(f/16) 4    the part as float16 pairs, which the fused kernels multiply in float32
    m/q w i            solutions of the row part; twice if they are copied to the host concurrently, and once more for
                       the warm start of approximate solvers; or all new rows, if they stay on the GPUs
    nnz/(p q) (4 + i)  entries, times the number of buffers (a fit: SLAB_BUFFERS); or the GPU's share of the ratings in
                       both orientations
    systems            a batch; or, if parts take turns, the systems of the whole row part and those summed before they
                       are added; or, if sums are reduced over GPUs, the systems of all rows; more if the sums of the
                       Gram matrix, which are freed before solutions and systems, are larger than both
    (m + n)/GPUs w i   the GPU's share of both sides, if factors stay on the GPUs

Ratings and factors that do not stay on GPUs are in host memory, or on disk if they do not fit there: first the factors
of both sides, old and new, then the ratings in both orientations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Literal

from ..core.objective import Side
from ..core.system import round_up
from . import fused, gram
from .grid import Grid
from .machine import H200, Machine

BATCH_BYTES = 2 << 30
"""Systems in a GPU's memory at a time: enough to fill any GPU, but small relative to ratings that need a GPU."""

SLABS = 8
"""Pieces in which data are loaded; loading the first piece does not overlap with work."""

SLAB_BUFFERS = 3
"""Row parts of ratings on a GPU at a time: one in use, one loaded, one being loaded."""

ROW_BYTES = 16
"""Bytes of offset, order and status of a row, without its scale."""

PIECE_BYTES = 36
"""Bytes of the description of a segment of a row: row, first slot, and (slot, begin, end)."""

CHUNK_BYTES = 64 << 20
"""Bytes of sums computed at a time if they are added to those of other parts of the fixed side."""

PIECES = 3
"""Systems in memory for each row of a batch whose sums are reduced over GPUs: rows are cut to balance the load."""

MOST_PARTS = 1 << 20

Place = Literal["device", "host", "disk"]


def fused_or_published(rank: int, itemsize: int) -> str:
    """Assembly selected by "auto" on a recent GPU."""
    return "fused" if rank <= fused.MAX_RANK and itemsize == 4 else "sparse_syrk"


@dataclass(frozen=True)
class Problem:
    """Sizes that a partition depends on.

    Attributes
    ----------
    shape : (n_users, n_items)
    nnz : int
    factors : int
        Rank of the systems.
    itemsize : int
        4 for float32, 8 for float64.
    sums : int
        Bytes of the partial sums of a row before reduction or solution; 0: those of the default kernels.
    segment : int
        Entries above which a row has more than one partial sum; 0: never.
    biases : bool
        Whether rows of factors have biases.
    implicit : bool
        Whether the Gram matrix of the fixed side is added to each system.
    cg_steps : int
        Steps of the approximate solver, which has a warm start; 0: exact.
    nonnegative : bool
        Whether factors are nonnegative, for which the solver has a warm start, too.
    assembly : str
        Kernels of a GPU; "": the fused kernels if they support the problem.
    precision : str
        Precision of their products.
    l2_bytes : int
        L2 cache of a GPU.
    on_chip : bool
        Whether rows of one segment are summed and solved in one kernel, if the fixed side is complete.
    batch : int
        Bytes of sums computed at a time.
    longest : (int, int)
        Entries of the longest user and of the longest item, a lower bound of row parts; 0: unknown.
    """

    shape: tuple[int, int]
    nnz: int
    factors: int
    itemsize: int = 4
    sums: int = 0
    segment: int = 0
    biases: bool = False
    implicit: bool = False
    cg_steps: int = 0
    nonnegative: bool = False
    assembly: str = ""
    precision: str = "float32"
    l2_bytes: int = 60 << 20
    on_chip: bool = False
    batch: int = BATCH_BYTES
    longest: tuple[int, int] = (0, 0)

    def rows(self, side: Side) -> int:
        """Rows of a side."""
        return self.shape[0] if side == "user" else self.shape[1]

    def longest_row(self, side: Side) -> int:
        """Entries of the longest row of a side; 0: unknown."""
        return self.longest[0] if side == "user" else self.longest[1]

    def part_entries(self, side: Side, batches: int) -> int:
        """Most entries of a row part, made of whole rows, for a number of row parts."""
        return max(-(-self.nnz // batches), self.longest_row(side))

    @property
    def row_bytes(self) -> int:
        """Of a row of factors."""
        return round_up(self.factors, 16 // self.itemsize) * self.itemsize

    @property
    def operand_bytes(self) -> int:
        """Of a row of the fixed side in the form that products read, beside its factors."""
        return fused.operand_bytes(self.factors, self.precision) if self.kernels == "fused" else 0

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in one orientation."""
        return 4 + self.itemsize

    @property
    def kernels(self) -> str:
        """Assembly that sums and solves."""
        return self.assembly or fused_or_published(self.factors, self.itemsize)

    @property
    def system_bytes(self) -> int:
        """Bytes of the partial sums of a row before reduction or solution."""
        if self.sums:
            return self.sums
        if fused_or_published(self.factors, self.itemsize) == "fused":
            return 4 * fused.FusedConfig.rule(self.factors).partial_floats
        return (self.factors + 1) * self.factors * self.itemsize


@dataclass(frozen=True)
class HalfPlan:
    """Plan of one half sweep.

    Attributes
    ----------
    side : {"user", "item"}
        Side to solve.
    parts : int
        p: parts of the fixed side.
    batches : int
        q: parts of the rows to solve.
    gpus : int
    buffers : int
        Parts of the fixed side in memory if a GPU has several: 2, or 1 if memory does not allow loading ahead.
    loads : int
        Row parts of streamed ratings in memory at a time.
    splits : int
        GPUs that hold different parts at a time; 0: the smaller of the numbers of parts and GPUs.
    resident : bool
        Factors stay on the GPUs; a GPU with several parts stores them contiguously, as one.
    bytes : dict of str to int
        Memory of one GPU by purpose.
    seconds : dict of str to float
        Seconds by purpose. They do not add up to `total`: loading overlaps with work, and there are fixed costs.
    total : float
        Seconds of the half sweep.
    """

    side: Side
    parts: int
    batches: int
    gpus: int
    buffers: int = 2
    loads: int = 2
    splits: int = 0
    resident: bool = False
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    @functools.cached_property
    def grid(self) -> Grid:
        """GPUs that hold different parts at a time, and groups of them."""
        splits = self.splits or next(d for d in range(min(self.gpus, self.parts), 0, -1) if self.gpus % d == 0)
        return Grid(splits, self.gpus // splits)

    @functools.cached_property
    def fixed_parts(self) -> int:
        """Parts of the fixed side that a GPU loads one after another; 1: its part stays."""
        return 1 if self.resident else -(-self.parts // self.grid.splits)

    @property
    def waves(self) -> int:
        """Number of row parts that a group of GPUs solves sequentially."""
        return -(-self.batches // self.grid.groups)

    @property
    def fixed(self) -> str:
        """Placement of the fixed side: "replicated", "split" or "streamed"."""
        return "streamed" if self.fixed_parts > 1 else "split" if self.grid.splits > 1 else "replicated"

    def __str__(self) -> str:
        grid = self.grid
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items() if seconds)
        turns = f" in {self.fixed_parts} turns" if self.fixed_parts > 1 else ""
        return (
            f"{self.side + 's':<9} p = {self.parts}, q = {self.batches}: fixed side {self.fixed}{turns}, "
            f"{grid.splits} x {grid.groups} GPUs, {self.waves} wave{'s' if self.waves > 1 else ''}; "
            f"{size_text(sum(self.bytes.values()))} a GPU "
            f"({', '.join(f'{name} {size_text(size)}' for name, size in self.bytes.items() if size)}); "
            f"{self.total:.3g} s ({parts})"
        )


def size_text(size: float) -> str:
    """Three digits with a unit: "28.1 GB"."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:,.3g} {unit}"
    return f"{size / 1000:,.3g} kB"


def priced(
    problem: Problem,
    half: HalfPlan,
    ratings: Place = "device",
    factors: Place = "device",
    machine: Machine = H200,
) -> HalfPlan:
    """A half sweep with its memory and time."""
    half = replace(half, bytes=half_bytes(problem, half, ratings, factors))
    seconds = half_seconds(problem, machine, half, ratings, factors)
    return replace(half, seconds=seconds, total=_total(half, seconds, machine))


@dataclass(frozen=True)
class Share:
    """Share of one GPU in a half sweep, in rows and entries.

    Attributes
    ----------
    fixed : int
        Rows of its part of the fixed side.
    solved : int
        Rows that it solves.
    own : int
        Rows of both sides that it owns.
    entries : int
        Entries on the GPU at a time, in both orientations if ratings stay there.
    """

    fixed: int
    solved: int
    own: int
    entries: int

    @classmethod
    def mean(cls, problem: Problem, half: HalfPlan, ratings: Place) -> Share:
        """The average share of a GPU."""
        rows, fixed = problem.rows(half.side), sum(problem.shape) - problem.rows(half.side)
        # a GPU that loads parts in turn keeps the entries of all of them; otherwise it has those of its own part
        at_a_time = half.grid.splits if half.resident else half.splits or half.parts
        entries = half.loads * -(-problem.part_entries(half.side, half.batches) // at_a_time)
        if ratings == "device":
            entries = 2 * -(-problem.nnz // half.gpus)
        parts = half.grid.splits if half.resident else half.parts
        return cls(-(-fixed // parts), -(-rows // half.gpus), -(-(rows + fixed) // half.gpus), entries)


def slots(problem: Problem, half: HalfPlan) -> int:
    """Partial sums of a row part in memory: one for each row, and more for rows longer than a segment."""
    rows, entries = -(-problem.rows(half.side) // half.batches), problem.part_entries(half.side, half.batches)
    cuts = entries // problem.segment if problem.segment else 0
    return 2 * cuts + 1 if problem.on_chip and half.fixed == "replicated" else rows + cuts


def slots_at_once(problem: Problem, half: HalfPlan) -> int:
    """Partial sums computed at a time."""
    most = min(CHUNK_BYTES, problem.batch) if half.fixed_parts > 1 else problem.batch
    least = 1
    if half.fixed == "split":  # two buffers of a row's pieces from each GPU, and their sum
        least = 2 * (PIECES * half.grid.splits + 1)
    elif problem.segment and half.fixed_parts == 1:
        # the pieces of a row are solved together, and summed together unless parts take turns
        least = max(1, -(-problem.longest_row(half.side) // problem.segment))
    return max(least, min(slots(problem, half), most // problem.system_bytes))


def half_bytes(
    problem: Problem, half: HalfPlan, ratings: Place, factors: Place, share: Share | None = None
) -> dict[str, int]:
    """Memory of one GPU in a half sweep, by purpose; see the module. `share`: default is the mean."""
    share = share or Share.mean(problem, half, ratings)
    grid, width, on_device = half.grid, problem.row_bytes, factors == "device"
    if problem.biases and not on_device:  # and offsets of the ratings by the fixed side's biases
        width += 2 * problem.itemsize
    batch = -(-problem.rows(half.side) // half.batches)
    solved = batch * width
    if on_device:  # a GPU's old rows are kept until the half sweep is complete
        solved = share.solved * width
    at_once = slots_at_once(problem, half)
    systems = at_once * problem.system_bytes
    pieces = 0 if on_device else slots(problem, half) * PIECE_BYTES
    if on_device and half.fixed == "split":  # segments of all rows of a group exist at once
        pieces = -(-problem.rows(half.side) // grid.groups) * PIECE_BYTES
    if half.fixed_parts > 1:
        systems += slots(problem, half) * problem.system_bytes
        pieces += at_once * PIECE_BYTES
    solved *= 1 if on_device else 3 if problem.cg_steps or problem.nonnegative else 2
    if problem.implicit:
        sums = gram.gram_bytes(share.fixed, problem.row_bytes // problem.itemsize, problem.itemsize)
        systems = max(systems, sums if half.fixed == "split" else sums - solved)
    own_is_part = on_device and grid.groups == 1 and half.fixed_parts == 1
    return {
        "fixed side": 0 if own_is_part else share.fixed * width * (half.buffers if half.fixed_parts > 1 else 1),
        "operands": share.fixed * problem.operand_bytes,
        "solutions": solved,
        "factors": share.own * width if on_device else 0,
        "ratings": share.entries * problem.entry_bytes,
        "rows": share.own * (ROW_BYTES + problem.itemsize) + pieces,
        "systems": systems,
    }


def half_seconds(
    problem: Problem, machine: Machine, half: HalfPlan, ratings: Place, factors: Place
) -> dict[str, float]:
    """Seconds of a half sweep by purpose."""
    rows, fixed = problem.rows(half.side), sum(problem.shape) - problem.rows(half.side)
    gpus, grid, width = half.gpus, half.grid, problem.row_bytes
    rates, links, rank, itemsize = machine.gpu, machine.links, problem.factors, problem.itemsize
    table = fixed / (grid.splits if half.resident else half.parts) * width
    kernels = problem.kernels
    entry = rates.entry_seconds(rank, itemsize, table, problem.l2_bytes, kernels, problem.precision)
    row = rates.row_seconds(rank, itemsize, kernels, problem.cg_steps, problem.nonnegative)
    seconds = {"assembly": problem.nnz / gpus * entry, "solve": min(rows, problem.nnz) / gpus * row}
    if problem.implicit:
        seconds["gram"] = rates.gram_seconds(fixed / gpus, rows / gpus, rank, itemsize) + rates.gram
    if factors == "device" and grid.groups > 1:
        crossing = table * (grid.groups - 1) / grid.groups
        seconds["all-gather"] = half.fixed_parts * (crossing / links.all_gather + links.collective)
    if grid.splits > 1:
        sums = rows / grid.groups * problem.system_bytes * half.fixed_parts
        crossing = sums * (grid.splits - 1) / grid.splits
        batches = max(4.0, sums / BATCH_BYTES, half.waves)
        seconds["reduce-scatter"] = crossing / links.reduce_rate(grid.splits) + batches * links.collective
    if half.fixed_parts > 1:  # each turn reads and writes the sums of a row part again
        again = 2 * half.fixed_parts * rows / grid.groups * problem.system_bytes
        seconds["turns"] = again / links.copy_bytes + half.fixed_parts * half.waves * links.slab
    elif factors != "device":
        seconds["waves"] = half.waves * links.slab
    load, solved, loads = 0.0, 0.0, half.waves if half.fixed_parts > 1 else 1  # each wave of rows loads the parts again
    if factors != "device":
        load += loads * half.fixed_parts * table
        solved = rows / gpus * width
    if ratings != "device":
        load += problem.nnz / gpus * problem.entry_bytes
    if load:
        seconds["from host"] = load / links.pinned_bytes + solved / links.fetch_bytes  # solutions return to the host
    read = problem.nnz * problem.entry_bytes if ratings == "disk" else 0.0
    if factors == "disk":  # shared by all GPUs
        read += gpus * loads * half.fixed_parts * table + rows * width
    if read:
        seconds["from disk"] = read / links.disk_bytes
    return seconds


def _total(half: HalfPlan, seconds: dict[str, float], machine: Machine) -> float:
    """Total seconds; overlapping times count once, since data are loaded while the previous ones are used.

    Sums are sent on a second stream while the next ones are computed, but the computing kernels fill the GPU: on H200s
    the two took as long as sequential execution.
    """
    work = sum(seconds.get(name, 0.0) for name in ("assembly", "solve", "gram", "turns", "waves", "reduce-scatter"))
    loading = max(seconds.get("from host", 0.0), seconds.get("from disk", 0.0))
    if half.fixed_parts > 1 and half.buffers == 1:
        work += loading
    else:
        work = max(work, loading) + min(work, loading) / SLABS
    idle = machine.gpu.sweep["als"] + (half.gpus * machine.links.rank if half.gpus > 1 else 0.0)
    return work + seconds.get("all-gather", 0.0) + idle


def fewest_batches(
    problem: Problem,
    machine: Machine,
    half: HalfPlan,
    ratings: Place,
    factors: Place,
    memory: float,
    least: int = 1,
) -> HalfPlan | None:
    """The half sweep with the smallest q that fits (cuMF 4.3); None if none does.

    q starts at `least`, rounded up to a multiple of the number of groups, and doubles. Parts that take turns are loaded
    while the previous one is used, if both fit.
    """
    rows, groups = problem.rows(half.side), half.grid.groups
    for buffers in (2, 1) if half.fixed_parts > 1 else (2,):
        batches = -(-least // groups) * groups
        while True:
            candidate = replace(half, batches=batches, buffers=buffers)
            if sum(half_bytes(problem, candidate, ratings, factors).values()) <= memory:
                return priced(problem, candidate, ratings, factors, machine)
            if batches >= rows or batches > MOST_PARTS:
                break
            batches *= 2
    return None
