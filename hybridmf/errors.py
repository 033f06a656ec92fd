"""Exceptions of the library. Each is also the built-in type a caller would expect, so ``except ValueError`` works."""

from __future__ import annotations

import functools


class HybridMFError(Exception):
    """Base of every exception that is particular to this library."""


class RatingsError(HybridMFError, ValueError):
    """Ratings cannot be used as they are: a bad file, line, index, value or shape."""


class DuplicateEntriesError(RatingsError):
    """A (user, item) pair occurs more than once and no rule to merge the entries was given."""


class UnknownLabelError(RatingsError, KeyError):
    """A user or item label that the ratings, or the model, do not have."""

    __str__ = Exception.__str__  # KeyError would show the message's repr


class NotPositiveDefiniteError(HybridMFError, ValueError):
    """The normal equations of one row have no unique solution.

    Attributes
    ----------
    side : {"user", "item"}
        Side whose system failed.
    row : int
        Position of the row on that side.
    minor : int
        Order of the leading minor that is not positive.
    """

    def __init__(self, message: str, *, side: str, row: int, minor: int) -> None:
        super().__init__(message)
        self.side, self.row, self.minor = side, row, minor

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), side=self.side, row=self.row, minor=self.minor), self.args


class NonFiniteError(HybridMFError, ArithmeticError):
    """Factors became infinite or NaN: the values overflow the precision in use."""


class DivergedError(HybridMFError, ArithmeticError):
    """Stochastic gradient descent took steps that are too long: the loss rose, or factors became infinite or NaN."""


class DeviceError(HybridMFError, RuntimeError):
    """A device was asked for that cannot serve the request."""


class MemoryBudgetError(HybridMFError, MemoryError):
    """The work does not fit in the memory at hand; raised before it starts."""


class DeviceMemoryError(MemoryBudgetError, DeviceError):
    """A GPU has too little memory left."""


class CommunicatorError(HybridMFError, RuntimeError):
    """Ranks can no longer work together: one has failed, ended, or does not answer; the message names the cause."""


class StoreError(RatingsError):
    """A store of ratings is incomplete, truncated, altered, or not one of ours."""


class ModelFileError(HybridMFError, ValueError):
    """A model or checkpoint file is truncated, altered, or not one of ours."""
