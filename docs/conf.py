"""The documentation site, by Sphinx: ``sphinx-build -c docs . build/site`` in the root of the repository.

The source folder is the root of the repository, so that a relative link such as ../README.md works in the checkout, on
code hosts and on the site. Pages are Markdown; the reference is generated from the docstrings. Notebooks are shown
without their outputs; ``-D nb_execution_mode=force`` executes them and shows what they print. The site needs no
network: it ships KaTeX, which sets the formulas (_static/katex).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import Element, SkipNode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hybridmf as hmf  # noqa: E402

project = "hybridmf"
author = copyright = "The hybridmf developers"
version = release = hmf.__version__
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "bench/README.md",
    "bench/AIMS.md",
    "bench/FIGURES.md",
    "bench/TRIALS.md",
    "bench/RECORDING.md",
    "docs/**.md",
    "docs/notebooks/*.ipynb",
]
exclude_patterns = ["build", "dist", ".venv*", "venv", ".git", ".*_cache", "**/node_modules"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.viewcode"]
nb_execution_mode = "off"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]  # $x$ and $$x$$, which code hosts render too
myst_heading_anchors = 4  # the anchors that code hosts make, which links between pages use
default_role = "code"  # `user_items` in a docstring names an argument
numpydoc_show_class_members = False  # autodoc lists them
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name types, with shapes

html_theme = "furo"
html_title = f"hybridmf {version}"
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")  # one address for each page of all versions
html_math_renderer = "katex"

CHAPTERS: dict[str, tuple[str, ...]] = {
    "Start": ("install", "quickstart", "first-week", "choosing", "porting", "tuning", "notebooks/index"),
    "User guide": (
        "data",
        "training",
        "methods",
        "sgd",
        "recommending",
        "cold-start",
        "serving",
        "evaluation",
        "compare",
        "pictures",
        "interop",
        "dispatch",
        "gpu",
        "bals-format",
        "cli",
        "environment",
    ),
    "Scale": ("several-gpus", "store", "planner", "checkpoints", "cluster", "transports"),
    "Measurements": ("performance", "systems", "evidence/index"),
    "Reference": ("api", "stability"),
    "Project": (
        "../README",
        "../CONTRIBUTING",
        "../CODE_OF_CONDUCT",
        "../SECURITY",
        "architecture",
        "../CHANGELOG",
        "../bench/README",
        "../bench/AIMS",
        "../bench/FIGURES",
        "../bench/TRIALS",
        "../bench/RECORDING",
    ),
}
"""The navigation. A missing page is skipped; a page that no chapter lists appears under "More"."""


def navigation(folder: Path) -> str:
    """Tables of contents for `folder`/index.md: the existing pages of `CHAPTERS` in docs, elsewhere all pages."""
    found = sorted(page.stem for kind in ("*.md", "*.ipynb") for page in folder.glob(kind))
    rest = [page for page in found if page not in ("index", *(name for names in CHAPTERS.values() for name in names))]
    if folder != ROOT / "docs":
        return contents("", [page for page in found if page != "index"])
    chapters = {title: [n for n in names if (folder / f"{n}.md").exists()] for title, names in CHAPTERS.items()}
    return "".join(contents(title, names) for title, names in (chapters | {"More": rest}).items() if names)


def contents(caption: str, names: list[str]) -> str:
    """One table of contents for the side bar."""
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(names) + "\n```\n"


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Append the navigation to index pages. In their text, code hosts would show it as code."""
    if Path(name).name == "index":
        source[0] += navigation((ROOT / name).parent)


def tex(translator: Any, node: Element) -> None:
    """Write a formula as TeX, in an element that _static/formulas.js hands to KaTeX."""
    tag, kind = ("span", "formula") if node.tagname == "math" else ("div", "formula display")
    translator.body.append(f'<{tag} class="{kind}">{translator.encode(node.astext())}</{tag}>')
    raise SkipNode


def add_katex(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Load KaTeX on the pages that have formulas."""
    if doctree is not None and any(doctree.findall(lambda node: node.tagname in ("math", "math_block"))):
        app.add_css_file("katex/katex.min.css")
        app.add_js_file("katex/katex.min.js", loading_method="defer")
        app.add_js_file("formulas.js", loading_method="defer")


def is_inherited_plumbing(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Whether a member belongs to scikit-learn, such as ``set_fit_request``, which documents it."""
    ours = str(getattr(value, "__module__", "hybridmf")).startswith("hybridmf")
    return None if ours and not name.endswith("_request") else True


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", is_inherited_plumbing)
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", add_katex)
    app.add_html_math_renderer("katex", inline_renderers=(tex, None), block_renderers=(tex, None))
