from . import datasets as datasets
from . import errors as errors
from . import formats as formats
from . import metrics as metrics
from . import scale as scale
from .als import ExplicitALS as ExplicitALS
from .als import ImplicitALS as ImplicitALS
from .ccd import CCD as CCD
from .compare import Comparison as Comparison
from .compare import compare as compare
from .data.convert import convert as convert
from .data.store import Store as Store
from .metrics import evaluate as evaluate
from .model.checkpoint import Checkpoint as Checkpoint
from .model.early_stopping import EarlyStopping as EarlyStopping
from .model.load import load as load
from .model.prepared import PreparedRatings as PreparedRatings
from .plan.types import Plan as Plan
from .ratings import Ratings as Ratings
from .ratings import k_fold as k_fold
from .ratings import leave_k_out as leave_k_out
from .ratings import split as split
from .sgd import SGD as SGD
from .tools.config import config as config
from .tools.config import show_config as show_config
from .tools.preview import plan as plan

__version__: str
