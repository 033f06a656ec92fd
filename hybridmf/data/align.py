"""Map labelled ratings to the positions of a model, or of other ratings.

A plain matrix already uses positions. Labelled `Ratings` are matched by label. If only one of the two has labels, equal
positions may mean different users or items, which is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Side
from ..core.sparse import entry_rows
from ..core.validate import check_choice, from_triplets
from ..errors import RatingsError, UnknownLabelError
from ..ratings import Ratings
from .labels import check_label_types, places_among, some
from .store import Store

logger = logging.getLogger("hybridmf")

UNKNOWN = ("error", "drop")  # values of ``unknown=``
IN_ORDER: Any = object()  # takes the place of an axis's labels if its rows or columns keep their order
Labels = tuple[Any, Any]  # labels of users and of items; None, or `IN_ORDER`, for either


def labels_of(given: Any) -> Labels | None:
    """Labels (or None) of users and items of `Ratings`, also prepared ones, or a `Store`; None for a plain matrix."""
    held = getattr(given, "ratings", given)
    return (held.user_ids, held.item_ids) if isinstance(held, (Ratings, Store)) else None


def align(
    matrix: sp.csr_array, have: Labels | None, want: Labels, *, name: str, unknown: str | None, owner: str = "the model"
) -> tuple[sp.csr_array, int]:
    """Reorder rows and columns to the positions of `want` by label; returns also the number of dropped entries.

    `have` are the labels of the matrix, None for a plain matrix, which uses positions. The result is the same object if
    all positions agree; else it has a row or column for each label of `want`, those of `owner`. Entries of users and
    items unknown to `want` are an error, or dropped; `unknown` is None if the caller offers no choice.
    """
    if unknown is not None:
        check_choice("unknown", unknown, UNKNOWN)
    if have is None:
        return matrix, 0
    places = [_places(axis, have[axis], want[axis], matrix.shape[axis], name, owner) for axis in (0, 1)]
    if places[0] is None and places[1] is None:
        return matrix, 0
    index = [entry_rows(matrix), matrix.indices]
    strangers = [
        np.unique(axis[found[axis] < 0]) if found is not None else axis[:0]
        for axis, found in zip(index, places, strict=True)
    ]
    for axis, found in enumerate(places):
        if found is not None:
            index[axis] = found[index[axis]]
    kept = (index[0] >= 0) & (index[1] >= 0)
    dropped = int(len(kept) - np.count_nonzero(kept))
    if dropped:
        if unknown != "drop" or dropped == len(kept):
            raise UnknownLabelError(_problem(name, owner, have, want, strangers, dropped, len(kept), unknown))
        logger.warning("%s: %d of %d entries left out, %s", name, dropped, len(kept), _said(strangers, have, owner))
    shape = [matrix.shape[axis] if found is None else len(want[axis]) for axis, found in enumerate(places)]
    rows, columns, values = index[0][kept], index[1][kept], matrix.data[kept]
    return from_triplets(rows, columns, values, (shape[0], shape[1]), name=name, dtype=matrix.dtype), dropped


def positions_in(side: Side, have: Any, want: Any, counts: tuple[int, int], name: str, owner: str) -> np.ndarray:
    """Position of each row of `name` among those of `owner`, by label if both have labels; -1 for unknown ones.

    `have` and `want` are the labels of `name` and of `owner`, `counts` their numbers of rows, which have to agree if
    neither has labels.
    """
    places = _places(SIDES.index(side), have, want, counts[0], name, owner)
    if places is not None:
        return places
    if counts[0] != counts[1]:
        raise RatingsError(
            f"{name} has {counts[0]} {side}s and {owner} {counts[1]}, and without labels only their number could say "
            "which are the same; fit both on labelled Ratings, or give arrays of factors"
        )
    return np.arange(counts[0])


def _places(axis: int, have: Any, want: Any, count: int, name: str, owner: str) -> np.ndarray | None:
    """Position in `want` of each label of an axis, -1 for unknown ones; None if all positions agree."""
    labels = want if have is None else have
    half = (have is None) != (want is None)
    if want is IN_ORDER or have is want or (half and are_positions(labels, np.arange(len(labels)))):
        return None
    if have is None or want is None:
        _refuse_half_labelled(SIDES[axis], want is None, name, owner)
    check_label_types(SIDES[axis], (owner, want), (name, have))
    if len(have) == len(want) and bool(np.all(have == want)):
        return None
    return places_among(want, have)


def are_positions(labels: np.ndarray, positions: np.ndarray) -> bool:
    """Whether labels are numbers that name these positions, as the index of rows from a frame without labels does."""
    return labels.dtype.kind in "iu" and bool(np.array_equal(labels, positions))


def _refuse_half_labelled(side: str, only_given: bool, name: str, owner: str) -> None:
    labelled, other = (name, owner) if only_given else (owner, name)
    remedy = "fit on labelled Ratings" if only_given else f"give {name} labels (Ratings.from_matrix(..., {side}_ids=))"
    raise RatingsError(
        f"{labelled} has {side} labels and {other} only positions, so {side}s cannot be matched; {remedy}, or pass "
        f"{name}.user_items (of a frame, {name}.to_numpy()), a plain matrix, if its rows and columns are the positions "
        f"of {owner}"
    )


def _said(strangers: Iterable[np.ndarray], have: Labels, owner: str) -> str:
    """Unknown users and items as text: their number and some of them."""
    parts = []
    for side, unknown, labels in zip(SIDES, strangers, have, strict=True):
        if len(unknown):
            parts.append(f"{len(unknown):,} {side}{'s' if len(unknown) > 1 else ''} ({some(labels[unknown])})")
    return f"of {' and '.join(parts)} unknown to {owner}"


def _problem(
    name: str,
    owner: str,
    have: Labels,
    want: Labels,
    strangers: list[np.ndarray],
    dropped: int,
    entries: int,
    unknown: str | None,
) -> str:
    text = f"{name} has {dropped:,} of {entries:,} entries {_said(strangers, have, owner)}"
    for side, ids, theirs in zip(SIDES, have, want, strict=True):
        if ids is None or theirs is None or theirs is IN_ORDER or set(ids.tolist()) & set(theirs.tolist()):
            continue
        text += f"; none of the {len(ids):,} {side}s of {name} is known to {owner}"
    if dropped == entries and unknown == "drop":
        return f"{text}; nothing would be left"
    return f"{text}; " + ('drop them with unknown="drop"' if unknown is not None else "leave them out")
