"""`hybridmf fit`: reports, saved files, invalid options, checkpoints, stores."""

from __future__ import annotations

import csv
import io
import json
import logging
import re

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import cli
from hybridmf.cli.titles import read_titles
from support.command_line import raising, refuse, run, succeed

# ------------------------------------------------------------------------------------------------------------ fit


def test_fit_explicit_reports_and_saves(folder, tmp_path):
    out = tmp_path / "m.safetensors"
    output = succeed("fit", folder / "ratings.csv", "-o", out, "--factors", 4, "--regularization", 0.1, "--biases")
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    assert f"{ratings.n_users:,} users, {ratings.n_items:,} items, {ratings.nnz:,} ratings." in output
    for part in ("Plan", "device", "memory", "15 iterations in", "objective", "RMSE", f"Saved {out}"):
        assert part in output
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    assert f"Held out {test.nnz:,} ratings, training on {train.nnz:,}." in output
    model = hmf.load(out)
    assert model.plan_.nnz == train.nnz
    np.testing.assert_array_equal(model.user_ids_, ratings.user_ids)
    np.testing.assert_array_equal(model.item_ids_, ratings.item_ids)
    baseline = hmf.metrics.PopularityRecommender().fit(train)
    for each, name in ((model, "ExplicitALS"), (baseline, "mean rating of each item")):
        value = hmf.evaluate(each, test, metrics="rmse")["rmse"]
        assert re.search(rf"{name} +{value:.4f}\n", output)
    assert list(tmp_path.iterdir()) == [out]


def test_fit_implicit_reports_rankings(folder, tmp_path):
    out = tmp_path / "m.safetensors"
    output = succeed("fit", folder / "ratings.csv", "-o", out, "--model", "implicit", "--factors", 4, "--alpha", 2)
    model = hmf.load(out)
    assert type(model) is hmf.ImplicitALS
    train, test = hmf.split(hmf.Ratings.from_file(folder / "ratings.csv"), test_size=0.1, random_state=0)
    for each, name in (
        (model, "ImplicitALS"),
        (hmf.metrics.PopularityRecommender().fit(train), "most popular items"),
    ):
        values = hmf.evaluate(each, test, train=train, metrics=("ndcg@10", "precision@10"))
        assert re.search(rf"{name} +{values['ndcg@10']:.4f} +{values['precision@10']:.4f}\n", output)


def test_fit_options_reach_the_model(folder, tmp_path):
    given = {
        "factors": 3, "regularization": 0.5, "alpha": 3.0, "iterations": 2, "solver": "cholesky", "assembly": "rank1",
        "device": "cpu", "precision": "float32", "dtype": "float64", "num_threads": 1,
    }  # fmt: skip
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]
    ratings, out = folder / "ratings.csv", tmp_path / "m.safetensors"
    succeed("fit", ratings, "-o", out, "--model", "implicit", "--seed", 5, "--quiet", *options)
    model = hmf.load(out)
    params = model.get_params()
    assert {name: params[name] for name in given} == given
    assert params["random_state"] == 5
    assert len(model.history_) == 2
    succeed("fit", ratings, "-o", out, "--bias-regularization", 0.3, "--balance", "--quiet")
    params = hmf.load(out).get_params()
    assert (params["biases"], params["bias_regularization"], params["balance"]) == (True, 0.3, True)
    succeed("fit", ratings, "-o", out, "--no-biases", "--iterations", 1, "--quiet")
    assert hmf.load(out).user_bias_ is None


def test_an_input_is_not_overwritten(folder, tmp_path):
    ratings, model = tmp_path / "ratings.csv", tmp_path / "m.safetensors"
    ratings.write_bytes((folder / "ratings.csv").read_bytes())
    model.write_bytes((folder / "model.safetensors").read_bytes())
    for file, arguments in (
        (ratings, ("fit", ratings, "-o", ratings)),
        (ratings, ("convert", ratings, ratings, "--to", "npz")),
        (model, ("recommend", model, "--user", "u1", "-o", model)),
    ):
        before = file.read_bytes()
        assert "is a file that is read" in refuse(*arguments)
        assert file.read_bytes() == before


def test_fit_is_repeatable(folder, tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        succeed("fit", folder / "ratings.csv", "-o", file, "--factors", 3, "--seed", seed, "--quiet")
    first, again, other = (hmf.load(file).user_factors for file in files)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_fit_quiet_keeps_the_results_only(folder, tmp_path):
    command = ("fit", folder / "ratings.csv", "-o", tmp_path / "m", "--factors", 2)
    full, quiet = succeed(*command), succeed(*command, "--quiet")
    assert all(text in full for text in ("Read ", "Held out ", "Plan"))
    assert not any(text in quiet for text in ("Read ", "Held out ", "Plan", "100%"))
    assert re.match(r"15 iterations in [\d.]+ s", quiet) and "On the held-out ratings" in quiet
    assert full[full.index("On the held-out ratings") : full.index("Saved")] in quiet
    assert quiet.rstrip("\n").split("\n")[-1].startswith(f"Saved {tmp_path / 'm'} (")


@pytest.mark.parametrize(("test_size", "held_out"), [("0", 0), ("25", 25), ("0.5", None)])
def test_fit_test_size(folder, tmp_path, test_size, held_out):
    ratings, out = folder / "ratings.csv", tmp_path / "m.safetensors"
    output = succeed("fit", ratings, "-o", out, "--factors", 2, "--test-size", test_size)
    nnz = hmf.Ratings.from_file(ratings).nnz
    held_out = round(nnz / 2) if held_out is None else held_out
    assert hmf.load(out).plan_.nnz == nnz - held_out
    assert ("RMSE" in output) == ("Held out" in output) == ("--test-size 0" in output) == (held_out > 0)


@pytest.mark.parametrize("test", [True, False])
@pytest.mark.parametrize("validation", ["0.1", "file", None])
def test_what_takes_all_ratings_does(folder, tmp_path, test, validation):
    """The options that the last line names, followed, train on all ratings."""
    ratings, out = folder / "ratings.csv", tmp_path / "m.safetensors"
    given = ["--test", ratings] if test else []
    held = [] if validation is None else ["--validation", ratings if validation == "file" else validation]
    fit = ("fit", ratings, "-o", out, "--factors", 2, "--iterations", 2)
    last = succeed(*fit, *given, *held).splitlines()[-1]
    parts = ["--test-size 0"] * (not test) + ["leaving out --validation"] * (validation == "0.1")
    assert last.endswith(f"({' and '.join(parts)} {'take' if len(parts) > 1 else 'takes'} all)." if parts else "B).")
    followed = ["--test-size", 0, *given, *([] if validation == "0.1" else held)]
    assert "trained on" not in succeed(*fit, *followed)
    assert hmf.load(out).plan_.nnz == hmf.Ratings.from_file(ratings).nnz


def test_fit_reads_columns_separators_and_duplicates(tmp_path):
    text = "score\titem\tuser\n1\ta\tx\n3\ta\tx\n2\tb\ty\n5\tb\tx\n"
    file, out = tmp_path / "r.txt", tmp_path / "m.safetensors"
    file.write_text(text)
    options = ["--user", "user", "--item", 1, "--value", "score", "--separator", "tab", "--header"]
    arguments = ["fit", file, "-o", out, "--factors", 1, "--test-size", 0, *options]
    assert "Merge them" in refuse(*arguments)
    succeed(*arguments, "--duplicates", "mean")
    model = hmf.load(out)
    assert model.user_ids_.tolist() == ["x", "y"]
    assert model.item_ids_.tolist() == ["a", "b"]
    assert model.plan_.nnz == 3
    assert "values            1 to 1" in succeed("info", file, "--duplicates", "max", *options, "--value", "none")
    lines = text.replace("score\titem\tuser\n", "").replace("\t", " ")
    file.write_text(lines)
    spelled = ["--separator", "space", "--no-header", "--user", 2, "--value", 0, "--duplicates", "sum"]
    assert "values            2 to 5" in succeed("info", file, *spelled)


def test_fit_saves_though_nothing_can_be_measured(tmp_path):
    file, out = tmp_path / "dislikes.csv", tmp_path / "m.safetensors"
    file.write_text("".join(f"{user},{item},{-1 if user or item else 1}\n" for user in range(6) for item in range(5)))
    output = succeed("fit", file, "-o", out, "--model", "implicit", "--factors", 2)
    assert "Not evaluated: " in output
    assert hmf.load(out).n_users == 6


@pytest.mark.parametrize("option", ["--test", "--validation"])
@pytest.mark.parametrize(("side", "column"), [("user", 0), ("item", 1)])
def test_fit_refuses_held_out_files_that_share_no_user_or_item_with_the_ratings(option, side, column, tmp_path):
    rows = [[str(user), str(item), "3"] for user in range(9) for item in range(5)]
    file, held, out = tmp_path / "r.csv", tmp_path / "held.csv", tmp_path / "m.safetensors"
    file.write_text("".join(",".join(row) + "\n" for row in rows))
    fit = ("fit", file, "-o", out, "--factors", 2, *(("--test-size", 0) if option == "--validation" else ()))
    held.write_text(file.read_text())
    succeed(*fit, option, held)
    out.unlink()
    strange = [[f"x{value}" if place == column else value for place, value in enumerate(row)] for row in rows]
    held.write_text("".join(",".join(row) + "\n" for row in strange))
    message = refuse(*fit, option, held)
    many, one = ("9 users", "a user") if side == "user" else ("5 items", "an item")
    assert f"{option} {held}: none of its {many}, such as 'x0', is {one} of" in message
    assert not out.exists()


def test_fit_keeps_the_old_file_when_it_fails(folder, tmp_path, monkeypatch):
    out = tmp_path / "m.safetensors"
    out.write_text("old")
    monkeypatch.setattr(hmf.ExplicitALS, "fit", raising(ValueError("increase regularization")))
    assert refuse("fit", folder / "ratings.csv", "-o", out) == "Error: increase regularization"
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


FIT_MISTAKES = [
    (["--factors", 0], "factors"),
    (["--factors", "many"], "not a valid integer"),
    (["--regularization", -1], "regularization"),
    (["--iterations", 0], "iterations"),
    (["--solver", "lu"], "solver must be one of"),
    (["--assembly", "magic"], "assembly must be one of"),
    (["--assembly", "bals", "--solver", "cg"], "bals"),
    (["--device", "tpu"], "device must be"),
    (["--precision", "int4"], "precision must be one of"),
    (["--precision", "bf16", "--device", "cpu"], "needs a GPU"),
    (["--dtype", "int8"], "dtype must be one of"),
    (["--num-threads", 0], "num_threads"),
    (["--seed", -3], "--seed"),
    (["--model", "magic"], "'--model'"),
    (["--alpha", 2], "--alpha belongs to --model implicit"),
    (["--biases", "--model", "implicit"], "--biases belongs to --model explicit"),
    (["--bias-regularization", 1, "--model", "implicit"], "--bias-regularization belongs to --model explicit"),
    (["--bias-regularization", -1], "bias_regularization must be >= 0, got -1"),
    (["--test-size", 1.5], "--test-size must be a share below 1"),
    (["--test-size", -0.1], "test_size"),
    (["--test-size", 10**9], "test_size"),
    (["--user", "nobody"], "nobody"),
    (["--value", 7], "7"),
    (["--separator", "::"], "a single column; pass --separator"),
    (["--duplicates", "forget"], "'--duplicates'"),
    (["--output", "no/such/folder/m"], "folder"),
    (["--output", "."], "directory"),
]


@pytest.mark.parametrize(("options", "message"), FIT_MISTAKES)
def test_fit_refuses(folder, tmp_path, options, message):
    out = [] if "--output" in options else ["-o", tmp_path / "m"]
    assert message in refuse("fit", folder / "ratings.csv", *out, *options)
    assert list(tmp_path.iterdir()) == []


def test_fit_validates_options_before_it_reads(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.fit.sources, "read_ratings", raising(RuntimeError("read all the same")))
    assert "factors" in refuse("fit", folder / "ratings.csv", "-o", tmp_path / "m", "--factors", 0)


def test_fit_refuses_files(folder, tmp_path):
    out = tmp_path / "m"
    assert "does not exist" in refuse("fit", tmp_path / "missing.csv", "-o", out)
    assert "directory" in refuse("fit", tmp_path, "-o", out)
    assert "'-o'" in refuse("fit", folder / "ratings.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text("1,2,3\n1,3,many\n")
    assert "line 2" in refuse("fit", bad, "-o", out)


def test_fit_continues_from_a_checkpoint(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    lines = [f"{u},{i},{rng.integers(1, 6)}" for u in range(20) for i in range(10) if rng.random() < 0.5]
    (tmp_path / "r.csv").write_text("\n".join(lines) + "\n")
    saved = [tmp_path / "a", tmp_path / "b"]
    common = ("fit", tmp_path / "r.csv", "--factors", 2, "--device", "cpu", "-o")
    succeed(*common, saved[0], "--iterations", 6)
    checkpointed = (*common, saved[1], "--checkpoint", tmp_path / "c", "--checkpoint-every", 2, "--resume")
    assert "No checkpoint in" in succeed(*checkpointed, "--iterations", 3)  # the first time
    assert sorted(path.name for path in (tmp_path / "c").iterdir())[-1] == "checkpoint-000003.safetensors"
    assert "Going on from" in succeed(*checkpointed, "--iterations", 6)
    ours, whole = (hmf.load(path) for path in reversed(saved))
    np.testing.assert_array_equal(ours.user_factors, whole.user_factors)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own, without those of pytest
    done = run(*checkpointed, "--iterations", 4)
    assert done.exit_code == 0 and "6 iterations in" in done.stdout
    assert "already has 6 iterations and iterations=4 includes them: fit returns the model of" in done.stderr
    again = refuse(*common, saved[1], "--checkpoint", tmp_path / "c")
    assert "add --resume to continue it" in again


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--resume",), "--resume needs --checkpoint DIR"),
        (("--checkpoint-every", 2), "--checkpoint-every needs --checkpoint DIR"),
        (("--checkpoint", "c", "--checkpoint-every", 0), "--checkpoint-every must satisfy"),
    ],
)
def test_checkpoint_options_that_make_no_sense(options, said, tmp_path):
    (tmp_path / "r.csv").write_text("1,2,3\n")
    assert said in refuse("fit", tmp_path / "r.csv", "-o", tmp_path / "m", *options)


# ------------------------------------------------------------------------------------------------------ real data


@pytest.mark.realdata
def test_movielens_100k_from_the_command_line(data_dir, tmp_path):
    ratings, out = data_dir / "ml-100k" / "u.data.gz", tmp_path / "m.safetensors"
    output = succeed("fit", ratings, "-o", out, "--factors", 8, "--iterations", 5, "--regularization", 0.1)
    assert "943 users, 1,682 items, 100,000 ratings." in output
    ours, baseline = (
        float(re.search(rf"{name} +(\d\.\d+)\n", output).group(1)) for name in ("ExplicitALS", "each item")
    )
    assert ours < 0.94 < 1.0 < baseline
    movies = ["--titles", data_dir / "ml-100k" / "u.item"]
    shown = succeed("recommend", out, "--user", 1, "-N", 5, *movies)
    assert len(re.findall(r"^ +\d+ +\d+ +\d\.\d{3}  .+ \(\d{4}\)$", shown, re.MULTILINE)) == 5
    found = succeed("recommend", out, "--all-users", "-N", 10, "--format", "csv", *movies, "--ratings", ratings)
    rows = list(csv.DictReader(io.StringIO(found)))
    assert len(rows) == 9_430
    assert all(row["title"] for row in rows)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "key", "title", "count"),
    [
        ("ml-1m/movies.dat", "2131", "Autumn Sonata (Höstsonaten ) (1978)", 3883),
        ("ml-100k/u.item", "543", "Misérables, Les (1995)", 1682),
        ("lastfm-2k/artists.dat.gz", "72", "Depeche Mode", 17633),
    ],
)
def test_real_titles(data_dir, name, key, title, count):
    titles = read_titles(str(data_dir / name))
    assert titles[key] == title
    assert len(titles) == count


def test_a_model_is_not_written_into_the_store_that_is_read(tmp_path):
    store = hmf.convert(sp.csr_array(np.ones((4, 3))), tmp_path / "store")
    for name in ("manifest.json", "model.safetensors"):
        assert "lies in the store that is read" in refuse("fit", store.path, "-o", store.path / name)
    hmf.Store.open(store.path).verify()


def test_validation_of_some_users_and_iterations(folder, tmp_path):
    arguments = ["fit", folder / "ratings.csv", "-o", tmp_path / "m.safetensors", "--factors", 4, "--iterations", 5]
    few = ["--validation-users", 10, "--validate-every", 2]
    history = json.loads(succeed(*arguments, "--validation", 0.2, *few, "--json"))["history"]
    assert [record["iteration"] for record in history if "rmse" in record] == [2, 4, 5]
    assert "--validation-users needs --validation" in refuse(*arguments, "--validation-users", 10)
    assert "--validate-every must" in refuse(*arguments, "--validation", 0.2, "--validate-every", 0)
