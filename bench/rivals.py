"""The peers a benchmark can run beside us, each with its objective mapped to ours.

A class whose library can go iteration by iteration has ``step()`` (one full iteration) and ``factors()`` ((users,
items) as float32, rows without entries zero), so that one loop times all and one function judges all. LIBMF and
cmfrec only fit as a whole: they have ``fit(iterations)`` instead. Our objectives: docs/methods.md. The mapping, with
biases and centering off everywhere:

implicit   c = alpha r for the entries, 1 elsewhere: given the matrix 1 + alpha r and alpha = 1; lambda as ours, not
           scaled by the row count
irspack    loss ORIGINAL: c = alpha0 + x for the entries, alpha0 elsewhere: given x = alpha r, alpha0 = 1, nu = 0, which
           leaves lambda unscaled; half of our objective as a whole, which changes no minimum
buffalo    c = 1 + alpha r, p = 1, lambda (reg_u, reg_i) unscaled with adaptive_reg off: ours as it is. From 128 factors
           on it runs iALS++ for every option, so it takes part below that only (and in the iALS++ rows)
rusket     c = 1 + alpha r, p = 1, lambda unscaled: ours as it is; items are solved last. It fits as a whole, on as many
           threads as RAYON_NUM_THREADS says when it is first used
lenskit    explicit, lambda times the row count (ALS-WR): ours as it is once it is kept from subtracting its bias model
cmfrec     CMF by ALS with scale_lam: lambda times the row count; user_bias, item_bias and center off; float32. Its
           implicit model is left out: with CG it does not minimize the Hu-Koren objective
LIBMF      P_L2_MFR: lambda_p2 |p_u|^2 + lambda_q2 |q_i|^2 for each *entry*, which sums to lambda times the row count;
           SGD, so it approaches the minimum and is judged by how near it comes

Left out: oneDAL's implicit ALS (daal4py of scikit-learn-intelex 2026.2), whose item factors do not solve the normal
equations of its own objective after an iteration (its user factors do, with lambda times the row count), and which
takes no lambda: times without an equal objective are no comparison.

An environment with these libraries: rivals.sh beside this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import json
import logging
import os
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import common
import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective, Side, State

PEERS = ("implicit", "irspack", "buffalo", "rusket", "lenskit", "cmfrec", "libmf")

Sides = tuple[np.ndarray, np.ndarray]
"""User factors, item factors."""

BUFFALO_SUBSPACE_RANK = 128
"""From this rank on buffalo runs iALS++ and ignores its option "optimizer"."""


def installed(name: str) -> bool:
    """Whether a peer can be imported."""
    return importlib.util.find_spec(name) is not None


class Ours:
    """hybridmf, one iteration at a time on one solver object."""

    def __init__(self, model: Any, matrix: sp.csr_array) -> None:
        from hybridmf.model.training import LocalRatings
        from hybridmf.plan.make import make_plan

        self.plan = make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz)
        ratings = LocalRatings(model, matrix).on_host(self.plan)
        state = model._initial_state(ratings, self.plan, model._objective())
        self.solver = model._solver(self.plan, model._objective(), ratings, state, 0)

    def step(self) -> None:
        """One full iteration."""
        common.iterate(self.solver)

    def factors(self) -> Sides:
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

    def factors(self) -> Sides:
        """User and item factors."""
        return self.users, self.items


class Irspack:
    """irspack's iALS: "CHOLESKY", "CG" (3 steps) or "IALSPP" (subspaces of 32)."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, alpha: float, threads: int, solver: str) -> None:
        from irspack.recommenders import _ials_core as core

        x = sp.csr_matrix(matrix, copy=True)
        x.data = alpha * x.data
        # 0.1 is its default; it divides by sqrt(rank) itself
        config = (
            core.IALSModelConfigBuilder().set_K(rank).set_init_stdev(0.1).set_alpha0(1.0).set_reg(lam)
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

    def factors(self) -> Sides:
        """User and item factors."""
        return self.trainer.user, self.trainer.item


class Buffalo:
    """kakao/buffalo's ALS core: "llt" (exact), "manual_cg" (3 steps over A_u) or "ialspp" (3 CG steps a block)."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, alpha: float, threads: int, solver: str) -> None:
        from buffalo.algo._als import CyALS
        from buffalo.algo.options import ALSOption

        assert rank < BUFFALO_SUBSPACE_RANK or solver == "ialspp"
        options = dict(ALSOption().get_default_option()) | {
            "d": rank, "num_workers": threads, "reg_u": lam, "reg_i": lam, "alpha": alpha, "optimizer": solver,
            "num_cg_max_iters": 3, "block_size": 32, "adaptive_reg": False, "compute_loss_on_training": False,
        }  # fmt: skip
        self.core = CyALS()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(options, file)
            file.flush()
            assert self.core.init(file.name.encode())
        columns = matrix.T.tocsr()
        self.layouts = [_ends_keys_values(each) for each in (matrix, columns)]
        rng = np.random.default_rng(0)  # its own start: |N(0, 1/d^2)|
        self.sides = tuple(
            np.abs(rng.normal(scale=1 / rank**2, size=(rows, rank))).astype(np.float32) for rows in matrix.shape
        )
        for side, layout in zip(self.sides, (matrix, columns), strict=True):
            side[np.diff(layout.indptr) == 0] = 0  # it leaves such rows as they started
        self.core.initialize_model(*self.sides)

    def step(self) -> None:
        """One full iteration: users, then items."""
        with threadpool_limits(1, user_api="blas"):
            for axis, (ends, keys, values) in enumerate(self.layouts):
                self.core.precompute(axis)
                self.core.partial_update(0, len(ends), ends, keys, values, axis)

    def factors(self) -> Sides:
        """User and item factors."""
        return self.sides[0], self.sides[1]


class Rusket:
    """rusket's implicit ALS, exact or with 3 CG steps; it fits as a whole."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, alpha: float, threads: int, use_cg: bool) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        self.ratings = sp.csr_matrix(matrix, dtype=np.float32, copy=True)  # it writes to its input
        self.options = {"factors": rank, "regularization": lam, "alpha": alpha, "use_cholesky": not use_cg,
                        "cg_iters": 3, "seed": 1, "use_cuda": False}  # fmt: skip
        self.model: Any = None

    def fit(self, iterations: int) -> Rusket:
        """A fit from its own random start."""
        from rusket import ALS

        self.model = ALS(iterations=iterations, **self.options).fit(self.ratings)
        return self

    def seconds_per_iteration(self) -> float:
        """What further iterations cost: a fit with three more of them against a fit with one."""
        one = _seconds(lambda: self.fit(1))
        return (_seconds(lambda: self.fit(4)) - one) / 3

    def factors(self) -> Sides:
        """User and item factors; zero for rows without entries."""
        sides = []
        for factors, axis in ((self.model.user_factors, 1), (self.model.item_factors, 0)):
            sides.append(np.array(factors, dtype=np.float32))
            sides[-1][np.asarray(self.ratings.getnnz(axis=axis)) == 0] = 0
        return sides[0], sides[1]


def _ends_keys_values(csr: sp.csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Buffalo's layout: where each row ends (int64), columns (int32), values (float32)."""
    return csr.indptr[1:].astype(np.int64), csr.indices.astype(np.int32), csr.data.astype(np.float32)


@cache
def _raw_lenskit_trainer() -> Any:
    """LensKit's explicit trainer on the ratings as they are, where its own subtracts a bias model first."""
    from lenskit.als._explicit import BiasedMFTrainer

    class RawTrainer(BiasedMFTrainer):
        def prepare_matrix(self, data: Any) -> Any:
            return data.interactions().matrix().scipy(attribute="rating", layout="coo").astype(np.float32)

    return RawTrainer


class LenskitData:
    """A matrix as LensKit's data set, which takes longer to build than some fits: made once, not counted."""

    def __init__(self, matrix: sp.csr_array) -> None:
        import pandas as pd
        import structlog
        from lenskit.data import from_interactions_df

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        coo = matrix.tocoo()
        frame = pd.DataFrame({"user_id": coo.row, "item_id": coo.col, "rating": coo.data})
        self.dataset, self.shape = from_interactions_df(frame), matrix.shape


class Lenskit:
    """LensKit's explicit ALS, exact; its thread count is process-wide (LK_NUM_THREADS, set by the caller)."""

    def __init__(self, data: LenskitData, rank: int, lam: float) -> None:
        from lenskit.als import BiasedMFScorer
        from lenskit.training import TrainingOptions

        scorer = BiasedMFScorer(embedding_size=rank, regularization=lam, epochs=1)
        self.trainer = _raw_lenskit_trainer()(scorer, data.dataset, TrainingOptions(rng=0))
        self.shape = data.shape

    def step(self) -> None:
        """One full iteration."""
        with threadpool_limits(1, user_api="blas"):
            self.trainer.train_epoch()

    def factors(self) -> Sides:
        """User and item factors, with rows for users and items without entries."""
        scorer = self.trainer.scorer
        sides = (scorer.users, scorer.user_embeddings), (scorer.items, scorer.item_embeddings)
        full = []
        for rows, (vocabulary, embeddings) in zip(self.shape, sides, strict=True):
            factors = np.zeros((rows, embeddings.shape[1]), dtype=np.float32)
            factors[np.asarray(vocabulary.ids())] = embeddings
            full.append(factors)
        return full[0], full[1]


class Cmfrec:
    """cmfrec's explicit CMF by ALS, exact or with 3 CG steps; it fits as a whole."""

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, threads: int, use_cg: bool) -> None:
        self.ratings = sp.coo_matrix(matrix)
        self.options = {
            "k": rank, "lambda_": lam, "scale_lam": True, "method": "als", "use_cg": use_cg, "max_cg_steps": 3,
            "finalize_chol": False, "user_bias": False, "item_bias": False, "center": False, "use_float": True,
            "precompute_for_predictions": False, "nthreads": threads, "random_state": 1, "verbose": False,
            "handle_interrupt": False,
        }  # fmt: skip
        self.more = 4 if use_cg else 1
        self.model: Any = None

    def fit(self, iterations: int) -> Cmfrec:
        """A fit from its own random start."""
        from cmfrec import CMF

        with threadpool_limits(1, user_api="blas"):  # it spreads rows over threads
            self.model = CMF(niter=iterations, **self.options).fit(self.ratings)
        return self

    def seconds_per_iteration(self) -> float:
        """What further iterations cost: a fit with some more of them against a fit with one."""
        one = _seconds(lambda: self.fit(1))
        return (_seconds(lambda: self.fit(1 + self.more)) - one) / self.more

    def factors(self) -> Sides:
        """User and item factors."""
        users, items = self.model.A_.copy(), self.model.B_.copy()
        users[np.bincount(self.ratings.row, minlength=len(users)) == 0] = 0
        items[np.bincount(self.ratings.col, minlength=len(items)) == 0] = 0
        return users, items


_LIBMF_ENTRY = np.dtype([("user", np.int32), ("item", np.int32), ("rating", np.float32)])


class _LibmfProblem(ctypes.Structure):
    _fields_ = (
        ("users", ctypes.c_int), ("items", ctypes.c_int), ("entries", ctypes.c_longlong), ("values", ctypes.c_void_p)
    )  # fmt: skip


class Libmf:
    """LIBMF's SGD on squared errors; it fits as a whole.

    Called below the PyPI package's ``fit``, which would copy every entry twice more on the way.
    """

    def __init__(self, matrix: sp.csr_array, rank: int, lam: float, threads: int, rate: float = 0.1) -> None:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            from libmf import mf as binding  # prints where it found its library

        self.library, self.shape, self.rank = binding.mf, matrix.shape, rank
        self.library.mf_train.argtypes = (ctypes.POINTER(_LibmfProblem), binding.MFParam)
        self.library.mf_train.restype = ctypes.POINTER(binding.MFModel)
        self.parameters = binding.MF(
            fun=binding.P_L2_MFR, k=rank, nr_threads=threads, eta=rate, lambda_p2=lam, lambda_q2=lam,
            lambda_p1=0.0, lambda_q1=0.0, quiet=True,
        )._options  # fmt: skip
        self.entries = np.empty(matrix.nnz, dtype=_LIBMF_ENTRY)
        self.entries["user"] = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        self.entries["item"], self.entries["rating"] = matrix.indices, matrix.data
        self.problem = _LibmfProblem(*matrix.shape, matrix.nnz, self.entries.ctypes.data)
        self.sides: list[np.ndarray] = []

    def fit(self, iterations: int) -> Libmf:
        """A fit from its own random start: shuffling, blocking and the epochs."""
        self.parameters.nr_iters = iterations
        model = self.library.mf_train(ctypes.byref(self.problem), self.parameters)
        self.sides = [
            np.nan_to_num(np.ctypeslib.as_array(side, (rows, self.rank)))  # rows without entries are NaN
            for rows, side in zip(self.shape, (model.contents.P, model.contents.Q), strict=True)
        ]
        self.library.mf_destroy_model(ctypes.byref(model))
        return self

    def is_rebuilt(self) -> bool:
        """Whether it was built with OpenMP (README.md), which the package as PyPI ships it is not."""
        return b"GOMP" in Path(self.library._name).read_bytes()

    def factors(self) -> Sides:
        """User and item factors."""
        return self.sides[0], self.sides[1]


def _seconds(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class Judge:
    """One function that judges everybody's factors: our objective on one matrix."""

    def __init__(self, model: hmf.ImplicitALS | hmf.ExplicitALS, matrix: sp.csr_array) -> None:
        from hybridmf.core.validate import csr_arrays
        from hybridmf.cpu.als import HalfSweep
        from hybridmf.formats import transpose
        from hybridmf.plan.make import make_plan

        self.objective: Objective = model._objective()
        plan = make_plan(self.objective, model._settings(), matrix.shape, matrix.nnz)
        self.arrays = csr_arrays(matrix)
        self.threads = plan.num_threads
        self.halves = {
            "user": HalfSweep("user", matrix, self.objective, plan),
            "item": HalfSweep("item", transpose(matrix, num_threads=plan.num_threads), self.objective, plan),
        }

    def loss(self, factors: Sides) -> float:
        """The objective at these factors."""
        return self._loss(_state(factors))

    def _loss(self, state: State) -> float:
        from hybridmf.cpu.als import objective_value

        degrees = self.halves["user"].degrees, self.halves["item"].degrees
        return objective_value(self.objective, self.arrays, state, *degrees, self.threads)

    def slack(self, factors: Sides) -> float:
        """Share by which one exact half sweep lowers the objective, of the side that gains less.

        Rounding for any exact ALS from any start: the side solved last is where the minimum over it lies,
        if what it minimizes is our objective. Approximate solvers leave some.
        """
        state = _state(factors)
        before = self._loss(state)
        sides: tuple[tuple[Side, Factors], ...] = (("user", state.item), ("item", state.user))
        return min(1 - self._loss(state.with_side(side, self.halves[side].solve(fixed, 0.0))) / before
                   for side, fixed in sides)  # fmt: skip


def _state(factors: Sides) -> State:
    users, items = (Factors(np.ascontiguousarray(side, dtype=np.float32)) for side in factors)
    return State(users, items)
