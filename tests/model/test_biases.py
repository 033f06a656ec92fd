"""The penalty of biases on every backend, in files and checkpoints; the range that predictions are clipped to."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.core.validate import as_csr, seed_of
from hybridmf.data.store import Store
from hybridmf.errors import ModelFileError
from hybridmf.model.learned import scale_of
from hybridmf.plan.start import initial_state
from hybridmf.ranks.shares import SharedEntries, StoredRatings, WholeRatings
from hybridmf.ranks.transport.threads import run_ranks
from support import reference
from support.model_files import alter, read_parts
from support.ranks import fit_rank
from support.ratings import planted

SMALL = {"factors": 3, "random_state": 3, "num_threads": 1, "iterations": 3}
RATINGS = planted(24, 16, 0.4)


def als(**options) -> hmf.ExplicitALS:
    return hmf.ExplicitALS(**SMALL | {"device": "cpu"} | options)


def half_stars(low: float = 0.5, high: float = 4.0, seed: int = 0) -> sp.csr_array:
    """FilmTrust's scale: multiples of 0.5, most rows short, so that predictions leave the scale."""
    rng = np.random.default_rng(seed)
    matrix = sp.random_array((40, 30), density=0.12, format="csr", rng=rng, dtype=np.float32)
    matrix.data[:] = np.round(2 * rng.uniform(low, high, matrix.nnz)) / 2
    matrix.data[:2] = low, high
    return matrix


def all_pairs(model, **options) -> np.ndarray:
    users, items = np.indices((model.n_users, model.n_items)).reshape(2, -1)
    return model.predict(users, items, **options)


# ------------------------------------------------------------------------------------------------------- the penalty


@pytest.mark.parametrize(("scaling", "penalty"), [(0.0, 0.0), (0.0, 0.3), (0.5, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize("several", [False, True])
def test_a_fit_is_the_references(backend, scaling, penalty, several):
    """Factors, biases and objective, on one device and on several."""
    if several and backend == "cuda":
        pytest.skip("ranks/test_gpu_rank.py has several GPUs")
    matrix = as_csr(RATINGS, dtype=np.float64)
    model = als(
        regularization=0.1, regularization_scaling=scaling, bias_regularization=penalty, dtype="float64",
        device=["cpu"] * 3 if several else backend, num_threads=3,
    )  # fmt: skip
    model.fit(RATINGS, callback=lambda model, record: None)
    objective = Objective("explicit", 0.1, scaling, biases=True, bias_regularization=penalty)
    start = initial_state(
        np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=16), 3, np.float64, objective,
        float(matrix.data.mean()), seed_of(3), model._start(objective, scale_of(matrix, objective)),
    )  # fmt: skip
    expected = reference.fit(matrix, start, objective, 3)
    for side in ("user", "item"):
        ours, theirs = model._learned.state.side(side), expected.side(side)
        np.testing.assert_allclose(ours.matrix, theirs.matrix, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(ours.bias, theirs.bias, rtol=1e-6, atol=1e-8)
    value = reference.objective_value(matrix, expected, objective)
    assert model.history_[-1]["objective"] == pytest.approx(value, rel=1e-9)
    assert model.objective(RATINGS) == pytest.approx(value, rel=1e-9)


def test_a_larger_penalty_gives_smaller_biases():
    squares = [float((als(bias_regularization=each).fit(RATINGS).item_bias_ ** 2).sum()) for each in (0, 0.3, 3, 30)]
    assert all(later < earlier for earlier, later in pairwise(squares))


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.SGD, hmf.CCD])
def test_the_default_penalty_is_lambda_in_standard_deviations(cls, tmp_path):
    """lambda has the unit of the ratings and lambda_b has none."""
    common = {"factors": 3, "iterations": 3, "biases": True, "regularization": 0.2, "device": "cpu", "random_state": 3}
    train, spread = RATINGS * 20, RATINGS.tocsr().data.astype(np.float64).std() * 20
    default, same = (cls(**common, bias_regularization=each).fit(train) for each in (None, 0.2 / spread))
    np.testing.assert_allclose(default.item_bias_, same.item_bias_, rtol=1e-5)
    default.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert loaded.bias_regularization is None
    assert loaded.objective(train) == default.objective(train) != cls(**common).fit(RATINGS).objective(train)
    assert loaded._learned.objective == default._learned.objective
    alter(tmp_path / "model", state={"bias_regularization": -1.0})
    with pytest.raises(ModelFileError, match="bias_regularization must be >= 0"):
        hmf.load(tmp_path / "model")


def test_new_rows_pay_the_same_penalty():
    model = als(bias_regularization=0.3, dtype="float64", iterations=10).fit(RATINGS)
    kept = model.user_factors_.copy(), model.user_bias_.copy()
    model.partial_fit_users([4, 5], RATINGS[[4, 5]])
    np.testing.assert_allclose(model.user_factors_, kept[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model.user_bias_, kept[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "error"), [(-0.1, ValueError), ("auto", TypeError), (float("nan"), ValueError), (True, TypeError)]
)
def test_invalid_penalties_are_refused(value, error):
    with pytest.raises(error, match="bias_regularization must be"):
        als(bias_regularization=value).fit(RATINGS)


def test_files_keep_the_penalty_and_older_ones_have_none(tmp_path):
    path, old = tmp_path / "model", tmp_path / "old"
    model = als(regularization=0.05, bias_regularization=0.3).fit(RATINGS)
    model.save(path)
    assert hmf.load(path).bias_regularization == 0.3
    assert hmf.load(path).objective(RATINGS) == model.objective(RATINGS)
    model.save(old)
    loaded = hmf.load(
        alter(old, params={"bias_regularization": None}, state={"value_range": None, "bias_regularization": None})
    )
    assert loaded.bias_regularization == 0
    free = Objective("explicit", 0.05, 1.0, biases=True)
    expected = reference.objective_value(as_csr(RATINGS, dtype=np.float64), model._learned.state, free)
    assert loaded.objective(RATINGS) == pytest.approx(expected, rel=1e-5)
    als(biases=False).fit(RATINGS).save(old)
    loaded = hmf.load(alter(old, params={"bias_regularization": None}))
    assert (loaded.biases, loaded.bias_regularization) == (False, None)


def test_a_checkpoint_of_another_penalty_is_refused(tmp_path):
    als().fit(RATINGS, checkpoint=tmp_path)
    with pytest.raises(ModelFileError, match=r"written with bias_regularization=None, this model has .*=0.3"):
        als(bias_regularization=0.3, iterations=5).fit(RATINGS, resume_from=tmp_path)
    newest = sorted(tmp_path.iterdir())[-1]
    alter(newest, params={"bias_regularization": None})  # as files before the parameter were
    with pytest.raises(ModelFileError, match=r"written with bias_regularization=0.0, this model has .*=None"):
        als(iterations=5).fit(RATINGS, resume_from=newest)
    assert als(iterations=5, bias_regularization=0.0).fit(RATINGS, resume_from=newest).n_iter_ == 5


# ---------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    "make",
    [
        lambda: als(factors=8, regularization=0.001, biases=False),
        lambda: als(factors=8, regularization=0.001),
        lambda: hmf.SGD(factors=8, regularization=0.0, iterations=20, random_state=0, device="cpu"),
        lambda: hmf.CCD(factors=8, regularization=0.001, random_state=0, device="cpu"),
    ],
)
def test_predictions_stay_in_the_training_range(make):
    model, matrix = make().fit(half_stars()), half_stars()
    free = all_pairs(model, clip=False)
    np.testing.assert_array_equal(all_pairs(model), np.clip(free, 0.5, 4.0))
    np.testing.assert_array_equal(all_pairs(model, clip=(1, 3)), np.clip(free, 1, 3))
    assert isinstance(model.predict(0, 1), np.floating)
    users, items = matrix.nonzero()
    expected = np.sqrt(np.mean((matrix[users, items] - np.clip(model.predict(users, items, clip=False), 0.5, 4)) ** 2))
    assert hmf.evaluate(model, matrix, metrics=("rmse",))["rmse"] == pytest.approx(expected, rel=1e-6)


def test_the_range_is_needed_here_and_rankings_ignore_it():
    model = als(factors=8, regularization=0.001, biases=False).fit(half_stars())
    free = all_pairs(model, clip=False)
    assert free.max() > 4.5 and free.min() < 0
    _, scores = model.recommend(0, N=5, filter_already_liked_items=False)
    np.testing.assert_allclose(scores, np.sort(free[:30])[::-1][:5], rtol=1e-5)
    plain = als(factors=8, regularization=0.001, biases=False)
    plain.fit(half_stars(), validation=half_stars(seed=1))
    assert plain.history_[-1]["rmse"] == pytest.approx(-plain.score(half_stars(seed=1), users="training"))


@pytest.mark.parametrize(("low", "high"), [(-3.0, -0.5), (-2.0, 2.0), (2.5, 2.5)])
def test_negative_and_constant_ratings(low, high):
    model = als(factors=4, regularization=0.001).fit(half_stars(low, high))
    assert model._learned.value_range == (low, high)
    predicted = all_pairs(model)
    assert low <= predicted.min() <= predicted.max() <= high


def test_explicit_zeros_count():
    matrix = half_stars()
    matrix.data[5] = 0
    assert als().fit(matrix)._learned.value_range == (0.0, 4.0)


def test_preferences_are_not_clipped():
    model = hmf.ImplicitALS(factors=3, random_state=0, device="cpu").fit(half_stars())
    assert model._learned.value_range is None
    np.testing.assert_array_equal(all_pairs(model), all_pairs(model, clip=False))


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        (True, TypeError, 'clip must be "auto", False or a pair'),
        (None, TypeError, 'clip must be "auto", False or a pair'),
        ("on", TypeError, 'clip must be "auto", False or a pair'),
        ((1, 2, 3), TypeError, 'clip must be "auto", False or a pair'),
        ((4, 1), ValueError, "low <= high, got 4 and 1"),
        ((0, float("inf")), ValueError, "clip must be finite"),
    ],
)
def test_invalid_clip_is_refused(clip, error, message):
    model = als().fit(RATINGS)
    for arguments in ((0, 0), (RATINGS,)):
        with pytest.raises(error, match=message):
            model.predict(*arguments, clip=clip)


def test_updates_widen_the_range():
    model = als().fit(half_stars())
    row = np.zeros((1, 30), np.float32)
    row[0, :3] = 5, 2, -1
    model.partial_fit_users([3], row)
    assert model._learned.value_range == (-1.0, 5.0)
    column = np.zeros((40, 1), np.float32)
    column[:3, 0] = 7
    model.partial_fit_items([31], column)
    assert model._learned.value_range == (-1.0, 7.0)
    model.partial_fit_users([4], sp.csr_array((1, 32), dtype=np.float32))  # no new value
    assert model._learned.value_range == (-1.0, 7.0)


def test_files_keep_the_range_and_older_ones_do_not_clip(tmp_path):
    path = tmp_path / "model"
    model = als(factors=8, regularization=0.001, biases=False).fit(half_stars())
    model.save(path)
    assert json.loads(read_parts(path)[0]["state"])["value_range"] == [0.5, 4.0]
    np.testing.assert_array_equal(all_pairs(hmf.load(path)), all_pairs(model))
    old = hmf.load(alter(path, state={"value_range": None}))
    np.testing.assert_array_equal(all_pairs(old), all_pairs(model, clip=False))
    old.partial_fit_users([3], np.full((1, 30), 2.0, np.float32))
    assert old._learned.value_range is None
    for damaged in ([4.0, 0.5], [1.0], "wide", [1.0, float("nan")]):
        with pytest.raises(ModelFileError, match=r"is corrupt: .*value_range must be"):
            hmf.load(alter(path, state={"value_range": damaged}))


def test_a_resumed_fit_clips(tmp_path):
    als(iterations=1).fit(half_stars(), checkpoint=tmp_path)
    assert als(iterations=2).fit(half_stars(), resume_from=tmp_path)._learned.value_range == (0.5, 4.0)


@pytest.mark.parametrize("several", [False, True])
def test_a_store_has_the_range(several, tmp_path):
    hmf.convert(hmf.Ratings.from_matrix(half_stars()), tmp_path / "store", slab_bytes=1500)
    store = Store.open(tmp_path / "store")
    assert store._manifest["range"] == [0.5, 4.0]
    options = {"device": ["cpu"] * 2, "num_threads": 2} if several else {}
    assert als(**options).fit(store)._learned.value_range == (0.5, 4.0)
    del store._manifest["range"]  # as stores before it were
    assert als(**options).fit(store)._learned.value_range == (0.5, 4.0)


@pytest.mark.parametrize("share", ["entries", "whole", "store"])
@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS])
def test_ranks_agree_on_the_range(share, cls, tmp_path):
    matrix = as_csr(half_stars(), name="matrix")
    if share == "store":
        hmf.convert(hmf.Ratings.from_matrix(matrix), tmp_path / "store", slab_bytes=1500)
    triplets = matrix.tocoo()

    def ratings(rank):
        if share == "whole":
            return WholeRatings(matrix)
        if share == "store":
            return StoredRatings(Store.open(tmp_path / "store"), np.float32, cls is hmf.ImplicitALS)
        mine = slice(0, 2) if rank == 1 else slice(2 + 100 * (rank // 2), 102 if rank == 0 else None)
        return SharedEntries(triplets.row[mine], triplets.col[mine], triplets.data[mine], matrix.shape)

    models = run_ranks(3, lambda c: fit_rank(cls(**SMALL | {"device": "cpu"}), ratings(c.rank), c), timeout=30)
    assert models[0]._learned.value_range == (None if cls is hmf.ImplicitALS else (0.5, 4.0))


# --------------------------------------------------------------------------------------------------------- real data


@pytest.mark.realdata
def test_movielens_100k_is_predicted_better_with_biases(data_dir):
    """0.894 to 0.897, by seed; without biases, 0.903 to 0.908 (8 factors, lambda 0.1 times the number of entries)."""
    train, test = hmf.split(hmf.Ratings.from_file(data_dir / "ml-100k" / "u.data.gz"), test_size=0.1, random_state=0)
    options = {"factors": 8, "random_state": 0, "device": "cpu"}
    biased = hmf.ExplicitALS(regularization=1.0, regularization_scaling=0.5, **options).fit(train)
    plain = hmf.ExplicitALS(regularization=0.1, biases=False, **options).fit(train)
    assert -biased.score(test) < -plain.score(test) - 0.005
    assert hmf.evaluate(biased, test, metrics=("rmse",))["rmse"] <= 0.899


@pytest.mark.exhaustive
@pytest.mark.realdata
def test_movielens_1m_with_biases(data_dir):
    """RMSE of the best model without biases at its default scaling; and a top ten that popularity does not reach."""
    ratings = hmf.Ratings.from_file(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz")
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    options = {"random_state": 0, "device": "cpu"}
    model = hmf.ExplicitALS(16, regularization=1.0, regularization_scaling=0.5, **options).fit(train)
    assert -model.score(test) <= 0.839
    ranking = hmf.ExplicitALS(
        32, regularization=24.0, bias_regularization=480.0, regularization_scaling="none", **options
    ).fit(train)
    popularity = hmf.metrics.PopularityRecommender().fit(train)
    found = [
        hmf.evaluate(each, test, train=train, metrics=("ndcg@10",), relevance_threshold=4)["ndcg@10"]
        for each in (ranking, popularity)
    ]
    assert found[0] > found[1]
    degrees = np.bincount(train.user_items.indices, minlength=train.n_items)
    ids, _ = ranking.recommend(np.arange(train.n_users))
    assert np.mean(degrees[ids] < 20) < 0.01
