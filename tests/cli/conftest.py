"""A folder with rating files and a fitted model, and a store of the same ratings."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import hybridmf as hmf
from hybridmf.tools import demo
from support.command_line import succeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """ratings.csv (labels u0.., m0..), titles.csv, and model.safetensors trained on the former."""
    folder = tmp_path_factory.mktemp("cli")
    films = demo.generate(90, 60, seed=3)
    with open(folder / "ratings.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "what", "stars"])
        for user, item, value in zip(films.users, films.items, films.values, strict=True):
            writer.writerow([f"u{user}", f"m{item}", int(value)])
    with open(folder / "titles.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "title"), *((f"m{k}", title) for k, title in enumerate(films.titles))])
    succeed("fit", folder / "ratings.csv", "-o", folder / "model.safetensors", "--factors", 4, "--iterations", 3)
    return folder


@pytest.fixture
def store(folder, tmp_path) -> Path:
    """A store of ratings.csv."""
    return hmf.convert(folder / "ratings.csv", tmp_path / "store", slab_bytes="4KiB").path
