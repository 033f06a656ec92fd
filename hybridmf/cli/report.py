"""What commands print and write: facts in two columns, labels, text that is complete or not there."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

import numpy as np

from ..core.files import write_atomically
from ..data.store import Store
from ..ratings import Ratings


def pairs(facts: dict[str, Any]) -> str:
    """Names and values in two columns."""
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def ratings_facts(ratings: Ratings) -> dict[str, Any]:
    """Sizes, density, values and degrees of ratings, as text by name."""
    n_users, n_items = ratings.shape
    matrix = ratings.user_items
    facts = {
        "users": f"{n_users:,}, {label_text(ratings.user_ids)}",
        "items": f"{n_items:,}, {label_text(ratings.item_ids)}",
        "ratings": f"{ratings.nnz:,}",
        "density": f"{ratings.nnz / max(n_users * n_items, 1):.3%}",
    }
    if ratings.nnz:
        data = matrix.data
        facts["values"] = f"{data.min():g} to {data.max():g}, mean {data.mean(dtype=np.float64):.4g}"
    facts["ratings per user"] = _degree_text(np.diff(matrix.indptr))
    facts["ratings per item"] = _degree_text(np.bincount(matrix.indices, minlength=n_items))
    return facts


def store_facts(store: Store) -> dict[str, Any]:
    """Sizes, degrees and slabs of a store, as text by name; entries are not read."""
    n_users, n_items = store.shape
    return {
        "users": f"{n_users:,}, {label_text(store.user_ids)}",
        "items": f"{n_items:,}, {label_text(store.item_ids)}",
        "ratings": f"{store.nnz:,}",
        "density": f"{store.nnz / max(n_users * n_items, 1):.3%}",
        "ratings per user": _degree_text(store.degrees("user")),
        "ratings per item": _degree_text(store.degrees("item")),
        "slabs": f"{len(store.slabs('user')):,} of users, {len(store.slabs('item')):,} of items",
        "bytes": f"{store.nbytes / 1e6:,.1f} MB",
    }


def _degree_text(degrees: np.ndarray) -> str:
    if not len(degrees):
        return "none"
    return (
        f"min {degrees.min():,}, median {np.median(degrees):,g}, mean {degrees.mean():,.1f}, max {degrees.max():,}; "
        f"{np.count_nonzero(degrees == 0):,} empty"
    )


def label_text(ids: np.ndarray | None) -> str:
    """The first labels, or that there are none."""
    return "positions" if ids is None else f"labels such as {', '.join(map(str, ids[:3].tolist()))}"


def names_of(ids: np.ndarray | None, count: int) -> list[Any]:
    """Labels as Python objects; positions where there are none."""
    return list(range(count)) if ids is None else ids.tolist()


def file_size(path: str) -> str:
    """Size of a file as text."""
    size = os.path.getsize(path)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def with_output(path: str | None, write: Callable[[TextIO], Any]) -> None:
    """Let `write` fill standard output, or a file that appears only once it is complete."""
    if path is None:
        write(sys.stdout)
        sys.stdout.flush()  # here, where a reader who has gone away ends the command quietly
        return

    def write_text(stream: BinaryIO) -> None:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        write(text)
        text.flush()
        text.detach()  # `stream` is the caller's to close

    write_atomically(path, write_text)
