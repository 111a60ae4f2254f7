"""Conversations → samples: rendered, tokenised once, cut to the length that is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import TokenSamples
from drivetrain.data.token_cache import Arrays, cached, content_key
from drivetrain.errors import Problem, UserError

FIELD = "workload.data"
SHOWN = 5
COUNTS = ("split_conversations", "boundary_checked", "boundary_mismatches", "unended")  # of ConversationTokens


@dataclass(frozen=True)
class Cut:
    """Samples, and what became of the conversations. truncated, too_long, without_target: samples."""

    samples: TokenSamples
    bad: list[BadRow] = field(default_factory=list)  # conversations that the template does not take
    truncated: int = 0
    too_long: int = 0
    without_target: int = 0
    split_conversations: int = 0
    boundary_checked: int = 0
    boundary_mismatches: int = 0
    unended: int = 0
    warning: str | None = None


def conversation_samples(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    tokenizer: Any,
    data: LanguageData,
    keeps: bool = True,
) -> Cut:
    """UserError for samples longer than `data.length` where they are an error, naming the first of them.

    keeps: whether the tokens are kept in the cache.
    """
    tokens, warning = (
        _tokens(conversations, template, tokenizer, data.train_on, data.cache)
        if keeps
        else (template.tokenised(conversations, data.train_on), None)
    )
    lengths = np.diff(tokens.offsets)
    too_long = lengths > data.length
    if data.too_long == "error" and too_long.any():
        raise UserError(_too_long(conversations, tokens, np.flatnonzero(too_long), data.length))
    kept = np.minimum(lengths, data.length)
    # where only the last reply counts, the beginning is cut off
    starts = tokens.offsets[:-1] + (lengths - kept if data.train_on == "last_response" else 0)
    trained = np.array(
        [tokens.targets[start + 1 : start + size].any() for start, size in zip(starts, kept, strict=True)], dtype=bool
    )  # the first token has nothing before it that could predict it
    fits = ~too_long if data.too_long == "drop" else np.ones(len(lengths), dtype=bool)
    chosen = np.flatnonzero(fits & trained)
    parts = [slice(starts[i], starts[i] + kept[i]) for i in chosen]
    samples = TokenSamples(
        np.concatenate([tokens.ids[:0], *(tokens.ids[part] for part in parts)]),
        np.concatenate([tokens.targets[:0], *(tokens.targets[part] for part in parts)]),
        np.cumsum([0, *kept[chosen]], dtype=np.int64),
        [conversations[origin].where for origin in tokens.origin[chosen]],
    )
    return Cut(
        samples,
        [BadRow(where, why) for where, why in tokens.problems],
        truncated=int((too_long & fits & trained).sum()),
        too_long=int((~fits).sum()),
        without_target=int((fits & ~trained).sum()),
        split_conversations=tokens.split_conversations,
        boundary_checked=tokens.boundary_checked,
        boundary_mismatches=tokens.boundary_mismatches,
        unended=tokens.unended,
        warning=warning,
    )


def _too_long(
    conversations: Sequence[Conversation], tokens: ConversationTokens, found: np.ndarray, length: int
) -> list[Problem]:
    lengths = np.diff(tokens.offsets)
    fix = f"raise {FIELD}.length, or give {FIELD}.too_long=truncate or drop"
    problems = [
        Problem(f"{FIELD}.length", f"{conversations[tokens.origin[i]].where} has {lengths[i]} tokens > {length}", fix)
        for i in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        problems.append(Problem(f"{FIELD}.length", f"and {len(found) - SHOWN} more samples are too long", fix))
    return problems


def _tokens(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, train_on: Any, cache: Path | None
) -> tuple[ConversationTokens, str | None]:
    """From the cache if it holds them."""
    # beside the template that is shown there may be one of the tokenizer's for conversations with tools
    header = [template.text, tokenizer.chat_template, train_on, tokenizer.special_tokens_map]
    if "strftime_now" in template.text:  # the day is in what it renders
        header.append(date.today().isoformat())
    key = content_key(header, tokenizer, chain.from_iterable(map(_texts, conversations)))

    def make() -> Arrays:
        made = template.tokenised(conversations, train_on)
        counts = [getattr(made, name) for name in COUNTS]
        problems = np.frombuffer(json.dumps(made.problems).encode(), dtype=np.uint8)
        held = {name: getattr(made, name) for name in ("ids", "targets", "offsets", "origin")}
        return {**held, "problems": problems, "counts": np.array(counts)}

    def whole(held: Arrays) -> bool:
        fits = len(held["ids"]) == len(held["targets"]) == held["offsets"][-1]
        return bool(fits and len(held["origin"]) == len(held["offsets"]) - 1 and len(held["counts"]) == len(COUNTS))

    held, warning = cached(cache, key, make, whole)
    problems = tuple((where, why) for where, why in json.loads(held["problems"].tobytes()))
    ids, targets, offsets, origin = (held[name] for name in ("ids", "targets", "offsets", "origin"))
    counts = dict(zip(COUNTS, held["counts"].tolist(), strict=True))
    return ConversationTokens(ids, targets, offsets, origin, problems, **counts), warning


def _texts(conversation: Conversation) -> list[str]:
    """All that decides its tokens, and where it stands, which its problems name."""
    messages = (json.dumps([each.as_template(), each.trained]) for each in conversation.messages)
    return [conversation.where, json.dumps(list(conversation.tools)), *messages]
