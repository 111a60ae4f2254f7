"""Turns texts into token ids, once: the result is cached by content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.token_cache import Arrays, cached, content_key
from drivetrain.errors import problem
from drivetrain.runtime.hub import ask_hub
from drivetrain.trust import remote_code

AT_ONCE = 4096  # texts, whose encodings are Python's objects
DESCRIBED = ("tokenizer.json", "tokenizer_config.json", "config.json")  # any says what a tokenizer is


@dataclass(frozen=True)
class Tokens:
    """Token ids of N texts, end to end. ids: (total,) int32; offsets: (N + 1,) int64; segments: (total,) int8, the text
    of a pair that a token belongs to, or None for single texts; cut: (N,) bool, whether a text is longer than
    max_length."""

    ids: np.ndarray
    offsets: np.ndarray
    segments: np.ndarray | None
    cut: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def truncated(self) -> int:
        """The number of texts longer than max_length."""
        return int(self.cut.sum())

    @property
    def arrays(self) -> Arrays:
        segments = {} if self.segments is None else {"segments": self.segments}
        return {"ids": self.ids, "offsets": self.offsets, "cut": self.cut, **segments}


def load_tokenizer(given: str, field: str, trusted: bool = False) -> Any:
    """Loads a fast Transformers tokenizer from a folder, a hub id, or a bare WordPiece vocab.txt (BERT's).

    trusted: whether Python code that lies beside it may run.
    """
    import transformers

    path = Path(given).expanduser()
    if path.is_file():
        return _word_piece(path, field)
    if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
        return _as_published_by_openai(path)
    not_a_hub_id = given.startswith((".", "/", "~")) or len(path.parts) > 2 or path.suffix in {".txt", ".json"}
    if not_a_hub_id and not path.is_dir():
        raise problem(field, f"{given} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    if path.is_dir() and (path / "vocab.txt").is_file() and not any(map(Path.is_file, map(path.joinpath, DESCRIBED))):
        why = f"{given} holds vocab.txt, and no file that names the kind of tokenizer"
        fix = f"for BERT's WordPiece give {path / 'vocab.txt'} itself, for others add tokenizer.json"
        raise problem(field, why, fix)
    if path.is_dir():
        _check_has_tokenizer(path, given, field)
    else:
        ask_hub(given, field)
    place = str(path) if path.is_dir() else given
    if trusted:
        remote_code.check_allowed_code(place, field)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=trusted)
    except Exception as error:  # hub, network and format errors have no class in common
        if remote_code.is_refusal(error):
            raise remote_code.refusal(given, field) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        fix = "give a folder with tokenizer.json, or a vocab.txt; without a network nothing can come from the hub"
        raise problem(field, f"no tokenizer can be loaded from {given}: {reason}", fix) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-2's way: the attention mask hides the padding
    return tokenizer


def keep_no_texts(tokenizer: Any) -> None:
    """Lets a tokenizer of texts that strangers send remember none of them.

    BPE and Unigram keep the tokens of the first 10,000 words that they meet, and of whole texts of up to 256 bytes
    where nothing splits texts into words: 4 to 20 MiB, by which a server grows, for a seventh of their time at most.
    """
    from tokenizers import models

    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if isinstance(model, models.BPE | models.Unigram):
        model._resize_cache(0)


def _check_has_tokenizer(folder: Path, given: str, field: str) -> None:
    """Raises UserError if no file looks like a tokenizer's: Transformers would name the formats that it tried."""
    names, endings = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece"), (".model", ".tiktoken", ".bpe")
    if any(each.name.startswith(names) or each.suffix in endings for each in folder.iterdir()):
        return
    saved = sorted(folder.glob("checkpoints/*/tokenizer.json"))
    if saved:
        why, fix = f"{given} is the folder of a run", f"give one of its checkpoints, such as {saved[-1].parent}"
    else:
        apart = f", or {field.removesuffix('path')}tokenizer" if field.endswith("model.path") else ""
        why, fix = f"{given} holds no tokenizer", f"give a folder with tokenizer.json{apart}"
    raise problem(field, why, fix)


def tokenise(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Returns the tokens of the texts, from the cache if it holds them, and a warning if the cache cannot be used."""
    header = ["cut", max_length, pairs is not None, tokenizer.truncation_side]
    key = content_key(header, tokenizer, (*texts, *(pairs or ())))

    def whole(held: Arrays) -> bool:
        return len(held["offsets"]) == len(held["cut"]) + 1 == len(texts) + 1 and held["offsets"][-1] == len(
            held["ids"]
        )

    held, warning = cached(cache, key, lambda: _tokenise(tokenizer, texts, pairs, max_length).arrays, whole)
    return Tokens(held["ids"], held["offsets"], held.get("segments"), held["cut"]), warning


def _tokenise(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Tokens:
    starts = range(0, len(texts), AT_ONCE)
    parts = [
        tokenise_block(
            tokenizer,
            texts[start : start + AT_ONCE],
            None if pairs is None else pairs[start : start + AT_ONCE],
            max_length,
        )
        for start in starts
    ]
    lengths = np.concatenate([part.lengths for part in parts])
    segments = [part.segments for part in parts if part.segments is not None]
    return Tokens(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate(segments) if segments else None,
        np.concatenate([part.cut for part in parts]),
    )


def tokenise_block(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Tokens:
    """Returns the tokens of a block of texts. A text far over max_length is cut first, where its tokens stay the
    same."""
    if pairs is None:
        texts = [_beginning(tokenizer, text, max_length) for text in texts]
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
    ids = np.fromiter(chain.from_iterable(encoded["input_ids"]), np.int32, offsets[-1])
    segments = None
    if pairs is not None:
        segments = np.fromiter(chain.from_iterable(encoded["token_type_ids"]), np.int8, offsets[-1])
    if encoded.is_fast:
        cut = np.array([bool(each.overflowing) for each in encoded.encodings])
    else:
        cut = _is_truncated(tokenizer, texts, pairs, lengths, max_length)
    return Tokens(ids, offsets, segments, cut)


def _beginning(tokenizer: Any, text: str, max_length: int) -> str:
    """Returns the text, or a beginning of it with the same first max_length tokens.

    A token depends on its neighbourhood alone, but no tokenizer states on how much of it: a beginning is taken only if
    it has twice as many tokens as are kept, and one of twice its length has the same ones among those.
    """
    size = 8 * max_length + 2048
    if len(text) <= 8 * size or tokenizer.truncation_side != "right":
        return text
    while 4 * size < len(text):
        short, long = (text[: _before_space(text, end)] for end in (size, 2 * size))
        ids, more = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (short, long))
        if len(ids) >= 2 * max_length and ids[: 2 * max_length] == more[: 2 * max_length]:
            return long
        size *= 2
    return text


def _before_space(text: str, end: int) -> int:
    """Returns a place near `end` where a word ends; `end` itself if there is none."""
    start = end - 1024
    found = max(text.rfind(space, start, end) for space in (" ", "\n"))
    return found if found > start else end


def _is_truncated(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, lengths: Sequence[int], max_length: int
) -> np.ndarray:
    """Returns (N,) bool: for a slow tokenizer's texts of max_length tokens, whether they have more without the
    limit."""
    cut = np.zeros(len(texts), dtype=bool)
    full = [i for i, length in enumerate(lengths) if length == max_length]
    if full:
        again = tokenizer(
            [texts[i] for i in full],
            None if pairs is None else [pairs[i] for i in full],
            truncation=True,
            max_length=max_length + 1,
            return_attention_mask=False,
        )
        cut[full] = [len(ids) > max_length for ids in again["input_ids"]]
    return cut


def _word_piece(path: Path, field: str) -> Any:
    """Makes BERT's tokenizer from a file of one token a line. A vocabulary with capital letters keeps case, another
    lowers it."""
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


def _as_published_by_openai(folder: Path) -> Any:
    """Makes GPT-2's byte-level BPE from the file names of its first publication. Its last token ends a text."""
    from transformers import GPT2TokenizerFast

    merges = [tuple(line.split()) for line in (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:] if line]
    vocabulary = json.loads((folder / "encoder.json").read_text("utf-8"))
    tokenizer = GPT2TokenizerFast(vocab=vocabulary, merges=merges)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
