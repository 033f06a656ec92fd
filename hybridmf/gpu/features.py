"""The regression of factors on features on a GPU: launches of cuda/features.cu; see `hybridmf.core.regression`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.regression import Regression, SideFeatures
from ..core.system import ceil_div
from ..device.cuda import Array, Device
from ..plan.extras import FEATURE_ENTRIES
from .launch import check_all, get_kernel

SOURCE = "features.cu"
THREADS = 64
ROWS = 4  # as in features.cu
BLOCKS_PER_SM = 16


class DeviceRegression(Regression):
    """A `Regression` whose sums, vectors and pulls are arrays of a device, for rows of `rank` unknowns."""

    def __init__(
        self,
        device: Device,
        features: SideFeatures,
        names: np.ndarray | None,
        scale: np.ndarray,
        degrees: np.ndarray,
        total: Callable[[np.ndarray], np.ndarray],
        rank: int,
        width: int,
        dtype: Any,
    ) -> None:
        super().__init__(features, names, scale, degrees, total)
        self.device, self.rank, self.width, self.dtype = device, rank, width, np.dtype(dtype)
        rows, back, upload = self.rows, self.back, device.upload
        counts = np.diff(back.indptr).astype(np.int64)
        firsts = np.concatenate(([0], np.cumsum(-(-counts // FEATURE_ENTRIES))))
        place = np.arange(firsts[-1]) - np.repeat(firsts[:-1], np.diff(firsts))
        starts = np.repeat(back.indptr[:-1].astype(np.int64), np.diff(firsts)) + place * FEATURE_ENTRIES
        self.bounds = upload(np.append(starts, back.nnz).astype(np.int64))
        self.firsts, self.n_pieces = upload(firsts.astype(np.int64)), int(firsts[-1])
        self.back_rows, self.back_weights = upload(back.indices.astype(np.int32)), upload(back.data.astype(self.dtype))
        self.inverse = upload(np.ascontiguousarray(self.vectors(np.eye(len(self.root)))))
        self.indptr, self.indices = upload(rows.indptr.astype(np.int64)), upload(rows.indices.astype(np.int32))
        self.values = upload(rows.data.astype(self.dtype))
        self._ridge: tuple[bytes, Array] | None = None
        self.pulled = upload(np.where(degrees > 0, scale, 0.0).astype(self.dtype))  # rows without entries stay zero

    def sums(self, factors: Any) -> Array:
        """See `Regression`; float64 on the device, shape (n_features, rank)."""
        device, n = self.device, len(self.root)
        check_all(
            device,
            table=(factors.table, self.dtype, (len(self.scale), self.width)),
            bias=(factors.device_bias, self.dtype, (len(self.scale),)),
        )
        partials = device.empty((max(1, self.n_pieces), self.rank), np.float64)
        bias = np.uint64(0) if factors.device_bias is None else factors.device_bias
        if self.n_pieces:
            arguments = (partials, factors.table, bias, self.back_rows, self.back_weights, self.bounds)
            self._kernel("feature_pieces")((self.n_pieces,), (THREADS,), arguments, 0)
        sums = device.empty((n, self.rank), np.float64)
        _over(device, sums.size, self._kernel("feature_totals"), (sums, partials, self.firsts, np.int64(n)))
        return sums

    def on_host(self, sums: Array) -> np.ndarray:
        return self.device.download(sums)

    def pull(self, sums: Array, ridge: np.ndarray) -> Array:
        """See `Regression`; a new table of `width` columns."""
        device, n = self.device, len(self.root)
        vectors = device.empty((n, self.width), self.dtype)
        arguments = (vectors, self.inverse, sums, np.int64(n))
        self._kernel("feature_vectors")((ceil_div(n, ROWS),), (THREADS,), arguments, 0)
        found = device.empty((len(self.scale), self.width), self.dtype)
        if self._ridge is None or self._ridge[0] != ridge.tobytes():
            self._ridge = ridge.tobytes(), device.upload(ridge.astype(self.dtype))
        of_rows = (self.indptr, self.indices, self.values, self.pulled, self._ridge[1])
        _over(device, found.size, self._kernel("feature_pull"), (found, vectors, *of_rows, np.int64(len(found))))
        return found

    def _kernel(self, name: str) -> Any:
        return get_kernel(self.device, SOURCE, name, **constants(self.rank, self.width, self.dtype))


def constants(rank: int, width: int, dtype: Any) -> dict[str, Any]:
    return {"RANK": rank, "LD": width, "REAL": np.dtype(dtype), "THREADS": THREADS}


def add_pull(device: Device, rhs: Array, pull: Array, slots: Array, rows: Array, rank: int) -> None:
    """``rhs[slots[k], :rank] += pull[rows[k], :rank]``; the rows of `rhs` may be apart."""
    check_all(
        device, pull=(pull, rhs.dtype, (None, None)), slots=(slots, np.int64, (None,)), rows=(rows, np.int32, (None,))
    )
    kernel = get_kernel(device, SOURCE, "add_pull", **constants(rank, pull.shape[1], rhs.dtype))
    sizes = (np.int64(len(rows)), np.int64(rhs.strides[0] // rhs.dtype.itemsize))
    _over(device, len(rows) * rank, kernel, (rhs, pull, slots, rows, *sizes))


def _over(device: Device, elements: int, kernel: Any, arguments: tuple[Any, ...]) -> None:
    if elements:
        blocks = min(ceil_div(elements, THREADS), BLOCKS_PER_SM * device.spec.multiprocessors)
        kernel((blocks,), (THREADS,), arguments, 0)
