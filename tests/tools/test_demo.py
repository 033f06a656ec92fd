"""The demonstration: its films, its figures, its text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.tools import demo
from support.command_line import refuse, succeed

# ----------------------------------------------------------------------------------------------------------- demo


@settings(max_examples=15)
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
def quick() -> tuple[dict[str, dict[str, float]], str]:
    """Numbers and text of a quick demonstration."""
    lines: list[str] = []
    result = demo.run_demo(lines.append, seed=0, quick=True, show_progress=False)
    return result, "\n".join(lines) + "\n"


def test_quick_demo_beats_the_baselines_clearly(quick):
    result, text = quick
    rmse, baseline = (result[name]["rmse"] for name in ("ExplicitALS", "mean ratings"))
    ours, popular = result["ImplicitALS"], result["popularity"]
    assert rmse < 0.9 * baseline
    assert ours["ndcg@10"] > 1.4 * popular["ndcg@10"]
    assert ours["precision@10"] > 1.4 * popular["precision@10"]
    assert ours["genre_share"] > 0.75
    assert popular["genre_share"] < 0.4
    for number in (rmse, baseline, ours["ndcg@10"], popular["ndcg@10"]):
        assert f"{number:.3f}" in text


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


def test_format_table():
    assert demo.format_table(["a", "bb"], [["x", 1], ["yyy", 22]], "<>", indent=1).split("\n") == [
        " a    bb",
        " ---  --",
        " x     1",
        " yyy  22",
    ]
