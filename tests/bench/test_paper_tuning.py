"""The page about tuning: recorded, rendered and shipped by bench/paper_tuning.py."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hybridmf._version import __version__
from hybridmf.gpu.tuning import tune
from hybridmf.gpu.tuning.trials import Sample
from hybridmf.plan import tables
from hybridmf.plan.tables import Entry
from hybridmf.tools import tuning_plots
from support.checkout import ROOT
from support.devices import serve_cuda
from support.tuning import H200, OTHER, SAMPLE, SYRK, cloud_line, entry, table

pytestmark = pytest.mark.usefixtures("no_tables")

# ---------------------------------------------------------------------------------------------------- evidence


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/paper_tuning.py with its results and page elsewhere."""
    folder = ROOT / "bench"
    if not (folder / "paper_tuning.py").is_file():
        pytest.skip("bench/ is not here")
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("paper_tuning")
    page = tmp_path / "tuning.md"
    page.write_text(module.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(module, "FIGURES", tmp_path / "figures")
    return module


def test_heat_maps_have_a_cell_for_each_tile(paper: Any, tmp_path: Path) -> None:
    lines = [
        {"bench": "tiles", "variant": "chip", "shape": "ml-1m", "factors": 32, "order": order, "gates_gflops": 9.0,
         "tile_rows": rows, "tile_cols": columns, "gflops": float(rows + columns)}
        for order in ("given", "by degree") for rows in (256, 768) for columns in (144, 160, 176)
        if (rows, columns) != (768, 160)
    ]  # fmt: skip
    heights, widths, grid = paper.as_grid(lines)
    assert (heights, widths) == ([256, 768], [144, 160, 176])
    np.testing.assert_array_equal(grid, [[400, 912], [416, np.nan], [432, 944]])
    pytest.importorskip("matplotlib")
    paths = tuning_plots.save_all(paper.heat_maps(lines), tmp_path / "figures")
    assert [path.name for path in paths] == ["tiles-chip-ml-1m-32.svg"]
    assert paths[0].read_text() == tuning_plots.save_all(paper.heat_maps(lines), tmp_path)[0].read_text()


def test_the_page_is_made_from_the_lines(paper: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpu = {"gpu": {"name": "Some GPU"}, "rule": False}
    tile = {"bench": "tiles", "shape": "ml-10m", "factors": 32, "order": "given", "gates_gflops": 500.0, **gpu}
    tile |= {"tile_cols": 144}
    lines = [
        cloud_line(8, 24, 900.0, True, ms={"user": 1.0, "item": 1.0}, run="before", **gpu),
        cloud_line(8, 8, 200.0, True, ms={"user": 1.0, "item": 4.0}, **gpu),
        cloud_line(8, 16, 1.0, ms={"user": 8.0, "item": 32.0}, **(gpu | {"rule": True})),
        cloud_line(8, 24, 1.0, status="spills", **gpu),
        cloud_line(8, 8, 150.0, kernel="mo_als", ms={"user": 9.0, "item": 9.0}, **gpu),
        tile | {"variant": "chip", "tile_rows": 256, "gflops": 1.0},  # measured again in the last line
        tile | {"variant": "chip", "tile_rows": 768, "gflops": 800.0},
        tile | {"variant": "chip", "tile_rows": 256, "gflops": 900.0},
    ]
    paper.report(lines)
    text = paper.PAGE.read_text(encoding="utf-8")
    assert "| 8 | 2 | 1 | (8, 8) | 200 | 400 | 8.0 x |" in text
    assert "| 8 | 8.00 | 8.00 | 8.00 | ships |" in text
    assert "| ml-10m | sums on chip | given | (256, 144) | 900 | (768, 144) | 800 | 500 |" in text
    assert text.count("Measured on Some GPU.") == 2 and "Not measured" not in text
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "sparse_syrk-itemsize-4",
        "tiles-chip-ml-10m-32",
    }
    cloud = (tmp_path / "figures" / "sparse_syrk-itemsize-4.svg").read_text()
    assert cloud.count("<image") == 2  # of each part: what lies in the background is pixels
    paper.report([])
    assert paper.PAGE.read_text(encoding="utf-8").count("Not measured yet.") == 3
    with pytest.raises(ValueError, match="once"):
        paper.filled("no place", "cloud", "text")


def test_packed_lines_are_the_lines(paper: Any) -> None:
    lines = [
        cloud_line(8, 8, 200.0, True, ms={"user": 0.1, "item": 4.0}, error=1e-7, reason=""),
        cloud_line(8, 16, 100.0, ms={"user": 0.3, "item": 8.0}, error=None, reason=""),
        cloud_line(8, 24, 1.0, status="spills", ms={}, error=None, reason=""),
    ]
    packed = json.loads(json.dumps(paper.pack(lines)))
    assert packed["points"] == 3 and packed["facts"] == lines[0]["facts"] and "factors" not in packed["columns"]
    assert packed["columns"]["ms"] == {"user": [0.1, 0.3, None], "item": [4.0, 8.0, None]}
    alone = {"bench": "tiles"}
    assert paper.unpack([alone, packed]) == [alone, *lines]
    for one in (lines[:1], lines[1:]):
        assert paper.unpack([paper.pack(one)]) == one
    with pytest.raises(ValueError, match=r"line 1 has the names .*, expected .* as in line 0; pack them apart"):
        paper.pack([lines[0], lines[0] | {"more": 1}])


GPU_LINE: dict[str, Any] = {
    "gpu": {"name": H200.name, "capability": [9, 0], "multiprocessors": 132, "cuda": 13020},
    "versions": {"hybridmf": __version__},
    "run": "now",
    "known": False,
}


def rank_lines(rank: int, user: float, item: float, **changes: Any) -> list[dict[str, Any]]:
    """What a run says of a rank: the rule's configuration, 1 ms a side, a winner, one that spills."""
    common = GPU_LINE | {"facts": {"rank": rank, "itemsize": 4}} | changes
    return [
        cloud_line(rank, 64, 1.0, rule=True, config=OTHER, ms={"user": 1.0, "item": 1.0}, **common),
        cloud_line(rank, 32, 1.0, True, rule=False, config=SYRK, ms={"user": user, "item": item}, **common),
        cloud_line(rank, 24, 1.0, rule=False, status="spills", ms={}, **common),
    ]


def test_winners_of_a_run_ship(paper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tables.SHIPPED / "h200.json"
    before = entry(facts={"rank": 8, "itemsize": 4}, **OTHER)
    beaten = entry(facts={"rank": 16, "itemsize": 4}, **OTHER)  # gains 1.5, and is not part of the run below
    tables.store(table([before, beaten]), path)
    tables.store(table([], replace(H200, name="NVIDIA H20", multiprocessors=78)), tables.SHIPPED / "a.json")
    none = rank_lines(56, 0.5, 0.5)
    for line in none:
        line["winner"] = False
    own = rank_lines(32, 1.5, 1.5)  # the rule's is best
    own[0]["winner"], own[1]["winner"] = True, False
    lines = [
        *rank_lines(24, 0.1, 0.1, run="before"),  # measured again below: not so much better
        *rank_lines(8, 0.8, 0.45, known=True),
        *rank_lines(16, 0.9, 0.9),
        *rank_lines(24, 0.98, 0.98),
        *own,
        *rank_lines(40, 0.5, 1.02),
        *rank_lines(64, 0.5, 1.04),
        *none,
        {"bench": "tiles", "variant": "chip"},
    ]
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    (tmp_path / "tuning.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for _ in range(2):  # again: the same
        done = CliRunner().invoke(paper.main, ["--ship"], catch_exceptions=False)
        assert done.exit_code == 0
        assert done.output.splitlines() == [
            "f = 8: ships",
            "f = 16: ships",
            "f = 24: stays out: the rule's takes 2.0% longer, wanted 3%",
            "f = 32: the rule's is the best",
            "f = 40: ships",
            "f = 64: stays out: takes 4.0% longer than the rule's for the items, allowed 3%",
            "f = 56: stays out: the rule's configuration was not timed, or none was chosen",
            f"{path}: 3 entries",
        ]
        kept = {one.facts["rank"]: one for one in tables.read_table(path).entries}
        rivals = (OTHER, SYRK, {"nb": 24, "kb": 8})
        assert kept[8] == Entry("sparse_syrk", {"rank": 8, "itemsize": 4}, SYRK, 0.6, 1.0, 2, rivals)
        assert kept[16] == beaten
        assert (kept[40].config, kept[40].ms, kept[40].rivals) == (SYRK, 0.71414, ())
    assert not tables.read_table(tables.SHIPPED / "a.json").entries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": "tiles"}, 'has no lines of task "cloud".*measure on a GPU'),
        ({"versions": {"hybridmf": "0.0.1"}}, "measured by hybridmf 0.0.1, this is .*measure again"),
        ({"gpu": GPU_LINE["gpu"] | {"multiprocessors": 99}}, "no table in .* of NVIDIA H200 with 99 .*--output"),
    ],
)
def test_tables_that_cannot_ship_are_refused(
    paper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tables.store(table([]), tables.SHIPPED / "h200.json")
    with pytest.raises(ValueError, match=message):
        paper.ship(rank_lines(8, 0.5, 0.5, **changes))
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    done = CliRunner().invoke(paper.main, ["--ship"])
    assert done.exit_code == 1 and "Error: tuning.jsonl has no lines" in done.output


def test_measurements_before_an_interruption_are_recorded(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(paper, "record", lambda file, line: kept.append((file, line)))
    monkeypatch.setattr(paper, "stamp", lambda device: {"gpu": device})

    def interrupted() -> None:
        with paper.together("some") as lines:
            lines += [{"tile_rows": 256, "gflops": 1.0}, {"tile_rows": 768, "gflops": 1.0}]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with paper.together("some"):
        pass  # nothing was measured: nothing is recorded
    assert kept == [("tuning", {"gflops": 1.0, "points": 2, "columns": {"tile_rows": [256, 768]}, "gpu": "some"})]


def test_tiles_are_measured_and_checked(paper: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_papers(paper, monkeypatch)
    recorder = paper.Recorder("tuning")
    sums = paper.AssemblySample(device, SAMPLE.user_items, 5)
    assert paper.gates_gflops(device, sums) > 0
    lines = list(paper.measure_tiles(recorder, device, sums, "quick"))
    assert [(line["variant"], line["tile_rows"], line["tile_cols"]) for line in lines] == [
        ("local", 20, 16),
        ("chip", 20, 16),
    ]
    json.dumps(lines)
    monkeypatch.setattr(paper, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="not measured"):
        paper.gates_gflops(device, sums)
    assert not list(paper.measure_tiles(recorder, device, sums, "quick"))
    assert [text.split(":")[0] for text in recorder.problems] == ["tiles, local, 20 x 16", "tiles, chip, 20 x 16"]


def tiny_papers(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tasks in a few seconds."""
    monkeypatch.setattr(paper, "FACTORS", 5)
    tiny = {"TILE_ROWS": (20,), "TILE_COLS": (16,), "TILE_SHAPES": ("ml-1m",), "CLOUD_RANKS": (5,)}
    for name, values in (tiny | {"CLOUD_SECONDS": 3}).items():
        monkeypatch.setattr(paper, name, {"quick": values})


def test_the_script_measures_both_and_the_page_takes_its_lines(
    paper: Any, undrawn: None, device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_cuda(device, monkeypatch)
    tiny_papers(paper, monkeypatch)
    monkeypatch.setattr(Sample, "draw", lambda *_: SAMPLE)
    monkeypatch.setattr(paper, "Tuner", functools.partial(tune.Tuner, most=1))
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    paper.report([])
    done = CliRunner().invoke(paper.main, ["--budget", "600"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    packed = [json.loads(text) for text in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert [line["bench"] for line in packed] == ["tune", "tiles", "tiles"]
    lines = paper.unpack(packed)
    assert {line["factors"] for line in lines if line["bench"] == "tune"} == {5}
    assert [line["order"] for line in lines if line["bench"] == "tiles"] == ["given"] * 2 + ["by degree"] * 2
    assert "Not measured yet." in paper.PAGE.read_text(encoding="utf-8")  # measuring leaves the page alone
    done = CliRunner().invoke(paper.main, ["--report"], catch_exceptions=False)
    assert done.exit_code == 0 and "Not measured yet." not in paper.PAGE.read_text(encoding="utf-8")
    done = CliRunner().invoke(paper.main, ["--budget", "1e-9", "--task", "cloud"])
    assert done.exit_code == 1 and "cloud, f = 5: left out" in done.output
