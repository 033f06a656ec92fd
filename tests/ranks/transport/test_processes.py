"""Ranks as processes over sockets: the laws, and a rank that is killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np

from hybridmf.errors import CommunicatorError
from support.communicators import laws
from support.processes import exit_codes


def stages(communicator, folder):
    """One test, since processes start slowly: laws, then rank 1 is killed and the others report the failure."""
    checks = laws(communicator)
    Path(folder, f"{communicator.rank} through").touch()
    if communicator.rank == 1:
        # a rank leaves the last barrier before the others do, and its death would end theirs
        while not all(Path(folder, f"{rank} through").exists() for rank in (0, 2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        communicator.allreduce(np.zeros(2))
    except CommunicatorError as error:
        Path(folder, str(communicator.rank)).write_text(f"{checks} {time.monotonic() - started} {error}")


def test_laws_of_processes_and_a_kill(tmp_path):
    assert exit_codes(3, stages, (str(tmp_path),), timeout=60) == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        checks, seconds, error = (tmp_path / str(rank)).read_text().split(maxsplit=2)
        assert int(checks) > 80
        assert float(seconds) < 30
        # or of the other survivor, whose error has ended it in the meantime
        assert re.fullmatch(r"rank [012] ended without closing its communicator \(was it killed\?\)", error)
