"""Fits by several processes: `fit`, the communicators that connect ranks, and the planner."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from .core.objective import Side
from .data.store import Store
from .errors import DeviceError
from .model.base import check_model
from .model.checkpoint import has_checkpoints
from .model.early_stopping import EarlyStopping
from .model.fit import Fit, Options
from .model.learned import summary_of
from .model.loop import Callback
from .model.ranked import RankedRatings, aborting
from .model.stopwatch import Stopwatch
from .model.training import LocalRatings
from .plan.partitions import ScalePlan, plan_scale
from .ranks.shares import StoredRatings, WholeRatings
from .ranks.transport.communicator import TIMEOUT, Communicator
from .ranks.transport.mpi import MpiCommunicator
from .ranks.transport.nccl import NcclCommunicator
from .ranks.transport.threads import run_ranks
from .ratings import Ratings

__all__ = [
    "Communicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "ScalePlan",
    "fit",
    "has_checkpoints",
    "plan_scale",
    "run_ranks",
]

logger = logging.getLogger("hybridmf")


def fit(
    model: Any,
    ratings: Any,
    communicator: Communicator | None = None,
    *,
    validation: Any = None,
    callback: Callback | None = None,
    show_progress: bool = False,
    checkpoint: Any = None,
    resume_from: str | os.PathLike[str] | None = None,
    unknown: str = "error",
    early_stopping: EarlyStopping | int | bool | None = None,
    freeze: Side | None = None,
    weights: Any = None,
    item_features: Any = None,
    user_features: Any = None,
    validation_users: int | None = None,
    validate_every: int = 1,
    track_objective: bool = False,
    timeout: float = TIMEOUT,
) -> Any:
    """Fit ALS on all ranks together; each rank calls it with the same arguments.

    Parameters
    ----------
    model : ImplicitALS or ExplicitALS
        With ``device="cuda"`` each rank uses the GPU with its local rank as index; with "auto" ranks use GPUs if every
        rank has one. Otherwise ranks use the CPU.
    ratings : path, Store, Ratings, matrix or data frame
        A folder is a store that every rank can read; each rank reads its part. Every rank reads all of a file.
    communicator : Communicator, optional
        Communicator for NumPy arrays. Default: `MpiCommunicator()`, closed after the fit.
    validation, callback, show_progress, checkpoint, resume_from, unknown, early_stopping, validation_users, \
validate_every
        As for ``fit`` of a model, on the first rank, which decides for all when to stop. With a validation set or a
        callback, it gathers all factors after each iteration. For implicit feedback and a store, it keeps the training
        items of the users of `validation`, 5 bytes each.
    freeze : {"user", "item"}, optional
        As for ``fit`` of a model; all ranks need the factors that `init` gives.
    weights, item_features, user_features
        As for ``fit`` of a model; every rank needs all of them, and of the ratings, which cannot be a store. Weights
        are for `ImplicitALS` only, and may be a path.
    track_objective : bool
        Record the objective of each iteration in ``history_``, even without observers.
    timeout : float
        Seconds that a rank waits for another rank, unless a communicator is given.

    Returns
    -------
    model or None
        Fitted, on the first rank, as after ``fit`` of a model; None on the others.

    Raises
    ------
    CommunicatorError
        Another rank has failed, does not respond, was killed, or has different ratings or parameters.
    Exception
        An error on this rank.
    """
    stopwatch = Stopwatch()
    check_model(model)
    ranks = MpiCommunicator(timeout=timeout) if communicator is None else communicator
    try:
        with aborting(ranks):
            options = Options(
                validation, callback, show_progress, checkpoint, resume_from, unknown, early_stopping, freeze,
                validation_users, validate_every, track_objective,
            )  # fmt: skip
            given: dict[Side, Any] = {"user": user_features, "item": item_features}
            features = {side: value for side, value in given.items() if value is not None}
            source = _source(model, ratings, weights, features, ranks)
            return Fit(model, source, options, ranks, stopwatch).run()
    finally:
        if communicator is None:
            ranks.close()


def _source(model: Any, ratings: Any, weights: Any, features: dict[Side, Any], ranks: Communicator) -> RankedRatings:
    """The ratings of this rank: its part of a store, or all of others, checked as by `fit` of a model."""
    device = _device(model, ranks)
    if isinstance(ratings, (str, os.PathLike)):
        ratings = Store.open(ratings) if Path(ratings).is_dir() else Ratings.from_file(os.fspath(ratings))
    if isinstance(ratings, Store):
        if weights is not None:
            raise TypeError("weights need ratings in memory, and a store is read slab by slab; fit store.to_ratings()")
        if features:
            raise TypeError(
                "features: ranks that read a store slab by slab have none; fit store.to_ratings(), or the store in one "
                "process, model.fit(store, item_features=)"
            )
        stored = StoredRatings(ratings, model._settings().dtype, model._objective().is_implicit)
        return RankedRatings(model, stored, ranks, device)
    if not hasattr(ratings, "shape"):
        kind = type(ratings).__name__
        raise TypeError(f"ratings must be the path of a store or file, a Store, Ratings or a matrix, got {kind}")
    if isinstance(weights, (str, os.PathLike)):
        weights = Ratings.from_file(os.fspath(weights))
    here = LocalRatings(model, ratings, weights, name="ratings", features=features)
    if here.weights is not None:
        raise ValueError("weights of explicit ratings are not available on ranks; use fit of the model on one device")
    total = 0.0 if here.unit is None else summary_of(here.matrix).total
    users, items = here.labels or (None, None)
    whole = WholeRatings(here.entries, users, items, here.unit, total)
    source = RankedRatings(model, whole, ranks, device, features=here.features)
    source.columns, source.frame_kind = here.columns, here.frame_kind
    return source


def _device(model: Any, ranks: Communicator) -> str:
    """The device of this rank; all ranks call it together."""
    asked = model._settings().device
    if asked == "cpu":
        return "cpu"
    if asked not in ("auto", "cuda"):
        raise ValueError(f'device={asked!r}: ranks choose their GPU by their number on the node; use "cuda" or "cpu"')
    from .device.cuda import device_count

    try:
        device = f"cuda:{ranks.local_rank % device_count()}"
    except DeviceError:
        if asked == "cuda":
            raise
        device = "cpu"
    with_gpu = int(ranks.allreduce(np.array([device != "cpu"], dtype=np.int64))[0])
    if with_gpu == ranks.size:
        return device
    if with_gpu:
        logger.info("device='auto' chose the CPU: %d of %d ranks have a GPU", with_gpu, ranks.size)
    return "cpu"
