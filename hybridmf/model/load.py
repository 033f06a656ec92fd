"""TODO."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ModelFileError
from .files import ModelFile


def load(path: str | os.PathLike[str]) -> Any:
    """Read a model that ``model.save(path)`` wrote.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    estimator
        Fitted, of the class that was saved.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
    ModelFileError
        Truncated, altered, of another format, or from a newer version.
    """
    import hybridmf

    from .base import FactorModel

    content = ModelFile(path)
    public = (getattr(hybridmf, name) for name in hybridmf.__all__)
    known = {cls.__name__: cls for cls in public if isinstance(cls, type) and issubclass(cls, FactorModel)}
    if content.model not in known:
        raise ModelFileError(
            f"{str(path)!r} holds a model of class {content.model!r}; this hybridmf knows {', '.join(sorted(known))}"
        )
    try:
        model = known[content.model](**content.params)._restore(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"{str(path)!r} holds parameters this hybridmf cannot use: {error}") from error
    content.check_model(model)
    return model
