"""The tunable kernels: for each, its parameters with their values, and the constraints of a configuration.

`SPACES` is the table. It has the kernels that "auto" chooses, and the published spaces of Gates et al. and BALS. There
are three kinds of constraints, as in Gates et al. (section VIII):

correctness  limits of the kernels; the configuration classes raise ValueError
hardware     threads and shared memory of a block, registers, `occupancy`. The number of registers is known after
             compilation: `tune` drops configurations that spill more than the rule's
soft         `LEAST_THREADS` on a multiprocessor (Gates: 512; sums in registers make up for fewer), `LEAST_REUSE`
             multiply-adds per element read from shared memory (Gates: 0.5), `LEAST_USEFUL` work

The choice of the rule always comes first. The others are grouped in families by the shape of tiles, and the most
promising member of each family comes before the second of any: a search that runs out of time has timed all shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ...core.system import ceil_div, round_up
from ...device.cuda import Device, DeviceSpec
from ...plan import fused as plan_fused
from ...plan.assemblies import OTHER_REGISTERS, REGISTERS, RESERVED, WARP, BalsConfig, lower_tiles
from ...plan.fused import FusedConfig
from ...plan.tables import Facts
from .. import cholesky_any, fused
from ..cholesky_any import CgConfig, CholeskyConfig
from ..fused import Build
from ..sparse_syrk import SyrkConfig
from . import trials
from .trials import Sample, Trial

Values: TypeAlias = "Iterable[Any] | Callable[[Facts, DeviceSpec], Iterable[Any]]"
"""Values of a parameter; a function if they depend on the facts and on the parameters before it."""

LEAST_THREADS = 256
LEAST_REUSE = 0.5
LEAST_USEFUL = 0.25
BUSY_THREADS = 512
"""Threads per multiprocessor beyond which more are not expected to help: the minimum of Gates' search."""

RESIDENT = {(7, 5): (1024, 16), (8, 6): (1536, 16), (8, 7): (1536, 16), (8, 9): (1536, 24)}
"""Threads and blocks of a multiprocessor, by compute capability (CUDA C++ Programming Guide, compute capabilities)."""

MOST_REGISTERS = 255  # registers of a thread
ENTRY_KINDS = ((False, False), (True, False), (False, True))  # (implicit, offsets); the first kind is timed


def resident_limits(spec: DeviceSpec) -> tuple[int, int]:
    if spec.capability[0] == 12:
        return 1536, 24
    return RESIDENT.get(spec.capability, (2048, 32))


def occupancy(threads: int, shared_bytes: int, registers: int, spec: DeviceSpec) -> int:
    """Resident blocks per multiprocessor; 0 if none fits."""
    most_threads, most_blocks = resident_limits(spec)
    registers = round_up(max(registers, 1), 8)
    if threads > 1024 or shared_bytes > spec.shared_bytes or registers > MOST_REGISTERS + 1:
        return 0
    by_memory = (spec.shared_bytes + RESERVED) // (shared_bytes + RESERVED)
    by_registers = REGISTERS // (round_up(threads, WARP) * registers)
    return min(most_blocks, most_threads // threads, by_memory, by_registers)


@dataclass(frozen=True)
class Space:
    """A tunable kernel."""

    # maps ``(factors, itemsize)`` to the facts that a choice depends on; empty if the kernel does not apply
    facts: Callable[[int, int], list[Facts]]
    # takes the facts named in `given` and the parameters; raises ValueError if the kernel does not support them
    config: Callable[..., Any]
    # maps ``(facts, spec)`` to the configuration without a table; ValueError if the device cannot run it
    rule: Callable[[Facts, DeviceSpec], Any]
    parameters: dict[str, Values]
    # maps ``(facts, config, spec, implicit, offsets)`` to the programs for a kind of entries
    builds: Callable[..., list[Build]]
    trial: Callable[[Device, Sample, Facts], Trial]  # maps ``(device, sample, facts)`` to the work to check and to time
    given: tuple[str, ...] = ("rank", "itemsize")
    # values of ``blocks_per_sm``, as shares of the largest number that registers and shared memory allow
    blocks: tuple[float, ...] = ()
    # registers, shared: map ``(facts, config)`` to the least registers of a thread, and to the shared memory of a
    # block
    registers: Callable[[Facts, Any], int] = lambda facts, config: 0
    shared: Callable[[Facts, Any], int] = lambda facts, config: config.shared_bytes
    # maps a configuration to multiply-adds per element read from shared memory, and their useful share
    work: Callable[[Any], tuple[float, float]] = lambda config: (1.0, 1.0)
    family: tuple[str, ...] = ()  # parameters that make a family
    weight: float = 1.0  # share of the time budget: higher for kernels with long compilations or tiles to build
    block: int = 8  # ranks with equal numbers of blocks of this size may share a table entry

    def programs(self, facts: Facts, config: Any, spec: DeviceSpec) -> tuple[list[Build], list[Build]]:
        """Programs that a trial runs, and those for other kinds of entries, which must not spill registers either."""
        timed, *others = (self.builds(facts, config, spec, *kind) for kind in ENTRY_KINDS)
        return timed, [build for kind in others for build in kind if build not in timed]

    def candidates(self, facts: Facts, spec: DeviceSpec) -> list[Any]:
        """Configurations to time: the rule's, then the most promising of each family, then the second of each ..."""
        ruled = self.rule(facts, spec)
        if self.shared(facts, ruled) > spec.shared_bytes:
            raise ValueError(f"{ruled} needs {self.shared(facts, ruled)} bytes of shared memory")
        families: dict[tuple[Any, ...], list[Any]] = {}
        promises = {config: self.promise(facts, config, spec) for config in self._configurations(facts, spec)}
        for config in sorted(promises, key=lambda one: -promises[one]):  # a stable sort: the order is deterministic
            if promises[config] > 0 and config != ruled:
                families.setdefault(tuple(getattr(config, name) for name in self.family), []).append(config)
        turns = itertools.zip_longest(*families.values())  # families ordered by their best member
        return [ruled, *(one for turn in turns for one in turn if one is not None)]

    def promise(self, facts: Facts, config: Any, spec: DeviceSpec) -> float:
        """Priority of a configuration, not a prediction of its speed; 0 if it violates a soft constraint."""
        blocks = self._resident(facts, config, spec)
        threads = config.threads * min(blocks, getattr(config, "blocks_per_sm", blocks))
        reuse, useful = self.work(config)
        if threads < LEAST_THREADS or reuse < LEAST_REUSE or useful <= LEAST_USEFUL:
            return 0.0
        return useful * min(1.0, max(threads, 1) / BUSY_THREADS) * reuse / (1.0 + reuse)

    def named(self, facts: Facts, values: dict[str, Any]) -> Any:
        """The configuration of a table entry; ValueError or TypeError for invalid values."""
        return self.config(**{name: facts[name] for name in self.given}, **values)

    def values(self, config: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(config).items() if name not in self.given}

    def _configurations(self, facts: Facts, spec: DeviceSpec) -> Iterator[Any]:
        """Configurations that satisfy the constraints of correctness and of the hardware."""
        points: list[dict[str, Any]] = [{}]
        for name, values in self.parameters.items():
            points = [
                point | {name: value}
                for point in points
                for value in (values(facts | point, spec) if callable(values) else values)
            ]
        for point in points:
            config = _legal(self.named, facts, point | ({"blocks_per_sm": 1} if self.blocks else {}))
            if config is not None:
                yield from self._fitting(facts, config, spec)

    def _fitting(self, facts: Facts, config: Any, spec: DeviceSpec) -> Iterator[Any]:
        """The configuration with each number of blocks per multiprocessor; nothing if it does not fit."""
        most = self._resident(facts, config, spec)
        if not self.blocks:
            if most >= getattr(config, "blocks_per_sm", 1):
                yield config
            return
        while most and _legal(replace, config, blocks_per_sm=most) is None:
            most -= 1  # the class counts registers more exactly
        for count in sorted({max(1, int(share * most)) for share in self.blocks} if most else (), reverse=True):
            yield replace(config, blocks_per_sm=count)

    def _resident(self, facts: Facts, config: Any, spec: DeviceSpec) -> int:
        return occupancy(config.threads, self.shared(facts, config), self.registers(facts, config), spec)


def _legal(make: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
    try:
        return make(*arguments, **fields)
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------- the kernels


def _useful(rank: int, tile: int, tiles: int, busy: float = 1.0) -> float:
    """Share of the sums of `tiles` square tiles that are needed; a whole tile on the diagonal counts as needed."""
    return min(1.0, busy * rank * (rank + 1) / (tiles * tile * tile))


def _systems_facts(factors: int, itemsize: int) -> list[Facts]:
    return [{"rank": factors, "itemsize": itemsize}] if factors <= cholesky_any.MAX_RANK else []


FUSED_KINDS = (("float32", "cholesky"), ("float32", "cg"), ("bf16", "cholesky"))


def _fused_facts(factors: int, itemsize: int) -> list[Facts]:
    if factors > plan_fused.MAX_RANK or itemsize != 4:
        return []
    # if another kernel solves, `FusedConfig.assembling` decides
    kinds = [kind for kind in FUSED_KINDS if not plan_fused.solved_apart(factors, kind[1])]
    return [{"rank": factors, "precision": precision, "solver": solver} for precision, solver in kinds]


def _fused_rule(facts: Facts, spec: DeviceSpec) -> FusedConfig:
    why_not = plan_fused.supports(facts["rank"], "float32", spec)
    if why_not:
        raise ValueError(why_not)
    return FusedConfig.rule(**facts)


def _fused_registers(facts: Facts, config: FusedConfig) -> int:
    """The lower triangle of 16 x 16 blocks over the lanes of a team, and 72 others; every rank has a configuration."""
    blocks = config.rank16 // plan_fused.BLOCK
    return blocks * (blocks + 1) // 2 * plan_fused.BLOCK**2 // (WARP * config.warps) + 72


def _fused_builds(facts: Facts, config: FusedConfig, spec: DeviceSpec, implicit: bool, offsets: bool) -> list[Build]:
    precision, solver = facts["precision"], facts["solver"]
    choices = fused.choices_of(config, precision, solver, spec)
    return fused.builds(config, fused.Kind(precision, solver, implicit, offsets), **choices)


def _assembly_builds(
    kernel: str, facts: Facts, config: SyrkConfig | BalsConfig, spec: DeviceSpec, implicit: bool, offsets: bool
) -> list[Build]:
    entries = {"REAL": np.dtype(f"f{facts['itemsize']}"), "IMPLICIT": implicit, "HAS_OFFSETS": offsets}
    return [(f"{kernel}.cu", kernel, config.constants | entries)]


def _sums_along(facts: Facts) -> list[int]:
    """Sums of a thread along a tile of sparse-syrk."""
    return [t for t in (2, 4, 5, 6, 8, 10, 12) if facts["nb"] % t == 0]


def _syrk_rows(facts: Facts, spec: DeviceSpec) -> list[int]:
    tx = facts["nb"] // facts["dx"]
    return [facts["nb"] // ty for ty in _sums_along(facts) if tx <= 2 * ty and ty <= 2 * tx]


def _syrk_registers(facts: Facts, config: SyrkConfig) -> int:
    tx, ty = config.nb // config.dx, config.nb // config.dy
    return (tx * ty + tx + ty) * config.itemsize // 4 + OTHER_REGISTERS


def _syrk_work(config: SyrkConfig) -> tuple[float, float]:
    tx, ty = config.nb // config.dx, config.nb // config.dy
    loads = max(1.0, ceil_div(config.rank, config.nb) ** 2 * config.nb / config.rank)  # of a factor row
    return tx * ty / (tx + ty), _useful(config.rank, config.nb, config.tiles) / loads**0.25


def _bals_capacities(facts: Facts, spec: DeviceSpec) -> list[int]:
    """Factor rows of a stage: as many as shared memory holds, and half of them."""
    least = _legal(BalsConfig, capacity=1, **facts)
    if least is None:
        return []
    left = (spec.shared_bytes + RESERVED) // least.blocks_per_sm - RESERVED - least.shared_bytes
    most = min(1024, 1 + left // (least.buffers * least.row_bytes)) if left > 0 else 0
    return [capacity for capacity in (most, most // 2) if capacity >= 32]


def _bals_work(config: BalsConfig) -> tuple[float, float]:
    busy = config.rows * config.part_tiles / config.threads
    return config.tile / 2, _useful(config.rank, config.tile, config.tiles, busy)


def _cholesky_rows(facts: Facts, spec: DeviceSpec) -> tuple[int, ...]:
    if facts["systems"]:
        return (4,)
    return (ceil_div(facts["rank"], facts["row_threads"]),) if facts["resident"] else (4, 8, 16)


def _cholesky_registers(facts: Facts, config: CholeskyConfig) -> int:
    return 64 if config.systems else config.tile_rows * config.tile_columns * config.itemsize // 4 + 40


# fmt: off
SPACES = {
    "fused": Space(
        _fused_facts, FusedConfig, _fused_rule, given=("rank",), weight=4.0, block=plan_fused.BLOCK,
        parameters={"warps": (1, 2, 4), "teams": (1, 2, 4, 8), "stages": (2, 3, 4, 5, 6)},
        blocks=(1.0, 0.8, 0.6, 0.4), registers=_fused_registers, family=("warps", "teams"),
        shared=lambda facts, config: config.shared_bytes(facts["solver"], facts["precision"]),
        # a warp multiplies 16 x 16 blocks: its square patch of blocks determines the reuse
        work=lambda config: (config.rank16 / plan_fused.BLOCK / config.warps**0.5, 1.0),
        builds=_fused_builds, trial=partial(trials.als_trial, assembly="fused", timed="all"),
    ),
    "sparse_syrk": Space(  # Gates' (nb, kb, dx, dy), and ours: groups, stages, entries at a time
        _systems_facts, SyrkConfig, lambda facts, spec: SyrkConfig.rule(**facts, spec=spec), weight=2.0,
        parameters={
            "nb": lambda at, spec: [nb for nb in (8, 16, 24, 32, 48, 64, 80, 96, 128) if nb < 2 * max(at["rank"], 8)],
            "dx": lambda at, spec: [at["nb"] // tx for tx in _sums_along(at)],
            "dy": _syrk_rows,
            "dz": (1, 2, 4, 8), "kb": (8, 16, 24, 32), "stages": (2, 3), "unroll": (1, 2, 4),
        },
        blocks=(1.0, 0.75), registers=_syrk_registers, work=_syrk_work, family=("nb", "dx", "dy"),
        builds=partial(_assembly_builds, "sparse_syrk"),
        trial=partial(trials.als_trial, assembly="sparse_syrk", timed="sums"),
    ),
    "bals": Space(  # BALS 4.3: rows of a block, staged factor rows (the width of a matrix tile), and its height
        _systems_facts, BalsConfig, lambda facts, spec: BalsConfig.rule(**facts, spec=spec), weight=4.0,
        parameters={
            "tile": (4, 8), "blocks_per_sm": (1, 2, 3), "buffers": (1, 2),
            "part_tiles": lambda at, spec: {ceil_div(lower_tiles(at["rank"], at["tile"]), n) for n in (1, 2, 4)},
            "rows": (1, 2, 4, 6, 8, 12, 16, 24, 32), "lanes": (8, 16, 32),
            "window": lambda at, spec: (max(16, at["lanes"]),),
            "capacity": _bals_capacities, "height": (1, 4),
        },
        work=_bals_work, family=("tile", "rows", "part_tiles", "buffers", "height"),
        builds=partial(_assembly_builds, "bals"), trial=partial(trials.als_trial, assembly="bals", timed="sums"),
    ),
    "cholesky_any": Space(  # systems that cholesky.cu does not solve
        lambda factors, itemsize: [] if factors <= 64 and itemsize == 4 else _systems_facts(factors, itemsize),
        CholeskyConfig, lambda facts, spec: CholeskyConfig.rule(**facts, spec=spec),
        parameters={
            "systems": lambda at, spec: (0, 2, 4, 8) if at["rank"] <= WARP else (0,),
            "row_threads": lambda at, spec: (16,) if at["systems"] else (8, 16, 32),
            "tile_columns": lambda at, spec: (4,) if at["systems"] else (4, 8),
            "resident": lambda at, spec: (True,) if at["systems"] else (True, False),
            "tile_rows": _cholesky_rows,
        },
        blocks=(1.0, 0.75, 0.5), registers=_cholesky_registers,
        family=("systems", "row_threads", "tile_rows", "tile_columns", "resident"),
        builds=lambda facts, config, *_: [("cholesky_any.cu", config.kernel, config.constants)],
        trial=partial(trials.als_trial, assembly="sparse_syrk", timed="solve"),
    ),
    "cg_any": Space(
        _systems_facts, CgConfig, lambda facts, spec: CgConfig.rule(**facts, spec=spec), weight=0.5,
        parameters={"warps": (1, 2, 4, 8), "resident": (True, False)}, family=("warps", "resident"),
        blocks=(1.0, 0.75, 0.5, 0.25), registers=lambda facts, config: 64,
        builds=lambda facts, config, *_: [("cg_any.cu", "cg", config.constants)],
        trial=partial(trials.als_trial, assembly="sparse_syrk", timed="solve", solver="cg"),
    ),
}
"""By name of the kernel in tuned tables and on the command line, in the order of tuning."""
# fmt: on
