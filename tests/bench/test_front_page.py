"""The picture of the front page, bench/front_page.py: recorded lines, a rival beside each of ours, bars from zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def test_each_panel_has_ours_and_a_rival_of_recorded_lines() -> None:
    import front_page

    panels = [*map(front_page.cpu_panel, front_page.CPU_PANELS), front_page.gpu_panel()]
    assert len(panels) == 4
    for title, unit, found in panels:
        assert title and "seconds" in unit
        assert "hybridmf" in found and len(found) >= 2 and min(found.values()) > 0


def test_bars_start_at_zero_and_show_their_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import front_page

    drawn, figure = [], front_page.figure

    @contextlib.contextmanager
    def kept(*arguments: Any) -> Iterator[Any]:
        with figure(*arguments) as drawing:
            drawn.append(drawing)
            yield drawing

    monkeypatch.setattr(front_page, "figure", kept)
    panels = [(f"panel {k}", "seconds", {"hybridmf": 1.0, "other": 2.5}) for k in range(4)]
    front_page.draw(tmp_path / "front.svg", panels)
    text = (tmp_path / "front.svg").read_text(encoding="utf-8")
    assert text.count("2.50 s") == 4 and text.count("1.00 s") == 4 and "panel 3" in text
    assert [axes.get_xlim() for axes in drawn[0].axes] == [(0, 3.0)] * 4


def test_the_picture_of_the_pages_is_there() -> None:
    assert "hybridmf" in (ROOT / "docs" / "_static" / "front-page.svg").read_text(encoding="utf-8")
    assert "front-page.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
