"""`hybridmf search`: the saved model, reports, options, bad input."""

from __future__ import annotations

import json
import logging

import numpy as np

import hybridmf as hmf
from support.command_line import refuse, run, succeed
from support.ratings import planted


def test_search_saves_the_best_model_of_all_ratings(folder, tmp_path):
    out = tmp_path / "best.safetensors"
    said = succeed(
        "search", folder / "ratings.csv", "-o", out, "--factors", 4, "--trials", 4, "--metric", "mae",
        "--lines", tmp_path / "trials.jsonl", "--plot", tmp_path / "trials.png",
    )  # fmt: skip
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    found = hmf.search(ratings, model=hmf.ExplicitALS(4, random_state=0), metric="mae", trials=4, random_state=0)
    assert f"mae {found.best_value:.4f}" in said and found.code() in said and f"Saved {out}" in said
    model = hmf.load(out)
    np.testing.assert_array_equal(model.item_factors_, found.best.item_factors_)
    assert model.plan_.nnz == ratings.nnz
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == len(found.trials)
    assert (tmp_path / "trials.png").exists()


def test_search_says_what_it_selects_by_and_what_the_model_reaches_without(tmp_path):
    ratings = tmp_path / "stars.csv"
    coo = planted(60, 40, 0.4, rank=3, seed=0).tocoo()
    rows = [f"u{u},i{i},{value:.3f}" for u, i, value in zip(coo.row, coo.col, coo.data, strict=True)]
    ratings.write_text("\n".join(["user,item,rating", *rows]) + "\n")
    common = ["search", ratings, "-o", tmp_path / "best.safetensors", "--factors", 4, "--trials", 1]
    printed = succeed(*common)
    assert "Held out to select by: a tenth, drawn at random." in printed
    assert ", which no other setting improves (without search: " in printed
    assert ", item means: " in printed and "; 1 trial in" in printed
    assert "Held out to select by: 50 ratings, " in succeed(*common, "--validation", 50)


def test_search_as_json_by_a_file_of_held_out_ratings(folder, tmp_path):
    out, known, held_out = (tmp_path / name for name in ("best.safetensors", "known.csv", "held-out.csv"))
    header, *lines = (folder / "ratings.csv").read_text().splitlines(keepends=True)
    for path, part in ((known, [line for k, line in enumerate(lines) if k % 5]), (held_out, lines[::5])):
        path.write_text("".join([header, *part]))
    arguments = [
        "search",
        known,
        "-o",
        out,
        "--factors",
        4,
        "--budget",
        "20s",
        "--trials",
        3,
        "--json",
    ]
    facts = json.loads(succeed(*arguments, "--validation", held_out))
    assert facts["model"] == "ExplicitALS" and facts["metric"] == "rmse" and facts["trials"] == 3
    assert facts["value"] <= facts["default"]
    assert json.loads(succeed(*arguments, "--validation", 0.3))["value"] != facts["value"]
    assert "entries of validation are in train as well" in refuse(*arguments, "--validation", known)
    strange = known.with_name("strange.csv")
    strange.write_text("user,item,rating\nx0,y0,3\n")
    assert f"--validation {strange}: none of its 1 users" in refuse(*arguments, "--validation", strange)


def test_search_with_features(folder, tmp_path):
    out, genres = tmp_path / "best.safetensors", tmp_path / "genres.csv"
    items = sorted({line.split(",")[1] for line in (folder / "ratings.csv").read_text().splitlines()[1:]})
    genres.write_text(
        "item,genre\n" + "".join(f"{item},{'noir' if k % 2 else 'war'}\n" for k, item in enumerate(items))
    )
    succeed("search", folder / "ratings.csv", "-o", out, "--factors", 4, "--trials", 4, "--item-features", genres)
    assert hmf.load(out).item_features_.names == ["genre:noir", "genre:war"]
    assert "needs --item-features FILE" in refuse(
        "search", folder / "ratings.csv", "-o", out, "--item-feature-columns", "x"
    )


def test_search_refuses_what_cannot_work(folder, store, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    ratings, out = folder / "ratings.csv", tmp_path / "best.safetensors"
    assert "--budget must be a time" in refuse("search", ratings, "-o", out, "--budget", "soon")
    assert "--validation must be a share or a number above 0" in refuse("search", ratings, "-o", out, "--validation", 0)
    assert "'--trials': 0 is not in the range x>=1" in refuse("search", ratings, "-o", out, "--trials", 0)
    assert "one trial takes about" in refuse("search", ratings, "-o", out, "--budget", "0.0001s")
    assert "is for explicit ratings" in refuse("search", ratings, "-o", out, "--model", "implicit", "--method", "sgd")
    assert "is a file that is read" in refuse("search", ratings, "-o", ratings)
    assert f"{store} is a store; convert" in refuse("search", store, "-o", out, "--where", "stars=5")
    for option, ending in (("--lines", "jsonl"), ("--plot", "png")):
        missing = tmp_path / "missing" / f"trials.{ending}"
        assert f"the folder '{missing.parent}' does not exist" in refuse("search", ratings, "-o", out, option, missing)
    assert "--metric must be one of" in refuse("search", ratings, "-o", out, "--metric", "best")
    likes = np.argwhere(np.random.default_rng(0).random((400, 60)) < 0.6 / np.sqrt(1 + np.arange(60)))
    np.savetxt(tmp_path / "likes.csv", likes, "%d", ",", header="user,item", comments="")
    implicit = ["--model", "implicit", "--factors", 8, "--regularization", 0.001, "--alpha", 1, "--trials", 2]
    assert "no trial is better than the most popular items" in refuse(
        "search", tmp_path / "likes.csv", "-o", out, *implicit
    )
    assert not out.exists()


def test_search_with_weights(folder, tmp_path):
    out, path = tmp_path / "best.safetensors", tmp_path / "weighted.csv"
    header, *lines = (folder / "ratings.csv").read_text().splitlines()
    path.write_text("\n".join([f"{header},sure", *(f"{line},{1 + k % 4}" for k, line in enumerate(lines))]) + "\n")
    arguments = ("search", path, "-o", out, "--factors", 4, "--trials", 3, "--weights", "sure")
    assert json.loads(succeed(*arguments, "--json"))["trials"] == 3
    ratings = hmf.Ratings.from_file(path, weight="sure")
    found = hmf.search(ratings, model=hmf.ExplicitALS(4, random_state=0), trials=3, random_state=0)
    np.testing.assert_array_equal(hmf.load(out).item_factors_, found.best.item_factors_)
    for more in (("--model", "implicit"), ("--validation", 0.1)):
        assert "a search has weights for --model explicit" in refuse(*arguments, *more)


def test_values_that_are_no_ratings_get_a_hint(tmp_path):
    log = tmp_path / "shop.csv"
    rng = np.random.default_rng(0)
    pairs = {(int(rng.integers(30)), int(rng.integers(20))) for _ in range(300)}
    log.write_text("customer,product,event\n" + "".join(f"c{a},p{b},view\n" for a, b in sorted(pairs)))
    arguments = ["search", log, "--value", "none", "--trials", 2, "-o", tmp_path / "m.safetensors", "--factors", 2]
    for given, hinted in (([], True), (["--model", "implicit"], False)):
        assert ("to rank items, add --model implicit" in run(*arguments, *given).output) is hinted
