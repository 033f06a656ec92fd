"""Lines of bench/results/ carry the hash of the sources that made them, and are fresh while the tree has it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import common
import freshness


def test_every_file_of_results_declares_a_code_path_that_exists():
    recorded = {path.stem for path in (ROOT / "bench" / "results").glob("*.jsonl")}
    assert recorded <= set(freshness.CODE)
    for declared in freshness.CODE.values():
        for patterns in declared.values() if isinstance(declared, dict) else [declared]:
            assert freshness.files(patterns) or patterns == ()


def test_tasks_and_devices_have_their_own_code_paths():
    sgd, als = ({"task": "sgd", "device": "cuda"}, {"task": "als"})
    assert "cuda/msgd.cu" in freshness.files(freshness.code_of("gpu", sgd))
    assert "cuda/msgd.cu" not in freshness.files(freshness.code_of("gpu", als))
    on_cpu = freshness.files(freshness.code_of("paper_gates", {"task": "iteration", "device": "cpu"}))
    assert "hybridmf/native/_als.pyx" in on_cpu
    assert not any(name.startswith("cuda/") for name in on_cpu)
    assert freshness.code_of("unknown", {}) == freshness.WHOLE


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one script, whose code path is a.py."""

    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    monkeypatch.setattr(freshness, "ROOT", tmp_path)
    monkeypatch.setattr(freshness, "CODE", {"some": ("a.py",)})
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget():
    for cached in (freshness.code_sha256, freshness.files, freshness.is_clean):
        cached.cache_clear()


def test_a_line_is_fresh_until_its_code_path_changes(checkout, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", checkout / "results")
    common.record("some", {"task": "t", "ms": 1.0})
    line = json.loads((checkout / "results" / "some.jsonl").read_text())
    assert line["clean"] is True
    assert freshness.state("some", line) == "fresh"
    (checkout / "b.py").write_text("not of the code path\n")
    forget()
    assert freshness.state("some", line) == "fresh"
    (checkout / "a.py").write_text("a = 2\n")
    forget()
    assert freshness.state("some", line) == "older sources"
    common.record("some", {"task": "t", "ms": 2.0})
    line = json.loads((checkout / "results" / "some.jsonl").read_text().splitlines()[-1])
    assert line["clean"] is False
    assert freshness.state("some", line) == "uncommitted"


def test_lines_without_a_hash_are_not_fresh_and_quoted_lines_say_so():
    assert freshness.state("gpu", {"task": "als"}) == "no hash"
    assert freshness.state("quoted", {"kind": "quoted"}) == "quoted"


def test_a_declaration_that_fits_no_file_is_an_error(checkout):
    with pytest.raises(ValueError, match=r"'missing\.py' fits no file"):
        freshness.files(("missing.py",))
