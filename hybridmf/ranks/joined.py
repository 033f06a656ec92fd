"""Factors distributed over ranks, concatenated on first access."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from ..core.objective import Factors, LazyFactors


class JoinedFactors(LazyFactors):
    """The rows of all ranks, concatenated on the host on first access.

    `parts`: factors of each rank, on the host or a device. Not modified.
    `order`, int64 array, shape (n,): row of the input for each row of the parts. Default: the same.
    """

    def __init__(self, parts: Sequence[Factors], order: np.ndarray | None = None) -> None:
        self.keep(parts=tuple(parts), order=order)

    parts: tuple[Factors, ...]
    order: np.ndarray | None

    def _brought(self) -> Factors:
        host = _joined(self.parts)
        if self.order is None:
            return host
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return host.take(inverse)

    @property
    def squares(self) -> Factors | None:
        """Sums of squared steps, on the host."""
        return self.on_host().squares

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def _joined(parts: Sequence[Factors]) -> Factors:
    dtype, columns = parts[0].form
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    matrix = np.empty((ends[-1], columns), dtype=dtype)
    with ThreadPoolExecutor(len(parts), thread_name_prefix="hybridmf-download") as threads:  # each GPU has its own bus
        places = [matrix[first:last] for first, last in pairwise(ends)]
        list(threads.map(lambda part, place: part.write(place), parts, places))
    biases = [part.bias for part in parts if part.bias is not None]
    squares = [part.squares for part in parts if part.squares is not None]
    return Factors(matrix, np.concatenate(biases) if biases else None, _joined(squares) if squares else None)
