"""Facts about the system: memory and cores within the limits of control groups, optional packages; sizes as texts."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Hold back Ctrl-C until the end: compiled modules that it interrupts while they load may raise an ImportError."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def needed(module: str, what: str, install: str) -> Any:
    """A module of an optional package; the ImportError says what needs it and what to install."""
    try:
        with ctrl_c_later():
            return import_module(module)
    except ImportError as error:
        raise ImportError(f"{what}: pip install {install}") from error


def available_memory() -> int | None:
    """Bytes this process can still get, by machine and control groups; None where the system does not say."""
    sizes = [_free_memory(), *map(_cgroup_memory, cgroup_folders("memory"))]
    return min((size for size in sizes if size is not None), default=None)


def _free_memory() -> int | None:
    free = system_bytes("/proc/meminfo", "MemAvailable")
    if free is not None:
        return free
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _cgroup_memory(folder: str) -> int | None:
    """Memory left in one control group (v2 or v1), including cached files; None without a limit."""
    for limit, usage, cache in _CGROUP_FILES:
        words = system_words(f"{folder}/{limit}") + system_words(f"{folder}/{usage}")
        if len(words) == 2 and words[0].isdecimal():  # not "max"
            statistics = system_words(f"{folder}/memory.stat")
            cached = dict(zip(statistics[::2], statistics[1::2], strict=False)).get(cache, "0")
            return max(0, int(words[0]) - int(words[1]) + int(cached))
    return None


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


CGROUPS = "/sys/fs/cgroup"
"""Where Linux shows control groups, by which containers and batch systems limit cores and memory."""


def system_words(path: str) -> list[str]:
    """Words of a small file of the system; none where it cannot be read."""
    try:
        with open(path) as file:
            return file.read().split()
    except (OSError, ValueError):
        return []


def system_bytes(path: str, key: str) -> int | None:
    """Bytes of a field, such as "VmRSS", of a file of the system that counts in kB; None where it has none."""
    words = system_words(path)
    try:
        return int(words[words.index(f"{key}:") + 1]) * 1024
    except (ValueError, IndexError):
        return None


def cgroup_folders(controller: str) -> list[str]:
    """Folders of the control groups (v2, v1) around this process, where limits of "cpu" or "memory" may stand."""
    folders = []
    for entry in system_words("/proc/self/cgroup"):  # v2: "0::/a/b"; v1: "4:memory:/a/b"
        number, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            groups = [CGROUPS if number == "0" else f"{CGROUPS}/{controller}", *filter(None, path.split("/"))]
            folders += ["/".join(groups[: depth + 1]) for depth in range(len(groups))]
    return folders


def _cpu_quota(folder: str) -> float:
    """Cores that one control group grants, rounded up; inf where it sets no limit."""
    words = system_words(f"{folder}/cpu.max")
    words = words or system_words(f"{folder}/cpu.cfs_quota_us") + system_words(f"{folder}/cpu.cfs_period_us")
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such files
        return math.inf
    return math.ceil(quota / period) if quota > 0 else math.inf


def available_cores() -> int:
    """Cores this process may use: its affinity mask and the quotas of its control groups, where the system has them."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    return int(min([cores, *map(_cpu_quota, cgroup_folders("cpu"))]))


def parse_bytes(name: str, value: Any) -> int:
    """Bytes of a number or a text such as "6GB", "1.5 GiB"."""
    units = {"": 1, "b": 1}
    units |= {prefix + "b": 1000**power for power, prefix in enumerate("kmgt", 1)}
    units |= {prefix + "ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?\d+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        size = int(float(match[1]) * units[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f'{name} must be a size such as "6GB", "500MiB" or a number of bytes, got {value!r}')
    return size


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The multiple of b from a on."""
    return ceil_div(a, b) * b
