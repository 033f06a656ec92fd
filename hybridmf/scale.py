"""Beyond one device and beyond memory: communicators, ranks, stores, checkpoints."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``hybridmf.scale.fit`` on first use: what it needs imports this package."""
    if name == "fit":
        from .tools.launch import fit

        return fit
    raise AttributeError(f"module 'hybridmf.scale' has no attribute {name!r}")
