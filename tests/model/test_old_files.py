"""Models and checkpoints of earlier versions, in tests/fixtures, load as what they were; fits resume from them."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import hybridmf as hmf
from hybridmf.model import files
from hybridmf.model.load import ESTIMATORS
from support.model_files import assert_equal_models
from support.old_files import (
    FIT_TOLERANCE,
    assert_facts,
    cases,
    data_of,
    expected,
    facts_of,
    finished_facts,
    folders,
    weights_of,
)

FILES = [*cases("models"), *cases("checkpoints")]
RESUMED = list(cases("checkpoints"))


def assert_model(model: Any, case: dict[str, Any]) -> None:
    """Compare with the model that was saved; hyperparameters and labels to the last bit."""
    found, wanted = facts_of(model, seen=case["seen"]), case["facts"]
    assert_facts(found, wanted)
    assert wanted["params"].items() <= found["params"].items()  # a later version may have more
    for name in ("user_ids", "item_ids"):
        assert found[name] == wanted[name]


@pytest.mark.parametrize(("folder", "name", "case"), FILES)
def test_a_file_of_an_earlier_version_is_the_model_that_was_saved(folder, name, case, tmp_path):
    """Read or mapped, and after it is saved again."""
    model, mapped = (hmf.load(folder / case["file"], mapped=mapped) for mapped in (False, True))
    if not case["seen"]:
        with pytest.raises(ValueError, match="saved without seen items"):
            model.recommend(0)
    model.save(tmp_path / "again", include_seen=case["seen"])
    mapped.save(tmp_path / "mapped", include_seen=case["seen"])
    assert (tmp_path / "mapped").read_bytes() == (tmp_path / "again").read_bytes()
    again = hmf.load(tmp_path / "again", mapped=True)
    assert_equal_models(again, model)
    assert_model(again, case)  # asked last: its answers rest on all that was read and written before


# ---------------------------------------------------------------------------------------------------------- resuming


def estimator(case: dict[str, Any]) -> Any:
    facts = case["facts"]
    return getattr(hmf, facts["class"])(**facts["params"] | {"iterations": case["iterations"]})


def fitted(folder: Path, case: dict[str, Any], **options: Any) -> Any:
    return estimator(case).fit(data_of(folder, case), weights=weights_of(folder, case), **options)


@pytest.mark.parametrize(("folder", "name", "case"), RESUMED)
def test_a_fit_resumed_from_an_earlier_version_ends_as_its_own_did(folder, name, case, tmp_path):
    """The end of the uninterrupted fit was recorded by the version that wrote the checkpoint."""
    path = folder / case["file"]
    old = sorted(each.name for each in path.parent.iterdir())
    copy = shutil.copytree(path.parent, tmp_path / "run")
    model = fitted(folder, case, resume_from=copy, checkpoint=hmf.Checkpoint(copy, keep=9))
    assert_facts(finished_facts(model), case["finished"], tolerance=FIT_TOLERANCE)
    stored = json.loads(metadata(path)["state"])["history"]
    assert model.history_[: len(stored)] == stored
    new = f"checkpoint-{case['iterations']:06d}.safetensors"
    assert {*old, new} <= {each.name for each in copy.iterdir()}
    np.testing.assert_array_equal(hmf.load(copy / new).user_factors_, model.user_factors_)


@pytest.mark.parametrize(("folder", "name", "case"), RESUMED)
def test_a_fit_resumed_from_an_earlier_version_ends_as_a_fit_of_this_one(folder, name, case):
    """Both draw the same initial factors and take the same steps. The checkpoint is given as a file, not a folder."""
    resumed = fitted(folder, case, resume_from=folder / case["file"])
    assert_facts(finished_facts(resumed), case["finished"], tolerance=FIT_TOLERANCE)
    if not case["repeatable"]:
        pytest.skip("the fit drew its seed")
    whole = fitted(folder, case)
    users, items = np.indices((whole.n_users, whole.n_items)).reshape(2, -1)
    found, wanted = (model.predict(users, items, clip=False) for model in (resumed, whole))
    np.testing.assert_allclose(found, wanted, **FIT_TOLERANCE)


@pytest.mark.parametrize(("folder", "name", "case"), RESUMED)
def test_a_checkpoint_of_an_earlier_version_is_of_its_data_alone(folder, name, case):
    with pytest.raises(hmf.errors.ModelFileError, match=r"was written for other data \(24x18-"):
        estimator(case).fit(np.eye(24, 18), resume_from=folder / case["file"])


# ------------------------------------------------------------------------------------------------------- completeness


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata()


def paths(part: str) -> list[Path]:
    return [folder / case["file"] for folder in folders() for case in expected(folder)[part].values()]


@pytest.mark.parametrize("part", ["models", "checkpoints"])
def test_each_kind_that_is_saved_has_a_file(part):
    """If this fails, a class or a format is new: write files of it with tests/fixtures/make.py."""
    found = [metadata(path) for path in paths(part)]
    assert {each["model"] for each in found if each["version"] == str(files.VERSION)} == ESTIMATORS.keys()


def test_each_public_class_that_saves_has_a_file():
    public = {name for name in hmf.__all__ if inspect.isclass(getattr(hmf, name))}
    assert {name for name in public if hasattr(getattr(hmf, name), "save")} == {"Ratings", *ESTIMATORS}
    assert any(expected(folder)["ratings"] for folder in folders())


def test_each_tensor_of_a_model_file_is_in_a_file():
    found = set()
    for path in paths("models") + paths("checkpoints"):
        with safetensors.safe_open(path, "numpy") as file:
            found |= {(name, str(file.get_tensor(name).dtype)) for name in file.keys()}  # noqa: SIM118
    assert {name for name, _ in found} == files.TENSORS
    assert {dtype for _, dtype in found} == set(files.DTYPES)
    for name in ("user_factors", "user_bias", "seen_values"):
        assert {(name, "float32"), (name, "float64")} <= found


def test_each_file_is_tested():
    for folder in folders():
        there = {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
        known = {case["file"] for part in ("models", "checkpoints") for case in expected(folder)[part].values()}
        assert {name for name in there if name.startswith("models")} <= known
        assert {Path(name).parent for name in there} == {Path(name).parent for name in known}
