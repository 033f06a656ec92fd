"""npz files of estimators with the interface of `implicit`, written by earlier versions, in tests/fixtures."""

from __future__ import annotations

import pytest

from hybridmf.compat import implicit
from hybridmf.compat.implicit.als import AlternatingLeastSquares
from support.old_files import assert_facts, cases, implicit_facts, matrix_of


@pytest.mark.parametrize(("folder", "name", "case"), list(cases("implicit")))
def test_a_model_of_an_earlier_version_is_read(folder, name, case):
    model = AlternatingLeastSquares.load(folder / "implicit" / f"{name}.npz")
    assert_facts(implicit_facts(model, matrix_of(folder, case["values"])), case["facts"])


def test_each_class_that_saves_has_a_file():
    classes = [value for module in (implicit.als, implicit.nearest_neighbours) for value in vars(module).values()]
    saving = [cls for cls in classes if isinstance(cls, type) and hasattr(cls, "save")]
    assert [cls.__name__ for cls in saving if "compat" in cls.__module__] == ["AlternatingLeastSquares"]
