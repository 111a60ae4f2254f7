"""Token ids of byte-level vocabularies, and where their tokens stand, without asking the tokenizer where.

In a byte-level vocabulary (Radford et al. 2019, section 2.2; GPT-2, Qwen, most later) every token stands for bytes,
and its own text has a character for each. The places of all tokens are then sums over ids, and the tokenizer makes no
Python tuple for each token. Vocabularies of other kinds, and tokenizers that change a text before they split it, keep
to their own offsets; `table_of` says which.
"""

from __future__ import annotations

import json
import unicodedata
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

KINDS = ("ByteLevel", "Split", "Digits", "Punctuation")  # of pre-tokenizers that change nothing else of a text
BYTES = 256


@dataclass(frozen=True)
class ByteTable:
    """lengths: (V,) int64, bytes that each token stands for. composed: whether texts are brought to NFC first. added:
    tokens that are looked for in texts as they are. of_bytes: (256,) int32, the token of each byte, if the vocabulary
    has no others; else None."""

    lengths: np.ndarray
    composed: bool
    added: tuple[str, ...]
    of_bytes: np.ndarray | None

    def encoded(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns ids (total,) int32 and lengths (N,) int64 of texts whose tokens are their bytes; None of others."""
        if self.of_bytes is None or any(token in text for text in texts for token in self.added):
            return None
        held = [text.encode() for text in texts]
        ids = self.of_bytes[np.frombuffer(b"".join(held), np.uint8)]
        return ids, np.fromiter(map(len, held), np.int64, len(held))

    def placed(self, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Returns (total, 2) int64, the first character of each token and the one behind its last; None where the
        tokens of a text do not stand for all of its bytes.

        ids: (total,), the texts' tokens, end to end; lengths: (N,), how many each text has.
        """
        held = [text.encode() for text in texts]
        if self.composed and not all(map(_is_composed, texts)):
            return None
        ends = np.cumsum(self.lengths[ids])
        behind = np.concatenate([[0], ends])[np.cumsum(lengths)]
        if not np.array_equal(behind, np.cumsum([len(each) for each in held])):
            return None
        if all(map(str.isascii, texts)):
            places = ends
            first = ends - self.lengths[ids]
        else:  # bytes that go on with a character are 10xxxxxx
            begun = np.cumsum((np.frombuffer(b"".join(held), np.uint8) & 0xC0) != 0x80)
            first, places = begun[ends - self.lengths[ids]] - 1, begun[ends - 1]
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        starts = np.repeat(np.cumsum(sizes) - sizes, lengths)
        return np.stack([first - starts, places - starts], axis=1)


_known: weakref.WeakKeyDictionary[Any, tuple[int, ByteTable | None]] = weakref.WeakKeyDictionary()


def table_of(tokenizer: Any) -> ByteTable | None:
    """Returns the table of a fast tokenizer, None for one whose tokens' places cannot be summed up.

    A tokenizer whose class is not Transformers' own may change texts or ids in its own code, and is always asked.
    """
    if tokenizer.split_special_tokens or not is_of_transformers(tokenizer):
        return None
    count = len(tokenizer)
    found = _known.get(tokenizer)
    if found is None or found[0] != count:
        found = _known[tokenizer] = count, _table(tokenizer.backend_tokenizer)
    return found[1]


def is_of_transformers(tokenizer: Any) -> bool:
    """Returns whether the tokenizer's class comes with Transformers: no code of the user's or of a model's folder."""
    return type(tokenizer).__module__.startswith("transformers.")


def flat_ids(tokenizer: Any, table: ByteTable, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids (total,) int32 and lengths (N,) int64, without special tokens around texts and without offsets.

    table: the tokenizer's.
    """
    if (found := table.encoded(texts)) is not None:
        return found
    backend = tokenizer.backend_tokenizer  # which earlier calls left their own settings with
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    made = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    lengths = np.fromiter(map(len, made), np.int64, len(made))
    flat = chain.from_iterable(each.ids for each in made)
    return np.fromiter(flat, np.int32, int(lengths.sum())), lengths


def _table(backend: Any) -> ByteTable | None:
    content = json.loads(backend.to_str())
    if not _sums_up(content):
        return None
    vocabulary: dict[str, int] = content["model"]["vocab"]
    lengths = np.zeros(backend.get_vocab_size(with_added_tokens=True) + BYTES, np.int64)
    highest = max([*vocabulary.values(), *(each["id"] for each in content["added_tokens"])], default=-1)
    if highest >= len(lengths):  # ids with large gaps
        return None
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for each in content["added_tokens"]:
        lengths[each["id"]] = len(each["content"].encode())
    of_bytes = None
    if not content["model"]["merges"] and not content["model"].get("ignore_merges") and content["normalizer"] is None:
        of_bytes = np.array([vocabulary[character] for character in characters_of_bytes()], np.int32)
    added = tuple(each["content"] for each in content["added_tokens"])
    return ByteTable(lengths, content["normalizer"] is not None, added, of_bytes)


def _sums_up(content: Mapping[str, Any]) -> bool:
    """Returns whether every token stands for bytes of the text as it is. content: of tokenizer.json."""
    model, before, after = content["model"], content["pre_tokenizer"] or {}, content["post_processor"] or {}
    steps = before.get("pretokenizers", [before])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and not model.get("byte_fallback")
        and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and all(step.get("type") in KINDS and step.get("behavior") != "Removed" for step in steps)
        and len(byte_level) == 1
        and not byte_level[0]["add_prefix_space"]
        and set(characters_of_bytes()) <= model["vocab"].keys()  # else bytes are left out, or unknown
        and not any(step.get("trim_offsets") for step in after.get("processors", [after]))
        and not any(each["lstrip"] or each["rstrip"] for each in content["added_tokens"])
    )


def _is_composed(text: str) -> bool:
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def characters_of_bytes() -> list[str]:
    """Returns the characters that stand for the bytes in byte-level vocabularies: Latin-1's visible ones for their own
    bytes, and for the others, in turn, those from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in visible else next(others)) for byte in range(BYTES)]
