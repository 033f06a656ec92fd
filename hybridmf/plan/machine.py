"""Constants of the cost model for a machine, built in or measured, and the file that stores them.

Built-in constants describe one core of a recent server (AVX-512) and an H200. `tools.calibrate` measures those of the
current machine (`hybridmf tune-kernels --calibrate`), and `save` writes them to the user's cache directory, together
with an identification of the hardware. A file of other hardware or another version, or an invalid file, is ignored with
one warning.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core.cache import CACHE_DIR, cache_dir
from ..core.files import write_atomically
from ..device.cuda import DeviceSpec
from ..native import _als

logger = logging.getLogger("hybridmf")


FORMAT = 4  # format version of the file; incremented whenever its meaning changes

NONNEGATIVE_GPU_ROW = 4.0
"""Time of a non-negative row on a GPU, in Cholesky solutions: 3 to 4 times theirs at ranks 32 to 128 from a start near
the solution (32,768 systems on an H200), 6 to 24 times from afar, as in the first iteration."""

Curve = tuple[tuple[float, float], ...]
"""A rate per second at a few numbers of factors, rising: ``((32, 8e10), (64, 1.1e11))``; see `seconds_at`."""


def rate_at(curve: Curve, factors: float) -> float:
    """Rate at a number of factors, interpolated linearly between the anchors in log-log scale.

    Below the first anchor the rate is proportional to the factors, as vectors are partly empty; beyond the last anchor
    it is constant.
    """
    (first, lowest), (last, highest) = curve[0], curve[-1]
    if factors <= first:
        return lowest * factors / first
    if factors >= last:
        return highest
    at = next(k for k, (high, _) in enumerate(curve) if factors <= high)
    (low, slow), (high, fast) = curve[at - 1], curve[at]
    return slow * (factors / low) ** (math.log(fast / slow) / math.log(high / low))


def seconds_at(curve: Curve, work: Callable[[float], float], factors: float) -> float:
    """Seconds for ``work(factors)``, at least those of any lower anchor, since measured rates are noisy.

    Below the first anchor the seconds are constant: vectors are padded, and the remaining time is overhead.

    `work`: flops or bytes as an increasing function of the number of factors.
    """
    factors = max(factors, curve[0][0])
    return max([work(f) / rate for f, rate in curve if f < factors] + [work(factors) / rate_at(curve, factors)])


def system_flops(f: float) -> float:
    """Work of adding an entry to the system of its row."""
    return f * (f + 1)


def solve_flops(f: float) -> float:
    return f**3 / 3 + 2 * f * f


VECTOR_RATES = ("assembly", "solve", "cg", "dense", "subspace")
"""Rates of the CPU that depend on its vector instructions."""


def _times(value: Any, factor: float) -> Any:
    """A constant, a curve, or a dict of these, times a factor."""
    if isinstance(value, dict):
        return {name: _times(one, factor) for name, one in value.items()}
    return tuple((f, rate * factor) for f, rate in value) if isinstance(value, tuple) else value * factor


def _sped_up(rates: Any, speed: float, names: tuple[str, ...], seconds: tuple[str, ...] = ()) -> Any:
    """Rates of the given names times `speed`, and constants in seconds divided by it."""
    changed = {name: _times(getattr(rates, name), speed) for name in names}
    return replace(rates, **changed, **{name: getattr(rates, name) / speed for name in seconds})


@dataclass(frozen=True)
class CpuRates:
    """Rates of one core in float32, and scaling over cores."""

    assembly: Curve = ((8, 8.5e9), (16, 4.0e10), (32, 8.0e10), (64, 1.12e11), (128, 1.35e11))
    """Flop/s of normal equations, f (f + 1) an entry, by our kernels."""
    solve: Curve = ((8, 1.6e9), (16, 4.5e9), (32, 1.6e10), (64, 5.2e10), (128, 1.1e11))
    """Flop/s of Cholesky and substitution, f^3 / 3 + 2 f^2 a row, including all other work per row."""
    dual: float = 3.0e10
    dual_row: float = 7.0e-7
    """Flop/s of rows in the dual form, n^2 (f + 2) + n^3 / 3 + 4 n f for n entries, and seconds for each of them
    besides."""
    product: float = 6.0e10
    """Flop/s of products of factors and a small matrix, f^2 a row where the matrix is triangular."""
    cg: Curve = ((8, 1.0e10), (16, 2.0e10), (32, 2.4e10), (64, 3.9e10), (128, 4.2e10))
    """Flop/s of conjugate gradients, 4 f an entry and pass, also where a row's matrix is formed instead."""
    dense: float = 5.0e10  # flop/s of a product of a Gram matrix and a vector
    subspace: float = 4.7e10  # flop/s of iALS++
    sgd: dict[str, Curve] = field(
        default_factory=lambda: {
            "msgd": ((16, 9.0e9), (32, 1.6e10), (64, 2.6e10), (128, 3.5e10)),
            "hogwild": ((16, 2.8e10), (32, 3.9e10), (64, 5.0e10), (128, 6.4e10)),
            "blocks": ((16, 2.4e10), (32, 3.9e10), (64, 5.4e10), (128, 6.4e10)),
        }
    )
    """Flop/s of an epoch by schedule, in the units of `SgdMethod.flops_per_iteration`."""
    sgd_row: float = 6.0e-8  # seconds for a row of an epoch, without its entries
    ccd_entry: float = 1.9e-9
    ccd_row: float = 4.0e-8  # seconds for one factor of an entry and of a row of CCD++, one inner iteration
    slower: dict[str, float] = field(default_factory=lambda: {"simd": 1.0, "bals": 1.95, "blas3": 4.2, "rank1": 6.0})
    """Times of other assemblies as multiples of ours."""
    row: float = 3.0e-7  # seconds for a row of a solver that builds no system
    region: float = 1.0e-5  # seconds to start and end one parallel region
    sweep: float = 8.0e-5  # seconds of a half sweep with no work: the Python around it
    gram: float = 3.5e-4  # additional fixed seconds of a half sweep of implicit feedback
    fresh: float = 5.0e-10
    """Seconds of all cores together to write a factor to newly allocated memory, if the cache is too small."""
    draw: float = 2.0e-9  # seconds of one core to draw an initial factor and to store the learned one
    fit: float = 4.0e-3  # fixed seconds of Python code around a fit
    gather_bytes: float = 1.2e10
    cached_bytes: float = 5.0e10  # bytes/s of gathered rows of factors from memory, and from the cache
    cache: float = 1.6e7  # effective bytes of cache per core
    memory_bytes: float = 2.0e11  # memory bandwidth of all cores together, in bytes/s
    serial: float = 0.02  # sigma of ``speedup(T) = T / (1 + sigma (T - 1))``

    def scaled(self, speed: float) -> CpuRates:
        """All rates of kernels times `speed`."""
        rates = (*VECTOR_RATES, "dual", "product", "sgd")
        return _sped_up(self, speed, rates, ("dual_row", "sgd_row", "ccd_entry", "ccd_row", "row"))

    def speedup(self, threads: int) -> float:
        """Speed-up of `threads` cores over one (Amdahl 1967, with a constant serial share)."""
        return threads / (1.0 + self.serial * (threads - 1))


@dataclass(frozen=True)
class GpuRates:
    """Rates of one GPU. The built-in ones are of an H200 with 132 multiprocessors and are scaled for other GPUs."""

    multiprocessors: int = 132  # number of multiprocessors of the measured GPU
    assembly: Curve = ((32, 5.4e13), (64, 7.6e13), (100, 7.4e13), (128, 9.8e13))
    """Flop/s of normal equations by the fused kernels, f (f + 1) an entry."""
    solve: Curve = ((32, 5.6e12), (64, 9.5e12), (100, 9.8e12), (128, 1.5e13), (256, 1.46e13), (512, 1.8e13))
    """Flop/s of Cholesky and substitution, f^3 / 3 + 2 f^2 a row."""
    cg: float = 1.6e13  # flop/s of conjugate gradients, 2 f^2 a row and pass
    cg_step: float = 7.0e-10  # seconds per row for the reductions over threads in a CG step, independent of f
    dual_row: float = 2.2e-9
    dual_pair: float = 2.6e-14
    """Seconds for a row in the dual form: fixed, and for each pair of its n entries times f + 128."""
    published: dict[str, Curve] = field(
        default_factory=lambda: {
            "sparse_syrk": ((32, 1.69e13), (64, 1.78e13), (256, 4.2e13)),
            "mo_als": ((32, 1.80e13), (64, 1.87e13), (256, 3.8e13)),
            "bals": ((32, 1.18e13), (64, 1.78e13)),
        }
    )
    """Flop/s of the other assemblies."""
    precision: dict[str, float] = field(
        default_factory=lambda: {"float32": 1.0, "bf16x3": 0.85, "tf32": 0.8, "bf16": 0.44, "float16": 0.67}
    )
    """Time of normal equations in other precisions, as a share of that in float32."""
    float64: float = 2.5  # time in float64 as a multiple of that in float32
    sgd: dict[str, Curve] = field(
        default_factory=lambda: {
            "msgd": ((32, 7.2e12), (64, 1.15e13), (128, 1.68e13), (256, 1.53e13), (512, 1.13e13)),
            "batch_hogwild": ((32, 3.7e12), (128, 9.6e12)),
        }
    )
    """Bytes/s of an epoch by schedule, in the units of `SgdMethod.bytes_per_iteration`."""
    # bench/walk.py, f = 32 to 128
    serial_update: float = 1.4e-7  # seconds for an update of MSGD that depends on the previous one
    solved_update: float = 2.5e-8  # seconds for an update in a row that solves several entries at a time
    ccd: float = 3.8e12  # bytes/s of CCD++, in the units of `CcdMethod.bytes_per_iteration`
    ccd_row: float = 2.5e-10  # seconds for one factor of a row of CCD++
    launch: float = 9.0e-6  # seconds to launch a kernel
    sweep: dict[str, float] = field(default_factory=lambda: {"als": 3.3e-4, "sgd": 2.7e-4, "ccd": 5.0e-4})
    """Seconds of a half sweep with no work, by kind of method: launches, and the Python around them (the run of
    2026-11-27 in bench/results/dispatch.jsonl, 604 x 371 ratings)."""
    gram: float = 4.0e-4  # additional fixed seconds of a half sweep of implicit feedback
    gather_bytes: float = 5.4e12
    cached_bytes: float = 9.3e12  # bytes/s of gathered rows of factors from memory, and from the L2 cache
    upload_bytes: float = 1.0e10  # bytes/s from the caller's arrays to the GPU, through pinned buffers
    fit: dict[str, float] = field(default_factory=lambda: {"als": 3.8e-3, "sgd": 9.6e-3, "ccd": 8.0e-3})
    """Fixed seconds around a fit beyond those on the CPU, by kind of method."""
    row_setup: float = 9.0e-8
    factor_setup: float = 1.0e-9
    """Seconds on the host for a row and for a factor, beyond those of a fit on the CPU and of copies."""
    entry_setup: dict[str, float] = field(
        default_factory=lambda: {"msgd": 2.0e-9, "batch_hogwild": 2.4e-8, "ccd++": 8.0e-9}
    )
    """Seconds on the host for an entry of SGD or CCD++."""
    start: float = 0.4  # seconds of the first use in a process: libraries, pinned buffers
    compile: dict[str, float] = field(
        default_factory=lambda: {
            "fused": 2.0,
            "sparse_syrk": 1.0,
            "mo_als": 1.0,
            "bals": 1.0,
            "msgd": 1.2,
            "batch_hogwild": 0.4,
            "ccd++": 1.2,
        }
    )
    """Seconds to compile the kernels for a new number of factors, by assembly or method."""
    load: float = 0.1  # seconds to load kernels that another process has compiled

    def entry_seconds(
        self,
        rank: int,
        itemsize: int,
        table_bytes: float,
        l2_bytes: float,
        assembly: str = "fused",
        precision: str = "float32",
    ) -> float:
        """Seconds to add an entry to the system of its row, its factors gathered from a table of `table_bytes`."""
        curve = self.assembly if assembly == "fused" else self.published[assembly]
        products = seconds_at(curve, system_flops, rank) * self.precision[precision] * self._wider(itemsize)
        gathered = self.cached_bytes if table_bytes <= l2_bytes else self.gather_bytes
        return max(products, rank * itemsize / gathered)

    def row_seconds(
        self, rank: int, itemsize: int, assembly: str = "fused", cg_steps: int = 0, nonnegative: bool = False
    ) -> float:
        """Seconds to solve the system of a row, exactly, by steps of CG, or for nonnegative factors."""
        wider = self._wider(itemsize)
        row = seconds_at(self.solve, solve_flops, rank) * wider
        if cg_steps:  # solved exactly if the steps cost more than the factorization
            row = min(row, (cg_steps + 1) * (2 * rank * rank / self.cg + self.cg_step) * wider)
        if nonnegative:
            row *= NONNEGATIVE_GPU_ROW
        if assembly != "fused" or nonnegative:  # systems go through memory
            row += 2 * rank * (rank + 1) * itemsize / self.gather_bytes
        return row

    def gram_seconds(self, fixed: float, solved: float, rank: int, itemsize: int) -> float:
        """Seconds of the Gram matrix of implicit feedback: summed over fixed rows, and read for each solved row."""
        summed = 2.0 * rank * rank / rate_at(self.assembly, rank) * self._wider(itemsize)
        return fixed * summed + solved * rank * rank * itemsize / self.cached_bytes

    def _wider(self, itemsize: int) -> float:
        return self.float64 if itemsize == 8 else 1.0

    def scaled(self, multiprocessors: int, capability: tuple[int, int]) -> GpuRates:
        """The rates of another GPU, scaled by the number and the throughput of its multiprocessors.

        Multiprocessors of compute capability 7.5 and 8.0 have half the float32 units of later ones (CUDA C++
        Programming Guide, arithmetic throughput).
        """
        share = multiprocessors / self.multiprocessors * (0.5 if capability <= (8, 0) else 1.0)
        if share == 1.0:
            return self
        return replace(self.sped_up(share), multiprocessors=multiprocessors)

    def sped_up(self, speed: float) -> GpuRates:
        rates = ("assembly", "solve", "cg", "published", "sgd", "ccd", "gather_bytes", "cached_bytes")
        return _sped_up(self, speed, rates, ("dual_row", "dual_pair", "ccd_row"))


@dataclass(frozen=True)
class LinkRates:
    """Rates between memories, files and GPUs, built in: a host with H200s linked all to all by NVLink."""

    pinned_bytes: float = 5.5e10
    fetch_bytes: float = 5.5e10  # bytes/s from page-locked memory to each GPU, and back, with all GPUs active
    # bench/results/out_of_core.jsonl: iterations on a store in the page cache take 97 to 147 ms for 1.58 GB
    disk_bytes: float = 1.3e10  # bytes/s from files to all GPUs together
    copy_bytes: float = 4.24e12  # bytes/s within the memory of a GPU, read and written
    # bench/results/scale.jsonl, task reduction: half sweeps less their sums and solves, on 2 and on 4 GPUs
    reduce_scatter: Curve = ((2, 3.7e11), (4, 1.35e11))
    """Bytes/s sent by each GPU in a reduce-scatter, by number of GPUs; other numbers use the next lower entry."""
    # NCCL on 4 GPUs, arrays of 1 GB: 2.54e11 bytes/s of the whole array, of which each GPU receives three quarters
    all_gather: float = 1.905e11  # bytes/s received by each GPU in an all-gather
    collective: float = 6.0e-5  # latency of a collective in seconds, including its launch
    # bench/results/scale.jsonl: half sweeps on 2 GPUs less half of those on one, divided by two
    rank: float = 1.0e-4
    """Seconds in which one thread launches a half sweep for each of several GPUs in turn: added to it, unless it is
    launched while the one before runs."""
    slab: float = 3.0e-4  # seconds added to a half sweep by each row part, since some kernels end before others start

    def reduce_rate(self, gpus: int) -> float:
        return max((count, rate) for count, rate in self.reduce_scatter if count <= max(gpus, 2))[1]


INSTRUCTION_SETS = {"avx512": 1.0, "avx2": 0.62, "neon": 0.22, "portable": 0.22}
"""Rates of other vector kernels as a share of the built-in ones (ExplicitALS, f = 64, one core of an AMD EPYC). NEON is
not measured: that of portable kernels, whose vectors are as long."""


@dataclass(frozen=True)
class Machine:
    """All hardware constants of the cost model."""

    cpu: CpuRates = field(default_factory=CpuRates)
    gpu: GpuRates = field(default_factory=GpuRates)  # rates of the GPU `gpu_name`, or of an H200 if that is ""
    links: LinkRates = field(default_factory=LinkRates)
    source: str = "built-in constants"  # origin of the constants, as text
    gpu_name: str = ""  # name of the GPU that was measured, or to which the constants are scaled

    def with_gpu(self, spec: DeviceSpec) -> Machine:
        """The machine with the constants of a GPU, measured or scaled from the available ones."""
        if spec.name == self.gpu_name:
            return self
        return replace(self, gpu=self.gpu.scaled(spec.multiprocessors, spec.capability), gpu_name=spec.name)


H200 = Machine()  # built-in constants, of cores with AVX-512


def built_in() -> Machine:
    """Default constants without calibration; rates of arithmetic depend on the instruction set."""
    return Machine(cpu=_sped_up(CpuRates(), INSTRUCTION_SETS.get(_als.instruction_set(), 1.0), VECTOR_RATES))


def constants_text(machine: Machine) -> str:
    """All constants, one per line; those of a GPU only if this machine has it."""
    lines = [f"source {machine.source}"]
    sides: list[tuple[str, Any]] = [("cpu", machine.cpu)]
    if machine.gpu_name:
        sides += [("gpu", machine.gpu), ("link", machine.links)]
    for side, rates in sides:
        lines += [f"{side} {name:16s} {_constant_text(value)}" for name, value in asdict(rates).items()]
    return "\n".join(lines)


def _constant_text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_constant_text(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(f"{rate:.3g} at {f:g}" for f, rate in value)
    return f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------- the file


def calibration_file() -> Path:
    """Path of the file written by `save` and read by `machine`."""
    return cache_dir() / "machine.json"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def identity() -> dict[str, Any]:
    """Identification of the hardware and version for CPU constants."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "instruction_set": _als.instruction_set(),
        "hybridmf": __version__,
    }


def prepare() -> Path:
    """Create the folder of the file and verify that it is writable."""
    path = calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(
            f"constants cannot be kept in {path.parent} ({error}); set {CACHE_DIR} to a folder you can write to"
        ) from error
    return path


def save(machine: Machine, gpu: Mapping[str, Any] | None = None) -> Path:
    """Write measured constants, atomically; `gpu`: name and driver of the GPU that was measured."""
    path = prepare()
    content = {
        "format": FORMAT,
        "identity": identity(),
        "gpu_identity": dict(gpu or {}),
        "source": machine.source,
        "cpu": asdict(machine.cpu),
        "gpu": asdict(machine.gpu),
        "links": asdict(machine.links),
    }
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    machine_at.cache_clear()
    return path


def machine() -> Machine:
    """The constants of this machine: measured if available, else built in."""
    path = calibration_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return machine_at(path, stamp, _als.instruction_set())


@functools.cache
def machine_at(path: Path, stamp: int, instruction_set: str) -> Machine:
    """`machine` for one version of the file, read and validated once; `stamp` 0: there is no file."""
    if not stamp:
        return built_in()
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning(
            "%s is ignored, built-in constants are used: %s; `hybridmf tune-kernels --calibrate` measures them anew",
            path,
            " ".join(str(error).split()) or type(error).__name__,
        )
        return built_in()


def _read(path: Path) -> Machine:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ValueError(f"its format is {found!r}, this version reads {FORMAT}")
    here, there = identity(), content["identity"]
    differing = [name for name in here if there.get(name) != here[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"it belongs to other hardware or another version ({name} {there.get(name)!r}, not {here[name]!r})"
        )
    return Machine(
        cpu=rates_of(CpuRates, content["cpu"]),
        gpu=rates_of(GpuRates, content["gpu"]),
        links=rates_of(LinkRates, content["links"]),
        source=str(content["source"]),
        gpu_name=str(content["gpu_identity"].get("name", "")),
    )


def rates_of(cls: Any, values: Mapping[str, Any]) -> Any:
    """Constants from JSON, each validated: a wrong one would silently select the wrong device."""
    wanted = {one.name for one in fields(cls)}
    if set(values) != wanted:
        raise ValueError(f"its constants are not those of this version ({', '.join(sorted(set(values) ^ wanted))})")
    return cls(**{name: _constant(name, value) for name, value in values.items()})


def _constant(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _constant(name, one) for key, one in value.items()}
    if isinstance(value, list):
        curve = tuple((float(f), float(rate)) for f, rate in value)
        rising = all(low < high for (low, _), (high, _) in itertools.pairwise(curve))
        if not curve or not rising or not all(_sane(f) and _sane(rate) for f, rate in curve):
            raise ValueError(f"its constant {name} is {value!r}")
        return curve
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (_sane(value) or value == 0):
        raise ValueError(f"its constant {name} is {value!r}")
    return value


def _sane(value: float) -> bool:
    return math.isfinite(value) and value > 0
