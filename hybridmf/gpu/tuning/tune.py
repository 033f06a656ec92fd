"""Times the configurations of kernels on this GPU and finds the fastest (Gates et al., section VIII; BALS 4.3).

A job is a kernel with the facts that its choice depends on. Its configurations (`spaces`) are compiled on all cores,
those of the rule and of tables first; those that spill more registers than the rule's are dropped. Each runs once, and
its results are checked (`trials`) before it is timed. The best three, the rule's and the tables' are then timed in
turn, and the winner's code for other kinds of entries is compiled and checked.

Jobs share the time budget by their weights, and later jobs get the time that one leaves. A share cuts off the least
promising configurations. The first rank of all kernels is tuned before the second of any. A job that starts times a few
configurations even beyond its share; jobs without time left are reported.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..._version import __version__
from ...core.system import available_cores
from ...core.validate import check_choice, check_int, check_real
from ...device.cuda import CudaDevice, Device, Resources
from ...device.health import one_line
from ...errors import DeviceError, DeviceMemoryError
from ...plan.tables import LEAST_MEASURED, Entry, Facts, Gpu, Table, known
from ..fused import Build
from ..launch import program
from .spaces import SPACES, Space
from .trials import Sample, TimedRun, Trial

FACTORS = (32, 64, 100, 128)
BUDGET = 300.0  # default time budget in seconds
REPEATS = 3  # runs timed per configuration; only one if the first takes `HOPELESS` times the best so far
HOPELESS = 1.3
FINALISTS = 3
FINAL_ROUNDS = 7
GAIN = 0.01  # part of the time that a configuration must save to replace the rule's or a table's: less is noise
FEWEST = 4  # configurations beside the rule's and the tables' that a job times even beyond its share


Timer = Callable[[Device, TimedRun, int], list[float]]  # ``(device, part, repeats)`` to milliseconds


def event_times(device: Device, part: TimedRun, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` runs, by CUDA events, or by the clock on an emulated device."""
    if not isinstance(device, CudaDevice):
        return [_wall_ms(device, part) for _ in range(repeats)]
    import cupy

    marks = []
    with device.active():
        for _ in range(repeats + 1):
            if part.prepare is not None:
                part.prepare()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            part.run()
            end.record()
            marks.append((start, end))
        marks[-1][1].synchronize()
        # not counted: the host launches ahead during the first run, so that launches are not timed
        return [float(cupy.cuda.get_elapsed_time(start, end)) for start, end in marks[1:]]


def _wall_ms(device: Device, part: TimedRun) -> float:
    if part.prepare is not None:
        part.prepare()
    device.synchronize()
    started = time.perf_counter()
    part.run()
    device.synchronize()
    return 1e3 * (time.perf_counter() - started)


@dataclass
class Measurement:
    """Result of one configuration."""

    config: Any
    values: dict[str, Any]  # its values in a tuned table
    status: str  # {"timed", "spills", "failed", "wrong"}
    reason: str = ""  # why it was not timed
    # ms, gflops: of each part of the trial: median milliseconds, and useful operations per time
    ms: dict[str, float] = field(default_factory=dict)
    gflops: dict[str, float] = field(default_factory=dict)
    error: float | None = None  # error found by the check
    resources: Resources | None = None  # maximum over its kernels

    @property
    def score(self) -> float:
        """Geometric mean of the milliseconds of all parts, Gates et al.'s criterion for the best overall kernel."""
        if not self.ms:
            return math.inf
        return math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in self.ms.values()))

    def set_times(self, parts: dict[str, TimedRun], times: dict[str, list[float]]) -> None:
        self.ms = {name: statistics.median(values) for name, values in times.items()}
        self.gflops = {name: part.flops / max(self.ms[name], 1e-9) / 1e6 for name, part in parts.items()}


@dataclass
class Job:
    """A kernel with the facts that its choice depends on, and the results."""

    kernel: str
    factors: int
    facts: Facts
    known: list[dict[str, Any]] = field(default_factory=list)  # values of tables for these facts
    # the rule's configuration first, then those of tables
    measurements: list[Measurement] = field(default_factory=list)
    winner: Measurement | None = None
    candidates: int = 0  # number of configurations
    seconds: float = 0.0
    reason: str = ""  # why there is no winner, or why the search ended early

    @property
    def space(self) -> Space:
        return SPACES[self.kernel]

    @property
    def name(self) -> str:
        return f"{self.kernel}, {', '.join(f'{name} {value}' for name, value in self.facts.items())}"

    @property
    def timed(self) -> list[Measurement]:
        """Timed configurations, fastest first."""
        return sorted((one for one in self.measurements if one.status == "timed"), key=lambda one: one.score)

    def is_known(self, one: Measurement) -> bool:
        return one.values in self.known

    @property
    def rule_ms(self) -> float:
        """Milliseconds of the rule's configuration, or of the winner if the rule's could not be timed."""
        assert self.winner is not None
        rule = self.measurements[0]
        return rule.score if rule.status == "timed" else self.winner.score

    @property
    def entry(self) -> Entry | None:
        """Entry for a tuned table: the winner, if others were timed."""
        timed = len(self.timed)
        if self.winner is None or timed < LEAST_MEASURED:
            return None
        times = round(self.winner.score, 5), round(self.rule_ms, 5)
        return Entry(self.kernel, self.facts, self.winner.values, *times, timed, rivals=tuple(self.known))

    def lines(self) -> Iterator[dict[str, Any]]:
        for place, one in enumerate(self.measurements):
            resources = one.resources
            yield {
                "bench": "tune", "kernel": self.kernel, "factors": self.factors, "facts": self.facts,
                "config": one.values, "rule": place == 0, "known": self.is_known(one),
                "winner": one is self.winner,
                "status": one.status, "reason": one.reason, "ms": one.ms, "gflops": one.gflops, "error": one.error,
                "registers": None if resources is None else resources.registers,
                "local_bytes": None if resources is None else resources.local_bytes,
            }  # fmt: skip

    def summary(self) -> str:
        winner, timed = self.winner, len(self.timed)
        if winner is None:
            return f"{self.name}: {self.reason}"
        dropped = f", {len(self.measurements) - timed} dropped" if timed < len(self.measurements) else ""
        counts = f"({timed} of {self.candidates} timed{dropped}; {self.seconds:.0f} s)"
        head = f"{self.name}: {winner.score:.3f} ms"
        if timed < LEAST_MEASURED:
            return f"{head} with nothing to compare it with, tables stay as they are {counts}"
        if winner is self.measurements[0] or self.is_known(winner):
            return f"{head}, {'the rule' if winner is self.measurements[0] else 'the table'}'s choice stays {counts}"
        best = ", ".join(f"{key} {value}" for key, value in winner.values.items())
        return f"{head} instead of {self.rule_ms:.3f} {counts}: {best}"


def make_jobs(kernels: Sequence[str] | None, factors: Sequence[int], itemsize: int) -> list[Job]:
    """Each kernel with each combination of facts once, in turn; its most usual facts at all ranks before others."""
    of_kernels: list[list[Job]] = []
    for kernel in SPACES if kernels is None else dict.fromkeys(kernels):
        kinds = itertools.zip_longest(*([(f, facts) for facts in SPACES[kernel].facts(f, itemsize)] for f in factors))
        jobs: dict[tuple[Any, ...], Job] = {}
        for f, facts in (each for kind in kinds for each in kind if each is not None):
            jobs.setdefault(tuple(facts.items()), Job(kernel, f, facts))
        of_kernels.append(list(jobs.values()))
    return [job for turn in itertools.zip_longest(*of_kernels) for job in turn if job is not None]


def table_of(device: Device, jobs: Sequence[Job]) -> Table:
    entries = (job.entry for job in jobs)
    return Table(Gpu.of(device.spec), tuple(entry for entry in entries if entry is not None))


def stamp(device: Device) -> dict[str, Any]:
    spec = device.spec
    gpu = {"name": spec.name, "capability": list(spec.capability), "multiprocessors": spec.multiprocessors}
    if isinstance(device, CudaDevice):
        import cupy

        gpu |= {"cuda": cupy.cuda.runtime.runtimeGetVersion(), "cupy": cupy.__version__}
    return {"gpu": gpu, "versions": {"hybridmf": __version__}, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


class Tuner:
    """One run of the tuner on a device, with a budget in seconds; the last job may take slightly longer.

    A job has at most `most` configurations beside those of the rule and of tables, among them `table`, the destination
    of the results.
    """

    def __init__(
        self,
        device: Device,
        *,
        budget: float = BUDGET,
        most: int | None = None,
        num_threads: int | None = None,
        timer: Timer = event_times,
        table: Table | None = None,
    ) -> None:
        self.device, self.timer, self.table = device, timer, table
        self.budget = check_real("budget", budget, 0.0, strict=True)
        self.most = None if most is None else check_int("most", most, 1)
        self.pool = ThreadPoolExecutor(num_threads or available_cores())
        self.end = math.inf
        self.prepared: dict[str, tuple[dict[Future[Resources], Any], list[Any]]] = {}

    def run(
        self,
        kernels: Sequence[str] | None = None,
        factors: Sequence[int] = FACTORS,
        *,
        dtype: str = "float32",
        sample: Sample | None = None,
    ) -> Iterator[Job]:
        """Tune kernels of `spaces.SPACES`; yield each job once it is done, so that its results are not lost.

        Kernels without support for the dtype of factors are left out.
        """
        for kernel in kernels or ():
            check_choice("kernel", kernel, tuple(SPACES))
        factors = [check_int("factors", f, 1) for f in factors]
        itemsize = {"float32": 4, "float64": 8}[check_choice("dtype", dtype, ("float32", "float64"))]
        return self._work_through(make_jobs(kernels, factors, itemsize), sample)

    def _work_through(self, jobs: list[Job], sample: Sample | None) -> Iterator[Job]:
        sample = sample or Sample.draw()
        self.end = time.monotonic() + self.budget
        try:
            for place, job in enumerate(jobs):
                self._work(job, jobs[place + 1 :], sample)
                yield job
        finally:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, job: Job, later: Sequence[Job], sample: Sample) -> None:
        started = time.monotonic()
        if started >= self.end:
            job.reason = (
                f"not tuned: the budget of {self.budget:g} s is spent; raise --budget, or restrict --kernel and "
                "--factors"
            )
            return
        weights = sum(each.space.weight for each in (job, *later))
        deadline = started + (self.end - started) * job.space.weight / weights
        try:
            first, others = self._prepare(job)
            for following in later[:1]:  # so that the next job does not wait for the compiler
                with contextlib.suppress(ValueError):  # reported when it runs
                    self._prepare(following)
            self._search(job, first, others, sample, deadline)
        except (DeviceMemoryError, ValueError) as error:
            job.reason = f"not tuned: {' '.join(str(error).split())}"
        job.seconds = time.monotonic() - started

    def _prepare(self, job: Job) -> tuple[dict[Future[Resources], Any], list[Any]]:
        """Compilations of the rule's configuration and of those of tables, and all other candidates."""
        if job.name not in self.prepared:
            spec = self.device.spec
            rule, *others = job.space.candidates(job.facts, spec)
            job.known = known(job.kernel, spec, job.facts, job.space.block, beside=self.table)
            first = {rule: None}
            for values in job.known:
                with contextlib.suppress(TypeError, ValueError):  # fits ignore it, too
                    first[job.space.named(job.facts, values)] = None
            others = [one for one in others if one not in first]
            job.candidates = len(first) + len(others)
            self.prepared[job.name] = {self._compiling(job, one): one for one in first}, others
        return self.prepared[job.name]

    def _compiling(self, job: Job, config: Any, *, variants: bool = False) -> Future[Resources]:
        """Compile the programs of a trial, or those for other kinds of entries."""
        timed, others = job.space.programs(job.facts, config, self.device.spec)
        return self.pool.submit(self._compile, others if variants else timed)

    def _compile(self, builds: Sequence[Build]) -> Resources:
        found = [self.device.resources(*program(file, kernel, **constants)) for file, kernel, constants in builds]
        return Resources(
            max((one.registers for one in found), default=0), max((one.local_bytes for one in found), default=0)
        )

    def _search(
        self, job: Job, first: dict[Future[Resources], Any], others: list[Any], sample: Sample, deadline: float
    ) -> None:
        """Check and time configurations until the deadline, then choose the winner."""
        most = None if self.most is None else max(0, self.most - len(first))
        compiling = first | {self._compiling(job, one): one for one in others[:most]}
        try:
            with self.device.active():
                trial = job.space.trial(self.device, sample, job.facts)
                try:
                    allowed = next(iter(first)).result().local_bytes
                except DeviceError as error:
                    raise ValueError(f"the rule's configuration does not compile: {error}") from error
                for future in itertools.chain(first, self._completed(list(compiling)[len(first) :], deadline)):
                    config = compiling[future]
                    one = Measurement(config, job.space.values(config), "failed")
                    self._measure(job, trial, one, future, allowed)
                    job.measurements.append(one)
                self._finals(job, trial, allowed)
        finally:
            for future in compiling:
                future.cancel()

    def _completed(self, waiting: list[Future[Resources]], deadline: float) -> Iterator[Future[Resources]]:
        """Compilations as they end, the most promising first: a few in any case, more until the deadline."""
        for count in itertools.count():
            limit = self.end if count < FEWEST else deadline
            done = wait(waiting, max(0.0, limit - time.monotonic()), FIRST_COMPLETED).done if waiting else set()
            if not done or time.monotonic() > limit:
                return
            first = next(future for future in waiting if future in done)
            waiting.remove(first)
            yield first

    def _measure(self, job: Job, trial: Trial, one: Measurement, future: Future[Resources], allowed: int) -> None:
        """Check and time one configuration, which may spill `allowed` bytes; record the reason of a failure."""
        try:
            one.resources = future.result()
        except DeviceError as error:
            one.reason = one_line(error)[:300]
            return
        if one.resources.local_bytes > allowed:
            one.status = "spills"
            one.reason = f"{one.resources.local_bytes} bytes of local memory a thread, the rule's has {allowed}"
            return
        try:
            one.error = trial.error(one.config)
            if not one.error <= trial.tolerance:
                one.status, one.reason = "wrong", f"error {one.error:.2e} beyond {trial.tolerance:.0e}"
                return
            self._time(one, trial.parts(one.config), min((each.score for each in job.timed), default=math.inf))
            one.status = "timed"
        except (DeviceError, ValueError, TypeError) as problem:
            one.reason = one_line(problem)[:300]
            self._require_device(job, problem)

    def _time(self, one: Measurement, parts: dict[str, TimedRun], best: float) -> None:
        times = {name: self.timer(self.device, part, 1) for name, part in parts.items()}
        one.set_times(parts, times)
        if one.score < HOPELESS * best:
            one.set_times(parts, {name: self.timer(self.device, part, REPEATS) for name, part in parts.items()})

    def _require_device(self, job: Job, problem: Exception) -> None:
        """Raise if an error left the device unusable: later results would be meaningless."""
        try:
            self.device.synchronize()
        except DeviceError as error:
            raise DeviceError(
                f"{self.device.spec.name} stopped working after {job.name} ({one_line(problem)[:300]}): start "
                f"again; kernels that were tuned before are kept. {error}"
            ) from error

    def _finals(self, job: Job, trial: Trial, allowed: int) -> None:
        """Time the best, the rule's and the tables' in turn, so that drift affects all alike; choose the winner.

        The winner is the fastest whose programs for other kinds of entries spill no more than the rule's.
        """
        rule = job.measurements[0]
        if not job.timed:
            job.reason = f"nothing could be timed: {rule.reason}"
            return
        best, *others = job.timed
        kept = (one for k, one in enumerate(others, 1) if k < FINALISTS or one is rule or job.is_known(one))
        finalists = [best, *kept]
        if len(finalists) > 1:
            self._time_in_turn(trial, finalists)
        limit = rule.score * (1 - GAIN) if rule.status == "timed" else math.inf
        better = [one for one in finalists if one is not rule and one.score <= limit]
        better.sort(key=lambda one: one.score * (1 - GAIN if job.is_known(one) else 1))
        contenders = [*better, rule] if better else []
        compiling = [self._compiling(job, one.config, variants=True) for one in contenders]
        for one, future in zip(better, compiling, strict=False):
            try:
                found, spilled = future.result().local_bytes, compiling[-1].result().local_bytes
            except DeviceError as error:
                one.status, one.reason = "failed", f"for other kinds of entries: {one_line(error)[:300]}"
                continue
            if found <= max(spilled, allowed):
                job.winner = one
                return
            one.status, one.reason = "spills", f"{found} bytes of local memory a thread for other kinds of entries"
        if rule.status == "timed":
            job.winner = rule
        else:
            job.reason = f"none that could be timed is sound; the rule's: {rule.reason}"

    def _time_in_turn(self, trial: Trial, finalists: list[Measurement]) -> None:
        parts = [trial.parts(one.config) for one in finalists]
        times: list[dict[str, list[float]]] = [{name: [] for name in each} for each in parts]
        for _, (place, each) in itertools.product(range(FINAL_ROUNDS), list(enumerate(parts))):
            for name, part in each.items():
                times[place][name] += self.timer(self.device, part, 1)
        for one, each, values in zip(finalists, parts, times, strict=True):
            one.set_times(each, values)
