"""The tuner: selection, budgets, failures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridmf.device.cuda import Resources
from hybridmf.errors import DeviceError, DeviceMemoryError
from hybridmf.gpu.tuning import spaces, tune
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.gpu.tuning.trials import TimedRun
from hybridmf.gpu.tuning.tune import Measurement, make_jobs, table_of
from hybridmf.plan import tables
from hybridmf.plan.tables import Entry
from support import emulated
from support.tuning import FACTS, H200, SAMPLE, SYRK, entry, table

pytestmark = pytest.mark.usefixtures("no_tables")

# ---------------------------------------------------------------------------------------------------- selection


class Acted(emulated.EmulatedDevice):
    """Compiles nothing, and says what programs take."""

    def __init__(self, spills: dict[int, int] | None = None, broken: tuple[int, ...] = (), dies: bool = False) -> None:
        super().__init__()
        self.spills, self.broken, self.dies, self.dead = spills or {}, broken, dies, False

    def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
        kb = next(int(text[3:]) for text in constants if text.startswith("KB="))
        if kb in self.broken:
            raise DeviceError("does not compile")
        implicit = "IMPLICIT=1" in constants
        return Resources(64, self.spills.get(-kb if implicit else kb, 0))

    def synchronize(self) -> None:
        if self.dead:
            raise DeviceError("illegal address")


class ActedTrial:
    """Answers without a kernel; the parts carry their kb."""

    tolerance = 1e-5

    def __init__(self, wrong: tuple[int, ...] = (), raises: tuple[int, ...] = (), device: Acted | None = None) -> None:
        self.wrong, self.raises, self.device = wrong, raises, device

    def parts(self, config: Any) -> dict[str, TimedRun]:
        run = TimedRun(lambda: None, flops=float(config.kb))
        return {"user": run, "item": run}

    def error(self, config: Any) -> float:
        kb = config.kb
        if kb in self.raises:
            if self.device is not None:
                self.device.dead = self.device.dies
            raise DeviceError("launch failed")
        return math.nan if kb in self.wrong else 1e-7


def tried(monkeypatch: pytest.MonkeyPatch, kernel: str, trial: Any) -> None:
    """Replace the trial of a kernel."""
    monkeypatch.setitem(SPACES, kernel, replace(SPACES[kernel], trial=trial))


KBS = (32, 4, 8, 16)
"""Of the rule, and of what else is tried."""


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``acted(device, ms, **trial)``: one job over a few configurations that take the given milliseconds."""

    def run(device: Acted, ms: dict[int, float], *, most: int | None = None, **trial: Any) -> Any:
        rule = SPACES["sparse_syrk"].rule(FACTS, H200)
        others = [replace(rule, kb=kb) for kb in KBS]
        monkeypatch.setattr(spaces.Space, "candidates", lambda self, facts, spec: others)
        tried(monkeypatch, "sparse_syrk", lambda *_: ActedTrial(device=device, **trial))

        def timer(_: Any, part: TimedRun, repeats: int) -> list[float]:
            return [ms[int(part.flops)]] * repeats

        tuner = tune.Tuner(device, timer=timer, num_threads=1, most=most)
        jobs = list(tuner.run(["sparse_syrk"], [64], sample=SAMPLE))
        assert len(jobs) == 1
        return jobs[0]

    return run


def statuses(job: Any) -> dict[int, str]:
    return {one.values["kb"]: one.status for one in job.measurements}


def test_the_fastest_wins(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.values["kb"] == 8
    assert job.entry == Entry("sparse_syrk", FACTS, job.winner.values, 1.0, 2.0, 4)
    assert "1.000 ms instead of 2.000" in job.summary()
    (line,) = [line for line in job.lines() if line["winner"]]
    assert line["config"]["kb"] == 8 and not line["rule"] and line["gflops"]["user"] == pytest.approx(8 / 1.0 / 1e6)
    assert json.loads(json.dumps(list(job.lines())))[0]["rule"]


def test_the_rule_stays_where_little_is_gained(acted: Any) -> None:
    job = acted(Acted(), {32: 1.0, 4: 0.995, 8: 1.0, 16: 1.1})
    assert job.winner is job.measurements[0]
    assert job.entry.ms == job.entry.rule_ms == 1.0
    assert "the rule's choice stays" in job.summary()


def test_spilling_failing_or_wrong_configurations_are_recorded_and_not_chosen(acted: Any) -> None:
    device = Acted(spills={8: 40}, broken=(4,))
    job = acted(device, {32: 2.0, 4: 0.1, 8: 0.1, 16: 0.1}, wrong=(16,))
    assert statuses(job) == {32: "timed", 4: "failed", 8: "spills", 16: "wrong"}
    reasons = {one.status: one.reason for one in job.measurements}
    assert "40 bytes of local memory" in reasons["spills"] and "nan beyond" in reasons["wrong"]
    assert "does not compile" in reasons["failed"]
    assert job.winner is job.measurements[0]


def test_configurations_may_spill_as_much_as_the_rule(acted: Any) -> None:
    job = acted(Acted(spills={32: 44, 8: 44, 4: 48}), {32: 2.0, 4: 0.1, 8: 1.0, 16: 1.5})
    assert statuses(job)[4] == "spills" and job.winner.values["kb"] == 8


def test_a_winner_must_not_spill_for_other_entries(acted: Any) -> None:
    job = acted(Acted(spills={-8: 16}), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.values["kb"] == 16
    assert statuses(job)[8] == "spills"


def test_a_failed_launch_is_recorded(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, raises=(8,))
    assert statuses(job)[8] == "failed" and job.winner.values["kb"] == 16


def test_a_device_that_does_not_recover_ends_the_run(acted: Any) -> None:
    with pytest.raises(DeviceError, match="stopped working after sparse_syrk, rank 64"):
        acted(Acted(dies=True), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, raises=(8,))


def test_a_rule_that_fails_leaves_the_others(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, wrong=(32,))
    assert job.winner.values["kb"] == 8
    job = acted(Acted(), {32: 2.0}, wrong=KBS)
    assert job.winner is None and job.entry is None and "nothing could be timed" in job.summary()
    job = acted(Acted(broken=(32,)), {})
    assert job.winner is None and "the rule's configuration does not compile" in job.summary()
    assert not table_of(Acted(), [job]).entries


def test_memory_that_does_not_suffice_skips_a_job(acted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise DeviceMemoryError("out of memory")

    tried(monkeypatch, "bals", full)
    (job,) = tune.Tuner(emulated.EmulatedDevice(), most=1).run(["bals"], [4], sample=SAMPLE)
    assert job.reason == "not tuned: out of memory"


def known_kb(kb: int) -> dict[str, int]:
    """An entry in the user's table for the emulated device; the configuration it has."""
    config: dict[str, int] = SPACES["sparse_syrk"].values(SPACES["sparse_syrk"].rule(FACTS, H200)) | {"kb": kb}
    spec = emulated.EmulatedDevice().spec
    tables.store(table([entry(facts=FACTS, **config)], spec), tables.user_file(spec))
    return config


def test_table_entries_are_always_timed(acted: Any) -> None:
    known = known_kb(64)  # none of those that are enumerated
    job = acted(Acted(), {32: 2.0, 64: 1.2, 4: 1.5, 8: 1.0, 16: 1.1}, most=1)
    assert list(statuses(job)) == [32, 64] and job.candidates == 5
    assert job.winner.values == known
    assert "the table's choice stays" in job.summary()
    assert [line["known"] for line in job.lines()] == [False, True]
    job = acted(Acted(), {32: 2.0, 64: 1.2, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.values["kb"] == 8 and job.entry.rivals == (known,)


def test_a_table_entry_must_be_beaten_clearly(acted: Any) -> None:
    known_kb(8)
    job = acted(Acted(), {32: 2.0, 4: 0.995, 8: 1.0, 16: 1.1})
    assert job.winner.values["kb"] == 8
    job = acted(Acted(), {32: 2.0, 4: 0.98, 8: 1.0, 16: 1.1})
    assert job.winner.values["kb"] == 4


def test_an_outdated_table_entry_is_in_the_finals_and_loses(acted: Any) -> None:
    known_kb(16)
    job = acted(Acted(), {32: 1.0, 4: 1.5, 8: 1.2, 16: 9.0})
    assert job.winner is job.measurements[0] and statuses(job)[16] == "timed"
    job = acted(Acted(broken=(16,)), {32: 2.0, 4: 1.5, 8: 1.0})
    assert statuses(job)[16] == "failed" and job.winner.values["kb"] == 8


def test_entries_that_no_class_accepts_are_skipped(acted: Any) -> None:
    spec = emulated.EmulatedDevice().spec
    broken = entry(facts=FACTS, **SYRK | {"nb": 30}), entry("bals", FACTS, **SYRK)
    tables.store(table(list(broken), spec), tables.user_file(spec))
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert list(statuses(job)) == [32, 4, 8, 16] and job.entry.rivals == (broken[0].config,)


ENUMERATED: dict[tuple[Any, ...], list[Any]] = {}


class Clock:
    """Seconds that pass by what is timed alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hybridmf.gpu.tuning.tune.time.monotonic", lambda: self.now)

    def timer(self, seconds: float) -> Any:
        """A `tune.Timer` under which each part takes so many seconds and as many milliseconds."""

        def run(_: Any, part: TimedRun, repeats: int) -> list[float]:
            self.now += seconds
            return [seconds] * repeats

        return run


@pytest.fixture
def enumerated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of a space, which take long to enumerate, are those of the tests before."""
    candidates = spaces.Space.candidates

    def known(self: spaces.Space, facts: Any, spec: Any) -> list[Any]:
        key = id(self.parameters), tuple(facts.items()), spec
        if key not in ENUMERATED:
            ENUMERATED[key] = candidates(self, facts, spec)
        return ENUMERATED[key]

    monkeypatch.setattr(spaces.Space, "candidates", known)


@pytest.fixture
def timetable(monkeypatch: pytest.MonkeyPatch, enumerated_once: None) -> Any:
    """``timetable(kernels, budget)``: the jobs of a run in which nothing is run and each timing takes a second."""

    def run(kernels: list[str], budget: float, ranks: Sequence[int] = (8, 16)) -> list[Any]:
        clock = Clock(monkeypatch)
        for kernel in kernels:
            tried(monkeypatch, kernel, lambda *_: ActedTrial())
        monkeypatch.setattr(ActedTrial, "parts", lambda *_: {"user": TimedRun(lambda: None)})
        monkeypatch.setattr(ActedTrial, "error", lambda *_: 0.0)
        monkeypatch.setattr(Acted, "resources", lambda *_: Resources(64, 0))
        timing: Any = {"timer": clock.timer(1.0), "budget": budget, "num_threads": 1}
        return list(tune.Tuner(Acted(), **timing).run(kernels, ranks, sample=SAMPLE))

    return run


def test_a_budget_is_shared_by_weight_and_what_is_left_passes_on(timetable: Any) -> None:
    jobs = timetable(["sparse_syrk", "bals"], 300.0, ranks=[16])
    finals = 2.0 * tune.FINAL_ROUNDS * (tune.FINALISTS + 1)  # which begin within a share, and may end after it
    assert [job.seconds for job in jobs] == [pytest.approx(100.0, abs=finals), pytest.approx(200.0, abs=finals)]
    assert all(len(job.timed) < job.candidates for job in jobs)
    few, many = timetable(["cg_any", "bals"], 1000.0, ranks=[16])
    assert len(few.timed) == few.candidates and few.seconds < 0.9 * 1000.0 * 0.5 / 4.5
    assert many.seconds == pytest.approx(1000.0 - few.seconds, abs=finals)


def test_a_short_budget_tunes_each_kernel(timetable: Any) -> None:
    jobs = timetable(["sparse_syrk", "bals", "cg_any"], 120.0)
    assert [(job.kernel, job.factors) for job in jobs] == [
        (kernel, rank) for rank in (8, 16) for kernel in ("sparse_syrk", "bals", "cg_any")
    ]
    assert all(len(job.timed) >= 1 + tune.FEWEST for job in jobs[:3])


def test_jobs_that_come_too_late_are_named(timetable: Any) -> None:
    first, *others = timetable(["sparse_syrk", "bals", "cg_any"], 5.0)
    assert 1 <= len(first.timed) < 1 + tune.FEWEST
    for job in others:
        assert not job.measurements and job.entry is None
        assert "not tuned: the budget of 5 s is spent" in job.summary()


def test_the_next_rule_is_compiled_ahead_of_other_configurations(
    monkeypatch: pytest.MonkeyPatch, enumerated_once: None
) -> None:
    compiled: list[str] = []

    class Watched(Acted):
        def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
            compiled.append(name)
            return Resources(64, 0)

    for kernel in ("sparse_syrk", "bals"):
        tried(monkeypatch, kernel, lambda *_: ActedTrial())
    monkeypatch.setattr(ActedTrial, "parts", lambda *_: {"user": TimedRun(lambda: None)})
    monkeypatch.setattr(ActedTrial, "error", lambda *_: 0.0)
    timer = Clock(monkeypatch).timer(1.0)
    list(tune.Tuner(Watched(), timer=timer, num_threads=1, most=3).run(["sparse_syrk", "bals"], [16], sample=SAMPLE))
    assert compiled[:4] == ["sparse_syrk", "bals", "sparse_syrk", "sparse_syrk"]


def test_configurations_timed_alone_are_not_kept(timetable: Any) -> None:
    job, *_ = timetable(["sparse_syrk"], 1.0)
    assert len(job.timed) == 1 and job.winner is job.measurements[0]
    assert job.entry is None and "nothing to compare it with" in job.summary()
    assert table_of(Acted(), [job]).entries == ()


def test_the_slow_are_timed_once() -> None:
    counted: list[int] = []

    def timer(_: Any, part: TimedRun, repeats: int) -> list[float]:
        counted.append(repeats)
        return [9.0] * repeats

    run = tune.Tuner(Acted(), timer=timer, num_threads=1)
    one = Measurement(SPACES["sparse_syrk"].rule(FACTS, H200), {}, "timed")
    run._time(one, ActedTrial().parts(one.config), 1.0)
    assert counted == [1, 1] and one.ms == {"user": 9.0, "item": 9.0}


def test_scores_are_geometric_means() -> None:
    rule = SPACES["sparse_syrk"].rule(FACTS, H200)
    assert Measurement(rule, {}, "timed", ms={"user": 2.0, "item": 8.0}).score == pytest.approx(4.0)
    assert Measurement(rule, {}, "failed").score == math.inf


def test_jobs_are_made_once() -> None:
    assert len(make_jobs(["cg_any", "cg_any"], [32, 64, 32], 4)) == 2
    kernels = {job.kernel for job in make_jobs(None, [32, 128], 4)}
    assert kernels == set(SPACES)


def test_kernels_take_turns_and_their_usual_kinds_come_first() -> None:
    jobs = make_jobs(["fused", "cg_any"], [32, 64], 4)
    names = [(job.kernel, job.factors) for job in jobs[:4]]
    assert names == [("fused", 32), ("cg_any", 32), ("fused", 64), ("cg_any", 64)]
    fused = [(job.facts["precision"], job.facts["solver"], job.factors) for job in jobs if job.kernel == "fused"]
    assert fused == [(*kind, f) for kind in spaces.FUSED_KINDS for f in (32, 64)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ["sgemm"]}, "kernel must be one of .*fused"),
        ({"factors": [0]}, "factors must satisfy factors >= 1, got 0"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"budget": 0}, "budget must be"),
        ({"most": 0}, "most must satisfy most >= 1"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    limits = {name: changes[name] for name in ("budget", "most") if name in changes}
    with pytest.raises(ValueError, match=message):
        tune.Tuner(emulated.EmulatedDevice(), **limits).run(**{} if limits else changes)
