"""``hybridmf recommend``: the best items of users of a saved model, as a table, CSV, JSON, Parquet or Arrow."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import click
import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Side
from ..core.validate import check_int
from ..data.align import align
from ..data.labels import check_label_types, label_kind
from ..model.load import load
from ..model.requests import UNKNOWN_IDS
from ..model.tables import FILES
from ..ratings import Ratings
from . import sources
from .features import check_include_cold, include_cold_option
from .options import Options, make_command, output_option, refuse_ending, refuse_overwriting
from .report import Answer, answer_entries, answer_table, names_of, with_output
from .titles import titles_of, titles_options

logger = logging.getLogger("hybridmf")

BLOCK_USERS = 8_192  # users in each call of `recommend` of the model, so that --all needs no list of all results
ENDINGS = {"": "table", ".txt": "table", ".csv": "csv", ".json": "json"}  # formats of text by the ending of the output

COLUMNS = ("item", "score")

Recommendations = Iterator[Answer]  # those of one user after the other


@make_command(
    "recommend",
    "hybridmf recommend model.safetensors --user 42 --user 7 --titles movies.dat",
    "hybridmf recommend model.safetensors --all -N 20 -o top20.parquet",
    "hybridmf recommend model.safetensors --all --titles movies.dat -o top10.csv",
    "hybridmf recommend model.safetensors --user 42 --include-cold",
)
@click.argument("model_file", metavar="MODEL", type=sources.existing_file)
@click.option("--user", "users", multiple=True, metavar="LABEL", help="User to recommend to; may be repeated.")
@click.option("--all", "--all-users", "all_users", is_flag=True, help="All users of the model.")
@click.option("-N", "count", type=int, default=10, show_default=True, help="Recommendations for each user.")
@click.option(
    "--unknown", type=click.Choice(UNKNOWN_IDS), default="error", show_default=True,
    help="Users of --user that the model does not have: refused, left out, or given the most popular items (last).",
)  # fmt: skip
@click.option("--include-seen", is_flag=True, help="Also recommend seen items.")
@include_cold_option("Also recommend items that have features and no training ratings.")
@click.option(
    "--ratings", "ratings_file", type=sources.ratings_path,
    help="Ratings with the seen items (file or store), instead of the training ratings.",
)  # fmt: skip
@titles_options
@click.option(
    "--format", "layout", type=click.Choice(["table", "csv", "json"]),
    help="[default: by the ending of the output, else table; .parquet and .arrow with --all]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@output_option("Write there, not to the terminal.")
def command(options: Options) -> None:
    """Recommend items to users of a trained model.

    Users and items go by the labels of the ratings file, or by positions from 0 where that had none. Items a user has
    already rated are left out.
    """
    users, output, layout, ratings_file = options.users, options.output, options.layout, options.ratings_file
    if bool(users) == options.all_users:
        raise click.UsageError("give either --user LABEL (once or more) or --all")
    if options.include_seen and ratings_file:
        raise click.UsageError("--include-seen excludes nothing, so --ratings has no effect; choose one of them")
    refuse_overwriting(output, options.model_file, *sources.files_of(ratings_file), options.titles_file)
    ending = os.path.splitext(output or "")[1].lower()
    if options.as_json:
        if layout not in (None, "json"):
            raise click.UsageError(f"--json and --format {layout} contradict each other; choose one of them")
        layout = "json"
    if layout is None:
        refuse_ending(output, (*ENDINGS, *FILES), "name the content with --format")
    binary = layout is None and ending in FILES
    if binary and (not options.all_users or options.titles_file is not None):
        raise click.UsageError(f"a {ending} file takes --all and no --titles; choose --format csv or json for these")
    layout = layout or ENDINGS.get(ending, "table")
    model = load(options.model_file)
    check_include_cold(model, options.include_cold)
    strangers = [] if options.unknown == "error" else unknown_of(model, users)
    known = [user for user in users if user not in strangers]
    positions = np.arange(model.n_users) if options.all_users else find_rows(model, "user", known)
    seen = None if ratings_file is None else seen_matrix(model, sources.read_ratings(ratings_file), ratings_file)
    titles = titles_of(model, options)
    which = {"filter_already_liked_items": not options.include_seen, "include_cold": options.include_cold}
    if binary:
        model.recommend_all(output, seen, options.count, show_progress=True, **which)
        return
    found = recommendations(model, positions, check_int("-N", options.count, 1), seen, which)
    if strangers and options.unknown == "popular":
        found = itertools.chain(found, ((user, most_popular(model, options.count)) for user in strangers))
    with_output(output, lambda stream: WRITERS[layout](stream, found, titles))


def find_rows(model: Any, side: Side, labels: Iterable[str]) -> np.ndarray:
    """Positions of users or items given as text, which stands for the label that is written so."""
    ids, names = getattr(model, f"{side}_ids"), names_of(model, side)
    table: dict[str, int] = {}
    several = {str(name) for position, name in enumerate(names) if table.setdefault(str(name), position) != position}
    unknown = [label for label in labels if label not in table]
    if unknown:
        what = f"{side}s of type {label_kind(ids)}" if ids is not None else f"{side}s by position (it has no labels)"
        some = ", ".join(map(str, names[:3]))
        raise ValueError(f"unknown {side} {', '.join(unknown)}; the model has {len(names):,} {what}, such as {some}")
    unclear = several.intersection(labels)
    if unclear:
        raise ValueError(
            f"{side} {', '.join(sorted(unclear))}: the model has labels of several types that are written so; choose "
            "one in Python: model.recommend(..., labels=True)"
        )
    return np.array([table[label] for label in labels], dtype=np.int64)


def unknown_of(model: Any, users: tuple[str, ...]) -> list[str]:
    """Users given as text that the model does not have, which are reported."""
    known = set(map(str, names_of(model, "user")))
    strangers = [user for user in users if user not in known]
    if strangers:
        logger.warning("%d of %d users are unknown to the model, such as %s", len(strangers), len(users), strangers[0])
    return strangers


def most_popular(model: Any, count: int) -> list[tuple[Any, float]]:
    """What a cold user gets: items by label with their scores."""
    names = names_of(model, "item")
    ids, scores = model.recommend_new([{}], N=count)
    return [(names[item], score) for item, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True) if item >= 0]


def seen_matrix(model: Any, ratings: Ratings, source: str) -> sp.csr_array:
    """Bring `ratings` to the positions of `model` by labels as text: csr_array, shape (n_users, n_items)."""
    have, want = [], []
    for side in SIDES:
        ours, theirs = getattr(model, f"{side}_ids"), getattr(ratings, f"{side}_ids")
        if ours is not None and theirs is not None and "U" not in ours.dtype.kind + theirs.dtype.kind:
            check_label_types(side, ("the model", ours), (source, theirs))  # all text stands for what is written so
        have.append(_as_text(ratings, model, side))
        want.append(_as_text(model, ratings, side))
    return align(ratings.user_items, (have[0], have[1]), (want[0], want[1]), name=source, unknown="drop")[0]


def _as_text(owner: Any, other: Any, side: Side) -> np.ndarray | None:
    """Labels as text, whatever types two files gave them; positions where neither side has labels."""
    if getattr(owner, f"{side}_ids") is None and getattr(other, f"{side}_ids") is not None:
        return None
    return np.array(list(map(str, names_of(owner, side))), dtype=object)


def recommendations(
    model: Any, positions: np.ndarray, count: int, seen: sp.csr_array | None, which: dict[str, Any]
) -> Recommendations:
    """Best items of each user, in blocks of users, by label; `which` items, as arguments of `recommend`."""
    user_names, item_names = names_of(model, "user"), names_of(model, "item")
    for start in range(0, len(positions), BLOCK_USERS):
        block = positions[start : start + BLOCK_USERS]
        rows = None if seen is None else seen[block]
        ids, scores = model.recommend(block, rows, N=count, **which)
        for user, items, values in zip(block.tolist(), ids.tolist(), scores.tolist(), strict=True):
            best = [(item_names[item], value) for item, value in zip(items, values, strict=True) if item >= 0]
            yield user_names[user], best


def _write_tables(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    for answer in found:
        stream.write(answer_table(answer, "user", COLUMNS, titles, "  nothing left to recommend"))


def _write_csv(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["user", "rank", "item", "score"] + (["title"] if titles is not None else []))
    for user, best in found:
        for rank, (item, score) in enumerate(best, 1):
            title = [titles.get(str(item), "")] if titles is not None else []
            writer.writerow([user, rank, item, f"{score:.7g}", *title])


def _write_json(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    lines = ",\n  "
    stream.write("[")
    for number, answer in enumerate(found):
        entries = answer_entries(answer, COLUMNS, titles)
        text = json.dumps({"user": answer[0], "recommendations": entries}, ensure_ascii=False)
        stream.write((lines if number else "\n  ") + text)
    stream.write("\n]\n")


WRITERS: dict[str, Callable[[TextIO, Recommendations, dict[str, str] | None], None]] = {
    "table": _write_tables,
    "csv": _write_csv,
    "json": _write_json,
}
