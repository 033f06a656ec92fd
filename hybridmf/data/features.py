"""Features of users and items: frames and matrices become one sparse matrix with names, aligned with ratings by label.

frames ──> a `_Column` for each ──> entries with names ──┐
matrices ────────────────────────> names by position ────┴──> Features ──> align_features ──> a row for each user
"""

from __future__ import annotations

import logging
import numbers
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.sparse as sp

from ..core.column_names import role_of
from ..core.objective import Side
from ..core.sparse import rows_or_empty
from ..core.system import available_memory
from ..core.triplets import frame_names
from ..core.validate import (
    as_csr,
    check_bool,
    check_choice,
    frozen_csr,
    make_csr,
    refuse_gpu,
    rows_of_entries,
)
from ..errors import MemoryBudgetError, RatingsError, UnknownLabelError
from .align import are_positions
from .columns import AUTO, check_distinct_names
from .labels import as_vector, check_label_types, label_array, label_table, plain_array

logger = logging.getLogger("hybridmf")

KINDS = ("number", "boolean", "category", "tags")
"""Kinds of columns: a number is one feature, as is a boolean; a category or a tag is one feature for each value."""

MERGES = ("error", "merge")
"""Values of ``duplicates=``."""

FEW_VALUES = 16
"""Distinct values up to which a column of text is no list of ids, however few rows there are."""

MANY_UNMATCHED = 0.5
"""Share of rows without features from which it is a warning."""

EXAMPLES = 3
"""Labels, names or values shown in a message."""

ENTRY_BYTES = 48
"""Memory of an entry while the matrix is made."""

_LISTS = (list, tuple, set, frozenset, np.ndarray)


@dataclass(frozen=True)
class _Column:
    """One column of a frame, and how it becomes features."""

    name: str
    kind: str
    separator: str | None = None


class _Coded(NamedTuple):
    """Entries of one column: rows, positions among its names, values."""

    rows: np.ndarray
    codes: np.ndarray
    values: np.ndarray
    names: list[str]


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
        columns: Sequence[_Column] = (),
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
        """Number of rows."""
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

        Returns
        -------
        Features

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
        return _from_frame(frame, "frame", None, *options)

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
            return self._matched(_like(rows, name, self._columns), name)
        matrix = _as_matrix(name, rows)
        if matrix.shape[1] != len(self.names):
            turned = f": rows are users or items, pass {name}.T" if matrix.shape[0] == len(self.names) else ""
            raise RatingsError(
                f"{name} has shape {matrix.shape}; expected {len(self.names)} features (columns){turned}"
            )
        return self._matched(Features._made(matrix, self.names, None), name)

    def coding(self) -> dict[str, Any]:
        """Names, columns, shift and scale in types of JSON: what `encode` needs, without the rows."""
        return {
            "names": self.names,
            "columns": self.columns,
            "shift": self.shift.tolist(),
            "scale": self.scale.tolist(),
        }

    @classmethod
    def from_coding(cls, coding: Mapping[str, Any]) -> Features:
        """Features without rows, of what `coding` returned; KeyError, TypeError or ValueError for anything else."""
        names = coding["names"]
        shift, scale = (np.array(coding[key], dtype=np.float64) for key in ("shift", "scale"))
        if not shift.shape == scale.shape == (len(names),) or not np.all(np.isfinite(shift)) or not np.all(scale > 0):
            raise ValueError(f"shift and scale have shapes {shift.shape} and {scale.shape} of {len(names)} features")
        columns = [_Column(**column) for column in coding["columns"]]
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
                f"{name}: none of its {len(unknown):,} features ({_some(unknown)}) is among the {len(self.names):,} of "
                f"the model ({_some(self.names)})"
            )
        if unknown:
            logger.warning(
                "%s: %d of %d features left out, unknown to the model (%s)",
                name, len(unknown), len(other.names), _some(unknown),
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
        found = _to_matrix(rows, codes, values, (matrix.shape[0], len(self.names)))
        return Features._made(found, self.names, other.labels, self._columns, self.shift, self.scale)

    def _with_rows(self, matrix: sp.csr_array, labels: Any) -> Features:
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
            return features._with_rows(matrix, labels)
        _refuse_half_labelled(argument, side, features, labels, n_rows)
    assert have is not None and labels is not None
    check_label_types(side, ("ratings", labels), (argument, have))
    table = label_table(have)
    places = np.fromiter((table.get(label, -1) for label in labels.tolist()), np.int64, n_rows)
    _check_matches(argument, side, places, labels, have)
    cold = np.ones(len(have), dtype=bool)
    cold[places[places >= 0]] = False
    strangers = np.flatnonzero(cold)
    rows = rows_or_empty(matrix, np.concatenate((places, strangers)))
    joined = plain_array([*labels.tolist(), *have[strangers].tolist()]) if len(strangers) else labels
    return features._with_rows(rows, joined)


def as_features(argument: str, value: Any, side: Side | None = None) -> Features:
    """Features of any accepted kind."""
    if isinstance(value, Features):
        return value
    if frame_names(value) is not None:
        try:
            return _from_frame(value, argument, side)
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
            f"{argument} has {side} labels (such as {_some(features.labels)}) and the ratings only positions, so "
            f"{side}s cannot be matched; fit labelled Ratings, or if row k of {argument} is {side} k of the ratings, "
            f"pass a matrix without labels, of {n_rows} rows"
        )
    turned = ""
    if features.matrix.shape[1] == n_rows != features.matrix.shape[0]:
        turned = f". Its shape {features.matrix.shape} looks transposed, too: rows are {side}s"
    raise RatingsError(
        f"the ratings have {side} labels (such as {_some(labels)}) and {argument} only positions, so {side}s cannot be "
        f"matched; give it labels: a frame with a column of them, or Features(matrix, labels=), such as "
        f"labels=ratings.{side}_ids if row k is {side} k of the ratings{turned}"
    )


def _check_matches(argument: str, side: Side, places: np.ndarray, labels: np.ndarray, have: np.ndarray) -> None:
    """Report how many rows of the ratings have features."""
    found = int(np.count_nonzero(places >= 0))
    missing, cold = labels[places < 0], len(have) - found
    text = (
        f"{argument} has features of {found:,} of {len(labels):,} {side}s of the ratings"
        f"{f' (none of {_some(missing)})' if len(missing) else ''}"
    )
    if not found:
        raise UnknownLabelError(
            f"{text}: none of its {len(have):,} labels (such as {_some(have)}) is one of theirs; give both the same ids"
        )
    few = len(missing) > MANY_UNMATCHED * len(labels)
    logger.log(
        logging.WARNING if few else logging.INFO,
        "%s, and of %s %ss that the ratings lack", text, f"{cold:,}", side,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- frames


def _from_frame(
    frame: Any,
    source: str,
    side: Side | None,
    label: Any = AUTO,
    columns: Sequence[Any] | None = None,
    categories: Sequence[Any] = (),
    separator: Any = None,
    standardize: bool = True,
    duplicates: str = "error",
) -> Features:
    """See `Features.from_frame`; `source` is the name of the frame in messages, `side` that of its rows, if known."""
    check_choice("duplicates", duplicates, MERGES)
    check_bool("standardize", standardize)
    names = frame_names(frame)
    if names is None:
        raise TypeError(
            f"{source} must be a pandas, polars or pyarrow table, got {type(frame).__name__}; a matrix goes through "
            "Features(matrix, names=, labels=)"
        )
    check_distinct_names(source, names)
    table = _eager(frame)
    place = _label_place(source, frame, names, label, side)
    taken = _taken(source, names, place, columns)
    labels = _labels_of(source, frame, table, names, place, label)
    chosen = set(_names_in("categories", source, names, categories))
    separators = _separators(source, names, taken, separator)
    n_rows = len(table)
    if not n_rows or not taken:
        raise RatingsError(
            f"{source} has {n_rows} rows and the columns {', '.join(map(repr, names))}, {len(taken)} of them features; "
            "it needs at least one of each"
        )
    kinds, coded = [], []
    for name in taken:
        values = _Values(source, name, table.get_column(name))
        column = values.column(name in chosen, separators.get(name))
        coded.append(_code(values, column, unlimited=name in chosen))
        kinds.append(column)
    rows, labels = _merged_rows(source, labels, n_rows, duplicates)
    return _joined(source, coded, kinds, rows, labels, standardize)


def _eager(frame: Any) -> Any:
    import narwhals as nw

    table = nw.from_native(frame)
    return table.collect() if isinstance(table, nw.LazyFrame) else table


def _label_place(source: str, frame: Any, names: list[Any], label: Any, side: Side | None) -> int | None:
    """Column of labels; None for the index of a frame, or none."""
    if label is None:
        return None
    if not (isinstance(label, str) and label == AUTO):
        return _place("label", source, names, label)
    wanted = ("user", "item") if side is None else (side,)
    found = [k for k, name in enumerate(names) if role_of(name) in wanted]
    named = [k for k in found if re.search(r"(?:id|ID|Id|isbn|asin|sku)$", str(names[k]))]
    if len(found) == 1 or len(named) == 1:
        return (named if len(named) == 1 else found)[0]
    listed = ", ".join(map(repr, names))
    if found:
        raise RatingsError(
            f"{source} has {len(found)} columns that could hold the labels by their names: "
            f"{', '.join(repr(names[k]) for k in found)}; pass label= (a name, or a number from 0)"
        )
    if _has_index(frame):
        return None
    raise RatingsError(
        f"{source}: which column holds the labels of its rows is unclear: no name says "
        f"{' or '.join(f'{each}s' for each in wanted)}. Its columns are {listed}; pass label= (a name, or a number "
        "from 0), or label=None if row k belongs to row k of ratings without labels"
    )


def _has_index(frame: Any) -> bool:
    """Whether the index of a pandas frame has labels: it has a name, or is text."""
    index = getattr(frame, "index", None)
    if index is None or not hasattr(frame, "iloc"):
        return False
    return index.name is not None or (len(index) > 0 and all(isinstance(label, str) for label in index))


def _labels_of(
    source: str, frame: Any, table: Any, names: list[Any], place: int | None, label: Any
) -> np.ndarray | None:
    if place is None:
        if label is None:
            return None
        return plain_array(frame.index.tolist())
    series = table.get_column(names[place])
    absent = _absent(series)
    if absent.any():
        raise RatingsError(
            f"column {names[place]!r} of {source}, its labels, is null in {np.count_nonzero(absent):,} of "
            f"{len(absent):,} rows (the first is row {int(np.argmax(absent))}); leave such rows out"
        )
    narrow = series.dtype.is_integer() and "128" not in str(series.dtype)
    return np.asarray(series.to_numpy()) if narrow else plain_array(series.to_list())


def _place(argument: str, source: str, names: list[Any], wanted: Any) -> int:
    """Position of a column given by name, or by position."""
    if wanted in names:
        return names.index(wanted)
    if isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool) and 0 <= wanted < len(names):
        return int(wanted)
    raise RatingsError(
        f"{source} has no column {wanted!r} ({argument}={wanted!r}); its columns are {', '.join(map(repr, names))}"
    )


def _names_in(argument: str, source: str, names: list[Any], wanted: Any) -> list[Any]:
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise TypeError(f"{argument} must be a sequence of names of columns, got {wanted!r}: write [{wanted!r}]")
    return [names[_place(argument, source, names, each)] for each in wanted]


def _taken(source: str, names: list[Any], place: int | None, columns: Any) -> list[Any]:
    """Names of the columns of features, in the order of the frame."""
    if columns is None:
        return [name for k, name in enumerate(names) if k != place and role_of(name) != "row"]
    chosen = set(_names_in("columns", source, names, columns))
    if place is not None and names[place] in chosen:
        raise RatingsError(f"columns names {names[place]!r}, which holds the labels of {source}; leave it out")
    return [name for name in names if name in chosen]


def _separators(source: str, names: list[Any], taken: list[Any], separator: Any) -> dict[Any, str]:
    """Separator of each column that has one."""
    given = separator if isinstance(separator, Mapping) else dict.fromkeys(taken, separator)
    for name, text in given.items():
        if name not in taken:
            _place("separator", source, names, name)
            raise RatingsError(f"separator names {name!r}, which is none of the columns of features of {source}")
        if text is not None and (not isinstance(text, str) or not text):
            raise TypeError(f"separator must be text, such as '|', got {text!r}")
    return {name: text for name, text in given.items() if text is not None}


def _absent(series: Any) -> np.ndarray:
    nulls = series.is_null() | series.is_nan() if series.dtype.is_float() else series.is_null()
    return np.asarray(nulls.to_numpy(), dtype=bool)


class _Values:
    """One column of a frame, or of a single row, as a list or an array."""

    def __init__(self, source: str, name: Any, series: Any) -> None:
        self.source, self.name = source, name
        self.kind: str | None = None
        if isinstance(series, list):
            self.given: Any = series
            self.absent = np.array([_is_absent(each) for each in series], dtype=bool)
            return
        import narwhals as nw

        dtype = series.dtype
        self.absent = _absent(series)
        if dtype.is_temporal():
            self._refuse_dates(str(dtype))
        if dtype.is_decimal():
            series = series.cast(nw.Float64)
        if dtype.is_numeric():
            self.kind = "number"
        elif dtype == nw.Boolean:
            self.kind = "boolean"
        elif dtype in (nw.String, nw.Categorical, nw.Enum):
            self.kind = "category"
        elif isinstance(dtype, (nw.List, nw.Array)):
            self.kind = "tags"
        elif dtype != nw.Object:
            raise TypeError(f"{self} has the type {dtype}, of which no features can be made: {self.way_out}")
        plain = self.kind == "number" and "128" not in str(dtype) and not self.absent.any()
        self.given = series.to_numpy() if plain else series.to_list()

    def __str__(self) -> str:
        return f"column {self.name!r} of {self.source}"

    way_out = "convert it to numbers, text or lists of text, or leave it out (columns=)"

    def _refuse_dates(self, kind: str) -> None:
        raise TypeError(
            f"{self} has dates ({kind}), of which no features can be made: convert them to numbers, such as the year, "
            "or to text, such as the decade; or leave the column out (columns=)"
        )

    def column(self, category: bool, separator: str | None) -> _Column:
        """How this column becomes features, by its type and the arguments."""
        kind = self.kind or self._kind_of_objects()
        if separator is not None and kind == "category":
            kind = "tags"
        else:
            separator = None
        if category and kind != "tags":
            kind = "category"
        return _Column(str(self.name), kind, separator)

    def _kind_of_objects(self) -> str:
        """Kind of Python objects, which have to agree."""
        kinds = {_kind_of(each) for each, absent in zip(self.given, self.absent, strict=True) if not absent}
        if not kinds:
            return "category"
        if len(kinds) == 1 and next(iter(kinds)) in KINDS:
            return next(iter(kinds))
        if any(kind.startswith("date") for kind in kinds) or kinds <= {"Timestamp", "Timedelta"}:
            self._refuse_dates(", ".join(sorted(kinds)))
        raise TypeError(f"{self} has values of the types {', '.join(sorted(kinds))}: {self.way_out}")

    def numbers(self) -> np.ndarray:
        """Values as float64; all of them have to be finite."""
        if self.absent.any():
            raise RatingsError(
                f"{self} is null in {np.count_nonzero(self.absent):,} of {len(self.absent):,} rows (the first is row "
                f"{int(np.argmax(self.absent))}); fill such numbers, with the mean, for example, or leave the column "
                "out (columns=)"
            )
        values = np.asarray(self.given, dtype=np.float64)
        _check_finite(str(self), values)
        return values

    def tags(self, separator: str | None) -> tuple[np.ndarray, list[str]]:
        """(row, tag) of each pair; categories are a tag for each row that has one."""
        rows: list[int] = []
        tags: list[str] = []
        for row, (each, absent) in enumerate(zip(self.given, self.absent, strict=True)):
            if absent:
                continue
            found = self._tags_of(each, separator)
            tags += found
            rows += [row] * len(found)
        return np.array(rows, dtype=np.int64), tags

    def _tags_of(self, given: Any, separator: str | None) -> list[str]:
        if separator is not None:
            return [text for part in given.split(separator) if (text := part.strip())]
        if not isinstance(given, _LISTS):
            return [str(given)] if given != "" else []
        tags = given.tolist() if isinstance(given, np.ndarray) else sorted(given, key=str)
        bad = next((tag for tag in tags if not isinstance(tag, (str, numbers.Integral)) and not _is_absent(tag)), None)
        if bad is not None:
            raise TypeError(
                f"{self} has lists of {type(bad).__name__} (such as {bad!r}); tags are text or integers. Vectors of "
                "numbers go through Features(numpy.stack(...), labels=)"
            )
        return [str(tag) for tag in tags if not _is_absent(tag) and tag != ""]


def _is_absent(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, _LISTS):
        return False
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA has no truth value
        return True


def _kind_of(value: Any) -> str:
    """Kind of a Python object, or the name of its type."""
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, str):
        return "category"
    if isinstance(value, (numbers.Real, Decimal)):
        return "number"
    return "tags" if isinstance(value, _LISTS) else type(value).__name__


def _code(values: _Values, column: _Column, unlimited: bool = True) -> _Coded:
    """Entries of one column; `unlimited`: values may be those of nearly one row each."""
    n_rows = len(values.absent)
    if column.kind in ("number", "boolean"):
        numbers_ = values.numbers()
        rows = np.arange(n_rows) if column.kind == "number" else np.flatnonzero(numbers_)
        return _Coded(rows, np.zeros(len(rows), dtype=np.int64), numbers_[rows], [column.name])
    rows, tags = values.tags(column.separator)
    distinct = sorted(set(tags))
    if not unlimited:
        _refuse_ids(values, tags, distinct)
        _refuse_joined(values, column, tags)
    table = {tag: place for place, tag in enumerate(distinct)}
    codes = np.fromiter(map(table.__getitem__, tags), np.int64, len(tags))
    return _Coded(rows, codes, np.ones(len(rows)), [f"{column.name}:{tag}" for tag in distinct])


def _refuse_ids(values: _Values, tags: list[str], distinct: list[str]) -> None:
    """Refuse a column with a feature for nearly each row."""
    if len(distinct) <= max(FEW_VALUES, len(tags) // 2):
        return
    raise RatingsError(
        f"{values} has {len(distinct):,} different values among {len(tags):,}, as ids or titles have, and each would "
        f"be a feature (such as {_some(distinct)}): leave it out (columns=), or give separator= if its values are "
        f"joined tags; categories=[{values.name!r}] takes them nevertheless"
    )


def _refuse_joined(values: _Values, column: _Column, tags: list[str]) -> None:
    """Refuse text in which tags seem joined by "|"."""
    joined = [tag for tag in tags if "|" in tag] if column.kind == "category" else []
    if len(joined) > len(tags) / 20:
        raise RatingsError(
            f"{values} has {len(joined):,} values such as {joined[0]!r}, which look like several tags: pass "
            f"separator='|'; categories=[{values.name!r}] takes each for one category"
        )


def _merged_rows(
    source: str, labels: np.ndarray | None, n_rows: int, duplicates: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """New row of each row of a frame, and the labels of the new rows."""
    if labels is None:
        return np.arange(n_rows), None
    plain = labels.tolist()
    table: dict[Any, int] = {}
    try:
        rows = np.fromiter((table.setdefault(label, len(table)) for label in plain), np.int64, n_rows)
    except TypeError as error:
        raise TypeError(f"{source} has labels that cannot be used as dictionary keys ({error})") from error
    repeated = n_rows - len(table)
    if not repeated:
        return rows, labels
    if duplicates == "error":
        again = next(label for label, count in Counter(plain).items() if count > 1)
        first, second = [k for k, label in enumerate(plain) if label == again][:2]
        raise RatingsError(
            f"{source} has {n_rows:,} rows of {len(table):,} labels (rows {first} and {second} have {again!r}); "
            'duplicates="merge" joins their tags and takes the mean of numbers, or leave one row for each label'
        )
    return rows, plain_array(list(table))


def _joined(
    source: str,
    coded: list[_Coded],
    columns: list[_Column],
    rows: np.ndarray,
    labels: np.ndarray | None,
    standardize: bool,
) -> Features:
    """Features of all columns; `rows`: the new row of each row."""
    _check_memory(source, sum(len(each.rows) for each in coded), sum(len(each.names) for each in coded))
    n_rows = int(rows.max()) + 1
    names: list[str] = []
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    moments: list[tuple[float, float]] = []
    kept: list[_Column] = []
    for each, column in zip(coded, columns, strict=True):
        if column.kind == "number":
            counts = np.bincount(rows, minlength=n_rows)
            values = np.bincount(rows, weights=each.values, minlength=n_rows) / counts
            mean, deviation = (float(values.mean()), float(values.std())) if standardize else (0.0, 1.0)
            if standardize and not deviation > abs(mean) * 1e-12:
                _warn_dropped(source, column.name, mean)
                continue
            part = (np.arange(n_rows), np.zeros(n_rows, dtype=np.int64), (values - mean) / deviation)
            moments.append((mean, deviation))
        else:
            pairs = np.unique(rows[each.rows] * max(1, len(each.names)) + each.codes)
            part = (pairs // max(1, len(each.names)), pairs % max(1, len(each.names)), np.ones(len(pairs)))
            moments += [(0.0, 1.0)] * len(each.names)
        parts.append((part[0], part[1] + len(names), part[2]))
        names += each.names
        kept.append(column)
    if not names and standardize:
        raise RatingsError(f"{source} has no feature that differs between its {n_rows:,} rows")
    where, codes, values = (np.concatenate([part[k] for part in parts]) for k in range(3))
    shift, scale = np.array(moments).reshape(-1, 2).T.copy()
    matrix = _to_matrix(where, codes, values, (n_rows, len(names)))
    return Features._made(matrix, names, labels, kept, shift, scale)


def _like(given: Any, name: str, columns: Sequence[_Column]) -> Features:
    """Features of the columns of a frame, or of one row as a mapping, coded as `columns`, and not standardized."""
    single = isinstance(given, Mapping)
    names = list(given) if single else cast("list[Any]", frame_names(given))
    texts = list(map(str, names))
    missing = [column.name for column in columns if column.name not in texts]
    if missing:
        raise RatingsError(
            f"{name} lacks the columns {', '.join(map(repr, missing))} of the features of the model; it has "
            f"{', '.join(map(repr, names)) or 'none'}"
        )
    labels: np.ndarray | None = None
    if single:
        series = {column.name: [given[names[texts.index(column.name)]]] for column in columns}
        n_rows = 1
    else:
        check_distinct_names(name, names)
        table = _eager(given)
        series = {column.name: table.get_column(names[texts.index(column.name)]) for column in columns}
        n_rows = len(table)
        used = {column.name for column in columns}
        found = [k for k, each in enumerate(names) if role_of(each) in ("user", "item") and str(each) not in used]
        if len(found) == 1 or _has_index(given):
            labels = _labels_of(name, given, table, names, found[0] if len(found) == 1 else None, AUTO)
    coded = []
    for column in columns:
        values = _Values(name, column.name, series[column.name])
        numeric = column.kind in ("number", "boolean")
        kind = values.column(column.kind == "category", column.separator).kind
        if kind != column.kind and (numeric or kind in ("number", "boolean") or column.kind == "category"):
            raise RatingsError(
                f"{values} holds values of the kind {kind}, and in the features of the model {column.kind}"
            )
        coded.append(_code(values, column))
    rows, labels = _merged_rows(name, labels, n_rows, "error")
    return _joined(name, coded, list(columns), rows, labels, standardize=False)


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
        _check_finite(name, np.asarray(matrix.data))
    else:
        _check_finite(name, matrix)
        matrix = sp.csr_array(matrix)
    with np.errstate(over="ignore"):
        return as_csr(matrix, name=name, dtype=np.float32, drop_zeros=True)


def _check_finite(name: str, values: np.ndarray) -> None:
    bad = ~(np.abs(values.astype(np.float64)) <= np.finfo(np.float32).max)
    if bad.any():
        first = np.unravel_index(int(np.argmax(bad)), values.shape)
        where = f"row {first[0]}" + (f", column {first[1]}" if values.ndim > 1 else "")
        raise RatingsError(
            f"{name} has {np.count_nonzero(bad):,} values that are no finite float32 numbers (the first is "
            f"{values[first]} at {where}); replace them"
        )


def _to_matrix(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> sp.csr_array:
    """Canonical CSR of entries that do not repeat; a zero stays an entry, as the mean of a number is."""
    order = np.lexsort((columns, rows))
    pointer = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=pointer[1:])
    return make_csr(pointer, columns[order].astype(np.int32), values[order].astype(np.float32), shape)


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
        raise RatingsError(f"{len(again)} names of features repeat, such as {_some(again)}; names must be distinct")
    return found


def _check_memory(source: str, entries: int, features: int) -> None:
    needed, free = entries * ENTRY_BYTES, available_memory()
    if free is not None and needed > free:
        raise MemoryBudgetError(
            f"{source} has {entries:,} entries of {features:,} features: to hold them takes {needed / 2**20:,.0f} MiB "
            f"of memory and {free / 2**20:,.0f} MiB are free; use fewer columns (columns=)"
        )


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
            name, len(constant), matrix.shape[1], n_rows, _some([features.names[k] for k in constant]),
        )  # fmt: skip


def _warn_dropped(source: str, name: str, value: float) -> None:
    logger.warning("%s: left out the feature %r, which is %g in all rows and says nothing", source, name, value)


def _some(values: Any) -> str:
    """A few of several labels or names."""
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return ", ".join(map(repr, plain[:EXAMPLES])) + (", ..." if len(plain) > EXAMPLES else "")
