"""`hybridmf evaluate` and `similar`; `fit` with files to test on, validation, other methods and JSON."""

from __future__ import annotations

import csv
import inspect
import json
import re

import numpy as np
import pandas as pd
import pytest

import hybridmf as hmf
from hybridmf.cli.fit import command as fit_command
from hybridmf.cli.hyperparameters import HYPERPARAMETERS, MODELS
from support.command_line import refuse, succeed


@pytest.fixture
def parts(folder, tmp_path):
    """train.csv and test.csv; the latter has a user whom the former does not have."""
    train, test = hmf.split(hmf.Ratings.from_file(folder / "ratings.csv"), 0.2, random_state=1)
    for name, part in (("train", train), ("test", test)):
        frame = part.to_frame("pandas")
        if name == "test":
            frame = pd.concat([frame, pd.DataFrame({"user": ["stranger"], "item": ["m1"], "value": [5.0]})])
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def fit(parts, *options, name="m.safetensors"):
    return succeed("fit", parts / "train.csv", "-o", parts / name, "--iterations", 4, "--factors", 3, *options)


def test_fit_evaluates_on_a_file(parts):
    output = fit(parts, "--test", parts / "test.csv")
    train, test = (hmf.Ratings.from_file(parts / f"{name}.csv") for name in ("train", "test"))
    model = hmf.load(parts / "m.safetensors")
    assert model.plan_.nnz == train.nnz
    value = hmf.evaluate(model, test, train=train, metrics="rmse", unknown="drop")["rmse"]
    assert f"{value:.4f}" in output and "1 ratings of users or items without training ratings are left out" in output
    assert "choose one of them" in refuse(
        "fit", parts / "train.csv", "-o", parts / "x", "--test", parts / "test.csv", "--test-size", 0.1
    )


def test_fit_as_json(parts):
    report = json.loads(fit(parts, "--test", parts / "test.csv", "--json"))
    model = hmf.load(parts / "m.safetensors")
    assert (report["model"], report["users"], report["iterations"]) == ("ExplicitALS", model.n_users, 4)
    assert [record["iteration"] for record in report["history"]] == [1, 2, 3, 4]
    values = (report["metrics"]["rmse"], report["baseline"]["rmse"])
    text = fit(parts, "--test", parts / "test.csv")
    assert all(f"{value:.4f}" in text for value in values)
    assert "metrics" not in json.loads(fit(parts, "--test-size", 0, "--json"))
    evaluated = json.loads(succeed("evaluate", parts / "m.safetensors", parts / "test.csv", "--json"))
    assert set(evaluated) == {"model", "users", "cold_users", "metrics", "intervals"}


@pytest.mark.parametrize("share", [True, False])
def test_fit_stops_early_and_saves_the_best(parts, share):
    validation = 0.1 if share else parts / "test.csv"
    options = ("--test-size", 0, "--validation", validation, "--patience", 2, "--regularization", 0.02)
    output = fit(parts, *options, "--iterations", 40, "--metric", "mae")
    model = hmf.load(parts / "m.safetensors")
    values = [record["mae"] for record in model.history_]
    assert len(values) == model.n_iter_ + 2 and model.n_iter_ == 1 + int(np.argmin(values))
    assert f"The best iteration is {model.n_iter_}." in output
    assert ("for validation" in output) is share
    info = succeed("info", parts / "m.safetensors")
    assert f"{values[model.n_iter_ - 1]:,.6g}" in info


@pytest.mark.parametrize(
    ("options", "cls", "parameters"),
    [
        (["--method", "sgd", "--learning-rate", 0.05, "--schedule", "blocks", "--decay", 0.2], hmf.SGD,
         {"learning_rate": 0.05, "schedule": "blocks", "decay": 0.2}),
        (["--method", "ccd", "--inner-iterations", 2, "--nonnegative", "--regularization-scaling", 0.5], hmf.CCD,
         {"inner_iterations": 2, "nonnegative": True, "regularization_scaling": 0.5}),
        (["--model", "implicit", "--unobserved-weight", 0.1, "--solver", "cg", "--cg-steps", 2], hmf.ImplicitALS,
         {"unobserved_weight": 0.1, "cg_steps": 2}),
        (["--solver", "subspace", "--block-size", 2, "--regularization-scaling", "none"], hmf.ExplicitALS,
         {"block_size": 2, "regularization_scaling": "none"}),
        (["--reorder", "both", "--row-form", "primal", "--reduction", "auto", "--gpu-memory-limit", "6GB"],
         hmf.ImplicitALS, {"reorder": "both", "row_form": "primal", "reduction": "auto", "gpu_memory_limit": "6GB"}),
        (["--method", "sgd", "--schedule", "blocks", "--no-deterministic", "--ordering", "user", "--order", "passes"],
         hmf.SGD, {"deterministic": False, "ordering": "user", "order": "passes"}),
        (["--regularization", "0.1,0.5", "--regularization-scaling", "count,0.5", "--bias-regularization", "1,2"],
         hmf.ExplicitALS,
         {"regularization": [0.1, 0.5], "regularization_scaling": ["count", 0.5], "bias_regularization": [1, 2]}),
        (["--model", "implicit", "--regularization-scaling", "count", "--count-unobserved"], hmf.ImplicitALS,
         {"count_unobserved": True}),
    ],
)  # fmt: skip
def test_every_estimator_and_its_parameters(parts, options, cls, parameters):
    options = [*options, *(["--model", "implicit"] if cls is hmf.ImplicitALS else [])]
    fit(parts, *options)
    model = hmf.load(parts / "m.safetensors")
    assert type(model) is cls
    assert {name: getattr(model, name) for name in parameters} == parameters


def test_every_parameter_has_an_option():
    parameters = {name for cls in MODELS.values() for name in inspect.signature(cls).parameters}
    assert parameters - set(HYPERPARAMETERS) == {"init", "random_state"}  # --init MODEL, --seed


def test_help_of_parameters_is_that_of_the_estimators():
    helps = {option.name: option.help for option in fit_command.params if option.name in HYPERPARAMETERS}
    assert helps["row_form"] == (
        "Form of the exact solution of rows with fewer entries than factors (als).  [default: auto]"
    )
    assert helps["iterations"].endswith(".  [default: 15; 10 implicit; 20 sgd]")
    assert helps["biases"].endswith(" (explicit only).  [default: --biases]")
    assert helps["cg_steps"] == "Steps of --solver cg (als).  [default: 3]"
    for name, text in helps.items():
        assert re.match(r'[\w"].{8,}\.', text) and "`" not in text, name


def test_fit_keeps_a_side_of_a_model(parts):
    fit(parts, "--test-size", 0, name="first")
    fit(parts, "--test-size", 0, "--init", parts / "first", "--freeze", "item", "--regularization", 2.0)
    first, second = hmf.load(parts / "first"), hmf.load(parts / "m.safetensors")
    np.testing.assert_array_equal(second.item_factors, first.item_factors)
    assert second.n_iter_ == 1 and not np.allclose(second.user_factors, first.user_factors)
    fit(parts, "--test-size", 0, "--init", "signed", "--iterations", 1)
    assert hmf.load(parts / "m.safetensors").init == "signed"
    command = ("fit", parts / "train.csv", "-o", parts / "x", "--freeze", "item")
    for options in ((), ("--init", "signed")):
        assert "--freeze item keeps the factors of a model: name it with --init MODEL" in refuse(*command, *options)
    assert "there is no model file" in refuse(*command, "--init", parts / "nothing")
    assert "the output" in refuse("fit", parts / "train.csv", "-o", parts / "first", "--init", parts / "first")


@pytest.mark.parametrize(("kind", "estimator"), [("implicit", hmf.ImplicitALS), ("explicit", hmf.ExplicitALS)])
def test_fit_has_weights_of_a_column(parts, kind, estimator):
    frame = pd.read_csv(parts / "train.csv")
    frame["sure"] = np.random.default_rng(0).uniform(0.5, 3, len(frame)).round(3)
    frame.to_csv(parts / "train.csv", index=False)
    ratings, weights = (hmf.Ratings.from_frame(frame, value=name) for name in ("value", "sure"))
    model = estimator(3, iterations=4, random_state=0)
    for share in (0, 0.2):
        told = fit(parts, "--model", kind, "--test-size", share, "--weights", "sure")
        assert "weight = column 3 'sure'" in told
        train, of_train = (hmf.split(each, share, random_state=0)[0] if share else each for each in (ratings, weights))
        model.fit(train, weights=of_train)
        found = hmf.load(parts / "m.safetensors").user_factors
        np.testing.assert_allclose(found, model.user_factors, rtol=1e-5, atol=1e-7)
    command = ("fit", parts / "train.csv", "-o", parts / "x", "--weights")
    assert "only --method als has weights of ratings" in refuse(*command, "sure", "--method", "sgd")
    assert "no column 'surely'" in refuse(*command, "surely", "--model", kind)
    store = hmf.convert(parts / "train.csv", parts / "store").path
    assert "names a column of a file of ratings" in refuse("fit", store, "-o", parts / "x", "--weights", "sure")
    hmf.Ratings.from_frame(frame, value="value").save(parts / "train.npz")
    refused = refuse("fit", parts / "train.npz", "-o", parts / "x", "--weights", "sure")
    assert "is read as 'npz', which has no columns that --weights could name" in refused
    frame["sure"] -= 1
    frame.to_csv(parts / "train.csv", index=False)
    refused = refuse(*command, "sure", "--model", kind)
    assert "column 'sure' of" in refused and "values that are not finite and above 0" in refused
    frame.loc[3, "sure"] = None
    frame.to_csv(parts / "train.csv", index=False)
    for refused in (refuse(*command, "sure", "--model", kind), refuse(*command[:-1], "--value", "sure")):
        assert "''" in refused and "leave out rows without one (where={column: function} in Python)" in refused
    assert "the first is '' at entry 3" in refuse(*command, "sure", "--model", kind)


def test_ratings_of_zero_have_weights(parts):
    frame = pd.read_csv(parts / "train.csv")
    value = frame.columns[-1]
    frame.loc[::5, value] = 0
    frame["sure"] = np.random.default_rng(0).uniform(0.5, 3, len(frame)).round(3)
    frame.to_csv(parts / "train.csv", index=False)
    fit(parts, "--test-size", 0, "--value", value, "--weights", "sure")
    ratings, weights = (hmf.Ratings.from_frame(frame, value=name) for name in (value, "sure"))
    model = hmf.ExplicitALS(3, iterations=4, random_state=0).fit(ratings, weights=weights)
    np.testing.assert_allclose(hmf.load(parts / "m.safetensors").user_factors, model.user_factors, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "sgd", "--solver", "cg"], "--solver is no parameter of SGD"),
        (["--method", "ccd", "--model", "implicit"], "--method ccd is for explicit ratings"),
        (["--regularization-scaling", "much"], "'much' is not none, count, a number"),
        (["--regularization", "1,2,3"], "'1,2,3' has 3 values"),
        (["--count-unobserved"], "--count-unobserved is no parameter of ExplicitALS"),
        (["--patience", 3], "--patience needs --validation"),
        (["--metric", "mae", "--validation", 0.1], "--metric needs --patience"),
        (["--validation", "nowhere.csv"], "is neither a number nor a file"),
        (["--validation", 1.5], "--validation must be a share below 1 or a whole number"),
        (["--where", "stars"], "--where takes COLUMN=VALUE"),
        (["--split-by", "time"], "needs the time of each entry"),
        (["--validation", 0.1, "--patience", 2, "--metric", "auc"], "metric must be rmse, mae"),
    ],
)
def test_fit_refuses(parts, options, message):
    assert message in refuse("fit", parts / "train.csv", "-o", parts / "x", *options)


def test_rows_and_times(tmp_path):
    with open(tmp_path / "log.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "behavior", "timestamp"])
        for k in range(300):
            writer.writerow([f"u{k % 20}", f"i{k % 37}", ["play", "view", "buy"][k % 3], 10**9 + k])
    options = ("--model", "implicit", "--value", "none", "--duplicates", "last", "--factors", 2, "--iterations", 2)
    out = tmp_path / "m.safetensors"
    succeed("fit", tmp_path / "log.csv", "-o", out, *options, "--where", "behavior=play,buy", "--split-by", "time")
    kept = {"behavior": ["play", "buy"]}
    log = hmf.Ratings.from_file(tmp_path / "log.csv", value=None, duplicates="last", where=kept)
    train, _ = hmf.split(log, 0.1, by="time")
    assert hmf.load(out).plan_.nnz == train.nnz < log.nnz
    by_number = ("--where", f"timestamp={10**9},{10**9 + 1}", "--test-size", 0)
    succeed("fit", tmp_path / "log.csv", "-o", out, *options, *by_number)
    assert hmf.load(out).plan_.nnz == 2


def test_evaluate(parts):
    fit(parts, "--test-size", 0)
    model, (train, test) = (
        hmf.load(parts / "m.safetensors"),
        (hmf.Ratings.from_file(parts / f"{name}.csv") for name in ("train", "test")),
    )
    metrics = ("rmse", "recall@5", "auc")
    arguments = ["evaluate", parts / "m.safetensors", parts / "test.csv", "--train", parts / "train.csv"]
    arguments += [part for name in metrics for part in ("--metric", name)]
    expected = hmf.evaluate(model, test, train=train, metrics=metrics, unknown="drop", relevance_threshold=4)
    output = succeed(*arguments, "--relevance-threshold", 4)
    for name, value in expected.items():
        assert f"{value:.4f} ({expected.interval(name).low:.4f} to {expected.interval(name).high:.4f})" in output
    assert f"{expected.n_users:,} users" in output and "over popularity" in output
    alone = succeed("evaluate", parts / "m.safetensors", parts / "test.csv")
    assert alone.splitlines()[0].split() == ["model", "metric", "value", "(95", "%", "interval)"]
    popular = hmf.metrics.PopularityRecommender().fit(train)
    options = {"train": train, "metrics": metrics, "unknown": "drop", "relevance_threshold": 4}
    gains = {name: expected.difference(hmf.evaluate(popular, test, **options), name) for name in metrics}
    for gain in gains.values():
        assert f"{gain.value:.4f} ({gain.low:.4f} to {gain.high:.4f})" in output
    report = json.loads(succeed(*arguments, "--relevance-threshold", 4, "--json"))
    assert report["metrics"] == pytest.approx(dict(expected)) and set(report["baseline"]) == set(metrics)
    assert report["minus_baseline"] == {name: pytest.approx(list(gain[1:])) for name, gain in gains.items()}
    assert report["intervals"]["auc"] == pytest.approx(list(expected.interval("auc")[1:]))
    covered = json.loads(succeed(*arguments, "--metric", "coverage@5", "--json"))
    assert "coverage@5" in covered["metrics"] and "coverage@5" not in covered["intervals"]
    assert "needs train=" in refuse("evaluate", parts / "m.safetensors", parts / "test.csv", "--metric", "auc")
    assert "metrics has 'best'" in refuse("evaluate", parts / "m.safetensors", parts / "test.csv", "--metric", "best")


def test_similar(folder, tmp_path):
    model = hmf.load(folder / "model.safetensors")
    ids, cosines = model.similar_items("m3", N=4, labels=True)
    output = succeed(
        "similar", folder / "model.safetensors", "--item", "m3", "-N", 4, "--titles", folder / "titles.csv"
    )
    assert output.startswith("item m3\n") and "title" in output
    assert [line.split()[1:3] for line in output.splitlines()[3:7]] == [
        [item, f"{value:.3f}"] for item, value in zip(ids, cosines, strict=True)
    ]
    arguments = ("similar", folder / "model.safetensors", "--user", "u2", "--user", "u1", "-N", 2, "--json")
    found = json.loads(succeed(*arguments))
    assert [answer["user"] for answer in found] == ["u2", "u1"]
    assert [entry["user"] for entry in found[0]["similar"]] == list(model.similar_users("u2", N=2, labels=True)[0])
    titled = json.loads(
        succeed("similar", folder / "model.safetensors", "--item", "m3", "--titles", folder / "titles.csv", "--json")
    )
    assert titled[0]["similar"][0]["item"] == "m3" and titled[0]["similar"][0]["title"]
    written = ("similar", folder / "model.safetensors", "--item", "m3", "-o")
    assert "-o x.xlsx ends in .xlsx, of which no file is written; end it in one of .txt, .json" in refuse(
        *written, "x.xlsx"
    )
    succeed(*written, tmp_path / "x.json")
    succeed(*written, tmp_path / "x.out", "--json")
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads((tmp_path / "x.out").read_text())
    assert "unknown item m999; the model has" in refuse("similar", folder / "model.safetensors", "--item", "m999")
    assert "either --item LABEL or --user" in refuse("similar", folder / "model.safetensors")
    assert "--titles are those of items" in refuse(
        "similar", folder / "model.safetensors", "--user", "u1", "--titles", folder / "titles.csv"
    )


def test_recommendations_for_all_as_files(folder, tmp_path):
    model, expected = hmf.load(folder / "model.safetensors"), None
    for name, read in (("recs.parquet", pd.read_parquet), ("recs.arrow", pd.read_feather)):
        succeed("recommend", folder / "model.safetensors", "--all", "-N", 3, "-o", tmp_path / name)
        expected = model.recommend_all(N=3, backend="pandas")
        pd.testing.assert_frame_equal(read(tmp_path / name), expected, check_dtype=False)
    succeed("recommend", folder / "model.safetensors", "--all", "-N", 3, "-o", tmp_path / "recs.csv")
    assert pd.read_csv(tmp_path / "recs.csv")["item"].tolist() == expected["item"].tolist()
    by_json = json.loads(succeed("recommend", folder / "model.safetensors", "--user", "u1", "--json"))
    assert by_json[0]["user"] == "u1"
    unseen = ("recommend", folder / "model.safetensors", "--all", "--include-seen", "-o", tmp_path / "all.parquet")
    succeed(*unseen)
    seen = model.recommend_all(filter_already_liked_items=False)
    assert pd.read_parquet(tmp_path / "all.parquet")["item"].tolist() == seen["item"].tolist()
    for options, message in (
        (["--user", "u1", "-o", tmp_path / "x.parquet"], "a .parquet file takes --all and no --titles"),
        (["--all", "--json", "--format", "csv"], "--json and --format csv contradict each other"),
    ):
        assert message in refuse("recommend", folder / "model.safetensors", *options)
