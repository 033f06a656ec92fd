"""Ratings that are checked, transposed and, for a GPU, copied there once, for several fits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.frames import kind_of
from ..core.objective import Side
from ..core.sparse import ValueSummary, transposed, without_zeros
from ..core.validate import as_csr, check_threads, frozen_csr, make_csr
from ..data.labels import axis_sizes
from ..data.store import Store
from ..data.wide import is_wide
from ..device.cuda import gpu_of, parse_device
from ..plan.make import NOTHING, Held
from ..plan.types import check_device, check_dtype
from ..ratings import Ratings, as_ratings
from .learned import pattern


class PreparedRatings:
    """Ratings prepared for several fits: checked and transposed once, and for a GPU copied there once.

    `fit` of any model accepts them in place of ratings, with the same result. So a hyperparameter search does the
    common work of its fits only once. A fit that reads ratings elsewhere (another device, several devices, ratings
    streamed for lack of GPU memory, reordered rows, BALS tiles, SGD, CCD) starts from the copy in the memory of the
    host.

    Parameters
    ----------
    user_items : Ratings, data frame, sparse or dense matrix, shape (n_users, n_items)
        Or a csr, csc or coo matrix of CuPy, which is checked, sorted and transposed on its GPU. It is copied. Its
        entries are also copied to the host, once, where models need them to exclude seen items.
    user_ids, item_ids : sequence, optional
        Labels of a matrix, as for `Ratings`.
    device : "cpu", "cuda" or "cuda:N", optional
        Default: the GPU that has `user_items`, else the CPU.
    dtype : {"float32", "float64"}
        Type of the values; the `dtype` of the models.

    Attributes
    ----------
    ratings : Ratings
        The ratings in memory, with labels; float32.
    user_items : csr_array, shape (n_users, n_items)
        The matrix in memory, in `dtype`; read-only.
    device : str
        "cpu" or "cuda:N".
    dtype : str
    nbytes : int
        Bytes of GPU memory, which are free once the object is deleted.

    Raises
    ------
    RatingsError, DuplicateEntriesError, TypeError, ValueError
        As for `Ratings`; `user_items` is on another device than `device`; or it is a `Store`, which fits read slab by
        slab.
    DeviceError
        The device cannot be used, or its memory does not suffice for both orientations.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> import scipy.sparse as sp
    >>> plays = sp.csr_array([[3, 0, 1, 0], [2, 4, 0, 0], [0, 1, 0, 5]])
    >>> prepared = hmf.PreparedRatings(plays)
    >>> estimators = [hmf.ImplicitALS(2, regularization=each) for each in (0.01, 0.1)]
    >>> models = [model.fit(prepared) for model in estimators]
    >>> prepared.device
    'cpu'
    """

    def __init__(
        self,
        user_items: Any,
        user_ids: Iterable[Any] | None = None,
        item_ids: Iterable[Any] | None = None,
        *,
        device: str | None = None,
        dtype: Any = "float32",
    ) -> None:
        self.dtype, where = check_dtype(dtype), place_of(user_items)
        self.device = _chosen(device, where, "user_items")
        self._held: Any = None
        if where is None:
            if isinstance(user_items, Store):
                raise TypeError(
                    "user_items is a Store, which fits read slab by slab as it is; prepare store.to_ratings()"
                )
            self._take(user_items, user_ids, item_ids)
            return
        from ..gpu.intake import host_matrix, read_matrix

        opened = self._opened()
        found = read_matrix(opened, user_items, self.dtype)
        if found is None:
            as_csr(host_matrix(opened, user_items), name="user_items", dtype=self.dtype)
            raise AssertionError("the checks of the host pass where those of the GPU fail")
        self._take_from_device(found, user_ids, item_ids)

    @classmethod
    def from_coo(
        cls,
        users: Any,
        items: Any,
        values: Any = None,
        *,
        shape: tuple[int | None, int | None] | None = None,
        user_ids: Iterable[Any] | None = None,
        item_ids: Iterable[Any] | None = None,
        device: str | None = None,
        dtype: Any = "float32",
    ) -> PreparedRatings:
        """Prepared ratings from coordinate triplets, also ones on a GPU.

        Parameters
        ----------
        users, items : array, shape (nnz,)
            As for `Ratings.from_coo`; or integer positions on one GPU, in arrays of any library with DLPack or the CUDA
            array interface (CuPy, PyTorch, JAX, Numba), of any integer type and in any order.
        values : real array, shape (nnz,), optional
            On the same device. None: every entry is 1.
        shape, user_ids, item_ids
            As for `Ratings.from_coo`.
        device, dtype
            As for the constructor.

        Raises
        ------
        RatingsError, DuplicateEntriesError, TypeError, ValueError, DeviceError
        """
        parts = {"users": users, "items": items} | ({} if values is None else {"values": values})
        where = {name: gpu_of(part) for name, part in parts.items()}
        place = where["users"]
        if len(set(where.values())) > 1:
            places = ", ".join(f"{name} on {each or 'the host'}" for name, each in where.items())
            raise ValueError(f"users, items and values must be on one device, got {places}")
        options: dict[str, Any] = {"shape": shape, "user_ids": user_ids, "item_ids": item_ids}
        if place is None:
            return cls(Ratings.from_coo(users, items, values, **options), device=device, dtype=dtype)
        from ..gpu.intake import host_array, read_triplets

        prepared = cls.__new__(cls)
        prepared.dtype, prepared.device, prepared._held = check_dtype(dtype), _chosen(device, place, "users"), None
        labels = [None if each is None else list(each) for each in (user_ids, item_ids)]
        sizes = axis_sizes((None, None) if shape is None else shape)
        known = tuple(
            size if size is not None or ids is None else len(ids) for size, ids in zip(sizes, labels, strict=True)
        )
        opened = prepared._opened()
        found = read_triplets(opened, users, items, values, (known[0], known[1]), prepared.dtype)
        if found is None:
            arrays = [None if part is None else host_array(opened, part) for part in (users, items, values)]
            Ratings.from_coo(*arrays, **options | {"user_ids": labels[0], "item_ids": labels[1]})
            raise AssertionError("the checks of the host pass where those of the GPU fail")
        prepared._take_from_device(found, *labels)
        return prepared

    # ---------------------------------------------------------------------------------------------- preparation

    def _opened(self) -> Any:
        from ..device.cuda import open_device

        return open_device(self.device)

    def _take(self, given: Any, user_ids: Any, item_ids: Any) -> None:
        """Check ratings on the host, and copy them to the device or transpose them."""
        kind = None
        if is_wide(given):
            kind, wide = kind_of(given), as_ratings(given, "user_items", users=user_ids is None)
            given, user_ids = wide.user_items, wide.user_ids if user_ids is None else user_ids
            item_ids = wide.item_ids if item_ids is None else item_ids
        given = as_ratings(given)
        if isinstance(given, Ratings):
            if user_ids is not None or item_ids is not None:
                raise ValueError("user_ids and item_ids are labels of a matrix; Ratings have their own: leave them out")
            self.ratings, self.user_items = given, as_csr(given, dtype=self.dtype)
        else:
            self.user_items = as_csr(given, name="user_items", dtype=self.dtype)
            self.ratings = Ratings._checked(_single(self.user_items), user_ids, item_ids)
            self.ratings.frame_kind = kind
        if self.device == "cpu":
            self.item_users  # noqa: B018, made here and not by the first fit
            return
        from ..gpu.matrix import DeviceMatrix

        summary = threading.Thread(target=lambda: self.values)  # as long as the copy
        summary.start()
        self._hold(DeviceMatrix.of(self._opened(), self.user_items))
        summary.join()

    def _take_from_device(self, held: Any, user_ids: Any, item_ids: Any) -> None:
        """Copy ratings to the host, and transpose them on the device."""
        opened = self._opened()
        indices, data = opened.download(held.indices), opened.download(held.data)
        self.user_items = frozen_csr(make_csr(held.indptr, indices, data, held.shape))
        self.ratings = Ratings._checked(_single(self.user_items), user_ids, item_ids)
        self._hold(held)

    def _hold(self, held: Any) -> None:
        """Keep `user_items`, which is on the device, and transpose it there."""
        opened = self._opened()
        with opened.active():
            known = replace(held, host=self.user_items)
            self._held = known, known.transposed(opened)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as ratings in memory, and prepared again where they are read."""
        return _prepared_again, (self.ratings, self.user_items, self.device, self.dtype)

    # ---------------------------------------------------------------------------------------------- used by fits

    @functools.cached_property
    def values(self) -> ValueSummary:
        """Sums and ranges of the values."""
        return ValueSummary.of([self.user_items.data], check_threads(None))

    @functools.cached_property
    def item_users(self) -> sp.csr_array:
        """The transpose in memory, csr_array, shape (n_items, n_users), read-only."""
        return transposed(self.user_items, check_threads(None))

    @functools.cached_property
    def degrees(self) -> dict[Side, np.ndarray]:
        """Number of entries of each user and of each item, int64."""
        items = self.item_users if self._held is None else self._held[1]
        return {"user": np.diff(self.user_items.indptr), "item": np.diff(items.indptr)}

    @functools.cached_property
    def seen(self) -> Any:
        """The pattern of entries that fitted models keep."""
        return pattern(self.user_items)

    @property
    def held(self) -> Held:
        """The GPU and its memory that these ratings take; `NOTHING` on the CPU."""
        return Held(self.device, self.nbytes) if self._held is not None else NOTHING

    def on_device(self, device: str) -> Any:
        """Both orientations on this device, `DeviceMatrix`; None if they are not there."""
        return self._held if device == self.device else None

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        arrays = [array for side in self._held or () for array in (side.starts, side.indices, side.data)]
        return sum(int(array.nbytes) for array in arrays)

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        return self.ratings.shape

    @property
    def nnz(self) -> int:
        """Number of entries, including explicit zeros."""
        return int(self.user_items.nnz)

    def without_zeros(self) -> PreparedRatings:
        """These ratings for implicit feedback: the same object, or a copy without explicit zeros, made once."""
        return self if not self.nnz or self.values.ends[0] else self._without_zeros

    @functools.cached_property
    def _without_zeros(self) -> PreparedRatings:
        copy = type(self).__new__(type(self))
        copy.dtype, copy.device, copy.ratings, copy._held = self.dtype, self.device, self.ratings, None
        copy.user_items = frozen_csr(without_zeros(self.user_items))
        if self._held is not None:
            from ..gpu import intake

            copy._hold(intake.without_zeros(self._opened(), self._held[0]))
        return copy

    def __repr__(self) -> str:
        return f"PreparedRatings({self.ratings!r}, device={self.device!r}, dtype={self.dtype!r})"


def place_of(given: Any) -> str | None:
    """The GPU that has a sparse matrix; None for anything else."""
    if getattr(given, "format", None) is None or sp.issparse(given):
        return None
    from ..gpu.intake import is_sparse

    return gpu_of(given.data) if is_sparse(given) else None


def prepared_for(given: Any, dtype: str, drop_zeros: bool) -> PreparedRatings | None:
    """Prepared ratings of a fit, if it gets these or ratings on a GPU; None for other ratings."""
    if not isinstance(given, PreparedRatings):
        if place_of(given) is None:
            return None
        given = PreparedRatings(given, dtype=dtype)
    if given.dtype != dtype:
        raise ValueError(
            f"the ratings are prepared with dtype={given.dtype!r}, and the model has dtype={dtype!r}; prepare them "
            f"with PreparedRatings(..., dtype={dtype!r}), or fit prepared.ratings"
        )
    return given.without_zeros() if drop_zeros else given


def _chosen(device: str | None, where: str | None, name: str) -> str:
    """Name of the device for ratings that are on the GPU `where`, or on the host."""
    if device is None:
        return where or "cpu"
    checked = check_device(device)
    if not isinstance(checked, str) or checked == "auto":
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", one device that keeps the ratings; got {device!r}')
    chosen = checked if checked == "cpu" else f"cuda:{parse_device(checked)}"
    if where not in (None, chosen):
        raise ValueError(f"{name} is on {where}, and device={device!r}; leave device out, or copy the ratings there")
    return chosen


def _single(matrix: sp.csr_array) -> sp.csr_array:
    """The matrix in float32; the index arrays are shared."""
    data = matrix.data.astype(np.float32, copy=False)
    return matrix if data is matrix.data else make_csr(matrix.indptr, matrix.indices, data, matrix.shape)


def _prepared_again(ratings: Ratings, user_items: sp.csr_array, device: str, dtype: str) -> PreparedRatings:
    prepared = PreparedRatings(user_items, device=device, dtype=dtype)
    prepared.ratings = ratings
    return prepared
