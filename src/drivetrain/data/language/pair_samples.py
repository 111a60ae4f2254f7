"""Turns pairs of conversations into samples: each side rendered and tokenised once, both cut to the length together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens
from drivetrain.data.language.conversation_samples import Cut, places_of, too_long_problems
from drivetrain.data.language.conversation_tokens import both_sides, conversation_tokens
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import PairSamples, TokenSamples
from drivetrain.errors import UserError

REWRITES = "the template renders an earlier message otherwise once an answer follows: a side is more than one sample"


def pair_samples(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, data: LanguageData
) -> Cut[PairSamples]:
    """Makes samples. Raises UserError for those longer than `data.length` if that is an error, naming the first.

    Both sides keep the same end of the prompt. It makes room for the longer answer, but at least half of the length
    (or all of it) stays; answers lose their ends.
    """
    tokens, warning = conversation_tokens(conversations, template, tokenizer, "responses", data.cache, pairs=True)
    sides, bad = _sides(tokens, conversations)
    prompts = tokens.first[sides].astype(np.int64)  # (N, 2), as all below
    whole = tokens.last[sides].astype(np.int64) + 1  # what stands behind the last target is context of nothing
    too_long = (whole > data.length).any(1)
    if data.too_long == "error" and too_long.any():
        found = sides[too_long].flatten()
        found = found[np.diff(tokens.offsets)[found] > data.length]
        raise UserError(too_long_problems(both_sides(conversations), tokens, found, data.length))
    room = np.maximum(data.length - (whole - prompts).max(1), data.length // 2)
    left_out = prompts - np.minimum(prompts, room[:, None])
    starts, lengths = tokens.offsets[:-1][sides] + left_out, np.minimum(whole - left_out, data.length)
    fits = ~too_long if data.too_long == "drop" else np.ones(len(sides), dtype=bool)
    alike = fits & _alike(tokens.ids, starts, lengths)
    kept = np.flatnonzero(fits & ~alike)
    rows = tokens.origin[sides[kept, 0]] // 2
    places = places_of(conversations, rows)
    margins = np.array([conversations[index].margin for index in rows], dtype=np.float32)
    chosen, rejected = (
        TokenSamples(tokens.ids, tokens.targets, starts[kept, side], lengths[kept, side], places) for side in (0, 1)
    )
    return Cut(
        PairSamples(chosen, rejected, margins),
        bad,
        truncated=int((too_long & fits & ~alike).sum()),
        too_long=int((~fits).sum()),
        alike=int(alike.sum()),
        boundary_checked=tokens.boundary_checked,
        boundary_mismatches=tokens.boundary_mismatches,
        unended=tokens.unended,
        warning=warning,
    )


def _sides(tokens: ConversationTokens, conversations: Sequence[Conversation]) -> tuple[np.ndarray, list[BadRow]]:
    """Returns which samples are the two sides of each pair, (N, 2), and the pairs that are not two samples."""
    bad = dict(tokens.problems)
    made = np.bincount(tokens.origin, minlength=2 * len(conversations)).reshape(-1, 2)
    usable = (made == 1).all(1)
    for index in np.flatnonzero(~usable).tolist():
        bad.setdefault(conversations[index].where, REWRITES)
    first = np.searchsorted(tokens.origin, np.arange(2 * len(conversations))).reshape(-1, 2)
    return first[usable], [BadRow(where, why) for where, why in bad.items()]


def _alike(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns whether both sides have the same tokens, (N,) bool."""
    found = lengths[:, 0] == lengths[:, 1]
    for index in np.flatnonzero(found).tolist():
        one, other = (ids[start : start + lengths[index, 0]] for start in starts[index])
        found[index] = np.array_equal(one, other)
    return found
