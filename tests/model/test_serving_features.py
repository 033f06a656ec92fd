"""Serving by features: cold items, new users, updates, explanations, files."""

from __future__ import annotations

import io
import logging
import pickle

import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import ModelFileError, RatingsError, UnknownLabelError
from support.messages import says

RNG = np.random.default_rng(0)
N_USERS, N_ITEMS, WARM = 40, 30, 24
CELLS = (RNG.random((N_USERS - 3, WARM)) < 0.35) * RNG.integers(1, 6, (N_USERS - 3, WARM)).astype(np.float32)
RATINGS = hmf.Ratings.from_matrix(
    CELLS, user_ids=[f"u{k}" for k in range(N_USERS - 3)], item_ids=[f"i{k}" for k in range(WARM)]
)
GENRES, JOBS = ["noir", "war", "comedy"], ["baker", "smith"]
ITEMS = hmf.Features(
    np.column_stack([np.eye(3)[np.arange(N_ITEMS) % 3], RNG.normal(size=N_ITEMS)]),
    names=[*(f"genre:{genre}" for genre in GENRES), "year"],
    labels=[f"i{k}" for k in range(N_ITEMS)],
)
USERS = hmf.Features(
    np.eye(2)[np.arange(N_USERS) % 2], names=[f"job:{job}" for job in JOBS], labels=[f"u{k}" for k in range(N_USERS)]
)
KINDS = {
    "implicit": (hmf.ImplicitALS, {"regularization": 0.5, "alpha": 1.0}),
    "explicit": (hmf.ExplicitALS, {"regularization": 0.5, "biases": False}),
    "biased": (hmf.ExplicitALS, {"regularization": 0.5, "bias_regularization": 0.2}),
}
BOTH = {"item_features": ITEMS, "user_features": USERS}


@pytest.fixture(scope="module")
def models():
    """Models whose users are exact for the vectors that the model has, not for those before the last half sweep."""
    found = {name: fitted(name) for name in KINDS}
    return {name: each.partial_fit_users(RATINGS.user_ids, RATINGS, labels=True) for name, each in found.items()}


def fitted(name, features=BOTH, **options):
    kind, given = KINDS[name]
    settings = {"factors": 4, "iterations": 40, "device": "cpu", "random_state": 0, "dtype": "float64"}
    return kind(**settings | given | options).fit(RATINGS, **features)


@pytest.fixture(params=KINDS)
def model(request, models):
    return models[request.param]


def joined(matrix, bias):
    return matrix if bias is None else np.column_stack((matrix, bias))


def vectors(model, side):
    held = model._fitted().state.vectors[side]
    return joined(held.matrix, held.bias)


def rows(model, side):
    return joined(getattr(model, f"{side}_factors_"), getattr(model, f"{side}_bias_"))


# --------------------------------------------------------------------------------------------------------- cold items


def test_rows_with_features_only_have_the_factors_of_their_features(model):
    assert model.item_ids_[WARM:].tolist() == [f"i{k}" for k in range(WARM, N_ITEMS)]
    np.testing.assert_allclose(rows(model, "item")[WARM:], ITEMS.matrix[WARM:] @ vectors(model, "item"), rtol=1e-6)
    np.testing.assert_allclose(rows(model, "user")[-3:], USERS.matrix[-3:] @ vectors(model, "user"), rtol=1e-6)
    assert model.item_features_.names == ITEMS.names and model.item_feature_vectors_.shape == (4, 4)
    assert model.user_features_.labels.tolist() == USERS.labels.tolist()
    assert not model.cold_users_[-3:].any() and not model.cold_items_[WARM:].any()
    plain = hmf.ImplicitALS(2, iterations=1, device="cpu").fit(RATINGS)
    assert plain.item_features_ is None and plain.user_feature_vectors_ is None


def scores(model):
    found = model.user_factors_ @ model.item_factors_.T
    return found if model.item_bias_ is None else found + model.item_bias_ + model.user_bias_[:, None] + model.mean_


@pytest.mark.parametrize("user", [0, N_USERS - 1])
def test_recommend_ranks_cold_items_on_request(model, user):
    seen = CELLS[user] if user < len(CELLS) else np.zeros(WARM)
    open_ = np.concatenate((np.flatnonzero(seen == 0), np.arange(WARM, N_ITEMS)))
    order = open_[np.argsort(-scores(model)[user, open_], kind="stable")]
    ids, values = model.recommend(user, N=N_ITEMS, include_cold=True)
    assert ids[: len(order)].tolist() == order.tolist() and np.all(ids[len(order) :] == -1)
    np.testing.assert_allclose(values[: len(order)], scores(model)[user, order], rtol=1e-5)
    warm = order[order < WARM]
    assert model.recommend(user, N=len(warm) + 1)[0].tolist() == [*warm, -1]
    assert model.recommend([user], N=3, include_cold=True)[0].tolist() == [order[:3].tolist()]
    cold = order[order >= WARM]
    for items in (np.arange(WARM, N_ITEMS), [np.arange(WARM, N_ITEMS)]):
        many = isinstance(items, list)
        asked = [user] if many else user
        found = np.atleast_2d(model.recommend(asked, N=6, items=items, include_cold=True)[0])[0]
        assert found.tolist() == cold.tolist()
        assert np.all(model.recommend(asked, N=6, items=items)[0] == -1)
    kept = model.recommend(user, N=2, filter_items=order[:1], include_cold=True)[0]
    assert kept.tolist() == order[1:3].tolist()


def test_tables_have_cold_items_on_request(model):
    pytest.importorskip("polars")
    frame = model.recommend_table(["u0"], N=N_ITEMS, include_cold=True, backend="polars")
    assert set(ITEMS.labels[WARM:]) <= set(frame["item"])
    assert not set(ITEMS.labels[WARM:]) & set(model.recommend_all(N=N_ITEMS, backend="polars")["item"])
    with pytest.raises(TypeError, match=says("include_cold must be True or False")):
        model.recommend(0, include_cold=1)


def test_evaluation_ranks_cold_items(models):
    test = hmf.Ratings.from_coo(
        ["u0", "u1", "u2"], ["i25", "i26", "i0"], user_ids=RATINGS.user_ids, item_ids=ITEMS.labels
    )
    model = models["implicit"]
    found = hmf.evaluate(model, test, train=RATINGS, metrics="recall@30", include_cold=True)
    assert found.apart["cold items"]["recall@30"] == 1 and found.apart["cold items among cold"]["recall@30"] == 1
    assert hmf.evaluate(model, test, train=RATINGS, metrics="recall@30").apart == {}
    assert list(found.apart)[-1] == "warm users" and model.n_users == N_USERS


def test_a_new_item_has_neighbours(model):
    ids, cosines = model.similar_items(WARM, N=N_ITEMS)
    wanted = model.item_factors_ @ model.item_factors_[WARM]
    wanted /= np.linalg.norm(model.item_factors_, axis=1) * np.linalg.norm(model.item_factors_[WARM])
    np.testing.assert_allclose(cosines, np.sort(wanted)[::-1], atol=1e-6)
    assert ids[0] == WARM


# ------------------------------------------------------------------------------------------------------------ new rows


@pytest.mark.parametrize("user", [0, 9])
def test_fold_in_by_features_solves_the_normal_equations(model, user):
    objective, warm = model._fitted().objective, slice(0, WARM)
    items, rated = model.item_factors_[warm], CELLS[user] != 0
    pull = USERS.matrix[[user]].toarray()[0] @ vectors(model, "user")
    ridge = np.full(4, objective.regularization.user)
    if objective.is_implicit:
        weights = np.where(rated, 1 + objective.alpha * CELLS[user], objective.unobserved_weight)
        design, target = items, rated * 1.0
    else:
        weights, design = rated * 1.0, items
        target = CELLS[user] - model.mean_
        if model.item_bias_ is not None:
            design, target = np.column_stack((items, np.ones(WARM))), target - model.item_bias_[warm]
            ridge = np.append(ridge, objective.bias_regularization.user)
        ridge = ridge * objective.row_scale("user", np.array([rated.sum()]))[0]
    matrix = (design.T * weights) @ design + np.diag(ridge)
    exact = np.linalg.solve(matrix, design.T @ (weights * target) + ridge * pull)
    row = np.pad(CELLS[[user]], ((0, 0), (0, N_ITEMS - WARM)))
    np.testing.assert_allclose(model.transform(row, features=USERS.matrix[[user]])[0], exact, rtol=1e-6)


def test_fold_in_by_features_gives_training_rows_their_factors(model):
    row = hmf.Ratings(RATINGS)[[0, 5, 7]]
    given = model.transform(row, features=USERS)
    np.testing.assert_allclose(given, rows(model, "user")[[0, 5, 7]], rtol=1e-6, atol=1e-8)
    by_order = model.transform(np.pad(CELLS[[0, 5]], ((0, 0), (0, N_ITEMS - WARM))), features=USERS.matrix[[0, 5]])
    np.testing.assert_allclose(by_order, given[:2], rtol=1e-6, atol=1e-8)
    assert np.abs(model.transform(row) - given).max() > 1e-4  # without features, another user


def test_fold_in_of_users_without_features_is_that_of_the_fit():
    for name in KINDS:
        model = fitted(name, {"item_features": ITEMS})
        np.testing.assert_allclose(model.transform(RATINGS), rows(model, "user"), rtol=1e-6, atol=1e-8)


def test_new_users_by_their_features(model):
    alone = np.eye(2) @ vectors(model, "user")
    for job in range(2):
        features = sp.csr_array(np.eye(2)[[job]])
        ids, values = model.recommend_new({}, N=3, features=features, include_cold=True)
        items = joined(model.item_factors_, None if model.item_bias_ is None else np.ones(N_ITEMS))
        wanted = items @ alone[job] + (0 if model.item_bias_ is None else model.item_bias_ + model.mean_)
        assert ids.tolist() == np.argsort(-wanted, kind="stable")[:3].tolist()
        np.testing.assert_allclose(values, np.sort(wanted)[::-1][:3], rtol=1e-5)
    several = model.recommend_new([{0: 5.0}, {3: 4.0}], N=2, features=np.eye(2))[0]
    single = [
        model.recommend_new({0: 5.0}, N=2, features=np.eye(2)[:1])[0],
        model.recommend_new({3: 4.0}, N=2, features=np.eye(2)[1:])[0],
    ]
    assert several.tolist() == [each.tolist() for each in single]


def test_features_of_new_users_are_matched_by_label(model, caplog):
    frame = hmf.Ratings.from_coo(["b", "a"], ["i3", "i0"], [4, 5], item_ids=ITEMS.labels)
    labelled = hmf.Features(np.eye(2), names=USERS.names, labels=["a", "b"])
    want = model.recommend_new([{0: 5.0}, {3: 4.0}], N=2, features=np.eye(2))[0]
    assert frame.user_ids.tolist() == ["a", "b"]
    for features in (labelled, hmf.Features(np.eye(2)[::-1], names=USERS.names, labels=["b", "a"])):
        assert model.recommend_new(frame, N=2, features=features)[0].tolist() == want.tolist()
    with caplog.at_level(logging.WARNING, "hybridmf"):
        model.recommend_new(frame, features=hmf.Features(np.eye(2), names=USERS.names, labels=["a", "x"]))
    assert "features has no features of 1 of 2 users" in caplog.text


def test_users_without_a_history_and_no_users(model):
    for nothing in ([], {}, ()):
        ids, _ = model.recommend_new(nothing, N=3, features=np.eye(2)[:1])
        assert ids.tolist() == model.recommend_new({}, N=3, features=np.eye(2)[:1])[0].tolist()
    nobody = sp.csr_array((0, N_ITEMS))
    assert model.transform(nobody, features=np.empty((0, 2))).shape[0] == 0
    for empty in (np.empty((0, 2)), hmf.Features(np.empty((0, 2)), names=USERS.names, labels=[])):
        with pytest.raises(RatingsError, match="features has no rows; expected one for each of 2 users"):
            model.recommend_new([{0: 5.0}, {3: 4.0}], features=empty)


def test_refusals(model, models):
    frame = hmf.Ratings.from_coo(["b", "a"], ["i3", "i0"], [4, 5], item_ids=ITEMS.labels)
    plain = fitted("implicit", {"item_features": ITEMS})
    strangers = hmf.Features(np.eye(2), names=USERS.names, labels=["x", "y"])
    one, two = {0: 1.0}, [{0: 1.0}, {1: 2.0}]
    for each, history, features, error, parts in (
        (plain, one, np.eye(2)[:1], ValueError, ("no features of users", "user_features=")),
        (model, one, np.eye(2), RatingsError, ("has 2 rows; expected one for each of 1 users",)),
        (model, one, np.ones((1, 5)), RatingsError, ("shape (1, 5); expected 2 features",)),
        (model, frame, np.eye(2), RatingsError, ("the rows have user labels and features only",)),
        (model, two, strangers, RatingsError, ("features have user labels",)),
        (model, frame, strangers, UnknownLabelError, ("none of the 2 users, such as 'a'", "'x'")),
        (model, one, {"job": "smith"}, TypeError, ("features is a dict",)),
    ):
        with pytest.raises(error, match=says(*parts)):
            each.recommend_new(history, features=features)


# ------------------------------------------------------------------------------------------------------------- updates


def test_new_items_by_features(models):
    model = pickle.loads(pickle.dumps(models["implicit"]))
    features = hmf.Features([[1, 0, 0, 0.5], [0, 1, 0, 0]], names=ITEMS.names, labels=["new", "newer"])
    model.partial_fit_items(["new", "newer"], sp.csr_array((N_USERS, 2)), labels=True, features=features)
    assert model.item_ids_[-2:].tolist() == ["new", "newer"] and len(model.item_features_) == N_ITEMS + 2
    wanted = features.matrix @ model.item_feature_vectors_
    np.testing.assert_allclose(model.item_factors_[-2:], wanted, rtol=1e-6)
    assert "new" in model.recommend("u0", N=40, labels=True, include_cold=True)[0]
    assert "new" not in model.recommend("u0", N=40, labels=True)[0]
    likes = np.zeros((N_USERS, 1))
    likes[:9] = 1
    model.partial_fit_items(["new"], likes, labels=True)  # which keeps its features, and is no longer cold
    assert "new" in model.recommend("u20", N=40, labels=True)[0]
    assert model.item_features_.matrix[[N_ITEMS]].toarray().tolist() == [[1, 0, 0, 0.5]]
    assert not np.allclose(model.item_factors_[N_ITEMS], wanted[0])
    model.partial_fit_items(["plain"], likes, labels=True)  # without features
    assert model.item_features_.matrix[[N_ITEMS + 2]].nnz == 0


def test_new_users_by_update(model):
    model = pickle.loads(pickle.dumps(model))
    row = hmf.Ratings(RATINGS)[[4]]
    new = hmf.Ratings.from_matrix(row.user_items, user_ids=["copy"], item_ids=RATINGS.item_ids)
    features = hmf.Features(USERS.matrix[[4]], names=USERS.names, labels=["copy"])
    model.partial_fit_users(["copy"], new, labels=True, features=features)
    np.testing.assert_allclose(rows(model, "user")[-1], rows(model, "user")[4], rtol=1e-6, atol=1e-8)
    before = rows(model, "user")[4].copy()
    model.partial_fit_users([4], np.pad(CELLS[[4]], ((0, 0), (0, N_ITEMS - WARM))))
    np.testing.assert_allclose(rows(model, "user")[4], before, rtol=1e-6, atol=1e-8)


# -------------------------------------------------------------------------------------------------------- explanations


@pytest.mark.parametrize("item", [3, WARM + 1])
@pytest.mark.parametrize("user", [2, N_USERS - 1])
def test_explanations_name_features(model, user, item):
    found = model.explain(user, item, N=N_ITEMS)
    assert found.score == pytest.approx(scores(model)[user, item], rel=1e-6)
    whole = found.baseline + found.contributions.sum() + sum(found.user_features.values())
    assert whole == pytest.approx(found.score, rel=1e-6)
    assert set(found.user_features) == {f"job:{JOBS[user % 2]}"}
    row = ITEMS.matrix[[item]].toarray()[0]
    user_row = np.append(model.user_factors_[user], [1.0] * (model.item_bias_ is not None))
    parts = {ITEMS.names[k]: row[k] * (vectors(model, "item")[k] @ user_row) for k in np.flatnonzero(row)}
    assert found.item_features == pytest.approx(parts, rel=1e-5)
    assert list(found.item_features) == sorted(parts, key=parts.get, reverse=True)
    if item >= WARM:  # nothing but features
        rest = 0 if model.item_bias_ is None else model.mean_ + model.user_bias_[user]
        assert sum(parts.values()) + rest == pytest.approx(found.score, rel=1e-5)
    label = model.explain(f"u{user}", f"i{item}", labels=True, N=2)
    assert list(label.item_features) == list(found.item_features)[:2] and len(label) == 4
    assert pickle.loads(pickle.dumps(label)).item_features == label.item_features


def test_explanations_without_features():
    found = hmf.ImplicitALS(2, iterations=2, device="cpu", random_state=0).fit(RATINGS).explain(0, 1)
    score, baseline, ids, contributions = found
    assert found.item_features == {} == found.user_features and len(ids) == len(contributions) and baseline == 0 < score


# --------------------------------------------------------------------------------------------------------------- files


def test_files_carry_features(model, tmp_path):
    path = tmp_path / "m.safetensors"
    model.save(path)
    loaded = hmf.load(path)
    assert loaded.item_features_.names == ITEMS.names and loaded.user_features_.labels.tolist() == USERS.labels.tolist()
    assert (loaded.item_features_.matrix != model.item_features_.matrix).nnz == 0
    np.testing.assert_array_equal(loaded.item_feature_vectors_, model.item_feature_vectors_)
    for call in (
        lambda m: m.recommend([0, N_USERS - 1], N=N_ITEMS, include_cold=True)[0].tolist(),
        lambda m: m.recommend([0], N=N_ITEMS)[0].tolist(),
        lambda m: m.recommend_new({0: 5.0}, N=4, features=np.eye(2)[:1])[1].tolist(),
        lambda m: m.explain(1, WARM).item_features,
        lambda m: m.objective(hmf.Ratings(RATINGS, RATINGS.user_ids, RATINGS.item_ids), unknown="drop"),
    ):
        assert call(loaded) == call(model)
    again = io.BytesIO()
    loaded.save(again)
    assert again.getvalue() == path.read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_carry_features(name, tmp_path):
    options = {"iterations": 6, "dtype": "float32"}
    kind, given = KINDS[name]
    settings = {"factors": 4, "device": "cpu", "random_state": 0} | given | options
    kept = hmf.Checkpoint(tmp_path, include_seen=True)
    half = kind(**settings | {"iterations": 3}).fit(RATINGS, **BOTH, checkpoint=kept)
    loaded = hmf.load(tmp_path / "checkpoint-000003.safetensors")
    assert loaded.item_features_.names == ITEMS.names
    for include in (False, True):
        found = [each.recommend([0, 39], N=30, include_cold=include)[0].tolist() for each in (half, loaded)]
        assert found[0] == found[1]
    resumed = kind(**settings).fit(RATINGS, **BOTH, resume_from=tmp_path)
    whole = kind(**settings).fit(RATINGS, **BOTH)
    np.testing.assert_allclose(resumed.item_factors_, whole.item_factors_, rtol=1e-4, atol=1e-5)


def test_frames_are_encoded_as_in_the_fit(tmp_path):
    pd = pytest.importorskip("pandas")
    films = pd.DataFrame(
        {"item_id": ITEMS.labels, "genre": [GENRES[k % 3] for k in range(N_ITEMS)], "year": np.arange(N_ITEMS)}
    )
    people = pd.DataFrame({"user_id": USERS.labels, "job": [JOBS[k % 2] for k in range(N_USERS)]})
    model = fitted("implicit", {"item_features": films, "user_features": people})
    model.save(tmp_path / "m")
    for each in (model, hmf.load(tmp_path / "m")):
        assert each.transform(sp.csr_array((0, N_ITEMS)), features=people[:0].drop(columns="user_id")).shape == (0, 4)
        with pytest.raises(RatingsError, match="features has no rows; expected one for each of 1 items"):
            each.partial_fit_items(["x"], sp.csr_array((N_USERS, 1)), labels=True, features=films[:0])
        ids = each.recommend_new([0, 1], N=3, features={"job": "smith"})[0]
        assert ids.tolist() == each.recommend_new([0, 1], N=3, features=sp.csr_array([[0, 1]]))[0].tolist()
        new = pd.DataFrame({"item_id": ["x"], "year": [29], "genre": ["war"]})
        each.partial_fit_items(["x"], sp.csr_array((N_USERS, 1)), labels=True, features=new)
        wanted = each.item_features_.encode({"year": 29, "genre": "war"}).matrix @ each.item_feature_vectors_
        np.testing.assert_allclose(each.item_factors_[-1], wanted[0], rtol=1e-6)


def altered(path, change):
    """The file with other tensors, and no checksums."""
    import json

    from safetensors import safe_open

    tensors = safetensors.numpy.load_file(path)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    del metadata["checksums"]
    state = json.loads(metadata["state"])
    change(tensors, state)
    safetensors.numpy.save_file(tensors, path, metadata | {"state": json.dumps(state)})


def put(name, value):
    return lambda tensors, state: tensors.update({name: value(tensors[name])})


DAMAGES = {
    "no vectors": lambda tensors, state: tensors.pop("item_feature_vectors"),
    "no tensors": lambda tensors, state: (
        [tensors.pop(name) for name in list(tensors) if name.startswith("item_feat")] + [tensors.pop("item_cold")]
    ),
    "no coding": lambda tensors, state: state.pop("features"),
    "other names": lambda tensors, state: state["features"]["item"]["coding"]["names"].append("x"),
    "fewer vectors": put("item_feature_vectors", lambda array: array[1:].copy()),
    "other type": put("item_feature_vectors", lambda array: array.astype(np.float32)),
    "no order": put("item_features_indices", lambda array: array[::-1].copy()),
    "fewer values": put("item_features_data", lambda array: array[1:].copy()),
    "not finite": put("item_features_data", lambda array: array * np.float32(np.nan)),
    "cold rows": put("item_cold", lambda array: array + 100),
    "cold order": put("item_cold", lambda array: array[::-1].copy()),
    "weight": lambda tensors, state: state["features"]["item"].update(weight=-1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(models, tmp_path, damage):
    path = tmp_path / "m.safetensors"
    models["implicit"].save(path)
    altered(path, DAMAGES[damage])
    with pytest.raises(ModelFileError):
        hmf.load(path)


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_on_a_gpu_is_served_as_one_on_the_cpu(name, gpu, tmp_path):
    options = {"factors": 6, "iterations": 3, "dtype": "float32"}  # kernels that gpu/test_features.py compiles, too
    on_cpu, on_gpu = fitted(name, **options), fitted(name, device="cuda", **options)
    on_gpu.save(tmp_path / "m")
    for each in (on_gpu, hmf.load(tmp_path / "m")):
        for call in (
            lambda m: m.recommend([0, N_USERS - 1], N=12, include_cold=True)[1],
            lambda m: m.recommend([0, N_USERS - 1], N=12)[1],
            lambda m: m.recommend_new({0: 5.0}, N=6, features=np.eye(2)[:1], include_cold=True)[1],
            lambda m: np.array(list(m.explain(1, WARM).item_features.values())),
        ):
            np.testing.assert_allclose(call(each), call(on_cpu), rtol=5e-3, atol=5e-3)
