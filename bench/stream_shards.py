"""A thousand shards of numbered rows with a text and a label."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

NUM_SHARDS = 1000
WORDS = ["good", "bad", "film", "book", "room", "meal", "slow", "warm", "long", "kind"]


def row(number: int, words: int) -> dict[str, Any]:
    """Returns the row of a number, whose label its text tells."""
    dice, label = random.Random(number), number * 7919 % 2
    text = " ".join([WORDS[label], *(dice.choice(WORDS[2:]) for _ in range(words - 1))])
    return {"number": number, "label": label, "text": text}


def write_shards(folder: Path, rows_a_shard: int, words: int) -> None:
    """Writes rows 0, 1, 2, ... over all shards."""
    folder.mkdir(parents=True)
    for shard in range(NUM_SHARDS):
        numbers = range(shard * rows_a_shard, (shard + 1) * rows_a_shard)
        lines = "".join(json.dumps(row(number, words)) + "\n" for number in numbers)
        (folder / f"part-{shard:04}.jsonl").write_text(lines)
