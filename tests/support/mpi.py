"""Jobs of MPI on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT


def run_job(size: int, code: str, *, timeout: float = 120.0, **names: Any) -> subprocess.CompletedProcess[str]:
    """How `size` processes end that run `code`, which finds `names` and may import from tests; skips without MPI."""
    pytest.importorskip("mpi4py")
    launcher = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if launcher is None:
        pytest.skip("there is no mpirun")
    given = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    folders = [str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # threads of these processes would wait for each other's cores
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", str(size), sys.executable, "-c"]
    return subprocess.run(
        [*command, f"{given}\n{code}"], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
