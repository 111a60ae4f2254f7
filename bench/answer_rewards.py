"""A reward for answers that costs next to nothing, for both sides of bench/preferences.py."""

from __future__ import annotations

from typing import Any


def distinct(completions: list[Any], **others: Any) -> list[float]:
    """Returns the share of distinct letters in each answer, a text or a list of messages."""
    del others
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]
