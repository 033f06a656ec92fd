"""Measuring a machine: a simulated one gives back its constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner

import hybridmf as hmf
from hybridmf.cli import main
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import DeviceError
from hybridmf.plan import dispatch
from hybridmf.plan import machine as _machine
from hybridmf.plan.cost import cost_of
from hybridmf.plan.machine import CpuRates, GpuRates, LinkRates, Machine, built_in, rate_at
from hybridmf.tools import calibrate as _calibrate
from support.cost_model import H200, LOADED
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("own_cache")

# ---------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("size", [(12, 20, 4), (5, 6, 6), (7, 3, 1)])
def test_problems_have_rows_of_one_length(size):
    rows, columns, degree = size
    matrix = _calibrate.regular(*size)
    assert matrix.shape == (rows, columns)
    assert np.all(np.diff(matrix.indptr) == degree)
    assert sp.csr_array(matrix).has_canonical_format
    assert matrix.data.min() >= 1 and matrix.data.max() <= 5 and matrix.dtype == np.float32


TRUE_CPU = replace(built_in().cpu.scaled(0.7), gather_bytes=1e14, cached_bytes=1e14, serial=0.07, sweep=1e-4, fresh=0.0)
TRUE_GPU = replace(
    GpuRates().sped_up(0.8),
    gather_bytes=1e18,
    cached_bytes=1e18,
    sweep={kind: seconds / 50 for kind, seconds in GpuRates().sweep.items()},
)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose fits take exactly the predicted time, with given constants and small problems."""
    machine = Machine(cpu=TRUE_CPU, gpu=TRUE_GPU)
    spec: list[DeviceSpec | None] = [H200]
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: (None if device == "cpu" else spec[0], "simulated"))
    monkeypatch.setattr(_calibrate, "GPU_PROBLEMS", ((4000, 4000, 200), (40_000, 40_000, 4)))
    monkeypatch.setattr(_calibrate, "available_cores", lambda: 8)

    def seconds(model: Any, matrix: sp.csr_array) -> float:
        return cost_of(hmf.plan(matrix, model), machine, LOADED).iteration

    monkeypatch.setattr(_calibrate, "iteration_seconds", seconds)
    monkeypatch.setattr(_calibrate, "_gpu_identity", lambda found: {"name": found.name, "driver": 1})
    monkeypatch.setattr(_calibrate, "device_count", lambda: 2)
    monkeypatch.setattr(
        _calibrate, "measure_links", lambda names, links, say: replace(links, pinned_bytes=1e9 * len(names))
    )
    return machine


def test_calibration_finds_the_constants_of_a_simulated_machine(simulated):
    said: list[str] = []
    machine, identity = _calibrate.calibrate(say=said.append)
    assert identity == {"name": "NVIDIA H200", "driver": 1} and machine.gpu_name == "NVIDIA H200"
    assert machine.source.startswith("measured on 20")
    np.testing.assert_allclose(machine.cpu.assembly, TRUE_CPU.assembly, rtol=0.02)
    np.testing.assert_allclose(machine.cpu.sgd["msgd"], TRUE_CPU.sgd["msgd"], rtol=0.02)
    for name in ("subspace", "ccd_entry", "ccd_row", "serial", "sweep"):
        assert getattr(machine.cpu, name) == pytest.approx(getattr(TRUE_CPU, name), rel=0.1), name
    assert machine.links == replace(LinkRates(), pinned_bytes=2e9)
    found, true = machine.gpu, TRUE_GPU
    np.testing.assert_allclose(found.assembly, true.assembly, rtol=0.1)
    np.testing.assert_allclose(found.solve, true.solve, rtol=0.1)
    for name in ("ccd", "ccd_row", "dual_row", "sweep"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.2), name
    for name in ("factor_setup", "row_setup", "load", "start", "fit", "compile", "upload_bytes"):
        assert getattr(found, name) == getattr(GpuRates(), name), name
    assert any("NVIDIA H200" in line for line in said)


def test_without_a_gpu_the_cores_are_measured(simulated, monkeypatch):
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: (None, "there is none"))
    said: list[str] = []
    machine, identity = _calibrate.calibrate(say=said.append)
    assert identity == {} and machine.gpu == GpuRates() and machine.gpu_name == ""
    assert said[-1] == "no GPU is measured: there is none"
    monkeypatch.setattr(_calibrate, "available_cores", lambda: 1)
    assert _calibrate.calibrate(gpu=False)[0].cpu.serial == CpuRates.serial


def test_the_fastest_iteration_counts():
    model = hmf.ExplicitALS(4, biases=False, iterations=3, device="cpu", random_state=0)
    assert 0 < _calibrate.iteration_seconds(model, planted()) <= max(one["seconds"] for one in model.history_[1:])


def test_the_command_measures_keeps_and_shows(simulated, monkeypatch):
    result = CliRunner().invoke(main, ["tune", "--calibrate"])
    assert result.exit_code == 0, result.output
    for part in (
        "source measured on",
        "cpu assembly",
        "gpu solve",
        "gpu sgd",
        "msgd",
        "link pinned_bytes     2e+09",
        f"kept in {_machine.calibration_file()}",
    ):
        assert part in result.output
    assert _machine.machine().gpu_name == "NVIDIA H200"


def test_the_command_names_an_unwritable_path(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "file"))
    result = CliRunner().invoke(main, ["tune", "--calibrate"])
    assert result.exit_code == 2
    assert "set HYBRIDMF_CACHE_DIR" in result.output


@pytest.mark.gpu
def test_calibration_on_a_gpu(monkeypatch):
    try:
        spec = dispatch.find_gpu("cuda")[0]
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    monkeypatch.setattr(_calibrate, "RANKS", (32, 64))
    monkeypatch.setattr(_calibrate, "GPU_PROBLEMS", ((10_000, 10_000, 200), (100_000, 100_000, 4)))
    machine, path = _calibrate.calibrate_and_save()
    assert machine.gpu_name == spec.name
    assert _machine.machine() == machine, path
    assert 1e11 < rate_at(machine.gpu.assembly, 64) < 1e16  # a difference of times, which other work beside it spoils
    assert all(seconds > 1e-5 for seconds in machine.gpu.sweep.values())  # of a GPU that others may use, too
    assert all(1e8 < rate < 1e14 for rate in (machine.links.pinned_bytes, machine.links.fetch_bytes))
    assert machine.links.copy_bytes > machine.links.pinned_bytes


@pytest.mark.gpu
def test_a_gpu_fit_is_remembered():
    try:
        dispatch.find_gpu("cuda")
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    model = hmf.ExplicitALS(8, biases=False, iterations=1, device="cuda", random_state=0)
    first = hmf.plan(planted(), model).estimates[0]
    model.fit(planted())
    assert hmf.plan(planted(), model).estimates[0].setup_seconds < first.setup_seconds
