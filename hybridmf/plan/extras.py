"""Weights of entries and features of rows: their memory, and why a plan may not serve them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import Plan, Settings

FEATURE_ENTRIES = 128  # entries of a feature that one block of threads adds up


def with_extras(settings: Settings) -> Settings:
    """Settings of a fit with weights of explicit ratings, whose entries keep their order; others as they are."""
    if not settings.weighted:
        return settings
    on_gpu = settings.device != "cpu"
    if on_gpu and settings.row_form == "dual":
        raise ValueError('row_form="dual" does not apply on a GPU with weights; use row_form="auto" or "primal"')
    form = "primal" if on_gpu and settings.device != "auto" else settings.row_form
    device = "cpu" if settings.device == "auto" else settings.device
    return replace(settings, reorder="none", row_form=form, device=device)


def unserved(plan: Plan) -> str:
    """Why the kernels of a plan, or its places of data, do not serve its weights and features; empty if they do."""
    return (_unserved_weights(plan) if plan.weighted else "") or (_unserved_features(plan) if plan.features else "")


def _unserved_weights(plan: Plan) -> str:
    reason = ""
    if plan.devices:
        reason = "several devices have none"
    elif plan.streamed or plan.offloaded:
        reason = "they need ratings and factors in the memory of the GPU"
    elif plan.assembly == "bals" and plan.gpu is None:
        reason = 'assembly="bals" has none'
    elif plan.gpu is not None and plan.solver != "cholesky":
        reason = f"solver={plan.solver!r} has none on a GPU"
    return f'weights of explicit ratings: {reason}; use device="cpu" and solver="cholesky"' if reason else ""


def _unserved_features(plan: Plan) -> str:
    if plan.gpu is None:
        return ""
    if plan.row_form == "dual":
        return 'row_form="dual" does not apply on a GPU with features; use row_form="auto" or "primal"'
    several = (plan.devices and plan.offloaded) or any(grid.splits > 1 for grid in plan.grids.values())
    if not several and plan.factors_on != "disk":
        return ""
    names = " and ".join(f"{side}_features" for side, _, _ in plan.features)
    place = "splits them over GPUs or keeps them on the host" if several else "keeps them in files"
    return (
        f"{names}: a fit with features needs the factors in the memory of each of several GPUs, or in the memory "
        f"of the host for one GPU, and the plan {place}; use GPUs with more memory, a larger gpu_memory_limit, or "
        'device="cpu"'
    )


def equation_bytes(count: int) -> int:
    """Host memory of the equations of a number of features."""
    return 3 * 8 * count**2


def extra_bytes(plan: Plan, width: int, pulled: bool = True) -> dict[str, int]:
    """Memory of weights and features by purpose, on the device of the plan.

    `width`: bytes of a row of factors. `pulled`: whether what features add to right-hand sides is there for all rows at
    a time; solutions of Cholesky on a GPU take its place.
    """
    sizes, itemsize = {}, plan.itemsize
    if plan.weighted:  # of both orientations; residuals of one at a time, and what they are computed from
        sizes["weights"] = (2 if plan.gpu is None else 4) * plan.nnz * itemsize
    if not plan.features:
        return sizes
    total = max(plan.rows(side) for side, _, _ in plan.features) * width if pulled else 0
    for side, count, entries in plan.features:
        rows = plan.rows(side)
        # by row and by feature, float64 on the host
        held = 8 if plan.gpu is None else itemsize
        total += 2 * entries * (4 + held) + rows * (8 + itemsize)
        if plan.gpu is None:
            total += equation_bytes(count)
        else:  # the inverse, sums of pieces and of features, and their vectors
            total += count * (count * itemsize + 16 * plan.rank + width) + entries // FEATURE_ENTRIES * 8 * plan.rank
    return sizes | {"features": total}
