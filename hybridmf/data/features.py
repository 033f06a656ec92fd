"""Features of users and items: frames, files and matrices become one sparse matrix with names, aligned by label.

frames, files ──> feature_columns.Table ──> a Column for each ──> entries with names ──┐
matrices ──────────────────────────────────────────────────────> names by position ────┴──> Features ──> align_features
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from ..core.objective import Side
from ..core.sparse import rows_or_empty
from ..core.triplets import frame_names
from ..core.validate import as_csr, frozen_csr, refuse_gpu, rows_of_entries
from ..errors import RatingsError, UnknownLabelError
from .align import are_positions
from .feature_columns import KINDS, Column, check_finite, code_like, code_table, read_table, table_of, to_matrix
from .labels import as_vector, check_label_types, label_array, places_among, plain_array, some

logger = logging.getLogger("hybridmf")

MANY_UNMATCHED = 0.5  # share of rows without features from which it is a warning


class Features:
    """Features of users or of items: a sparse matrix, a name for each column, and a label for each row; read-only.

    Parameters
    ----------
    matrix : sparse or dense matrix, shape (n_rows, n_features)
        Real and finite. Zeros of a dense matrix are absent; both are equal for a model.
    names : sequence of str, optional
        Name of each feature, such as "genre:noir". Default: "0", "1", ...
    labels : sequence, shape (n_rows,), optional
        Label of the user or item of each row, by which rows meet those of the ratings. Without labels, row k belongs to
        row k (of items: column k) of ratings that have no labels either.

    Attributes
    ----------
    matrix : csr_array, shape (n_rows, n_features)
        float32.
    names : list of str
    labels : array or None
    columns : list of dict
        Of `from_frame`: name, kind and separator of each column that was used.
    shift, scale : float64 array, shape (n_features,)
        A standardized feature is ``(value - shift) / scale``; for others, 0 and 1.

    Raises
    ------
    RatingsError, TypeError
        `matrix` is no matrix of finite real numbers, or `names` repeat.
    ValueError
        Labels that repeat, or whose number is not that of the rows.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> features = hmf.Features([[1, 0], [1, 1]], names=["genre:noir", "genre:drama"], labels=["Laura", "Gilda"])
    >>> features
    Features(2 rows, 2 features)
    """

    def __init__(self, matrix: Any, names: Iterable[Any] | None = None, labels: Iterable[Any] | None = None) -> None:
        self._set(_as_matrix("matrix", matrix), names, labels)
        _warn_constant("matrix", self)

    def _set(
        self,
        matrix: sp.csr_array,
        names: Iterable[Any] | None,
        labels: Iterable[Any] | None,
        columns: Sequence[Column] = (),
        shift: np.ndarray | None = None,
        scale: np.ndarray | None = None,
    ) -> None:
        n_rows, n_features = cast("tuple[int, int]", matrix.shape)
        self.matrix = frozen_csr(matrix)
        self.names = _checked_names(names, n_features)
        if labels is not None and not isinstance(labels, (Mapping, set, frozenset)):
            labels = as_vector("labels", labels)
            if len(labels) == n_features != n_rows:
                raise ValueError(
                    f"labels has {len(labels)} elements, as many as matrix of shape {matrix.shape} has columns: rows "
                    "are users or items and columns are features, pass matrix.T"
                )
        self.labels = label_array("labels", labels, n_rows)
        self._columns = tuple(columns)
        self.shift = np.zeros(n_features) if shift is None else shift
        self.scale = np.ones(n_features) if scale is None else scale

    @classmethod
    def _made(cls, *parts: Any) -> Features:
        features = cls.__new__(cls)
        features._set(*parts)
        return features

    def __repr__(self) -> str:
        return f"Features({self.matrix.shape[0]:,} rows, {self.matrix.shape[1]:,} features)"

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def columns(self) -> list[dict[str, Any]]:
        """See the class."""
        return [asdict(column) for column in self._columns]

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        label: int | str | None = "auto",
        columns: Sequence[Any] | None = None,
        categories: Sequence[Any] = (),
        separator: str | Mapping[Any, str] | None = None,
        standardize: bool = True,
        duplicates: str = "error",
    ) -> Features:
        """Features from a data frame with one row for each user or item.

        Parameters
        ----------
        frame : pandas or polars DataFrame, polars LazyFrame, pyarrow Table, or another frame supported by narwhals
            A column of numbers becomes one feature, as does one of booleans; both need a value in every row. A column
            of text or categories becomes one feature for each value, "genre:noir"; a column of lists (of text or
            integers), one for each tag. Null and empty text is no category, and an empty list no tag. Dates are
            refused: make them numbers.
        label : str, int or None
            Column of labels, by name or by position from 0. "auto" takes the column whose name says users or items
            ("user_id", "movieId", ...), or the index of a pandas frame, and raises if there is none or several. None:
            row k belongs to row k of ratings without labels.
        columns : sequence, optional
            Names of the columns to use; default: all others.
        categories : sequence
            Names of columns that are categories whatever their type, such as codes of occupations; also of text that
            nearly every row has for itself, such as titles, which is refused otherwise.
        separator : str or mapping, optional
            What stands between tags in text such as "noir|drama": of all columns of text, or by name of column.
        standardize : bool
            Give each number the mean 0 and the standard deviation 1 over the rows; a number that is the same in all
            rows is dropped with a warning.
        duplicates : {"error", "merge"}
            What to do with several rows of one label. "merge" takes all of their categories and tags, and the mean of
            their numbers: a table with a row for each pair of item and tag.

        Raises
        ------
        RatingsError
            No or several columns of labels, null or repeated labels, numbers that are null or not finite, a column of
            ids, or two features of one name.
        MemoryBudgetError
            The matrix does not fit in memory.
        TypeError
            `frame` is no data frame, or a column has a type that cannot be used.
        """
        options = (label, columns, categories, separator, standardize, duplicates)
        return cls._made(*code_table(table_of(frame, "frame"), None, *options))

    @classmethod
    def from_file(
        cls,
        path: Any,
        *,
        label: int | str | None = "auto",
        columns: Sequence[Any] | None = None,
        categories: Sequence[Any] = (),
        separator: str | Mapping[Any, str] | None = None,
        standardize: bool = True,
        duplicates: str = "error",
        field_separator: str | None = None,
        encoding: str | None = None,
    ) -> Features:
        """Features from a file with one row for each user or item: text, Parquet or JSON lines.

        Parameters
        ----------
        path : str or path
            The first line of text, which may be gzipped, names the columns. A column of text is one of numbers or of
            booleans (true, false) if all of its fields are; empty fields are null.
        label, columns, categories, separator, standardize, duplicates
            As for `from_frame`.
        field_separator : str, optional
            Between the fields of text. Default: of "::", tab, "|", ";" and ",", the one that comes first in line 1.
        encoding : str, optional
            Of text. Default: UTF-8, or latin-1 for what is not valid UTF-8.

        Raises
        ------
        RatingsError, MemoryBudgetError, TypeError
            As for `from_frame`; also for rows of text that have not as many fields as line 1.
        FileNotFoundError, IsADirectoryError
        ImportError
            Parquet or JSON lines without pyarrow.
        """
        table = read_table(path, field_separator, encoding)
        return cls._made(*code_table(table, None, label, columns, categories, separator, standardize, duplicates))

    @classmethod
    def _of_side(cls, path: Any, side: Side, columns: Sequence[str] | None, separator: str | None) -> Features:
        """`from_file` for the command line, which says whose features the file has."""
        return cls._made(*code_table(read_table(path), side, columns=columns, separator=separator))

    def encode(self, rows: Any, *, name: str = "features") -> Features:
        """Other rows in the columns of these features.

        Parameters
        ----------
        rows : frame, mapping, Features or matrix
            A frame with the columns that these features were made of, in any order; a mapping of names of columns to
            the values of one row, such as ``{"genre": ["noir"], "year": 1946}``; other `Features`, whose columns are
            matched by name; or a matrix with the same features in the same order. Numbers are those of the frame; they
            are standardized with the mean and deviation of these features.
        name : str
            Name of `rows` in messages.

        Returns
        -------
        Features
            With the labels of `rows`, if it has some. Categories and tags that these features lack are left out, with
            a warning.

        Raises
        ------
        RatingsError
            A column is missing or has another kind, or none of the features is known.
        TypeError
        """
        if isinstance(rows, Features):
            return self._matched(rows, name)
        if isinstance(rows, Mapping) or frame_names(rows) is not None:
            if not self._columns:
                raise TypeError(
                    f"{name} is a {type(rows).__name__}, and the features of the model were no frame: pass a matrix of "
                    f"{len(self.names)} columns, or Features with names"
                )
            return self._matched(Features._made(*code_like(table_of(rows, name), self._columns)), name)
        matrix = _as_matrix(name, rows)
        if matrix.shape[1] != len(self.names):
            turned = f": rows are users or items, pass {name}.T" if matrix.shape[0] == len(self.names) else ""
            raise RatingsError(
                f"{name} has shape {matrix.shape}; expected {len(self.names)} features (columns){turned}"
            )
        return self._matched(Features._made(matrix, self.names, None), name)

    def coding(self) -> dict[str, Any]:
        """Names, columns, shift and scale in types of JSON: what `encode` needs, without the rows."""
        scaling = {"shift": self.shift.tolist(), "scale": self.scale.tolist()}
        return {"names": self.names, "columns": self.columns} | scaling

    @classmethod
    def from_coding(cls, coding: Mapping[str, Any]) -> Features:
        """Features without rows, of what `coding` returned; KeyError, TypeError or ValueError for anything else."""
        names = coding["names"]
        shift, scale = (np.array(coding[key], dtype=np.float64) for key in ("shift", "scale"))
        if not shift.shape == scale.shape == (len(names),) or not np.all(np.isfinite(shift)) or not np.all(scale > 0):
            raise ValueError(f"shift and scale have shapes {shift.shape} and {scale.shape} of {len(names)} features")
        columns = [Column(**column) for column in coding["columns"]]
        if not all(column.kind in KINDS for column in columns):
            raise ValueError(f"columns are of the kinds {', '.join(sorted({column.kind for column in columns}))}")
        empty = _as_matrix("features", sp.csr_array((0, len(names)), dtype=np.float32))
        return cls._made(empty, names, None, columns, shift, scale)

    def _matched(self, other: Features, name: str) -> Features:
        """`other` with the names and the scale of `self`."""
        table = {feature: place for place, feature in enumerate(self.names)}
        places = np.array([table.get(feature, -1) for feature in other.names], dtype=np.int64)
        unknown = [other.names[k] for k in np.flatnonzero(places < 0) if other.matrix.shape[0]]
        if unknown and len(unknown) == len(other.names):
            raise UnknownLabelError(
                f"{name}: none of its {len(unknown):,} features ({some(unknown)}) is among the {len(self.names):,} of "
                f"the model ({some(self.names)})"
            )
        if unknown:
            logger.warning(
                "%s: %d of %d features left out, unknown to the model (%s)",
                name, len(unknown), len(other.names), some(unknown),
            )  # fmt: skip
        matrix = other.matrix
        codes, values = places[matrix.indices], matrix.data.astype(np.float64)
        rows = rows_of_entries(matrix.indptr)
        scaled = (self.shift != 0) | (self.scale != 1)
        kept = (codes >= 0) & ~scaled[codes]
        parts = [(rows[kept], codes[kept], values[kept])]
        for column in np.flatnonzero((places >= 0) & scaled[places]):  # values of all rows, 0 without entry
            code = places[column]
            raw = matrix[:, [column]].toarray()[:, 0].astype(np.float64) * other.scale[column] + other.shift[column]
            scores = (raw - self.shift[code]) / self.scale[code]
            parts.append((np.arange(len(raw)), np.full(len(raw), code), scores))
        rows, codes, values = (np.concatenate([part[k] for part in parts]) for k in range(3))
        found = to_matrix(rows, codes, values, (matrix.shape[0], len(self.names)))
        return Features._made(found, self.names, other.labels, self._columns, self.shift, self.scale)

    def with_rows(self, matrix: sp.csr_array, labels: Any) -> Features:
        """The same features of other rows, as a checked matrix and labels."""
        return Features._made(matrix, self.names, labels, self._columns, self.shift, self.scale)


# ------------------------------------------------------------------------------------------------------------ alignment


def align_features(argument: str, value: Any, labels: np.ndarray | None, n_rows: int) -> Features:
    """Features with a row for each row of the ratings, in their order, then the cold rows: those of features only.

    `argument` is "item_features" or "user_features", and `labels` are those of the items or users of the ratings. Rows
    of ratings that have no features are empty. Without labels on both sides, rows are positions and there are no cold
    rows.
    """
    side: Side = "user" if argument.startswith("user") else "item"
    features = as_features(argument, value, side)
    have, matrix = features.labels, features.matrix
    if not matrix.shape[0] or not matrix.shape[1]:
        raise RatingsError(f"{argument} has shape {matrix.shape}: it needs at least one {side} and one feature")
    if have is None and labels is None:
        _check_rows(argument, side, matrix, n_rows)
        return features
    if have is None or labels is None:
        known = cast(np.ndarray, labels if have is None else have)
        if len(known) == n_rows == matrix.shape[0] and are_positions(known, np.arange(n_rows)):
            return features.with_rows(matrix, labels)
        _refuse_half_labelled(argument, side, features, labels, n_rows)
    assert have is not None and labels is not None
    check_label_types(side, ("ratings", labels), (argument, have))
    places = places_among(have, labels)
    _check_matches(argument, side, places, labels, have)
    cold = np.ones(len(have), dtype=bool)
    cold[places[places >= 0]] = False
    strangers = np.flatnonzero(cold)
    rows = rows_or_empty(matrix, np.concatenate((places, strangers)))
    joined = plain_array([*labels.tolist(), *have[strangers].tolist()]) if len(strangers) else labels
    return features.with_rows(rows, joined)


def as_features(argument: str, value: Any, side: Side | None = None) -> Features:
    if isinstance(value, Features):
        return value
    if frame_names(value) is not None:
        try:
            return Features._made(*code_table(table_of(value, argument), side))
        except RatingsError as error:
            raise type(error)(
                f"{error} (arguments of Features.from_frame, whose result takes the place of the frame)"
            ) from error
    if not sp.issparse(value) and not isinstance(value, np.ndarray):
        refuse_gpu(value, argument)
        raise TypeError(
            f"{argument} must be a data frame, a SciPy or NumPy matrix of shape (n_{side}s, n_features), or "
            f"hybridmf.Features, got {type(value).__name__}"
        )
    features = Features._made(_as_matrix(argument, value), None, None)
    _warn_constant(argument, features)
    return features


def _check_rows(argument: str, side: Side, matrix: sp.csr_array, n_rows: int) -> None:
    """Without labels, only the number of rows could say which are the same."""
    if matrix.shape[0] == n_rows:
        return
    expected = f"{argument} has shape {matrix.shape}; expected a row for each of n_{side}s={n_rows} {side}s"
    if matrix.shape[1] == n_rows:
        raise RatingsError(f"{expected}: rows are {side}s and columns are features, pass {argument}.T")
    more = ""
    if matrix.shape[0] > n_rows:
        more = f". For {side}s without entries, make the ratings larger (Ratings.from_coo(..., shape=)), or"
    raise RatingsError(f"{expected}{more or ';'} give both labels: labelled Ratings, and Features(..., labels=)")


def _refuse_half_labelled(
    argument: str, side: Side, features: Features, labels: np.ndarray | None, n_rows: int
) -> None:
    if labels is None:
        raise RatingsError(
            f"{argument} has {side} labels (such as {some(features.labels)}) and the ratings only positions, so "
            f"{side}s cannot be matched; fit labelled Ratings, or if row k of {argument} is {side} k of the ratings, "
            f"pass a matrix without labels, of {n_rows} rows"
        )
    turned = ""
    if features.matrix.shape[1] == n_rows != features.matrix.shape[0]:
        turned = f". Its shape {features.matrix.shape} looks transposed, too: rows are {side}s"
    raise RatingsError(
        f"the ratings have {side} labels (such as {some(labels)}) and {argument} only positions, so {side}s cannot be "
        f"matched; give it labels: a frame with a column of them, or Features(matrix, labels=), such as "
        f"labels=ratings.{side}_ids if row k is {side} k of the ratings{turned}"
    )


def _check_matches(argument: str, side: Side, places: np.ndarray, labels: np.ndarray, have: np.ndarray) -> None:
    """Report how many rows of the ratings have features."""
    found = int(np.count_nonzero(places >= 0))
    missing, cold = labels[places < 0], len(have) - found
    text = (
        f"{argument} has features of {found:,} of {len(labels):,} {side}s of the ratings"
        f"{f' (none of {some(missing)})' if len(missing) else ''}"
    )
    if not found:
        raise UnknownLabelError(
            f"{text}: none of its {len(have):,} labels (such as {some(have)}) is one of theirs; give both the same ids"
        )
    few = len(missing) > MANY_UNMATCHED * len(labels)
    logger.log(
        logging.WARNING if few else logging.INFO,
        "%s, and of %s %ss that the ratings lack", text, f"{cold:,}", side,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- matrices


def _as_matrix(name: str, given: Any) -> sp.csr_array:
    """Checked CSR, float32, of a SciPy or dense matrix."""
    refuse_gpu(given, name)
    if isinstance(given, np.ma.MaskedArray) and np.ma.getmaskarray(given).any():
        raise RatingsError(f"{name} has {np.ma.count_masked(given):,} masked values; fill them: {name}.filled(0)")
    matrix: Any = given if sp.issparse(given) else np.asarray(given)
    if matrix.ndim != 2:
        raise RatingsError(f"{name} must be a matrix of shape (rows, features), got {matrix.ndim} dimension(s)")
    if matrix.dtype.kind not in "fiub":
        raise TypeError(
            f"{name} has dtype {matrix.dtype}; features are real numbers (categories and tags go in as a data frame: "
            "Features.from_frame)"
        )
    if sp.issparse(matrix):
        matrix = matrix if matrix.format in ("csr", "csc", "coo") else matrix.tocoo()
        check_finite(name, np.asarray(matrix.data))
    else:
        check_finite(name, matrix)
        matrix = sp.csr_array(matrix)
    with np.errstate(over="ignore"):
        return as_csr(matrix, name=name, dtype=np.float32, drop_zeros=True)


def _checked_names(names: Iterable[Any] | None, count: int) -> list[str]:
    if names is None:
        return [str(place) for place in range(count)]
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence with the name of each feature, got {names!r}")
    found = [str(name) for name in names]
    if len(found) != count:
        raise RatingsError(f"names has {len(found)} elements; expected one for each of {count} features")
    again = [name for name, number in Counter(found).items() if number > 1]
    if again:
        raise RatingsError(f"{len(again)} names of features repeat, such as {some(again)}; names must be distinct")
    return found


def _warn_constant(name: str, features: Features) -> None:
    """Report features of a matrix that are the same in all rows, which therefore say nothing."""
    matrix = features.matrix
    n_rows = matrix.shape[0]
    if n_rows < 2:
        return
    counts = np.bincount(matrix.indices, minlength=matrix.shape[1])
    constant = [
        place for place in np.flatnonzero(counts == n_rows) if np.ptp(matrix.data[matrix.indices == place]) == 0
    ] + np.flatnonzero(counts == 0).tolist()
    if constant:
        logger.warning(
            "%s: %d of %d features are the same in all %d rows and say nothing (%s); leave them out",
            name, len(constant), matrix.shape[1], n_rows, some([features.names[k] for k in constant]),
        )  # fmt: skip
