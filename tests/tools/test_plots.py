"""What pictures show: data of lines and bars, limits and labels. How they look is for the eye."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import plots
from support.command_line import refuse, succeed
from support.ratings import planted

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("small_product")

RATINGS = planted(60, 40, 0.3)


def points(line):
    return np.asarray(line.get_xdata(), dtype=float).tolist(), np.asarray(line.get_ydata(), dtype=float).tolist()


@pytest.fixture(scope="module")
def parts():
    return hmf.split(hmf.Ratings.from_matrix(RATINGS), 0.2, random_state=0)


@pytest.fixture(scope="module")
def model(parts):
    train, test = parts
    fitted = hmf.ExplicitALS(factors=8, regularization=0.001, iterations=30, random_state=0, device="cpu")
    return fitted.fit(train, validation=test, early_stopping={"patience": 2, "metric": "mae", "min_delta": 0.5})


# ------------------------------------------------------------------------------------------------------------- a fit


def test_training_marks_the_chosen_iteration(model):
    assert model.n_iter_ < len(model.history_)
    ax = plots.training(model)
    objective, chosen = ax.lines
    iterations = [record["iteration"] for record in model.history_]
    assert points(objective) == (iterations, [record["objective"] for record in model.history_])
    assert points(chosen)[0] == [model.n_iter_, model.n_iter_]
    (beside,) = [each for each in ax.figure.axes if each is not ax]
    curve, ring = beside.lines
    assert points(curve) == (iterations, [record["mae"] for record in model.history_])  # that of early stopping
    assert points(ring) == ([model.n_iter_], [model.history_[model.n_iter_ - 1]["mae"]])
    assert beside.get_ylabel() == "validation MAE (lower is better)"
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["objective", "MAE", f"chosen: iteration {model.n_iter_}"]
    other = plots.training(model, metric="rmse").figure.axes[1]
    assert points(other.lines[0])[1] == [record["rmse"] for record in model.history_]


def test_training_draws_into_given_axes_and_without_a_metric():
    figure = plots.new_figure(4, 3)
    ax = figure.subplots()
    fitted = hmf.ExplicitALS(factors=2, iterations=2, device="cpu").fit(RATINGS, callback=lambda *_: None)
    assert plots.training(fitted, ax=ax) is ax and figure.axes == [ax]
    with pytest.raises(ValueError, match="metric 'rmse' is not in history_, which has no metric"):
        plots.training(fitted, metric="rmse")
    silent = hmf.ExplicitALS(factors=2, iterations=2, device="cpu").fit(RATINGS)
    with pytest.raises(ValueError, match="history_ has no objective: fit with validation="):
        plots.training(silent)


# ----------------------------------------------------------------------------------------------------------- ratings


def test_degrees_are_ranked_on_logarithmic_axes(tmp_path):
    dense = np.zeros((6, 4), np.float32)
    dense[0, :] = 1
    dense[1, :2] = dense[3, 0] = 1
    ax = plots.degrees(dense)
    users, items = ax.lines
    assert points(users) == ([1, 2, 3], [4, 2, 1]) and points(items) == ([1, 2, 3, 4], [3, 2, 1, 1])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["6 users, 3 of them without entries", "4 items"]
    sp.save_npz(tmp_path / "r.npz", sp.csr_matrix(RATINGS))
    store = hmf.convert(tmp_path / "r.npz", tmp_path / "store")
    by_store, by_matrix = plots.degrees(store), plots.degrees(RATINGS)
    assert [points(line) for line in by_store.lines] == [points(line) for line in by_matrix.lines]


def test_many_degrees_are_thinned(monkeypatch):
    monkeypatch.setattr(plots, "POINTS", 5)
    x, y = points(plots.degrees(RATINGS).lines[0])
    counts = np.sort(np.diff(RATINGS.indptr))[::-1]
    assert len(x) <= 5 and x[0] == 1 and x[-1] == np.count_nonzero(counts)
    assert y == counts[np.int64(x) - 1].tolist()


@pytest.mark.parametrize("cells", [400, 3])
def test_occupancy_counts_entries_of_tiles(monkeypatch, cells):
    monkeypatch.setattr(plots, "CELLS", cells)
    before, after = plots.occupancy(RATINGS, 8, 16)
    both = (before, RATINGS), (after, hmf.formats.reorder(RATINGS).matrix)
    for axes, matrix in both:
        image = axes.images[0].get_array().filled(0)
        counts = np.zeros((8, 3))
        np.add.at(counts, (matrix.nonzero()[0] // 8, matrix.nonzero()[1] // 16), 1)
        if cells == 3:  # cells of three rows of tiles, the last of two
            counts = np.stack([counts[:3].mean(axis=0), counts[3:6].mean(axis=0), counts[6:].mean(axis=0)])
        np.testing.assert_allclose(image, counts)
        found = hmf.formats.BalsMatrix.from_csr(matrix, 8, 16).statistics()
        assert f"reuse {found['reuse_factor']:.2f}" in axes.get_title()
        assert axes.images[0].get_extent() == [0, 40, 60, 0]
    assert before.images[0].norm is after.images[0].norm
    with pytest.raises(ValueError, match="ax must be two axes"):
        plots.occupancy(RATINGS, ax=before)


# ---------------------------------------------------------------------------------------------------------- rankings


def test_recall_curves_are_those_of_evaluate(parts, model):
    train, test = parts
    ax = plots.recall_curves({"ours": model, "lists": np.zeros((60, 1), int)}, test, train, k=12, relevance_threshold=3)
    ours, _, popular = ax.lines
    names = [f"recall@{k}" for k in range(1, 13)]
    for line, each in ((ours, model), (popular, hmf.metrics.PopularityRecommender().fit(train))):
        found = hmf.evaluate(each, test, train=train, metrics=names, relevance_threshold=3)
        assert points(line) == (list(range(1, 13)), list(found.values()))
    assert [line.get_label() for line in ax.lines] == ["ours", "lists", "most popular items"]
    assert ax.get_ylim()[0] == 0
    assert plots.recall_curves(model, test, train, k=2).lines[0].get_label() == "ExplicitALS"


# ------------------------------------------------------------------------------------------------------- comparisons


def test_bars_start_at_zero():
    models = [hmf.ExplicitALS(3, iterations=3, solver=solver) for solver in ("cholesky", "cg")]
    result = hmf.compare(RATINGS, models, devices=["cpu"])
    ax = plots.bars(result)
    assert ax.get_xlim()[0] == 0 and ax.get_xscale() == "linear"
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [
        (0, run.per_iteration) for run in result.runs[::-1]
    ]
    ax = plots.score_bars(result)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [result.baseline.score, *(run.scores[-1] for run in result.runs[::-1])]
    assert ax.get_xlim()[0] == 0 and {bar.get_x() for bar in ax.patches} == {0}
    assert ax.get_xlabel() == "held-out RMSE (lower is better)"
    ends = ax.collections[-1].get_segments()[0][:, 0]
    assert ends.tolist() == pytest.approx(list(result.runs[0].interval[1:]))
    assert points(plots.curves(result).lines[0])[1] == list(result.runs[0].scores)
    with pytest.raises(ValueError, match="result has no held-out entries"):
        plots.score_bars(hmf.compare(RATINGS, models[0], devices=["cpu"], test_size=0))


# ------------------------------------------------------------------------------------------------------- the commands


def test_pictures_of_the_commands(tmp_path, parts, monkeypatch):
    files = {name: tmp_path / f"{name}.csv" for name in ("train", "test")}
    for (name, path), part in zip(files.items(), parts, strict=True):
        frame = part.to_frame("pandas")
        assert list(frame.columns) == ["user", "item", "value"], name
        frame.to_csv(path, index=False)
    model_file, drawn, written = tmp_path / "m.safetensors", [], []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **options: drawn.append((figure, options))
    )
    monkeypatch.setattr(plots, "write_atomically", lambda path, _: written.append(path))
    picture = ("--plot", tmp_path / "picture.svg")
    fit = ("fit", files["train"], "-o", model_file, "--factors", 3, "--iterations", 3, "--quiet")
    succeed(*fit, "--validation", 0.1, *picture)
    assert all("objective" in record for record in hmf.load(model_file).history_)
    succeed(*fit, *picture)
    succeed("info", files["train"], *picture)
    hmf.convert(files["train"], tmp_path / "store")
    succeed("info", tmp_path / "store", *picture)
    succeed("evaluate", model_file, files["test"], "--train", files["train"], *picture)
    succeed("convert", files["train"], "--to", "bals-stats", "--tile-rows", 16, *picture)
    succeed("compare", files["train"], "--method", "als", "--device", "cpu", "--iterations", 2, *picture)
    labels = [
        "validation RMSE (lower is better)",
        "objective",
        "entries",
        "entries",
        "recall@k",
        "entries per tile of 16 x 192",
    ]
    for (figure, options), label in zip(drawn, [*labels, "seconds per iteration"], strict=True):
        assert label in {text for ax in figure.axes for text in (ax.get_xlabel(), ax.get_ylabel())}
        assert options["format"] == "svg"
    assert set(map(str, written)) == {str(tmp_path / "picture.svg")} and len(written) == len(drawn)


def test_pictures_are_validated_before_any_work(tmp_path, monkeypatch):
    sp.save_npz(tmp_path / "r.npz", sp.csr_matrix(RATINGS))
    fit = ("fit", tmp_path / "r.npz", "-o", tmp_path / "m.safetensors")
    assert "has no ending of a picture format; endings: " in refuse(*fit, "--plot", tmp_path / "p.doc")
    assert "does not exist" in refuse(*fit, "--plot", tmp_path / "missing" / "p.png")
    assert "--plot draws the entries of a file of ratings or a store" in refuse("info", "--plot", tmp_path / "p.png")
    to_store = ("convert", tmp_path / "r.npz", f"{tmp_path}/store/", "--plot", tmp_path / "p.png")
    assert "--plot needs the ratings in memory" in refuse(*to_store)
    succeed(*fit, "--iterations", 1, "--quiet")
    no_train = ("evaluate", tmp_path / "m.safetensors", tmp_path / "r.npz", "--plot", tmp_path / "p.png")
    assert "--plot compares with the most popular items of --train FILE" in refuse(*no_train)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "hybridmf[plot]"' in refuse(*fit, "--plot", tmp_path / "p.png")


def test_a_picture_is_written_by_its_ending(tmp_path):
    figure = plots.degrees(RATINGS).figure
    plots.save(figure, tmp_path / "p.PNG")
    assert (tmp_path / "p.PNG").read_bytes()[:4] == b"\x89PNG"


def test_notebooks_show_a_figure_and_pickle_copies_it() -> None:
    """They find `_repr_png_`; what pickle makes is a plain figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = plots.new_figure(2, 2)
    figure.subplots().plot([1, 2])
    assert figure._repr_png_().startswith(b"\x89PNG")
    copied = pickle.loads(pickle.dumps(figure))
    assert type(copied) is Figure and len(copied.axes[0].lines) == 1
