"""The documentation: examples run and print what the page shows; links, public names and cited tests exist.

A fenced ``python`` block is executed, page by page from top to bottom, in a folder of its own. A ``text`` block under a
line that says only "prints" is what the block above it prints; numbers may differ by one in the last digit shown
(other processors and BLAS libraries round differently), and "..." stands for anything. A block directly under
``<!-- not run: reason -->`` is left alone; one under ``<!-- new process -->`` has only the files of those above it. On
the pages of COMMAND_PAGES the ``hybridmf`` lines of ``bash`` blocks run as well. data/test_ratings.py runs data.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.cli import main
from support.checkout import ROOT

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
RUN_ELSEWHERE = ("data.md",)
COMMAND_PAGES = ("quickstart.md",)
NEW_PROCESS = "<!-- new process -->"
LEFT_OUT = re.compile(r"<!-- not run: \S.* -->")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ------------------------------------------------------------------------------------------------- reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the page's line it starts on, and what stands directly above it."""

    language: str
    text: str
    line: int
    above: str
    paragraph: str

    @property
    def left_out(self) -> bool:
        return LEFT_OUT.fullmatch(self.above.strip()) is not None

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.paragraph.strip() == "prints"


def blocks_of(text: str) -> list[Block]:
    lines, blocks, start = text.split("\n"), [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = lines[start - 1] if start else ""
        paragraph = next((other for other in reversed(lines[:start]) if other.strip()), "")
        body = "\n".join(lines[start + 1 : number]) + "\n"
        blocks.append(Block(lines[start][3:].strip(), body, start + 1, above, paragraph))
        start = None
    assert start is None, f"the block that starts on line {start} has no end"
    return blocks


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_of(text: str) -> str:
    """Everything a page sets as code: blocks, and what stands between backticks."""
    inline = re.findall(r"`([^`\n]+)`", prose_of(text))
    return "\n".join([*inline, *(block.text for block in blocks_of(text))])


def test_blocks_are_found_with_what_stands_above_them() -> None:
    page = "a\n<!-- not run: slow -->\n```python\nx = 1\n```\n\nprints\n\n```text\n1\n2\n```\n```python\n```\n"
    code, output, empty = blocks_of(page)
    assert (code.language, code.text, code.line, code.left_out, code.is_output) == ("python", "x = 1\n", 3, True, False)
    assert (output.text, output.left_out, output.is_output) == ("1\n2\n", False, True)
    assert (empty.text, empty.left_out) == ("\n", False)
    assert prose_of(page).split() == ["a", "<!--", "not", "run:", "slow", "-->", "prints"]
    assert code_of("`one` and\n```\ntwo\n```\n") == "one\ntwo\n"
    with pytest.raises(AssertionError, match="line 0 has no end"):
        blocks_of("```python\n")


# --------------------------------------------------------------------------------------------- running its examples


def same_output(printed: str, shown: str) -> bool:
    """Whether `printed` is what the page shows: text equal, numbers to one in the last digit shown, "..." anything."""
    words, pieces = [line.rstrip() for line in printed.strip().split("\n")], shown.strip().split("...")
    text = "\n".join(words)
    pattern, numbers = r"[\s\S]*?".join(_pattern_of(piece) for piece in pieces), NUMBER.findall("\0".join(pieces))
    match = re.fullmatch(pattern, text)
    return match is not None and all(map(_close, match.groups(), numbers))


def _pattern_of(piece: str) -> str:
    """The piece as a pattern in which every number is a group and runs of blanks within a line are one."""
    escaped = [re.sub(r"(?:\\ )+", " +", re.escape(text)) for text in NUMBER.split(piece)]
    return rf"({NUMBER.pattern})".join(escaped)


def _close(printed: str, shown: str) -> bool:
    if not re.search(r"[.e]", shown):
        return printed == shown
    mantissa, _, exponent = shown.partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed.replace(",", "")) - float(shown.replace(",", ""))) < 1.01 * last_digit


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a 1\nb  2.50 \n", "a 1\nb 2.50"),
        ("rmse 0.8451", "rmse 0.8450"),
        ("rmse 0.8451", "rmse 0.84..."),
        ("sizes 1,024 x 16", "sizes 1,024 x 16"),
        ("one\n2 seconds\nthree", "one\n...\nthree"),
        ("-3.2e-05", "-3.1e-05"),
        ("film-01 4.2", "film-01 4.1"),
        ("[0 2 1]", "[0 2 1]"),
    ],
)
def test_same_output_accepts(printed: str, shown: str) -> None:
    assert same_output(printed, shown)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a 1", "a 2"),
        ("rmse 0.8451", "rmse 0.8453"),
        ("film-01 4.2", "film-02 4.2"),
        ("sizes 1,024", "sizes 1,025"),
        ("one\nthree", "one\n...\nfour"),
        ("a", "a\nb"),
        ("1.05 x", "1.05 y"),
    ],
)
def test_same_output_refuses(printed: str, shown: str) -> None:
    assert not same_output(printed, shown)


def run(block: Block, page: str, namespace: dict[str, object]) -> str:
    """Execute a block and return what it printed; tracebacks name the page and its line."""
    if block.above.strip() == NEW_PROCESS:
        path = os.pathsep.join([str(Path(hmf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", block.text], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert not done.returncode, f"{page} line {block.line}: {done.stderr}"
        return done.stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, page, "exec"), namespace)
        else:
            for line in block.text.replace("\\\n", " ").strip().split("\n"):
                command, *arguments = shlex.split(line, comments=True)
                assert command == "hybridmf", f"{page} line {block.line}: {line!r} is no hybridmf command"
                assert not main.main(arguments, standalone_mode=False), f"{page} line {block.line}: {line!r} failed"
    return printed.getvalue()


def write_rating_files() -> None:
    """Small files by the names that pages use for the reader's own: MovieLens 1M in form, 60 users and 40 films."""
    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((60, 40)) < 0.3) + 1
    stars = rng.integers(1, 6, len(pairs))
    lines = [f"{user}::{film}::{value}::{978300000 + film}" for (user, film), value in zip(pairs, stars, strict=True)]
    Path("ratings.dat").write_text("\n".join(lines) + "\n")
    Path("movies.dat").write_text("".join(f"{film}::Film {film} (1999)::Drama\n" for film in range(1, 41)))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RUN_ELSEWHERE], ids=by_name)
def test_examples_run_and_print_what_the_page_shows(
    page: Path, without_layout: None, small_product: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny fits: a second thread only waits; no bit depends on it
    write_rating_files()
    languages = ("python", "bash") if page.name in COMMAND_PAGES else ("python",)
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.is_output:
            assert printed is not None, f"{page.name} line {block.line}: nothing above it was run"
            assert same_output(printed, block.text), f"{page.name} line {block.line}: this was printed\n{printed}"
            printed = None
        elif block.language in languages and (block.language == "python" or block.text.startswith("hybridmf ")):
            printed = None if block.left_out else run(block, page.name, namespace)


def test_the_readme_works_on_a_package_page() -> None:
    """Links and pictures are absolute; those of the project lead to files of the checkout, and to headings there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(text))
    assert len(links) > 10 and len(text.splitlines()) < 120
    places = {
        "https://hybridmf.readthedocs.io/en/stable/": lambda path: ROOT / path.replace(".html", ".md"),
        "https://github.com/hybridmf/hybridmf/blob/main/": lambda path: ROOT / path,
        "https://raw.githubusercontent.com/hybridmf/hybridmf/main/": lambda path: ROOT / path,
    }
    for link in links:
        base = next((base for base in places if link.startswith(base)), None)
        assert base, f"{link} is relative, or leads to another site"
        path, _, anchor = link.removeprefix(base).partition("#")
        target = places[base](path)
        assert target.is_file(), link
        assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=by_name)
def test_code_fits_the_width_of_the_site(page: Path) -> None:
    """A longer line is cut off at the right. Output of programs wraps; the test command is one line for .ci/run."""
    code = [each for each in blocks_of(page.read_text(encoding="utf-8")) if each.language in ("python", "bash")]
    lines = [line for each in code if "the test command" not in each.above for line in each.text.split("\n")]
    assert not [line for line in lines if len(line) > 88]


def test_formulas_need_no_network() -> None:
    """The site ships KaTeX, whose style sheet names fonts that are there."""
    folder = ROOT / "docs" / "_static" / "katex"
    fonts = re.findall(r"url\((fonts/\w[\w-]*\.woff2)\)", (folder / "katex.min.css").read_text(encoding="utf-8"))
    assert len(fonts) > 10 and all((folder / font).is_file() for font in fonts)
    assert (folder / "katex.min.js").is_file() and "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_every_page_is_covered() -> None:
    """What the tests above rest on: pages are found, and those that teach by example have examples."""
    names = {page.name for page in PAGES}
    assert {"index.md", "quickstart.md", "methods.md", "bals-format.md", "systems.md", *RUN_ELSEWHERE} <= names
    examples = {"quickstart": 6, "recommending": 10, "training": 8, "methods": 5, "bals-format": 4}
    for name, least in examples.items():
        blocks = blocks_of((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        assert sum(block.language == "python" and not block.left_out for block in blocks) >= least
        assert sum(block.is_output for block in blocks) >= least // 2


# --------------------------------------------------------------------------------------- links, names, cited tests


def anchors_of(text: str) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors() -> None:
    assert anchors_of("# The BALS format\n\n## Saving, and `load`\n```\n# no\n```\n") == {
        "the-bals-format",
        "saving-and-load",
    }


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose_of(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), f"{page.name}: no heading for {link}"


@functools.cache
def all_code() -> str:
    return "\n".join(code_of(page.read_text(encoding="utf-8")) for page in PAGES)


@pytest.mark.parametrize("name", hmf.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert re.search(rf"\b(?:hmf|hybridmf)\.{name}\b|^{name}\b", all_code(), flags=re.MULTILINE)


def public_objects() -> dict[str, Any]:
    """Classes and functions by name: those of the package and of its public modules."""
    found = {}
    for place in (hmf, *(value for name in hmf.__all__ if inspect.ismodule(value := getattr(hmf, name)))):
        for name in getattr(place, "__all__", vars(place)):
            value = getattr(place, name)
            ours = re.match(r"hybridmf\b(?!\.(core|ranks)\b)", str(getattr(value, "__module__", "")))
            if ours and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                found[f"{place.__name__}.{name}"] = value
    return found


def test_public_objects_and_their_members_have_docstrings() -> None:
    objects = public_objects()
    assert {"hybridmf.convert", "hybridmf.metrics.Evaluation", "hybridmf.Ratings"} <= set(objects)
    bare = [name for name, value in objects.items() if not value.__doc__]
    for name, value in objects.items():
        if inspect.isclass(value):
            members = inspect.classify_class_attrs(value)
            ours = [each for each in members if not each.name.startswith("_") and each.kind != "data"]
            ours = [each for each in ours if "hybridmf" in each.defining_class.__module__]
            bare += [f"{name}.{each.name}" for each in ours if not each.object.__doc__]
    assert not bare


def test_errors_and_formats_are_documented() -> None:
    classes = [name for name, value in vars(hmf.errors).items() if inspect.isclass(value)]
    code = all_code()
    missing = [name for name in [*classes, *hmf.formats.__all__] if not re.search(rf"\b{name}\b", code)]
    assert classes and not missing


def referenced_names() -> set[str]:
    """Full names that the directives of the API reference name, members of modules included."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for name, members in re.findall(r"^\.\. auto\w+:: ([\w.]+)\n(?: +:members: *(.*))?", text, flags=re.MULTILINE):
        listed = [member.strip() for member in members.split(",") if member.strip()]
        if not listed and inspect.ismodule(getattr(hmf, name.rpartition(".")[2], None)):  # :members: of a module is all
            listed = [each for each in vars(getattr(hmf, name.rpartition(".")[2])) if not each.startswith("_")]
        names |= {name, *(f"{name}.{member}" for member in listed)}
    return names


def test_the_reference_has_every_public_name() -> None:
    names = referenced_names()
    wanted = {f"hybridmf.{name}" for name in hmf.__all__} | {f"hybridmf.formats.{name}" for name in hmf.formats.__all__}
    for module in (hmf.metrics, hmf.datasets):
        functions = [f for name, f in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")]
        wanted |= {f"{f.__module__}.{f.__name__}" for f in functions if f.__module__ == module.__name__}
    assert wanted - names == {"hybridmf.metrics.evaluate"}  # there as hybridmf.evaluate


def test_the_reference_names_what_exists() -> None:
    for name in referenced_names() - {"hybridmf." + module for module in ("metrics", "formats", "datasets", "errors")}:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_architecture_page_names_what_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.pyx?):(\w+)`", page)
    assert len(named) > 40
    for path, name in named:
        text = (ROOT / "hybridmf" / path).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name}\b|^{name} = ", text, flags=re.MULTILINE), f"no {path}:{name}"
    for path in re.findall(r"`((?:core|data|device|native|plan|cpu|gpu|ranks|model|tools|cli)/[\w/.]*)`", page):
        assert (ROOT / "hybridmf" / path).exists(), path


def test_every_environment_variable_is_on_its_page() -> None:
    """Names of environment variables in the package and its build; HYBRIDMF_DELAYS is a macro of the kernels."""
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    files = [path for kind in ("*.py", "*.pyx", "*.c", "*.h") for path in (ROOT / "hybridmf").rglob(kind)]
    pattern = r"""["']((?:HYBRIDMF|OMP|OMPI|PMI|SLURM|NCCL|CUPY|CUDA)_[A-Z_]+|CFLAGS)["']"""
    named = {name for path in files for name in re.findall(pattern, path.read_text(encoding="utf-8"))}
    build = set(re.findall(pattern, (ROOT / "setup.py").read_text(encoding="utf-8")))
    assert {"HYBRIDMF_ISA", "OMP_NUM_THREADS", "NCCL_NVLS_ENABLE", "HYBRIDMF_DEBUG"} <= named | build
    missing = {name for name in named | build - {"CFLAGS"} if f"`{name}" not in page}
    assert missing <= {"HYBRIDMF_DELAYS", "CUDA_ERROR_"}
    read = set(re.findall(r"environ(?:\.get)?[(\[]\"(\w+)\"", "".join(path.read_text("utf-8") for path in files)))
    assert all(name in page for name in read)


@pytest.mark.parametrize("cls", [hmf.ImplicitALS, hmf.ExplicitALS])
def test_every_parameter_is_in_methods(cls: type) -> None:
    code = code_of((ROOT / "docs" / "methods.md").read_text(encoding="utf-8"))
    assert not [name for name in cls().get_params() if not re.search(rf"\b{name}\b", code)]


def test_every_method_of_a_model_is_documented() -> None:
    code = all_code()
    names = [name for name, value in inspect.getmembers(hmf.ImplicitALS, inspect.isfunction) if value.__doc__]
    ours = [name for name in names if getattr(hmf.ImplicitALS, name).__module__.startswith("hybridmf")]
    public = [name for name in ours if not name.startswith("_")]
    assert "recommend" in public and "fit" in public
    assert not [name for name in public if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_cited_tests_exist(page: Path) -> None:
    for file, name in re.findall(r"((?:\w+/)*test_\w+\.py)::(\w+)", page.read_text(encoding="utf-8")):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\(", text, flags=re.MULTILINE), f"no {file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_no_page_names_a_path_of_a_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:work|tmp|root|home|mnt)/", page.read_text(encoding="utf-8"))
