"""Stochastic gradient descent for explicit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .core.objective import Objective, Side, State
from .core.validate import check_int, seed_of
from .model.base import FactorModel
from .model.training import LocalRatings
from .plan.epochs import EpochKernels, EpochSolver, GridBlock, degrees_of
from .plan.sgd import SgdMethod
from .plan.solver import Solver
from .plan.types import Plan

DEFAULT_MULTIPLE = 0.05
"""Default lambda in standard deviations of the ratings, less than that of exact solvers, since SGD ends before
the minimum (bench/defaults.py)."""


class SgdRatings(LocalRatings):
    """Ratings of SGD, which several GPUs check and transpose."""

    def place(self, plan: Plan) -> Plan:
        """Put both orientations where the solver of the plan reads them."""
        if plan.gpu is None or not plan.devices:
            return super().place(plan)
        from .device.cuda import open_device

        self._upload(plan, [open_device(name) for name in plan.devices])
        self.value_range, self.total = self.values.value_range, self.values.total
        return plan


@dataclass(eq=False, repr=False, kw_only=True)
class SGD(FactorModel):
    """Matrix factorization of explicit ratings by stochastic gradient descent.

    Each update uses one entry: with ``e = r_ui - mu - b_u - b_i - x_u.y_i``,

        ``x_u += gamma / c (e y_i - lambda_U x_u)``, ``y_i += gamma / c (e x_u - lambda_V y_i)``,
        ``b_u += gamma (e - lambda_b b_u)``, ``b_i += gamma (e - lambda_b b_i)``

    where all right-hand sides use the old values (MSGD eq. 3). gamma is the learning rate of the epoch; an epoch visits
    each entry once. c is the scale of the ratings: their root mean square, or their standard deviation in a model with
    biases. An update is a step of length gamma on ratings divided by c, so learning rates do not depend on the unit of
    the ratings: multiplying ratings and lambda by k multiplies the factors by ``sqrt(k)``. The penalty of an entry is
    ``lambda_U |x_u|^2 + lambda_V |y_i|^2 + lambda_b (b_u^2 + b_i^2)``, so the objective is that of ``ExplicitALS`` with
    ``regularization_scaling="count"`` and the same lambdas.

    Parameters
    ----------
    factors : int
        Rank, 1 to 2048 (512 on a GPU).
    regularization : float or (float, float), optional
        lambda >= 0, in the unit of the ratings: one for both sides, or a pair (lambda_U of users, lambda_V of items),
        for the schedule "msgd" (MSGD eq. 1). ``learning_rate * regularization / c`` must be less than 1. Default:
        0.05 standard deviations of the training ratings (their root mean square if all are equal, 1 if all are 0).
        Multiplying the ratings by k then multiplies predictions by k, up to rounding.
    learning_rate : float, optional
        Learning rate of the first epoch, > 0, for standardized ratings. Default, without and with biases: "power" 0.12
        and 0.04, "geometric" 0.11 and 0.035, "constant" 0.038 and 0.015, "rpcs" and "adagrad" 0.08 and 0.05. A
        learning rate gamma for unscaled ratings corresponds to ``learning_rate=gamma * c``.
    decay : float, optional
        Decay of the learning rate. Its meaning and default depend on `rate_schedule`.
    rate_schedule : {"power", "geometric", "constant", "rpcs", "adagrad"}
        Learning rate of epoch t = 0, 1, ...: ``learning_rate / (1 + decay t^1.5)`` (cuMF_SGD; decay 0.1 if not given),
        ``learning_rate decay^t`` (MSGD; 0.9), or `learning_rate`. The other two divide each step g (``e y - lambda x``
        of standardized ratings) by ``sqrt(1 + G)``, where G is a sum of squared steps that starts at 0. "rpcs" (Chin et
        al. 2015, LIBMF): the first 8 coordinates of a row share one G, the remaining ones another; after each step, G
        grows by the mean of the squared steps of its coordinates. The first epoch updates the first 8 only. "adagrad"
        (Duchi et al. 2011): each coordinate has its own G, which includes the current step.
    schedule : {"msgd", "hogwild", "blocks", "batch_hogwild"}
        Order of the updates, and which of them run concurrently:

        - "msgd": updates each item by its entries (users ascending) with the users fixed, then each user with the items
          fixed (MSGD Alg. 1; on a GPU Algs. 2 and 3). Parallel over rows without conflicts: the factors are the same
          for any number of threads.
        - "hogwild": entries in shuffled order, divided among threads that update without synchronization (Niu et al.
          2011). CPU only. With more than one thread, results differ from run to run.
        - "blocks": users and items are assigned at random to a grid of blocks; blocks that share no row and no column
          run concurrently. CPU only. See `deterministic`.
        - "batch_hogwild": as "hogwild", with a warp processing many consecutive entries of the shuffled order
          (cuMF_SGD). GPU only. Results differ from run to run.
    ordering : {"user", "item", "mixed", "crossed"}
        Orientation of the ratings in each pass of "msgd" on a GPU: the four combinations of MSGD 6.4. A pass is
        centralized (Alg. 3) if it iterates over the rows that it updates, else decentralized (Alg. 2). "user": by
        users, so the pass over items is decentralized; "item": by items, so the pass over users is decentralized; both
        keep one orientation in GPU memory. "mixed": both passes centralized; "crossed": both decentralized. Results
        differ by rounding only. On the CPU both passes are centralized.
    order : {"passes", "blocks"}
        With a list of devices: what a rank updates before it passes its items on. "passes": all items in one round,
        then all users, as on one device. "blocks" (MSGD Alg. 4 as printed): the items it holds, then its users by
        these items; it converges more slowly per epoch, since each range of users works with its own item factors.
    biases : bool
        Fit the mean mu (fixed at the training mean) and user and item biases.
    bias_regularization : float or (float, float), optional
        lambda_b >= 0, as for `ExplicitALS`, or a pair (users, items) as for `regularization`; it has no unit.
        ``learning_rate * bias_regularization`` must be less than 1.
    iterations : int
        Epochs.
    device : {"auto", "cpu", "cuda", "cuda:N"}, or a list such as ["cuda:0", "cuda:1"]
        "auto" chooses the device for the schedule and logs the reason. A list runs "msgd" on several devices, one rank
        on each: a rank owns a part of the users, and the items move from rank to rank (MCUMSGD, MSGD Alg. 4). The
        factors depend on the number of devices, since it determines where each row starts, as they depend on a seed.
    precision : {"float32", "float16"}
        "float16", on a GPU: storage of factors under "batch_hogwild"; under "msgd" with the ordering "mixed", a copy of
        the fixed side that each pass reads, while what it updates stays in float32. Arithmetic is in float32.
    deterministic : bool
        For "blocks": visit blocks by shuffled diagonals of the grid (DSGD, Gemulla et al. 2011), each block after its
        predecessors in its row and column. The grid depends on the data and `factors` only, so the factors are the
        same for any number of threads. False: visit the free block with the fewest visits (FPSGD, Zhuang et al. 2013).
    dtype, num_threads, gpu_memory_limit
        As for `ImplicitALS`.
    random_state : int, Generator or None
        Seed of the initial factors and of every shuffle. A fit resumed from a checkpoint repeats the shuffles of the
        uninterrupted fit, since the checkpoint stores their seed.
    init : {"nonnegative", "signed"}, fitted model or tuple of arrays, optional
        As for `ImplicitALS`; factors and biases of both sides are used, and None for one of them draws it.

    Attributes
    ----------
    user_factors, item_factors, user_factors_, item_factors_, n_iter_, history_, timings_, plan_, device_, user_ids_, \
item_ids_
        As for `ImplicitALS`.
    regularization_ : float or (float, float)
        lambda of the fit, also where the parameter is None.
    user_bias_, item_bias_ : array or None
    mean_ : float

    Notes
    -----
    `fit` raises `hybridmf.errors.DivergedError` when it diverges: when an error or a factor becomes infinite or NaN, or
    when the running sum of squared errors of an epoch exceeds twice the lowest sum so far. The model keeps the factors
    of the last valid epoch. With a checkpoint, the fit can resume from there with a lower `learning_rate`. New rows
    (`transform`) get exact factors from the normal equations of `ExplicitALS`.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> stars = sp.csr_array([[5, 0, 1, 0], [4, 4, 0, 0], [0, 1, 0, 5]])
    >>> model = hmf.SGD(factors=2, iterations=100, device="cpu", random_state=0).fit(stars)
    >>> model.predict(0, 0).round()
    np.float64(5.0)
    """

    regularization: float | tuple[float, float] | None = None
    learning_rate: float | None = None
    decay: float | None = None
    rate_schedule: str = "power"
    schedule: str = "msgd"
    ordering: str = "mixed"
    order: str = "passes"
    biases: bool = True
    bias_regularization: float | tuple[float, float] | None = None
    iterations: int = 20
    precision: str = "float32"
    deterministic: bool = True

    _source = SgdRatings

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        weights = (self.regularization, "count", self.biases, self.bias_regularization)
        objective = Objective.explicit(*weights, spread, DEFAULT_MULTIPLE)
        for name in ("regularization", "bias_regularization"):
            pair = getattr(objective, name)
            if pair.user != pair.item and self.schedule != "msgd":
                raise ValueError(
                    f"{name}={pair} needs schedule='msgd', whose passes update one side each, got schedule="
                    f"{self.schedule!r}, which moves a user and an item at a time; use one number, or schedule='msgd'"
                )
        return objective

    def _method(self) -> SgdMethod:
        rates = (self.rate_schedule, self.learning_rate, self.decay)
        biases = self._objective().biases
        return SgdMethod.check(self.schedule, self.ordering, *rates, self.deterministic, biases, self.order)

    def _seed_bits(self, kept: int | None) -> int:
        return seed_of(self.random_state) if kept is None else check_int("seed_bits", kept, 0)

    def _standardized(self, plan: Plan, objective: Objective, scale: float) -> Plan:
        """The plan with the learning rate scaled to these ratings."""
        assert isinstance(plan.method, SgdMethod)
        number = "float16" if plan.precision == "float16" else plan.dtype
        method = plan.method.standardized(objective, scale, number)
        return plan.changed(method=method)

    def _solver(self, plan: Plan, objective: Objective, ratings: LocalRatings, state: State, completed: int) -> Solver:
        plan = self._standardized(plan, objective, ratings.scale(objective))
        arguments = (ratings.user_items, ratings.item_users, objective, plan, state, completed)
        if plan.devices:
            from .ranks.mcumsgd import MultiSGD

            return MultiSGD(*arguments)
        blocks: list[GridBlock] = [{"user": ratings.user_items, "item": ratings.item_users}]
        kernels: EpochKernels
        if plan.gpu is None:
            from .cpu.sgd import CpuEpochs

            state = state.on_host()
            kernels = CpuEpochs(blocks, objective, plan)
        else:
            from .device.cuda import open_device
            from .gpu.sgd import GpuEpochs

            kernels = GpuEpochs(open_device(plan.device), blocks, objective, plan)
        return EpochSolver(kernels, objective, plan, state, degrees_of(blocks[0]), completed)
