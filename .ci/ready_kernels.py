"""Compiles the kernels that wheels carry, for each architecture, with NVRTC and without a GPU.

    python .ci/ready_kernels.py [ARCHITECTURE ...]      in a built checkout with the extra "test"; by default all

The archives are hybridmf/device/ready/sm_*.tar.xz, which git ignores. They hold the kernels of fits, recommendations
and evaluations at the usual ranks with the default settings; kernels that are in an archive are not compiled again.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hybridmf as hmf
from hybridmf.core.files import write_atomically
from hybridmf.device import ready
from hybridmf.device.compiler import Program
from hybridmf.device.cuda import options_for, program_text
from hybridmf.plan.dispatch import signature_of
from hybridmf.plan.types import Plan
from hybridmf.tools.prepare import all_programs_of
from support.compiler import cubin_of
from support.devices import SPECS

SPECS_READY = {key: SPECS[key] for key in (80, 86, 90, 100, 120)} | {89: replace(SPECS[86], capability=(8, 9))}
RANKS = (16, 32, 64, 128)
SHAPES = (((138_493, 26_744), 20_000_263), ((1_000_000, 100_000), 3_000_000))
"""Users, items and entries: of long rows, and of short ones, which the dual form solves."""


def plans(architecture: int) -> list[Plan]:
    """The fits whose kernels an archive holds."""
    device = SimpleNamespace(spec=SPECS_READY[architecture])
    models = [kind(rank, device="cuda") for rank in RANKS for kind in (hmf.ImplicitALS, hmf.ExplicitALS)]
    with mock.patch("hybridmf.device.cuda.open_device", return_value=device):
        return [hmf.plan(shape=shape, nnz=nnz, model=model) for model in models for shape, nnz in SHAPES]


def programs(architecture: int) -> list[Program]:
    """The programs of an architecture, each once."""
    device = SimpleNamespace(spec=SPECS_READY[architecture])
    found = (all_programs_of(device, plan) for plan in plans(architecture))
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def compiled(job: tuple[int, Program]) -> tuple[str, bytes]:
    """Key and cubin of a program."""
    architecture, (source, name, constants) = job
    text, options = program_text(source, name, constants), options_for(source)
    return ready.key_of(text, name, options), cubin_of(text, options, architecture)


def missing(architecture: int, known: dict[str, bytes]) -> Iterator[tuple[int, Program]]:
    """Jobs for what an archive does not hold."""
    for source, name, constants in programs(architecture):
        if ready.key_of(program_text(source, name, constants), name, options_for(source)) not in known:
            yield architecture, (source, name, constants)


def write(architecture: int, pool: Executor) -> Path:
    """Write the archive of an architecture, with what is there and still needed; its path."""
    path = ready.archive_of(SPECS_READY[architecture].capability)
    known = ready.read(path) if path.is_file() else {}
    made = known | dict(pool.map(compiled, missing(architecture, known)))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
        for source, name, constants in sorted(programs(architecture), key=lambda program: program[1:]):
            key = ready.key_of(program_text(source, name, constants), name, options_for(source))
            member = tarfile.TarInfo(key)
            member.size = len(made[key])
            archive.addfile(member, io.BytesIO(made[key]))
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
    signatures = sorted({signature_of(plan) for plan in plans(architecture)})
    write_atomically(ready.plans_of(SPECS_READY[architecture].capability), "\n".join(signatures).encode())
    return path


if __name__ == "__main__":
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for architecture in map(int, sys.argv[1:] or SPECS_READY):
            started = time.perf_counter()
            path = write(architecture, pool)
            print(f"{path}: {path.stat().st_size} bytes, {time.perf_counter() - started:.0f} s")
