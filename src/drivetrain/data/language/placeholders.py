"""Finds placeholders that are left in conversations, such as LLaMA-Factory's {{name}}, which would be learnt
literally."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drivetrain.data.language.conversations import Conversation

PLACEHOLDER = re.compile(r"\{\{ ?\w+ ?\}\}")
SHOWN = 5


def placeholders_left(conversations: Sequence[Conversation]) -> tuple[int, list[str]]:
    """Returns how many conversations hold any, and the different ones in the order in which they come."""
    found = [_of_one(each) for each in conversations]
    return sum(map(bool, found)), list(dict.fromkeys(each for listed in found for each in listed))


def _of_one(conversation: Conversation) -> list[str]:
    contents = (message.content for message in conversation.messages)
    return [each for content in contents if "{{" in content for each in PLACEHOLDER.findall(content)]


def placeholders_note(conversations: Sequence[Conversation], name: str, among: str = "") -> str | None:
    """Returns the warning about them. among: row numbers to search; None searches all rows of data set `name`."""
    count, found = placeholders_left(conversations)
    if not count:
        return None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    filled = ", ".join(f"'{each}': ..." for each in found[:SHOWN])
    sentence = f"{count:,} conversations of {among}{name} hold {', '.join(found[:SHOWN])}{more}, learnt as they stand"
    return f"{sentence}; to put something in their place, give the data set replace: {{{filled}}}"
