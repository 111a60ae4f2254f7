"""A reward whose module can be imported only by several processes together."""

from __future__ import annotations

import os
import time
from pathlib import Path

folder, count = os.environ["STARTED_TOGETHER"].rsplit(" ", 1)
(Path(folder) / str(os.getpid())).touch()
for _ in range(600):
    if len(list(Path(folder).iterdir())) >= int(count):
        break
    time.sleep(0.1)
else:
    raise RuntimeError(f"fewer than {count} processes start together")


def zeros(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)
