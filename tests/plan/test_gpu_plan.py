"""Plans of a GPU: kernels, batches, memory, and when "auto" takes it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.device import cuda as devices
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import DeviceError, DeviceMemoryError
from hybridmf.plan import als_gpu
from hybridmf.plan import fused as plan_fused
from hybridmf.plan.als import ALS, for_fold_in
from hybridmf.plan.fused import gram_bytes
from hybridmf.plan.make import check_memory, make_plan
from hybridmf.plan.types import Plan, Settings
from support.devices import plan_of
from support.emulated import EmulatedDevice
from support.fake_cupy import Machine
from support.messages import says
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("forget_devices")

GIB = 1 << 30

# ------------------------------------------------------------------------------------------------------------- plans

H200 = DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, 140 * GIB)
T4 = DeviceSpec("T4", 1, (7, 5), 40, 64 * 1024, 4 << 20, 16 * GIB, 15 * GIB)
NETFLIX = ((480_189, 17_770), 99_072_112)
EXPLICIT = Objective("explicit", 0.05)
IMPLICIT = Objective("implicit", 0.05)


@pytest.fixture
def plan_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plan of a fit on a given GPU."""

    def make(
        spec: DeviceSpec = H200,
        objective: Objective = EXPLICIT,
        size: tuple[tuple[int, int], int] = NETFLIX,
        **options: Any,
    ) -> Plan:
        monkeypatch.setattr(devices, "open_device", lambda name: SimpleNamespace(spec=spec))
        defaults = hmf.ExplicitALS(biases=False, num_threads=1).get_params() | {"device": "cuda"}
        names = Settings.__dataclass_fields__
        settings = Settings.check(
            method=ALS, **{name: value for name, value in (defaults | options).items() if name in names}
        )
        return make_plan(objective, settings, *size)

    return make


def test_sums_of_the_gram_matrix_are_planned(plan_on: Callable[..., Plan]) -> None:
    """They take the memory of the new factors and of the first batch, before either is there; here they need more."""
    small, width = ((50, 30), 1116), 8
    plan = plan_on(factors=7, size=small, objective=IMPLICIT)
    assert plan.bytes["systems"] + 30 * width * 4 == gram_bytes(50, width, 4) == 64 * 64 * 4
    assert plan.bytes["systems"] > plan_on(factors=7, size=small).bytes["systems"]


def test_plan_of_our_kernels(plan_on: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on(factors=100)
    assert (plan.device, plan.gpu, plan.reason) == ("cuda:0", H200, "asked for")
    assert (plan.assembly, plan.solver, plan.reorder, plan.precision) == ("fused", "cholesky", "none", "float32")
    assert plan.segment == plan_fused.SEGMENT
    assert plan.batch_slots >= 1
    assert plan_on(factors=8).batch_slots == 2 * (plan.nnz // plan.segment) + 1  # only long rows need any
    assert plan.bytes["systems"] == plan.batch_slots * 4 * plan_fused.partial_floats(100)
    assert plan.bytes["factors"] == (480_189 + 17_770) * 100 * 4 and plan.bytes["solutions"] == 480_189 * 100 * 4
    assert plan.bytes["ratings"] == 2 * 8 * plan.nnz and plan.bytes["rows"] > 20 * (480_189 + 17_770)
    assert plan.total_bytes == sum(plan.bytes.values()) < H200.free_bytes
    assert not plan.notes
    assert plan_on(factors=99).bytes["factors"] == plan.bytes["factors"]  # rows are whole pieces of 16 bytes
    monkeypatch.setattr("hybridmf.core.system.available_memory", None)  # nothing is on the host
    check_memory(plan)


@pytest.mark.parametrize(
    ("options", "objective", "spec", "why"),
    [
        ({"factors": 129}, EXPLICIT, H200, "factors=129 is beyond 128"),
        (
            {"factors": 128},
            Objective("explicit", 0.1, biases=True),
            H200,
            "factors=128, and one coordinate for the biases, are beyond 128 (use factors=127, or biases=False)",
        ),
        (
            {"factors": 200},
            Objective("explicit", 0.1, biases=True),
            H200,
            "factors=200, and one coordinate for the biases, are beyond 128",
        ),
        ({"dtype": "float64"}, EXPLICIT, H200, "dtype float64 has no tensor-core products"),
        ({}, EXPLICIT, T4, "compute capability 7.5 is below 8.0"),
        ({}, Objective("implicit", 0.1, unobserved_weight=1.5), H200, "unobserved_weight 1.5 above 1"),
        ({}, EXPLICIT, DeviceSpec("Small", 0, (8, 0), 1, 8192, 0, GIB, 200 * GIB), "factors=64 needs"),
    ],
    ids=[
        "factors",
        "factors with biases",
        "many factors with biases",
        "float64",
        "Turing",
        "negative weights",
        "little shared memory",
    ],
)
def test_plan_where_our_kernels_do_not_apply(
    plan_on: Callable[..., Plan], options: dict, objective: Objective, spec: DeviceSpec, why: str
) -> None:
    small = ((1000, 500), 20_000)
    plan = plan_on(spec, objective, small, **options)
    assert plan.assembly == "sparse_syrk"
    assert plan.segment == als_gpu.GPU_SEGMENT
    assert any(note.startswith("assembly sparse_syrk instead of fused: ") and why in note for note in plan.notes)
    assert f"note      {plan.notes[0]}" in str(plan)
    with pytest.raises(ValueError, match=says('assembly="fused" cannot serve this: ', why, 'use assembly="auto"')):
        plan_on(spec, objective, small, assembly="fused", **options)
    with pytest.raises(ValueError, match=says("precision='tf32' is for the fused kernels: ", why, "use precision=")):
        plan_on(spec, objective, small, precision="tf32", **options)


@pytest.mark.parametrize("assembly", ["sparse_syrk", "mo_als", "bals"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plan_of_published_assemblies(plan_on: Callable[..., Plan], assembly: str, dtype: str) -> None:
    plan = plan_on(assembly=assembly, dtype=dtype)
    assert (plan.assembly, plan.dtype, plan.segment) == (assembly, dtype, als_gpu.GPU_SEGMENT)
    assert plan.reorder == ("both" if assembly == "bals" else "none")
    assert (plan.tile_rows > 0) == (plan.tile_cols > 0) == ("tiles" in plan.bytes) == (assembly == "bals")
    assert plan.bytes["systems"] == plan.batch_slots * 65 * 64 * np.dtype(dtype).itemsize <= als_gpu.BATCH_BYTES
    folded = for_fold_in(plan)
    # without tiles: what serves every weight, rank and type
    assert folded.assembly == ("mo_als" if assembly == "mo_als" else "sparse_syrk")
    assert folded.segment == als_gpu.GPU_SEGMENT
    assert (folded.solver, folded.reorder, folded.tile_rows) == ("cholesky", "none", 0)
    with pytest.raises(ValueError, match=says("precision='bf16' is for the fused kernels", "use precision='float32'")):
        plan_on(assembly=assembly, dtype=dtype, precision="bf16")


@pytest.mark.parametrize("precision", ["bf16x3", "tf32", "bf16", "float16"])
def test_plan_of_other_precisions(plan_on: Callable[..., Plan], precision: str) -> None:
    plan = plan_on(precision=precision, objective=IMPLICIT)
    assert (plan.assembly, plan.precision) == ("fused", precision)
    assert f"{precision} products" in str(plan)


def test_plan_refuses_features_of_cpus(plan_on: Callable[..., Plan]) -> None:
    for assembly in ("simd", "rank1", "blas3"):
        message = says(f"assembly={assembly!r} runs on the CPU only; on a GPU use one of fused, sparse_syrk, mo_als")
        with pytest.raises(ValueError, match=message):
            plan_on(assembly=assembly)
    assert plan_on(solver="cg", assembly="mo_als").solver == "cg"


def test_plan_of_blocks_of_coordinates(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(factors=256, solver="subspace", block_size=48, objective=IMPLICIT)
    assert (plan.assembly, plan.rank, plan.system_rank, len(plan.blocks)) == ("fused", 256, 48, 6)
    assert plan.blocks[0] == (0, 48) and plan.blocks[-1] == (240, 256)
    assert "subspace, 48 coordinates at a time" in str(plan)
    assert plan.bytes["systems"] == plan.batch_slots * 4 * plan_fused.partial_floats(48)
    assert plan.bytes["predictions"] > 4 * plan.nnz
    assert plan.bytes["blocks"] > 480_189 * 256 * 4
    assert plan_on(factors=64, solver="subspace", block_size=300).blocks == [(0, 64)]
    assert plan_on(factors=256, solver="subspace", block_size=129).assembly == "sparse_syrk"
    folded = for_fold_in(plan)
    assert (folded.solver, folded.assembly, folded.system_rank) == ("cholesky", "sparse_syrk", 256)
    assert folded.segment == als_gpu.GPU_SEGMENT and folded.batch_slots < plan.batch_slots
    with pytest.raises(DeviceMemoryError, match=says("the fit needs about", "predictions", "use fewer factors")):
        check_memory(plan_on(factors=256, solver="subspace", gpu_memory_limit="2GB"))


def test_plan_refuses_blocks_of_coordinates_where_gpus_have_none(plan_on: Callable[..., Plan]) -> None:
    for assembly in ("mo_als", "bals"):
        message = says(f"assembly={assembly!r} cannot solve for blocks of coordinates", 'use assembly="auto"')
        with pytest.raises(ValueError, match=message):
            plan_on(solver="subspace", assembly=assembly)
    with pytest.raises(ValueError, match=says('row_form="dual" does not apply', "solver='subspace'")):
        plan_on(solver="subspace", row_form="dual")
    with pytest.raises(ValueError, match=says("solver='subspace' runs on one GPU, and device names 2")):
        plan_on(solver="subspace", device=["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match=says("a store is read slab by slab", "fit store.to_ratings()")):
        plan_of(200 * GIB, slab=10**6, solver="subspace")


def test_blocks_of_coordinates_are_priced(plan_on: Callable[..., Plan]) -> None:
    """They pay with many factors, and on a GPU."""

    def seconds(**options: Any) -> float:
        return plan_on(objective=IMPLICIT, **options).estimates[0].seconds_per_iteration

    for factors, times in ((256, 1.5), (512, 4.0)):
        assert times * seconds(factors=factors, solver="subspace", block_size=64) < seconds(factors=factors)
    assert plan_on(device="auto", factors=256, solver="subspace").device == "cuda:0"


def test_plan_text_of_a_gpu(plan_on: Callable[..., Plan]) -> None:
    text = str(plan_on(factors=64, objective=IMPLICIT))
    for part in (
        "device    cuda:0: asked for",
        "problem   480,189 users x 17,770 items, 99,072,112 entries, implicit feedback",
        "solver    cholesky, assembly fused; reorder none",
        "kernels   cuda:0 (H200, sm_90, 140.0 GiB free), float32 products, rows cut after 4,096 entries, ",
        "systems at a time", "work      ", "memory    ", "ratings ", "factors ", "systems ",
    ):  # fmt: skip
        assert part in text, part
    assert "with tiles of " in str(plan_on(assembly="bals"))


# ---------------------------------------------------------------------------------------------------- plans of memory


def test_batches_follow_the_memory(plan_on: Callable[..., Plan]) -> None:
    fixed = sum(size for name, size in plan_on(assembly="mo_als").bytes.items() if name != "systems")
    slot = 65 * 64 * 4

    def free(size: int) -> DeviceSpec:
        return DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, size)

    for slots in (1, 2, 1000):
        plan = plan_on(free(fixed + slots * slot + slot // 2), assembly="mo_als")
        assert slots / 2 < plan.batch_slots <= slots  # of the smallest number of equal batches
        check_memory(plan)
    assert plan_on(assembly="mo_als").batch_slots == als_gpu.BATCH_BYTES // slot
    assert plan_on(size=((100, 50), 3000), assembly="mo_als").batch_slots == 100  # there are no more rows
    bals = plan_on(free(0), assembly="bals")
    assert bals.batch_slots == bals.tile_rows  # whole blocks of rows


@pytest.mark.parametrize("assembly", ["sparse_syrk", "mo_als"])
def test_both_sides_of_streamed_ratings_have_the_slots_of_the_larger(
    plan_on: Callable[..., Plan], assembly: str
) -> None:
    """A slab has few long rows of items and many short ones of users, whose sums go beside it in two batches."""
    plan = plan_on(assembly=assembly, gpu_memory_limit="1500MB")
    rows_of_slab = plan.n_users * plan.slab // plan.nnz
    assert plan.streamed == "host" and plan.batch_slots > rows_of_slab // 2
    assert sum(plan.bytes.values()) <= 1_500_000_000
    check_memory(plan)


def test_a_fit_that_does_not_fit_is_refused(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(T4, factors=512, gpu_memory_limit="10MB")
    assert plan.gpu is not None and plan.gpu.free_bytes == 10**7
    needs = (
        "the fit needs about 4,2", "MiB on T4 and 9.5 MiB are free (ratings 1,5", "factors 97", "solutions 93",
        "systems ",
        'use fewer factors, a GPU with more memory, free memory of other programs, or device="cpu"',
    )  # fmt: skip
    with pytest.raises(DeviceMemoryError, match=says("the fit needs about ", *needs[1:])) as caught:
        check_memory(plan)
    assert isinstance(caught.value, MemoryError)


def test_memory_limits_take_the_smaller(plan_on: Callable[..., Plan]) -> None:
    assert plan_on(gpu_memory_limit="6GB").gpu.free_bytes == 6 * 10**9
    assert plan_on(gpu_memory_limit=500 * GIB).gpu.free_bytes == 140 * GIB


# ------------------------------------------------------------------------------------------------------------- "auto"


def test_auto_takes_a_gpu_for_large_work(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(device="auto")
    assert (plan.device, plan.assembly) == ("cuda:0", "fused")
    assert re.fullmatch(r"there is a GPU: 15 iterations in about .* on the GPU, .* on the CPU", plan.reason)
    assert plan_on(device="auto", size=((100, 50), 1000), precision="tf32").device == "cuda:0"
    assert plan_on(device="auto", size=((100, 50), 1000), assembly="mo_als").device == "cuda:0"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": ((100, 50), 1000)}, "of them set-up (H200 was found)"),
        ({"assembly": "blas3"}, "assembly='blas3' is the CPU's (H200 was found)"),
        ({"gpu_memory_limit": "5MB"}, "4.8 MiB are free (ratings"),
        ({"gpu_memory_limit": "1GB", "assembly": "bals"}, "953.7 MiB are free (ratings"),
    ],
    ids=["small", "assembly", "memory", "memory for tiles"],
)
def test_auto_selects_the_cpu_where_it_is_faster(
    plan_on: Callable[..., Plan], options: dict, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hybridmf"):
        plan = plan_on(device="auto", **options)
    assert (plan.device, plan.gpu) == ("cpu", None)
    assert reason in plan.reason
    assert plan.reason.endswith("(H200 was found)")
    assert "device='auto' chose the CPU: " in caplog.text


def test_auto_refuses_a_gpu_assembly_that_does_not_fit(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(device="auto", assembly="mo_als", gpu_memory_limit="5MB")
    assert plan.device == "cuda:0"
    with pytest.raises(DeviceMemoryError):
        check_memory(plan)


def test_auto_refuses_a_gpu_assembly_where_there_is_no_gpu(machine: Machine) -> None:
    machine(None)
    message = says(
        "assembly='mo_als' is a GPU's, and there is none (no GPU: CuPy is not installed", 'use assembly="auto"'
    )
    with pytest.raises(DeviceError, match=message):
        hmf.ExplicitALS(biases=False, assembly="mo_als").fit(planted())


# ------------------------------------------------------------------------------------------------------ a fit on a GPU


def test_a_fit_goes_to_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(name: str = "cuda") -> EmulatedDevice:
        asked.append(name)
        return EmulatedDevice()

    monkeypatch.setattr(devices, "open_device", opened)
    monkeypatch.setattr("hybridmf.ranks.gpu_rank.GpuWorker", _reached)
    with pytest.raises(InterruptedError):
        hmf.ExplicitALS(biases=False, factors=4, device="cuda").fit(planted())
    assert asked[0] == "cuda" and set(asked[1:]) == {"cuda:0"}


def _reached(*_: Any) -> Any:
    raise InterruptedError
