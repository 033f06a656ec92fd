"""Stochastic gradient descent for explicit feedback."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from .core.objective import Objective, State
from .core.validate import check_int, check_rng
from .model.base import FactorModel
from .model.learned import scale_of
from .plan.sgd import SgdMethod
from .plan.solver import Solver
from .plan.types import Plan, Settings


class SGD(FactorModel):
    """Matrix factorization of explicit ratings by stochastic gradient descent.

    An update looks at one entry: with ``e = r_ui - mu - b_u - b_i - x_u.y_i``,

        ``x_u += gamma / c (e y_i - lambda x_u)``, ``y_i += gamma / c (e x_u - lambda y_i)``,
        ``b_u += gamma (e - lambda_b b_u)``, ``b_i += gamma (e - lambda_b b_i)``

    from the old values (MSGD eq. 3); gamma is the learning rate of the epoch, and an epoch sees each entry once. c is
    the scale of the ratings: their root mean square, with biases about their mean. These are steps of length gamma on
    ratings divided by c, so learning rates do not depend on the unit of the ratings: ratings and lambda times k give
    factors times ``sqrt(k)``. An entry pays ``lambda (|x_u|^2 + |y_i|^2) + lambda_b (b_u^2 + b_i^2)``, so the sum that
    is minimized is that of ``ExplicitALS`` with ``regularization_scaling="count"`` and the same lambdas.

    Parameters
    ----------
    factors : int
        Rank, 1 to 2048 (512 on a GPU).
    regularization : float
        lambda >= 0, in the unit of the ratings; ``learning_rate * regularization / c`` must be less than 1.
    learning_rate : float, optional
        Of the first epoch, > 0, for standardized ratings. Default, without biases and with them: "power" 0.12 and 0.04,
        "geometric" 0.11 and 0.035, "constant" 0.038 and 0.015, "rpcs" and "adagrad" 0.08 and 0.05. A rate gamma of
        factors in the unit of the ratings is ``learning_rate=gamma * c``.
    decay : float, optional
        How the learning rate falls; what it means and its default depend on `rate_schedule`.
    rate_schedule : {"power", "geometric", "constant", "rpcs", "adagrad"}
        Learning rate of epoch t = 0, 1, ...: ``learning_rate / (1 + decay t^1.5)`` (cuMF_SGD; decay 0.1 if not given),
        ``learning_rate decay^t`` (MSGD; 0.9), or `learning_rate`. The other two divide each step g (``e y - lambda x``
        of standardized ratings) by ``sqrt(1 + G)``, G a sum of squared steps that starts at 0. "rpcs" (Chin et al.
        2015, LIBMF): the first 8 coordinates of a row share one G, the others another, which grow by the mean of
        their squared steps after the step; in the first epoch the first 8 move alone. "adagrad" (Duchi et al. 2011):
        each coordinate has its own, which counts the step itself.
    schedule : {"msgd", "hogwild", "blocks", "batch_hogwild"}
        In which order, and who conflicts with whom:

        - "msgd": each item walks its entries (users ascending) with the users fixed, then each user with the items
          fixed (MSGD Alg. 1; on a GPU Algs. 2 and 3). Parallel over rows without conflicts: the same factors for any
          number of threads.
        - "hogwild": entries in a shuffled order, split among threads that do not look out for each other (Niu et al.
          2011). CPU only; with more than one thread no two runs agree.
        - "blocks": users and items are dealt at random into a grid of blocks, and blocks that share no row and no
          column run at a time. CPU only. See `deterministic`.
        - "batch_hogwild": as "hogwild", a warp taking many consecutive entries of the shuffled order (cuMF_SGD). GPU
          only; no two runs agree.
    ordering : {"user", "item", "mixed", "crossed"}
        Orientation of the ratings that each pass of "msgd" walks on a GPU: the four combinations of MSGD 6.4. A pass is
        centralized (Alg. 3) where it walks the rows that it moves, else decentralized (Alg. 2). "user": by users, so
        the pass over items is decentralized; "item": by items, so the pass over users is; both need one orientation in
        the GPU's memory. "mixed": both centralized; "crossed": both decentralized. The result does not depend on it but
        for rounding; on the CPU both passes are centralized.
    order : {"passes", "blocks"}
        What a rank moves between two steps of the items' journey, on a list of devices. "passes", ours: all items, then
        all users, as on one device. "blocks", MSGD Alg. 4 as printed: the items at hand, then its users by them; an
        epoch brings less, since each range of users gets factors of its own.
    biases : bool
        Fit the mean mu (kept at the training mean) and user and item biases.
    bias_regularization : float, optional
        lambda_b >= 0, as for `ExplicitALS`; it has no unit. ``learning_rate * bias_regularization`` must be less
        than 1.
    iterations : int
        Epochs.
    device : {"auto", "cpu", "cuda", "cuda:N"}, or a list such as ["cuda:0", "cuda:1"]
        "auto" takes the best there is for the schedule and logs why. A list runs "msgd" on a rank for each entry: each
        owns a part of the users, and the items travel from rank to rank (MCUMSGD, MSGD Alg. 4). The same number of
        devices gives the same factors, another number others, as another seed would: rows begin elsewhere.
    precision : {"float32", "float16"}
        How "batch_hogwild" stores factors on the GPU; arithmetic is in float32.
    deterministic : bool
        For "blocks": visit them by shuffled diagonals of the grid (DSGD, Gemulla et al. 2011), each block after those
        before it in its row and in its column. The grid depends on the data and `factors` only, so the factors are the
        same for any number of threads. False: any free block that was seen least (FPSGD, Zhuang et al. 2013).
    dtype : {"float32", "float64"}
        Type of factors and arithmetic.
    num_threads : int, optional
        Default: OMP_NUM_THREADS, else the cores this process may use.
    random_state : int, Generator or None
        Seed of the initial factors and of every shuffle. A fit resumed from a checkpoint repeats the shuffles of the
        uninterrupted one: the checkpoint has what they are drawn from.
    gpu_memory_limit : int or str, optional
        As for `ImplicitALS`.

    Attributes
    ----------
    user_factors, item_factors, user_factors_, item_factors_, n_iter_, history_, timings_, plan_, device_, user_ids_, \
item_ids_
        As for `ImplicitALS`.
    user_bias_, item_bias_ : array or None
    mean_ : float

    Notes
    -----
    `fit` stops with a `hybridmf.errors.DivergedError` when steps turn out too long: when an error or a factor becomes
    infinite or NaN, or the squared errors that an epoch adds up as it goes are more than twice the lowest before. The
    model keeps the factors of the last epoch that was sound; with a checkpoint, the fit resumes from there with a lower
    `learning_rate`. New rows (`transform`) get exact factors, by the normal equations of `ExplicitALS`.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> stars = sp.csr_array([[5, 0, 1, 0], [4, 4, 0, 0], [0, 1, 0, 5]])
    >>> model = hmf.SGD(factors=2, iterations=100, device="cpu", random_state=0).fit(stars)
    >>> model.predict(0, 0).round()
    np.float64(5.0)
    """

    def __init__(
        self,
        factors: int = 64,
        *,
        regularization: float = 0.05,
        learning_rate: float | None = None,
        decay: float | None = None,
        rate_schedule: str = "power",
        schedule: str = "msgd",
        ordering: str = "mixed",
        order: str = "passes",
        biases: bool = False,
        bias_regularization: float | None = None,
        iterations: int = 20,
        device: str | list[str] = "auto",
        precision: str = "float32",
        deterministic: bool = True,
        dtype: Any = "float32",
        num_threads: int | None = None,
        random_state: Any = None,
        gpu_memory_limit: str | int | None = None,
    ) -> None:
        self.factors = factors
        self.regularization = regularization
        self.learning_rate = learning_rate
        self.decay = decay
        self.rate_schedule = rate_schedule
        self.schedule = schedule
        self.ordering = ordering
        self.order = order
        self.biases = biases
        self.bias_regularization = bias_regularization
        self.iterations = iterations
        self.device = device
        self.precision = precision
        self.deterministic = deterministic
        self.dtype = dtype
        self.num_threads = num_threads
        self.random_state = random_state
        self.gpu_memory_limit = gpu_memory_limit

    def _objective(self, spread: float = 1.0) -> Objective:
        return Objective.explicit(self.regularization, "count", self.biases, self.bias_regularization, spread)

    def _settings(self) -> Settings:
        method = SgdMethod.check(
            self.schedule,
            self.ordering,
            self.rate_schedule,
            self.learning_rate,
            self.decay,
            self.deterministic,
            self._objective().biases,
            self.order,
        )
        return Settings.check(
            factors=self.factors,
            precision=self.precision,
            dtype=self.dtype,
            num_threads=self.num_threads,
            device=self.device,
            gpu_memory_limit=self.gpu_memory_limit,
            iterations=self.iterations,
            method=method,
        )

    def _seed_bits(self, kept: int | None) -> int:
        return _shuffle_seed(self.random_state) if kept is None else check_int("seed_bits", kept, 0)

    def _standardized(self, plan: Plan, objective: Objective, user_items: sp.csr_array) -> Plan:
        """The plan of a fit on these ratings, to whose scale the learning rate refers."""
        assert isinstance(plan.method, SgdMethod)
        number = "float16" if plan.precision == "float16" else plan.dtype
        method = plan.method.standardized(objective, scale_of(user_items, objective), number)
        return plan.changed(method=method)

    def _solver(
        self,
        plan: Plan,
        objective: Objective,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        state: State,
        completed: int,
    ) -> Solver:
        plan = self._standardized(plan, objective, user_items)
        if plan.devices:
            from .ranks.mcumsgd import MultiSGD

            return MultiSGD(user_items, item_users, objective, plan, state, completed)
        if plan.gpu is None:
            from .cpu.sgd import CpuSGD

            return CpuSGD(user_items, item_users, objective, plan, state, completed)
        from .device.cuda import open_device
        from .gpu.sgd import GpuSGD

        return GpuSGD(open_device(plan.device), user_items, item_users, objective, plan, state, completed)


def _shuffle_seed(random_state: Any) -> int:
    """63 bits for the shuffles; of an integer always the same, so that a resumed fit shuffles alike."""
    return int(check_rng(random_state).integers(np.iinfo(np.int64).max))
