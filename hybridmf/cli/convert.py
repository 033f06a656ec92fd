"""``hybridmf convert``: ratings in another format, and statistics of BALS tiles."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
from typing import Any, BinaryIO

import click
import numpy as np
import scipy.io
import scipy.sparse as sp

from .. import formats
from ..core.files import write_atomically
from ..core.table import format_table
from ..data.convert import convert as convert_to_store
from ..plots import occupancy, save
from ..ratings import Ratings
from . import sources
from .options import Options, check_folder, make_command, plot_option, refuse_overwriting
from .report import facts_text, file_size, names_of, ratings_facts, with_output


@make_command(
    "convert",
    "hybridmf convert ratings.dat ratings.npz",
    "hybridmf convert ratings.csv.gz ratings.mtx",
    "hybridmf convert ratings.npz --to bals-stats --tile-rows 512",
    "hybridmf convert ratings.csv.gz store/ --memory-limit 4GB",
    "hybridmf convert store/ finer/ --slab-bytes 4MiB",
)
@click.argument("paths", metavar="RATINGS... [OUT]", nargs=-1, required=True)
@click.option(
    "--to", "target", type=click.Choice(["npz", "mtx", "csv", "bals-stats", "store"]),
    help="Format of OUT; bals-stats writes the statistics as JSON.  [default: by the ending of OUT; store: a folder]",
)  # fmt: skip
@click.option("--slab-bytes", default="64MiB", show_default=True, help="Size of a slab of a store.")
@click.option("--memory-limit", default="1GiB", show_default=True, help="Memory for a conversion to a store.")
@click.option("--overwrite", is_flag=True, help="Replace an existing store, or the file OUT after several RATINGS.")
@click.option("--tile-rows", type=int, default=256, show_default=True, help="Height of a BALS tile.")
@click.option("--tile-cols", type=int, default=192, show_default=True, help="Width of a BALS tile.")
@click.option("--num-threads", type=int, help="[default: all cores]")
@plot_option("Picture of the BALS tiles before and after reordering")
@sources.ratings_options
@click.option("--quiet", is_flag=True, help="No statistics.")
def command(options: Options) -> None:
    """Convert ratings to another format and print statistics.

    RATINGS is a file, as for "hybridmf fit", or a store. A folder as OUT becomes a store, from which ALS is fitted slab
    by slab: text, MatrixMarket and Parquet files, and stores, may be larger than memory. npz and csv keep labels and
    times, npz weights too; a store keeps labels, and no times; mtx has positions only (its rows are the users in
    sorted order). The statistics show the savings of BALS tiles on these ratings, as read and reordered by degree.
    Several files, a pattern in quotation marks ("logs/*.csv") and a folder of Parquet files become one.
    """
    quiet, plot, tiles = options.quiet, options.plot, (options.tile_rows, options.tile_cols)
    ratings_file, out = _source_and_out(options)
    for output in (out, plot):
        refuse_overwriting(output, *sources.files_of(ratings_file))
    target = options.target or _format_of(out)
    if out is None and target != "bals-stats":
        raise click.UsageError("give a file OUT to write, or --to bals-stats for statistics only")
    if plot is not None and target == "store":
        raise click.UsageError("--plot needs the ratings in memory, and a conversion to a store does not; leave it out")
    if target == "store":
        assert out is not None
        arguments = sources.reading_arguments() | {
            name: getattr(options, name) for name in ("slab_bytes", "memory_limit", "overwrite")
        }
        source = sources.open_store(ratings_file) if sources.is_store(ratings_file) else ratings_file
        del arguments["timestamp"]  # a store has no times
        store = convert_to_store(source, out, **arguments)
        if not quiet:
            click.echo(facts_text(sources.column_facts(ratings_file) | ratings_facts(store)))
        return
    if out is not None and os.path.isdir(out):
        raise click.UsageError(f"{out} is a folder, which can only become a store; give the name of a file")
    ratings = sources.read_ratings(ratings_file, show_progress=not quiet)
    statistics = {}
    if not quiet or target == "bals-stats":
        statistics = bals_statistics(ratings.user_items, *tiles, options.num_threads)
    if plot is not None:
        save(occupancy(ratings, *tiles)[0].figure, plot)
    if out is not None:
        lost = {"csv": ["weights"], "mtx": ["timestamps", "weights"]}.get(target, [])
        if lost := [name for name in lost if getattr(ratings, name) is not None]:
            click.echo(f"{' and '.join(lost).capitalize()} are not written to {target}; npz keeps them.", err=True)
        _write_ratings(ratings, out, target, statistics)
    if not quiet:
        click.echo(facts_text(sources.column_facts(ratings_file) | ratings_facts(ratings)))
        click.echo(f"\nBALS tiles of {tiles[0]} x {tiles[1]}\n\n{_bals_table(statistics)}")
        if out is not None:
            click.echo(f"\nWrote {out} ({file_size(out)}).")


def _source_and_out(options: Options) -> tuple[sources.Source, str | None]:
    """RATINGS and OUT, the last path, unless there is one only."""
    paths = options.paths
    context = click.get_current_context()
    given, out = (paths[:-1], paths[-1]) if len(paths) > 1 else (paths, None)
    if len(given) > 1 and out is not None and os.path.isfile(out) and not options.overwrite:  # "convert logs/*.csv"
        raise click.UsageError(
            f"the last path is the output, and {out} exists; name another after the {len(given)} files, or pass "
            "--overwrite"
        )
    parameter = next(each for each in context.command.params if each.name == "paths")
    if out is not None:
        click.Path(writable=True).convert(out, parameter, context)
        check_folder(context, parameter, out.rstrip("/" + os.sep))  # it may be a folder itself
    return sources.one_source(tuple(sources.ratings_path.convert(path, parameter, context) for path in given)), out


def _format_of(out: str | None) -> str:
    if out is None:
        return ""
    if out.endswith(("/", os.sep)) or os.path.isdir(out):
        return "store"
    endings = {".npz": "npz", ".mtx": "mtx", ".mtx.gz": "mtx", ".csv": "csv", ".csv.gz": "csv", ".json": "bals-stats"}
    for ending, target in endings.items():
        if out.lower().endswith(ending):
            return target
    raise click.UsageError(f"the ending of {out} selects no format; choose one of {', '.join(endings)}, or give --to")


def bals_statistics(
    matrix: sp.csr_array, tile_rows: int, tile_cols: int, num_threads: int | None
) -> dict[str, dict[str, float]]:
    """`BalsMatrix.statistics` of the matrix as it is and with rows and columns sorted by degree."""
    reordered = formats.reorder(matrix, num_threads=num_threads).matrix
    return {
        name: formats.BalsMatrix.from_csr(each, tile_rows, tile_cols, num_threads).statistics()
        for name, each in (("as read", matrix), ("reordered", reordered))
    }


def _bals_table(statistics: dict[str, dict[str, float]]) -> str:
    texts = {
        "tiles": "{tiles:,}",
        "vacant tiles": "{vacant_tiles:,} ({vacant_tile_share:.1%})",
        "segments (rows of tiles)": "{segments:,}",
        "vacant segments in other tiles": "{vacant_segments:,} ({vacant_segment_share:.1%})",
        "reuse factor (ratings per loaded column)": "{reuse_factor:.2f}",
    }
    rows = [[name, *(text.format(**values) for values in statistics.values())] for name, text in texts.items()]
    for layout in ("BALS", "CSR"):
        sizes = (values[f"{layout.lower()}_bytes"] / 1e6 for values in statistics.values())
        rows.append([f"megabytes as {layout}", *(f"{size:,.1f}" for size in sizes)])
    return format_table(["", *statistics], rows, "<>>")


def _write_ratings(ratings: Ratings, out: str, target: str, statistics: dict[str, dict[str, float]]) -> None:
    if target == "npz":
        ratings.save(out)
    elif target == "bals-stats":
        with_output(out, lambda stream: stream.write(json.dumps(statistics, indent=2) + "\n"))
    else:
        write_atomically(out, lambda stream: _write_text(stream, out, target, ratings))


def _write_text(stream: BinaryIO, out: str, target: str, ratings: Ratings) -> None:
    packed: Any = contextlib.nullcontext(stream)
    if out.lower().endswith(".gz"):
        packed = gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0)  # the same bytes for the same data
    with packed as opened:
        if target == "csv":
            _write_csv_ratings(opened, ratings)
        else:
            scipy.io.mmwrite(opened, ratings.user_items, field="real", precision=9)


def _write_csv_ratings(stream: BinaryIO, ratings: Ratings) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    times = ratings.timestamps
    if times is not None and times.dtype.kind == "M":
        times = np.datetime_as_string(times)
    text.write("user,item,rating\n" if times is None else "user,item,rating,timestamp\n")
    # Quoting all text keeps a label such as "#1 fan" from being read as a comment; 9 digits keep a float32.
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    users, items = names_of(ratings, "user"), names_of(ratings, "item")
    matrix = ratings.user_items
    for position, user in enumerate(users):
        row = slice(matrix.indptr[position], matrix.indptr[position + 1])
        names = map(items.__getitem__, matrix.indices[row].tolist())
        values = (int(each) if each.is_integer() else float(f"{each:.9g}") for each in matrix.data[row].tolist())
        columns = [names, values] + ([] if times is None else [times[row].tolist()])
        writer.writerows((user, *fields) for fields in zip(*columns, strict=True))
    text.flush()
    text.detach()
