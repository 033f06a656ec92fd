"""recommend_new and recalculate_user: users whose factors come from their history."""

from __future__ import annotations

import threading
import time

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import DuplicateEntriesError, RatingsError, UnknownLabelError
from support.messages import says
from support.ratings import planted
from support.served_models import EMPTY_USER, KINDS, N_ITEMS, M, assert_same, fitted, labelled, make, snapshot


def with_labels(kind="implicit", **options):
    return make(kind, **options).fit(labelled())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_row_is_recommended_what_its_user_is(kind):
    model, rows = fitted(kind), planted()
    before = snapshot(model)
    for options in (
        {},
        {"items": np.arange(0, N_ITEMS, 2), "filter_items": [4]},
        {"filter_already_liked_items": False},
    ):
        expected = model.recommend(np.arange(M), N=6, **options)
        for found in (
            model.recommend_new(rows, N=6, **options),
            model.recommend(np.arange(M), rows, N=6, recalculate_user=True, **options),
            model.recommend(np.arange(M) + 1000, rows, N=6, recalculate_user=True, **options),
        ):
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
    assert_same(before, snapshot(model))


def test_a_new_user_is_served_as_one_who_was_added():
    model, row = fitted("implicit"), planted(1, N_ITEMS, density=0.3, seed=4)
    found = model.recommend_new(row, N=7)
    recalculated = model.recommend(M + 5, row, N=7, recalculate_user=True)
    expected = model.partial_fit_users([M], row).recommend(M, N=7)
    for answer in ((found[0][0], found[1][0]), recalculated):
        np.testing.assert_array_equal(answer[0], expected[0])
        np.testing.assert_array_equal(answer[1], expected[1])


def test_histories_by_position_and_by_label():
    model = with_labels()
    row = np.zeros((1, N_ITEMS))
    row[0, [3, 8, 9]] = 1
    ids, scores = (answer[0] for answer in model.recommend_new(row, N=4))
    one = model.recommend_new([3, 8, 9], N=4)
    assert one[0].shape == (4,)
    np.testing.assert_array_equal(one[0], ids)
    names = np.array([f"i{k}" for k in ids], dtype=object)
    for history in (
        ["i3", "i8", "i9"],
        ("i9", "i8", "i3"),
        np.array(["i3", "i8", "i9"]),
        pd.Series(["i3", "i8", "i9"]),
    ):
        found, values = model.recommend_new(history, N=4, labels=True)
        np.testing.assert_array_equal(found, names)
        np.testing.assert_array_equal(values, scores)
    several, _ = model.recommend_new([["i3", "i8", "i9"], {"i1": 2.0}, []], N=4, labels=True)
    assert several.shape == (3, 4)
    np.testing.assert_array_equal(several[0], names)
    popular, counts = model.recommend_new([], N=2, labels=True)
    assert list(counts) == sorted(np.bincount(planted().indices), reverse=True)[:2]
    assert list(popular) == list(several[2][:2]) == list(model.recommend_new([[]], N=2, labels=True)[0][0])
    kept, _ = model.recommend_new(["i3"], N=3, items=["i5", "i6"], filter_items=["i6"], labels=True)
    assert kept.tolist() == ["i5", None, None]


def test_values_of_a_history_count():
    model = with_labels("biases")
    row = np.zeros((1, N_ITEMS))
    row[0, [3, 8]] = [5, 1]
    expected = model.recommend_new(row, N=4)
    found = model.recommend_new({"i3": 5, "i8": 1}, N=4, labels=True)
    np.testing.assert_array_equal(found[0], [f"i{k}" for k in expected[0][0]])
    np.testing.assert_array_equal(found[1], expected[1][0])
    with pytest.raises(RatingsError, match=says("rows are items without ratings", "{item: rating}")):
        model.recommend_new(["i3"], labels=True)


def test_repeated_items_of_implicit_histories_add_up():
    model = with_labels()
    expected = model.recommend_new({"i3": 3.0, "i8": 1.0}, N=4, labels=True)
    for history in (["i3", "i8", "i3", "i3"], np.array(["i3", "i3", "i8", "i3"]), pd.Series(["i8"] + ["i3"] * 3)):
        for found, wanted in zip(model.recommend_new(history, N=4, labels=True), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    several, _ = model.recommend_new([[3, 8, 3, 3], [8, 8]], N=4)
    np.testing.assert_array_equal(several[0], model.recommend_new({3: 3.0, 8: 1.0}, N=4)[0])
    np.testing.assert_array_equal(several[1], model.recommend_new({8: 2.0}, N=4)[0])


def test_repeated_entries_of_implicit_rows_add_up():
    """A matrix of new events is a history, too; held-out entries and the training data stay strict."""
    model, summed = with_labels(), sp.csr_array(planted()[:4])
    twice = sp.coo_array(summed)
    twice = sp.coo_array(
        (np.tile(twice.data / 2, 2), [np.tile(index, 2) for index in twice.coords]), shape=summed.shape
    )
    for call in (
        model.transform,
        model.predict,
        lambda rows: model.recommend_new(rows, N=4)[0],
        lambda rows: model.recommend(range(4), rows, N=4, recalculate_user=True)[0],
        lambda rows: model.recommend(range(4), N=4, filter_items=rows)[0],
    ):
        np.testing.assert_array_equal(call(twice), call(summed))
    for call in (model.objective, lambda rows: hmf.ExplicitALS(factors=2).fit(planted()).transform(rows)):
        with pytest.raises(DuplicateEntriesError, match="more than one entry"):
            call(twice)


def test_items_that_the_model_does_not_have():
    model = with_labels()
    with pytest.raises(UnknownLabelError, match=says("rows: unknown item label 'new'", "such as 'i0'")):
        model.recommend_new(["i3", "new"], labels=True)
    found = model.recommend_new(["i3", "new"], labels=True, unknown="drop")
    np.testing.assert_array_equal(found[0], model.recommend_new(["i3"], labels=True)[0])
    strangers = hmf.Ratings.from_coo(["zoe", "zoe"], ["i3", "new"])
    with pytest.raises(UnknownLabelError):
        model.recommend_new(strangers)
    np.testing.assert_array_equal(model.recommend_new(strangers, labels=True, unknown="drop")[0][0], found[0])


@pytest.mark.parametrize(
    ("rows", "options", "kind", "parts"),
    [
        ("i3", {"labels": True}, TypeError, ("rows must be a matrix, or items of one or several users, got 'i3'",)),
        (["i3"], {}, TypeError, ("rows must be integers",)),
        ([N_ITEMS], {}, ValueError, (f"rows has {N_ITEMS} at position 0",)),
        (np.ones((1, 3)), {}, RatingsError, ("rows has shape (1, 3), expected (n_rows, n_items=40)",)),
        (["i3"], {"items": ["i99"], "labels": True}, UnknownLabelError, ("items: unknown item label 'i99'",)),
        ([3], {"unknown": "skip"}, ValueError, ("unknown must be one of 'error', 'drop'",)),
        ([3], {"labels": 1}, TypeError, ("labels must be True or False",)),
    ],
)
def test_recommend_new_refuses(rows, options, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        with_labels().recommend_new(rows, **options)


def test_recalculate_user_needs_rows_of_these_users():
    model = fitted("implicit")
    with pytest.raises(ValueError, match=says("recalculate_user=True", "pass user_items")):
        model.recommend(0, recalculate_user=True)
    with pytest.raises(ValueError, match=says("userid has 60 at position 0")):
        model.recommend([M, 1], planted(), recalculate_user=True)
    with pytest.raises(ValueError, match=says("userid has -1")):
        model.recommend(-1, planted()[:1], recalculate_user=True)
    cold, _ = model.recommend(EMPTY_USER, planted()[EMPTY_USER : EMPTY_USER + 1], N=3, recalculate_user=True)
    np.testing.assert_array_equal(cold, model.recommend(EMPTY_USER, N=3)[0])


def test_threads_serve_new_users_while_the_model_is_updated():
    """An answer comes from the factors before an update or after it, and nothing of the old ones stays behind."""
    model, row = fitted("implicit"), planted(1, N_ITEMS, density=0.3, seed=4)
    other = planted(M, N_ITEMS, density=0.2, seed=9)
    old = model.recommend_new(row, N=5)[1]
    changed = fitted("implicit").partial_fit_items(np.arange(N_ITEMS), other)
    new = changed.recommend_new(row, N=5)[1]
    assert not np.array_equal(old, new)
    answers, stop = [], threading.Event()

    def serve():
        while not stop.is_set():
            answers.append(model.recommend_new(row, N=5)[1])

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(answers) < 3:
        time.sleep(1e-3)
    model.partial_fit_items(np.arange(N_ITEMS), other)
    seen = len(answers)
    while len(answers) < seen + 5:
        time.sleep(1e-3)
    stop.set()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(answer, old) or np.array_equal(answer, new) for answer in answers)
    np.testing.assert_array_equal(model.recommend_new(row, N=5)[1], new)


@pytest.mark.parametrize("several", [False, True])
def test_a_dense_row_of_integers_is_no_history(several):
    cells = np.zeros((5, 8), dtype=np.int64)
    cells[:, ::3] = [1, 2, 5]
    model = hmf.ImplicitALS(factors=2, iterations=1, random_state=0, device="cpu").fit(cells)
    row = cells[0]
    with pytest.raises(RatingsError, match=r"rows has 8 integers .* 5 of them are 0.*numpy.atleast_2d"):
        model.recommend_new([row.tolist()] * 2 if several else row, N=2)
    model.recommend_new(np.atleast_2d(row), N=2)
    model.recommend_new([0, 1, 2, 3, 4, 5, 6, 7], N=2)


@pytest.mark.parametrize(
    "index", [["i3", "i8"], pd.Index([3, 8], name="item"), [0.5, 1.5]], ids=["names", "named", "floats"]
)
def test_a_series_whose_index_may_name_items_is_refused(index):
    model = hmf.ImplicitALS(2, iterations=1).fit(hmf.Ratings.from_matrix(sp.eye(10, format="csr")))
    with pytest.raises(TypeError, match=r"series\.to_dict\(\)"):
        model.recommend_new(pd.Series([4, 5], index=index), N=2)
    with pytest.raises(TypeError, match=r"series\.to_dict\(\)"):
        model.recommend_new([pd.Series([4, 5], index=index)], N=2)
    filtered = pd.Series([4, 5], index=[17, 3])  # as of rows of a frame
    np.testing.assert_array_equal(model.recommend_new(filtered, N=2)[0], model.recommend_new([4, 5], N=2)[0])
