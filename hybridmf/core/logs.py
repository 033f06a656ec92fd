"""Filters of the log of the library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("hybridmf")


@contextmanager
def filtered_log(passes: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Log only messages that pass, which the function may change."""
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
