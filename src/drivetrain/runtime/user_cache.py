"""The folder of what is kept for this user and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns $XDG_CACHE_HOME, or ~/.cache where it is not set (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
