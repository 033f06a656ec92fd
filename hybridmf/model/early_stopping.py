"""Early stopping: when a fit no longer improves on held-out entries, restore the factors of the best iteration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.objective import Factors, LazyFactors
from ..core.validate import check_int, check_real
from .learned import Learned

LOWER_IS_BETTER = ("rmse", "mae")
METRICS = re.compile(r"rmse|mae|(?:ndcg|precision|recall|map|mrr|hit_rate)@[1-9][0-9]*")


def refuse_error(argument: str, name: str) -> None:
    """Refuse errors of predicted ratings for implicit feedback, whose scores are no ratings."""
    if name in LOWER_IS_BETTER:
        raise ValueError(
            f'{argument} "{name}" compares predicted ratings, and models of implicit feedback rank: use a metric of '
            'rankings such as "ndcg@10", or fit ExplicitALS'
        )


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a fit when a metric of the validation set no longer improves, and restore the best factors.

    Parameters
    ----------
    patience : int
        Iterations without an improvement after which the fit stops.
    metric : str, optional
        ``"ndcg@k"``, ``"precision@k"``, ``"recall@k"``, ``"map@k"``, ``"mrr@k"``, ``"hit_rate@k"``, ``"rmse"`` or
        ``"mae"``. Default: RMSE for
        explicit and NDCG@10 for implicit feedback.
    min_delta : float
        Smallest improvement that counts.

    Raises
    ------
    TypeError, ValueError

    Examples
    --------
    >>> import hybridmf as hmf
    >>> stopping = hmf.EarlyStopping(patience=5, metric="recall@20")
    """

    patience: int = 3
    metric: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_int("patience", self.patience, 1)
        check_real("min_delta", self.min_delta, 0.0)
        if self.metric is not None and not (isinstance(self.metric, str) and METRICS.fullmatch(self.metric)):
            raise ValueError(
                f"metric must be rmse, mae, ndcg@k, precision@k, recall@k, map@k, mrr@k or hit_rate@k (k a positive "
                f'integer, as in "ndcg@10"), got {self.metric!r}'
            )


def check_early_stopping(given: Any) -> EarlyStopping | None:
    """The argument ``early_stopping=`` of `fit`: a rule, its patience, True, or a mapping of its parameters."""
    if given is None or given is False or isinstance(given, EarlyStopping):
        return given or None
    if given is True:
        return EarlyStopping()
    if isinstance(given, Mapping):
        return EarlyStopping(**given)
    return EarlyStopping(check_int("early_stopping", given, 1))


@dataclass
class Watch:
    """The best iteration of a fit in progress."""

    rule: EarlyStopping
    metric: str = ""  # that of the rule, or the default of the model
    iteration: int = 0  # 0 before the first
    value: float = field(default=np.nan)
    learned: Learned | None = None
    """The result of the iteration, with factors in the memory of the host that later iterations do not change."""

    def see(self, iteration: int, value: float, learned: Learned) -> bool:
        """Record an iteration and return whether the fit has to stop after it."""
        gain = self.value - value if self.metric in LOWER_IS_BETTER else value - self.value
        if not self.iteration or gain > self.rule.min_delta:
            self.iteration, self.value = iteration, value
            state = learned.state
            self.learned = replace(learned, state=replace(state, user=_apart(state.user), item=_apart(state.item)))
        return iteration - self.iteration >= self.rule.patience


def _apart(factors: Factors) -> Factors:
    """Factors in arrays that no other code changes: those on a GPU or in files are copied."""
    own = np.array if isinstance(factors, LazyFactors) else np.asarray
    return Factors(own(factors.matrix), None if factors.bias is None else own(factors.bias))
