"""The progress bar is drawn on terminals only, and a missing stream is no error."""

from __future__ import annotations

import io
import logging
import sys

import pytest

import hybridmf as hmf
from hybridmf.compare import compare
from hybridmf.core.progress import progress_bar
from support.ratings import planted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fit(**arguments) -> hmf.ExplicitALS:
    return hmf.ExplicitALS(factors=2, iterations=3, device="cpu", random_state=0).fit(planted(), **arguments)


def test_a_terminal_shows_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    fit(show_progress=True)
    assert "ExplicitALS: 100%" in sys.stderr.getvalue() and "objective=" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    fit()
    assert sys.stderr.getvalue() == ""


def test_elsewhere_nothing_is_drawn_and_iterations_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        model = fit(show_progress=True)
    assert sys.stderr.getvalue() == ""
    lines = [message for message in caplog.messages if message.startswith("iteration ")]
    objective = model.history_[-1]["objective"]
    assert len(lines) == 3 and lines[-1] == f"iteration 3 of 3: objective {objective:.5g}"


def test_the_history_does_not_depend_on_the_stream(monkeypatch):
    histories = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        histories.append([row["objective"] for row in fit(show_progress=True).history_])
    assert histories[0] == histories[1]


@pytest.mark.parametrize("closed", [False, True])
def test_without_standard_error_nothing_is_drawn(monkeypatch, closed):
    stream = None
    if closed:
        stream = Terminal()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert fit(show_progress=True).n_iter_ == 3
    assert progress_bar(3, shown=True).disable


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_compare_draws_nothing_into_a_pipe(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    model = hmf.ExplicitALS(factors=2, iterations=2)
    compare(planted(), {"als": model}, devices="cpu", show_progress=True)
    assert stream is None or "%" not in stream.getvalue()
