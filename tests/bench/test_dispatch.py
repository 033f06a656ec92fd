"""The benchmark of the dispatcher, bench/dispatch.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from hybridmf.datasets import SHAPES
from support.cost_model import H200, built_in, load_bench
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_benchmark_repeats_short_fits():
    bench = load_bench()
    assert bench.enough([2.0]) and not bench.enough([0.5]) and bench.enough([0.5, 0.4])
    assert not bench.enough([0.2]) and not bench.enough([0.2, 0.2]) and bench.enough([0.2, 0.2, 0.2])
    assert not bench.enough([0.001] * 9) and bench.enough([0.001] * 10)
    assert not bench.enough([0.4, 0.01])  # the first was a stall
    found = bench.measure(bench.model_of("MSGD", 8, "cpu"), planted(), iterations=3)
    assert set(found) == {"seconds_per_iteration", "setup_seconds"} and min(found.values()) > 0


def test_the_fastest_of_several_fits_counts(monkeypatch):
    """Of each part: one fit waits as a whole, others in an iteration; the first iteration of each warms up."""
    fits = iter([(9.0, [2.0, 1.0, 1.0]), (7.5, [2.0, 1.0, 3.0]), (5.5, [3.0, 1.5, 0.5])])
    clock = [0.0]

    class Model:
        def fit(self, matrix: Any) -> None:
            total, seconds = next(fits)
            clock[0] += total
            self.history_ = [{"seconds": one} for one in seconds]

    bench = load_bench()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    told: list[list[float]] = []
    model: Any = Model()
    found = bench.time_fits(model, planted(), lambda totals: told.append(list(totals)) or len(totals) == 3)
    assert found == (0.5, 0.5 + 1.5)
    assert told == [[9.0], [9.0, 7.5], [9.0, 7.5, 5.5]]


def test_the_benchmark_covers_what_it_promises():
    bench = load_bench()
    for shapes, _ in bench.GRIDS.values():
        for shape, scale, ranks in shapes:
            assert shape in SHAPES and 0 < scale <= 1
            both, only_cpu = (list(bench.cases(ranks, gpu, assemblies=False)) for gpu in (True, False))
            assert [case for case in both if case[2] == "cpu"] == only_cpu
            assert len(both) == 2 * len(only_cpu) and {case[0] for case in both} <= set(bench.MODELS)
    published = {case[2:] for case in bench.cases(bench.FULL, gpu=True, assemblies=True) if case[3] != "auto"}
    assert published == {(device, name) for device, names in bench.ASSEMBLIES.items() for name in names}


def test_reports_scale_the_built_in_constants_by_the_speeds_of_a_run(tmp_path, monkeypatch, capsys):
    bench = load_bench()
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    assert list(bench.read_runs()) == [] and bench.wrong_choices() == ([], 0)
    bench.report()
    assert "no run is recorded" in capsys.readouterr().out
    known = built_in()
    cpu = replace(known.cpu.scaled(0.5), serial=0.1, sweep=1e-3, fit=1.0)
    gpu = replace(known.gpu.sped_up(2.0), sweep={"als": 2 * known.gpu.sweep["als"]}, row_setup=1.0)
    now = {"task": "machine", "run": "now", "cpu": asdict(cpu), "gpu": asdict(gpu), "gpu_identity": {}, "spec": None}
    lines = [now, {"task": "fit", "run": "then"}, {"task": "fit", "run": "now", "model": "MSGD"}]
    (tmp_path / "dispatch.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    ((line, fits),) = bench.read_runs()
    assert fits == lines[-1:]
    found = bench.machine_of(line)
    assert found.cpu.assembly == pytest.approx(np.array(cpu.assembly))
    assert (found.cpu.serial, found.cpu.sweep, found.cpu.fit) == (0.1, 1e-3, known.cpu.fit)
    assert found.gpu.solve == pytest.approx(np.array(gpu.solve)) and found.gpu.row_setup == known.gpu.row_setup
    assert found.gpu.sweep == pytest.approx({kind: 2 * spent for kind, spent in known.gpu.sweep.items()})


def test_the_benchmark_evaluates_choices(monkeypatch):
    """On times that its own predictions make true, no choice is wrong; on their opposite, all are."""
    bench = load_bench()
    machine = built_in()
    fits = []
    for name in bench.MODELS:
        for device in ("cpu", "cuda"):
            line = {
                "model": name, "factors": 64, "device": device, "assembly_asked": "auto", "threads": 16,
                "run": "2026-11-27", "shape": "x",
                "scale": 1.0, "n_users": 138_493, "n_items": 27_278, "nnz": 20_000_263,
                "facts": {"longest_user": 3000, "longest_item": 60_000, "empty": 0},
            }  # fmt: skip
            cost = bench.cost(line, machine, H200)
            fits.append(line | {"seconds_per_iteration": cost.iteration, "setup_seconds": sum(cost.setup.values())})
    lost = bench.choices(fits, machine, H200)
    assert len(lost) == len(bench.MODELS) * len(bench.ITERATIONS)
    assert all(share == 0 for share, _ in lost)
    for line in fits:
        line["seconds_per_iteration"] = 1.0 if line["device"] == "cuda" else 1e-3
        line["setup_seconds"] = 0.0
    assert max(share for share, _ in bench.choices(fits, machine, H200)) == pytest.approx(999)
