"""Reading a model file: the estimator of the class that it names."""

from __future__ import annotations

import os
from typing import BinaryIO, TypeAlias, cast

from ..als import ExplicitALS, ImplicitALS
from ..ccd import CCD
from ..core.validate import check_bool
from ..errors import ModelFileError
from ..sgd import SGD
from .base import FactorModel
from .files import ModelFile

ESTIMATORS: dict[str, type[FactorModel]] = {cls.__name__: cls for cls in (CCD, SGD, ExplicitALS, ImplicitALS)}
"""The classes of models that files hold."""

Model: TypeAlias = ExplicitALS | ImplicitALS | SGD | CCD  # what a model file holds


def load(path: str | os.PathLike[str] | BinaryIO, *, mapped: bool = False) -> Model:
    """Read a model that ``model.save(path)`` wrote.

    Parameters
    ----------
    path : path-like or binary file
        An open file, such as ``io.BytesIO``, is read from its position to its end.
    mapped : bool
        Map factors and seen items from the file instead of reading them: processes that map one file share its memory.
        The file must not be modified in place; `save` replaces it, which does not affect the mapped one.

    Returns
    -------
    estimator
        Fitted, of the class that was saved.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
    TypeError, ValueError
        A file that is open in text mode, or an open file with ``mapped=True``.
    ModelFileError
        Truncated, altered, of another format, or from a newer version.
    """
    content = ModelFile(path, mapped=check_bool("mapped", mapped))
    if content.model not in ESTIMATORS:
        raise ModelFileError(
            f"{str(content.path)!r} holds a model of class {content.model!r}; this hybridmf supports "
            f"{', '.join(sorted(ESTIMATORS))}"
        )
    try:
        model = ESTIMATORS[content.model](**content.params)._restore(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"{str(content.path)!r} holds parameters this hybridmf cannot use: {error}") from error
    content.check_model(model)
    return cast(Model, model)
