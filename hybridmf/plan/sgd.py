"""SGD as a `Method`: validated hyperparameters, schedules, device, memory and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..core.objective import Objective
from ..core.system import ceil_div
from ..core.validate import check_bool, check_choice, check_real, index_pointer_dtype
from ..device.cuda import DeviceSpec
from ..errors import DeviceError, RatingsError
from . import dispatch
from .cost import gather_seconds, gpu_idle, memory_floor
from .machine import CpuRates, GpuRates, Machine, seconds_at
from .types import CpuWork, Method, Plan, Settings, instruction_set_notes

SCHEDULES = ("msgd", "hogwild", "blocks", "batch_hogwild")
CPU_SCHEDULES = ("msgd", "hogwild", "blocks")
GPU_SCHEDULES = ("msgd", "batch_hogwild")
ORDERS = ("passes", "blocks")
"""Orders of updates on several ranks; see `hybridmf.ranks.mcumsgd`."""

ORDERINGS = ("user", "item", "mixed", "crossed")
RATE_SCHEDULES = ("power", "geometric", "constant", "rpcs", "adagrad")

GPU_RATE_SCHEDULES = ("power", "geometric", "constant")
"""Rate schedules with sums of squares run on the CPU only: on a GPU, AdaGrad's would double the memory traffic."""

DEFAULT_RATES = {"power": 0.12, "geometric": 0.11, "constant": 0.038, "rpcs": 0.08, "adagrad": 0.08}
"""Default learning rates for standardized ratings, without biases."""

BIASED_RATES = {"power": 0.04, "geometric": 0.035, "constant": 0.015, "rpcs": 0.05, "adagrad": 0.05}
"""Default learning rates with biases, where factors explain residuals, which contain more noise."""

DEFAULT_DECAYS = {"power": 0.1, "geometric": 0.9}
"""At rank 32 and 20 epochs every schedule reaches a test RMSE below 0.87 on MovieLens 1M, 0.855 with biases."""

MAX_LEARNING_RATE = 10.0
"""Steps on standardized ratings are stable up to about 2 / |y|^2, and factors have length about 1."""

SCALES = {"float16": (1e-4, 1e6), "float32": (1e-9, 1e9), "float64": (1e-25, 1e25)}
"""Scales of ratings without overflow: factors grow with the square root, AdaGrad's sums with the cube of the scale."""

LONG_ROW = 32768
"""Entries of a row from which MSGD on a GPU processes it several entries at a time, concurrently with the other rows:
this takes more instructions, but otherwise a warp advances one entry in some 200 ns, and the longest rows would end
long after the others. An epoch of Netflix's shape, f = 128, took 14.4 ms on an H200, 15.2 with 49,152, 16.7 with
65,536, and 18.1 with 20,000 in an earlier version that took 16.7. With a still earlier one on two H200s, 10.9 ms, 11.0
with half of it and 11.7 with a quarter."""

TRIPLET_ENTRY = 3e-8
"""Seconds of one core to sort an entry into the order of a schedule on the CPU."""

GPU_MAX_FACTORS = 512
"""A warp holds a row of factors in registers: 16 a lane."""


@dataclass(frozen=True)
class SgdMethod(Method):
    """Hyperparameters of stochastic gradient descent."""

    kind: ClassVar[str] = "sgd"
    entry_seconds: ClassVar[float] = 3e-9  # bench/dispatch.py, 16 cores
    streams: ClassVar[bool] = False

    schedule: str  # {"msgd", "hogwild", "blocks", "batch_hogwild"}
    ordering: str  # orientations of the ratings in the passes of MSGD on a GPU: "user", "item", "mixed", "crossed"
    rate_schedule: str  # {"power", "geometric", "constant", "rpcs", "adagrad"}
    learning_rate: float
    decay: float  # see `hybridmf.plan.epochs.learning_rate_at`; `decay` is 0 where the schedule has none
    deterministic: bool  # whether `blocks` are visited in an order that does not depend on the threads
    order: str = "passes"  # order of updates on several ranks; see `hybridmf.ranks.mcumsgd`: "passes", "blocks"
    seed_bits: int = 0  # seed of the shuffles, together with the number of the epoch; set at the start of a fit
    scale: float = 1.0
    """Scale that standardizes the ratings (`hybridmf.core.objective.rating_scale`), to which the learning rate refers;
    set at the start of a fit."""

    def names(self, plan: Plan) -> tuple[str, str]:
        return "", self.schedule

    @classmethod
    def check(
        cls,
        schedule: Any,
        ordering: Any,
        rate_schedule: Any,
        learning_rate: Any,
        decay: Any,
        deterministic: Any,
        biases: bool = False,
        order: Any = "passes",
    ) -> SgdMethod:
        """Validate the hyperparameters; None selects the default for the rate schedule and biases."""
        schedule = check_choice("schedule", schedule, SCHEDULES)
        rate_schedule = check_choice("rate_schedule", rate_schedule, RATE_SCHEDULES)
        default = (BIASED_RATES if biases else DEFAULT_RATES)[rate_schedule]
        rate = default if learning_rate is None else learning_rate
        rate = check_real("learning_rate", rate, 0.0, strict=True)
        if rate > MAX_LEARNING_RATE:
            raise ValueError(
                f"learning_rate must be at most {MAX_LEARNING_RATE:g}, got {rate:g}: longer steps than about "
                "2 / |factors|^2 diverge; start from 0.01 to 0.1"
            )
        if schedule == "batch_hogwild" and rate_schedule not in GPU_RATE_SCHEDULES:
            raise ValueError(
                f"rate_schedule={rate_schedule!r} runs on the CPU and schedule='batch_hogwild' on a GPU; use one of "
                f"rate_schedule={', '.join(map(repr, GPU_RATE_SCHEDULES))}, or another schedule"
            )
        return cls(
            schedule,
            check_choice("ordering", ordering, ORDERINGS),
            rate_schedule,
            rate,
            _check_decay(rate_schedule, decay),
            check_bool("deterministic", deterministic),
            check_choice("order", order, ORDERS),
        )

    def standardized(self, objective: Objective, scale: float, number: str) -> SgdMethod:
        """The method for a fit on ratings of a given scale, in the number format `number`."""
        least, most = SCALES[number]
        if not least <= scale <= most:
            raise RatingsError(
                f"the ratings have a root mean square of about {scale:.3g}; SGD in {number} takes {least:g} to "
                f"{most:g}: divide ratings and regularization by {scale:.0e}"
            )
        for name, weight, unit in (
            ("regularization", max(objective.regularization), scale),
            ("bias_regularization", max(objective.bias_regularization) if objective.biases else 0.0, 1.0),
        ):
            if self.learning_rate * weight / unit >= 1:
                over = f" / {unit:.4g} (the scale of the ratings)" if unit != 1 else ""
                raise ValueError(
                    f"learning_rate * {name} must be < 1 for standardized ratings, got {self.learning_rate:g} * "
                    f"{weight:g}{over}: each step would reverse the factors; lower one of them"
                )
        return replace(self, scale=scale)

    def rng(self, epoch: int | None = None) -> np.random.Generator:
        """Generator of epoch `epoch` (0, 1, ...); None: generator for draws before the first epoch."""
        return np.random.default_rng(np.random.SeedSequence([self.seed_bits, 0 if epoch is None else epoch + 1]))

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work of an epoch: 2 f for the error of an entry and 3 f for each row it updates.

        MSGD updates one row at a time, so it computes each error twice.
        """
        return self._flops * plan.nnz * plan.rank

    @property
    def _flops(self) -> float:
        """Flops per entry and factor."""
        return 10.0 if self.schedule == "msgd" else 8.0

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Both rows of an entry are read and written; MSGD reads them twice and writes each once a pass at most."""
        return 4.0 * plan.nnz * plan.rank * np.dtype(plan.dtype).itemsize

    def cpu_setup(self, plan: Plan, rates: CpuRates) -> dict[str, float]:
        """Triplets in the order of the schedule."""
        return {} if self.schedule == "msgd" else {"schedule": plan.nnz * TRIPLET_ENTRY}

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Updates of entries at the rate of the schedule; with MSGD the updates of a row are sequential."""
        flops = self._flops
        entry = seconds_at(rates.sgd[self.schedule], lambda f: flops * f, plan.rank)
        if self.rate_schedule in ("rpcs", "adagrad"):
            entry *= 3.0  # a square root and a division for each updated row or coordinate
        # MSGD keeps the row that it updates in registers; blocks keep theirs in a core's cache
        moved = (2 if self.schedule == "msgd" else 4) * plan.nnz * plan.rank * 4.0
        near = self.schedule == "blocks"
        floor = 0.0 if near else max(gather_seconds(plan, rates), memory_floor(moved, plan, rates))
        seconds = max(plan.nnz * entry, floor) + plan.filled_rows * rates.sgd_row
        longest = 0.0
        if self.schedule == "msgd":
            longest = max(plan.longest) * seconds_at(rates.sgd["msgd"], lambda f: 5 * f, plan.rank)
        return CpuWork(seconds, regions=4.0, new_tables=0.2, longest=longest)

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        """Bytes over their rate, or the longest user and item."""
        rates = machine.gpu
        itemsize: float = plan.itemsize
        if plan.precision == "float16":
            itemsize = READ_AS_FLOAT16 * itemsize if self.schedule == "msgd" else 2
        seconds = plan.nnz * seconds_at(rates.sgd[self.schedule], lambda f: 4 * f * itemsize, plan.rank)
        if self.schedule == "msgd":
            seconds = max(seconds, sum(chain_seconds(one, rates) for one in plan.longest))
        return seconds + gpu_idle(plan, rates)

    def describe(self, plan: Plan) -> str:
        rate = f"{self.rate_schedule} rate {self.learning_rate:g}"
        if self.rate_schedule in DEFAULT_DECAYS:
            rate += f", decay {self.decay:g}"
        order = "" if self.order == "passes" else f", order {self.order}"
        return f"SGD, schedule {self.schedule}{order}; {rate}"

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        if base.frozen:
            raise ValueError(
                f"freeze={base.frozen!r} does not apply to SGD, which moves a user and an item by each rating; solve "
                "one side by ExplicitALS or CCD, which minimize the same objective"
            )
        base = base.changed(assembly="simd", reorder="none")
        if base.precision not in ("float32", "float16"):
            raise ValueError(f"precision must be 'float32' or 'float16' for SGD, got {base.precision!r}")
        if isinstance(settings.device, tuple):
            return self._ranks_plan(base, settings, settings.device)
        if self.order != "passes":
            raise ValueError(
                f"order={self.order!r} is the order in which items travel between several devices, got "
                f'device={settings.device!r}; use a list such as device=["cuda:0", "cuda:1"], or order="passes"'
            )
        why_not = "" if spec is None else self._why_not_gpu(base, spec)
        if why_not and settings.device != "auto":
            raise ValueError(f'{why_not}; use device="cpu" or device="auto" for it, or change the parameter')
        return dispatch.choose(
            dispatch.PlanRequest(
                base,
                settings,
                spec,
                on_cpu=lambda undecided: self._cpu_plan(undecided, settings),
                on_gpu=lambda undecided: self._gpu_plan(undecided, settings, spec),
                cpu_only=why_not,
                gpu_only=self.schedule not in CPU_SCHEDULES,
            )
        )

    def _ranks_plan(self, base: Plan, settings: Settings, devices: tuple[str, ...]) -> Plan:
        """One rank on each device: each owns users, and items move between ranks (MSGD Alg. 4)."""
        if self.schedule != "msgd":
            raise ValueError(
                f"schedule={self.schedule!r} runs on one device, got device={list(devices)!r}; "
                "use schedule='msgd' on several"
            )
        first = replace(settings, device=devices[0])
        if devices[0] == "cpu":
            plan = self._cpu_plan(base, first)
        else:
            why_not = self._why_not_gpu(base, None)
            if why_not:
                raise ValueError(f"{why_not}; use CPU ranks (device={['cpu'] * len(devices)!r}) for it, or change it")
            plan = self._gpu_plan(base, first, dispatch.find_gpus(devices)[0])
            plan = plan.changed(bytes=self._rank_bytes(plan, len(devices)))
        note = f"{len(devices)} ranks on {', '.join(devices)}: each owns users, items travel from rank to rank"
        return plan.changed(devices=devices, notes=(*plan.notes, note))

    def _rank_bytes(self, plan: Plan, ranks: int) -> dict[str, int]:
        """Memory of one of several GPUs, for equal shares."""
        m, n, itemsize = plan.n_users, plan.n_items, np.dtype(plan.dtype).itemsize
        shared = self._gpu_bytes(plan)
        width = -(-plan.rank // 8) * 8 * itemsize
        # each block of ratings has separate tables for this rank's users and the block's items: bounds, order, sums
        tables = (m + n) * (8 + 4 + 8) + self._range_bytes(plan)
        held = n * width  # the items of all blocks, which launches find in the same memory in every epoch
        # users before the epoch, which popular items read, are a copy if a table has biases
        before = -(-m // ranks) * width if plan.rank > plan.factors else 0
        factors = shared["factors"] // ranks + held + before
        return {"ratings": shared["ratings"] // ranks + tables, "factors": factors}

    def _why_not_gpu(self, base: Plan, spec: DeviceSpec | None) -> str:
        """Setting that a GPU, or several (None), do not support; empty if all are supported."""
        if self.schedule not in GPU_SCHEDULES:
            return f"schedule={self.schedule!r} runs on the CPU only"
        if self.rate_schedule not in GPU_RATE_SCHEDULES:
            return f"rate_schedule={self.rate_schedule!r} runs on the CPU only"
        if base.factors > GPU_MAX_FACTORS:
            return f"factors={base.factors} runs on the CPU only (a GPU takes up to {GPU_MAX_FACTORS})"
        if self.schedule == "batch_hogwild" and base.dtype != "float32":
            return f"dtype={base.dtype!r} is not for schedule='batch_hogwild', which computes in float32"
        if self.schedule == "msgd" and base.precision != "float32":
            return self._why_not_float16(base, spec)
        return ""

    def _why_not_float16(self, base: Plan, spec: DeviceSpec | None) -> str:
        """Setting that keeps MSGD from reading the fixed side in float16."""
        asked = f"precision={base.precision!r} with schedule='msgd'"
        if spec is None:
            return f"{asked} is for one device"
        if self.ordering != "mixed":
            return f"{asked} needs ordering='mixed', got {self.ordering!r}"
        if base.dtype != "float32":
            return f"{asked} needs dtype='float32', got {base.dtype!r}"
        if spec.capability < (8, 0):
            return f"{asked} needs a GPU of compute capability 8.0, got {spec.capability[0]}.{spec.capability[1]}"
        return ""

    def _gpu_plan(self, base: Plan, settings: Settings, spec: DeviceSpec | None) -> Plan:
        notes = () if self.schedule == "msgd" else ("factors depend on the race of the GPU's warps: no two runs agree",)
        plan = dispatch.on_gpu(base, settings, spec)
        return plan.changed(bytes=self._gpu_bytes(plan), notes=notes)

    def _gpu_bytes(self, plan: Plan) -> dict[str, int]:
        m, n, nnz, itemsize = plan.n_users, plan.n_items, plan.nnz, np.dtype(plan.dtype).itemsize
        rows = (m + n) * (-(-plan.rank // 8) * 8) * itemsize
        copies = 3 if plan.rank > plan.factors else 2  # a table with biases is a copy of the working rows
        if self.schedule == "batch_hogwild":
            # one orientation, crowded rows of the other, and runs, which the host shuffles
            entries = nnz + int(MOST_CROWDED * nnz)
            runs = 16 * (entries // RUN + m + n)
            layout = max(m, n) * 8 + min(m, n)
            return {"ratings": entries * (4 + itemsize) + layout + runs, "factors": (copies + 1) * rows}
        copies += plan.precision == "float16"  # the float16 copy that a pass reads
        layouts = 1 if self.ordering in ("user", "item") else 2
        tables = (m + n) * (8 + 4 + 8) + self._range_bytes(plan)
        return {"ratings": layouts * nnz * (4 + itemsize) + tables, "factors": copies * rows}

    def _range_bytes(self, plan: Plan) -> int:
        """Bytes of bounds and sums of the ranges of rows, beyond the first range of each row."""
        assert plan.gpu is not None
        row_bytes = stored_width(plan.factors, plan.dtype) * np.dtype(plan.dtype).itemsize
        shapes = ((plan.n_users, plan.n_items), (plan.n_items, plan.n_users))
        counts = [range_count(shape, plan.nnz, row_bytes, plan.gpu.l2_bytes) for shape in shapes]
        return sum(moved * (8 + 8) * (count - 1) for (moved, _), count in zip(shapes, counts, strict=True))

    def _cpu_plan(self, base: Plan, settings: Settings) -> Plan:
        notes = instruction_set_notes()
        if self.schedule not in CPU_SCHEDULES:
            what = f"schedule={self.schedule!r} needs a GPU"
            way_out = f"use one of schedule={', '.join(map(repr, CPU_SCHEDULES))}"
            if settings.device != "cpu":
                raise DeviceError(f"{what}, and none serves this ({base.reason}); {way_out}")
            raise ValueError(f'{what}; on device="cpu" {way_out}')
        if base.precision != "float32":
            if settings.device == "cpu":
                raise ValueError(
                    f'precision={base.precision!r} needs a GPU; on device="cpu" use precision="float32" '
                    '(dtype="float64" for more)'
                )
            notes.append(f"precision {base.precision!r} is the GPU's; the CPU computes in {base.dtype}")
        if base.num_threads > 1 and self.schedule == "hogwild":
            notes.append("factors depend on the race of the threads: no two runs agree")
        if base.num_threads > 1 and self.schedule == "blocks" and not self.deterministic:
            notes.append("the order of blocks depends on the threads: no two runs agree")
        plan = base.changed(precision="float32", notes=tuple(notes))
        return plan.changed(bytes=self._cpu_bytes(plan))

    def _cpu_bytes(self, plan: Plan) -> dict[str, int]:
        m, n, nnz, itemsize = plan.n_users, plan.n_items, plan.nnz, np.dtype(plan.dtype).itemsize
        pointer = np.dtype(index_pointer_dtype(nnz)).itemsize
        entries = 0 if self.schedule == "msgd" else nnz * (8 + itemsize)  # triplets in the order of the schedule
        copies = 4 if self.rate_schedule == "adagrad" else 2
        line = 64 // itemsize
        width = -(-plan.rank // line) * line
        return {
            "ratings": 2 * nnz * (itemsize + 4) + (m + n) * (pointer + 8) + entries,
            # an epoch works on a copy, so that an interrupted one has no effect
            "factors": copies * (m + n) * width * itemsize,
            # a permutation of the entries, while triplets are sorted
            "workspace": nnz * 8 if self.schedule == "hogwild" else (m + n) * 8,
        }


def chain_seconds(longest: int, rates: GpuRates) -> float:
    """Seconds of the longest row of a pass of MSGD on a GPU, whose updates are sequential."""
    return max(min(longest, LONG_ROW) * rates.serial_update, longest * rates.solved_update)


def _check_decay(rate_schedule: str, decay: Any) -> float:
    default = DEFAULT_DECAYS.get(rate_schedule)
    if default is None:
        if decay is not None:
            raise ValueError(f"decay={decay!r} has no effect with rate_schedule={rate_schedule!r}; leave it out")
        return 0.0
    if decay is None:
        return default
    if rate_schedule == "power":
        return check_real("decay", decay, 0.0)
    value = check_real("decay", decay, 0.0, strict=True)
    if value > 1:
        raise ValueError(
            f"decay must be at most 1 with rate_schedule='geometric', got {value:g}: the learning rate is multiplied "
            "by it after each epoch"
        )
    return value


RANGE_OF_L2 = 0.25
"""Share of the L2 cache for one range of fixed rows. All rows visit one range before the next, so that the range stays
in the cache; otherwise rows would be at different positions and read from memory. An epoch of Netflix's shape took 17.9
ms instead of 19.0 on an H200 (f = 128, 31 MB a range), 10.0 instead of 12.0 (64, 15 MB), 7.9 instead of 9.4 (32)."""

MOST_RANGES = 8
"""Most ranges: they are processed sequentially, and more of them were slower (f = 128: 12 took 18.0 ms)."""

RANGE_ENTRIES = 64
"""Minimum average entries of a row in a range, since starting a row takes as long as some updates."""

READ_AS_FLOAT16 = 0.88
"""Time of an epoch of MSGD that reads the fixed side in float16, against float32 (Netflix's shape, f = 128, H200)."""

MOST_CROWDED = 0.5
"""Largest part of all entries in crowded rows of batch-Hogwild, whose entries are on the GPU twice."""

RUN = 16
"""Consecutive entries of one row in batch-Hogwild, while the row stays in registers. In trials on an H100, an epoch of
Netflix's shape, f = 128 in float16, took 14.0 ms, and 15.7 with 8; 32 leave room for fewer blocks: 14.2."""


def range_count(shape: tuple[int, int], nnz: int, row_bytes: int, l2_bytes: int, most: int = MOST_RANGES) -> int:
    """Number of column ranges in which rows process their entries; see `RANGE_OF_L2`.

    `shape`: numbers of updated rows and of fixed rows.
    """
    moved, fixed = shape
    wanted = ceil_div(fixed * row_bytes, max(1, int(RANGE_OF_L2 * l2_bytes)))
    return max(1, min(wanted, most, nnz // max(1, RANGE_ENTRIES * moved)))


def stored_width(factors: int, dtype: Any) -> int:
    """Columns of a table of factors in a dtype: rows are multiples of 16 bytes."""
    vector = 16 // np.dtype(dtype).itemsize
    return ceil_div(factors, vector) * vector
