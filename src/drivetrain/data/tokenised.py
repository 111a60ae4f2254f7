"""Texts → token ids, once: the result is cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.errors import problem

FORMAT = 1


@dataclass(frozen=True)
class Tokens:
    """Token ids of N texts, end to end. ids: (total,) int32; offsets: (N + 1,) int64; segments: (total,) int8, which of
    a pair a token is of, or None for single texts."""

    ids: np.ndarray
    offsets: np.ndarray
    segments: np.ndarray | None
    truncated: int  # texts longer than max_length

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def load_tokenizer(given: str, field: str) -> Any:
    """A fast Transformers tokenizer from a folder, a hub id, or a bare WordPiece vocab.txt (BERT's)."""
    import transformers

    path = Path(given)
    if path.is_file():
        return _word_piece(path, field)
    if path.suffix == ".txt":
        raise problem(field, f"{given} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    try:
        return transformers.AutoTokenizer.from_pretrained(given)
    except Exception as error:  # hub, network and format errors have no class in common
        raise problem(
            field,
            f"no tokenizer can be loaded from {given}: {str(error).strip().splitlines()[0][:200]}",
            "give a folder with tokenizer.json, or a vocab.txt; without a network nothing can come from the hub",
        ) from error


def tokenise(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Tokens of the texts, from the cache if it holds them. Returns a warning too if the cache cannot be used."""
    folder = cache or _default_cache()
    file = folder / f"{_content_key(tokenizer, texts, pairs, max_length)}.npz"
    cached = _read(file, len(texts))
    if cached is not None:
        return cached, None
    tokens = _tokenise(tokenizer, texts, pairs, max_length)
    return tokens, _write(file, tokens)


def _tokenise(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Tokens:
    encoded = tokenizer(
        list(texts),
        None if pairs is None else list(pairs),
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=pairs is not None,
        return_overflowing_tokens=False,
    )
    lengths = [len(ids) for ids in encoded["input_ids"]]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    segments = np.concatenate(encoded["token_type_ids"]).astype(np.int8) if pairs is not None else None
    ids = np.concatenate(encoded["input_ids"]).astype(np.int32)
    # a text of exactly max_length was perhaps not cut; counting those at the bound is a bound from above by little
    return Tokens(ids, offsets, segments, truncated=_count_truncated(tokenizer, texts, pairs, lengths, max_length))


def _count_truncated(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, lengths: Sequence[int], max_length: int
) -> int:
    full = [i for i, length in enumerate(lengths) if length == max_length]
    if not full:
        return 0
    again = tokenizer(
        [texts[i] for i in full],
        None if pairs is None else [pairs[i] for i in full],
        truncation=True,
        max_length=max_length + 1,
        return_attention_mask=False,
    )
    return sum(len(ids) > max_length for ids in again["input_ids"])


def _word_piece(path: Path, field: str) -> Any:
    from transformers import BertTokenizerFast

    vocabulary = path.read_text(encoding="utf-8").splitlines()
    missing = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"} - set(vocabulary)
    if missing:
        raise problem(
            field, f"{path} is no WordPiece vocabulary: it lacks {', '.join(sorted(missing))}", "one token a line"
        )
    return BertTokenizerFast(vocab={token: number for number, token in enumerate(vocabulary)})


def _content_key(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> str:
    import tokenizers

    digest = hashlib.blake2b(digest_size=20)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a slow tokenizer of the user's has none
    identity = backend.to_str() if backend is not None else repr(tokenizer)
    digest.update(json.dumps([FORMAT, identity, tokenizers.__version__, max_length, pairs is not None]).encode())
    for text in (*texts, *(pairs or ())):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))  # or ["ab", "c"] would be ["a", "bc"]
        digest.update(encoded)
    return digest.hexdigest()


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain" / "tokenised"


def _read(file: Path, count: int) -> Tokens | None:
    """None if it is not there or damaged: then it is made again."""
    try:
        with np.load(file, allow_pickle=False) as held:
            segments = held.get("segments")
            tokens = Tokens(held["ids"], held["offsets"], segments, int(held["truncated"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    whole = len(tokens.offsets) == count + 1 and tokens.offsets[-1] == len(tokens.ids)
    return tokens if whole else None


def _write(file: Path, tokens: Tokens) -> str | None:
    aside = file.with_suffix(f".{os.getpid()}.partial")
    arrays: dict[str, Any] = {"ids": tokens.ids, "offsets": tokens.offsets, "truncated": np.int64(tokens.truncated)}
    if tokens.segments is not None:
        arrays["segments"] = tokens.segments
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as opened:
            np.savez(opened, **arrays)
        aside.replace(file)
    except OSError as error:
        return f"tokens could not be cached in {file.parent} ({error.strerror}); they are made again next time"
    return None
