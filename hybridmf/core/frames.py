"""Data frames returned by the library, of the same kind as its input, through narwhals."""

from __future__ import annotations

import contextlib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from .system import ctrl_c_later, needed
from .validate import check_choice

KINDS = ("pandas", "polars", "pyarrow")  # libraries of returned frames; by default, the first one that is installed


def kind_of(given: Any) -> str | None:
    """Library of a frame or series; None for anything else."""
    module = type(given).__module__.partition(".")[0]
    return module if module in KINDS else None


def check_kind(name: str, value: Any, *usual: str | None) -> str:
    """Library to make a frame with: `value`; if that is None, the first of `usual` that is not, or one installed."""
    if value is not None:
        return str(check_choice(name, value, KINDS))
    found = next((kind for kind in usual if kind is not None), None)
    found = found or next((kind for kind in KINDS if find_spec(kind)), None)
    if found is None:
        raise ImportError(f"a data frame needs one of {', '.join(KINDS)}: pip install pandas")
    return found


def import_before_arrow() -> None:
    """Import pandas and pyarrow, if they are installed, without losing a Ctrl-C; pyarrow's arrays import pandas."""
    for module in ("pandas", "pyarrow.csv"):
        with contextlib.suppress(ImportError), ctrl_c_later():
            import_module(module)


def pandas_frame(rows: list[dict[str, Any]], otherwise: str) -> Any:
    """A pandas data frame of a table of results; `otherwise` is what works without pandas."""
    return needed("pandas", "to_frame needs pandas", f"pandas; or {otherwise}").DataFrame(rows)


def make_frame(columns: dict[str, np.ndarray], kind: str) -> Any:
    import narwhals.stable.v2 as nw

    library: Any = kind
    return nw.from_dict(columns, backend=library).to_native()
