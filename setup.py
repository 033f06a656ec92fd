"""Extensions, OpenMP flags, Cython directives and the cuda/ -> hybridmf/cuda mapping; all else is in pyproject.toml.

Environment variables read at build time
    HYBRIDMF_DEBUG=1          bounds and None checks in the Cython code, no optimization, debug symbols
    HYBRIDMF_SANITIZE=address build the extensions with AddressSanitizer (.ci/asan does, and runs the tests on them)
    HYBRIDMF_NO_OPENMP=1      build without OpenMP (one thread)
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

# One C file per instruction set, chosen at run time (hybridmf/cpu/kernels.c): no -march flag reaches a wheel.
KERNELS = [f"hybridmf/cpu/kernels{name}.c" for name in ("", "_portable", "_avx2", "_avx512")]
CCD_KERNELS = [f"hybridmf/cpu/ccd_{name}.c" for name in ("kernels", "portable", "avx2", "avx512")]
KERNEL_HEADERS = ["hybridmf/cpu/kernels.h", "hybridmf/cpu/kernels_impl.h", "hybridmf/cpu/sgd_impl.h"]
CCD_HEADERS = ["hybridmf/cpu/ccd_kernels.h", "hybridmf/cpu/ccd_impl.h"]


def compiler_flags(compiler_type: str) -> tuple[list[str], list[str]]:
    """Compile and link arguments: MSVC, or GCC and clang."""
    if compiler_type == "msvc":
        return ["/std:c11", *(["/Od", "/Zi"] if DEBUG else ["/O2"])], ["/DEBUG"] if DEBUG else []
    # neither errno nor floating point traps are looked at: results are tested for NaN and infinity instead
    compile_args = ["-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-unused-function"]
    if not SANITIZE:
        return [*compile_args, *(["-O0", "-g"] if DEBUG else ["-O3"])], []
    sanitize = f"-fsanitize={SANITIZE}"
    return [*compile_args, "-O1", "-g", "-fno-omit-frame-pointer", sanitize], [sanitize]


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
    """Adds what is only known once a build has begun: the compiler's flags, and whether the options have changed."""

    def build_extensions(self) -> None:  # noqa: D102
        options = remembered_options()
        for extension in self.extensions:
            extension.depends = [*extension.depends, options]
            for flags in (compiler_flags, openmp_flags):
                compile_args, link_args = flags(self.compiler.compiler_type)
                extension.extra_compile_args += compile_args
                extension.extra_link_args += link_args
        super().build_extensions()


def extensions() -> list[Extension]:
    """Describe the extension modules. They use typed memoryviews, so no NumPy headers are needed."""
    with_kernels = {"include_dirs": ["hybridmf/cpu"], "depends": [*KERNEL_HEADERS, *CCD_HEADERS]}
    return cythonize(
        [
            Extension("hybridmf._openmp", ["hybridmf/_openmp.pyx"]),
            Extension("hybridmf._formats", ["hybridmf/_formats.pyx"]),
            Extension("hybridmf.cpu._als", ["hybridmf/cpu/_als.pyx", *KERNELS], **with_kernels),
            Extension("hybridmf.cpu._ccd", ["hybridmf/cpu/_ccd.pyx", *KERNELS, *CCD_KERNELS], **with_kernels),
            Extension("hybridmf.cpu._sgd", ["hybridmf/cpu/_sgd.pyx", *KERNELS], **with_kernels),
            Extension("hybridmf.cpu._topk", ["hybridmf/cpu/_topk.pyx", *KERNELS], **with_kernels),
        ],
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


setup(
    # cuda/ is carried as data of a "package" that has no __init__.py; an editable install reads it where it is.
    packages=[*find_packages(include=["hybridmf", "hybridmf.*"]), "hybridmf.cuda"],
    package_dir={"hybridmf.cuda": "cuda"},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExt},
)
