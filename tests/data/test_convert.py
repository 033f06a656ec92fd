"""Conversion of every format is what `Ratings.from_file` reads, and survives kills and full disks."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import subprocess
import sys
import tempfile
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.data import convert as conversion
from hybridmf.data.fingerprint import fingerprint
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import DuplicateEntriesError, MemoryBudgetError, RatingsError, StoreError
from support.ratings import planted
from support.stores import SLAB, assert_same_matrix


def assert_same_ratings(store: hmf.Store, expected: hmf.Ratings) -> None:
    """Both orientations, labels and what the manifest says."""
    found = store.to_ratings()
    assert_same_matrix(found.user_items, expected.user_items)
    assert_same_matrix(StoreMatrix(store, "item").load().csr, expected.item_users)
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
@settings(max_examples=12)
def test_any_entries_and_slabs(entries, slab_bytes):

    with tempfile.TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "r.csv", entries)
        store = hmf.convert(path, Path(folder) / "store", slab_bytes=slab_bytes, duplicates="sum")
        expected = hmf.Ratings.from_file(path, duplicates="sum")
        assert_same_ratings(store, expected)
        ratings = StoreMatrix(store, "user", np.float64, drop_zeros=True)
        assert_same_matrix(ratings.load().csr, as_csr(expected, dtype=np.float64, drop_zeros=True))
        assert fingerprint(ratings) == fingerprint(ratings.load().csr)


def test_real_ratings(data_dir, tmp_path):
    path = tmp_path / "ratings.dat.gz"
    with gzip.open(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz", "rb") as file:
        path.write_bytes(gzip.compress(b"".join(islice(file, 250_000)), 1))
    store = hmf.convert(path, tmp_path / "store", slab_bytes="256KiB", memory_limit="4MiB")
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
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 2**30)
    with pytest.raises(MemoryBudgetError, match=r"2,000,000,000 rows and 3 columns by its header.*1,024 MiB are free"):
        read(tmp_path / "r.mtx")
    assert [path.name for path in tmp_path.iterdir()] == ["r.mtx"]


@pytest.mark.parametrize("path", [None, 3, b"store", "", "a\0b"])
def test_invalid_paths_of_stores_are_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for act in (lambda: hmf.convert(planted(), path), lambda: hmf.Store.open(path)):
        with pytest.raises((TypeError, ValueError), match="path must be a path"):
            act()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["strings", "mtx", "parquet of large integers"])
def test_a_store_becomes_another_one_slab_by_slab(kind, tmp_path, monkeypatch):
    """The store that its file would have become, with finer and with coarser slabs."""
    path = SOURCES[kind](tmp_path)
    straight = hmf.convert(path, tmp_path / "straight", slab_bytes=SLAB)
    monkeypatch.setattr(hmf.Store, "user_items", property(lambda self: pytest.fail("loaded into memory")))
    coarse = hmf.convert(path, tmp_path / "coarse", slab_bytes="1MiB")
    for number, source in enumerate((coarse, coarse.path, str(coarse.path))):
        again = hmf.convert(source, tmp_path / f"again{number}", slab_bytes=SLAB)
        assert again.checksum == straight.checksum != coarse.checksum
    assert hmf.convert(straight, tmp_path / "merged", slab_bytes="1MiB").checksum == coarse.checksum


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


def test_a_failed_conversion_keeps_the_old_store(tmp_path):
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_conversion_that_lost_the_old_store_says_so(error, tmp_path, monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise error

    for overwrite in (False, True):
        monkeypatch.setattr(conversion, "_cut", fail)
        caplog.clear()
        with pytest.raises(error):
            hmf.convert(planted(), tmp_path / "store", overwrite=overwrite)
        said = f"{tmp_path / 'store'}: the old store is gone: overwrite=True removed it before this conversion"
        assert any(said in message for message in caplog.messages) == overwrite
        monkeypatch.undo()
        hmf.convert(planted(), tmp_path / "store", overwrite=overwrite)


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
    monkeypatch.setattr(conversion, "_parquet", lambda path, options, _: original(path, options, 64))
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
def test_options_are_validated_first(options, problem, tmp_path):
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
    limit = 1.5 * 2**20
    assert limit < 24 * len(pairs)  # what ids and values alone would take
    for name in ("once", "twice"):
        tracemalloc.start()
        try:
            hmf.convert(path, tmp_path / name, memory_limit="1MiB", slab_bytes="64KiB")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak < limit:  # other threads and growing tables of the process may allocate during one of them
            break
    assert peak < limit


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


def test_a_store_is_replaced_only_on_request(tmp_path):
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
import numpy, scipy.sparse  # takes longer than all of the conversions
hmf.convert, hmf.Store

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


def test_a_conversion_that_is_killed_anywhere_starts_again(tmp_path):
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
        assert_same_matrix(StoreMatrix(store, "item").load().csr, expected.item_users)


@pytest.mark.parametrize("stage", ["_read", "_sort", "_stored_entries"])
def test_ctrl_c_leaves_no_files(stage, tmp_path, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path = write_text(tmp_path / "r.csv", triplets())
    monkeypatch.setattr(conversion._Streamed, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        hmf.convert(path, tmp_path / "store", slab_bytes=SLAB)
    assert [each.name for each in tmp_path.iterdir()] == ["r.csv"]


@pytest.mark.parametrize("step", [1, 2**40])
def test_ids_of_chunks_are_known_in_order_and_sorted_only_if_some_are_new(step):
    chunks = [np.random.default_rng(k).integers(-50 * (k + 1), 50 * (k + 1), 200) * step for k in range(4)]
    ids = conversion._Integers()
    for chunk in chunks:
        np.testing.assert_array_equal(ids.raw(chunk), chunk)
    np.testing.assert_array_equal(ids.known, np.unique(np.concatenate(chunks)))
    known = ids.known
    ids.raw(chunks[0])
    assert ids.known is known


def test_an_unfinished_conversion_is_replaced(tmp_path, caplog):
    """Also that of an older version, which could be continued."""
    path, folder = write_text(tmp_path / "r.csv", triplets()), tmp_path / "store"
    (folder / "work").mkdir(parents=True)
    (folder / "work" / "users.bin").write_bytes(b"12345678")
    (folder / "user-000000.indptr.npy").write_bytes(b"half")
    (folder / "unfinished.json").write_text('{"version": 1, "stage": "read", "identity": null}')
    with pytest.raises(StoreError, match="unfinished conversion; run hybridmf convert again, or delete the folder"):
        hmf.Store.open(folder)
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert_same_ratings(hmf.convert(path, folder, slab_bytes=SLAB), hmf.Ratings.from_file(path))
    assert "removed an unfinished conversion" in caplog.text


@pytest.mark.parametrize("kind", ["text", "matrix"])
def test_a_full_disk_at_any_point_is_reported_and_leaves_no_files(kind, tmp_path, monkeypatch):
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
                hmf.convert(source, tmp_path / "store", slab_bytes=1000)
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


def test_a_second_conversion_into_a_folder_is_refused_and_the_first_continues(tmp_path, monkeypatch):
    path, folder = write_text(tmp_path / "r.csv", triplets()), tmp_path / "deep" / "store"
    original, refused = conversion._Streamed._sort, []

    def another(*given: Any) -> Any:
        for overwrite in (False, True):
            with pytest.raises(BlockingIOError, match=r"another conversion into this folder is running; .*store"):
                hmf.convert(path, folder, slab_bytes=SLAB, overwrite=overwrite)
            refused.append(overwrite)
        return original(*given)

    monkeypatch.setattr(conversion._Streamed, "_sort", another)
    assert_same_ratings(hmf.convert(path, folder, slab_bytes=SLAB), hmf.Ratings.from_file(path))
    assert refused == 2 * [False, True]  # of users and of items


def test_folders_that_stay_empty_are_removed(tmp_path):
    with pytest.raises(RatingsError):
        hmf.convert(sp.csr_array([[np.nan]]), tmp_path / "deep" / "store")
    assert list(tmp_path.iterdir()) == []
