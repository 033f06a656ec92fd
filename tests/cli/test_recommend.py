"""`hybridmf recommend`: tables, CSV and JSON, seen items, invalid options."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
import scipy.io

import hybridmf as hmf
from hybridmf import cli
from hybridmf.cli.titles import read_titles
from support.command_line import load_model, raising, refuse, succeed

# ------------------------------------------------------------------------------------------------------ recommend


def test_recommend_table_with_titles(folder):
    output = succeed(
        "recommend", folder / "model.safetensors", "--user", "u7", "--user", "u3", "-N", 4, "--titles",
        folder / "titles.csv",
    )  # fmt: skip
    assert re.findall(r"^user (.+)$", output, re.MULTILINE) == ["u7", "u3"]
    model, titles = load_model(folder), read_titles(str(folder / "titles.csv"))
    position = model.user_ids_.tolist().index("u7")
    ids, scores = model.recommend(position, N=4)
    rows = re.findall(r"^ +(\d+) +(m\d+) +(-?\d+\.\d+)  (.+)$", output, re.MULTILINE)
    assert len(rows) == 8
    expected = [
        (str(rank), label, f"{score:.3f}", titles[label])
        for rank, (label, score) in enumerate(zip(model.item_ids_[ids].tolist(), scores, strict=True), 1)
    ]
    assert rows[:4] == expected


def test_recommend_csv_for_all_users_excludes_seen_items(folder, monkeypatch):
    arguments = ["recommend", folder / "model.safetensors", "--all-users", "-N", 3, "--format", "csv"]
    output = succeed(*arguments)
    rows = list(csv.DictReader(io.StringIO(output)))
    model = load_model(folder)
    ids, scores = model.recommend(np.arange(model.n_users), N=3)
    assert [row["user"] for row in rows] == np.repeat(model.user_ids_, 3).tolist()
    assert [row["item"] for row in rows] == model.item_ids_[ids].ravel().tolist()
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * model.n_users
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores.ravel(), rtol=1e-6)
    monkeypatch.setattr(cli.recommend, "BLOCK_USERS", 7)
    assert succeed(*arguments) == output
    with_titles = list(csv.DictReader(io.StringIO(succeed(*arguments, "--titles", folder / "titles.csv"))))
    assert all(row["title"] for row in with_titles)


def test_recommend_include_seen(folder):
    arguments = ["recommend", folder / "model.safetensors", "--user", "u1", "-N", 100, "--format", "csv"]
    unseen, everything = succeed(*arguments), succeed(*arguments, "--include-seen")
    model = load_model(folder)
    seen = model._learned.seen[[model.user_ids_.tolist().index("u1")]].nnz
    assert everything.count("\n") == 1 + model.n_items
    assert unseen.count("\n") == 1 + model.n_items - seen  # fewer than N are not padded


def test_recommend_json_to_a_file(folder, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["recommend", folder / "model.safetensors", "--user", "u1", "--user", "u2", "-N", 2, "--format", "json"]
    assert succeed(*arguments, "--titles", folder / "titles.csv", "-o", out) == ""
    content = json.loads(out.read_text())
    assert [entry["user"] for entry in content] == ["u1", "u2"]
    assert all(set(best) == {"item", "score", "title"} for entry in content for best in entry["recommendations"])
    assert json.loads(succeed(*arguments))[0]["recommendations"][0].keys() == {"item", "score"}


def test_any_ending_goes_with_a_format(folder, tmp_path):
    arguments = ["recommend", folder / "model.safetensors", "--user", "u1", "-N", 2]
    for name, options in (("a", []), ("a.txt", []), ("a.xyz", ["--format", "table"]), ("a.tsv", ["--json"])):
        succeed(*arguments, *options, "-o", tmp_path / name)
        assert (tmp_path / name).read_text().startswith("[" if "--json" in options else "user u1")


def test_recommend_by_ratings_file(folder, tmp_path):
    model = load_model(folder)
    items = model.item_ids_.tolist()
    file = tmp_path / "seen.csv"  # u1 has all items but three, u2 has all, a stranger and a strange item change nothing
    rows = [("u1", item) for item in items[3:]] + [("u2", item) for item in items] + [("nobody", "m1"), ("u1", "new")]
    file.write_text("".join(f"{user},{item},1\n" for user, item in rows))
    arguments = ["recommend", folder / "model.safetensors", "--ratings", file]
    found = list(csv.DictReader(io.StringIO(succeed(*arguments, "--user", "u1", "--format", "csv"))))
    assert {row["item"] for row in found} == set(items[:3])
    assert "nothing left to recommend" in succeed(*arguments, "--user", "u2")
    assert json.loads(succeed(*arguments, "--user", "u2", "--format", "json")) == [
        {"user": "u2", "recommendations": []}
    ]


def test_recommend_by_position(folder, tmp_path):
    matrix = hmf.Ratings.from_file(folder / "ratings.csv").user_items
    scipy.io.mmwrite(tmp_path / "r.mtx", matrix)
    model = tmp_path / "m.safetensors"
    succeed("fit", tmp_path / "r.mtx", "-o", model, "--factors", 2, "--test-size", 0, "--quiet")
    found = json.loads(succeed("recommend", model, "--user", 5, "-N", 2, "--format", "json"))
    ids, _ = hmf.load(model).recommend(5, N=2)
    assert found[0]["user"] == 5
    assert [best["item"] for best in found[0]["recommendations"]] == ids.tolist()
    again = json.loads(
        succeed("recommend", model, "--user", 5, "-N", 2, "--format", "json", "--ratings", tmp_path / "r.mtx")
    )
    assert again == found
    assert "by position (it has no labels)" in refuse("recommend", model, "--user", "u5")
    message = refuse("recommend", model, "--user", 5, "--ratings", folder / "ratings.csv")
    assert "the model only positions" in message
    message = refuse("recommend", folder / "model.safetensors", "--user", "u5", "--ratings", tmp_path / "r.mtx")
    assert "the model has user labels" in message


def test_recommend_to_users_without_a_row(folder):
    arguments = ["recommend", folder / "model.safetensors", "--user", "zoe", "--user", "u7", "-N", 3, "--json"]
    assert "unknown user zoe" in refuse(*arguments)
    model = load_model(folder)
    expected = model.recommend("u7", N=3, labels=True)[0].tolist()
    for rule, users in (("drop", ["u7"]), ("popular", ["u7", "zoe"])):
        output = succeed(*arguments, "--unknown", rule)
        answers = json.loads(output[output.index("[") :])
        assert [each["user"] for each in answers] == users
        assert [each["item"] for each in answers[0]["recommendations"]] == expected
    popular = model.recommend(["zoe"], N=3, labels=True, unknown="popular")[0][0].tolist()
    assert [each["item"] for each in answers[1]["recommendations"]] == popular


def test_recommend_needs_seen_items(folder, tmp_path):
    bare = tmp_path / "m.safetensors"
    load_model(folder).save(bare, include_seen=False)
    arguments = ["recommend", bare, "--user", "u1"]
    assert "saved without" in refuse(*arguments)
    succeed(*arguments, "--include-seen")
    succeed(*arguments, "--ratings", folder / "ratings.csv")


def test_recommend_warns_about_titles_of_other_items(folder, tmp_path):
    file = tmp_path / "titles.csv"
    file.write_text("x1,A Title\n")
    output = succeed("recommend", folder / "model.safetensors", "--user", "u1", "--titles", file)
    assert "Warning: none of the ids" in output
    assert "'x1'" in output


def test_recommend_writes_no_file_when_it_fails(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hmf.ExplicitALS, "recommend", raising(ValueError("no good")))
    refuse("recommend", folder / "model.safetensors", "--all-users", "-o", tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


RECOMMEND_MISTAKES = [
    ([], "give either --user LABEL"),
    (["--user", "u1", "--all-users"], "give either --user LABEL"),
    (["--user", "u1", "--user", "me"], "unknown user me; the model has 90 users of type str, such as u0, u1"),
    (["--user", "u1", "-N", 0], "-N"),
    (["--user", "u1", "--format", "xml"], "'--format'"),
    (["--user", "u1", "--include-seen", "--ratings", "ratings.csv"], "choose one"),
    (["--user", "u1", "--titles", "missing.csv"], "does not exist"),
    (["--user", "u1", "--ratings", "strangers.csv"], "none of the 2 users of strangers.csv is known to the model"),
    (["--user", "u1", "--ratings", "strange_items.csv"], "none of the 2 items"),
    (["--user", "u1", "-o", "no/such/folder/x"], "folder"),
    (["--all", "-o", "x.xlsx"], "-o x.xlsx ends in .xlsx, of which no file is written; end it in one of .txt, .csv"),
    (
        ["--user", "u1", "-o", "x.tsv"],
        ".json, .parquet, .pq, .arrow, .feather, .ipc, or name the content with --format",
    ),
]


@pytest.mark.parametrize(("options", "message"), RECOMMEND_MISTAKES)
def test_recommend_refuses(folder, monkeypatch, options, message):
    monkeypatch.chdir(folder)
    (folder / "strangers.csv").write_text("you,m1,2\nshe,m2,3\n")
    (folder / "strange_items.csv").write_text("u1,a,2\nu2,b,3\n")
    assert message in refuse("recommend", "model.safetensors", *options)


def test_recommend_refuses_other_files(folder, tmp_path):
    refuse("recommend", folder / "ratings.csv", "--user", "u1")
    part = tmp_path / "m.safetensors"
    part.write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    assert "not a complete model file" in refuse("recommend", part, "--user", "u1")
    assert "not a complete model file" in refuse("info", part)
    assert "does not exist" in refuse("recommend", tmp_path / "missing", "--user", "u1")


def test_labels_are_named_with_their_type(tmp_path):
    """On the command line all is text: it stands for the label that is written so, and for no other."""
    cells = np.eye(3, 4) + 1
    plays = {
        "numbers": hmf.Ratings(cells, user_ids=[17850.0, 17851.0, 17852.0]),
        "mixed": hmf.Ratings(cells, user_ids=np.array([101, "101", "x"], dtype=object)),
    }
    for name, ratings in plays.items():
        hmf.ImplicitALS(factors=2, device="cpu").fit(ratings).save(tmp_path / name)
    numbers, mixed = tmp_path / "numbers", tmp_path / "mixed"
    succeed("recommend", numbers, "--user", "17850.0", "--include-seen")
    message = refuse("recommend", numbers, "--user", "17850")
    assert "unknown user 17850; the model has 3 users of type float64, such as 17850.0" in message
    message = refuse("recommend", mixed, "--user", "101")
    assert "user 101: the model has labels of several types that are written so" in message
    succeed("recommend", mixed, "--user", "x", "--include-seen")
    (tmp_path / "seen.csv").write_text("user,item,plays\n17850,1,1\n17851,2,1\n")
    message = refuse("recommend", numbers, "--user", "17850.0", "--ratings", tmp_path / "seen.csv")
    assert "users are of type float64 in the model and of type int64 in" in message
