"""Initial factors from another fitted model, whose rows are matched by label."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..core.objective import SIDES, Side
from ..data.align import Labels, positions_in
from ..data.labels import some
from ..errors import RatingsError
from .learned import Learned

logger = logging.getLogger("hybridmf")


def factors_from(
    known: Learned, labels: Labels | None, shape: tuple[int, int], factors: int, frozen: Side | None
) -> tuple[tuple[Any, ...], dict[Side, np.ndarray]]:
    """Factors of a model in the order of other ratings, and the rows of each side that it does not have.

    `labels`, `shape` and `factors` are those of the fit. The arrays are user and item factors and, if the model has
    them, user and item biases; missing rows are zero. Rows that the model has learned nothing of count as missing,
    except on a frozen side, of which no row may be missing.
    """
    rank = known.state.user.matrix.shape[1]
    if rank != factors:
        raise ValueError(f"init is a model of {rank} factors, and this one has factors={factors}; use factors={rank}")
    have: Labels = labels or (None, None)
    found: list[list[np.ndarray]] = []
    new: dict[Side, np.ndarray] = {}
    for side, count, own in zip(SIDES, shape, have, strict=True):
        theirs = known.state.side(side).on_host()
        counts = (count, len(theirs))
        places = positions_in(side, own, known.labels(side), counts, "user_items", "the model given as init")
        strangers = np.flatnonzero(places < 0)
        if side == frozen and len(strangers):
            raise RatingsError(
                f"freeze={side!r} needs factors of every {side}, and init has none of {len(strangers)} of {count} "
                f"({some(strangers if own is None else own[strangers])}); leave them out of the ratings"
            )
        blank = np.zeros(len(theirs), bool)
        blank[theirs.blank_rows()] = side != frozen
        taken = np.flatnonzero((places >= 0) & ~blank[places])
        found.append([np.zeros((count, *array.shape[1:]), array.dtype) for array in theirs.arrays])
        for ours, array in zip(found[-1], theirs.arrays, strict=True):
            ours[taken] = array[places[taken]]
        new[side] = np.setdiff1d(np.arange(count), taken)
    if all(len(new[side]) == count for side, count in zip(SIDES, shape, strict=True)):
        raise RatingsError("init has factors of none of these users and items; is it a model of other data?")
    known_rows = [f"{count - len(new[side])} of {count} {side}s" for side, count in zip(SIDES, shape, strict=True)]
    logger.info("init: factors of %s are those of the model, the others are drawn", " and ".join(known_rows))
    return tuple(each for pair in zip(*found, strict=True) for each in pair), new
