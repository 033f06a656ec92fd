"""`hybridmf fit` with files of features."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import hybridmf as hmf
from support.command_line import refuse, succeed

FIT = ("--factors", 3, "--iterations", 2, "--test-size", 0, "--quiet")


@pytest.fixture
def films(folder, tmp_path):
    """A file of features of the items of ratings.csv and of one more."""
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    path = tmp_path / "films.csv"
    rows = [f"{name},Film {name},{('noir', 'noir|war', 'war')[k % 3]},{1940 + k}" for k, name in
            enumerate([*ratings.item_ids, "new"])]  # fmt: skip
    path.write_text("film_id,title,genres,year\n" + "\n".join(rows) + "\n")
    return path


def test_features_reach_the_model(folder, films, tmp_path):
    out = tmp_path / "m.safetensors"
    output = succeed(
        "fit", folder / "ratings.csv", "-o", out, *FIT[:-1], "--model", "implicit", "--item-features", films,
        "--item-feature-columns", "genres, year", "--tag-separator", "|", "--item-feature-weight", 0.5,
    )  # fmt: skip
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    assert f"Item features: 3 of {ratings.n_items + 1} items." in output
    features = hmf.Features.from_file(films, columns=["genres", "year"], separator="|")
    model = hmf.ImplicitALS(3, iterations=2, item_feature_weight=0.5, random_state=0)
    model.fit(ratings, item_features=features)
    assert "new" in model.item_ids_
    np.testing.assert_array_equal(hmf.load(out).item_factors, model.item_factors)


def test_cold_items_on_request(folder, films, tmp_path):
    out = tmp_path / "m.safetensors"
    succeed(
        "fit", folder / "ratings.csv", "-o", out, *FIT, "--model", "implicit", "--item-features", films,
        "--item-feature-columns", "genres", "--tag-separator", "|",
    )  # fmt: skip
    model = hmf.load(out)
    arguments = ("recommend", out, "--user", "u7", "-N", model.n_items, "--json")
    for options, cold in (((), False), (("--include-cold",), True)):
        (found,) = json.loads(succeed(*arguments, *options))
        ids, scores = model.recommend("u7", N=model.n_items, labels=True, include_cold=cold)
        assert [each["item"] for each in found["recommendations"]] == [each for each in ids if each is not None]
        np.testing.assert_allclose([each["score"] for each in found["recommendations"]], scores[np.isfinite(scores)])
        assert ("new" in ids) == cold
    table = tmp_path / "all.parquet"
    succeed("recommend", out, "--all", "-N", model.n_items, "--include-cold", "-o", table)
    assert "new" in pq.read_table(table)["item"].to_pylist()
    stranger = (*arguments[:2], "--user", "nobody", "--unknown", "popular", "--include-cold", "--json")
    (popular,) = json.loads(succeed(*stranger))
    assert "new" not in [each["item"] for each in popular["recommendations"]]
    refused = ("recommend", folder / "model.safetensors", "--user", "u7", "--include-cold")
    assert "--include-cold ranks items by their features, and the model has none" in refuse(*refused)


def test_cold_items_apart(folder, films, tmp_path):
    lines = (folder / "ratings.csv").read_text().splitlines()
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    cold = tuple(f"m{k}" for k in range(0, 60, 5))
    is_cold = [line.split(",")[1] in cold for line in lines]
    for path, part in ((train, False), (test, True)):
        rows = [each for each, at in zip(lines[1:], is_cold[1:], strict=True) if at == part]
        path.write_text("\n".join([lines[0], *rows]) + "\n")
    out = tmp_path / "m.safetensors"
    succeed(
        "fit", train, "-o", out, *FIT, "--model", "implicit", "--item-features", films, "--item-feature-columns",
        "genres", "--tag-separator", "|",
    )  # fmt: skip
    arguments = ("evaluate", out, test, "--train", train, "--include-cold", "--metric", "ndcg@10")
    expected = hmf.evaluate(
        hmf.load(out), hmf.Ratings.from_file(test), train=hmf.Ratings.from_file(train), metrics="ndcg@10",
        include_cold=True,
    )  # fmt: skip
    found = json.loads(succeed(*arguments, "--json"))
    assert found["apart"]["cold items among cold"]["ndcg@10"] == expected.apart["cold items among cold"]["ndcg@10"]
    assert found["apart"]["cold items among cold"]["users"] == expected.apart["cold items among cold"].n_users
    assert str(expected.apart) in succeed(*arguments)
    assert "the model has none" in refuse("evaluate", folder / "model.safetensors", test, "--include-cold")


def test_features_of_users(folder, tmp_path):
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    path = tmp_path / "users.csv"
    ages = [f"{name},{20 + k},{'xyz'[k % 3]}" for k, name in enumerate(ratings.user_ids)]
    path.write_text("user_id,age,country\n" + "\n".join(ages) + "\n")
    out = tmp_path / "m.safetensors"
    output = succeed("fit", folder / "ratings.csv", "-o", out, *FIT[:-1], "--user-features", path)
    assert f"User features: 4 of {ratings.n_users} users." in output
    model = hmf.ExplicitALS(3, iterations=2, random_state=0)
    model.fit(ratings, user_features=hmf.Features.from_file(path))
    np.testing.assert_array_equal(hmf.load(out).user_factors, model.user_factors)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("column 'title'", "different values", "(--item-feature-columns)", "--tag-separator")),
        (("--item-feature-columns", "genres"), ("column 'genres'", "pass --tag-separator '|'")),
        (("--item-feature-columns", "genre"), ("has no column 'genre' (--item-feature-columns)", "'genres'")),
        (("--user-feature-columns", "age"), ("--user-feature-columns needs --user-features FILE",)),
    ],
)
def test_messages_name_options(folder, films, tmp_path, arguments, parts):
    given = ("fit", folder / "ratings.csv", "-o", tmp_path / "m", *FIT, "--item-features", films, *arguments)
    text = refuse(*given)
    assert re.search(".*".join(map(re.escape, parts)), text), text
    assert "columns=" not in text and "categories=" not in text


def test_files_without_a_column_of_labels(folder, tmp_path):
    path = tmp_path / "films.csv"
    path.write_text("number,year\nm1,1990\nm2,1991\n")
    given = ("fit", folder / "ratings.csv", "-o", tmp_path / "m", *FIT)
    assert "name it item_id in line 1" in refuse(*given, "--item-features", path)
    assert "--tag-separator needs --item-features" in refuse(*given, "--tag-separator", ";")
