"""The notebooks of docs/notebooks: their cells run, and they are stored without outputs.

The site executes them in a kernel (``-D nb_execution_mode=force``); here their code runs in this process, with the last
expression of each cell shown as a notebook shows it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LONG = ("search", "gpu", "evaluation")
"""Take some seconds each."""


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return cells


def test_the_notebooks_are_there() -> None:
    names = {notebook.stem for notebook in NOTEBOOKS}
    assert names == {"explicit", "implicit", "gpu", "out-of-core", "search", "evaluation"}
    index = (ROOT / "docs" / "notebooks" / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in index for name in names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_stored_without_outputs(notebook: Path) -> None:
    cells = cells_of(notebook)
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not [line for cell in code for line in cell["source"] if len(line.rstrip("\n")) > 88]


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=[pytest.mark.exhaustive] * (path.stem in LONG), id=path.stem) for path in NOTEBOOKS],
)
def test_their_cells_run(notebook: Path, without_layout: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(notebook)):
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"]), f"{notebook.name}, cell {number}").body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{notebook.name}, cell {number}", "exec"), namespace)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), f"{notebook.name}, cell {number}", "eval"), namespace)
            png = getattr(shown, "_repr_png_", None)
            assert shown is None or (png() if png else shown._repr_html_())
