"""hybridmf: matrix factorization of sparse user x item ratings for recommenders.

Exact alternating least squares for explicit and implicit feedback on multicore CPUs, the BALS blocked format, and what
a recommender needs around them: ratings with labels, recommendations, fold-in, metrics, files.
"""

from . import errors, formats, metrics
from ._config import config, show_config
from ._io import load
from ._plan import Plan, plan
from ._version import __version__
from .als import ExplicitALS, ImplicitALS
from .ccd import CCD
from .metrics import evaluate
from .ratings import Ratings, split
from .sgd import SGD

__all__ = [
    "CCD",
    "SGD",
    "ExplicitALS",
    "ImplicitALS",
    "Plan",
    "Ratings",
    "__version__",
    "config",
    "errors",
    "evaluate",
    "formats",
    "load",
    "metrics",
    "plan",
    "show_config",
    "split",
]
