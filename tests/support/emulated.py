"""A device that runs the kernels of cuda/ on the CPU: the GPU solvers' logic is tested where there is no GPU.

`emulator/emulator.h` says how, and what it cannot show.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hybridmf.device.arguments import Struct, passed
from hybridmf.device.cuda import DeviceSpec, Resources
from hybridmf.device.recording import current_recording
from hybridmf.errors import DeviceMemoryError

HEADER = Path(__file__).parent / "emulator" / "emulator.h"

WRAPPER = """
#ifdef COMPILED_KERNEL
extern "C" const char* KERNEL_launch(const unsigned* grid, const unsigned* block, unsigned long shared, void** values) {
    return emulator::run(grid, block, shared, emulator::thread<KERNEL>, values);
}
extern "C" const auto KERNEL_sizes = emulator::sizes_of(KERNEL);
#endif
"""

KERNEL = re.compile(r"^.*__global__\s+void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+)\(", re.MULTILINE)

SHARED = re.compile(r"^(\s*)__shared__ (?:__align__\(\d+\) )?([\w:]+) ([^;(]+);", re.MULTILINE)
"""Static shared memory: a type and its variables, some of them arrays."""

SEED = "HYBRIDMF_EMULATOR_SEED"
"""Environment variable with the seed of the schedules; 0, the default, runs threads in order."""

RACES = "HYBRIDMF_EMULATOR_RACES"
"""Environment variable: 1 compiles kernels with ThreadSanitizer, whose library must be preloaded (.ci/races)."""

ONE_AT_A_TIME = threading.Lock()
"""A launch: the emulator keeps its threads in one place, and ranks are threads."""


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _folder() -> Path:
    """Where compiled kernels are, for all processes of a run of the tests, or of several runs."""
    shared = os.environ.get("HYBRIDMF_EMULATOR_DIR")
    if shared:
        Path(shared).mkdir(parents=True, exist_ok=True)
        return Path(shared)
    folder = Path(tempfile.mkdtemp(prefix="hybridmf-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def finds_races() -> bool:
    """Whether kernels run under ThreadSanitizer."""
    return os.environ.get(RACES, "") not in ("", "0")


def _command(optimization: str = "-O0") -> list[str]:
    """The compiler: most kernels take it longer than they run."""
    races = ["-DEMULATOR_RACES"] if finds_races() else []
    return [compiler() or "c++", "-std=c++17", optimization, "-fPIC", "-w", *races]


def _kernel_command() -> list[str]:
    """The compiler of kernels, and of the header that is precompiled for them."""
    plain = ["-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables"]  # nothing here throws
    return [*_command(), *plain, *(["-fsanitize=thread", "-g"] if finds_races() else [])]


def _with_shared_variables(source: str) -> str:
    """The source with static shared memory that each block of the emulator has for itself."""
    number = itertools.count()

    def declare(match: re.Match[str]) -> str:
        space, kind, variables = match.groups()
        texts = []
        for variable in re.split(r",\s*(?![^\[]*\])", variables):
            name, k = variable.split("[")[0].strip(), next(number)
            shape = variable.strip()[len(name) :]
            texts.append(f"typedef {kind} shared_{k}{shape};")
            texts.append(f"auto& {name} = emulator::shared_variable<shared_{k}>({k});")
        return space + " ".join(texts)

    changed = SHARED.sub(declare, source)
    left = re.search(r"^\s*__shared__.*", changed, re.MULTILINE)
    if left:
        raise RuntimeError(f"the emulator does not understand this declaration: {left[0].strip()}")
    return changed


@functools.cache
def _seed_function() -> Any:
    return ctypes.CDLL(str(_emulator().parent / "emulator.so")).emulator_seed


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} does not compile for the emulator:\n{done.stderr[:4000]}")


@functools.cache
def _emulator() -> Path:
    """Header of the emulator, precompiled, beside its library, which is loaded; once for all processes of a run.

    The compiler finds the precompiled header beside the text; if it made none, it takes the text.
    """
    texts = [*_kernel_command(), HEADER.read_text(), HEADER.with_suffix(".cpp").read_text()]
    folder = _folder() / hashlib.sha256(repr(texts).encode()).hexdigest()[:24]
    if not folder.exists():
        own = Path(tempfile.mkdtemp(dir=_folder()))
        header = shutil.copy(HEADER, own)
        subprocess.run([*_kernel_command(), "-x", "c++-header", header, "-o", f"{header}.gch"], capture_output=True)
        source = str(HEADER.with_suffix(".cpp"))
        _run(
            [*_command("-O2"), "-fno-semantic-interposition", "-shared", "-o", str(own / "emulator.so"), source],
            "emulator.cpp",
        )
        with contextlib.suppress(OSError):  # another process was faster
            own.rename(folder)
    ctypes.CDLL(str(folder / "emulator.so"), mode=ctypes.RTLD_GLOBAL)
    return folder / HEADER.name


def _with_wrappers(source: str) -> str:
    """The source with a function to call for each kernel that the preprocessor leaves."""
    names = dict.fromkeys(KERNEL.findall(source))
    marked = KERNEL.sub(lambda match: f"#define COMPILED_{match[1]}\n{match[0]}", source)
    return marked + "".join(WRAPPER.replace("KERNEL", name) for name in names)


@functools.cache
def _library(source: str, constants: tuple[str, ...]) -> Any:
    """All kernels of a file for some constants, compiled at once: each by itself would take nearly as long."""
    header, source = _emulator(), _with_wrappers(_with_shared_variables(source))
    texts = [header.parent.name, source, *constants]
    library = _folder() / f"{hashlib.sha256(repr(texts).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        own = Path(tempfile.mkdtemp(dir=_folder())) / library.name
        defined = [f"-D{constant}" for constant in constants]
        text = own.with_suffix(".cpp")
        text.write_text(source)
        command = [
            *_kernel_command(),
            "-shared",
            *_linker(),
            "-include",
            str(header),
            *defined,
            "-o",
            str(own),
            str(text),
            "-lgcc",
        ]
        _run(command, f"{KERNEL.findall(source)} with {constants}")
        own.replace(library)  # complete, for concurrent readers
    return ctypes.CDLL(str(library))


@functools.cache
def _kernel(source: str, name: str, constants: tuple[str, ...]) -> tuple[Any, tuple[int, ...]]:
    """The function that launches a kernel, and how many bytes each of its arguments has."""
    library = _library(source, constants)
    count = ctypes.c_int.in_dll(library, f"{name}_sizes").value
    sizes = (ctypes.c_int * (1 + count)).in_dll(library, f"{name}_sizes")
    launch = library[f"{name}_launch"]
    launch.restype = ctypes.c_char_p
    return launch, tuple(sizes[1:])


def _seed(number: int) -> None:
    """Choose the schedule of the next launch."""
    _seed_function()(ctypes.c_ulonglong(number))


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _bytes_of(argument: Any) -> bytes:
    """What a kernel is given: of arrays the address."""
    if isinstance(argument, np.ndarray):
        return _address(argument).to_bytes(8, sys.byteorder)
    if isinstance(argument, tuple):
        return passed(argument, _address).tobytes()
    assert isinstance(argument, np.generic), f"{argument!r} is no NumPy scalar"
    return argument.tobytes()


@functools.cache
def _linker() -> list[str]:
    """The fastest linker, without libraries: what they and the emulator define is loaded before the kernels."""
    return ["-nostdlib", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else [])]


class EmulatedCopier:
    """Has the methods of `hybridmf.device.copier.CudaCopier`; a copy is complete at once."""

    def pin(self, array: np.ndarray) -> bool:
        return True

    def after(self, mark: Any) -> None:
        pass

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        assert target.dtype == source.dtype and source.size <= target.size
        target[: source.size] = source

    def fetch(self, target: np.ndarray, source: np.ndarray) -> None:
        assert target.dtype == source.dtype and source.size == target.size and target.flags.c_contiguous
        target.reshape(-1)[...] = source.reshape(-1)

    def mark(self) -> Any:
        return None

    def synchronize(self) -> None:
        pass

    def twin(self) -> EmulatedCopier:
        return self


class EmulatedDevice:
    """Has the methods of `hybridmf.device.cuda.CudaDevice`; arrays are NumPy's.

    Parameters
    ----------
    memory_bytes : int
    capability : (int, int)
    seed : int, optional
        Of the schedules of threads: 0 runs them in order. Default: HYBRIDMF_EMULATOR_SEED, or 0.
    multiprocessors : int, optional
        With one, the blocks of small problems take several rows.
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        capability: tuple[int, int] = (9, 0),
        seed: int | None = None,
        multiprocessors: int = 2,
    ) -> None:
        self.seed = int(os.environ.get(SEED, "0")) if seed is None else seed
        self.spec = DeviceSpec(
            name="emulated",
            index=0,
            capability=capability,
            multiprocessors=multiprocessors,
            shared_bytes=227 * 1024,
            l2_bytes=60 << 20,
            memory_bytes=memory_bytes,
            free_bytes=memory_bytes,
        )
        self.limit: int | None = None
        """Largest allocation that succeeds, to act out a device that runs out of memory."""
        self.launches: list[str] = []
        self.compiled_ahead: list[tuple[str, str, tuple[str, ...]]] = []
        self.compiled_later: list[tuple[str, str, tuple[str, ...]]] = []

    def refresh(self) -> None:
        pass

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        size = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
        if self.limit is not None and size > self.limit:
            raise DeviceMemoryError(f"emulated: {size} bytes are more than {self.limit}")
        raw = np.empty(size + 256, dtype=np.uint8)  # as CUDA aligns
        start = -raw.ctypes.data % 256
        array = raw[start : start + size].view(dtype).reshape(shape)
        if array.dtype.kind == "f":
            array[...] = np.nan  # whoever reads what was not written shows it
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def upload(self, array: np.ndarray, target: np.ndarray | None = None) -> np.ndarray:
        if target is None:
            target = self.empty(array.shape, array.dtype)
        assert target.dtype == array.dtype and target.shape == array.shape and target.flags.c_contiguous
        target[...] = array
        return target

    def adopt(self, array: Any) -> np.ndarray:
        return self.upload(array.memory)  # of a support.gpu_arrays.GpuArray

    def download(self, array: np.ndarray, target: np.ndarray | None = None, *, settled: bool = False) -> np.ndarray:
        if target is None:
            return array.copy()
        target[...] = array
        return target

    def begin_download(self, array: np.ndarray) -> Callable[[], np.ndarray]:
        copied = array.copy()
        return lambda: copied

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b

    def free_bytes(self) -> int:
        return self.spec.free_bytes

    def synchronize(self) -> None:
        pass

    def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
        self.kernel(source, name, constants)  # what does not compile is told here, as on a GPU
        return Resources(0, 0)

    def prepare(
        self,
        program: tuple[str, str, tuple[str, ...]],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared_bytes: int = 0,
    ) -> Callable[..., None]:
        kernel = self.kernel(*program)

        def launch(beside: bool = False) -> None:
            self.note(launch, beside)
            given = [each.packed[()].copy() if isinstance(each, Struct) else each for each in arguments]
            kernel(grid, block, given, shared_bytes)

        return launch

    def address(self, array: np.ndarray) -> int:
        return _address(array)

    def current_stream(self) -> int:
        return 0

    def note(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Add a call to the recording that this thread makes, if any."""
        if (recording := current_recording()) is not None:
            recording.add(self, function, arguments)  # type: ignore[arg-type]

    def record(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    def fork(self) -> None:
        pass

    def join(self) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reach(self, other: EmulatedDevice) -> None:
        pass

    def receive(self, target: np.ndarray, source: np.ndarray) -> None:
        self.note(self.receive, target, source)
        assert target.dtype == source.dtype and target.shape == source.shape
        assert target.flags.c_contiguous and source.flags.c_contiguous
        np.copyto(target, source)

    def fetch(self, target: np.ndarray, source: np.ndarray, after: Sequence[Any]) -> Any:
        self.receive(target, source)

    def fetched(self) -> Any:
        return None

    def copier(self) -> EmulatedCopier:
        return EmulatedCopier()

    def compile_ahead(self, programs: Iterable[tuple[str, str, tuple[str, ...]]], later: bool = False) -> None:
        if later:
            self.compiled_later.extend(programs)
        else:
            self.compiled_ahead = list(programs)

    def kernel(self, source: str, name: str, constants: tuple[str, ...]) -> Any:
        with ONE_AT_A_TIME:
            start, sizes = _kernel(source, name, constants)
        places = (0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes))  # of arguments, one after another

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared_bytes: int) -> None:
            self.launches.append(name)
            assert len(arguments) == len(sizes), f"{name} takes {len(sizes)} arguments, got {len(arguments)}"
            assert shared_bytes <= self.spec.shared_bytes, f"{name} wants {shared_bytes} bytes of shared memory"
            assert math.prod(block) <= 1024
            if not math.prod(grid):
                raise ValueError(f"{name}: empty grid {grid}")  # as CUDA would
            passed_on = bytearray(places[-1])
            for argument, size, place in zip(arguments, sizes, places, strict=False):
                value = _bytes_of(argument)
                assert len(value) == size, f"{name}: argument of {len(value)} bytes where the kernel takes {size}"
                passed_on[place : place + size] = value
            memory = np.frombuffer(passed_on, np.uint8)
            first = memory.ctypes.data
            pointers = (ctypes.c_void_p * len(sizes))(*(first + place for place in places[:-1]))
            three = ctypes.c_uint * 3
            with ONE_AT_A_TIME:
                _seed(self.seed and (self.seed << 20) + len(self.launches))
                failed = start(
                    three(*grid, *(1,) * (3 - len(grid))),
                    three(*block, *(1,) * (3 - len(block))),
                    ctypes.c_ulong(shared_bytes),
                    pointers,
                )
                if failed:
                    raise RuntimeError(f"emulator, {name}: {failed.decode()}")

        return launch
