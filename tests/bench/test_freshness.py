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
    for cached in (freshness.code_hash, freshness._form_hash, freshness.files, freshness.is_clean, freshness.controls):
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


ONE = """\"\"\"Text.\"\"\"
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from x import Y

A: dict[str, int] = {"a": 1}  # a comment

class B:
    "Text."
    c: int = 3

    def d(self, e: Y) -> float:
        "More text."
        return f"{e:{self.c}}" + "# no comment"
"""
OTHER = """
from __future__ import annotations
from typing import TYPE_CHECKING
A: Mapping = {
    'a': 1,
}
class B:
    c: float = 3
    def d(self, e):
        return (f"{e:{self.c}}" + "# no comment")
"""


def test_comments_docstrings_annotations_and_layout_are_no_code():
    assert freshness.form("a.py", ONE) == freshness.form("a.py", OTHER)
    for old, new in (("= 3", "= 4"), ("self.c", "self.b"), ('"# no', '"#  no'), ("'a'", "'b'"), ("B:", "C:")):
        assert freshness.form("a.py", OTHER) != freshness.form("a.py", OTHER.replace(old, new))


def test_tokens_of_cuda_and_cython_are_compared_without_comments():
    cuda = '#define A(x) (x \\\n    + 1)  // one\n/* two\nlines */ int f() { return A("//") ; }\n'
    same = '#define A(x) (x + 1)\nint f()\n{\n    return A("//");  // end\n}\n'
    assert freshness.form("a.cu", cuda) == freshness.form("a.cu", same)
    assert freshness.form("a.cu", cuda) != freshness.form("a.cu", cuda.replace("+ 1)", "+ 2)"))
    assert freshness.form("a.cu", "#if A\nint a;") != freshness.form("a.cu", "#if A int a;")
    cython = 'cdef int f(int a) nogil:\n    """Text\n    more."""\n    # why\n\n    return g(a,\n             "#")\n'
    same = 'cdef int f(int a) nogil:\n    return g(a, "#")  # why\n'
    assert freshness.form("a.pyx", cython) == freshness.form("a.pyx", same)
    assert freshness.form("a.pyx", same) != freshness.form("a.pyx", same.replace("    return", "  return"))


def test_a_line_of_other_code_is_fresh_by_a_control(checkout, monkeypatch):
    def control(before, after):
        return {"kind": "control", "covers": {"some ": [before, after]}}

    now = freshness.code_hash(("a.py",))
    line = {"code_form_sha256": "first", "clean": True}
    cases = {
        "older sources": [[], [control("first", "second")], [control(now, "first")]],
        "fresh by control": [[control("first", now)], [control("second", now), control("first", "second")]],
    }
    for expected, groups in cases.items():
        for lines in groups:
            monkeypatch.setattr(freshness, "controls", lambda lines=lines: tuple(lines))
            assert freshness.state("some", line) == expected
    assert freshness.state("some", line | {"clean": False}) == "older sources"
    assert freshness.state("some", {"code_form_sha256": now, "clean": None}) == "fresh, clean unknown"
