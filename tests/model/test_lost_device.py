"""Fits on a GPU that fails for good or does not answer, on a stand-in for CuPy: what is raised, kept and printed."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.device import health
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.model.loop import FitLoop
from hybridmf.plan import dispatch
from support.failing_gpu import ctrl_c_after, model_on, serve
from support.fake_cupy import CUDARuntimeError
from support.messages import says
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("forget_devices")

ILLEGAL = "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered"


def values_of(model: Any) -> tuple[float, float]:
    """The value of all user factors, and of all item factors: the numbers of the half sweeps that solved them."""
    sides = (model.user_factors_, model.item_factors_)
    assert all(len(np.unique(side)) == 1 for side in sides)
    return tuple(float(side[0, 0]) for side in sides)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------- the error


@pytest.mark.parametrize(
    ("half", "work"), [(1, "item factors of iteration 1"), (3, "item factors of iteration 2"), (4, "user factors of")]
)
def test_the_error_names_device_half_sweep_cause_and_remedy(
    half: int, work: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, failing = serve(monkeypatch)
    failing.number, failing.kernel = half, "crash"
    with pytest.raises(
        hmf.errors.DeviceLostError,
        match=says(
            f"cuda:0 failed while computing the {work}", ILLEGAL, "restart it", 'device="cpu"', "The model is as"
        ),
    ) as caught:
        model_on("cuda").fit(planted())
    assert str(caught.value.__cause__) == str(module.broken)
    assert caught.value.__suppress_context__
    assert isinstance(caught.value, hmf.errors.DeviceError)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)


def test_later_calls_refuse_at_once_and_the_cpu_still_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, failing = serve(monkeypatch)
    failing.number, failing.kernel = 3, "crash"
    model = model_on("cuda")
    with pytest.raises(hmf.errors.DeviceLostError):
        model.fit(planted())
    launches = len(sys.modules["cupy"].launches)
    cause = says("cuda:0 failed while computing the item factors of iteration 2", "restart it")
    with pytest.raises(hmf.errors.DeviceError, match=cause):
        model.fit(planted())
    with pytest.raises(hmf.errors.DeviceLostError, match=cause):
        hmf.device.cuda.open_device("cuda")
    assert len(sys.modules["cupy"].launches) == launches
    usable, reason = dispatch.gpu_status()
    assert not usable and "cuda:0 failed" in reason
    expected = model_on("cpu").fit(planted())
    expected.save(tmp_path / "model")
    with caplog.at_level(logging.INFO, "hybridmf"):
        auto = model_on("auto").fit(planted())
    assert auto.device_ == "cpu" and auto.plan_.reason.startswith("no GPU: cuda:0 failed")
    assert "device='auto' chose the CPU: cuda:0 failed" in caplog.text
    np.testing.assert_array_equal(auto.user_factors_, expected.user_factors_)


@pytest.mark.parametrize("brought", [True, False])
def test_the_model_keeps_what_is_on_the_host(brought: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A callback that uses the factors brings them to the host; otherwise they are lost with the device."""
    _, failing = serve(monkeypatch)
    failing.number, failing.kernel = 6, "crash"  # the users of iteration 3
    model = model_on("cuda")
    callback = (lambda model, record: model.user_factors_ is model.item_factors_) if brought else lambda *_: None
    text = "The model has the factors of iteration 2, which were on the host" if brought else "The model is not fitted"
    with pytest.raises(hmf.errors.DeviceLostError, match=says("the user factors of iteration 3", text)):
        model.fit(planted(), callback=callback)
    if not brought:
        with pytest.raises(NotFittedError):
            model.save(tmp_path / "model")
        return
    assert model.n_iter_ == len(model.history_) == 2
    assert values_of(model) == (4, 3)
    model.save(tmp_path / "model")
    assert values_of(hmf.load(tmp_path / "model")) == (4, 3)
    assert model.recommend(0)[0].shape == (10,)


def test_a_refit_that_loses_the_device_leaves_the_old_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _, failing = serve(monkeypatch)
    model = model_on("cuda").fit(planted())
    assert values_of(model) == (6, 5)
    failing.number, failing.kernel = 4, "crash"
    with pytest.raises(hmf.errors.DeviceLostError, match="The model is as it was before the fit"):
        model.fit(planted())
    assert values_of(model) == (6, 5) and model.n_iter_ == 3
    assert model.recommend([0, 1])[0].shape == (2, 10)


def test_a_lost_device_is_not_asked_to_serve(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, failing = serve(monkeypatch)
    model = model_on("cuda").fit(planted())
    failing.number, failing.kernel = 1, "crash"
    with pytest.raises(hmf.errors.DeviceLostError):
        model_on("cuda").fit(planted())
    assert np.isfinite(model.objective(planted()))
    assert model.transform(planted()).shape == (60, 4)
    assert "cuda:0 failed" in caplog.text and "the CPU serves the model instead" in caplog.text


def test_checkpoints_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, failing = serve(monkeypatch)
    failing.number, failing.kernel = 5, "crash"
    with pytest.raises(hmf.errors.DeviceLostError, match=says("checkpoints are in", str(tmp_path))):
        model_on("cuda", iterations=50).fit(planted(), checkpoint=tmp_path)


def test_a_device_lost_after_the_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = serve(monkeypatch)
    finish = FitLoop._finish

    def failing(loop: FitLoop, **how: Any) -> None:
        module.broken = CUDARuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered")
        finish(loop, **how)

    monkeypatch.setattr(FitLoop, "_finish", failing)
    model = model_on("cuda")
    with pytest.raises(hmf.errors.DeviceLostError, match=says("ECCUncorrectable", "The model is not fitted")):
        model.fit(planted())
    assert not hasattr(model, "n_iter_")


def test_errors_of_the_evaluation_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = serve(monkeypatch)

    def callback(model: Any, record: Any) -> None:
        module.broken = RuntimeError("unused")
        hmf.device.cuda.open_device()

    module.cuda.runtime.CUDARuntimeError = RuntimeError
    monkeypatch.setattr(health, "STICKY", frozenset({"unused"}))
    with pytest.raises(hmf.errors.DeviceLostError, match="while computing the evaluation of iteration 1: Runtime"):
        model_on("cuda").fit(planted(), callback=callback)


# ----------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(("half", "kept"), [(2, None), (3, (2, 1)), (4, (2, 3)), (5, (4, 3))])
def test_ctrl_c_while_a_kernel_hangs_keeps_the_last_half_sweep(
    half: int, kept: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its factors are complete, so the copy waits for no kernel."""
    _, failing = serve(monkeypatch)
    failing.number, failing.kernel = half, "hang"
    model, begun = model_on("cuda"), time.monotonic()
    with caplog.at_level(logging.INFO, "hybridmf"), pytest.raises(KeyboardInterrupt), ctrl_c_after(0.3):
        model.fit(planted())
    assert time.monotonic() - begun < 0.3 + 1
    assert "The model has the last completed half sweep" in caplog.text
    if kept is not None:
        assert values_of(model) == kept
        assert model.n_iter_ == (half - 1) // 2


@pytest.mark.parametrize("brought", [True, False])
def test_a_device_that_does_not_answer_is_lost(
    brought: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, failing = serve(monkeypatch)
    failing.number, failing.kernel = 6, "hang"
    monkeypatch.setattr(health, "PATIENCE", 0.3)
    # copies wait for the kernel, as those of factors that were not checked yet
    monkeypatch.setattr(DeviceFactors, "keep", keep_unsettled)
    model, begun = model_on("cuda"), time.monotonic()
    callback = (lambda model, record: model.user_factors_ is model.item_factors_) if brought else None
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.3):
        model.fit(planted(), callback=callback)
    assert 0.5 < time.monotonic() - begun < 3
    said = "cuda:0 failed while computing the user factors of iteration 3: it did not answer for"
    assert said in caplog.text and "after an interruption" in caplog.text
    if brought:
        assert "The model has the factors of iteration 2, which were on the host" in caplog.text
        assert values_of(model) == (4, 3)
    else:
        assert "The model is as it was before the fit" in caplog.text
        assert not hasattr(model, "n_iter_")
    with pytest.raises(hmf.errors.DeviceError, match="did not answer"):
        model_on("cuda").fit(planted())


def keep_unsettled(self: DeviceFactors, **attributes: Any) -> None:
    """`DeviceFactors.keep` without the mark of complete factors."""
    for name, value in attributes.items():
        object.__setattr__(self, name, False if name == "settled" else value)


# ---------------------------------------------------------------------------------------------------- what is printed

IMPORTS = """
import gc
import sys
import pytest
from support.failing_gpu import ctrl_c_after, model_on, serve
from support.ratings import planted
import hybridmf as hmf
from hybridmf.device import cuda, health
"""


def serving(kernel: str) -> str:
    """A model whose third half sweep launches this kernel."""
    return f"""
        _, failing = serve(pytest.MonkeyPatch())
        failing.number, failing.kernel = 3, "{kernel}"
        model = model_on("cuda")
        """


def run(*parts: str) -> subprocess.CompletedProcess[str]:
    """One process for several statements: most of its time it imports."""
    script = "\n".join(map(textwrap.dedent, (IMPORTS, *parts)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)


CAUGHT = """
try:
    model.fit(planted())
except hmf.errors.DeviceLostError as error:
    print(error)
model_on("cpu").fit(planted())
del _, failing, model, sys.modules["cupy"]
cuda._open.cache_clear()
health._known.clear()
gc.collect()
"""


def test_nothing_but_the_error_is_printed_and_a_process_whose_kernel_hangs_ends() -> None:
    """The first error is handled; after it, Ctrl-C ends a kernel that hangs, and the process with it."""
    done = run(
        serving("crash"),
        CAUGHT,
        serving("hang"),
        """
        try:
            with ctrl_c_after(0.5):
                model.fit(planted())
        except KeyboardInterrupt:
            print("interrupted", model.n_iter_)
        """,
    )
    assert done.returncode == 0 and not done.stderr
    error, interrupted = done.stdout.splitlines()
    assert "cuda:0 failed" in error and interrupted == "interrupted 1"


def test_one_error_and_nothing_else_is_printed() -> None:
    """The stand-in's destructors fail like CuPy's, and would be heard if nothing kept the objects alive."""
    done = run(
        "kept, health.keep_alive = health.keep_alive, lambda *objects: None",
        serving("crash"),
        CAUGHT,
        "health.keep_alive = kept",
        'print("----", file=sys.stderr)',
        serving("crash"),
        "model.fit(planted())",
    )
    control, _, printed = done.stderr.partition("----\n")
    assert "Exception ignored" in control
    assert done.returncode == 1
    assert printed.startswith("Traceback")
    assert printed.count("Traceback") == 2, printed  # the error, and its cause
    assert "Exception ignored" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith(
        "hybridmf.errors.DeviceLostError: cuda:0 failed while computing the item factors of iteration 2"
    )
