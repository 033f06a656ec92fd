"""`implicit` 0.7's names: ``import hybridmf.compat.implicit as implicit``; `als` and `nearest_neighbours`' weights."""

from . import als as als
from . import nearest_neighbours as nearest_neighbours
