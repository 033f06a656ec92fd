"""Fits on a real GPU whose kernels fail or never end, each in a process of its own, which loses the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import gc, json, os, signal, sys, threading, time
import numpy as np
import hybridmf as hmf
from hybridmf.device import health
from hybridmf.ranks.su_als import RankALS
from hybridmf.gpu.factors import DeviceFactors
from support.ratings import planted

SOURCE = r'''
extern "C" __global__ void crash() { *reinterpret_cast<volatile int*>(16) = 1; }

extern "C" __global__ void hang(const volatile int* flag, long long nanoseconds) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*flag && now - begun < nanoseconds);
}
'''
HANGS = 40  # seconds: no GPU is blocked for longer
FAILING, HALF = KERNEL, 4  # the users of iteration 2

count, before, sent = 0, [], []
solve = RankALS.solve

def failing_solve(self, side):
    global count
    count += 1
    if count == HALF:
        device = self.worker.device
        before.extend(device.download(self.own[each].table) for each in ("user", "item"))
        if FAILING == "crash":
            device.kernel(SOURCE, "crash", ())((1,), (1,), (), 0)
        else:
            flag, hang = device.zeros(1, np.int32), device.kernel(SOURCE, "hang", ())
            while device._compiler._threads:  # loading a program waits for all kernels, and other calls for the loading
                time.sleep(0.01)
            hang((1,), (1,), (flag, np.int64(HANGS * 10**9)), 0)
            threading.Timer(2.0, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT))).start()
    return solve(self, side)

RankALS.solve = failing_solve

def model_on(device, **options):
    return hmf.ExplicitALS(biases=False, factors=8, iterations=5, random_state=0, device=device, **options)

model_on("cuda").set_params(iterations=1).fit(planted())  # compiles
count = 0
model = model_on("cuda")
"""


def run(kernel: str, body: str, timeout: float = 120) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a script; returns its end, and the seconds from its last line of output to its exit."""
    script = SCRIPT.replace("KERNEL", repr(kernel)) + body
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=timeout
    )
    ended = time.time()
    answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return done, ended - answer.get("now", ended)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_illegal_access_raises_one_error_and_prints_nothing_else() -> None:
    done, _ = run("crash", "model.fit(planted())")
    assert done.returncode == 1
    assert "Exception ignored" not in done.stderr and "Error in sys.excepthook" not in done.stderr, done.stderr
    assert done.stderr.count("Traceback") == 2, done.stderr  # the error, and its cause
    kind, _, message = done.stderr.splitlines()[-1].partition(": ")
    assert kind == "hybridmf.errors.DeviceLostError"
    assert message.startswith("cuda:0 failed while computing the user factors of iteration 2: CUDA"), message
    assert "restart it" in message


def test_a_process_goes_on_without_the_gpu(tmp_path: Path) -> None:
    done, _ = run(
        "crash",
        f"""
answer = {{}}
try:
    model.fit(planted(), callback=lambda model, record: model.user_factors_ is model.item_factors_)
except hmf.errors.DeviceLostError as error:
    answer["first"] = str(error)
model.save({str(tmp_path / "model")!r})
answer["iterations"] = hmf.load({str(tmp_path / "model")!r}).n_iter_
begun = time.monotonic()
try:
    model_on("cuda").fit(planted())
except hmf.errors.DeviceError as error:
    answer["later"] = str(error)
answer["seconds"] = time.monotonic() - begun
answer["auto"] = model_on("auto").fit(planted()).device_
answer["cpu"] = bool(np.isfinite(model_on("cpu").fit(planted()).user_factors_).all())
answer["served"] = model.recommend([0, 1])[0].shape
gc.collect()
print(json.dumps(answer | {{"now": time.time()}}))
""",
    )
    answer = answer_of(done)
    assert done.returncode == 0, done.stderr
    # no handler of logging is set up, so that warnings are printed: of the model file, which is loaded without the GPU
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "IllegalAddress" in answer["first"] or "ILLEGAL_ADDRESS" in answer["first"], answer
    assert "The model has the factors of iteration 1, which were on the host" in answer["first"]
    assert answer["iterations"] == 1
    assert "cuda:0 failed while computing the user factors of iteration 2" in answer["later"]
    assert answer["seconds"] < 1
    assert answer["auto"] == "cpu" and answer["cpu"] and answer["served"] == [2, 10]


INTERRUPTED = """
answer = {}
try:
    model.fit(planted())
except KeyboardInterrupt:
    answer["seconds"] = time.monotonic() - sent[0]
"""


def test_ctrl_c_during_a_kernel_that_hangs_keeps_the_last_half_sweep() -> None:
    """Copies of complete factors run beside the kernel; the process ends although the kernel does not."""
    done, leaving = run(
        "hang",
        INTERRUPTED
        + """
answer["iterations"] = model.n_iter_
answer["same"] = [
    bool(np.array_equal(ours, table[:, :8]))
    for ours, table in zip((model.user_factors_, model.item_factors_), before)
]
answer["lost"] = health._known[0].loss is not None
print(json.dumps(answer | {"now": time.time()}))
""",
    )
    answer = answer_of(done)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert answer["seconds"] < 2, answer
    assert answer["iterations"] == 1 and answer["same"] == [True, True] and not answer["lost"], answer
    assert leaving < 15, f"the process took {leaving:.1f} s to end"


def test_a_gpu_that_does_not_answer_is_lost(tmp_path: Path) -> None:
    """Where the copy has to wait for the kernel."""
    done, leaving = run(
        "hang",
        "keep = DeviceFactors.keep\n"
        "DeviceFactors.keep = lambda self, **given: keep(self, **{k: v for k, v in given.items() if k != 'settled'})\n"
        + INTERRUPTED
        + """
try:
    model_on("cuda").fit(planted())
except hmf.errors.DeviceError as error:
    answer["later"] = str(error)
answer["cpu"] = bool(np.isfinite(model_on("cpu").fit(planted()).user_factors_).all())
print(json.dumps(answer | {"now": time.time()}))
""",
    )
    answer = answer_of(done)
    assert done.returncode == 0, done.stderr
    assert 4 < answer["seconds"] < 9, answer
    assert "did not answer for 5 s after an interruption" in answer["later"]
    assert "The model is as it was before the fit" in done.stderr  # a warning
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert answer["cpu"]
    assert leaving < 15, f"the process took {leaving:.1f} s to end"
