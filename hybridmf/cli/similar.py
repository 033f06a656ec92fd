"""``hybridmf similar``: items or users whose factors are close to those of others."""

from __future__ import annotations

import json

import click

from ..core.objective import Side
from ..core.validate import check_int
from ..model.load import load
from .options import Options, make_command, output_option, refuse_ending, refuse_overwriting
from .recommend import find_rows
from .report import answer_entries, answer_table, names_of, with_output
from .sources import existing_file
from .titles import titles_of, titles_options


@make_command(
    "similar",
    "hybridmf similar model.safetensors --item 260 --titles movies.dat",
    "hybridmf similar model.safetensors --user 42 -N 5 --json",
)
@click.argument("model_file", metavar="MODEL", type=existing_file)
@click.option("--item", "items", multiple=True, metavar="LABEL", help="Item to find neighbours of; may be repeated.")
@click.option("--user", "users", multiple=True, metavar="LABEL", help="User to find neighbours of; may be repeated.")
@click.option("-N", "count", type=int, default=10, show_default=True, help="Neighbours of each, the first is itself.")
@titles_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@output_option("Write there, not to the terminal.")
def command(options: Options) -> None:
    """Find the items, or users, that are most similar to others by the cosine of their factors.

    Items and users go by the labels of the ratings file, or by positions from 0 where that had none.
    """
    items, users, output, as_json = options.items, options.users, options.output, options.as_json
    if bool(items) == bool(users):
        raise click.UsageError("give either --item LABEL or --user LABEL, once or more")
    if users and options.titles_file:
        raise click.UsageError("--titles are those of items, and --user finds users; leave them out")
    refuse_overwriting(output, options.model_file, options.titles_file)
    if not as_json:
        refuse_ending(output, ("", ".txt", ".json"), "add --json")
        as_json = (output or "").lower().endswith(".json")
    model = load(options.model_file)
    side: Side = "item" if items else "user"
    names, rows = names_of(model, side), find_rows(model, side, items or users)
    find = model.similar_items if items else model.similar_users
    found, scores = find(rows, check_int("-N", options.count, 1))
    titles = titles_of(model, options)
    answers = [
        (names[row], [(names[k], value) for k, value in zip(ids, values, strict=True) if k >= 0])
        for row, ids, values in zip(rows.tolist(), found.tolist(), scores.tolist(), strict=True)
    ]
    columns = (side, "cosine")
    if as_json:
        lists = [{side: each[0], "similar": answer_entries(each, columns, titles)} for each in answers]
        text = json.dumps(lists, ensure_ascii=False, indent=2) + "\n"
    else:
        text = "".join(answer_table(each, side, columns, titles, "  no factors, so no neighbours") for each in answers)
    with_output(output, lambda stream: stream.write(text))
