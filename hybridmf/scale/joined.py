"""Factors of which each rank has a range of rows, as one; put together where somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._objective import Factors


def part_of(factors: Factors, first: int, last: int) -> Factors:
    """Rows `first` to `last` - 1, as views."""
    bias = None if factors.bias is None else factors.bias[first:last]
    squares = None if factors.squares is None else part_of(factors.squares, first, last)
    return Factors(factors.matrix[first:last], bias, squares)


class JoinedFactors(Factors):
    """The ranks' rows one after the other, on the host once somebody looks.

    Parameters
    ----------
    parts : sequence of Factors
        Of each rank, wherever it keeps them; not to be written to.
    order : int64 array, shape (n,), optional
        Row of the input that each row of the parts belongs to, if not the same.
    """

    def __init__(self, parts: Sequence[Factors], order: np.ndarray | None = None) -> None:
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "_host", None)

    parts: tuple[Factors, ...]
    order: np.ndarray | None
    _host: Factors | None

    def on_host(self) -> Factors:
        """A copy in NumPy arrays, made once."""
        if self._host is None:
            host = _joined([part.on_host() for part in self.parts])
            if self.order is not None:
                inverse = np.empty_like(self.order)
                inverse[self.order] = np.arange(len(self.order))
                host = host.take(inverse)
            object.__setattr__(self, "_host", host)
        joined = self._host
        assert joined is not None
        return joined

    @property
    def matrix(self) -> np.ndarray:
        """Factors on the host."""
        return self.on_host().matrix

    @property
    def bias(self) -> np.ndarray | None:
        """Biases on the host."""
        return self.on_host().bias

    @property
    def squares(self) -> Factors | None:
        """Sums of squared steps on the host."""
        return self.on_host().squares

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __reduce__(self) -> Any:
        return Factors, (self.matrix, self.bias, self.squares)


def _joined(parts: Sequence[Factors]) -> Factors:
    biases = [part.bias for part in parts if part.bias is not None]
    squares = [part.squares for part in parts if part.squares is not None]
    return Factors(
        np.concatenate([part.matrix for part in parts]),
        np.concatenate(biases) if biases else None,
        _joined(squares) if squares else None,
    )
