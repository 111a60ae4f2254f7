"""Tokenises the texts of a store into another store, a block of texts at a time, in several processes where that pays.

Each block is a file that is complete or absent. After a kill the next builder takes the existing ones, so that the
arrays are the same as without a kill.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Store, default_root
from drivetrain.data.block_work import stored_blocks
from drivetrain.data.text_rows import TextRows
from drivetrain.data.token_cache import content_key
from drivetrain.data.tokenised import Tokens, tokenise_block


def stored_tokens(
    tokenizer: Any, rows: TextRows, indices: np.ndarray | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Returns the tokens of these rows, made once a machine, and a warning if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache.
    """
    chosen = None if indices is None else blake2b(indices.astype(np.int64).tobytes(), digest_size=20).hexdigest()
    paired = "second" in rows.store
    key = content_key([rows.store.folder.name, chosen, max_length, paired, tokenizer.truncation_side], tokenizer, ())
    found, warning = stored_blocks(
        (cache or default_root(), f"tokens-{key}"),
        tokenizer,
        partial(_tokens_of, tokenizer, rows.store, indices, max_length),
        lambda: _sizes(rows, indices),
        # of ordinary text a token is three bytes or more and takes four, in its block and in the array
        lambda sizes: min(int(sizes.sum()) * 3, len(sizes) * max_length * 8),
    )
    segments = found.array("segments") if paired else None
    return Tokens(found.array("ids"), found.array("offsets"), segments, found.array("cut")), warning


def _tokens_of(
    tokenizer: Any, store: Store, indices: np.ndarray | None, max_length: int, start: int, stop: int
) -> dict[str, np.ndarray]:
    rows = TextRows(store)
    chosen = np.arange(start, stop) if indices is None else indices[start:stop]
    first, second = rows.first.taken(chosen), rows.second
    pairs = None if second is None else list(second.taken(chosen))
    made = tokenise_block(tokenizer, list(first), pairs, max_length)
    arrays = {"ids": made.ids, "lengths": made.lengths.astype(np.int32), "cut": made.cut}
    return arrays if made.segments is None else {**arrays, "segments": made.segments}


def _sizes(rows: TextRows, indices: np.ndarray | None) -> np.ndarray:
    """Returns the bytes of each text, its pair included."""
    sizes = np.zeros(len(rows.store.array("rows")), np.int64)
    for name in ("first_ends", "second_ends"):
        if name in rows.store:
            sizes += np.diff(rows.store.array(name), prepend=0)
    return sizes if indices is None else sizes[indices]
