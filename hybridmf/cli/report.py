"""Output of commands: facts in two columns, labels, files that are complete or absent."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TextIO

import numpy as np

from ..core.files import write_atomically
from ..core.objective import SIDES, Side
from ..core.table import format_table
from ..data.store import Store
from ..plots import entry_counts
from ..ratings import Ratings


def pairs(facts: dict[str, Any]) -> str:
    """Names and values in two columns."""
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def ratings_facts(ratings: Ratings | Store) -> dict[str, Any]:
    """Sizes, density and degrees, values in memory, slabs of a store: numbers by name."""
    n_users, n_items = ratings.shape
    facts = {
        "users": n_users,
        "items": n_items,
        "user_labels": None if ratings.user_ids is None else ratings.user_ids[:3].tolist(),
        "item_labels": None if ratings.item_ids is None else ratings.item_ids[:3].tolist(),
        "ratings": ratings.nnz,
        "density": ratings.nnz / max(n_users * n_items, 1),
    }
    if isinstance(ratings, Ratings) and ratings.nnz:
        data = ratings.user_items.data
        facts["values"] = {
            "min": float(data.min()), "max": float(data.max()), "mean": float(data.mean(dtype=np.float64)),
        }  # fmt: skip
    facts |= {f"ratings_per_{side}": _degrees(degrees) for side, degrees in entry_counts(ratings).items()}
    if isinstance(ratings, Store):
        facts["slabs"] = {"user": len(ratings.slabs("user")), "item": len(ratings.slabs("item"))}
        facts["bytes"] = ratings.nbytes
    return facts


def _degrees(degrees: np.ndarray) -> dict[str, float] | None:
    if not len(degrees):
        return None
    return {
        "min": int(degrees.min()),
        "median": float(np.median(degrees)),
        "mean": float(degrees.mean()),
        "max": int(degrees.max()),
        "empty": int(np.count_nonzero(degrees == 0)),
    }


def facts_text(facts: dict[str, Any]) -> str:
    shown = {
        "users": f"{facts['users']:,}, {label_text(facts['user_labels'])}",
        "items": f"{facts['items']:,}, {label_text(facts['item_labels'])}",
        "ratings": f"{facts['ratings']:,}",
        "density": f"{facts['density']:.3%}",
    }
    if "columns" in facts:
        shown = {"columns": facts["columns"]} | shown
    if "values" in facts:
        shown["values"] = "{min:g} to {max:g}, mean {mean:.4g}".format(**facts["values"])
    for name in SIDES:
        degrees = facts[f"ratings_per_{name}"]
        text = "min {min:,}, median {median:,g}, mean {mean:,.1f}, max {max:,}; {empty:,} empty"
        shown[f"ratings per {name}"] = "none" if degrees is None else text.format(**degrees)
    if "slabs" in facts:
        shown["slabs"] = "{user:,} of users, {item:,} of items".format(**facts["slabs"])
        shown["bytes"] = f"{facts['bytes'] / 1e6:,.1f} MB"
    return pairs(shown)


def label_text(ids: Sequence[Any] | None) -> str:
    """The first labels, or that there are none."""
    return "positions" if ids is None else f"labels such as {', '.join(map(str, ids[:3]))}"


def names_of(owner: Any, side: Side) -> list[Any]:
    """Labels of a side of ratings or of a model as Python objects; positions where there are none."""
    ids = getattr(owner, f"{side}_ids")
    return list(range(getattr(owner, f"n_{side}s"))) if ids is None else ids.tolist()


def file_size(path: str) -> str:
    size = os.path.getsize(path)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def with_output(path: str | None, write: Callable[[TextIO], Any]) -> None:
    """Let `write` fill standard output, or a file that appears only once it is complete."""
    if path is None:
        write(sys.stdout)
        sys.stdout.flush()  # here, where a closed pipe ends the command quietly
        return

    def write_text(stream: BinaryIO) -> None:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        write(text)
        text.flush()
        text.detach()  # `stream` is the caller's to close

    write_atomically(path, write_text)


Answer = tuple[Any, list[tuple[Any, float]]]
"""Label of a user or item, and the labels and scores of what was found for it, best first."""


def answer_table(answer: Answer, of: str, columns: tuple[str, str], titles: dict[str, str] | None, nothing: str) -> str:
    """An answer as text; `of` is "user" or "item", `columns` are the names of what was found and of its score."""
    name, best = answer
    rows = [[rank, other, f"{score:.3f}"] for rank, (other, score) in enumerate(best, 1)]
    header, align = ["rank", *columns], ">>>"
    if titles is not None:
        header, align = [*header, "title"], ">>><"
        rows = [[*row, titles.get(str(row[1]), "")] for row in rows]
    return f"{of} {name}\n{format_table(header, rows, align) if rows else nothing}\n\n"


def answer_entries(answer: Answer, columns: tuple[str, str], titles: dict[str, str] | None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        dict(zip(columns, (o, float(f"{score:.7g}")), strict=True)) for o, score in answer[1]
    ]
    if titles is not None:
        entries = [entry | {"title": titles.get(str(entry[columns[0]]))} for entry in entries]
    return entries
