"""scikit-learn's protocol of estimators, without importing scikit-learn, which takes longer than most fits.

Parameters, cloning and pickling need none of it. Other features of scikit-learn's base classes (metadata routing, HTML
representations, output containers) are delegated to these classes once the program has imported scikit-learn.
"""

from __future__ import annotations

import copy
import functools
import inspect
import reprlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import scipy.sparse as sp

from ..core.triplets import refuse_triplets
from ..core.validate import refuse_gpu, without_mask
from ..data.store import Store
from ..ratings import Ratings

if TYPE_CHECKING:
    from sklearn.utils import Tags

_Model = TypeVar("_Model", bound="Estimator")

_MISSING: Any = object()


class _Signature:
    """The parameters of the constructor, for editors and the reference, which would show those of `__new__`."""

    def __get__(self, model: object, cls: Any) -> inspect.Signature:
        own = inspect.signature(cls.__init__)
        return own.replace(parameters=[*own.parameters.values()][1:], return_annotation=own.empty)


class Estimator:
    """Base of estimators whose constructor stores its keyword arguments under their names."""

    # The lock of writers has a slot: scikit-learn takes the other attributes for parameters, and pickles hold them.
    __slots__ = ("__dict__", "__weakref__", "_lock")
    _lock: threading.RLock
    __signature__ = _Signature()

    def __new__(cls: type[_Model], *args: Any, **kwargs: Any) -> _Model:
        """An estimator with a lock of its own, copies and pickles included."""
        model = super().__new__(cls)
        model._lock = threading.RLock()
        return model

    @classmethod
    @functools.cache
    def _defaults(cls) -> dict[str, Any]:
        """Parameters of the constructor by name, with their defaults."""
        given = list(inspect.signature(cls.__init__).parameters.values())[1:]
        return {each.name: each.default for each in sorted(given, key=lambda each: each.name)}

    @classmethod
    def _get_param_names(cls) -> list[str]:
        return list(cls._defaults())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters of the constructor; `deep` is ignored, as none of them has parameters of its own."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self: _Model, **params: Any) -> _Model:
        """Set parameters of the constructor.

        Raises
        ------
        ValueError
            An unknown parameter; nothing is set.
        """
        known = self._get_param_names()
        for name in params:
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for estimator {self}. Valid parameters are: {known!r}.")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        shown = {name: repr(value) for name, value in self.get_params().items()}
        changed = (f"{name}={text}" for name, text in shown.items() if text != repr(self._defaults()[name]))
        return f"{type(self).__name__}({', '.join(changed)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __sklearn_is_fitted__(self) -> bool:
        raise NotImplementedError

    def __sklearn_tags__(self) -> Tags:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        # factors have the dtype of the model, not of the input
        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=[]),
            input_tags=InputTags(sparse=True),
        )

    def _lent(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that raised NotFittedError, which it raises again
        lent = _MISSING
        # notebooks prefer this one to `_repr_html_`, which is ours
        lending = name != "_repr_mimebundle_" and not (name.startswith("__") and name.endswith("__"))
        if lending and "sklearn" in sys.modules:
            lent = inspect.getattr_static(_as_scikit_learns(self), name, _MISSING)
        if lent is _MISSING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # class methods call others of scikit-learn's classes
        return lent.__get__(self, _as_scikit_learns(self)) if hasattr(type(lent), "__get__") else lent

    if not TYPE_CHECKING:  # type checkers would accept every misspelt attribute
        __getattr__ = _lent

    # -------------------------------------------------------------------------------------------- transformers

    fit: Callable[..., Any]

    def fit_transform(self, user_items: Any, y: Any = None, **options: Any) -> Any:
        """Fit to ratings, and compute the factors of their rows; `options` are those of `fit`."""
        return self.fit(user_items, y, **options).transform(user_items)

    def set_output(self: _Model, *, transform: str | None = None) -> _Model:
        """Set the container that `transform` returns: "default", "pandas" or "polars"."""
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}
        return self


def transformed(model: Any, user_items: Any) -> Any:
    """The factors of new rows, in the container that scikit-learn is set to."""
    if "sklearn" not in sys.modules and "_sklearn_output_config" not in vars(model):  # no container is asked for
        return model._factors_of(user_items)
    return _as_scikit_learns(model).transform(model, user_items)


def _as_scikit_learns(model: Estimator) -> Any:
    """The estimator's class with scikit-learn's base classes, which set it up as one of theirs."""
    kind: Any = type(model)
    return _with_scikit_learns(kind)


@functools.cache
def _with_scikit_learns(kind: Any) -> Any:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

    bases = (kind, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator)
    # scikit-learn wraps methods of the class itself only
    content = {"transform": lambda self, X: kind._factors_of(self, X), "__module__": kind.__module__}
    return type(kind.__name__, bases, content)


def not_fitted(message: str) -> Exception:
    """scikit-learn's NotFittedError."""
    from sklearn.exceptions import NotFittedError

    return NotFittedError(message)


def unfitted(model: _Model, **params: Any) -> _Model:
    """A copy of an estimator that is not fitted, with some parameters changed."""
    return type(model)(**copy.deepcopy(model.get_params())).set_params(**params)


def take_columns(model: Any, columns: Any) -> None:
    """Set the number of columns of the training data, and the names that a frame has: scikit-learn's attributes."""
    if isinstance(columns, np.ndarray):
        model.n_features_in_ = columns.shape[1]
        vars(model).pop("feature_names_in_", None)
        return
    from sklearn.utils.validation import validate_data

    validate_data(model, columns, skip_check_array=True, reset=True)


def numeric_matrix(model: Any, matrix: Any, name: str) -> Any:
    """A dense matrix of finite numbers; sparse ones, `Ratings` and stores as they are."""
    if sp.issparse(matrix) or isinstance(matrix, (Ratings, Store)):
        return matrix
    from sklearn.utils import check_array

    refuse_gpu(matrix, name)
    refuse_triplets(matrix, name)  # by names of columns, which check_array drops
    return check_array(without_mask(matrix, name), dtype="numeric", input_name=name, estimator=model)


def check_columns(model: Any, rows: Any) -> None:
    """Compare the column names of a frame with those of the training data."""
    from sklearn.utils.validation import validate_data

    validate_data(model, rows, skip_check_array=True, reset=False)
