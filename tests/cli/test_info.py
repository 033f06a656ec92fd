"""`hybridmf info` of the installation, of models and of ratings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import cli
from support.command_line import facts, load_model, refuse, succeed


def test_info_of_the_installation(monkeypatch):
    known = hmf.config()
    shown = facts(succeed("info"))
    assert shown["hybridmf"] == hmf.__version__
    assert shown["instruction set"] == known["instruction_set"]
    assert shown["threads"] == str(known["threads"])
    assert known["gpu_reason"] in shown["GPU"]
    assert "GiB" in shown["memory free"]
    other = known | {"gpu": "H200; fine", "gpu_reason": "", "memory_available": None, "blas": [], "cupy": "14.0"}
    monkeypatch.setattr(cli.info, "config", lambda: dict(other))
    shown = facts(succeed("info"))
    assert (shown["GPU"], shown["memory free"], shown["blas"], shown["CuPy"]) == (
        "H200; fine", "unknown", "none found", "14.0",
    )  # fmt: skip
    monkeypatch.setattr(cli.info, "config", lambda: other | {"gpu": None, "gpu_reason": "no driver"})
    assert facts(succeed("info"))["GPU"] == "none: no driver"


def test_info_of_a_model(folder, tmp_path):
    model = load_model(folder)
    shown = facts(succeed("info", folder / "model.safetensors"))
    assert shown["model"] == "ExplicitALS"
    assert shown["users"] == "90, labels such as u0, u1, u10"
    assert shown["factors"] == "4"
    assert shown["trained on"] == f"{model.plan_.nnz:,} ratings, 3 iterations"
    assert shown["seen items"] == "stored"
    renamed = tmp_path / "renamed"
    renamed.write_bytes((folder / "model.safetensors").read_bytes())
    assert facts(succeed("info", renamed))["model"] == "ExplicitALS"
    model.save(renamed, include_seen=False)
    assert facts(succeed("info", renamed))["seen items"].startswith("not stored")


def test_info_of_ratings(tmp_path):
    matrix = sp.coo_array(([1.0, 5.0, 2.0], ([0, 0, 2], [0, 1, 1])), shape=(3, 4))
    scipy.io.mmwrite(tmp_path / "r.mtx", matrix)
    shown = facts(succeed("info", tmp_path / "r.mtx"))
    assert shown == {
        "users": "3, positions",
        "items": "4, positions",
        "ratings": "3",
        "density": "25.000%",
        "values": "1 to 5, mean 2.667",
        "ratings per user": "min 0, median 1, mean 1.0, max 2; 1 empty",
        "ratings per item": "min 0, median 0.5, mean 0.8, max 2; 2 empty",
    }
    scipy.io.mmwrite(tmp_path / "r.mtx", sp.coo_array((2, 3)))
    assert "values" not in facts(succeed("info", tmp_path / "r.mtx"))
    hmf.Ratings(sp.csr_array((0, 3))).save(tmp_path / "r.npz")
    assert facts(succeed("info", tmp_path / "r.npz"))["ratings per user"] == "none"


def test_info_as_json(folder, store, tmp_path):
    known = json.loads(succeed("info", "--json"))
    assert known == json.loads(json.dumps(hmf.config())) | {"memory_available": known["memory_available"]}
    model = load_model(folder)
    found = json.loads(succeed("info", folder / "model.safetensors", "--json"))
    assert (found["model"], found["users"], found["items"]) == ("ExplicitALS", model.n_users, model.n_items)
    assert found["ratings"] == model.plan_.nnz and found["seen_items"] is True
    assert found["history"] == model.history_ and found["parameters"] == model.get_params()
    assert found["user_labels"] == model.user_ids[:3].tolist()
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    by_file = json.loads(succeed("info", folder / "ratings.csv", "--json"))
    data, degrees = ratings.user_items.data, np.diff(ratings.user_items.indptr)
    assert by_file["values"] == {"min": data.min(), "max": data.max(), "mean": pytest.approx(data.mean())}
    assert by_file["ratings_per_user"]["median"] == np.median(degrees) and "'what'" in by_file.pop("columns")
    by_store = json.loads(succeed("info", store, "--json"))
    assert by_store.pop("slabs")["user"] >= 1 and by_store.pop("bytes") > 0
    del by_file["values"]
    assert by_store == by_file


def test_info_of_some_rows(folder):
    some = hmf.Ratings.from_file(folder / "ratings.csv", where={"stars": ["5"]})
    shown = succeed("info", folder / "ratings.csv", "--where", "stars=5")
    assert facts(shown)["ratings"] == f"{some.nnz:,}"
    for place in ((), (folder / "model.safetensors",)):
        assert "--where filters rows of a file of ratings" in refuse("info", *place, "--where", "stars=5")


def test_info_refuses(tmp_path):
    assert "does not exist" in refuse("info", tmp_path / "missing")
    (tmp_path / "m.safetensors").write_text("1,2,3")
    assert "not a complete model file" in refuse("info", tmp_path / "m.safetensors")
