"""Texts → token ids, once: the result is cached by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.errors import problem

FORMAT = 2


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

    path = Path(given).expanduser()
    if path.is_file():
        return _word_piece(path, field)
    not_a_hub_id = given.startswith((".", "/", "~")) or len(path.parts) > 2 or path.suffix in {".txt", ".json"}
    if not_a_hub_id and not path.is_dir():
        raise problem(field, f"{given} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else given)
    except Exception as error:  # hub, network and format errors have no class in common
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        fix = "give a folder with tokenizer.json, or a vocab.txt; without a network nothing can come from the hub"
        raise problem(field, f"no tokenizer can be loaded from {given}: {reason}", fix) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-2's way: the attention mask hides the padding
    return tokenizer


def tokenise(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Tokens of the texts, from the cache if it holds them. Returns a warning too if the cache cannot be used."""
    folder = cache or _default_cache()
    file = folder / f"{_content_key(tokenizer, texts, pairs, max_length)}.npz"
    cached, damage = _read(file, len(texts))
    if cached is not None:
        return cached, None
    tokens = _tokenise(tokenizer, texts, pairs, max_length)
    return tokens, _write(file, tokens) or damage


def _tokenise(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Tokens:
    encoded = tokenizer(
        list(texts),
        None if pairs is None else list(pairs),
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=pairs is not None,
    )
    lengths = [len(ids) for ids in encoded["input_ids"]]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    segments = np.concatenate(encoded["token_type_ids"]).astype(np.int8) if pairs is not None else None
    ids = np.concatenate(encoded["input_ids"]).astype(np.int32)
    if encoded.is_fast:
        truncated = sum(bool(each.overflowing) for each in encoded.encodings)
    else:
        truncated = _count_truncated(tokenizer, texts, pairs, lengths, max_length)
    return Tokens(ids, offsets, segments, truncated)


def _count_truncated(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, lengths: Sequence[int], max_length: int
) -> int:
    """Of a slow tokenizer's texts of max_length tokens, those that have more when they may."""
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
    """BERT's tokenizer over one token a line. A vocabulary with capital letters keeps case, another lowers it."""
    from transformers import BertTokenizerFast

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise problem(field, f"{path} is not UTF-8", "give a WordPiece vocabulary, one token a line") from None
    # not splitlines: tokens such as U+2028 count as line breaks there, and every later token would get a wrong number
    vocabulary = text.rstrip("\n").split("\n")
    missing = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"} - set(vocabulary)
    if missing:
        lacks = ", ".join(sorted(missing))
        fix = "one token a line; a tokenizer.json is given by its folder"
        raise problem(field, f"{path} is no WordPiece vocabulary: it lacks {lacks}", fix)
    if len(set(vocabulary)) < len(vocabulary):
        twice = next(token for number, token in enumerate(vocabulary) if token in vocabulary[:number])
        raise problem(field, f"{path} has the token {twice!r} twice", "give the file as it was published")
    cased = any(token.lower() != token for token in vocabulary if not token.startswith(("[", "<")))
    return BertTokenizerFast(vocab={token: number for number, token in enumerate(vocabulary)}, do_lower_case=not cased)


# --- the cache -------------------------------------------------------------------------------------------------------


def _content_key(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> str:
    import tokenizers
    import transformers

    versions = [tokenizers.__version__, transformers.__version__]
    shape = [max_length, pairs is not None, tokenizer.truncation_side]
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps([FORMAT, versions, shape, _identity(tokenizer)]).encode())
    for text in (*texts, *(pairs or ())):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))  # or ["ab", "c"] would be ["a", "bc"]
        digest.update(encoded)
    return digest.hexdigest()


def _identity(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer
        return f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())} {tokenizer.init_kwargs}"
    content = json.loads(backend.to_str())
    # every call leaves its own here: with them the same texts would have another key the second time
    content.pop("truncation", None)
    content.pop("padding", None)
    return json.dumps(content)


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "drivetrain" / "tokenised"


def _read(file: Path, count: int) -> tuple[Tokens | None, str | None]:
    """(tokens, None), or (None, None) if it is not there, or (None, what is wrong with it)."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as held:  # checks a CRC of each array
            segments = held.get("segments")
            tokens = Tokens(held["ids"], held["offsets"], segments, int(held["truncated"]))
        if len(tokens.offsets) != count + 1 or tokens.offsets[-1] != len(tokens.ids):
            raise ValueError("its parts do not fit together")
    except FileNotFoundError:
        return None, None
    except Exception as error:  # damage shows itself as nearly anything
        return None, f"the token cache {file} was damaged ({type(error).__name__}) and is made again"
    return tokens, None


def _write(file: Path, tokens: Tokens) -> str | None:
    """Aside, then renamed, so that no reader sees half a file. Returns a warning if that fails."""
    aside = file.with_suffix(f".{os.getpid()}.partial")
    arrays: dict[str, Any] = {"ids": tokens.ids, "offsets": tokens.offsets, "truncated": np.int64(tokens.truncated)}
    if tokens.segments is not None:
        arrays["segments"] = tokens.segments
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as opened:
                np.savez(opened, **arrays)
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        return f"tokens could not be cached in {file.parent} ({error.strerror}); they are made again next time"
    return None
