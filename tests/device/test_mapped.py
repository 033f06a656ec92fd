"""Arrays that are mapped from files, read as files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridmf.device.mapped import file_behind, reader_of
from hybridmf.errors import StoreError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "values.npy"
    np.save(path, np.arange(5000, dtype=np.int32))
    return path


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@given(first=st.integers(0, 4999), second=st.integers(0, 4999), at=st.integers(0, 400))
def test_views_are_found_where_they_are_in_the_file(saved: Path, first: int, second: int, at: int) -> None:
    mapped = np.load(saved, mmap_mode="r")
    for whole in (mapped, mapped.view(np.ndarray)):
        view = as_bytes(whole[min(first, second) :][: abs(first - second) + 1])[at:]
        if not len(view):
            continue
        found = file_behind(view)
        assert found is not None and Path(found[0]) == saved
        assert saved.read_bytes()[found[1] : found[1] + len(view)] == view.tobytes()


def test_parts_are_read_from_the_file_and_not_from_memory(saved: Path) -> None:
    source = as_bytes(np.load(saved, mmap_mode="r").view(np.ndarray)[100:])
    buffer = np.zeros(256, np.uint8)
    with reader_of(source) as read:
        read(buffer, 1024)
    np.testing.assert_array_equal(buffer, source[1024:1280])


@pytest.mark.parametrize("array", [np.arange(100.0), np.arange(100)[::2].copy()], ids=["owned", "copied"])
def test_other_arrays_are_copied(array: np.ndarray) -> None:
    assert file_behind(array) is None
    raw, buffer = as_bytes(array), np.zeros(16, np.uint8)
    with reader_of(raw) as read:
        read(buffer, 8)
    np.testing.assert_array_equal(buffer, raw[8:24])


def test_views_with_gaps_are_no_piece_of_a_file(saved: Path) -> None:
    assert file_behind(np.load(saved, mmap_mode="r")[::2]) is None


@pytest.mark.parametrize("lack", ["file", "preadv"])
def test_unreadable_files_are_copied_from_memory(lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "values.npy"
    np.save(path, np.arange(100, dtype=np.int32))
    source, buffer = as_bytes(np.load(path, mmap_mode="r")), np.zeros(16, np.uint8)
    if lack == "file":
        path.unlink()  # a temporary file that lives only where it is mapped
    else:
        monkeypatch.delattr(os, "preadv")
    with reader_of(source) as read:
        read(buffer, 8)
    np.testing.assert_array_equal(buffer.view(np.int32), [2, 3, 4, 5])


def test_writes_to_a_private_mapping_are_not_lost(saved: Path) -> None:
    private = np.load(saved, mmap_mode="c")
    private[3] = -7
    buffer = np.zeros(16, np.uint8)
    with reader_of(as_bytes(private[2:])) as read:
        read(buffer, 0)
    np.testing.assert_array_equal(buffer.view(np.int32), [2, -7, 4, 5])


def test_a_file_that_was_truncated_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    np.save(path, np.arange(100_000, dtype=np.int32))
    source = as_bytes(np.load(path, mmap_mode="r"))
    os.truncate(path, 1000)
    with reader_of(source) as read, pytest.raises(StoreError, match="truncated while it was read"):
        read(np.zeros(4096, np.uint8), 0)
