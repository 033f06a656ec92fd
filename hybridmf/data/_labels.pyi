from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

_Offset = TypeVar("_Offset", np.int32, np.int64)

@disjoint_base
class LabelTable:
    def __len__(self) -> int: ...
    def codes(self, bounds: NDArray[_Offset], text: NDArray[np.uint8]) -> NDArray[np.int32]: ...
    def labels(self, first: int = 0) -> list[str]: ...
