"""A text file that is there whole, or as it was before: whoever reads it, and whenever its writer is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """UTF-8, line ends as they are. What a link points at is replaced, and the link stays. Raises OSError."""
    target = path.resolve()
    aside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8", newline="")
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
