"""Figures of the tuner."""

from __future__ import annotations

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


def test_figures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hybridmf\[plot\]"):
        tune_plots.make_figure(1, 1)
