"""Batches of rows that a group of ranks sums at a time: a range of each member's rows (cuMF Alg. 3, lines 9-16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..plan.half_sweep import SYSTEMS_PER_ROW
from ..plan.types import Plan

MORE_BATCHES, BATCH_BYTES = 4, 128 << 20
"""Batches of a half sweep, so that reduction overlaps assembly, if each batch still has `BATCH_BYTES`."""

Ranges: TypeAlias = "list[tuple[int, int]]"  # ranges of rows: the first row and the one after the last


@dataclass(frozen=True)
class BatchedRows:
    """Rows of a side that a group of ranks sums batch by batch, from the view of one rank."""

    names: np.ndarray  # int64 array, shape (n,): Number of each row solved here, for error messages
    degrees: np.ndarray  # int64 array, shape (n,): Entries of each of these rows on all ranks
    batches: list[Ranges]  # rows of the rank's block of entries in each batch, range after range
    solved: list[Ranges]  # rows of `names` that are solved here in each batch, range after range


def batch_rows(plan: Plan, splits: int, rows: int) -> int:
    """Rows of each member in a batch.

    Memory holds two batches of all members' rows, with up to two more segments of each row, and the reduced systems of
    own rows.
    """
    most = max(1, plan.batch_slots // (2 * (SYSTEMS_PER_ROW * splits + 1)))
    worth_while = BATCH_BYTES // (splits * (plan.rank + 1) * plan.rank * np.dtype(plan.dtype).itemsize // 2) + 1
    return max(1, min(most, max(worth_while, -(-rows // MORE_BATCHES))))


def batch_entries(batches: Sequence[Ranges], degrees: np.ndarray) -> np.ndarray:
    before = np.concatenate(([0], np.cumsum(degrees)))
    sizes = [sum(int(before[last] - before[first]) for first, last in batch) for batch in batches]
    return np.array(sizes, dtype=np.int64)


def even_batches(counts: Sequence[int], rows: int) -> list[Ranges]:
    """For each batch, a range of at most `rows` rows of each member, which has ``counts[k]`` of them."""
    return [
        [(min(at, count), min(at + rows, count)) for count in counts] for at in range(0, max(counts, default=0), rows)
    ]


def bounded_batches(bounds: Sequence[np.ndarray], entries: Sequence[np.ndarray], most: int) -> list[Ranges]:
    """Batches of at most `most` entries of all members together, for ratings that are streamed batch by batch.

    A batch has the next rows of each member; a member whose next rows do not fit contributes none, so that two long
    rows are not in one batch. The member with the most entries left comes first.

    `bounds`, `entries`: of each member, int (n_ranges + 1,) and (n_ranges,): ranges of rows that are in one batch.
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
