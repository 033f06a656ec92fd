"""Tests that the scripts of .ci/ name exist: a pattern that fits nothing would leave them out without a word."""

from __future__ import annotations

import re

from support.checkout import ROOT

SCRIPTS = [path.read_text() for path in sorted((ROOT / ".ci").iterdir()) if path.is_file()]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def test_files_that_scripts_name_exist():
    named = {name for text in SCRIPTS for name in re.findall(r"tests/[\w/]+(?:\.py)?", text)}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_selected_tests_exist():
    chosen = re.findall(r"^ +selected=(.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    named = set(re.findall(r"\btest_\w+", " ".join(chosen)))
    assert len(named) > 3
    known = {name for path in TESTS for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    assert [name for name in sorted(named) if not any(name in each for each in known)] == []
