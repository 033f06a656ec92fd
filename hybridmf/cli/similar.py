"""``hybridmf similar``: items or users whose factors are close to those of others."""

from __future__ import annotations

import json
from typing import Any

import click

from ..core import validate as _validate
from ..core.objective import Side
from ..core.table import format_table
from ..model.load import load
from .options import debug_option, examples, output_option, refuse_ending, refuse_overwriting
from .recommend import find_rows
from .report import names_of, with_output
from .sources import existing_file, spelled_separator
from .titles import read_titles, warn_if_strangers


@click.command(
    "similar",
    epilog=examples(
        "hybridmf similar model.safetensors --item 260 --titles movies.dat",
        "hybridmf similar model.safetensors --user 42 -N 5 --json",
    ),
)
@click.argument("model_file", metavar="MODEL", type=existing_file)
@click.option("--item", "items", multiple=True, metavar="LABEL", help="Item to find neighbours of; may be repeated.")
@click.option("--user", "users", multiple=True, metavar="LABEL", help="User to find neighbours of; may be repeated.")
@click.option("-N", "count", type=int, default=10, show_default=True, help="Neighbours of each, the first is itself.")
@click.option("--titles", "titles_file", type=existing_file, help="Text file of item id, title, ...; may be gzipped.")
@click.option("--titles-separator", help='Between its fields: ",", "::", "|", "tab".  [default: detected]')
@click.option("--titles-encoding", help="[default: UTF-8, else latin-1]")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@output_option("Write there, not to the terminal.")
@debug_option
def command(
    model_file: str,
    items: tuple[str, ...],
    users: tuple[str, ...],
    count: int,
    titles_file: str | None,
    titles_separator: str | None,
    titles_encoding: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Find the items, or users, that are most similar to others by the cosine of their factors.

    Items and users go by the labels of the ratings file, or by positions from 0 where that had none.
    """
    if bool(items) == bool(users):
        raise click.UsageError("give either --item LABEL or --user LABEL, once or more")
    if users and titles_file:
        raise click.UsageError("--titles are those of items, and --user finds users; leave them out")
    refuse_overwriting(output, model_file, titles_file)
    if not as_json:
        refuse_ending(output, ("", ".txt", ".json"), "add --json")
        as_json = (output or "").lower().endswith(".json")
    model = load(model_file)
    side: Side = "item" if items else "user"
    names = names_of(model.item_ids, model.n_items) if items else names_of(model.user_ids, model.n_users)
    rows = find_rows(model, side, items or users)
    count = _validate.check_int("-N", count, 1)
    found, scores = model.similar_items(rows, count) if items else model.similar_users(rows, count)
    titles: dict[str, str] | None = None
    if titles_file is not None:
        titles = read_titles(titles_file, spelled_separator(titles_separator), titles_encoding)
        warn_if_strangers(titles, model, titles_file)
    answers = [
        (names[row], [(names[k], value) for k, value in zip(ids, values, strict=True) if k >= 0])
        for row, ids, values in zip(rows.tolist(), found.tolist(), scores.tolist(), strict=True)
    ]
    text = _json(side, answers, titles) if as_json else _tables(side, answers, titles)
    with_output(output, lambda stream: stream.write(text))


def _tables(side: Side, answers: list[tuple[Any, list[tuple[Any, float]]]], titles: dict[str, str] | None) -> str:
    parts = []
    for name, best in answers:
        header, align = ["rank", side, "cosine"], ">>>"
        rows = [[rank, other, f"{value:.3f}"] for rank, (other, value) in enumerate(best, 1)]
        if titles is not None:
            header, align = [*header, "title"], ">>><"
            rows = [[*row, titles.get(str(row[1]), "")] for row in rows]
        body = format_table(header, rows, align) if rows else "  no factors, so no neighbours"
        parts.append(f"{side} {name}\n{body}\n\n")
    return "".join(parts)


def _json(side: Side, answers: list[tuple[Any, list[tuple[Any, float]]]], titles: dict[str, str] | None) -> str:
    found = []
    for name, best in answers:
        entries = [{side: other, "cosine": float(f"{value:.7g}")} for other, value in best]
        if titles is not None:
            entries = [entry | {"title": titles.get(str(entry[side]))} for entry in entries]
        found.append({side: name, "similar": entries})
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
