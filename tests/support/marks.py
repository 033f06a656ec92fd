"""Marks of parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """Parameters of a variant that runs with ``-m exhaustive`` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def mostly_exhaustive(cases: Collection[Any], usual: Collection[Any]) -> list[Any]:
    """All cases, of which those that are not usual run with ``-m exhaustive`` only."""
    assert all(case in cases for case in usual)
    return [case if case in usual else exhaustive(*(case if isinstance(case, tuple) else (case,))) for case in cases]
