"""Memory of solvers on the CPU; memory and threads of requests to a fitted model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..core.validate import check_memory, index_pointer_dtype
from ..native import _als
from .assemblies import tile_pointers
from .extras import extra_bytes
from .row_forms import changes_basis

if TYPE_CHECKING:
    from .types import Plan

GRAM_ROWS = 512  # rows of a partial sum of `_als.gram` at least (GRAM_ROWS of native/_als.pyx)


ANSWER_BYTES = 1 << 28  # size of ids and scores from which free memory is checked before they are allocated


def check_answer(n_rows: int, N: int, found: int, itemsize: int) -> None:
    """Raise if the ids and scores of `N` results per row do not fit in memory.

    `n_rows`, `N`: shape of the answer. `found`: columns that can hold results; the others are padding. `itemsize`:
    bytes of a score.
    """
    columns = N if found >= N else N + found  # results are computed without padding, and copied
    needed = n_rows * columns * (4 + itemsize)
    if needed > ANSWER_BYTES:
        way_out = f"N={found} holds all {found:,} that there are" if found < N else "ask for fewer of them at a time"
        check_memory(f"an answer of N={N:,} results for each of {n_rows:,} rows", needed, way_out)


WORK_OF_A_THREAD = 1 << 22
"""Multiply-adds per thread; they take 0.2 to 0.5 ms.

A thread of the pool starts within 5 to 50 microseconds on an idle machine. If all cores are busy it waits for a time
slice of the scheduler, milliseconds, and spinning then costs as much processor time as the work."""


def threads_for(work: float, parts: int, num_threads: int) -> int:
    """Threads for `work` multiply-adds in `parts` separate parts, at most `num_threads`."""
    return max(1, min(num_threads, parts, int(work / WORK_OF_A_THREAD)))


def cpu_bytes(plan: Plan) -> dict[str, int]:
    m, n, nnz, rank = plan.n_users, plan.n_items, plan.nnz, plan.rank
    itemsize = np.dtype(plan.dtype).itemsize
    pointer = np.dtype(index_pointer_dtype(nnz)).itemsize
    # the caller's arrays, our copy of them and its transpose; permuted copies of both
    layouts = (2 if plan.streamed else 3) + (0 if plan.reorder == "none" else 2)
    sizes = {
        "ratings": layouts * (plan.slab if plan.streamed else nnz) * (itemsize + 4) + (m + n) * (pointer + 8),
        # old and new factors of the side being solved, so that an interrupted half sweep has no effect
        "factors": (m + n + max(m, n)) * rank * itemsize,
        # not at the same time: the Gram matrix is complete before rows are solved
        "workspace": max(
            plan.num_threads * _row_scratch(plan, itemsize) * itemsize + _segment_bytes(plan), _gram_bytes(plan)
        ),
    }
    # the fixed side in another basis
    changed = max(n if changes_basis(plan, "user") else 0, m if changes_basis(plan, "item") else 0)
    if changed:
        sizes["basis"] = changed * rank * itemsize
    if plan.tile_rows:
        pointers = tile_pointers(m, n, plan) + tile_pointers(n, m, plan)
        # the kernels' int64 pointers are copies if those of the format are int32
        sizes["tiles"] = 2 * nnz * (itemsize + 8) + pointers * (8 if pointer == 8 else pointer + 8)
    return sizes | extra_bytes(plan, rank * itemsize)


def rank_bytes(plan: Plan, ranks: int) -> dict[str, int]:
    """Memory by purpose of one of several ranks on the CPU that do not share memory."""
    m, n = plan.n_users, plan.n_items
    itemsize = np.dtype(plan.dtype).itemsize
    row = plan.rank * itemsize
    sizes = cpu_bytes(plan)
    if not plan.streamed:
        pointers = (m + n) * (np.dtype(index_pointer_dtype(plan.nnz)).itemsize + 8)
        sizes["ratings"] = 3 * -(-plan.nnz // ranks) * (itemsize + 4) + pointers
    # every rank receives the whole state of a resumed fit; then its own rows, old and new
    sizes["factors"] = (m + n + 2 * -(-(m + n) // ranks)) * row
    sizes["gathered"] = max(m, n) * row
    return sizes


def _row_scratch(plan: Plan, itemsize: int) -> int:
    if plan.tile_rows:
        return _als.bals_workspace_size(plan.rank, itemsize, plan.tile_rows, plan.tile_cols)
    if plan.solver == "subspace":
        longest = min(plan.nnz, max(plan.n_users, plan.n_items))  # an upper bound
        return _als.subspace_workspace_size(plan.rank, plan.block_size, itemsize, longest)
    return _als.workspace_size(plan.rank, itemsize)


def _segment_bytes(plan: Plan) -> int:
    """Bytes of partial systems of long rows shared by threads, if such rows are possible."""
    if plan.assembly != "simd" or plan.solver != "cholesky":
        return 0
    if min(plan.nnz, max(plan.n_users, plan.n_items)) <= _als.LONG_ROW:
        return 0
    return _als.SEGMENTS * system_bytes(plan)


def _gram_bytes(plan: Plan) -> int:
    """Float64 partial sums of `_als.gram`, up to 256, which implicit feedback needs."""
    if plan.feedback == "explicit":
        return 0
    width = _als.padded_rank(plan.rank)
    parts = min(256, -(-max(plan.n_users, plan.n_items) // GRAM_ROWS)) + 3  # the sum, its halves put together
    return parts * width * width * 8


def system_bytes(plan: Plan) -> int:
    """Bytes of one padded system and its right-hand side in the CPU's kernels."""
    width = _als.padded_rank(plan.rank)
    return (width + 1) * width * np.dtype(plan.dtype).itemsize
