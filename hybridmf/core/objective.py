"""The objective of a model and its factors, shared by the backends, so that each weight is decided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .validate import check_bool, check_choice, check_real

Side = Literal["user", "item"]
SIDES: tuple[Side, Side] = ("user", "item")

Scaling: TypeAlias = "str | float"
"""One value of `regularization_scaling`."""

HU_KOREN_VOLINSKY: dict[str, float] = {"regularization": 0.01, "alpha": 1.0, "unobserved_weight": 1.0}
"""Weights of implicit feedback that are left out beside others that are given."""

DEFAULT_IMPLICIT: dict[str, float] = {"regularization": 7.0, "alpha": 0.0, "unobserved_weight": 0.1}
"""Weights of implicit feedback if none is given (bench/defaults.py, docs/tuning.md); see `default_implicit_lambda`."""

STRONGEST = 0.5
"""Most of the largest singular value of implicit preferences that the default lambda takes: near 1, factors are 0."""

DEFAULT_MULTIPLE = 0.1
"""Default lambda of explicit ratings with ``regularization_scaling="count"``, in standard deviations of the ratings."""

USUAL_DEGREE = 144
"""Entries of the row whose penalty by the default lambda is the same with every power of the entries."""

SCALES = (1e-30, 1e30)
"""Bounds of `rating_scale`: initial factors are drawn in float32 for any ratings."""

LEAST_SPREAD = 1e-6
"""Standard deviation of ratings, relative to their root mean square, below which it is rounding: they are equal."""


def other_side(side: Side) -> Side:
    return "item" if side == "user" else "user"


class PerSide(NamedTuple):
    """A number for each side."""

    user: float
    item: float

    def of(self, side: Side) -> float:
        return self.user if side == "user" else self.item

    def __str__(self) -> str:
        return f"{self.user:g}" if self.user == self.item else f"({self.user:g}, {self.item:g})"


ZERO = PerSide(0.0, 0.0)


def check_per_side(name: str, value: object, check: Callable[[str, object], float]) -> PerSide:
    """The checked numbers of users and items, from one value for both or a pair (users, items)."""
    if not isinstance(value, (tuple, list)):
        number = check(name, value)
        return PerSide(number, number)
    if len(value) != 2:
        raise ValueError(f"{name} must be one value, or a pair (users, items); got {len(value)} values: {value!r}")
    return PerSide(*(check(f"{name} of {side}s", one) for side, one in zip(SIDES, value, strict=True)))


def check_nonnegative(name: str, value: object) -> float:
    return check_real(name, value, 0.0)


def _check_scaling(name: str, value: object) -> float:
    """Exponent nu of ``s = n_u ** nu``: 0 for "none", 1 for "count" (ALS-WR, cuMF eq. 1), or the number given."""
    if isinstance(value, str):
        return {"none": 0.0, "count": 1.0}[check_choice(name, value, ("none", "count"))]
    return check_real(name, value, 0.0)


@dataclass(frozen=True)
class Objective:
    """Squared-error objective with a ridge penalty (no factor 1/2).

    Explicit: ``sum_observed (r - mu - b_u - b_i - x.y)^2 + lambda (sum_u s_u |x_u|^2 + sum_i s_i |y_i|^2)
    + lambda_b (sum_u s_u b_u^2 + sum_i s_i b_i^2)``.
    Implicit: ``sum_all c (p - x.y)^2`` + the same penalty, with ``c = 1 + alpha |r|``, ``p = [r > 0]`` where observed
    and ``c = unobserved_weight``, ``p = 0`` elsewhere.

    lambda, lambda_b and nu may differ between users and items; a number given for one of them stands for both sides.
    """

    feedback: Literal["explicit", "implicit"]
    regularization: PerSide  # lambda
    scaling: PerSide = ZERO  # nu: s = (n + added) ** nu for a row with n entries
    alpha: float = 1.0  # as the next: implicit feedback only
    unobserved_weight: float = 1.0
    biases: bool = False  # explicit feedback only
    bias_regularization: PerSide = ZERO  # lambda_b
    count_unobserved: bool = False
    """Implicit feedback only: whether s counts all pairs of a row, each as `unobserved_weight`, beside its entries
    (Rendle, Krichene, Zhang and Koren 2022, who write alpha_0 for this weight)."""
    added: PerSide = ZERO  # sum of the weights of the pairs so counted; see `for_shape`

    def __post_init__(self) -> None:
        for name in ("regularization", "scaling", "bias_regularization", "added"):
            value = getattr(self, name)
            if not isinstance(value, PerSide):
                object.__setattr__(self, name, PerSide(value, value))

    @classmethod
    def explicit(
        cls,
        regularization: object,
        scaling: object,
        biases: object,
        bias_regularization: object = None,
        spread: float = 1.0,
        multiple: float = DEFAULT_MULTIPLE,
    ) -> Objective:
        """Checked objective of explicit feedback for ratings with a standard deviation of `spread`.

        None for `regularization` is `default_lambdas`; for `scaling`, 0.5 for models with biases and the default
        lambda, else "count". lambda has the unit of the ratings and lambda_b has none: a `bias_regularization` of None
        is lambda / `spread`.
        """
        biased = check_bool("biases", biases)
        if scaling is None:
            scaling = 0.5 if biased and regularization is None else "count"
        powers = check_per_side("regularization_scaling", scaling, _check_scaling)
        lambdas = default_lambdas(powers, spread, multiple)
        if regularization is not None:
            lambdas = check_per_side("regularization", regularization, check_nonnegative)
        if bias_regularization is None:
            bias_regularization = tuple(lambda_ / spread for lambda_ in lambdas)
        return cls(
            "explicit",
            lambdas,
            powers,
            biases=biased,
            bias_regularization=check_per_side("bias_regularization", bias_regularization, check_nonnegative),
        )

    @classmethod
    def implicit(
        cls,
        regularization: object,
        scaling: object,
        alpha: object,
        unobserved_weight: object,
        count_unobserved: object = False,
        degrees: Mapping[Side, np.ndarray] | None = None,
    ) -> Objective:
        """Checked objective of implicit feedback (Hu, Koren and Volinsky 2008; Gates et al. eq. 1).

        Weights that are None are `DEFAULT_IMPLICIT` if no weight is given, lambda for ratings of these `degrees`; else
        they are `HU_KOREN_VOLINSKY`.
        """
        given = {"regularization": regularization, "alpha": alpha, "unobserved_weight": unobserved_weight}
        none_given = scaling is None and not count_unobserved and all(value is None for value in given.values())
        usual = DEFAULT_IMPLICIT | default_implicit_lambda(degrees) if none_given else HU_KOREN_VOLINSKY
        weights = {name: usual[name] if value is None else value for name, value in given.items()}
        objective = cls(
            "implicit",
            check_per_side("regularization", weights["regularization"], check_nonnegative),
            check_per_side("regularization_scaling", "none" if scaling is None else scaling, _check_scaling),
            alpha=check_real("alpha", weights["alpha"], 0.0),
            unobserved_weight=check_real("unobserved_weight", weights["unobserved_weight"], 0.0),
            count_unobserved=check_bool("count_unobserved", count_unobserved),
        )
        if objective.count_unobserved and not any(objective.scaling):
            raise ValueError(
                f"count_unobserved=True has no effect with regularization_scaling={scaling!r}, which counts nothing; "
                'use regularization_scaling="count" or a power, or count_unobserved=False'
            )
        return objective

    def for_shape(self, shape: tuple[int, int]) -> Objective:
        """The objective for ratings of this many users and items, whose pairs `count_unobserved` counts."""
        if not self.count_unobserved:
            return self
        users, items = shape
        return replace(self, added=PerSide(self.unobserved_weight * items, self.unobserved_weight * users))

    @property
    def weights(self) -> dict[str, float]:
        """What multiplies errors and penalties, by the name of its parameter; the larger one of both sides."""
        if self.is_implicit:
            names = ["regularization", "alpha", "unobserved_weight"]
        else:
            names = ["regularization", "bias_regularization"] if self.biases else ["regularization"]
        return {name: float(np.max(getattr(self, name))) for name in names}

    def check_finite_in(self, dtype: np.dtype) -> None:
        """Reject a weight that is infinite in the type of the computation."""
        largest = float(np.finfo(dtype).max)
        for name, value in self.weights.items():
            if value > largest:
                raise ValueError(
                    f"{name} must be at most {largest:g}, the largest {dtype.name}, got {value:g}; lower {name}"
                )

    @property
    def is_implicit(self) -> bool:
        return self.feedback == "implicit"

    def row_scale(self, side: Side, degrees: np.ndarray) -> np.ndarray:
        """s of each row from its number of entries; float64, shape of `degrees`. Empty rows count as 1 (unused)."""
        return (np.maximum(degrees, 1).astype(np.float64) + self.added.of(side)) ** self.scaling.of(side)

    def ridge(self, side: Side, factors: int, system_order: int) -> np.ndarray:
        """Diagonal that ``s_u`` multiplies in the normal equations, float64: factors, then a bias."""
        ridge = np.full(system_order, self.regularization.of(side))
        ridge[factors:] = self.bias_regularization.of(side)
        return ridge

    def share(self, side: Side) -> float:
        """lambda of a side divided by that of the items; 1 where one is 0, so that no basis has the least penalty."""
        return self.regularization.of(side) / self.regularization.item if all(self.regularization) else 1.0

    def penalty(self, side: Side, factors: np.ndarray, degrees: np.ndarray, bias: np.ndarray | None = None) -> float:
        """Penalty of one side, ``sum_u s_u (lambda |x_u|^2 + lambda_b b_u^2)``, in float64."""
        return self.penalty_of_squares(side, np.einsum("ij,ij->i", factors, factors, dtype=np.float64), degrees, bias)

    def penalty_of_squares(
        self, side: Side, squares: np.ndarray, degrees: np.ndarray, bias: np.ndarray | None = None
    ) -> float:
        """`penalty` from the squared length of each row's factors, shape (n,)."""
        rows = self.regularization.of(side) * squares
        if bias is not None:
            rows = rows + self.bias_regularization.of(side) * np.square(bias, dtype=np.float64)
        return float(rows @ self.row_scale(side, degrees))


def default_lambdas(scaling: PerSide, spread: float, multiple: float = DEFAULT_MULTIPLE) -> PerSide:
    """Default lambda of explicit ratings with a standard deviation of `spread`: ``multiple * spread * 144**(1 - nu)``.

    That is 0.1 standard deviations for "count", 1.2 for 0.5 and 14.4 for "none".
    """
    return PerSide(*(multiple * spread * USUAL_DEGREE ** (1 - power) for power in scaling))


def default_implicit_lambda(degrees: Mapping[Side, np.ndarray] | None) -> dict[str, float]:
    """Default lambda of implicit feedback: 7, or less for small data, whose factors it would shrink to nothing.

    The minimum is zero for lambda above the largest singular value of the preferences. ``|d_u| |d_i| / nnz`` estimates
    it from the degrees, within 25 % on the sets of bench/defaults.py.
    """
    if degrees is None:
        return {}
    users, items = (degrees[side].astype(np.float64) for side in SIDES)
    largest = math.sqrt((users @ users) * (items @ items)) / max(1.0, users.sum())
    return {"regularization": min(DEFAULT_IMPLICIT["regularization"], STRONGEST * largest)}


@dataclass(frozen=True)
class Factors:
    """Factors of one side."""

    matrix: np.ndarray  # shape (n, rank), C order
    bias: np.ndarray | None = None  # shape (n,)
    squares: Factors | None = None  # AdaGrad's sums of squared steps of each coordinate, during a fit

    def __len__(self) -> int:
        return len(self.matrix)

    def on_host(self) -> Factors:
        """The factors as NumPy arrays; factors of other backends stay on a device until they are read."""
        return self

    def held_by(self, device: Any = None) -> Any:
        """Factors that are on a device (default: any) and nowhere else, as `matrix` there; None if they are not."""
        return None

    def blank_rows(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Which of `rows` (default: all), by place, have zero factors and no bias, that is, no training entries."""
        first = self.matrix[:, 0] if rows is None else self.matrix[rows, 0]
        suspects = np.flatnonzero(first == 0)  # few, or none: the other columns are read for these only
        if not len(suspects):
            return suspects
        where = suspects if rows is None else rows[suspects]
        blank = ~self.matrix[where].any(axis=1)
        if self.bias is not None:
            blank &= self.bias[where] == 0
        return suspects[blank]

    @property
    def form(self) -> tuple[np.dtype, int]:
        """dtype and columns of `matrix`."""
        return self.matrix.dtype, self.matrix.shape[1]

    def write(self, target: np.ndarray) -> None:
        """Write `matrix` to an array of its shape and dtype on the host."""
        target[...] = self.matrix

    @property
    def arrays(self) -> list[Any]:
        """Arrays of the factors in their present memory; first axis: rows."""
        return [self.matrix] if self.bias is None else [self.matrix, self.bias]

    def with_arrays(self, arrays: Sequence[Any]) -> Factors:
        return Factors(arrays[0], arrays[1] if len(arrays) > 1 else None)

    def take(self, rows: np.ndarray) -> Factors:
        host = self.on_host()
        return host.with_arrays([np.ascontiguousarray(array[rows]) for array in host.arrays])

    def part(self, rows: slice) -> Factors:
        """Some consecutive rows, as views."""
        bias = None if self.bias is None else self.bias[rows]
        return Factors(self.matrix[rows], bias, None if self.squares is None else self.squares.part(rows))

    def reordered(self, rows: np.ndarray) -> Factors:
        """All rows in the given order, where the factors are."""
        return self.take(rows)

    def put(self, rows: np.ndarray, new: Factors, size: int) -> Factors:
        """A copy of `size` rows in which `rows` are replaced by `new`; added rows are zero."""
        host, arrays = self.on_host(), []
        for old, replacing in zip(host.arrays, new.on_host().arrays, strict=False):  # biases if both have them
            arrays.append(np.zeros((size, *old.shape[1:]), dtype=old.dtype))
            arrays[-1][: len(old)] = old
            arrays[-1][rows] = replacing
        return host.with_arrays(arrays)


def scoring_rows(factors: Factors, side: Side, mean: float) -> np.ndarray:
    """Rows whose inner products are the predictions: factors; mean and biases, if any, as two more columns."""
    matrix, bias = factors.matrix, factors.bias
    if bias is None:
        return matrix
    rows = np.ones((len(matrix), matrix.shape[1] + 2), dtype=matrix.dtype)
    rows[:, :-2] = matrix
    if side == "user":
        rows[:, -2] = bias + matrix.dtype.type(mean)
    else:
        rows[:, -1] = bias
    return rows


class LazyFactors(Factors):
    """Factors stored elsewhere or in another layout, converted to host arrays at first access.

    A subclass stores its data by `keep`, since factors are frozen, and converts them in `_brought`.
    """

    _host: Factors | None = None

    def keep(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _brought(self) -> Factors:
        raise NotImplementedError

    def on_host(self) -> Factors:
        """The factors in NumPy arrays, made once."""
        host = self._host
        if host is None:
            host = self._brought()
            self.keep(_host=host)
        return host

    def wait_by(self, release: Callable[[], bool]) -> None:
        """Wait until no other code holds older factors, if there is no memory for new ones beside them."""

    def let_go(self) -> None:
        """Drop arrays that `on_host` has created, if new factors may need their memory."""

    @property
    def matrix(self) -> np.ndarray:
        return self.on_host().matrix

    @property
    def bias(self) -> np.ndarray | None:
        return self.on_host().bias

    def __len__(self) -> int:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        return Factors, (self.matrix, self.bias, self.squares)


@dataclass(frozen=True)
class State:
    """Everything a fit has learned: both sides and the mean rating (0 without biases)."""

    user: Factors
    item: Factors
    mean: float = 0.0
    vectors: Mapping[Side, Factors] = field(default_factory=dict)
    """Those of the features of a side, if it has any, with biases as the factors have."""

    def side(self, side: Side) -> Factors:
        return self.user if side == "user" else self.item

    def on_host(self) -> State:
        return replace(self, user=self.user.on_host(), item=self.item.on_host())

    def with_side(self, side: Side, factors: Factors) -> State:
        return replace(self, user=factors) if side == "user" else replace(self, item=factors)


def rating_scale(total: float, squares: float, nnz: int, biases: bool) -> float:
    """Root mean square of ratings: about their mean where a model has biases and ratings differ, else about zero.

    Ratings divided by it are standardized: in any unit, factors with a norm of about 1 explain them. Learning
    rates of `SGD` and initial factors refer to it. `squares` is the sum of the squared ratings. The result is within
    `SCALES`; 1 if all ratings are zero.
    """
    about_zero = squares / nnz
    if not about_zero:
        return 1.0
    if not math.isfinite(about_zero):
        return SCALES[1]
    about_mean = about_zero - (total / nnz) ** 2
    spread = biases and about_mean > LEAST_SPREAD**2 * about_zero
    return float(np.clip(math.sqrt(about_mean if spread else about_zero), *SCALES))


class Terms(NamedTuple):
    """Parameters of an update of stochastic gradient descent, apart from its entry."""

    rate: float
    regularization: float
    mean: float
    bias_rate: float
    bias_regularization: float
    root: float = 1.0  # AdaGrad and RPCS divide a step by the square root of this plus a sum of squared steps
    bias_root: float = 1.0
    head_only: bool = False  # RPCS updates only the heads of rows
