"""Check that sdists and wheels hold what they should and nothing else.

Called as ``python .ci/check_distributions.py SOURCE SDIST_OR_WHEEL ...``, where SOURCE is a clean copy of the checkout.
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
        names = [name for name in archive.namelist() if not name.endswith("/")]
    metadata = [name for name in names if ".dist-info/" in name]
    bundled = [name for name in names if name.startswith(("hybridmf.libs/", "hybridmf/.dylibs/"))]
    names = [name for name in names if name not in bundled]
    modules = [name for name in names if name.endswith((".so", ".pyd"))]
    package = {
        path
        for path in (source / "hybridmf").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed", ".json", ".xz", ".plans")
    }
    wanted = {str(path.relative_to(source)) for path in package}
    wanted |= {f"hybridmf/{path.relative_to(source)}" for path in (source / "cuda").rglob("*") if path.is_file()}
    problems = differences("wheel", wanted, set(names) - set(metadata) - set(modules))
    problems += differences(
        "wheel (extension modules)",
        {str(path.relative_to(source).with_suffix("")) for path in (source / "hybridmf").rglob("*.pyx")},
        {name.split(".")[0] for name in modules},
    )
    licenses = ["LICENSE", *(f"LICENSE-{path.name.split('-')[0].split('.')[0]}.txt" for path in map(Path, bundled))]
    for license in licenses:  # those of libraries that auditwheel, delocate or delvewheel added
        if not any(name.endswith(f"/{license}") for name in metadata):
            problems.append(f"wheel lacks {license}")
    return problems + [f"{name}: see STYLE, cuda/ must not be a package" for name in names if "cuda/__init__" in name]


def check(source: Path, path: str) -> list[str]:
    """The problems of one distribution."""
    return (check_wheel if path.endswith(".whl") else check_sdist)(source, path)


if __name__ == "__main__":
    source, paths = Path(sys.argv[1]), sys.argv[2:]
    sys.exit("\n".join(f"{Path(path).name}: {problem}" for path in paths for problem in check(source, path)) or 0)
