"""Updates of a fitted model: positions, labels, counts, histories, and factors that are set."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Side
from ..core.sparse import as_ones, keep_entries, replace_rows, take_rows, transposed
from ..core.validate import check_ids, check_memory, make_csr
from ..data.align import IN_ORDER, are_positions, labels_of
from ..data.labels import check_label_types, check_storable_labels, plain_array
from ..errors import UnknownLabelError
from ..plan.start import check_given
from ..plan.types import NONNEGATIVE
from .described import described_rows, replaced_rows, rows_described
from .learned import Learned, count_items, likes_of, pattern
from .ranking import fold_in
from .requests import Unknown, positions_of


def _check_positions(name: str, ids: Any) -> np.ndarray:
    """Positions to update, at least one and none twice; they may lie behind the last."""
    positions = check_ids(name, ids, 2**31 - 1, "2**31 - 1")
    if positions.size == 0:
        raise ValueError(f"{name} is empty; give at least one position")
    values, counts = np.unique(positions, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"{name} has {values[counts > 1][0]} more than once; give each position once")
    return positions


def _named_positions(learned: Learned, side: Side, ids: Any) -> tuple[Any, list[Any] | None]:
    """Positions of labels to update or to add, and these labels; of a model without labels, `ids` and None.

    Unknown labels have the next free positions, in their order.
    """
    known = learned.labels(side)
    if known is None:
        return ids, None
    added = Unknown("drop")
    positions = positions_of(learned, side, "ids", ids, True, added)
    strangers, absent = added.strangers("ids"), positions < 0
    names = np.empty(len(positions), dtype=object)
    names[~absent], names[absent] = known[positions[~absent]], strangers
    positions[absent] = len(known) + np.arange(len(strangers))
    labels = _plain_list(list(names))
    twice = next((label for label, count in Counter(labels).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"ids has {twice!r} more than once; give each label once")
    return positions, labels


def updated_axis(name: str, given: Any, axis: int, positions: np.ndarray, names: np.ndarray | None) -> Any:
    """Labels to align the updated rows (axis 0) or columns (axis 1) with; without labels they keep the order of ids."""
    have = labels_of(given)
    if have is None or have[axis] is None:
        return IN_ORDER
    if names is None:  # `align` raises unless the labels are the positions
        return IN_ORDER if are_positions(have[axis], positions) else None
    wanted = names[positions]
    check_label_types(SIDES[axis], ("the model or of labels", names), (name, have[axis]))
    given_labels = set(have[axis].tolist())
    missing = [label for label in wanted.tolist() if label not in given_labels]
    if missing:
        raise UnknownLabelError(
            f"{name} does not have {len(missing)} of {len(positions)} {SIDES[axis]}s that ids names, such as "
            f"{missing[0]!r}; give entries of each of them, or leave it out of ids"
        )
    return wanted


def _updated_counts(
    learned: Learned, side: Side, positions: np.ndarray, rows: sp.csr_array, seen: sp.csr_array | None
) -> np.ndarray | None:
    """Entries of each item after an update; without `seen`, old entries of replaced users still count."""
    if seen is not None:
        return count_items(seen)
    counts = learned.item_counts
    if counts is None:
        return None
    if side == "user":
        return counts + count_items(take_rows(rows, np.flatnonzero(positions >= len(learned.state.user))))
    grown = np.zeros(max(len(counts), int(positions.max()) + 1), dtype=np.int64)
    grown[: len(counts)] = counts
    grown[positions] = np.diff(rows.indptr)
    return grown


def _updated_likes(
    learned: Learned,
    side: Side,
    positions: np.ndarray,
    rows: sp.csr_array,
    history: sp.csr_array | None,
    counts: np.ndarray | None,
) -> np.ndarray | None:
    """Positive entries of each item after an update to `counts` entries; `history` has the values, if they are known.

    None if all entries are positive.
    """
    if history is not None and history.dtype != np.int8:
        return likes_of([history], counts)
    if counts is None or (learned.item_likes is None and not np.any(rows.data <= 0)):
        return None
    liked = keep_entries(rows, rows.data > 0)
    before = replace(learned, item_counts=learned.popularity)
    likes = _updated_counts(before, side, positions, liked, None)
    return None if likes is None else np.minimum(likes, counts)


def with_factors(learned: Learned, given: dict[Side, tuple[Any, Any]]) -> Learned:
    """The state with other factors and biases of the sides; it keeps those for which None is given."""
    if all(array is None for pair in given.values() for array in pair):
        raise ValueError("set_factors needs user_factors, item_factors, user_bias or item_bias; all of them are None")
    state = learned.state
    for side, (matrix, bias) in given.items():
        known, wanted = state.side(side), f"for the {side}s of this model"
        new, new_bias = known.matrix, known.bias
        if matrix is not None:
            new = check_given(f"{side}_factors", matrix, new.shape, new.dtype, wanted)
            if learned.plan.solver == NONNEGATIVE and new.min(initial=0) < 0:
                raise ValueError(f"{side}_factors has negative elements, and nonnegative=True; clip them at 0")
        if bias is not None:
            if new_bias is None:
                raise ValueError(
                    f"{side}_bias was given, and the model has no biases; leave it out, or fit biases=True"
                )
            new_bias = check_given(f"{side}_bias", bias, new_bias.shape, new_bias.dtype, wanted)
        state = state.with_side(side, Factors(new, new_bias))
    return replace(learned, state=state)


def _extended_labels(side: str, known: Any, positions: np.ndarray, size: int, labels: Any) -> np.ndarray | None:
    """Labels after adding positions up to `size`; each label keeps its type."""
    if known is None:
        if labels is not None:
            raise ValueError(f"labels were given, but this model's {side}s have none (it was fitted on positions)")
        return None
    plain = known.tolist()
    if labels is None:
        if size == len(plain):
            return known
        raise ValueError(
            f"ids adds {side}s up to position {size - 1} and this model's {side}s have labels; pass labels= for them"
        )
    given = _plain_list(labels)
    check_storable_labels("labels", given)
    check_label_types(side, ("the model", known), ("labels", plain_array(given)))
    if len(given) != len(positions):
        raise ValueError(f"labels has {len(given)} elements; expected one for each of {len(positions)} ids")
    missing = sorted(set(range(len(plain), size)) - set(positions.tolist()))
    if missing:
        raise ValueError(f"ids skips position {missing[0]}, which would have no label; add positions without gaps")
    extended = plain + [None] * (size - len(plain))
    for position, label in zip(positions.tolist(), given, strict=True):
        if position < len(plain) and label != plain[position]:
            raise ValueError(
                f"labels says {label!r} for position {position}, whose label is {plain[position]!r}; "
                "labels of known positions cannot change"
            )
        extended[position] = label
    if len(set(extended)) != size:
        raise ValueError("labels repeats a label; each position needs a label of its own")
    return _as_labels(extended, known)


def _plain_list(labels: Any) -> list[Any]:
    """Labels as Python objects; a single value is one label."""
    if hasattr(labels, "__array__"):  # also a Series or an Index of pandas
        return np.atleast_1d(np.asarray(labels)).tolist()
    items = list(labels) if isinstance(labels, (list, tuple, range)) else [labels]
    return [item.item() if isinstance(item, np.generic) else item for item in items]


def _as_labels(labels: list[Any], like: np.ndarray) -> np.ndarray:
    """An array with the kind of dtype of `like` if that changes no label, else with dtype object."""
    kinds = {type(label) for label in labels}
    if like.dtype.kind != "O" and len(kinds) == 1:
        array = np.array(labels)
        if array.ndim == 1 and array.tolist() == labels:
            return array
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _turned(history: sp.csr_array) -> sp.csr_array:
    """The transpose of a pattern, or of one with values."""
    if history.dtype != np.int8:
        return transposed(history)
    return pattern(transposed(as_ones(history, np.float32)))  # the type of kernels


def updated_labels(learned: Learned, side: Side, ids: Any, labels: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions of an update, and the labels of all rows after it."""
    if isinstance(labels, bool):
        ids, labels = _named_positions(learned, side, ids) if labels else (ids, None)
    positions = _check_positions("ids", ids)
    known = learned.state.side(side)
    size = max(len(known), int(positions.max()) + 1)
    check_memory(
        f"ids has {positions.max():,}, and a model of {size:,} {side}s",
        size * (known.matrix.shape[1] * known.matrix.itemsize + 16),
        "positions are counted from 0: is the id a label?",
    )
    return positions, _extended_labels(side, learned.labels(side), positions, size, labels)


def updated(
    learned: Learned, side: Side, positions: np.ndarray, rows: sp.csr_array, names: np.ndarray | None, given: Any = None
) -> Learned:
    """The state with rows folded in and stored at their positions; `given`: features of these rows."""
    known, degrees = learned.state.side(side), np.diff(rows.indptr)
    size = max(len(known), int(positions.max()) + 1)
    new: sp.csr_array | None = None
    if given is not None:
        new = described_rows(learned, side, given, None if names is None else names[positions], len(positions))
    features = replaced_rows(learned, side, positions, size, degrees, new, names)
    described = rows_described(replace(learned, features=features), side, positions)
    factors = known.put(positions, fold_in(learned, side, rows, described), size)
    seen, values, history = learned.seen_matrix(), learned.values, None
    if seen is not None:
        history = seen if values is None else make_csr(seen.indptr, seen.indices, values, seen.shape)
        if side == "user":
            history = replace_rows(history, positions, rows, size)
        else:
            history = _turned(replace_rows(_turned(history), positions, rows, size))
        seen, values = pattern(history), None if values is None else history.data
    counts = _updated_counts(learned, side, positions, rows, seen)
    likes = _updated_likes(learned, side, positions, rows, history, counts)
    changed: dict[str, Any] = {f"{side}_ids": names, "seen": seen, "total": None, "values": values}
    changed |= {"item_counts": counts, "item_likes": likes, "features": features}
    if side == "item" and size > len(known):
        changed["feature_names"] = None  # the new columns have no names
    if learned.value_range is not None:
        low, high = learned.value_range
        changed["value_range"] = float(rows.data.min(initial=low)), float(rows.data.max(initial=high))
    return replace(learned, state=learned.state.with_side(side, factors), **changed)
