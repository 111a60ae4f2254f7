"""The tokens of conversations, made once: kept by content, or where the conversations are on disk, beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import check_room, default_root, stored
from drivetrain.data.block_work import blocks_of, bytes_of, joined, worked_off
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens, TrainOn, looked_at
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.data.token_cache import Arrays, cached, content_key

COUNTS = ("split_conversations", "boundary_checked", "boundary_mismatches", "unended")  # of ConversationTokens
ARRAYS = ("ids", "targets", "offsets", "origin", "first", "last")


def conversation_tokens(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, train_on: TrainOn, cache: Path | None
) -> tuple[ConversationTokens, str | None]:
    """From the cache if it holds them. Returns a warning too if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache.
    """
    # beside the template that is shown there may be one of the tokenizer's for conversations with tools
    header = ["edges", template.text, tokenizer.chat_template, train_on, tokenizer.special_tokens_map]
    if "strftime_now" in template.text:  # the day is in what it renders
        header.append(date.today().isoformat())
    if isinstance(conversations, StoredConversations):
        return _stored(conversations, template, tokenizer, train_on, cache, header)
    key = content_key(header, tokenizer, chain.from_iterable(map(_texts, conversations)))
    held, warning = cached(cache, key, lambda: _held(template.tokenised(conversations, train_on)), _is_whole)
    return _tokens_of(held, held["counts"], json.loads(held["problems"].tobytes())), warning


def _texts(conversation: Conversation) -> list[str]:
    """All that decides its tokens, and where it stands, which its problems name."""
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


@dataclass(frozen=True)
class Work:
    """All that a process needs to tokenise blocks of conversations."""

    template: ChatTemplate
    tokenizer: Any
    conversations: StoredConversations
    train_on: TrainOn
    folder: Path
    blocks: Sequence[tuple[int, int]]  # first conversation and the one behind the last

    def make(self, number: int) -> dict[str, np.ndarray]:
        start, stop = self.blocks[number]
        checked = {index - start for index in looked_at(len(self.conversations)) if start <= index < stop}
        made = _held(self.template.tokenised(self.conversations[start:stop], self.train_on, checked))
        made["lengths"] = np.diff(made.pop("offsets"))
        made["origin"] = made["origin"] + start
        return made


def _stored(
    conversations: StoredConversations,
    template: ChatTemplate,
    tokenizer: Any,
    train_on: TrainOn,
    cache: Path | None,
    header: Sequence[Any],
) -> tuple[ConversationTokens, str | None]:
    key = content_key([*header, conversations.identity], tokenizer, ())

    def build(folder: Path) -> None:
        sizes = conversations.sizes
        # of ordinary text a token is three bytes or more and takes five, in its block and in the arrays
        check_room(folder, int(sizes.sum()) * 10 // 3, f"tokenising {len(sizes):,} conversations")
        blocks = blocks_of(sizes)
        work = Work(template, tokenizer, conversations, train_on, folder, blocks)
        worked_off(work, bytes_of(sizes, blocks))
        joined(folder, len(blocks), {"counts": _sums, "problems": _all_problems})

    found, warning = stored(cache or default_root(), f"conversation-tokens-{key}", build)
    arrays = {name: found.array(name) for name in ARRAYS}
    return _tokens_of(arrays, found.facts["counts"], found.facts["problems"]), warning


def _sums(counts: Sequence[np.ndarray]) -> list[int]:
    return [int(total) for total in np.sum(counts, axis=0)]


def _all_problems(parts: Sequence[np.ndarray]) -> list[list[str]]:
    return [each for part in parts for each in json.loads(part.tobytes())]
