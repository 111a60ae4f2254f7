"""Texts of a store → tokens of a store, a block of texts at a time, in several processes where that pays.

Each block is a file that is there whole or not at all. After a kill the next builder takes those that are there, so
that the arrays are the same as if there had been none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Store, check_room, default_root, stored
from drivetrain.data.block_work import blocks_of, bytes_of, joined, worked_off
from drivetrain.data.text_rows import TextRows
from drivetrain.data.token_cache import content_key
from drivetrain.data.tokenised import Tokens, tokenise_block


@dataclass(frozen=True)
class Work:
    """All that a process needs. indices: which rows, None for all."""

    tokenizer: Any
    rows: Store
    indices: np.ndarray | None
    max_length: int
    folder: Path
    blocks: Sequence[tuple[int, int]]  # first text and the one behind the last

    def make(self, number: int) -> dict[str, np.ndarray]:
        rows, (start, stop) = TextRows(self.rows), self.blocks[number]
        chosen = np.arange(start, stop) if self.indices is None else self.indices[start:stop]
        first, second = rows.first.taken(chosen), rows.second
        pairs = None if second is None else list(second.taken(chosen))
        made = tokenise_block(self.tokenizer, list(first), pairs, self.max_length)
        arrays = {"ids": made.ids, "lengths": made.lengths.astype(np.int32), "cut": made.cut}
        return arrays if made.segments is None else {**arrays, "segments": made.segments}


def stored_tokens(
    tokenizer: Any, rows: TextRows, indices: np.ndarray | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Tokens of these rows, made once a machine. Returns a warning too if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache.
    """
    chosen = None if indices is None else blake2b(indices.astype(np.int64).tobytes(), digest_size=20).hexdigest()
    paired = "second" in rows.store
    key = content_key([rows.store.folder.name, chosen, max_length, paired, tokenizer.truncation_side], tokenizer, ())
    found, warning = stored(
        cache or default_root(), f"tokens-{key}", lambda folder: _build(folder, tokenizer, rows, indices, max_length)
    )
    segments = found.array("segments") if paired else None
    return Tokens(found.array("ids"), found.array("offsets"), segments, found.array("cut")), warning


def _build(folder: Path, tokenizer: Any, rows: TextRows, indices: np.ndarray | None, max_length: int) -> None:
    sizes = _sizes(rows, indices)
    blocks = blocks_of(sizes)
    # of ordinary text a token is three bytes or more and takes four, in its block and in the array
    check_room(folder, min(int(sizes.sum()) * 3, len(sizes) * max_length * 8), f"tokenising {len(sizes):,} texts")
    work = Work(tokenizer, rows.store, indices, max_length, folder, blocks)
    worked_off(work, bytes_of(sizes, blocks))
    joined(folder, len(blocks))


def _sizes(rows: TextRows, indices: np.ndarray | None) -> np.ndarray:
    """Bytes of each text, its pair included."""
    sizes = np.zeros(len(rows.store.array("rows")), np.int64)
    for name in ("first_ends", "second_ends"):
        if name in rows.store:
            sizes += np.diff(rows.store.array(name), prepend=0)
    return sizes if indices is None else sizes[indices]
