"""Checkpoints: one model file per completed iteration, the newest two kept; a fit resumes from one (cuMF 4.4)."""

from __future__ import annotations

import logging
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from .._files import write_atomically
from .._io import ModelFile, check_storable_labels, encode_model, jsonable
from ..errors import ModelFileError
from ..ratings import Ratings
from .store import Store

logger = logging.getLogger("hybridmf")

KEEP = 2
"""Checkpoints kept: the newest, and the one before it in case the newest cannot be read."""

FREE_PARAMS = frozenset({"iterations", "device", "num_threads", "assembly", "reorder", "precision", "random_state"}) | {
    "learning_rate",  # a run that diverged goes on with shorter steps
    "decay",
    "schedule",
    "ordering",
    "deterministic",
}
"""Parameters that may differ between the run that stopped and the one that resumes: the objective is the same."""

_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")


def fingerprint(matrix: sp.csr_array) -> str:
    """Short identity of the training data: shape, number of entries and a CRC-32 of the arrays."""
    crc = 0
    for array in (matrix.indptr.astype(np.int64, copy=False), matrix.indices, matrix.data):
        crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), crc) if array.size else crc
    return f"{matrix.shape[0]}x{matrix.shape[1]}-{matrix.nnz}-{crc:08x}"


def prepare(
    directory: str | os.PathLike[str], resume_from: str | os.PathLike[str] | None = None, ratings: Any = None
) -> Path:
    """Return the checkpoint folder, made if it does not exist; fails before training rather than after.

    Parameters
    ----------
    directory : path-like
    resume_from : path-like, optional
        As given to ``fit``.
    ratings : Ratings or matrix, optional
        What is fitted; labels that no model file can hold are refused.

    Raises
    ------
    NotADirectoryError, PermissionError
    FileExistsError
        The folder holds checkpoints that this run does not continue: two runs would replace each other's.
    TypeError
        Labels other than strings and numbers.
    """
    path = Path(directory)
    if isinstance(ratings, (Ratings, Store)):
        check_storable_labels("user_ids", ratings.user_ids)
        check_storable_labels("item_ids", ratings.item_ids)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"checkpoint {str(path)!r} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"checkpoint folder {str(path)!r} cannot be written to")
    newest = _listed(path)[-1:]
    if newest and (resume_from is None or Path(resume_from).resolve() not in (path.resolve(), newest[0].resolve())):
        raise FileExistsError(
            f"checkpoint folder {str(path)!r} holds checkpoints of an earlier run, the newest {newest[0].name}: "
            f"continue it with resume_from={str(path)!r}, or give another folder"
        )
    return path


def write(directory: Path, model: Any, data: str) -> None:
    """Write the model's current state as the newest checkpoint and remove those before its last `KEEP`."""
    content = encode_model(model, {"data": data}, resumable=True)
    write_atomically(directory / f"checkpoint-{model.n_iter_:06d}.safetensors", content)
    # later ones could not be read when this run was resumed from one before them
    for old in [path for path in _listed(directory) if _iteration(path) <= model.n_iter_][:-KEEP]:
        old.unlink(missing_ok=True)


def _iteration(path: Path) -> int:
    """Iteration of a checkpoint by its name; -1 for other files."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _listed(directory: Path) -> list[Path]:
    return sorted((path for path in directory.iterdir() if _iteration(path) >= 0), key=_iteration)


def read(path: str | os.PathLike[str], model: Any, data: str) -> ModelFile:
    """Find the checkpoint to resume from: a file, or the newest readable one of a folder.

    Raises
    ------
    FileNotFoundError
        The folder holds no checkpoint.
    ModelFileError
        It belongs to other data or other parameters, which are named, or cannot be read.
    """
    content = _newest(Path(path)) if Path(path).is_dir() else ModelFile(path)
    name = str(content.path)
    if "data" not in content.summary:
        raise ModelFileError(f"{name!r} is a saved model, not a checkpoint; pass what checkpoint= wrote")
    if content.model != type(model).__name__:
        raise ModelFileError(f"{name!r} is a checkpoint of {content.model}, not of {type(model).__name__}")
    ours = jsonable(model.get_params(deep=False))
    for key, value in content.params.items():
        if key not in FREE_PARAMS and ours.get(key) != value:
            raise ModelFileError(f"{name!r} was written with {key}={value!r}, this model has {key}={ours.get(key)!r}")
    content.check_model(model)
    if content.summary["data"] != data:
        raise ModelFileError(
            f"{name!r} was written for other data ({content.summary['data']}, this is {data}: "
            "users x items - entries - checksum); resume with the same ratings"
        )
    shape = f"{len(content.state.user)}x{len(content.state.item)}"
    if not data.startswith(f"{shape}-"):
        raise ModelFileError(f"{name!r} is corrupt: it holds factors of {shape} users x items for other data ({data})")
    return content


def _newest(directory: Path) -> ModelFile:
    paths = _listed(directory)
    if not paths:
        raise FileNotFoundError(f"resume_from folder {str(directory)!r} holds no checkpoint")
    problem: ModelFileError | None = None
    for path in reversed(paths):
        try:
            return ModelFile(path)
        except ModelFileError as error:
            problem = error
            logger.warning("checkpoint passed over: %s", error)
    assert problem is not None
    raise problem
