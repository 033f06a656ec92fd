"""The progress bar, and where it is drawn."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int, shown: bool, **options: Any) -> tqdm:
    """A bar on standard error if that is a terminal, or in a notebook; elsewhere, or unless `shown`, none is drawn.

    Parameters
    ----------
    total : int
        Iterations, or what `unit` names.
    shown : bool
        Whether one is asked for.
    **options
        As for `tqdm.tqdm`.
    """
    stream = sys.stderr  # None under pythonw and in some services
    drawable = shown and stream is not None and not getattr(stream, "closed", False)
    # None leaves it to tqdm, which draws in notebooks and on terminals only
    return tqdm(total=total, disable=None if drawable else True, **({"unit": "iteration"} | options))
