"""Turns conversations into prompts: all before the last reply, which is the reference of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut, places_of, too_long_problems
from drivetrain.data.language.conversation_tokens import conversation_tokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import PromptSamples, TokenSamples
from drivetrain.errors import UserError


def prompt_samples(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, data: LanguageData
) -> Cut[PromptSamples]:
    """Makes samples. Raises UserError for prompts longer than `data.length` if that is an error, naming the first;
    cut, they lose their beginning."""
    tokens, warning = conversation_tokens(conversations, template, tokenizer, "last_response", data.cache)
    lengths = tokens.first.astype(np.int64)
    too_long = lengths > data.length
    if data.too_long == "error" and too_long.any():
        raise UserError(too_long_problems(conversations, tokens, np.flatnonzero(too_long), data.length))
    kept = np.flatnonzero(~too_long) if data.too_long == "drop" else np.arange(len(lengths))
    left = np.minimum(lengths, data.length)[kept]
    starts = (tokens.offsets[:-1] + lengths)[kept] - left
    origin = tokens.origin[kept]
    prompts = TokenSamples(tokens.ids, tokens.targets, starts, left, places_of(conversations, origin))
    return Cut(
        PromptSamples(prompts, LastReplies(conversations, origin)),
        [BadRow(where, why) for where, why in tokens.problems],
        truncated=int(too_long.sum()) if data.too_long == "truncate" else 0,
        too_long=len(lengths) - len(kept),
        boundary_checked=tokens.boundary_checked,
        boundary_mismatches=tokens.boundary_mismatches,
        warning=warning,
    )


class LastReplies(Sequence[str]):
    """The last reply of each of the conversations of these indices, read when it is used."""

    def __init__(self, conversations: Sequence[Conversation], indices: np.ndarray) -> None:
        self._conversations, self._indices = conversations, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: Any) -> Any:
        messages = self._conversations[int(self._indices[number])].messages
        return next(each.content for each in reversed(messages) if each.role == "assistant")
