"""The scripts that measure cuMF's and MSGD's evidence: their lines, and pages from the lines alone."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import hybridmf as hmf
from support import compiler
from support.checkout import ROOT

BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

common = pytest.importorskip("common")
paper_common = pytest.importorskip("paper_common")
import paper_cumf  # noqa: E402
import paper_msgd  # noqa: E402
import paper_race  # noqa: E402

SMALL = ["--shape", "ml-1m", "--scale", "0.02", "--factors", "8", "--threads", "1"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of their own for lines and pages."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "sources_sha256", lambda: "0")
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    monkeypatch.setattr(paper_common, "EVIDENCE", evidence)
    for page in ("cumf.md", "msgd.md"):
        (evidence / page).write_text((BENCH.parent / "docs" / "evidence" / page).read_text())
    return tmp_path


def lines_of(results: Path, name: str) -> list[dict]:
    return [json.loads(text) for text in (results / "results" / f"{name}.jsonl").read_text().splitlines()]


def invoke(script, *arguments: str) -> str:
    found = CliRunner().invoke(script.main, [*arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


CPU_TASKS = {"paper_cumf": {"convergence", "cost"}, "paper_msgd": {"sequential", "convergence", "cores"}}


@pytest.mark.parametrize("script", [paper_cumf, paper_msgd], ids=lambda script: script.NAME)
def test_lines_and_pages(results, undrawn, script):
    """Pictures of both scripts are drawn by test_evidence.py, and those of a page twice."""
    invoke(script, *SMALL)
    lines = lines_of(results, script.NAME)
    assert {line["task"] for line in lines} == CPU_TASKS[script.NAME]
    for line in lines:
        assert {"shape", "scale", "size", "nnz", "factors", "machine", "commit", "date"} <= set(line)
        if line["task"] == "convergence":
            assert len(line["seconds"]) == len(line["rmse"]) > 3 and line["rmse"][-1] < line["start_rmse"]
        if line["task"] == "cost":
            rows, nnz = line["rows"], line["nnz"]
            assert line["predicted"] == {"hermitian": nnz * 36, "rhs": nnz * 9 + 16 * rows, "solve": 512 * rows}
    pages = []
    for _ in range(2):
        invoke(script, "--render")
        folder = results / "evidence"
        pages.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert pages[0] == pages[1]
    page = pages[0][script.NAME.removeprefix("paper_") + ".md"].decode()
    assert "ml-1m x 0.02" in page and paper_common.NOT_MEASURED in page  # what needs a GPU
    for line in lines:
        assert line.get("method", "") in page
    for name in (name for name in pages[0] if name.endswith(".svg")):
        assert f"({name})" in page


def test_only_rendered_sections_change(results):
    page = results / "evidence" / "cumf.md"
    before = page.read_text()
    invoke(paper_cumf, "--render")  # of no lines at all
    after = page.read_text()
    assert after.count(paper_common.NOT_MEASURED) == 3

    def rest(text):
        return re.sub(r"(<!-- begin \w+ -->).*?(<!-- end \w+ -->)", r"\1\2", text, flags=re.DOTALL)

    assert rest(after) == rest(before) != after


def test_a_race_is_a_fit():
    """The errors of a race are those of fits of as many iterations; the clock stops where it is told to."""
    data = paper_race.Split.of("ml-1m", 0.05)
    assert data.nnz + data.test.nnz == data.user.nnz + data.test.nnz
    given = {"regularization": 0.05, "biases": False, "device": "cpu", "random_state": 0}
    found = paper_race.race(hmf.ExplicitALS(4, **given), data, 3)
    for iterations, error in enumerate(found["rmse"], 1):
        model = hmf.ExplicitALS(4, **given, iterations=iterations).fit(data.user)
        wanted = np.sqrt(np.mean((data.test.data - model.predict(data.test.row, data.test.col, clip=False)) ** 2))
        assert error == pytest.approx(wanted, rel=1e-5)
    assert len(paper_race.race(hmf.ExplicitALS(4, biases=False, device="cpu"), data, 3, seconds=0)["seconds"]) == 0
    wild = paper_race.race(hmf.SGD(4, **given, learning_rate=10.0), data, 3)
    assert "diverged" in wild["diverged"] and wild["rmse"] == []


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.SGD, hmf.CCD])
def test_kernels_are_compiled_before_a_race_on_a_gpu(cls, gpu, monkeypatch):
    solvers, waited = [], []
    iterate, wait = paper_race.iterate, type(gpu).synchronize
    monkeypatch.setattr(paper_race, "iterate", lambda solver: (solvers.append(solver), iterate(solver)))
    monkeypatch.setattr(type(gpu), "synchronize", lambda device: (waited.append(device), wait(device))[1])
    model = cls(4, biases=False, device="cuda", random_state=0)
    found = paper_race.race(model, paper_race.Split.of("ml-1m", 0.02), 2)
    assert len(found["seconds"]) == 2
    assert [solver is solvers[0] for solver in solvers] == [True, False, False]
    assert len(waited) >= 2  # the clock stops when the GPU has finished


def test_a_race_is_plotted():
    lines = [
        {"method": "slow", "seconds": [1.0, 1.0], "rmse": [0.9, 0.8], "set_up_s": 0.1},
        {"method": "wild", "seconds": [], "rmse": [], "set_up_s": 0.1},
        {"method": "far", "seconds": [0.5], "rmse": [1.0], "set_up_s": 0.1},
    ]
    slow, wild, far = paper_race.race_table(lines).split("\n")[2:]
    assert slow == "| slow | 2 | 1 | 0.8000 | 2 | 0.1 |"
    assert "diverged" in wild and far.endswith("| - | 0.1 |")


def test_missing_devices_are_reported(results, monkeypatch):
    def none(name="cuda"):
        raise hmf.errors.DeviceError("no GPU here")

    monkeypatch.setattr("hybridmf.device.cuda.open_device", none)
    found = CliRunner().invoke(paper_msgd.main, ["--device", "cuda"])
    assert found.exit_code == 1 and "--device cuda: no GPU here" in found.output


@pytest.mark.parametrize("warp_sync", [False, True])
@pytest.mark.parametrize("r", [32, 64])
def test_the_papers_mapping_is_msgd(device, monkeypatch, r, warp_sync):
    """An epoch of the kernel in bench/ gives the factors of an epoch of a fit, for any number of blocks."""
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    data = paper_race.Split.of("ml-1m", 0.02)
    epochs = [paper_msgd.BlockedEpoch(device, data, r, warp_sync) for _ in range(3)]
    assert epochs[0].check(3) < paper_msgd.TOLERANCE
    fit = paper_msgd.sgd(r, "cpu", schedule="msgd", iterations=1)
    fit.fit(data.user)
    for epoch, blocks in ((epochs[1], 1), (epochs[2], 7)):
        epoch.run(blocks)
        for side, wanted in (("user", fit.user_factors), ("item", fit.item_factors)):
            np.testing.assert_allclose(device.download(epoch.tables[side]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ordering", ["user", "item", "crossed"])
def test_the_papers_decentralized_walk_is_msgd(device, monkeypatch, ordering):
    """Alg. 2 as printed; emulated blocks run one after the other and cannot meet, so there is one."""
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    data = paper_race.Split.of("ml-1m", 0.02)
    epoch, blocks = (
        paper_msgd.BlockedEpoch(device, data, 32, True, ordering),
        1 if device.spec.name == "emulated" else 64,
    )
    fit = paper_msgd.sgd(32, "cpu", schedule="msgd", iterations=1)
    fit.fit(data.user)
    epoch.run(blocks)
    for side, wanted in (("user", fit.user_factors), ("item", fit.item_factors)):
        np.testing.assert_allclose(device.download(epoch.tables[side]), wanted, rtol=1e-4, atol=1e-5)
    assert paper_msgd.BlockedEpoch(device, data, 32, True, ordering).check(blocks) < paper_msgd.TOLERANCE


def test_occupancy():
    """Limited by blocks, by threads, by registers and by shared memory."""
    blocks = [paper_msgd.resident_blocks(*given, 227 << 10) for given in ((32, 21, 256), (512, 21, 0), (128, 80, 0))]
    assert blocks == [32, 4, 6]
    assert paper_msgd.resident_blocks(128, 32, 99 << 10, 227 << 10) == 2


@pytest.mark.parametrize("task", ["transfer", "ordering", "occupancy"])
def test_tasks_of_a_gpu_are_rendered(device, results, monkeypatch, task):
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    if device.spec.name == "emulated":  # without events, and whose blocks cannot meet
        monkeypatch.setattr(paper_msgd, "timed", lambda device, steps, repeats: [[(step(), 1.0)[1] for step in steps]])
        monkeypatch.setattr(paper_msgd, "COLUMN_BLOCKS_PER_SM", 1 / device.spec.multiprocessors)
        monkeypatch.setattr(paper_msgd, "release", lambda device: None)
    data = paper_race.Split.of("ml-1m", 0.02)
    profile = replace(paper_msgd.PROFILES["cuda", "quick"], ranks=(32,), repeats=1)
    recorder = paper_common.Recorder("paper_msgd", stamp={"device": "cuda", "gpu": {"name": "G"}})
    paper_msgd.TASKS[task](paper_msgd.Session(recorder, device, data, profile, 1))
    assert not recorder.problems
    lines = lines_of(results, "paper_msgd")
    assert {line["task"] for line in lines} == {task}
    invoke(paper_msgd, "--render")
    page = (results / "evidence" / "msgd.md").read_text()
    section = page.split(f"<!-- begin {task} -->")[1].split(f"<!-- end {task} -->")[0]
    expected = {
        "transfer": ["page-locked"],
        "ordering": list(paper_msgd.VARIANTS.values()),
        "occupancy": ["as printed"],
    }
    assert all(text in section for text in ["ml-1m" if task != "occupancy" else "r", *expected[task]])


def test_the_fastest_rate_of_each_method_is_shown():
    """That first reaches the RMSE that all methods reach; older lines, in float32, are no part of the race."""
    common = {"factors": 8, "threads": 2, "set_up_s": 0.1, "race": "float64"}
    lines = [
        common | {"method": "old", "seconds": [1.0], "rmse": [0.1], "race": ""},
        common | {"method": "slow", "rate": 0.1, "seconds": [1.0, 1.0], "rmse": [0.9, 0.8]},
        common | {"method": "slow", "rate": 0.2, "seconds": [1.0, 1.0], "rmse": [0.8, 0.79]},
        common | {"method": "slow", "rate": 0.4, "seconds": [], "rmse": []},
        common | {"method": "quick", "seconds": [0.1, 0.1, 0.1], "rmse": [0.9, 0.79, 0.7]},
    ]
    assert paper_msgd.common_rmse(paper_msgd.race_of(lines)) == 0.79
    assert [(line["method"], line.get("rate")) for line in paper_msgd.fastest(lines)] == [
        ("slow", 0.2),
        ("quick", None),
    ]
    part = paper_msgd.convergence_part(lines)
    assert "| slow | float32 | 0.2 | 2 |" in part and "| quick | float32 | - | 0.2 |" in part and "old" not in part


@pytest.mark.parametrize("warp_sync", [0, 1])
@pytest.mark.parametrize("r", [32, 512])
def test_the_papers_mapping_compiles(monkeypatch, r, warp_sync):
    """For the GPU it is timed on, with everything in registers."""
    monkeypatch.setattr(compiler, "source_text", lambda file: paper_msgd.kernel_source())
    constants = (f"RANK={r}", f"WARP_SYNC={warp_sync}", "REAL=float")
    reports = compiler.resources_of(compiler.compile_program(compiler.Program("msgd_blocks.cu", constants, 90)))
    assert {report.function for report in reports} == {"msgd_blocks", "msgd_columns"}
    assert not any(report.local_bytes for report in reports)


def test_a_wrong_kernel_is_not_timed(device, monkeypatch):
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    epoch = paper_msgd.BlockedEpoch(device, paper_race.Split.of("ml-1m", 0.02), 32, True)
    epoch.rate *= 1.5
    epoch.start = {side: table * 1.1 for side, table in epoch.start.items()}
    with pytest.raises(RuntimeError, match="rows of the paper's kernel are off by"):
        epoch.check(2)


def test_switches_change_nothing_but_time(device, monkeypatch):
    """Assemblies with the switches set go through the fit's own path, and are timed apart from the rest."""
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    data = paper_race.Split.of("ml-1m", 0.02)
    profile = replace(paper_cumf.PROFILES["cuda", "quick"], factors=8, iterations=2, repeats=1)
    reference: list[float] = []
    fast = paper_cumf.measure_switch(device, data, profile, "mo_als", reference)
    assert len(reference) == len(fast["seconds"]) == 2
    slow = paper_cumf.measure_switch(device, data, profile, "mo_als_plain", reference)
    assert slow["rmse"] == pytest.approx(fast["rmse"], rel=1e-4)  # as many repeats as the first
    assert [paper_cumf.relative(ratio, 10) for ratio in (1.0015, 2.5)] == ["+0.15 % (10)", "2.50 x (10)"]
    assert 0 < slow["assembly_ms"] < 1e3 * slow["seconds"][0]
    with pytest.raises(RuntimeError, match="where the first combination has"):
        paper_cumf.measure_switch(device, data, profile, "mo_als_uncached", [9.0, 9.0])
    phases = paper_cumf.measure_phases_gpu(device, data, 8, "item", 1, None)
    assert phases["hermitian_ms"] > 0 and phases["solve_ms"] > 0 and phases["planned_batch_bytes"] > 0


def test_libmf_races_by_whole_fits(monkeypatch):
    class Library:
        """LIBMF's fits: set-up of 1 s, epochs of 0.5 s."""

        now = 0.0

        def __init__(self, matrix, rank, lam, threads):
            self.shape, self.rank = matrix.shape, rank

        def fit(self, epochs):
            Library.now += 1 + 0.5 * epochs
            self.epochs = epochs

        def factors(self):
            return tuple(np.full((rows, self.rank), self.epochs, np.float32) for rows in self.shape)

    ratings = hmf.datasets.synthetic("ml-1m", scale=0.02).user_items
    split = paper_race.Split("ml-1m", 0.02, ratings, ratings.T.tocsr(), ratings.tocoo())
    monkeypatch.setattr(paper_race.rivals, "Libmf", Library)
    monkeypatch.setattr(paper_race.time, "perf_counter", lambda: Library.now)
    line = paper_race.race_libmf(split, 4, 0.05, 1, seconds=4.0)
    assert line["epochs"] == (2, 4, 8)  # the fit that takes longer is the last
    assert line["seconds"] == [1.0, 1.0, 2.0] and line["set_up_s"] == 1.0
    assert line["rmse"][0] < line["rmse"][1] < line["rmse"][2]  # of larger and larger scores
    shown = paper_race.race_table([{"method": "LIBMF, CPU"} | line]).splitlines()[-1]
    assert [cell.strip() for cell in shown.split("|")][1:4] == ["LIBMF, CPU", "8", "0.5"]
