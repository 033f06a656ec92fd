"""The command line and the demonstration, through click's test runner and as a process."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf import cli
from hybridmf.cli import main
from hybridmf.cli.titles import read_titles
from hybridmf.errors import MemoryBudgetError
from hybridmf.formats import BalsMatrix, reorder
from hybridmf.model import files as _io
from hybridmf.tools import demo

ROOT = Path(__file__).parents[1]
COMMANDS = ("demo", "fit", "compare", "recommend", "info", "tune", "convert")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: object) -> str:
    """The message of a user's mistake: exit code 2, one line, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    last = result.output.rstrip("\n").split("\n")[-1]
    assert last.startswith("Error: "), result.output
    return last


def start(*arguments: object, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "hybridmf", *map(str, arguments)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


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


def load_model(folder: Path):
    return hmf.load(folder / "model.safetensors")


# ------------------------------------------------------------------------------------------------------ the group


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    output = succeed(command, "--help")
    assert f"hybridmf {command}" in output.split("Examples:")[1]
    assert "--debug" in output
    assert succeed(command, "-h") == output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_marks_of_its_source(command):
    output = succeed(command, "--help")
    assert not any(mark in output for mark in ("\\b", "\b", "noqa"))


def test_help_of_compare_lists_each_method_on_a_line():
    listed = re.findall(r"^  (als|als-cg|als-subspace|sgd-[a-z-]+|ccd)  ", succeed("compare", "--help"), re.MULTILINE)
    sgd = [f"sgd-{schedule}" for schedule in ("blocks", "hogwild", "msgd", "batch-hogwild")]
    assert listed == ["als", "als-cg", "als-subspace", *sgd, "ccd"]


def test_help_of_the_group_names_all_commands_and_nothing_else():
    commands = re.findall(r"^  ([a-z]+)  ", succeed("--help").split("Commands:")[1], re.MULTILINE)
    assert sorted(commands) == sorted(COMMANDS)


def test_version_as_a_process():
    process = start("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, f"hybridmf, version {hmf.__version__}", "")


@pytest.mark.parametrize("error", [ValueError("no\ngood"), TypeError("no good"), hmf.errors.DeviceError("no good")])
def test_a_library_error_is_one_line(monkeypatch, error):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(error))
    assert refuse("demo") == "Error: no good"


def test_an_error_without_words_is_named(monkeypatch):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(ValueError()))
    assert refuse("demo") == "Error: ValueError"


def test_a_file_error_names_the_file(monkeypatch):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(PermissionError(13, "Permission denied", "some/file")))
    assert refuse("demo") == "Error: some/file: Permission denied"


@pytest.mark.parametrize("arguments", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback(monkeypatch, arguments):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(ValueError("no good")))
    assert isinstance(run(*arguments).exception, ValueError)


def test_a_bug_is_not_taken_for_a_mistake(monkeypatch):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(RuntimeError("a bug")))
    result = run("demo")
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_interruption_exits_130(monkeypatch):
    monkeypatch.setattr(cli.demo, "run_demo", _raising(KeyboardInterrupt()))
    result = run("demo")
    assert result.exit_code == 130
    assert result.output.strip() == "Interrupted."


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_while_training_leaves_no_file(folder, tmp_path):
    process = start("fit", folder / "ratings.csv", "-o", tmp_path / "m.safetensors", "--iterations", 10**6)
    line = next(line for line in iter(process.stdout.readline, "") if "memory" in line)  # the end of the plan
    assert line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("Interrupted.\n")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_who_goes_away_is_no_error(folder):
    process = start("recommend", folder / "model.safetensors", "--all-users")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=60)


def _raising(error: BaseException):
    def function(*_, **__):
        raise error

    return function


# ----------------------------------------------------------------------------------------------------------- demo


@settings(deadline=None, max_examples=15)
@given(n_users=st.integers(1, 60), n_items=st.integers(1, 80), seed=st.integers(0, 2**40))
def test_generated_films_are_sound_and_repeatable(n_users, n_items, seed):
    films = demo.generate(n_users, n_items, seed)
    again = demo.generate(n_users, n_items, seed)
    for name in ("users", "items", "values", "item_genres", "liked_genres"):
        np.testing.assert_array_equal(getattr(films, name), getattr(again, name))
    assert films.titles == again.titles
    assert films.shape == (n_users, n_items) == (len(films.liked_genres), len(set(films.titles)))
    pairs = films.users * n_items + films.items
    assert np.all(np.diff(pairs) > 0)
    assert set(np.unique(films.values)) <= {1, 2, 3, 4, 5}
    assert np.all(np.bincount(films.users, minlength=n_users) > 0)
    assert set(films.item_genres.sum(axis=1)) <= {1, 2}
    assert np.all(films.liked_genres.sum(axis=1) == 2)


def test_generated_films_have_the_planted_structure():
    films = demo.generate(1500, 800, seed=1)
    assert len(demo.generate(1, demo.MOST_TITLES).titles) == demo.MOST_TITLES == 1600
    own = films.is_own_genre(films.users, films.items)
    assert films.values[own].mean() > films.values[~own].mean() + 0.5  # taste shows in the stars
    assert own.mean() > 1.5 * films.is_own_genre(films.users, films.users % 800).mean()  # and in what is watched
    counts = np.sort(np.bincount(films.items, minlength=800))[::-1]
    assert counts[:80].sum() > 0.25 * counts.sum()  # a tenth of the films has far more than a tenth of the ratings
    assert films.values.std() > 0.5
    other = demo.generate(1500, 800, seed=2)
    assert len(other.values) != len(films.values) or not np.array_equal(other.items, films.items)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n_users": 0}, ValueError),
        ({"n_items": 0}, ValueError),
        ({"n_items": 1601}, ValueError),
        ({"seed": -1}, ValueError),
        ({"n_users": 2.0}, TypeError),
        ({"seed": None}, TypeError),
    ],
)
def test_generate_refuses(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        demo.generate(**arguments)


@pytest.fixture(scope="module")
def quick() -> tuple[demo.DemoResult, str]:
    """Numbers and text of a quick demonstration."""
    lines: list[str] = []
    result = demo.run_demo(lines.append, seed=0, quick=True, show_progress=False)
    return result, "\n".join(lines) + "\n"


def test_quick_demo_beats_the_baselines_clearly(quick):
    result, text = quick
    assert result.explicit < 0.9 * result.item_means
    assert result.implicit["ndcg@10"] > 1.4 * result.popularity["ndcg@10"]
    assert result.implicit["precision@10"] > 1.4 * result.popularity["precision@10"]
    assert result.implicit["genre_share"] > 0.75
    assert result.popularity["genre_share"] < 0.4
    assert set(result.seconds) == {method for method in demo.METHODS if demo._serves("cpu", *method)}
    assert all(0 < second < 5 for pair in result.seconds.values() for second in pair)
    for number in (result.explicit, result.item_means, result.implicit["ndcg@10"], result.popularity["ndcg@10"]):
        assert f"{number:.3f}" in text
    for pair in result.seconds.values():
        assert f"{pair[0]:.4f}" in text and f"{pair[1]:.4f}" in text


def test_quick_demo_recommends_titles_of_each_persons_genres(quick):
    people = _section(quick[1], 4)
    likes = re.findall(r"Person [\d,]+ likes (.+?)\. Highest", people)
    assert len(likes) == 3
    assert len({genre for pair in likes for genre in pair.split(" and ")}) == 6  # three different tastes
    recommended = re.findall(r"^ +-?\d\.\d\d  (.+?)  +(\* )?([A-Z].*)$", people, re.MULTILINE)
    assert len(recommended) == 18
    assert sum(bool(star) for _, star, _ in recommended) >= 12
    every_title = {title for name in demo.GENRE_NAMES for title in demo._titles(name)}
    assert {title for title, _, _ in recommended} <= every_title


def test_demo_text_is_plain_and_narrow(quick):
    text = quick[1]
    assert text.isascii()
    assert max(map(len, text.split("\n"))) <= demo.WIDTH
    assert "\n\n\n" not in text


def test_demo_command_is_repeatable(quick):
    output = succeed("demo", "--quick")
    for number in (1, 4):
        assert _section(output, number) == _section(quick[1], number)
    assert "100%" not in output  # the progress bar: this is no terminal


def _section(report: str, number: int) -> str:
    return report.split(f"\n{number}. ")[1].split(f"\n{number + 1}. ")[0]


def test_demo_refuses_a_negative_seed():
    assert "seed" in refuse("demo", "--seed", -1)


def test_demo_says_why_there_is_no_gpu_column(monkeypatch):
    monkeypatch.setattr(demo, "plan", _raising(hmf.errors.DeviceError("the cat took it")))
    lines: list[str] = []
    demo._report_seconds(lines.append, _few_ratings(), seed=0)
    assert "There is no GPU column. the cat took it" in "\n".join(lines)
    assert "sparse_syrk" not in "\n".join(lines)


def test_demo_has_a_gpu_column_where_there_is_one(monkeypatch):
    monkeypatch.setattr(demo, "plan", lambda *_: None)
    monkeypatch.setattr(demo, "_seconds_per_iteration", lambda model, _: {"cpu": 0.25, "cuda": 0.125}[model.device])
    lines: list[str] = []
    seconds = demo._report_seconds(lines.append, _few_ratings(), seed=0)
    table = lines[-1].lstrip("\n").split("\n")
    assert "explicit, cuda" in table[0]
    cpu, cuda, none = ["0.2500"] * 2, ["0.1250"] * 2, ["-"] * 2
    assert [line.split() for line in table[2:]] == [
        ["rank1", "cholesky", *cpu, *none],
        ["blas3", "cholesky", *cpu, *none],
        ["sparse_syrk", "cholesky", *none, *cuda],
        ["mo_als", "cholesky", *none, *cuda],
        ["bals", "cholesky", *cpu, *cuda],
        ["auto", "cholesky", *cpu, *cuda],
        ["auto", "cg", *cpu, *cuda],
        ["auto", "subspace", *cpu, *none],
    ]
    assert set(seconds.values()) == {(0.25, 0.25)}


def _few_ratings() -> hmf.Ratings:
    films = demo.generate(20, 15)
    return hmf.Ratings.from_coo(films.users, films.items, films.values, shape=films.shape)


def test_format_table():
    assert demo.format_table(["a", "bb"], [["x", 1], ["yyy", 22]], "<>", indent=1).split("\n") == [
        " a    bb",
        " ---  --",
        " x     1",
        " yyy  22",
    ]


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
    file.write_text("".join(f"{user},{item},-1\n" for user in range(6) for item in range(5)))
    output = succeed("fit", file, "-o", out, "--model", "implicit", "--factors", 2)
    assert "Not evaluated: " in output
    assert hmf.load(out).n_users == 6


def test_fit_keeps_the_old_file_when_it_fails(folder, tmp_path, monkeypatch):
    out = tmp_path / "m.safetensors"
    out.write_text("old")
    monkeypatch.setattr(hmf.ExplicitALS, "fit", _raising(ValueError("increase regularization")))
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
    (["--test-size", 1.5], "test_size"),
    (["--test-size", -0.1], "test_size"),
    (["--test-size", 10**9], "test_size"),
    (["--user", "nobody"], "nobody"),
    (["--value", 7], "7"),
    (["--separator", "::"], "1 columns"),
    (["--duplicates", "forget"], "'--duplicates'"),
    (["--output", "no/such/folder/m"], "folder"),
    (["--output", "."], "directory"),
]


@pytest.mark.parametrize(("options", "message"), FIT_MISTAKES)
def test_fit_refuses(folder, tmp_path, options, message):
    out = [] if "--output" in options else ["-o", tmp_path / "m"]
    assert message in refuse("fit", folder / "ratings.csv", *out, *options)
    assert list(tmp_path.iterdir()) == []


def test_fit_judges_options_before_it_reads(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.fit, "read_ratings", _raising(RuntimeError("read all the same")))
    assert "factors" in refuse("fit", folder / "ratings.csv", "-o", tmp_path / "m", "--factors", 0)


def test_fit_refuses_files(folder, tmp_path):
    out = tmp_path / "m"
    assert "does not exist" in refuse("fit", tmp_path / "missing.csv", "-o", out)
    assert "directory" in refuse("fit", tmp_path, "-o", out)
    assert "'-o'" in refuse("fit", folder / "ratings.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text("1,2,3\n1,3,many\n")
    assert "line 2" in refuse("fit", bad, "-o", out)


def test_fit_goes_on_from_a_checkpoint(tmp_path):
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
    done = subprocess.run(
        [sys.executable, "-m", "hybridmf", *map(str, checkpointed), "--iterations", "4"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "6 iterations in" in done.stdout
    assert "has 6 iterations behind it and iterations=4 counts them in: nothing is trained" in done.stderr
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


def test_recommend_csv_for_all_users_leaves_out_what_they_have(folder, monkeypatch):
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


def test_recommend_needs_to_know_what_was_seen(folder, tmp_path):
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
    monkeypatch.setattr(hmf.ExplicitALS, "recommend", _raising(ValueError("no good")))
    refuse("recommend", folder / "model.safetensors", "--all-users", "-o", tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


RECOMMEND_MISTAKES = [
    ([], "say for whom"),
    (["--user", "u1", "--all-users"], "say for whom"),
    (["--user", "u1", "--user", "me"], "unknown user me; the model knows 90 users, such as u0, u1"),
    (["--user", "u1", "-N", 0], "-N"),
    (["--user", "u1", "--format", "xml"], "'--format'"),
    (["--user", "u1", "--include-seen", "--ratings", "ratings.csv"], "choose one"),
    (["--user", "u1", "--titles", "missing.csv"], "does not exist"),
    (["--user", "u1", "--ratings", "strangers.csv"], "none of the 2 users of strangers.csv is known to the model"),
    (["--user", "u1", "--ratings", "strange_items.csv"], "none of the 2 items"),
    (["--user", "u1", "-o", "no/such/folder/x"], "folder"),
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


# --------------------------------------------------------------------------------------------------------- titles

TITLES = {
    "movies.dat": ("1::Amélie (2001)::Comedy|Romance\n2::A | B, C: D\n".encode("latin-1"), "A | B, C: D"),
    "u.item": ("1|Amélie (2001)|01-Jan-2001||http://x/?a::b|0\n2|A, B|\n".encode("latin-1"), "A, B"),
    "movies.csv": ('\ufeffmovieId,title,genres\n1,Amélie (2001),A|B\n2,"A, ""B""",C\n'.encode(), 'A, "B"'),
    "bare.csv": ("1,Amélie (2001),A|B\n2,B,C|D".encode(), "B"),
    "semicolons.csv": ('"1";"Amélie (2001)"\r\n"2";"A; B"\r\n'.encode(), "A; B"),
    "artists.tsv": ('id\tname\turl\n1\tAmélie (2001)\tu\n2\t"Al" B, C "D\tu\n\n'.encode(), '"Al" B, C "D'),
    "artists.tsv.gz": (gzip.compress("1\tAmélie (2001)\n2\tB\n".encode()), "B"),
    "no_newline_inside": ("1|Amélie (2001)\n2|A\x85B\x0cC\n".encode("latin-1"), "A\x85B\x0cC"),
}


@pytest.mark.parametrize("name", TITLES)
def test_titles_are_read(tmp_path, name):
    content, second = TITLES[name]
    (tmp_path / name).write_bytes(content)
    titles = read_titles(str(tmp_path / name))
    assert titles["1"] == "Amélie (2001)"
    assert titles["2"] == second
    assert len(titles) <= 3  # perhaps a header


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], "is empty"),
        (b"\n \n", [], "is empty"),
        (b"1 A Title\n", [], "has no separator"),
        (b"1,A Title\n2\n", [], "entry 2 ('2') has no title"),
        (b"1,A Title\n", ["--titles-separator", "::"], "entry 1 ('1,A Title') has no title after the separator '::'"),
        (b"1\tA\n", ["--titles-separator", ","], "has no title"),
        (b"1,Am\xe9lie\n", ["--titles-encoding", "utf-8"], "line 1 is not valid utf-8"),
        (b"1,A\n", ["--titles-encoding", "klingon"], "--titles-encoding: unknown encoding: klingon"),
        (gzip.compress(b"1,A Title\n", mtime=0)[:-10], [], "truncated"),
        (b'1,"' + b"x" * 200_000, [], "cannot be read as CSV"),
    ],
)
def test_titles_are_refused(folder, tmp_path, content, options, message):
    file = tmp_path / "titles"
    file.write_bytes(content)
    arguments = ["recommend", folder / "model.safetensors", "--user", "u1", "--titles", file]
    assert message in refuse(*arguments, *options)


def test_titles_take_a_spelled_out_tab_and_an_encoding(folder, tmp_path):
    file = tmp_path / "titles"
    file.write_bytes("a,m1\tA €\n".encode("cp1252"))
    titles = read_titles(str(file), "\t", "cp1252")
    assert titles == {"a,m1": "A €"}
    for tab in ("tab", "\\t"):
        succeed(
            "recommend", folder / "model.safetensors", "--user", "u1", "--titles", file,
            "--titles-separator", tab, "--titles-encoding", "cp1252",
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- info


def facts(text: str) -> dict[str, str]:
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.strip().split("\n"))


def test_info_of_the_installation(monkeypatch):
    known = hmf.config()
    shown = facts(succeed("info"))
    assert shown["hybridmf"] == hmf.__version__
    assert shown["instruction set"] == known["instruction_set"]
    assert shown["threads"] == str(known["threads"])
    assert known["gpu_reason"] in shown["GPU"]
    assert "GiB" in shown["memory free"]
    other = known | {"gpu": "H200", "gpu_reason": "H200; fine", "memory_available": None, "blas": [], "cupy": "14.0"}
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


def test_info_refuses(tmp_path):
    assert "does not exist" in refuse("info", tmp_path / "missing")
    (tmp_path / "m.safetensors").write_text("1,2,3")
    assert "not a complete model file" in refuse("info", tmp_path / "m.safetensors")


# -------------------------------------------------------------------------------------------------------- convert


def same_ratings(one: hmf.Ratings, other: hmf.Ratings, labels: bool = True) -> bool:
    same = one.shape == other.shape and (one.user_items != other.user_items).nnz == 0 and one.nnz == other.nnz
    if labels:
        same = same and one.user_ids.tolist() == other.user_ids.tolist()
        same = same and one.item_ids.tolist() == other.item_ids.tolist()
    return same


@pytest.mark.parametrize("name", ["r.npz", "r.csv", "r.csv.gz", "r.mtx", "r.mtx.gz"])
def test_convert_keeps_the_ratings(folder, tmp_path, name):
    output = succeed("convert", folder / "ratings.csv", tmp_path / name)
    assert f"Wrote {tmp_path / name}" in output
    before, after = (hmf.Ratings.from_file(path) for path in (folder / "ratings.csv", tmp_path / name))
    assert same_ratings(before, after, labels="mtx" not in name)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else {
        "r.npz": b"PK", "r.csv": b"us", "r.mtx": b"%%"
    }[name])  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5))
def test_csv_and_mtx_keep_every_float32(tmp_path_factory, values):
    tmp_path = tmp_path_factory.mktemp("floats")
    positions = np.arange(len(values))
    ratings = hmf.Ratings.from_coo(positions, positions, np.array(values, dtype=np.float32))
    ratings.save(tmp_path / "r.npz")
    for name in ("r.csv", "r.mtx"):
        succeed("convert", tmp_path / "r.npz", tmp_path / name, "--quiet")
        assert same_ratings(ratings, hmf.Ratings.from_file(tmp_path / name), labels=False)


def test_csv_keeps_awkward_labels(tmp_path):
    ratings = hmf.Ratings.from_coo(["#1 fan", 'say "hi"', "a,b"], ["x", "#", "x"], [1, 2.5, 0])
    ratings.save(tmp_path / "r.npz")
    succeed("convert", tmp_path / "r.npz", tmp_path / "r.csv", "--quiet")
    assert same_ratings(ratings, hmf.Ratings.from_file(tmp_path / "r.csv"))


def test_a_folder_becomes_a_store_and_is_fitted_from(folder, tmp_path):
    source, store = folder / "ratings.csv", tmp_path / "store"
    output = succeed("convert", source, f"{store}/", "--slab-bytes", "4KiB", "--memory-limit", "1MiB")
    ratings = hmf.Ratings.from_file(source)
    assert f"{ratings.nnz:,}" in output and " of users, " in output
    assert np.array_equal(hmf.Store.open(store).to_ratings().user_items.data, ratings.user_items.data)
    assert "there is a store already" in refuse("convert", source, store)
    assert succeed("convert", source, store, "--overwrite", "--quiet", "--slab-bytes", "4KiB") == ""
    columns, _, facts = output.partition("\n")
    assert columns.split(maxsplit=1) == [
        "columns",
        "user = column 0 'who', item = column 1 'what', value = column 2 'stars'",
    ]
    assert succeed("info", store) == facts
    options = ("--factors", 4, "--iterations", 3, "--seed", 5, "--quiet", "--device", "cpu")
    for name, where, size in (("a", store, 0), ("b", source, 0), ("c", store, 0.2), ("d", source, 0.2)):
        succeed("fit", where, "-o", tmp_path / name, "--test-size", size, *options)
    for one, other in ("ab", "cd"):
        found, expected = hmf.load(tmp_path / one), hmf.load(tmp_path / other)
        assert np.array_equal(found.user_factors, expected.user_factors)
        assert np.array_equal(found.recommend(3)[0], expected.recommend(3)[0])


@pytest.fixture
def store(folder, tmp_path) -> Path:
    """A store of ratings.csv."""
    return hmf.convert(folder / "ratings.csv", tmp_path / "store", slab_bytes="4KiB").path


@pytest.mark.parametrize("name", ["r.npz", "r.csv.gz", "r.mtx"])
def test_a_store_becomes_a_file(folder, store, name, tmp_path):
    output = succeed("convert", store, tmp_path / name)
    assert "BALS tiles of 256 x 192" in output and f"Wrote {tmp_path / name}" in output
    before, after = hmf.Store.open(store).to_ratings(), hmf.Ratings.from_file(tmp_path / name)
    assert same_ratings(before, after, labels="mtx" not in name)
    assert "reuse factor" in succeed("convert", store, "--to", "bals-stats")


def test_a_store_becomes_another_store(store, tmp_path):
    output = succeed("convert", store, f"{tmp_path}/finer/", "--slab-bytes", "1KiB", "--memory-limit", "1MiB")
    before, after = hmf.Store.open(store), hmf.Store.open(tmp_path / "finer")
    assert same_ratings(before.to_ratings(), after.to_ratings())
    assert f"slabs             {len(after.slabs('user'))} of users" in output
    assert len(after.slabs("user")) > len(before.slabs("user"))
    assert "is a store that is read" in refuse("convert", store, f"{store}/", "--overwrite")
    for inside in ("finer/", "r.npz"):
        assert "lies in the store that is read" in refuse("convert", store, f"{store}/{inside}")
    assert before.verify() is None


def test_a_store_that_does_not_fit_into_memory_becomes_a_store_only(store, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridmf.data.store.available_memory", lambda: 100)
    assert "MiB of memory as a matrix" in refuse("convert", store, tmp_path / "r.npz")
    succeed("convert", store, f"{tmp_path}/other/", "--quiet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]


def test_methods_are_compared_on_a_store(store):
    options = ("--method", "als", "--device", "cpu", "--factors", 2, "--iterations", 2, "--quiet")
    assert succeed("compare", f"{store}/", *options).startswith("store: 90 users x 60 items, ")


def test_seen_items_are_read_from_a_store(folder, store):
    arguments = ("recommend", folder / "model.safetensors", "--user", "u3", "--format", "csv", "--ratings")
    assert succeed(*arguments, store) == succeed(*arguments, folder / "ratings.csv")


READING_OPTIONS = [
    ("--separator", ","), ("--header",), ("--no-header",), ("--user", 0), ("--item", 1), ("--value", "none"),
    ("--duplicates", "error"),
]  # fmt: skip


@pytest.mark.parametrize("option", READING_OPTIONS, ids=lambda option: option[0])
def test_options_that_say_how_a_file_is_read_are_refused_of_what_is_no_such_file(folder, store, tmp_path, option):
    out = tmp_path / "m.safetensors"
    for command, why in (
        (("fit", store, "-o", out), "is a store"),
        (("fit", store, "-o", out, "--test-size", 0), "is a store"),
        (("info", store), "is a store"),
        (("info", folder / "model.safetensors"), "is a model"),
        (("info",), "none is given"),
        (("compare", store), "is a store"),
        (("compare", "demo"), "is drawn from a seed"),
        (("convert", store, tmp_path / "r.npz"), "is a store"),
        (("convert", store, f"{tmp_path}/other/"), "is a store"),
    ):
        message = refuse(*command, *option)
        assert message.startswith(f"Error: {option[0]} says how a file of ratings is read, and ")
        assert message.endswith(f"{why}; leave it out")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_that_is_no_store_is_named(folder, tmp_path):
    for arguments in (
        ("fit", tmp_path, "-o", tmp_path / "m"), ("info", tmp_path), ("compare", tmp_path),
        ("convert", tmp_path, tmp_path / "r.npz"), ("convert", tmp_path, f"{tmp_path}/store/"),
        ("recommend", folder / "model.safetensors", "--user", "u3", "--ratings", tmp_path),
    ):  # fmt: skip
        assert "is a directory, but no store (no manifest.json)" in refuse(*arguments)
    assert not list(tmp_path.iterdir())


def test_a_store_whose_seen_items_do_not_fit_is_fitted_all_the_same(folder, tmp_path, monkeypatch):
    hmf.convert(folder / "ratings.csv", tmp_path / "store")
    monkeypatch.setattr("hybridmf.data.store.StoredSeen.load", _no_memory)
    output = succeed(
        "fit", tmp_path / "store", "-o", tmp_path / "m", "--test-size", 0, "--factors", 2, "--iterations", 1
    )
    assert "Saved without what users have seen: too much" in output
    assert "not stored" in succeed("info", tmp_path / "m")


def test_a_model_that_has_no_room_where_it_should_go_is_saved_elsewhere(folder, tmp_path, monkeypatch):
    original, model = _io.write_atomically, tmp_path / "m.safetensors"

    def full(path: Any, content: Any) -> None:
        if Path(path) == model:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content)

    monkeypatch.setattr(_io, "write_atomically", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = refuse("fit", folder / "ratings.csv", "-o", model, "--factors", 2, "--iterations", 1)
    assert f"{model}: No space left on device; the model was saved as {tmp_path}" in said
    (rescued,) = tmp_path.glob("hybridmf-*/m.safetensors")
    assert str(rescued) in said and hmf.load(rescued).n_iter_ == 1


def _no_memory(self: object) -> None:
    raise MemoryBudgetError("too much")


def test_folders_become_stores_only(folder, tmp_path):
    assert "can only become a store" in refuse("convert", folder / "ratings.csv", tmp_path, "--to", "npz")
    assert "does not exist" in refuse("convert", folder / "ratings.csv", tmp_path / "none" / "store" / "")
    assert "holds other files" in refuse("convert", folder / "ratings.csv", folder)
    assert "slab_bytes must be a size" in refuse(
        "convert", folder / "ratings.csv", f"{tmp_path}/s/", "--slab-bytes", "x"
    )


def test_convert_prints_statistics(folder, tmp_path):
    tiles = ["--tile-rows", 16, "--tile-cols", 8, "--num-threads", 1]
    output = succeed("convert", folder / "ratings.csv", "--to", "bals-stats", *tiles)
    ratings = hmf.Ratings.from_file(folder / "ratings.csv")
    assert f"ratings           {ratings.nnz:,}\n" in output
    assert "ratings per user  min" in output
    assert "BALS tiles of 16 x 8" in output
    before = BalsMatrix.from_csr(ratings.user_items, 16, 8).statistics()
    after = BalsMatrix.from_csr(reorder(ratings.user_items).matrix, 16, 8).statistics()
    assert before != after
    for name, key, form in (
        ("tiles", "tiles", "{:,}"),
        ("segments .rows of tiles.", "segments", "{:,}"),
        ("reuse factor .*column.", "reuse_factor", "{:.2f}"),
    ):
        pattern = rf"^ +{name} +{re.escape(form.format(before[key]))} +{re.escape(form.format(after[key]))}$"
        assert re.search(pattern, output, re.MULTILINE), name
    for kind in ("tile", "segment"):
        share = f"{before[f'vacant_{kind}s']:,} ({before[f'vacant_{kind}_share']:.1%})"
        assert share in output
    for out, to in (("stats.json", ()), ("stats.txt", ("--to", "bals-stats"))):
        written = succeed("convert", folder / "ratings.csv", tmp_path / out, "--quiet", *to, *tiles)
        assert written == ""
        assert json.loads((tmp_path / out).read_text()) == {"as read": before, "reordered": after}


def test_convert_format_by_option(folder, tmp_path):
    succeed("convert", folder / "ratings.csv", tmp_path / "x", "--to", "mtx", "--quiet")
    assert (tmp_path / "x").read_bytes().startswith(b"%%MatrixMarket")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a file OUT"),
        (["--to", "csv"], "name a file OUT"),
        (["out.xls"], "the ending of out.xls says no format"),
        (["out.npz.gz"], "says no format"),
        (["out.csv", "--to", "xls"], "'--to'"),
        (["no/such/out.csv"], "folder"),
        (["out.csv", "--tile-rows", 0], "tile_rows"),
        (["out.csv", "--tile-cols", 0], "tile_cols"),
        (["out.csv", "--num-threads", 0], "num_threads"),
    ],
)
def test_convert_refuses(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refuse("convert", folder / "ratings.csv", *options)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ real data


@pytest.mark.realdata
def test_movielens_1m_from_the_command_line(data_dir, tmp_path):
    ratings, out = data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz", tmp_path / "m.safetensors"
    output = succeed("fit", ratings, "-o", out, "--factors", 8, "--iterations", 5, "--regularization", 0.065)
    assert "6,040 users, 3,706 items, 1,000,209 ratings." in output
    ours, baseline = (
        float(re.search(rf"{name} +(\d\.\d+)\n", output).group(1)) for name in ("ExplicitALS", "each item")
    )
    assert ours < 0.89 < 0.97 < baseline
    movies = ["--titles", data_dir / "ml-1m" / "movies.dat"]
    shown = succeed("recommend", out, "--user", 1, "-N", 5, *movies)
    assert len(re.findall(r"^ +\d+ +\d+ +\d\.\d{3}  .+ \(\d{4}\)$", shown, re.MULTILINE)) == 5
    found = succeed("recommend", out, "--all-users", "-N", 10, "--format", "csv", *movies, "--ratings", ratings)
    rows = list(csv.DictReader(io.StringIO(found)))
    assert len(rows) == 60_400
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


# ----------------------------------------------------------------------------------------------------------- docs


def test_documentation_names_real_options_and_commands():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    helps = {command: succeed(command, "--help") for command in COMMANDS}
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(COMMANDS)
    for command in COMMANDS:
        section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
        options = set(
            re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", re.sub(r"```text.*?```", "", section, flags=re.DOTALL))
        )
        unknown = {option for option in options if option not in helps[command]}
        assert not unknown, (command, unknown)


def test_a_model_is_not_written_into_the_store_that_is_read(tmp_path):
    store = hmf.convert(sp.csr_array(np.ones((4, 3))), tmp_path / "store")
    for name in ("manifest.json", "model.safetensors"):
        assert "lies in the store that is read" in refuse("fit", store.path, "-o", store.path / name)
    hmf.Store.open(store.path).verify()
