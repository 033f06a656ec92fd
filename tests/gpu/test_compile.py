"""Every kernel of cuda/ compiled by NVRTC, which needs no GPU: no error, no spilled register, no stack frame.

By default one configuration of `EVERY_RUN` is compiled for the H200 (sm_90), in single precision: tensor cores, walks
and warpgroups, whose PTX the emulator replaces. Exhaustive tests compile one of each kernel in both precisions, the
usual ranks for the H200 with all its tables, solvers and kinds of feedback, and one configuration of each kernel for
the other architectures; with ``HYBRIDMF_ALL_KERNELS=1`` every default configuration for all of them. `.ci/gpu`, which
must run whenever a kernel changes, runs the exhaustive tests.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridmf.device.cuda import KERNEL
from hybridmf.gpu import (
    dual,
    fused,
)
from hybridmf.gpu.launch import constant_texts, kernel_folder
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.plan import fused as plan_fused
from hybridmf.plan import tables
from support.builds import BUILDS, builds_of
from support.compiler import Program, Resources, compile_program, needs_nvrtc, resources_of
from support.devices import SPECS

needs_nvrtc()

exhaustive = pytest.mark.exhaustive

ALL = os.environ.get("HYBRIDMF_ALL_KERNELS", "0") not in ("", "0")
USUAL_RANKS = (16, 64, 100, 128)
DEFAULT_PRECISION = fused.PRECISION_CODES["float32"]


def excused_bytes(program: Program, function: str) -> float:
    """How much local memory a function of a program may use: none, but for six cases."""
    if {"ACCUMULATORS=local", "UNROLLED=0"} <= set(program.constants):
        return float("inf")  # more sums than registers, as in the paper; it is there to be measured against
    if program.file == "fused_als.cu" and {"RANK=64", "RANK=96", "RANK=100", "RANK=128"} & set(program.constants):
        return FEW_SCALARS
    if program.file == "cholesky_sums.cu":
        return FEW_SCALARS  # 14 values at rank 100; with fewer systems on a multiprocessor it would be slower
    if program.file in ("cholesky.cu", "dual_rows.cu") and "RANK=64" in program.constants:
        return ONE_SCALAR
    if function == "blocked":
        return ONE_SCALAR  # blocks that walk long rows leave registers to those of short rows: 128 a thread
    if program.file == "top_k.cu" and program.architecture < 90:
        return ONE_SCALAR
    return 0


ONE_SCALAR = 24
FEW_SCALARS = 208
"""Stack, stores and loads together: 2 to 12 scalars and right-hand sides beside the accumulators, outside of the
products. What avoids them was 20 % slower at rank 100 (four warps a row instead of two), measured on an H200."""


# ------------------------------------------------------------------------------------------------- what is compiled


def builds_for(architecture: int, ranks: Sequence[int] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Builds of all modules; the fused kernels only where the plan may choose them (tensor cores from sm_80 on)."""
    spec = SPECS[architecture]
    for module in BUILDS:
        if module not in (fused, dual) or not plan_fused.supports(64, "float32", spec):
            yield from builds_of(module, spec, ranks)


def large_systems(architecture: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The build of the kernel that only the largest ranks have, where tensor cores are."""
    for build in builds_of(fused, SPECS[architecture], (128,)) if architecture >= 80 else ():
        if build[0] == "cholesky_sums.cu":
            yield build


def warpgroup_builds(ranks: Sequence[int]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Builds of the sums for Hopper, whose products the compiler may serialize at one rank and not at another."""
    return (build for build in builds_of(fused, SPECS[90], ranks) if build[0] == "warpgroup_sums.cu")


def one_of_each_kernel(builds: Iterable[tuple[str, str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
    """The first build of each kernel and type of number (their code differs most)."""
    first: dict[Any, tuple[str, str, dict[str, Any]]] = {}
    for build in builds:
        file, kernel, constants = build
        first.setdefault((file, kernel, str(constants.get("REAL")), constants.get("ACCUMULATORS")), build)
    return list(first.values())


def of_each_run(constants: dict[str, Any]) -> bool:
    """Whether a build is one of those for the H200: all are, but that solvers take turns beside rarer precisions.

    The fused kernels know 6 precisions, 2 solvers and 3 kinds of feedback, 36 programs of 5 to 8 s. Of the 5 precisions
    that have to be asked for, each is compiled with either solver and with each kind of feedback.
    """
    precision = constants.get("ARITHMETIC", DEFAULT_PRECISION)
    if "SOLVER" not in constants:
        return True
    return precision == DEFAULT_PRECISION or constants["SOLVER"] == (precision + constants["HAS_OFFSETS"]) % 2


def shipped_builds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Builds of what ships for the H200, for all kinds of entries."""
    entries = itertools.chain.from_iterable(table.entries for table in tables.shipped_tables(SPECS[90]))
    for entry in (entry for entry in entries if entry.kernel in SPACES):
        space = SPACES[entry.kernel]
        config = space.named(entry.facts, entry.config)
        yield from itertools.chain(*space.programs(entry.facts, config, SPECS[90]))


def programs() -> list[Program]:
    """Each program once, the slow ones first."""
    chosen = []
    for architecture in SPECS:
        if ALL:
            builds = list(builds_for(architecture, None))
        elif architecture == 90:
            builds = [build for build in builds_for(architecture, USUAL_RANKS) if of_each_run(build[2])]
        else:
            builds = one_of_each_kernel([*builds_for(architecture, (64,)), *large_systems(architecture)])
        if architecture == 90:
            builds += [*shipped_builds(), *warpgroup_builds((112, 120))]
        chosen += [Program(file, constant_texts(constants), architecture) for file, _, constants in builds]
    return sorted(dict.fromkeys(chosen), key=lambda program: program.file != "fused_als.cu")


PROGRAMS = programs()


def usual_programs() -> set[Program]:
    """One of each kernel and type for the H200, of a small rank, which compiles fastest; of the fused kernels one."""
    builds = one_of_each_kernel(build for build in builds_for(90, (16, 64)) if build[0] != "fused_als.cu")
    fused_builds = (build[2] for build in builds_of(fused, SPECS[90], (16,)) if build[0] == "fused_als.cu")
    usual = [each for each in fused_builds if each["ARITHMETIC"] == DEFAULT_PRECISION]
    builds += [("fused_als.cu", "", each) for each in usual if each["IMPLICIT"] and not each["HAS_OFFSETS"]]
    builds += one_of_each_kernel(warpgroup_builds((100,)))
    return {Program(file, constant_texts(constants), 90) for file, _, constants in builds}


USUAL = usual_programs()
EVERY_RUN = ("fused_als.cu", "msgd.cu", "warpgroup_sums.cu")


# ------------------------------------------------------------------------------------------------------------- tests


def parameter(program: Program) -> Any:
    usual = program in USUAL
    every_run = usual and program.file in EVERY_RUN and "REAL=double" not in program.constants
    return pytest.param(
        program, id=f"usual-{program}" if usual else str(program), marks=() if every_run else pytest.mark.exhaustive
    )


@pytest.mark.parametrize("program", [parameter(program) for program in PROGRAMS])
def test_compiles_without_local_memory(program: Program) -> None:
    log = compile_program(program)
    report = resources_of(log)
    assert report, f"no resource report in the log:\n{log}"
    assert not [each for each in report if each.local_bytes > excused_bytes(program, each.function)]
    assert "wgmma" not in log and "warpgroup.wait" not in log, f"products wait for each other:\n{log}"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.file, marks=() if program.file == "msgd.cu" else exhaustive)
        for program in sorted(USUAL, key=str)
        if "REAL=double" not in program.constants
    ],
)
def test_compiles_with_delays(program: Program) -> None:
    """For tests on a GPU (.ci/gpu); registers may be spilled."""
    log = compile_program(replace(program, constants=(*program.constants, "HYBRIDMF_DELAYS=1")))
    assert resources_of(log)
    assert "wgmma" not in log


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    files = {path.name for path in kernel_folder().glob("*.cu")}
    for architecture, spec in SPECS.items():
        compiled = {program.file for program in PROGRAMS if program.architecture == architecture}
        on_tensor_cores = {"fused_als.cu", "split.cu", "dual_rows.cu", "basis.cu", "cholesky.cu", "cholesky_sums.cu"}
        missing = set() if architecture == 90 else {"warpgroup_sums.cu"}
        assert files - compiled == missing | (on_tensor_cores if spec.capability < (8, 0) else set())


def test_shipped_configurations_are_compiled() -> None:
    """Among them tiles of 80, which no usual rank has."""
    texts = [set(program.constants) for program in PROGRAMS if program.file == "sparse_syrk.cu"]
    for implicit, offsets in ((0, 0), (1, 0), (0, 1)):
        assert any({"NB=80", "KB=8", f"IMPLICIT={implicit}", f"HAS_OFFSETS={offsets}"} <= text for text in texts)


def test_every_precision_is_compiled_with_every_solver_and_feedback() -> None:
    names = ("ARITHMETIC", "SOLVER", "HAS_OFFSETS", "IMPLICIT")
    found = set()
    for program in PROGRAMS:
        constants = dict(constant.split("=") for constant in program.constants)
        if (program.file, program.architecture, constants.get("RANK")) == ("fused_als.cu", 90, "64"):
            found.add(tuple(int(constants[name]) for name in names))
    feedback = ((0, 0), (1, 0), (0, 1))
    for precision in fused.PRECISION_CODES.values():
        for solver in fused.SOLVER_CODES.values():
            assert any(each[:2] == (precision, solver) for each in found)
            assert {(DEFAULT_PRECISION, solver, *kind) for kind in feedback} <= found
        for kind in feedback:
            assert any((each[0], *each[2:]) == (precision, *kind) for each in found)


def test_every_kernel_is_in_a_build() -> None:
    """A kernel that no builds name may still be in the program of another one."""
    builds = list(builds_for(90, None))
    for path in kernel_folder().glob("*.cu"):
        kernels = set(
            re.findall(r"__global__[^;{]*?\b(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)", "", path.read_text()))
        )
        named = {kernel for file, kernel, _ in builds if file == path.name}
        assert kernels and named <= kernels


def test_kernels_are_compiled_one_by_one() -> None:
    """Each launch bounds and modifier that the sources have is understood, and the code is that of the whole file."""
    for path in kernel_folder().glob("*.cu"):
        text = path.read_text()
        assert len(KERNEL.findall(text)) == text.count("__global__") > 0, path.name
    whole = Program("transpose.cu", ("REAL=float", "THREADS=256"), 90)
    everything = resources_of(compile_program(whole))
    assert len(everything) > 1
    for each in everything:
        assert resources_of(compile_program(replace(whole, kernel=each.function))) == [each]


def test_errors_of_the_compiler_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void f() { no_such(); }'
    monkeypatch.setattr("support.compiler.source_text", lambda file: source)
    with pytest.raises(RuntimeError, match=r'(?s)sm_90-x.cu- does not compile .*identifier "no_such" is undefined'):
        compile_program(Program("x.cu", (), 90))


def test_local_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that is indexed at run time needs a stack frame."""
    body = "float a[64] = {}; for (int k = 0; k < 99; ++k) a[k * index & 63] += out[k]; out[0] = a[index & 63];"
    source = f'extern "C" __global__ void f(float* out, int index) {{ {body} }}'
    monkeypatch.setattr("support.compiler.source_text", lambda file: source)
    (resources,) = resources_of(compile_program(Program("x.cu", (), 90)))
    assert resources.function == "f"
    assert resources.stack >= 256
    assert resources.local_bytes >= resources.stack


def test_resources_are_read_from_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert resources_of(log) == [Resources("f", 8, 12, 16), Resources("g", 0, 0, 0)]
