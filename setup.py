"""Extensions, OpenMP flags, Cython directives and the cuda/ -> hybridmf/cuda mapping; all else is in pyproject.toml.

Environment variables read at build time
    HYBRIDMF_DEBUG=1          bounds and None checks in the Cython code, no optimization, debug symbols
    HYBRIDMF_SANITIZE=address build the extensions with AddressSanitizer (.ci/asan does, and runs the tests on them)
    HYBRIDMF_NO_OPENMP=1      build without OpenMP (one thread)
    LIBOMP_PREFIX=folder      macOS: the folder with LLVM's include/omp.h and lib/libomp.dylib, if it is not Homebrew's
    CFLAGS                    the compiler's own; without it a build has no debug symbols

From Python 3.12 on the modules use the limited API alone: one wheel (cp312-abi3) serves every later version.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

DEBUG = os.environ.get("HYBRIDMF_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("HYBRIDMF_SANITIZE", "")
OPENMP = os.environ.get("HYBRIDMF_NO_OPENMP", "0") in ("", "0")

# Python 3.11's limited API lacks calls without a tuple of arguments, a free-threaded Python has none before 3.15
LIMITED_API = (
    sys.implementation.name == "cpython"
    and sys.version_info >= (3, 12)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)

# One C file per instruction set, chosen at run time (hybridmf/native/kernels.c): no -march flag reaches a wheel. One
# extension, _kernels, links them all; the others get tables of functions from it.
KERNELS = [f"hybridmf/native/kernels{name}.c" for name in ("", "_portable", "_avx2", "_avx512", "_neon")]
# Modules with loops that the compiler has to vectorize. The others call these kernels: -O3 takes the compiler 2.4 times
# as long there and makes no fit or request faster. Conjugate gradients in _als take 1.2 times as long with -O2.
VECTORIZED = ("hybridmf.native._kernels", "hybridmf.native._als")
CCD_KERNELS = [f"hybridmf/native/ccd_{name}.c" for name in ("kernels", "portable", "avx2", "avx512")]
HEADERS = [f"hybridmf/native/{name}.h" for name in ("kernels", "kernels_impl", "sgd_impl", "ccd_kernels", "ccd_impl")]


def compiler_flags(optimization: str) -> tuple[list[str], list[str]]:
    """Compile and link arguments for GCC and clang; clang-cl takes those of them that it does not ignore."""
    # neither errno nor floating point traps are looked at: results are tested for NaN and infinity instead
    compile_args = ["-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-unused-function"]
    if not SANITIZE:
        # Python's own flags mostly have -g, which makes a build a third longer for the sake of whoever debugs
        symbols = [] if "CFLAGS" in os.environ else ["-g0"]
        return [*compile_args, *(["-O0", "-g"] if DEBUG else [optimization, *symbols])], []
    sanitize = f"-fsanitize={SANITIZE}"
    # no -O1: what it saves the tests, it takes the compiler three times over
    return [*compile_args, "-O0", "-g", "-fno-omit-frame-pointer", sanitize], [sanitize]


def windows_flags(optimization: str) -> tuple[list[str], list[str]]:
    """The same for clang-cl, whose options for GCC's extensions follow /clang:."""
    kept = ["/clang:-ffp-contract=fast", "/clang:-fno-math-errno", "-Wno-unused-function"]
    return [*kept, *(["/Od", "/Z7"] if DEBUG else [f"/clang:{optimization}"])], ["/DEBUG"] if DEBUG else []


def openmp_flags() -> tuple[list[str], list[str]]:
    """OpenMP switches; macOS's clang takes them through the preprocessor and needs libomp at link time."""
    if not OPENMP:
        return [], []
    if sys.platform == "win32":
        llvm = Path(clang_cl()).parents[1]
        return ["-openmp"], ["libomp.lib", f"/LIBPATH:{llvm / 'lib'}"]
    if sys.platform == "darwin":
        libomp = libomp_prefix()
        include, library = ([f"-I{libomp}/include"], [f"-L{libomp}/lib"]) if libomp else ([], [])
        return ["-Xpreprocessor", "-fopenmp", *include], [*library, "-lomp"]
    return ["-fopenmp"], ["-fopenmp"]


def libomp_prefix() -> str | None:
    """macOS: the folder of LLVM's OpenMP library, by LIBOMP_PREFIX, of conda or of Homebrew; None if there is none."""
    named = os.environ.get("LIBOMP_PREFIX")
    if named and not Path(named, "include", "omp.h").exists():
        raise SystemExit(f"LIBOMP_PREFIX={named!r} has no include/omp.h; expected a folder with include/ and lib/")
    folders = [named, sys.prefix, "/opt/homebrew/opt/libomp", "/usr/local/opt/libomp"]
    return next((folder for folder in folders if folder and Path(folder, "include", "omp.h").exists()), None)


def clang_cl() -> str:
    """Windows: the path of clang-cl. The kernels need vector extensions that MSVC's cl lacks."""
    places = [shutil.which("clang-cl"), Path(os.environ.get("PROGRAMFILES", ""), "LLVM", "bin", "clang-cl.exe")]
    found = next((str(place) for place in places if place and Path(place).exists()), None)
    if found is None:
        raise SystemExit("hybridmf needs clang-cl on Windows: install LLVM (winget install LLVM.LLVM)")
    return found


def remembered_options() -> str:
    """Path of a file that changes when the options above do: what depends on it is then built anew."""
    path = Path("build", "options.txt")
    text = f"debug={DEBUG} sanitize={SANITIZE} openmp={OPENMP} limited={LIMITED_API}\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(path)


class BuildExt(build_ext):
    """Adds what is only known once a build has begun: flags, and whether options have changed."""

    def finalize_options(self) -> None:  # noqa: D102
        super().finalize_options()
        if self.parallel is None:
            self.parallel = os.cpu_count() or 1

    def build_extensions(self) -> None:  # noqa: D102
        options = remembered_options()
        flags = compiler_flags
        if self.compiler.compiler_type == "msvc":
            flags = windows_flags
            self.compiler.initialize()
            self.compiler.cc = clang_cl()
        openmp_compile_args, openmp_link_args = openmp_flags()
        for extension in self.extensions:
            compile_args, link_args = flags("-O3" if extension.name in VECTORIZED else "-O1")
            extension.depends = [*extension.depends, options]
            extension.extra_compile_args += compile_args + openmp_compile_args
            extension.extra_link_args += link_args + openmp_link_args
        super().build_extensions()


class Editable(editable_wheel):
    """An editable install puts the checkout on the path, where mypy, pyright and editors find the package, too.

    With cuda/ mapped into the package setuptools would install an import hook, which only Python follows.
    """

    def finalize_options(self) -> None:  # noqa: D102
        self.distribution.packages = find_packages(include=["hybridmf", "hybridmf.*"])
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


def extension(name: str, sources: list[str] | None = None, **options: Any) -> Extension:
    """The module `name` of the package, by default of the one .pyx file that has its name."""
    full = f"hybridmf.{name}"
    if LIMITED_API:
        options |= {"py_limited_api": True, "define_macros": [("Py_LIMITED_API", "0x030C0000")]}
    return Extension(full, sources or [full.replace(".", "/") + ".pyx"], **options)


def extensions() -> list[Extension]:
    """Describe the extension modules. They use typed memoryviews, so no NumPy headers are needed."""
    with_kernels = {"include_dirs": ["hybridmf/native"], "depends": HEADERS}
    kernels = ["hybridmf/native/_kernels.pyx", *KERNELS, *CCD_KERNELS]
    return cythonize(
        [
            extension("_openmp"),
            extension("_formats"),
            extension("data._spelling"),
            extension("native._kernels", kernels, **with_kernels),
            extension("native._als", **with_kernels),
            extension("native._ccd", **with_kernels),
            extension("native._draw", **with_kernels),
            extension("native._rankings"),
            extension("native._sgd", **with_kernels),
            extension("native._topk", **with_kernels),
        ],
        nthreads=os.cpu_count() or 1,
        # Cython looks at time stamps only, so C with and without checks lies in different folders.
        build_dir="build/cython-debug" if DEBUG else "build/cython",
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "nonecheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
            "autotestdict": False,  # no doctests in .pyx files, so no __test__ that the stubs would have to declare
        },
    )


if __name__ == "__main__":  # not in the processes that Cython may start, which import this file
    setup(
        # cuda/ is carried as data of a "package" that has no __init__.py; an editable install reads it where it is
        packages=[*find_packages(include=["hybridmf", "hybridmf.*"]), "hybridmf.cuda"],
        package_dir={"hybridmf.cuda": "cuda"},
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildExt, "editable_wheel": Editable},
        options={"bdist_wheel": {"py_limited_api": "cp312"}} if LIMITED_API else {},
    )
