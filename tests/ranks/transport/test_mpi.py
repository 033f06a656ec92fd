"""Ranks that are processes of an MPI job."""

from __future__ import annotations

import sys
import time

import pytest

import hybridmf as hmf
from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport import mpi
from hybridmf.testing import CommunicatorContract
from support.mpi import run_job

LAWS = """
from hybridmf.ranks.transport import mpi
from hybridmf.scale import MpiCommunicator
from hybridmf.testing import check_communicator
mpi.PIECE_BYTES = 1 << 16  # larger arrays travel in several pieces
communicator = MpiCommunicator(timeout=30)
assert (communicator.size, communicator.local_rank, communicator.timeout) == (size, communicator.rank, 30)
communicator.close()
check_communicator(MpiCommunicator)
print("done", flush=True)
"""


class TestProcesses(CommunicatorContract):
    sizes = (3,)

    def run(self, size, check):
        job = run_job(size, f"size = {size}\n{LAWS}")
        assert job.returncode == 0, job.stderr
        assert job.stdout.split() == ["done"] * size


def test_a_killed_process_ends_the_job() -> None:
    code = """
import os, signal
import numpy as np
from hybridmf.scale import MpiCommunicator
communicator = MpiCommunicator()
communicator.barrier()
if communicator.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
communicator.allreduce(np.zeros(2))
"""
    begun = time.monotonic()
    assert run_job(2, code).returncode != 0
    assert time.monotonic() - begun < 60  # not after the timeout of 600 s


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_processes_that_mpi_does_not_connect_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would fit alone: of another MPI than that of mpi4py, or by srun without its plugin."""
    monkeypatch.setenv(name, "4")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(CommunicatorError, match=f"{name}=4, but MPI sees one process: .* srun --mpi=pmix"):
        mpi._check_launcher(1)
    mpi._check_launcher(4)
    monkeypatch.delenv("SLURM_STEP_ID")
    if name == "SLURM_NTASKS":  # a shell of an allocation
        mpi._check_launcher(1)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r'need mpi4py .*pip install "hybridmf\[mpi\]", then start .* mpirun or srun'):
        hmf.scale.fit(hmf.ExplicitALS(device="cpu"), [[1.0]])
