"""Outputs of commands are refused before any work where they would replace something else than a file."""

from __future__ import annotations

import os
import stat

import pytest

from hybridmf.model.base import FactorModel
from support.command_line import refuse


@pytest.mark.parametrize("command", ["fit", "recommend", "convert"])
def test_a_pipe_is_not_replaced(command, folder, tmp_path, monkeypatch):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.delattr(FactorModel, "fit")
    arguments = {
        "fit": [folder / "ratings.csv", "-o", path],
        "recommend": [folder / "model.safetensors", "--all", "-o", path],
        "convert": [folder / "ratings.csv", path],
    }[command]
    message = refuse(command, *arguments)
    assert f"path {str(path)!r} is a pipe, and only regular files are replaced" in message
    assert stat.S_ISFIFO(path.stat().st_mode) and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("command", ["fit", "recommend", "convert"])
def test_a_dash_is_no_name_of_a_file(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {
        "fit": [folder / "ratings.csv", "-o", "-"],
        "recommend": [folder / "model.safetensors", "--all", "-o", "-"],
        "convert": [folder / "ratings.csv", "-"],
    }[command]
    assert "'-' is no file" in refuse(command, *arguments)
    assert os.listdir(tmp_path) == []
    assert "/dev/stdin" in refuse("fit", "-", "-o", "m.safetensors")
    assert "'' is no file" in refuse("fit", folder / "ratings.csv", "-o", "")
