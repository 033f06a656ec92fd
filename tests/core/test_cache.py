"""Where measurements of a machine are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridmf.core.cache import CACHE_DIR, cache_dir
from hybridmf.plan.machine import calibration_file


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    assert not (tmp_path / "here").exists()  # a request does not write


def test_the_home_folder_may_be_abbreviated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_DIR, "~/mine")
    assert cache_dir() == tmp_path / "mine"
    assert calibration_file() == tmp_path / "mine" / "machine.json"
    monkeypatch.setenv(CACHE_DIR, "~nobody-of-that-name/mine")
    assert cache_dir() == Path("~nobody-of-that-name/mine")


@pytest.mark.parametrize("value", ["", "  ", None])
def test_without_it_the_folder_is_in_the_cache_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(CACHE_DIR, raising=False)
    else:
        monkeypatch.setenv(CACHE_DIR, value)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: str(tmp_path / name))
    assert cache_dir() == tmp_path / "hybridmf"
