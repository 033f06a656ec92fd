"""hybridmf: matrix factorization of sparse user x item ratings for recommenders.

Alternating least squares for explicit and implicit feedback, stochastic gradient descent and CCD++ on multicore CPUs
and GPUs, and what a recommender needs around them: ratings with labels, recommendations, fold-in, metrics, files, and
comparisons of methods and devices.
"""

from . import datasets, errors, formats, metrics
from . import scale as scale
from ._version import __version__
from .als import ExplicitALS, ImplicitALS
from .ccd import CCD
from .compare import Comparison, compare
from .data.convert import convert
from .data.store import Store
from .metrics import evaluate
from .model.checkpoint import Checkpoint
from .model.load import load
from .plan.types import Plan
from .ratings import Ratings, split
from .sgd import SGD
from .tools.config import config, show_config
from .tools.preview import plan

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
