"""One half sweep of ALS on GPUs: its memory and time, for p x q GPUs, batches and offloading (cuMF eq. 8, extended).

A half sweep cuts the fixed side into p parts and the rows to solve into q batches (cuMF Algorithm 3). The p parts are
distributed over the GPUs of a group; if there are fewer GPUs than parts, the GPUs load parts in turn (elasticity, cuMF
4.4). Groups process different batches of rows in parallel, and each group processes its batches sequentially, in waves.
One GPU that holds everything is p = q = 1.

A GPU holds, in bytes a cell i and with the rows padded to w cells (cuMF eq. 8 counts ``f`` and ``f^2`` cells instead)

    n/p w i            a part of the fixed side; twice if the next part is loaded concurrently
    n/p 16 ceil(f/16) 4    the part as float16 pairs, which the fused kernels multiply in float32
    m/q w i            solutions of the batch; twice if they are copied to the host concurrently, and once more for
                       the warm start of approximate solvers; or all new rows, if they stay on the GPUs
    nnz/(p q) (4 + i)  entries, times SLAB_BUFFERS; or the GPU's share of the ratings in both orientations
    systems            those of a batch, or of BATCH_BYTES at a time; of rows longer than a segment alone if the others
                       are solved on the chip; or, if parts take turns, the systems of the batch and those summed
                       before they are added; or, if sums are reduced over GPUs, the systems of all rows; more if the
                       sums of the Gram matrix, which are freed before solutions and systems, are larger than both
    basis              the fixed side and some solutions in the basis of implicit rows in the dual form
    (m + n)/GPUs w i   the GPU's share of both sides, if factors stay on the GPUs
    rows               offset, order, status and scale of a row, and the segments of long ones
    tiles, blocks ...  what BALS and iALS++ need beside that

Ratings and factors that do not stay on GPUs are in host memory, or on disk if they do not fit there: first the factors
of both sides, old and new, then the ratings in both orientations.

The time is, for each side of ``rows`` rows,

    nnz * max(f (f + 1) / assembly rate(f), f bytes / gather rate)  +  rows * (f^3 / 3 + 2 f^2) / solve rate(f)

(the roofline of Williams, Waterman and Patterson 2009, with the rates of `hybridmf.plan.machine`), less where short
rows take the dual form, plus transfers.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core.objective import SIDES, Side, other_side
from . import fused
from .assemblies import tile_pointers
from .extras import extra_bytes
from .grid import Grid
from .machine import Machine
from .row_forms import dual_up_to, short_rows, side_sizes

if TYPE_CHECKING:
    from .types import Place, Plan

BATCH_BYTES = 2 << 30
"""Systems in a GPU's memory at a time: enough to fill any GPU, but small relative to ratings that need a GPU."""

HOST_BATCH_BYTES = 256 << 20
"""`BATCH_BYTES` for offloaded factors, where memory is better used for more rows, which save loads of factors."""

SLABS = 8  # slabs in which data are loaded; loading the first one does not overlap with work
SLAB_BUFFERS = 3  # batches of ratings on a GPU at a time: one in use, one loaded, one being loaded
ROW_BYTES = 16  # bytes of offset, order and status of a row, without its scale
SEGMENT_BYTES = 36  # bytes of the description of a segment of a row: row, first slot, and (slot, begin, end)
CHUNK_BYTES = 64 << 20  # bytes of sums computed at a time if they are added to those of other parts of the fixed side

SYSTEMS_PER_ROW = 3
"""Systems in memory for each row of a batch whose sums are reduced over GPUs: rows are cut to balance the load."""

ROWS_AT_ONCE = 1 << 18  # rows in the dual form whose solutions change back from another basis together
MOST_PARTS = 1 << 20
PUBLISHED = "published"  # variant of a kernel as printed
PUBLISHED_BATCH = 4096  # systems at a time in the paper of Gates et al. (section V)
PREDICTED_ROWS = 2048  # entries of a row whose losses or predictions one warp sums
BLOCK_LAUNCHES = 30  # launches for a block of coordinates of the subspace solver, most of them small kernels


@dataclass(frozen=True)
class HalfPlan:
    """Plan of one half sweep; `fewest_batches` and `priced` complete it."""

    side: Side  # side to solve
    parts: int  # p: parts of the fixed side
    batches: int  # q: batches of the rows to solve, over all groups of GPUs
    gpus: int
    ratings: Place = "device"
    factors: Place = "device"
    """Where they are between half sweeps. A GPU whose factors stay there stores several parts contiguously, as one."""
    split: bool = True
    """Whether GPUs hold different parts at a time; if not, each of them loads all parts for its own rows."""
    buffers: int = 2
    """Parts of the fixed side in memory if a GPU has several: 2, or 1 if memory does not allow loading ahead."""
    bytes: dict[str, int] = field(default_factory=dict)  # memory of one GPU by purpose
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by purpose. They do not add up to `total`: loading overlaps with work, and there are fixed costs."""
    total: float = 0.0

    @functools.cached_property
    def grid(self) -> Grid:
        """GPUs that hold different parts at a time, and groups of them."""
        most = min(self.gpus, self.parts) if self.split else 1
        splits = next(d for d in range(most, 0, -1) if self.gpus % d == 0)
        return Grid(splits, self.gpus // splits)

    @functools.cached_property
    def turns(self) -> int:
        """Parts of the fixed side that a GPU loads one after another; 1: its part stays."""
        return 1 if self.factors == "device" else -(-self.parts // self.grid.splits)

    @property
    def held(self) -> int:
        """Parts into which the fixed side is cut, of which a GPU holds one at a time."""
        return self.grid.splits if self.factors == "device" else self.parts

    @property
    def waves(self) -> int:
        """Number of batches that a group of GPUs solves sequentially."""
        return -(-self.batches // self.grid.groups)

    @property
    def fixed(self) -> str:
        """Placement of the fixed side: "replicated", "split" or "streamed"."""
        return "streamed" if self.turns > 1 else "split" if self.grid.splits > 1 else "replicated"

    @property
    def total_bytes(self) -> int:
        """Memory of one GPU."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        grid = self.grid
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items() if seconds)
        turns = f" in {self.turns} turns" if self.turns > 1 else ""
        return (
            f"{self.side + 's':<9} p = {self.parts}, q = {self.batches}: fixed side {self.fixed}{turns}, "
            f"{grid.splits} x {grid.groups} GPUs, {self.waves} wave{'s' if self.waves > 1 else ''}; "
            f"{size_text(self.total_bytes)} a GPU "
            f"({', '.join(f'{name} {size_text(size)}' for name, size in self.bytes.items() if size)}); "
            f"{self.total:.3g} s ({parts})"
        )


def size_text(size: float) -> str:
    """Three digits with a unit: "28.1 GB"."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:,.3g} {unit}"
    return f"{size / 1000:,.3g} kB"


# ------------------------------------------------------------------------------------------------------------- memory


def slot_bytes(plan: Plan) -> int:
    """Bytes of one system, or of the partial sums of one segment of a row."""
    rank = plan.system_rank
    return 4 * fused.partial_floats(rank) if plan.assembly == "fused" else (rank + 1) * rank * plan.itemsize


def batch_entries(plan: Plan, side: Side, batches: int) -> int:
    """Most entries of a batch, made of whole rows, for a number of batches."""
    return max(-(-plan.nnz // batches), plan.longest_row(side))


def _most_slots(rows: int, entries: int, segment: int, apart: bool) -> int:
    """Most partial sums of rows: one for each and each full segment, or two for each full segment of long rows alone.

    `apart`: whether sums of all rows are in memory, and not those of rows longer than a segment alone.
    """
    return rows + entries // segment if apart else 2 * (entries // segment) + 1


def _apart(plan: Plan, side: Side) -> bool:
    """Whether sums of all rows of a side go through memory: with CG, what features contribute is added there."""
    return plan.solved_apart or (plan.solver == "cg" and any(side == described for described, _, _ in plan.features))


def _slots(plan: Plan, half: HalfPlan) -> int:
    """Partial sums of a batch in memory."""
    rows, apart = -(-plan.rows(half.side) // half.batches), half.fixed != "replicated" or _apart(plan, half.side)
    return _most_slots(rows, batch_entries(plan, half.side, half.batches), plan.segment, apart)


def slots_at_once(plan: Plan, half: HalfPlan) -> int:
    """Partial sums computed at a time."""
    assert plan.gpu is not None
    most = BATCH_BYTES if half.factors == "device" else max(1, min(HOST_BATCH_BYTES, plan.gpu.free_bytes // 8))
    least, systems = 1, PUBLISHED_BATCH if plan.variant == PUBLISHED else plan.n_users + plan.n_items + plan.nnz
    if half.fixed == "split":  # two buffers of a row's sums from each GPU, and their sum
        least = 2 * (SYSTEMS_PER_ROW * half.grid.splits + 1)
    elif half.turns == 1:
        # the segments of a row are solved together, and summed together unless parts take turns; BALS sums whole tiles
        least = max(1, plan.tile_rows, -(-plan.longest_row(half.side) // plan.segment))
    else:
        most = min(CHUNK_BYTES, most)
    return max(least, min(_slots(plan, half), most // slot_bytes(plan), systems))


def slots_of_both(plan: Plan, halves: Iterable[HalfPlan], memory: float) -> int:
    """Partial sums at a time for both half sweeps: the most that either one has at once, if the other one has room."""
    at_once = [(slots_at_once(plan, half), max(0, int(memory) - half.total_bytes)) for half in halves]
    each = slot_bytes(plan)
    return min(max(slots for slots, _ in at_once), *(slots + left // each for slots, left in at_once))


def half_bytes(
    plan: Plan,
    half: HalfPlan,
    *,
    fixed: int | None = None,
    solved: int | None = None,
    own: int | None = None,
    entries: int | None = None,
) -> dict[str, int]:
    """Memory of one GPU in a half sweep, by purpose; see the module.

    The share of a GPU, by default the mean: rows of its part of the fixed side, rows that it solves, rows of both sides
    that it owns, and entries on the GPU at a time, in both orientations if ratings stay there.
    """
    grid, on_device, itemsize = half.grid, half.factors == "device", plan.itemsize
    rows, others = plan.rows(half.side), plan.rows(other_side(half.side))
    if fixed is None:
        fixed = -(-others // half.held)
    if solved is None:
        solved = -(-rows // half.gpus)
    if own is None:
        own = -(-(rows + others) // half.gpus)
    if entries is None:
        # a GPU that loads all parts in turn keeps the entries of all of them; otherwise it has those of its own part
        at_a_time = half.held if half.split else 1
        entries = SLAB_BUFFERS * -(-batch_entries(plan, half.side, half.batches) // at_a_time)
        if half.ratings == "device":
            entries = 2 * -(-plan.nnz // half.gpus)
    plain_width = fused.table_width(plan.rank, plan.dtype) * itemsize
    # biases, and offsets of the ratings by the fixed side's biases
    width = plain_width + (2 * itemsize if plan.rank > plan.factors else 0)
    # a GPU's old rows are kept until the half sweep is complete
    solutions = solved if on_device else -(-rows // half.batches)
    solutions *= width * (1 if on_device else 2 if plan.solver == "cholesky" else 3)
    at_once, each = slots_at_once(plan, half), slot_bytes(plan)
    systems, segments = at_once * each, _slots(plan, half)
    if half.fixed == "split" and on_device:  # segments of all rows of a group exist at once
        segments = -(-rows // grid.groups)
    elif on_device:  # those of both sides stay
        segments = sum(
            _most_slots(-(-plan.rows(side) // half.gpus), -(-plan.nnz // half.gpus), plan.segment, _apart(plan, side))
            for side in SIDES
        )
    if half.turns > 1:
        systems += _slots(plan, half) * each
        segments += at_once
    if plan.feedback == "implicit":
        sums = fused.gram_bytes(fixed, fused.table_width(plan.rank, plan.dtype), itemsize)
        systems = max(systems, sums if half.fixed == "split" else sums - solutions)
    own_is_part = on_device and grid.groups == 1
    changes_basis = plan.feedback == "implicit" and longest_dual(plan, half) > 0
    operand = fused.operand_bytes(plan.system_rank, plan.precision) if plan.assembly == "fused" else 0
    return {
        "ratings": entries * (4 + itemsize),
        "factors": own * width if on_device else 0,
        "fixed side": 0 if own_is_part else fixed * width * (half.buffers if half.turns > 1 else 1),
        "operands": fixed * operand,
        "basis": (fixed + 2 * min(solved, ROWS_AT_ONCE)) * plain_width if changes_basis else 0,
        "solutions": solutions,
        "rows": own * (ROW_BYTES + itemsize) + (0 if plan.tile_rows else segments * SEGMENT_BYTES),
        "systems": systems,
        **({"tiles": _tile_bytes(plan, half.gpus)} if plan.tile_rows else {}),
        **(_subspace_bytes(plan) if plan.solver == "subspace" else {}),
        **extra_bytes(plan, width, pulled=on_device and plan.solver != "cholesky"),
    }


def _tile_bytes(plan: Plan, gpus: int) -> int:
    """Memory of a GPU for both orientations in tiles, beside the ratings."""
    m, n = plan.n_users, plan.n_items
    pointers = tile_pointers(-(-m // gpus), n, plan) + tile_pointers(-(-n // gpus), m, plan)
    return 2 * -(-plan.nnz // gpus) * (8 + plan.itemsize) + 8 * pointers


def _subspace_bytes(plan: Plan) -> dict[str, int]:
    """Memory by purpose of iALS++ beside that of the exact solver of systems of the size of a block."""
    m, n, itemsize = plan.n_users, plan.n_items, plan.itemsize
    widths = [fused.table_width(last - first, plan.dtype) for first, last in plan.blocks]
    return {
        # of each entry; (row, begin, end) of segments of rows
        "predictions": plan.nnz * itemsize + 24 * (m + n + plan.nnz // PREDICTED_ROWS),
        # the fixed side by blocks, changes of the solutions, and what they are computed from
        "blocks": max(m, n) * (sum(widths) + 3 * widths[0]) * itemsize,
    }


# --------------------------------------------------------------------------------------------------------------- time


def longest_dual(plan: Plan, half: HalfPlan) -> int:
    """Entries of the longest row in the dual form, which needs ratings and the whole fixed side on the GPU."""
    whole = half.ratings == half.factors == "device" and half.grid.splits == 1
    return dual_up_to(plan, half.side) if whole else 0


def _kernel_seconds(plan: Plan, half: HalfPlan, machine: Machine) -> dict[str, float]:
    assert plan.gpu is not None
    rates, rank, itemsize, kernels = machine.gpu, plan.rank, plan.itemsize, (plan.assembly, plan.precision)
    shares = [side_sizes(plan, side)[0] for side in (half.side, other_side(half.side))]
    filled = max(plan.filled_rows, 1) / sum(shares)  # rows with entries
    rows, others = (filled * share / half.gpus for share in shares)
    cache, nnz, table = (
        plan.gpu.l2_bytes,
        plan.nnz / half.gpus,
        plan.rows(other_side(half.side)) * rank * itemsize / half.held,
    )

    def entry(width: int) -> float:
        return rates.entry_seconds(width, itemsize, table * width / rank, cache, *kernels)

    if plan.solver == "subspace":  # predictions at the start and after each block, and the systems of each block
        widths = [last - first for first, last in plan.blocks]
        seconds = {
            "launches": BLOCK_LAUNCHES * len(widths) * rates.launch,
            "predictions": nnz * (2 * rank - widths[-1]) * itemsize / rates.gather_bytes,
            "assembly": sum(nnz * entry(width) for width in widths),
            "solve": sum(rows * rates.row_seconds(width, itemsize, plan.assembly) for width in widths),
        }
        # products of solutions and Gram matrix cost as much as the Gram matrix
        gram = rates.gram_seconds(rows + others, 0, rank, itemsize)
    else:
        steps = plan.cg_steps if plan.solver == "cg" else 0
        row = rates.row_seconds(rank, itemsize, plan.assembly, steps, plan.solver == "nonnegative")
        short, entries, squares, _ = short_rows(longest_dual(plan, half), nnz / rows)
        seconds = {"assembly": (nnz - rows * entries) * entry(rank), "solve": rows * (1 - short) * row}
        if short:
            seconds["dual"] = rows * (short * rates.dual_row + squares * rates.dual_pair * (rank + 128))
        gram = rates.gram_seconds(others, rows * (1 - short), rank, itemsize)
    return seconds | ({"gram": gram + rates.gram} if plan.feedback == "implicit" else {})


def half_seconds(plan: Plan, half: HalfPlan, machine: Machine) -> dict[str, float]:
    seconds = _kernel_seconds(plan, half, machine)
    rows, links, gpus, grid = plan.rows(half.side), machine.links, half.gpus, half.grid
    width = fused.table_width(plan.rank, plan.dtype) * plan.itemsize
    table, on_device = plan.rows(other_side(half.side)) / half.held * width, half.factors == "device"
    if on_device and grid.groups > 1:
        crossing = table * (grid.groups - 1) / grid.groups
        seconds["all-gather"] = crossing / links.all_gather + links.collective
    if grid.splits > 1:
        sums = rows / grid.groups * slot_bytes(plan) * half.turns
        crossing = sums * (grid.splits - 1) / grid.splits
        reductions = max(4.0, sums / BATCH_BYTES, half.waves)
        seconds["reduce-scatter"] = crossing / links.reduce_rate(grid.splits) + reductions * links.collective
    if half.turns > 1:  # each turn reads and writes the sums of a batch again
        again = 2 * half.turns * rows / grid.groups * slot_bytes(plan)
        seconds["turns"] = again / links.copy_bytes + half.turns * half.waves * links.slab
    elif not on_device or half.ratings != "device":
        seconds["waves"] = half.waves * links.slab
    load, solved, loads = 0.0, 0.0, half.waves if half.turns > 1 else 1  # each wave of rows loads the parts again
    if not on_device:
        load += loads * half.turns * table
        solved = rows / gpus * width
    entry_bytes = 4 + plan.itemsize
    if half.ratings != "device":
        load += plan.nnz / gpus * entry_bytes
    if load:
        seconds["from host"] = load / links.pinned_bytes + solved / links.fetch_bytes  # solutions return to the host
    read = plan.nnz * entry_bytes if half.ratings == "disk" else 0.0
    if half.factors == "disk":  # shared by all GPUs
        read += gpus * loads * half.turns * table + rows * width
    if read:
        seconds["from disk"] = read / links.disk_bytes
    return seconds


def priced(plan: Plan, half: HalfPlan, machine: Machine) -> HalfPlan:
    """A half sweep with its time, in which overlapping times count once: data load while the previous ones are used.

    Sums are sent on a second stream while the next ones are computed, but the computing kernels fill the GPU: on H200s
    the two took as long as sequential execution.
    """
    seconds = half_seconds(plan, half, machine)
    apart = ("from host", "from disk", "all-gather")
    work = sum(spent for name, spent in seconds.items() if name not in apart)
    loading = max(seconds.get("from host", 0.0), seconds.get("from disk", 0.0))
    if half.turns > 1 and half.buffers == 1:
        work += loading
    else:
        work = max(work, loading) + min(work, loading) / SLABS
    work += seconds.get("all-gather", 0.0)
    launching = half.gpus * machine.links.rank if half.gpus > 1 else 0.0
    # half sweeps of complete rows that stay on the GPUs are launched while those before them run
    ahead = half.fixed == "replicated" and half.factors == half.ratings == "device"
    total = max(work, launching) if ahead else work + launching
    return replace(half, seconds=seconds, total=total + machine.gpu.sweep["als"])


def fewest_batches(
    plan: Plan, half: HalfPlan, machine: Machine, memory: float, least: int = 1, entries: int | None = None
) -> HalfPlan | None:
    """The half sweep with the smallest q, at least `least`, that fits (cuMF 4.3), by bisection; None if none does.

    q is a multiple of the number of groups. Parts that take turns are loaded while the previous one is used, if both
    fit. `entries`: those of the buffers of a GPU, if they do not depend on q.
    """
    groups = half.grid.groups
    first = -(-least // groups)
    last = max(first, -(-min(plan.rows(half.side), MOST_PARTS) // groups))
    for buffers in (2, 1) if half.turns > 1 else (2,):

        def fits(waves: int, buffers: int = buffers) -> bool:
            tried = replace(half, batches=waves * groups, buffers=buffers)
            return sum(half_bytes(plan, tried, entries=entries).values()) <= memory

        whole = fits(first)  # usually
        if whole or fits(last):
            waves = first if whole else first + bisect.bisect_left(range(first, last), True, key=fits)
            found = replace(half, batches=waves * groups, buffers=buffers)
            return priced(plan, replace(found, bytes=half_bytes(plan, found, entries=entries)), machine)
    return None
