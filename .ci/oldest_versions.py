"""Prints requirements that pin what pyproject.toml declares to the oldest version it allows, one a line.

    python .ci/oldest_versions.py pyproject.toml [extra ...]

It uses pip's own parsers, so a fresh environment needs nothing else. A requirement without a lower bound stays as it
is. CUDA's libraries are left out: no test that runs on the result needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pip._vendor import tomli
from pip._vendor.packaging.requirements import Requirement

NOT_INSTALLED = ("cuda-", "nvidia-")


def oldest(requirement: Requirement) -> str:
    """`requirement` with ``>=`` turned into ``==``."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    lower = [bound.version for bound in requirement.specifier if bound.operator == ">="]
    return f"{requirement.name}{extras}=={lower[0]}" if lower else f"{requirement.name}{extras}{requirement.specifier}"


def declared(project: dict[str, Any], extras: list[str]) -> list[Requirement]:
    """What an installation with `extras` asks for here, and what building does."""
    lines = list(project["project"]["dependencies"]) + list(project["build-system"]["requires"])
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    return [each for each in requirements if each.marker is None or each.marker.evaluate()]


def main() -> None:
    """Print the pins of the file and the extras that the command line names."""
    project = tomli.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    chosen = [each for each in declared(project, sys.argv[2:]) if not each.name.startswith(NOT_INSTALLED)]
    print("\n".join(sorted({oldest(each) for each in chosen})))


if __name__ == "__main__":
    main()
