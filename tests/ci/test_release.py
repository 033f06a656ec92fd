"""What a release writes in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib

from hybridmf import __version__
from support.checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RECIPE = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8")


def section(name: str) -> set[str]:
    """Requirements of the section of the conda recipe, without blanks."""
    lines = re.search(rf"(?m)^  {name}:\n((?: {{4,}}.*\n)+)", RECIPE)[1].splitlines()
    return {line.removeprefix("    - ").replace(" ", "") for line in lines if line.startswith("    - ")}


def test_the_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    number = __version__.removesuffix(".dev0")
    assert re.findall(r"(?m)^version: (.+)$", citation) == [number]
    assert re.findall(r'(?m)^  version: "(.+)"$', RECIPE) == [number]


def test_the_recipe_for_conda_has_the_requirements_of_the_package() -> None:
    assert section("run") == {"python", *PROJECT["project"]["dependencies"]}
    required = {line.lower().replace(" ", "") for line in PROJECT["build-system"]["requires"]}
    assert required <= section("host")
    assert f'<{PROJECT["project"]["requires-python"].removeprefix(">=")}"' in RECIPE
