"""Extensions, OpenMP flags, Cython directives and the cuda/ -> hybridmf/cuda mapping; all else is in pyproject.toml.

Environment variables read at build time
    HYBRIDMF_DEBUG=1          bounds and None checks in the Cython code, no optimization, debug symbols
    HYBRIDMF_SANITIZE=address build the extensions with AddressSanitizer (run them with libasan preloaded)
    HYBRIDMF_NO_OPENMP=1      build without OpenMP (one thread)
"""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DEBUG = os.environ.get("HYBRIDMF_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("HYBRIDMF_SANITIZE", "")
OPENMP = os.environ.get("HYBRIDMF_NO_OPENMP", "0") in ("", "0")

# One C file per instruction set, chosen at run time (hybridmf/cpu/kernels.c): no -march flag reaches a wheel.
KERNELS = [f"hybridmf/cpu/kernels{name}.c" for name in ("", "_portable", "_avx2", "_avx512")]
KERNEL_HEADERS = ["hybridmf/cpu/kernels.h", "hybridmf/cpu/kernels_impl.h"]


def compiler_flags(compiler_type: str) -> tuple[list[str], list[str]]:
    """Compile and link arguments for MSVC, macOS clang (libomp) and GCC / clang elsewhere."""
    if compiler_type == "msvc":
        return ["/Od", "/Zi"] if DEBUG else ["/O2"], []
    compile_args = ["-O0", "-g"] if DEBUG else ["-O3"]
    compile_args += ["-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-unused-function"]
    link_args: list[str] = []
    if SANITIZE:
        compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g", "-O1"]
        link_args += [f"-fsanitize={SANITIZE}"]
    return compile_args, link_args


def openmp_flags(compiler_type: str) -> tuple[list[str], list[str]]:
    """OpenMP switches; macOS's clang takes them through the preprocessor and needs libomp at link time."""
    if not OPENMP:
        return [], []
    if compiler_type == "msvc":
        return ["/openmp"], []
    if sys.platform == "darwin":
        return ["-Xpreprocessor", "-fopenmp"], ["-lomp"]
    return ["-fopenmp"], ["-fopenmp"]


class BuildExt(build_ext):
    """Adds the flags once the compiler is known."""

    def build_extensions(self) -> None:  # noqa: D102
        for flags in (compiler_flags, openmp_flags):
            compile_args, link_args = flags(self.compiler.compiler_type)
            for extension in self.extensions:
                extension.extra_compile_args += compile_args
                extension.extra_link_args += link_args
        super().build_extensions()


class BuildPy(build_py):
    """Carries cuda/ into the package as hybridmf/cuda (an editable install reads the checkout's folder instead)."""

    def _kernel_files(self) -> list[tuple[Path, Path]]:
        target = Path(self.build_lib) / "hybridmf" / "cuda"
        return [(source, target / source.name) for source in sorted((ROOT / "cuda").iterdir()) if source.is_file()]

    def run(self) -> None:  # noqa: D102
        super().run()
        if self.editable_mode:
            return
        for source, target in self._kernel_files():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: D102
        return super().get_outputs(include_bytecode) + [str(target) for _, target in self._kernel_files()]


def extension(name: str, sources: list[str], depends: list[str]) -> Extension:
    """One extension module; NumPy 2 headers also serve NumPy 1.25 and later at run time."""
    return Extension(
        name,
        sources,
        depends=depends,
        include_dirs=[np.get_include(), "hybridmf/cpu"],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
    )


extensions = [
    extension("hybridmf._formats", ["hybridmf/_formats.pyx"], []),
    extension("hybridmf.cpu._als", ["hybridmf/cpu/_als.pyx", *KERNELS], KERNEL_HEADERS),
    extension("hybridmf.cpu._topk", ["hybridmf/cpu/_topk.pyx", *KERNELS], KERNEL_HEADERS),
]

setup(
    ext_modules=cythonize(
        extensions,
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "nonecheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
        },
    ),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
