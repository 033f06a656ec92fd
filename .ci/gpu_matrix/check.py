"""One case: its fits, whether they repeat their bits, and whether the answer is right."""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hybridmf as hmf

from . import oracle
from .cases import Case
from .data import Matrix, open_matrix
from .oracle import Fitted, Problem

PRODUCT_ERROR = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bf16x3": 2.0**-17,
    "tf32": 2.0**-11,
    "bf16": 2.0**-9,
    "float16": 2.0**-11,
}
"""Unit roundoff of the factors in the products of each precision; sums and the solution are in float32."""

ARITHMETIC_ERROR = {"float32": 2.0**-16, "float64": 2.0**-46}
"""Backward error of sums and solution alone, by dtype: eight times the 1.9e-6 that docs/gpu.md measures in float32.

A row summed from a buffer that is overwritten, or not yet filled, has errors of 1e-3 to 1.
"""

HOGWILD_SPREAD = 0.05
"""Largest relative difference of the objectives of two runs of a schedule that does not repeat its bits."""


def allowed_errors(case: Case, counts: np.ndarray) -> np.ndarray:
    """Largest backward error of rows of these effective numbers of entries.

    Each factor is rounded once, by up to its unit, so that n entries of about equal weight change A by twice the unit
    over sqrt(n), and b by half as much: docs/gpu.md measures 1.3 units over sqrt(n). Eight covers the largest of some
    hundred rows, and that factors of a row differ in length.
    """
    arithmetic = ARITHMETIC_ERROR["float64" if case.precision == "float64" else "float32"]
    return arithmetic + 8 * PRODUCT_ERROR[case.precision] / np.sqrt(np.maximum(counts, 1))


class Failure(Exception):
    """A case that ran and is wrong; says why."""


@dataclass
class Bench:
    """What a process keeps for its cases: data sets, ratings on the device, objectives of exact fits.

    Attributes
    ----------
    folder : Path
        Of the data sets.
    device : str
    """

    folder: Path
    device: str = "cuda"

    def __post_init__(self) -> None:
        # few at a time: other processes hold as many
        self.matrix = functools.lru_cache(8)(lambda name: open_matrix(self.folder, name))
        self.lengths = functools.lru_cache(8)(self._lengths)
        self.ratings = functools.lru_cache(4)(self._ratings)
        self.on_device = functools.lru_cache(1)(self._on_device)
        self.exact_objective = functools.lru_cache(8)(self._exact_objective)

    def _lengths(self, name: str) -> dict[str, np.ndarray]:
        matrix: Matrix = self.matrix(name)
        return {side: np.diff(matrix.rows(side, "explicit").indptr) for side in oracle.OTHER}

    def _ratings(self, name: str, feedback: str) -> Any:
        return hmf.Ratings.from_matrix(self.matrix(name).rows("user", feedback))

    def _on_device(self, name: str, feedback: str, dtype: str) -> Any:
        return hmf.PreparedRatings(self.ratings(name, feedback), device=self.device, dtype=dtype)

    def _exact_objective(self, data: str, model: str, factors: int, iterations: int, weights: tuple[Any, ...]) -> float:
        case = Case("exact", data, model, factors, dict(weights), iterations)
        return objective(self, case, fit(self, case)[0])

    def given(self, case: Case) -> Any:
        """The ratings that the fits of a case get."""
        if case.prepared:
            return self.on_device(case.data, case.feedback, case.options.get("dtype", "float32"))
        self.on_device.cache_clear()
        return self.ratings(case.data, case.feedback)

    def release(self) -> None:
        """Give memory that no array uses back to the GPU, which other processes share."""
        gc.collect()
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def make_model(case: Case, device: str) -> Any:
    """The estimator of a case."""
    kinds: dict[str, Callable[..., Any]] = {"implicit": hmf.ImplicitALS, "sgd": hmf.SGD, "ccd": hmf.CCD}
    return kinds.get(case.model, hmf.ExplicitALS)(device=device, **case.parameters())


def learned(model: Any) -> Fitted:
    """The factors of a model."""
    bias = {side: getattr(model, f"{side}_bias_", None) for side in oracle.OTHER}
    factors = {"user": model.user_factors_, "item": model.item_factors_}
    return Fitted(factors, bias, float(getattr(model, "mean_", 0.0) or 0.0))


def fit(bench: Bench, case: Case, watched: bool = False) -> tuple[Fitted, Fitted | None, Fitted | None]:
    """Factors after the fit; if `watched`, also after the first iteration and the last but one.

    Where a GPU is used, ratings and factors must be on it: otherwise other code runs than the case means.
    """
    model, seen = make_model(case, bench.device), {}

    def watch(model: Any, record: Any) -> None:
        if record["iteration"] in (1, case.iterations - 1):
            now = learned(model)
            copies = {side: now.factors[side].copy() for side in oracle.OTHER}
            bias = {side: None if each is None else each.copy() for side, each in now.bias.items()}
            seen[record["iteration"]] = Fitted(copies, bias, now.mean)

    model.fit(bench.given(case), callback=watch if watched else None)
    if bench.device != "cpu" and (model.plan_.streamed or model.plan_.offloaded or model.device_ == "cpu"):
        raise Failure(f"the plan put it elsewhere: {model.plan_}")
    return learned(model), seen.get(1), seen.get(case.iterations - 1)


def digest(fitted: Fitted) -> str:
    """The bits of all factors and biases."""
    found = hashlib.sha256()
    for array in fitted.arrays():
        found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def same_bits(a: Fitted, b: Fitted) -> bool:
    """Whether two fits have the same bits (NaNs included)."""
    return all(
        x.shape == y.shape and np.array_equal(x.view(np.uint8), y.view(np.uint8))
        for x, y in zip(map(np.ascontiguousarray, a.arrays()), map(np.ascontiguousarray, b.arrays()), strict=True)
    )


def problem_of(case: Case) -> Problem:
    """The objective of a case."""
    return Problem.of(case.feedback == "implicit", case.parameters())


def objective(bench: Bench, case: Case, fitted: Fitted) -> float:
    """The objective of a case's model, in float64."""
    ratings = bench.matrix(case.data).rows("user", case.feedback)
    return oracle.objective(problem_of(case), ratings, bench.lengths(case.data), fitted)


def check_finite(fitted: Fitted) -> None:
    """Every factor of every row is a number."""
    for array in fitted.arrays():
        bad = ~np.isfinite(array)
        if bad.any():
            raise Failure(
                f"{np.count_nonzero(bad)} factors are not finite, the first at {np.argwhere(bad)[0].tolist()}"
            )


def check_mean(bench: Bench, case: Case, fitted: Fitted) -> None:
    """The mean rating of a biased model is that of the ratings."""
    mean = float(bench.matrix(case.data).rows("user", case.feedback).data.mean(dtype=np.float64))
    if case.biases and abs(fitted.mean - mean) > 1e-6 * abs(mean):
        raise Failure(f"the mean is {fitted.mean}, not {mean}")


def check_exact(bench: Bench, case: Case, last: Fitted, before: Fitted | None) -> float:
    """Residuals of the users, solved last, and of the items, for the users of the iteration before; the largest one."""
    worst = 0.0
    for side, fixed in (("user", last), ("item", before)):
        if fixed is None:
            continue
        ratings, lengths = bench.matrix(case.data).rows(side, case.feedback), bench.lengths(case.data)[side]
        rows = oracle.chosen_rows(lengths, case.name)
        errors, counts = oracle.row_errors(problem_of(case), ratings, side, last, fixed, rows)
        allowed = allowed_errors(case, counts)
        wrong, k = np.count_nonzero(~(errors <= allowed)), int(np.argmax(errors / allowed))
        if wrong:
            raise Failure(
                f"{side} {rows[k]} ({lengths[rows[k]]} entries) has a backward error of {errors[k]:.1e}, allowed "
                f"{allowed[k]:.1e}; so have {wrong} of {len(rows)} {side}s"
            )
        worst = max(worst, float(errors.max()))
    return worst


def check_objective(bench: Bench, case: Case, last: Fitted, first: Fitted | None) -> float:
    """The objective has fallen since the first iteration, and is near the exact solver's; relative to it."""
    names = ("unobserved_weight", "regularization_scaling", "nonnegative")
    weights = tuple((name, case.options[name]) for name in names if name in case.options)
    exact = case.exact()
    value = objective(bench, case, last)
    best = bench.exact_objective(exact.data, exact.model, exact.factors, exact.iterations, weights)
    ratio, (low, high) = value / best, case.limits
    if not low <= ratio <= high:
        raise Failure(f"the objective is {ratio:.3f} times the exact solver's, allowed {low:g} to {high:g}")
    if first is not None:
        start = objective(bench, case, first)
        if not value < start:
            raise Failure(f"the objective rose from {start:.6g} after the first iteration to {value:.6g}")
    return ratio


def check_answer(bench: Bench, case: Case, found: tuple[Fitted, Fitted | None, Fitted | None]) -> float:
    """A number that says how good the answer is: the largest backward error, or the relative objective."""
    last, first, before = found
    check_finite(last)
    check_mean(bench, case, last)
    if case.check == "objective":
        return check_objective(bench, case, last, first)
    return check_exact(bench, case, last, before)


def repeat(bench: Bench, case: Case, first: Fitted) -> None:
    """The other fits, without observers, against the first."""
    for number in range(2, case.fits + 1):
        again, _, _ = fit(bench, case)
        if case.reproducible and not same_bits(first, again):
            rows = _differing(first, again)
            raise Failure(f"fit {number} has other bits than the first: {rows}")
        if not case.reproducible:
            values = [objective(bench, case, each) for each in (first, again)]
            if not abs(values[0] - values[1]) <= HOGWILD_SPREAD * values[0]:
                raise Failure(f"fit {number} has an objective of {values[1]:.6g}, the first {values[0]:.6g}")


def _differing(a: Fitted, b: Fitted) -> str:
    """Which rows differ, and by how much."""
    found = []
    for side in oracle.OTHER:
        difference = np.abs(np.float64(a.factors[side]) - np.float64(b.factors[side])).max(axis=1)
        rows = np.flatnonzero(~(difference == 0))
        if len(rows):
            found.append(f"{len(rows)} {side}s, first {rows[:3].tolist()}, by up to {np.max(difference):.1e}")
    return "; ".join(found) or "biases only"


def run_case(bench: Bench, case: Case, expected: str | None = None) -> dict[str, Any]:
    """The result of a case: status, what is wrong, the figure of the check, the bits.

    Parameters
    ----------
    expected : str, optional
        Bits of the same case without delays. Then the answer is right if it has these bits.
    """
    result: dict[str, Any] = {"status": "ok"}
    try:
        found = fit(bench, case, watched=True)
        if case.reproducible:
            result["sha256"] = digest(found[0])
        try:
            if expected is None or result.get("sha256") != expected:
                result["figure"] = float(f"{check_answer(bench, case, found):.3g}")
        finally:
            if expected is not None and result.get("sha256") not in (None, expected):
                result |= {"status": "failed", "detail": "other bits than without delays"}
        repeat(bench, case, found[0])
    except Failure as failure:
        also = f"; {result['detail']}" if "detail" in result else ""
        result |= {"status": "failed", "detail": f"{failure}{also}"}
    finally:
        bench.release()
    return result
