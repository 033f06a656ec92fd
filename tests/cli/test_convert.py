"""`hybridmf convert` between files and stores."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.errors import MemoryBudgetError
from hybridmf.formats import BalsMatrix, reorder
from hybridmf.model import files as _io
from support.command_line import refuse, succeed

# -------------------------------------------------------------------------------------------------------- convert


def same_ratings(one: hmf.Ratings, other: hmf.Ratings, labels: bool = True) -> bool:
    same = one.shape == other.shape and (one.user_items != other.user_items).nnz == 0 and one.nnz == other.nnz
    if labels:
        same = same and one.user_ids.tolist() == other.user_ids.tolist()
        same = same and one.item_ids.tolist() == other.item_ids.tolist()
    return same


@pytest.mark.parametrize("name", ["r.npz", "r.csv", "r.csv.gz", "r.mtx", "r.mtx.gz"])
def test_convert_keeps_the_ratings(folder, tmp_path, name):
    output = succeed("convert", folder / "ratings.csv", tmp_path / name)
    assert f"Wrote {tmp_path / name}" in output
    before, after = (hmf.Ratings.from_file(path) for path in (folder / "ratings.csv", tmp_path / name))
    assert same_ratings(before, after, labels="mtx" not in name)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else {
        "r.npz": b"PK", "r.csv": b"us", "r.mtx": b"%%"
    }[name])  # fmt: skip


@settings(max_examples=10)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5))
def test_csv_and_mtx_keep_every_float32(tmp_path_factory, values):
    tmp_path = tmp_path_factory.mktemp("floats")
    positions = np.arange(len(values))
    ratings = hmf.Ratings.from_coo(positions, positions, np.array(values, dtype=np.float32))
    ratings.save(tmp_path / "r.npz")
    for name in ("r.csv", "r.mtx"):
        succeed("convert", tmp_path / "r.npz", tmp_path / name, "--quiet")
        assert same_ratings(ratings, hmf.Ratings.from_file(tmp_path / name), labels=False)


@pytest.mark.parametrize(
    "times",
    [
        np.array([1600000000, 5, -3]),
        np.array([0.5, 1.25, 3.0]),
        np.array(["2024-01-01T10:00:00", "2024-02-29T00:00:00", "1999-12-31T23:59:59"], "M8[s]"),
    ],
)
def test_csv_keeps_times(times, tmp_path):
    ratings = hmf.Ratings.from_coo(["a", "b", "b"], ["x", "x", "y"], [1, 2, 3], timestamps=times)
    ratings.with_weights([1, 2, 3]).save(tmp_path / "r.npz")
    assert "Weights are not written to csv" in succeed("convert", tmp_path / "r.npz", tmp_path / "r.csv", "--quiet")
    told = succeed("convert", tmp_path / "r.npz", tmp_path / "r.mtx", "--quiet")
    assert "Timestamps and weights are not written to mtx" in told
    again = hmf.Ratings.from_file(tmp_path / "r.csv")
    assert same_ratings(ratings, again)
    np.testing.assert_array_equal(again.timestamps, ratings.timestamps)


def test_csv_keeps_awkward_labels(tmp_path):
    ratings = hmf.Ratings.from_coo(["#1 fan", 'say "hi"', "a,b"], ["x", "#", "x"], [1, 2.5, 0])
    ratings.save(tmp_path / "r.npz")
    succeed("convert", tmp_path / "r.npz", tmp_path / "r.csv", "--quiet")
    assert same_ratings(ratings, hmf.Ratings.from_file(tmp_path / "r.csv"))


def test_a_folder_becomes_a_store_and_is_fitted_from(folder, tmp_path):
    source, store = folder / "ratings.csv", tmp_path / "store"
    output = succeed("convert", source, f"{store}/", "--slab-bytes", "4KiB", "--memory-limit", "1MiB")
    ratings = hmf.Ratings.from_file(source)
    assert f"{ratings.nnz:,}" in output and " of users, " in output
    assert np.array_equal(hmf.Store.open(store).to_ratings().user_items.data, ratings.user_items.data)
    assert "there is a store already" in refuse("convert", source, store)
    assert succeed("convert", source, store, "--overwrite", "--quiet", "--slab-bytes", "4KiB") == ""
    columns, _, facts = output.partition("\n")
    assert columns.split(maxsplit=1) == [
        "columns",
        "user = column 0 'who', item = column 1 'what', value = column 2 'stars'",
    ]
    assert succeed("info", store) == facts
    options = ("--factors", 4, "--iterations", 3, "--seed", 5, "--quiet", "--device", "cpu")
    for name, where, size in (("a", store, 0), ("b", source, 0), ("c", store, 0.2), ("d", source, 0.2)):
        succeed("fit", where, "-o", tmp_path / name, "--test-size", size, *options)
    for one, other in ("ab", "cd"):
        found, expected = hmf.load(tmp_path / one), hmf.load(tmp_path / other)
        assert np.array_equal(found.user_factors, expected.user_factors)
        assert np.array_equal(found.recommend(3)[0], expected.recommend(3)[0])


@pytest.mark.parametrize("name", ["r.npz", "r.csv.gz", "r.mtx"])
def test_a_store_becomes_a_file(folder, store, name, tmp_path):
    output = succeed("convert", store, tmp_path / name)
    assert "BALS tiles of 256 x 192" in output and f"Wrote {tmp_path / name}" in output
    before, after = hmf.Store.open(store).to_ratings(), hmf.Ratings.from_file(tmp_path / name)
    assert same_ratings(before, after, labels="mtx" not in name)
    assert "reuse factor" in succeed("convert", store, "--to", "bals-stats")


def test_a_store_becomes_another_store(store, tmp_path):
    output = succeed("convert", store, f"{tmp_path}/finer/", "--slab-bytes", "1KiB", "--memory-limit", "1MiB")
    before, after = hmf.Store.open(store), hmf.Store.open(tmp_path / "finer")
    assert same_ratings(before.to_ratings(), after.to_ratings())
    assert f"slabs             {len(after.slabs('user'))} of users" in output
    assert len(after.slabs("user")) > len(before.slabs("user"))
    assert "is a store that is read" in refuse("convert", store, f"{store}/", "--overwrite")
    for inside in ("finer/", "r.npz"):
        assert "lies in the store that is read" in refuse("convert", store, f"{store}/{inside}")
    assert before.verify() is None


def test_a_store_that_does_not_fit_into_memory_becomes_a_store_only(store, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 100)
    assert "as a matrix takes" in refuse("convert", store, tmp_path / "r.npz")
    succeed("convert", store, f"{tmp_path}/other/", "--quiet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]


@pytest.mark.usefixtures("small_product")
def test_methods_are_compared_on_a_store(store):
    options = ("--method", "als", "--device", "cpu", "--factors", 2, "--iterations", 2, "--quiet")
    assert succeed("compare", f"{store}/", *options).startswith("store: 90 users x 60 items, ")


def test_seen_items_are_read_from_a_store(folder, store):
    arguments = ("recommend", folder / "model.safetensors", "--user", "u3", "--format", "csv", "--ratings")
    assert succeed(*arguments, store) == succeed(*arguments, folder / "ratings.csv")


READING_OPTIONS = [
    ("--separator", ","), ("--header",), ("--no-header",), ("--user", 0), ("--item", 1), ("--value", "none"),
    ("--duplicates", "error"),
]  # fmt: skip


@pytest.mark.parametrize("option", READING_OPTIONS, ids=lambda option: option[0])
def test_file_options_are_refused_for_other_sources(folder, store, tmp_path, option):
    out = tmp_path / "m.safetensors"
    for command, why in (
        (("fit", store, "-o", out), "is a store"),
        (("fit", store, "-o", out, "--test-size", 0), "is a store"),
        (("info", store), "is a store"),
        (("info", folder / "model.safetensors"), "is a model"),
        (("info",), "none is given"),
        (("compare", store), "is a store"),
        (("compare", "demo"), "is drawn from a seed"),
        (("convert", store, tmp_path / "r.npz"), "is a store"),
        (("convert", store, f"{tmp_path}/other/"), "is a store"),
    ):
        message = refuse(*command, *option)
        assert message.startswith(f"Error: {option[0]} says how a file of ratings is read, and ")
        assert message.endswith(f"{why}; leave it out")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_that_is_no_store_is_named(folder, tmp_path):
    for arguments in (
        ("fit", tmp_path, "-o", tmp_path / "m"), ("info", tmp_path), ("compare", tmp_path),
        ("convert", tmp_path, tmp_path / "r.npz"), ("convert", tmp_path, f"{tmp_path}/store/"),
        ("recommend", folder / "model.safetensors", "--user", "u3", "--ratings", tmp_path),
    ):  # fmt: skip
        assert "is a directory, but no store (no manifest.json)" in refuse(*arguments)
    assert not list(tmp_path.iterdir())


def test_a_store_whose_seen_items_do_not_fit_is_fitted_and_saved_without_them(folder, tmp_path, monkeypatch):
    hmf.convert(folder / "ratings.csv", tmp_path / "store")
    monkeypatch.setattr("hybridmf.data.store.StoredSeen.load", _no_memory)
    output = succeed(
        "fit", tmp_path / "store", "-o", tmp_path / "m", "--test-size", 0, "--factors", 2, "--iterations", 1
    )
    assert "Saved without seen items: too much" in output
    assert "not stored" in succeed("info", tmp_path / "m")


def test_a_model_that_cannot_be_saved_in_its_place_is_saved_elsewhere(folder, tmp_path, monkeypatch):
    original, model = _io.write_atomically, tmp_path / "m.safetensors"

    def full(path: Any, content: Any) -> None:
        if Path(path) == model:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content)

    monkeypatch.setattr(_io, "write_atomically", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = refuse("fit", folder / "ratings.csv", "-o", model, "--factors", 2, "--iterations", 1)
    assert f"{model}: No space left on device; the model was saved as {tmp_path}" in said
    (rescued,) = tmp_path.glob("hybridmf-*/m.safetensors")
    assert str(rescued) in said and hmf.load(rescued).n_iter_ == 1


def _no_memory(self: object) -> None:
    raise MemoryBudgetError("too much")


def test_folders_become_stores_only(folder, tmp_path):
    assert "can only become a store" in refuse("convert", folder / "ratings.csv", tmp_path, "--to", "npz")
    assert "does not exist" in refuse("convert", folder / "ratings.csv", tmp_path / "none" / "store" / "")
    assert "holds other files" in refuse("convert", folder / "ratings.csv", folder)
    assert "slab_bytes must be a size" in refuse(
        "convert", folder / "ratings.csv", f"{tmp_path}/s/", "--slab-bytes", "x"
    )


def test_convert_prints_statistics(folder, tmp_path):
    tiles = ["--tile-rows", 16, "--tile-cols", 8, "--num-threads", 1]
    output = succeed("convert", folder / "ratings.csv", "--to", "bals-stats", *tiles)
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    assert f"ratings           {ratings.nnz:,}\n" in output
    assert "ratings per user  min" in output
    assert "BALS tiles of 16 x 8" in output
    before = BalsMatrix.from_csr(ratings.user_items, 16, 8).statistics()
    after = BalsMatrix.from_csr(reorder(ratings.user_items).matrix, 16, 8).statistics()
    assert before != after
    for name, key, form in (
        ("tiles", "tiles", "{:,}"),
        ("segments .rows of tiles.", "segments", "{:,}"),
        ("reuse factor .*column.", "reuse_factor", "{:.2f}"),
    ):
        pattern = rf"^ +{name} +{re.escape(form.format(before[key]))} +{re.escape(form.format(after[key]))}$"
        assert re.search(pattern, output, re.MULTILINE), name
    for kind in ("tile", "segment"):
        share = f"{before[f'vacant_{kind}s']:,} ({before[f'vacant_{kind}_share']:.1%})"
        assert share in output
    for out, to in (("stats.json", ()), ("stats.txt", ("--to", "bals-stats"))):
        written = succeed("convert", folder / "ratings.csv", tmp_path / out, "--quiet", *to, *tiles)
        assert written == ""
        assert json.loads((tmp_path / out).read_text()) == {"as read": before, "reordered": after}


def test_convert_format_by_option(folder, tmp_path):
    succeed("convert", folder / "ratings.csv", tmp_path / "x", "--to", "mtx", "--quiet")
    assert (tmp_path / "x").read_bytes().startswith(b"%%MatrixMarket")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give a file OUT"),
        (["--to", "csv"], "give a file OUT"),
        (["out.xls"], "the ending of out.xls selects no format"),
        (["out.npz.gz"], "selects no format"),
        (["out.csv", "--to", "xls"], "'--to'"),
        (["no/such/out.csv"], "folder"),
        (["out.csv", "--tile-rows", 0], "tile_rows"),
        (["out.csv", "--tile-cols", 0], "tile_cols"),
        (["out.csv", "--num-threads", 0], "num_threads"),
    ],
)
def test_convert_refuses(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refuse("convert", folder / "ratings.csv", *options)
    assert list(tmp_path.iterdir()) == []
