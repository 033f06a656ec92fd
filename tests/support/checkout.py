"""Where the checkout is."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of hybridmf/, tests/, bench/ and docs/."""
