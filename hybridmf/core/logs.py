"""Filters of the log of the library."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("hybridmf")

_quiet: set[int] = set()  # threads


@contextmanager
def filtered_log(passes: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Log only messages that pass, which the function may change."""
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log messages of this thread, such as that factors have shrunk to zero."""
    own = threading.get_ident()
    _quiet.add(own)
    try:
        with filtered_log(lambda record: record.thread != own):
            yield
    finally:
        _quiet.discard(own)


def is_quiet() -> bool:
    """Whether messages of this thread are dropped, so that checks which only warn can be left out."""
    return threading.get_ident() in _quiet
