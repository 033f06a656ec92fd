"""The archives of kernels in wheels: what they hold is what fits ask for."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.device import ready
from hybridmf.device.cuda import options_for, program_text
from hybridmf.plan.dispatch import signature_of
from support import emulated
from support.checkout import ROOT
from support.compiler import cubin_of, needs_nvrtc
from support.devices import open_or_skip, serve_cuda
from support.ratings import planted

sys.path.append(str(ROOT / ".ci"))
import ready_kernels


def key_of(source: str, name: str, constants: tuple[str, ...]) -> str:
    return ready.key_of(program_text(source, name, constants), name, options_for(source))


@pytest.mark.parametrize("architecture", ready_kernels.SPECS_READY)
def test_an_archive_of_this_checkout_is_complete(architecture: int) -> None:
    path = ready.archive_of(ready_kernels.SPECS_READY[architecture].capability)
    if not path.is_file():
        pytest.skip("no archive: python .ci/ready_kernels.py makes it")
    known = ready.read(path)
    assert not list(ready_kernels.missing(architecture, known)), "sources have changed: python .ci/ready_kernels.py"
    assert len(known) == len(ready_kernels.programs(architecture))
    signatures = {signature_of(plan) for plan in ready_kernels.plans(architecture)}
    assert set(ready.plans_of(ready_kernels.SPECS_READY[architecture].capability).read_text().split()) == signatures


def test_an_archive_holds_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    chosen = [each for each in ready_kernels.programs(90) if each[1] in ("row_range", "copy_block")]
    assert len(chosen) == 2
    monkeypatch.setattr(ready, "FOLDER", tmp_path / "ready")
    monkeypatch.setattr(ready_kernels, "programs", lambda architecture: chosen)
    with ThreadPoolExecutor(1) as pool:
        made = ready.read(ready_kernels.write(90, pool))
        assert set(made) == {key_of(*each) for each in chosen}
        assert all(cubin.startswith(b"\x7fELF") for cubin in made.values())
        assert len(ready.plans_of((9, 0)).read_text().split()) == 2 * len(ready_kernels.RANKS)
        # what is there is kept, what is not needed any more goes
        chosen.pop()
        monkeypatch.setattr(ready_kernels, "compiled", lambda job: pytest.fail("compiled again"))
        again = ready.read(ready_kernels.write(90, pool))
    assert again == {key_of(*chosen[0]): made[key_of(*chosen[0])]}


def test_a_compilation_without_messages_writes_into_no_bytes_of_others() -> None:
    needs_nvrtc()
    cubin_of('extern "C" __global__ void nothing() {}', (), 90)
    assert list(b" ") == [32]


@pytest.mark.skipif(emulated.compiler() is None, reason="no C++ compiler to run kernels on the CPU with")
@pytest.mark.parametrize("kind", [hmf.ImplicitALS, hmf.ExplicitALS])
def test_fits_and_recommendations_ask_for_these_programs(
    kind: type[hmf.ImplicitALS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks that are there, with the default settings."""
    device, used = emulated.EmulatedDevice(capability=(9, 0)), []
    serve_cuda(device, monkeypatch)
    kernel = device.kernel
    monkeypatch.setattr(device, "kernel", lambda *key: used.append(key) or kernel(*key))
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", 0)
    ratings = planted(60, 40, 0.3)
    model = kind(16, iterations=2, device="cuda", random_state=0).fit(ratings)
    fitted = len(set(used))
    model.recommend(np.arange(60), N=5)
    assert fitted and len(set(used)) > fitted
    assert set(used) <= set(ready_kernels.programs(90))


@pytest.mark.gpu
def test_kernels_of_an_archive_compute_what_those_of_nvrtc_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    device = open_or_skip("cuda")
    architecture = 10 * device.spec.capability[0] + device.spec.capability[1]
    if architecture not in ready_kernels.SPECS_READY:
        pytest.skip(f"no archive for sm_{architecture}")
    chosen = [each for each in ready_kernels.programs(architecture) if "RANK=16" in each[2]]
    monkeypatch.setattr(ready_kernels, "programs", lambda architecture: chosen)
    monkeypatch.setattr(ready, "FOLDER", tmp_path)
    monkeypatch.setattr(ready, "_archives", {})
    with ThreadPoolExecutor(16) as pool:
        ready_kernels.write(architecture, pool)
    models, loaded, load = [], [], ready.load
    monkeypatch.setattr(ready, "load", lambda *given: loaded.append(load(*given)) or loaded[-1])
    for wanted in ("0", "1"):
        monkeypatch.setenv(ready.READY_KERNELS, wanted)
        ready._archives.clear()
        device._kernels.clear()
        device._compiler._results.clear()
        loaded.clear()
        models.append(hmf.ImplicitALS(16, iterations=3, device="cuda", random_state=0).fit(planted(200, 90, 0.3)))
        assert any(kernel is not None for kernel in loaded) == (wanted == "1")
    np.testing.assert_array_equal(models[0].user_factors_, models[1].user_factors_)
    np.testing.assert_array_equal(models[0].item_factors_, models[1].item_factors_)
