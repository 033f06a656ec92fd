"""A matrix on the host that a thread checks and copies while a GPU computes.

Copying and checking a hundred million entries takes about as long as six iterations over them. A GPU checks the entries
that it has received itself, so a fit there need not wait for the host, whose copy is for the fitted model. The thread
starts after the upload: both are limited by the bandwidth of the host's memory.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.sparse import ValueSummary
from ..core.validate import MAX_AXIS, as_csr, check_threads, checked_pointer
from ..ratings import Ratings
from .learned import pattern

LATE_ENTRIES = 1 << 22  # entries from which the check is worth a thread; below, it takes about a millisecond


class LateMatrix:
    """Ratings by user, as a validated matrix; their entries are those of a thread that checks them.

    `given` is a matrix as `late_matrix` accepts it, `name` the argument for messages. `indptr` is checked, and of our
    own; `unchecked` are columns and values of the caller, `values` the summary of these values. A corrupt `indptr` is
    an error at once; everything else is raised by `checked`.
    """

    def __init__(self, given: Any, name: str) -> None:
        self.shape: tuple[int, int] = given.shape
        self.indptr = checked_pointer(given.indptr, given.shape[0], name)
        self.unchecked = given.indices[: self.nnz], given.data[: self.nnz]
        self.values = ValueSummary.of([self.unchecked[1]], check_threads(None))
        self._given, self._name = given, name
        self._check: Future[tuple[sp.csr_array, sp.csr_array]] | None = None

    def begin(self) -> Future[tuple[sp.csr_array, sp.csr_array]]:
        if self._check is None:
            threads = ThreadPoolExecutor(1, thread_name_prefix="hybridmf-check")
            self._check = threads.submit(_checked, self._given, self._name)
            threads.shutdown(wait=False)
        return self._check

    @property
    def nnz(self) -> int:
        return int(self.indptr[-1])

    @property
    def checked(self) -> sp.csr_array:
        """The canonical copy of `as_csr`."""
        return self.begin().result()[0]

    @property
    def seen(self) -> sp.csr_array:
        """`pattern` of the copy."""
        return self.begin().result()[1]

    @property
    def indices(self) -> np.ndarray:
        return self.checked.indices

    @property
    def data(self) -> np.ndarray:
        return self.checked.data


def _checked(given: Any, name: str) -> tuple[sp.csr_array, sp.csr_array]:
    matrix = as_csr(given, name=name, dtype=given.data.dtype)
    return matrix, pattern(matrix)


def late_matrix(given: Any, name: str, dtype: Any, drop_zeros: bool) -> LateMatrix | None:
    """A `LateMatrix` of a large matrix in memory whose arrays are those of a canonical one of `dtype`; else None.

    `drop_zeros`: explicit zeros are to be dropped, so that a matrix with any is not served.
    """
    if isinstance(given, Ratings):
        given = given.user_items
    if not sp.issparse(given) or given.format != "csr" or max(given.shape) > MAX_AXIS:
        return None
    arrays = given.indices, given.data
    if any(type(each) is not np.ndarray or each.ndim != 1 or not each.flags.c_contiguous for each in arrays):
        return None
    if (given.indices.dtype, given.data.dtype) != (np.int32, np.dtype(dtype)) or not len(given.indptr):
        return None
    if not LATE_ENTRIES <= int(given.indptr[-1]) <= min(map(len, arrays)):
        return None
    late = LateMatrix(given, name)
    if drop_zeros and not late.values.ends[0]:
        return None
    return late
