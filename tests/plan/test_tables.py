"""Tables of tuned configurations: their order, their files, invalid tables."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.gpu.cholesky_any import CgConfig, CholeskyConfig, TilesConfig, WideTilesConfig
from hybridmf.gpu.sparse_syrk import SyrkConfig
from hybridmf.gpu.topk import GroupMaxConfig
from hybridmf.gpu.tuning.spaces import SPACES
from hybridmf.plan import assemblies as plan_assemblies
from hybridmf.plan import tables
from hybridmf.plan.assemblies import BalsConfig
from hybridmf.plan.fused import FusedConfig
from hybridmf.plan.tables import Entry, Gpu, Table
from support.tuning import H200, OTHER, SYRK, entry, table

pytestmark = pytest.mark.usefixtures("no_tables")

UNKNOWN = replace(H200, name="some other GPU", multiprocessors=99)

# ---------------------------------------------------------------------------------------------------- tables


def test_without_entries_the_rule_applies() -> None:
    assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)


def test_the_users_table_precedes_the_shipped_one() -> None:
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
    assert len(caplog.records) == 1 and "hybridmf tune-kernels" in caplog.text and str(path) in caplog.text
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


def test_invalid_entries_fall_back_to_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    broken = entry(**SYRK | {"nb": 30}), entry("fused", {"rank": 64, "precision": "float32", "solver": "cg"}, warps=3)
    tables.store(table(list(broken)), tables.user_file(H200))
    with caplog.at_level(logging.WARNING, "hybridmf"):
        assert SyrkConfig.default(64, 4, H200) == SyrkConfig.rule(64, 4, H200)
        assert FusedConfig.default(64, H200, "float32", "cg") == FusedConfig.rule(64)
    assert len(caplog.records) == 2 and "cannot be used" in caplog.text


def test_entries_too_large_for_a_device_fall_back_to_the_rule() -> None:
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


def test_table_lookups_are_cached() -> None:
    far = entry(facts={"rank": 62, "itemsize": 4}, **SYRK | {"kb": 8})
    tables.store(table([far]), tables.user_file(H200))
    tables.store(table([entry(**SYRK)]), tables.SHIPPED / "h200.json")
    found = tables.known("sparse_syrk", H200, RANK_64)
    assert [config["kb"] for config in found] == [SYRK["kb"], 8]  # exact first, as fits take them
    beside = table([entry(**OTHER), entry(facts={"rank": 32, "itemsize": 4}, **SYRK)])
    assert tables.known("sparse_syrk", H200, RANK_64, beside=beside) == [*found, OTHER]
    assert tables.known("sparse_syrk", H200, RANK_64, beside=table([entry(**SYRK)])) == found
    assert tables.known("mo_als", H200, RANK_64) == []


@settings(max_examples=15)
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
    entries = [Entry(kernel, facts, SPACES[kernel].values(one), 1.0, 2.0, 4) for kernel, (facts, one) in chosen.items()]
    tables.store(table(entries), tables.user_file(H200))
    found = {
        "fused": FusedConfig.default(64, H200),
        "sparse_syrk": SyrkConfig.default(64, 4, H200),
        "bals": BalsConfig.default(64, 4, H200),
        "cholesky_any": CholeskyConfig.default(100, 4, H200),
        "cg_any": CgConfig.default(64, 4, H200),
    }
    assert found == {kernel: one for kernel, (_, one) in chosen.items()}
    assert plan_assemblies.bals_tile_sizes(64, 4, H200) == chosen["bals"][1].matrix_tile
    for kernel, (facts, one) in chosen.items():  # and what the tuner makes of an entry
        assert SPACES[kernel].named(facts, SPACES[kernel].values(one)) == one
    wide = found["bals"].capacity + 1  # does not hold such tiles: the rule
    assert BalsConfig.default(64, 4, H200, tile_cols=wide) == BalsConfig.rule(64, 4, H200, tile_cols=wide)


def test_shipped_tables_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tables.__file__).with_name("tuned")
    monkeypatch.setattr(tables, "SHIPPED", folder)
    for path in folder.glob("*.json"):
        shipped = tables.read_table(path)
        gpu = shipped.gpu
        assert path.name == gpu.file_name
        spec = replace(H200, **vars(gpu))
        for one in shipped.entries:
            assert one.ms <= one.rule_ms
            assert tables.best(dict, one.kernel, spec, one.facts, given={}) == one.config
            space = SPACES[one.kernel]
            numbers = [one.facts[name] for name in ("rank", "ld", "padded") if name in one.facts]
            assert one.facts in space.facts(*(numbers or [64]), 4) + space.facts(*(numbers or [64]), 8)
            assert space.values(space.named(one.facts, one.config)) == one.config


def test_neighbours_of_shipped_ranks_run_the_timed_program(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (WideTilesConfig(65), {"rank": 64}, "rank must be in 65 ... 128"),
        (WideTilesConfig(65), {"blocks_per_sm": 8}, "blocks_per_sm must be in 1 ... 7"),
        (TilesConfig(64, 4, 2), {"teams": 33}, "teams must be in 1 ... 32"),
        (CgConfig(64, 4, 2, True, 2), {"warps": 3}, "warps must be a power of two"),
        (CgConfig(64, 4, 2, True, 2), {"itemsize": 2}, "itemsize must be 4"),
        (GroupMaxConfig(64, 64, 2), {"users_per_warp": 8}, "users_per_warp must be 16, 32 or 64"),
        (GroupMaxConfig(64, 64, 2), {"tile_groups": 3}, "tile_groups must be 1, 2, 4 or 8"),
    ],
)
def test_impossible_configurations_give_the_reason(config: Any, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_heights_of_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="height must be an integer >= 1"):
        BalsConfig(4, 4, tile=4, rows=4, part_tiles=1, capacity=20, height=0)
