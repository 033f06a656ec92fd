"""Pieces into which a GPU divides the sum of a Gram matrix, and the memory of their sums."""

from __future__ import annotations

import numpy as np

from ..core.system import ceil_div, round_up

TILE = 64

BLOCKS = 1056
"""Blocks of threads that share a table: eight on each multiprocessor of an H200."""

PIECE_ROWS = (256, 4096)
"""Minimum and maximum rows of a piece, which is summed in the table's type; pieces are added in float64."""

SUMS_BYTES = 64 << 20
"""Maximum memory of the sums of all pieces."""


def gram_sides(width: int) -> tuple[int, int]:
    """Rows and columns of the sums of a piece, and its number of tiles."""
    side = round_up(width, TILE)
    return side, side // TILE * (side // TILE + 1) // 2


def gram_rows(n: int, width: int, itemsize: int) -> int:
    """Rows of a piece of a table of `n` rows."""
    side, tiles = gram_sides(width)
    rows = int(np.clip(ceil_div(n * tiles, BLOCKS), *PIECE_ROWS))
    return max(rows, ceil_div(n, max(1, SUMS_BYTES // (side * side * itemsize))))


def gram_bytes(n: int, width: int, itemsize: int) -> int:
    """Bytes of the sums of all pieces of a table; plans omit small arrays such as their total."""
    side, _ = gram_sides(width)
    return ceil_div(n, gram_rows(n, width, itemsize)) * side * side * itemsize
