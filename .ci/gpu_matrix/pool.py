"""Processes that run cases side by side, and the watchdog over them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cases import Case

START_SECONDS = 60.0
"""A new process imports, opens the GPU and maps the data during its first case."""

GRACE_SECONDS = 20.0
"""After the end of the time, cases that run may end for so long."""

PROGRESS_SECONDS = 15.0
ENDS = {"hang": "no answer", "crash": "its process died"}

Result = dict[str, Any]


@dataclass
class Worker:
    """A process, and the case it runs.

    Attributes
    ----------
    process : Popen
    log : file
        Its standard error.
    group : deque of Case
        What it runs next.
    case : Case or None
    started, deadline : float
    fresh : bool
        Whether it has answered nothing yet.
    """

    process: subprocess.Popen[str]
    log: Any
    group: deque[Case] = field(default_factory=deque)
    case: Case | None = None
    started: float = 0.0
    deadline: float = 0.0
    fresh: bool = True

    def tail(self, characters: int = 1500) -> str:
        """The end of what it wrote to standard error."""
        self.log.flush()
        with open(self.log.name, errors="replace") as file:
            return file.read()[-characters:]

    def kill(self) -> None:
        """End it, whatever it waits for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own: also what it has started
        self.process.wait()


class Pool:
    """Runs groups of cases in several processes; a process that hangs or dies costs one case.

    Parameters
    ----------
    command : sequence of str
        A process that answers cases (`worker.serve`).
    processes : int
    expected : dict, optional
        Bits of cases by name, passed on.
    limit_seconds : float
        No case starts later; 0: no limit.
    environment : dict, optional
        Variables of the processes, beside those of this one.
    report : callable
        Called with lines of progress.
    saved : callable, optional
        Called now and then with all results so far.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        expected: dict[str, str] | None = None,
        limit_seconds: float = 0.0,
        environment: dict[str, str] | None = None,
        report: Callable[[str], None] = lambda line: print(line, flush=True),
        saved: Callable[[dict[str, Result]], None] = lambda results: None,
    ) -> None:
        self.command, self.processes, self.expected = list(command), processes, expected or {}
        self.environment = {**os.environ, **(environment or {})}
        self.report, self.saved = report, saved
        self.started = time.monotonic()
        self.end = self.started + limit_seconds if limit_seconds else float("inf")
        self.answers: queue.Queue[tuple[Worker, str]] = queue.Queue()
        self.results: dict[str, Result] = {}
        self.workers: list[Worker] = []
        self.waiting: deque[deque[Case]] = deque()

    def run(self, groups: Sequence[Sequence[Case]]) -> dict[str, Result]:
        """Results by name; cases for which time did not suffice have the status "not run"."""
        self.waiting = deque(deque(group) for group in groups)
        total = sum(map(len, groups))
        reported = time.monotonic()
        try:
            while self._assign():
                self._take_answer()
                self._watch()
                if time.monotonic() > reported + PROGRESS_SECONDS:
                    reported = time.monotonic()
                    self._tell(total)
        finally:
            for worker in self.workers:
                worker.kill()
        for group in groups:
            for case in group:
                self.results.setdefault(case.name, {"status": "not run"})
        self.saved(self.results)
        return self.results

    # ---------------------------------------------------------------------------------------------- work

    def _assign(self) -> bool:
        """Give every free process a case; whether any runs."""
        if time.monotonic() < self.end:
            while len(self.workers) < self.processes and self.waiting:
                self._start_worker()
            for worker in [worker for worker in self.workers if worker.case is None]:
                if not worker.group:
                    worker.group = self._next_group()
                if worker.group:
                    self._send(worker, worker.group.popleft())
        return any(worker.case for worker in self.workers)

    def _next_group(self) -> deque[Case]:
        """The next group; at the end, half of the longest one that another process has."""
        if self.waiting:
            return self.waiting.popleft()
        longest = max((worker.group for worker in self.workers), key=len)
        return deque(longest.pop() for _ in range(len(longest) // 2))

    def _start_worker(self) -> None:
        log = tempfile.NamedTemporaryFile("w", prefix="gpu-case-", suffix=".log")  # noqa: SIM115, as long as the process
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        worker = Worker(process, log)
        self.workers.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker: Worker) -> None:
        for line in worker.process.stdout or ():
            self.answers.put((worker, line))
        self.answers.put((worker, ""))

    def _send(self, worker: Worker, case: Case) -> None:
        worker.case = case
        seconds = case.seconds + START_SECONDS * worker.fresh
        worker.started = time.monotonic()
        worker.deadline = worker.started + seconds
        asked = {"case": case.as_json(), "seconds": seconds, "expected": self.expected.get(case.name)}
        with contextlib.suppress(BrokenPipeError):  # it has died; the end of its answers says so
            assert worker.process.stdin is not None
            print(json.dumps(asked), file=worker.process.stdin, flush=True)

    # ---------------------------------------------------------------------------------------------- answers

    def _take_answer(self) -> None:
        try:
            worker, line = self.answers.get(timeout=0.2)
        except queue.Empty:
            return
        if worker not in self.workers:
            return  # killed before
        if not line:
            self._lose(worker, "crash")
            return
        assert worker.case is not None
        result = json.loads(line)
        if result["status"] == "error":  # the process ends by itself
            result |= {"status": "failed", "beside": self._beside(worker)}
            self.report(f"FAILED {worker.case.name}: {result['detail']}\n{worker.tail()}")
            self._retire(worker)
        elif result["status"] == "failed":
            self.report(f"FAILED {worker.case.name}: {result['detail']}")
        self.results[worker.case.name] = result
        worker.case, worker.fresh = None, False

    def _watch(self) -> None:
        """Kill what is past its deadline; after the end of the time, all."""
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.case is not None and now > worker.deadline:
                self._lose(worker, "hang")
            elif worker.case is not None and now > self.end + GRACE_SECONDS:
                detail = f"cut after {now - worker.started:.0f} s"
                self.results[worker.case.name] = {"status": "not run", "detail": detail}
                worker.case = None
                self._retire(worker)

    def _lose(self, worker: Worker, status: str) -> None:
        """A process that hangs or has died: its case fails, others go on."""
        self._retire(worker)
        if worker.case is None:
            return
        code = (
            f" with {worker.process.returncode}"
            if status == "crash"
            else f" in {time.monotonic() - worker.started:.0f} s"
        )
        detail = f"{ENDS[status]}{code}: {' '.join(worker.tail(300).split())}"
        self.results[worker.case.name] = {"status": status, "detail": detail, "beside": self._beside(worker)}
        self.report(f"{status.upper()} {worker.case.name}: {detail}\n{worker.tail()}")
        worker.case = None

    def _retire(self, worker: Worker) -> None:
        """End a process; the rest of its group goes to another one."""
        worker.kill()
        self.workers.remove(worker)
        if worker.group:
            self.waiting.appendleft(worker.group)

    def _beside(self, worker: Worker) -> list[str]:
        return [each.case.name for each in self.workers if each is not worker and each.case is not None]

    def _tell(self, total: int) -> None:
        bad = sum(result["status"] != "ok" for result in self.results.values())
        running = ", ".join(worker.case.name for worker in self.workers if worker.case)
        seconds = time.monotonic() - self.started
        self.report(f"[{seconds:.0f} s] {len(self.results)} of {total} cases, {bad} failed; running: {running}")
        self.saved(self.results)
