"""Exceptions of the library. Each is also the built-in type a caller would expect, so ``except ValueError`` works."""

from __future__ import annotations

import functools


class HybridMFError(Exception):
    """Base of every exception that is particular to this library."""


class RatingsError(HybridMFError, ValueError):
    """Invalid ratings: a bad file, line, index, value or shape."""


class DuplicateEntriesError(RatingsError):
    """A (user, item) pair occurs more than once and no rule for merging the entries was given."""


class UnknownLabelError(RatingsError, KeyError):
    """A user or item label is unknown to the ratings or the model."""

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
    """Stochastic gradient descent diverged: the loss rose, or factors became infinite or NaN."""


class DeviceError(HybridMFError, RuntimeError):
    """The requested device is missing or cannot run the request."""


class DeviceLostError(DeviceError):
    """A GPU failed, and CUDA cannot use it again in this process; or it does not answer.

    The process has to be restarted. Until then, all calls for this GPU raise this error at once; fits on the CPU, and
    `save` of factors on the host, still work.

    Attributes
    ----------
    facts : dict
        "device", "reason", and "work": what the GPU was computing, empty if unknown. Shared by all errors about the
        same failure.
    kept : str
        State of the model after the fit that failed; empty for other calls.
    """

    def __init__(self, facts: dict[str, str]) -> None:
        super().__init__(facts)
        self.facts, self.kept = facts, ""

    def __str__(self) -> str:
        facts, work = self.facts, self.facts["work"]
        text = (
            f"{facts['device']} failed{f' while computing {work}' if work else ''}: {facts['reason']}; this process "
            'cannot use the GPU any more: restart it, or use device="cpu"'
        )
        return f"{text}. {self.kept}" if self.kept else text

    def during(self, work: str) -> None:
        """Name the work of the GPU when it failed, in this and all later errors."""
        self.facts["work"] = self.facts["work"] or work


class MemoryBudgetError(HybridMFError, MemoryError):
    """The computation does not fit in the available memory; raised before it starts."""


class DeviceMemoryError(MemoryBudgetError, DeviceError):
    """A GPU has too little free memory."""


class CommunicatorError(HybridMFError, RuntimeError):
    """Communication between ranks failed: a rank has failed, ended or does not respond; the message names the cause."""


class StoreError(RatingsError):
    """A store of ratings is incomplete, truncated or altered, or was not written by hybridmf."""


class ModelFileError(HybridMFError, ValueError):
    """A model or checkpoint file is truncated or altered, or was not written by hybridmf."""
