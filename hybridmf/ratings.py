"""Ratings in: triplets, matrices, data frames and files become one labelled, checked CSR matrix; and the random split.

    frames, Parquet ──> readers ──┐
    text ─────> text, lists ──────┼──> labels.Entries (positions + labels) ──> validate.from_triplets ─┐
    triplets ─────────────────────┘                                                                    ├──> Ratings
    .mtx, .npz ───────> readers ──┬───────────────────────────────────────────> validate.as_csr ───────┘
    matrices ─────────────────────┘

`data.labels` maps ids to positions; `core.files` recognizes file formats.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, cast, overload

import numpy as np
import scipy.sparse as sp

from .core.files import write_atomically
from .core.frames import check_kind, kind_of, make_frame
from .core.sparse import entry_rows, keep_entries, take_rows, transposed
from .core.table import html_facts
from .core.triplets import frame_names, named_like_entries
from .core.validate import (
    MERGE_RULES,
    as_csr,
    check_choice,
    check_int,
    check_real,
    check_rng,
    check_threads,
    from_triplets,
    frozen_csr,
    make_csr,
)
from .data import readers
from .data.columns import AUTO, column_place, log_columns
from .data.labels import (
    Entries,
    NoEntriesError,
    as_times,
    as_vector,
    as_weights,
    axis_sizes,
    joined_entries,
    joined_files,
    label_array,
    label_kind,
    label_table,
    look_up,
    refuse_other_index,
    refuse_series,
    resolve,
    storable,
    warn_spelled_twice,
)
from .data.layout import FileOptions
from .data.lists import list_options, read_lists
from .data.splits import WAYS, fold_of_entries, held_out, last_of_each_user
from .data.text import find_layout, read_fields, read_text
from .data.transforms import ages_of, axis_key, labels_at
from .data.wide import is_wide, read_wide
from .errors import DuplicateEntriesError, RatingsError

if TYPE_CHECKING:  # parts of frames are Ratings, those of matrices csr_array
    from narwhals.stable.v2.typing import IntoFrame

logger = logging.getLogger("hybridmf")

LEAST_DECAY = 1e-6
"""Least factor of `Ratings.time_decay`, which keeps the weights of entries of any age in the range of float32."""


class EntryView:
    """Entries of ratings as samples: an index selects entries, and the result is `Ratings` of the same shape.

    Attributes
    ----------
    ratings : Ratings
    shape : (int,)
        Number of entries.
    """

    def __init__(self, ratings: Ratings) -> None:
        self.ratings = ratings

    @property
    def shape(self) -> tuple[int]:
        """(nnz,)."""
        return (int(self.ratings.user_items.nnz),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, entries: Any) -> Ratings:
        mask = np.zeros(len(self), dtype=bool)
        places = np.arange(len(self))[axis_key(entries)]
        mask[places] = True
        if np.count_nonzero(mask) < np.size(places):  # of a bootstrap sample; a pair has one entry
            raise ValueError("entries are selected at most once each, and the index repeats some")
        return self.ratings._keep(mask)


class Ratings:
    """A sparse user x item matrix with labels of its rows and columns; read-only.

    Parameters
    ----------
    user_items : sparse or dense matrix, shape (n_users, n_items)
        Validated and copied to canonical CSR, float32. Ratings, a store or a wide data frame (see `from_matrix`) keep
        their labels, unless others are given.
    user_ids : sequence, shape (n_users,), optional
        Label of each row; None if rows are identified by position.
    item_ids : sequence, shape (n_items,), optional
        Label of each column.

    Attributes
    ----------
    user_items : csr_array, shape (n_users, n_items)
        float32 values, int32 indices, columns sorted within rows, no duplicate pairs. An explicit zero is an entry. The
        three arrays are read-only; ``user_items.copy()`` is writable.
    user_ids, item_ids : ndarray or None
    timestamps : array, shape (nnz,), or None
        Time of each entry, in the order of ``user_items.data``: int64, float64 or datetime64. Kept by `from_coo`,
        `from_frame` and `from_file`.
    weights : float32 array, shape (nnz,), or None
        Weight of each entry in the same order, which multiplies its squared error in a fit; None: all weigh the same.
        See `with_weights` and `time_decay`.
    frame_kind : {"pandas", "polars", "pyarrow"} or None
        Library of the data frame that the ratings came from; tables are returned as its frames.

    Raises
    ------
    RatingsError, TypeError
        `user_items` is no matrix of real numbers; corrupt, out of range, masked, NaN or infinite; or a table.
    ValueError
        Labels that repeat, or whose number differs from the number of rows or columns.
    """

    def __init__(self, user_items: Any, user_ids: Iterable[Any] | None = None, item_ids: Iterable[Any] | None = None):
        if is_wide(user_items):
            user_items = as_ratings(user_items, "user_items", users=user_ids is None)
        given = getattr(user_items, "ratings", user_items) if hasattr(user_items, "user_items") else None
        self.user_items: sp.csr_array = as_csr(user_items, name="user_items")
        user_ids = getattr(given, "user_ids", None) if user_ids is None else user_ids
        item_ids = getattr(given, "item_ids", None) if item_ids is None else item_ids
        self.user_ids = label_array("user_ids", user_ids, self.n_users)
        self.item_ids = label_array("item_ids", item_ids, self.n_items)
        same = user_items if isinstance(user_items, Ratings) else None
        self.timestamps: np.ndarray | None = None if same is None else same.timestamps
        self.weights: np.ndarray | None = None if same is None else same.weights
        self.frame_kind: str | None = getattr(given, "frame_kind", None)

    @classmethod
    def _checked(
        cls, user_items: sp.csr_array, user_ids: Iterable[Any] | None = None, item_ids: Iterable[Any] | None = None
    ) -> Ratings:
        """Wrap a canonical float32 matrix without validation; no other code holds its arrays."""
        ratings = cls.__new__(cls)
        ratings.user_items, ratings.frame_kind = frozen_csr(user_items), None
        ratings.timestamps = ratings.weights = None
        ratings.user_ids = label_array("user_ids", user_ids, ratings.n_users)
        ratings.item_ids = label_array("item_ids", item_ids, ratings.n_items)
        return ratings

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"weights": None} | state)  # older pickles have none
        self.user_items = as_csr(self.user_items)  # unpickled arrays may be writable, or maps of a file

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
        timestamps: Any = None,
        weights: Any = None,
    ) -> Ratings:
        """Ratings from coordinate triplets.

        Parameters
        ----------
        users, items : array, shape (nnz,)
            Integers are positions, counted from 0. Strings and objects are labels: they get positions in sorted
            order (or in the order of `user_ids` / `item_ids`, where given). Integer ids that are labels, such as
            MovieLens ids, are passed as an object array, or through `from_frame`.
        values : real array, shape (nnz,), optional
            None: every entry is 1.
        shape : (n_users, n_items), optional
            Default, also for an axis that is None: the largest position + 1, or the number of labels.
        user_ids, item_ids : sequence, optional
            Label of each row and of each column.
        duplicates : {"error", "sum", "mean", "first", "last", "max"}
            What to do with a pair that occurs more than once. A merged entry has the latest time of its pair; under
            "first" and "last", that of the entry kept. With weights, "mean" is the weighted mean, which has the sum of
            the weights; "sum" has the mean of the weights by value; others have the weight of the entry kept.
        timestamps : array of numbers or datetime64, shape (nnz,), optional
        weights : array of numbers, shape (nnz,), optional
            Finite and more than 0; see `Ratings`.

        Raises
        ------
        RatingsError
            Unequal lengths, pandas series with different indexes, positions out of range, missing or unknown labels, or
            values that are not finite.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        TypeError
            Ids or values of a type that cannot be used.
        """
        check_choice("duplicates", duplicates, MERGE_RULES)
        refuse_other_index(users=users, items=items, values=values, timestamps=timestamps, weights=weights)
        users, items = as_vector("users", users), as_vector("items", items)
        values = np.ones(len(users), dtype=np.float32) if values is None else as_vector("values", values)
        if not len(users) == len(items) == len(values):
            raise RatingsError(
                f"users, items and values must be equally long, got {len(users)}, {len(items)} and {len(values)}"
            )
        n_users, n_items = (None, None) if shape is None else axis_sizes(shape)
        rows, user_ids, n_users = resolve("users", users, "user_ids", user_ids, n_users)
        columns, item_ids, n_items = resolve("items", items, "item_ids", item_ids, n_items)
        entries = Entries(rows, columns, values, user_ids, item_ids, (n_users, n_items))
        if timestamps is not None:
            entries.times = as_times(timestamps, count=len(values))
        if weights is not None:
            entries.weights = as_weights(weights, len(values))
        return _from_entries(entries, duplicates)

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
            Explicit zeros of a sparse matrix are entries; zeros and masked cells of a dense one are absent. Or a wide
            data frame (a pivot table): its index and the names of its columns become labels, and missing cells (NaN,
            null) are absent, too. A default index of pandas (0, 1, 2, ...) stands for positions.
        user_ids, item_ids : sequence, optional
            Label of each row and of each column; default: those of a frame.
        duplicates : {"error", "sum", "mean", "first", "last", "max"}
            What to do with a pair that occurs more than once.

        Raises
        ------
        RatingsError, TypeError
            No matrix of real numbers; corrupt, out of range, masked, NaN or infinite; or a table of entries.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``; the message names its labels.
        """
        check_choice("duplicates", duplicates, MERGE_RULES)
        if hasattr(matrix, "user_items") or is_wide(matrix):  # has labels of its own, and no pair twice
            return cls(matrix, user_ids, item_ids)
        try:
            return cls(as_csr(matrix, name="matrix", duplicates=duplicates), user_ids, item_ids)
        except DuplicateEntriesError:
            coo = matrix.tocoo()
            users = label_array("user_ids", user_ids, coo.shape[0])
            items = label_array("item_ids", item_ids, coo.shape[1])
            raise Entries(coo.row, coo.col, coo.data, users, items, coo.shape).duplicate_error() from None

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        user: int | str = "auto",
        item: int | str = "auto",
        value: int | str | None = "auto",
        duplicates: str = "error",
        timestamp: int | str | None = "auto",
        where: Mapping[Any, Any] | None = None,
        missing: str = "error",
        weight: int | str | None = None,
    ) -> Ratings:
        """Ratings from a data frame with one row for each entry.

        Parameters
        ----------
        frame : pandas or polars DataFrame, polars LazyFrame, pyarrow Table, or another frame supported by narwhals
        user, item : str or int
            Columns of ids, by name or by position from 0. "auto" recognizes common names ("user_id", "movieId", "asin",
            ...), in any order, and raises if they are ambiguous. Ids, integers included, become sorted labels.
        value : str, int or None
            Column of values. None makes every entry 1, and so does "auto" if the frame has only two columns of ids and
            timestamps.
        duplicates : {"error", "sum", "mean", "first", "last", "max"}
            What to do with a pair that occurs more than once.
        timestamp : str, int or None
            Column of times (numbers, dates, or text in ISO 8601), kept as `timestamps`. "auto" takes the only column
            with a time-like name, if its values can be used; None keeps none.
        where : mapping, optional
            Row filters, such as ``{"behavior": "play"}``: for each column a value, a collection of values, or a
            function of the column as an array that returns a mask. Other rows are dropped before validation.
        missing : {"error", "drop", "keep"}
            What to do with entries without a user or an item: null, no text, or a word that stands for a missing value
            (NULL, None, NA, nan and similar). "keep" takes such words for ids, not nulls.
        weight : str or int, optional
            Column of `weights`, finite and more than 0.

        Raises
        ------
        RatingsError
            A missing, ambiguous or duplicate column; a null id or value, or a value that is not finite (rows count
            from 0).
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        TypeError
            `frame` is no data frame, or a column has a type that cannot be used.
        """
        options = FileOptions(
            user=user, item=item, value=value, duplicates=duplicates, timestamp=timestamp, where=where,
            missing=missing, weight=weight,
        )  # fmt: skip
        ratings = _from_entries(readers.frame_entries(frame, "frame", options), duplicates)
        ratings.frame_kind = kind_of(frame)
        return ratings

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | IO[Any],
        *,
        format: str = "auto",
        separator: str | None = None,
        header: bool | str = "auto",
        user: int | str = "auto",
        item: int | str = "auto",
        value: int | str | None = "auto",
        duplicates: str = "error",
        encoding: str | None = None,
        comment: str | None = "#",
        quote: str | None = "auto",
        escape: str | None = None,
        missing: str = "error",
        timestamp: int | str | None = "auto",
        where: Mapping[Any, Any] | None = None,
        show_progress: bool = False,
        weight: int | str | None = None,
    ) -> Ratings:
        """Ratings from a file: delimited text, MatrixMarket, .npz or Parquet, recognized by content, then by name.

        Parameters
        ----------
        path : str, path, list of these, or file object
            Text and MatrixMarket files may be gzipped. A list of files, a pattern such as ``"logs/*.csv"`` and a folder
            of Parquet files are read as one; columns in the names of folders (``year=2024``) can be named as others. A
            file object is read to its end.
        format : {"auto", "text", "csv", "tsv", "lists", "jsonl", "mtx", "npz", "parquet"}
            "text" is delimited text with any separator. "lists" is text whose lines hold a user, then all items of the
            user, separated by commas or white space (or `separator`); it is never detected. "jsonl" has a JSON object
            on each line, whose fields are the columns (needs pyarrow). "npz" is the format of `save` and
            ``scipy.sparse.save_npz``.
        separator : str, optional
            Field separator of text: ``","``, ``"::"``, ...; ``" "`` is any run of white space. Default: detected.
            Fields may be quoted if the separator is one character other than a blank.
        header : {"auto", True, False}
            Whether text starts with a line of column names. "auto" assumes a header if the ids and the value of the
            first line are not numbers; with ``value=None``, if its ids are not numbers and those of the next line are
            integers, or if it holds common names ("user_id", "item", ...).
        user, item : int or str
            Columns of ids, by position from 0 or by name (text and Parquet). "auto" takes the columns with common names
            ("user_id", "movieId", "asin", ...) in the header, in any order; without such names, the first and the
            second. A header that identifies only one of the two raises an error.
        value : int, str or None
            Column of values; "auto" also recognizes common names ("rating", "plays", ...), otherwise it takes the
            third. None makes every entry 1, and so does "auto" if only timestamps are left.
        duplicates, missing
            As for `from_frame`.
        encoding : str, optional
            Encoding of text; None is UTF-8, or UTF-16 after a byte order mark.
        comment : str or None
            Lines of text that start with this string are skipped; None skips no lines.
        quote : str or None
            Character around fields of text, which may then contain separators and line ends. "auto": quotation marks;
            a quoted field that does not end in its line, or goes on after its closing mark, is an error. None: marks
            are part of the text.
        escape : str, optional
            Character of text, such as a backslash, before a quotation mark or a separator that belongs to a field.
        timestamp : int, str or None
            Column of times (numbers, or dates in ISO 8601) of text and Parquet, kept as `timestamps`. "auto" takes the
            only column with a time-like name, or without a header the fourth if it holds dates or, of four columns,
            Unix times, as in the files of MovieLens. None keeps none.
        where : mapping, optional
            Row filters of text and Parquet, such as ``{"behavior": "play"}``: for each column, by name or number, a
            value, a collection of values, or a function of the column as an array that returns a mask. Ids that occur
            only in other rows are dropped.
        show_progress : bool
            Draw a progress bar while text is read, if that takes longer than a second.
        weight : int or str, optional
            Column of `weights` of text, JSON lines and Parquet, finite and more than 0.

        Returns
        -------
        Ratings
            Ids of text and Parquet become labels. In text they are int64 if all ids of a column are integers as Python
            prints them, else strings. A MatrixMarket or SciPy .npz file has positions only.

        Raises
        ------
        RatingsError
            The content is invalid; for text the message names the line, counted from 1.
        DuplicateEntriesError
            A repeated pair under ``duplicates="error"``.
        MemoryBudgetError
            The rows, columns or entries that the header of a MatrixMarket file declares, or the arrays of an .npz file,
            do not fit in memory.
        FileNotFoundError, IsADirectoryError
            The file does not exist, or is a directory.
        ImportError
            A Parquet file without pyarrow.
        """
        options = FileOptions(
            format, separator, header, user, item, value, duplicates, encoding, comment, quote, escape, missing,
            timestamp, where, show_progress, weight,
        )  # fmt: skip
        if hasattr(path, "read"):
            with readers.file_of(path) as name:
                return _from_file(name, options)
        parts = readers.part_paths(path)
        if parts is None:
            return _from_file(os.fsdecode(cast(Any, path)), options)
        return _from_entries(_entries_of_parts(parts, options), duplicates)

    @classmethod
    def concat(cls, parts: Iterable[Ratings], *, duplicates: str = "error") -> Ratings:
        """All entries of several ratings, whose users and items are matched by label.

        Parameters
        ----------
        parts : iterable of Ratings
            All have labels of a side, or none has; without labels, positions must have the same meaning in all.
        duplicates : {"error", "sum", "mean", "first", "last", "max"}
            What to do with a pair that occurs in several parts.

        Returns
        -------
        Ratings
            With the timestamps if all parts have them; with weights if some have them, which are 1 for the others.

        Raises
        ------
        RatingsError, DuplicateEntriesError, TypeError, ValueError
        """
        given = list(parts)
        if not given or not all(isinstance(part, Ratings) for part in given):
            kinds = ", ".join(type(part).__name__ for part in given) or "nothing"
            raise TypeError(f"concat takes one or more Ratings, got {kinds}; make them with Ratings.from_frame")
        entries = joined_entries(
            [
                Entries(
                    entry_rows(part.user_items), part.user_items.indices, part.user_items.data, part.user_ids,
                    part.item_ids, part.shape, times=part.timestamps, weights=part.weights,
                )
                for part in given
            ]
        )  # fmt: skip
        ratings = _from_entries(entries, check_choice("duplicates", duplicates, MERGE_RULES))
        ratings.frame_kind = given[0].frame_kind
        return ratings

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
        """Number of entries, including explicit zeros."""
        return int(self.user_items.nnz)

    @cached_property
    def item_users(self) -> sp.csr_array:
        """The transpose, csr_array, shape (n_items, n_users), read-only as `user_items`; made once."""
        return transposed(as_csr(self.user_items), check_threads(None))

    @cached_property
    def _user_table(self) -> dict[Any, int]:
        return label_table(self.user_ids)

    @cached_property
    def _item_table(self) -> dict[Any, int]:
        return label_table(self.item_ids)

    # ----------------------------------------------------------------------------------------------------- methods

    def user_index(self, labels: Any) -> Any:
        """Positions of users.

        Parameters
        ----------
        labels : a label, or a vector of labels
            Positions if `user_ids` is None; they are validated and returned.

        Returns
        -------
        int, or int64 array of shape (len(labels),)

        Raises
        ------
        UnknownLabelError
            A label is unknown; a KeyError whose message names the first such label.
        ValueError, TypeError
            Without labels: a position out of range or not an integer.
        """
        return look_up("user", labels, self.user_ids, self._user_table, self.n_users)

    def item_index(self, labels: Any) -> Any:
        """Positions of items; the same rules as `user_index`."""
        return look_up("item", labels, self.item_ids, self._item_table, self.n_items)

    def split(
        self, test_size: float | int = 0.1, random_state: Any = None, *, by: str = "random"
    ) -> tuple[Ratings, Ratings]:
        """(train, test); see `hybridmf.split`."""
        return split(self, test_size, random_state, by=by)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write matrix and labels to one .npz file; `from_file` reads both, ``scipy.sparse.load_npz`` the matrix.

        Parameters
        ----------
        path : str or path
            The file is written under a temporary name and renamed, so readers never see a partial file.

        Raises
        ------
        TypeError
            Labels are neither numbers nor strings.
        """
        matrix = self.user_items
        content = {"format": np.array(b"csr"), "shape": np.array(matrix.shape), "_is_array": np.array(True)}
        content |= {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
        for name in readers.NPZ_LABELS:
            if (array := getattr(self, name)) is not None:
                content[name] = storable(name, array)
        write_atomically(os.fsdecode(path), lambda stream: np.savez(stream, **cast(Any, content)))

    def _of(
        self,
        matrix: sp.csr_array,
        entries: np.ndarray | None = None,
        user_ids: np.ndarray | None = None,
        item_ids: np.ndarray | None = None,
    ) -> Ratings:
        """New ratings of a canonical matrix; by default with the labels of these ratings."""
        ratings = Ratings(
            frozen_csr(matrix),
            self.user_ids if user_ids is None else user_ids,
            self.item_ids if item_ids is None else item_ids,
        )
        ratings.frame_kind = self.frame_kind
        for name in ("timestamps", "weights"):
            known = getattr(self, name)
            setattr(ratings, name, known if known is None or entries is None else known[entries])
        return ratings

    def _keep(self, mask: np.ndarray) -> Ratings:
        """The entries where `mask`, shape (nnz,), is true; the shape does not change."""
        return self._of(keep_entries(self.user_items, mask), mask)

    # ------------------------------------------------------------------------------------------------- selection

    def __len__(self) -> int:
        """Number of users."""
        return self.n_users

    def __getitem__(self, rows: Any) -> Ratings:
        """Ratings of some users, by position: integers, a slice or a mask; all items stay.

        Users without labels are renumbered.
        """
        positions = np.ascontiguousarray(np.atleast_1d(np.arange(len(self))[axis_key(rows)]))
        matrix = self.user_items
        places = make_csr(matrix.indptr, matrix.indices, np.arange(matrix.nnz, dtype=np.float64), matrix.shape)  # exact
        entries = take_rows(places, positions).data.astype(np.int64)
        ids = None if self.user_ids is None else self.user_ids[positions]
        return self._of(take_rows(matrix, positions), entries, ids)

    @property
    def entries(self) -> EntryView:
        """The entries as samples, for scikit-learn's splitters: ``GridSearchCV(...).fit(ratings.entries)``."""
        return EntryView(self)

    def k_core(self, k: int, item_k: int | None = None) -> Ratings:
        """The largest part in which each user has at least k entries and each item at least `item_k`.

        Parameters
        ----------
        k : int
        item_k : int, optional
            Default: k.

        Returns
        -------
        Ratings
            Without the other users and items. Users and items without labels get their former positions as labels.

        Raises
        ------
        TypeError, ValueError
        RatingsError
            Nothing is left.
        """
        k = check_int("k", k, 1)
        item_k = k if item_k is None else check_int("item_k", item_k, 1)
        rows, columns = entry_rows(self.user_items), self.user_items.indices
        n_users, n_items = self.user_items.shape
        mask = np.ones(len(columns), dtype=bool)
        while True:
            users = np.bincount(rows[mask], minlength=n_users) >= k
            items = np.bincount(columns[mask], minlength=n_items) >= item_k
            kept = mask & users[rows] & items[columns]
            if np.array_equal(kept, mask):
                break
            mask = kept
        if not mask.any():
            raise RatingsError(f"no user and item have k={k} and item_k={item_k} entries among each other")
        part = self._keep(mask)
        matrix = take_rows(part.user_items, np.flatnonzero(users))
        places = (np.cumsum(items) - 1).astype(np.int32)
        matrix = make_csr(matrix.indptr, places[matrix.indices], matrix.data, (matrix.shape[0], int(items.sum())))
        ids = [
            np.flatnonzero(used) if labels is None else labels[used]
            for used, labels in ((users, self.user_ids), (items, self.item_ids))
        ]
        return part._of(matrix, None, *ids)

    # --------------------------------------------------------------------------------------------------- values

    def with_values(self, values: Callable[[np.ndarray], Any] | Any) -> Ratings:
        """The same entries with other values.

        Parameters
        ----------
        values : callable, or array of shape (nnz,)
            A function of the values, such as ``np.log1p``; or values in the order of ``user_items.data``.

        Raises
        ------
        RatingsError
            Not one finite value for each entry.
        """
        old = self.user_items
        refuse_series(values, "values")
        new = np.asarray(values(old.data.copy()) if callable(values) else values)
        if new.shape != old.data.shape:
            raise RatingsError(f"values has shape {new.shape}; expected one value for each of {old.nnz} entries")
        return self._of(from_triplets(entry_rows(old), old.indices, new, old.shape, name="values"))

    def binarize(self, threshold: float | None = None) -> Ratings:
        """Entries of at least `threshold` (default: more than 0) with the value 1; all others are dropped."""
        data = self.user_items.data  # float32, as the threshold has to be
        mask = data > 0 if threshold is None else data >= np.float32(check_real("threshold", threshold))
        return self._keep(mask).with_values(np.ones_like)

    def log_weight(self, scale: float = 1.0) -> Ratings:
        """Values log(1 + value / scale): the confidence of Hu, Koren and Volinsky (2008), with their epsilon as scale.

        Parameters
        ----------
        scale : float
            More than 0.
        """
        return self.with_values(np.log1p(self._counts() / check_real("scale", scale, 0.0, strict=True)))

    def tfidf_weight(self) -> Ratings:
        """Square root of each value times the inverse frequency of its item, as `implicit` computes it.

        Users are documents and items are terms: log(n_users / (1 + entries of the item)), at least 0.
        """
        return self.with_values(np.sqrt(self._counts()) * self._rarity())

    def bm25_weight(self, K1: float = 100.0, B: float = 0.8) -> Ratings:
        """Okapi BM25 weights, as `implicit` computes them: large counts saturate, and frequent items weigh less.

        Parameters
        ----------
        K1 : float
            Value at which half of the saturation is reached, for a user with an average sum of values.
        B : float
            Normalization by the sum of each user's values, from 0 (none) to 1.

        Notes
        -----
        Users are documents and items are terms. implicit's examples call its function with a matrix of items x users.
        """
        K1, B = check_real("K1", K1, 0.0), check_real("B", B, 0.0)
        if B > 1:
            raise ValueError(f"B must be <= 1, got {B:g}")
        values, rows = self._counts(), entry_rows(self.user_items)
        sums = np.bincount(rows, weights=values, minlength=len(self))
        length = 1.0 - B + B * sums / (sums.mean() or 1.0)
        divisor = K1 * length[rows] + values
        weights = np.divide(values * (K1 + 1.0), divisor, out=np.zeros_like(values), where=divisor > 0)
        return self.with_values(weights * self._rarity())

    def _counts(self) -> np.ndarray:
        """Values in float64, none of them negative."""
        values = self.user_items.data.astype(np.float64)
        if len(values) and values.min() < 0:
            raise RatingsError(f"weights are of counts; the smallest value is {values.min():g}, expected >= 0")
        return values

    def _rarity(self) -> np.ndarray:
        """Inverse frequency of the item of each entry."""
        counts = np.bincount(self.user_items.indices, minlength=self.user_items.shape[1])
        rarity = np.maximum(np.log(max(1, len(self))) - np.log1p(counts), 0.0)  # negative values would mean dislike
        return np.asarray(rarity[self.user_items.indices])

    # --------------------------------------------------------------------------------------------------- weights

    def with_weights(self, weights: Any) -> Ratings:
        """The same entries with other weights, which multiply their squared errors in a fit.

        Parameters
        ----------
        weights : array of shape (nnz,), or None
            Finite and more than 0, in the order of ``user_items.data``: by user, then by item. None: all entries weigh
            the same. `from_coo` takes weights in the order of its triplets, `from_frame` a column of them.

        Raises
        ------
        RatingsError, TypeError
            Not one finite number above 0 for each entry.
        """
        ratings = self._of(self.user_items)
        refuse_series(weights)
        ratings.weights = None if weights is None else as_weights(weights, self.user_items.nnz)
        return ratings

    def time_decay(self, half_life: Any, *, now: Any = None) -> Ratings:
        """Weights that halve with each `half_life` of age: ``0.5 ** ((now - timestamp) / half_life)``.

        Values stay as they are: an old rating of 2 is still a 2, and counts less. Weights that the ratings have already
        are multiplied. (Koren 2009 fits such decays; `log_weight` and `bm25_weight` change values.)

        Parameters
        ----------
        half_life : float or timedelta
            Age at which an entry counts half, in the unit of `timestamps`: seconds for Unix times. For dates, a
            timedelta of Python, NumPy or pandas.
        now : timestamp, optional
            Time at which the age is 0; default: the latest timestamp. Of dates, a date, or text such as "2026-11-23".

        Returns
        -------
        Ratings
            An entry weighs at least a millionth, whatever its age.

        Raises
        ------
        ValueError, TypeError
            No timestamps, entries after `now`, or a `half_life` that is not more than 0 or has another unit.

        Examples
        --------
        >>> import hybridmf as hmf
        >>> ratings = hmf.Ratings.from_coo([0, 0, 1], [0, 1, 1], [5, 3, 4], timestamps=[0, 10, 20])
        >>> ratings.time_decay(half_life=10).weights
        array([0.25, 0.5 , 1.  ], dtype=float32)
        """
        if self.timestamps is None:
            raise ValueError(
                "time_decay needs the time of each entry, and ratings has none; read them with timestamp= (from_file, "
                "from_frame) or timestamps= (from_coo)"
            )
        decay = np.exp2(-ages_of(self.timestamps, half_life, now))
        if (least := np.count_nonzero(decay <= LEAST_DECAY)) > len(decay) / 2:
            logger.warning(
                "time_decay: %d of %d entries are so old that they weigh %g; half_life=%s has to be in the unit of the "
                "timestamps, and now=%s too",
                least, len(decay), LEAST_DECAY, half_life, now,
            )  # fmt: skip
        weights = np.maximum(decay, LEAST_DECAY) * (1.0 if self.weights is None else self.weights)
        return self.with_weights(weights)

    # ---------------------------------------------------------------------------------------------------- export

    def to_frame(self, backend: str | None = None) -> Any:
        """Data frame with the columns user, item, value and, if known, timestamp and weight; one row for each entry.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}, optional
            Default: the library of the frame that the ratings came from, else the first that is installed; an
            ImportError without any.
        """
        kind = check_kind("backend", backend, self.frame_kind)
        matrix = self.user_items
        columns = {
            "user": labels_at(self.user_ids, entry_rows(matrix)),
            "item": labels_at(self.item_ids, matrix.indices),
            "value": matrix.data,
            "timestamp": self.timestamps,
            "weight": self.weights,
        }
        return make_frame({name: np.array(column) for name, column in columns.items() if column is not None}, kind)

    # -------------------------------------------------------------------------------------------------------- text

    def __repr__(self) -> str:
        text = f"Ratings({self.n_users:,} users x {self.n_items:,} items, {self.nnz:,} entries"
        if self.nnz:
            low, high = self.user_items.data.min(), self.user_items.data.max()
            text += f" ({100 * self.nnz / self.n_users / self.n_items:.3g} %), values {low:g} to {high:g}"
        return f"{text}; user ids: {label_kind(self.user_ids)}, item ids: {label_kind(self.item_ids)})"

    def _repr_html_(self) -> str:
        values, facts = self.user_items.data, {}
        if self.nnz:
            facts["density"] = f"{self.nnz / self.n_users / self.n_items:.3%}"
            facts["values"] = f"{values.min():g} to {values.max():g}, mean {values.mean(dtype=np.float64):.4g}"
        if self.timestamps is not None and len(self.timestamps):
            facts["times"] = f"{self.timestamps.min()} to {self.timestamps.max()}"
        for side, n, ids in (("users", self.n_users, self.user_ids), ("items", self.n_items, self.item_ids)):
            some = "positions" if ids is None else "labels such as " + ", ".join(str(each) for each in ids[:3])
            facts[side] = f"{n:,}, {some}"
        return html_facts("Ratings", [("entries", f"{self.nnz:,}"), *facts.items()])


def _from_entries(entries: Entries, duplicates: str) -> Ratings:
    try:
        matrix = entries.to_matrix(duplicates)
    except DuplicateEntriesError:
        entries = entries.without_copies()
        matrix = entries.to_matrix(duplicates)
    ratings = Ratings._checked(matrix)
    ratings.user_ids, ratings.item_ids = entries.user_ids, entries.item_ids  # distinct in all entries
    for name, ids in (("user ids", ratings.user_ids), ("item ids", ratings.item_ids)):
        if ids is not None:
            warn_spelled_twice(name, ids)
            ids.flags.writeable = False
    ratings.timestamps, ratings.weights = entries.times_of(duplicates), entries.weights_of(duplicates)
    return ratings


def _from_file(name: str, options: FileOptions) -> Ratings:
    head, format = options.detect(name)
    if format not in ("npz", "mtx"):
        return _from_entries(_file_entries(name, head, format, options), options.duplicates)
    _refuse_columns(name, format, options)
    matrix, labels = (readers.read_npz if format == "npz" else readers.read_matrix_market)(name, head)
    try:
        return _from_saved(matrix, labels, options.duplicates)
    except (ValueError, TypeError) as error:
        kind = DuplicateEntriesError if isinstance(error, DuplicateEntriesError) else RatingsError
        raise kind(f"{name}: {error}") from error


def _file_entries(name: str, head: bytes, format: str, options: FileOptions) -> Entries:
    """Entries of a file with a row for each entry, or of lists."""
    if format == "lists":
        _refuse_columns(name, format, options)
        return read_lists(name, list_options(name, head, options))
    if format == "parquet":
        return readers.read_parquet(name, options)
    if format == "jsonl":
        return readers.frame_entries(readers.read_frame(name, format), name, options)
    found = find_layout(name, head, options)
    log_columns(name, found.columns)
    mask = weights = None
    if found.columns.weight is not None:
        weights = read_fields(found, found.columns.weight)
    if options.where is not None:
        names, n_fields = found.columns.names, found.n_fields
        places = {column: column_place("where", name, names, n_fields, column) for column in options.where}
        fields = {column: read_fields(found, place) for column, place in places.items()}
        mask = readers.row_mask(name, options.where, fields)
    entries = read_text(found, mask, weights)
    if entries.weights is not None:
        entries.weights = readers.column_weights(name, options.weight, entries.weights)
    return entries


def _entries_of_parts(paths: list[str], options: FileOptions) -> Entries:
    """Entries of several files; parts without entries that are kept are skipped, unless all are."""
    parts: list[Entries] = []
    empty: NoEntriesError | None = None
    formats = set()
    for path in paths:
        head, format = options.detect(path)
        if format in ("npz", "mtx"):
            raise RatingsError(f"{path} is a matrix, which is not read with other files; use Ratings.concat")
        try:
            part = _file_entries(path, head, format, options)
        except NoEntriesError as error:
            empty = error
            continue
        formats.add(format)
        parts += [part] if len(part.values) else []
    if not parts:
        raise empty or RatingsError(f"{paths[0]} and {len(paths) - 1} other files hold no ratings")
    text = formats.isdisjoint(("parquet", "jsonl"))
    return joined_files(parts, f"{paths[0]} and {len(paths) - 1} other files", text=text)


def _from_saved(matrix: Any, labels: dict[str, np.ndarray], duplicates: str) -> Ratings:
    """Ratings of a matrix that was read from a file, with its labels, times and weights, if any."""
    times, weights = labels.pop("timestamps", None), labels.pop("weights", None)
    ratings = Ratings.from_matrix(matrix, duplicates=duplicates, **labels)
    if times is not None:
        if times.shape != (ratings.nnz,) or matrix.nnz != ratings.nnz:
            raise RatingsError(f"timestamps has shape {times.shape}; expected one for each of {ratings.nnz} entries")
        ratings.timestamps = as_times(times)
    if weights is not None:
        ratings.weights = as_weights(weights, ratings.nnz)
    return ratings


def _refuse_columns(path: str, format: str, options: FileOptions) -> None:
    timestamp = None if options.timestamp == AUTO else options.timestamp
    for argument, value in (("timestamp", timestamp), ("where", options.where), ("weight", options.weight)):
        if value is not None:
            raise ValueError(
                f"{path} is read as {format!r}, which has no columns that {argument}= could name: leave it out"
            )


# ----------------------------------------------------------------------------------------------------------- the split


@overload
def split(
    ratings: Ratings | IntoFrame, test_size: float | int = 0.1, random_state: Any = None, *, by: str = "random"
) -> tuple[Ratings, Ratings]: ...
@overload
def split(
    ratings: Any, test_size: float | int = 0.1, random_state: Any = None, *, by: str = "random"
) -> tuple[Any, Any]: ...
def split(
    ratings: Any, test_size: float | int = 0.1, random_state: Any = None, *, by: str = "random"
) -> tuple[Any, Any]:
    """Split the entries into a training and a test part of the same shape.

    Parameters
    ----------
    ratings : Ratings, data frame (as for `Ratings.from_frame`), or matrix of shape (n_users, n_items)
    test_size : float or int
        Share, 0 < test_size < 1, or number (at least 1) to hold out; `by` defines of what.
    random_state : None, int, Generator or RandomState
        The same seed gives the same split. It breaks ties in time, too.
    by : {"random", "user", "item", "time", "last"}
        "random" draws entries. "user" draws users and holds out all of their entries; `recommend_new` serves them from
        a part of these entries, and models fitted with ``user_features=`` from their features. "item" draws items and
        holds out all of their entries: cold items, which models fitted with ``item_features=`` rank by
        ``recommend(include_cold=True)``; see `evaluate`. "time" holds out the latest entries of the matrix. "last"
        holds out the last entries of each user: a number, or a share rounded down. Each user keeps at least one entry,
        and users with too few entries for the number keep all. "time" and "last" need `timestamps`.

    Returns
    -------
    train, test : Ratings with the labels of `ratings`; for a matrix, csr_array
        Each entry, including explicit zeros, is in exactly one part. Parts of a float64 or wide integer matrix are
        float64, all others float32.

    Raises
    ------
    ValueError, TypeError
        `test_size` out of range or not a number, or no timestamps.
    RatingsError
        `ratings` is invalid, or the training part would be empty.
    """
    check_choice("by", by, WAYS)
    ratings = as_ratings(ratings)
    matrix = _matrix_of(ratings)
    times = None if getattr(ratings, "timestamps", None) is None else np.asarray(ratings.timestamps)
    return _parts(ratings, matrix, held_out(matrix, by, test_size, check_rng(random_state), times))


@overload
def leave_k_out(ratings: Ratings | IntoFrame, k: int = 1, random_state: Any = None) -> tuple[Ratings, Ratings]: ...
@overload
def leave_k_out(ratings: Any, k: int = 1, random_state: Any = None) -> tuple[Any, Any]: ...
def leave_k_out(ratings: Any, k: int = 1, random_state: Any = None) -> tuple[Any, Any]:
    """Hold out k random entries of each user who has more than k; others keep all of theirs.

    ``split(ratings, k, by="last")`` holds out the last k by time.

    Parameters
    ----------
    ratings : Ratings, data frame, or matrix of shape (n_users, n_items)
    k : int
    random_state : None, int, Generator or RandomState

    Returns
    -------
    train, test
        As for `split`, as are the errors.
    """
    ratings = as_ratings(ratings)
    matrix, count = _matrix_of(ratings), check_int("k", k, 1)
    return _parts(ratings, matrix, last_of_each_user(matrix, check_rng(random_state).random(matrix.nnz), count, "k"))


@overload
def k_fold(
    ratings: Ratings | IntoFrame, n_splits: int = 5, random_state: Any = None
) -> Iterator[tuple[Ratings, Ratings]]: ...
@overload
def k_fold(ratings: Any, n_splits: int = 5, random_state: Any = None) -> Iterator[tuple[Any, Any]]: ...
def k_fold(ratings: Any, n_splits: int = 5, random_state: Any = None) -> Iterator[tuple[Any, Any]]:
    """Folds over the entries: each entry is in one test part.

    For `sklearn.model_selection.GridSearchCV` see `Ratings.entries`.

    Parameters
    ----------
    ratings : Ratings, data frame, or matrix of shape (n_users, n_items)
    n_splits : int
        At least 2.
    random_state : None, int, Generator or RandomState

    Yields
    ------
    train, test
        As for `split`, as are the errors.
    """
    ratings = as_ratings(ratings)
    matrix, n_splits = _matrix_of(ratings), check_int("n_splits", n_splits, 2)
    folds = fold_of_entries(matrix.nnz, n_splits, check_rng(random_state))
    return (_parts(ratings, matrix, folds == fold) for fold in range(n_splits))


def is_pairs(given: Any) -> bool:
    """Whether `given` is a table of pairs: a frame with columns of users and items, or a view of entries."""
    names = frame_names(given)
    return isinstance(given, EntryView) if names is None else named_like_entries(names)


def as_ratings(given: Any, name: str = "frame", *, users: bool = True) -> Any:
    """Ratings of a data frame, of entries or wide, of a view of entries, or of `PreparedRatings`; others as is.

    Values of a wide frame keep their precision. `users=False` ignores its index; see `hybridmf.data.wide.read_wide`.
    """
    held = getattr(given, "ratings", None)
    if isinstance(held, Ratings):
        return held
    names = frame_names(given)
    if names is None:
        return given
    if not named_like_entries(names):
        cells, user_ids, item_ids = read_wide(given, name, users=users)
        ratings = Ratings._checked(as_csr(cells, name=name, dtype=_exact_dtype(cells)), user_ids, item_ids)
        ratings.frame_kind = kind_of(given)
        return ratings
    try:
        return Ratings.from_frame(given)
    except RatingsError as error:  # whose advice is an argument of from_frame
        raise type(error)(
            f"{error} (arguments of Ratings.from_frame, whose result takes the place of the frame)"
        ) from error


def _matrix_of(ratings: Any) -> sp.csr_array:
    dtype = np.float32 if isinstance(ratings, Ratings) else _exact_dtype(ratings)
    return as_csr(ratings, name="ratings", dtype=dtype)


def _parts(ratings: Any, matrix: sp.csr_array, mask: np.ndarray) -> tuple[Any, Any]:
    """(train, test), where `mask` marks the entries of the test part."""
    if isinstance(ratings, Ratings):
        return ratings._keep(~mask), ratings._keep(mask)
    return keep_entries(matrix, ~mask), keep_entries(matrix, mask)


def _exact_dtype(matrix: Any) -> type:
    """float64 if float32 cannot represent every value of the matrix's dtype, else float32."""
    given = getattr(matrix, "dtype", np.dtype(np.float64))
    narrow = given.kind in "biuf" and np.promote_types(given, np.float32) == np.float32
    return np.float32 if narrow else np.float64
