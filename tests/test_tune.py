"""The tuner: constraints, tables and their order, selection, the command; trials on the emulated device."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gpu_als import on_a_gpu, serve_cuda

from hybridmf._version import __version__
from hybridmf.cli import main
from hybridmf.core.cache import CACHE_DIR
from hybridmf.device.cuda import DeviceSpec, Resources
from hybridmf.errors import DeviceError, DeviceMemoryError
from hybridmf.gpu.cholesky_any import CgConfig, CholeskyConfig, TilesConfig
from hybridmf.gpu.launch import constant_texts, source_text
from hybridmf.gpu.mo_als import MoAlsConfig
from hybridmf.gpu.sgd import BlockedConfig, HogwildConfig
from hybridmf.gpu.sparse_syrk import SyrkConfig
from hybridmf.gpu.topk import GroupMaxConfig
from hybridmf.gpu.tuning import plots as tune_plots
from hybridmf.gpu.tuning import spaces, trials, tune
from hybridmf.gpu.tuning.spaces import SPACES, Candidate
from hybridmf.gpu.tuning.trials import Part, Sample
from hybridmf.gpu.tuning.tune import Measurement, make_jobs, table_of
from hybridmf.plan import assemblies as plan_assemblies
from hybridmf.plan import tables
from hybridmf.plan.assemblies import BalsConfig
from hybridmf.plan.ccd_gpu import CcdConfig, StagedConfig
from hybridmf.plan.fused import FusedConfig
from hybridmf.plan.tables import Entry, Gpu, Table

GIB = 1 << 30
H200 = DeviceSpec("NVIDIA H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 141 * GIB, 140 * GIB)
T4 = DeviceSpec("T4", 0, (7, 5), 40, 64 << 10, 4 << 20, 16 * GIB, 15 * GIB)
A40 = DeviceSpec("A40", 0, (8, 6), 84, 99 << 10, 6 << 20, 48 * GIB, 47 * GIB)
UNKNOWN = replace(H200, name="some other GPU", multiprocessors=99)

SAMPLE = Sample.draw(60, 40, 700)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No table of this user, and none that ships."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables._warn_once.cache_clear()
    return tmp_path


def table(entries: list[Entry], spec: DeviceSpec = H200, **changes: Any) -> Table:
    return replace(Table(Gpu.of(spec), tuple(entries)), **changes)


def entry(kernel: str = "sparse_syrk", facts: dict[str, Any] | None = None, **config: int) -> Entry:
    return Entry(kernel, facts or {"rank": 64, "itemsize": 4}, config or SYRK, 1.0, 1.5, 9)


SYRK = {"nb": 32, "kb": 16, "dx": 4, "dy": 4, "dz": 2, "stages": 2, "unroll": 1, "blocks_per_sm": 4}
OTHER = SYRK | {"kb": 32}


# ---------------------------------------------------------------------------------------------------- spaces


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_builds_are_what_is_launched(cache: Path) -> None:
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


# ---------------------------------------------------------------------------------------------------- tables


def test_silent_tables_leave_it_to_the_rule() -> None:
    assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)


def test_the_user_comes_before_what_ships() -> None:
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "h200.json")
    assert SyrkConfig.default(64, 4, H200) == SyrkConfig(64, 4, **SYRK)
    tables.store(table([entry(**OTHER)]), tables.user_file(H200))
    assert SyrkConfig.default(64, 4, H200) == SyrkConfig(64, 4, **OTHER)


def test_an_exact_entry_comes_before_a_near_one() -> None:
    tables.store(table([entry(facts={"rank": 62, "itemsize": 4}, **OTHER)]), tables.user_file(H200))
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "h200.json")
    assert SyrkConfig.default(64, 4, H200).kb == SYRK["kb"]
    assert SyrkConfig.default(61, 4, H200).kb == OTHER["kb"]


@pytest.mark.parametrize(("rank", "near"), [(57, True), (64, True), (56, False), (65, False)])
def test_ranks_share_an_entry_within_a_block_of_8(rank: int, near: bool) -> None:
    tables.store(table([entry(**SYRK)]), tables.user_file(H200))
    found = SyrkConfig.default(rank, 4, H200)
    assert found == (SyrkConfig(rank, 4, **SYRK) if near else SyrkConfig.rule(rank, 4, H200))


def test_other_facts_must_be_equal() -> None:
    tables.store(table([entry(**SYRK)]), tables.user_file(H200))
    assert SyrkConfig.default(64, 8, H200) == SyrkConfig.rule(64, 8, H200)


def test_gpus_alike_share_what_ships() -> None:
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "h200.json")
    assert SyrkConfig.default(64, 4, replace(H200, name="NVIDIA H100 80GB HBM3")).kb == SYRK["kb"]
    assert SyrkConfig.default(64, 4, UNKNOWN) == SyrkConfig.rule(64, 4, UNKNOWN)


def test_the_table_of_the_same_name_comes_first() -> None:
    h100 = replace(H200, name="H100")
    tables.store(table([entry(**OTHER)], h100), tables.SHIPPED / "a.json")
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "b.json")
    assert SyrkConfig.default(64, 4, H200).kb == SYRK["kb"]
    assert SyrkConfig.default(64, 4, h100).kb == OTHER["kb"]


CORRUPT = {
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe",
    "something else": b"[1, 2]",
    "another format": b'{"format": "x"}',
    "newer": json.dumps({"format": tables.FORMAT, "version": 99}).encode(),
    "no gpu": json.dumps({"format": tables.FORMAT, "version": 1, "entries": []}).encode(),
    "gpu": json.dumps({"format": tables.FORMAT, "version": 1, "gpu": 3, "entries": [], "hybridmf": "1"}).encode(),
    "kernel": table([replace(entry(), kernel=3)]).to_json().encode(),  # type: ignore[arg-type]
    "rank": table([entry(facts={"rank": "x", "itemsize": 4})]).to_json().encode(),
    "values": table([entry(nb="wide")]).to_json().encode(),  # type: ignore[arg-type]
    "rivals": table([replace(entry(), rivals=({"nb": "wide"},))]).to_json().encode(),
    "ms": table([replace(entry(), ms="fast")]).to_json().encode(),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_files_that_are_no_tables_are_ignored_with_a_warning(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tables.user_file(H200)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "hybridmf"):
        assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)
        assert SyrkConfig.default(32, 4, H200) == SyrkConfig.rule(32, 4, H200)
    assert len(caplog.records) == 1 and "hybridmf tune" in caplog.text and str(path) in caplog.text
    tables.store(table([entry(**SYRK)]), path)  # writes it anew
    assert SyrkConfig.default(64, 4, H200).kb == SYRK["kb"]


@pytest.mark.parametrize("foreign", [table([entry()], UNKNOWN), table([entry()], version="0.0.1")])
def test_tables_of_other_gpus_and_versions_are_ignored_with_a_warning(
    foreign: Table, caplog: pytest.LogCaptureFixture
) -> None:
    tables.store(foreign, tables.user_file(H200))
    with caplog.at_level(logging.WARNING, "hybridmf"):
        for _ in range(2):
            assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)
    assert len(caplog.records) == 1 and "ignored" in caplog.text


def test_entries_that_cannot_work_leave_it_to_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    broken = entry(**SYRK | {"nb": 30}), entry("fused", {"rank": 64, "precision": "float32", "solver": "cg"}, warps=3)
    tables.store(table(list(broken)), tables.user_file(H200))
    with caplog.at_level(logging.WARNING, "hybridmf"):
        assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)
        assert FusedConfig.default(64, H200, "float32", "cg") == FusedConfig.rule(64)
    assert len(caplog.records) == 2 and "cannot be used" in caplog.text


def test_entries_too_large_for_a_device_leave_it_to_the_rule() -> None:
    """The same name with less shared memory."""
    small = replace(H200, shared_bytes=20 << 10)
    wide = {"warps": 1, "teams": 2, "stages": 3, "blocks_per_sm": 4}
    given = [
        entry("fused", {"rank": 64, "precision": "float32", "solver": "cholesky"}, **wide),
        entry(**SYRK | {"stages": 3, "kb": 64, "nb": 64, "dx": 8, "dy": 8}),
    ]
    tables.store(table(given), tables.SHIPPED / "h200.json")
    assert FusedConfig.default(64, H200) == FusedConfig(64, **wide)
    assert FusedConfig.default(64, small) == FusedConfig.rule(64)
    assert SyrkConfig.default(64, 4, small) == SyrkConfig.rule(64, 4, small)


def test_storing_keeps_entries_for_other_facts() -> None:
    path = tables.user_file(H200)
    first, second = entry(**SYRK), entry(facts={"rank": 32, "itemsize": 4}, **SYRK)
    tables.store(table([first, second]), path)
    tables.store(table([entry(**OTHER)]), path)
    assert tables.read_table(path).entries == (entry(**OTHER), second)
    tables.store(table([first], UNKNOWN), path)  # of another kind: nothing to keep
    assert tables.read_table(path).entries == (first,)


RANK_64 = {"rank": 64, "itemsize": 4}


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        pytest.param({"ms": 1.0}, {"ms": 0.5, "measured": 1}, "old", id="timed alone"),
        pytest.param({"ms": 1.5, "measured": 1}, {"ms": 1.5}, "new", id="the old one was timed alone"),
        pytest.param({"ms": 1.0}, {"ms": 1.2, "rivals": (SYRK,)}, "new", id="the old one has lost to it"),
        pytest.param({"ms": 1.0}, {"ms": 1.2}, "old", id="gains less over the rule"),
        pytest.param({"ms": 1.0}, {"ms": 0.6, "rule_ms": 0.7}, "old", id="gains less, on a faster clock"),
        pytest.param({"ms": 1.0}, {"ms": 0.9}, "new", id="gains more over the rule"),
    ],
)
def test_storing_keeps_the_better_entry(old: dict[str, Any], new: dict[str, Any], kept: str) -> None:
    path = tables.user_file(H200)
    entries = {
        "old": replace(Entry("sparse_syrk", RANK_64, SYRK, 1.0, 1.5, 9), **old),
        "new": replace(Entry("sparse_syrk", RANK_64, OTHER, 1.0, 1.5, 9), **new),
    }
    tables.store(table([entries["old"]]), path)
    tables.store(table([entries["new"]]), path)
    assert tables.read_table(path).entries == (entries[kept],)


def test_the_same_configuration_is_recorded_anew() -> None:
    path, slower = tables.user_file(H200), replace(entry(**SYRK), ms=1.3)
    tables.store(table([entry(**SYRK)]), path)
    tables.store(table([slower]), path)
    assert tables.read_table(path).entries == (slower,)


def test_what_tables_say_is_found_once() -> None:
    far = entry(facts={"rank": 62, "itemsize": 4}, **SYRK | {"kb": 8})
    tables.store(table([far]), tables.user_file(H200))
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "h200.json")
    found = tables.known("sparse_syrk", H200, RANK_64)
    assert [config["kb"] for config in found] == [SYRK["kb"], 8]  # exact first, as fits take them
    beside = table([entry(**OTHER), entry(facts={"rank": 32, "itemsize": 4}, **SYRK)])
    assert tables.known("sparse_syrk", H200, RANK_64, beside=beside) == [*found, OTHER]
    assert tables.known("sparse_syrk", H200, RANK_64, beside=table([entry(**SYRK)])) == found
    assert tables.known("mo_als", H200, RANK_64) == []


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.builds(
            Entry,
            st.text(),
            st.dictionaries(st.text(), st.integers() | st.booleans() | st.text()).map(
                lambda facts: {k: v for k, v in facts.items() if k != "rank"}
            ),
            st.dictionaries(st.text(), st.integers() | st.booleans()),
            st.floats(allow_nan=False, allow_infinity=False),
            st.floats(allow_nan=False, allow_infinity=False),
            st.integers(),
            st.lists(st.dictionaries(st.text(), st.integers())).map(tuple),
        )
    )
)
def test_tables_survive_their_files(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    path = tmp_path_factory.mktemp("table") / "t.json"
    tables.store(table(entries), path, merge=False)
    assert tables.read_table(path) == table(entries)


def test_every_kernel_takes_its_table() -> None:
    """What the enumerations store is what each configuration class makes of it."""
    chosen = {}
    for kernel, space in SPACES.items():
        factors = 100 if kernel == "cholesky_any" else 64
        facts = space.facts(factors, 4)[0]
        chosen[kernel] = facts, space.candidates(facts, H200)[3]
    entries = [Entry(kernel, facts, one.values, 1.0, 2.0, 4) for kernel, (facts, one) in chosen.items()]
    tables.store(table(entries), tables.user_file(H200))
    found = {
        "fused": FusedConfig.default(64, H200),
        "sparse_syrk": SyrkConfig.default(64, 4, H200),
        "mo_als": MoAlsConfig.default(64, 4, H200),
        "bals": BalsConfig.default(64, 4, H200),
        "cholesky_tiles": TilesConfig.default(64, H200),
        "cholesky_any": CholeskyConfig.default(100, 4, H200),
        "cg_any": CgConfig.default(64, 4, H200),
        "msgd": BlockedConfig.default(64, 4, H200),
        "batch_hogwild": HogwildConfig.default(H200, 64, 2, False),
        "top_k": GroupMaxConfig.default(64, H200),
    }
    assert found == {kernel: one.config for kernel, (_, one) in chosen.items() if kernel != "ccd"}
    staged = CcdConfig.choose(1000, 1000, 10**6, 2, np.float32, H200)
    assert StagedConfig(staged.threads, staged.segment) == chosen["ccd"][1].config
    assert plan_assemblies.bals_tile_sizes(64, 4, H200) == spaces.bals_tile(chosen["bals"][1])
    for kernel, (facts, one) in chosen.items():  # and what the tuner makes of an entry
        assert SPACES[kernel].named(facts, H200, **one.values) == one
    wide = found["bals"].capacity + 1  # does not hold such tiles: the rule
    assert BalsConfig.default(64, 4, H200, tile_cols=wide) == BalsConfig.rule(64, 4, H200, tile_cols=wide)


def test_what_ships_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tables.__file__).with_name("tuned")
    monkeypatch.setattr(tables, "SHIPPED", folder)
    for path in folder.glob("*.json"):
        shipped = tables.read_table(path)
        gpu = shipped.gpu
        assert path.name == gpu.file_name
        spec = replace(H200, **vars(gpu))
        for one in shipped.entries:
            space = SPACES[one.kernel]
            numbers = [one.facts[name] for name in ("rank", "ld", "padded") if name in one.facts]
            assert one.facts in space.facts(*(numbers or [64]), 4) + space.facts(*(numbers or [64]), 8)
            assert one.ms <= one.rule_ms
            assert tables.tuned(one.kernel, spec, one.facts) == (one.config, True)
            assert space.named(one.facts, spec, **one.config).values == one.config


def test_neighbours_of_what_ships_run_the_program_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with as many blocks of 8 takes its neighbour's entry: as many tiles in the same kernel, the rule's too."""
    folder = Path(tables.__file__).with_name("tuned")
    monkeypatch.setattr(tables, "SHIPPED", folder)
    shipped = tables.read_table(folder / Gpu.of(H200).file_name)
    entries = [one for one in shipped.entries if one.kernel == "sparse_syrk"]
    assert len(entries) >= 6
    for one in entries:
        timed = SyrkConfig.default(**one.facts, spec=H200)
        replaced = SyrkConfig.rule(**one.facts, spec=H200)
        assert vars(timed) == one.facts | one.config
        assert timed != replaced
        for rank in range(timed.rank - 7, timed.rank):
            near, rule = SyrkConfig.default(rank, timed.itemsize, H200), SyrkConfig.rule(rank, timed.itemsize, H200)
            assert (near, rule) == (replace(timed, rank=rank), replace(replaced, rank=rank))
            assert (near.tiles, near.shared_bytes) == (timed.tiles, timed.shared_bytes)
            assert (rule.tiles, rule.shared_bytes) == (replaced.tiles, replaced.shared_bytes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (FusedConfig(100, 2, 1, 4, 4), {"rank": 129}, "rank must be in 1 ... 128"),
        (FusedConfig(100, 2, 1, 4, 4), {"warps": 3}, "warps must be 1, or 2 or 4"),
        (FusedConfig(100, 2, 1, 4, 4), {"rank": 64}, "warps must be 1, or 2 or 4"),
        (FusedConfig(100, 2, 1, 4, 4), {"teams": 2}, "teams must be 1"),
        (FusedConfig(100, 2, 1, 4, 4), {"stages": 1}, "stages must be at least 2"),
        (TilesConfig(64, 4, 2), {"rank": 65}, "rank must be in 1 ... 64"),
        (TilesConfig(64, 4, 2), {"teams": 33}, "teams must be in 1 ... 32"),
        (CgConfig(64, 4, 2, True, 2), {"warps": 3}, "warps must be a power of two"),
        (CgConfig(64, 4, 2, True, 2), {"itemsize": 2}, "itemsize must be 4"),
        (StagedConfig(768, 2048), {"threads": 1000}, "threads must be a multiple of 32"),
        (StagedConfig(768, 2048), {"segment": 100}, "segment must be a multiple of the 128"),
        (GroupMaxConfig(64, 64, 2), {"users_per_warp": 8}, "users_per_warp must be 16, 32 or 64"),
        (GroupMaxConfig(64, 64, 2), {"tile_groups": 3}, "tile_groups must be 1, 2, 4 or 8"),
    ],
)
def test_impossible_configurations_say_why(config: Any, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_heights_of_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="height must be at least 1"):
        plan_assemblies._bals_and_height(height=0)


# ---------------------------------------------------------------------------------------------------- selection


class Acted(emulated.EmulatedDevice):
    """Compiles nothing, and says what programs take."""

    def __init__(self, spills: dict[int, int] | None = None, broken: tuple[int, ...] = (), dies: bool = False) -> None:
        super().__init__()
        self.spills, self.broken, self.dies, self.dead = spills or {}, broken, dies, False

    def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
        kb = next(int(text[3:]) for text in constants if text.startswith("KB="))
        if kb in self.broken:
            raise DeviceError("does not compile")
        implicit = "IMPLICIT=1" in constants
        return Resources(64, self.spills.get(-kb if implicit else kb, 0))

    def synchronize(self) -> None:
        if self.dead:
            raise DeviceError("illegal address")


class ActedTrial:
    """Answers without a kernel; the parts carry their kb."""

    tolerance = 1e-5

    def __init__(self, wrong: tuple[int, ...] = (), raises: tuple[int, ...] = (), device: Acted | None = None) -> None:
        self.wrong, self.raises, self.device = wrong, raises, device

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        run = replace(Part(lambda: None), flops=float(candidate.values["kb"]))
        return {"user": run, "item": run}

    def error(self, candidate: Candidate) -> float:
        kb = candidate.values["kb"]
        if kb in self.raises:
            if self.device is not None:
                self.device.dead = self.device.dies
            raise DeviceError("launch failed")
        return math.nan if kb in self.wrong else 1e-7


FACTS = {"rank": 64, "itemsize": 4}
KBS = (32, 4, 8, 16)
"""Of the rule, and of what else is tried."""


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``acted(device, ms, **trial)``: one job over a few configurations that take the given milliseconds."""

    def run(device: Acted, ms: dict[int, float], *, most: int | None = None, **trial: Any) -> Any:
        rule = SPACES["sparse_syrk"].rule(FACTS, H200)
        others = [replace(rule, config=replace(rule.config, kb=kb), values=rule.values | {"kb": kb}) for kb in KBS]
        monkeypatch.setattr(spaces.Space, "candidates", lambda self, facts, spec: others)
        monkeypatch.setitem(trials.MAKERS, "sparse_syrk", lambda *_: ActedTrial(device=device, **trial))

        def timer(_: Any, part: Part, repeats: int) -> list[float]:
            return [ms[int(part.flops)]] * repeats

        jobs = list(tune.tune(device, ["sparse_syrk"], [64], sample=SAMPLE, timer=timer, num_threads=1, most=most))
        assert len(jobs) == 1
        return jobs[0]

    return run


def statuses(job: Any) -> dict[int, str]:
    return {one.candidate.values["kb"]: one.status for one in job.measurements}


def test_the_fastest_wins(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.candidate.values["kb"] == 8
    assert job.entry == Entry("sparse_syrk", FACTS, job.winner.candidate.values, 1.0, 2.0, 4)
    assert "1.000 ms instead of 2.000" in job.summary()
    (line,) = [line for line in job.lines() if line["winner"]]
    assert line["config"]["kb"] == 8 and not line["rule"] and line["gflops"]["user"] == pytest.approx(8 / 1.0 / 1e6)
    assert json.loads(json.dumps(list(job.lines())))[0]["rule"]


def test_the_rule_stays_where_little_is_gained(acted: Any) -> None:
    job = acted(Acted(), {32: 1.0, 4: 0.995, 8: 1.0, 16: 1.1})
    assert job.winner is job.measurements[0]
    assert job.entry.ms == job.entry.rule_ms == 1.0
    assert "the rule's choice stays" in job.summary()


def test_what_spills_fails_or_is_wrong_is_recorded_and_not_chosen(acted: Any) -> None:
    device = Acted(spills={8: 40}, broken=(4,))
    job = acted(device, {32: 2.0, 4: 0.1, 8: 0.1, 16: 0.1}, wrong=(16,))
    assert statuses(job) == {32: "timed", 4: "failed", 8: "spills", 16: "wrong"}
    reasons = {one.status: one.reason for one in job.measurements}
    assert "40 bytes of local memory" in reasons["spills"] and "nan beyond" in reasons["wrong"]
    assert "does not compile" in reasons["failed"]
    assert job.winner is job.measurements[0]


def test_what_the_rule_spills_others_may_too(acted: Any) -> None:
    job = acted(Acted(spills={32: 44, 8: 44, 4: 48}), {32: 2.0, 4: 0.1, 8: 1.0, 16: 1.5})
    assert statuses(job)[4] == "spills" and job.winner.candidate.values["kb"] == 8


def test_a_winner_must_not_spill_for_other_entries(acted: Any) -> None:
    job = acted(Acted(spills={-8: 16}), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.candidate.values["kb"] == 16
    assert statuses(job)[8] == "spills"


def test_a_failed_launch_is_recorded(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, raises=(8,))
    assert statuses(job)[8] == "failed" and job.winner.candidate.values["kb"] == 16


def test_a_device_that_does_not_recover_ends_it(acted: Any) -> None:
    with pytest.raises(DeviceError, match="does not work any more after sparse_syrk, rank 64"):
        acted(Acted(dies=True), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, raises=(8,))


def test_a_rule_that_fails_leaves_the_others(acted: Any) -> None:
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1}, wrong=(32,))
    assert job.winner.candidate.values["kb"] == 8
    job = acted(Acted(), {32: 2.0}, wrong=KBS)
    assert job.winner is None and job.entry is None and "nothing could be timed" in job.summary()
    job = acted(Acted(broken=(32,)), {})
    assert job.winner is None and "the rule's configuration does not compile" in job.summary()
    assert not table_of(Acted(), [job]).entries


def test_memory_that_does_not_suffice_skips_a_job(acted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise DeviceMemoryError("out of memory")

    monkeypatch.setitem(trials.MAKERS, "mo_als", full)
    (job,) = tune.tune(emulated.EmulatedDevice(), ["mo_als"], [4], sample=SAMPLE, most=1)
    assert job.reason == "not tuned: out of memory"


def known_kb(kb: int) -> dict[str, int]:
    """An entry in the user's table for the emulated device; the configuration it has."""
    config: dict[str, int] = SPACES["sparse_syrk"].rule(FACTS, H200).values | {"kb": kb}
    spec = emulated.EmulatedDevice().spec
    tables.store(table([entry(facts=FACTS, **config)], spec), tables.user_file(spec))
    return config


def test_what_tables_have_is_always_timed(acted: Any) -> None:
    known = known_kb(64)  # none of those that are enumerated
    job = acted(Acted(), {32: 2.0, 64: 1.2, 4: 1.5, 8: 1.0, 16: 1.1}, most=1)
    assert list(statuses(job)) == [32, 64] and job.candidates == 5
    assert job.winner.candidate.values == known
    assert "the table's choice stays" in job.summary()
    assert [line["known"] for line in job.lines()] == [False, True]
    job = acted(Acted(), {32: 2.0, 64: 1.2, 4: 1.5, 8: 1.0, 16: 1.1})
    assert job.winner.candidate.values["kb"] == 8 and job.entry.rivals == (known,)


def test_what_is_in_a_table_must_be_beaten_clearly(acted: Any) -> None:
    known_kb(8)
    job = acted(Acted(), {32: 2.0, 4: 0.995, 8: 1.0, 16: 1.1})
    assert job.winner.candidate.values["kb"] == 8
    job = acted(Acted(), {32: 2.0, 4: 0.98, 8: 1.0, 16: 1.1})
    assert job.winner.candidate.values["kb"] == 4


def test_a_table_that_is_slow_by_now_is_in_the_finals_and_loses(acted: Any) -> None:
    known_kb(16)
    job = acted(Acted(), {32: 1.0, 4: 1.5, 8: 1.2, 16: 9.0})
    assert job.winner is job.measurements[0] and statuses(job)[16] == "timed"
    job = acted(Acted(broken=(16,)), {32: 2.0, 4: 1.5, 8: 1.0})
    assert statuses(job)[16] == "failed" and job.winner.candidate.values["kb"] == 8


def test_entries_that_no_class_takes_are_passed_over(acted: Any) -> None:
    spec = emulated.EmulatedDevice().spec
    broken = entry(facts=FACTS, **SYRK | {"nb": 30}), entry("mo_als", FACTS, **SYRK)
    tables.store(table(list(broken), spec), tables.user_file(spec))
    job = acted(Acted(), {32: 2.0, 4: 1.5, 8: 1.0, 16: 1.1})
    assert list(statuses(job)) == [32, 4, 8, 16] and job.entry.rivals == (broken[0].config,)


class Clock:
    """Seconds that pass by what is timed alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hybridmf.gpu.tuning.tune.time.monotonic", lambda: self.now)

    def timer(self, seconds: float) -> Any:
        """A `tune.Timer` under which each part takes so many seconds and as many milliseconds."""

        def run(_: Any, part: Part, repeats: int) -> list[float]:
            self.now += seconds
            return [seconds] * repeats

        return run


@pytest.fixture
def timetable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``timetable(kernels, budget)``: the jobs of a run in which nothing is run and each timing takes a second."""

    def run(kernels: list[str], budget: float, ranks: Sequence[int] = (16, 32)) -> list[Any]:
        clock = Clock(monkeypatch)
        for kernel in kernels:
            monkeypatch.setitem(trials.MAKERS, kernel, lambda *_: ActedTrial())
        monkeypatch.setattr(ActedTrial, "parts", lambda *_: {"user": Part(lambda: None)})
        monkeypatch.setattr(ActedTrial, "error", lambda *_: 0.0)
        monkeypatch.setattr(Acted, "resources", lambda *_: Resources(64, 0))
        timing: Any = {"timer": clock.timer(1.0), "budget": budget, "num_threads": 1}
        return list(tune.tune(Acted(), kernels, ranks, sample=SAMPLE, **timing))

    return run


def test_a_budget_is_shared_by_weight_and_what_is_left_passes_on(timetable: Any) -> None:
    jobs = timetable(["sparse_syrk", "mo_als"], 300.0, ranks=[16])
    finals = 2.0 * tune.FINAL_ROUNDS * (tune.FINALISTS + 1)  # which begin within a share, and may end after it
    assert [job.seconds for job in jobs] == [pytest.approx(200.0, abs=finals), pytest.approx(100.0, abs=finals)]
    assert all(len(job.timed) < job.candidates for job in jobs)
    few, many = timetable(["msgd", "mo_als"], 300.0, ranks=[16])
    assert len(few.timed) == few.candidates and few.seconds < 0.9 * 300.0 * 0.5 / 1.5
    assert many.seconds == pytest.approx(300.0 - few.seconds, abs=finals)


def test_a_short_budget_gives_each_kernel_something(timetable: Any) -> None:
    jobs = timetable(["sparse_syrk", "mo_als", "msgd"], 120.0)
    assert [(job.space.kernel, job.factors) for job in jobs] == [
        (kernel, rank) for rank in (16, 32) for kernel in ("sparse_syrk", "mo_als", "msgd")
    ]
    assert all(len(job.timed) >= 1 + tune.FEWEST for job in jobs[:3])


def test_jobs_that_come_too_late_are_named(timetable: Any) -> None:
    first, *others = timetable(["sparse_syrk", "mo_als", "msgd"], 5.0)
    assert 1 <= len(first.timed) < 1 + tune.FEWEST
    for job in others:
        assert not job.measurements and job.entry is None
        assert "not tuned: the budget of 5 s is spent" in job.summary()


def test_the_next_rule_is_compiled_ahead_of_other_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    class Watched(Acted):
        def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
            compiled.append(name)
            return Resources(64, 0)

    for kernel in ("sparse_syrk", "mo_als"):
        monkeypatch.setitem(trials.MAKERS, kernel, lambda *_: ActedTrial())
    monkeypatch.setattr(ActedTrial, "parts", lambda *_: {"user": Part(lambda: None)})
    monkeypatch.setattr(ActedTrial, "error", lambda *_: 0.0)
    timer = Clock(monkeypatch).timer(1.0)
    list(tune.tune(Watched(), ["sparse_syrk", "mo_als"], [16], sample=SAMPLE, timer=timer, num_threads=1, most=3))
    assert compiled[:4] == ["sparse_syrk", "mo_als", "sparse_syrk", "sparse_syrk"]


def test_what_was_timed_alone_is_not_kept(timetable: Any) -> None:
    job, *_ = timetable(["sparse_syrk"], 1.0)
    assert len(job.timed) == 1 and job.winner is job.measurements[0]
    assert job.entry is None and "nothing to compare it with" in job.summary()
    assert table_of(Acted(), [job]).entries == ()


def test_the_slow_are_timed_once() -> None:
    counted: list[int] = []

    def timer(_: Any, part: Part, repeats: int) -> list[float]:
        counted.append(repeats)
        return [9.0] * repeats

    run = tune._Run(Acted(), timer, None, None)
    runner = tune._Runner(run, make_jobs(["sparse_syrk"], [64], 4)[0], None)  # type: ignore[arg-type]
    runner.best = 1.0
    one = Measurement(SPACES["sparse_syrk"].rule(FACTS, H200), "timed")
    runner._time(ActedTrial(), one)
    assert counted == [1, 1] and one.ms == {"user": 9.0, "item": 9.0}


def test_scores_are_geometric_means() -> None:
    rule = SPACES["sparse_syrk"].rule(FACTS, H200)
    assert Measurement(rule, "timed", ms={"user": 2.0, "item": 8.0}).score == pytest.approx(4.0)
    assert Measurement(rule, "failed").score == math.inf


def test_jobs_are_made_once() -> None:
    assert [job.facts for job in make_jobs(["ccd"], [32, 64], 4)] == SPACES["ccd"].facts(32, 4)
    assert len(make_jobs(["top_k", "top_k"], [97, 112], 4)) == 1
    kernels = {job.space.kernel for job in make_jobs(None, [32, 128], 4)}
    assert kernels == set(SPACES) == set(trials.MAKERS)


def test_kernels_take_turns_and_their_usual_kinds_come_first() -> None:
    jobs = make_jobs(["fused", "top_k"], [32, 64], 4)
    names = [(job.space.kernel, job.factors) for job in jobs[:4]]
    assert names == [("fused", 32), ("top_k", 32), ("fused", 64), ("top_k", 64)]
    fused = [(job.facts["precision"], job.facts["solver"], job.factors) for job in jobs if job.space.kernel == "fused"]
    assert fused == [(*kind, f) for kind in spaces.FUSED_KINDS for f in (32, 64)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ["sgemm"]}, "kernel must be one of .*fused"),
        ({"factors": [0]}, "factors must satisfy factors >= 1, got 0"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"budget": 0}, "budget must be"),
        ({"most": 0}, "most must satisfy most >= 1"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.tune(emulated.EmulatedDevice(), **changes)


# ---------------------------------------------------------------------------------------------------- trials


def test_the_sample_is_what_it_says() -> None:
    matrix = SAMPLE.user_items
    assert matrix.shape == (60, 40) and 0 < matrix.nnz <= 700
    assert set(np.unique(matrix.data)) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    assert (SAMPLE.item_users != matrix.T).nnz == 0
    assert matrix.has_canonical_format and matrix.indices.dtype == np.int32
    doubled = SAMPLE.side("item", 8)
    assert doubled.dtype == np.float64 and doubled.indices.dtype == np.int32
    few = trials.subset(matrix, 7)
    assert few.shape == (7, 40) and few.indices.dtype == np.int32
    np.testing.assert_array_equal(few.toarray(), matrix.toarray()[np.linspace(0, 59, 7).astype(int)])


SMALL = {"sparse_syrk": 5, "bals": 5, "cholesky_tiles": 5, "ccd": 5}
"""Kernels that are quick to emulate."""


@pytest.mark.parametrize("kernel", SMALL)
def test_trials_know_right_answers_from_wrong_ones(kernel: str, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.SystemsTrial, "most", 6)
    space = SPACES[kernel]
    facts = space.facts(SMALL[kernel], 4)[0]
    trial = trials.MAKERS[kernel](device, SAMPLE, facts)
    one = space.candidates(facts, device.spec)[0]
    error = trial.error(one)
    assert 0 < error <= trial.tolerance
    parts = trial.parts(one)
    assert all(part.flops > 0 for part in parts.values())
    assert all(ms > 0 for part in parts.values() for ms in tune.event_times(device, part, 1))
    monkeypatch.setattr(trial, "_run", lambda *_: None)
    assert not trial.error(one) <= trial.tolerance


def test_a_job_on_the_emulated_device(device: Any) -> None:
    (job,) = tune.tune(device, ["sparse_syrk"], [5], sample=SAMPLE, most=2, num_threads=2)
    assert [one.status for one in job.measurements] == ["timed", "timed"]
    assert job.winner in job.measurements
    assert table_of(device, [job]).gpu == Gpu.of(device.spec)


def test_msgd_needs_a_row_to_check() -> None:
    long = Sample.draw(2000, 2, 4000)
    with pytest.raises(ValueError, match="no item with 1 to 600 entries"):
        trials.BlockedTrial(emulated.EmulatedDevice(), long, {"ld": 8, "itemsize": 4})


@on_a_gpu
@pytest.mark.parametrize("kernel", SPACES)
def test_every_kernel_is_tuned_on_a_gpu(device: Any, kernel: str) -> None:
    sample = Sample.draw(3000, 500, 60_000)
    jobs = list(tune.tune(device, [kernel], [100 if kernel == "cholesky_any" else 32], sample=sample, most=3))
    assert jobs
    for job in jobs:
        assert job.winner is not None, job.summary()
        assert not [one for one in job.measurements if one.status in ("failed", "wrong")], list(job.lines())
        assert all(one.resources.registers > 0 for one in job.timed)
    tables.store(table_of(device, jobs), tables.user_file(device.spec))
    for job in jobs:
        if job.entry is not None:  # the rule's may be all that is sound of so few
            assert tables.tuned(kernel, device.spec, job.facts) == (job.entry.config, True)


@on_a_gpu
def test_spills_are_seen_on_a_gpu(device: Any) -> None:
    body = "float a[64] = {}; for (int k = 0; k < 99; ++k) a[k * index & 63] += out[k]; out[0] = a[index & 63];"
    found = device.resources(f'extern "C" __global__ void f(float* out, int index) {{ {body} }}', "f", ())
    assert found.local_bytes >= 256 and found.registers > 0


# ---------------------------------------------------------------------------------------------------- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["tune", *arguments])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device for the command, and a sample that takes no time."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    device = emulated.EmulatedDevice()
    monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda *_: device)
    monkeypatch.setattr(Sample, "draw", lambda: SAMPLE)
    return device


def test_the_command_keeps_what_it_finds(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines, plots = tmp_path / "lines.jsonl", tmp_path / "plots"
    options = ("--kernel", "sparse_syrk", "--factors", "5", "--most", "2", "--lines", str(lines), "--plot", str(plots))
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    path = tables.user_file(gpu.spec)
    assert f"kept in {path}" in result.output and "sparse_syrk, rank 5" in result.output
    (kept,) = tables.read_table(path).entries
    assert kept.facts == {"rank": 5, "itemsize": 4}
    assert vars(SyrkConfig.default(5, 4, gpu.spec)) == kept.facts | kept.config
    measured = tune_plots.read_lines(lines)
    assert len(measured) == 2 and measured[0]["gpu"]["name"] == "emulated"
    assert measured[0]["versions"] == {"hybridmf": __version__}
    assert [plot.suffix for plot in plots.iterdir()] == [".svg"]
    path.unlink()
    mine = tmp_path / "mine.json"
    invoke("--kernel", "sparse_syrk", "--factors", "5", "--most", "2", "-o", str(mine))
    (kept,) = tables.read_table(mine).entries
    result = invoke("--kernel", "sparse_syrk", "--factors", "5", "--most", "1", "-o", str(mine), "--lines", str(lines))
    assert result.exit_code == 0, result.output
    assert kept.config in [line["config"] for line in tune_plots.read_lines(lines)[2:]]  # the file's entry is timed
    assert len(tables.read_table(mine).entries) == 1


def test_what_was_found_before_an_interruption_is_kept(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: Any, *_: Any, **__: Any) -> Any:
        job = make_jobs(["sparse_syrk"], [64], 4)[0]
        job.measurements = [Measurement(SPACES["sparse_syrk"].rule(FACTS, H200), "timed", ms={"user": 1.0})] * 2
        job.winner = job.measurements[0]
        yield job
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    assert invoke().exit_code == 130
    assert len(tables.read_table(tables.user_file(gpu.spec)).entries) == 1


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise DeviceError("there is no NVIDIA driver")

    monkeypatch.setattr("hybridmf.device.cuda.open_device", none)
    result = invoke()
    assert result.exit_code == 2
    assert "tune measures kernels on a GPU, and none can be used here: there is no NVIDIA driver" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--factors", "32,many"), "must be numbers with commas between"),
        (("--kernel", "sgemm"), "kernel must be one of"),
        (("--budget", "0"), "budget must be"),
        (("-o", "/no/such/folder/x.json"), "does not exist"),
    ],
)
def test_mistakes_of_the_command(gpu: Any, options: tuple[str, ...], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2 and message in result.output
    assert not tables.user_file(gpu.spec).exists()


# ---------------------------------------------------------------------------------------------------- figures


def cloud_line(factors: int, nb: int, user: float, winner: bool = False, **changes: Any) -> dict[str, Any]:
    line = {"bench": "tune", "kernel": "sparse_syrk", "factors": factors, "facts": {"rank": factors, "itemsize": 4}}
    line |= {"config": {"nb": nb, "kb": 8}, "winner": winner, "status": "timed"}
    return line | {"gflops": {"user": user, "item": 2 * user}} | changes


def test_clouds_name_what_is_best_at_some_rank() -> None:
    lines = [cloud_line(f, nb, 100.0 - abs(f - nb)) for f in (8, 16, 24) for nb in (8, 16, 32)]
    assert tune_plots.best_at_some_rank(lines, "user") == ["(8, 8)", "(16, 8)"]
    pytest.importorskip("matplotlib")
    spilled = cloud_line(8, 99, 1e9, status="spills")
    figures = tune_plots.clouds([*lines, spilled, {"bench": "tiles"}, cloud_line(8, 8, 1.0, kernel="mo_als")])
    assert list(figures) == ["sparse_syrk-itemsize-4", "mo_als-itemsize-4"]
    user, item = figures["sparse_syrk-itemsize-4"].axes
    assert (user.get_title(), item.get_title()) == ("user", "item")
    assert len(user.lines) == 3 + 2  # each configuration in gray, the best in color


def test_heat_maps_have_a_cell_for_each_tile(tmp_path: Path) -> None:
    lines = [
        {"bench": "tiles", "variant": "chip", "shape": "ml-1m", "factors": 32, "order": order, "gates_gflops": 9.0,
         "tile_rows": rows, "tile_cols": columns, "gflops": float(rows + columns)}
        for order in ("given", "by degree") for rows in (256, 768) for columns in (144, 160, 176)
        if (rows, columns) != (768, 160)
    ]  # fmt: skip
    heights, widths, grid = tune_plots.as_grid(lines)
    assert (heights, widths) == ([256, 768], [144, 160, 176])
    np.testing.assert_array_equal(grid, [[400, 912], [416, np.nan], [432, 944]])
    pytest.importorskip("matplotlib")
    paths = tune_plots.save_all(tune_plots.heat_maps(lines), tmp_path / "figures")
    assert [path.name for path in paths] == ["tiles-chip-ml-1m-32.svg"]
    assert paths[0].read_text() == tune_plots.save_all(tune_plots.heat_maps(lines), tmp_path)[0].read_text()


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    for text in ('{"a": 1}\nno', '{"a": 1}\n[2]'):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match="line 2"):
            tune_plots.read_lines(tmp_path / "x.jsonl")


def test_figures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hybridmf\[plot\]"):
        tune_plots.make_figure(1, 1)


# ---------------------------------------------------------------------------------------------------- evidence


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/paper_tuning.py with its results and page elsewhere."""
    folder = Path(__file__).parents[1] / "bench"
    if not (folder / "paper_tuning.py").is_file():
        pytest.skip("bench/ is not here")
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("paper_tuning")
    page = tmp_path / "tuning.md"
    page.write_text(module.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(module, "FIGURES", tmp_path / "figures")
    return module


def test_the_page_is_made_from_the_lines(paper: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpu = {"gpu": {"name": "Some GPU"}, "rule": False}
    tile = {"bench": "tiles", "shape": "ml-10m", "factors": 32, "order": "given", "gates_gflops": 500.0, **gpu}
    tile |= {"tile_cols": 144}
    lines = [
        cloud_line(8, 24, 900.0, True, ms={"user": 1.0, "item": 1.0}, run="before", **gpu),
        cloud_line(8, 8, 200.0, True, ms={"user": 1.0, "item": 4.0}, **gpu),
        cloud_line(8, 16, 1.0, ms={"user": 8.0, "item": 32.0}, **(gpu | {"rule": True})),
        cloud_line(8, 24, 1.0, status="spills", **gpu),
        cloud_line(8, 8, 150.0, kernel="mo_als", ms={"user": 9.0, "item": 9.0}, **gpu),
        tile | {"variant": "chip", "tile_rows": 256, "gflops": 1.0},  # measured again in the last line
        tile | {"variant": "chip", "tile_rows": 768, "gflops": 800.0},
        tile | {"variant": "chip", "tile_rows": 256, "gflops": 900.0},
    ]
    paper.report(lines)
    text = paper.PAGE.read_text(encoding="utf-8")
    assert "| 8 | 2 | 1 | (8, 8) | 200 | 400 | 8.0 x |" in text
    assert "| 8 | 8.00 | 8.00 | 8.00 | ships |" in text
    assert "| ml-10m | sums on chip | given | (256, 144) | 900 | (768, 144) | 800 | 500 |" in text
    assert text.count("Measured on Some GPU.") == 2 and "Not measured" not in text
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "sparse_syrk-itemsize-4",
        "tiles-chip-ml-10m-32",
    }
    cloud = (tmp_path / "figures" / "sparse_syrk-itemsize-4.svg").read_text()
    assert cloud.count("<image") == 2  # of each part: what lies in the background is pixels
    paper.report([])
    assert paper.PAGE.read_text(encoding="utf-8").count("Not measured yet.") == 3
    with pytest.raises(ValueError, match="once"):
        paper.filled("no place", "cloud", "text")


def test_packed_lines_are_the_lines(paper: Any) -> None:
    lines = [
        cloud_line(8, 8, 200.0, True, ms={"user": 0.1, "item": 4.0}, error=1e-7, reason=""),
        cloud_line(8, 16, 100.0, ms={"user": 0.3, "item": 8.0}, error=None, reason=""),
        cloud_line(8, 24, 1.0, status="spills", ms={}, error=None, reason=""),
    ]
    packed = json.loads(json.dumps(paper.pack(lines)))
    assert packed["points"] == 3 and packed["facts"] == lines[0]["facts"] and "factors" not in packed["columns"]
    assert packed["columns"]["ms"] == {"user": [0.1, 0.3, None], "item": [4.0, 8.0, None]}
    alone = {"bench": "tiles"}
    assert paper.unpack([alone, packed]) == [alone, *lines]
    for one in (lines[:1], lines[1:]):
        assert paper.unpack([paper.pack(one)]) == one
    with pytest.raises(ValueError, match=r"line 1 has the names .*, expected .* as in line 0; pack them apart"):
        paper.pack([lines[0], lines[0] | {"more": 1}])


GPU_LINE: dict[str, Any] = {
    "gpu": {"name": H200.name, "capability": [9, 0], "multiprocessors": 132, "cuda": 13020},
    "versions": {"hybridmf": __version__},
    "run": "now",
    "known": False,
}


def rank_lines(rank: int, user: float, item: float, **changes: Any) -> list[dict[str, Any]]:
    """What a run says of a rank: the rule's configuration, 1 ms a side, a winner, one that spills."""
    common = GPU_LINE | {"facts": {"rank": rank, "itemsize": 4}} | changes
    return [
        cloud_line(rank, 64, 1.0, rule=True, config=OTHER, ms={"user": 1.0, "item": 1.0}, **common),
        cloud_line(rank, 32, 1.0, True, rule=False, config=SYRK, ms={"user": user, "item": item}, **common),
        cloud_line(rank, 24, 1.0, rule=False, status="spills", ms={}, **common),
    ]


def test_winners_of_a_run_ship(paper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tables.SHIPPED / "h200.json"
    before = entry(facts={"rank": 8, "itemsize": 4}, **OTHER)
    beaten = entry(facts={"rank": 16, "itemsize": 4}, **OTHER)  # gains 1.5, and the run below does not know it
    tables.store(table([before, beaten]), path)
    tables.store(table([], replace(H200, name="NVIDIA H20", multiprocessors=78)), tables.SHIPPED / "a.json")
    none = rank_lines(56, 0.5, 0.5)
    for line in none:
        line["winner"] = False
    own = rank_lines(32, 1.5, 1.5)  # the rule's is best
    own[0]["winner"], own[1]["winner"] = True, False
    lines = [
        *rank_lines(24, 0.1, 0.1, run="before"),  # measured again below: not so much better
        *rank_lines(8, 0.8, 0.45, known=True),
        *rank_lines(16, 0.9, 0.9),
        *rank_lines(24, 0.98, 0.98),
        *own,
        *rank_lines(40, 0.5, 1.02),
        *rank_lines(64, 0.5, 1.04),
        *none,
        {"bench": "tiles", "variant": "chip"},
    ]
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    (tmp_path / "tuning.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for _ in range(2):  # again: the same
        done = CliRunner().invoke(paper.main, ["--ship"], catch_exceptions=False)
        assert done.exit_code == 0
        assert done.output.splitlines() == [
            "f = 8: ships",
            "f = 16: ships",
            "f = 24: stays out: the rule's takes 2.0% longer, wanted 3%",
            "f = 32: the rule's is the best",
            "f = 40: ships",
            "f = 64: stays out: takes 4.0% longer than the rule's for the items, allowed 3%",
            "f = 56: stays out: the rule's configuration was not timed, or none was chosen",
            f"{path}: 3 entries",
        ]
        kept = {one.facts["rank"]: one for one in tables.read_table(path).entries}
        rivals = (OTHER, SYRK, {"nb": 24, "kb": 8})
        assert kept[8] == Entry("sparse_syrk", {"rank": 8, "itemsize": 4}, SYRK, 0.6, 1.0, 2, rivals)
        assert kept[16] == beaten
        assert (kept[40].config, kept[40].ms, kept[40].rivals) == (SYRK, 0.71414, ())
    assert not tables.read_table(tables.SHIPPED / "a.json").entries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": "tiles"}, 'has no lines of task "cloud".*measure on a GPU'),
        ({"versions": {"hybridmf": "0.0.1"}}, "measured by hybridmf 0.0.1, this is .*measure again"),
        ({"gpu": GPU_LINE["gpu"] | {"multiprocessors": 99}}, "no table in .* of NVIDIA H200 with 99 .*--output"),
    ],
)
def test_what_cannot_ship_is_refused(
    paper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tables.store(table([]), tables.SHIPPED / "h200.json")
    with pytest.raises(ValueError, match=message):
        paper.ship(rank_lines(8, 0.5, 0.5, **changes))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    done = CliRunner().invoke(paper.main, ["--ship"])
    assert done.exit_code == 1 and "Error: tuning.jsonl has no lines" in done.output


def test_what_was_measured_before_an_interruption_is_recorded(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(paper, "record", lambda file, line: kept.append((file, line)))
    monkeypatch.setattr(paper, "stamp", lambda device: {"gpu": device})

    def interrupted() -> None:
        with paper.together("some") as lines:
            lines += [{"tile_rows": 256, "gflops": 1.0}, {"tile_rows": 768, "gflops": 1.0}]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with paper.together("some"):
        pass  # nothing was measured: nothing is recorded
    assert kept == [("tuning", {"gflops": 1.0, "points": 2, "columns": {"tile_rows": [256, 768]}, "gpu": "some"})]


def test_tiles_are_measured_and_checked(paper: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_papers(paper, monkeypatch)
    recorder = paper.Recorder("tuning")
    sums = trials.Sums(device, SAMPLE.user_items, 5, 4)
    assert paper.gates_gflops(device, sums) > 0
    lines = list(paper.measure_tiles(recorder, device, sums, "quick"))
    assert [(line["variant"], line["tile_rows"], line["tile_cols"]) for line in lines] == [
        ("local", 20, 16),
        ("chip", 20, 16),
    ]
    json.dumps(lines)
    monkeypatch.setattr(paper, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="not measured"):
        paper.gates_gflops(device, sums)
    assert not list(paper.measure_tiles(recorder, device, sums, "quick"))
    assert [text.split(":")[0] for text in recorder.problems] == ["tiles, local, 20 x 16", "tiles, chip, 20 x 16"]


def tiny_papers(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tasks in a few seconds."""
    monkeypatch.setattr(paper, "FACTORS", 5)
    tiny = {"TILE_ROWS": (20,), "TILE_COLS": (16,), "TILE_SHAPES": ("ml-1m",), "CLOUD_RANKS": (5,)}
    for name, values in (tiny | {"CLOUD_SECONDS": 3}).items():
        monkeypatch.setattr(paper, name, {"quick": values})


def test_the_script_measures_both_and_the_page_takes_its_lines(
    paper: Any, device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    serve_cuda(device, monkeypatch)
    tiny_papers(paper, monkeypatch)
    monkeypatch.setattr(Sample, "draw", lambda *_: SAMPLE)
    monkeypatch.setattr(paper, "tune", functools.partial(tune.tune, most=1))
    for module in (paper, importlib.import_module("common")):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    paper.report([])
    done = CliRunner().invoke(paper.main, ["--budget", "600"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    packed = tune_plots.read_lines(tmp_path / "tuning.jsonl")
    assert [line["bench"] for line in packed] == ["tune", "tiles", "tiles"]
    lines = paper.unpack(packed)
    assert {line["factors"] for line in lines if line["bench"] == "tune"} == {5}
    assert [line["order"] for line in lines if line["bench"] == "tiles"] == ["given"] * 2 + ["by degree"] * 2
    assert "Not measured yet." in paper.PAGE.read_text(encoding="utf-8")  # measuring leaves the page alone
    done = CliRunner().invoke(paper.main, ["--report"], catch_exceptions=False)
    assert done.exit_code == 0 and "Not measured yet." not in paper.PAGE.read_text(encoding="utf-8")
    done = CliRunner().invoke(paper.main, ["--budget", "1e-9", "--task", "cloud"])
    assert done.exit_code == 1 and "cloud, f = 5: left out" in done.output
