"""Reads the answers that a run left beside its other files."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any

from drivetrain.runtime.strict_json import plain, restored


def newest_answers(folder: Path, most: int) -> list[dict[str, Any]]:
    """Returns the last prompts that the run answered, the newest last, as `samples.jsonl` has them: step, prompt,
    answer, and where they are known reference, reference_model, reward, rewards and advantage."""
    lines: deque[bytes] = deque(maxlen=most)
    with contextlib.suppress(OSError), (folder / "samples.jsonl").open("rb") as opened:
        lines.extend(opened)
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            sample = json.loads(line)
            if isinstance(sample, dict):
                found.append(plain(restored(sample)))
    return found
