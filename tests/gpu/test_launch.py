"""Sources, constants and arguments of launches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hybridmf.core.objective import Objective
from hybridmf.device.cuda import open_device
from hybridmf.gpu import launch
from support.fake_cupy import Machine
from support.messages import says

pytestmark = pytest.mark.usefixtures("forget_devices")

# ---------------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("file", ["fused_als.cu", "msgd.cu"])
def test_sources_are_found_and_spliced(file: str) -> None:
    """Headers of headers, and those that several name, too."""
    text = launch.source_text(file)
    assert not re.search(r"^#(include|pragma once)", text, flags=re.MULTILINE)
    assert text.count("constexpr int WARP = 32;") == text.count("void mma_tf32(") == 1
    assert launch.kernel_folder().is_dir()


def test_an_installation_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "site" / "hybridmf" / "gpu" / "launch.py"))
    with pytest.raises(FileNotFoundError, match=says("no kernel sources beside", "install hybridmf again")):
        launch.kernel_folder()


def test_constants_become_options() -> None:
    constants = {"REAL": np.dtype(np.float64), "RANK": 7, "IMPLICIT": True, "FLAG": np.False_, "NAME": "local"}
    assert launch.constant_texts(constants) == ("FLAG=0", "IMPLICIT=1", "NAME=local", "RANK=7", "REAL=double")
    assert launch.constant_texts({"REAL": np.dtype(np.float32)}) == ("REAL=float",)


def test_delays_are_compiled_in_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for seed, constants in (("", ("LD=8",)), ("7", ("HYBRIDMF_DELAYS=7", "LD=8"))):
            monkeypatch.setenv(launch.DELAYS, seed)
            launch.program.cache_clear()
            assert launch.program("split.cu", "split_table", LD=8)[2] == constants
    finally:
        launch.program.cache_clear()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4)), np.zeros((3, 5), dtype=np.float32), np.zeros(12, dtype=np.float32),
        np.zeros((4, 3), dtype=np.float32).T, np.zeros((3, 8), dtype=np.float32)[:, ::2],
    ],
    ids=["dtype", "shape", "axes", "Fortran order", "strides"],
)  # fmt: skip
def test_arguments_are_checked(array: np.ndarray) -> None:
    launch.check("factors", np.zeros((3, 4), dtype=np.float32), np.float32, (3, 4))
    launch.check("factors", np.zeros((3, 4), dtype=np.float32), np.float32, (None, 4))
    wanted = says("factors must be float32, C order, shape (3, 4); got", str(array.dtype), str(array.shape))
    with pytest.raises(TypeError, match=wanted):
        launch.check("factors", array, np.float32, (3, 4))


def test_host_arrays_are_refused(machine: Machine) -> None:
    machine()
    device = open_device()
    launch.check_not_host(device, factors=device.zeros(3, np.float32))
    with pytest.raises(TypeError, match=says("ratings is a numpy.ndarray, not an array on Fake")):
        launch.check_not_host(device, factors=device.zeros(3, np.float32), ratings=np.zeros(3, dtype=np.float32))


def test_entries_say_what_kernels_are_compiled_for() -> None:
    indices, ratings, offsets = np.zeros(3, dtype=np.int32), np.ones(3), np.ones(5)
    plain = launch.DeviceEntries(indices, ratings)
    assert plain.constants == {"REAL": np.float64, "IMPLICIT": False, "HAS_OFFSETS": False}
    assert plain.arrays[2] is ratings
    biased = launch.DeviceEntries(indices, ratings.astype(np.float32), offsets, True, 2.0, 0.5)
    assert biased.constants == {"REAL": np.float32, "IMPLICIT": True, "HAS_OFFSETS": True}
    assert biased.arrays[2] is offsets
    assert biased.scalars == (2.0, 0.5) and all(type(scalar) is np.float32 for scalar in biased.scalars)


IMPLICIT = Objective("implicit", 0.05)
