"""The package grows neither in lines nor in depth beyond the limits of .ci/structure.py."""

from __future__ import annotations

import sys

import pytest

from support import emulated
from support.checkout import ROOT

sys.path.append(str(ROOT / ".ci"))
import structure


def test_lines_and_classes():
    found = structure.sizes()
    assert {name: value for name, value in found.items() if value > structure.LIMITS[name]} == {}


def test_levels_of_the_plan():
    assert (
        len(max(structure.chains(structure.PACKAGE / "plan").values(), key=len)) <= structure.LIMITS["levels of plan/"]
    )


def test_imports_for_types_do_not_count(tmp_path):
    for name in ("below", "typed", "late"):
        (tmp_path / f"{name}.py").touch()
    text = "from .below import a\nif TYPE_CHECKING:\n    from .typed import b\ndef f():\n    from . import late\n"
    (tmp_path / "top.py").write_text(text + "from .missing import c\nfrom ..other import below\n")
    assert structure.imports(tmp_path / "top.py") == {"below", "late"}
    (tmp_path / "late.py").write_text("from .typed import x")
    assert structure.chains(tmp_path)["top"] == ["top", "late", "typed"]


@pytest.mark.skipif(emulated.compiler() is None, reason="no C++ compiler to run kernels on the CPU with")
def test_calls_from_fit_to_every_kernel():
    """On the CPU and on an emulated GPU."""
    found = structure.calls()
    limit = structure.LIMITS["calls from fit to a kernel"]
    assert {name: way for name, way in found.items() if len(way) > limit} == {}
    assert {"_als.cholesky_rows", "_sgd.rows", "_ccd.update", "cuda solve_rows", "cuda centralized"} <= set(found)
    assert found["_als.cholesky_rows"][0] == "fit"
