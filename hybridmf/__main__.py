"""``python -m hybridmf``: the same as the command ``hybridmf``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main(prog_name="hybridmf")
