"""Updates of users and items of a fitted model."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import validate as _validate
from hybridmf.core.objective import State
from hybridmf.errors import MemoryBudgetError, NotPositiveDefiniteError, RatingsError
from hybridmf.model import updates
from support import reference
from support.messages import says
from support.ratings import planted
from support.served_models import (
    EMPTY_ITEM,
    KINDS,
    N_ITEMS,
    M,
    assert_same,
    fitted,
    labelled,
    make,
    outcome,
    snapshot,
    user_rows,
)

# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("kind", KINDS)
def test_training_rows_as_updates_change_nothing(kind):
    model = fitted(kind)
    before = snapshot(model) | {"bias": model.user_bias_}
    assert model.partial_fit_users(np.arange(M), planted()) is model
    assert_same(before, snapshot(model) | {"bias": model.user_bias_})


@pytest.mark.parametrize("kind", KINDS)
def test_partial_fit_users_replaces_and_extends(kind):
    model = fitted(kind)
    before = model.user_factors_.copy()
    rows = planted(3, N_ITEMS, density=0.5, seed=8)
    model.partial_fit_users([M + 1, 5, M], rows)
    assert model.n_users == len(model.user_factors_) == M + 2
    np.testing.assert_array_equal(user_rows(model)[[M + 1, 5, M]], model.transform(rows))
    untouched = np.delete(np.arange(M), 5)
    np.testing.assert_array_equal(model.user_factors_[untouched], before[untouched])
    ids, _ = model.recommend([M + 1, 5, M], N=N_ITEMS)
    for found, row in zip(ids, rows.toarray(), strict=True):
        shown = np.delete(np.arange(N_ITEMS), EMPTY_ITEM)
        np.testing.assert_array_equal(np.sort(found[found >= 0]), shown[row[shown] == 0])
    if model.user_bias_ is not None:
        assert model.user_bias_.shape == (M + 2,)
    assert np.isfinite(model.predict(M + 1, np.arange(N_ITEMS))).all()


def test_partial_fit_users_leaves_zeros_in_gaps():
    model = fitted("biases").partial_fit_users(M + 2, np.ones((1, N_ITEMS)))
    assert model.n_users == M + 3
    assert not model.user_factors_[M : M + 2].any()
    np.testing.assert_array_equal(model.user_bias_[M : M + 2], 0)
    assert set(model.recommend(M + 2)[0]) == {-1}
    assert set(model.recommend(M, N=N_ITEMS)[0]) == set(range(N_ITEMS)) - {EMPTY_ITEM} | {-1}


@pytest.mark.parametrize("kind", KINDS)
def test_partial_fit_items_replaces_and_extends(kind):
    model = fitted(kind)
    before = model.item_factors_.copy()
    columns = planted(M, 2, density=0.5, seed=9)
    assert model.partial_fit_items([N_ITEMS, 3], columns) is model
    assert model.n_items == model.n_features_in_ == N_ITEMS + 1
    expected = reference.half_sweep(columns.T, model._learned.state.user, model.mean_, model._learned.objective)
    np.testing.assert_allclose(model.item_factors_[[N_ITEMS, 3]], expected.matrix, rtol=2e-3, atol=2e-3)
    untouched = np.delete(np.arange(N_ITEMS), 3)
    np.testing.assert_array_equal(model.item_factors_[untouched], before[untouched])
    seen = planted().toarray() != 0
    seen = np.column_stack((seen, columns.toarray()[:, 0] != 0))
    seen[:, 3] = columns.toarray()[:, 1] != 0
    assert model.cold_items_.nonzero()[0].tolist() == [EMPTY_ITEM, N_ITEMS]  # the first of the columns is empty, too
    seen[:, [EMPTY_ITEM, N_ITEMS]] = True
    ids, _ = model.recommend(np.arange(M), N=N_ITEMS + 1)
    for user in range(M):
        np.testing.assert_array_equal(np.sort(ids[user][ids[user] >= 0]), np.flatnonzero(~seen[user]))
    assert model.transform(sp.csr_array((1, N_ITEMS + 1))).shape == (1, user_rows(model).shape[1])
    with pytest.raises(RatingsError, match=says("(1, 40), expected (n_rows, n_items=41)")):
        model.transform(sp.csr_array((1, N_ITEMS)))


def test_item_factors_of_the_last_half_sweep_fold_back_from_their_columns():
    """Items are solved first, so their columns fold to them for the users they were solved with."""
    states = []
    model = make("explicit64", iterations=2).fit(planted(), callback=lambda m, _: states.append(m._learned.state))
    model._learn(replace(model._learned, state=State(states[0].user, states[1].item)))
    model.partial_fit_items(np.arange(N_ITEMS), planted())
    np.testing.assert_array_equal(model.item_factors_, states[1].item.matrix)


def test_derived_arrays_follow_an_update():
    """Caches of recommend, similar_items and fold-in must not outlive the factors they were made of."""
    model = fitted("implicit")
    for call in (lambda m: m.recommend(0), lambda m: m.similar_items(0), lambda m: m.similar_users(0)):
        call(model)
    model.transform(planted())
    model.partial_fit_items([0, N_ITEMS], planted(M, 2, density=0.6, seed=2))
    model.partial_fit_users([0], planted(1, N_ITEMS + 1, density=0.6, seed=2)[:, :])
    fresh = copy.deepcopy(model)
    assert not fresh._learned.derived
    assert_same(snapshot(fresh), snapshot(model))
    for method in ("similar_items", "similar_users"):
        np.testing.assert_array_equal(getattr(fresh, method)(0)[0], getattr(model, method)(0)[0])


@pytest.mark.parametrize(
    ("method", "ids", "matrix", "kind", "parts"),
    [
        ("users", [], planted()[:0], ValueError, ("ids is empty; give at least one position",)),
        ("users", [1, 2, 1], planted()[:3], ValueError, ("ids has 1 more than once", "each position once")),
        ("users", [-1], planted()[:1], ValueError, ("ids has -1 at position 0",)),
        ("users", [2**31], planted()[:1], ValueError, ("ids has 2147483648 at position 0",)),
        ("users", [1.0], planted()[:1], TypeError, ("ids must be integers", "float64")),
        ("users", True, planted()[:1], TypeError, ("ids must be integers", "bool")),
        ("users", [[1]], planted()[:1], ValueError, ("ids must be one position or a vector",)),
        ("users", [1, 2], planted()[:3], RatingsError, ("rows has shape (3, 40); expected (n_ids=2, n_items=40)",)),
        ("users", [1], planted().T[:1], RatingsError, ("rows has shape (1, 60), expected (n_rows, n_items=40)",)),
        ("users", [1], np.full((1, 40), np.inf), ValueError, ("rows", "infinity")),
        ("users", [1], sp.csr_array(np.full((1, 40), np.nan)), RatingsError, ("rows has the value nan",)),
        ("items", [], planted()[:, :0], ValueError, ("ids is empty",)),
        ("items", [2, 2], planted()[:, :2], ValueError, ("ids has 2 more than once",)),
        ("items", [1, 2], planted()[:, :3], RatingsError, ("cols has shape (60, 3); expected (n_users=60, n_ids=2)",)),
        ("items", [1, 2], planted()[:, :2].T, RatingsError,
         ("cols has shape (2, 60); expected (n_users=60, n_ids=2)", "pass cols.T")),
    ],
)  # fmt: skip
def test_updates_refuse(method, ids, matrix, kind, parts):
    model = fitted()
    before = snapshot(model)
    with pytest.raises(kind, match=says(*parts)):
        getattr(model, f"partial_fit_{method}")(ids, matrix)
    assert_same(before, snapshot(model))


def test_a_failed_fold_in_leaves_the_model_alone():
    dense = np.random.default_rng(0).random((20, 20)) + 0.5
    model = make("explicit64", regularization=0.0).fit(dense)
    before = model.user_factors_.copy()
    with pytest.raises(NotPositiveDefiniteError, match="user 0"):
        model.partial_fit_users([25], sp.csr_array(([1.0], ([0], [0])), shape=(1, 20)))
    with pytest.raises(NotPositiveDefiniteError, match="item 1"):
        model.partial_fit_items([0, 3], sp.csr_array(np.column_stack((dense[:, 0], dense[:, 1] * (dense[:, 1] > 1.4)))))
    np.testing.assert_array_equal(model.user_factors_, before)
    assert (model.n_users, model.n_items, model._learned.seen.shape) == (20, 20, (20, 20))


@pytest.mark.parametrize("method", ["users", "items"])
def test_an_update_is_all_or_nothing(method, monkeypatch):
    model = fitted()
    before = snapshot(model)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(updates, "replace_rows", fail)
    rows = np.ones((1, N_ITEMS)) if method == "users" else np.ones((M, 1))
    with pytest.raises(MemoryError):
        getattr(model, f"partial_fit_{method}")([M if method == "users" else N_ITEMS], rows)
    monkeypatch.undo()
    assert_same(before, snapshot(model))


def test_an_id_that_does_not_fit_in_memory_is_refused(monkeypatch):
    model = fitted()
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 10_000)
    with pytest.raises(MemoryBudgetError, match=r"ids has 100,000.*is the id a label"):
        model.partial_fit_users([100_000], np.ones((1, N_ITEMS)))


def test_updates_keep_labels():
    model = make().fit(labelled())
    model.partial_fit_users([3], planted()[:1])
    assert model.user_ids_.tolist() == [f"u{k}" for k in range(M)]
    model.partial_fit_users([M + 1, 2, M], planted()[:3], labels=["new b", "u2", "new a"])
    assert model.user_ids_.tolist() == [*(f"u{k}" for k in range(M)), "new a", "new b"]
    model.partial_fit_items([N_ITEMS], np.ones((M + 2, 1)), labels=["a much longer label than all the others"])
    assert model.item_ids_[-1] == "a much longer label than all the others"


@pytest.mark.parametrize(
    ("ids", "labels", "parts"),
    [
        ([M], None, ("ids adds users up to position 60", "users have labels; pass labels=")),
        ([M], ["a", "b"], ("labels has 2 elements; expected one for each of 1 ids",)),
        ([M + 1], ["a"], ("ids skips position 60, which would have no label",)),
        ([M], ["u7"], ("labels repeats a label",)),
        ([M, M + 1], ["a", "a"], ("labels repeats a label",)),
    ],
)
def test_label_rules(ids, labels, parts):
    model = make().fit(labelled())
    before = snapshot(model)
    with pytest.raises(ValueError, match=says(*parts)):
        model.partial_fit_users(ids, planted()[: len(ids)], labels=labels)
    assert_same(before, snapshot(model))
    with pytest.raises(ValueError, match=says("labels were given, but this model's items have none")):
        make().fit(planted()).partial_fit_items([N_ITEMS], np.ones((M, 1)), labels=["a"])


@pytest.mark.parametrize(
    ("known", "label"),
    [
        (list(range(100, 100 + M)), 3.7),
        (list(range(100, 100 + M)), "12"),
        ([f"u{k}" for k in range(M)], 5),
        ([7, *(f"u{k}" for k in range(1, M))], 5),
    ],
    ids=["float to int", "text to int", "int to text", "int to mixed"],
)
def test_new_labels_stay_what_they_are(known, label):
    model = make(iterations=1).fit(labelled(users=known))
    found = outcome(lambda: model.partial_fit_users([M], planted()[:1], labels=[label]))
    if isinstance(found, Exception):
        assert "label" in str(found)  # refused by name is fine
        assert "literal" not in str(found)
    else:
        assert model.user_ids_.tolist() == [*known, label]
        assert type(model.user_ids_.tolist()[-1]) is type(label)


@pytest.mark.parametrize("kind", [tuple, pd.Series, pd.Index, np.array])
def test_new_labels_in_any_sequence(kind):
    model = make(iterations=1).fit(labelled()).partial_fit_users([M, M + 1], planted()[:2], labels=kind(["x", "y"]))
    assert model.user_ids_[M:].tolist() == ["x", "y"]


def test_labels_that_contradict_known_ones_are_refused():
    with pytest.raises(ValueError, match="label"):
        make(iterations=1).fit(labelled()).partial_fit_users([3], planted()[:1], labels=["somebody else"])


def test_updates_by_label():
    """Known labels are updated, new ones appended in their order, whatever the order of the rows' own labels."""
    rows = planted(9, N_ITEMS, density=0.5, seed=8)[:4]  # none is empty
    model = make().fit(labelled()).partial_fit_users(["newbie", "u5", "abe", "u2"], rows, labels=True)
    expected = make().fit(labelled()).partial_fit_users([M, 5, M + 1, 2], rows, labels=["newbie", "u5", "abe", "u2"])
    assert_same(snapshot(model), snapshot(expected))
    assert model.user_ids_.tolist() == [*(f"u{k}" for k in range(M)), "newbie", "abe"]
    named = labelled(rows[[2, 0, 3, 1]], ["abe", "newbie", "u2", "u5"])
    for given in (named, pd.DataFrame({
        "user": named.user_ids[named.user_items.tocoo().row], "item": named.item_ids[named.user_items.indices],
        "rating": named.user_items.data,
    })):  # fmt: skip
        again = make().fit(labelled()).partial_fit_users(pd.Series(["newbie", "u5", "abe", "u2"]), given, labels=True)
        np.testing.assert_array_equal(again.user_factors_, model.user_factors_)
    one = make().fit(labelled()).partial_fit_users("zoe", rows[:1], labels=True)
    assert one.user_ids_[-1] == "zoe" and one.n_users == M + 1
    items = make().fit(labelled()).partial_fit_items(["i3", "new"], planted(M, 2, seed=3), labels=True)
    assert_same(
        snapshot(items),
        snapshot(make().fit(labelled()).partial_fit_items([3, N_ITEMS], planted(M, 2, seed=3), labels=["i3", "new"])),
    )
    by_position = make().fit(planted()).partial_fit_users([5, M], rows[:2], labels=True)
    assert_same(snapshot(by_position), snapshot(make().fit(planted()).partial_fit_users([5, M], rows[:2])))
    numbers = make().fit(labelled(users=range(100, 100 + M))).partial_fit_users([105, 7], rows[:2], labels=True)
    assert numbers.user_ids_.tolist() == [*range(100, 100 + M), 7] and numbers.user_ids_.dtype.kind == "i"


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        (["u5", "zoe", "zoe"], ("ids has 'zoe' more than once",)),
        (["u5", "u5"], ("ids has 'u5' more than once",)),
        ([], ("ids is empty",)),
        ([5], ("in the model", "in ids", "one type")),
        (["zoe", None], ("NoneType",)),
    ],
)
def test_updates_by_label_refuse(ids, parts):
    model = make().fit(labelled())
    before = snapshot(model)
    with pytest.raises((ValueError, TypeError), match=says(*parts)):
        model.partial_fit_users(ids, planted()[: len(ids)], labels=True)
    assert_same(before, snapshot(model))


def test_feature_names_follow_added_items():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    model = make(iterations=1).fit(frame).partial_fit_items([N_ITEMS], np.ones((M, 1)), labels=["new"])
    assert len(getattr(model, "feature_names_in_", range(N_ITEMS + 1))) == model.n_features_in_


# ----------------------------------------------------------------------------------------------------- large matrices


def test_everything_works_with_64_bit_pointers(monkeypatch, tmp_path):
    """Beyond 2^31 entries indptr is int64 and indices stay int32; a low limit shows it on a small matrix."""
    plain = {kind: fitted(kind) for kind in ("explicit", "implicit")}
    monkeypatch.setattr(_validate, "INT32_LIMIT", 100)
    for kind, expected in plain.items():
        model = make(kind).fit(planted())
        assert model._learned.seen.indptr.dtype == np.int64
        model._learn(replace(model._learned, plan=expected.plan_))  # its bytes count the wider pointers
        assert_same(snapshot(expected), snapshot(model))
        assert model.score(planted()[:50]) == expected.score(planted()[:50])
        assert model.objective(planted()) == expected.objective(planted())
        model.save(tmp_path / "model")
        loaded = hmf.load(tmp_path / "model")
        np.testing.assert_array_equal(loaded.recommend([1, 2])[0], expected.recommend([1, 2])[0])
        loaded.partial_fit_items([0], planted()[:, :1]).recommend([1, 2])


@pytest.mark.parametrize(
    "use",
    [lambda m: m.recommend([1, 2], planted()), lambda m: m.partial_fit_users([0], planted()[:1]).recommend([1, 2])],
    ids=["user_items", "partial_fit_users"],
)
def test_64_bit_pointers_in_user_items_and_updates(monkeypatch, use):
    expected = use(fitted())
    monkeypatch.setattr(_validate, "INT32_LIMIT", 100)
    np.testing.assert_array_equal(use(make().fit(planted()))[0], expected[0])
