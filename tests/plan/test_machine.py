"""The file of measured constants."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hybridmf as hmf
from hybridmf.plan import machine as _machine
from hybridmf.plan.cost import cost_of
from hybridmf.tools import calibrate as _calibrate
from support.cost_model import NETFLIX, measured, plan_of

pytestmark = pytest.mark.usefixtures("own_cache")


def test_measured_constants_are_kept_and_used():
    assert _machine.machine() == _machine.built_in()
    path = _machine.save(measured(), {"name": "Some GPU", "driver": 13020})
    assert path == _machine.calibration_file()
    assert _machine.machine() == measured()
    plan = plan_of(hmf.ExplicitALS(64, biases=False, device="cpu", num_threads=8), **NETFLIX)
    assert plan.estimates[0].seconds_per_iteration == cost_of(plan, measured()).iteration
    assert json.loads(path.read_text())["identity"] == _machine.identity()
    assert set(_machine.identity()) == {"processor", "cores", "instruction_set", "hybridmf"}
    again = replace(measured(), source="measured again")
    os.utime(_machine.save(again, {"name": "Some GPU"}), ns=(1, 1))
    assert _machine.machine() == again


def spoil(**changes: Any) -> Any:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        for name, value in changes.items():
            content[name] = content[name] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.write_text('{"format": 4, "identity'), "it is not JSON"),
        (lambda path: path.write_bytes(b"\xff\x00\x12"), "it is not JSON"),
        (lambda path: path.write_text(""), "it is not JSON"),
        (lambda path: path.write_text("[1, 2]"), "its format is None"),
        (lambda path: path.write_text('{"format": 4}'), "'identity'"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (spoil(format=1), "its format is 1, this version reads 4"),
        (spoil(identity={"processor": "Z80"}), "other hardware or another version (processor 'Z80', not "),
        (spoil(identity={"cores": 1024}), "(cores 1024, not "),
        (spoil(identity={"instruction_set": "mmx"}), "(instruction_set 'mmx', not "),
        (spoil(identity={"hybridmf": "99.0"}), "(hybridmf '99.0', not "),
        (spoil(cpu={"new": 1.0}), "its constants are not those of this version (new)"),
        (spoil(cpu={"serial": -1.0}), "its constant serial is -1.0"),
        (spoil(cpu={"row": "fast"}), "its constant row is 'fast'"),
        (spoil(cpu={"row": True}), "its constant row is True"),
        (spoil(cpu={"row": float("nan")}), "its constant row is nan"),
        (spoil(cpu={"solve": []}), "its constant solve is []"),
        (spoil(cpu={"solve": [[64, 1e9], [32, 1e9]]}), "its constant solve is [[64"),
        (spoil(gpu={"sgd": {"msgd": [[64, 0.0]]}}), "its constant sgd is [[64"),
        (spoil(gpu="nothing"), "its constants are not those"),
        (spoil(links={"reduce_scatter": [[4, 1e9], [2, 1e9]]}), "its constant reduce_scatter is [[4"),
        (spoil(cpu=7), "not iterable"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(change, why, caplog):
    path = _machine.save(measured(), {"name": "Some GPU"})
    change(path)
    for _ in range(3):
        assert _machine.machine() == _machine.built_in()
    (warning,) = [one.message for one in caplog.records]
    assert "is ignored, built-in constants are used: " in warning and "`hybridmf tune-kernels --calibrate`" in warning
    assert why in warning
    if path.is_file():
        _machine.save(measured(), {"name": "Some GPU"})  # measured anew
        assert _machine.machine() == measured()


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(
        OSError, match=r"constants cannot be kept in .*set HYBRIDMF_CACHE_DIR to a folder you can write"
    ):
        _machine.save(measured())
    assert _machine.machine() == _machine.built_in()
    monkeypatch.setattr(_calibrate, "calibrate", lambda **_: pytest.fail("measured before it looked"))
    with pytest.raises(OSError, match="constants cannot be kept"):
        _calibrate.calibrate_and_save()


def test_the_users_cache_is_the_default(monkeypatch):
    monkeypatch.delenv("HYBRIDMF_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: f"there/{name}")
    assert _machine.calibration_file() == Path("there/hybridmf/machine.json")


def test_a_processor_has_a_name(monkeypatch):
    assert _machine.processor()

    def unreadable(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr("builtins.open", unreadable)
    assert _machine.processor()
