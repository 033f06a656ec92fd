"""The demonstration: invented films with planted taste, models trained on them, and a report in plain text.

Nothing is downloaded. `generate` draws a data set whose structure is known, so the report can say whether the models
found it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..als import ExplicitALS, ImplicitALS
from ..core.table import format_table
from ..core.validate import check_int
from ..metrics import PopularityRecommender, evaluate
from ..ratings import Ratings, split

LIKED = 4.0  # lowest rating that counts as liking a film
WIDTH = 80  # maximum width of the report in characters

GENRES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("films.json").read_text())
"""Title words of each genre: all combinations of subject and ending give 1,600 titles."""

GENRE_NAMES = tuple(GENRES)

# Each taste group likes two genres and dislikes a third; users of one group agree, but not perfectly.
TASTE_GROUPS = (
    ("Science fiction", "Fantasy", "Romance"),
    ("Romance", "Comedy", "War"),
    ("Crime", "Horror", "Animation"),
    ("Western", "War", "Science fiction"),
    ("Documentary", "Crime", "Fantasy"),
    ("Animation", "Fantasy", "Horror"),
    ("Comedy", "Western", "Documentary"),
    ("Documentary", "Romance", "Western"),
    ("Science fiction", "Horror", "Comedy"),
    ("War", "Crime", "Animation"),
)


@dataclass(frozen=True)
class Films:
    """The generated data set and its planted structure."""

    users: np.ndarray
    items: np.ndarray  # of each rating; sorted by user, then item
    values: np.ndarray  # float32 ratings 1 to 5
    titles: list[str]
    item_genres: np.ndarray  # bool, shape (n_items, n_genres); one or two genres per item
    liked_genres: np.ndarray  # bool, shape (n_users, n_genres); the two genres of the user's taste group

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.liked_genres), len(self.titles)

    def ratings(self) -> Ratings:
        return Ratings.from_coo(self.users, self.items, self.values, shape=self.shape)

    def genre_text(self, item: int) -> str:
        """Genres of one item, e.g. ``"Crime, Horror"``."""
        return ", ".join(np.array(GENRE_NAMES)[self.item_genres[item]])

    def is_own_genre(self, user: Any, item: Any) -> Any:
        """Whether an item has a genre the user likes; positions, broadcast against each other."""
        return np.any(self.item_genres[item] & self.liked_genres[user], axis=-1)


def generate(n_users: int = 4000, n_items: int = 1500, seed: int = 0) -> Films:
    """Invented films and their ratings, the same for the same seed.

    A rating is 3.3 + the user's mood + the film's quality + how well its genres match the user's taste + noise, rounded
    and clipped to 1..5. Popularity follows a power law, and users choose films they expect to like, so that ratings are
    missing not at random, as in real data. There are at most 1,600 titles.
    """
    check_int("n_users", n_users, 1)
    check_int("n_items", n_items, 1, MOST_TITLES)
    rng = np.random.default_rng(check_int("seed", seed, 0))
    titles, item_genres = _draw_films(n_items, rng)
    group = rng.integers(len(TASTE_GROUPS), size=n_users)
    taste = _group_taste()[group] + rng.normal(0.0, 0.2, (n_users, len(GENRE_NAMES)))
    affinity = taste @ (item_genres / item_genres.sum(axis=1, keepdims=True)).T
    quality = rng.normal(0.0, 0.35, n_items)
    popularity = 1.0 / (1.0 + rng.permutation(n_items)) ** 0.7
    users, items = _draw_pairs(affinity, np.log(popularity) + 0.5 * quality, rng)
    mood = rng.normal(0.0, 0.35, n_users)
    expected = 3.3 + mood[users] + quality[items] + 1.1 * affinity[users, items]
    values = np.clip(np.rint(expected + rng.normal(0.0, 0.6, len(users))), 1, 5).astype(np.float32)
    return Films(users, items, values, titles, item_genres, _group_taste()[group] > 0)


def _draw_films(n_items: int, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """Titles and genres; title words come from the first genre, and one film in four has a second genre."""
    pairs = [(genre, title) for genre, name in enumerate(GENRE_NAMES) for title in _titles(name)]
    chosen = rng.permutation(len(pairs))[:n_items]
    item_genres = np.zeros((n_items, len(GENRE_NAMES)), dtype=bool)
    item_genres[np.arange(n_items), [pairs[k][0] for k in chosen]] = True
    mixed = np.flatnonzero(rng.random(n_items) < 0.25)
    item_genres[mixed, rng.integers(len(GENRE_NAMES), size=len(mixed))] = True
    return [pairs[k][1] for k in chosen], item_genres


def _titles(genre: str) -> list[str]:
    words = GENRES[genre]
    return [f"{subject} {ending}" for subject in words["subjects"] for ending in words["endings"]]


MOST_TITLES = sum(len(_titles(name)) for name in GENRE_NAMES)


def _group_taste() -> np.ndarray:
    """Taste of each group, shape (n_groups, n_genres): 1 for liked genres, -1 for the disliked one, else 0."""
    taste = np.zeros((len(TASTE_GROUPS), len(GENRE_NAMES)))
    for row, (first, second, disliked) in enumerate(TASTE_GROUPS):
        taste[row, [GENRE_NAMES.index(first), GENRE_NAMES.index(second)]] = 1.0
        taste[row, GENRE_NAMES.index(disliked)] = -1.0
    return taste


def _draw_pairs(
    affinity: np.ndarray, item_appeal: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rated films of each user: a draw without replacement that favours popular films and those of the user's taste."""
    n_users, n_items = affinity.shape
    # log-normal: few users rate many films, most rate few
    counts = np.clip(rng.lognormal(np.log(45.0), 0.6, n_users), 12, max(1, n_items // 3)).astype(np.int64)
    appeal = 2.2 * affinity + item_appeal
    appeal += rng.gumbel(size=appeal.shape)  # the largest sums are a draw without replacement
    order = np.argsort(-appeal, axis=1)
    taken = np.arange(n_items)[None, :] < counts[:, None]
    users = np.repeat(np.arange(n_users), counts)
    items = order[taken]
    by_pair = np.lexsort((items, users))
    return users[by_pair], items[by_pair]


# ------------------------------------------------------------------------------------------------------- the report


def run_demo(
    write: Callable[[str], Any], *, seed: int = 0, quick: bool = False, show_progress: bool = True
) -> dict[str, dict[str, float]]:
    """Generate the films, train both models, and report, a few lines at a time; `quick` takes a second or two.

    The result has the numbers of the report, on held-out entries: of "ExplicitALS" and "mean ratings" the "rmse"; of
    "ImplicitALS" and "popularity" the "ndcg@10", the "precision@10" and the "genre_share", the share of recommendations
    in a genre that the user likes.
    """
    films = generate(*((1200, 600) if quick else (4000, 1500)), seed=seed)
    train, test = split(films.ratings(), test_size=0.1, random_state=seed)
    common: dict[str, Any] = {"factors": 12, "iterations": 10, "device": "cpu", "random_state": seed}
    write(_data_text(films, seed))
    write(
        _heading(
            "2. Explicit feedback: how many stars would a person give?",
            f"ExplicitALS learns from {train.nnz:,} ratings and predicts the {test.nnz:,} that were held out. RMSE is "
            "the typical error in stars: lower is better. About 0.6 of it is noise that nobody could predict.",
        )
    )
    explicit = ExplicitALS(regularization=0.1, biases=True, **common).fit(train, show_progress=show_progress)
    found = {
        name: dict(evaluate(each, test, metrics="rmse"))
        for name, each in (("ExplicitALS", explicit), ("mean ratings", PopularityRecommender().fit(train)))
    }
    rmse, baseline = found["ExplicitALS"]["rmse"], found["mean ratings"]["rmse"]
    rows = [
        ["each film's mean rating", f"{baseline:.3f}", "baseline"],
        ["ExplicitALS, 12 factors", f"{rmse:.3f}", f"{1 - rmse / baseline:.0%} lower"],
    ]
    write("\n" + format_table(["prediction", "RMSE", "against the mean"], rows, "<><"))

    liked = keep_liked(train)
    write(
        _heading(
            "3. Implicit feedback: what will a person like next?",
            f"ImplicitALS is told only which films a person liked (4 or 5 stars: {liked.nnz:,} pairs) and ranks the "
            "films that person has not seen. NDCG@10 and precision@10 say how well the first ten match what was liked "
            'in the held-out part: higher is better. "Own genres" is the share of the ten in a genre that the person '
            "likes.",
        )
    )
    implicit = ImplicitALS(regularization=3.0, alpha=2.0, **common).fit(liked, show_progress=show_progress)
    found |= {
        name: _ranking_quality(each, films, train, test)
        for name, each in (("popularity", PopularityRecommender().fit(liked)), ("ImplicitALS", implicit))
    }
    rows = [
        [
            text,
            f"{found[name]['ndcg@10']:.3f}",
            f"{found[name]['precision@10']:.3f}",
            f"{found[name]['genre_share']:.0%}",
        ]
        for text, name in (("most popular films", "popularity"), ("ImplicitALS, 12 factors", "ImplicitALS"))
    ]
    write("\n" + format_table(["recommendation", "NDCG@10", "precision@10", "own genres"], rows, "<>>>"))
    _report_people(write, films, train, implicit)
    write(f"{_heading('Next: your own ratings')}\n{NEXT}")
    return found


NEXT = """
  hybridmf compare demo     (seconds and accuracy of each method)
  hybridmf fit ratings.csv --model implicit -o model.safetensors
  hybridmf recommend model.safetensors --user 42 --titles titles.csv"""


def _heading(title: str, text: str = "") -> str:
    paragraph = "\n\n" + textwrap.fill(text, WIDTH, break_long_words=False) if text else ""
    return f"\n{title}\n{'=' * len(title)}{paragraph}"


def _data_text(films: Films, seed: int) -> str:
    n_users, n_items = films.shape
    count = len(films.values)
    heading = _heading(
        "1. The data: invented, so that the truth is known",
        f"{n_users:,} people have rated {n_items:,} films with 1 to 5 stars: {count:,} ratings, "
        f"{count / n_users / n_items:.1%} of all pairs (seed {seed}). Each film has one or two of {len(GENRE_NAMES)} "
        "genres; each person likes two genres, dislikes a third, and mostly watches what promises to please. A few "
        "films are watched by many, most by few. The models see who gave which film how many stars. They never see a "
        "genre: finding the taste is their job.",
    )
    shares = np.bincount(films.values.astype(np.int64), minlength=6)[1:] / count
    return f"{heading}\n\n" + format_table(["stars", *"12345"], [["share", *(f"{n:.1%}" for n in shares)]], "<>>>>>")


def keep_liked(ratings: Ratings) -> Ratings:
    coo = ratings.user_items.tocoo()
    keep = coo.data >= LIKED
    return Ratings.from_coo(coo.row[keep], coo.col[keep], shape=ratings.shape)


def _ranking_quality(model: Any, films: Films, train: Ratings, test: Ratings) -> dict[str, float]:
    quality = evaluate(model, test, train=train, metrics=("ndcg@10", "precision@10"), relevance_threshold=LIKED)
    people = np.arange(train.n_users)
    ids, _ = model.recommend(people, train.user_items, N=10)
    return quality | {"genre_share": float(films.is_own_genre(people[:, None], ids).mean())}


def _report_people(write: Callable[[str], Any], films: Films, train: Ratings, model: ImplicitALS) -> None:
    write(
        _heading(
            "4. Three people and what ImplicitALS recommends to them",
            "An asterisk marks a genre the person likes. The score is the predicted preference, 1 for a like.",
        )
    )
    for user in _three_people(films, train):
        row = train.user_items[[user]]
        taste = " and ".join(np.array(GENRE_NAMES)[films.liked_genres[user]])
        write(f"\nPerson {user:,} likes {taste}. Highest of {row.nnz} ratings:\n")
        favourites = row.indices[np.argsort(-row.data, kind="stable")][:3].tolist()
        write("\n".join(f"    {films.titles[item]} ({films.genre_text(item)})" for item in favourites))
        ids, scores = model.recommend([user], row, N=6)
        rows = []
        for item, score in zip(ids[0].tolist(), scores[0], strict=True):
            mark = "*" if films.is_own_genre(user, item) else " "
            rows.append([f"{score:.2f}", films.titles[item], f"{mark} {films.genre_text(item)}"])
        write("\n" + format_table(["score", "recommended", "  genres"], rows, "><<"))


def _three_people(films: Films, train: Ratings) -> list[int]:
    """Three users of different taste with an ordinary number of ratings."""
    counts = np.diff(train.user_items.indptr)
    chosen: list[int] = []
    for user in np.argsort(np.abs(counts - 100), kind="stable").tolist():
        if not any(np.any(films.liked_genres[user] & films.liked_genres[other]) for other in chosen):
            chosen.append(user)
        if len(chosen) == 3:
            break
    return chosen
