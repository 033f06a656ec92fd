"""By the mapping of docs/porting.md: `implicit`'s exact solver, serving and loss, and the minimum of LIBMF."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

import hybridmf as hmf
from hybridmf.core.objective import Factors
from support.ratings import planted

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
    peer.item_factors = model.item_factors.copy()
    peer._YtY = None
    confidence = sp.csr_matrix(plays[:5], copy=True)
    confidence.data = 1 + confidence.data
    recalculated = np.vstack([peer.recalculate_user(np.arange(5), confidence)])
    np.testing.assert_allclose(model.transform(plays[:5]), recalculated, rtol=2e-3, atol=2e-4)


# ------------------------------------------------------------------------------------------ lines of docs/porting.md


@pytest.fixture(scope="module")
def same_factors():
    """Our model, `implicit`'s with the same factors, and the matrices each is given."""
    plays = planted(120, 80, 0.15)
    plays.data = np.ceil(plays.data)
    model = hmf.ImplicitALS(factors=8, alpha=2.0, regularization=0.1, iterations=3, random_state=0).fit(plays)
    peer = implicit_model(
        plays, Factors(model.item_factors), factors=8, alpha=2.0, regularization=0.1, iterations=1, dtype=np.float32
    )
    peer.user_factors, peer.item_factors, peer._YtY = model.user_factors.copy(), model.item_factors.copy(), None
    confidence = sp.csr_matrix(plays, copy=True)
    confidence.data = 1 + 2 * confidence.data
    return model, peer, plays, confidence


def test_porting_loss_is_the_objective_over_all_confidences(same_factors):
    from implicit.cpu._als import calculate_loss

    model, peer, plays, confidence = same_factors
    loss = calculate_loss(confidence, peer.user_factors, peer.item_factors, 0.1, num_threads=1)
    total = plays.shape[0] * plays.shape[1] - plays.nnz + confidence.sum()
    assert loss * total == pytest.approx(model.objective(plays), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"filter_already_liked_items": False}, {"filter_items": [3, 5, 8]}, {"items": np.arange(20, 50)}],
    ids=lambda options: "".join(options) or "usual",
)
def test_porting_recommendations_are_the_same(same_factors, options):
    model, peer, plays, _ = same_factors
    users = np.array([0, 7, 33])
    ids, scores = model.recommend(users, N=5, **options)
    their_ids, their_scores = peer.recommend(users, sp.csr_matrix(plays)[users], N=5, **options)
    np.testing.assert_array_equal(ids, their_ids)
    np.testing.assert_allclose(scores, their_scores, rtol=1e-5)


def test_porting_similar_items_are_the_same(same_factors):
    model, peer, _, _ = same_factors
    for ours, theirs in ((model.similar_items, peer.similar_items), (model.similar_users, peer.similar_users)):
        ids, cosines = ours(4, N=6)
        their_ids, their_cosines = theirs(4, N=6)
        np.testing.assert_array_equal(ids, their_ids)
        np.testing.assert_allclose(cosines, their_cosines, rtol=1e-4)


def test_porting_nothing_left_to_recommend(same_factors):
    model, peer, plays, _ = same_factors
    everything = sp.csr_matrix(np.ones((1, plays.shape[1]), np.float32))
    ids, scores = model.recommend(0, sp.csr_array(everything), N=3)
    their_ids, their_scores = peer.recommend(0, everything, N=3)
    assert (ids == -1).all() and np.isneginf(scores).all()
    assert (their_ids >= 0).all() and (their_scores < -3e38).all()


def test_porting_dislikes_and_stored_zeros(same_factors):
    """A dislike weighs the same in both; a stored zero is a confidence of 0 there and an unobserved pair here."""
    model, peer, plays, confidence = same_factors
    row, theirs = plays[:1].copy(), confidence[:1].copy()
    row.data[::2] *= -1
    theirs.data[::2] *= -1
    np.testing.assert_allclose(model.transform(row)[0], peer.recalculate_user(0, theirs), rtol=2e-3, atol=2e-4)
    row, theirs = plays[:1].copy(), confidence[:1].copy()
    row.data[0] = theirs.data[0] = 0
    without = theirs.copy()
    without.eliminate_zeros()
    np.testing.assert_allclose(model.transform(row)[0], peer.recalculate_user(0, without), rtol=2e-3, atol=2e-4)
    assert np.abs(peer.recalculate_user(0, theirs) - peer.recalculate_user(0, without)).max() > 1e-3


def test_porting_libmf_minimizes_the_sum_scaled_by_counts():
    """LIBMF's factors are near the minimum of the sum with lambda times the count, and of no other lambda."""
    pytest.importorskip("libmf")
    from libmf import mf

    ratings = planted(200, 120, 0.3)
    users, items = ratings.nonzero()
    triplets = np.column_stack([users, items, ratings.data]).astype(np.float32)
    engine = mf.MF(
        fun=mf.P_L2_MFR, k=8, nr_iters=300, eta=0.1, nr_threads=1, nr_bins=20, quiet=True,
        lambda_p1=0, lambda_q1=0, lambda_p2=0.1, lambda_q2=0.1,
    )  # fmt: skip
    engine.fit(triplets)
    x, y = (np.nan_to_num(np.float64(side)) for side in (engine.p_factors(), engine.q_factors()))
    assert np.isnan(engine.p_factors()[100]).all()  # the planted empty row

    def objective(lam):
        squares = (ratings.data - np.einsum("ij,ij->i", x[users], y[items])) ** 2
        counts = np.bincount(users, minlength=len(x)), np.bincount(items, minlength=len(y))
        return squares.sum() + lam * (counts[0] @ (x**2).sum(axis=1) + counts[1] @ (y**2).sum(axis=1))

    excess = {
        lam: objective(lam) / hmf.ExplicitALS(
            biases=False, factors=8, regularization=lam, iterations=40, balance=True, dtype="float64", num_threads=1,
            random_state=0,
        ).fit(ratings).objective(ratings) - 1
        for lam in (0.05, 0.1, 0.2)
    }  # fmt: skip
    assert -1e-3 < excess[0.1] < 0.5 * min(excess[0.05], excess[0.2]), excess
    seen, strangers = engine.predict(np.array([[users[0], items[0]]])), engine.predict(np.array([[100, items[0]]]))
    assert seen[0] == pytest.approx(float(x[users[0]] @ y[items[0]]), rel=1e-4)
    assert strangers[0] == pytest.approx(ratings.data.mean(), rel=1e-3)
