"""Turns conversations into prompts: all before the last reply, which is the reference of answers if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import FIELD, SHOWN, Cut, places_of
from drivetrain.data.language.conversation_tokens import conversation_tokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import PromptRow, PromptSamples, TokenSamples
from drivetrain.errors import Problem, UserError


def prompt_samples(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    tokenizer: Any,
    data: LanguageData,
    context: int | None = None,
) -> Cut[PromptSamples]:
    """Makes samples. A prompt is too long if it has more than `data.length` tokens, or so many that no place of the
    model's context is left for an answer. Raises UserError for such prompts if that is an error, naming the first; cut,
    they lose their beginning.

    context: the longest sequence that the model has positions for; None if there is no bound.
    """
    tokens, warning = conversation_tokens(conversations, template, tokenizer, "last_response", data.cache)
    lengths = tokens.first.astype(np.int64)
    longest = data.length if context is None else min(data.length, context - 1)
    too_long = lengths > longest
    if data.too_long == "error" and too_long.any():
        where = places_of(conversations, tokens.origin[too_long])
        raise UserError([*_problems(where, lengths[too_long], data, context)])
    kept = np.flatnonzero(~too_long) if data.too_long == "drop" else np.arange(len(lengths))
    left = np.minimum(lengths, longest)[kept]
    starts = (tokens.offsets[:-1] + lengths)[kept] - left
    origin = tokens.origin[kept]
    prompts = TokenSamples(tokens.ids, tokens.targets, starts, left, places_of(conversations, origin))
    return Cut(
        PromptSamples(prompts, PromptRows(conversations, origin)),
        [BadRow(where, why) for where, why in tokens.problems],
        truncated=int(too_long.sum()) if data.too_long == "truncate" else 0,
        too_long=len(lengths) - len(kept),
        boundary_checked=tokens.boundary_checked,
        boundary_mismatches=tokens.boundary_mismatches,
        warning=warning,
    )


def _problems(places: Sequence[str], lengths: np.ndarray, data: LanguageData, context: int | None) -> Iterator[Problem]:
    """Yields problems of the first prompts that are too long, and how many more there are."""
    for number, length in enumerate(lengths[:SHOWN].tolist()):
        why, fix = f"the prompt of {places[number]} has {length} tokens", f"give {FIELD}.too_long=truncate or drop"
        if length > data.length:
            yield Problem(f"{FIELD}.length", f"{why} > {data.length}", f"raise {FIELD}.length, or {fix}")
        else:
            why += f", and the model's context of {context} leaves no room for an answer"
            yield Problem(f"{FIELD}.length", why, f"shorten the prompt, or {fix}")
    if len(lengths) > SHOWN:
        fix = f"shorten them, or give {FIELD}.too_long=truncate or drop"
        yield Problem(f"{FIELD}.length", f"and {len(lengths) - SHOWN} more prompts are too long", fix)


class PromptRows(Sequence[PromptRow]):
    """The rows of the conversations of these indices, each read when it is used."""

    def __init__(self, conversations: Sequence[Conversation], indices: np.ndarray) -> None:
        self._conversations, self._indices = conversations, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: Any) -> Any:
        read = self._conversations[int(self._indices[number])]
        *before, last = read.messages
        is_reply = last.role == "assistant"
        prompt = [each.as_template() for each in (before if is_reply else read.messages)]
        return PromptRow(prompt, last.content if is_reply else None, read.columns)
