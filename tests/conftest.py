"""Shared fixtures: the folder of real ratings, a small planted problem."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C as usual: shells start background jobs with SIGINT ignored, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # measured constants of whoever runs the tests would decide what runs where, and tests leave none behind
    folder = tempfile.mkdtemp(prefix="hybridmf-tests-")
    os.environ["HYBRIDMF_CACHE_DIR"] = folder
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist share what they compile
        os.environ["HYBRIDMF_EMULATOR_DIR"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real rating files; the test is skipped where there is none."""
    folder = Path(os.environ.get("HYBRIDMF_TEST_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
    if not (folder / "ml-1m").is_dir():
        pytest.skip(f"no real rating data in {folder} (set HYBRIDMF_TEST_DATA)")
    return folder


def planted(m: int = 60, n: int = 40, density: float = 0.2, rank: int = 3, seed: int = 0) -> sp.csr_array:
    """Positive ratings of about 1..5 from planted low rank plus noise, with an empty row and an empty column."""
    rng = np.random.default_rng(seed)
    mask = rng.random((m, n)) < density
    mask[m // 2] = False
    mask[:, n // 3] = False
    scores = 3 + rng.normal(size=(m, rank)) @ rng.normal(size=(n, rank)).T + rng.normal(scale=0.2, size=(m, n))
    rows, columns = np.nonzero(mask)
    values = np.clip(scores, 0.5, None)[rows, columns].astype(np.float32)
    return sp.csr_array((values, (rows, columns)), shape=(m, n))


@pytest.fixture
def ratings_matrix() -> sp.csr_array:
    """60 x 40 ratings, a fifth observed."""
    return planted()


def _device(name: str) -> Any:
    if name == "emulated":
        import emulated

        if emulated.compiler() is None:
            pytest.skip("no C++ compiler to run kernels on the CPU with")
        return emulated.EmulatedDevice()
    from hybridmf.device.cuda import open_device
    from hybridmf.errors import DeviceError

    try:
        return open_device()
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """A device to run kernels on: the emulated one everywhere, a GPU where there is one."""
    return _device(request.param)
