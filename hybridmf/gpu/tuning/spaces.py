"""The configurations of each kernel to time, the most promising first.

Three kinds of constraints, as in Gates et al. (section VIII):

correctness  limits of the kernels; the configuration classes raise ValueError
hardware     threads and shared memory of a block, registers, `occupancy`. The number of registers is known after
             compilation: `tune` drops configurations that spill more than the rule's
soft         `LEAST_THREADS` on a multiprocessor (Gates: 512; sums in registers make up for fewer), `LEAST_REUSE`
             multiply-adds per element read from shared memory (Gates: 0.5), no tile twice as wide as needed

The choice of the rule always comes first. The others are grouped in families by the shape of tiles, and the most
promising member of each family comes before the second of any: a search that runs out of time has timed all shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.system import ceil_div
from ...device.cuda import DeviceSpec
from ...plan import assemblies as plan_assemblies
from ...plan import ccd_gpu
from ...plan import fused as plan_fused
from ...plan import sgd as plan_sgd
from ...plan.assemblies import REGISTERS, RESERVED, WARP, BalsConfig
from ...plan.fused import FusedConfig
from .. import cholesky_any, fused, sgd, topk
from ..cholesky_any import CgConfig, CholeskyConfig, TilesConfig
from ..sgd import BlockedConfig, HogwildConfig
from ..sparse_syrk import SyrkConfig
from ..topk import GroupMaxConfig

Facts = dict[str, Any]
Build = tuple[str, str, dict[str, Any]]
"""(file, kernel, constants)"""

LEAST_THREADS = 256
LEAST_REUSE = 0.5
BUSY_THREADS = 512
"""Threads per multiprocessor beyond which more are not expected to help: the minimum of Gates' search."""

RESIDENT = {(7, 5): (1024, 16), (8, 6): (1536, 16), (8, 7): (1536, 16), (8, 9): (1536, 24)}
"""Threads and blocks of a multiprocessor, by compute capability (CUDA C++ Programming Guide, compute capabilities)."""


def resident_limits(spec: DeviceSpec) -> tuple[int, int]:
    """Threads and blocks that a multiprocessor holds."""
    if spec.capability[0] == 12:
        return 1536, 24
    return RESIDENT.get(spec.capability, (2048, 32))


def occupancy(threads: int, shared_bytes: int, blocks_per_sm: int, spec: DeviceSpec) -> int:
    """Resident blocks per multiprocessor, if registers allow `blocks_per_sm`; 0 if none fits."""
    most_threads, most_blocks = resident_limits(spec)
    if threads > 1024 or shared_bytes > spec.shared_bytes:
        return 0
    by_memory = (spec.shared_bytes + RESERVED) // (shared_bytes + RESERVED)
    return min(blocks_per_sm, most_blocks, most_threads // threads, by_memory)


@dataclass(frozen=True)
class Candidate:
    """A configuration and properties that rank it.

    Attributes
    ----------
    config : dataclass
    values : dict
        Its values in a tuned table.
    threads : int
        Threads on a multiprocessor.
    reuse : float
        Multiply-adds per element read from shared memory.
    useful : float
        Share of the multiply-adds that are needed.
    loads : float
        Number of times that a factor row is copied to shared memory.
    family : tuple
        The shape of its tiles.
    """

    config: Any
    values: dict[str, Any]
    threads: int
    reuse: float = 1.0
    useful: float = 1.0
    family: tuple[Any, ...] = ()
    loads: float = 1.0

    @property
    def promise(self) -> float:
        """Priority: higher values are timed first. Not a prediction of speed."""
        busy = min(1.0, self.threads / BUSY_THREADS)
        return self.useful * busy * self.reuse / (1.0 + self.reuse) / self.loads**0.25


@dataclass(frozen=True)
class Space:
    """The search space of a kernel.

    Attributes
    ----------
    kernel : str
        Its name in tuned tables and on the command line.
    facts : callable
        Maps ``(factors, itemsize)`` to the facts that a choice depends on; empty if the kernel does not apply.
    rule : callable
        Maps ``(facts, spec)`` to the choice without a table; ValueError if the device cannot run it.
    enumerate : callable
        Maps ``(facts, spec)`` to all others; the caller drops those that a class refuses.
    named : callable
        Maps ``(facts, spec, **values)`` of a tuned table to a candidate; ValueError or TypeError for invalid values.
    builds : callable
        Maps ``(facts, config)`` to the programs that a trial runs.
    variants : callable
        Maps ``(facts, config)`` to programs for other kinds of entries; a winner must not spill there either.
    weight : float
        Share of the time budget: higher for kernels with long compilations or tiles to build.
    block : int
        Ranks with equal numbers of blocks of this size may share a table entry.
    """

    kernel: str
    facts: Callable[[int, int], list[Facts]]
    rule: Callable[[Facts, DeviceSpec], Candidate]
    enumerate: Callable[[Facts, DeviceSpec], Iterator[Candidate]]
    named: Callable[..., Candidate]
    builds: Callable[[Facts, Any], list[Build]]
    variants: Callable[[Facts, Any], list[Build]] = field(default=lambda facts, config: [])
    weight: float = 1.0
    block: int = 8

    def candidates(self, facts: Facts, spec: DeviceSpec) -> list[Candidate]:
        """Candidates to time: the rule's, then the most promising of each family, then the second of each ...

        Raises
        ------
        ValueError
            The device cannot run even the rule's choice.
        """
        first = self.rule(facts, spec)
        others = {tuple(sorted(one.values.items())): one for one in self.enumerate(facts, spec) if _is_worth_it(one)}
        others.pop(tuple(sorted(first.values.items())), None)
        return [first, *_interleaved(others.values())]


def _is_worth_it(candidate: Candidate) -> bool:
    """The soft constraints."""
    return candidate.threads >= LEAST_THREADS and candidate.reuse >= LEAST_REUSE and candidate.useful > 0.25


def _interleaved(candidates: Iterable[Candidate]) -> list[Candidate]:
    families: dict[tuple[Any, ...], list[Candidate]] = {}
    for one in sorted(candidates, key=lambda one: -one.promise):  # a stable sort: the order is deterministic
        families.setdefault(one.family, []).append(one)
    turns = itertools.zip_longest(*families.values())  # families ordered by their best member
    return [one for turn in turns for one in turn if one is not None]


def _legal(make: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
    """A configuration; None if its class refuses it."""
    try:
        return make(*arguments, **fields)
    except ValueError:
        return None


def _values(config: Any, *facts: str) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in facts}


def _block_counts(make: Callable[[int], Any], spec: DeviceSpec) -> Iterator[Any]:
    """The configuration with the most blocks per multiprocessor, and with three quarters of them.

    Fewer blocks leave more registers to a thread.
    """
    most = 0
    for blocks in range(1, resident_limits(spec)[1] + 1):
        config = _legal(make, blocks)
        if config is None or occupancy(config.threads, config.shared_bytes, blocks, spec) < blocks:
            break
        most = blocks
    for blocks in sorted({most, max(1, 3 * most // 4)} if most else set(), reverse=True):
        yield make(blocks)


def _resident(config: Any, spec: DeviceSpec) -> int:
    return config.threads * occupancy(config.threads, config.shared_bytes, config.blocks_per_sm, spec)


def _lower_share(rank: int, tile: int, tiles: int) -> float:
    """Share of the elements of `tiles` square tiles that are in the lower triangle."""
    return rank * (rank + 1) / 2 / (tiles * tile * tile)


# ---------------------------------------------------------------------------------------------------- sparse-syrk


def _syrk(config: SyrkConfig, spec: DeviceSpec) -> Candidate:
    tx, ty = config.nb // config.dx, config.nb // config.dy
    useful = min(1.0, 2 * _lower_share(config.rank, config.nb, config.tiles))  # whole tiles are summed
    family, values = (config.nb, config.dx, config.dy), _values(config, "rank", "itemsize")
    loads = max(1.0, ceil_div(config.rank, config.nb) ** 2 * config.nb / config.rank)
    return Candidate(config, values, _resident(config, spec), tx * ty / (tx + ty), useful, family, loads)


def _enumerate_syrk(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    """Gates' (nb, kb, dx, dy), and our parameters: groups, stages, entries at a time, blocks per multiprocessor."""
    rank, itemsize = facts["rank"], facts["itemsize"]
    widths = [nb for nb in (8, 16, 24, 32, 48, 64, 80, 96, 128) if nb < 2 * max(rank, 8)]
    per_thread = (2, 4, 5, 6, 8, 10, 12)
    for nb, tx, ty in itertools.product(widths, per_thread, per_thread):
        if nb % tx or nb % ty or tx > 2 * ty or ty > 2 * tx:
            continue
        for dz, kb, stages, unroll in itertools.product((1, 2, 4, 8), (8, 16, 24, 32), (2, 3), (1, 2, 4)):

            def make(blocks: int, shape: Any = (nb, kb, nb // tx, nb // ty, dz, stages, unroll)) -> Any:
                return SyrkConfig(*(rank, itemsize, *shape, blocks))

            for config in _block_counts(make, spec):
                yield _syrk(config, spec)


def _syrk_facts(factors: int, itemsize: int) -> list[Facts]:
    return [{"rank": factors, "itemsize": itemsize}] if factors <= cholesky_any.MAX_RANK else []


def _entry_constants(itemsize: int, implicit: bool = False, offsets: bool = False) -> dict[str, Any]:
    return {"REAL": np.dtype(f"f{itemsize}"), "IMPLICIT": implicit, "HAS_OFFSETS": offsets}


def _assembly_builds(kernel: str) -> Callable[[Facts, Any], list[Build]]:
    def builds(facts: Facts, config: Any) -> list[Build]:
        return [(f"{kernel}.cu", kernel, config.constants | _entry_constants(facts["itemsize"]))]

    return builds


def _assembly_variants(kernel: str) -> Callable[[Facts, Any], list[Build]]:
    def builds(facts: Facts, config: Any) -> list[Build]:
        kinds = ((True, False), (False, True))
        entries = (_entry_constants(facts["itemsize"], *kind) for kind in kinds)
        return [(f"{kernel}.cu", kernel, config.constants | each) for each in entries]

    return builds


# ---------------------------------------------------------------------------------------------------- BALS


def _bals(config: BalsConfig, height: int, spec: DeviceSpec) -> Candidate:
    idle = config.rows * config.part_tiles / config.threads
    useful = min(1.0, 2 * idle * _lower_share(config.rank, config.tile, config.tiles))
    values = _values(config, "rank", "itemsize") | {"height": height}
    family = (config.tile, config.rows, config.part_tiles, config.buffers, height)
    return Candidate(config, values, _resident(config, spec), config.tile / 2, useful, family)


def _enumerate_bals(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    """Rows of a block, staged factor rows (the width of a matrix tile), and its height in blocks: BALS 4.3."""
    rank, itemsize = facts["rank"], facts["itemsize"]
    for tile, blocks, buffers in itertools.product((4, 8), (1, 2, 3), (1, 2)):
        tiles = plan_assemblies.lower_tiles(rank, tile)
        for parts, rows, lanes in itertools.product((1, 2, 4), (1, 2, 4, 6, 8, 12, 16, 24, 32), (8, 16, 32)):
            part_tiles = ceil_div(tiles, parts)
            least = _legal(
                BalsConfig, rank, itemsize, tile, rows, part_tiles, 1, buffers, lanes, max(16, lanes), blocks
            )
            if least is None:
                continue
            left = (spec.shared_bytes + RESERVED) // blocks - RESERVED - least.shared_bytes
            most = min(1024, 1 + left // (buffers * least.row_bytes)) if left > 0 else 0
            for capacity in (most, most // 2):
                if capacity >= 32:
                    for height in (1, 4):
                        yield _bals(replace(least, capacity=capacity), height, spec)


def bals_tile(candidate: Candidate) -> tuple[int, int]:
    """(tile_rows, tile_cols) of a candidate for BALS, as `bals_tile_sizes` gives them to a plan."""
    config, height = candidate.config, candidate.values["height"]
    width = config.capacity
    return height * config.rows, width // WARP * WARP if width >= WARP else width


# ---------------------------------------------------------------------------------------------------- fused


def _fused(config: FusedConfig, solver: str, spec: DeviceSpec) -> Candidate:
    shared = config.shared_bytes(solver)
    threads = config.threads * occupancy(config.threads, shared, config.blocks_per_sm, spec)
    # a warp multiplies 16 x 16 blocks: its square patch of blocks determines the reuse
    blocks = config.rank16 // plan_fused.BLOCK
    reuse = blocks / config.warps**0.5
    return Candidate(config, _values(config, "rank"), threads, reuse, 1.0, (config.warps, config.teams))


FUSED_REGISTERS = 72
"""Registers beside accumulators: with them some configuration of every rank compiles without spilling."""

FUSED_KINDS = (("float32", "cholesky"), ("float32", "cg"), ("bf16", "cholesky"))


def _fused_facts(factors: int, itemsize: int) -> list[Facts]:
    if factors > plan_fused.MAX_RANK or itemsize != 4:
        return []
    return [{"rank": factors, "precision": precision, "solver": solver} for precision, solver in FUSED_KINDS]


def _fused_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    why_not = plan_fused.supports(facts["rank"], "float32", spec)
    if why_not:
        raise ValueError(why_not)
    return _fused(FusedConfig.rule(facts["rank"]), facts["solver"], spec)


def _enumerate_fused(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    rank, solver = facts["rank"], facts["solver"]
    blocks = ceil_div(rank, plan_fused.BLOCK)
    for warps, teams, stages, resident in itertools.product((1, 2, 4), (1, 2, 4, 8), (2, 3, 4, 5, 6), range(1, 13)):
        config = _legal(FusedConfig, rank, warps, teams, stages, resident)
        if config is None:
            continue
        # accumulators of a thread: 16 x 16 blocks of the lower triangle over the lanes of a team
        sums = blocks * (blocks + 1) // 2 * plan_fused.BLOCK**2 // (WARP * warps)
        available = min(255, REGISTERS // (config.threads * resident) // 8 * 8)
        fits = occupancy(config.threads, config.shared_bytes(solver), resident, spec) == resident
        if sums + FUSED_REGISTERS <= available and fits:
            yield _fused(config, solver, spec)


def _fused_builds(facts: Facts, config: FusedConfig) -> list[Build]:
    return _fused_programs(facts, config, False, False)


def _fused_programs(facts: Facts, config: FusedConfig, implicit: bool, offsets: bool) -> list[Build]:
    constants = fused.build_constants(config, facts["precision"], facts["solver"], implicit, offsets)
    kernels = ["assemble_segments"]
    if not config.solved_by_sums(facts["solver"]):
        kernels += ["solve_partials"]
    if not config.solved_apart:
        kernels += ["solve_rows"]
    return [("fused_als.cu", kernel, constants) for kernel in kernels]


def _fused_variants(facts: Facts, config: FusedConfig) -> list[Build]:
    return _fused_programs(facts, config, True, False) + _fused_programs(facts, config, False, True)


# ---------------------------------------------------------------------------------------------------- solvers


def _cholesky_any_facts(factors: int, itemsize: int) -> list[Facts]:
    """Facts for which cholesky.cu does not apply."""
    served = itemsize == 4 and factors <= 64
    return [] if served or factors > cholesky_any.MAX_RANK else [{"rank": factors, "itemsize": itemsize}]


def _cholesky(config: CholeskyConfig, spec: DeviceSpec) -> Candidate:
    family = (config.systems > 0, config.row_threads, config.tile_rows, config.tile_columns, config.resident)
    reuse = 1.0
    if not config.systems:
        reuse = config.tile_rows * config.tile_columns / (config.tile_rows + config.tile_columns)
    return Candidate(config, _values(config, "rank", "itemsize"), _resident(config, spec), reuse, 1.0, family)


def _enumerate_cholesky(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    rank, itemsize = facts["rank"], facts["itemsize"]
    for systems, blocks in itertools.product((2, 4, 8), (2, 3, 4, 6, 8)) if rank <= WARP else ():
        config = _legal(CholeskyConfig, rank, itemsize, systems, blocks_per_sm=blocks)
        if config is not None and occupancy(config.threads, config.shared_bytes, blocks, spec) == blocks:
            yield _cholesky(config, spec)
    for row_threads, columns, resident in itertools.product((8, 16, 32), (4, 8), (True, False)):
        heights = (ceil_div(rank, row_threads),) if resident else (4, 8, 16)
        for height in heights:
            if height * columns * itemsize > 768:
                continue  # more accumulators than registers

            def make(blocks: int, shape: Any = (0, row_threads, height, columns, resident)) -> CholeskyConfig:
                config = CholeskyConfig(*(rank, itemsize, *shape, blocks))
                registers = REGISTERS // (config.threads * blocks)
                if config.tile_rows * config.tile_columns * itemsize // 4 + 40 > min(255, registers):
                    raise ValueError("not enough registers")
                return config

            for config in _block_counts(make, spec):
                yield _cholesky(config, spec)


def _cholesky_builds(facts: Facts, config: CholeskyConfig) -> list[Build]:
    return [("cholesky_any.cu", config.kernel, config.constants)]


def _tiles(config: TilesConfig, spec: DeviceSpec) -> Candidate:
    resident = 32 * config.teams * occupancy(32 * config.teams, config.shared_bytes, config.blocks_per_sm, spec)
    return Candidate(config, _values(config, "rank"), resident, 1.0, 1.0, (config.teams,))


def _tiles_facts(factors: int, itemsize: int) -> list[Facts]:
    return [{"rank": factors}] if factors <= 64 and itemsize == 4 else []


def _tiles_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    if not TilesConfig.serves(facts["rank"], "float32", spec):
        raise ValueError(f"compute capability {spec.capability[0]}.{spec.capability[1]} is below 8.0")
    return _tiles(TilesConfig.rule(facts["rank"]), spec)


def _enumerate_tiles(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    blocks16 = ceil_div(facts["rank"], 16)
    for teams, blocks in itertools.product((1, 2, 4, 8), range(1, 33)):
        config = TilesConfig(facts["rank"], teams, blocks)
        sums = blocks16 * (blocks16 + 1) // 2 * 256 // WARP
        available = min(255, REGISTERS // (32 * teams * blocks) // 8 * 8)
        if sums + 40 <= available and occupancy(32 * teams, config.shared_bytes, blocks, spec) == blocks:
            yield _tiles(config, spec)


def _cg(config: CgConfig, spec: DeviceSpec) -> Candidate:
    family = (config.warps, config.resident)
    return Candidate(config, _values(config, "rank", "itemsize"), _resident(config, spec), 1.0, 1.0, family)


def _enumerate_cg(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    rank, itemsize = facts["rank"], facts["itemsize"]
    for warps, resident in itertools.product((1, 2, 4, 8), (True, False)):
        for registers in (64, 96, 128, 255):
            fewest = REGISTERS // (warps * WARP * registers)

            def make(blocks: int, fewest: int = fewest, shape: Any = (warps, resident)) -> CgConfig:
                if blocks > fewest:
                    raise ValueError("not enough registers")
                return CgConfig(*(rank, itemsize, *shape, blocks))

            for config in _block_counts(make, spec):
                yield _cg(config, spec)


# ---------------------------------------------------------------------------------------------------- SGD


def _blocked(config: BlockedConfig, spec: DeviceSpec) -> Candidate:
    threads = 32 * (config.helpers + 1)
    blocks = occupancy(threads, config.shared_bytes, resident_limits(spec)[1], spec)
    # a block is one long row, of which there are few: occupancy is irrelevant
    resident = max(LEAST_THREADS, threads * blocks)
    return Candidate(config, _values(config, "ld", "itemsize"), resident, config.chunk / 4, 1.0, (config.chunk,))


def _msgd_facts(factors: int, itemsize: int) -> list[Facts]:
    return [{"ld": plan_sgd.stored_width(factors, f"f{itemsize}"), "itemsize": itemsize}]


def _msgd_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    config = BlockedConfig.rule(facts["ld"], facts["itemsize"], spec)
    if config.shared_bytes > spec.shared_bytes:
        raise ValueError(f"rows of {config.ld} numbers need {config.shared_bytes} bytes of shared memory")
    return _blocked(config, spec)


def _enumerate_msgd(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    for chunk, helpers, more in itertools.product((8, 16), (3, 5, 7), (0, 4)):
        config = BlockedConfig(facts["ld"], facts["itemsize"], chunk, helpers, 2 * helpers + more)
        if config.shared_bytes <= spec.shared_bytes:
            yield _blocked(config, spec)


def _msgd_builds(facts: Facts, config: BlockedConfig) -> list[Build]:
    return _msgd_programs(facts, config, False)


def _msgd_programs(facts: Facts, config: BlockedConfig, biases: bool) -> list[Build]:
    constants = {"REAL": np.dtype(f"f{facts['itemsize']}"), "HAS_BIASES": biases} | config.constants
    return [("msgd.cu", kernel, constants) for kernel in ("blocked", "centralized")]


def _hogwild_facts(factors: int, itemsize: int) -> list[Facts]:
    """Factors are stored in float16 or float32, never in float64."""
    widths = ((plan_sgd.stored_width(factors, f"f{size}"), size) for size in (2, 4))
    kinds = itertools.product(widths, (False, True))
    return [{"ld": ld, "itemsize": size, "biases": b} for (ld, size), b in kinds] if itemsize == 4 else []


def _hogwild(config: HogwildConfig, spec: DeviceSpec) -> Candidate:
    values = {name: getattr(config, name) for name in ("blocks_per_sm", "run", "batch")}
    resident = sgd.THREADS * occupancy(sgd.THREADS, 0, config.blocks_per_sm, spec)
    # long runs read rows less often from memory
    return Candidate(config, values, max(LEAST_THREADS, resident), config.run / 8, 1.0, (config.run,))


def _hogwild_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    return _hogwild(HogwildConfig.rule(spec, facts["ld"], facts["itemsize"], facts["biases"]), spec)


def _enumerate_hogwild(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    """Runs and blocks; a worker takes 256 entries at a time, as in cuMF_SGD, or four times as many."""
    most = HogwildConfig.blocks_for(facts["ld"], facts["itemsize"], False)
    for run, blocks, entries in itertools.product((8, 16, 32), range(1, most + 4), (256, 1024)):
        config = HogwildConfig.make(spec, facts["ld"], facts["itemsize"], blocks, run, entries // run)
        yield _hogwild(config, spec)


def _hogwild_builds(facts: Facts, config: HogwildConfig) -> list[Build]:
    constants = config.constants(facts["ld"], facts["itemsize"] == 2, facts["biases"])
    return [("batch_hogwild.cu", "batch_hogwild", constants)]


# ---------------------------------------------------------------------------------------------------- CCD++, top-K


def _ccd_facts(factors: int, itemsize: int) -> list[Facts]:
    """The kernels do not depend on the rank; vectors: 2 in the items' pass, 3 in the users'."""
    return [{"itemsize": itemsize, "vectors": vectors} for vectors in (2, 3)]


def _ccd(config: ccd_gpu.StagedConfig, spec: DeviceSpec) -> Candidate:
    return Candidate(config, dict(vars(config)), config.threads, 1.0, 1.0, (config.threads,))


def _ccd_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    return _ccd(ccd_gpu.StagedConfig.rule(f"f{facts['itemsize']}"), spec)


def _enumerate_ccd(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    for threads, segment in itertools.product((256, 512, 640, 768, 896, 1024), (2048, 1024, 4096)):
        yield _ccd(ccd_gpu.StagedConfig(threads, segment), spec)


def _ccd_builds(facts: Facts, config: ccd_gpu.StagedConfig) -> list[Build]:
    # the size of a tile is that of the device; a trial compiles it again, its registers are the same
    dtype, staged = (
        np.dtype(f"f{facts['itemsize']}"),
        ccd_gpu.CcdConfig(True, 4096, 1, config.segment, 1, config.threads),
    )
    return [("ccd.cu", "rank_one", staged.constants(facts["vectors"], dtype))]


def _ccd_variants(facts: Facts, config: ccd_gpu.StagedConfig) -> list[Build]:
    return _ccd_builds(facts | {"vectors": 1}, config)  # further inner iterations


def _top_k_facts(factors: int, itemsize: int) -> list[Facts]:
    """Products are float16 for every dtype of factors."""
    padded = topk.round_up(factors, 16)
    return [{"padded": padded}] if padded <= topk.LARGEST_PADDED and itemsize == 4 else []


def _top_k(config: GroupMaxConfig, spec: DeviceSpec) -> Candidate:
    threads = WARP * topk.WARPS
    resident = threads * occupancy(threads, config.shared_bytes, 8, spec)
    reuse = config.users_per_warp / 16
    return Candidate(config, _values(config, "padded"), resident, reuse, 1.0, (config.users_per_warp,))


def _top_k_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    config = GroupMaxConfig.rule(facts["padded"])
    if not config.fits(spec):
        raise ValueError(f"rank {config.padded} needs {config.shared_bytes} bytes of shared memory")
    return _top_k(config, spec)


def _enumerate_top_k(facts: Facts, spec: DeviceSpec) -> Iterator[Candidate]:
    for users, groups in itertools.product((16, 32, 64), (1, 2, 4, 8)):
        config = GroupMaxConfig(facts["padded"], users, groups)
        halves = users * facts["padded"] // 2 // WARP  # registers of a warp's users
        if config.fits(spec) and halves <= 160:
            yield _top_k(config, spec)


def _rank_and_size(make: Callable[..., Any], describe: Callable[..., Candidate]) -> Callable[..., Candidate]:
    def rule(facts: Facts, spec: DeviceSpec) -> Candidate:
        return describe(make(facts["rank"], facts["itemsize"], spec), spec)

    return rule


def _named(make: Callable[..., Any], describe: Callable[..., Candidate], *given: str) -> Callable[..., Candidate]:
    """`Space.named` of a class whose arguments are some facts and the values of an entry."""

    def named(facts: Facts, spec: DeviceSpec, **values: Any) -> Candidate:
        return describe(make(**{name: facts[name] for name in given}, **values), spec)

    return named


def _fused_named(facts: Facts, spec: DeviceSpec, **values: Any) -> Candidate:
    return _fused(FusedConfig(facts["rank"], **values), facts["solver"], spec)


def _bals_named(facts: Facts, spec: DeviceSpec, *, height: int, **values: Any) -> Candidate:
    return _bals(BalsConfig(facts["rank"], facts["itemsize"], **values), height, spec)


def _hogwild_named(facts: Facts, spec: DeviceSpec, **values: Any) -> Candidate:
    return _hogwild(HogwildConfig.make(spec, facts["ld"], facts["itemsize"], **values), spec)


def _bals_rule(facts: Facts, spec: DeviceSpec) -> Candidate:
    return _bals(BalsConfig.rule(facts["rank"], facts["itemsize"], spec), 1, spec)


SPACES = {
    space.kernel: space
    for space in (
        Space(
            "fused", _fused_facts, _fused_rule, _enumerate_fused, _fused_named, _fused_builds, _fused_variants,
            weight=4.0, block=plan_fused.BLOCK,
        ),
        Space(
            "sparse_syrk", _syrk_facts, _rank_and_size(SyrkConfig.rule, _syrk), _enumerate_syrk,
            _named(SyrkConfig, _syrk, "rank", "itemsize"), _assembly_builds("sparse_syrk"),
            _assembly_variants("sparse_syrk"), weight=2.0,
        ),
        Space(
            "bals", _syrk_facts, _bals_rule, _enumerate_bals, _bals_named, _assembly_builds("bals"),
            _assembly_variants("bals"), weight=4.0,
        ),
        Space(
            "cholesky_tiles", _tiles_facts, _tiles_rule, _enumerate_tiles, _named(TilesConfig, _tiles, "rank"),
            lambda facts, config: [("cholesky.cu", "cholesky_tiles", config.constants)], block=16,
        ),
        Space(
            "cholesky_any", _cholesky_any_facts, _rank_and_size(CholeskyConfig.rule, _cholesky), _enumerate_cholesky,
            _named(CholeskyConfig, _cholesky, "rank", "itemsize"), _cholesky_builds,
        ),
        Space(
            "cg_any", _syrk_facts, _rank_and_size(CgConfig.rule, _cg), _enumerate_cg,
            _named(CgConfig, _cg, "rank", "itemsize"),
            lambda facts, config: [("cg_any.cu", "cg", config.constants)], weight=0.5,
        ),
        Space(
            "msgd", _msgd_facts, _msgd_rule, _enumerate_msgd, _named(BlockedConfig, _blocked, "ld", "itemsize"),
            _msgd_builds, lambda facts, config: _msgd_programs(facts, config, True), weight=0.5,
        ),
        Space(
            "batch_hogwild", _hogwild_facts, _hogwild_rule, _enumerate_hogwild, _hogwild_named, _hogwild_builds,
            weight=0.5,
        ),
        Space(
            "ccd", _ccd_facts, _ccd_rule, _enumerate_ccd, _named(ccd_gpu.StagedConfig, _ccd), _ccd_builds,
            _ccd_variants,
            weight=3.0,
        ),
        Space(
            "top_k", _top_k_facts, _top_k_rule, _enumerate_top_k, _named(GroupMaxConfig, _top_k, "padded"),
            lambda facts, config: [("top_k.cu", "group_max", config.constants)], weight=0.5,
        ),
    )
}  # fmt: skip
"""By name of the kernel, in the order of tuning."""
