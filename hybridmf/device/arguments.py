"""Arguments of kernels: a tuple is a C struct, passed by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def passed(argument: Any, address: Callable[[Any], int]) -> Any:
    """The form of an argument that a launch accepts: for a tuple, the bytes of the C struct with its elements.

    Arrays in a tuple become pointers; the caller keeps them until the kernel is launched.
    """
    if not isinstance(argument, tuple):
        return argument
    values = tuple(field if isinstance(field, np.generic) else np.uintp(address(field)) for field in argument)
    # an array: CuPy passes those of one element by value
    return np.array(values, dtype=_struct(tuple(value.dtype for value in values)))


class Struct:
    """A C struct whose fields may change between the launches that pass it by value (`CudaDevice.prepare`)."""

    def __init__(self, fields: tuple[Any, ...], address: Callable[[Any], int]) -> None:
        self._address = address
        self.packed: np.ndarray = passed(fields, address)

    def set(self, fields: tuple[Any, ...]) -> None:
        address = self._address
        self.packed[()] = tuple(field if isinstance(field, np.generic) else address(field) for field in fields)


@functools.cache
def _struct(dtypes: tuple[np.dtype, ...]) -> np.dtype:
    return np.dtype([(f"f{k}", dtype) for k, dtype in enumerate(dtypes)], align=True)
