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
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ..._version import __version__
from ...core.system import available_cores
from ...core.validate import check_choice, check_int, check_real
from ...device.cuda import CudaDevice, Device, Resources
from ...errors import DeviceError, DeviceMemoryError
from ...plan.tables import LEAST_MEASURED, Entry, Gpu, Table, known
from ..launch import constant_texts, source_text
from .spaces import SPACES, Build, Candidate, Facts, Space
from .trials import MAKERS, Part, Sample, Trial

logger = logging.getLogger("hybridmf")

FACTORS = (32, 64, 100, 128)
BUDGET = 300.0
"""Default time budget in seconds."""

REPEATS = 3
"""Runs timed per configuration; only one if the first takes `HOPELESS` times the best so far."""

HOPELESS = 1.3
FINALISTS = 3
FINAL_ROUNDS = 7
GAIN = 0.01
"""Part of the time that a configuration must save to replace the rule's or a table's: less is noise."""

FEWEST = 4
"""Configurations beside the rule's and the tables' that a job times even beyond its share."""


Timer = Callable[[Device, Part, int], list[float]]
"""``(device, part, repeats)`` to milliseconds."""


def event_times(device: Device, part: Part, repeats: int) -> list[float]:
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


def _wall_ms(device: Device, part: Part) -> float:
    if part.prepare is not None:
        part.prepare()
    device.synchronize()
    started = time.perf_counter()
    part.run()
    device.synchronize()
    return 1e3 * (time.perf_counter() - started)


@dataclass
class Measurement:
    """Result of one configuration.

    Attributes
    ----------
    candidate : Candidate
    status : {"timed", "spills", "failed", "wrong"}
    reason : str
        Why it was not timed.
    ms : dict of str to float
        Milliseconds of each part of the trial, medians.
    gflops : dict of str to float
        Useful operations of each part per time.
    error : float or None
        Error found by the check.
    resources : Resources or None
        Maximum over its kernels.
    """

    candidate: Candidate
    status: str
    reason: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    gflops: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    resources: Resources | None = None

    @property
    def score(self) -> float:
        """Geometric mean of the milliseconds of all parts, as Gates et al. choose the best overall kernel."""
        if not self.ms:
            return math.inf
        return math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in self.ms.values()))


@dataclass
class Job:
    """A kernel with the facts that its choice depends on, and the results.

    Attributes
    ----------
    space : Space
    factors : int
    facts : dict
    known : list of dict
        Values of tables for these facts.
    measurements : list of Measurement
        The rule's configuration first, then those of tables.
    winner : Measurement or None
    candidates : int
        Number of configurations.
    seconds : float
    reason : str
        Why there is no winner, or why the search ended early.
    """

    space: Space
    factors: int
    facts: Facts
    known: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    winner: Measurement | None = None
    candidates: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.space.kernel}, {', '.join(f'{name} {value}' for name, value in self.facts.items())}"

    @property
    def timed(self) -> list[Measurement]:
        """Timed configurations, fastest first."""
        return sorted((one for one in self.measurements if one.status == "timed"), key=lambda one: one.score)

    def is_known(self, one: Measurement) -> bool:
        """Whether a table has this configuration."""
        return one.candidate.values in self.known

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
        values = self.winner.candidate.values
        return Entry(self.space.kernel, self.facts, values, *times, timed, rivals=tuple(self.known))

    def lines(self) -> Iterator[dict[str, Any]]:
        """A record of each configuration, for plots."""
        for place, one in enumerate(self.measurements):
            resources = one.resources
            yield {
                "bench": "tune", "kernel": self.space.kernel, "factors": self.factors, "facts": self.facts,
                "config": one.candidate.values, "rule": place == 0, "known": self.is_known(one),
                "winner": one is self.winner,
                "status": one.status, "reason": one.reason, "ms": one.ms, "gflops": one.gflops, "error": one.error,
                "threads": one.candidate.threads, "reuse": one.candidate.reuse,
                "registers": None if resources is None else resources.registers,
                "local_bytes": None if resources is None else resources.local_bytes,
            }  # fmt: skip

    def summary(self) -> str:
        """One line of text."""
        winner = self.winner
        if winner is None:
            return f"{self.name}: {self.reason}"
        dropped = len(self.measurements) - len(self.timed)
        counts = f"{len(self.timed)} of {self.candidates} timed" + (f", {dropped} dropped" if dropped else "")
        counts = f"({counts}; {self.seconds:.0f} s)"
        if len(self.timed) < LEAST_MEASURED:
            return (
                f"{self.name}: {winner.score:.3f} ms with nothing to compare it with, tables stay as they are {counts}"
            )
        if winner is self.measurements[0] or self.is_known(winner):
            whose = "the rule's" if winner is self.measurements[0] else "the table's"
            return f"{self.name}: {winner.score:.3f} ms, {whose} choice stays {counts}"
        best = ", ".join(f"{key} {value}" for key, value in winner.candidate.values.items())
        return f"{self.name}: {winner.score:.3f} ms instead of {self.rule_ms:.3f} {counts}: {best}"


def make_jobs(kernels: Sequence[str] | None, factors: Sequence[int], itemsize: int) -> list[Job]:
    """Each kernel with each combination of facts once.

    Kernels alternate, in the order of `spaces.SPACES`; the most usual facts of each (the first) come at all ranks
    before the next ones.
    """
    of_kernels: list[list[Job]] = []
    for name in SPACES if kernels is None else dict.fromkeys(kernels):
        kinds = itertools.zip_longest(*([(f, facts) for facts in SPACES[name].facts(f, itemsize)] for f in factors))
        jobs: dict[tuple[Any, ...], Job] = {}
        for f, facts in (each for kind in kinds for each in kind if each is not None):
            jobs.setdefault(tuple(sorted(facts.items())), Job(SPACES[name], f, facts))
        of_kernels.append(list(jobs.values()))
    return [job for turn in itertools.zip_longest(*of_kernels) for job in turn if job is not None]


def tune(
    device: Device,
    kernels: Sequence[str] | None = None,
    factors: Sequence[int] = FACTORS,
    *,
    dtype: str = "float32",
    budget: float = BUDGET,
    sample: Sample | None = None,
    most: int | None = None,
    num_threads: int | None = None,
    timer: Timer = event_times,
    table: Table | None = None,
) -> Iterator[Job]:
    """Tune kernels on a device; yield each job once it is done, so that its results are not lost.

    Parameters
    ----------
    device : Device
    kernels : sequence of str, optional
        Keys of `spaces.SPACES`; default: all.
    factors : sequence of int
        Ranks.
    dtype : {"float32", "float64"}
        Dtype of factors; kernels without support for it are left out.
    budget : float
        Seconds, from the drawing of ratings; the last job may take slightly longer.
    sample : Sample, optional
        Ratings; default: `Sample.draw()`.
    most : int, optional
        Maximum configurations of a job, beside those of the rule and of tables.
    num_threads : int, optional
        Compilations at a time; default: all cores.
    timer : callable
        Replaces `event_times` in tests.
    table : Table, optional
        Destination of the results, if fits do not read it: its configurations are timed, too.

    Raises
    ------
    ValueError
        An unknown kernel, or an invalid rank or budget.
    DeviceError
        The device failed; jobs already yielded stay valid.
    """
    for kernel in kernels or ():
        check_choice("kernel", kernel, tuple(SPACES))
    factors = [check_int("factors", f, 1) for f in factors]
    itemsize = {"float32": 4, "float64": 8}[check_choice("dtype", dtype, ("float32", "float64"))]
    budget = check_real("budget", budget, 0.0, strict=True)
    most = None if most is None else check_int("most", most, 1)
    jobs = make_jobs(kernels, factors, itemsize)
    return _run_jobs(_Run(device, timer, most, table), jobs, budget, sample, num_threads or available_cores())


def table_of(device: Device, jobs: Sequence[Job]) -> Table:
    """Make the tuned table from the winners of jobs."""
    entries = (job.entry for job in jobs)
    return Table(Gpu.of(device.spec), tuple(entry for entry in entries if entry is not None))


def stamp(device: Device) -> dict[str, Any]:
    """GPU and versions, for every record."""
    spec = device.spec
    gpu: dict[str, Any] = {
        "name": spec.name,
        "capability": list(spec.capability),
        "multiprocessors": spec.multiprocessors,
    }
    if isinstance(device, CudaDevice):
        import cupy

        gpu |= {"cuda": cupy.cuda.runtime.runtimeGetVersion(), "cupy": cupy.__version__}
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"gpu": gpu, "versions": {"hybridmf": __version__}, "date": today}


@dataclass(frozen=True)
class _Run:
    """State shared by the jobs of a run; see `tune`."""

    device: Device
    timer: Timer
    most: int | None
    table: Table | None


def _run_jobs(run: _Run, jobs: list[Job], budget: float, sample: Sample | None, threads: int) -> Iterator[Job]:
    sample = sample or Sample.draw()
    end = time.monotonic() + budget
    pool = ThreadPoolExecutor(threads)
    runners = [_Runner(run, job, pool) for job in jobs]
    before: _Runner | None = None
    try:
        for place, runner in enumerate(runners):
            _work_through(runner, runners[place + 1 :], sample, end, budget)
            # its variants were compiled meanwhile
            if before is not None:
                yield before.settled()
            before = runner
        if before is not None:
            yield before.settled()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _work_through(runner: _Runner, later: Sequence[_Runner], sample: Sample, end: float, budget: float) -> None:
    """Run one job within its share of the remaining time."""
    job, started = runner.job, time.monotonic()
    if started >= end:
        job.reason = (
            f"not tuned: the budget of {budget:g} s is spent; raise --budget, or restrict --kernel and --factors"
        )
        return
    weights = sum(each.job.space.weight for each in (runner, *later))
    runner.end, runner.deadline = end, started + (end - started) * job.space.weight / weights
    try:
        runner.prepare()
        for following in later[:1]:  # before this job's variants, so that the next job does not wait for them
            with contextlib.suppress(ValueError):  # reported when it runs
                following.prepare()
        runner.run(sample)
    except (DeviceMemoryError, ValueError) as error:
        job.reason = f"not tuned: {' '.join(str(error).split())}"
    job.seconds = time.monotonic() - started


class _Runner:
    """Runs one job until its deadline."""

    def __init__(self, run: _Run, job: Job, pool: ThreadPoolExecutor) -> None:
        self.device, self.timer, self.most, self.table = run.device, run.timer, run.most, run.table
        self.job, self.pool = job, pool
        self.deadline = self.end = math.inf
        self.allowed_bytes = 0
        self.best = math.inf
        self.first: dict[Future[Resources], Candidate] = {}
        self.others: list[Candidate] = []
        self.contenders: list[Measurement] = []
        self.variants: list[list[Future[Resources]]] = []

    def prepare(self) -> None:
        """Compile the rule's configuration and those of tables, unless already started.

        Raises
        ------
        ValueError
            The device cannot run even the rule's configuration.
        """
        if self.first:
            return
        job, spec = self.job, self.device.spec
        rule, *others = job.space.candidates(job.facts, spec)
        job.known = known(job.space.kernel, spec, job.facts, job.space.block, beside=self.table)
        first = [rule]
        for values in job.known:
            with contextlib.suppress(TypeError, ValueError):  # fits ignore it, too
                one = job.space.named(job.facts, spec, **values)
                first += [one] if one.values not in [each.values for each in first] else []
        tried = [one.values for one in first]
        self.others = [one for one in others if one.values not in tried]
        job.candidates = len(first) + len(self.others)
        self.first = {self._submit(one): one for one in first}

    def run(self, sample: Sample) -> None:
        """Compile, check and time all configurations; then run the finals."""
        most = None if self.most is None else max(0, self.most - len(self.first))
        compiling = {self._submit(one): one for one in self.others[:most]}
        (rule, candidate), *tables = self.first.items()
        try:
            with self.device.active():
                trial = MAKERS[self.job.space.kernel](self.device, sample, self.job.facts)
                self._measure_rule(trial, rule, candidate)
                for future, candidate in tables:
                    self._measure(trial, future, candidate)
                for future in self._completed(list(compiling)):
                    self._measure(trial, future, compiling[future])
                self._finals(trial)
        finally:
            for future in compiling:
                future.cancel()

    def _submit(self, candidate: Candidate) -> Future[Resources]:
        return self.pool.submit(self._compile, self.job.space.builds(self.job.facts, candidate.config))

    def _compile(self, builds: Sequence[Build]) -> Resources:
        """Compile all kernels of some programs; return the maximum of their resources."""
        found = []
        for file, kernel, constants in builds:
            found.append(self.device.resources(source_text(file), kernel, constant_texts(constants)))
        return Resources(max(one.registers for one in found), max(one.local_bytes for one in found))

    def _completed(self, waiting: list[Future[Resources]]) -> Iterator[Future[Resources]]:
        """Compilations as they end, the most promising first: a few in any case, more until the deadline."""
        for count in itertools.count():
            limit = self.end if count < FEWEST else self.deadline
            done = wait(waiting, max(0.0, limit - time.monotonic()), FIRST_COMPLETED).done if waiting else set()
            if not done or time.monotonic() > limit:
                return
            first = next(future for future in waiting if future in done)
            waiting.remove(first)
            yield first

    def _measure_rule(self, trial: Trial, future: Future[Resources], candidate: Candidate) -> None:
        """Measure the rule's configuration; others may spill as much as it does."""
        try:
            self.allowed_bytes = future.result().local_bytes
        except DeviceError as error:
            raise ValueError(f"the rule's configuration does not compile: {error}") from error
        self._measure(trial, future, candidate)

    def _measure(self, trial: Trial, future: Future[Resources], candidate: Candidate) -> None:
        """Check and time one configuration; record the reason of a failure."""
        try:
            resources = future.result()
        except DeviceError as error:
            self._record(Measurement(candidate, "failed", _short(error)))
            return
        if resources.local_bytes > self.allowed_bytes:
            reason = f"{resources.local_bytes} bytes of local memory a thread, the rule's has {self.allowed_bytes}"
            self._record(Measurement(candidate, "spills", reason, resources=resources))
            return
        try:
            found = trial.error(candidate)
            if not found <= trial.tolerance:
                reason = f"error {found:.2e} beyond {trial.tolerance:.0e}"
                self._record(Measurement(candidate, "wrong", reason, error=found, resources=resources))
                return
            one = Measurement(candidate, "timed", error=found, resources=resources)
            self._time(trial, one)
        except (DeviceError, ValueError, TypeError) as problem:
            self._record(Measurement(candidate, "failed", _short(problem), resources=resources))
            self._require_device(problem)
            return
        self._record(one)
        self.best = min(self.best, one.score)

    def _time(self, trial: Trial, one: Measurement) -> None:
        parts = trial.parts(one.candidate)
        times = {name: self.timer(self.device, part, 1) for name, part in parts.items()}
        one.ms = {name: values[0] for name, values in times.items()}
        if one.score < HOPELESS * self.best:
            for name, part in parts.items():
                times[name] = self.timer(self.device, part, REPEATS)
        self._set(one, parts, times)

    def _set(self, one: Measurement, parts: dict[str, Part], times: dict[str, list[float]]) -> None:
        one.ms = {name: statistics.median(values) for name, values in times.items()}
        one.gflops = {name: part.flops / max(one.ms[name], 1e-9) / 1e6 for name, part in parts.items()}

    def _record(self, measurement: Measurement) -> None:
        self.job.measurements.append(measurement)

    def _require_device(self, problem: Exception) -> None:
        """Raise if an error left the device unusable: later results would be meaningless."""
        try:
            self.device.synchronize()
        except DeviceError as error:
            raise DeviceError(
                f"{self.device.spec.name} stopped working after {self.job.name} ({_short(problem)}): start "
                f"again; kernels that were tuned before are kept. {error}"
            ) from error

    def _finals(self, trial: Trial) -> None:
        """Time the best, the rule's and the tables' in turn, so that drift affects all alike.

        Also compiles possible winners for other kinds of entries.
        """
        job = self.job
        if not job.timed:
            job.reason = f"nothing could be timed: {job.measurements[0].reason}"
            return
        rule = job.measurements[0]
        best, *others = job.timed
        kept = (one for k, one in enumerate(others, 1) if k < FINALISTS or one is rule or job.is_known(one))
        finalists = [best, *kept]
        if len(finalists) > 1:
            self._time_in_turn(trial, finalists)
        limit = rule.score * (1 - GAIN) if rule.status == "timed" else math.inf
        better = [one for one in finalists if one is not rule and one.score <= limit]
        better.sort(key=lambda one: one.score * (1 - GAIN if job.is_known(one) else 1))
        self.contenders = [*better, rule]
        if better:
            self.variants = [self._submit_variants(one.candidate) for one in self.contenders]

    def _submit_variants(self, candidate: Candidate) -> list[Future[Resources]]:
        builds = self.job.space.variants(self.job.facts, candidate.config)
        return [self.pool.submit(self._compile, [build]) for build in builds]

    def settled(self) -> Job:
        """Return the job with its winner: the fastest whose variants for other kinds of entries also pass."""
        job = self.job
        if not self.contenders:
            return job
        *better, rule = self.contenders
        for one, variants in zip(better, self.variants, strict=False):
            one.status, one.reason = self._check_variants(variants)
            if one.status == "timed":
                job.winner = one
                return job
        if rule.status == "timed":
            job.winner = rule
        else:
            job.reason = f"none that could be timed is sound; the rule's: {rule.reason}"
        return job

    def _check_variants(self, variants: list[Future[Resources]]) -> tuple[str, str]:
        try:
            found = max((future.result().local_bytes for future in variants), default=0)
        except DeviceError as error:
            return "failed", f"for other kinds of entries: {_short(error)}"
        allowed = max((future.result().local_bytes for future in self.variants[-1]), default=0)
        if found > max(allowed, self.allowed_bytes):
            return "spills", f"{found} bytes of local memory a thread for other kinds of entries"
        return "timed", ""

    def _time_in_turn(self, trial: Trial, finalists: list[Measurement]) -> None:
        parts = [trial.parts(one.candidate) for one in finalists]
        times: list[dict[str, list[float]]] = [{name: [] for name in each} for each in parts]
        for _, (place, each) in itertools.product(range(FINAL_ROUNDS), list(enumerate(parts))):
            for name, part in each.items():
                times[place][name] += self.timer(self.device, part, 1)
        for one, each, values in zip(finalists, parts, times, strict=True):
            self._set(one, each, values)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
