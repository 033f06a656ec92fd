"""Scripts of bench/ are run in the process of the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def drawn_at_once(without_layout: None) -> None:
    """Pages have dozens of pictures."""


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are empty files where other tests draw them: that takes most of the time of a page."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).touch())


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """Some scripts silence the library's log, which later tests read."""
    logger = logging.getLogger("hybridmf")
    level = logger.level
    yield
    logger.setLevel(level)
