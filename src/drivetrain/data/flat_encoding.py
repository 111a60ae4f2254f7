"""Encodes many texts as flat arrays, with as few Python lists of numbers as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from drivetrain.data.byte_lengths import flat_ids, table_of


@dataclass(frozen=True)
class Encoded:
    """Token ids of N texts, end to end. ids: (total,) int32; lengths: (N,) int64, tokens of each text.

    spans: (total, 2) int64, first character of each token and the one behind its last; None if not requested.
    """

    ids: np.ndarray
    lengths: np.ndarray
    spans: np.ndarray | None = None


def encode(tokenizer: Any, texts: Sequence[str], spans: bool = False) -> Encoded:
    """Encodes texts without special tokens around them. spans: whether to return where tokens stand."""
    if not texts:
        return Encoded(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros((0, 2), np.int64) if spans else None)
    table = table_of(tokenizer) if tokenizer.is_fast else None
    if table is not None:
        found, lengths = flat_ids(tokenizer, table, texts)
        places = table.placed(texts, found, lengths) if spans else None
        if places is not None or not spans:
            return Encoded(found, lengths, places)
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    ids = encoded["input_ids"]
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    total = int(lengths.sum())
    flat = np.fromiter(chain.from_iterable(ids), np.int32, total)
    if not spans:
        return Encoded(flat, lengths)
    # each text's own list at a time: all of a block's would be hundreds of thousands of tuples
    pairs = chain.from_iterable(chain.from_iterable(each.offsets for each in encoded.encodings))
    return Encoded(flat, lengths, np.fromiter(pairs, np.int64, 2 * total).reshape(-1, 2))
