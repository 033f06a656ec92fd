"""Tokens of sockets without their cost."""

from __future__ import annotations

import pytest

from hybridmf.ranks.transport import sockets


@pytest.fixture(autouse=True)
def cheap_tokens(monkeypatch):
    """The many meetings of these tests do not wait for scrypt."""
    monkeypatch.setitem(sockets.SCRYPT, "n", 2)
