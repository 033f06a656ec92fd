"""CCD++: hyperparameters, device, memory and cost; the order of the rank-one updates; layout on a GPU.

The kernels are in `cpu.ccd` and `gpu.ccd`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from ..core.objective import SIDES, Factors, Objective, Side, State, other_side
from ..core.system import ceil_div
from ..core.validate import check_bool, check_int, index_pointer_dtype
from ..device.cuda import DeviceSpec
from ..errors import NonFiniteError
from ..native import _ccd
from . import dispatch
from .cost import gpu_idle, memory_floor
from .fused import table_width
from .machine import CpuRates, Machine
from .solver import SWEEP_ORDER, Unconnected, frozen_text
from .tables import KernelConfig
from .types import CpuWork, Method, Plan, Settings, instruction_set_notes

MAX_INNER_ITERATIONS = 1000  # upper bound; a rank-one problem converges long before


@dataclass(frozen=True)
class CcdMethod(Method):
    """Hyperparameters of CCD++ beyond the objective (Yu, Hsieh, Si and Dhillon 2012)."""

    kind: ClassVar[str] = "ccd"
    entry_seconds: ClassVar[float] = 4e-9  # bench/dispatch.py, 16 cores
    streams: ClassVar[bool] = False

    inner_iterations: int = 1
    """Alternations between the item and the user vector before the residual is updated for the next factor."""
    nonnegative: bool = False  # project coordinates to max(0, .), which gives the exact minimizer under that constraint

    def names(self, plan: Plan) -> tuple[str, str]:
        return "", "ccd++"

    @classmethod
    def check(cls, *, inner_iterations: Any, nonnegative: Any) -> CcdMethod:
        return cls(
            check_int("inner_iterations", inner_iterations, 1, MAX_INNER_ITERATIONS),
            check_bool("nonnegative", nonnegative),
        )

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        """Decide device and memory. With device="auto", use the GPU found if the work outweighs its start-up time."""
        if isinstance(settings.device, tuple):
            raise ValueError(
                f"device={list(settings.device)!r}: CCD runs on one device; name one, or use ALS or SGD on several"
            )
        base = base.changed(precision="float32", reorder="none")
        return dispatch.choose(
            dispatch.PlanRequest(
                base, settings, spec, on_cpu=_on_cpu, on_gpu=lambda undecided: _on_gpu(undecided, settings, spec)
            )
        )

    @staticmethod
    def bias_columns(plan: Plan) -> tuple[Side, ...]:
        """Sides whose biases are stored in the first columns of coordinates, with ones on the other side."""
        return SWEEP_ORDER if plan.rank > plan.factors else ()

    def columns_of_work(self, plan: Plan) -> float:
        """Equivalent number of factors with one inner iteration each; each column of biases counts as one."""
        return plan.factors * (4.0 * self.inner_iterations + 6.0) / 10.0 + len(self.bias_columns(plan))

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work: per entry, side and factor 4 flops for each inner iteration, and 4 for two residual updates.

        Recomputing the residual at the start of an iteration takes another 2 per factor.
        """
        return 20.0 * plan.nnz * self.columns_of_work(plan)

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Both copies of the residual, read and written once per factor, with their indices.

        Further inner iterations only read.
        """
        itemsize = np.dtype(plan.dtype).itemsize
        once, again = 2.0 * (4 + 2 * itemsize), 2.0 * (4 + itemsize)
        biases = len(self.bias_columns(plan))
        return plan.nnz * ((plan.factors + biases) * once + plan.factors * (self.inner_iterations - 1) * again)

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Passes over all entries, one factor at a time; factors are converted to columns and back to rows."""
        once = plan.nnz * rates.ccd_entry + plan.filled_rows * rates.ccd_row
        floor = memory_floor(self.bytes_per_iteration(plan) * 4 / plan.itemsize, plan, rates)
        regions = plan.factors * (2.0 * self.inner_iterations + 2.0) + len(self.bias_columns(plan)) * 4.0
        return CpuWork(max(self.columns_of_work(plan) * once, floor), regions, new_tables=2.0)

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        """Bytes divided by their rate, and several launches for each factor."""
        rates, biases = machine.gpu, len(self.bias_columns(plan))
        launches = plan.factors * (2.0 * self.inner_iterations + 4.0) + biases * 6.0
        rows = plan.filled_rows * (plan.factors + biases) * rates.ccd_row
        return self.bytes_per_iteration(plan) / rates.ccd + rows + launches * rates.launch + gpu_idle(plan, rates)

    def describe(self, plan: Plan) -> str:
        inner = f"{self.inner_iterations} inner iteration{'s' if self.inner_iterations > 1 else ''}"
        sign = ", non-negative" if self.nonnegative else ""
        return f"ccd++, {inner} of each rank-one update{sign}{frozen_text(plan)}"


def non_finite(objective: Objective, side: Side, row: int, factor: int | None) -> NonFiniteError:
    """The error for a coordinate that overflowed; a bias if `factor` is None."""
    what, penalty = f"factor {factor}", f"regularization (now {objective.regularization.of(side):g})"
    if factor is None:
        what, penalty = "bias", f"bias_regularization (now {objective.bias_regularization.of(side):g})"
    return NonFiniteError(
        f"{what} of {side} {row} became infinite or NaN; "
        f"scale the ratings down, increase {penalty}, or use dtype='float64'"
    )


def _on_cpu(plan: Plan) -> Plan:
    """`plan` on the CPU: ratings and residual in both orientations, factors by row and by column."""
    m, n, nnz = plan.n_users, plan.n_items, plan.nnz
    itemsize = np.dtype(plan.dtype).itemsize
    pointer = np.dtype(index_pointer_dtype(nnz)).itemsize
    sizes = {
        # the kernels' int64 pointers are copies if those of the matrices are int32
        "ratings": 2 * nnz * (itemsize + 4) + (m + n) * (pointer + 8),
        "residual": 2 * nnz * itemsize,
        # by column; and by row, old and new, so that an interrupted iteration has no effect
        "factors": 3 * (m + n) * (plan.factors + len(CcdMethod.bias_columns(plan))) * itemsize,
        "vectors": (m + n) * (2 * itemsize + 8 * (1 + plan.rank - plan.factors)),
        "workspace": plan.num_threads * _ccd.LONG_ROW * itemsize,
    }
    return plan.changed(bytes=sizes, notes=tuple(instruction_set_notes()))


def _on_gpu(plan: Plan, settings: Settings, spec: DeviceSpec | None) -> Plan:
    plan, biases = dispatch.on_gpu(plan, settings, spec), plan.rank > plan.factors
    assert plan.gpu is not None
    sizes = memory_bytes(plan.n_users, plan.n_items, plan.nnz, plan.factors, plan.dtype, plan.gpu, biases)
    return plan.changed(bytes=sizes)


# ---------------------------------------------------------------------------------------------------------- the solver


class RankOneSolver(Unconnected):
    """Cyclic coordinate descent over rank-one factors: owns the current factors; a subclass owns the residual.

    The coordinates of a side by column are its biases, ones that multiply the other side's biases, then factors. The
    method of `plan` is a `CcdMethod`, the objective explicit.
    """

    def __init__(self, objective: Objective, plan: Plan, state: State) -> None:
        assert not objective.is_implicit
        self.objective, self.plan, self.state, self.method = objective, plan, state, cast(CcdMethod, plan.method)
        self.biases = self.method.bias_columns(plan)

    def active(self) -> AbstractContextManager[None]:
        """Context of all computation."""
        return nullcontext()

    def solve(self, step: None = None) -> State:
        """Run one outer iteration on copies of the factors.

        Every iteration recomputes the residual, so that a resumed fit equals an uninterrupted one bit for bit, and
        rounding errors do not accumulate. A factor is solved in every inner iteration, biases once.
        """
        with self.active():
            columns = self.columns_of_state()
            for column in range(len(self.biases) + self.plan.factors):
                for inner in range(1 if self.is_bias(column) else self.method.inner_iterations):
                    for side in SWEEP_ORDER:
                        self.update(side, columns, column, inner)
            users, items = (self.factors(side, columns[side]) for side in SIDES)
            return State(users, items, self.state.mean)

    def keep(self, step: None, solved: State) -> None:
        self.state = solved

    def is_bias(self, column: int) -> bool:
        """Whether a column has biases of one side and ones of the other."""
        return column < len(self.biases)

    def solves(self, side: Side, column: int) -> bool:
        """Whether a side's coordinates change: not if they are ones that multiply biases, or the side is frozen."""
        return side != self.plan.frozen and not (self.is_bias(column) and self.biases[column] != side)

    def columns_of_state(self) -> dict[Side, Any]:
        """Compute the residual of the state; return both sides' coordinates by column."""
        raise NotImplementedError

    def update(self, side: Side, columns: dict[Side, Any], column: int, inner: int) -> None:
        """Solve the coordinates of a side in one column, in inner iteration 0, 1, ...; and update the residual."""
        raise NotImplementedError

    def factors(self, side: Side, columns: Any) -> Factors:
        """Convert coordinates by column to factors; raises NonFiniteError if one is infinite or NaN."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------------ layout on a GPU

QUAD = 4  # entries a lane reads at a time; rows are padded to whole quads

SEGMENT = 256
"""Entries above which a piece is split: what a warp reads together. Longer segments, which a warp would read in several
steps, spread what all warps read at a time over more memory: 2 to 5 % slower with 2,048 on an H100."""

STAGED_THREADS = {4: 1024, 8: 512}
"""Threads of a block that has a multiprocessor to itself, by bytes of a number: the most that do not spill registers.
In float32, 1,024 were 7 % faster than 768 in a trial on an H200."""

MEAN_PIECE = 32
"""Minimum average entries of a row in a tile for tiles to be faster: each piece takes 16 bytes, and 8 for its sums."""

MAX_TILE = 1 << 16  # maximum elements of a tile, which 16-bit indices address
CHUNK_ENTRIES = 1 << 24  # entries on the device in their original order at a time, while they are copied to the layout

VECTORS: dict[Side, int] = {"item": 2, "user": 3}
"""Vectors of the other side that the pass of each side gathers; see cuda/ccd.cu."""


@dataclass(frozen=True)
class CcdConfig(KernelConfig):
    """Layout of one side's entries, and launch configuration of its passes."""

    staged: bool  # stage vectors of the other side in shared memory, tile by tile; else gather them from global memory
    tile: int  # elements of a staged vector; the last 16 bytes are zeros
    n_tiles: int  # 1 if vectors are not staged
    segment: int  # entries above which a piece is split; at most `SEGMENT`
    blocks: int  # maximum blocks of a pass
    threads: int  # threads of each

    def check(self) -> None:
        if self.segment > SEGMENT:
            raise ValueError(f"segment must be 1 to {SEGMENT} entries, which a warp reads together; got {self.segment}")

    @classmethod
    def choose(cls, n_rows: int, n_fixed: int, nnz: int, vectors: int, dtype: Any, spec: DeviceSpec) -> CcdConfig:
        """The layout for sizes and a device.

        Tiles are as large as shared memory allows; there are none if rows would have only a few entries in each.
        """
        itemsize = np.dtype(dtype).itemsize
        tile = min(spec.shared_bytes // (16 * vectors) * (16 // itemsize), MAX_TILE)
        n_tiles = ceil_div(n_fixed, tile - 16 // itemsize)
        config = cls(True, tile, n_tiles, SEGMENT, spec.multiprocessors, STAGED_THREADS[itemsize])
        if config.n_tiles == 1 or nnz >= MEAN_PIECE * n_rows * config.n_tiles:
            return config
        return cls(False, 16, 1, SEGMENT, _gathering_blocks(vectors, dtype) * spec.multiprocessors, 256)

    def constants_for(self, vectors: int, dtype: Any) -> dict[str, Any]:
        """Compile-time constants of a pass that gathers `vectors` vectors."""
        return {
            "REAL": np.dtype(dtype),
            "STAGED": self.staged,
            "VECTORS": vectors,
            "TILE": self.tile,
            "THREADS": self.threads,
            "BLOCKS_PER_SM": 1 if self.staged else _gathering_blocks(vectors, dtype),
        }

    def usable(self, dtype: Any) -> int:
        return self.tile - 16 // np.dtype(dtype).itemsize


def _gathering_blocks(vectors: int, dtype: Any) -> int:
    """Resident blocks per multiprocessor of a pass that does not stage its vectors: as many as registers allow."""
    return 3 if np.dtype(dtype).itemsize == 4 and vectors < 3 else 2


def memory_bytes(
    n_users: int, n_items: int, nnz: int, factors: int, dtype: Any, spec: DeviceSpec, biases: bool = False
) -> dict[str, int]:
    """Upper bound on the memory of a fit on a device, by purpose; actual use depends on the entries."""
    itemsize = np.dtype(dtype).itemsize
    sizes = {"ratings": 0, "residual": 0, "pieces": 0}
    counts: dict[Side, int] = {"user": n_users, "item": n_items}
    for side in SIDES:
        n_rows, n_fixed = counts[side], counts[other_side(side)]
        config = CcdConfig.choose(n_rows, n_fixed, nnz, VECTORS[side], dtype, spec)
        pieces = min(nnz, n_rows * config.n_tiles) + nnz // config.segment
        places = nnz + (QUAD - 1) * min(nnz, n_rows * config.n_tiles) + (QUAD - 1)
        sizes["ratings"] += places * ((2 if config.staged else 4) + itemsize)
        sizes["residual"] += places * itemsize
        # pieces and their tiles, partial sums; parts (a team's blocks, in up to three layers of up to three kinds of
        # pieces); split rows; penalties; packs
        sizes["pieces"] += pieces * (16 + 4 + 2 * itemsize)
        sizes["pieces"] += min(pieces, 9 * (2 * config.n_tiles + config.blocks)) * 32
        sizes["pieces"] += (min(pieces, config.blocks) + 1) * 4
        sizes["pieces"] += min(n_rows, pieces) * 16 + (1 + biases) * n_rows * itemsize
        sizes["pieces"] += 0 if config.staged else (n_fixed + 1) * 4 * itemsize
    # old and new tables and biases; columns, of which biases take two, and a spare one
    rows = table_width(n_users, dtype) + table_width(n_items, dtype)
    width = table_width(factors + biases, dtype)
    sizes["factors"] = rows * (2 * (width + biases) + factors + 2 * biases + 1) * itemsize
    # some entries in their original order, and their destinations, while the second side is laid out
    chunk = min(nnz, CHUNK_ENTRIES + max(n_users, n_items))
    sizes["chunk"] = chunk * (4 + itemsize)
    return sizes
