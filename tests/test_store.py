"""Stores: conversion of every format is `Ratings.from_file`, survives kills and full disks; a fit has the same bits."""

from __future__ import annotations

import copy
import errno
import functools
import gzip
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from conftest import planted
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.sparse import SUMMED, entry_sum
from hybridmf.core.validate import as_csr
from hybridmf.data import convert as conversion
from hybridmf.data import store as stores
from hybridmf.data.fingerprint import fingerprint
from hybridmf.data.manifest import seal
from hybridmf.data.slabs import MemorySlabs, slab_bounds, slab_entries
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import DuplicateEntriesError, MemoryBudgetError, ModelFileError, RatingsError, StoreError

SLAB = 900
"""Bytes of a slab here: a few rows."""


def assert_same_matrix(found: sp.csr_array, expected: sp.csr_array) -> None:
    assert found.shape == expected.shape
    for name in ("indptr", "indices", "data"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other)


def assert_same_ratings(store: hmf.Store, expected: hmf.Ratings) -> None:
    """Both orientations, labels and what the manifest says."""
    found = store.to_ratings()
    assert_same_matrix(found.user_items, expected.user_items)
    assert_same_matrix(StoreMatrix(store, "item").load(), expected.item_users)
    assert (store.shape, store.nnz) == (expected.shape, expected.nnz)
    for name in ("user_ids", "item_ids"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if other is not None:
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
    np.testing.assert_array_equal(store.degrees(), np.diff(expected.user_items.indptr))
    np.testing.assert_array_equal(store.degrees("item"), np.diff(expected.item_users.indptr))
    assert not (store.path / "work").exists() and not (store.path / "unfinished.json").exists()
    store.verify()


def triplets(count: int = 300, seed: int = 0) -> list[tuple[int, int, float]]:
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(60 * 40)[:count]
    return [(int(p // 40) * 7 - 50, int(p % 40) + 3, float(rng.integers(0, 11)) / 2) for p in pairs]


def write_text(path: Path, rows: list[tuple[Any, Any, Any]], separator: str = ",", head: str = "") -> Path:
    text = head + "".join(separator.join(map(str, row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------------------- conversion


def _parquet(path: Path, rows: list[tuple[Any, Any, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    users, items, values = (list(column) for column in zip(*rows, strict=True))
    wide = isinstance(users[0], int) and users[0] >= 2**62
    table = pa.table({"u": pa.array(users, pa.uint64()) if wide else users, "i": items, "r": values})
    pq.write_table(table, path, row_group_size=50)
    return path


def _mtx(path: Path, **options: Any) -> Path:
    rows, columns, values = (np.array(column) for column in zip(*triplets(), strict=True))
    matrix = sp.coo_array((values, ((rows + 50) // 7, columns)), shape=(61, 50))
    scipy.io.mmwrite(path, matrix, **options)
    return path


SOURCES = {
    "integers": lambda d: write_text(d / "r.csv", triplets()),
    "header, gzip": lambda d: write_text(d / "r.tsv.gz", triplets(), "\t", "user\titem\trating\n"),
    "two characters": lambda d: write_text(d / "r.dat", triplets(), "::"),
    "white space": lambda d: write_text(d / "r.txt", triplets(), " ", "# a comment\n\n"),
    "strings": lambda d: write_text(d / "r.csv", [(f"u{u}", f"Ünï {i}", r) for u, i, r in triplets()]),
    "integers until the last line": lambda d: write_text(d / "r.csv", [*triplets(), ("007", 3, 1)]),
    "integers far apart": lambda d: write_text(d / "r.csv", [(u * 10**15, i, r) for u, i, r in triplets()]),
    "two columns": lambda d: write_text(d / "r.csv", [row[:2] for row in triplets()]),
    "quoted": lambda d: write_text(d / "r.csv", [(f'"a,{u}"', i, r) for u, i, r in triplets()]),
    "parquet": lambda d: _parquet(d / "r.parquet", triplets()),
    "parquet of strings": lambda d: _parquet(d / "r.parquet", [(f"u{u}", i, r) for u, i, r in triplets()]),
    "parquet of large integers": lambda d: _parquet(
        d / "r.parquet", [(2**63 + u + 50, i, r) for u, i, r in triplets()]
    ),
    "mtx": lambda d: _mtx(d / "r.mtx"),
    "mtx pattern": lambda d: _mtx(d / "r.mtx", field="pattern"),
    "mtx integer": lambda d: _mtx(d / "r.mtx", field="integer"),
    "mtx array": lambda d: (scipy.io.mmwrite(d / "r.mtx", np.arange(12.0).reshape(3, 4)), d / "r.mtx")[1],
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_is_converted_to_what_from_file_reads(source, tmp_path, monkeypatch):
    path = SOURCES[source](tmp_path)
    expected = hmf.Ratings.from_file(path)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 1 << 14)  # 64 entries of a chunk
    monkeypatch.setattr(conversion, "BLOCK_CHARS", 500)
    store = hmf.convert(path, tmp_path / "store", slab_bytes=SLAB, memory_limit="1MiB")
    assert len(store.slabs("user")) > 1 or source == "mtx array"
    assert_same_ratings(store, expected)
    assert repr(store).startswith(f"Store({str(tmp_path / 'store')!r}: {expected.n_users} users x")


def test_matrices_and_npz_and_stores_are_converted(tmp_path):
    ratings = hmf.Ratings.from_matrix(planted(), user_ids=[f"u{k}" for k in range(60)])
    ratings.save(tmp_path / "r.npz")
    for name, source in {"ratings": ratings, "npz": tmp_path / "r.npz"}.items():
        assert_same_ratings(hmf.convert(source, tmp_path / name, slab_bytes=SLAB), ratings)
    again = hmf.convert(hmf.Store.open(tmp_path / "npz"), tmp_path / "again", slab_bytes=10**9)
    assert [len(again.slabs(side)) for side in ("user", "item")] == [1, 1]
    assert_same_ratings(again, ratings)
    coo = sp.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 3))
    assert_same_ratings(
        hmf.convert(coo, tmp_path / "sum", duplicates="sum"), hmf.Ratings.from_matrix(coo, duplicates="sum")
    )
    assert_same_ratings(hmf.convert(np.zeros((3, 4)), tmp_path / "no"), hmf.Ratings(np.zeros((3, 4))))
    with pytest.raises(DuplicateEntriesError):
        hmf.convert(coo, tmp_path / "error")
    assert not (tmp_path / "error").exists()


@pytest.mark.parametrize("rule", ["sum", "mean", "first", "last", "max"])
def test_pairs_that_repeat_are_merged_as_in_memory(rule, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 1 << 14)
    rng = np.random.default_rng(1)
    rows = [
        (int(u), int(i), float(v)) for u, i, v in zip(*rng.integers(0, 12, (2, 500)), rng.normal(size=500), strict=True)
    ]
    path = write_text(tmp_path / "r.csv", rows)
    store = hmf.convert(path, tmp_path / "store", slab_bytes=SLAB, duplicates=rule)
    assert_same_ratings(store, hmf.Ratings.from_file(path, duplicates=rule))


@pytest.mark.parametrize("kind", ["integers", "strings", "parquet"])
def test_a_pair_that_repeats_is_named_as_in_memory(kind, tmp_path):
    rows: list[Any] = triplets()
    rows.insert(200, (*rows[7][:2], 9.0))
    if kind == "strings":
        rows = [(f"u{u}", f"i{i}", r) for u, i, r in rows]
    path = _parquet(tmp_path / "r.parquet", rows) if kind == "parquet" else write_text(tmp_path / "r.csv", rows)
    with pytest.raises(DuplicateEntriesError) as expected:
        hmf.Ratings.from_file(path)
    with pytest.raises(DuplicateEntriesError) as found:
        hmf.convert(path, tmp_path / "store", slab_bytes=SLAB)
    assert str(found.value) == str(expected.value)
    assert not (tmp_path / "store").exists()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(-3, 3)), min_size=1, max_size=60),
    st.integers(8, 400),
)
@settings(deadline=None, max_examples=12)
def test_any_entries_and_slabs(entries, slab_bytes):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "r.csv", entries)
        store = hmf.convert(path, Path(folder) / "store", slab_bytes=slab_bytes, duplicates="sum")
        expected = hmf.Ratings.from_file(path, duplicates="sum")
        assert_same_ratings(store, expected)
        ratings = StoreMatrix(store, "user", np.float64, drop_zeros=True)
        assert_same_matrix(ratings.load(), as_csr(expected, dtype=np.float64, drop_zeros=True))
        assert fingerprint(ratings) == fingerprint(ratings.load())


def test_real_ratings(data_dir, tmp_path):
    path = data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz"
    store = hmf.convert(path, tmp_path / "store", slab_bytes="1MiB", memory_limit="16MiB")
    assert_same_ratings(store, hmf.Ratings.from_file(path))


# bad sources: the text's own mistakes are tested with Ratings.from_file; here those that only a stream can meet

COORDINATES = "%%MatrixMarket matrix coordinate real general\n3 3 "
BAD = {
    "only a header": ("r.csv", "user,item,rating\n", "holds no ratings, only a header"),
    "a bad line": ("r.csv", "1,2,3\n1,3,many\n", "line 2"),
    "too few": ("r.mtx", COORDINATES + "2\n1 1 1.5\n", "it has 1 entries and its header says 2"),
    "row": ("r.mtx", COORDINATES + "1\n4 1 1.5\n", "entry 0 has the row 4; expected 1 to 3"),
    "column": ("r.mtx", COORDINATES + "1\n1 0 1.5\n", "the column 0; expected 1 to 3"),
    "value": ("r.mtx", COORDINATES + "1\n1 1 nan\n", "the value nan; values must be finite"),
    "garbage": ("r.mtx", COORDINATES + "1\n1 1 x\n", "cannot be read as MatrixMarket"),
    "negative sizes": ("r.mtx", COORDINATES.replace("3 3", "-3 3") + "1\n1 1 5\n", "header says -3 rows, 3 columns"),
    "overflow": ("r.mtx", COORDINATES + "1\n2 1 1e300\n", "of the users from position 0 on"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_source_leaves_nothing(case, tmp_path):
    name, text, problem = BAD[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(RatingsError) as caught:
        hmf.convert(tmp_path / name, tmp_path / "store")
    assert problem in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize("read", [hmf.Ratings.from_file, lambda path: hmf.convert(path, path.parent / "store")])
@pytest.mark.parametrize("kind", ["general", "symmetric"])
def test_rows_that_cannot_be_counted_in_memory_are_refused_before(read, kind, tmp_path, monkeypatch):
    head = COORDINATES.replace("3 3", "2000000000 3").replace("general", kind)
    (tmp_path / "r.mtx").write_text(head + "1\n1 1 5\n")
    monkeypatch.setattr("hybridmf.data.readers.available_memory", lambda: 2**30)
    with pytest.raises(MemoryBudgetError, match=r"2,000,000,000 rows and 3 columns by its header.*1,024 MiB are free"):
        read(tmp_path / "r.mtx")
    assert [path.name for path in tmp_path.iterdir()] == ["r.mtx"]


@pytest.mark.parametrize("path", [None, 3, b"store", "", "a\0b"])
def test_what_is_no_path_of_a_store(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for act in (lambda: hmf.convert(planted(), path), lambda: hmf.Store.open(path)):
        with pytest.raises((TypeError, ValueError), match="path must be a path"):
            act()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["strings", "mtx", "parquet of large integers"])
def test_a_store_becomes_another_one_in_chunks(kind, tmp_path, monkeypatch):
    """The store that its file would have become."""
    path = SOURCES[kind](tmp_path)
    straight = hmf.convert(path, tmp_path / "straight", slab_bytes=SLAB)
    monkeypatch.setattr(hmf.Store, "user_items", property(lambda self: pytest.fail("loaded into memory")))
    coarse = hmf.convert(path, tmp_path / "coarse", slab_bytes="1MiB")
    monkeypatch.setattr(conversion, "_stored", chunk_by_chunk(conversion._stored, 7))
    for number, source in enumerate((coarse, coarse.path, str(coarse.path))):
        again = hmf.convert(source, tmp_path / f"again{number}", slab_bytes=SLAB)
        assert again.checksum == straight.checksum != coarse.checksum


def chunk_by_chunk(stored, length):
    """So many entries a chunk."""
    return lambda store, limit: stored(store, 64 * length)


def test_a_store_with_empty_rows_and_zeros_becomes_another_one(tmp_path):
    matrix = planted()
    matrix.data[::5] = 0
    first = hmf.convert(hmf.Ratings(matrix, user_ids=[f"u{k}" for k in range(60)]), tmp_path / "first")
    second = hmf.convert(first, tmp_path / "second", slab_bytes=SLAB)
    assert_same_ratings(second, first.to_ratings())
    assert StoreMatrix(second, drop_zeros=True).nnz == np.count_nonzero(matrix.data) < matrix.nnz


def test_a_folder_that_is_no_store_is_not_converted(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"is a directory, but no store \(no manifest.json\)"):
        hmf.convert(tmp_path / "empty", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_stopped_conversion_of_a_store_goes_on(tmp_path, monkeypatch, caplog):
    store = hmf.convert(planted(), tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(conversion._Streamed, "_item_slabs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hmf.convert(store, tmp_path / "second")
    with caplog.at_level("INFO", "hybridmf"):
        again = hmf.convert(store.path, tmp_path / "second")
    assert "going on with a conversion that stopped after stage 'items in buckets'" in caplog.text
    assert_same_ratings(again, store.to_ratings())


def interrupted(*_):
    raise KeyboardInterrupt


def test_replacing_a_store_by_what_cannot_be_converted_leaves_it(tmp_path):
    store = hmf.convert(planted(), tmp_path / "store")
    with pytest.raises(ValueError, match=r"is the store that is converted; .*source.to_ratings"):
        hmf.convert(store, tmp_path / "store", overwrite=True)
    with pytest.raises(ValueError, match=r"is the store that is converted"):
        hmf.convert(store.path, tmp_path / "store", overwrite=True)
    with pytest.raises(RatingsError, match="nan"):
        hmf.convert(np.array([[1.0, np.nan]]), tmp_path / "store", overwrite=True)
    hmf.Store.open(tmp_path / "store").verify()
    again = hmf.convert(store.to_ratings(), tmp_path / "store", overwrite=True)
    assert_same_matrix(again.user_items, as_csr(planted()))


def test_a_comment_is_text(tmp_path):
    path = write_text(tmp_path / "r.csv", triplets())
    for read in (hmf.Ratings.from_file, lambda path, **options: hmf.convert(path, tmp_path / "store", **options)):
        with pytest.raises(TypeError, match="comment must be the text that comments begin with, or None, got 3"):
            read(path, comment=3)


def test_an_empty_parquet_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"u": pa.array([], pa.int64()), "i": pa.array([], pa.int64())}), tmp_path / "r.parquet")
    with pytest.raises(RatingsError, match="holds no ratings"):
        hmf.convert(tmp_path / "r.parquet", tmp_path / "store")


def test_a_null_names_its_row_in_any_chunk(tmp_path, monkeypatch):
    path = _parquet(tmp_path / "r.parquet", [*triplets(), (1, 2, None)])
    original = conversion._parquet
    monkeypatch.setattr(conversion, "_parquet", lambda path, columns, rows: original(path, columns, 64))
    with pytest.raises(RatingsError, match="null at row 300"):
        hmf.convert(path, tmp_path / "store")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"slab_bytes": "much"}, "slab_bytes must be a size"),
        ({"memory_limit": 0}, "memory_limit must be a size"),
        ({"duplicates": "median"}, "duplicates must be one of"),
        ({"format": "xml"}, "format must be one of"),
        ({"header": 3}, "header must be one of"),
    ],
)
def test_options_are_judged_first(options, problem, tmp_path):
    path = write_text(tmp_path / "r.csv", triplets())
    with pytest.raises(ValueError, match=problem):
        hmf.convert(path, tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_memory_is_bounded(tmp_path):
    rng = np.random.default_rng(0)
    pairs = rng.permutation(500 * 400)[:80_000]
    path = tmp_path / "r.csv"
    with open(path, "w") as file:
        file.writelines(f"{p // 400},{p % 400},{p % 5}\n" for p in pairs)
    hmf.convert(path, tmp_path / "warm", memory_limit="1MiB", slab_bytes="64KiB")  # imports
    tracemalloc.start()
    try:
        hmf.convert(path, tmp_path / "store", memory_limit="1MiB", slab_bytes="64KiB")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 2**20 < 24 * len(pairs)  # what ids and values alone would take


# ------------------------------------------------------------------------------------------------- other folders


def test_folders_that_are_not_ours_are_left_alone(tmp_path):
    path = write_text(tmp_path / "r.csv", triplets())
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"holds other files .letter\.txt"):
            hmf.convert(path, other, overwrite=overwrite)
    assert [each.name for each in other.iterdir()] == ["letter.txt"]
    with pytest.raises(FileExistsError, match="there is a file of that name"):
        hmf.convert(path, path)
    with pytest.raises(StoreError, match="is a directory, but no store"):
        hmf.Store.open(other)
    with pytest.raises(FileNotFoundError, match="no such store"):
        hmf.Store.open(tmp_path / "none")
    with pytest.raises(NotADirectoryError, match="a store is a folder"):
        hmf.Store.open(path)


def test_a_store_is_replaced_only_when_asked_to(tmp_path):
    path = write_text(tmp_path / "r.csv", triplets())
    hmf.convert(path, tmp_path / "store", slab_bytes=SLAB)
    write_text(path, triplets(100, seed=2))
    with pytest.raises(FileExistsError, match="there is a store already"):
        hmf.convert(path, tmp_path / "store")
    assert hmf.Store.open(tmp_path / "store").nnz == 300
    store = hmf.convert(path, tmp_path / "store", overwrite=True)
    assert_same_ratings(store, hmf.Ratings.from_file(path))


# ------------------------------------------------------------------------------------------------- interruptions

KILLED = """
import os, signal, sys
from pathlib import Path
import hybridmf as hmf
from hybridmf.errors import StoreError

source, folder = sys.argv[1:]

def dies_at(count):
    left = [count]
    def dying(function):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)
        return call
    os.fsync = lambda file: None  # a kill loses nothing that was written
    for name in ("replace", "unlink"):
        setattr(os, name, dying(getattr(os, name)))

def run(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def convert(path, **options):
    return hmf.convert(source, path, slab_bytes=1200, duplicates="sum", **options)

def first(count, path):
    dies_at(count)
    convert(path)

def again(path):
    try:
        hmf.Store.open(path).verify()
    except StoreError as error:
        assert "unfinished conversion" in str(error) or "is a directory, but no store" in str(error), error
    except FileNotFoundError:
        pass
    else:
        return
    assert convert(path).nnz

for count in range(0, 1000, 2):
    path = f"{folder}/{count}"
    status = run(lambda: first(count, path))
    if not status:
        print("survived", count)
        break
    assert os.WIFSIGNALED(status), status
    assert run(lambda: again(path)) == 0, count
"""


def test_a_conversion_that_is_killed_anywhere_goes_on_or_begins_anew(tmp_path):
    path = write_text(tmp_path / "r.csv", triplets(120))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "survived" in done.stdout
    expected = hmf.Ratings.from_file(path)
    folders = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    assert len(folders) > 15
    for folder in folders:
        store = hmf.Store.open(folder)
        names = {entry.name for entry in folder.iterdir()} - {"unfinished.json"}  # killed when the manifest was written
        assert names == {"manifest.json", *store._manifest["files"]}
        assert_same_matrix(store.to_ratings().user_items, expected.user_items)
        assert_same_matrix(StoreMatrix(store, "item").load(), expected.item_users)


def test_a_stopped_conversion_goes_on_with_the_stage_it_was_in(tmp_path, monkeypatch, caplog):
    path = write_text(tmp_path / "r.csv", triplets())
    folder = tmp_path / "store"
    original = conversion._Streamed._item_slabs

    def interrupted(self: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion._Streamed, "_item_slabs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hmf.convert(path, folder, slab_bytes=SLAB)
    with pytest.raises(StoreError, match="unfinished conversion; run the same hybridmf convert again"):
        hmf.Store.open(folder)
    monkeypatch.setattr(conversion._Streamed, "_item_slabs", original)
    monkeypatch.setattr(conversion._Streamed, "_read", None)  # it is not read again
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert_same_ratings(hmf.convert(path, folder, slab_bytes=SLAB), hmf.Ratings.from_file(path))
    assert "going on with a conversion that stopped after stage 'items in buckets'" in caplog.text


@pytest.mark.parametrize("change", ["source", "options", "record"])
def test_an_unfinished_conversion_of_something_else_is_removed(change, tmp_path, monkeypatch, caplog):
    path = write_text(tmp_path / "r.csv", triplets())
    folder = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(conversion._Streamed, "_item_slabs", lambda self: sys.exit(3))
        with pytest.raises(SystemExit):
            hmf.convert(path, folder, slab_bytes=SLAB)
    if change == "source":
        write_text(path, triplets(250, seed=3))
    if change == "record":
        (folder / "unfinished.json").write_text('{"version": 1, "stage": "lunch", "identity": null}')
    options = {"duplicates": "sum"} if change == "options" else {}
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert_same_ratings(hmf.convert(path, folder, slab_bytes=SLAB, **options), hmf.Ratings.from_file(path))
    assert "an unfinished conversion of something else is removed" in caplog.text


@pytest.mark.parametrize("kind", ["text", "matrix"])
def test_a_full_disk_anywhere_is_said_and_leaves_nothing(kind, tmp_path, monkeypatch):
    path = write_text(tmp_path / "r.csv", triplets(60))
    source = path if kind == "text" else hmf.Ratings.from_file(path)
    left = [0]

    def filling(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments, **named)

        return call

    failures = 0
    for count in range(1000):
        left[0] = count
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", filling(os.fsync))
            try:
                hmf.convert(source, tmp_path / "store", slab_bytes=600)
                break
            except OSError as error:
                caught = error
        failures += 1
        assert caught.errno == errno.ENOSPC
        assert "the disk is full; a conversion needs up to 48 bytes an entry" in str(caught)
        assert not (tmp_path / "store").exists(), count
    assert failures > 15


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EFBIG])
def test_a_quota_or_a_limit_of_files_is_a_full_disk(code, tmp_path, monkeypatch):
    def fail(_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"disk is full for you \({os.strerror(code)}\); .*store") as caught:
        hmf.convert(planted(), tmp_path / "store")
    assert caught.value.errno == code
    assert not (tmp_path / "store").exists()


def test_a_second_conversion_into_a_folder_is_refused_and_the_first_goes_on(tmp_path, monkeypatch):
    path, folder = write_text(tmp_path / "r.csv", triplets()), tmp_path / "deep" / "store"
    original, refused = conversion._Streamed._user_slabs, []

    def another(self: Any) -> Any:
        for overwrite in (False, True):
            with pytest.raises(BlockingIOError, match=r"another conversion into this folder is at work; .*store"):
                hmf.convert(path, folder, slab_bytes=SLAB, overwrite=overwrite)
            refused.append(overwrite)
        return original(self)

    monkeypatch.setattr(conversion._Streamed, "_user_slabs", another)
    assert_same_ratings(hmf.convert(path, folder, slab_bytes=SLAB), hmf.Ratings.from_file(path))
    assert refused == [False, True]


def test_folders_that_stay_empty_are_removed(tmp_path):
    with pytest.raises(RatingsError):
        hmf.convert(sp.csr_array([[np.nan]]), tmp_path / "deep" / "store")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def store(tmp_path) -> hmf.Store:
    """`planted()` with labels, in slabs of a few rows."""
    ids = {"user_ids": [f"u{k}" for k in range(60)], "item_ids": np.arange(40) * 3}
    return hmf.convert(hmf.Ratings.from_matrix(planted(), **ids), tmp_path / "store", slab_bytes=SLAB)


def rewrite_manifest(store: hmf.Store, **changes: Any) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text()) | changes
    manifest["checksum"] = seal(manifest)
    (store.path / "manifest.json").write_text(json.dumps(manifest))


def test_sizes_are_checked_when_a_store_is_opened(store):
    path = store.path / "item-000002.indices.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        StoreError, match=r"item-000002\.indices\.npy' is truncated: \d+ bytes, \d+ were written; convert"
    ):
        hmf.Store.open(store.path)
    path.write_bytes(content + b"x")
    with pytest.raises(StoreError, match=r"item-000002\.indices\.npy' is too long"):
        hmf.Store.open(store.path)
    path.unlink()
    with pytest.raises(StoreError, match=r"item-000002\.indices\.npy' is missing"):
        hmf.Store.open(store.path)


@pytest.mark.parametrize(
    "name", ["user-000001.indptr.npy", "item-000000.values.npy", "user_ids.npy", "item-degrees.npy"]
)
def test_an_altered_byte_is_found_where_it_is_read(name, store):
    path = store.path / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    opened = hmf.Store.open(store.path)
    with pytest.raises(StoreError, match=rf"{name}' was altered \(CRC-32 [0-9a-f]+, [0-9a-f]+ when it was written\)"):
        opened.verify()
    with pytest.raises(StoreError, match=rf"{name}' was altered"):
        hmf.ExplicitALS(biases=False, factors=2, device="cpu", iterations=1).fit(hmf.Store.open(store.path))


def alter(path: Path) -> None:
    """Other content of the same size, in place; indices beyond all rows."""
    array = np.load(path)
    array[:] = 10**6
    with open(path, "r+b") as file:
        np.save(file, array)


def cut(path: Path) -> None:
    os.truncate(path, 200)


@pytest.mark.parametrize("devices", ["cpu", ["cpu", "cpu"]])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (alter, r"was altered \(CRC-32 .*convert the ratings again"),
        (cut, r"is truncated: 200 bytes, \d+ were written"),
        (Path.unlink, r"cannot be read \(No such file"),
    ],
)
def test_what_is_damaged_between_iterations_does_not_reach_a_kernel(damage, problem, devices, store):
    def spoil(model: Any, record: dict[str, float]) -> None:
        if record["iteration"] == 2:
            damage(store.path / "item-000001.indices.npy")

    model = hmf.ExplicitALS(biases=False, factors=2, device=devices, iterations=5, random_state=0)
    with pytest.raises(StoreError, match=rf"item-000001\.indices\.npy' {problem}"):
        model.fit(store, callback=spoil)
    assert model.n_iter_ == 2


def test_a_store_that_is_replaced_while_it_is_used_is_to_be_opened_again(store):
    store.verify()
    hmf.convert(planted() * 2, store.path, overwrite=True)
    with pytest.raises(StoreError, match=r"another conversion has replaced the store since it was opened: open it a"):
        store.to_ratings()
    hmf.Store.open(store.path).verify()


def test_a_pickled_model_outlives_the_store_it_was_fitted_on(store):
    model = hmf.ImplicitALS(factors=2, device="cpu", iterations=2, random_state=0).fit(store)
    pickled, ids = pickle.dumps(model), model.recommend(3, N=4)[0]
    np.testing.assert_array_equal(pickle.loads(pickled).recommend(3, N=4)[0], ids)
    store.path.rename(store.path.parent / "elsewhere")
    alone = pickle.loads(pickle.dumps(copy.deepcopy(pickle.loads(pickled))))
    np.testing.assert_array_equal(alone.user_factors, model.user_factors)
    with pytest.raises(FileNotFoundError, match="there is no such store"):
        alone.recommend(3, N=4)
    alone.recommend(3, N=4, user_items=planted()[[3]])


def test_a_file_that_was_only_touched_is_read_again_and_serves(store):
    store.verify()
    os.utime(store.path / "user-000001.values.npy", (1, 1))
    assert store.to_ratings().nnz == store.nnz


def test_what_goes_after_it_was_opened_is_missed(store):
    (store.path / "user-000001.indices.npy").unlink()
    with pytest.raises(StoreError, match=r"user-000001\.indices\.npy' cannot be read"):
        store.verify()


def test_manifests_are_checked(store):
    path = store.path / "manifest.json"
    whole = json.loads(path.read_text())
    for text, problem in (
        ("{", "is no manifest of a store"),
        ("[]", "is no manifest of a store"),
        (json.dumps(whole | {"format": "zarr"}), "is a manifest of 'zarr'"),
        (json.dumps(whole | {"version": 2}), "has version 2; this hybridmf reads version 1: upgrade"),
        (json.dumps(whole | {"nnz": 3}), "was altered: its checksum does not fit"),
    ):
        path.write_text(text)
        with pytest.raises(StoreError, match=problem):
            hmf.Store.open(store.path)


def replace_array(store: hmf.Store, name: str, array: np.ndarray | bytes) -> hmf.Store:
    """A store one of whose files was replaced, checksum and all."""
    if isinstance(array, bytes):
        (store.path / name).write_bytes(array)
    else:
        np.save(store.path / name, array)
    found = conversion.file_checksum(store.path / name)
    files = store._manifest["files"] | {name: {"bytes": (store.path / name).stat().st_size, "crc32": found}}
    rewrite_manifest(store, files=files)
    return hmf.Store.open(store.path)


def test_files_that_contradict_each_other_do_not_reach_a_kernel(store):
    slab = store.slabs()[0]
    matrix = slab.matrix()
    indices, indptr, values = np.array(matrix.indices), np.array(matrix.indptr, dtype=np.int64), np.array(matrix.data)
    moved = indptr.copy()
    moved[1] += 1
    degrees = store.degrees("item")
    cases = {
        "user-000000.indices.npy": [np.full_like(indices, 40), indices[::-1].copy(), -indices - 1],
        "user-000000.indptr.npy": [indptr + 1, indptr[::-1].copy(), moved],
        "user-000000.values.npy": [np.full_like(values, np.nan), np.zeros_like(values)],
    }
    for name, arrays in cases.items():
        original = np.load(store.path / name)
        for array in arrays:
            with pytest.raises(StoreError, match="contradicts the files beside it"):
                replace_array(store, name, array).slabs()[0].matrix()
        store = replace_array(store, name, original)
    for name, array, problem in (
        (
            "user-000000.indices.npy",
            indices.view(np.float32),
            "holds float32 of shape .*, expected a vector of .* int32",
        ),
        ("user-000000.indices.npy", indices[None], r"holds .* of shape \(1, .*, expected a vector of \d+ int32"),
        ("user-000000.indices.npy", b"\x93NUMPY\2\0", r"is no array \(version \(2, 0\) of .npy\)"),
        ("user-000000.indices.npy", b"PK\3\4", "is no array"),
        ("user-000000.indices.npy", b"\x93NUMPY\1\0v\0" + b"[" * 118, "is no array"),
        ("item-degrees.npy", degrees[::-1].copy(), "contradicts the sizes of slabs"),
        ("item-degrees.npy", -degrees, "contradicts the sizes of slabs"),
        ("item-degrees.npy", np.full_like(degrees, 2**62), "contradicts the sizes of slabs"),
        ("item_ids.npy", np.arange(2), "has 2 labels for 40 rows"),
        ("item_ids.npy", np.arange(40) // 2, "has a label more than once"),
        ("item_ids.npy", np.arange(40.0), "holds float64 of shape .*, expected a vector of int64 or uint64 or uint8"),
        ("item_ids.npy", np.zeros(3, np.uint8), "holds no labels"),
        ("item_ids.npy", np.full(10**5, ord("["), np.uint8), "holds no labels"),
    ):
        original = (store.path / name).read_bytes()
        size = len(original)
        content = array if isinstance(array, np.ndarray) else array + b"\n" * (size - len(array))
        with pytest.raises(StoreError, match=rf"{name}' {problem}"):
            replace_array(store, name, content).verify()
        store = replace_array(store, name, original)
    store.verify()


@pytest.mark.parametrize("zeros", [0, 5])
def test_values_that_the_manifest_does_not_tell_of(zeros, tmp_path):
    """In one slab, or in the sum of all; explicit zeros in other rows; another transpose."""
    matrix = as_csr(planted()).copy()
    matrix.data[: 2 * zeros : 2] = 0
    ratings = hmf.Ratings.from_matrix(matrix)

    def changed(change, name="user-000000.values.npy"):
        store = hmf.convert(ratings, tmp_path / "store", slab_bytes=SLAB, overwrite=True)
        return replace_array(store, name, change(np.load(store.path / name)))

    def swapped(values):
        first, second = np.flatnonzero(values != values[-1])[-1], len(values) - 1
        values[[first, second]] = values[[second, first]]
        return values

    for change in (lambda values: values * 2, lambda values: values / 2, lambda values: -values):
        with pytest.raises(
            StoreError, match=r"manifest\.json' has other sums or magnitudes than the values of slabs of u"
        ):
            changed(change).to_ratings()
        with pytest.raises(StoreError, match="has other sums or magnitudes"):
            hmf.ExplicitALS(factors=2, device="cpu", iterations=1).fit(changed(change))
    with pytest.raises(StoreError, match="slabs of items that are not the transpose of the slabs of users"):
        changed(swapped).verify()
    if zeros:
        with pytest.raises(StoreError, match="contradicts the files beside it"):
            changed(lambda values: np.roll(values, 1)).to_ratings()
        with pytest.raises(StoreError, match=r"user-degrees-nonzero\.npy' contradicts the sizes of slabs"):
            changed(lambda degrees: degrees + 1, "user-degrees-nonzero.npy").to_ratings()


# ------------------------------------------------------------------------------------------------ manifests

WRONG = [
    -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf"), True, None, "", "0", "user", [], [0], [-1],
    [[]], [0, 1], [1, 0], [0.0, 1.0], {}, {"user": []}, {"../x": {"bytes": 1, "crc32": "0"}},
]  # fmt: skip
"""What a field may hold instead."""

PATHS = [
    ["shape"], ["shape", 0], ["shape", 1], ["nnz"], ["zeros"], ["dtype"], ["bounds"], ["bounds", "user"],
    ["bounds", "user", 0], ["bounds", "user", 1], ["bounds", "item", -1], ["bounds", "item"], ["sums"], ["sums", "all"],
    ["sums", "nonzero"], ["magnitudes"], ["magnitudes", "all"], ["magnitudes", "nonzero"], ["magnitudes", "all", 0],
    ["magnitudes", "nonzero", 1], ["files"], ["files", "user-degrees.npy"], ["files", "user-000001.values.npy"],
    ["files", "item-000000.indices.npy", "bytes"], ["files", "item-000000.indptr.npy", "crc32"], ["version"],
    ["format"], ["files", "user_ids.npy"], ["files", "user_ids.npy", "bytes"], ["files", "new.npy"], ["title"],
]  # fmt: skip


@functools.cache
def small_store(zeros: int) -> tuple[Path, str, hmf.Ratings]:
    """A store, what its manifest says, and its ratings."""
    matrix = as_csr(planted()).copy()
    matrix.data[: 2 * zeros : 2] = 0
    ratings = hmf.Ratings.from_matrix(matrix, user_ids=[f"u{k}" for k in range(60)])
    path = Path(tempfile.mkdtemp(prefix="hybridmf-tests-")) / "store"
    store = hmf.convert(ratings, path, slab_bytes=SLAB)
    return path, (store.path / "manifest.json").read_text(), ratings


def spoil(manifest: Any, where: list[Any], change: Callable[[Any], Any]) -> None:
    *outer, last = where
    for key in outer:
        manifest = manifest[key]
    found = manifest[last] if isinstance(manifest, list) or last in manifest else None
    new = change(found)
    if new is DELETED:
        del manifest[last]
    else:
        manifest[last] = new


DELETED = object()
CHANGES = st.one_of(
    st.sampled_from(WRONG).map(lambda value: lambda _: value),
    st.just(lambda found: DELETED if found is not None else 1),
    st.integers(-3, 3).map(
        lambda by: lambda found: found + by if isinstance(found, (int, float)) else [found] * abs(by)
    ),
    st.just(lambda found: found[::-1] if isinstance(found, (str, list)) else found),
    st.just(lambda found: found * 2 if isinstance(found, (list, int, float)) else found),
)


@given(st.integers(0, 1), st.lists(st.tuples(st.sampled_from(PATHS), CHANGES), min_size=1, max_size=2))
@settings(deadline=None, max_examples=300)
def test_a_manifest_that_contradicts_itself_is_refused_or_harmless(zeros, changes):
    """Any field, with a checksum to match: the same ratings or a StoreError, nothing else."""
    path, text, expected = small_store(5 * zeros)
    manifest = json.loads(text)
    for where, change in changes:
        with suppress(KeyError, IndexError, TypeError, AttributeError):  # the first change took its place away
            spoil(manifest, where, change)
    manifest["checksum"] = seal(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    try:
        store = hmf.Store.open(path)
        found = store.to_ratings()
        matrix = StoreMatrix(store, drop_zeros=True)
        labels, numbers = store.user_ids, (matrix.nnz, matrix.largest_slab, *matrix.ends, matrix.total)
        store.verify()
    except StoreError:
        return
    finally:
        (path / "manifest.json").write_text(text)
    assert_same_matrix(found.user_items, expected.user_items)
    assert (store.shape, store.nnz) == (expected.shape, expected.nnz)
    known = StoreMatrix(hmf.Store.open(path), drop_zeros=True)
    assert numbers == pytest.approx((known.nnz, known.largest_slab, *known.ends, known.total), rel=1e-6)
    assert labels is None or labels.tolist() == expected.user_ids.tolist()


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        (["bounds", "user"], [0, 60], "the manifest|files has the unknown user-00000"),
        (["bounds", "user", 1], 61, "bounds of users has 61, expected 0 to 60"),
        (["bounds", "item", 1], 0, "bounds of items do not ascend from 0 to 40"),
        (["nnz"], -1, "nnz has -1, expected 0 to 2400"),
        (["nnz"], 10**18, "nnz has 1000000000000000000, expected 0 to 2400"),
        (["nnz"], 490, "nnz is 490, slabs of users have 487 entries"),
        (["shape"], [60], r"shape is \[60\], expected a list of 2"),
        (["sums", "all"], 1e5, "sums has 100000.0, expected a number of magnitude"),
        (["sums", "all"], 1.0, "sums differ: 1.0 and"),
        (["magnitudes", "nonzero"], [-1, 5], "magnitudes of nonzero values are -1.0 to 5.0"),
        (["magnitudes", "all"], [], r"magnitudes of all values are \[\], expected"),
        (["files", "user-degrees.npy", "bytes"], 0, "bytes of user-degrees.npy has 0, expected 128 to"),
        (["files", "user-degrees.npy", "bytes"], 600, "user-degrees.npy has 472 bytes of numbers, expected 480"),
        (["files", "user-degrees.npy", "crc32"], "0", "crc32 of user-degrees.npy is '0'"),
        (["files", "user-degrees.npy"], [], "the entry of user-degrees.npy is a list, expected an object"),
        (["files", "user-000000.values.npy", "bytes"], 129, "user-000000.[a-z]+.npy has .* bytes of numbers"),
        (["files", "../../etc/passwd"], {}, "files has the unknown ../../etc/passwd"),
        (["dtype"], "float64", "dtype is 'float64', expected 'float32'"),
    ],
)
def test_a_manifest_names_the_field_that_is_wrong(where, value, problem, store):
    manifest = json.loads((store.path / "manifest.json").read_text())
    spoil(manifest, where, lambda _: value)
    rewrite_manifest(store, **manifest)
    with pytest.raises(StoreError, match=rf"manifest\.json' contradicts itself: .*{problem}"):
        hmf.Store.open(store.path)


def test_a_slab_has_no_more_entries_than_fit(store):
    manifest = json.loads((store.path / "manifest.json").read_text())
    fewest = int(np.argmin(np.diff(manifest["bounds"]["user"])))
    for slab in range(len(store.slabs())):
        for array in ("indices", "values"):
            manifest["files"][f"user-{slab:06d}.{array}.npy"]["bytes"] = 128 + 4 * 487 * (slab == fewest)
    rewrite_manifest(store, **manifest)
    with pytest.raises(StoreError, match=rf"itself: slab {fewest} of users has 487 entries, at most \d+ fit"):
        hmf.Store.open(store.path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"format": ' + '{"a": ' * 10**5, "1" * 5000, "\ud800", "null", "[1]"])
def test_what_is_no_manifest(text, store):
    (store.path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(StoreError, match="is no manifest of a store"):
        hmf.Store.open(store.path)
    cut(store.path / "user-000000.values.npy")
    with pytest.raises(StoreError, match=r"is truncated: .*; convert the ratings again"):
        store.slabs()[0].matrix()


# ------------------------------------------------------------------------------------------------------- parts


@given(st.lists(st.integers(0, 30), max_size=50), st.integers(1, 100))
@settings(deadline=None, max_examples=100)
def test_slabs_cover_all_rows(degrees, entries):
    bounds = slab_bounds(np.array(degrees, dtype=np.int64), entries)
    assert bounds[0] == 0 and bounds[-1] == len(degrees)
    assert (np.diff(bounds) > 0).all()
    sizes = slab_entries(bounds, np.array(degrees, dtype=np.int64))
    assert sizes.sum() == sum(degrees)
    assert all(size <= entries or rows == 1 for size, rows in zip(sizes, np.diff(bounds), strict=True))


def test_slabs_of_a_matrix_in_memory_are_its_rows():
    matrix = as_csr(planted())
    slabs = MemorySlabs.cut(matrix, 50)
    assert len(slabs.bounds) > 4
    parts = [slabs.matrix(k) for k in range(len(slabs.bounds) - 1)]
    assert_same_matrix(as_csr(sp.vstack(parts, format="csr")), matrix)
    assert all(np.shares_memory(part.data, matrix.data) for part in parts if part.nnz)
    np.testing.assert_array_equal(slabs.ends, [np.abs(matrix.data).min(), np.abs(matrix.data).max()])
    assert (slabs.nnz, slabs.dtype, slabs.shape) == (matrix.nnz, np.float32, matrix.shape)
    assert len(MemorySlabs.cut(as_csr(sp.csr_array((3, 2))), 5).ends) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_do_not_depend_on_parts(dtype):
    values = np.random.default_rng(0).normal(size=3 * SUMMED + 77).astype(np.float32).astype(dtype)
    whole = entry_sum([values])
    assert whole == pytest.approx(float(values.astype(float).sum()), rel=1e-12)
    for cuts in ([1, 5, SUMMED], [SUMMED, 2 * SUMMED], [SUMMED - 1, SUMMED - 1, 3 * SUMMED + 3]):
        assert entry_sum(np.split(values, cuts)) == whole
    assert entry_sum([]) == 0


def test_a_store_is_pickled_by_its_path(store):
    other = pickle.loads(pickle.dumps(store))
    assert other.path == store.path and other.nnz == store.nnz
    assert copy.deepcopy(store).shape == store.shape


# ------------------------------------------------------------------------------------------------------- fits

FITS = {
    "explicit": (hmf.ExplicitALS, {"biases": False}),
    "biases": (hmf.ExplicitALS, {"biases": True}),
    "biases, float64, balance": (hmf.ExplicitALS, {"biases": True, "dtype": "float64", "balance": True}),
    "explicit cg": (hmf.ExplicitALS, {"biases": False, "solver": "cg", "regularization_scaling": 0.5}),
    "rank1": (hmf.ExplicitALS, {"biases": False, "assembly": "rank1"}),
    "bals": (hmf.ExplicitALS, {"biases": False, "assembly": "bals"}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "implicit cg": (hmf.ImplicitALS, {"solver": "cg"}),
    "implicit blas3": (hmf.ImplicitALS, {"assembly": "blas3"}),
    "subspace": (hmf.ImplicitALS, {"solver": "subspace", "block_size": 2}),
    "implicit balance": (hmf.ImplicitALS, {"balance": True, "regularization_scaling": "count"}),
}


def fitted(kind: str, data: Any, fit: dict[str, Any] | None = None, **options: Any) -> Any:
    cls, own = FITS[kind]
    common = {"factors": 4, "iterations": 3, "random_state": 0, "device": "cpu"}
    return cls(**(common | own | options)).fit(data, **(fit or {}))


def assert_same_fit(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.user_factors_, other.user_factors_)
    np.testing.assert_array_equal(one.item_factors_, other.item_factors_)
    for name in ("user_bias_", "item_bias_"):
        if getattr(other, name) is not None:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.mean_ == other.mean_
    hidden = ("seconds",)
    for mine, theirs in zip(one.history_, other.history_, strict=True):
        assert {k: v for k, v in mine.items() if k not in hidden} == {
            k: v for k, v in theirs.items() if k not in hidden
        }


@pytest.mark.parametrize("kind", FITS)
def test_a_fit_on_a_store_has_the_bits_of_one_in_memory(kind, tmp_path):
    matrix = planted()
    matrix.data[::9] = 0  # entries for explicit feedback, none for implicit
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=SLAB)
    look = {"callback": lambda model, record: None}
    model = fitted(kind, store, look)
    assert model.plan_.streamed == "disk"
    assert_same_fit(model, fitted(kind, matrix, look, reorder="none"))


def test_long_rows_too(tmp_path):
    from hybridmf.native import _als

    matrix = planted(6, _als.LONG_ROW + 500, 0.98)
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes="64KiB")
    assert_same_fit(fitted("implicit", store, iterations=1), fitted("implicit", matrix, iterations=1))


def test_what_looks_on_and_serves_sees_no_difference(store, tmp_path):
    ratings = store.to_ratings()
    train, test = hmf.split(ratings, 0.2, random_state=0)
    stored = hmf.convert(train, tmp_path / "train", slab_bytes=SLAB)
    for kind in ("explicit", "implicit"):
        one, other = (fitted(kind, data, {"validation": test}) for data in (stored, train))
        assert_same_fit(one, other)
        users = np.array([59, 0, 7, 30, 7])
        for found, expected in zip(one.recommend(users, N=5), other.recommend(users, N=5), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert one.score(test) == other.score(test)
        assert one.score(stored) == other.score(train)
        assert one.objective(stored) == other.objective(train)
        np.testing.assert_array_equal(one.transform(stored), other.transform(train))
        np.testing.assert_array_equal(one.predict(stored), other.predict(train))
        assert one.user_ids_.tolist() == other.user_ids_.tolist()
        assert_same_fit(pickle.loads(pickle.dumps(one)), other)
        for model in (one, other):
            model.partial_fit_users(3, train.user_items[:1])
        np.testing.assert_array_equal(one.recommend(3)[0], other.recommend(3)[0])


def test_a_model_of_a_store_is_saved_with_what_users_have_seen_if_that_fits(store, tmp_path, monkeypatch):
    model = fitted("explicit", store)
    model.save(tmp_path / "model.safetensors")
    loaded = hmf.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.recommend(4)[0], model.recommend(4)[0])
    monkeypatch.setattr("hybridmf.data.store.available_memory", lambda: 100)
    with pytest.raises(MemoryBudgetError, match=r"what users have seen takes .* include_seen=False"):
        model.save(tmp_path / "other.safetensors")
    model.save(tmp_path / "other.safetensors", include_seen=False)
    with pytest.raises(ValueError, match="without what its users have seen"):
        hmf.load(tmp_path / "other.safetensors").recommend(4)


@pytest.mark.parametrize(("first", "second"), [("store", "memory"), ("memory", "store")])
def test_a_fit_resumes_on_a_store_and_off_it(first, second, store, tmp_path):
    data = {"store": store, "memory": store.to_ratings()}
    for kind in ("biases, float64, balance", "implicit"):
        folder = tmp_path / f"{kind[:3]}"
        fitted(kind, data[first], {"checkpoint": folder}, iterations=2)
        model = fitted(kind, data[second], {"resume_from": folder}, iterations=4)
        assert model.n_iter_ == 4
        assert_same_fit(model, fitted(kind, data[first], iterations=4))
    other = hmf.convert(planted(seed=3), tmp_path / "other")
    with pytest.raises(ModelFileError, match="was written for other data"):
        fitted("implicit", other, {"resume_from": tmp_path / "imp"})


def test_reordering_needs_all_ratings(store):
    for how in ("both", "rows", True):
        with pytest.raises(ValueError, match=r"reorder='\w+' needs all ratings in memory.*store\.to_ratings\(\)"):
            fitted("explicit", store, reorder=how)
    assert fitted("bals", store).plan_.reorder == "none"


def test_sgd_and_ccd_load_a_store_if_there_is_memory(store, monkeypatch, caplog):
    ratings = store.to_ratings()
    for model in (
        hmf.SGD(factors=3, iterations=2, device="cpu", random_state=0),
        hmf.CCD(factors=3, iterations=2, device="cpu", random_state=0),
    ):
        with caplog.at_level(logging.INFO, "hybridmf"):
            found = model.fit(store).user_factors.copy()
        assert "loading the store" in caplog.text
        assert model.user_ids_.tolist() == ratings.user_ids.tolist()
        np.testing.assert_array_equal(found, model.fit(ratings).user_factors)
    monkeypatch.setattr("hybridmf.data.store.available_memory", lambda: 100)
    with pytest.raises(MemoryBudgetError, match="ExplicitALS and ImplicitALS fit a store without loading it"):
        model.fit(store)


def test_plan_and_compare_take_a_store(store):
    plan = hmf.plan(store, hmf.ExplicitALS(biases=False, factors=4, device="cpu"))
    largest = max(slab.matrix().nnz for side in ("user", "item") for slab in store.slabs(side))
    assert (plan.streamed, plan.slab) == ("disk", largest)
    assert f"streamed  from disk in slabs of up to {largest:,} entries" in str(plan)
    whole = hmf.plan(store.to_ratings(), hmf.ExplicitALS(biases=False, factors=4, device="cpu"))
    assert (whole.streamed, whole.slab) == ("", 0)
    assert plan.bytes["ratings"] < whole.bytes["ratings"]
    result = hmf.compare(store, hmf.ExplicitALS(biases=False, factors=2, iterations=1), devices=["cpu"])
    assert result.name == "store"


def test_a_fit_on_a_store_holds_no_more_than_a_few_slabs(tmp_path):
    matrix = as_csr(planted(1000, 600, 0.7))
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes="32KiB")
    fitted("explicit", store, num_threads=1)
    tracemalloc.start()
    try:
        fitted("explicit", store, num_threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * matrix.nnz  # a quarter of both orientations


def test_a_store_without_entries_is_refused(tmp_path):
    store = hmf.convert(sp.csr_array((3, 4)), tmp_path / "store")
    with pytest.raises(RatingsError, match="has no entries"):
        fitted("explicit", store)


def test_threads_read_slabs_at_the_same_time(tmp_path, monkeypatch):
    """NumPy has Python parse each file's header; Python 3.11 fails now and then where two threads parse at a time."""
    store = hmf.convert(planted(60, 40, 0.3), tmp_path / "store", slab_bytes="4KiB")
    at_once, most, parsed = [0], [0], []
    layout = stores._layout

    def slow(path):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.002)
        parsed.append(Path(path).name)
        at_once[0] -= 1
        return layout(path)

    monkeypatch.setattr(stores, "_layout", slow)
    matrix = StoreMatrix(store)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            slabs = list(pool.map(lambda _: [matrix.matrix(slab) for slab in range(len(matrix.bounds) - 1)], range(4)))
    for ours, theirs in zip(slabs[0], slabs[1], strict=True):
        np.testing.assert_array_equal(ours.toarray(), theirs.toarray())
    assert most == [1]
    assert len(parsed) <= 4 * len(set(parsed))  # once for each thread at most, whatever is read again
