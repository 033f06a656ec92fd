"""What a half sweep takes on several GPUs, or with factors that do not stay there: cuMF eq. 8 extended to our memory.

Pure functions of sizes and of a machine's constants: they plan for machines that are not there. A half sweep cuts the
fixed side into p parts and the rows to solve into q (cuMF Algorithm 3). p parts lie on as many GPUs of a group as there
are, else they are loaded one after the other (elasticity, cuMF 4.4); groups take row parts side by side, and each group
its own one after the other, in waves.

A GPU holds, in bytes a cell i and with the rows padded to w cells (cuMF eq. 8 counts ``f`` and ``f^2`` cells instead)

    n/p w i            the part of the fixed side; twice where the next part is loaded meanwhile
    m/q w i            solutions of the row part, twice where they leave for the host meanwhile, and once more where
                       approximate solvers begin with the last ones; or all new rows, where they stay on the GPUs
    nnz/(p q) (4 + i)  entries, as often as they are loaded ahead (a fit: SLAB_BUFFERS); or all of its share, both
                       orientations
    systems            a batch (ours are solved batch by batch), or, where parts take turns, those of the whole row part
                       and as many as are summed before they join those; where they are added up over GPUs, of all rows
    (m + n)/GPUs w i   its share of both sides, where factors stay on the GPUs

Ratings and factors that do not stay on GPUs are in the memory of the host, or on its disks where they have no room
there: factors of both sides, old and new, and then ratings in both orientations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..core.objective import Side
from ..core.system import round_up
from . import fused
from .grid import Grid
from .machine import H200, Machine

BATCH_BYTES = 2 << 30
"""Systems in a GPU's memory at a time: enough to fill any GPU, little beside the ratings that need a GPU."""

SLABS = 8
"""Pieces that data are loaded in, of which nothing runs beside the first one."""

SLAB_BUFFERS = 3
"""Row parts of ratings that a fit has on a GPU at a time: one is worked on, one is there, one is on its way."""

ROW_BYTES = 16
"""Offset, order and status of a row; its scale comes to that."""

PIECE_BYTES = 36
"""A piece of a row that is summed apart: row, first slot, and (slot, begin, end)."""

CHUNK_BYTES = 64 << 20
"""Sums that are made at a time where they join those of other parts of the fixed side."""

PIECES = 3
"""Systems in memory for each row of a batch whose sums are added up over GPUs: rows are cut so that no thread is left
with a long one."""

MOST_PARTS = 1 << 20

Place = Literal["device", "host", "disk"]


def fused_or_published(rank: int, itemsize: int) -> str:
    """Assembly that "auto" stands for on a recent GPU."""
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
        Bytes of the sums of a row that wait to be added up or solved; 0: those of our kernels.
    segment : int
        Entries above which a row has more than one of them; 0: never.
    biases : bool
        Whether rows of factors have a bias beside them.
    implicit : bool
        Whether the Gram matrix of the fixed side is added to each system.
    cg_steps : int
        Of the approximate solver, which has a warm start; 0: exact.
    assembly : str
        Kernels of a GPU; "": the fused ones where they serve.
    precision : str
        Of their products.
    l2_bytes : int
        Cache of a GPU.
    on_chip : bool
        Whether rows of one segment are solved where they are summed, if the fixed side is there as a whole.
    batch : int
        Bytes of sums that are made at a time.
    longest : (int, int)
        Entries of the longest user and of the longest item, which no row part can be shorter than; 0: not known.
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
        """Entries of the longest row of a side; 0: not known."""
        return self.longest[0] if side == "user" else self.longest[1]

    def part_entries(self, side: Side, batches: int) -> int:
        """Most entries of a row part where there are so many: of whole rows."""
        return max(-(-self.nnz // batches), self.longest_row(side))

    @property
    def row_bytes(self) -> int:
        """Of a row of factors."""
        return round_up(self.factors, 16 // self.itemsize) * self.itemsize

    @property
    def entry_bytes(self) -> int:
        """Of an entry in one orientation."""
        return 4 + self.itemsize

    @property
    def kernels(self) -> str:
        """Assembly that sums and solves."""
        return self.assembly or fused_or_published(self.factors, self.itemsize)

    @property
    def system_bytes(self) -> int:
        """Of the sums of a row that wait to be added up or solved."""
        if self.sums:
            return self.sums
        if fused_or_published(self.factors, self.itemsize) == "fused":
            return 4 * fused.FusedConfig.rule(self.factors).partial_floats
        return (self.factors + 1) * self.factors * self.itemsize


@dataclass(frozen=True)
class HalfPlan:
    """One half sweep.

    Attributes
    ----------
    side : {"user", "item"}
        Solved.
    parts : int
        p: parts of the fixed side.
    batches : int
        q: parts of the rows to solve.
    gpus : int
    buffers : int
        Parts of the fixed side in memory where they take turns: 2, or 1 if there is no room to load one meanwhile.
    loads : int
        Row parts of ratings in memory at a time where they are streamed.
    splits : int
        GPUs that hold different parts at a time; 0: as many as there are parts and GPUs for.
    resident : bool
        Factors stay on the GPUs: one that has several parts has them side by side, as one.
    bytes : dict of str to int
        Memory of one GPU by purpose.
    seconds : dict of str to float
        By purpose; they do not add up: loading overlaps with work, and each half sweep has time of its own.
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

    @property
    def grid(self) -> Grid:
        """GPUs that hold different parts at a time, and groups of them."""
        splits = self.splits or next(d for d in range(min(self.gpus, self.parts), 0, -1) if self.gpus % d == 0)
        return Grid(splits, self.gpus // splits)

    @property
    def turns(self) -> int:
        """Parts of the fixed side that a GPU loads one after the other; 1: it stays."""
        return 1 if self.resident else -(-self.parts // self.grid.splits)

    @property
    def waves(self) -> int:
        """Row parts that a group of GPUs solves one after the other."""
        return -(-self.batches // self.grid.groups)

    @property
    def fixed(self) -> str:
        """Where the fixed side is: "replicated", "split" or "streamed"."""
        return "streamed" if self.turns > 1 else "split" if self.grid.splits > 1 else "replicated"

    def __str__(self) -> str:
        grid = self.grid
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items() if seconds)
        turns = f" in {self.turns} turns" if self.turns > 1 else ""
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
    """What one GPU has of a half sweep, in rows and entries.

    Attributes
    ----------
    fixed : int
        Rows of its part of the fixed side.
    solved : int
        Rows that it solves.
    own : int
        Rows of both sides that it owns.
    entries : int
        On it at a time: of both orientations where ratings stay there.
    """

    fixed: int
    solved: int
    own: int
    entries: int

    @classmethod
    def mean(cls, problem: Problem, half: HalfPlan, ratings: Place) -> Share:
        """Of GPUs that all have the same."""
        rows, fixed = problem.rows(half.side), sum(problem.shape) - problem.rows(half.side)
        # a fit that takes turns has the entries of all parts meanwhile, and one of parts side by side those of its own
        at_a_time = half.grid.splits if half.resident else half.splits or half.parts
        entries = half.loads * -(-problem.part_entries(half.side, half.batches) // at_a_time)
        if ratings == "device":
            entries = 2 * -(-problem.nnz // half.gpus)
        parts = half.grid.splits if half.resident else half.parts
        return cls(-(-fixed // parts), -(-rows // half.gpus), -(-(rows + fixed) // half.gpus), entries)


def slots(problem: Problem, half: HalfPlan) -> int:
    """Sums of a row part that go through memory: one for each row, and more for rows longer than a segment."""
    rows, entries = -(-problem.rows(half.side) // half.batches), problem.part_entries(half.side, half.batches)
    cuts = entries // problem.segment if problem.segment else 0
    return 2 * cuts + 1 if problem.on_chip and half.fixed == "replicated" else rows + cuts


def slots_at_once(problem: Problem, half: HalfPlan) -> int:
    """Of these, as many as are made at a time."""
    most = min(CHUNK_BYTES, problem.batch) if half.turns > 1 else problem.batch
    least = 1
    if half.fixed == "split":  # of a row of each GPU twice, and as they are added up
        least = 2 * (PIECES * half.grid.splits + 1)
    elif problem.segment and half.turns == 1:
        # a row's pieces are solved together, where parts do not take turns they are summed together, too
        least = max(1, -(-problem.longest_row(half.side) // problem.segment))
    return max(least, min(slots(problem, half), most // problem.system_bytes))


def half_bytes(
    problem: Problem, half: HalfPlan, ratings: Place, factors: Place, share: Share | None = None
) -> dict[str, int]:
    """Memory of one GPU in a half sweep, by purpose; see the module. `share`: what it has, if not the mean."""
    share = share or Share.mean(problem, half, ratings)
    grid, width, on_device = half.grid, problem.row_bytes, factors == "device"
    if problem.biases and not on_device:  # and what ratings owe to the fixed side's
        width += 2 * problem.itemsize
    batch = -(-problem.rows(half.side) // half.batches)
    solved = batch * width
    if on_device:  # the new rows of a GPU beside the old ones, until the half sweep is complete
        solved = share.solved * width
    at_once = slots_at_once(problem, half)
    systems = at_once * problem.system_bytes
    pieces = 0 if on_device else slots(problem, half) * PIECE_BYTES
    if on_device and half.fixed == "split":  # all rows of a group are cut once
        pieces = -(-problem.rows(half.side) // grid.groups) * PIECE_BYTES
    if half.turns > 1:
        systems += slots(problem, half) * problem.system_bytes
        pieces += at_once * PIECE_BYTES
    own_is_part = on_device and grid.groups == 1 and half.turns == 1
    return {
        "fixed side": 0 if own_is_part else share.fixed * width * (half.buffers if half.turns > 1 else 1),
        "solutions": solved * (1 if on_device else 3 if problem.cg_steps else 2),
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
    row = rates.row_seconds(rank, itemsize, kernels, problem.cg_steps)
    seconds = {"assembly": problem.nnz / gpus * entry, "solve": min(rows, problem.nnz) / gpus * row}
    if problem.implicit:
        seconds["gram"] = rates.gram_seconds(fixed / gpus, rows / gpus, rank, itemsize) + rates.gram
    if factors == "device" and grid.groups > 1:
        crossing = table * (grid.groups - 1) / grid.groups
        seconds["all-gather"] = half.turns * (crossing / (0.75 * links.all_gather) + links.collective)
    if grid.splits > 1:
        sums = rows / grid.groups * problem.system_bytes * half.turns
        crossing = sums * (grid.splits - 1) / grid.splits
        batches = max(4.0, sums / BATCH_BYTES, half.waves)
        seconds["reduce-scatter"] = crossing / links.reduce_rate(grid.splits) + batches * links.collective
    if half.turns > 1:  # sums of a row part are read and written again in each turn
        again = 2 * half.turns * rows / grid.groups * problem.system_bytes
        seconds["turns"] = again / links.copy_bytes + half.turns * half.waves * links.slab
    elif factors != "device":
        seconds["waves"] = half.waves * links.slab
    load, loads = 0.0, half.waves if half.turns > 1 else 1  # parts in turns come again for each wave of rows
    if factors != "device":
        load += loads * half.turns * table + rows / gpus * width
    if ratings != "device":
        load += problem.nnz / gpus * problem.entry_bytes
    if load:
        seconds["from host"] = load / links.pinned_bytes
    read = problem.nnz * problem.entry_bytes if ratings == "disk" else 0.0
    if factors == "disk":  # which all GPUs share
        read += gpus * loads * half.turns * table + rows * width
    if read:
        seconds["from disk"] = read / links.disk_bytes
    return seconds


def _total(half: HalfPlan, seconds: dict[str, float], machine: Machine) -> float:
    """What overlaps counts once: data are loaded while the last ones are used.

    Sums are sent on a stream beside the one that makes the next ones, but the kernels that make them fill the GPU until
    they end: on H200s both took as long as one after the other.
    """
    work = sum(seconds.get(name, 0.0) for name in ("assembly", "solve", "gram", "turns", "waves", "reduce-scatter"))
    loading = max(seconds.get("from host", 0.0), seconds.get("from disk", 0.0))
    if half.turns > 1 and half.buffers == 1:
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
    """The half sweep with the smallest q that fits, as cuMF 4.3 wants it; None if none does.

    q grows by doubling from the number of groups, or from `least` in whole multiples of it. Parts that take turns are
    loaded while the one before is used, if both fit.
    """
    rows, groups = problem.rows(half.side), half.grid.groups
    for buffers in (2, 1) if half.turns > 1 else (2,):
        batches = -(-least // groups) * groups
        while True:
            candidate = replace(half, batches=batches, buffers=buffers)
            if sum(half_bytes(problem, candidate, ratings, factors).values()) <= memory:
                return priced(problem, candidate, ratings, factors, machine)
            if batches >= rows or batches > MOST_PARTS:
                break
            batches *= 2
    return None
