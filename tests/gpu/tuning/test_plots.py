"""Figures of the tuner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridmf.gpu.tuning import plots as tune_plots
from support.tuning import cloud_line

pytestmark = pytest.mark.usefixtures("no_tables")


def test_clouds_name_what_is_best_at_some_rank() -> None:
    lines = [cloud_line(f, nb, 100.0 - abs(f - nb)) for f in (8, 16, 24) for nb in (8, 16, 32)]
    assert tune_plots.best_at_some_rank(lines, "user") == ["(8, 8)", "(16, 8)"]
    pytest.importorskip("matplotlib")
    spilled = cloud_line(8, 99, 1e9, status="spills")
    figures = tune_plots.clouds([*lines, spilled, {"bench": "tiles"}, cloud_line(8, 8, 1.0, kernel="mo_als")])
    assert list(figures) == ["sparse_syrk-itemsize-4", "mo_als-itemsize-4"]
    user, item = figures["sparse_syrk-itemsize-4"].axes
    assert (user.get_title(), item.get_title()) == ("user", "item")
    assert len(user.lines) == 3 + 2  # each configuration in gray, the best in color


def test_heat_maps_have_a_cell_for_each_tile(tmp_path: Path) -> None:
    lines = [
        {"bench": "tiles", "variant": "chip", "shape": "ml-1m", "factors": 32, "order": order, "gates_gflops": 9.0,
         "tile_rows": rows, "tile_cols": columns, "gflops": float(rows + columns)}
        for order in ("given", "by degree") for rows in (256, 768) for columns in (144, 160, 176)
        if (rows, columns) != (768, 160)
    ]  # fmt: skip
    heights, widths, grid = tune_plots.as_grid(lines)
    assert (heights, widths) == ([256, 768], [144, 160, 176])
    np.testing.assert_array_equal(grid, [[400, 912], [416, np.nan], [432, 944]])
    pytest.importorskip("matplotlib")
    paths = tune_plots.save_all(tune_plots.heat_maps(lines), tmp_path / "figures")
    assert [path.name for path in paths] == ["tiles-chip-ml-1m-32.svg"]
    assert paths[0].read_text() == tune_plots.save_all(tune_plots.heat_maps(lines), tmp_path)[0].read_text()


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    for text in ('{"a": 1}\nno', '{"a": 1}\n[2]'):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match="line 2"):
            tune_plots.read_lines(tmp_path / "x.jsonl")


def test_figures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hybridmf\[plot\]"):
        tune_plots.make_figure(1, 1)
