"""hybridmf: matrix factorization of sparse user x item ratings for recommenders.

Alternating least squares for explicit and implicit feedback, stochastic gradient descent and CCD++ on multicore CPUs
and GPUs, and what a recommender needs around them: ratings with labels, recommendations, fold-in, metrics, files, and
comparisons of methods and devices.
"""

from . import datasets, errors, formats, metrics
from ._config import config, show_config
from ._io import load
from ._plan import Plan
from ._preview import plan
from ._version import __version__
from .als import ExplicitALS, ImplicitALS
from .ccd import CCD
from .compare import Comparison, compare
from .metrics import evaluate
from .ratings import Ratings, split
from .scale.checkpoint import Checkpoint
from .scale.convert import convert
from .scale.store import Store
from .sgd import SGD

__all__ = [
    "CCD",
    "SGD",
    "Checkpoint",
    "Comparison",
    "ExplicitALS",
    "ImplicitALS",
    "Plan",
    "Ratings",
    "Store",
    "__version__",
    "compare",
    "config",
    "convert",
    "datasets",
    "errors",
    "evaluate",
    "formats",
    "load",
    "metrics",
    "plan",
    "show_config",
    "split",
]


def __getattr__(name: str) -> object:
    """``hybridmf.dask`` on first use: it imports Dask."""
    if name == "dask":
        import importlib

        return importlib.import_module("hybridmf.dask")
    raise AttributeError(f"module 'hybridmf' has no attribute {name!r}")
