"""The rival of the batched Cholesky that few machines have: left out, and why is said."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))

cusolverdx = pytest.importorskip("cusolverdx")

SYSTEMS = (np.zeros((4, 32, 32), np.float32), np.zeros((4, 32), np.float32))


def test_without_nvmath_there_is_no_rival(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cusolverdx.solver(*SYSTEMS) is None
    assert not capsys.readouterr().out


def test_a_library_that_cannot_be_imported_is_named(monkeypatch, capsys, tmp_path):
    for package in ("numba", "nvmath"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "numba" / "cuda.py").write_text("raise AttributeError('no row_stack')")
    for module in [name for name in sys.modules if name.partition(".")[0] in ("numba", "nvmath")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    assert cusolverdx.solver(*SYSTEMS) is None
    assert "cuSolverDx is left out: nvmath-python cannot be imported (no row_stack)" in capsys.readouterr().out


def test_other_ranks_have_no_setting(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail(f"looked for {name}"))
    assert cusolverdx.solver(np.zeros((4, 33, 33), np.float32), np.zeros((4, 33), np.float32)) is None
