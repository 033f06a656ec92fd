"""Each call uses one state of the model as a whole, and updates follow one another.

`swapping` gives a model another state at each read, which is what a second thread does at the worst moments.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import threading
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.ann import AnnIndex
from hybridmf.model import updates
from support.messages import says
from support.ratings import planted
from support.served_models import N_ITEMS, M, fitted, labelled, make, outcome

ROWS = planted(7, N_ITEMS, seed=5)
FEWER = 31  # items of the smaller state
NAMES = [f"i{k}" for k in range(N_ITEMS)]


def of_names(n_users: int, n_items: int, shift: int, seed: int) -> hmf.Ratings:
    """Ratings whose labels are those of every other call, at other positions."""
    users = [f"u{(k + shift) % n_users}" for k in range(n_users)]
    items = [f"i{(k + shift) % n_items}" for k in range(n_items)]
    return labelled(planted(n_users, n_items, seed=seed), users, items)


@functools.cache
def states(kind: str, smaller: bool):
    """Two fitted models, to be copied; the second has other factors and labels, or also another shape and rank."""
    one = make(kind).fit(of_names(M, N_ITEMS, 0, 0))
    if smaller:
        return one, make(kind, factors=3, iterations=2).fit(of_names(20, FEWER, 5, 1))
    return one, make(kind, iterations=2).fit(of_names(M, N_ITEMS, 5, 1))


def swapping(model, *learned):
    """A copy of a model that has the next one of these states, in turn, at each read of its state."""

    def read(self):
        waiting = vars(self)["_states"]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    content = {
        "_learned": property(read, lambda self, learned: vars(self).update(_states=[learned])),
        "__sklearn_is_fitted__": lambda self: True,
    }
    kind = type(model)
    swaps = type(kind.__name__, (kind,), content)
    twin = swaps(**model.get_params())
    vars(twin).update({name: value for name, value in vars(model).items() if name != "_learned"})
    vars(twin)["_states"] = list(learned) * 50
    return twin


def saved(model) -> dict:
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    return of_state(hmf.load(file))


def of_state(model) -> dict:
    learned = model._learned
    parts = [learned.state.side(side).matrix for side in ("user", "item")]
    seen = learned.seen_matrix()
    return {
        "factors": parts, "labels": (learned.user_ids, learned.item_ids), "seen": (seen.indptr, seen.indices),
        "values": learned.values, "counts": learned.item_counts, "iterations": (learned.n_iter, learned.history),
    }  # fmt: skip


def after(update) -> dict:
    return of_state(update)


def columns(frame) -> dict:
    return {name: frame[name].tolist() for name in frame.columns}


class Held:
    """A model for the call of an index, which has been made before."""

    def __init__(self, model) -> None:
        self.model = model

    def _fitted(self):
        """The state that the call meets first."""
        return vars(self.model).get("_states", [vars(self.model).get("_learned")])[0]

    def export_items(self, labels: bool):
        return None, np.arange(FEWER)

    def _holding(self):
        return self.model._holding()


def everything(queries, k):
    """A search that finds all places, and the sum of the query."""
    return np.tile(np.arange(k), (len(queries), 1)), np.tile(queries.sum(axis=1, keepdims=True), k)


LABELLED_ROWS = labelled(ROWS, users=[f"new {k}" for k in range(7)])
LABELLED_FEWER = labelled(ROWS[:, :FEWER], users=[f"new {k}" for k in range(7)])
PLAIN = ("user_factors_", "item_factors_", "user_factors", "item_factors", "user_bias_", "item_bias_", "mean_",
         "plan_", "device_", "user_ids_", "item_ids_", "user_ids", "item_ids", "cold_users_", "cold_items_",
         "item_counts_", "n_users", "n_items", "n_iter_", "history_",
         "user_features_", "item_features_", "user_feature_vectors_", "item_feature_vectors_",
         "regularization_", "regularization_scaling_")  # fmt: skip
METHODS = {
    "user_index": [lambda m: m.user_index(["u1", "u7"])],
    "item_index": [lambda m: m.item_index(["i1", "i7"])],
    "recommend": [
        lambda m: m.recommend([0, 3, 19], N=6),
        lambda m: m.recommend(["u1", "u7"], labels=True, filter_items=["i2"], items=NAMES[:20]),
        lambda m: m.recommend(np.arange(7), LABELLED_ROWS.user_items, recalculate_user=True),
        lambda m: m.recommend([0, 1], items=[[1, 2, 3], [4, 30]]),
    ],
    "recommend_table": [lambda m: columns(m.recommend_table(["u1", "u2"], N=4, backend="pandas"))],
    "recommend_all": [lambda m: columns(m.recommend_all(N=4, backend="pandas"))],
    "recommend_new": [
        lambda m: m.recommend_new({"i1": 4.0, "i9": 2.0}, labels=True),
        lambda m: m.recommend_new(ROWS),
        lambda m: m.recommend_new(LABELLED_ROWS, unknown="drop"),
        lambda m: m.recommend_new(ROWS.toarray()),
    ],
    "similar_items": [lambda m: m.similar_items([1, 30]), lambda m: m.similar_items("i3", labels=True)],
    "similar_users": [lambda m: m.similar_users([1, 19], filter_users=[4])],
    "explain": [lambda m: m.explain("u1", "i9", labels=True), lambda m: m.explain(3, 7)],
    "to_torch": [lambda m: m.to_torch()],
    "export_items": [lambda m: m.export_items()],
    "export_users": [lambda m: m.export_users(), lambda m: m.export_users([1, 19])],
    "predict": [
        lambda m: m.predict([0, 19, 3], [30, 7, 1]),
        lambda m: m.predict(59, 39),
        lambda m: m.predict(ROWS),
        lambda m: m.predict(ROWS[:, :FEWER]),
    ],
    "transform": [
        lambda m: m.transform(ROWS), lambda m: m.transform(ROWS[:, :FEWER].toarray()),
        lambda m: m.transform(LABELLED_ROWS), lambda m: m.transform(LABELLED_FEWER),
    ],
    "objective": [lambda m: m.objective(planted()), lambda m: m.objective(planted(20, FEWER, seed=1))],
    "score": [
        lambda m: m.score(ROWS), lambda m: m.score(ROWS[:, :FEWER]), lambda m: m.score(planted(seed=3)),
        lambda m: m.score(of_names(20, FEWER, 5, 1), users="training"),
    ],
    "partial_fit_users": [
        lambda m: after(m.partial_fit_users([2, M], ROWS[:2], labels=["u2", "new"])),
        lambda m: after(m.partial_fit_users([2, 3], ROWS[:2])),
        lambda m: after(m.partial_fit_users([20], ROWS[:1, :FEWER], labels=["new"])),
    ],
    "partial_fit_items": [
        lambda m: after(m.partial_fit_items([3, 4], planted()[:, :2])),
        lambda m: after(m.partial_fit_items([FEWER], planted()[:20, :1], labels=["new"])),
    ],
    "set_factors": [
        lambda m: after(m.set_factors(np.ones((M, 4)))), lambda m: after(m.set_factors(None, np.ones((FEWER, 3)))),
    ],
    "save": [saved],
    "get_feature_names_out": [lambda m: m.get_feature_names_out()],
}  # fmt: skip
FUNCTIONS = {
    "evaluate": [
        lambda m: hmf.evaluate(m, planted(seed=3), metrics=("ndcg@5", "map@5"), block_users=7),
        lambda m: hmf.evaluate(m, planted(20, FEWER, seed=3), metrics=("ndcg@5", "map@5"), block_users=7),
    ],
    "transform to a frame": [
        lambda m, rows=rows: columns(m.set_output(transform="pandas").transform(rows))
        for rows in (ROWS, ROWS[:, :FEWER])
    ],
    "AnnIndex": [lambda m: AnnIndex(Held(m), everything).recommend([0, 3, 19], N=3)],
    "init": [
        lambda m: make("biases", init=m, iterations=1).fit(of_names(M, N_ITEMS, 0, 3)).user_factors,
        lambda m: make("biases", init=m, iterations=1, factors=3).fit(of_names(M, N_ITEMS, 0, 3)).user_factors,
    ],
}
CALLS = {name: [lambda m, name=name: getattr(m, name)] for name in PLAIN} | METHODS | FUNCTIONS
NO_STATE = {"fit", "fit_transform", "get_params", "set_params", "set_output"}
IMPLICIT_ONLY = {"alpha_", "unobserved_weight_"}  # read as `regularization_` is


def test_the_calls_below_are_all_public_methods_and_properties():
    public = {name for name in dir(hmf.ImplicitALS) if not name.startswith("_")} - hmf.ImplicitALS._defaults().keys()
    assert public - NO_STATE - IMPLICIT_ONLY == set(PLAIN) | set(METHODS)


def told(call, model):
    found = outcome(lambda: call(model))
    return (type(found), str(found)) if isinstance(found, Exception) else found


@pytest.mark.parametrize(("kind", "smaller"), [("biases", False), ("biases", True), ("implicit", True)])
@pytest.mark.parametrize("names", [PLAIN, *([name] for name in (*METHODS, *FUNCTIONS))], ids=lambda names: names[0])
def test_each_call_answers_from_one_state(names, kind, smaller, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_dlpack=np.from_dlpack))
    one, other = copy.deepcopy(states(kind, smaller))
    for name, (first, second) in product(names, ((one, other), (other, one))):
        answered = 0
        for call in CALLS[name]:
            want = told(call, copy.deepcopy(first))
            found = told(call, swapping(first, first._learned, second._learned))
            np.testing.assert_equal(found, want)
            answered += not (isinstance(want, tuple) and isinstance(want[0], type))
        assert answered


@pytest.mark.parametrize("shape", [(M, N_ITEMS), (M, FEWER)])
def test_names_of_columns_belong_to_the_state(shape):
    pd = pytest.importorskip("pandas")
    frames = [
        pd.DataFrame(matrix.toarray(), columns=[f"{letter}{k}" for k in range(matrix.shape[1])])
        for matrix, letter in ((planted(), "a"), (planted(*shape, seed=1), "b"))
    ]
    one, other = (make("implicit").fit(frame) for frame in frames)
    want = one.transform(frames[0])
    model = swapping(other, one._learned, other._learned)  # whose attributes are of the later fit
    np.testing.assert_array_equal(model.transform(frames[0]), want)


# ------------------------------------------------------------------------------------------------------------- writers


def test_no_update_of_several_threads_is_lost(monkeypatch):
    model, row = fitted("implicit"), sp.csr_array(ROWS[:1])
    fold_in = updates.fold_in
    monkeypatch.setattr(updates, "fold_in", lambda *given: (time.sleep(0.005), fold_in(*given))[1])

    def update(k: int) -> None:
        for j in range(5):
            model.partial_fit_users([5 * k + j], row)
            model.partial_fit_items([5 * k + j], planted(M + k * 0, 1, seed=2))

    threads = [threading.Thread(target=update, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = model._learned.seen_matrix()
    column = planted(M, 1, seed=2).toarray()[:, 0] != 0
    for j in range(20):
        others = np.arange(20, N_ITEMS)
        np.testing.assert_array_equal(seen[[j]].toarray()[0, others] != 0, row.toarray()[0, others] != 0)
        assert np.array_equal(seen[:, [j]].toarray()[20:, 0] != 0, column[20:])


def test_a_fit_is_not_undone_by_an_update_that_began_before_it(monkeypatch):
    model, go, fold_in = fitted("implicit"), threading.Event(), updates.fold_in
    began = threading.Event()

    def slow(*given):
        began.set()
        assert go.wait(30)
        return fold_in(*given)

    monkeypatch.setattr(updates, "fold_in", slow)
    update = threading.Thread(target=model.partial_fit_users, args=([0], ROWS[:1]))
    update.start()
    assert began.wait(30)
    fit = threading.Thread(target=model.fit, args=(planted(20, FEWER),))
    fit.start()
    fit.join(1)
    go.set()
    update.join()
    fit.join()
    assert (model.n_users, model.n_items) == (20, FEWER)


def test_copies_have_a_lock_of_their_own():
    model = fitted("implicit")
    with model._lock:
        for twin in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            thread = threading.Thread(target=twin.partial_fit_users, args=([0], ROWS[:1]), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
    assert "_lock" not in vars(model)


# --------------------------------------------------------------------------------------------------------- set_factors


ARRAYS = (
    "user_factors_", "item_factors_", "user_factors", "item_factors", "user_bias_", "item_bias_", "item_counts_",
    "user_ids_", "item_ids_",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["biases", "biases64"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_model_are_read_only(name, kind):
    model = make(kind).fit(labelled())
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    for each in (model, hmf.load(file)):
        with pytest.raises(ValueError, match="read-only"):
            getattr(each, name)[0] = 1


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit"])
def test_set_factors_reaches_every_call(kind):
    model = fitted(kind)
    model.recommend(0), model.similar_items(0), model.transform(ROWS)  # packed items, cosines, sums
    before, rng = model.user_factors_, np.random.default_rng(0)
    items = rng.random(model.item_factors_.shape)
    assert model.set_factors(item_factors=items) is model
    np.testing.assert_array_equal(model.item_factors, items.astype(np.float32))
    np.testing.assert_array_equal(model.user_factors_, before)
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    again = hmf.load(file)  # has nothing that was made of the old factors
    for call in (
        lambda m: m.recommend(3, N=5), lambda m: m.similar_items(4), lambda m: m.transform(ROWS),
        lambda m: m.predict(3, 4), lambda m: m.export_items(),
    ):  # fmt: skip
        np.testing.assert_equal(call(model), call(again))
    items[:] = 0
    assert model.item_factors.any()  # a copy


def test_set_factors_sets_biases_and_keeps_the_rest():
    model = fitted("biases")
    before = model.item_bias_
    model.set_factors(user_bias=np.full(M, 2))
    assert model.user_bias_.tolist() == [2] * M and model.user_bias_.dtype == np.float32
    np.testing.assert_array_equal(model.item_bias_, before)


@pytest.mark.parametrize(
    ("kind", "given", "error", "parts"),
    [
        ("explicit", {}, ValueError, ("set_factors needs user_factors, item_factors, user_bias or item_bias",)),
        ("explicit", {"user_factors": np.ones((3, 4))}, ValueError, ("user_factors has shape (3, 4), expected (60, 4)",
                                                                      "for the users of this model")),
        ("explicit", {"item_bias": np.ones(N_ITEMS)}, ValueError, ("item_bias was given", "has no biases")),
        ("biases", {"item_bias": np.ones(3)}, ValueError, ("item_bias has shape (3,), expected (40,)",)),
        ("implicit", {"item_factors": np.full((N_ITEMS, 4), np.nan)}, ValueError, ("item_factors has the value nan",)),
        ("implicit", {"item_factors": [["x"] * 4] * N_ITEMS}, TypeError, ("item_factors must be an array of real",)),
    ],
)  # fmt: skip
def test_set_factors_refuses(kind, given, error, parts):
    model = fitted(kind)
    before = model._learned
    with pytest.raises(error, match=says(*parts)):
        model.set_factors(**given)
    assert model._learned is before


def test_set_factors_of_a_nonnegative_model_are_not_negative():
    model = fitted("implicit", nonnegative=True)
    with pytest.raises(ValueError, match=says("item_factors has negative elements", "clip them at 0")):
        model.set_factors(item_factors=-np.ones((N_ITEMS, 4)))
