"""Alternating least squares estimators for implicit and explicit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from .core.objective import SIDES, Objective, PerSide, Scaling, Side, State
from .core.validate import check_real
from .data.align import Labels
from .model.base import FactorModel
from .model.training import LocalRatings, side_features
from .plan.solver import Solver
from .plan.start import Init, Start
from .plan.types import Plan
from .ranks.cpu_rank import CpuWorker
from .ranks.su_als import RankALS, Worker, one_device


@dataclass(eq=False, repr=False, kw_only=True)
class _ALS(FactorModel):
    """Parameters and solver of both estimators."""

    solver: str = "cholesky"
    regularization_scaling: Scaling | tuple[Scaling, Scaling] | None = None
    cg_steps: int = 3
    assembly: str = "auto"
    reorder: str | bool = "auto"
    precision: str = "float32"
    nonnegative: bool = False
    block_size: int = 32
    balance: bool = False
    row_form: str = "auto"
    reduction: str = "auto"
    item_feature_weight: float = 1.0
    user_feature_weight: float = 1.0

    _reads_slabs = True
    _serves_features = True

    def _start(self, objective: Objective, scale: float) -> Start:
        """Of the users: items are solved first, and solvers that start from earlier factors do as well from zeros.

        Only subspace steps on explicit feedback need drawn items: after 10 iterations their objective is 2 % lower with
        them, while that of implicit feedback is 4 % higher (8 factors in blocks of 4).
        """
        both = self.solver == "subspace" and not objective.is_implicit
        return replace(super()._start(objective, scale), sides=SIDES if both else ("user",))

    def _sides_read(self, frozen: Side | None = None) -> tuple[Side, ...]:
        """Exact solvers overwrite the side solved first, the items'; a change of basis reads them before."""
        return (frozen or "user",) if self._is_exact() and not self.balance else SIDES

    def _is_exact(self) -> bool:
        return self.solver == "cholesky"

    def _feature_weights(self) -> PerSide:
        given = ((f"{side}_feature_weight", getattr(self, f"{side}_feature_weight")) for side in SIDES)
        return PerSide(*(check_real(name, value, 0.0, strict=True) for name, value in given))

    def _init(self, shape: tuple[int, int], labels: Labels | None = None, frozen: Side | None = None) -> Init:
        """See `FactorModel`; refuses factors that would have no effect."""
        init = super()._init(shape, labels, frozen)
        if init.given and not set(init.given) & set(self._sides_read(frozen)):
            raise ValueError(
                "init has item_factors only, which the exact solver replaces before it reads them; give user_factors"
            )
        return init

    def _solver(self, plan: Plan, objective: Objective, ratings: LocalRatings, state: State, completed: int) -> Solver:
        features = side_features(self, ratings.features)
        if plan.devices:
            from .ranks.multi_als import MultiALS

            return MultiALS(ratings.user_items, ratings.item_users, objective, plan, state, features=features)
        worker: Worker = CpuWorker(plan.num_threads)
        if plan.gpu is not None:
            from .device.cuda import open_device
            from .ranks.gpu_rank import GpuWorker

            worker = GpuWorker(open_device(plan.device))
        given = one_device(ratings.user_items, ratings.item_users, plan, state)
        weights = ratings.weights_by_side(plan)
        return RankALS(worker=worker, objective=objective, features=features, weights=weights, **given)


@dataclass(eq=False, repr=False, kw_only=True)
class ImplicitALS(_ALS):
    """Matrix factorization of implicit feedback by alternating least squares, exact by default.

    Minimizes ``sum_(all u,i) c_ui (p_ui - x_u.y_i)^2 + lambda (sum_u s_u |x_u|^2 + sum_i s_i |y_i|^2)`` with
    ``c = 1 + alpha |r|``, ``p = 1`` if ``r > 0`` else 0 for the entries, and ``c = unobserved_weight``, ``p = 0``
    elsewhere (Hu, Koren and Volinsky 2008; Gates et al. 2015, eq. 1). A negative entry is a confident dislike.

    Without any weight (`regularization`, `alpha`, `unobserved_weight`, `regularization_scaling`, `count_unobserved`),
    lambda is 7, alpha 0 and the unobserved weight 0.1: values of entries do not matter, so neither does their unit.
    With one of them, those left out are 0.01, 1 and 1, the usual values of the literature.

    Parameters
    ----------
    factors : int
        Rank, 1 to 2048.
    regularization : float or (float, float), optional
        lambda >= 0, of both sides or of (users, items). At the minimum, predictions depend on the product of the two
        alone; their ratio sets the length of user factors against that of item factors. Default: see above; for small
        data, less than 7: at most half of ``|d_u| |d_i| / nnz``, where d are the numbers of entries of users and of
        items. Above this estimate of the largest singular value, all factors are nearly zero.
    alpha : float, optional
        Confidence per unit of feedback, >= 0; ``fit(weights=)`` takes other confidences. The library `implicit` uses
        ``c = alpha r``: pass it ``1 + alpha r`` with its ``alpha=1`` for the same model.
    iterations : int
        Full sweeps; each solves the items, then the users.
    solver : {"cholesky", "cg", "subspace"}
        How the equations of a row are solved. "cholesky" is exact. "cg" takes `cg_steps` conjugate gradient steps.
        "subspace" solves blocks of `block_size` coordinates in turn (iALS++: Rendle, Krichene, Zhang and Koren 2021).
        The last two start from the previous factors.
    device : {"auto", "cpu", "cuda", "cuda:N"}, or list of them
        Where to compute. "auto" chooses the device with the shortest predicted time and logs the reason. "cuda" is the
        first GPU; a named device that cannot be used raises an error. A list runs the fit on several devices, one rank
        on each; the first device serves the fitted model.
    regularization_scaling : {"none", "count"} or float, or a pair of them, optional
        The factor s of a row: 1 ("none", the default), its number of entries ("count", ALS-WR), or that number to the
        given power; of both sides or of (users, items).
    unobserved_weight : float, optional
        Confidence of pairs without an entry, >= 0.
    count_unobserved : bool
        Also count all pairs of a row in s, each with `unobserved_weight`. The factor of a user is then ``(n_u +
        unobserved_weight n_items) ** nu``, with nu = 1 for "count" (the frequency scaling of Rendle, Krichene, Zhang
        and Koren 2022).
    cg_steps : int
        Steps of ``solver="cg"``.
    assembly : {"auto", "simd", "rank1", "blas3", "bals", "fused", "sparse_syrk", "mo_als", ...}
        Algorithm that builds the normal equations. On the CPU: "simd" (this library's vector kernels), "rank1" (Gates
        fig. 5), "blas3" (Gates fig. 6, through BLAS) or "bals" (BALS tiles). On a GPU: "fused" (this library's kernels,
        which also solve), "sparse_syrk" (Gates), "mo_als" (cuMF) or "bals". "auto" uses this library's kernels where
        they support the problem. For comparison, "blas3_published" is Gates fig. 6 as printed; GPUs also run
        "sparse_syrk_published", Gates' kernel as printed, "bals_local", which maps sums to threads as in the paper, and
        MO-ALS with sums in global memory ("mo_als_global"), without the read-only cache ("mo_als_uncached"), or both
        ("mo_als_plain").
    reorder : {"auto", "none", "rows", "columns", "both"} or bool
        Sort rows and columns by degree internally (BALS Alg. 3). Factors keep the order of the input.
    precision : {"float32", "bf16x3", "tf32", "bf16", "float16"}
        Tensor-core arithmetic on the GPU. The CPU supports "float32" only.
    dtype : {"float32", "float64"}
        Type of factors and arithmetic.
    num_threads : int, optional
        Threads of the CPU. Default: OMP_NUM_THREADS, else the cores this process may use. The result does not depend on
        it.
    random_state : int, Generator or None
        Seed of the initial factors.
    init : {"nonnegative", "signed"}, fitted model or tuple of arrays, optional
        Initial factors. "nonnegative" (the default) and "signed" draw them from a uniform distribution. A fitted model
        of the same number of factors gives its own: its users and items are matched with those of the ratings by label
        (by position if neither has labels), and new ones are drawn. Arrays
        ``(user_factors, item_factors)``, of shape (n_users, factors) and (n_items, factors), continue from earlier
        factors; models with biases also accept ``(user_factors, item_factors, user_bias, item_bias)``. Rows follow the
        rows and columns of the ratings. Items are solved first, from the user factors: the exact solver ignores
        `item_factors` (unless ``balance=True``), which may be None; "cg" and "subspace" start from them. Model files
        do not contain these arrays.
    nonnegative : bool
        Constrain all factors to be nonnegative; biases may be negative. Each row is the exact minimum under the
        constraint, by coordinate descent on its normal equations, also in `transform` and other fold-in. Needs
        ``solver="cholesky"``, an assembly other than "rank1", "blas3" and "bals", and a nonnegative `init`.
    block_size : int
        Coordinates in each block of ``solver="subspace"``. With ``block_size >= factors`` the solver is exact. A GPU is
        fastest with 32 to 64.
    balance : bool
        Before each iteration, change to the basis with the smallest penalty at the same predictions. The objective
        approaches its minimum in a few iterations instead of tens. The early iterations then differ from those of the
        published algorithms.
    row_form : {"auto", "primal", "dual"}
        Form of the exact solution of rows with fewer entries than factors. "primal" solves `factors` equations, "dual"
        one for each entry: the same solution at a fraction of the work. "auto" chooses for each row by its number of
        entries. "dual", for comparison, takes the dual form for all rows with at most as many entries as factors (on a
        GPU, and at most 64). It raises an error where the dual form does not apply: with ``regularization=0`` or
        ``bias_regularization=0``, other solvers, assemblies other than "simd" and "fused", implicit feedback with
        `regularization_scaling` or ``unobserved_weight > 1``, and GPUs that do not hold all ratings and factors.
    reduction : {"auto", "parallel", "two_phase", "root"}
        How several GPUs reduce partial sums when the plan splits the fixed side over them (cuMF 4.2): in parallel,
        first within sockets and then across them, or on one GPU, which then solves. "auto" is "parallel". The other
        values raise an error if the plan splits nothing.
    item_feature_weight, user_feature_weight : float
        How much the features given to `fit` may explain, > 0. With f_i the features of item i and W their vectors, the
        penalty of the items is ``lambda (sum_i s_i |y_i - W^T f_i|^2 + |W|^2 / item_feature_weight)``. A small weight
        fits hardly anything to features; a large one no longer shrinks the vectors of rare features.
    gpu_memory_limit : int or str, optional
        GPU memory that the plan may use, in bytes or as text such as "6GB". Default: the free memory, limited by the
        environment variable HYBRIDMF_GPU_MEMORY_LIMIT.

    Attributes
    ----------
    user_factors, item_factors : float32 array, shape (n_users, factors) and (n_items, factors)
    user_factors_, item_factors_ : the same factors in `dtype`
    regularization_, alpha_, unobserved_weight_, regularization_scaling_ : float
        Weights of the fit, also where a parameter is None; a pair if users and items differ.
    n_iter_ : int
        Completed iterations.
    history_ : list of dict
    timings_ : dict
        See `fit`.
    plan_ : Plan
        Every size and choice of the fit.
    device_ : str
    user_ids_, item_ids_ : array or None
        Labels, if the model was fitted on labelled Ratings.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> plays = sp.csr_array([[3, 0, 1, 0], [2, 4, 0, 0], [0, 1, 0, 5]])
    >>> model = hmf.ImplicitALS(factors=2, alpha=10, device="cpu", random_state=0).fit(plays)
    >>> ids, scores = model.recommend(0, N=2)
    >>> ids.shape
    (2,)
    """

    alpha: float | None = None
    iterations: int = 10
    unobserved_weight: float | None = None
    count_unobserved: bool = False

    @property
    def alpha_(self) -> float:
        """`alpha` of the fit, also where the parameter is None."""
        return self._fitted().objective.alpha

    @property
    def unobserved_weight_(self) -> float:
        """`unobserved_weight` of the fit, also where the parameter is None."""
        return self._fitted().objective.unobserved_weight

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        weights = (self.alpha, self.unobserved_weight, self.count_unobserved)
        return Objective.implicit(self.regularization, self.regularization_scaling, *weights, degrees)


@dataclass(eq=False, repr=False, kw_only=True)
class ExplicitALS(_ALS):
    """Matrix factorization of explicit ratings by alternating least squares, exact by default.

    Minimizes ``sum_(u,i observed) (r_ui - mu - b_u - b_i - x_u.y_i)^2 + lambda (sum_u s_u |x_u|^2 + sum_i s_i
    |y_i|^2) + lambda_b (sum_u s_u b_u^2 + sum_i s_i b_i^2)``, without a factor 1/2.

    Parameters
    ----------
    factors : int
        Rank, 1 to 2048.
    regularization : float or (float, float), optional
        lambda >= 0, of both sides or of (users, items), in the unit of the ratings. Default: ``0.1 * 144 ** (1 - nu)``
        standard deviations of the training ratings (their root mean square if all are equal, 1 if all are 0), with nu
        the power of `regularization_scaling`: 0.1 for "count", 1.2 for 0.5 and 14.4 for "none". Multiplying the ratings
        by k then multiplies predictions by k.
    regularization_scaling : {"none", "count"} or float, or a pair of them, optional
        The factor s of a row: 1 ("none"), its number of entries ("count", ALS-WR: Zhou et al. 2008, cuMF eq. 1), or
        that number to the given power; of both sides or of (users, items). Default: 0.5 for models with biases and the
        default `regularization`, else "count".
    biases : bool
        Fit the mean mu (fixed at the training mean) and user and item biases, solved together with the factors. The
        systems of a biased model have one more unknown.
    bias_regularization : float or (float, float), optional
        lambda_b >= 0, the penalty of squared biases, of both sides or of (users, items); 0 leaves them unpenalized.
        Default: `regularization` divided by the standard deviation of the training ratings, since lambda has the unit
        of the ratings and lambda_b has none. For ranking rather than rating prediction, use about twenty times the
        default together with ``regularization_scaling="none"``, which shrinks the biases of rarely rated items most.
    iterations, solver, device, cg_steps, assembly, reorder, precision, dtype, num_threads, random_state, \
init, nonnegative, block_size, balance, row_form, reduction, item_feature_weight, user_feature_weight, \
gpu_memory_limit
        As for `ImplicitALS`.

    Attributes
    ----------
    user_factors, item_factors, user_factors_, item_factors_, n_iter_, history_, timings_, plan_, device_, user_ids_, \
item_ids_
        As for `ImplicitALS`.
    regularization_, regularization_scaling_ : float
        lambda and nu of the fit, also where the parameters are None; a pair if users and items differ.
    user_bias_, item_bias_ : array or None
    mean_ : float

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> stars = sp.csr_array([[5, 0, 1, 0], [4, 4, 0, 0], [0, 1, 0, 5]])
    >>> model = hmf.ExplicitALS(factors=2, device="cpu", random_state=0).fit(stars)
    >>> model.predict(0, 0).round()
    np.float64(5.0)
    """

    biases: bool = True
    bias_regularization: float | tuple[float, float] | None = None

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        return Objective.explicit(
            self.regularization, self.regularization_scaling, self.biases, self.bias_regularization, spread
        )
