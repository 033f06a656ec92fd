"""Tuned configurations of kernels: tables that ship with the library, and those that this user has measured.

A table belongs to one kind of GPU. Its entries say, for a kernel and the facts its choice depends on (rank, item size,
...), which configuration was fastest. `hybridmf tune-kernels` writes them; without an entry in any table, the method
`rule` of each configuration class decides.

Order of lookup, first match wins: the user's entry for exactly these facts; a shipped one; the user's entry for the
nearest rank with as many blocks of 8 (16 for the fused kernels: the size of their tiles); a shipped one of that kind.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from .._version import __version__
from ..core.cache import cache_dir
from ..core.files import write_atomically
from ..device.cuda import DeviceSpec

logger = logging.getLogger("hybridmf")

ANEW = "`hybridmf tune-kernels` writes it anew"
FORMAT = "hybridmf tuned kernels"
VERSION = 1
SHIPPED = Path(__file__).with_name("tuned")  # folder of the shipped tables, one for each kind of GPU
LEAST_MEASURED = 2  # minimum number of timed configurations for a meaningful choice

Config = TypeVar("Config")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Gpu:
    """Identification of a kind of GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # as in `DeviceSpec`

    @classmethod
    def of(cls, spec: DeviceSpec) -> Gpu:
        return cls(spec.name, spec.capability, spec.multiprocessors, spec.shared_bytes)

    def alike(self, other: Gpu) -> bool:
        """Whether measurements of one GPU apply to the other: same name, or same kind and number of multiprocessors."""
        return self.name == other.name or vars(self) | {"name": ""} == vars(other) | {"name": ""}

    @property
    def file_name(self) -> str:
        return f"{re.sub('[^a-z0-9]+', '-', self.name.lower()).strip('-') or 'gpu'}-{self.multiprocessors}.json"


@dataclass(frozen=True)
class Entry:
    """The fastest configuration of a kernel for some facts."""

    kernel: str
    facts: Facts  # parameters of the choice; "rank" may match approximately
    config: dict[str, Any]  # fields of its configuration class, beside the facts
    ms: float
    rule_ms: float  # milliseconds of the trial with this configuration, and with that of the rule
    measured: int  # configurations that were timed
    rivals: tuple[dict[str, Any], ...] = ()
    """Configurations of existing tables for these facts, timed in the same run as this configuration."""

    @property
    def gain(self) -> float:
        """Speed-up over the configuration of the rule, which every run times."""
        return self.rule_ms / self.ms if self.ms > 0 else 0.0

    def better_of(self, newer: Entry) -> Entry:
        """The better of two entries for the same facts, which a table keeps.

        An entry timed alone loses. If this configuration is among the rivals of the newer entry, the newer one wins, as
        both were timed in one run; otherwise entries of different runs are compared by their gains over the rule.
        """
        if newer.measured < LEAST_MEASURED:
            return self
        if self.measured < LEAST_MEASURED or self.config == newer.config or self.config in newer.rivals:
            return newer
        return self if self.gain > newer.gain else newer

    def distance(self, kernel: str, facts: Facts, block: int) -> int | None:
        """Distance between its rank and the one in `facts`; None if the entry does not apply."""
        if kernel != self.kernel or self.facts.keys() != facts.keys():
            return None
        if any(self.facts[name] != value for name, value in facts.items() if name != "rank"):
            return None
        mine, wanted = self.facts.get("rank", 0), facts.get("rank", 0)
        return abs(mine - wanted) if -(-mine // block) == -(-wanted // block) else None


@dataclass(frozen=True)
class Table:
    """Entries of one kind of GPU."""

    gpu: Gpu
    entries: tuple[Entry, ...] = ()
    version: str = __version__  # version of hybridmf that measured them

    def find(self, kernel: str, facts: Facts, block: int) -> tuple[int, Entry] | None:
        distances = ((entry.distance(kernel, facts, block), entry) for entry in self.entries)
        near = [(distance, entry) for distance, entry in distances if distance is not None]
        return min(near, key=lambda pair: pair[0], default=None)

    def merged(self, newer: Table) -> Table:
        """Entries of both tables; for the same facts, the one selected by `Entry.better_of`."""
        found: dict[tuple[Any, ...], Entry] = {}
        for entry in (*self.entries, *newer.entries):
            key = (entry.kernel, *sorted(entry.facts.items()))
            found[key] = found[key].better_of(entry) if key in found else entry
        return Table(newer.gpu, tuple(found.values()), newer.version)

    def to_json(self) -> str:
        """Text of the file, one entry per line."""
        head = {"format": FORMAT, "version": VERSION, "hybridmf": self.version, "gpu": asdict(self.gpu)}
        lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in self.entries)
        return f'{json.dumps(head)[:-1]},\n "entries": [\n{lines}\n]}}\n'


def read_table(path: Path) -> Table:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also for text that is not UTF-8
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"no table of {FORMAT}")
    if content.get("version") != VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, this hybridmf reads {VERSION}")
    try:
        gpu = Gpu(**content["gpu"] | {"capability": tuple(content["gpu"]["capability"])})
        entries = tuple(Entry(**entry | {"rivals": tuple(entry.get("rivals", ()))}) for entry in content["entries"])
        for entry in entries:
            _check_entry(entry)
        return Table(gpu, entries, str(content["hybridmf"]))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not in the layout of such a table ({type(error).__name__}: {error})") from error


def _check_entry(entry: Entry) -> None:
    if not isinstance(entry.kernel, str):
        raise TypeError(f"kernel {entry.kernel!r} is no name")
    if not isinstance(entry.facts.get("rank", 1), int):
        raise TypeError(f"rank {entry.facts['rank']!r} is no number")
    for config in (entry.config, *entry.rivals):
        for name, value in config.items():
            if not isinstance(value, int):  # also bool
                raise TypeError(f"{name} {value!r} of {entry.kernel} is no integer")
    for name in ("ms", "rule_ms", "measured"):
        if not isinstance(getattr(entry, name), int | float):
            raise TypeError(f"{name} {getattr(entry, name)!r} of {entry.kernel} is no number")


def user_file(spec: DeviceSpec) -> Path:
    return cache_dir() / "tuned" / Gpu.of(spec).file_name


def user_table(spec: DeviceSpec) -> Table | None:
    """The user's measurements for a kind of GPU; None if there are no valid ones."""
    path = user_file(spec)
    table = _loaded(path)
    if table is None:
        return None
    if not table.gpu.alike(Gpu.of(spec)):
        _warn_once(f"ignored {path}: it is of {table.gpu.name}, this is {spec.name}; {ANEW}")
        return None
    if table.version != __version__:  # kernels may have changed
        _warn_once(f"ignored {path}: tuned by hybridmf {table.version}, this is {__version__}; {ANEW}")
        return None
    return table


def shipped_tables(spec: DeviceSpec) -> Iterator[Table]:
    """Shipped tables for a kind of GPU, those with its name first."""
    tables = [table for path in sorted(SHIPPED.glob("*.json")) if (table := _loaded(path)) is not None]
    gpu = Gpu.of(spec)
    yield from sorted((table for table in tables if table.gpu.alike(gpu)), key=lambda table: table.gpu.name != gpu.name)


def store(table: Table, path: Path, *, merge: bool = True) -> None:
    """Write a table; better entries in the file for the same kind of GPU and version are kept (`Table.merged`)."""
    old = stored(path, table.gpu) if merge else None
    if old is not None and old.version == table.version:
        table = old.merged(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, table.to_json().encode())


def stored(path: Path, gpu: Gpu) -> Table | None:
    """The table in a file, which must be of this kind of GPU and this version; else None."""
    table = _loaded(path)
    return table if table is not None and table.gpu == gpu and table.version == __version__ else None


def _loaded(path: Path) -> Table | None:
    """A table, reloaded when its file changes; None, with a warning, if the file is invalid."""
    try:
        stamp = path.stat()
    except OSError:  # most users have none
        return None
    return _loaded_as_of(path, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=32)
def _loaded_as_of(path: Path, _modified: int, _size: int) -> Table | None:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        logger.warning("ignored %s: %s; %s", path, error, ANEW)
        return None


@functools.lru_cache(maxsize=128)
def _warn_once(message: str) -> None:
    logger.warning(message)


def known(
    kernel: str, spec: DeviceSpec, facts: Facts, block: int = 8, *, beside: Table | None = None
) -> list[dict[str, Any]]:
    """Configurations of all tables for these facts, without duplicates; the one used by fits first.

    `beside`: A table in addition to those used by fits.
    """
    entries = [entry for _, entry in _hits(kernel, spec, facts, block)]
    other = beside.find(kernel, facts, block) if beside is not None else None
    configs: list[dict[str, Any]] = []
    for entry in [*entries, *([other[1]] if other is not None else [])]:
        if entry.config not in configs:
            configs.append(dict(entry.config))
    return configs


def _hits(kernel: str, spec: DeviceSpec, facts: Facts, block: int) -> list[tuple[int, Entry]]:
    """The applicable entry of each table and its distance; exact ones first, then the user's."""
    own = user_table(spec)
    tables = [*([own] if own is not None else []), *shipped_tables(spec)]
    found = [hit for table in tables if (hit := table.find(kernel, facts, block)) is not None]
    return sorted(found, key=lambda hit: hit[0] > 0)  # stable: among entries equally exact, the user's comes first


def best(
    make: Callable[..., Config], kernel: str, spec: DeviceSpec, facts: Facts, *, given: Facts | None = None,
    block: int = 8,
) -> Config | None:  # fmt: skip
    """The tuned configuration; None if the tables have none or an unusable one.

    `make`: takes `given` and the fields of the entry as keyword arguments; raises ValueError or TypeError if invalid.
    `given`: default: `facts`. `block`: ranks with the same number of blocks of this size may share an entry.
    """
    found = _hits(kernel, spec, facts, block)
    if not found:
        return None
    distance, config = found[0][0], found[0][1].config
    try:
        return make(**(facts if given is None else given), **config)
    except (TypeError, ValueError) as error:
        if not distance:  # an entry for another rank need not be valid for this one
            _warn_once(f"the tuned {kernel} {config} for {facts} cannot be used ({error}); a rule chooses instead")
        return None


# ---------------------------------------------------------------------------------------------- configurations


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time choices of a kernel, the same for all its launches in a fit.

    A subclass has a field for each, `threads` and the dynamic `shared_bytes` of a block, which the kernel asserts.
    ValueError is raised for a choice that the kernel does not support.
    """

    tuned_as: ClassVar[str] = ""  # name of the kernel in tuned tables
    names: ClassVar[dict[str, str]] = {}
    """Constants of fields whose names are not those of the fields in capitals; "" for none."""
    derived: ClassVar[tuple[str, ...]] = ()  # properties that are constants, too
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    file: ClassVar[str]  # name in ``cuda/``
    kernel: ClassVar[str]
    rule: ClassVar[Callable[..., Any]]  # the choice without a tuned one; raises ValueError if the device cannot run any

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in self.may_be_zero or isinstance(value, bool) else 1
            require(isinstance(value, int) and value >= least, f"{name} must be an integer >= {least}, got {value!r}")
        itemsize = getattr(self, "itemsize", 4)
        require(itemsize in (4, 8), f"itemsize must be 4 (float32) or 8 (float64), got {itemsize}")
        self.check()

    def check(self) -> None:
        """Raise ValueError for a combination of positive integers that the kernel does not support."""

    @classmethod
    def default(cls, rank: int, itemsize: int, spec: DeviceSpec, **sizes: Any) -> Any:
        """The tuned choice for a device if it fits, or that of the rule."""
        facts = {"rank": rank, "itemsize": itemsize}
        found: Any = best(cls, cls.tuned_as, spec, facts) if cls.tuned_as else None
        fits = found is not None and found.shared_bytes <= spec.shared_bytes and found.holds(**sizes)
        return found if fits else cls.rule(rank, itemsize, spec, **sizes)

    def holds(self, **sizes: Any) -> bool:
        return True

    @property
    def constants(self) -> dict[str, Any]:
        values = vars(self) | {name: getattr(self, name) for name in self.derived}
        found = {self.names.get(name, name.upper()): value for name, value in values.items()}
        found.pop("", None)
        if "REAL" in found:
            found["REAL"] = np.dtype(f"f{found['REAL']}")
        return found

    @property
    def build(self) -> tuple[str, str, dict[str, Any]]:
        """``(file, kernel, constants)`` of the program."""
        return self.file, self.kernel, self.constants

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        """Blocks for n systems or segments."""
        return (n,)

    def require_fit(self, spec: DeviceSpec) -> None:
        """Raise ValueError if a block needs more shared memory than a device has."""
        needed: int = self.shared_bytes  # type: ignore[attr-defined]
        require(
            needed <= spec.shared_bytes,
            f"systems of rank {getattr(self, 'rank', '')} need {needed} bytes of shared memory a block, {spec.name} "
            f"has {spec.shared_bytes}; use fewer factors or device='cpu'",
        )

    def require_match(self, rank: int, dtype: Any) -> None:
        """Raise ValueError if the configuration is not for the rank and dtype of arrays."""
        mine, size = vars(self)["rank"], vars(self)["itemsize"]
        require(
            (mine, size) == (rank, dtype.itemsize),
            f"config is for rank {mine} and items of {size} bytes; these have rank {rank} and {dtype.itemsize} bytes",
        )
