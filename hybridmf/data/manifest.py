"""The manifest of a store: its fields, the files that follow from them, and the rules that connect them.

    format, version, dtype     "hybridmf-store", 1, "float32"
    shape                      [n_users, n_items]
    nnz, zeros                 entries, and explicit zeros among them
    bounds                     of slabs: {"user": [0, ..., n_users], "item": [0, ..., n_items]}, ascending
    sums                       of all values in user order: {"all": x, "nonzero": x}, equal up to rounding
    magnitudes                 smallest and largest absolute value: {"all": [a, b], "nonzero": [a, b]}, [] of no values
    range                      smallest and largest value: [a, b], None of no values; absent in older stores
    files                      {name: {"bytes": n, "crc32": "8 hexadecimal digits"}}
    checksum                   CRC-32 of all other fields

A checksum shows that a manifest is unchanged, not that it is valid, and kernels do not validate stores. So
`check_manifest` accepts only the fields, files, types, ranges and sizes that a conversion writes.
"""

from __future__ import annotations

import json
import re
import zlib
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.objective import SIDES, Side, other_side
from ..core.validate import MAX_AXIS
from .labels import MAX_VALUE

FORMAT, VERSION = "hybridmf-store", 1
MANIFEST = "manifest.json"
ARRAYS = {"indptr": np.int64, "indices": np.int32, "values": np.float32}
LABELS = frozenset(["user_ids.npy", "item_ids.npy"])

HEADER = 128  # bytes of NumPy's header before a vector
ROUNDING = 1e-9  # tolerance of sums over the same entries in another order, relative to entries x largest value

KINDS = {"all", "nonzero"}
FIELDS = {"format", "version", "dtype", "shape", "nnz", "zeros", "bounds", "sums", "magnitudes", "files", "checksum"}


def slab_file(side: Side, slab: int, array: str) -> str:
    return f"{side}-{slab:06d}.{array}.npy"


def degrees_file(side: Side, *, nonzero: bool = False) -> str:
    return f"{side}-degrees-nonzero.npy" if nonzero else f"{side}-degrees.npy"


def seal(manifest: dict[str, Any]) -> str:
    """CRC-32 of a manifest without its checksum."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raise unless a manifest has the fields of a conversion, without contradictions."""
    _keys("the manifest", manifest, FIELDS, frozenset(["range"]))
    _require(manifest["dtype"] == "float32", f"dtype is {manifest['dtype']!r}, expected 'float32'")
    shape = [_count("shape", each, MAX_AXIS) for each in _list("shape", manifest["shape"], 2)]
    nnz = _count("nnz", manifest["nnz"], shape[0] * shape[1])
    zeros = _count("zeros", manifest["zeros"], nnz)
    _keys("bounds", manifest["bounds"], set(SIDES))
    for side, count in zip(SIDES, shape, strict=True):
        name = f"bounds of {side}s"
        ends = [_count(name, each, count) for each in _list(name, manifest["bounds"][side])]
        ascending = ends[:1] == [0] and ends[-1] == count and all(first < last for first, last in pairwise(ends))
        _require(ascending, f"{name} do not ascend from 0 to {count}")
    _check_values(manifest["magnitudes"], manifest["sums"], nnz, zeros)
    if manifest.get("range") is not None:
        low, high = (_real("range", each) for each in _list("range", manifest["range"], 2))
        largest = manifest["magnitudes"]["all"][-1:]
        sound = low <= high and [max(-low, high)] == largest
        _require(sound, f"range is {manifest['range']!r}, the largest magnitude {largest}")
    _check_files(manifest)


def entries_of_slabs(manifest: dict[str, Any], side: Side) -> np.ndarray:
    """Entries of each slab of a side, from the sizes of its files; int64."""
    files, n_slabs = manifest["files"], len(manifest["bounds"][side]) - 1
    sizes = [files[slab_file(side, slab, "values")]["bytes"] for slab in range(n_slabs)]
    return (np.array(sizes, dtype=np.int64) - HEADER) // 4


# ------------------------------------------------------------------------------------------------ rules


def _check_values(magnitudes: Any, sums: Any, nnz: int, zeros: int) -> None:
    """Check sums and magnitudes against the numbers of entries and explicit zeros."""
    _keys("magnitudes", magnitudes, KINDS)
    _keys("sums", sums, KINDS)
    nonzero = nnz - zeros
    ends = [_real("magnitudes", each) for each in _list("magnitudes", magnitudes["nonzero"], 2 if nonzero else 0)]
    low, high = ends or (0.0, 0.0)
    _require(0 < low <= high or not nonzero, f"magnitudes of nonzero values are {low} to {high}")
    expected = [0.0 if zeros else low, high] if nnz else []
    _require(magnitudes["all"] == expected, f"magnitudes of all values are {magnitudes['all']!r}, expected {expected}")
    slack = ROUNDING * nonzero * high
    total, rest = (_real("sums", sums[kind], nonzero * high + slack) for kind in ("all", "nonzero"))
    _require(abs(total - rest) <= (slack if zeros else 0), f"sums differ: {total} and {rest} without zeros")


def _check_files(manifest: dict[str, Any]) -> None:
    """Check for exactly the files that the other fields imply, with the implied sizes."""
    files, shape = manifest["files"], dict(zip(SIDES, manifest["shape"], strict=True))
    _keys("files", files, set(_sizes(manifest)), LABELS)
    for name, entry in files.items():
        _keys(f"the entry of {name}", entry, {"bytes", "crc32"})
        _count(f"bytes of {name}", entry["bytes"], 1 << 62, HEADER)
        crc = entry["crc32"]
        _require(isinstance(crc, str) and bool(re.fullmatch("[0-9a-f]{8}", crc)), f"crc32 of {name} is {crc!r}")
    for name, size in _sizes(manifest).items():
        found = files[name]["bytes"] - HEADER
        _require(size in (None, found), f"{name} has {found} bytes of numbers, expected {size}")
    for side in SIDES:
        entries = entries_of_slabs(manifest, side)
        for slab, (count, rows) in enumerate(
            zip(entries.tolist(), np.diff(manifest["bounds"][side]).tolist(), strict=True)
        ):
            for array in ("indices", "values"):
                found = files[slab_file(side, slab, array)]["bytes"] - HEADER
                _require(found == 4 * count, f"{slab_file(side, slab, array)} has {found} bytes of numbers")
            most = rows * shape[other_side(side)]
            _require(count <= most, f"slab {slab} of {side}s has {count} entries, at most {most} fit")
        total = sum(entries.tolist())
        _require(total == manifest["nnz"], f"nnz is {manifest['nnz']}, slabs of {side}s have {total} entries")


def _sizes(manifest: dict[str, Any]) -> dict[str, int | None]:
    """Bytes of numbers in each file except labels; None if they depend on the entries of a slab."""
    sizes: dict[str, int | None] = {}
    for side, count in zip(SIDES, manifest["shape"], strict=True):
        sizes[degrees_file(side)] = 8 * count
        if manifest["zeros"]:
            sizes[degrees_file(side, nonzero=True)] = 8 * count
        for slab, rows in enumerate(np.diff(manifest["bounds"][side]).tolist()):
            sizes[slab_file(side, slab, "indptr")] = 8 * (rows + 1)
            sizes[slab_file(side, slab, "indices")] = sizes[slab_file(side, slab, "values")] = None
    return sizes


# ------------------------------------------------------------------------------------------------ types


def _require(sound: bool, problem: str) -> None:
    if not sound:
        raise ValueError(problem)


def _keys(name: str, found: Any, needed: set[str], allowed: frozenset[str] = frozenset()) -> None:
    _require(isinstance(found, dict), f"{name} is a {type(found).__name__}, expected an object")
    missing, unknown = sorted(needed - found.keys()), sorted(found.keys() - needed - allowed)
    _require(not missing, f"{name} lacks {', '.join(missing[:3])}")
    _require(not unknown, f"{name} has the unknown {', '.join(unknown[:3])}")


def _list(name: str, found: Any, length: int | None = None) -> list[Any]:
    sound = isinstance(found, list) and length in (None, len(found))
    _require(sound, f"{name} is {str(found)[:40]}, expected a list" + ("" if length is None else f" of {length}"))
    return list(found)


def _count(name: str, found: Any, most: int, least: int = 0) -> int:
    """Check for an integer, which True is not."""
    _require(type(found) is int and least <= found <= most, f"{name} has {str(found)[:40]}, expected {least} to {most}")
    return int(found)


def _real(name: str, found: Any, most: float = MAX_VALUE) -> float:
    sound = type(found) in (int, float) and -most <= found <= most
    _require(sound, f"{name} has {str(found)[:40]}, expected a number of magnitude {most:g} at most")
    return float(found)
