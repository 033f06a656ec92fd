"""What the fit loop asks of a backend: iterations over a state the backend owns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..core.objective import Side, State
from .types import Plan

SWEEP_ORDER: tuple[Side, Side] = ("item", "user")
"""Items first: the user factors a fit ends with are then exact for its item factors, so fold-in reproduces them."""


class Solver(Protocol):
    """One method on one device."""

    @property
    def state(self) -> State:
        """Factors a model can keep; replaced as a whole, never written to."""

    def sweep(self) -> Iterator[None]:
        """One iteration; yields whenever `state` has changed. Whatever ends it early, `state` is whole."""

    def objective_value(self) -> float:
        """The objective at the current state."""

    def close(self) -> None:
        """End threads and connections; `state` stays readable. The fit loop calls it whatever has ended the fit."""


class Unconnected:
    """A solver that has no threads and connections."""

    def close(self) -> None:
        """Nothing to end."""


class Alternating(Unconnected):
    """An iteration that is made of half sweeps."""

    plan: Plan

    def update(self, side: Side) -> None:
        """Solve one side; the state changes only once the half sweep is complete."""
        raise NotImplementedError

    def balance(self) -> None:
        """Bring the factors to the basis of least penalty; see `hybridmf.core.balance`."""
        raise NotImplementedError

    def sweep(self) -> Iterator[None]:
        """Both half sweeps; yields after each, so that an interruption in the second one keeps the first."""
        if self.plan.balance:
            self.balance()  # before the items: the users' factors have to stay exact for the items' of the same sweep
        for side in SWEEP_ORDER:
            self.update(side)
            yield
