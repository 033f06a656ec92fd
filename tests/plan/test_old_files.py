"""Tables of tuned kernels and calibrations that earlier versions wrote, in tests/fixtures."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

import pytest

from hybridmf.plan import machine, tables
from support.old_files import assert_facts, cases, expected, folders

TUNING = [case for case in cases("tuning") if case.id.endswith("-table")]
CALIBRATIONS = [case for case in cases("tuning") if case.id.endswith("-calibration")]


@pytest.mark.parametrize(("folder", "name", "case"), TUNING)
def test_a_table_of_an_earlier_version_is_read(folder, name, case):
    """Tables are shipped, too; those of a user serve only the version that measured them."""
    table = tables.read_table(folder / case["file"])
    as_json = json.loads(json.dumps([asdict(table.gpu), [asdict(entry) for entry in table.entries]]))
    assert_facts(as_json, [case["gpu"], case["entries"]])


@pytest.mark.parametrize(("folder", "name", "case"), CALIBRATIONS)
def test_a_calibration_of_an_earlier_version_is_read_or_ignored(folder, name, case, own_cache, monkeypatch, caplog):
    """It serves the hardware and the version that measured it, and no other."""
    path = folder / case["file"]
    content = json.loads(path.read_text())
    with caplog.at_level(logging.WARNING, logger="hybridmf"):
        assert machine.machine_at(path, 1, "portable").source == machine.built_in().source
    assert "is ignored, built-in constants are used" in caplog.text
    if content["format"] != machine.FORMAT:
        return
    monkeypatch.setattr(machine, "identity", lambda: content["identity"])
    found = machine.machine_at(path, 2, "portable")
    assert (found.source, found.gpu_name) == (case["source"], content["gpu_identity"]["name"])
    for part in ("cpu", "gpu", "links"):
        assert json.loads(json.dumps(asdict(getattr(found, part)))) == content[part]


def test_each_format_has_a_file():
    found: dict[str, list[Any]] = {"table": [], "calibration": []}
    for folder in folders():
        for name, case in expected(folder)["tuning"].items():
            found[name].append(json.loads((folder / case["file"]).read_text()))
    assert tables.VERSION in {each["version"] for each in found["table"]}
    assert machine.FORMAT in {each["format"] for each in found["calibration"]}
