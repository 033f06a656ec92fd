"""The peers a benchmark can run beside us, each with its objective mapped to ours.

Every class has ``step()`` (one full iteration) and ``factors()`` ((users, items) as float32), so that one loop times
all and one function judges all. Our objectives: docs/methods.md. The mapping:

implicit   c = alpha r for the entries, 1 elsewhere: given the matrix 1 + alpha r and alpha = 1
irspack    loss ORIGINAL: c = alpha0 + x for the entries, alpha0 elsewhere: given x = alpha r, alpha0 = 1, nu = 0
lenskit    explicit, penalty scaled by the row count (ALS-WR), on ratings less its bias model: we get the same residuals
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

import hybridmf as hmf
from hybridmf._objective import Factors, State


def installed(name: str) -> bool:
    """Whether a peer can be imported."""
    return importlib.util.find_spec(name) is not None


class Ours:
    """hybridmf, one iteration at a time on one solver object."""

    def __init__(self, model: Any, matrix: sp.csr_array) -> None:
        from hybridmf._base import SWEEP_ORDER
        from hybridmf._plan import make_plan
        from hybridmf.formats import transpose

        self.sides = SWEEP_ORDER
        self.plan = make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz)
        columns = transpose(matrix, num_threads=self.plan.num_threads)
        state = model._initial_state(matrix, columns, self.plan, model._objective())
        self.solver = model._solver(self.plan, matrix, columns, state)

    def step(self) -> None:
        """One full iteration."""
        for side in self.sides:
            self.solver.update(side)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """User and item factors."""
        return self.solver.state.user.matrix, self.solver.state.item.matrix


class Implicit:
    """benfred/implicit: exact (use_cg=False) or 3 CG steps."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, alpha: float, threads: int, use_cg: bool) -> None:
        from implicit.cpu._als import least_squares, least_squares_cg
        from implicit.cpu.als import AlternatingLeastSquares

        confidence = sp.csr_matrix(matrix, copy=True)
        confidence.data = 1 + alpha * confidence.data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AlternatingLeastSquares(rank, regularization=lam, use_cg=use_cg, num_threads=threads, iterations=1)
        rng = np.random.default_rng(0)
        self.users = (rng.random((matrix.shape[0], rank)) * 0.01).astype(np.float32)
        self.items = (rng.random((matrix.shape[1], rank)) * 0.01).astype(np.float32)
        self.confidence, self.columns = confidence, confidence.T.tocsr()
        self.solve = least_squares_cg if use_cg else least_squares
        self.options: dict[str, Any] = {"num_threads": threads} | ({"cg_steps": 3} if use_cg else {})
        self.lam = model.regularization

    def step(self) -> None:
        """One full iteration, as its fit loop does it; BLAS on one thread, which it asks for itself."""
        with threadpool_limits(1, user_api="blas"):
            self.solve(self.confidence, self.users, self.items, self.lam, **self.options)
            self.solve(self.columns, self.items, self.users, self.lam, **self.options)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """User and item factors."""
        return self.users, self.items


class Irspack:
    """irspack's iALS: "CHOLESKY", "CG" (3 steps) or "IALSPP" (subspaces of 32)."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, alpha: float, threads: int, solver: str) -> None:
        from irspack.recommenders import _ials_core as core

        x = sp.csr_matrix(matrix, copy=True)
        x.data = alpha * x.data
        config = (
            core.IALSModelConfigBuilder().set_K(rank).set_init_stdev(0.1 / np.sqrt(rank)).set_alpha0(1.0).set_reg(lam)
            .set_nu(0.0).set_loss_type(core.LossType.ORIGINAL).set_random_seed(0).build()
        )  # fmt: skip
        self.config = (
            core.IALSSolverConfigBuilder().set_n_threads(threads).set_solver_type(getattr(core.SolverType, solver))
            .set_max_cg_steps(3).set_ialspp_subspace_dimension(32).set_ialspp_iteration(1).build()
        )  # fmt: skip
        self.trainer = core.IALSTrainer(config, x)

    def step(self) -> None:
        """One full iteration."""
        self.trainer.step(self.config)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """User and item factors."""
        return self.trainer.user, self.trainer.item


class Lenskit:
    """LensKit's explicit biased ALS; its thread count is process-wide (LK_NUM_THREADS, set by the caller)."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float) -> None:
        import pandas as pd
        import structlog
        from lenskit.als import BiasedMFScorer
        from lenskit.data import from_interactions_df
        from lenskit.training import TrainingOptions

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        coo = matrix.tocoo()
        frame = pd.DataFrame({"user_id": coo.row, "item_id": coo.col, "rating": coo.data})
        data = from_interactions_df(frame)
        scorer = BiasedMFScorer(embedding_size=rank, regularization=lam, epochs=1)
        self.trainer = scorer.create_trainer(data, TrainingOptions(rng=0))
        self.residuals = sp.csr_array(self.trainer.prepare_matrix(data))

    def step(self) -> None:
        """One full iteration."""
        with threadpool_limits(1, user_api="blas"):
            self.trainer.train_epoch()

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """User and item factors."""
        return self.trainer.scorer.user_embeddings, self.trainer.scorer.item_embeddings


def objective(model: hmf.ImplicitALS | hmf.ExplicitALS, factors: tuple[np.ndarray, np.ndarray], matrix: Any) -> float:
    """The objective of `model` at anybody's factors."""
    from hybridmf._validate import csr_arrays
    from hybridmf.cpu.als import objective_value

    users, items = (Factors(np.ascontiguousarray(side, dtype=np.float32)) for side in factors)
    indptr, indices, data = csr_arrays(matrix)
    degrees = np.diff(indptr), np.bincount(indices, minlength=matrix.shape[1])
    return objective_value(model._objective(), (indptr, indices, data), State(users, items), *degrees, 2)
