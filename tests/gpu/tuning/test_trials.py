"""Trials of the tuner on the emulated device and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridmf.gpu.tuning import tune
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.gpu.tuning.trials import Sample, TrialHalf
from hybridmf.gpu.tuning.tune import table_of
from hybridmf.plan import tables
from hybridmf.plan.tables import Gpu
from support.devices import on_a_gpu
from support.tuning import SAMPLE

pytestmark = pytest.mark.usefixtures("no_tables")

# ---------------------------------------------------------------------------------------------------- trials


def test_the_sample_has_the_stated_properties() -> None:
    matrix = SAMPLE.user_items
    assert matrix.shape == (60, 40) and 0 < matrix.nnz <= 700
    assert set(np.unique(matrix.data)) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    assert (SAMPLE.item_users != matrix.T).nnz == 0
    assert matrix.has_canonical_format and matrix.indices.dtype == np.int32
    doubled = SAMPLE.side("item", 8)
    assert doubled.dtype == np.float64 and doubled.indices.dtype == np.int32
    ordered = SAMPLE.by_degree
    assert (ordered["item"] != ordered["user"].T).nnz == 0
    assert (np.diff(np.diff(ordered["user"].indptr)) <= 0).all()


SMALL = ("sparse_syrk", "bals", "cg_any")
"""Kernels that are quick to emulate."""


@pytest.mark.parametrize("kernel", SMALL)
def test_trials_distinguish_right_results_from_wrong_ones(kernel: str, device: Any, monkeypatch: Any) -> None:
    space = SPACES[kernel]
    facts = space.facts(5, 4)[0]
    trial = space.trial(device, SAMPLE, facts)
    config = space.candidates(facts, device.spec)[0]
    assert 0 < trial.error(config) <= trial.tolerance
    parts = trial.parts(config)
    assert all(part.flops > 0 for part in parts.values())
    assert all(ms > 0 for part in parts.values() for ms in tune.event_times(device, part, 1))
    assert 0 < trial.error(config) <= trial.tolerance  # timing leaves nothing behind
    monkeypatch.setattr(TrialHalf, "steps", lambda *_: iter(()))
    assert not trial.error(config) <= trial.tolerance


def test_a_job_on_the_emulated_device(device: Any) -> None:
    (job,) = tune.Tuner(device, most=2, num_threads=2).run(["sparse_syrk"], [5], sample=SAMPLE)
    assert [one.status for one in job.measurements] == ["timed", "timed"]
    assert job.winner in job.measurements
    assert table_of(device, [job]).gpu == Gpu.of(device.spec)


@on_a_gpu
@pytest.mark.parametrize("kernel", SPACES)
def test_every_kernel_is_tuned_on_a_gpu(device: Any, kernel: str) -> None:
    sample = Sample.draw(3000, 500, 60_000)
    jobs = list(tune.Tuner(device, most=3).run([kernel], [100 if kernel == "cholesky_any" else 32], sample=sample))
    assert jobs
    for job in jobs:
        assert job.winner is not None, job.summary()
        assert not [one for one in job.measurements if one.status in ("failed", "wrong")], list(job.lines())
        assert all(one.resources.registers > 0 for one in job.timed)
    tables.store(table_of(device, jobs), tables.user_file(device.spec))
    for job in jobs:
        if job.entry is not None:  # the rule's may be all that is sound of so few
            assert tables.best(dict, kernel, device.spec, job.facts, given={}) == job.entry.config


@on_a_gpu
def test_spills_are_seen_on_a_gpu(device: Any) -> None:
    body = "float a[64] = {}; for (int k = 0; k < 99; ++k) a[k * index & 63] += out[k]; out[0] = a[index & 63];"
    found = device.resources(f'extern "C" __global__ void f(float* out, int index) {{ {body} }}', "f", ())
    assert found.local_bytes >= 256 and found.registers > 0
