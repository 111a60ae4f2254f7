"""Turns conversations into samples: rendered, tokenised once, cut to the length that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens
from drivetrain.data.language.conversation_tokens import conversation_tokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import Tokenised, TokenSamples
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.errors import Problem, UserError

FIELD = "workload.data"
SHOWN = 5
S = TypeVar("S", bound=Tokenised)


@dataclass(frozen=True)
class Cut(Generic[S]):
    """Samples, and the fate of the conversations. truncated, too_long, without_target, alike: numbers of samples; the
    last of pairs whose sides do not differ once they are cut."""

    samples: S
    bad: list[BadRow] = field(default_factory=list)  # conversations that the template does not take
    truncated: int = 0
    too_long: int = 0
    without_target: int = 0
    alike: int = 0
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
) -> Cut[TokenSamples]:
    """Makes samples. Raises UserError for those longer than `data.length` if that is an error, naming the first of
    them.

    keeps: whether the tokens are kept in the cache.
    """
    tokens, warning = (
        conversation_tokens(conversations, template, tokenizer, data.train_on, data.cache)
        if keeps
        else (template.tokenised(conversations, data.train_on), None)
    )
    lengths = np.diff(tokens.offsets)
    too_long = lengths > data.length
    if data.too_long == "error" and too_long.any():
        raise UserError(too_long_problems(conversations, tokens, np.flatnonzero(too_long), data.length))
    kept = np.minimum(lengths, data.length)
    # where only the last reply counts, the beginning is cut off
    left_out = lengths - kept if data.train_on == "last_response" else np.zeros_like(lengths)
    trained = tokens.last > left_out if data.train_on == "last_response" else tokens.first < kept
    fits = ~too_long if data.too_long == "drop" else np.ones(len(lengths), dtype=bool)
    chosen = np.flatnonzero(fits & trained)
    starts = (tokens.offsets[:-1] + left_out)[chosen]
    samples = TokenSamples(
        tokens.ids, tokens.targets, starts, kept[chosen], places_of(conversations, tokens.origin[chosen])
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


def places_of(conversations: Sequence[Conversation], indices: np.ndarray) -> Sequence[str]:
    if isinstance(conversations, StoredConversations):
        return conversations.places.taken(indices)
    return [conversations[index].where for index in indices]


def too_long_problems(
    conversations: Sequence[Conversation], tokens: ConversationTokens, found: np.ndarray, length: int
) -> list[Problem]:
    """Returns problems of the samples in `found`, the first of them by name."""
    lengths = np.diff(tokens.offsets)
    fix = f"raise {FIELD}.length, or give {FIELD}.too_long=truncate or drop"
    problems = [
        Problem(f"{FIELD}.length", f"{conversations[tokens.origin[i]].where} has {lengths[i]} tokens > {length}", fix)
        for i in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        problems.append(Problem(f"{FIELD}.length", f"and {len(found) - SHOWN} more samples are too long", fix))
    return problems
