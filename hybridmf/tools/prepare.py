"""Compiles the kernels of fits and recommendations ahead of time: for a machine, or for the image of a container."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import scipy.sparse as sp

from ..als import ExplicitALS, ImplicitALS
from ..core.sparse import RowColumns
from ..device import cuda
from ..device.compiler import Program
from ..gpu import topk
from ..gpu.engine import GpuEngine
from ..gpu.half import programs_of, wide_programs_of
from ..plan.types import Plan

SHAPE = (60, 40)  # users and items of the fits that compile
MANY_ITEMS = 1 << 20  # items for which recommendations use all of their kernels


def all_programs_of(device: cuda.Device, plan: Plan) -> list[Program]:
    """Those of fits of a plan and of recommendations from many items."""
    programs = programs_of(device, plan) + wide_programs_of(device, plan)
    columns = plan.factors + 2 * (plan.rank > plan.factors)
    for n in topk.LIST_SIZES:
        programs += topk.programs(device.spec, columns, plan.dtype, MANY_ITEMS, n)
    return programs


def compile_kernels(factors: Sequence[int], say: Callable[[str], object]) -> None:
    """Fit and serve small models on the first GPU, and compile the kernels of larger ones; `say` gets a line a rank."""
    device = cuda.open_device()
    matrix = sp.csr_array((np.random.default_rng(0).random(SHAPE) < 0.5).astype(np.float32))
    for rank in factors:
        started = time.perf_counter()
        models = (ImplicitALS(rank), ExplicitALS(rank), ExplicitALS(rank, biases=False))
        for model in models:
            model.set_params(iterations=1, device="cuda", random_state=0).fit(matrix)
            programs = all_programs_of(device, model.plan_)
            device.compile_ahead(programs)
            for program in programs:
                device.kernel(*program)
            engine = GpuEngine(device, model.plan_)
            items = engine.pack(model.item_factors)
            engine.top_k(model.user_factors, items, 10, seen=RowColumns.of(model._learned.seen_matrix()))
        say(f"{rank} factors: {time.perf_counter() - started:.1f} s")
