"""Cold items by their features, beside other libraries; and what features cost an iteration.

    python bench/features.py --data FOLDER                       MovieLens 100K (ml-100k in FOLDER)
    python bench/features.py --data FOLDER --set ml-1m --trials 8 --seeds 1 --features genres
    python bench/features.py --iterations --device cuda          synthetic ML-20M with planted features
    python bench/features.py --report                            the tables of docs/cold-start.md, from the newest lines

All entries of a fifth of the items are held out, and a tenth of the others. A method tries so many settings, is fitted
without a further such part of the training entries, and is judged there: by NDCG@10 of warm items times that of cold
items among cold. Settings are drawn at random from its space, with the same seed, and from the second half of the
trials on around the best so far. The best setting is fitted on all training entries; its
NDCG@10 on the held-out entries is reported: of warm items among warm, of cold items among all, and of cold items among
cold. Likes are ratings of 4 and 5. All models have 32 factors and the same features: genres, and the year in steps of
five years. "popularity by features" is a ridge regression of the logarithm of an item's degree on its features, the
best that can be done for cold items without knowing the user.

Methods of explicit ratings (ExplicitALS, cmfrec's CMF) see all ratings and rank by the predicted rating.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import scipy.sparse as sp
from common import RESULTS, median, record

import hybridmf as hmf

FACTORS = 32
NEAR = 2.5
"""Factor around the best settings so far, from which the second half of the trials are drawn."""

SETS = ("ml-100k", "ml-1m")
FEATURES = ("genres and years", "genres")
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
PARTS = ("warm items", "cold items", "cold items among cold")

Settings = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """Ratings, and the features of their items in the order of the columns, CSR of shape (n_items, n_features)."""

    ratings: hmf.Ratings
    features: sp.csr_array
    names: list[str]


def films(folder: Path, name: str) -> dict[int, tuple[str, list[str]]]:
    """Title and genres of each film."""
    if name == "ml-1m":
        lines = (folder / name / "movies.dat").read_text(encoding="latin-1").splitlines()
        rows = (line.split("::") for line in lines)
        return {int(film): (title, genres.split("|")) for film, title, genres in rows}
    lines = (folder / name / "u.item").read_text(encoding="latin-1").splitlines()
    found = {}
    for line in lines:
        fields = line.split("|")
        flags = fields[-len(GENRES_100K) :]
        found[int(fields[0])] = fields[1], [g for g, flag in zip(GENRES_100K, flags, strict=True) if flag == "1"]
    return found


def read(folder: Path, name: str, kind: str) -> Data:
    """A set of MovieLens with its features."""
    file = "u.data.gz" if name == "ml-100k" else "ratings_no_timestamps.dat.gz"
    ratings = hmf.Ratings.from_file(folder / name / file)
    known = films(folder, name)
    tags = []
    for film in ratings.item_ids.tolist():
        title, genres = known[film]
        year = title.rstrip()[-5:-1]
        period = [f"year:{int(year) // 5 * 5}"] if kind != "genres" and year.isdigit() else []
        tags.append([f"genre:{genre}" for genre in genres] + period)
    names = sorted({tag for each in tags for tag in each})
    place = {tag: k for k, tag in enumerate(names)}
    rows = np.repeat(np.arange(len(tags)), list(map(len, tags)))
    columns = [place[tag] for each in tags for tag in each]
    cells = sp.csr_array((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(tags), len(names)))
    return Data(ratings, cells, names)


def held_out(ratings: hmf.Ratings, seed: int) -> tuple[hmf.Ratings, hmf.Ratings]:
    """Training entries, and the test part: a fifth of the items, and a tenth of the entries of the others."""
    warm, cold = hmf.split(ratings, 0.2, seed, by="item")
    train, known = hmf.split(warm, 0.1, seed)
    return train, hmf.Ratings.concat([known, cold])


# ------------------------------------------------------------------------------------------------------------ methods


class Scores:
    """A matrix of scores as a model for `hmf.evaluate`."""

    def __init__(self, scores: np.ndarray, like: hmf.Ratings) -> None:
        self.scores, (self.n_users, self.n_items) = scores.astype(np.float32), scores.shape
        self.user_ids_, self.item_ids_ = like.user_ids, like.item_ids

    def recommend(
        self, users: np.ndarray, user_items: Any, N: int, filter_already_liked_items: bool = True, items: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N items of the highest scores that a user has not seen, among `items`."""
        scores = self.scores[users]
        seen = user_items.tocoo()
        scores[seen.row, seen.col] = -np.inf
        if items is not None:
            others = np.ones(self.n_items, dtype=bool)
            others[items] = False
            scores[:, others] = -np.inf
        top = np.argpartition(-scores, N - 1, axis=1)[:, :N]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable"), 1)
        values = np.take_along_axis(scores, top, 1)
        return np.where(values > -np.inf, top, -1), values


def warm_first(train: hmf.Ratings) -> tuple[sp.csr_array, np.ndarray, int]:
    """The columns of warm items, then the order of all items, and the number of warm ones."""
    degrees = np.bincount(train.user_items.indices, minlength=train.n_items)
    order = np.concatenate((np.flatnonzero(degrees), np.flatnonzero(degrees == 0)))
    n_warm = int(np.count_nonzero(degrees))
    return sp.csr_array(train.user_items[:, order[:n_warm]]), order, n_warm


def in_order(items: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows of all items from those in `order`."""
    found = np.empty_like(items)
    found[order] = items
    return found


def random_popularity(train: hmf.Ratings, _: Any, __: Settings, seed: int) -> np.ndarray:
    """Degrees; items without entries at random."""
    counts = np.bincount(train.user_items.indices, minlength=train.n_items)
    tie = np.random.default_rng(seed).random(train.n_items)
    return np.broadcast_to(counts + 0.5 * tie, train.shape)


def popularity_by_features(train: hmf.Ratings, features: sp.csr_array, given: Settings, _: int) -> np.ndarray:
    """A ridge regression of the logarithm of degrees on features, for all items."""
    counts = np.bincount(train.user_items.indices, minlength=train.n_items)
    warm = counts > 0
    x = np.column_stack([np.ones(len(counts)), features.toarray()])
    penalty = given["ridge"] * np.diag([0.0] + [1.0] * features.shape[1])
    weights = np.linalg.solve(x[warm].T @ x[warm] + penalty, x[warm].T @ np.log(counts[warm]))
    scores = np.where(warm, np.log(np.maximum(counts, 1)), x @ weights)
    return np.broadcast_to(scores, train.shape)


def scores_of(model: Any) -> np.ndarray:
    """All scores of a fitted model of ours; cold items included."""
    scores = np.asarray(model.user_factors @ model.item_factors.T)
    bias = getattr(model, "item_bias_", None)
    return scores if bias is None else scores + bias


def ours(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """ImplicitALS with features."""
    named = hmf.Features(features, labels=train.item_ids)
    return scores_of(implicit(given, seed).fit(train, item_features=named))


def ours_without(train: hmf.Ratings, _: Any, given: Settings, seed: int) -> np.ndarray:
    """ImplicitALS without features."""
    return scores_of(implicit(given, seed).fit(train))


def implicit(given: Settings, seed: int) -> hmf.ImplicitALS:
    """Our model with the settings of `WEIGHTS`, where weights are divided by those of observed entries."""
    unobserved = 1 / (1 + given["alpha"])
    weights = {"alpha": 0.0, "unobserved_weight": unobserved, "regularization": given["lambda_"] * unobserved}
    more = {name: value for name, value in given.items() if name not in WEIGHTS}
    return hmf.ImplicitALS(FACTORS, device="cpu", random_state=seed, **weights, **more)


def ours_explicit(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """ExplicitALS with features."""
    named = hmf.Features(features, labels=train.item_ids)
    model = hmf.ExplicitALS(FACTORS, device="cpu", random_state=seed, regularization_scaling="none", **given)
    return scores_of(model.fit(train, item_features=named))


def irspack(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """irspack's iALS with features."""
    from irspack import IALSRecommender

    matrix, order, n_warm = warm_first(train)
    rows = sp.csr_matrix(features[order])
    model = IALSRecommender(
        sp.csr_matrix(matrix), n_components=FACTORS, item_features=rows[:n_warm], random_seed=seed,
        solver_type="CHOLESKY", loss_type="IALSPP", n_threads=cores(), **given,
    )  # fmt: skip
    model.learn()
    items = np.concatenate((model.get_item_embedding(), model.trainer.transform_item_feature(rows[n_warm:])))
    return np.asarray(model.get_user_embedding() @ in_order(items, order).T)


def cmfrec_implicit(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """cmfrec's CMF_implicit."""
    from cmfrec import CMF_implicit

    return cmf(CMF_implicit, train, features, given, seed)


def cmfrec_explicit(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """cmfrec's CMF."""
    from cmfrec import CMF

    return cmf(CMF, train, features, given | {"scale_lam": False}, seed)


def cmf(kind: Any, train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """A model of cmfrec, exact; items beyond the columns of X have features only."""
    matrix, order, _ = warm_first(train)
    model = kind(
        k=FACTORS, use_cg=False, use_float=True, nthreads=cores(), random_state=seed, verbose=False,
        precompute_for_predictions=False, handle_interrupt=False, **given,
    )  # fmt: skip
    model.fit(X=sp.coo_matrix(matrix), I=features[order].toarray().astype(np.float32))
    scores = model.A_ @ in_order(model.B_, order).T
    bias = getattr(model, "item_bias_", None)
    if bias is not None and len(bias):
        full = np.zeros(train.n_items, dtype=np.float32)
        full[: len(bias)] = bias
        scores = scores + in_order(full, order)
    return np.asarray(scores)


def lightfm(train: hmf.Ratings, features: sp.csr_array, given: Settings, seed: int) -> np.ndarray:
    """LightFM: each item's own vector, if it has entries, and those of its features."""
    from lightfm import LightFM

    degrees = np.bincount(train.user_items.indices, minlength=train.n_items)
    own = sp.diags_array((degrees > 0).astype(np.float32))
    rows = sp.csr_matrix(sp.hstack([own, features]), dtype=np.float32)
    settings = dict(given)
    epochs = settings.pop("epochs")
    if settings.pop("normalized"):
        rows = sp.csr_matrix(sp.diags_array(1 / np.maximum(np.asarray(rows.sum(axis=1)).ravel(), 1e-9)) @ rows)
    rows.indptr, rows.indices = rows.indptr.astype(np.int32), rows.indices.astype(np.int32)  # the only type it takes
    model = LightFM(no_components=FACTORS, loss="warp", random_state=seed, **settings)
    matrix = sp.coo_matrix(train.user_items, copy=True)
    matrix.row, matrix.col = matrix.row.astype(np.int32), matrix.col.astype(np.int32).copy()
    model.fit(matrix, item_features=rows, epochs=epochs, num_threads=cores())
    biases, items = model.get_item_representations(rows)
    return np.asarray(model.get_user_representations()[1] @ items.T + biases)


def cores() -> int:
    """Cores of this process, as `taskset` gives them."""
    return len(os.sched_getaffinity(0))


class Between(NamedTuple):
    """A number between two, uniform in its logarithm, with three digits."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator, near: float | None = None) -> float:
        """One of all, or at most `NEAR` times as large or as small as `near`."""
        low, high = (self.low, self.high) if near is None else (max(self.low, near / NEAR), min(self.high, near * NEAR))
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


class OneOf(NamedTuple):
    """One of several values."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator, near: Any = None) -> Any:
        """One of all; `near` half of the time, if given."""
        drawn = self.values[rng.integers(len(self.values))]
        return near if near is not None and rng.random() < 0.5 else drawn


# those of CMF_implicit in other words: 1 + alpha = 1 / unobserved_weight, lambda = regularization / unobserved_weight
WEIGHTS: dict[str, Between | OneOf] = {"lambda_": Between(1, 300), "alpha": Between(0.5, 40)}


class Method(NamedTuple):
    """A method, the space of its settings, the package that it needs, and whether it takes all ratings."""

    scores: Callable[[hmf.Ratings, sp.csr_array, Settings, int], np.ndarray]
    space: Mapping[str, Between | OneOf]
    package: str = "hybridmf"
    explicit: bool = False


METHODS = {
    "popularity": Method(random_popularity, {}),
    "popularity by features": Method(popularity_by_features, {"ridge": Between(0.1, 30)}),
    "ImplicitALS without features": Method(ours_without, WEIGHTS),
    "ImplicitALS": Method(ours, WEIGHTS | {"item_feature_weight": Between(0.01, 30)}),
    "ExplicitALS": Method(
        ours_explicit,
        {
            "regularization": Between(2, 60),
            "bias_regularization": Between(2, 200),
            "item_feature_weight": Between(0.01, 10),
        },
        explicit=True,
    ),
    "irspack iALS": Method(
        irspack,
        {
            "alpha0": Between(0.03, 1),
            "reg": Between(3e-4, 1e-1),
            "nu": OneOf((0.0, 0.5, 1.0)),
            "lambda_item_feature": Between(1e-3, 100),
        },
        "irspack",
    ),
    "cmfrec CMF_implicit": Method(
        cmfrec_implicit,
        WEIGHTS | {"w_item": Between(0.03, 100)},
        "cmfrec",
    ),
    "cmfrec CMF": Method(
        cmfrec_explicit, {"lambda_": Between(2, 60), "w_item": Between(0.05, 10)}, "cmfrec", explicit=True
    ),
    "LightFM": Method(
        lightfm,
        {
            "epochs": OneOf((20, 40, 80)),
            "learning_rate": Between(0.01, 0.1),
            "item_alpha": Between(1e-7, 1e-4),
            "normalized": OneOf((False, True)),
        },
        "lightfm",
    ),
}


# --------------------------------------------------------------------------------------------------------- measurement


def likes(ratings: hmf.Ratings) -> hmf.Ratings:
    """Ratings of 4 and 5 as feedback, of all users and items."""
    return ratings.binarize(4)


def values_of(
    method: Method, train: hmf.Ratings, test: hmf.Ratings, data: Data, given: Settings, seed: int
) -> tuple[dict[str, float], float]:
    """NDCG@10 of each part of the test entries, and seconds of the fit with the scores of all pairs."""
    started = time.perf_counter()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        scores = method.scores(train if method.explicit else likes(train), data.features, given, seed)
    seconds = time.perf_counter() - started
    if not np.all(np.isfinite(scores)):
        return dict.fromkeys(PARTS, 0.0), seconds
    found = hmf.evaluate(Scores(scores, train), likes(test), train=train, metrics="ndcg@10", include_cold=True)
    return {part: found.apart[part]["ndcg@10"] for part in PARTS}, seconds


def drawn(space: Mapping[str, Between | OneOf], rng: np.random.Generator, near: Settings | None) -> Settings:
    """Settings of a method, around others if given."""
    return {name: each.draw(rng, None if near is None else near[name]) for name, each in space.items()}


def compare(name: str, kind: str, data: Data, chosen: dict[str, Method], trials: int, seed: int) -> None:
    """The best of each method on one split, recorded."""
    train, test = held_out(data.ratings, seed)
    known, validation = held_out(train, 100 + seed)
    for title, method in chosen.items():
        tried: list[tuple[float, Settings]] = []
        rng = np.random.default_rng(seed)
        for trial in range(trials if method.space else 1):
            near = max(tried, key=lambda each: each[0])[1] if 2 * trial >= trials > 1 else None
            given = drawn(method.space, rng, near)
            parts, _ = values_of(method, known, validation, data, given, seed)
            tried.append((parts["warm items"] * parts["cold items among cold"], given))
        value, best = max(tried, key=lambda each: each[0])
        parts, seconds = values_of(method, train, test, data, best, seed)
        line = {"bench": "features", "set": name, "features": kind, "method": title, "seed": seed, "trials": trials}
        line |= {"settings": best, "validation": round(value, 6), "seconds": round(seconds, 3), "threads": cores()}
        line["ndcg@10"] = {part: round(each, 5) for part, each in parts.items()}
        record("features", line)
        shown = ", ".join(f"{part} {each:.4f}" for part, each in parts.items())
        click.echo(f"{name}, {kind}, seed {seed}: {title:28}  {shown}  ({seconds:.1f} s, {best})")


# -------------------------------------------------------------------------------------------------------- an iteration


def planted(ratings: hmf.Ratings, tables: int = 20, values: int = 50, seed: int = 0) -> sp.csr_array:
    """`tables` features of `values` values of each item, by who likes it: items with the same users share them."""
    rng = np.random.default_rng(seed)
    matrix = ratings.user_items
    users = rng.normal(size=(matrix.shape[0], 32)).astype(np.float32)
    items = np.asarray(matrix.T @ (matrix @ (matrix.T @ users) / np.maximum(1, np.diff(matrix.indptr))[:, None]))
    items /= np.maximum(np.linalg.norm(items, axis=1, keepdims=True), 1e-9)
    codes = [np.argmax(items @ rng.normal(size=(32, values)), axis=1) + values * k for k in range(tables)]
    rows = np.tile(np.arange(len(items)), tables)
    shape = (len(items), tables * values)
    return sp.csr_array((np.ones(len(rows), np.float32), (rows, np.concatenate(codes))), shape=shape)


def iterations(device: str, shape: str, scale: float, factors: int, repeats: int) -> None:
    """Seconds of an iteration with and without features, in turn."""
    for feedback in ("implicit", "explicit"):
        ratings = hmf.datasets.synthetic(shape, feedback=feedback, scale=scale, seed=0)
        features = planted(ratings)
        prepared = hmf.PreparedRatings(ratings)
        kind = hmf.ImplicitALS if feedback == "implicit" else hmf.ExplicitALS
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(repeats):
            for name, given in (("without", {}), ("with", {"item_features": features})):
                model = kind(factors, iterations=6, device=device, random_state=0).fit(prepared, **given)
                seconds[name].append(median([each["seconds"] for each in model.history_[1:]]))
        best = {name: min(each) for name, each in seconds.items()}
        ratio = best["with"] / best["without"]
        line = {
            "bench": "features", "task": "iteration", "shape": shape, "scale": scale, "feedback": feedback,
            "factors": factors, "device": str(model.device_), "features": features.shape[1],
            "feature_entries": features.nnz, "nnz": ratings.nnz, "seconds": best, "ratio": round(ratio, 4),
        }  # fmt: skip
        record("features", line)
        click.echo(
            f"{shape} x {scale:g} {feedback}, {factors} factors on {model.device_}: {1e3 * best['without']:.2f} ms an "
            f"iteration, {1e3 * best['with']:.2f} ms with {features.shape[1]} features ({ratio:.3f} times)"
        )


# --------------------------------------------------------------------------------------------------------------- report


def report() -> str:
    """A table for each set and its features, means over the seeds of the newest lines."""
    file = RESULTS / "features.jsonl"
    recorded = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    newest = {(line["set"], line["features"], line["method"], line["seed"]): line for line in recorded if "set" in line}
    tables = []
    for name, kind in dict.fromkeys((line["set"], line["features"]) for line in newest.values()):
        rows = [f"**{name}, {kind}**", "", f"| method | {' | '.join(PARTS)} | seconds |", "|---|" + "---:|" * 4]
        methods = dict.fromkeys(key[2] for key in newest if key[:2] == (name, kind))
        for method in methods:
            lines = [line for key, line in newest.items() if key[:3] == (name, kind, method)]
            values = [np.mean([line["ndcg@10"][part] for line in lines]) for part in PARTS]
            cells = [f"{value:.4f}" for value in values] + [f"{np.mean([line['seconds'] for line in lines]):.1f}"]
            rows.append(f"| {method} | {' | '.join(cells)} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--data", type=click.Path(path_type=Path), help="Folder with ml-100k and ml-1m.")
@click.option("--set", "sets", multiple=True, type=click.Choice(SETS), help="[default: ml-100k]")
@click.option("--features", "kinds", multiple=True, type=click.Choice(FEATURES), help="[default: genres and years]")
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)))
@click.option("--trials", type=int, default=16, show_default=True, help="Settings of each method.")
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--iterations", "times", is_flag=True, help="Seconds of an iteration, in place of the comparison.")
@click.option("--device", default="cpu", show_default=True, help="Of --iterations.")
@click.option("--shape", default="ml-20m", show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Of the shape.")
@click.option("--factors", default=64, show_default=True, help="Of --iterations.")
@click.option("--repeats", default=3, show_default=True, help="Of --iterations.")
@click.option("--report", "reports", is_flag=True)
def main(
    data: Path | None,
    sets: tuple[str, ...],
    kinds: tuple[str, ...],
    methods: tuple[str, ...],
    trials: int,
    seeds: int,
    times: bool,
    device: str,
    shape: str,
    scale: float,
    factors: int,
    repeats: int,
    reports: bool,
) -> None:
    logging.getLogger("hybridmf").setLevel(logging.ERROR)
    if reports:
        click.echo(report())
        return
    if times:
        iterations(device, shape, scale, factors, repeats)
        return
    if data is None:
        raise click.UsageError("give --data FOLDER, --iterations or --report")
    chosen = {title: METHODS[title] for title in methods or METHODS}
    absent = {method.package for method in chosen.values() if importlib.util.find_spec(method.package) is None}
    if absent:
        click.echo(f"not installed, and left out: {', '.join(sorted(absent))}")
    chosen = {title: method for title, method in chosen.items() if method.package not in absent}
    for name in sets or SETS[:1]:
        for kind in kinds or FEATURES[:1]:
            of_set = read(data, name, kind)
            for seed in range(seeds):
                compare(name, kind, of_set, chosen, trials, seed)


if __name__ == "__main__":
    main()
