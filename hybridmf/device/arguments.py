"""Arguments of kernels: a tuple is a C struct, passed by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def passed(argument: Any, address: Callable[[Any], int]) -> Any:
    """The form of an argument that a launch accepts: for a tuple, the bytes of the C struct with its elements.

    `argument`: arrays in a tuple become pointers; the caller keeps them until the kernel is launched. `address`: of an
    array on the device.
    """
    if not isinstance(argument, tuple):
        return argument
    values = tuple(field if isinstance(field, np.generic) else np.uintp(address(field)) for field in argument)
    # an array: CuPy passes those of one element by value
    return np.array(values, dtype=_struct(tuple(value.dtype for value in values)))


@functools.cache
def _struct(dtypes: tuple[np.dtype, ...]) -> np.dtype:
    return np.dtype([(f"f{k}", dtype) for k, dtype in enumerate(dtypes)], align=True)
