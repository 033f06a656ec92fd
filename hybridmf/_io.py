"""Model files: safetensors with a JSON header, written atomically, judged when read.

Tensors: ``user_factors``, ``item_factors``; ``user_bias``, ``item_bias`` (biased models); ``seen_indptr``,
``seen_indices`` (what users have seen); ``user_ids``, ``item_ids`` (labels: integers as int64, others as the UTF-8
bytes of a JSON list). Metadata: ``format``, ``version``, ``model`` (class name), ``params``, ``state``, each JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ._files import write_atomically as write_atomically
from ._objective import Factors, State
from ._validate import make_csr
from .errors import ModelFileError

FORMAT, VERSION = "hybridmf", 1


def _encode_labels(name: str, labels: np.ndarray) -> np.ndarray:
    if labels.dtype.kind in "iu":
        return labels.astype(np.int64)
    plain = labels.tolist()
    kinds = {type(label) for label in plain}
    if not kinds <= {str, int, float, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"{name} holds labels of type {names}; only strings and numbers can be saved: relabel them first"
        )
    return np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)


def _decode_labels(tensor: np.ndarray | None) -> np.ndarray | None:
    if tensor is None or tensor.dtype == np.int64:
        return tensor
    plain = json.loads(tensor.tobytes().decode())
    labels = np.array(plain)
    if labels.ndim != 1 or [type(a) for a in labels.tolist()] != [type(a) for a in plain]:
        labels = np.empty(len(plain), dtype=object)  # mixed types: NumPy would turn numbers into strings
        labels[:] = plain
    return labels


def jsonable(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JSON can hold them; a Generator cannot be stored and becomes None."""
    plain: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, type):
            value = np.dtype(value).name
        plain[key] = value if isinstance(value, (str, int, float, bool, list, tuple, type(None))) else None
    return plain


def encode_model(model: Any, extra: dict[str, Any] | None = None, *, include_seen: bool = True) -> bytes:
    """Return a fitted model as the bytes of a model file; `extra` goes into its state."""
    state: State = model._state
    tensors = {"user_factors": state.user.matrix, "item_factors": state.item.matrix}
    if state.user.bias is not None and state.item.bias is not None:
        tensors |= {"user_bias": state.user.bias, "item_bias": state.item.bias}
    if include_seen and model._seen is not None:
        tensors |= {"seen_indptr": model._seen.indptr, "seen_indices": model._seen.indices}
    for name in ("user_ids", "item_ids"):
        labels = getattr(model, f"{name}_")
        if labels is not None:
            tensors[name] = _encode_labels(name, labels)
    summary = {
        "mean": state.mean,
        "n_iter": model.n_iter_,
        "history": model.history_,
        "nnz": model.plan_.nnz,
    } | (extra or {})
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": type(model).__name__,
        "params": json.dumps(jsonable(model.get_params(deep=False))),
        "state": json.dumps(summary),
    }
    return _ordered(safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, metadata))


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its metadata in order: the library leaves it to a hash map, and one model, one file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


class ModelFile:
    """A model file whose content was checked.

    Attributes
    ----------
    model : str
        Class name.
    params, summary : dict
        Constructor parameters; mean, iterations, history and what else was stored.
    state : State
    seen : csr_array or None
    user_ids, item_ids : array or None
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"path {str(path)!r} is a folder, not a model file")
        if not self.path.exists():
            raise FileNotFoundError(f"there is no model file {str(path)!r}")
        metadata, tensors = self._read()
        if metadata.get("format") != FORMAT:
            raise self._error("is a safetensors file, but not a hybridmf model")
        if metadata.get("version") != str(VERSION):
            raise self._error(
                f"has format version {metadata.get('version')!r}; this hybridmf reads version {VERSION}: "
                "upgrade hybridmf or save the model again"
            )
        try:
            self.model = metadata["model"]
            self.params: dict[str, Any] = json.loads(metadata["params"])
            self.summary: dict[str, Any] = json.loads(metadata["state"])
            self.user_ids = _decode_labels(tensors.get("user_ids"))
            self.item_ids = _decode_labels(tensors.get("item_ids"))
            self.state = self._state(tensors, float(self.summary["mean"]))
            self.seen = self._seen(tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ModelFileError):
                raise
            raise self._error(f"is corrupt: {type(error).__name__}: {error}") from error
        self._check_labels()

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{str(self.path)!r} {problem}")

    def _read(self) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        try:
            with safetensors.safe_open(self.path, framework="numpy") as file:
                return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, ValueError, TypeError) as error:
            raise self._error(
                f"is not a complete model file ({error}); it is truncated, altered, or of another format"
            ) from error

    def _state(self, tensors: dict[str, np.ndarray], mean: float) -> State:
        users, items = tensors["user_factors"], tensors["item_factors"]
        if users.ndim != 2 or items.ndim != 2 or users.shape[1] != items.shape[1]:
            raise self._error(
                f"is corrupt: user_factors {users.shape} and item_factors {items.shape} do not fit together"
            )
        if users.dtype not in (np.float32, np.float64) or users.dtype != items.dtype:
            raise self._error(f"is corrupt: factors have dtypes {users.dtype} and {items.dtype}")
        user_bias, item_bias = tensors.get("user_bias"), tensors.get("item_bias")
        for name, bias, factors in (("user_bias", user_bias, users), ("item_bias", item_bias, items)):
            if bias is not None and bias.shape != (len(factors),):
                raise self._error(f"is corrupt: {name} has shape {bias.shape}, expected ({len(factors)},)")
        for name, array in tensors.items():
            if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
                raise self._error(f"is corrupt: {name} has values that are not finite")
        return State(Factors(users, user_bias), Factors(items, item_bias), mean)

    def _seen(self, tensors: dict[str, np.ndarray]) -> Any:
        if "seen_indptr" not in tensors:
            return None
        indptr, indices = tensors["seen_indptr"], tensors["seen_indices"]
        shape = (len(self.state.user), len(self.state.item))
        sound = (
            indptr.shape == (shape[0] + 1,)
            and indptr[0] == 0
            and indptr[-1] == len(indices)
            and bool(np.all(np.diff(indptr) >= 0))
            and bool(np.all((indices >= 0) & (indices < shape[1])))
        )
        if not sound:
            raise self._error("is corrupt: the record of what users have seen is inconsistent")
        return make_csr(indptr.astype(np.int64), indices.astype(np.int32), np.ones(len(indices), np.int8), shape)

    def _check_labels(self) -> None:
        for name, labels, factors in (
            ("user_ids", self.user_ids, self.state.user),
            ("item_ids", self.item_ids, self.state.item),
        ):
            if labels is not None and len(labels) != len(factors):
                raise self._error(f"is corrupt: {len(labels)} {name} for {len(factors)} rows of factors")


def load(path: str | os.PathLike[str]) -> Any:
    """Read a model that ``model.save(path)`` wrote.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    estimator
        Fitted, of the class that was saved.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
    ModelFileError
        Truncated, altered, of another format, or from a newer version.
    """
    from . import als

    content = ModelFile(path)
    known = {cls.__name__: cls for cls in (als.ImplicitALS, als.ExplicitALS)}
    if content.model not in known:
        raise ModelFileError(
            f"{str(path)!r} holds a model of class {content.model!r}; this hybridmf knows {', '.join(sorted(known))}"
        )
    try:
        model = known[content.model](**content.params)
        return model._restore(content)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} holds parameters this hybridmf cannot use: {error}") from error
