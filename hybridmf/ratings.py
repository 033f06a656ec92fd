"""Ratings in: triplets, matrices, data frames and files become one labelled, checked CSR matrix; and the random split.

    triplets, frames, text ──> _Entries (positions + labels) ──> _validate.from_triplets ─┐
    matrices, .mtx, .npz ──────────────────────────────────────> _validate.as_csr ────────┴──> Ratings

Text is read by ``numpy.loadtxt`` while ids are integers and every line is regular. Anything else, mistakes included,
goes through the csv module line by line, which is slower and knows line numbers.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import gzip
import io
import logging
import os
import re
import secrets
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

import numpy as np
import scipy.io
import scipy.sparse as sp

from . import _formats
from ._validate import (
    MERGE_RULES,
    as_csr,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_real,
    check_rng,
    check_threads,
    csr_arrays,
    from_triplets,
    label_array,
    make_csr,
)
from .errors import DuplicateEntriesError, HybridMFError, RatingsError

logger = logging.getLogger("hybridmf")

FORMATS = ("auto", "text", "csv", "tsv", "mtx", "npz", "parquet")
"""What ``Ratings.from_file(format=)`` may say."""

SEPARATORS = ("::", "\t", ",", ";", "|", " ")
"""What a text file is tried with, in this order, when no separator is given; a blank means any run of white space."""

BLOCK_CHARS = 1 << 24
"""Text parsed at a time on the fast path: bounds memory whatever the file's size."""

SNIFFED_LINES = 50
HEAD_BYTES = 4096
MAX_PADDED = 256  # characters; a NumPy string array is as wide as its longest member
MAX_POSITION = int(np.iinfo(np.int32).max)
MAX_VALUE = float(np.finfo(np.float32).max)
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,19})")  # 007 and +7 are labels of their own, not the number 7
ID_COLUMN_NAMES = frozenset({"user", "userid", "users", "uid", "item", "itemid", "items", "iid", "movieid", "artistid"})


class UnknownLabelError(HybridMFError, KeyError):
    """A user or item label that the ratings do not have."""

    __str__ = Exception.__str__  # KeyError would show the message's repr


# ---------------------------------------------------------------------------------------------------------- the class


class Ratings:
    """A sparse user x item matrix with the labels of its rows and columns. Not meant to be changed once made.

    Parameters
    ----------
    user_items : sparse or dense matrix, shape (n_users, n_items)
        Checked and brought to canonical CSR, float32; memory is shared where nothing had to change.
    user_ids : sequence, shape (n_users,), optional
        Label of each row; None where positions are all there is.
    item_ids : sequence, shape (n_items,), optional
        Label of each column.

    Attributes
    ----------
    user_items : csr_array, shape (n_users, n_items)
        float32 values, int32 indices, columns sorted within rows, no pair twice. An explicit zero is an entry.
    user_ids, item_ids : ndarray or None

    Raises
    ------
    RatingsError, TypeError
        `user_items` cannot be used; see `_validate.as_csr`.
    ValueError
        Labels that repeat, or whose number differs from the number of rows or columns.
    """

    def __init__(self, user_items: Any, user_ids: Iterable[Any] | None = None, item_ids: Iterable[Any] | None = None):
        self.user_items: sp.csr_array = as_csr(user_items, name="user_items")
        self.user_ids = _labels("user_ids", user_ids, self.n_users)
        self.item_ids = _labels("item_ids", item_ids, self.n_items)

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_coo(
        cls,
        users: Any,
        items: Any,
        values: Any = None,
        *,
        shape: tuple[int | None, int | None] | None = None,
        user_ids: Iterable[Any] | None = None,
        item_ids: Iterable[Any] | None = None,
        duplicates: str = "error",
    ) -> Ratings:
        """Ratings from coordinate triplets.

        Parameters
        ----------
        users, items : array, shape (nnz,)
            Integers are positions, counted from 0. Strings and objects are labels: they get positions in sorted
            order (or in the order of `user_ids` / `item_ids`, where given). Integer ids that are labels, such as
            MovieLens ids, go in as an object array, or through `from_frame`.
        values : real array, shape (nnz,), optional
            None: every entry is 1.
        shape : (n_users, n_items), optional
            None, as a whole or for one axis: the largest position + 1, or the number of labels.
        user_ids, item_ids : sequence, optional
            Label of each row and of each column.
        duplicates : {"error", "sum", "mean", "last", "max"}
            What to do with a pair that occurs more than once.

        Returns
        -------
        Ratings

        Raises
        ------
        RatingsError
            Unequal lengths, positions out of range, labels that are missing or not in `user_ids`, values not finite.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        TypeError
            Ids or values of a type that cannot be used.
        """
        check_choice("duplicates", duplicates, MERGE_RULES)
        users, items = _vector("users", users), _vector("items", items)
        values = np.ones(len(users), dtype=np.float32) if values is None else _vector("values", values)
        if not len(users) == len(items) == len(values):
            raise RatingsError(
                f"users, items and values must be equally long, got {len(users)}, {len(items)} and {len(values)}"
            )
        n_users, n_items = (None, None) if shape is None else _sizes(shape)
        rows, user_ids, n_users = _resolve("users", users, "user_ids", user_ids, n_users)
        columns, item_ids, n_items = _resolve("items", items, "item_ids", item_ids, n_items)
        return _Entries(rows, columns, values, user_ids, item_ids, (n_users, n_items)).to_ratings(duplicates)

    @classmethod
    def from_matrix(
        cls,
        matrix: Any,
        *,
        user_ids: Iterable[Any] | None = None,
        item_ids: Iterable[Any] | None = None,
        duplicates: str = "error",
    ) -> Ratings:
        """Ratings from a matrix of users (rows) by items (columns).

        Parameters
        ----------
        matrix : sparse matrix or array of any SciPy format, or 2-D array, shape (n_users, n_items)
            Explicit zeros of a sparse matrix are entries; zeros of a dense one are absent.
        user_ids, item_ids : sequence, optional
            Label of each row and of each column.
        duplicates : {"error", "sum", "mean", "last", "max"}
            What to do with a pair that occurs more than once.

        Returns
        -------
        Ratings
            Shares memory with a matrix that already was canonical float32 CSR.

        Raises
        ------
        RatingsError, TypeError
            The matrix cannot be used; see `_validate.as_csr`.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``; it is named by its labels.
        """
        try:
            return cls(as_csr(matrix, name="matrix", duplicates=duplicates), user_ids, item_ids)
        except DuplicateEntriesError:
            coo = matrix.tocoo()
            rows, columns = _labels("user_ids", user_ids, coo.shape[0]), _labels("item_ids", item_ids, coo.shape[1])
            raise _Entries(coo.row, coo.col, coo.data, rows, columns, coo.shape).duplicate_error() from None

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        user: str = "user",
        item: str = "item",
        value: str | None = "rating",
        duplicates: str = "error",
    ) -> Ratings:
        """Ratings from a data frame with one row for each entry.

        Parameters
        ----------
        frame : pandas or polars DataFrame, polars LazyFrame, pyarrow Table, or another frame narwhals knows
        user, item : str
            Columns of ids. Ids always become labels, sorted, integers too.
        value : str or None
            Column of values. None makes every entry 1, and so does the default where the frame holds nothing but the
            two id columns.
        duplicates : {"error", "sum", "mean", "last", "max"}
            What to do with a pair that occurs more than once.

        Returns
        -------
        Ratings

        Raises
        ------
        RatingsError
            A column that is not there, a null id or value, a value that is not finite (rows count from 0).
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        TypeError
            `frame` is no data frame, or a column has a type that cannot be used.
        """
        check_choice("duplicates", duplicates, MERGE_RULES)
        return _frame_entries(frame, "frame", user, item, value).to_ratings(duplicates)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        format: str = "auto",
        separator: str | None = None,
        header: bool | str = "auto",
        user: int | str = 0,
        item: int | str = 1,
        value: int | str | None = 2,
        duplicates: str = "error",
        encoding: str | None = None,
        comment: str | None = "#",
    ) -> Ratings:
        """Ratings from a file: delimited text, MatrixMarket, .npz or Parquet, recognized by content, then by name.

        Parameters
        ----------
        path : str or path
            Text and MatrixMarket files may be gzipped.
        format : {"auto", "text", "csv", "tsv", "mtx", "npz", "parquet"}
            "text" is delimited text with any separator. "npz" is what `save` and ``scipy.sparse.save_npz`` write.
        separator : str, optional
            Between the fields of text: ``","``, ``"::"``, ...; ``" "`` is any run of white space. None finds out.
            Fields may be quoted where the separator is one character other than a blank.
        header : {"auto", True, False}
            Whether text starts with a line of column names. "auto" takes the first line for one when its ids and its
            value are not numbers; with ``value=None``, when its ids are not numbers and those of the next line are
            integers, or when it holds usual names ("user_id", "item", ...).
        user, item : int or str
            Columns of ids, by position from 0 or by name (text and Parquet).
        value : int, str or None
            Column of values. None makes every entry 1, and so does the default in a file of two columns.
        duplicates : {"error", "sum", "mean", "last", "max"}
            What to do with a pair that occurs more than once.
        encoding : str, optional
            Of text; None is UTF-8, or UTF-16 after a byte order mark.
        comment : str or None
            Lines of text that start with it are skipped; None skips none.

        Returns
        -------
        Ratings
            Ids of text and Parquet become labels; in text, int64 where all ids of a column are integers as Python
            prints them, else strings. A MatrixMarket or SciPy .npz file has positions only.

        Raises
        ------
        RatingsError
            The content cannot be used; for text the message names the line, counted from 1.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        FileNotFoundError, IsADirectoryError
            There is no such file.
        ImportError
            A Parquet file without pyarrow.
        """
        check_choice("format", format, FORMATS)
        check_choice("duplicates", duplicates, MERGE_RULES)
        check_choice("header", header, ("auto", True, False))
        name = os.fsdecode(path)
        head = _read_head(name)
        if format == "auto":
            format = _sniff_format(name, head)
        if format == "npz":
            return _read_npz(name, head, duplicates)
        if format == "mtx":
            return _read_matrix_market(name, head, duplicates)
        if format == "parquet":
            return _read_parquet(name, user, item, value).to_ratings(duplicates)
        separator = {"csv": ",", "tsv": "\t"}.get(format) if separator is None else separator
        layout = _find_layout(name, head, separator, header, (user, item, value), encoding, comment)
        return _read_text(layout).to_ratings(duplicates)

    # -------------------------------------------------------------------------------------------------- properties

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        return cast("tuple[int, int]", self.user_items.shape)

    @property
    def n_users(self) -> int:
        """Number of rows."""
        return int(self.user_items.shape[0])

    @property
    def n_items(self) -> int:
        """Number of columns."""
        return int(self.user_items.shape[1])

    @property
    def nnz(self) -> int:
        """Number of entries, explicit zeros among them."""
        return int(self.user_items.nnz)

    @cached_property
    def item_users(self) -> sp.csr_array:
        """The transpose, csr_array, shape (n_items, n_users); made once."""
        arrays = _formats.transpose(*csr_arrays(self.user_items), self.n_items, num_threads=check_threads(None))
        return make_csr(*arrays, self.shape[::-1])

    @cached_property
    def _user_table(self) -> dict[Any, int]:
        return _table(self.user_ids)

    @cached_property
    def _item_table(self) -> dict[Any, int]:
        return _table(self.item_ids)

    # ----------------------------------------------------------------------------------------------------- methods

    def user_index(self, labels: Any) -> Any:
        """Positions of users.

        Parameters
        ----------
        labels : a label, or a vector of labels
            Where `user_ids` is None, positions; they are checked and come back.

        Returns
        -------
        int, or int64 array of shape (len(labels),)

        Raises
        ------
        UnknownLabelError
            A KeyError that names the first unknown label.
        ValueError, TypeError
            Without labels: a position out of range or not an integer.
        """
        return _lookup("user", labels, self.user_ids, self._user_table, self.n_users)

    def item_index(self, labels: Any) -> Any:
        """Positions of items; the same rules as `user_index`."""
        return _lookup("item", labels, self.item_ids, self._item_table, self.n_items)

    def split(self, test_size: float | int = 0.1, random_state: Any = None) -> tuple[Ratings, Ratings]:
        """Random split of the entries into (train, test); see `hybridmf.split`."""
        train, test = split(self, test_size, random_state)
        return train, test

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write matrix and labels to one .npz file; `from_file` brings both back, ``scipy.sparse.load_npz`` the matrix.

        Parameters
        ----------
        path : str or path
            Written under a temporary name and moved into place, so a reader sees a whole file or none.

        Raises
        ------
        TypeError
            Labels other than numbers and strings.
        """
        matrix = self.user_items
        content = {"format": np.array(b"csr"), "shape": np.array(matrix.shape), "_is_array": np.array(True)}
        content |= {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
        for name, labels in (("user_ids", self.user_ids), ("item_ids", self.item_ids)):
            if labels is not None:
                content[name] = _storable(name, labels)
        _write_atomically(os.fsdecode(path), lambda stream: np.savez(stream, **cast(Any, content)))

    def __repr__(self) -> str:
        text = f"Ratings({self.n_users:,} users x {self.n_items:,} items, {self.nnz:,} entries"
        if self.nnz:
            low, high = self.user_items.data.min(), self.user_items.data.max()
            text += f" ({100 * self.nnz / self.n_users / self.n_items:.3g} %), values {low:g} to {high:g}"
        return f"{text}; user ids: {_kind(self.user_ids)}, item ids: {_kind(self.item_ids)})"


# ----------------------------------------------------------------------------------------------------------- the split


def split(ratings: Any, test_size: float | int = 0.1, random_state: Any = None) -> tuple[Any, Any]:
    """Random split of the entries into a training and a test part of the same shape.

    Parameters
    ----------
    ratings : Ratings, or matrix of shape (n_users, n_items)
    test_size : float or int
        Share of the entries, 0 < test_size < 1 (``round(nnz * test_size)`` entries, at least 1), or their number.
    random_state : None, int, Generator or RandomState
        The same seed gives the same split.

    Returns
    -------
    train, test : Ratings with the labels of `ratings`; for a matrix, csr_array
        Disjoint, and together the input: each entry, explicit zeros too, is in one of them. A matrix of float64 or of
        wide integers gives float64 parts, any other one float32.

    Raises
    ------
    ValueError, TypeError
        `test_size` out of range or not a number.
    RatingsError
        `ratings` cannot be used, or nothing would be left to train on.
    """
    dtype = np.float32 if isinstance(ratings, Ratings) else _exact_dtype(ratings)
    matrix = as_csr(ratings, name="ratings", dtype=dtype)
    chosen = _choose(matrix.nnz, test_size, check_rng(random_state))
    train, test = _take(matrix, ~chosen), _take(matrix, chosen)
    if isinstance(ratings, Ratings):
        return tuple(Ratings(part, ratings.user_ids, ratings.item_ids) for part in (train, test))  # type: ignore[return-value]
    return train, test


def _exact_dtype(matrix: Any) -> type:
    """float64 where float32 could not hold every value of the matrix's dtype."""
    given = getattr(matrix, "dtype", np.dtype(np.float64))
    narrow = given.kind in "biuf" and np.promote_types(given, np.float32) == np.float32
    return np.float32 if narrow else np.float64


def _choose(nnz: int, test_size: float | int, rng: np.random.Generator) -> np.ndarray:
    """Mask over the entries, True for those of the test part."""
    if isinstance(test_size, (int, np.integer)):
        count = check_int("test_size", test_size, 1)
    else:
        share = check_real("test_size", test_size, 0, strict=True)
        if share >= 1:
            raise ValueError(f"test_size must be a share below 1 or an integer number of entries, got {test_size!r}")
        count = max(1, round(nnz * share))
    if count >= nnz:
        raise RatingsError(f"test_size={test_size} takes {count} of {nnz} entries and leaves none to train on")
    mask = np.zeros(nnz, dtype=bool)
    mask[rng.choice(nnz, count, replace=False, shuffle=False)] = True
    return mask


def _take(matrix: sp.csr_array, keep: np.ndarray) -> sp.csr_array:
    """Return the entries under the mask; order and shape stay, so the part is canonical as the whole was."""
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return make_csr(before[matrix.indptr], matrix.indices[keep], matrix.data[keep], matrix.shape)


# ---------------------------------------------------------------------------------------------------- labels, positions


@dataclass
class _Entries:
    """Triplets on their way to a matrix; `where` says in the source's words where entries stand."""

    users: np.ndarray  # (nnz,) positions
    items: np.ndarray  # (nnz,) positions
    values: np.ndarray  # (nnz,)
    user_ids: np.ndarray | None
    item_ids: np.ndarray | None
    shape: tuple[int, int]
    source: str = "ratings"
    where: Callable[[int, int], str] = lambda first, second: f"entries {first} and {second}"

    def to_ratings(self, duplicates: str) -> Ratings:
        try:
            matrix = from_triplets(self.users, self.items, self.values, self.shape, duplicates=duplicates)
        except DuplicateEntriesError:
            raise self.duplicate_error() from None
        return Ratings(matrix, self.user_ids, self.item_ids)

    def duplicate_error(self) -> DuplicateEntriesError:
        """Name the first entry that repeats a pair, and the one it repeats."""
        pairs = self.users.astype(np.int64) * self.shape[1] + self.items
        order = np.argsort(pairs, kind="stable")
        repeats = np.flatnonzero(pairs[order[1:]] == pairs[order[:-1]])
        place = repeats[np.argmin(order[repeats + 1])]
        first, second = int(order[place]), int(order[place + 1])
        user, item = _label_of(self.user_ids, self.users[first]), _label_of(self.item_ids, self.items[first])
        return DuplicateEntriesError(
            f"{self.source} has more than one entry for the pair (user {user}, item {item}): "
            f"{self.where(first, second)}, values {float(self.values[first]):g} and {float(self.values[second]):g}. "
            'Merge them with duplicates="sum", "mean", "last" or "max"'
        )


def _kind(ids: np.ndarray | None) -> str:
    return "positions" if ids is None else "str" if ids.dtype.kind == "U" else ids.dtype.name


def _label_of(ids: np.ndarray | None, position: int) -> str:
    return f"at position {position}" if ids is None else repr(ids[position : position + 1].tolist()[0])


def _vector(name: str, values: Any) -> np.ndarray:
    """Turn a sequence into a 1-D array; mixed lists and tuples stay objects (NumPy makes strings and rows of them)."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a vector, got {values!r} of type {type(values).__name__}")
    if hasattr(values, "__array__"):
        result = np.asarray(values)
        if result.ndim != 1:
            raise RatingsError(f"{name} must be one-dimensional, got shape {result.shape}")
        return result
    members = list(values)
    numbers = all(isinstance(member, (int, float, np.number)) for member in members)
    if numbers or all(isinstance(member, str) and len(member) <= MAX_PADDED for member in members):
        return np.asarray(members)
    return np.fromiter(members, dtype=object, count=len(members))


def _labels(name: str, labels: Iterable[Any] | None, count: int) -> np.ndarray | None:
    return None if labels is None else label_array(name, _vector(name, labels), count)


def _sizes(shape: Any) -> tuple[int | None, int | None]:
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise ValueError(f"shape must be (n_users, n_items), got {shape!r}")
    n_users, n_items = (
        None if size is None else check_int(f"shape[{axis}]", size, 0, MAX_POSITION) for axis, size in enumerate(shape)
    )
    return n_users, n_items


def _resolve(
    name: str, ids: np.ndarray, ids_name: str, labels: Iterable[Any] | None, size: int | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Positions, labels and their number for one side of `from_coo`."""
    if not ids.size:
        ids = ids.astype(np.int32)
    if ids.dtype.kind in "iu":
        return _resolve_positions(name, ids, ids_name, labels, size)
    if ids.dtype.kind not in "USO":
        raise TypeError(
            f"{name} has dtype {ids.dtype}; expected integers (positions), or strings or objects (labels): "
            f"pass {name}.astype(int) or {name}.astype(object)"
        )
    if labels is None:
        codes, found = _factorize(name, ids, "entry")
    else:
        found = _known_labels(ids_name, labels)
        codes = _known_codes(name, ids, ids_name, found)
    if size not in (None, len(found)):
        raise RatingsError(
            f"shape says {size} {name}, but there are {len(found)} labels; leave the shape out, or give all {size} "
            f"labels as {ids_name}"
        )
    return codes, found, len(found)


def _resolve_positions(
    name: str, ids: np.ndarray, ids_name: str, labels: Iterable[Any] | None, size: int | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    known = None if labels is None else _vector(ids_name, labels)
    if size is None:
        size = _largest(name, ids) + 1 if known is None else len(known)
    return ids, _labels(ids_name, known, size), size


def _known_labels(name: str, labels: Iterable[Any]) -> np.ndarray:
    vector = _vector(name, labels)
    return cast(np.ndarray, label_array(name, vector, len(vector)))


def _largest(name: str, ids: np.ndarray) -> int:
    largest = int(ids.max()) if ids.size else -1
    if largest >= MAX_POSITION:
        raise RatingsError(
            f"{name} has {largest} at entry {int(ids.argmax())}; integers are positions here, at most "
            f"{MAX_POSITION - 1}. If they are labels, pass {name}.astype(object)"
        )
    return max(largest, -1)  # a negative position is from_triplets' to report


def _known_codes(name: str, ids: np.ndarray, ids_name: str, labels: np.ndarray) -> np.ndarray:
    codes = _find(_table(labels), ids)
    unknown = np.flatnonzero(codes < 0)
    if unknown.size:
        raise RatingsError(
            f"{name} has the label {_label_of(ids, unknown[0])} at entry {unknown[0]}, which is not among the "
            f"{len(labels)} {ids_name}"
        )
    return codes


def _factorize(name: str, ids: np.ndarray | list[Any], unit: str) -> tuple[np.ndarray, np.ndarray]:
    """(position of each id, sorted unique labels); `unit` is what the source calls an entry."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return _factorize_integers(ids)
    return _factorize_objects(name, ids if isinstance(ids, list) else ids.tolist(), unit)


def _factorize_integers(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if ids.size == 0:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    low, high = int(ids.min()), int(ids.max())
    if high > np.iinfo(np.int64).max or high - low >= 4 * ids.size + 2**16:
        labels, codes = np.unique(ids, return_inverse=True)
        return codes, labels if high > np.iinfo(np.int64).max else labels.astype(np.int64)
    # Ids that lie close together: a table of the range is far cheaper than sorting all entries.
    offsets = ids.astype(np.int64) - low
    present = np.zeros(high - low + 1, dtype=bool)
    present[offsets] = True
    return (np.cumsum(present, dtype=np.int32) - 1)[offsets], np.flatnonzero(present) + low


def _factorize_objects(name: str, ids: list[Any], unit: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        unique = set(ids)
    except TypeError as error:
        raise TypeError(f"{name} has labels that cannot be used as dictionary keys ({error})") from error
    if any(map(_is_missing, unique)):
        place = next(k for k, label in enumerate(ids) if _is_missing(label))
        raise RatingsError(f"{name} has no id ({ids[place]}) at {unit} {place}; remove or fill such entries")
    try:
        labels = sorted(unique)
    except TypeError as error:
        kinds = ", ".join(sorted({type(label).__name__ for label in unique}))
        raise TypeError(f"{name} mixes labels that have no order ({kinds}); make them all strings") from error
    table = {label: position for position, label in enumerate(labels)}
    return np.fromiter(map(table.__getitem__, ids), np.int32, len(ids)), _plain_labels(labels)


def _is_missing(label: Any) -> bool:
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas.NA has no truth value
        return True


def _plain_labels(labels: list[Any]) -> np.ndarray:
    """Array of numbers, or of strings where that does not pad much; object for all else."""
    kinds = set(map(type, labels))
    if kinds == {int} or kinds == {float} or (kinds == {str} and max(map(len, labels)) <= MAX_PADDED):
        return np.asarray(labels)
    return np.fromiter(labels, dtype=object, count=len(labels))


def _table(ids: np.ndarray | None) -> dict[Any, int]:
    return {} if ids is None else {label: position for position, label in enumerate(ids.tolist())}


def _find(table: dict[Any, int], labels: np.ndarray) -> np.ndarray:
    """Position of each label, int64; -1 for the unknown ones."""
    return np.fromiter((table.get(label, -1) for label in labels.tolist()), np.int64, len(labels))


def _lookup(side: str, labels: Any, ids: np.ndarray | None, table: dict[Any, int], count: int) -> Any:
    if getattr(labels, "ndim", 1) == 0:  # NumPy scalars and 0-d arrays
        labels = labels.item()
    scalar = isinstance(labels, (str, bytes)) or not isinstance(labels, Iterable)
    scalar = scalar or (isinstance(labels, tuple) and labels in table)
    if ids is None:
        positions = check_ids("labels", labels, count, f"n_{side}s")
        return int(positions[0]) if scalar else positions
    wanted = np.fromiter([labels], dtype=object, count=1) if scalar else _vector("labels", labels)
    positions = _find(table, wanted)
    unknown = np.flatnonzero(positions < 0)
    if unknown.size:
        more = f" (and {unknown.size - 1} more)" if unknown.size > 1 else ""
        raise UnknownLabelError(
            f"unknown {side} label {_label_of(wanted, unknown[0])}{more}; there are {count} {side} labels of type "
            f"{_kind(ids)}, such as {', '.join(map(repr, ids[:3].tolist()))}"
        )
    return int(positions[0]) if scalar else positions


# -------------------------------------------------------------------------------------------------------------- frames


def _frame_entries(frame: Any, source: str, user: Any, item: Any, value: Any) -> _Entries:
    import narwhals as nw

    try:
        table = nw.from_native(frame)
    except TypeError as error:
        raise TypeError(
            f"frame must be a pandas, polars or pyarrow table, got {type(frame).__name__}; "
            "matrices go through Ratings.from_matrix, arrays through Ratings.from_coo"
        ) from error
    names = table.collect_schema().names()
    if value == "rating" and value not in names and len(names) == 2:
        value = None
    wanted = {"user": user, "item": item} | ({} if value is None else {"value": value})
    _check_columns(source, wanted, names)
    table = table.select(*wanted.values())
    eager = table.collect() if isinstance(table, nw.LazyFrame) else table
    users, user_ids = _factorize(f"column {user!r} of {source}", _frame_ids(source, eager, user), "row")
    items, item_ids = _factorize(f"column {item!r} of {source}", _frame_ids(source, eager, item), "row")
    values = np.ones(len(users), np.float32) if value is None else _frame_values(source, eager, value)
    shape = (len(user_ids), len(item_ids))
    return _Entries(users, items, values, user_ids, item_ids, shape, source, lambda a, b: f"rows {a} and {b}")


def _check_columns(source: str, wanted: dict[str, Any], names: list[Any]) -> None:
    for argument, column in wanted.items():
        if column not in names:
            hint = "; value=None makes every entry 1" if argument == "value" else ""
            raise RatingsError(
                f"{source} has no column {column!r} ({argument}={column!r}); its columns are "
                f"{', '.join(map(repr, names))}{hint}"
            )
    if len(set(wanted.values())) < len(wanted):
        named = ", ".join(f"{argument}={column!r}" for argument, column in wanted.items())
        raise ValueError(f"user, item and value must be different columns, got {named}")


def _frame_column(source: str, table: Any, column: Any) -> Any:
    series = table.get_column(column)
    if series.null_count():
        row = int(np.flatnonzero(series.is_null().to_numpy())[0])
        raise RatingsError(f"column {column!r} of {source} is null at row {row}; remove or fill such rows")
    return series


def _frame_ids(source: str, table: Any, column: Any) -> np.ndarray | list[Any]:
    series = _frame_column(source, table, column)
    # As a list, strings cost what they are long; a NumPy array pads each one to the longest.
    return series.to_numpy() if series.dtype.is_integer() else series.to_list()


def _frame_values(source: str, table: Any, column: Any) -> np.ndarray:
    given = _frame_column(source, table, column).to_numpy()
    try:
        if given.dtype.kind not in "fiubO":
            raise TypeError(f"its dtype is {given.dtype}")
        values = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"column {column!r} of {source} holds no real numbers ({error})") from error
    bad = np.flatnonzero(~(np.abs(values) <= MAX_VALUE))
    if bad.size:
        raise RatingsError(
            f"column {column!r} of {source} has the value {values[bad[0]]} at row {bad[0]}; values must be finite "
            "float32 numbers: remove or replace such rows"
        )
    return values


# ------------------------------------------------------------------------------------------------- files of any format


@contextlib.contextmanager
def _reading(path: str, encoding: str = "utf-8") -> Iterator[None]:
    """Errors of gzip and of the decoder in words that say what to do."""
    try:
        yield
    except EOFError as error:
        raise RatingsError(f"{path} is truncated: its gzip stream ends early; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise RatingsError(f"{path} is a corrupt gzip file ({error}); copy or download it again") from error
    except UnicodeError as error:
        raise RatingsError(
            f"{path}{_undecodable_line(path, encoding)} is not valid {encoding} ({error}); "
            'pass the right one, such as encoding="latin-1"'
        ) from error


def _undecodable_line(path: str, encoding: str) -> str:
    if encoding.startswith(("utf-16", "utf-32")):  # a line end is more than one byte there
        return ""
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode(encoding)
            except UnicodeError:
                return f", line {number}"
    return ""


def _open_bytes(path: str) -> BinaryIO:
    """Open for reading; gzip is told by its first two bytes, whatever the name says."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "expected a file of ratings, got a directory", path)
    stream = open(path, "rb")  # noqa: SIM115
    if stream.peek(2)[:2] == b"\x1f\x8b":
        stream.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    return stream


def _read_head(path: str) -> bytes:
    with _reading(path), _open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise RatingsError(f"{path} is empty; expected ratings in one of the formats {', '.join(FORMATS[1:])}")
    return head


def _sniff_format(path: str, head: bytes) -> str:
    for magic, format in ((b"PK\x03\x04", "npz"), (b"PAR1", "parquet"), (b"%%MatrixMarket", "mtx")):
        if head.startswith(magic):
            return format
    ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
    return {".npz": "npz", ".parquet": "parquet", ".pq": "parquet", ".mtx": "mtx"}.get(ending, "text")


def _read_npz(path: str, head: bytes, duplicates: str) -> Ratings:
    if not head.startswith(b"PK\x03\x04"):
        raise RatingsError(f"{path} is no .npz file (it starts with {head[:8]!r}); write one with Ratings.save")
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            ids = {name: archive[name] for name in ("user_ids", "item_ids") if name in names}
        matrix = sp.load_npz(path) if "format" in names else None
    except Exception as error:  # a damaged archive fails in zipfile, zlib, NumPy or SciPy, each in several ways
        raise RatingsError(f"{path} cannot be read as .npz ({error}); it is damaged or not one of ours") from error
    if matrix is None:
        raise RatingsError(
            f"{path} holds no sparse matrix but {', '.join(names[:5]) or 'nothing'}; expected a file of Ratings.save "
            "or scipy.sparse.save_npz (unpack other archives first)"
        )
    return _matrix_ratings(path, matrix, duplicates, **ids)


def _read_matrix_market(path: str, head: bytes, duplicates: str) -> Ratings:
    if not head.startswith(b"%%MatrixMarket"):
        raise RatingsError(f"{path} is no MatrixMarket file: line 1 must start with %%MatrixMarket, got {head[:40]!r}")
    if b"complex" in head.split(b"\n", 1)[0].lower():
        raise RatingsError(f"{path} holds complex values; ratings must be real (real, integer or pattern)")
    try:
        with _reading(path), _open_bytes(path) as stream:
            matrix = scipy.io.mmread(stream)
    except RatingsError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise RatingsError(f"{path} cannot be read as MatrixMarket: {error}") from error
    return _matrix_ratings(path, matrix, duplicates)


def _matrix_ratings(path: str, matrix: Any, duplicates: str, **ids: Any) -> Ratings:
    """`Ratings.from_matrix`, with the path in what it may have to say."""
    try:
        return Ratings.from_matrix(matrix, duplicates=duplicates, **ids)
    except (ValueError, TypeError) as error:
        kind = DuplicateEntriesError if isinstance(error, DuplicateEntriesError) else RatingsError
        raise kind(f"{path}: {error}") from error


def _read_parquet(path: str, user: int | str, item: int | str, value: int | str | None) -> _Entries:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow, which reads Parquet: pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = _select(path, tuple(names), len(names), (user, item, value))
            selected = [None if column is None else names[column] for column in columns]
            table = file.read(columns=[name for name in selected if name is not None])
    except (pa.ArrowException, OSError) as error:
        raise RatingsError(f"{path} cannot be read as Parquet ({error}); it is damaged or another format") from error
    return _frame_entries(table, path, *selected)


def _storable(name: str, labels: np.ndarray) -> np.ndarray:
    """Labels as an array that needs no pickle."""
    if labels.dtype.kind != "O":
        return labels
    if all(isinstance(label, str) for label in labels):
        return labels.astype(np.str_)
    kind = next(type(label).__name__ for label in labels if not isinstance(label, str))
    raise TypeError(f"{name} has labels of type {kind}; only numbers and strings can be saved")


def _write_atomically(path: str, write: Callable[[BinaryIO], Any]) -> None:
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"  # in the same folder: a rename must not cross file systems
    try:
        with open(temporary, "xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ---------------------------------------------------------------------------------------------------------- text files


@dataclass(frozen=True)
class _Layout:
    """What is known of a text file before it is read."""

    path: str
    encoding: str
    comment: str | None
    separator: str
    header: bool
    n_fields: int
    user: int
    item: int
    value: int | None
    integer_ids: bool  # of the first entry: worth trying the fast path

    def open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(_open_bytes(self.path), encoding=self.encoding)


class _Lines:
    """Iterator over the lines that count; knows the number and text of the first line of the record being read."""

    def __init__(self, stream: Iterable[str], comment: str | None) -> None:
        self.stream, self.comment = enumerate(stream, 1), comment
        self.last = 0
        self.start()

    def start(self) -> None:
        """Begin a new record."""
        self.number, self.text = 0, ""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        while True:
            self.last, line = next(self.stream)
            text = line.strip()
            if text and not (self.comment and text.startswith(self.comment)):
                if not self.number:
                    self.number, self.text = self.last, line
                return line


def _find_layout(
    path: str,
    head: bytes,
    separator: str | None,
    header: bool | str,
    selectors: tuple[int | str, int | str, int | str | None],
    encoding: str | None,
    comment: str | None,
) -> _Layout:
    """Look at the first lines and settle separator, header and columns."""
    codec = _text_encoding(path, head, encoding)
    if separator is not None:
        _check_separator(separator)
    with _reading(path, codec), io.TextIOWrapper(_open_bytes(path), encoding=codec) as stream:
        lines = [line for line, _ in zip(_Lines(stream, comment), range(SNIFFED_LINES), strict=False)]
    if not lines:
        raise RatingsError(f"{path} holds no ratings, only blank lines or comments")
    if separator is None:
        separator = _sniff_separator(path, lines, selectors[2])
    rows = _sample(lines, separator)
    n_fields = _usual_width(rows)[0]
    first = [field.strip() for field in rows[0]]
    has_header = _has_header(rows, n_fields, header, selectors)
    if has_header and len(first) != n_fields:
        raise RatingsError(f"{path}: the header has {len(first)} fields, {first}, but the lines below have {n_fields}")
    user, item, value = _select(path, tuple(first) if has_header else None, n_fields, selectors)
    if has_header:
        named = None if value is None else first[value]
        logger.info("%s has a header; user=%r, item=%r, value=%r", path, first[user], first[item], named)
    sample = next((row for row in rows[has_header:] if len(row) == n_fields), rows[0])
    integer_ids = all(INTEGER.fullmatch(sample[column].strip()) for column in (user, item))
    return _Layout(path, codec, comment, separator, has_header, n_fields, user, item, value, integer_ids)


def _text_encoding(path: str, head: bytes, encoding: str | None) -> str:
    if encoding is not None:
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # unlike lookup, refuses base64 and its like
            name = codecs.lookup(encoding).name
        except LookupError as error:
            raise ValueError(f"encoding={encoding!r} is no text encoding; try 'utf-8' or 'latin-1'") from error
        return "utf-8-sig" if name == "utf-8" else name
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in head:
        raise RatingsError(
            f"{path} is not text (it has a zero byte at {head.index(0)}); formats that are read: "
            f"{', '.join(FORMATS[1:])}. For text in UTF-16 pass its encoding"
        )
    return "utf-8-sig"


def _check_separator(separator: Any) -> None:
    if not isinstance(separator, str):
        raise TypeError(f"separator must be a string or None, got {separator!r}")
    if not separator or set(separator) & set('\r\n"'):
        raise ValueError(f"separator must be a string without quotes and line ends, got {separator!r}")


def _split_lines(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    """Fields of each record; only with a separator of one character can fields be quoted, and span lines."""
    if separator == " ":
        return (line.split() for line in lines)
    if len(separator) > 1:
        return (line.rstrip("\n").split(separator) for line in lines)
    return csv.reader(lines, delimiter=separator)


def _sample(lines: list[str], separator: str) -> list[list[str]]:
    """Return the records of the first lines, up to one that the csv module refuses."""
    rows: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        rows.extend(_split_lines(lines, separator))
    return rows or [lines[:1]]


def _usual_width(rows: list[list[str]]) -> tuple[int, float]:
    """Return the most frequent number of fields, and the share of lines that have it."""
    widths = Counter(map(len, rows))
    width = max(widths, key=lambda width: (widths[width], width))
    return width, widths[width] / len(rows)


def _sniff_separator(path: str, lines: list[str], value: int | str | None) -> str:
    """Return the separator under which the lines look most like ratings, the first of equals."""

    def score(separator: str) -> tuple[bool, bool, float]:
        rows = _sample(lines, separator)
        width, share = _usual_width(rows)
        if width < 2 or share < 0.5:
            return False, False, 0.0
        whole = [row for row in rows[1:] if len(row) == width]
        numeric = not isinstance(value, int) or all(_is_number(row[value]) for row in whole if value < width)
        return width > 2 and numeric, width > 2, share

    preferred = {".csv": ",", ".tsv": "\t"}.get(os.path.splitext(path.lower().removesuffix(".gz"))[1])
    candidates = sorted(SEPARATORS, key=lambda separator: separator != preferred)
    # White space comes last on its own: it also stands inside titles and dates of files with another separator.
    for group in ([separator for separator in candidates if separator != " "], [" "]):
        best = max(group, key=score)
        if score(best)[2]:
            return best
    tried = ", ".join(map(repr, SEPARATORS))
    raise RatingsError(f"{path}: no separator in {_cut(lines[0])}; tried {tried}. Pass the right one as separator=")


def _is_number(text: str) -> bool:
    return _number(text) is not None


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)  # float() would take 1_0 for 10; loadtxt does not
    except ValueError:
        return None


def _has_header(rows: list[list[str]], n_fields: int, header: bool | str, selectors: tuple[Any, Any, Any]) -> bool:
    named = [selector for selector in selectors if isinstance(selector, str)]
    if named and header is False:
        raise ValueError(f"column {named[0]!r} is given by name, but header=False says there are none; give its number")
    if header != "auto" or named:
        return True if named else check_bool("header", header)
    user, item, value = selectors
    first, second = rows[0], rows[1] if len(rows) > 1 else []
    places = [place for place in (user, item) if isinstance(place, int) and 0 <= place < len(first)]
    if any(_is_number(first[place]) for place in places):
        return False
    if value is not None and not (value == 2 and n_fields == 2):
        return isinstance(value, int) and 0 <= value < len(first) and not _is_number(first[value])
    usual = any(re.sub("[^a-z]", "", first[place].lower()) in ID_COLUMN_NAMES for place in places)
    return usual or any(INTEGER.fullmatch(second[place].strip()) for place in places if place < len(second))


def _select(
    path: str, names: tuple[str, ...] | None, n_fields: int, selectors: tuple[int | str, int | str, int | str | None]
) -> tuple[int, int, int | None]:
    """Numbers of the user, item and value columns."""
    user, item, value = selectors
    if value == 2 and n_fields == 2:
        value = None
    wanted = {"user": user, "item": item} | ({} if value is None else {"value": value})
    places = {name: _column(path, name, selector, names, n_fields) for name, selector in wanted.items()}
    if len(set(places.values())) < len(places):
        raise ValueError(f"user, item and value must be different columns, got columns {places}")
    return places["user"], places["item"], places.get("value")


def _column(path: str, argument: str, selector: int | str, names: tuple[str, ...] | None, n_fields: int) -> int:
    if isinstance(selector, str):
        if names is None or selector not in names:
            known = ", ".join(map(repr, names or ()))
            raise RatingsError(f"{path} has no column {selector!r} ({argument}={selector!r}); its columns are {known}")
        return names.index(selector)
    place = check_int(argument, selector, 0)
    if place >= n_fields:
        hint = "; value=None makes every entry 1" if argument == "value" else ""
        raise RatingsError(f"{path} has {n_fields} columns, none for {argument}={place} (they count from 0){hint}")
    return place


def _read_text(layout: _Layout) -> _Entries:
    numeric = _read_integers(layout) if layout.integer_ids else None
    if numeric is not None:
        (users, user_ids), (items, item_ids) = map(_factorize_integers, numeric[:2])
        values = numeric[2]
    else:
        (users, user_ids), (items, item_ids), values = _read_records(layout)
    if not len(users):
        raise RatingsError(f"{layout.path} holds no ratings, only a header")

    def where(first: int, second: int) -> str:
        lines = [lines.number for k, (lines, _) in enumerate(_records(layout)) if k in (first, second)]
        return f"lines {lines[0]} and {lines[1]}"

    shape = (len(user_ids), len(item_ids))
    return _Entries(users, items, values, user_ids, item_ids, shape, layout.path, where)


def _read_integers(layout: _Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Users, items (int64) and values (float64) by numpy.loadtxt; None as soon as anything is out of the ordinary."""
    kinds = {layout.user: "i8", layout.item: "i8", layout.value: "f8"}
    dtype = np.dtype([(f"f{k}", kinds.get(k, "U1")) for k in range(layout.n_fields)])
    padded = re.compile(rf"(?:\n|{re.escape(layout.separator)})[ \t]*-?0[0-9]")
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    header = layout.header
    for block in _blocks(layout):
        if "+" in block or padded.search("\n" + block):  # loadtxt would make integers of what `INTEGER` refuses
            return None
        lines = _block_lines(block, layout)
        if header:
            lines = [line for line in lines if line.strip()]
            header, lines = not lines, lines[1:]
        if not any(lines):
            continue
        table = _parse_block(lines, dtype, layout)
        if table is None:
            return None
        values = np.ones(len(table)) if layout.value is None else table[f"f{layout.value}"]
        if not np.all(np.abs(values) <= MAX_VALUE):
            return None
        parts.append((table[f"f{layout.user}"], table[f"f{layout.item}"], values))
    if not parts:
        return np.empty(0), np.empty(0), np.empty(0)
    users, items, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return users, items, values


def _blocks(layout: _Layout) -> Iterator[str]:
    """Stretches of whole lines."""
    with _reading(layout.path, layout.encoding), layout.open() as stream:
        while block := stream.read(BLOCK_CHARS):
            yield block + stream.readline()


def _block_lines(block: str, layout: _Layout) -> list[str]:
    if len(layout.separator) > 1 and "\x1f" not in block:  # loadtxt takes one character: ASCII's unit separator
        block = block.replace(layout.separator, "\x1f")
    lines = block.split("\n")
    if layout.comment and layout.comment in block:
        lines = [line for line in lines if not line.lstrip().startswith(layout.comment)]
    return lines


def _parse_block(lines: list[str], dtype: np.dtype, layout: _Layout) -> np.ndarray | None:
    """Structured table of the lines, with as many fields in each as `dtype` has; None if any line is irregular."""
    delimiter = {" ": None}.get(layout.separator, "\x1f" if len(layout.separator) > 1 else layout.separator)
    with warnings.catch_warnings():
        # NumPy before 2.4 reads the id 1.5 as 1 with a DeprecationWarning; such ids are labels, not integers.
        warnings.simplefilter("error")
        try:
            return np.loadtxt(lines, dtype=dtype, delimiter=delimiter, comments=None, ndmin=1)
        except (ValueError, OverflowError, Warning):
            return None


def _records(layout: _Layout) -> Iterator[tuple[_Lines, list[str]]]:
    """Fields of each record below the header; the `_Lines` beside them says where the record starts."""
    with _reading(layout.path, layout.encoding), layout.open() as stream:
        lines = _Lines(stream, layout.comment)
        rows = _split_lines(lines, layout.separator)
        if layout.header:
            next(rows)
        while True:
            lines.start()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise _bad_line(layout, lines, f"cannot be split into fields ({error})") from error
            if len(row) != layout.n_fields:
                raise _bad_line(layout, lines, f"has {len(row)} field{'s' if len(row) != 1 else ''}")
            yield lines, row


def _read_records(
    layout: _Layout,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:
    """((positions, labels) of users, the same of items, values) through the csv module."""
    user_table: dict[str, int] = {}
    item_table: dict[str, int] = {}
    users, items, values = array("i"), array("i"), array("d")
    for lines, row in _records(layout):
        user, item = row[layout.user].strip(), row[layout.item].strip()
        if not user or not item:
            raise _bad_line(layout, lines, f"has no {'item' if user else 'user'}")
        users.append(user_table.setdefault(user, len(user_table)))
        items.append(item_table.setdefault(item, len(item_table)))
        values.append(1.0 if layout.value is None else _value(layout, lines, row[layout.value]))
    return (
        _sorted_labels(np.array(users, dtype=np.int32), list(user_table)),
        _sorted_labels(np.array(items, dtype=np.int32), list(item_table)),
        np.array(values, dtype=np.float64),
    )


def _value(layout: _Layout, lines: _Lines, text: str) -> float:
    value = _number(text)
    if value is None:
        raise _bad_line(layout, lines, f"has the value {_cut(text)}, which is not a number (value=None ignores values)")
    if not -MAX_VALUE <= value <= MAX_VALUE:
        raise _bad_line(layout, lines, f"has the value {_cut(text)}; values must be finite float32 numbers")
    return value


def _bad_line(layout: _Layout, lines: _Lines, problem: str) -> RatingsError:
    columns = f"user={layout.user}, item={layout.item}" + ("" if layout.value is None else f", value={layout.value}")
    hint = f". It runs to line {lines.last}: is a quote left open?" if lines.last > lines.number else ""
    separator = "white space" if layout.separator == " " else repr(layout.separator)
    return RatingsError(
        f"{layout.path}, line {lines.number} {problem}: {_cut(lines.text)}; "
        f"expected {layout.n_fields} fields separated by {separator} (columns from 0: {columns}){hint}"
    )


def _cut(text: str, length: int = 80) -> str:
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= length else text[:length] + "...")


def _sorted_labels(codes: np.ndarray, labels: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and labels brought to sorted order; labels become int64 where every one is such an integer."""
    limits = np.iinfo(np.int64)
    if all(INTEGER.fullmatch(label) and limits.min <= int(label) <= limits.max for label in labels):
        positions, unique = _factorize_integers(np.array(labels, dtype=np.int64))
    else:
        positions, unique = _factorize_objects("ids", labels, "label")
    return positions[codes], unique
