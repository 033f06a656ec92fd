"""Check that an sdist and a wheel hold what they should and nothing else.

Called as ``python .ci/check_distributions.py SOURCE SDIST WHEEL``, where SOURCE is a clean copy of the checkout.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path


def differences(what: str, wanted: set[str], found: set[str]) -> list[str]:
    """One line for each name that is missing or too many."""
    missing = [f"{what} lacks {name}" for name in sorted(wanted - found)]
    return missing + [f"{what} holds {name}, which does not belong there" for name in sorted(found - wanted)]


def check_sdist(source: Path, sdist: str) -> list[str]:
    """The sdist is the checkout, without its top-level dot files, and with what setuptools writes."""
    with tarfile.open(sdist) as archive:
        names = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
    found = {name for name in names if name not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in name}
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    return differences("sdist", {name for name in files if not (name.startswith(".") and "/" not in name)}, found)


def check_wheel(source: Path, wheel: str) -> list[str]:
    """The wheel is hybridmf without C and Cython sources, its extension modules, and cuda/ as hybridmf/cuda."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    metadata = [name for name in names if ".dist-info/" in name]
    modules = [name for name in names if name.endswith((".so", ".pyd"))]
    package = {path for path in (source / "hybridmf").rglob("*") if path.suffix in (".py", ".pyi", ".typed", ".json")}
    wanted = {str(path.relative_to(source)) for path in package}
    wanted |= {f"hybridmf/{path.relative_to(source)}" for path in (source / "cuda").rglob("*") if path.is_file()}
    problems = differences("wheel", wanted, set(names) - set(metadata) - set(modules))
    problems += differences(
        "wheel (extension modules)",
        {str(path.relative_to(source).with_suffix("")) for path in (source / "hybridmf").rglob("*.pyx")},
        {name.split(".")[0] for name in modules},
    )
    if not any(name.endswith("/LICENSE") for name in metadata):
        problems.append("wheel lacks LICENSE")
    return problems + [f"{name}: see STYLE, cuda/ must not be a package" for name in names if "cuda/__init__" in name]


if __name__ == "__main__":
    problems = check_sdist(Path(sys.argv[1]), sys.argv[2]) + check_wheel(Path(sys.argv[1]), sys.argv[3])
    sys.exit("\n".join(problems) or 0)
