"""cuSolverDx, NVIDIA's Cholesky solver for device code, as a rival of the batched Cholesky: through numba-cuda.

    pip install "nvmath-python[cu13-dx]" "numpy<2.5"    # numba-cuda 0.30 does not work with NumPy 2.5

A block loads whole systems into shared memory, calls cuSolverDx's factorization and solve, and stores the solutions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import click
import numpy as np

SETTINGS = {32: (4, 128), 64: (1, 32), 96: (1, 128), 100: (1, 128)}
"""Systems and threads of a block by rank; 48 KiB of shared memory hold no system of a much larger rank. They are the
fastest of those tried on an H100: 1 to 4 systems, 32 to 256 threads, and those that cuSolverDx suggests."""

PADDING = 4
"""Unused rows between columns in shared memory, against bank conflicts; 0, 1 and 2 were slower or equal. Loads of the
lower triangle alone were slower."""


def solver(matrices: Any, rhs: Any) -> Callable[[], Any] | None:
    """
    A step that solves systems in global memory.

    Parameters
    ----------
    matrices, rhs
        CuPy arrays of float32 (n, rank, rank) and (n, rank), contiguous.

    Returns
    -------
    Callable or None
        It returns the solutions, (n, rank). None for another rank than those of `SETTINGS`, without nvmath-python, and
        if it cannot be imported, which is said.
    """
    n, rank = rhs.shape
    if rank not in SETTINGS or importlib.util.find_spec("nvmath") is None:
        return None
    try:
        from numba import cuda
        from nvmath.device import CholeskySolver
    except (ImportError, AttributeError) as error:
        click.echo(f"cuSolverDx is left out: nvmath-python cannot be imported ({error})")
        return None
    import cupy

    systems, threads = SETTINGS[rank]
    if n % systems:
        raise ValueError(f"n = {n} systems must be a multiple of {systems}, the systems of a block")
    column = rank + PADDING
    dx = CholeskySolver(
        size=(rank, rank, 1), precision=np.float32, execution="Block", fill_mode="lower",
        leading_dimensions=(column, rank), batches_per_block=systems, block_dim=(threads, 1, 1),
    )  # fmt: skip
    elements, unknowns = systems * rank * rank, systems * rank
    matrices_size, rhs_size = dx.a_size(), dx.b_size()

    @cuda.jit
    def kernel(x: Any, a: Any, b: Any) -> None:
        a_shared = cuda.shared.array(matrices_size, np.float32)
        b_shared = cuda.shared.array(rhs_size, np.float32)
        info = cuda.shared.array(systems, np.int32)
        block = cuda.blockIdx.x
        for k in range(cuda.threadIdx.x, elements, threads):
            a_shared[k // rank * column + k % rank] = a[block * elements + k]
        for k in range(cuda.threadIdx.x, unknowns, threads):
            b_shared[k] = b[block * unknowns + k]
        cuda.syncthreads()
        dx.factorize(a_shared, info)
        cuda.syncthreads()
        dx.solve(a_shared, b_shared)
        cuda.syncthreads()
        for k in range(cuda.threadIdx.x, unknowns, threads):
            x[block * unknowns + k] = b_shared[k]

    solutions = cupy.zeros_like(rhs)
    flat = [cuda.as_cuda_array(array.reshape(-1)) for array in (solutions, matrices, rhs)]

    def run() -> Any:
        kernel[n // systems, threads](*flat)
        return solutions

    return run
