"""Scripts of bench/ are run in the process of the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """Some scripts silence the library's log, which later tests read."""
    logger = logging.getLogger("hybridmf")
    level = logger.level
    yield
    logger.setLevel(level)
