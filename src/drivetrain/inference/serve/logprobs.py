"""Log-probabilities in the forms of OpenAI's API, with tokens as texts and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from drivetrain.data.byte_lengths import characters_of_bytes
from drivetrain.generation.requests import Logprob

LOWEST = -9999.0  # JSON has no infinity; OpenAI's own figure


class TokenTexts:
    """The texts of single tokens. A token that is no whole character has the text bytes:\\x.., as vLLM and OpenAI
    write it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, bytes] = {}
        self._bytes = {char: byte for byte, char in enumerate(characters_of_bytes())}

    @cached_property
    def _levels(self) -> bool:
        """Whether tokens are written in the signs that stand for bytes. Read where it is needed: a large vocabulary
        takes a while, and slow tokenizers have none of it."""
        return "ByteLevel" in str(getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", ""))

    def text(self, token: int) -> str:
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token: int) -> bytes:
        if token not in self._found:
            self._found[token] = self._raw(token)
        return self._found[token]

    def _raw(self, token: int) -> bytes:
        piece: str = self._tokenizer.convert_ids_to_tokens(token) or ""
        if self._levels and all(char in self._bytes for char in piece):
            return bytes(self._bytes[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's bytes
            return bytes([int(piece[3:5], 16)])
        if token in self._tokenizer.added_tokens_decoder or self._levels:
            return piece.encode()
        return piece.replace("▁", " ").encode()


def chat_logprobs(logprobs: Sequence[Logprob], texts: TokenTexts) -> dict[str, Any]:
    """Returns the `logprobs` of a choice of chat."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": max(value, LOWEST), "bytes": list(texts.raw(token))}

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(*alternative) for alternative in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: Sequence[tuple[int, Logprob | None]], texts: TokenTexts, offset: int) -> dict[str, Any]:
    """Returns the `logprobs` of a choice of text completions. logprobs: with their tokens; the first token of a prompt
    has none. offset: characters before the first of them."""
    tokens, offsets = [], []
    for token, _ in logprobs:
        tokens.append(texts.text(token))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [None if each is None else max(each.logprob, LOWEST) for _, each in logprobs],
        "top_logprobs": [None if each is None else _top(each, texts) for _, each in logprobs],
        "text_offset": offsets,
    }


def _top(logprob: Logprob, texts: TokenTexts) -> dict[str, float]:
    """Returns text → log-probability, of the likeliest tokens and the chosen one; of tokens with one text, the
    likelier."""
    found: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
        text = texts.text(token)
        found[text] = max(found.get(text, LOWEST), value)
    return found
