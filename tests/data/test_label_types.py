"""Labels of different types never meet by themselves: "101" and 101, or 17850.0 and 17850."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.data.labels import check_label_types, look_up
from hybridmf.errors import RatingsError, UnknownLabelError
from support.ratings import planted

SMALL = {"factors": 2, "iterations": 1, "random_state": 0, "device": "cpu", "num_threads": 1}
NUMBERS = [101, 102, 103]
KINDS = {"int": NUMBERS, "float": [101.0, 102.0, 103.0], "str": ["101", "102", "103"]}
CELLS = np.array([[1.0, 2, 0], [0, 1, 3], [2, 0, 1]])
HELD_OUT = np.where(CELLS == 0, 2.0, 0)


def ratings(kind: str, side: str = "user", cells=CELLS) -> hmf.Ratings:
    other = "item" if side == "user" else "user"
    return hmf.Ratings.from_matrix(cells, **{f"{side}_ids": KINDS[kind], f"{other}_ids": list("abc")})


def fitted(kind: str, side: str):
    return hmf.ImplicitALS(**SMALL).fit(ratings(kind, side))


USES = {
    "concat": lambda a, b, side: hmf.Ratings.concat([ratings(a, side), ratings(b, side)], duplicates="sum"),
    "init": lambda a, b, side: hmf.ImplicitALS(**SMALL, init=fitted(a, side)).fit(ratings(b, side)),
    "weights": lambda a, b, side: hmf.ImplicitALS(**SMALL).fit(ratings(a, side), weights=ratings(b, side)),
    "validation": lambda a, b, side: hmf.ImplicitALS(**SMALL).fit(
        ratings(a, side), validation=ratings(b, side, HELD_OUT), unknown="drop"
    ),
    "evaluate": lambda a, b, side: hmf.evaluate(fitted(a, side), ratings(b, side, HELD_OUT), unknown="drop"),
    "recommend": lambda a, b, side: fitted(a, side).recommend([0], ratings(b, side)),
    "partial_fit_users": lambda a, b, side: fitted(a, side).partial_fit_users([0, 1, 2], ratings(b, side)),
    "partial_fit_items": lambda a, b, side: fitted(a, side).partial_fit_items([0, 1, 2], ratings(b, side)),
    "objective": lambda a, b, side: fitted(a, side).objective(ratings(b, side)),
}


@pytest.mark.parametrize(
    ("first", "second", "use", "side"),
    [
        *(("int", "str", use, side) for use in USES for side in ("user", "item")),
        # which types meet is decided in one place, whatever asks
        *(
            (*pair, use, side)
            for pair in (("str", "int"), ("int", "float"), ("float", "str"))
            for use, side in (("concat", "user"), ("evaluate", "item"), ("recommend", "user"))
        ),
    ],
)
def test_labels_of_different_types_are_refused(first, second, use, side):
    USES[use](first, first, side)
    names = {"int": "int64", "float": "float64", "str": "str"}
    with pytest.raises(RatingsError) as caught:
        USES[use](first, second, side)
    found = re.match(rf"{side}s are of type (\w+) in .* and of type (\w+) in ", str(caught.value))
    assert found is not None, str(caught.value)
    assert sorted(found.groups()) == sorted((names[first], names[second]))


@pytest.mark.parametrize(("first", "second"), [("int", "str"), ("str", "int"), ("int", "float")])
def test_the_conversion_that_the_message_names_works(first, second):
    parts = [ratings(first), ratings(second)]
    with pytest.raises(RatingsError) as caught:
        hmf.Ratings.concat(parts, duplicates="sum")
    call = re.search(r"convert those of part (\d): Ratings\(ratings, user_ids=ratings.user_ids.astype\((\w+)\)\)", str(
        caught.value))  # fmt: skip
    assert call is not None
    k, target = int(call[1]), {"int": int, "float": float, "str": str}[call[2]]
    parts[k] = hmf.Ratings(parts[k], user_ids=parts[k].user_ids.astype(target))
    assert hmf.Ratings.concat(parts, duplicates="sum").n_users == 3


def test_the_conversion_fits_the_labels():
    numbers, guests = np.array([1, 2]), np.array(["1", "guest-7"])
    with pytest.raises(RatingsError, match=r"convert those of the log: .*astype\(str\)"):
        check_label_types("user", ("the log", numbers), ("the new log", guests))
    with pytest.raises(RatingsError, match="write them with one type"):
        check_label_types("user", ("a", np.array([1.5])), ("b", np.array(["x"])))


def test_a_frame_goes_by_the_same_rule():
    pd = pytest.importorskip("pandas")
    model = hmf.ImplicitALS(**SMALL).fit(pd.DataFrame(CELLS, index=NUMBERS, columns=list("abc")))
    with pytest.raises(RatingsError, match="of type int64 in the model and of type str in test"):
        hmf.evaluate(model, pd.DataFrame(CELLS, index=list(map(str, NUMBERS)), columns=list("abc")))


@pytest.mark.parametrize(
    ("labels", "others"),
    [
        ([1, 2], [2, "guest"]), (["guest", "x"], [2, "guest"]), ([1, "x"], [1, "x"]),
        (np.array([1], np.int8), np.array([1], np.uint64)), (["a" * 300, "b"], ["a"]), ([], ["a"]),
    ],
)  # fmt: skip
def test_labels_of_common_types_meet(labels, others):
    arrays = [np.array(each, dtype=None if isinstance(each, np.ndarray) else object) for each in (labels, others)]
    check_label_types("user", ("a", arrays[0]), ("b", None), ("c", arrays[1]))


@pytest.mark.parametrize(
    ("labels", "others"),
    [(["1", "x"], [1, "x"]), ([1, "x"], ["1"]), ([True], [1]), ([1.0, "x"], [1, "x"]), ([b"a"], ["a"])],
)
def test_mixed_labels_meet_unless_a_text_has_two_types(labels, others):
    arrays = [np.fromiter(each, dtype=object, count=len(each)) for each in (labels, others)]
    with pytest.raises(RatingsError, match=r"users are of type \w+ in a and of type \w+ in b"):
        check_label_types("user", ("a", arrays[0]), ("b", arrays[1]))


@given(st.sampled_from(list(KINDS)), st.sampled_from(list(KINDS)), st.integers(0, 2), st.booleans())
def test_requests_find_labels_of_their_type_only(have, asked, place, vector):
    ids = np.array(KINDS[have])
    table = {label: k for k, label in enumerate(ids.tolist())}
    label = KINDS[asked][place]
    given = [label] if vector else label
    if have == asked:
        assert np.all(look_up("user", given, ids, table, 3) == place)
    else:
        with pytest.raises(UnknownLabelError, match="unknown user label"):
            look_up("user", given, ids, table, 3)


@pytest.mark.parametrize("number", [101, np.int32(101), np.uint64(101)])
def test_classes_of_one_type_are_the_same(number):
    found = ratings("int")
    assert found.user_index(number) == 0
    assert found.user_index(np.array([number])).tolist() == found.user_index([number]).tolist() == [0]


def test_new_labels_have_the_type_of_the_known_ones():
    model = hmf.ImplicitALS(**SMALL).fit(ratings("int"))
    for new in ("104", 104.0):
        with pytest.raises(RatingsError, match=r"users are of type int64 in the model and of type (str|float64) in"):
            model.partial_fit_users([3], CELLS[:1], labels=[new])
    model.partial_fit_users([3], CELLS[:1], labels=[104])
    assert model.user_ids_.tolist() == [*NUMBERS, 104]


def test_without_labels_nothing_is_compared():
    plain = hmf.Ratings(planted(4, 3, 0.9))
    assert hmf.Ratings.concat([plain, plain], duplicates="sum").user_ids is None


@pytest.mark.parametrize("ids", [[2**63 + 1, 2**63, 5], [2**53 + 1, 2**53, 1.5], [-(2**53) - 1, 0.5, -(2**53)]])
def test_integers_in_lists_that_floating_point_numbers_merge_stay_apart(ids):
    made = hmf.Ratings.from_matrix(CELLS, user_ids=ids)
    assert made.user_ids.tolist() == ids
    assert [made.user_index(label) for label in ids] == [0, 1, 2]


def test_labels_in_arrays_of_objects_are_saved_like_those_in_lists(tmp_path):
    for ids in (NUMBERS, list("uvw")):
        made = hmf.Ratings.from_matrix(CELLS, user_ids=np.array(ids, dtype=object))
        made.save(tmp_path / "r.npz")
        assert hmf.Ratings.from_file(tmp_path / "r.npz").user_ids.tolist() == made.user_ids.tolist() == ids
    mixed = hmf.Ratings.from_matrix(CELLS, user_ids=[1, "1", 2])
    with pytest.raises(TypeError, match=r"user_ids has labels of type int, str; .*str\(label\)"):
        mixed.save(tmp_path / "r.npz")


@pytest.mark.parametrize(
    ("argument", "way_out"), [("userid", "numpy.asarray(userid).astype(str)"), ("items", "asarray")]
)
def test_the_conversion_of_a_request_is_one_of_ids(argument, way_out):
    model = hmf.ImplicitALS(**SMALL).fit(hmf.Ratings.from_matrix(CELLS, user_ids=list("uvw"), item_ids=list("abc")))
    arguments = {"userid": "u"} | {argument: [1, 2]}
    with pytest.raises(RatingsError, match=re.escape(way_out)):
        model.recommend(**arguments, labels=True, unknown="drop")


def test_the_conversion_of_features_is_one_of_features():
    made = hmf.Ratings.from_matrix(CELLS, item_ids=list("123"))
    with pytest.raises(RatingsError, match=r"column.astype\(str\) of a frame, or Features"):
        hmf.ImplicitALS(**SMALL).fit(made, item_features=hmf.Features(np.eye(3), labels=[1, 2, 3]))


def test_arrays_with_words_for_missing_ids_are_reported(caplog):
    made = hmf.Ratings.from_coo(np.array(["nan", "u", "None"]), [0, 1, 2])
    assert made.n_users == 3
    assert [
        m for m in caplog.messages if m.startswith("users has the ids 'None', 'nan', which often stand for missing")
    ]
    caplog.clear()
    hmf.Ratings.from_coo(["u", "v"], ["NA", "x"], item_ids=["NA", "x"])  # given as a label
    assert not caplog.messages


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("text", "remedy"), [("101.0", "float).astype(int"), ("101.5", "str"), ("nan", "str")])
def test_whole_numbers_with_a_point_become_integers(text, remedy):
    """As text, 101 and 101.0 would not meet either."""
    parts = [hmf.Ratings(CELLS, ids) for ids in (NUMBERS, [text, "102.0", "103.0"])]
    with pytest.raises(RatingsError) as caught:
        hmf.Ratings.concat(parts)
    assert f".user_ids.astype({remedy}))" in str(caught.value)


def test_sets_have_no_order():
    with pytest.raises(TypeError, match="users is a set, which has no order"):
        hmf.Ratings.from_coo({"a", "b"}, [0, 1])
    model = fitted("int", "item")
    with pytest.raises(TypeError, match="labels is a set, which has no order"):
        model.item_index({101, 102})
    some = [model.recommend("a", N=1, labels=True, items=ids)[0].tolist() for ids in ({101, 102, 103}, NUMBERS)]
    assert some[0] == some[1]


def test_ids_that_are_no_vector_name_their_argument():
    with pytest.raises(RatingsError, match="itemid: labels must be one-dimensional, got shape"):
        fitted("int", "item").similar_items(np.array([[101]]), labels=True)
