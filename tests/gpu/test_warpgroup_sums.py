"""Sums of segments by the warpgroup products of Hopper beside float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hybridmf.gpu import fused
from hybridmf.gpu.launch import DeviceEntries
from hybridmf.plan.fused import FusedConfig
from support.devices import SPECS
from support.marks import mostly_exhaustive
from support.partials import lower_of

LENGTHS = (230, 65, 64, 33, 32, 31, 5, 1, 0)
"""Of segments: around the 32 entries of a chunk, and more than the 6 chunks on their way."""

TOLERANCE = {"float32": 1e-6, "bf16x3": 5e-5}


@pytest.fixture
def hopper(device):
    if device.spec.capability != (9, 0):
        pytest.skip("only Hopper has warpgroup products")
    return device


def summed(device, kernels: fused.FusedKernels, factors: np.ndarray, entries: DeviceEntries, lengths):
    """(lower triangles, right-hand sides) that the kernel leaves, one for each segment."""
    ends = np.cumsum(lengths)
    segments = np.column_stack((np.arange(len(lengths)), ends - lengths, ends)).astype(np.int64)
    sums = kernels.empty(len(lengths))
    table = device.upload(factors)
    kernels.assemble(sums, kernels.operand(table), entries, device.upload(segments))
    found, rank = device.download(sums[0]), kernels.config.rank
    rhs = found[:, -kernels.config.rank16 :][:, :rank]
    return np.stack([lower_of(partial, rank) for partial in found]), rhs


def problem(device, kind: str, lengths=LENGTHS, rank: int = 128):
    """(factors, entries, outer weights, linear weights) of segments of these lengths."""
    rng = np.random.default_rng(0)
    n, nnz = 40, sum(lengths)
    factors = np.zeros((n, -rank % 4 + rank), np.float32)
    factors[:, :rank] = rng.standard_normal((n, rank))
    indices = rng.integers(0, n, nnz).astype(np.int32)
    ratings = (rng.lognormal(0, 3, nnz) * rng.choice([1, 1, 1, -1], nnz)).astype(np.float32)
    offsets = rng.standard_normal(nnz if kind == "residual" else n).astype(np.float32)
    implicit = kind in ("implicit", "residual")
    given = {"offsets": {"offsets": offsets}, "residual": {"predicted": offsets}}.get(kind, {})
    arrays = {name: device.upload(array) for name, array in given.items()}
    entries = DeviceEntries(
        device.upload(indices), device.upload(ratings), implicit=implicit, alpha=2.0, unobserved_weight=0.5, **arrays
    )
    outer, linear = np.ones(nnz), ratings.astype(np.float64)
    if implicit:
        outer = 1 + 2.0 * np.abs(linear) - 0.5
        linear = np.where(linear > 0, outer + 0.5, 0) - (outer * offsets if kind == "residual" else 0)
    elif kind == "offsets":
        linear = linear - offsets[indices]
    return factors, entries, indices, outer, linear


CASES = list(itertools.product((97, 104, 111, 120, 128), ("explicit", "implicit", "offsets", "residual"), TOLERANCE))


@pytest.mark.parametrize(
    ("rank", "kind", "precision"),
    mostly_exhaustive(
        CASES,
        [
            (97, "explicit", "float32"),
            (97, "implicit", "bf16x3"),
            (128, "explicit", "bf16x3"),
            (128, "implicit", "float32"),
        ],
    ),
)
def test_sums_are_those_of_float64(hopper, rank, kind, precision):
    factors, entries, indices, outer, linear = problem(hopper, kind, rank=rank)
    kernels = fused.FusedKernels(
        hopper, FusedConfig.rule(rank), precision, "cholesky", largest=float(np.abs(factors).max())
    )
    assert kernels.by_warpgroups
    lower, right = summed(hopper, kernels, factors, entries, LENGTHS)
    for segment, (first, length) in enumerate(zip(np.cumsum(LENGTHS) - LENGTHS, LENGTHS, strict=True)):
        part = slice(first, first + length)
        rows = factors[indices[part], :rank].astype(np.float64)
        matrix, rhs = (rows.T * outer[part]) @ rows, rows.T @ linear[part]
        assert (np.abs(lower[segment] - np.tril(matrix)) <= TOLERANCE[precision] * np.abs(matrix).max()).all()
        assert (np.abs(right[segment] - rhs) <= TOLERANCE[precision] * np.abs(rhs).max()).all()


def test_sums_do_not_depend_on_which_block_takes_a_segment(hopper, monkeypatch):
    factors, entries, *_ = problem(hopper, "implicit")
    kernels = fused.FusedKernels(hopper, FusedConfig.rule(128), largest=float(np.abs(factors).max()))
    many = summed(hopper, kernels, factors, entries, LENGTHS)
    monkeypatch.setattr(fused, "WARPGROUP_BLOCKS_PER_SM", 2 / hopper.spec.multiprocessors)
    np.testing.assert_equal(summed(hopper, kernels, factors, entries, LENGTHS), many)


@pytest.mark.parametrize(
    ("rank", "precision", "solver", "architecture", "taken"),
    [
        (128, "float32", "cholesky", 90, True),
        (97, "bf16x3", "nonnegative", 90, True),
        (96, "float32", "cholesky", 90, False),
        (128, "float32", "cg", 90, False),
        (128, "float32_wide", "cholesky", 90, False),
        (128, "float32", "cholesky", 100, False),
    ],
)
def test_only_hopper_takes_them_for_the_largest_ranks(rank, precision, solver, architecture, taken):
    assert fused.summed_by_warpgroups(rank, precision, solver, SPECS[architecture]) == taken
