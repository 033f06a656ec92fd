"""Extensions, OpenMP flags, Cython directives and the cuda/ -> hybridmf/cuda mapping; all else is in pyproject.toml.

Environment variables read at build time
    HYBRIDMF_DEBUG=1          bounds and None checks in the Cython code, no optimization, debug symbols
    HYBRIDMF_SANITIZE=address build the extensions with AddressSanitizer (.ci/asan does, and runs the tests on them)
    HYBRIDMF_NO_OPENMP=1      build without OpenMP (one thread)
    CFLAGS                    the compiler's own; without it a build has no debug symbols
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("HYBRIDMF_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("HYBRIDMF_SANITIZE", "")
OPENMP = os.environ.get("HYBRIDMF_NO_OPENMP", "0") in ("", "0")

# One C file per instruction set, chosen at run time (hybridmf/native/kernels.c): no -march flag reaches a wheel. One
# extension, _kernels, links them all; the others get tables of functions from it.
KERNELS = [f"hybridmf/native/kernels{name}.c" for name in ("", "_portable", "_avx2", "_avx512")]
CCD_KERNELS = [f"hybridmf/native/ccd_{name}.c" for name in ("kernels", "portable", "avx2", "avx512")]
HEADERS = [f"hybridmf/native/{name}.h" for name in ("kernels", "kernels_impl", "sgd_impl", "ccd_kernels", "ccd_impl")]


def compiler_flags(compiler_type: str) -> tuple[list[str], list[str]]:
    """Compile and link arguments: MSVC, or GCC and clang."""
    if compiler_type == "msvc":
        return ["/std:c11", *(["/Od", "/Zi"] if DEBUG else ["/O2"])], ["/DEBUG"] if DEBUG else []
    # neither errno nor floating point traps are looked at: results are tested for NaN and infinity instead
    compile_args = ["-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-unused-function"]
    if not SANITIZE:
        # Python's own flags mostly have -g, which makes a build a third longer for the sake of whoever debugs
        symbols = [] if "CFLAGS" in os.environ else ["-g0"]
        return [*compile_args, *(["-O0", "-g"] if DEBUG else ["-O3", *symbols])], []
    sanitize = f"-fsanitize={SANITIZE}"
    # no -O1: what it saves the tests, it takes the compiler three times over
    return [*compile_args, "-O0", "-g", "-fno-omit-frame-pointer", sanitize], [sanitize]


def openmp_flags(compiler_type: str) -> tuple[list[str], list[str]]:
    """OpenMP switches; macOS's clang takes them through the preprocessor and needs libomp at link time."""
    if not OPENMP:
        return [], []
    if compiler_type == "msvc":
        return ["/openmp"], []
    if sys.platform == "darwin":
        return ["-Xpreprocessor", "-fopenmp"], ["-lomp"]
    return ["-fopenmp"], ["-fopenmp"]


def remembered_options() -> str:
    """Path of a file that changes when the options above do: what depends on it is then built anew."""
    path = Path("build", "options.txt")
    text = f"debug={DEBUG} sanitize={SANITIZE} openmp={OPENMP}\n"
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
        compile_args, link_args = compiler_flags(self.compiler.compiler_type)
        openmp_compile_args, openmp_link_args = openmp_flags(self.compiler.compiler_type)
        for extension in self.extensions:
            extension.depends = [*extension.depends, options]
            extension.extra_compile_args += compile_args + openmp_compile_args
            extension.extra_link_args += link_args + openmp_link_args
        super().build_extensions()


def extensions() -> list[Extension]:
    """Describe the extension modules. They use typed memoryviews, so no NumPy headers are needed."""
    with_kernels = {"include_dirs": ["hybridmf/native"], "depends": HEADERS}
    kernels = ["hybridmf/native/_kernels.pyx", *KERNELS, *CCD_KERNELS]
    return cythonize(
        [
            Extension("hybridmf._openmp", ["hybridmf/_openmp.pyx"]),
            Extension("hybridmf._formats", ["hybridmf/_formats.pyx"]),
            Extension("hybridmf.data._spelling", ["hybridmf/data/_spelling.pyx"]),
            Extension("hybridmf.native._kernels", kernels, **with_kernels),
            Extension("hybridmf.native._als", ["hybridmf/native/_als.pyx"], **with_kernels),
            Extension("hybridmf.native._ccd", ["hybridmf/native/_ccd.pyx"], **with_kernels),
            Extension("hybridmf.native._draw", ["hybridmf/native/_draw.pyx"], **with_kernels),
            Extension("hybridmf.native._rankings", ["hybridmf/native/_rankings.pyx"]),
            Extension("hybridmf.native._sgd", ["hybridmf/native/_sgd.pyx"], **with_kernels),
            Extension("hybridmf.native._topk", ["hybridmf/native/_topk.pyx"], **with_kernels),
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
        # cuda/ is carried as data of a "package" that has no __init__.py; an editable install reads it where it is.
        packages=[*find_packages(include=["hybridmf", "hybridmf.*"]), "hybridmf.cuda"],
        package_dir={"hybridmf.cuda": "cuda"},
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildExt},
    )
