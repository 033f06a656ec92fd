"""Patterns of messages."""

from __future__ import annotations

import re


def says(*parts: str) -> str:
    """Regular expression: these parts, literally, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)
