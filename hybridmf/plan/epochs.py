"""SGD as a solver: learning rates, and the epochs of every schedule, device and rank.

Kernels are in `cpu.sgd` and `gpu.sgd`, hyperparameters in `plan.sgd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State, Terms
from ..errors import DivergedError, ModelFileError
from .solver import SWEEP_ORDER, Unconnected
from .types import Plan

if TYPE_CHECKING:
    from .sgd import SgdMethod

GridBlock = dict[Side, sp.csr_array]
"""Ratings of some users and some items, by the rows of either side; rows and columns count from 0."""

Passes = tuple[Side | None, ...]
"""Of an epoch. MSGD (Alg. 1) updates the items by their entries with the users fixed, then the users with the items
fixed; other schedules have one pass (None), whose updates move a user and an item."""

Step = tuple[int, Side | None, dict[Side, Any]] | None
"""Block, side and working copies of a pass; None where every rank must have come before any goes on."""

RISE = 2.0  # training loss of an epoch, relative to the lowest previous one, above which the fit has diverged
SUMMING = ("rpcs", "adagrad")  # rate schedules with sums of squared steps


class EpochKernels(Protocol):
    """A schedule on a device, over blocks of ratings: all of them, or those of a rank (`hybridmf.ranks.mcumsgd`).

    `work` is a working copy of the factors of some rows, whose form is the device's.
    """

    passes: Passes

    def active(self) -> AbstractContextManager[None]:
        """Context of all computation."""

    def hold(self, factors: Factors) -> Factors:
        """Move factors to where they stay between epochs."""

    def copies(self, factors: Factors) -> Any:
        """Working copy of factors."""

    def fixed(self, factors: Factors) -> Any:
        """Factors that a pass reads, as a working copy that must not be updated."""

    def move(
        self,
        block: int,
        side: Side | None,
        work: dict[Side, Any],
        terms: Terms,
        epoch: int,
        between: Callable[[], None],
    ) -> None:
        """One pass over the ratings of a block; calls `between` where it may be stopped."""

    def factors(self, work: Any) -> Factors:
        """Convert a working copy to factors; `work` must not be used afterwards."""

    def begin_result(self, *sides: Factors) -> Callable[[], tuple[float, bool]]:
        """Function that waits for the epoch; returns its training loss, and whether all of `sides` is finite.

        The loss is that of all updates since the last call, each error before its update.
        """

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        """Squared errors of the ratings of a block."""

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        """Penalty of some rows of a side."""

    def arrays(self, work: Any) -> list[Any]:
        """Arrays of the working copy of a range of items, which ranks exchange."""

    def arrived(self, work: Any, arrays: Sequence[Any]) -> Any:
        """Working copy of a received range of items, in the form of `work`."""

    def places(self, rows: np.ndarray) -> Any:
        """Row numbers where `merged` takes them."""

    def merged(self, work: Any, other: Any, places: Any) -> Any:
        """Working copy with rows `places` of `work` and, below it, `other`."""


Epoch: TypeAlias = tuple[State, Callable[[], tuple[float, bool]]]
"""An epoch that was started: its state, and its result as `EpochKernels.begin_result` has it."""

Solved: TypeAlias = tuple[State, float]  # the state after an epoch, and its training loss


class EpochSolver(Unconnected):
    """Stochastic gradient descent on one device; `hybridmf.ranks.mcumsgd.RankSGD` has the order of updates of a rank.

    `plan`: its method is an `SgdMethod`. `state`: initial factors and mean, after `completed` epochs. `degrees`: for
    the penalty.
    """

    def __init__(
        self,
        kernels: EpochKernels,
        objective: Objective,
        plan: Plan,
        state: State,
        degrees: dict[Side, np.ndarray],
        completed: int = 0,
    ) -> None:
        self.kernels, self.objective, self.plan, self.degrees = kernels, objective, plan, degrees
        self.method = cast("SgdMethod", plan.method)
        state = starting_state(state, self.method, plan.factors, completed)
        with kernels.active():
            self.state = State(kernels.hold(state.user), kernels.hold(state.item), state.mean)
        self.epoch, self.best = completed, math.inf

    def solve(self, step: None = None) -> Solved:
        """Run one epoch on copies; raises DivergedError if it is not finite, or the loss has risen."""
        with self.kernels.active():
            work = self.begin()
            for _ in self.launch_passes(work):
                pass
            state, result = self.end(work)
            loss, is_finite = self._agreed(*result())
        return self.checked(state, loss, is_finite)

    def begin(self) -> dict[Side, Any]:
        return {side: self.kernels.copies(self.state.side(side)) for side in SIDES}

    def launch_passes(self, work: dict[Side, Any]) -> Iterator[None]:
        """Start the passes of an epoch that `begin` returned, in order; yields where ranks meet.

        For one thread that drives several ranks; each step runs within ``kernels.active()``.
        """
        terms = self.terms()
        for step in self._passes(work):
            if step is None:
                yield None
            else:
                block, side, operands = step
                self.kernels.move(block, side, operands, terms[side], self.epoch, self._between)

    def terms(self) -> dict[Side | None, Terms]:
        given = (self.method, self.objective, self.state.mean, self.epoch)
        return {side: terms_at(*given, side or "user") for side in self.kernels.passes}

    def end(self, work: dict[Side, Any]) -> Epoch:
        """The epoch after its passes; uses up the working copies."""
        kernels = self.kernels
        users = kernels.factors(work.pop("user"))
        state = State(users, kernels.factors(work.pop("item")), self.state.mean)
        return state, kernels.begin_result(state.user, state.item)

    def checked(self, state: State, loss: float, is_finite: bool) -> Solved:
        """The result of an epoch, unless it has diverged."""
        if not math.isfinite(loss):
            self._fail("errors became infinite or NaN")
        if not is_finite:
            self._fail("factors became infinite or NaN")
        if loss > RISE * self.best:
            self._fail(f"the sum of squared errors rose from {self.best:.4g} to {loss:.4g}")
        return state, loss

    def keep(self, step: None, solved: Solved) -> None:
        self.state, loss = solved
        self.best = min(self.best, loss)
        self.epoch += 1

    def _passes(self, work: dict[Side, Any]) -> Iterator[Step]:
        """The steps of an epoch; `work` may change between two of them."""
        for side in self.kernels.passes:
            yield 0, side, work

    def _between(self) -> None:
        """Stop the epoch by an error where it may be stopped."""

    def _agreed(self, loss: float, is_finite: bool) -> tuple[float, bool]:
        """The results of an epoch of all ranks."""
        return loss, is_finite

    def _fail(self, what: str) -> None:
        raise diverged(what, self.method, self.epoch)

    def objective_value(self) -> float:
        """The objective at the current factors, losses and sums in float64."""
        with self.kernels.active():
            return self._with_penalty(self.kernels.loss(0, self.state.user, self.state.item, self.state.mean))

    def _with_penalty(self, loss: float) -> float:
        """A sum of squared errors, and the penalty of the rows of this solver."""
        return sum((self.kernels.penalty(side, self.state.side(side), self.degrees[side]) for side in SIDES), loss)


def learning_rate_at(method: SgdMethod, epoch: int) -> float:
    """Learning rate gamma_t of epoch t = 0, 1, ...

    "power": ``learning_rate / (1 + decay t^1.5)`` (Yun et al. 2014, as cuMF_SGD has it);
    "geometric": ``learning_rate decay^t`` (MSGD's experiments); "constant", "rpcs", "adagrad": ``learning_rate``,
    which the last two then divide by ``sqrt(1 + sum of squared gradients)`` of each row or coordinate.
    """
    if method.rate_schedule == "power":
        return method.learning_rate / (1.0 + method.decay * epoch**1.5)
    if method.rate_schedule == "geometric":
        return float(method.learning_rate * method.decay**epoch)
    return method.learning_rate


def terms_at(method: SgdMethod, objective: Objective, mean: float, epoch: int, side: Side = "user") -> Terms:
    """Constants of the updates of a side in epoch t = 0, 1, ..., in the units of the ratings.

    An update that moves both sides has one lambda for both (`hybridmf.plan.sgd.SgdMethod.plan`).

    The learning rate refers to standardized ratings: with c their scale, to ratings, mean and biases divided by c,
    factors by sqrt(c) and lambda by c, whose objective is the given one divided by c^2. There errors are ``e / c``,
    steps of factors ``e y - lambda x`` are divided by ``c^1.5`` and steps of biases ``e - lambda_b b`` by c. Back in
    the given units, c remains in constants only:

    - factors move by ``sqrt(c) gamma s / c^1.5 = (gamma / c) s``, biases by ``c gamma s / c = gamma s``;
    - with AdaGrad and RPCS, whose sums of squared steps G are divided by ``c^3`` (factors) and ``c^2`` (biases), by
      ``sqrt(c) gamma (s / c^1.5) / sqrt(1 + G / c^3) = sqrt(c) gamma s / sqrt(c^3 + G)`` and by
      ``c gamma s / sqrt(c^2 + G)``.
    """
    rate, c = learning_rate_at(method, epoch), method.scale
    ridges = objective.regularization.of(side), objective.bias_regularization.of(side)
    if method.rate_schedule not in SUMMING:
        return Terms(rate / c, ridges[0], mean, rate, ridges[1])
    head_only = method.rate_schedule == "rpcs" and epoch == 0
    return Terms(math.sqrt(c) * rate, ridges[0], mean, c * rate, ridges[1], c**3, c**2, head_only)


def diverged(what: str, method: SgdMethod, epoch: int) -> DivergedError:
    """The error for divergence in epoch 0, 1, ...; `what` describes the symptom."""
    now = learning_rate_at(method, epoch)
    rate = f"learning_rate={method.learning_rate:g}"
    if now != method.learning_rate:
        rate += f" ({now:g} in this epoch)"
    return DivergedError(
        f"SGD diverged in iteration {epoch + 1}: {what}. {rate} is too long a step for these ratings: "
        f"try learning_rate={method.learning_rate / 4:g}; "
        "the model keeps the factors of the last valid iteration, if any"
    )


def passes_of(method: SgdMethod) -> Passes:
    return SWEEP_ORDER if method.schedule == "msgd" else (None,)


def degrees_of(block: GridBlock) -> dict[Side, np.ndarray]:
    return {side: np.diff(matrix.indptr) for side, matrix in block.items()}


def sums_width(method: SgdMethod, factors: int) -> int:
    """Number of sums of squared steps per row."""
    return {"adagrad": factors, "rpcs": 2}.get(method.rate_schedule, 0)


def starting_state(state: State, method: SgdMethod, factors: int, completed: int) -> State:
    """The state with the sums of squares that the method continues from, or without any."""
    width = sums_width(method, factors)
    if not width:
        users, items = (
            side if side.squares is None else replace(side, squares=None) for side in (state.user, state.item)
        )
        return State(users, items, state.mean)
    if completed and (state.user.squares is None or state.user.squares.matrix.shape[1] != width):
        raise ModelFileError(
            f"the checkpoint holds no sums of squares that rate_schedule={method.rate_schedule!r} could "
            "continue from; start anew, or resume with another rate_schedule"
        )
    return state
