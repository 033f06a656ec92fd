"""The peers' results: `implicit`'s exact solver on the same confidence matrix, SciPy's dense solvers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from conftest import planted
from threadpoolctl import threadpool_limits

import hybridmf as hmf
from hybridmf._objective import Factors

implicit = pytest.importorskip("implicit")


def implicit_model(plays: sp.csr_array, start: Factors, **options):
    """`implicit`'s Cholesky ALS from given item factors; its confidence is alpha r, so it is handed 1 + alpha r."""
    from implicit.cpu.als import AlternatingLeastSquares

    warnings.filterwarnings("ignore", message="OpenBLAS is configured")
    alpha = options.pop("alpha")
    confidence = sp.csr_matrix(plays, dtype=np.float32, copy=True)
    confidence.data = 1 + alpha * confidence.data
    model = AlternatingLeastSquares(use_cg=False, num_threads=2, alpha=1.0, **options)
    model.user_factors = np.zeros((plays.shape[0], options["factors"]), np.float32)
    model.item_factors = start.matrix.astype(np.float32)
    with warnings.catch_warnings(), threadpool_limits(1, user_api="blas"):
        warnings.simplefilter("ignore")
        model.fit(confidence, show_progress=False)
    return model


@pytest.mark.parametrize("assembly", ["rank1", "blas3", "bals"])
@pytest.mark.parametrize("alpha", [1.0, 40.0])
def test_implicit_feedback_equals_implicits_cholesky(assembly, alpha):
    """`implicit` solves users first and we items first, so it is given the transpose and our initial user factors."""
    plays = planted(120, 80, 0.15)
    plays.data = np.ceil(plays.data)  # whole numbers, so that both see the same confidences
    # the factors our model starts from: those it has before the first sweep
    seeds = []
    model = hmf.ImplicitALS(
        factors=8, alpha=alpha, regularization=0.1, iterations=5, assembly=assembly, random_state=0, dtype="float64"
    )
    original = model._initial_state
    model._initial_state = lambda *args: seeds.append(original(*args)) or seeds[0]
    model.fit(plays)
    peer = implicit_model(
        plays.T.tocsr(), seeds[0].user, factors=8, alpha=alpha, regularization=0.1, iterations=5, dtype=np.float64
    )
    # the peer solves in float32
    np.testing.assert_allclose(peer.user_factors, model.item_factors_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(peer.item_factors, model.user_factors_, rtol=1e-3, atol=1e-4)


def test_fold_in_equals_implicits_recalculated_user():
    plays = planted(120, 80, 0.15)
    model = hmf.ImplicitALS(factors=8, alpha=1.0, regularization=0.1, iterations=3, random_state=0).fit(plays)
    peer = implicit_model(
        plays, Factors(model.item_factors), factors=8, alpha=1.0, regularization=0.1, iterations=1, dtype=np.float32
    )
    peer.item_factors = model.item_factors
    peer._YtY = None
    confidence = sp.csr_matrix(plays[:5], copy=True)
    confidence.data = 1 + confidence.data
    recalculated = np.vstack([peer.recalculate_user(np.arange(5), confidence)])
    np.testing.assert_allclose(model.transform(plays[:5]), recalculated, rtol=2e-3, atol=2e-4)
