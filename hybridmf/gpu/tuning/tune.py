"""Times the configurations of kernels on this GPU and finds the fastest (Gates et al., section VIII; BALS 4.3).

One job is one kernel with the facts that its choice depends on. Its configurations (`spaces`) are compiled on all
cores, those of the rule and of tables first; what spills more registers than the rule's is dropped. Each is run once
and its answer checked (`trials`) before it is timed. The best three, the rule's and the tables' are then timed in turn,
and the winner's code for other kinds of entries is looked at.

Jobs share the time budget by their weights, and what one leaves is the others'; what a share cuts off is what was
expected least of. All kernels have their first rank tuned before any has its second. A job that begins looks at a few
configurations whatever its share is, since less finds nothing; jobs for which no time is left are named.
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
"""Seconds, by default."""

REPEATS = 3
"""Times that each configuration is timed; once, where the first time is `HOPELESS` times the best so far."""

HOPELESS = 1.3
FINALISTS = 3
FINAL_ROUNDS = 7
GAIN = 0.01
"""Part of the time that a configuration must save to replace the rule's or a table's: less is noise."""

FEWEST = 4
"""Configurations beside the rule's and the tables' that a job looks at while there is time at all."""


Timer = Callable[[Device, Part, int], list[float]]
"""``(device, part, repeats)`` to milliseconds."""


def event_times(device: Device, part: Part, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` runs, by CUDA events; by the clock where the device is emulated."""
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
        # the first does not count: while it runs the host gets ahead, whose launches would else be timed
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
    """What became of one configuration.

    Attributes
    ----------
    candidate : Candidate
    status : {"timed", "spills", "failed", "wrong"}
    reason : str
        Why it was not timed.
    ms : dict of str to float
        Milliseconds of each part of the trial, medians.
    gflops : dict of str to float
        Useful work of each part over its time.
    error : float or None
        What the check found.
    resources : Resources or None
        The largest of its kernels.
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
        """Geometric mean of the parts' milliseconds, as Gates choose the best overall kernel."""
        if not self.ms:
            return math.inf
        return math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in self.ms.values()))


@dataclass
class Job:
    """One kernel with the facts that its choice depends on, and what came of it.

    Attributes
    ----------
    space : Space
    factors : int
    facts : dict
    known : list of dict
        What tables say for these facts.
    measurements : list of Measurement
        The rule's configuration first, then those of tables.
    winner : Measurement or None
    candidates : int
        Configurations there are.
    seconds : float
    reason : str
        Why there is no winner, or what was cut off.
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
        """For messages."""
        return f"{self.space.kernel}, {', '.join(f'{name} {value}' for name, value in self.facts.items())}"

    @property
    def timed(self) -> list[Measurement]:
        """Those that were timed, fastest first."""
        return sorted((one for one in self.measurements if one.status == "timed"), key=lambda one: one.score)

    def is_known(self, one: Measurement) -> bool:
        """Whether a table has this configuration."""
        return one.candidate.values in self.known

    @property
    def rule_ms(self) -> float:
        """Of the rule's configuration; of the winner where the rule's could not be timed."""
        assert self.winner is not None
        rule = self.measurements[0]
        return rule.score if rule.status == "timed" else self.winner.score

    @property
    def entry(self) -> Entry | None:
        """What a tuned table keeps: the winner, if it has beaten anything."""
        timed = len(self.timed)
        if self.winner is None or timed < LEAST_MEASURED:
            return None
        times = round(self.winner.score, 5), round(self.rule_ms, 5)
        values = self.winner.candidate.values
        return Entry(self.space.kernel, self.facts, values, *times, timed, rivals=tuple(self.known))

    def lines(self) -> Iterator[dict[str, Any]]:
        """A record of each configuration, what plots are made of."""
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
        """A line for people."""
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

    The kernels take turns, in the order of `spaces.SPACES`; each has its most usual kind of facts (the first) at all
    ranks before the next kind.
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
    """Tune kernels on a device; yields each job once it is done, so that what was found is not lost.

    Parameters
    ----------
    device : Device
    kernels : sequence of str, optional
        Keys of `spaces.SPACES`; default: all.
    factors : sequence of int
        Ranks.
    dtype : {"float32", "float64"}
        Of the numbers; kernels that know only one are left out for the other.
    budget : float
        Seconds from when the ratings are drawn; the last job that begins may take a little longer.
    sample : Sample, optional
        Ratings; default: `Sample.draw()`.
    most : int, optional
        Configurations of a job at most; those of the rule and of tables are timed whatever it says.
    num_threads : int, optional
        Compilations at a time; default: all cores.
    timer : callable
        For tests.
    table : Table, optional
        Where what is found will go, if fits do not look there: its configurations are timed, too.

    Raises
    ------
    ValueError
        An unknown kernel, a rank or a budget that is none.
    DeviceError
        The device does not work any more; jobs that were yielded stand.
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
    """The tuned table that jobs make."""
    entries = (job.entry for job in jobs)
    return Table(Gpu.of(device.spec), tuple(entry for entry in entries if entry is not None))


def stamp(device: Device) -> dict[str, Any]:
    """What every record says of GPU and versions."""
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
    """What the jobs of a run share; see `tune`."""

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
            # its other programs were compiled meanwhile
            if before is not None:
                yield before.settled()
            before = runner
        if before is not None:
            yield before.settled()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _work_through(runner: _Runner, later: Sequence[_Runner], sample: Sample, end: float, budget: float) -> None:
    """One job within its share of what is left of the time."""
    job, started = runner.job, time.monotonic()
    if started >= end:
        job.reason = (
            f"not tuned: the budget of {budget:g} s is spent; --budget gives more, --kernel and --factors leave out"
        )
        return
    weights = sum(each.job.space.weight for each in (runner, *later))
    runner.end, runner.deadline = end, started + (end - started) * job.space.weight / weights
    try:
        runner.prepare()
        for following in later[:1]:  # ahead of this job's other programs, so that it need not wait for them
            with contextlib.suppress(ValueError):  # told when it is its turn
                following.prepare()
        runner.run(sample)
    except (DeviceMemoryError, ValueError) as error:
        job.reason = f"not tuned: {' '.join(str(error).split())}"
    job.seconds = time.monotonic() - started


class _Runner:
    """Works through one job until its deadline."""

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
        """Compile the rule's configuration and those of tables, if that was not begun before.

        Raises
        ------
        ValueError
            Not even the rule finds a configuration that the device can run.
        """
        if self.first:
            return
        job, spec = self.job, self.device.spec
        rule, *others = job.space.candidates(job.facts, spec)
        job.known = known(job.space.kernel, spec, job.facts, job.space.block, beside=self.table)
        first = [rule]
        for values in job.known:
            with contextlib.suppress(TypeError, ValueError):  # fits cannot use it either
                one = job.space.named(job.facts, spec, **values)
                first += [one] if one.values not in [each.values for each in first] else []
        tried = [one.values for one in first]
        self.others = [one for one in others if one.values not in tried]
        job.candidates = len(first) + len(self.others)
        self.first = {self._submit(one): one for one in first}

    def run(self, sample: Sample) -> None:
        """Compile, check and time; then the finals."""
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
        """Compile all kernels of some programs; the most that one of them takes."""
        found = []
        for file, kernel, constants in builds:
            found.append(self.device.resources(source_text(file), kernel, constant_texts(constants)))
        return Resources(max(one.registers for one in found), max(one.local_bytes for one in found))

    def _completed(self, waiting: list[Future[Resources]]) -> Iterator[Future[Resources]]:
        """Compilations as they end, of those the most promising first: a few, and more until the deadline."""
        for count in itertools.count():
            limit = self.end if count < FEWEST else self.deadline
            done = wait(waiting, max(0.0, limit - time.monotonic()), FIRST_COMPLETED).done if waiting else set()
            if not done or time.monotonic() > limit:
                return
            first = next(future for future in waiting if future in done)
            waiting.remove(first)
            yield first

    def _measure_rule(self, trial: Trial, future: Future[Resources], candidate: Candidate) -> None:
        """The rule's configuration: what it spills is what others may."""
        try:
            self.allowed_bytes = future.result().local_bytes
        except DeviceError as error:
            raise ValueError(f"the rule's configuration does not compile: {error}") from error
        self._measure(trial, future, candidate)

    def _measure(self, trial: Trial, future: Future[Resources], candidate: Candidate) -> None:
        """Check and time one configuration; what fails is recorded with the reason."""
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
        """After an error that stays with the device, nothing that follows would mean anything."""
        try:
            self.device.synchronize()
        except DeviceError as error:
            raise DeviceError(
                f"{self.device.spec.name} does not work any more after {self.job.name} ({_short(problem)}): start "
                f"again; kernels that were tuned before are kept. {error}"
            ) from error

    def _finals(self, trial: Trial) -> None:
        """Time the best, the rule's and the tables' in turn, so that drift hits all alike.

        What may win has its code for other entries compiled.
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
        """The job with its winner: the fastest whose code for other kinds of entries is sound too."""
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
