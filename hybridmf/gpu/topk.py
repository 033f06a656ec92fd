"""Top-K on a GPU: items packed for scoring, batches of users, the launches of cuda/top_k.cu."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp

from ..core.system import ceil_div, round_up
from ..core.validate import csr_arrays
from ..device.cuda import Array, Device, DeviceSpec
from ..errors import DeviceMemoryError
from ..plan.tables import KernelConfig
from .launch import check, check_all, get_kernel, program

SOURCE = "top_k.cu"

GROUP, OCTET, ROW_WARPS, WARPS = 32, 8, 4, 4
"""As in cuda/top_k.cu: items of a group, groups of an octet, warps of a block (one row each; of group_max)."""

QUEUE = 256
"""Groups that a warp of select_best sorts at a time, as in cuda/top_k.cu."""

LIST_SIZES = (32, 128)
"""Compiled values of KEPT; longer lists are selected from whole rows of scores."""

LARGEST_PADDED = 512
"""Largest padded rank that fits in the registers of group_max."""

LARGEST_EXPONENT = 1000
"""Keeps scales within float64."""

LARGEST_BATCH = 1 << 16
"""Users at a time: 256 blocks of 256 users fill any GPU, with every chunk of items."""

BATCH_BYTES = 2 << 30
"""Maximum workspace of a batch; less if less is free."""

SORTED_IN_SHARED = 32 << 10
"""Bytes of a list up to which it is sorted in shared memory."""

CHUNK = 128
"""Maximum groups of a block of group_max: 1 MB of items at rank 128, 100 us of work."""

LARGEST_GRID_Y = 65535

BYTE_GROUPS = 2048
"""Minimum groups for products of int8 factors, which take half the time of float16 but leave more groups to score."""

BYTE_RANK = 64
"""Minimum rank for int8: below it, moving the maxima of groups takes as long as the products."""

BYTE_RESIDUAL = 0.12
"""Maximum rounding error of an item for int8, relative to its norm over the square root of the rank, the spread of
scores of random factors. Normal factors have 0.1 at rank 128."""

HEAD_SHARE = 8
"""An eighth of the groups, those of largest norm, are scored before users are pruned."""


@dataclass(frozen=True)
class GroupMaxConfig(KernelConfig):
    """Compile-time choices of the kernel group_max."""

    padded: int  # the rank rounded up to 16; to 32 for int8
    users_per_warp: int  # {16, 32, 64}: users whose factors a warp keeps in registers
    tile_groups: int  # {1, 2, 4, 8}: groups that are copied to shared memory together
    in_bytes: bool = False  # products of int8 factors instead of float16 ones

    names: ClassVar[dict[str, str]] = {"in_bytes": "BYTES"}

    def check(self) -> None:
        if self.users_per_warp not in (16, 32, 64):
            raise ValueError(f"users_per_warp must be 16, 32 or 64, got {self.users_per_warp}")
        if self.tile_groups not in (1, 2, 4, 8):
            raise ValueError(f"tile_groups must be 1, 2, 4 or 8: octets end with a tile; got {self.tile_groups}")

    @classmethod
    def rule(cls, padded: int, in_bytes: bool = False) -> GroupMaxConfig:
        """The configuration with as many users as registers hold."""
        row = padded if in_bytes else 2 * padded
        return cls(padded, 64 if row <= 256 else 32 if row <= 512 else 16, 2 if row <= 256 else 1, in_bytes)

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def row_bytes(self) -> int:
        return self.padded * (1 if self.in_bytes else 2)

    @property
    def block_users(self) -> int:
        return WARPS * self.users_per_warp

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two tiles of items, and two trays of words per warp."""
        tile = self.tile_groups * GROUP * self.row_bytes
        tray = self.users_per_warp * 12 * 4
        return 2 * tile + 2 * WARPS * tray

    def fits(self, spec: DeviceSpec) -> bool:
        return self.padded <= LARGEST_PADDED and self.shared_bytes + 1024 <= spec.shared_bytes


def programs(
    spec: DeviceSpec, rank: int, dtype: Any, n_items: int, n: int = LIST_SIZES[0]
) -> list[tuple[str, str, tuple[str, ...]]]:
    """Arguments of `Device.kernel` for calls of `top_k` with up to `n` items a user, the slowest first."""
    dtype, row_kernels = np.dtype(dtype), ["row_norms", "pack_panels"]
    by_groups = GroupMaxConfig.rule(round_up(max(rank, 1), 16))
    if not by_groups.fits(spec):
        row_kernels += ["score_rows", "drop_seen", "sort_rows"]
        return [program(SOURCE, name, **_constants(dtype)) for name in row_kernels]
    in_bytes = GroupMaxConfig.rule(round_up(max(rank, 1), 32), True)
    n_groups = round_up(ceil_div(n_items, GROUP), OCTET)
    configs = [by_groups, in_bytes] if _may_use_bytes(spec, rank, n_groups, in_bytes) else [by_groups]
    lists = _constants(dtype, n)
    pruned = ["prune"] if _head_groups(n_groups, n) < n_groups else []
    row_kernels += ["prepare_items", "prepare_users", "mark_seen"]
    return [
        *(program(SOURCE, name, **lists) for name in ("select_best", *pruned)),
        *(program(SOURCE, "group_max", **config.constants) for config in configs),
        *(program(SOURCE, name, **_constants(dtype)) for name in row_kernels),
    ]


class PackedItems:
    """Items packed for the kernels, by descending norm; made once, used by any number of calls.

    `candidates` ascend; others are left out. `in_bytes`: whether group_max multiplies int8 factors or float16 ones, by
    default the faster ones; the result is the same. There are `n_groups` groups of 32 items, a multiple of 8; the last
    ones are empty.

    `panels`, float (n_groups, rank rounded up to 16 bytes, 32): factors for exact scores.
    `halves`: scaled items; None if tensor cores cannot be used, and whole rows of scores are computed.
    `operands`, uint16: items as group_max multiplies them: `halves`, or int8 factors, shape (n_groups, padded / 16, 32,
        8).
    `groups`, float32 (n_groups, 2), or None: largest norm of a group, and largest norm of the rounding errors of an
        item in `operands`; both scaled.
    `steps`, float32 (n_groups, 2), or None: value of 1 in the operands of a group, and largest norm of the rounding
        errors of an item in `halves`.
    `ids`, `ascending`: items in packed order; the same in ascending order. `positions`: the place of each item in
        packed order, -1 for excluded ones.
    """

    def __init__(
        self, device: Device, items: Array, candidates: np.ndarray | None = None, in_bytes: bool | None = None
    ) -> None:
        if len(items.shape) != 2 or items.dtype not in (np.float32, np.float64):
            raise TypeError(
                f"items must be float32 or float64, shape (n_items, rank); got {items.dtype}, {items.shape}"
            )
        self.device, self.items = device, items
        self.dtype = np.dtype(items.dtype)
        self.rank = int(items.shape[1])
        self.config = GroupMaxConfig.rule(round_up(max(self.rank, 1), 16))
        on_device = items if device.owns(items) else device.upload(items)
        check("items", on_device, self.dtype, (None, None))
        norms = row_norms(device, on_device)
        kept = np.arange(len(norms)) if candidates is None else np.asarray(candidates, dtype=np.int64)
        norms = norms[kept]
        order = np.argsort(-norms, kind="stable")
        packed_ids = kept[order].astype(np.int32)
        positions = np.full(items.shape[0], -1, dtype=np.int32)
        positions[packed_ids] = np.arange(len(packed_ids), dtype=np.int32)
        self.n_items = len(packed_ids)
        self.n_groups = round_up(ceil_div(self.n_items, GROUP), OCTET)
        exponent = math.frexp(norms[order[0]])[1] if self.n_items else 0
        self.scale = math.ldexp(1.0, -max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent)))
        self.ids, self.positions = device.upload(packed_ids), device.upload(positions)
        self.ascending = device.upload(kept.astype(np.int32))
        self.panels = self._pack_panels(on_device)
        self.halves: Array = None
        self.operands: Array = None
        self.groups: Array = None
        self.steps: Array = None
        if self.config.fits(device.spec):
            self._prepare(on_device, in_bytes)
        device.synchronize()  # other threads may use the items from streams of their own

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes of an item."""
        return ceil_div(self.rank * self.dtype.itemsize, 16)

    def _pack_panels(self, items: Array) -> Array:
        per_vector = 16 // self.dtype.itemsize
        panels = self.device.empty((self.n_groups, self.vectors * per_vector, GROUP), self.dtype)
        count = self.n_groups * self.vectors * GROUP
        if count:
            kernel = get_kernel(self.device, SOURCE, "pack_panels", **_constants(self.dtype))
            arguments = (panels, items, self.ids, *_int32(self.n_items, self.n_groups, self.rank))
            kernel((ceil_div(count, 256),), (256,), arguments, 0)
        return panels

    def _prepare(self, items: Array, in_bytes: bool | None) -> None:
        """Round the items to float16, and to int8 if requested or probably faster."""
        device = self.device
        self.halves = device.empty((self.n_groups * GROUP, self.padded), np.uint16)
        self.groups, self.steps = (device.empty((self.n_groups, 2), np.float32) for _ in range(2))
        wide = GroupMaxConfig.rule(round_up(max(self.rank, 1), 32), True)
        if _may_use_bytes(device.spec, self.rank, self.n_groups, wide) if in_bytes is None else in_bytes:
            self.operands = device.empty((self.n_groups * GROUP, wide.padded // 2), np.uint16)
            self._round(items, wide)
            if in_bytes or self._bytes_suffice():
                self.config = wide
                return
        self.operands = self.halves
        self._round(items, self.config)

    @property
    def padded(self) -> int:
        """Factors of a row of `halves`."""
        return round_up(max(self.rank, 1), 16)

    def _bytes_suffice(self) -> bool:
        """Whether int8 distinguishes scores well enough, by the median error of the groups."""
        norms, errors = self.device.download(self.groups).T
        return bool(np.median(errors[norms > 0] / norms[norms > 0]) * math.sqrt(self.rank) <= BYTE_RESIDUAL)

    def _round(self, items: Array, config: GroupMaxConfig) -> None:
        if self.n_groups:
            byte_row = config.padded if config.in_bytes else 0
            sizes = _int32(self.n_items, self.n_groups, self.rank, self.padded, byte_row)
            rows = (self.halves, self.operands, self.groups, self.steps, items, self.ids)
            arguments = (*rows, *sizes, np.float64(self.scale))
            _launch_rows(self.device, "prepare_items", self.n_groups, arguments, _constants(self.dtype))


def top_k(
    device: Device,
    users: np.ndarray,
    items: np.ndarray | PackedItems,
    n: int,
    *,
    seen: sp.csr_array | None = None,
    candidates: np.ndarray | None = None,
    copies: dict[Any, Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The `n` items with the highest ``users @ items.T``, ties to the lower item, as `hybridmf.cpu.topk.top_k`.

    Scores are one chain of fused multiply-adds over the factors in order; `seen` excludes explicit zeros, too. A copy
    of it on the device is read from `copies`, or kept there, if all users are served at a time.
    """
    if candidates is not None:
        items = PackedItems(device, items.items if isinstance(items, PackedItems) else items, candidates)
    packed = items if isinstance(items, PackedItems) else PackedItems(device, items)
    users = np.ascontiguousarray(users, dtype=packed.dtype)
    ids = np.full((len(users), n), -1, dtype=np.int32)
    scores = np.full((len(users), n), -np.inf, dtype=packed.dtype)
    kept = min(n, packed.n_items)  # further columns are padding
    seen_ptr, seen_ids, _ = csr_arrays(seen) if seen is not None else (None, None, None)

    def run(start: int, stop: int) -> None:
        kept_by = copies if copies is not None and stop - start == len(users) else {}
        rows: Any = kept_by.get(device)
        if rows is None and seen_ptr is not None and seen_ids is not None:
            rows = device.upload(seen_ptr[start : stop + 1] - seen_ptr[start])
            rows = rows, device.upload(seen_ids[seen_ptr[start] : seen_ptr[stop]])
            kept_by[device] = rows
        found = top_k_on_device(device, device.upload(users[start:stop]), packed, kept, *rows or ())
        ids[start:stop, :kept], scores[start:stop, :kept] = (device.download(array) for array in found)

    if kept:
        per_user = _bytes_per_user(packed, kept) + packed.rank * packed.dtype.itemsize
        _in_batches(len(users), _batch_users(device, per_user), run)
    return ids, scores


def top_k_on_device(
    device: Device,
    users: Array,
    packed: PackedItems,
    n: int,
    seen_ptr: Array | None = None,
    seen_ids: Array | None = None,
) -> tuple[Array, Array]:
    """`top_k` of device arrays; `seen_ptr` has the bounds of each user's part of `seen_ids`, which ascends in it."""
    n_users = len(users)
    check_all(
        device,
        users=(users, packed.dtype, (None, packed.rank)),
        seen_ptr=(seen_ptr, np.int64, (n_users + 1,)),
        seen_ids=(seen_ids, np.int32, (None,)),
    )
    if (seen_ptr is None) != (seen_ids is None):
        raise TypeError("seen_ptr and seen_ids belong together: pass both or neither")
    if not packed.n_items:
        gaps = np.full((n_users, n), -1, dtype=np.int32), np.full((n_users, n), -np.inf, dtype=packed.dtype)
        return device.upload(gaps[0]), device.upload(gaps[1])
    ids, scores = device.empty((n_users, n), np.int32), device.empty((n_users, n), packed.dtype)
    best = _best_by_groups if _by_groups(packed, n) else _best_of_rows

    def run(start: int, stop: int) -> None:
        seen = (seen_ptr[start : stop + 1], seen_ids) if seen_ptr is not None else None
        best(packed, users[start:stop], seen, ids[start:stop], scores[start:stop])

    if n:
        _in_batches(n_users, _batch_users(device, _bytes_per_user(packed, n)), run)
    return ids, scores


# ---------------------------------------------------------------------------------------------------- batches


Seen = tuple[Array, Array]
"""Seen items of a batch of users: pointer and indices of rows of a CSR matrix; the pointer may start above 0."""


def _by_groups(packed: PackedItems, n: int) -> bool:
    """Whether to select by bounds of groups, rather than from whole rows of scores."""
    return packed.halves is not None and min(n, packed.n_items) <= LIST_SIZES[-1]


def _may_use_bytes(spec: DeviceSpec, rank: int, n_groups: int, config: GroupMaxConfig) -> bool:
    """Whether int8 factors are faster if they distinguish scores."""
    # a GPU of compute capability 10 has hardly any units for int8
    fast = spec.capability >= (8, 0) and spec.capability[0] != 10
    return fast and n_groups >= BYTE_GROUPS and rank >= BYTE_RANK and config.fits(spec)


def _bytes_per_user(packed: PackedItems, n: int) -> int:
    """Workspace and results of one user."""
    result = n * (4 + packed.dtype.itemsize)
    if _by_groups(packed, n):
        return result + packed.n_groups * 4 + packed.config.row_bytes + 16 + 4
    size, in_shared = _sorted_list(packed, n)
    pairs = 0 if in_shared else size * (4 + packed.dtype.itemsize)
    return result + packed.n_groups * GROUP * packed.dtype.itemsize + pairs


def _batch_users(device: Device, bytes_per_user: int) -> int:
    """Users of a batch, whose workspace takes at most half of the free memory."""
    return max(1, min(LARGEST_BATCH, min(device.free_bytes() // 2, BATCH_BYTES) // bytes_per_user))


def _in_batches(n_users: int, batch: int, run: Callable[[int, int], None]) -> None:
    """``run(start, stop)`` over all users; a batch that does not fit in memory is halved."""
    start = 0
    while start < n_users:
        stop = min(start + batch, n_users)
        try:
            run(start, stop)
        except DeviceMemoryError:
            if stop - start == 1:
                raise
            batch = ceil_div(stop - start, 2)
        else:
            start = stop


# ---------------------------------------------------------------------------------------------------- launches


def _constants(dtype: np.dtype, wanted: int = 0) -> dict[str, Any]:
    """Compile-time constants of all kernels but group_max, for lists of `wanted` items; without lists, one for all."""
    return {"REAL": dtype, "KEPT": next(size for size in LIST_SIZES if size >= wanted)}


def _int32(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(value) for value in values)


def _launch_rows(
    device: Device,
    name: str,
    n_rows: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    shared_bytes: int = 0,
) -> None:
    """Launch a kernel in which a warp processes a row."""
    kernel = get_kernel(device, SOURCE, name, **constants)
    kernel((ceil_div(n_rows, ROW_WARPS),), (32 * ROW_WARPS,), arguments, shared_bytes)


def row_norms(device: Device, rows: Array) -> np.ndarray:
    """Norms of rows in float64, on the host."""
    n_rows, rank = rows.shape
    norms = device.empty((n_rows,), np.float64)
    if n_rows:
        arguments = (norms, rows, *_int32(n_rows, rank))
        _launch_rows(device, "row_norms", n_rows, arguments, _constants(np.dtype(rows.dtype)))
    return device.download(norms)


ScoreBounds = tuple[Array, Array, Array]
"""Bounds of the scores of a batch of users.

uint32 (n_users, n_groups), bits of float32: largest approximate score of the unseen items of each group, of scaled
factors; float32 (n_users, 4), UserBound in the kernels: norm, factors of the slack and exponent of each user; int32
(n_users,): first group that cannot have one of a user's best items. Words after its octet are not written."""


def _bound_groups(packed: PackedItems, users: Array, seen: Seen | None, wanted: int) -> ScoreBounds:
    """Largest score of each group by tensor cores; with many groups, users are pruned after the first ones."""
    device, config, n_groups = packed.device, packed.config, packed.n_groups
    n_users, constants = users.shape[0], _constants(packed.dtype, wanted)
    words, of_users = device.empty((n_users, n_groups), np.uint32), device.empty((n_users, 4), np.float32)
    limits = device.empty((n_users,), np.int32)
    operands = device.empty((n_users, config.row_bytes // 2), np.uint16)
    sizes = _int32(n_users, n_groups, packed.rank, config.padded, config.in_bytes)
    prepared = (operands, of_users, limits, users, *sizes)
    _launch_rows(device, "prepare_users", n_users, prepared, _constants(packed.dtype))
    if seen is not None:
        marked = (words, *seen, packed.positions, *_int32(n_users, n_groups))
        _launch_rows(device, "mark_seen", n_users, marked, _constants(packed.dtype))
    head = _head_groups(n_groups, wanted)
    _group_max(packed, words, limits, operands, 0, head, seen is not None)
    if head < n_groups:
        tables = (limits, words, of_users, packed.groups)
        sizes = _int32(n_users, n_groups, head, wanted, packed.rank)
        _launch_rows(device, "prune", n_users, (*tables, *sizes, np.float64(packed.scale)), constants)
        _group_max(packed, words, limits, operands, head, n_groups, seen is not None)
    return words, of_users, limits


def _best_by_groups(packed: PackedItems, users: Array, seen: Seen | None, ids: Array, scores: Array) -> None:
    """Exact scores of the items that can be among the best; see cuda/top_k.cu."""
    n_users, n = ids.shape
    wanted = min(n, packed.n_items)
    words, of_users, limits = _bound_groups(packed, users, seen, wanted)
    constants = _constants(packed.dtype, wanted)
    left_out = (packed.positions, packed.positions) if seen is None else seen  # not read without seen
    arrays = (ids, scores, users, of_users, words, limits)
    tables = (packed.panels, packed.halves, packed.ids, packed.ascending, packed.groups, packed.steps, *left_out)
    sizes = _int32(n_users, packed.n_items, packed.n_groups, n, packed.rank, packed.padded, seen is not None)
    lists = 4 * constants["KEPT"] * (packed.dtype.itemsize + 4) + QUEUE * (4 + 4) + 2 * GROUP * 4
    shared_bytes = ROW_WARPS * (16 * packed.vectors + 4 * packed.padded + lists)
    arguments = (*arrays, *tables, *sizes, np.float64(packed.scale))
    _launch_rows(packed.device, "select_best", n_users, arguments, constants, shared_bytes)


def _head_groups(n_groups: int, n: int) -> int:
    """Groups to score before users are pruned; all of them if there are few."""
    head = round_up(max(2 * OCTET, 2 * n, n_groups // HEAD_SHARE), OCTET)
    return head if n_groups >= 128 and 2 * head <= n_groups else n_groups


def _group_max(
    packed: PackedItems, words: Array, limits: Array, operands: Array, first: int, last: int, filtered: bool
) -> None:
    """Largest score of an unseen item in each of the groups from `first` to `last`."""
    device, config = packed.device, packed.config
    n_users, n_groups = words.shape
    tiles = ceil_div(n_users, config.block_users)
    # about eight blocks per multiprocessor, so that blocks that end early do not leave it idle
    chunk = round_up(ceil_div((last - first) * tiles, 8 * device.spec.multiprocessors), OCTET)
    chunk = max(min(CHUNK, chunk), round_up(ceil_div(last - first, LARGEST_GRID_Y), OCTET))
    sizes = _int32(n_users, packed.n_items, n_groups, first, last, chunk, filtered)
    arguments = (words, operands, packed.operands, packed.steps, limits, *sizes)
    kernel = get_kernel(device, SOURCE, "group_max", **config.constants)
    kernel((tiles, ceil_div(last - first, chunk)), (32 * WARPS,), arguments, config.shared_bytes)


def _sorted_list(packed: PackedItems, n: int) -> tuple[int, bool]:
    """Length of the list that sort_rows sorts, and whether it is in shared memory."""
    size = 1 << max(5, (min(n, packed.n_items) - 1).bit_length())
    return size, size * (4 + packed.dtype.itemsize) <= SORTED_IN_SHARED


def _best_of_rows(packed: PackedItems, users: Array, seen: Seen | None, ids: Array, scores: Array) -> None:
    """All scores of a batch of users, and a selection from each row."""
    device, constants = packed.device, _constants(packed.dtype)
    n_users, n = ids.shape
    pitch = packed.n_groups * GROUP
    rows = device.empty((n_users, pitch), packed.dtype)
    kernel = get_kernel(device, SOURCE, "score_rows", **constants)
    sizes = _int32(n_users, packed.n_items, packed.n_groups, packed.rank)
    kernel((ceil_div(n_users, 16), ceil_div(packed.n_groups, 16)), (256,), (rows, users, packed.panels, *sizes), 0)
    if seen is not None:
        dropped = (rows, *seen, packed.positions, np.int32(n_users), np.int64(pitch))
        _launch_rows(device, "drop_seen", n_users, dropped, constants)
    size, in_shared = _sorted_list(packed, n)
    work = (0,) if in_shared else (n_users, size)
    work_scores, work_ids = device.empty(work, packed.dtype), device.empty(work, np.int32)
    kernel = get_kernel(device, SOURCE, "sort_rows", **constants)
    scalars = (np.int32(packed.n_items), np.int64(pitch), np.int32(n), np.int32(size), np.int32(in_shared))
    shared_bytes = size * (4 + packed.dtype.itemsize) if in_shared else 0
    kernel((n_users,), (512,), (ids, scores, work_scores, work_ids, rows, packed.ids, *scalars), shared_bytes)
