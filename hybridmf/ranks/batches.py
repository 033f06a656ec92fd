"""Which rows a group of ranks sums at a time: of each member's own rows a range, in each batch (cuMF Alg. 3, 9-16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ..plan.half_sweep import PIECES
from ..plan.types import Plan

MORE_BATCHES, BATCH_BYTES = 4, 128 << 20
"""Batches that a half sweep is cut into so that sums travel while others are made, if each still has so many bytes:
GPUs add them up in about the time in which ranks that are threads launch what a batch needs."""

Ranges: TypeAlias = "list[tuple[int, int]]"
"""Ranges of rows: the first of each, and the one after its last."""


def batch_rows(plan: Plan, splits: int, rows: int) -> int:
    """Rows of each member that are summed at a time.

    Two batches of all members' rows are in memory at a time, each row with up to two more pieces, and the added-up
    systems of the own rows.
    """
    most = max(1, plan.batch_slots // (2 * (PIECES * splits + 1)))
    worth_while = BATCH_BYTES // (splits * (plan.rank + 1) * plan.rank * np.dtype(plan.dtype).itemsize // 2) + 1
    return max(1, min(most, max(worth_while, -(-rows // MORE_BATCHES))))


def batch_entries(batches: Sequence[Ranges], degrees: np.ndarray) -> np.ndarray:
    """Entries of each batch, int64; `degrees`: of each row."""
    before = np.concatenate(([0], np.cumsum(degrees)))
    sizes = [sum(int(before[last] - before[first]) for first, last in batch) for batch in batches]
    return np.array(sizes, dtype=np.int64)


def even_batches(counts: Sequence[int], rows: int) -> list[Ranges]:
    """At most `rows` rows of each member at a time; a member with fewer rows has none in the last batches.

    Parameters
    ----------
    counts : sequence of int
        Rows of each member.
    rows : int

    Returns
    -------
    list of list of (first, last)
        Of each batch, the range of each member's rows.
    """
    return [
        [(min(at, count), min(at + rows, count)) for count in counts] for at in range(0, max(counts, default=0), rows)
    ]


def bounded_batches(bounds: Sequence[np.ndarray], entries: Sequence[np.ndarray], most: int) -> list[Ranges]:
    """Batches of at most `most` entries of all members together, where ratings come batch by batch.

    Each batch has the next rows of each member, or none of those for which there is no room any more: rows that are
    long on their own are not summed with each other. Who has most left to do comes first.

    Parameters
    ----------
    bounds : sequence of int array, shape (n_ranges + 1,)
        How each member's rows are cut.
    entries : sequence of int array, shape (n_ranges,)
        Entries of these ranges.
    most : int

    Returns
    -------
    list of list of (first, last)
        As of `even_batches`.
    """
    sizes, batches = [each.tolist() for each in entries], []
    at = [0] * len(sizes)
    while any(next_one < len(own) for next_one, own in zip(at, sizes, strict=True)):
        ranges, held, empty = [(0, 0)] * len(sizes), 0, True
        for k in sorted(range(len(sizes)), key=lambda k: at[k] - len(sizes[k])):
            first = at[k]
            takes = first < len(sizes[k]) and (empty or held + sizes[k][first] <= most)
            if takes:
                at[k], held, empty = first + 1, held + sizes[k][first], False
            ranges[k] = (int(bounds[k][first]), int(bounds[k][at[k]]))
        batches.append(ranges)
    return batches
