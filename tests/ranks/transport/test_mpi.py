"""Ranks that are processes of an MPI job."""

from __future__ import annotations

import sys

import pytest

import hybridmf as hmf
from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport import mpi
from hybridmf.testing import CommunicatorContract
from support.mpi import run_job

LAWS = """
import sys, types
# scikit-learn, which the laws of estimators import, takes each process a second
sys.modules["hybridmf.testing.estimators"] = types.SimpleNamespace(EstimatorContract=None)
from hybridmf.ranks.transport import mpi
from hybridmf.ranks.transport.mpi import MpiCommunicator
from hybridmf.testing import check_communicator
from support.communicators import impatient
mpi.PIECE_BYTES = 1 << 16  # larger arrays travel in several pieces
communicator = MpiCommunicator(timeout=30)
assert (communicator.size, communicator.local_rank, communicator.timeout) == (size, communicator.rank, 30)
communicator.close()
with impatient() as clock:
    check_communicator(lambda timeout: clock.watch(MpiCommunicator(timeout=timeout)))
print("done", flush=True)
"""


class TestProcesses(CommunicatorContract):
    sizes = (3,)

    def run(self, size, check):
        assert hmf.scale.MpiCommunicator is mpi.MpiCommunicator
        job = run_job(size, f"size = {size}\n{LAWS}")
        assert job.returncode == 0, job.stderr
        assert job.stdout.split() == ["done"] * size


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
