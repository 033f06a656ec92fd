"""Cyclic coordinate descent (CCD++) for explicit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .core.objective import Objective, Scaling, Side, State
from .model.base import FactorModel
from .model.training import LocalRatings
from .plan.ccd import CcdMethod
from .plan.solver import Solver
from .plan.types import Plan


@dataclass(eq=False, repr=False, kw_only=True)
class CCD(FactorModel):
    """Matrix factorization of explicit ratings by cyclic coordinate descent, one rank-one update after another.

    Minimizes what `ExplicitALS` minimizes, ``sum_(u,i observed) (r_ui - mu - b_u - b_i - x_u.y_i)^2 + lambda (sum_u s_u
    |x_u|^2 + sum_i s_i |y_i|^2) + lambda_b (sum_u s_u b_u^2 + sum_i s_i b_i^2)``, by CCD++ (Yu, Hsieh, Si and Dhillon
    2012; MSGD 3.2.2; BALS 6.2). It visits the factors t in turn: given the residual of all other factors, it sets the
    item coordinates ``y_it`` and then the user coordinates ``x_ut`` to their minimizers, each a ridge regression with
    one unknown. Biases are updated before the factors, item biases first. An iteration costs O(nnz factors), an
    iteration of ALS O(nnz factors^2). The objective never rises, up to rounding.

    Parameters
    ----------
    factors : int
        Rank, 1 to 2048.
    regularization, regularization_scaling, biases, bias_regularization
        As for `ExplicitALS`.
    iterations : int
        Outer iterations; each visits every factor once.
    inner_iterations : int
        Alternations between items and users for each factor, 1 to 1000.
    nonnegative : bool
        Constrain all factors to be nonnegative; biases may be negative. Fold-in (`transform`) does not apply the
        constraint.
    device : {"auto", "cpu", "cuda", "cuda:N"}
        "auto" chooses the device with the shortest predicted time and logs the reason. "cuda" is the first GPU; a named
        device that cannot be used raises an error.
    dtype, num_threads, random_state, gpu_memory_limit
        As for `ImplicitALS`.
    init : {"nonnegative", "signed"}, fitted model or tuple of arrays, optional
        As for `ImplicitALS`; factors and biases of both sides are used, and None for one of them draws it. A
        nonnegative model needs nonnegative factors.

    Attributes
    ----------
    user_factors, item_factors, user_factors_, item_factors_, n_iter_, history_, timings_, plan_, device_, user_ids_, \
item_ids_
        As for `ImplicitALS`.
    regularization_, regularization_scaling_ : float
        lambda and nu of the fit, also where the parameters are None; a pair if users and items differ.
    user_bias_, item_bias_ : array or None
    mean_ : float

    Notes
    -----
    `transform` folds new rows in with the exact solver, as in every model. For a training row it returns the optimal
    factors given the item factors, which coordinate descent only approximates. A coordinate that
    ``regularization=0`` leaves undetermined (all coordinates that its entries multiply are zero) is set to zero, so no
    system is singular.

    An interrupted fit keeps the factors of the last completed iteration. Each iteration recomputes the residual from
    the factors, so a resumed fit gives the same bits as an uninterrupted one.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> stars = sp.csr_array([[5, 0, 1, 0], [4, 4, 0, 0], [0, 1, 0, 5]])
    >>> model = hmf.CCD(factors=2, device="cpu", random_state=0).fit(stars)
    >>> model.predict(0, 0).round()
    np.float64(5.0)
    """

    regularization_scaling: Scaling | tuple[Scaling, Scaling] | None = None
    inner_iterations: int = 1
    nonnegative: bool = False
    biases: bool = True
    bias_regularization: float | tuple[float, float] | None = None

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        return Objective.explicit(
            self.regularization, self.regularization_scaling, self.biases, self.bias_regularization, spread
        )

    def _method(self) -> CcdMethod:
        return CcdMethod.check(inner_iterations=self.inner_iterations, nonnegative=self.nonnegative)

    def _solver(self, plan: Plan, objective: Objective, ratings: LocalRatings, state: State, completed: int) -> Solver:
        arguments = (ratings.user_items, ratings.item_users, objective, plan, state)
        if plan.gpu is None:
            from .cpu.ccd import CpuCCD

            return CpuCCD(*arguments[:-1], state.on_host())
        from .device.cuda import open_device
        from .gpu.ccd import GpuCCD

        return GpuCCD(open_device(plan.device), *arguments)
