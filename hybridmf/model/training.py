"""The ratings of a fit in one process: checked, then in both orientations where the solver reads them."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, Side, State
from ..core.regression import SideFeatures
from ..core.sparse import ValueSummary, transposed
from ..core.validate import check_nonempty, csr_arrays, make_csr
from ..data import fingerprint
from ..data.align import Labels, labels_of
from ..data.features import Features, align_features
from ..data.store import Store, StoreMatrix
from ..data.wide import is_wide, without_rows
from ..plan.make import NOTHING, check_memory, plan_for
from ..plan.solver import Solver
from ..plan.types import Plan, Settings
from ..ratings import Ratings, as_ratings
from .engine import GPU_SCORES
from .late import LateMatrix
from .learned import likes_of, pattern, scale_of, summary_of
from .prepared import PreparedRatings, prepared_for
from .weights import in_units, weighted_entries, weights_of_entries

if TYPE_CHECKING:
    from ..device.cuda import Device

logger = logging.getLogger("hybridmf")


def compile_ahead(plan: Plan, later: bool = False) -> list[Device]:
    """Start to compile the kernels of a fit of ALS, if it is on GPUs, and those that serve its model; the GPUs.

    `later`: after all that the fit at hand needs.
    """
    if plan.gpu is None or plan.method.kind != "als":
        return []
    from ..device.cuda import open_device
    from ..gpu import topk
    from ..gpu.half import programs_of, wide_programs_of

    devices = [open_device(name) for name in plan.devices or (plan.device,)]
    for device in devices:
        device.compile_ahead(programs_of(device, plan), later)
    if float(plan.n_users) * plan.n_items * plan.rank >= GPU_SCORES and not plan.offloaded:  # else the CPU serves
        columns = plan.factors + 2 * (plan.rank > plan.factors)  # of `scoring_rows`
        devices[0].compile_ahead(topk.programs(devices[0].spec, columns, plan.dtype, plan.n_items), later=True)
    for device in devices:  # rows with entries of their own alone soon make factors of a wide range
        device.compile_ahead(wide_programs_of(device, plan), later=True)
    return devices


class LocalRatings:
    """The source of a `hybridmf.model.fit.Fit` in one process, and, once placed, the ratings that its solver reads.

    `late` allows a check of a large matrix that ends during the fit. `entries` are what the solver reads: those of
    `matrix`, or with weights others of the same pattern, in a unit.
    """

    closing = staticmethod(closing)  # context of a solver, which ends its threads and connections

    user_items: Any
    """csr_array, StoreMatrix or DeviceMatrix, or `Dealt` on several GPUs; as `item_users`. Set by placing."""
    item_users: Any
    values: ValueSummary | StoreMatrix  # sums and ranges of the values of `entries`

    def __init__(
        self,
        model: Any,
        user_items: Any,
        weights: Any = None,
        *,
        late: bool = False,
        name: str = "user_items",
        features: Mapping[Side, Any] | None = None,
    ) -> None:
        self.model = model
        self.unit: float | None = None
        self.prepared = prepared_for(user_items, model._settings().dtype, model._objective().is_implicit)
        given = as_ratings(user_items if self.prepared is None else self.prepared, name)
        self.labels = labels_of(given)
        self.frame_kind = getattr(given, "frame_kind", None)
        own = getattr(given, "weights", None) if isinstance(given, Ratings) else None
        if own is not None and weights is not None:
            raise ValueError(f"weights: {name} has weights of its own; give one of them (ratings.with_weights(None))")
        weights = own if weights is None else weights
        late = late and self.prepared is None and weights is None and not features
        self._late = model._late_matrix(given) if late else None
        self.matrix: Any = self._late
        if self._late is None:
            self.matrix = model._check_matrix(given, name) if self.prepared is None else self.prepared.user_items
        check_nonempty(self.matrix, name)
        columns = user_items if is_wide(user_items) else given
        self.features: dict[Side, Features] = {}
        if features:
            check_serves_features(model, features)
            matrix, self.labels, self.features = with_features(self.matrix, self.labels, features)
            if matrix.shape != self.matrix.shape:  # some rows have features only
                self.prepared, self.matrix, columns = None, matrix, matrix
        self.entries, self.shape = self.matrix, self.matrix.shape
        self.weights: np.ndarray | None = None
        if weights is not None:
            self._weigh(weights, user_items if own is None else given, own)
        self.columns = _columns(columns, self.shape)

    def _weigh(self, weights: Any, given: Any, own: np.ndarray | None) -> None:
        """Weights of the entries: confidences of implicit feedback, else of squared errors."""
        model, objective = self.model, self.model._objective()
        if not model._serves_features:
            named = "ratings has weights" if own is not None else "weights"
            raise ValueError(
                f"{named}: {type(model).__name__} has no weights of entries; use ImplicitALS or ExplicitALS, or leave "
                "them out (ratings.with_weights(None))"
            )
        self.prepared = None  # its values on a GPU are those that the weights replace
        found = weights_of_entries(self.matrix, self.labels, weights, given)
        if not objective.is_implicit:
            if model.nonnegative:
                raise ValueError("weights: nonnegative=True has no weights of explicit ratings; leave out one")
            self.weights = found
            return
        if own is not None:  # those of Ratings multiply
            found = found * (1 + objective.alpha * np.abs(self.matrix.data.astype(np.float64)))
        self.entries, self.unit = weighted_entries(self.matrix, found, objective)

    def plan(self, objective: Objective, settings: Settings) -> Plan:
        """The plan of the fit, which fits in memory."""
        settings = replace(settings, weighted=self.weights is not None, features=sizes_of(self.features))
        held = NOTHING if self.prepared is None else self.prepared.held
        plan = plan_for(self.entries, in_units(objective, self.unit), settings, held)
        check_memory(plan)
        return plan

    def place(self, plan: Plan) -> Plan:
        """Put both orientations where the solver of the plan reads them; the kernels of ALS are compiled meanwhile."""
        if self._late is not None and not plan.ratings_on_device:
            self.entries = self.matrix = self._late.checked
        devices = compile_ahead(plan)
        if devices and plan.ratings_on_device:
            self._upload(plan, devices)
        else:
            self.on_host(plan)
        self.value_range = self.values.value_range
        self.total = self.values.total if self.unit is None else summary_of(self.matrix).total
        return plan

    def on_host(self, plan: Plan) -> LocalRatings:
        """These ratings with both orientations in memory or in a store."""
        self._summarize(plan)
        self.user_items = self.entries
        if self.prepared is not None:
            log_detour(self.prepared, plan)
            self.item_users = self.prepared.item_users
        elif isinstance(self.entries, StoreMatrix):
            self.item_users = self.entries.transposed()
        else:
            self.item_users = transposed(self.entries, plan.num_threads)
        return self

    def _upload(self, plan: Plan, devices: Sequence[Device]) -> None:
        """Upload one orientation to GPUs and transpose it there, unless the ratings are prepared there.

        A late check of the matrix is awaited only if the GPUs find a fault.
        """
        from ..gpu.intake import uploaded
        from ..ranks.dealt import deal

        self._summarize(plan)
        held: Any = None
        if self.prepared is not None:
            held = None if plan.devices else self.prepared.on_device(plan.device)
            if held is None:
                log_detour(self.prepared, plan)
        if held is None:
            matrix, late = self.entries, isinstance(self.entries, LateMatrix)
            indptr, indices, data = (matrix.indptr, *matrix.unchecked) if late else csr_arrays(matrix)
            if plan.devices:
                held = deal(devices, matrix.shape, indptr, indices, data, plan.row_cost)
            else:
                with devices[0].active():
                    rows = uploaded(devices[0], matrix.shape, indptr, indices, data)
                    held = None if rows is None else (rows, rows.transposed(devices[0]))
            assert late or held is not None  # checked on the host
            if late:
                matrix.begin()
        if held is None:
            self.entries = self.matrix.checked  # raises, or has them sorted
            self._upload(plan, devices)
        else:
            self.user_items, self.item_users = held

    def _summarize(self, plan: Plan) -> None:
        known = self.entries if self.prepared is None else self.prepared
        summarized = isinstance(known, (LateMatrix, PreparedRatings))
        self.values = known.values if summarized else summary_of(known, plan.num_threads)

    @functools.cached_property
    def degrees(self) -> dict[Side, np.ndarray]:
        """Entries of each row of either side, int64."""
        return {
            "user": np.diff(self.user_items.indptr).astype(np.int64, copy=False),
            "item": np.diff(self.item_users.indptr).astype(np.int64, copy=False),
        }

    @property
    def nnz(self) -> int:
        return int(self.entries.nnz)

    @property
    def mean(self) -> float:
        """Mean of the values; weighted, if they have weights."""
        if self.weights is not None:
            return float(self.weights @ self.matrix.data / self.weights.sum())
        return self.values.total / self.nnz

    def scale(self, objective: Objective) -> float:
        """Scale that standardizes explicit ratings; see `hybridmf.core.objective.rating_scale`."""
        return scale_of(self.entries, objective, self.values)

    def spread(self, objective: Objective) -> float:
        """Standard deviation of explicit ratings; their root mean square if all are equal."""
        return self.scale(replace(objective, biases=True))

    @property
    def solver(self) -> Callable[..., Solver]:
        """Makes the solver of the placed ratings."""
        return functools.partial(self.model._solver, ratings=self)

    def weights_by_side(self, plan: Plan) -> dict[Side, np.ndarray]:
        """Weights of explicit entries, in the order of those by user and by item."""
        if self.weights is None:
            return {}
        matrix, weights = self.matrix, self.weights.astype(self.matrix.dtype)
        by_user = make_csr(matrix.indptr, matrix.indices, weights, matrix.shape)
        return {"user": weights, "item": transposed(by_user, plan.num_threads).data}

    def fingerprint(self) -> str:
        """See `hybridmf.data.fingerprint`."""
        parts = [fingerprint.fingerprint(self.entries), *described_by(self.model, self.features)]
        if self.weights is not None:
            parts.append(f"weights-{zlib.crc32(self.weights.tobytes()):08x}")
        return "-".join(parts)

    @staticmethod
    def shared(state: State, plan: Plan, objective: Objective) -> State:
        """The state of a checkpoint."""
        return state

    @staticmethod
    def gathered(solver: Solver) -> State:
        """The factors of all rows."""
        return solver.state

    @staticmethod
    def seen_by(held_out: Any, objective: Objective) -> None:
        """None: the model has the entries of all users."""

    def kept(self) -> dict[str, Any]:
        """What a fitted model keeps of the entries; the first call is made after a half sweep."""
        seen = getattr(self.matrix if self.prepared is None else self.prepared, "seen", None)
        stored = isinstance(self.matrix, StoreMatrix)
        likes = None
        if (self.value_range or (1.0, 1.0))[0] <= 0:
            likes = likes_of(self.matrix.matrices() if stored else (self.matrix,), self.degrees["item"])
        return {
            "seen": pattern(self.matrix) if seen is None else seen,
            "values": None if stored or self.unit is not None else self.matrix.data,
            "item_likes": likes,
        }


def check_serves_features(model: Any, features: Mapping[Side, Any]) -> None:
    """Refuse features where the solver does not have them."""
    names = " and ".join(f"{side}_features" for side in features)
    if not model._serves_features:
        raise ValueError(f"{names}: {type(model).__name__} has no features; use ImplicitALS or ExplicitALS")
    if model.nonnegative:
        raise ValueError(
            f"{names}: nonnegative=True constrains factors, and vectors of features are signed; leave out one"
        )


def sizes_of(features: Mapping[Side, Features]) -> tuple[tuple[Side, int, int], ...]:
    """Sides with features, their number, and the entries of their matrix."""
    return tuple((side, len(each.names), int(each.matrix.nnz)) for side, each in features.items())


def side_features(model: Any, features: Mapping[Side, Features]) -> dict[Side, SideFeatures]:
    """The features of a fit as solvers read them."""
    weights = model._feature_weights()
    return {side: SideFeatures(each.matrix, weights.of(side)) for side, each in features.items()}


def described_by(model: Any, features: Mapping[Side, Features]) -> list[str]:
    """Identities of the features of a fit, with their weights."""
    weights = model._feature_weights()
    return [
        f"{side}-{fingerprint.fingerprint(each.matrix)}-{weights.of(side)!r}" for side, each in sorted(features.items())
    ]


def with_features(
    matrix: sp.csr_array | StoreMatrix, labels: Labels | None, given: Mapping[Side, Any]
) -> tuple[sp.csr_array | StoreMatrix, Labels | None, dict[Side, Features]]:
    """Ratings with an empty row for each user, and an empty column for each item, of which only features are known."""
    found: dict[Side, Features] = {}
    names: list[Any] = list(labels or (None, None))
    shape = list(matrix.shape)
    for axis, side in enumerate(SIDES):
        if side not in given:
            continue
        features = align_features(f"{side}_features", given[side], names[axis], matrix.shape[axis])
        found[side], names[axis] = features, features.labels
        shape[axis] = len(features)
    if tuple(shape) != matrix.shape:
        more = shape[0] - matrix.shape[0], shape[1] - matrix.shape[1]
        if isinstance(matrix, StoreMatrix):
            matrix = StoreMatrix(matrix.store, matrix.side, matrix.dtype, matrix.drop_zeros, more)
        else:
            indptr = np.pad(matrix.indptr, (0, more[0]), mode="edge")
            matrix = make_csr(indptr, matrix.indices, matrix.data, (shape[0], shape[1]))
    return matrix, None if labels is None else (names[0], names[1]), found


def _columns(given: Any, shape: tuple[int, int]) -> Any:
    """Object that scikit-learn reads the number and names of features from: an array, or the columns of a frame."""
    if is_wide(given):
        return without_rows(given)
    if sp.issparse(given) or isinstance(given, (Ratings, Store, StoreMatrix)):
        return np.broadcast_to(np.float32(0), shape)
    return given


def log_detour(source: PreparedRatings, plan: Plan) -> None:
    """Log that a fit reads prepared ratings from the host, unless it runs there and they were prepared there."""
    if source.device != "cpu" or plan.gpu is not None:
        logger.info(
            "the ratings are prepared on %s, and this fit on %s starts from the copy in the memory of the host",
            source.device,
            plan.device_name,
        )
