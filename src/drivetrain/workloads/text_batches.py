"""Tokenised texts as samples, and batches of them: padded to one length, or laid end to end in one row."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from drivetrain.data.texts import Texts
from drivetrain.data.tokenised import Tokens
from drivetrain.models.unpadded import Places
from drivetrain.workloads.base import Batch
from drivetrain.workloads.exporting import PlainBatch

# a space that a decoder puts between Chinese signs, which the text had not
BETWEEN_SIGNS = re.compile(
    r"(?<=[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef]) (?=[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef])"
)


def decoded(tokenizer: Any, ids: np.ndarray) -> str:
    """Returns tokens as the text that a model reads, as far as the tokenizer can tell: cut and without marks."""
    return BETWEEN_SIGNS.sub("", tokenizer.decode(ids.tolist(), skip_special_tokens=True))


class TextSamples:
    """Tokenised texts; a sample is (ids, segments or None, label or -1). texts: kept where they are shown again.

    indices: which of the tokens' texts these are; None: all.
    """

    def __init__(
        self,
        tokens: Tokens,
        indices: np.ndarray | None,
        labels: np.ndarray | None,
        names: Sequence[str],
        texts: Texts | None = None,
    ) -> None:
        self.tokens, self.labels, self.names, self.texts = tokens, labels, names, texts
        self._indices = indices

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        del epoch  # nothing here is random
        place = index if self._indices is None else int(self._indices[index])
        part = slice(self.tokens.offsets[place], self.tokens.offsets[place + 1])
        segments = None if self.tokens.segments is None else self.tokens.segments[part]
        return self.tokens.ids[part], segments, -1 if self.labels is None else int(self.labels[index])

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each, (N,)."""
        lengths = self.tokens.lengths
        return lengths if self._indices is None else lengths[self._indices]

    @property
    def truncated(self) -> int:
        """The number of texts longer than max_length."""
        cut = self.tokens.cut
        return int((cut if self._indices is None else cut[self._indices]).sum())


def padded(samples: Sequence[Any], pad: int, length: int | None) -> Batch:
    """Returns input_ids, attention_mask, labels, and token_type_ids for pairs: (B, L) and (B,), int64.

    length: L; None: the longest sample's.
    """
    longest = length or max(1, *(len(ids) for ids, _, _ in samples))
    ids = np.full((len(samples), longest), pad, dtype=np.int64)
    mask = np.zeros((len(samples), longest), dtype=np.int64)
    segments = np.zeros((len(samples), longest), dtype=np.int64)
    for row, (tokens, kinds, _) in enumerate(samples):
        ids[row, : len(tokens)] = tokens
        mask[row, : max(1, len(tokens))] = 1  # attention over nothing would be NaN
        if kinds is not None:
            segments[row, : len(tokens)] = kinds
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.array([label for *_, label in samples])}
    if samples[0][1] is not None:
        batch["token_type_ids"] = segments
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def end_to_end(samples: Sequence[Any], pad: int, places: Places) -> Batch:
    """Returns input_ids, position_ids, and token_type_ids for pairs, of all texts end to end: (1, T); lengths and
    labels: (B,); int64. An empty text is one token of padding, as in a padded batch."""
    texts = [ids.astype(np.int64) if len(ids) else np.array([pad]) for ids, _, _ in samples]
    row = {"input_ids": texts, "position_ids": [places.of(ids) for ids in texts]}
    if samples[0][1] is not None:
        row["token_type_ids"] = [kinds if len(kinds) else np.zeros(1) for _, kinds, _ in samples]
    batch = {name: np.concatenate(each).astype(np.int64)[None] for name, each in row.items()}
    batch |= {
        "lengths": np.array([len(ids) for ids in texts]),
        "labels": np.array([label for *_, label in samples]),
    }
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def plain(model: nn.Module, samples: Sequence[Any], pad: int, segments: bool) -> PlainBatch:
    """Returns a padded batch as tokenizers write it. segments: whether the tokenizer numbers the texts of a pair, and
    gives zeros for single texts."""
    batch = padded(samples, pad, None)
    labels = batch.pop("labels")
    if not segments or "token_type_ids" not in inspect.signature(model.forward).parameters:
        batch.pop("token_type_ids", None)
    else:
        batch.setdefault("token_type_ids", torch.zeros_like(batch["input_ids"]))
    return PlainBatch(batch, labels)
