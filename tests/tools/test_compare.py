"""Comparisons: what runs where, what the report holds, disagreements, the command; and the synthetic shapes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

import hybridmf as hmf
from hybridmf import cli, datasets
from hybridmf.compare import Comparison, compare, default_models
from hybridmf.errors import DeviceError
from hybridmf.metrics import Interval
from hybridmf.tools import demo
from support.ratings import planted

SMALL = planted(60, 40, 0.3)


pytestmark = pytest.mark.usefixtures("small_product")


def als(**options):
    return hmf.ExplicitALS(
        **{"factors": 3, "iterations": 3, "random_state": 0, "biases": False, "regularization": 0.05} | options
    )


# ---------------------------------------------------------------------------------------------------- comparisons


def test_each_method_runs_as_a_fit_of_its_own():
    result = compare(SMALL, [als(), hmf.CCD(3, iterations=4, random_state=0)], devices=["cpu"])
    assert [run.method for run in result.runs] == ["ExplicitALS", "CCD"]
    assert [len(run.seconds) for run in result.runs] == [3, 4]
    train, test = hmf.split(hmf.Ratings.from_matrix(SMALL), test_size=0.1, random_state=0)
    for run, model in zip(result.runs, (als(), hmf.CCD(3, iterations=4, random_state=0)), strict=True):
        model.set_params(device="cpu").fit(train)
        assert run.objective[-1] == pytest.approx(model.objective(train), rel=1e-9)
        assert run.scores[-1] == pytest.approx(hmf.evaluate(model, test, metrics="rmse")["rmse"])
        assert list(run.objective) == sorted(run.objective, reverse=True)
        assert run.plan.nnz == train.nnz == result.nnz
        assert run.gflops > 0
        assert run.of_ceiling > 0
        assert run.bytes_per_second > 0
        assert set(run.phases) == {"check", "plan", "convert", "set up", "compile", "solve", "finish"}
        assert all(seconds >= 0 for seconds in run.phases.values())
        assert sum(run.seconds) == pytest.approx(run.phases["solve"] + run.phases["compile"])


def test_devices_start_from_the_same_factors_and_agree(backend):
    result = compare(SMALL, als(), devices=["cpu", backend], test_size=0)
    assert result.agree
    if backend == "cuda":
        (difference,) = result.factor_differences.values()
        assert 0 < difference < 1e-3
        assert [run.device for run in result.runs] == ["cpu", "cuda:0"]


def test_devices_that_disagree_are_named(monkeypatch):
    original = hmf.ExplicitALS.fit

    def fit(self, *args, **options):  # the second "device" has another lambda
        self.regularization *= 1.0 if self.device == "cpu" else 2.0
        return original(self.set_params(device="cpu"), *args, **options)

    monkeypatch.setattr(hmf.ExplicitALS, "fit", fit)
    monkeypatch.setattr(
        importlib.import_module("hybridmf.plan.dispatch"), "find_gpu", lambda device: (None, "pretended")
    )
    result = compare(SMALL, als(), devices=["cpu", "auto"])
    assert not result.agree
    (message,) = result.disagreements
    assert message.startswith("ExplicitALS: the objective is")
    assert "DISAGREEMENT: ExplicitALS" in str(result)
    assert compare(SMALL, als(), devices=["cpu", "auto"], tolerance=10.0).agree


def test_without_a_gpu_the_cpu_is_compared_and_the_reason_reported(monkeypatch):
    def none(device):
        if device != "cpu":
            raise DeviceError("there is no GPU here")
        return None, "asked for"

    monkeypatch.setattr(importlib.import_module("hybridmf.plan.dispatch"), "find_gpu", none)
    result = compare(SMALL, als())
    assert [run.device for run in result.runs] == ["cpu"]
    assert result.skipped == ("cuda: there is no GPU here",)
    assert "Left out: cuda: there is no GPU here" in str(result)
    with pytest.raises(DeviceError, match="nothing ran: cuda: there is no GPU here"):
        compare(SMALL, als(), devices="cuda")


def test_methods_that_a_device_does_not_support_are_named():
    models = {"tiles": als(assembly="bals"), "races": hmf.SGD(3, schedule="batch_hogwild")}
    result = compare(SMALL, models, devices=["cpu"], iterations=1)
    assert [run.method for run in result.runs] == ["tiles"]
    assert len(result.runs[0].seconds) == 1
    (reason,) = result.skipped
    assert reason.startswith("races on cpu: schedule='batch_hogwild' needs a GPU")


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_the_default_methods(feedback):
    result = compare("ml-1m", feedback=feedback, devices=["cpu"], scale=0.02, iterations=2)
    expected = [name for name in default_models(feedback) if name != "sgd-batch-hogwild"]
    assert [run.method for run in result.runs] == expected
    for run in result.runs:
        assert run.metric == {"explicit": "rmse", "implicit": "ndcg@10"}[feedback]
        assert len(run.scores) == {"explicit": 2, "implicit": 1}[feedback]
    assert result.name == f"ml-1m x 0.02 (synthetic, {feedback})"


def test_models_stay_as_they_are_and_get_one_seed():
    model = als(random_state=None, device="auto")
    first, second = (compare(SMALL, model, devices=["cpu"], seed=3) for _ in range(2))
    assert model.random_state is None
    assert model.device == "auto"
    assert not hasattr(model, "n_iter_")
    assert first.runs[0].objective == second.runs[0].objective
    other = compare(SMALL, model, devices=["cpu"], seed=4)
    assert other.runs[0].objective != first.runs[0].objective


def test_reports(tmp_path):
    result = compare(SMALL, [als(), als(solver="cg")], devices=["cpu"])
    table = str(result)
    for text in ("ExplicitALS, cg", "s / iteration", "planned MiB", f"{result.runs[0].objective[-1]:.6g}", "RMSE"):
        assert text in table
    content = json.loads(result.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == content
    assert [run["method"] for run in content["runs"]] == ["ExplicitALS", "ExplicitALS, cg"]
    assert content["runs"][0]["objectives"] == list(result.runs[0].objective)
    frame = result.to_frame()
    assert list(frame["method"]) == ["ExplicitALS", "ExplicitALS, cg"]
    assert frame["objective"][1] == result.runs[1].objective[-1]


def test_the_report_explains_the_tables_and_names_the_best():
    result = compare(SMALL, {"long": als(iterations=8), "short": als(iterations=1)}, devices=["cpu"])
    text = str(result)
    lowest = min(result.runs, key=lambda run: run.objective[-1])
    best = min(result.runs, key=lambda run: run.scores[-1])
    assert f"Lowest objective: {lowest.method} on cpu, {lowest.objective[-1]:,.6g}." in text
    assert f"Best held-out RMSE: {best.method} on cpu, {best.scores[-1]:.4f}." in text
    assert "Lower is better for seconds, objective and RMSE" in text and "peak: additional memory" in text
    # nothing differs and nothing is compiled on one CPU
    assert "factors differ" not in text and "compile" not in text
    run = result.runs[0]
    number = next(n for n, score in enumerate(run.scores, 1) if score <= 1.01 * best.scores[-1])
    seconds = run.phases["check"] + run.phases["plan"] + run.phases["convert"] + run.phases["set up"]
    seconds += sum(run.seconds[:number])
    assert run.seconds_to(best.scores[-1]) == pytest.approx(seconds)
    assert run.seconds_to(0.0) is None
    assert "First within 1 % of that RMSE: " in text
    assert "held-out" not in str(compare(SMALL, als(), devices=["cpu"], test_size=0))


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_the_baseline_is_a_row_of_the_report(feedback):
    ratings = datasets.synthetic("ml-1m", feedback=feedback, scale=0.05)
    models = {"als": default_models(feedback, 4, 3)["als"], "nothing": default_models(feedback, 4, 1)["als"]}
    models["nothing"].set_params(regularization=1e6)
    result = compare(ratings, models, devices=["cpu"])
    metric = {"explicit": "rmse", "implicit": "ndcg@10"}[feedback]
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    popular = hmf.evaluate(hmf.metrics.PopularityRecommender().fit(train), test, train=train, metrics=metric)
    assert result.baseline.score == popular[metric] and result.baseline.interval == popular.interval(metric)
    fitted = models["als"].set_params(device="cpu").fit(train)
    found = hmf.evaluate(fitted, test, train=train, metrics=metric)
    good, bad = result.runs
    assert good.interval == found.interval(metric) and good.difference == found.difference(popular, metric)
    assert not bad.beats_the_baseline
    text = str(result)
    assert f"{good.difference.value:+.4f} ({good.difference.low:+.4f} to {good.difference.high:+.4f})" in text
    name = {"explicit": "mean rating of each item", "implicit": "most popular items"}[feedback]
    assert f"\n{name}  " in text and f"No better than the {name} with these settings: " in text
    content = json.loads(result.to_json())
    low = f"{metric}_low"
    assert content["baseline"]["name"] == name and content["baseline"][low] == popular.interval(metric).low
    assert content["runs"][0][low] == good.interval.low
    assert content["runs"][0]["minus_baseline"] == good.difference.value


def test_default_methods_beat_the_item_means_where_biases_are_all_there_is():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 150, 6000), rng.integers(0, 120, 6000)
    stars = 3.5 + rng.normal(size=150)[users] + rng.normal(size=120)[items] * 0.3 + rng.normal(size=6000) * 0.3
    ratings = hmf.Ratings.from_coo(users, items, stars, duplicates="first")
    result = compare(ratings, default_models("explicit", 4, 8), devices=["cpu"])
    assert all(run.beats_the_baseline for run in result.runs) and "No better" not in str(result)
    without = compare(ratings, {"plain": als(regularization=100.0), "als": default_models("explicit", 4, 8)["als"]})
    assert "No better than the mean rating of each item with these settings: plain" in str(without)


def test_a_difference_that_the_test_part_cannot_tell_is_named_so():
    result = compare(SMALL, als(), devices=["cpu"])
    run = result.runs[0]
    better = Interval(run.scores[-1] - result.baseline.score, -1.0, 1.0)
    for score, sentence in (
        (99.0, "Better than the mean rating of each item, but by less than the test part can tell"),
        (0.0, "No better than the mean rating of each item with these settings"),
    ):
        baseline = replace(result.baseline, score=score)
        changed = replace(result, runs=(replace(run, difference=better),), baseline=baseline)
        assert f"{sentence}: {run.title}." in str(changed)
        assert str(changed).count("etter than the mean") == 1


def test_one_held_out_user_has_no_interval():
    result = compare(SMALL, als(), devices=["cpu"], test_size=0.9 / SMALL.nnz)
    assert result.baseline.interval is None and result.runs[0].difference is None
    assert "mean rating of each item" in str(result)


def test_the_report_of_rankings(monkeypatch):
    result = compare("ml-1m", feedback="implicit", devices=["cpu"], scale=0.02, iterations=2)
    best = max(run.scores[-1] for run in result.runs)
    assert f", {best:.4f}." in str(result) and "Best held-out NDCG@10" in str(result)
    assert result.runs[0].seconds_to(1.0) is None  # measured after the last iteration only
    assert "First within" not in str(result)


def test_the_command_names_the_file(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{u},{i},{rng.integers(1, 6)}" for u in range(30) for i in rng.permutation(20)[:8]]
    (tmp_path / "stars.csv").write_text("\n".join(lines))
    found = CliRunner().invoke(
        cli.main, ["compare", str(tmp_path / "stars.csv"), "--method", "als", "--factors", "2", "--quiet"]
    )
    assert found.exit_code == 0
    assert found.output.startswith("stars.csv: 30 users x 20 items, 216 training entries, loaded in ")


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    result = compare(SMALL, als(), devices=["cpu"])
    (tmp_path / "report.json").write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        result.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == "old"


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = compare(SMALL, [als(), als(solver="cg")], devices=["cpu"])
    figure = result.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    bars, scores, curves = figure.axes
    assert len(bars.patches) == 2 and len(curves.lines) == 3  # with the baseline
    assert len(scores.patches) == 3 and curves.get_ylabel() == "held-out RMSE"
    unscored = compare(SMALL, als(), devices=["cpu"], test_size=0)
    assert unscored.baseline is None
    unscored = unscored.plot()
    assert [ax.get_xlabel() for ax in unscored.axes] == ["seconds per iteration", "seconds, set-up included"]
    assert unscored.axes[1].get_ylabel() == "objective"


def test_plot_names_the_package_to_install(monkeypatch):
    result = compare(SMALL, als(), devices=["cpu"])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hybridmf\[plot\]"):
        result.plot()
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.to_frame()


MISTAKES = [
    ({"user_items": "ml-2m"}, ValueError, "neither a file nor a known shape; shapes: demo, epinions"),
    ({"devices": ["tpu"]}, ValueError, "device must be"),
    ({"models": [hmf.ExplicitALS]}, TypeError, "make one: ExplicitALS()"),
    ({"models": []}, ValueError, "models is empty"),
    ({"models": [als(), als()]}, ValueError, "two models are called 'ExplicitALS'"),
    ({"models": [als(), hmf.ImplicitALS(3)]}, ValueError, "compare them separately"),
    ({"feedback": "both"}, ValueError, "feedback must be one of"),
    ({"scale": 0}, ValueError, "scale"),
    ({"test_size": -1}, ValueError, "test_size"),
    ({"seed": -1}, ValueError, "seed"),
    ({"show_progress": "yes"}, TypeError, "show_progress"),
]


@pytest.mark.parametrize(("given", "error", "message"), MISTAKES)
def test_mistakes(given, error, message):
    arguments = {"user_items": SMALL, "models": als(), "devices": ["cpu"]} | given
    with pytest.raises(error) as caught:
        compare(**arguments)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------- command


def run(*arguments: object):
    return CliRunner().invoke(cli.main, ["compare", *map(str, arguments)])


def test_command_on_a_file(tmp_path):
    rows, columns = SMALL.nonzero()
    lines = [f"{u},{i},{SMALL[u, i]:g}" for u, i in zip(rows, columns, strict=True)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item,rating", *lines]))
    report = tmp_path / "report.json"
    result = run(
        tmp_path / "ratings.csv", "--method", "als", "--method", "ccd", "--factors", 3, "--iterations", 2,
        "--device", "cpu", "--json", report, "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [each["method"] for each in json.loads(report.read_text())["runs"]] == ["als", "ccd"]
    assert "s / iteration" in result.stdout
    some = ("--method", "als", "--device", "cpu", "--iterations", 1, "--where", "user=1,2,3", "--quiet")
    liked = hmf.Ratings.from_file(tmp_path / "ratings.csv", where={"user": ["1", "2", "3"]})
    assert f"{hmf.split(liked, 0.1, random_state=0)[0].nnz:,} training" in run(tmp_path / "ratings.csv", *some).stdout


@pytest.fixture
def few_films(monkeypatch):
    """Drawing the usual demo takes longer than a fit."""
    monkeypatch.setattr(demo, "generate", partial(demo.generate, 400, 150))


@pytest.mark.usefixtures("few_films")
def test_command_on_shapes_and_the_demo():
    small = ("--method", "als", "--factors", 4, "--iterations", 1, "--device", "cpu")
    assert run("ml-1m", "--scale", 0.02, *small).exit_code == 0
    for feedback in ("explicit", "implicit"):
        result = run("demo", "--feedback", feedback, *small)
        assert result.exit_code == 0, result.output
        assert "invented films" in result.stdout


def test_command_fails_where_devices_disagree(monkeypatch):
    monkeypatch.setattr(Comparison, "agree", False)
    assert run("ml-1m", "--scale", 0.02, "--method", "als", "--iterations", 1, "--device", "cpu").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ml-2m"], "neither a file nor a known shape"),
        (["demo", "--method", "svd"], "--method svd is unknown for explicit feedback; known: als, als-cg"),
        (["demo", "--device", "tpu"], "device must be"),
        (["demo", "--json", "missing/report.json"], "does not exist"),
        (["demo", "--where", "stars=5"], "demo is drawn from a seed"),
        (["ml-1m", "--scale", 2], "scale must be at most 1"),
        (["demo", "--iterations", 0], "iterations"),
    ],
)
@pytest.mark.usefixtures("few_films")
def test_command_errors(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# ---------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_synthetic_ratings(feedback):
    ratings = datasets.synthetic("ml-20m", feedback=feedback, scale=0.02, seed=1)
    m, n, nnz = datasets.shape_of("ml-20m", 0.02)
    assert ratings.shape == (m, n) == (2770, 546)
    assert 0.6 * nnz < ratings.nnz <= nnz  # pairs drawn twice are merged
    again, other = (datasets.synthetic("ml-20m", feedback=feedback, scale=0.02, seed=seed) for seed in (1, 2))
    assert (again.user_items != ratings.user_items).nnz == 0
    assert (other.user_items != ratings.user_items).nnz > 0
    values = set(np.unique(ratings.user_items.data))
    assert values == {1, 2, 3, 4, 5} if feedback == "explicit" else min(values) == 1 and max(values) > 5
    degrees = np.sort(np.bincount(ratings.user_items.indices, minlength=n))[::-1]
    assert degrees[: n // 10].sum() > 0.2 * ratings.nnz  # some items are popular


def test_planted_ratings_can_be_learned():
    ratings = datasets.synthetic("ml-1m", scale=0.3)
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    model = hmf.ExplicitALS(8, biases=False, regularization=0.1, device="cpu", random_state=0).fit(train)
    assert hmf.evaluate(model, test, metrics="rmse")["rmse"] < 0.9 * np.std(test.user_items.data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "ml-2m"}, "shape must be one of"),
        ({"shape": "msd", "scale": 1.5}, "scale must be at most 1"),
        ({"shape": "msd", "feedback": "loud"}, "feedback must be one of"),
        ({"shape": "msd", "seed": -1}, "seed"),
    ],
)
def test_synthetic_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        datasets.synthetic(**({"scale": 0.01} | arguments))
