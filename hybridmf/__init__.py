"""hybridmf: matrix factorization of sparse user x item ratings for recommenders.

Alternating least squares for explicit and implicit feedback, stochastic gradient descent and CCD++ on multicore CPUs
and GPUs; labelled ratings, recommendations, fold-in, metrics, files, and comparisons of methods and devices.

Public names are imported on first use (SPEC 1); ``__init__.pyi`` lists them.
"""

import sys
from importlib import import_module
from types import ModuleType

import lazy_loader

from ._version import __version__ as __version__

_public, _, _names = lazy_loader.attach_stub(__name__, __file__)

_MODULES = ("als", "ann", "ccd", "compat", "dask", "ratings", "sgd", "testing")
"""Public modules that `import *` leaves out: their contents are public, and Dask is optional."""

__all__ = ["__version__", *(name for name in _names if name not in _MODULES)]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> object:
    """A public name, or a public module, on first use."""
    if name in _MODULES:
        return import_module(f"hybridmf.{name}")
    if name not in _names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _public(name)


class _Package(ModuleType):
    """Keeps `hybridmf.compare`, `hybridmf.plan` and `hybridmf.search` functions although modules have these names.

    The import system binds a module to its package's attribute whenever some code imports it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("compare", "plan", "search") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """By name: cloudpickle knows plain modules only, and functions that use this one have to reach workers."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
