"""Fits on a GPU whose factors are in files: the bits of fits that have them in the memory of the host, and no more memory."""

from __future__ import annotations

import contextlib
import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu_als import FITS, gpu, on_a_gpu  # noqa: F401
from test_gpu_stream import assert_same_fit
from test_gpu_turns import HOST_LIMIT, MATRIX, TURNS_LIMIT, fitted, no_threads

import hybridmf as hmf
from hybridmf import _io, _plan, _scratch
from hybridmf._engine import engine_for
from hybridmf._scratch import SCRATCH_DIR, scratch_file
from hybridmf.scale.checkpoint import UNFINISHED

FREE = 4_000
"""Bytes of memory that the host is said to have: the factors of MATRIX, twice, are 5,120."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of factors go; it may be in memory, where tests run."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setenv(SCRATCH_DIR, str(place))
    monkeypatch.setattr(_scratch, "IN_MEMORY", ())
    return place


@pytest.fixture
def small_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without room for the factors of MATRIX."""
    monkeypatch.setattr(_plan, "available_memory", lambda: FREE)
    return folder


# ---------------------------------------------------------------------------------------------------------- whole fits


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("implicit", {}),
        ("explicit", {"dtype": "float64", "assembly": "sparse_syrk", "gpu_memory_limit": 9_000}),
        ("biases", {"balance": True}),
        ("implicit", {"solver": "cg"}),
        ("biases", {"gpu_memory_limit": TURNS_LIMIT, "solver": "cg"}),
    ],
)
def test_the_bits_are_those_of_factors_on_the_host(kind, options, gpu, folder, monkeypatch):  # noqa: F811
    limits = {"gpu_memory_limit": HOST_LIMIT} | options
    on_host = fitted(kind, MATRIX, **limits)
    assert on_host.plan_.factors_on == "host"
    monkeypatch.setattr(_plan, "available_memory", lambda: on_host.plan_.host_bytes - 1)
    model = fitted(kind, MATRIX, **limits)
    plan = model.plan_
    assert plan.factors_on == "disk" and plan.disk_bytes == on_host.plan_.host_bytes and plan.host_bytes == 0
    assert plan.scratch == (str(folder),) and f"in {str(folder)!r}: factors, old and new" in str(plan)
    assert "nor in the memory of the host: they are in files" in str(plan)
    assert_same_fit(model, on_host)
    assert model.user_factors.flags.c_contiguous and model.recommend(0, N=3)[0].shape == (3,)
    assert engine_for(plan).name == "cpu"
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).user_factors, on_host.user_factors)
    assert no_threads() and not list(folder.iterdir())


@pytest.mark.parametrize("free", [FREE, 100_000])
def test_a_store_and_its_factors_on_disk(free, gpu, folder, tmp_path, monkeypatch):  # noqa: F811
    """Files are beside the store where nobody says otherwise; ratings are in memory if they have room alone."""
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=960)
    on_host = fitted("explicit", store, gpu_memory_limit=HOST_LIMIT)
    monkeypatch.delenv(SCRATCH_DIR)
    monkeypatch.setattr(_plan, "available_memory", lambda: free)
    monkeypatch.setattr(_plan.Plan, "_away_bytes", property(lambda plan: 100_001))
    model = fitted("explicit", store, gpu_memory_limit=HOST_LIMIT)
    assert model.plan_.factors_on == "disk" and model.plan_.scratch == (str(tmp_path),)
    assert model.plan_.streamed == ("disk" if free == FREE else "host")
    assert_same_fit(model, on_host)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "store"]


def test_what_a_callback_has_seen_stays_as_it_was(gpu, small_host):  # noqa: F811
    for kind, factors in (("implicit", 8), ("biases", 6)):  # tables as they are, and copies without padding
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def look(model: Any, record: Any, seen: Any = seen) -> None:
            seen.append((model.user_factors_, model.user_factors_.copy()))

        cls, given = FITS[kind]
        options = {"iterations": 5, "random_state": 0, "device": "cuda", "gpu_memory_limit": HOST_LIMIT}
        model = cls(**(given | {"factors": factors} | options)).fit(MATRIX, callback=look)
        assert model.plan_.factors_on == "disk"
        for view, copy in seen:
            assert scratch_file(view) is not None and view.flags.c_contiguous
            np.testing.assert_array_equal(view, copy)


def test_files_live_as_long_as_the_model(gpu, small_host):  # noqa: F811
    before = len(_scratch._mapped)
    model = fitted("implicit", MATRIX, gpu_memory_limit=HOST_LIMIT)
    gc.collect()
    assert len(_scratch._mapped) == before + 2  # those of the last factors
    view = model.user_factors_[3:5]
    del model
    gc.collect()
    assert len(_scratch._mapped) == before + 1 and view.shape == (2, 7)
    del view
    gc.collect()
    assert len(_scratch._mapped) == before


def test_checkpoints_resume_wherever_factors_are(gpu, folder, tmp_path, monkeypatch):  # noqa: F811
    straight = fitted("biases", MATRIX, iterations=4)
    cls, given = FITS["biases"]
    options = given | {"random_state": 0, "device": "cuda"}
    cls(**options, iterations=1).fit(MATRIX, checkpoint=tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(_plan, "available_memory", lambda: FREE)
        patched.setattr("safetensors.safe_open", _without_factors(_io.safetensors.safe_open))
        resumed = cls(**options, iterations=2, gpu_memory_limit=HOST_LIMIT)
        resumed.fit(MATRIX, checkpoint=tmp_path / "saved", resume_from=tmp_path / "saved")
    assert resumed.plan_.factors_on == "disk" and resumed.n_iter_ == 2
    assert not list((tmp_path / "saved").glob(f"{UNFINISHED}*"))
    again = cls(**options, iterations=4).fit(MATRIX, resume_from=tmp_path / "saved")
    assert again.plan_.factors_on == "device"
    np.testing.assert_array_equal(again.user_factors, straight.user_factors)
    on_cpu = cls(**(options | {"device": "cpu"}), iterations=4).fit(MATRIX, resume_from=tmp_path / "saved")
    np.testing.assert_allclose(on_cpu.user_factors, straight.user_factors, rtol=1e-2, atol=1e-3)


def _without_factors(original: Any) -> Any:
    """`safetensors.safe_open` that refuses to read factors into memory."""

    @contextlib.contextmanager
    def opened(*arguments: Any, **options: Any) -> Any:
        with original(*arguments, **options) as file:
            yield _Guarded(file)

    return opened


class _Guarded:
    def __init__(self, file: Any) -> None:
        self.metadata, self.keys, self._file = file.metadata, file.keys, file

    def get_tensor(self, name: str) -> Any:
        assert name not in _io.LARGE
        return self._file.get_tensor(name)


def test_a_damaged_checkpoint_is_found_where_it_is_mapped(gpu, small_host, tmp_path):  # noqa: F811
    cls, given = FITS["explicit"]
    options = given | {"random_state": 0, "device": "cuda", "gpu_memory_limit": HOST_LIMIT}
    cls(**options, iterations=1).fit(MATRIX, checkpoint=tmp_path / "saved")
    path = next((tmp_path / "saved").iterdir())
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(hmf.errors.ModelFileError, match="was altered or damaged after it was written"):
        cls(**options, iterations=2).fit(MATRIX, resume_from=path)
