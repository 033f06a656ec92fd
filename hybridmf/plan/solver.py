"""Interface of solvers for the fit loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.objective import Side, State
from .types import Plan

SWEEP_ORDER: tuple[Side, Side] = ("item", "user")
"""Items first: the final user factors are then exact given the item factors, so fold-in reproduces them."""


Choose: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""Function from the degrees of rows to the positions of some of them."""


class Given(NamedTuple):
    """The input of a half sweep, on its device."""

    fixed: Any  # all factors of the other side
    mean: float  # mean rating, 0 without biases
    start: Any = None  # factors that iterative solvers start from; default: zeros
    gram: Any = None  # the weighted Gram matrix of the fixed factors, if already computed
    pull: Any = None  # added to the right-hand sides; on a GPU a table that solutions may overwrite


Steps: TypeAlias = Generator[tuple[Any, Any] | None, None, None]
"""Yields None after each step, and finally new factors with the status of each row."""


class Half:
    """One half of a sweep: solves every row of a side for the fixed factors of the other side."""

    one_thread = False  # whether `steps` never waits for the host, so that one thread can launch for several devices

    def active(self) -> AbstractContextManager[None]:
        """Context of all computation."""
        return nullcontext()

    def steps(self, given: Given) -> Steps:
        """Solve step by step; on a GPU, the result is possibly not complete before its `check`.

        The first step on a GPU ends with the first long kernel, so that one thread can start all of several devices
        before it continues with any.
        """
        raise NotImplementedError

    def check(self, solved: Any, status: Any) -> None:
        """Raise the failure of a row."""

    def solve(self, *given: Any, **more: Any) -> Any:
        """New factors, complete, all steps at once; the arguments are those of `Given`."""
        with self.active():
            *_, launched = self.steps(Given(*given, **more))
            assert launched is not None
            self.check(*launched)
        return launched[0]


def frozen_text(plan: Plan) -> str:
    """End of the description of a plan for which one side keeps its factors."""
    return f"; {plan.frozen} factors are frozen" if plan.frozen else ""


class Solver(Protocol):
    """One method on one device."""

    continues: bool  # whether another iteration follows the current one in any case, so that it may begin early

    @property
    def state(self) -> State:
        """Current factors; replaced as a whole, never modified."""

    def sweep(self) -> Iterator[Any]:
        """The steps of one iteration; `solve` and `keep` each of them before the next one is taken."""

    def solve(self, step: Any) -> Any:
        """The result of a step; the state does not change."""

    def keep(self, step: Any, solved: Any) -> None:
        """Make the result of `solve` the state, which is consistent after each step."""

    def objective_value(self) -> float:
        """The objective at the current state."""

    def close(self) -> None:
        """End threads and connections; `state` stays readable. Called at the end of every fit, even a failed one."""


class Unconnected:
    """A solver without threads or connections, whose iteration is one step."""

    continues = False

    def sweep(self) -> Iterator[Any]:
        yield None

    def close(self) -> None:
        """Nothing to end."""


class Alternating(Unconnected):
    """A solver whose iteration consists of two half sweeps, that of each side."""

    plan: Plan
    solving: Side | None = None  # the side of the current half sweep, or of the one that failed
    incomplete = False  # whether `rows` has only some of the rows, those of this process

    def rows(self, side: Side, choose: Choose) -> tuple[np.ndarray, sp.csr_array] | None:
        """Numbers and entries of some rows, in the order of the input; None where rows are split."""
        return None

    def update(self, side: Side) -> None:
        """Solve one side; the state changes only once the half sweep is complete."""
        self.keep(side, self.solve(side))

    def solve(self, side: Side) -> Any:
        raise NotImplementedError

    def keep(self, side: Side, solved: Any) -> None:
        raise NotImplementedError

    def balance(self) -> None:
        """Transform the factors to the basis with the smallest penalty; see `hybridmf.core.balance`."""
        raise NotImplementedError

    def sweep(self) -> Iterator[Side]:
        if self.plan.balance:
            self.balance()  # before the items: the users' factors have to stay exact for the items' of the same sweep
        for side in SWEEP_ORDER:
            if side != self.plan.frozen:
                self.solving = side
                yield side
                self.solving = None
