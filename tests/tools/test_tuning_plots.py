"""Figures of the tuner."""

from __future__ import annotations

import pytest

from hybridmf.tools import tuning_plots
from support.tuning import cloud_line

pytestmark = pytest.mark.usefixtures("no_tables")


def test_clouds_name_what_is_best_at_some_rank() -> None:
    lines = [cloud_line(f, nb, 100.0 - abs(f - nb)) for f in (8, 16, 24) for nb in (8, 16, 32)]
    assert tuning_plots.best_at_some_rank(lines, "user") == ["(8, 8)", "(16, 8)"]
    pytest.importorskip("matplotlib")
    spilled = cloud_line(8, 99, 1e9, status="spills")
    figures = tuning_plots.clouds([*lines, spilled, {"bench": "tiles"}, cloud_line(8, 8, 1.0, kernel="mo_als")])
    assert list(figures) == ["sparse_syrk-itemsize-4", "mo_als-itemsize-4"]
    user, item = figures["sparse_syrk-itemsize-4"].axes
    assert (user.get_title(), item.get_title()) == ("user", "item")
    assert len(user.lines) == 3 + 2  # each configuration in gray, the best in color
