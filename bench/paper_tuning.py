"""Tuning as in the papers: all configurations of sparse-syrk over f (Gates fig. 13), tile sizes (BALS figs. 13-14).

    python bench/paper_tuning.py                   quick: measure both, 3 minutes on an H200
    python bench/paper_tuning.py --profile full    more ranks, the papers' whole grids and more data sets; about 20
    python bench/paper_tuning.py --budget 90       that many seconds in all, the ranks' shares of "cloud" equal
    python bench/paper_tuning.py --report          no GPU: figures and tables of docs/evidence/tuning.md from the lines
    python bench/paper_tuning.py --ship            no GPU: what "cloud" has chosen goes into hybridmf/plan/tuned/

Task "cloud": for each rank, the configurations of `sparse_syrk` that satisfy the constraints of the tuner, as many as
the time allows, on users and items; those with 2 stages, 1 entry at a time and 1 group are what Gates' kernel has.
Task "tiles": BALS over heights xb and widths yb of tiles, f = 32, rows and columns as they come and by degree, in the
paper's mapping (nb = 16, dx = dy = 4; sums in local memory) and in ours (sums on chip), beside sparse-syrk on the same
data. Both check answers against float64 NumPy before anything is timed, and append to bench/results/tuning.jsonl one
JSON line for the configurations of a rank, or the tiles of a matrix: what differs between them is in columns (`pack`).
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import ROOT, median, record
from paper_common import Line, Recorder, compile_bals, read_lines

from hybridmf._version import __version__
from hybridmf.datasets import SHAPES
from hybridmf.device.cuda import Array, Device
from hybridmf.formats import BalsMatrix, reorder
from hybridmf.gpu import bals
from hybridmf.gpu.bals import BalsLocalConfig
from hybridmf.gpu.half import SegmentedRows
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.gpu.sparse_syrk import SyrkConfig, sparse_syrk
from hybridmf.gpu.tuning.trials import Sample, TimedRun, handful, random_table, row_entries
from hybridmf.gpu.tuning.tune import Tuner, event_times, stamp
from hybridmf.plan import tables
from hybridmf.plan.assemblies import BalsConfig
from hybridmf.plan.fused import table_width
from hybridmf.plan.tables import Entry, Table
from hybridmf.plots import new_figure
from hybridmf.tools import tuning_plots

FILE = "tuning"
PAGE = ROOT / "docs" / "evidence" / "tuning.md"
FIGURES = ROOT / "docs" / "evidence" / "figures"

FACTORS = 32
"""Of BALS figs. 13 and 14."""

CLOUD_RANKS = {
    "quick": (8, 16, 32, 48, 64, 80, 88, 96),
    "full": tuple(sorted({*range(8, 104, 8), *range(10, 110, 10), 128})),
}
CLOUD_SECONDS = {"quick": 12, "full": 20}
"""For each rank."""

TILE_ROWS = {"quick": (256, 768, 1280, 2816, 5376), "full": tuple(range(256, 7937, 512))}
TILE_COLS = {"quick": (144, 192, 256, 320, 384), "full": tuple(range(144, 385, 16))}
TILE_SHAPES = {"quick": ("ml-10m",), "full": ("ml-10m", "ml-20m")}

SHIPS_FROM = 1.03
"""The rule's time over that of a configuration that ships, users and items together, and how many times the rule's it
may take on either: other data have longer or shorter rows than these, and should not lose much."""

TOLERANCE = 2e-5
"""Tolerated error of a sum, relative to the largest element."""

REPEATS = 3

SEGMENT = 2048
"""Entries of a segment, as in a plan."""


# ---------------------------------------------------------------------------------------------------- data


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


class AssemblySample:
    """Rows for a published assembly in float32, and the outputs for their systems."""

    def __init__(self, device: Device, matrix: sp.csr_array, rank: int) -> None:
        self.device, self.rank, self.matrix = device, rank, matrix
        self.degrees = np.diff(matrix.indptr)
        self.table = random_table(matrix.shape[1], rank, table_width(rank, np.float32), np.float32, 1)
        self.factors = device.upload(self.table)
        self.entries = DeviceEntries(device.upload(matrix.indices), device.upload(matrix.data))
        order = np.argsort(-self.degrees, kind="stable")[: int(np.count_nonzero(self.degrees))]
        self.pieces = SegmentedRows.cut(np.asarray(matrix.indptr, dtype=np.int64), order, SEGMENT)
        self.segments = device.upload(self.pieces.segments)
        self.flops = float(matrix.nnz) * rank * (rank + 1)

    @functools.cached_property
    def outputs(self) -> tuple[Array, Array]:
        """(matrices, rhs), one slot per segment."""
        return self._empty(len(self.pieces.segments))

    @functools.cached_property
    def row_outputs(self) -> tuple[Array, Array]:
        """(matrices, rhs), one slot per row."""
        return self._empty(len(self.degrees))

    def _empty(self, n: int) -> tuple[Array, Array]:
        rank, empty = self.rank, self.device.empty
        return empty((n, rank, rank), np.float32), empty((n, rank), np.float32)

    def clear(self, outputs: tuple[Array, Array]) -> None:
        """Overwrite results of another configuration, which must not pass the check."""
        for array in outputs:
            array[...] = np.nan

    def error(self, outputs: tuple[Array, Array], by_row: bool) -> float:
        """Largest error over a few rows, relative to the largest element of each."""
        errors = []
        for row in handful(self.degrees):
            A, b = (self._download(array, row, by_row) for array in outputs)
            columns, ratings = row_entries(self.matrix, row)
            y = self.table[columns, : self.rank].astype(np.float64)
            errors += [relative(np.tril(A), np.tril(y.T @ y)), relative(b, y.T @ ratings)]
        return float(np.max(errors))  # NaN stays

    def _download(self, array: Array, row: int, by_row: bool) -> np.ndarray:
        first, last = row, row + 1
        if not by_row:
            place = int(np.flatnonzero(self.pieces.rows == row)[0])
            first, last = self.pieces.slots[place : place + 2]
        return self.device.download(array[first:last]).sum(axis=0, dtype=np.float64)


# ---------------------------------------------------------------------------------------------------- measuring


def run_clouds(recorder: Recorder, device: Device, profile: str) -> None:
    """Gates fig. 13; data in the shape of the paper's (rec-eachmovie, Table I)."""
    sample = Sample.draw(61_265, 1_623, 2_811_717)
    run = datetime.now(UTC).isoformat(timespec="seconds")
    ranks = CLOUD_RANKS[profile]
    for place, rank in enumerate(ranks):
        if not recorder.has_time(f"cloud, f = {rank}"):
            continue
        share = min(CLOUD_SECONDS[profile], recorder.seconds_left / (len(ranks) - place))
        with recorder.case(f"cloud, f = {rank}"):
            (job,) = Tuner(device, budget=share).run(["sparse_syrk"], [rank], sample=sample)
            click.echo(job.summary())
            with together(device) as lines:
                lines += [line | {"sample": sample.name, "run": run} for line in job.lines()]


def run_tiles(recorder: Recorder, device: Device, profile: str) -> None:
    """BALS figs. 13 and 14."""
    for shape in TILE_SHAPES[profile]:
        m, n, nnz = SHAPES[shape][:3]
        given = Sample.draw(m, n, nnz).user_items
        for order, matrix in (("given", given), ("by degree", reorder(given).matrix)):
            with recorder.case(f"tiles, {shape}, {order}"):
                sums = AssemblySample(device, matrix, FACTORS)
                gates = gates_gflops(device, sums)
                click.echo(f"{shape}, {order}: sparse-syrk {gates:,.0f} GFLOP/s")
                more = {"shape": shape, "order": order, "gates_gflops": gates, "nnz": len(sums.matrix.data)}
                with together(device) as lines:
                    for line in measure_tiles(recorder, device, sums, profile):
                        lines.append(line | more)
                        tile = f"{line['tile_rows']} x {line['tile_cols']}"
                        click.echo(f"  {line['variant']:5s} {tile}: {line['gflops']:,.0f}")


@contextmanager
def together(device: Device) -> Iterator[list[Line]]:
    """Measurements that are recorded as one line, even if an error or Ctrl-C comes in between."""
    lines: list[Line] = []
    try:
        yield lines
    finally:
        if lines:
            record(FILE, pack(lines) | stamp(device))


def gates_gflops(device: Device, sums: AssemblySample) -> float:
    """Rate of sparse-syrk by the rule, checked."""
    config = SyrkConfig.rule(FACTORS, 4, device.spec)
    arrays = (sums.outputs, sums.factors, sums.entries, sums.segments, config)
    run = functools.partial(sparse_syrk, device, *arrays)
    return checked_gflops(device, sums, run, by_row=False)


def checked_gflops(device: Device, sums: AssemblySample, run: Any, *, by_row: bool) -> float:
    """Useful work over the median time, after one run whose answer is checked."""
    outputs = sums.row_outputs if by_row else sums.outputs
    sums.clear(outputs)
    run()
    error = sums.error(outputs, by_row)
    if not error <= TOLERANCE:
        raise RuntimeError(f"error {error:.2e} is beyond {TOLERANCE:.0e}: not measured")
    return sums.flops / median(event_times(device, TimedRun(run), REPEATS)) / 1e6


def measure_tiles(recorder: Recorder, device: Device, sums: AssemblySample, profile: str) -> Iterator[dict[str, Any]]:
    """Both kernels over a grid of tile sizes; what cannot run is left out, what fails is named at the end."""
    grid = list(itertools.product(TILE_ROWS[profile], TILE_COLS[profile]))
    compile_bals(device, [config for tile in grid for _, config in configurations(device, *tile)])
    for rows, columns in grid:
        if not recorder.has_time(f"tiles, {rows} x {columns}"):
            continue
        started = time.perf_counter()
        matrix = BalsMatrix.from_csr(sums.matrix, rows, columns)
        more = {"build_s": time.perf_counter() - started, "reuse": matrix.nnz / max(1, len(matrix.tile_colidx))}
        tiles = bals.upload_tiles(device, matrix)
        for variant, config in configurations(device, rows, columns):
            blocks = bals.RowBlocks.of(tiles, 0, -(-len(sums.degrees) // rows))
            run = functools.partial(
                bals.bals, device, sums.row_outputs, sums.factors, sums.entries, blocks, config, tiles=tiles
            )
            with recorder.case(f"tiles, {variant}, {rows} x {columns}"):
                rate = checked_gflops(device, sums, run, by_row=True)
                yield {
                    "bench": "tiles", "variant": variant, "factors": FACTORS, "tile_rows": rows, "tile_cols": columns,
                    "gflops": rate, "config": vars(config), **more,
                }  # fmt: skip


def configurations(device: Device, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
    """The paper's mapping with nb = 16 and dx = dy = 4, and ours."""
    threads = min(1024 // 16, -(-rows // 2) * 2)
    local = BalsLocalConfig(FACTORS, 4, rows, columns, 16, 4, 4, threads)
    if local.shared_bytes <= device.spec.shared_bytes:
        yield "local", local
    try:
        yield "chip", BalsConfig.rule(FACTORS, 4, device.spec, tile_cols=columns)
    except ValueError:  # such wide tiles do not fit
        return


TASKS = {"cloud": run_clouds, "tiles": run_tiles}


# ---------------------------------------------------------------------------------------------------- lines


def pack(lines: Sequence[Line]) -> Line:
    """Many measurements as one: what all share stands once, the rest in columns; thousands of lines become readable.

    Parameters
    ----------
    lines : sequence of dict
        All with the same names; None does not occur within a nested dict, where it marks a name that a line lacks.

    Returns
    -------
    dict
        What is the same, and ``"points"``: how many there are, ``"columns"``: a list for each name, or a dict of lists.

    Raises
    ------
    ValueError
        Names differ, so that something would be lost.
    """
    for place, line in enumerate(lines):
        if line.keys() != lines[0].keys():
            raise ValueError(
                f"line {place} has the names {sorted(line)}, expected {sorted(lines[0])} as in line 0; pack them apart"
            )
    same = {name: value for name, value in lines[0].items() if all(line[name] == value for line in lines)}
    columns = {name: _column([line[name] for line in lines]) for name in lines[0] if name not in same}
    return same | {"points": len(lines), "columns": columns}


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, dict) for value in values):
        return values
    names = dict.fromkeys(name for value in values for name in value)
    return {name: [value.get(name) for value in values] for name in names}


def unpack(lines: Iterable[Line]) -> list[Line]:
    """The measurements behind lines of `pack`; other lines as they are."""
    return [one for line in lines for one in (_points(line) if "columns" in line else [line])]


def _points(line: Line) -> Iterator[Line]:
    same = {name: value for name, value in line.items() if name not in ("points", "columns")}
    for place in range(line["points"]):
        yield same | {name: _cell(column, place) for name, column in line["columns"].items()}


def _cell(column: Any, place: int) -> Any:
    if not isinstance(column, dict):
        return column[place]
    return {name: values[place] for name, values in column.items() if values[place] is not None}


# ---------------------------------------------------------------------------------------------------- the page


def latest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each measurement; of the configurations of a rank, those of the last run that had it."""
    last = {line["factors"]: line.get("run") for line in lines if line["bench"] == "tune"}
    lines = [line for line in lines if line["bench"] != "tune" or line.get("run") == last[line["factors"]]]
    names = ("bench", "variant", "kernel", "shape", "order", "factors", "tile_rows", "tile_cols")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        key = (*(str(line.get(name)) for name in names), str(line.get("config")))
        found.pop(key, None)
        found[key] = line
    return list(found.values())


def score(line: Line) -> float:
    """Milliseconds of users and items together, as `Measurement.score` has them."""
    return float(np.sqrt(line["ms"]["user"] * line["ms"]["item"]))


def cloud_table(lines: Sequence[dict[str, Any]]) -> str:
    """What was chosen at each rank, and how far the worst is from it."""
    timed = [line for line in lines if line["bench"] == "tune" and line["status"] == "timed"]
    rows = ["| f | timed | dropped | chosen (nb, kb, dx, dy, dz, stages, unroll, blocks) | users | items | worst |"]
    rows.append("| ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for f in sorted({line["factors"] for line in timed}):
        group = [line for line in timed if line["factors"] == f]
        dropped = sum(line["bench"] == "tune" and line["factors"] == f for line in lines) - len(group)
        chosen = next((line for line in group if line["winner"]), None)
        if chosen is None:
            continue
        ratio = max(map(score, group)) / score(chosen)
        rates = (f"{chosen['gflops'][side]:,.0f}" for side in ("user", "item"))
        text = tuning_plots.config_text(chosen["config"])
        rows.append(f"| {f} | {len(group)} | {dropped} | {text} | {' | '.join(rates)} | {ratio:.1f} x |")
    return "\n".join(rows)


def ship_table(lines: Sequence[Line]) -> str:
    """The rule's time over that of what was chosen, and whether that ships."""
    rows = ["| f | users | items | together | |", "| ---: | ---: | ---: | ---: | --- |"]
    for group in sorted(by_facts(lines), key=lambda group: int(group[0]["factors"])):
        rule, winner = rule_and_winner(group)
        if rule is not None and winner is not None:
            ratios = [
                *(rule["ms"][side] / winner["ms"][side] for side in ("user", "item")),
                score(rule) / score(winner),
            ]
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            rows.append(f"| {group[0]['factors']} | {cells} | {objection(group) or 'ships'} |")
    return "\n".join(rows)


def tile_table(lines: Sequence[dict[str, Any]]) -> str:
    """The best and the worst tile of each heat map, beside sparse-syrk."""
    tiles = [line for line in lines if line["bench"] == "tiles"]
    rows = ["| data | kernel | order | best (xb, yb) | GFLOP/s | worst (xb, yb) | GFLOP/s | sparse-syrk |"]
    rows.append("| --- | --- | --- | --- | ---: | --- | ---: | ---: |")
    keys = dict.fromkeys((line["shape"], line["variant"], line["order"]) for line in tiles)
    for shape, variant, order in keys:
        group = [line for line in tiles if (line["shape"], line["variant"], line["order"]) == (shape, variant, order)]
        ends = [choose(group, key=lambda line: line["gflops"]) for choose in (max, min)]
        cells = (f"({end['tile_rows']}, {end['tile_cols']}) | {end['gflops']:,.0f}" for end in ends)
        name = {"local": "the paper's mapping", "chip": "sums on chip"}[variant]
        rows.append(f"| {shape} | {name} | {order} | {' | '.join(cells)} | {ends[0]['gates_gflops']:,.0f} |")
    return "\n".join(rows)


def filled(page: str, name: str, text: str) -> str:
    """The page with the text between the two comments of a name.

    Raises
    ------
    ValueError
        The page has no such place.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin} and {end} once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def figure_links(paths: Sequence[Path]) -> str:
    """Images of the page."""
    return "\n\n".join(f"![{path.stem}](figures/{path.name})" for path in paths)


def small(figure: Any) -> Any:
    """The figure with what lies in the background as pixels: a cloud has a thousand gray lines."""
    figure.set_dpi(150)
    for axes in figure.axes:
        axes.set_rasterization_zorder(1.5)  # gray lines have 1, named ones 2 and more
    return figure


def heat_maps(lines: Iterable[Line]) -> dict[str, Any]:
    """GFLOP/s over height and width of BALS tiles, one figure for each data set, kernel and rank (BALS figs. 13, 14).

    Rows and columns as they come and by degree stand beside each other on one scale; what Gates' kernel reaches on the
    same data is named.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("bench") == "tiles":
            groups.setdefault(f"tiles-{line['variant']}-{line['shape']}-{line['factors']}", []).append(line)
    return {name: _heat_map(name, group) for name, group in groups.items()}


def _heat_map(name: str, lines: list[Line]) -> Any:
    orders = list(dict.fromkeys(line["order"] for line in lines))
    rates = [line["gflops"] for line in lines]
    figure = new_figure(5.2 * len(orders), 4.2)
    image = None
    for axes, order in zip(np.atleast_1d(figure.subplots(1, len(orders))), orders, strict=True):
        group = [line for line in lines if line["order"] == order]
        heights, widths, grid = as_grid(group)
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap="jet", vmin=min(rates), vmax=max(rates))
        axes.set_xticks(range(len(heights)), [str(value) for value in heights], rotation=90, fontsize=6)
        axes.set_yticks(range(len(widths)), [str(value) for value in widths], fontsize=6)
        gates = group[0].get("gates_gflops")
        beside = f"; Gates' kernel {gates:,.0f}" if gates else ""
        axes.set(title=f"{order}: best {np.nanmax(grid):,.0f}{beside}", xlabel="xb (rows)", ylabel="yb (columns)")
    figure.colorbar(image, ax=figure.axes, label="GFLOP/s")
    figure.suptitle(name)
    return figure


def as_grid(lines: Sequence[Line]) -> tuple[list[int], list[int], np.ndarray]:
    """(heights, widths, GFLOP/s of shape (n_widths, n_heights)); NaN where nothing was measured."""
    heights = sorted({line["tile_rows"] for line in lines})
    widths = sorted({line["tile_cols"] for line in lines})
    grid = np.full((len(widths), len(heights)), np.nan)
    for line in lines:
        grid[widths.index(line["tile_cols"]), heights.index(line["tile_rows"])] = line["gflops"]
    return heights, widths, grid


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Draw all figures and put all tables into the page."""
    lines = latest([line for line in lines if line.get("kernel") in (None, "sparse_syrk")])
    page = PAGE.read_text(encoding="utf-8")
    for name, table, figures in (
        ("cloud", cloud_table, tuning_plots.clouds),
        ("tiles", tile_table, heat_maps),
    ):
        drawn = tuning_plots.save_all({name: small(figure) for name, figure in figures(lines).items()}, FIGURES)
        machine = sorted({line["gpu"]["name"] for line in lines})
        measured = f"Measured on {', '.join(machine)}.\n\n{table(lines)}\n\n{figure_links(drawn)}"
        page = filled(page, name, measured if drawn else "Not measured yet.")
    page = filled(page, "ships", ship_table(lines) if by_facts(lines) else "Not measured yet.")
    PAGE.write_text(page, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- what ships


def ship(lines: Sequence[Line]) -> None:
    """Put the configurations that a run has chosen into the tables that ship, and say so for each rank.

    Raises
    ------
    ValueError
        There are no such lines, no table ships for their GPU, or they are of another version.
    """
    groups = by_facts(lines)
    if not groups:
        raise ValueError(
            f'{FILE}.jsonl has no lines of task "cloud", from which tables are made; measure on a GPU: '
            "python bench/paper_tuning.py --task cloud"
        )
    found: dict[Path, Table] = {}
    for group in groups:
        path, table = shipped_table(group[0])
        reason = objection(group)
        click.echo(f"f = {group[0]['factors']}: {reason or 'ships'}")
        if not reason:
            found[path] = Table(table.gpu, (*(found[path].entries if path in found else ()), entry_of(group)))
    for path, table in found.items():
        tables.store(table, path)
        click.echo(f"{path}: {len(tables.read_table(path).entries)} entries")


def by_facts(lines: Sequence[Line]) -> list[list[Line]]:
    """The configurations of each rank, as the last run had them."""
    groups: dict[str, list[Line]] = {}
    for line in latest(lines):
        if line["bench"] == "tune":
            groups.setdefault(json.dumps([line["gpu"]["name"], line["kernel"], line["facts"]]), []).append(line)
    return list(groups.values())


def shipped_table(line: Line) -> tuple[Path, Table]:
    """The table that ships for the GPU of a line, and its file.

    Raises
    ------
    ValueError
        There is none, or the line is of another version, whose kernels may have been others.
    """
    gpu, version = line["gpu"], line["versions"]["hybridmf"]
    if version != __version__:
        raise ValueError(
            f"{FILE}.jsonl was measured by hybridmf {version}, this is {__version__}, whose kernels may be others; "
            "measure again: python bench/paper_tuning.py --task cloud"
        )
    for path in sorted(tables.SHIPPED.glob("*.json")):
        table = tables.read_table(path)
        kind = {"name": table.gpu.name, "capability": list(table.gpu.capability)}
        kind["multiprocessors"] = table.gpu.multiprocessors
        if kind.items() <= gpu.items():
            return path, table
    raise ValueError(
        f"no table in {tables.SHIPPED} is of {gpu['name']} with {gpu['multiprocessors']} multiprocessors, as the lines "
        f"are; begin one there: hybridmf tune-kernels --output {tables.SHIPPED}/FILE.json"
    )


def objection(group: Sequence[Line]) -> str:
    """Why what was chosen among the configurations of a rank does not ship; nothing where it does."""
    rule, winner = rule_and_winner(group)
    if rule is None or winner is None:
        return "stays out: the rule's configuration was not timed, or none was chosen"
    if winner is rule:
        return "the rule's is the best"
    if score(rule) < SHIPS_FROM * score(winner):
        return f"stays out: the rule's takes {score(rule) / score(winner) - 1:.1%} longer, wanted {SHIPS_FROM - 1:.0%}"
    worst, side = max((winner["ms"][side] / rule["ms"][side], side) for side in rule["ms"])
    if worst > SHIPS_FROM:
        return f"stays out: takes {worst - 1:.1%} longer than the rule's for the {side}s, allowed {SHIPS_FROM - 1:.0%}"
    return ""


def rule_and_winner(group: Sequence[Line]) -> tuple[Line | None, Line | None]:
    """The lines of the rule's configuration and of the chosen one; None for what was not timed."""
    timed = [line for line in group if line["status"] == "timed"]
    return next((line for line in timed if line["rule"]), None), next((line for line in timed if line["winner"]), None)


def entry_of(group: Sequence[Line]) -> Entry:
    """What a table says of the configurations of a rank without an `objection`, as `Job.entry` does."""
    rule, winner = rule_and_winner(group)
    assert rule is not None and winner is not None
    timed = sum(line["status"] == "timed" for line in group)
    rivals = tuple(line["config"] for line in group if line["known"])
    times = round(score(winner), 5), round(score(rule), 5)
    return Entry(winner["kernel"], winner["facts"], winner["config"], *times, timed, rivals)


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option("--task", type=click.Choice(list(TASKS)), multiple=True, help="Default: both.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds after which no case begins.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing; figures and tables of the page.")
@click.option("--ship", "only_ship", is_flag=True, help="Measure nothing; winners go into the tables that ship.")
def main(profile: str, task: tuple[str, ...], budget: float | None, only_report: bool, only_ship: bool) -> None:
    if only_report or only_ship:
        lines = unpack(read_lines(FILE))
        if only_report:
            report(lines)
        if only_ship:
            try:
                ship(lines)
            except ValueError as error:
                raise click.ClickException(str(error)) from error
        return
    recorder, device = Recorder.begin(FILE, "cuda", budget)
    click.echo(str(device.spec))
    for name in task or TASKS:
        TASKS[name](recorder, device, profile)
    recorder.finish()


if __name__ == "__main__":
    main()
