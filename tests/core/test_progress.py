"""The progress bar is drawn on terminals only, and a missing stream is no error."""

from __future__ import annotations

import gzip
import io
import logging
import sys

import pytest

import hybridmf as hmf
from hybridmf.compare import compare
from hybridmf.core import progress
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


def test_without_a_bar_nothing_of_notebooks_is_imported(monkeypatch):
    """Importing it warns in notebooks without ipywidgets."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    fit()


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


@pytest.mark.parametrize("packed", [False, True])
def test_a_bar_shows_how_much_of_a_long_file_is_read(tmp_path, monkeypatch, packed):
    content = b"1,2,3\n1,3,4\n2,2,5\n"
    path = tmp_path / "ratings.csv"
    path.write_bytes(gzip.compress(content) if packed else content)
    size = path.stat().st_size
    for delay, shown in ((0.0, True), (3600.0, False)):
        monkeypatch.setattr(progress, "LONG", delay)
        monkeypatch.setattr(sys, "stderr", Terminal())
        hmf.Ratings.from_file(path, show_progress=True)
        drawn = sys.stderr.getvalue()
        assert ("Reading ratings.csv: 100%" in drawn and f"| {size:.1f}/{size:.1f}" in drawn) == shown
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    hmf.Ratings.from_file(path)
    assert sys.stderr.getvalue() == ""
    with pytest.raises(TypeError, match="show_progress must be True or False, got 'yes'"):
        hmf.Ratings.from_file(path, show_progress="yes")


@pytest.mark.usefixtures("small_product")
@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_compare_draws_nothing_into_a_pipe(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    model = hmf.ExplicitALS(factors=2, iterations=2)
    compare(planted(), {"als": model}, devices="cpu", show_progress=True)
    assert stream is None or "%" not in stream.getvalue()
