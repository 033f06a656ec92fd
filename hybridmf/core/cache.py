"""The folder of this user's measurements of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_DIR = "HYBRIDMF_CACHE_DIR"  # environment variable: the folder to use instead of the system's place for caches


def cache_dir() -> Path:
    """Folder of files that are measured again if they are lost; it may not exist yet.

    HYBRIDMF_CACHE_DIR ("~" is the home folder) if set, else ``hybridmf`` in the user's cache folder
    (``~/.cache`` on Linux).
    """
    named = os.environ.get(CACHE_DIR, "").strip()
    # unlike pathlib's, it leaves an unknown user unchanged
    return Path(os.path.expanduser(named)) if named else Path(platformdirs.user_cache_dir("hybridmf", appauthor=False))
