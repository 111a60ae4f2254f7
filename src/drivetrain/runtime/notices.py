"""Lines that say what is going on while a user waits."""

from __future__ import annotations

import sys
from collections.abc import Callable

Notify = Callable[[str], None]


def notify(line: str) -> None:
    """Prints a line on the standard error stream."""
    print(line, file=sys.stderr, flush=True)
