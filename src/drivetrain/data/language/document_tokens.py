"""The tokens of documents, one after the other, in one array on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Writer, check_room, default_root, stored
from drivetrain.data.block_work import remove_blocks, stored_blocks
from drivetrain.data.flat_encoding import Encoded, encode
from drivetrain.data.language.documents import StoredTexts
from drivetrain.data.language.long_tokens import compact, tokens_of
from drivetrain.data.long_text import LongText
from drivetrain.data.token_cache import content_key

AT_ONCE = 256  # texts a call of the tokenizer, which gives Python's integers


def encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts without special tokens around them."""
    if not texts:
        return []
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return found


def stored_ids(
    contents: Sequence[str | LongText] | StoredTexts, end: Sequence[int], tokenizer: Any, cache: Path | None
) -> tuple[np.ndarray, str | None]:
    """Returns (N,) int32, mapped from disk: each document's ids and `end`; and a warning if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache.
    """
    root = cache or default_root()
    if isinstance(contents, StoredTexts):
        return _of_stored(contents, end, tokenizer, root)
    digests = (each.source.digest(root) if isinstance(each, LongText) else each for each in contents)
    key = content_key(["texts", list(end)], tokenizer, digests)

    def build(folder: Path) -> None:
        long = [each for each in contents if isinstance(each, LongText)]
        if long:
            check_room(folder, _room(tokenizer, long), "tokenising them")
        with Writer(folder) as writer:
            for part in _parts(contents, long, np.array(end, np.int32), tokenizer, folder):
                writer.append("ids", part)
            for each in long:
                each.source.check_unchanged()  # before the store is finished, which no later start would doubt
            writer.finish({})
        remove_blocks(folder)

    found, warning = stored(root, f"texts-{key}", build)
    return found.array("ids"), warning


def _room(tokenizer: Any, long: Sequence[LongText]) -> int:
    """Returns the bytes that the texts' tokens take, in the files of pieces and in the array, judged by one piece."""
    longest = max(long, key=lambda each: each.end)
    places = longest.places()
    middle = len(places) // 2
    start, stop = places[middle - 1], places[middle]
    ids = encode(tokenizer, [longest.span(start, stop)]).ids
    tokens = len(ids) * sum(each.end for each in long) / max(1, stop - start)
    return int(tokens * (ids.itemsize + compact(ids).itemsize))


def _parts(
    contents: Sequence[str | LongText], long: Sequence[LongText], end: np.ndarray, tokenizer: Any, folder: Path
) -> Iterator[np.ndarray]:
    yield np.zeros(0, np.int32)
    of_long = tokens_of(tokenizer, long, folder) if long else iter(())
    for is_long, group in groupby(contents, lambda each: isinstance(each, LongText)):
        texts = list(group)
        if is_long:
            for _ in texts:
                yield from next(of_long)
                yield end
            continue
        for start in range(0, len(texts), AT_ONCE):
            part = [text for text in texts[start : start + AT_ONCE] if isinstance(text, str)]
            yield _ended(encode(tokenizer, part), end.tolist())


# --- of documents on disk --------------------------------------------------------------------------------------------


def _of_stored(texts: StoredTexts, end: Sequence[int], tokenizer: Any, root: Path) -> tuple[np.ndarray, str | None]:
    found, warning = stored_blocks(
        (root, f"texts-{content_key(['texts', list(end), texts.identity], tokenizer, ())}"),
        tokenizer,
        partial(_ids_of_block, tokenizer, texts, list(end)),
        lambda: texts.sizes,
        # of ordinary text a token is three bytes or more and takes four, in its block and in the array
        lambda sizes: 3 * int(sizes.sum()),
    )
    return found.array("ids"), warning


def _ids_of_block(
    tokenizer: Any, texts: StoredTexts, end: Sequence[int], start: int, stop: int
) -> dict[str, np.ndarray]:
    return {"ids": _ended(encode(tokenizer, texts.contents(start, stop)), end)}


def _ended(encoded: Encoded, end: Sequence[int]) -> np.ndarray:
    """Returns (N,) int32: each text's ids and `end`."""
    behind = np.cumsum(encoded.lengths)
    return np.insert(encoded.ids, np.repeat(behind, len(end)), np.tile(np.array(end, np.int32), len(behind)))
