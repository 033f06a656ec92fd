"""Ranks that are processes of an MPI job."""

from __future__ import annotations

import sys
import time

import pytest

import hybridmf as hmf
from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport import mpi
from support.mpi import run_job

LAWS = """
import numpy as np
from hybridmf.ranks.transport import mpi
from hybridmf.scale import MpiCommunicator
from support.communicators import laws
for piece in (mpi.PIECE_BYTES, 1000):
    mpi.PIECE_BYTES = piece
    communicator = MpiCommunicator(timeout=60)
    assert (communicator.size, communicator.local_rank, communicator.timeout) == (3, communicator.rank, 60)
    assert laws(communicator) > 80
    large = np.full(1 << 21, communicator.rank, np.float32)  # no such array fits in the buffers of MPI
    assert communicator.allreduce(large).tolist() == [3.0] * len(large)
    if communicator.rank == 0:
        communicator.sendrecv(large, 1, 1, np.empty(0))
    if communicator.rank == 1:
        received = communicator.sendrecv(np.empty(0), 0, 0, large)
        assert not received.any()
    communicator.close()
print("done", flush=True)
"""

FAILURES = """
import time
import numpy as np
from hybridmf.errors import CommunicatorError
from hybridmf.scale import MpiCommunicator
from mpi4py import MPI

def failing(name, function, timeout=60):
    communicator, begun = MpiCommunicator(timeout=timeout), time.monotonic()
    try:
        said = function(communicator)
    except CommunicatorError as error:
        said = str(error)
    took = time.monotonic() - begun
    assert took < 20, (name, took)
    for rank, each in enumerate(MPI.COMM_WORLD.gather(said) or ()):
        print(name, rank, each, sep="|", flush=True)
    MPI.COMM_WORLD.Barrier()

def aborted(c):
    if c.rank == 1:
        c.abort("its disk is full")
    c.barrier()

def computing(c):
    if c.rank == 1:
        c.abort("it has other ratings")
    while not c.cause:
        time.sleep(0.01)
    return c.cause

def different(c):
    if c.rank == 2:
        c.allreduce(np.zeros(3))
    c.allreduce(np.zeros(2))

def silent(c):
    if c.rank == 2:
        time.sleep(2)
    c.barrier()

def closed(c):
    if c.rank == 1:
        c.close()
        return "closed"
    if c.rank == 2:
        return "elsewhere"
    c.sendrecv(np.zeros(1), 1, 1, np.zeros(1))

def closed_itself(c):
    c.barrier()
    c.close()
    c.barrier()

failing("aborted", aborted)
failing("computing", computing)
failing("different", different)
failing("silent", silent, timeout=0.5)
failing("closed", closed)
failing("closed itself", closed_itself)
"""


def test_laws() -> None:
    job = run_job(3, LAWS)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 3


def test_every_rank_learns_the_first_cause() -> None:
    job = run_job(3, FAILURES)
    assert job.returncode == 0, job.stderr
    said: dict[str, list[str]] = {}
    for line in job.stdout.splitlines():
        name, rank, text = line.split("|")
        assert len(said.setdefault(name, [])) == int(rank)
        said[name].append(text)
    assert said["aborted"] == ["its disk is full"] * 3
    assert said["computing"] == ["it has other ratings"] * 3
    for size in (2, 3):
        assert all(f"allreduce of float64 ({size},)" in text for text in said["different"])
    assert all("did not answer" in text and "within 0.5 s in barrier" in text for text in said["silent"][:2])
    assert said["closed"][1:] == ["closed", "elsewhere"]
    assert "rank 1 has closed its communicator while rank 0 waits for it in sendrecv" in said["closed"][0]
    assert all("has closed this communicator" in text for text in said["closed itself"])


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
