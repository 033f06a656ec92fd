"""Search spaces of the tuner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.device.cuda import DeviceSpec
from hybridmf.gpu.fused import FusedKernels
from hybridmf.gpu.launch import constant_texts, program
from hybridmf.gpu.tuning import spaces
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.plan.fused import FusedConfig
from support import compiler, emulated
from support.tuning import GIB, H200, SAMPLE

pytestmark = pytest.mark.usefixtures("no_tables")

T4 = DeviceSpec("T4", 0, (7, 5), 40, 64 << 10, 4 << 20, 16 * GIB, 15 * GIB)
A40 = DeviceSpec("A40", 0, (8, 6), 84, 99 << 10, 6 << 20, 48 * GIB, 47 * GIB)

# ---------------------------------------------------------------------------------------------------- spaces


@settings(max_examples=8)
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
            first, *others = space.candidates(facts, spec)
        except ValueError:  # the device cannot run this kernel at all
            continue
        assert first == space.rule(facts, spec)
        assert len({first, *others}) == 1 + len(others)
        threads, _ = spaces.resident_limits(spec)
        for one in others:
            assert space.shared(facts, one) <= spec.shared_bytes
            resident = space._resident(facts, one, spec)
            assert one.threads <= 1024 and getattr(one, "blocks_per_sm", 1) <= resident
            assert spaces.LEAST_THREADS <= one.threads * resident <= threads
            reuse, useful = space.work(one)
            assert reuse >= spaces.LEAST_REUSE and useful > spaces.LEAST_USEFUL


SYRK_FACTS = {"rank": 48, "itemsize": 4}


@pytest.fixture(scope="module")
def syrk_candidates() -> list[Any]:
    """Thousands, which take long to enumerate."""
    return SPACES["sparse_syrk"].candidates(SYRK_FACTS, H200)


def test_every_shape_comes_before_any_second_of_its_kind(syrk_candidates: list[Any]) -> None:
    _, *others = syrk_candidates
    families = [(one.nb, one.dx, one.dy) for one in others]
    first_repeat = next(place for place, family in enumerate(families) if family in families[:place])
    assert set(families[:first_repeat]) == set(families)
    promises = [SPACES["sparse_syrk"].promise(SYRK_FACTS, one, H200) for one in others[:first_repeat]]
    assert promises == sorted(promises, reverse=True) and promises[-1] > 0


def test_correctness_constraints_of_the_paper(syrk_candidates: list[Any]) -> None:
    """Gates VIII: nb divisible by dx and dy; kb by what shares it; whole warps."""
    for one in syrk_candidates:
        assert one.nb % one.dx == one.nb % one.dy == one.kb % one.dz == 0
        assert one.dx * one.dy * one.dz % 32 == 0


def test_known_good_candidates_are_among_them() -> None:
    """What was faster in trials: a fifth block on a multiprocessor."""
    facts = {"rank": 32, "precision": "bf16", "solver": "cholesky"}
    assert FusedConfig(32, 1, 4, 3, 5) in SPACES["fused"].candidates(facts, H200)


@pytest.mark.parametrize(
    ("kernel", "factors", "itemsize"), [("fused", 129, 4), ("fused", 64, 8), ("cholesky_any", 64, 4)]
)
def test_kernels_that_do_not_apply_have_no_facts(kernel: str, factors: int, itemsize: int) -> None:
    assert SPACES[kernel].facts(factors, itemsize) == []


@pytest.mark.parametrize(
    ("kernel", "facts", "message"),
    [
        ("fused", {"rank": 8, "precision": "float32", "solver": "cg"}, "below 8.0"),
        ("bals", {"rank": 4096, "itemsize": 8}, "shared memory"),
    ],
)
def test_devices_that_cannot_run_a_kernel(kernel: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPACES[kernel].candidates(facts, T4)


def test_kernels_to_tune() -> None:
    """The kernels that "auto" chooses, Gates' sparse-syrk and BALS; facts of no others."""
    assert list(SPACES) == ["fused", "sparse_syrk", "bals", "cholesky_any", "cg_any"]


@pytest.mark.parametrize("kernel", SPACES)
def test_parameters_are_those_of_the_configuration(kernel: str) -> None:
    """No field of a configuration is left out, and none is named twice."""
    space = SPACES[kernel]
    names = [*space.given, *space.parameters, *(["blocks_per_sm"] if space.blocks else [])]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(space.config))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", [kernel for kernel in SPACES if kernel != "fused"])  # which takes long
def test_candidates_compile(kernel: str) -> None:
    facts = SPACES[kernel].facts(100 if kernel == "cholesky_any" else 48, 4)[0]
    candidates = SPACES[kernel].candidates(facts, H200)
    one = candidates[len(candidates) // 2]
    for file, name, constants in SPACES[kernel].programs(facts, one, H200)[0][:1]:
        log = compiler.compile_program(compiler.Program(file, constant_texts(constants), 90))
        assert name in {each.function for each in compiler.resources_of(log)}


@pytest.mark.parametrize("kernel", ["sparse_syrk", "bals", "cg_any"])
def test_builds_are_what_is_launched(kernel: str, no_tables: Path) -> None:
    """A program that a trial compiles once more, alone, would be compiled in the timed part."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = Recording()
    space = SPACES[kernel]
    facts = space.facts(5, 4)[0]
    one = space.candidates(facts, device.spec)[0]
    space.trial(device, SAMPLE, facts).error(one)
    built = {program(file, name, **constants) for file, name, constants in space.programs(facts, one, device.spec)[0]}
    assert {asked for asked in device.asked if asked[1] in {name for _, name, _ in built}} == built


def test_a_configuration_that_decides_nothing_is_not_tuned() -> None:
    """From rank 81 on, exact systems are summed and solved by kernels of their own."""
    tuned = [facts["solver"] for factors in (80, 81) for facts in SPACES["fused"].facts(factors, 4)]
    assert tuned == ["cholesky", "cg", "cholesky", "cg"]


def test_programs_of_the_fused_kernels_are_those_of_a_fit() -> None:
    for rank in (32, 100, 128):
        facts = {"rank": rank, "precision": "float32", "solver": "cholesky"}
        one = SPACES["fused"].candidates(facts, H200)[1]
        built = SPACES["fused"].programs(facts, one, H200)[0]
        kernels = FusedKernels(emulated.EmulatedDevice(), one)
        assert [program(file, name, **constants) for file, name, constants in built] == kernels.programs(False, False)


class Recording(emulated.EmulatedDevice):
    """Remembers which programs were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []

    def kernel(self, source: str, name: str, constants: tuple[str, ...]) -> Any:
        self.asked.append((source, name, constants))
        return super().kernel(source, name, constants)
