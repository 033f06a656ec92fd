"""The scripts find what they use of the library."""

from __future__ import annotations

import importlib
import sys

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench").glob("*.py")))
def test_a_script_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("hybridmf"):
            raise
        pytest.skip(f"needs {error.name}")
