"""The progress bar, and where it is drawn."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

LONG = 1.0  # seconds after which reading a file shows a bar


def progress_bar(total: int, shown: bool, **options: Any) -> tqdm:
    """A bar with tqdm's options on a terminal (standard error) or in a notebook; none elsewhere, or unless `shown`."""
    if not shown:
        from tqdm import tqdm

        return tqdm(total=total, disable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a notebook without ipywidgets: the bar is text, which is well
        from tqdm.auto import tqdm
    stream = sys.stderr  # None under pythonw and in some services
    drawable = stream is not None and not getattr(stream, "closed", False)
    # None leaves it to tqdm, which draws in notebooks and on terminals only
    return tqdm(total=total, disable=None if drawable else True, **({"unit": "iteration"} | options))


@contextlib.contextmanager
def reading_progress(path: str, shown: bool) -> Iterator[Callable[[int], object]]:
    """A bar over the bytes of a file, drawn once reading takes `LONG` seconds; gives a function that moves it.

    The function takes the bytes read so far: fewer than before where the file is read from its beginning again.
    """
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "delay": LONG}
    with progress_bar(os.path.getsize(path), shown, desc=f"Reading {os.path.basename(path)}", **options) as bar:
        yield lambda done: bar.update(done - bar.n)
