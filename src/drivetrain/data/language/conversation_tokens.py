"""Makes the tokens of conversations once: kept by content, or for conversations on disk, beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import default_root
from drivetrain.data.block_work import stored_blocks
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens, TrainOn, looked_at
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.prompt_replies import answered
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.data.token_cache import Arrays, cached, content_key

COUNTS = ("split_conversations", "boundary_checked", "boundary_mismatches", "unended")  # of ConversationTokens
ARRAYS = ("ids", "targets", "offsets", "origin", "first", "last")


def conversation_tokens(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    tokenizer: Any,
    train_on: TrainOn,
    cache: Path | None,
    pairs: bool = False,
) -> tuple[ConversationTokens, str | None]:
    """Returns the tokens, from the cache if it holds them, and a warning if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache. pairs: conversation n gives two, of the numbers 2n
    (chosen) and 2n + 1 (rejected).
    """
    # beside the template that is shown there may be one of the tokenizer's for conversations with tools
    header = ["edges", template.text, tokenizer.chat_template, train_on, tokenizer.special_tokens_map]
    if "strftime_now" in template.text:  # the day is in what it renders
        header.append(date.today().isoformat())
    if isinstance(conversations, StoredConversations):
        return _stored(conversations, template, tokenizer, train_on, cache, header, pairs)
    each = both_sides(conversations) if pairs else [*map(answered, conversations)]
    key = content_key(header, tokenizer, chain.from_iterable(map(_texts, each)))
    held, warning = cached(cache, key, lambda: _held(template.tokenised(each, train_on)), _is_whole)
    return _tokens_of(held, held["counts"], json.loads(held["problems"].tobytes())), warning


def both_sides(pairs: Sequence[Conversation]) -> list[Conversation]:
    """Returns the conversations of pairs, chosen and rejected in turns."""
    return [side for pair in pairs for side in pair.sides]


def _texts(conversation: Conversation) -> list[str]:
    """Returns everything that decides a conversation's tokens, and its place, which problems name."""
    messages = (json.dumps([each.as_template(), each.trained]) for each in conversation.messages)
    return [conversation.where, json.dumps(list(conversation.tools)), *messages]


def _held(made: ConversationTokens) -> dict[str, np.ndarray]:
    problems = np.frombuffer(json.dumps(made.problems).encode(), dtype=np.uint8)
    counts = np.array([getattr(made, name) for name in COUNTS])
    return {**{name: getattr(made, name) for name in ARRAYS}, "problems": problems, "counts": counts}


def _is_whole(held: Arrays) -> bool:
    fits = len(held["ids"]) == len(held["targets"]) == held["offsets"][-1]
    of_samples = {len(held["origin"]), len(held["first"]), len(held["last"]), len(held["offsets"]) - 1}
    return bool(fits and len(of_samples) == 1 and len(held["counts"]) == len(COUNTS))


def _tokens_of(held: Arrays, counts: Iterable[int], problems: Sequence[Sequence[str]]) -> ConversationTokens:
    named: dict[str, Any] = dict(zip(COUNTS, map(int, counts), strict=True))
    named.update((name, held[name]) for name in ARRAYS)
    return ConversationTokens(**named, problems=tuple((where, why) for where, why in problems))


# --- of conversations on disk ----------------------------------------------------------------------------------------


def _tokens_of_block(
    template: ChatTemplate, conversations: StoredConversations, train_on: TrainOn, pairs: bool, start: int, stop: int
) -> dict[str, np.ndarray]:
    each, sides = conversations[start:stop], 2 if pairs else 1
    checked = {sides * (index - start) for index in looked_at(len(conversations)) if start <= index < stop}
    talks = both_sides(each) if pairs else [*map(answered, each)]
    made = _held(template.tokenised(talks, train_on, checked))
    made["lengths"] = np.diff(made.pop("offsets"))
    made["origin"] = made["origin"] + sides * start
    return made


def _stored(
    conversations: StoredConversations,
    template: ChatTemplate,
    tokenizer: Any,
    train_on: TrainOn,
    cache: Path | None,
    header: Sequence[Any],
    pairs: bool,
) -> tuple[ConversationTokens, str | None]:
    key = content_key([*header, conversations.identity, *(["pairs"] if pairs else [])], tokenizer, ())

    found, warning = stored_blocks(
        (cache or default_root(), f"conversation-tokens-{key}"),
        tokenizer,
        partial(_tokens_of_block, template, conversations, train_on, pairs),
        lambda: conversations.sizes,
        # of ordinary text a token is three bytes or more and takes five, in its block and in the arrays
        lambda sizes: int(sizes.sum()) * 10 // 3,
        {"counts": _sums, "problems": _all_problems},
    )
    arrays = {name: found.array(name) for name in ARRAYS}
    return _tokens_of(arrays, found.facts["counts"], found.facts["problems"]), warning


def _sums(counts: Sequence[np.ndarray]) -> list[int]:
    return [int(total) for total in np.sum(counts, axis=0)]


def _all_problems(parts: Sequence[np.ndarray]) -> list[list[str]]:
    return [each for part in parts for each in json.loads(part.tobytes())]
