"""Model files: safetensors with a JSON header, written atomically and validated when read.

Tensors: ``user_factors``, ``item_factors``; ``user_bias``, ``item_bias`` (biased models); ``user_squares``,
``item_squares``, ``user_bias_squares``, ``item_bias_squares`` (checkpoints of AdaGrad); ``seen_indptr``,
``seen_indices`` (items seen by users); ``seen_values`` (their values, or one value if all are equal; or, for up to 256
distinct values, a table of which ``seen_codes`` has the places); ``item_counts`` (training entries of each item);
``item_likes`` (positive ones, where others exist);
``user_ids``, ``item_ids`` (labels: integers as int64 or uint64, others as the UTF-8 bytes of a JSON list); for a side
with features, such as items, ``item_features_indptr``, ``item_features_indices``, ``item_features_data`` (a row for
each item), ``item_feature_vectors``, ``item_feature_bias`` (their vectors) and ``item_cold`` (rows whose factors follow
from their features), while ``state`` has names, columns and weights. Metadata:
``format``, ``version``, ``model`` (class name), ``params``, ``state`` and ``checksums``, the last three JSON objects.
Kernels do not validate a loaded model, so an inconsistent file raises an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import safetensors
import safetensors.numpy

from .. import _formats
from ..core.files import write_atomically as write_atomically
from ..core.frames import KINDS
from ..core.objective import SIDES, Factors, Objective, Side, State, check_nonnegative, check_per_side
from ..core.validate import check_choice, check_int, check_range, check_real, make_csr
from ..data.features import Features
from ..data.labels import LABEL_DTYPES, decode_labels, encode_labels
from ..errors import ModelFileError
from .learned import Learned, LearnedFeatures, likes_of

FORMAT, VERSION = "hybridmf", 1

SQUARES = ("user_squares", "item_squares", "user_bias_squares", "item_bias_squares")
FEATURES = ("features_indptr", "features_indices", "features_data", "feature_vectors", "feature_bias", "cold")
TENSORS = frozenset(f"{side}_{name}" for side in SIDES for name in ("factors", "bias", "ids", *FEATURES)) | {
    *SQUARES, "seen_indptr", "seen_indices", "seen_values", "seen_codes", "item_counts", "item_likes",
}  # fmt: skip
DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64", "int32": "I32", "uint8": "U8"}
"""Names of dtypes in NumPy and in safetensors."""

LARGE = frozenset(["user_factors", "item_factors", "seen_indices"])
"""Tensors that can be mapped: they may be larger than memory, and processes share them."""

CHECKED_ROWS = 65536  # rows of a tensor that are checked at a time

MAX_COUNT = int(np.iinfo(np.int64).max)


def jsonable(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values; what cannot be stored (a Generator, initial factors) becomes None."""
    plain: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (type, np.dtype)):
            value = np.dtype(value).name
        if isinstance(value, (tuple, list)):
            value = [each.item() if isinstance(each, np.generic) else each for each in value]
            value = value if all(isinstance(each, (str, int, float)) for each in value) else None
        plain[key] = value if isinstance(value, (str, int, float, bool, list, type(None))) else None
    return plain


def _json_default(value: Any) -> Any:
    """Convert NumPy scalars and arrays, which callbacks may put into records, to Python objects."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(
        f"history_ holds a value of type {type(value).__name__}; only numbers, strings, lists and dicts can be saved: "
        "let the callback put nothing else into its record"
    )


def model_metadata(kind: str, learned: Learned, extra: dict[str, Any] | None = None) -> dict[str, str]:
    """Metadata of a fitted model of the class named `kind`; `extra` is added to its state."""
    summary = {
        "mean": learned.state.mean,
        "n_iter": learned.n_iter,
        "history": learned.history,
        "nnz": learned.plan.nnz,
        "total": learned.total,
        "value_range": learned.value_range,
        "frame_kind": learned.frame_kind,
    } | (extra or {})
    if learned.features:
        summary["features"] = {
            side: {"coding": each.features.coding(), "weight": each.weight} for side, each in learned.features.items()
        }
    objective = learned.objective
    for name in ("regularization", "bias_regularization") if objective.biases else ("regularization",):
        users, items = getattr(objective, name)  # defaults depend on the ratings
        summary[name] = users if users == items else [users, items]
    if learned.params.get("regularization_scaling", 0.0) is None:
        summary["scaling"] = list(objective.scaling)
    for name in ("alpha", "unobserved_weight"):
        if learned.params.get(name, 0.0) is None:
            summary[name] = getattr(objective, name)
    if objective.count_unobserved:  # users and items of the fit; updates may have added some
        summary["unobserved"] = list(objective.added)
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "model": kind,
        "params": json.dumps(learned.params),  # as they were at the fit
        "state": json.dumps(summary, default=_json_default),
    }


def state_tensors(state: State, *, resumable: bool = False) -> dict[str, np.ndarray]:
    """Tensors that change during a fit; `resumable` adds those needed to resume it, AdaGrad's sums of squares."""
    tensors: dict[str, np.ndarray | None] = {}
    for side in SIDES:
        factors, vectors = state.side(side), state.vectors.get(side)
        tensors |= {f"{side}_factors": factors.matrix, f"{side}_bias": factors.bias}
        if resumable and factors.squares is not None:
            tensors |= {f"{side}_squares": factors.squares.matrix, f"{side}_bias_squares": factors.squares.bias}
        if vectors is not None:
            tensors |= {f"{side}_feature_vectors": vectors.matrix, f"{side}_feature_bias": vectors.bias}
    return {name: array for name, array in tensors.items() if array is not None}


def lasting_tensors(learned: Learned, *, include_seen: bool = True) -> dict[str, np.ndarray]:
    """Tensors that do not change during a fit: labels, features, counts of items, and items seen by users."""
    tensors: dict[str, np.ndarray | None] = {"item_counts": learned.item_counts, "item_likes": learned.item_likes}
    seen = learned.seen_matrix() if include_seen else None
    if seen is not None:
        tensors |= {"seen_indptr": seen.indptr, "seen_indices": seen.indices}
        if learned.values is not None:
            tensors |= _encode_values(learned.values)
    for side in SIDES:
        labels, known = learned.labels(side), learned.features.get(side)
        if labels is not None:
            tensors[f"{side}_ids"] = encode_labels(f"{side}_ids", labels)
        if known is not None:
            matrix, cold = known.features.matrix, known.cold.astype(np.int64)
            arrays = (matrix.indptr.astype(np.int64, copy=False), matrix.indices, matrix.data, cold)
            names = ("features_indptr", "features_indices", "features_data", "cold")
            tensors |= {f"{side}_{name}": array for name, array in zip(names, arrays, strict=True)}
    return {name: array for name, array in tensors.items() if array is not None}


def _encode_values(values: np.ndarray) -> dict[str, np.ndarray]:
    """Values of entries as tensors: all of them, or one, or a byte for each and a table."""
    table = np.unique(values[:CHECKED_ROWS])
    while len(table) <= 256:
        places = np.minimum(np.searchsorted(table, values), len(table) - 1)
        new = values[table[places] != values]
        if not len(new):
            return {"seen_values": table} | ({"seen_codes": places.astype(np.uint8)} if len(table) > 1 else {})
        table = np.union1d(table, new[:CHECKED_ROWS])
    return {"seen_values": values}


def _decode_values(tensors: dict[str, np.ndarray], nnz: int) -> np.ndarray | None:
    """The values that `_encode_values` encoded; None if there are none."""
    if "seen_values" not in tensors:
        return None
    values, codes = tensors["seen_values"], tensors.get("seen_codes")
    if values.ndim != 1 or values.dtype.kind != "f" or not len(values):
        raise ValueError(f"seen_values has shape {values.shape} and dtype {values.dtype}")
    if codes is not None:
        if codes.dtype != np.uint8 or codes.shape != (nnz,) or codes.max(initial=0) >= len(values):
            raise ValueError(f"seen_codes has shape {codes.shape} and dtype {codes.dtype} for {nnz} entries")
        return np.asarray(values[codes])
    values = np.full(nnz, values[0]) if len(values) == 1 else values
    if len(values) != nnz:
        raise ValueError(f"seen_values has {len(values)} values for {nnz} entries")
    return values


def save_model(path: Any, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    """Write a model to a file that appears complete, or to an open binary file."""
    if not hasattr(path, "write"):
        write_atomically(_path_of(path), lambda file: write_model(file, metadata, tensors))
        return
    _refuse_text(path, "wb")
    write_model(path, metadata, tensors)


def _path_of(path: Any) -> Path:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a path or an open binary file, got {path!r} of type {type(path).__name__}")
    return Path(os.fsdecode(path))


def _refuse_text(file: Any, mode: str) -> None:
    if isinstance(file, io.TextIOBase):
        raise TypeError(
            f"path is a text file ({type(file).__name__}), and models are bytes: open it with mode {mode!r}"
        )


def write_model(file: BinaryIO, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    """Write a model file in safetensors format, tensor by tensor, without a copy of all tensors in memory.

    Output is deterministic: names and metadata are sorted, whereas the safetensors library uses the order of a hash
    map. Tensors with the widest elements come first, so that every tensor is aligned.
    """
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    metadata = metadata | {"checksums": json.dumps(_checksums(metadata, tensors), sort_keys=True)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    end = 0
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksums(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> dict[str, int]:
    """CRC-32 of each tensor, and of the metadata under the name ""."""
    said = "\0".join(metadata[name] for name in ("model", "params", "state"))
    return {"": zlib.crc32(said.encode())} | {name: zlib.crc32(_bytes_of(array)) for name, array in tensors.items()}


def _all_finite(array: np.ndarray) -> bool:
    if array.dtype.kind != "f":
        return True
    return all(bool(np.isfinite(array[k : k + CHECKED_ROWS]).all()) for k in range(0, len(array), CHECKED_ROWS))


class ModelFile:
    """The validated content of a model file.

    `params` are those of the constructor of the class named `model`; `summary` has ``mean``, ``n_iter``, ``nnz``,
    ``total``, ``value_range``, ``history`` and any other stored fields; the rest is as in `Learned`. `mapped`: map the
    tensors of `LARGE` from the file instead of reading them; it must not change while they are used.
    """

    def __init__(self, path: str | os.PathLike[str] | BinaryIO, *, mapped: bool = False) -> None:
        if not hasattr(path, "read"):
            self.path = _path_of(path)
            if self.path.is_dir():
                raise IsADirectoryError(f"path {str(path)!r} is a folder, not a model file")
            if not self.path.exists():
                raise FileNotFoundError(f"there is no model file {str(path)!r}")
            metadata, tensors = self._read(LARGE if mapped else frozenset())
        else:
            if mapped:
                raise ValueError(
                    "mapped=True needs the path of a file, got an open one; give its path, or mapped=False"
                )
            _refuse_text(path, "rb")
            self.path = Path(str(getattr(path, "name", type(path).__name__)))
            metadata, tensors = self._read_open(cast(BinaryIO, path))
        if metadata.get("format") != FORMAT:
            raise self._error("is a safetensors file, but not a hybridmf model")
        if metadata.get("version") != str(VERSION):
            raise self._error(
                f"has format version {metadata.get('version')!r}; this hybridmf reads version {VERSION}: "
                "upgrade hybridmf or save the model again"
            )
        try:
            self._check_sums(metadata, tensors)
            self.model = metadata["model"]
            self.params = _with_biases(self._object("params", metadata["params"]), self.model)
            self.summary = self._object("state", metadata["state"])
            self._check_summary()
            self._require(tensors.keys() <= TENSORS, f"unknown tensors {sorted(tensors.keys() - TENSORS)}")
            self.state = self._state(tensors)
            self.seen = self._seen(tensors)
            self.values = None if self.seen is None else _decode_values(tensors, self.seen.nnz)
            self.item_counts = self._item_counts(tensors)
            self.item_likes = self._item_likes(tensors)
            self.user_ids = self._labels("user_ids", tensors, len(self.state.user))
            self.item_ids = self._labels("item_ids", tensors, len(self.state.item))
            self.features = self._features(tensors)
        except ModelFileError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"is corrupt: {type(error).__name__}: {error}") from error

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{str(self.path)!r} {problem}")

    def _require(self, sound: bool, problem: str) -> None:
        if not sound:
            raise self._error(f"is corrupt: {problem}")

    def _read(self, to_map: frozenset[str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        with self._complete(), safetensors.safe_open(self.path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, file.keys()
            return metadata, {name: self._mapped(name) if name in to_map else file.get_tensor(name) for name in names}

    def _read_open(self, file: BinaryIO) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        content = file.read()
        with self._complete():
            tensors: dict[str, np.ndarray] = safetensors.numpy.load(content)  # validates the header
            size = int.from_bytes(content[:8], "little")
            return json.loads(content[8 : 8 + size]).get("__metadata__", {}), tensors

    @contextlib.contextmanager
    def _complete(self) -> Iterator[None]:
        """Turn errors of the library into one that names the file."""
        try:
            yield
        except (safetensors.SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise self._error(
                f"is not a complete model file ({error}); it is truncated, altered, or of another format"
            ) from error

    def _mapped(self, name: str) -> np.ndarray:
        """A tensor mapped from the file, whose header the library has validated."""
        with open(self.path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(size))[name]
        dtype = next(known for known, short in DTYPES.items() if short == found["dtype"])
        shape, begin = tuple(found["shape"]), 8 + size + found["data_offsets"][0]
        if 0 in shape:  # nothing cannot be mapped
            return np.zeros(shape, dtype)
        return np.asarray(np.memmap(self.path, dtype, "r", begin, shape))

    def _check_sums(self, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        if "checksums" not in metadata:  # written before there were any
            return
        expected = self._object("checksums", metadata["checksums"])
        found = _checksums(metadata, tensors)
        for name in sorted(expected.keys() | found.keys()):
            what = f"{name} was" if name else "its metadata were"
            same = expected.get(name) == found.get(name)
            self._require(same, f"{what} altered or damaged after it was written (the checksum differs)")

    def _object(self, name: str, text: str) -> dict[str, Any]:
        found = json.loads(text)
        self._require(isinstance(found, dict), f"{name} is a JSON {type(found).__name__}, expected an object")
        return found

    def _check_summary(self) -> None:
        summary = self.summary
        check_real("mean", summary["mean"])
        check_int("n_iter", summary["n_iter"], 0, MAX_COUNT)
        check_int("nnz", summary["nnz"], 0, MAX_COUNT)
        if summary.setdefault("total", None) is not None:
            check_real("total", summary["total"])
        found = summary.setdefault("value_range", None)  # files of earlier versions have none
        self.value_range = None if found is None else check_range("value_range", found)
        kind = summary.setdefault("frame_kind", None)  # files of earlier versions have none
        self.frame_kind: str | None = None if kind is None else check_choice("frame_kind", kind, KINDS)
        for name in ("regularization", "bias_regularization", "scaling", "unobserved"):
            if name in summary:
                summary[name] = check_per_side(name, summary[name], check_nonnegative)
        for name in ("alpha", "unobserved_weight"):
            if name in summary:
                check_nonnegative(name, summary[name])
        history = summary["history"]
        records = isinstance(history, list) and all(isinstance(record, dict) for record in history)
        self._require(records, "history is not a list of records")

    @property
    def learned(self) -> dict[str, Any]:
        """Fields of `Learned` that the file has."""
        names = ("state", "seen", "user_ids", "item_ids", "item_counts", "value_range", "frame_kind", "values")
        found = {name: getattr(self, name) for name in (*names, "item_likes", "features")}
        return found | {name: self.summary[name] for name in ("total", "n_iter", "history")}

    def objective(self, by_params: Objective) -> Objective:
        """The objective of the fit: `by_params`, with its defaults, some of which follow from the ratings."""
        objective = replace(by_params, added=self.summary.get("unobserved", by_params.added))
        names = ("regularization", "bias_regularization", "alpha", "unobserved_weight", "regularization_scaling")
        left_out = [
            name.replace("regularization_scaling", "scaling") for name in names if self.params.get(name) is None
        ]
        found = {name: self.summary[name] for name in left_out if name in self.summary}  # earlier files have fewer
        return replace(objective, **found)

    def _state(self, tensors: dict[str, np.ndarray]) -> State:
        users, items = tensors["user_factors"], tensors["item_factors"]
        self._require(
            users.ndim == items.ndim == 2 and users.shape[1] == items.shape[1] and 0 not in users.shape + items.shape,
            f"user_factors {users.shape} and item_factors {items.shape} do not fit together",
        )
        self._require(
            users.dtype in (np.float32, np.float64) and users.dtype == items.dtype,
            f"factors have dtypes {users.dtype} and {items.dtype}",
        )
        user_bias, item_bias = tensors.get("user_bias"), tensors.get("item_bias")
        self._require((user_bias is None) == (item_bias is None), "one side has biases and the other has none")
        for name, bias, factors in (("user_bias", user_bias, users), ("item_bias", item_bias, items)):
            if bias is not None:
                self._require(
                    bias.shape == (len(factors),) and bias.dtype == factors.dtype,
                    f"{name} has shape {bias.shape} and dtype {bias.dtype}, "
                    f"expected ({len(factors)},) and {factors.dtype}",
                )
        for name, array in tensors.items():
            self._require(_all_finite(array), f"{name} has values that are not finite")
        largest = float(np.finfo(users.dtype).max)
        self._require(
            abs(self.summary["mean"]) <= largest, f"its mean is beyond {largest:g}, the largest {users.dtype}"
        )
        squares = self._squares(tensors)
        return State(
            Factors(users, user_bias, squares.get("user")),
            Factors(items, item_bias, squares.get("item")),
            float(self.summary["mean"]),
        )

    def _squares(self, tensors: dict[str, np.ndarray]) -> dict[str, Factors]:
        """Sums of squares of both sides, shaped like the factors and biases, or two per row; {} if there are none."""
        if not tensors.keys() & set(SQUARES):
            return {}
        for name in SQUARES:
            twin = tensors.get(name.replace("_squares", "") if "bias" in name else name.replace("squares", "factors"))
            sums = tensors.get(name)
            alike = (twin is None) == (sums is None)
            if twin is not None and sums is not None:
                shapes = {twin.shape, *([(len(twin), 2)] if twin.ndim == 2 else [])}  # RPCS: two sums a row
                alike = sums.shape in shapes and twin.dtype == sums.dtype and bool(np.all(sums >= 0))
            self._require(alike, f"{name} does not match its factors or biases")
        widths = {tensors[f"{side}_squares"].shape[1] for side in ("user", "item")}
        self._require(len(widths) == 1, "user_squares does not match item_squares")
        return {
            side: Factors(tensors[f"{side}_squares"], tensors.get(f"{side}_bias_squares")) for side in ("user", "item")
        }

    def _seen(self, tensors: dict[str, np.ndarray]) -> Any:
        if not tensors.keys() & {"seen_indptr", "seen_indices"}:
            return None
        indptr, indices = tensors["seen_indptr"], tensors["seen_indices"]
        shape = (len(self.state.user), len(self.state.item))
        self._require(_is_canonical(indptr, indices, shape), "the seen items are inconsistent")
        return make_csr(
            indptr.astype(np.int64), indices.astype(np.int32, copy=False), np.ones(len(indices), np.int8), shape
        )

    def _features(self, tensors: dict[str, np.ndarray]) -> dict[Side, LearnedFeatures]:
        """Features of each side that has some; the state gets their vectors."""
        found: dict[Side, LearnedFeatures] = {}
        said = self.summary.get("features", {})
        for side in SIDES:
            parts = {name: tensors[f"{side}_{name}"] for name in FEATURES if f"{side}_{name}" in tensors}
            self._require(bool(parts) == (side in said), f"features of {side}s are incomplete")
            if not parts:
                continue
            factors, vectors = self.state.side(side), Factors(parts["feature_vectors"], parts.get("feature_bias"))
            features = Features.from_coding(said[side]["coding"])
            count, n_rows = len(features.names), len(factors)
            indptr, indices, data = (parts[f"features_{name}"] for name in ("indptr", "indices", "data"))
            sound = _is_canonical(indptr, indices, (n_rows, count)) and _fits(data, np.float32, indices.shape)
            sound = sound and _fits(vectors.matrix, factors.matrix.dtype, (count, factors.matrix.shape[1]))
            sound = sound and (vectors.bias is None) == (factors.bias is None)
            sound = sound and (vectors.bias is None or _fits(vectors.bias, factors.matrix.dtype, (count,)))
            cold = parts["cold"]
            sound = sound and _fits(cold, np.int64, (cold.size,)) and bool(np.all(cold[1:] > cold[:-1]))
            sound = sound and (not len(cold) or 0 <= int(cold[0]) <= int(cold[-1]) < n_rows)
            self._require(sound, f"features of {side}s do not fit their factors")
            matrix = make_csr(indptr.astype(np.int64), indices.astype(np.int32, copy=False), data, (n_rows, count))
            labels = self.user_ids if side == "user" else self.item_ids
            weight = check_real("weight", said[side]["weight"], 0.0, strict=True)
            found[side] = LearnedFeatures(features.with_rows(matrix, labels), weight, cold)
            self.state = replace(self.state, vectors={**self.state.vectors, side: vectors})
        return found

    def _item_counts(self, tensors: dict[str, np.ndarray]) -> np.ndarray | None:
        """Training entries of each item; if the file has no counts, computed from the items seen by users."""
        counted = None if self.seen is None else np.bincount(self.seen.indices, minlength=self.seen.shape[1])
        counts = tensors.get("item_counts")
        if counts is None:
            return counted
        sound = _fits(counts, np.int64, (len(self.state.item),)) and bool(np.all(counts >= 0))
        sound = sound and (counted is None or np.array_equal(counts, counted))
        self._require(sound, "item_counts contradicts the seen items")
        return counts

    def _item_likes(self, tensors: dict[str, np.ndarray]) -> np.ndarray | None:
        """Positive training entries of each item; None if all are positive, or if the file does not say."""
        likes, counts = tensors.get("item_likes"), self.item_counts
        if likes is None:
            if self.seen is None or self.values is None or np.all(self.values > 0):
                return None
            return likes_of([make_csr(self.seen.indptr, self.seen.indices, self.values, self.seen.shape)], counts)
        sound = counts is not None and _fits(likes, np.int64, counts.shape)
        self._require(
            sound and bool(np.all(likes >= 0) and np.all(likes <= counts)), "item_likes contradicts item_counts"
        )
        return likes

    def _labels(self, name: str, tensors: dict[str, np.ndarray], count: int) -> np.ndarray | None:
        tensor = tensors.get(name)
        if tensor is None:
            return None
        vector = tensor.ndim == 1 and tensor.dtype in LABEL_DTYPES
        self._require(vector, f"{name} is a tensor of shape {tensor.shape} and dtype {tensor.dtype}")
        labels = decode_labels(name, tensor)
        self._require(len(labels) == count, f"{len(labels)} {name} for {count} rows of factors")
        self._require(len(set(labels.tolist())) == count, f"{name} has a label more than once")
        return labels

    def check_model(self, model: Any) -> None:
        """Raise unless the parameters of `model` match the tensors, since kernels do not check this."""
        params = {"biases": False} | jsonable(model.get_params(deep=False))
        matrix, biased = self.state.user.matrix, self.state.user.bias is not None
        for name, found in {"factors": matrix.shape[1], "dtype": matrix.dtype.name, "biases": biased}.items():
            problem = f"its tensors are those of a model with {name}={found!r}, not {name}={params[name]!r}"
            self._require(params[name] == found, problem)


def _with_biases(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """Parameters of a file; files written before `CCD` had biases have none, before their penalty one of zero."""
    if kind == "CCD":
        params = {"biases": False} | params
    if "biases" in params and "bias_regularization" not in params:
        return params | {"bias_regularization": 0.0 if params["biases"] else None}
    return params


def _fits(array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> bool:
    return array.dtype == dtype and array.shape == shape


def _is_canonical(indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int]) -> bool:
    """Whether the arrays are a CSR matrix with strictly ascending columns in each row."""
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (indptr, indices)):
        return False
    indptr = indptr.astype(np.int64)  # unsigned differences would wrap around
    return (
        indptr.shape == (shape[0] + 1,)
        and indptr[0] == 0
        and indptr[-1] == len(indices)
        and bool(np.all(indptr[:-1] <= indptr[1:]))
        and (not len(indices) or 0 <= int(indices.min()) <= int(indices.max()) < shape[1])
        and _formats.row_order_status(indptr, indices.astype(np.int32))[0] == _formats.SORTED_UNIQUE
    )


def stored_iteration(path: str | os.PathLike[str]) -> int | None:
    """Completed iterations according to the header of a file, which alone is read; None if the header has none."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            found = json.loads((file.metadata() or {})["state"])["n_iter"]
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if type(found) is int and found >= 0 else None
