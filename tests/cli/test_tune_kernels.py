"""`hybridmf tune-kernels`: stored results, interruptions, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hybridmf import ExplicitALS
from hybridmf._version import __version__
from hybridmf.cli import main
from hybridmf.errors import DeviceError
from hybridmf.gpu.fused import PRECISION_CODES
from hybridmf.gpu.launch import program
from hybridmf.gpu.sparse_syrk import SyrkConfig
from hybridmf.gpu.tuning import tune
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.gpu.tuning.trials import Sample
from hybridmf.gpu.tuning.tune import Measurement, make_jobs
from hybridmf.plan import tables
from support import emulated
from support.builds import FUSED_KERNELS
from support.tuning import FACTS, H200, SAMPLE

pytestmark = pytest.mark.usefixtures("no_tables")

# ---------------------------------------------------------------------------------------------------- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["tune-kernels", *arguments])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device for the command, and a sample that takes no time."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = emulated.EmulatedDevice()
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda *_: device)
    monkeypatch.setattr(Sample, "draw", lambda: SAMPLE)
    return device


def test_kernels_are_compiled_ahead_of_time(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, asked, kernel = f"ARITHMETIC={PRECISION_CODES['float32_wide']}", [], gpu.kernel

    def compiled(*key: Any) -> Any:
        asked.append(key)
        return None if wide in key[2] else kernel(*key)  # nothing here launches it

    monkeypatch.setattr(gpu, "kernel", compiled)
    result = invoke("--compile", "--factors", "7")
    assert result.exit_code == 0 and result.output.startswith("7 factors: "), result.output
    found = {(name, constant) for _, name, constants in asked for constant in constants}
    for name in FUSED_KERNELS:
        for code in ("float32", "float32_wide") if name != "solve_partials" else ("float32",):
            assert (name, f"ARITHMETIC={PRECISION_CODES[code]}") in found
        assert {(name, f"RANK={rank}") for rank in (7, 8)} <= found  # without and with biases
    assert {"draw_rows", "scatter_entries", "row_range", "prepare_items"} <= {name for _, name, _ in asked}


def test_calibration_and_compilation_are_two_tasks() -> None:
    result = invoke("--compile", "--calibrate")
    assert result.exit_code == 2 and "give one of them" in result.output


def test_the_command_stores_its_results(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines, plots = tmp_path / "lines.jsonl", tmp_path / "plots"
    options = ("--kernel", "sparse_syrk", "--factors", "5", "--most", "2", "--lines", str(lines), "--plot", str(plots))
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    path = tables.user_file(gpu.spec)
    assert f"kept in {path}" in result.output and "sparse_syrk, rank 5" in result.output
    (kept,) = tables.read_table(path).entries
    assert kept.facts == {"rank": 5, "itemsize": 4}
    assert vars(SyrkConfig.default(5, 4, gpu.spec)) == kept.facts | kept.config
    measured = [json.loads(text) for text in lines.read_text().splitlines()]
    assert len(measured) == 2 and measured[0]["gpu"]["name"] == "emulated"
    assert measured[0]["versions"] == {"hybridmf": __version__}
    assert [plot.suffix for plot in plots.iterdir()] == [".svg"]
    path.unlink()
    mine = tmp_path / "mine.json"
    invoke("--kernel", "sparse_syrk", "--factors", "5", "--most", "2", "-o", str(mine))
    (kept,) = tables.read_table(mine).entries
    result = invoke("--kernel", "sparse_syrk", "--factors", "5", "--most", "1", "-o", str(mine), "--lines", str(lines))
    assert result.exit_code == 0, result.output
    assert kept.config in [
        json.loads(text)["config"] for text in lines.read_text().splitlines()[2:]
    ]  # the file's entry is timed
    assert len(tables.read_table(mine).entries) == 1


def test_a_fit_launches_the_tuned_configuration(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's program before, the tuned one after; the factors agree."""
    asked: list[Any] = []
    kernel = gpu.kernel
    monkeypatch.setattr(gpu, "kernel", lambda *key: asked.append(key) or kernel(*key))

    def fit() -> tuple[np.ndarray, set[Any]]:
        asked.clear()
        model = ExplicitALS(5, biases=False, assembly="sparse_syrk", device="cuda", iterations=1, random_state=0)
        model.fit(SAMPLE.user_items)
        return model.user_factors, {key for key in asked if key[1] == "sparse_syrk"}

    by_rule, before = fit()
    ruled, tuned, *_ = SPACES["sparse_syrk"].candidates({"rank": 5, "itemsize": 4}, gpu.spec)
    job = tune.Job("sparse_syrk", 5, {"rank": 5, "itemsize": 4})
    values = SPACES["sparse_syrk"].values
    times = ((ruled, 2.0), (tuned, 1.0))
    job.measurements = [Measurement(one, values(one), "timed", ms={"user": ms}) for one, ms in times]
    job.winner = job.measurements[1]
    monkeypatch.setattr(tune.Tuner, "run", lambda *_, **__: iter([job]))
    assert invoke("--factors", "5").exit_code == 0
    by_table, after = fit()
    (build,), _ = SPACES["sparse_syrk"].programs(job.facts, tuned, gpu.spec)
    assert after == {program(*build[:2], **build[2])} and after != before
    np.testing.assert_allclose(by_table, by_rule, rtol=1e-4, atol=1e-5)


def test_results_before_an_interruption_are_kept(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: Any, *_: Any, **__: Any) -> Any:
        job = make_jobs(["sparse_syrk"], [64], 4)[0]
        rule = SPACES["sparse_syrk"].rule(FACTS, H200)
        job.measurements = [Measurement(rule, SPACES["sparse_syrk"].values(rule), "timed", ms={"user": 1.0})] * 2
        job.winner = job.measurements[0]
        yield job
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.Tuner, "run", interrupted)
    assert invoke().exit_code == 130
    assert len(tables.read_table(tables.user_file(gpu.spec)).entries) == 1


def test_without_a_gpu_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise DeviceError("there is no NVIDIA driver")

    monkeypatch.setattr("hybridmf.device.cuda.open_device", none)
    result = invoke()
    assert result.exit_code == 2
    assert "tune-kernels needs a GPU, and none can be used here: there is no NVIDIA driver" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--factors", "32,many"), "must be numbers with commas between"),
        (("--kernel", "sgemm"), "kernel must be one of"),
        (("--budget", "0"), "budget must be"),
        (("-o", "/no/such/folder/x.json"), "does not exist"),
    ],
)
def test_errors_of_the_command(gpu: Any, options: tuple[str, ...], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2 and message in result.output
    assert not tables.user_file(gpu.spec).exists()
