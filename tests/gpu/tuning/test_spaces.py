"""Search spaces of the tuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.device.cuda import DeviceSpec
from hybridmf.gpu.launch import constant_texts, source_text
from hybridmf.gpu.tuning import spaces, trials
from hybridmf.gpu.tuning.spaces import SPACES
from support import emulated
from support.tuning import GIB, H200, SAMPLE

pytestmark = pytest.mark.usefixtures("no_tables")

T4 = DeviceSpec("T4", 0, (7, 5), 40, 64 << 10, 4 << 20, 16 * GIB, 15 * GIB)
A40 = DeviceSpec("A40", 0, (8, 6), 84, 99 << 10, 6 << 20, 48 * GIB, 47 * GIB)

# ---------------------------------------------------------------------------------------------------- spaces


@settings(max_examples=25)
@given(
    kernel=st.sampled_from(list(SPACES)),
    factors=st.integers(1, 300),
    spec=st.sampled_from([H200, A40, T4]),
    itemsize=st.sampled_from([4, 8]),
)
def test_candidates_satisfy_the_limits_of_the_hardware(
    kernel: str, factors: int, spec: DeviceSpec, itemsize: int
) -> None:
    space = SPACES[kernel]
    for facts in space.facts(factors, itemsize):
        try:
            rule = space.rule(facts, spec)
        except ValueError:  # the device cannot run this kernel at all
            continue
        first, *others = space.candidates(facts, spec)
        assert first == rule
        keys = [tuple(one.values.items()) for one in (first, *others)]
        assert len(set(keys)) == len(keys)
        threads, _ = spaces.resident_limits(spec)
        for one in others:
            shared = getattr(one.config, "shared_bytes", 0)
            shared = shared("cholesky") if callable(shared) else shared
            assert shared <= spec.shared_bytes
            assert getattr(one.config, "threads", 32) <= 1024
            assert spaces.LEAST_THREADS <= one.threads <= threads
            assert one.reuse >= spaces.LEAST_REUSE


def test_every_shape_comes_before_any_second_of_its_kind() -> None:
    _, *others = SPACES["sparse_syrk"].candidates({"rank": 64, "itemsize": 4}, H200)
    families = [one.family for one in others]
    first_repeat = next(place for place, family in enumerate(families) if family in families[:place])
    assert set(families[:first_repeat]) == set(families)
    assert [one.promise for one in others[:first_repeat]] == sorted(
        (one.promise for one in others[:first_repeat]), reverse=True
    )


def test_correctness_constraints_of_the_paper() -> None:
    """Gates VIII: nb divisible by dx and dy; kb by what shares it; whole warps."""
    for one in SPACES["sparse_syrk"].candidates({"rank": 100, "itemsize": 4}, H200):
        v = one.values
        assert v["nb"] % v["dx"] == v["nb"] % v["dy"] == v["kb"] % v["dz"] == 0
        assert v["dx"] * v["dy"] * v["dz"] % 32 == 0


def test_known_good_candidates_are_among_them() -> None:
    """What was faster in trials: long runs with blocks that leave registers, and more threads for two vectors."""
    hogwild = SPACES["batch_hogwild"].candidates({"ld": 64, "itemsize": 2, "biases": False}, H200)
    assert {"blocks_per_sm": 4, "run": 32, "batch": 32} in [one.values for one in hogwild]
    staged = SPACES["ccd"].candidates({"itemsize": 4, "vectors": 2}, H200)
    assert {"threads": 1024, "segment": 2048} in [one.values for one in staged]


@pytest.mark.parametrize(
    ("kernel", "factors", "itemsize"), [("fused", 129, 4), ("fused", 64, 8), ("cholesky_any", 64, 4), ("top_k", 600, 4)]
)
def test_kernels_that_do_not_serve_have_no_facts(kernel: str, factors: int, itemsize: int) -> None:
    assert SPACES[kernel].facts(factors, itemsize) == []


@pytest.mark.parametrize(
    ("kernel", "facts", "message"),
    [
        ("fused", {"rank": 8, "precision": "float32", "solver": "cg"}, "below 8.0"),
        ("cholesky_tiles", {"rank": 8}, "below 8.0"),
        ("msgd", {"ld": 8192, "itemsize": 8}, "shared memory"),
        ("top_k", {"padded": 512}, "shared memory"),
    ],
)
def test_devices_that_cannot_run_a_kernel(kernel: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPACES[kernel].candidates(facts, T4)


@pytest.mark.parametrize("kernel", [kernel for kernel in SPACES if kernel != "fused"])  # which takes long
def test_candidates_compile(kernel: str) -> None:
    compile_tests = pytest.importorskip("test_gpu_compile")
    facts = SPACES[kernel].facts(100 if kernel == "cholesky_any" else 48, 4)[0]
    candidates = SPACES[kernel].candidates(facts, H200)
    one = candidates[len(candidates) // 2]
    for file, name, constants in SPACES[kernel].builds(facts, one.config)[:1]:
        log = compile_tests.compile_program(compile_tests.Program(file, constant_texts(constants), 90))
        assert name in {each.function for each in compile_tests.resources_of(log)}


def test_builds_are_what_is_launched(no_tables: Path) -> None:
    """A program that a trial compiles once more, alone, would be compiled in the timed part."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = Recording()
    space = SPACES["sparse_syrk"]
    facts = space.facts(5, 4)[0]
    one = space.candidates(facts, device.spec)[0]
    trials.MAKERS["sparse_syrk"](device, SAMPLE, facts).error(one)
    built = {(source_text(file), name, constant_texts(c)) for file, name, c in space.builds(facts, one.config)}
    assert set(device.asked) == built


class Recording(emulated.EmulatedDevice):
    """Remembers which programs were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []

    def kernel(self, source: str, name: str, constants: tuple[str, ...]) -> Any:
        self.asked.append((source, name, constants))
        return super().kernel(source, name, constants)
