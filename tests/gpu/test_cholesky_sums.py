"""Systems that are solved from sums in global memory, beside float64."""

from __future__ import annotations

import numpy as np
import pytest

from hybridmf.gpu.fused import FusedKernels
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.gpu.systems import SideSystems
from hybridmf.plan.fused import BLOCK, FusedConfig
from support.marks import exhaustive
from support.partials import partial_of


@pytest.mark.parametrize("rank", [exhaustive(85), 90, 96, exhaustive(100), 120])
def test_elements_that_kernels_do_not_store_do_not_matter(device, rank):
    """Elements beyond the rank, and the upper right quarters of the blocks on the diagonal."""
    rng = np.random.default_rng(0)
    kernels = FusedKernels(device, FusedConfig.rule(rank), "float32", "cholesky")
    assert kernels.config.solved_by_sums("cholesky")
    rank16, n = kernels.config.rank16, 3
    factors = rng.standard_normal((n, 2 * rank, rank))
    matrices, targets = factors.transpose(0, 2, 1) @ factors, rng.standard_normal((n, rank))
    whole, rhs = np.full((n, rank16, rank16), np.nan), np.full((n, rank16), np.nan)
    whole[:, :rank, :rank], rhs[:, :rank] = matrices, targets
    for first in range(0, rank16, BLOCK):
        whole[:, first : first + BLOCK // 2, first + BLOCK // 2 : first + BLOCK] = np.nan
    partials = np.stack([partial_of(*system) for system in zip(whole, rhs, strict=True)])
    width = kernels.config.width
    systems = SideSystems(
        solutions=device.empty((n, width), np.float32),
        status=device.zeros(n, np.int32),
        gram=None,
        ridge=device.upload(np.full(rank, 0.5, np.float32)),
        scale=device.upload(np.ones(n, np.float32)),
    )
    entries = DeviceEntries(device.zeros(0, np.int32), device.zeros(0, np.float32))
    slots, rows = np.arange(n + 1, dtype=np.int64), np.arange(n, dtype=np.int32)
    kernels.solve(systems, (device.upload(partials),), device.upload(slots), device.upload(rows), entries)
    assert not device.download(systems.status).any()
    solved = device.download(systems.solutions)[:, :rank]
    expected = np.linalg.solve(matrices + 0.5 * np.eye(rank), targets[..., None])[..., 0]
    np.testing.assert_allclose(solved, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
