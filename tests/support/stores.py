"""Stores of small ratings."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

SLAB = 900
"""Bytes of a slab here: a few rows."""


def assert_same_matrix(found: sp.csr_array, expected: sp.csr_array) -> None:
    assert found.shape == expected.shape
    for name in ("indptr", "indices", "data"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other)
