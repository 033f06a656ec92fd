"""What notebooks show: `_repr_html_` of ratings, plans, models, evaluations, comparisons and searches."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf

EMPTY = ("br", "hr", "img")


class Cells(HTMLParser):
    """The texts of the cells of well-formed HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def cells(shown: Any) -> list[str]:
    return Cells(shown._repr_html_()).texts


@pytest.fixture(scope="module")
def stars() -> hmf.Ratings:
    rng = np.random.default_rng(0)
    users, items = np.nonzero(rng.random((40, 30)) < 0.5)
    labels = np.array([f"<b>{i}&" for i in range(30)], dtype=object)
    return hmf.Ratings.from_coo(users, labels[items], rng.integers(1, 6, len(users)))


def test_ratings(stars: hmf.Ratings) -> None:
    shown = cells(stars)
    assert shown[0] == "Ratings" and f"{stars.nnz:,}" in shown
    assert "30, labels such as <b>0&, <b>1&, <b>10&" in shown  # escaped, and parsed again
    empty = hmf.Ratings.from_matrix(np.zeros((2, 3)))
    assert cells(empty) == ["Ratings", "entries", "0", "users", "2, positions", "items", "3, positions"]


def test_times_of_ratings() -> None:
    timed = hmf.Ratings.from_coo([1, 2], ["a", "b"], [1.0, 2.0], timestamps=[10, 20])
    assert "times" in cells(timed)


def test_a_plan_shows_what_print_shows(stars: hmf.Ratings) -> None:
    plan = hmf.plan(stars, hmf.ExplicitALS(factors=4))
    shown = cells(plan)
    lines = str(plan).splitlines()
    assert shown == ["Plan", *(part.strip() for line in lines for part in (line[:10], line[10:]))]
    assert shown.count("estimate") > 1


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS, hmf.SGD, hmf.CCD])
def test_models(cls: Any, stars: hmf.Ratings, tmp_path: Any) -> None:
    model = cls(factors=3, iterations=2, random_state=0)
    assert cells(model) == [f"{model!r}, not fitted"]
    train, test = hmf.split(stars, test_size=0.2, random_state=0)
    shown = cells(model.fit(train, validation=test))
    facts = dict(zip(shown[1::2], shown[2::2], strict=True))
    assert shown[0] == repr(model) and facts["users, items"] == "40 x 30" and facts["iterations"] == "2"
    assert facts["device"] == "cpu" and float(facts["seconds"]) > 0
    metric = "ndcg@10" if cls is hmf.ImplicitALS else "rmse"
    assert float(facts[metric]) == pytest.approx(model.history_[-1][metric], rel=1e-4)
    model.save(tmp_path / "m.safetensors")
    assert "40 x 30" in cells(hmf.load(tmp_path / "m.safetensors"))


def test_scikit_learn_lends_notebooks_no_view_of_its_own(stars: hmf.Ratings) -> None:
    import sklearn.base  # noqa: F401

    assert not hasattr(hmf.ExplicitALS(), "_repr_mimebundle_")
    assert "not fitted" in hmf.ExplicitALS()._repr_html_()


@pytest.mark.usefixtures("small_product")
def test_evaluations_comparisons_and_searches(stars: hmf.Ratings) -> None:
    train, test = hmf.split(stars, test_size=0.3, random_state=0)
    model = hmf.ImplicitALS(factors=3, iterations=2, random_state=0).fit(train)
    found = hmf.evaluate(model, test, metrics=("ndcg@10", "recall@5"))
    assert cells(found)[:2] == ["metric", "value"] and f"{found['recall@5']:.4f}" in cells(found)
    assert f"{found.n_users} users" in cells(found)[-1]
    both = hmf.evaluate({"a<b": model, "b": model}, test, metrics="ndcg@10")
    assert "a<b" in cells(both)
    result = hmf.compare(
        stars, {"one": hmf.ExplicitALS(3, iterations=2), "two": hmf.CCD(3, iterations=2)}, devices="cpu"
    )
    shown = cells(result)
    text = " ".join(str(result).split())
    assert {"one", "two", "method", "s / iteration"} <= set(shown)
    assert all(" ".join(each.split()) in text for each in shown)
    search = hmf.search(train, model=hmf.ImplicitALS(factors=3), trials=3, random_state=0)
    assert "trial" in cells(search) and f"{search.best_value:.4f}" in " ".join(cells(search))
