"""A reward that keeps account of each answer that it is asked for, for bench/reward_kills.py."""

from __future__ import annotations

import json
import os
import time

SECONDS = 0.03  # of a call, in which the run may be killed


def letters(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Returns the share of low tokens in each answer. Appends a line for the call, which one write makes whole."""
    asked = [[prompt, ids] for prompt, ids in zip(prompts, completion_ids, strict=True)]
    with open(os.environ["REWARD_CALLS"], "ab", buffering=0) as calls:
        calls.write(json.dumps([int(os.environ["RUN_START"]), asked]).encode() + b"\n")
    time.sleep(SECONDS)
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]
