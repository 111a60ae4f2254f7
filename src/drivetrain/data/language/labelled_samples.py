"""Turns conversations whose last reply is labelled into samples, each beside one with another sample's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut, places_of, too_long_problems
from drivetrain.data.language.conversation_tokens import conversation_tokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import LabelledSamples, TokenSamples
from drivetrain.errors import UserError


def labelled_samples(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, data: LanguageData
) -> Cut[LabelledSamples]:
    """Makes samples. Raises UserError for those longer than `data.length` if that is an error, naming the first.

    A long one loses the beginning of its prompt, of which at least half of the length (or all) stays, then the end of
    its answer. Each answer is mismatched with the prompt of one other sample: the next in an order drawn at random.
    """
    tokens, warning = conversation_tokens(conversations, template, tokenizer, "responses", data.cache)
    prompts, whole = tokens.first.astype(np.int64), tokens.last.astype(np.int64) + 1
    too_long = whole > data.length
    if data.too_long == "error" and too_long.any():
        raise UserError(too_long_problems(conversations, tokens, np.flatnonzero(too_long), data.length))
    left_out = prompts - np.minimum(prompts, np.maximum(data.length - whole + prompts, data.length // 2))
    fits = ~too_long if data.too_long == "drop" else np.ones(len(whole), dtype=bool)
    kept = np.flatnonzero(fits)
    places = places_of(conversations, tokens.origin[kept])
    lengths = np.minimum(whole - left_out, data.length)[kept]
    own = TokenSamples(tokens.ids, tokens.targets, (tokens.offsets[:-1] + left_out)[kept], lengths, places)
    labels = np.array([bool(conversations[index].desirable) for index in tokens.origin[kept]], dtype=bool)
    order = np.random.default_rng(len(kept)).permutation(len(kept))
    partners = np.empty_like(order)
    partners[order] = np.roll(order, 1)
    return Cut(
        LabelledSamples(own, labels, (prompts - left_out)[kept], partners, data.length),
        [BadRow(where, why) for where, why in tokens.problems],
        truncated=int((too_long & fits).sum()),
        too_long=int((~fits).sum()),
        boundary_checked=tokens.boundary_checked,
        boundary_mismatches=tokens.boundary_mismatches,
        unended=tokens.unended,
        warning=warning,
    )
