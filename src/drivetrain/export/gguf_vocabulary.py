"""A tokenizer in GGUF's form: its tokens, its merges, and the name by which llama.cpp knows how it splits text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.errors import Problem, UserError

# how tokenizer.json splits text before merging (public tokenizers' own patterns) → llama.cpp's name of the same
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
    "": "gpt-2",  # its pattern is part of the byte-level step
}
DIGITS_APART = "smollm"
SPACE = "\u2581"  # as which llama.cpp keeps a space in tokens of SentencePiece's kinds
UNMERGED = 10**6  # the score, negated, of tokens that no merge makes


def write_vocabulary(tokenizer: Any, rows: int, ends: frozenset[int], writer: Any) -> int | None:
    """Adds a Transformers tokenizer to a GGUFWriter. rows: of the embedding, which may exceed the tokenizer's tokens.
    ends: tokens that end an answer. Returns the token that llama.cpp takes once for several unknown characters in a
    row; None where each text has bytes. Raises UserError for a kind of tokenizer that GGUF does not hold here."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if model["type"] != "BPE":
        why = f"its tokenizer is of the kind {model['type']}, and gguf takes BPE and single characters here"
        raise UserError([Problem("--to", why, "give transformers")])
    if model.get("byte_fallback"):
        _write_pieces(backend, rows, writer)
    elif _is_of_characters(backend):
        _write_characters(backend, rows, writer)
    else:
        _write_bytes(backend, rows, writer)
    _write_special(tokenizer, ends, writer)
    return tokenizer.unk_token_id if _is_of_characters(backend) else None


def _write_bytes(backend: Mapping[str, Any], rows: int, writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_of(backend))
    tokens, types = _tokens(backend, rows)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [each if isinstance(each, str) else " ".join(each) for each in backend["model"]["merges"]]
    # llama.cpp wants the list to be there: a pair of letters that no token is made of changes nothing
    writer.add_token_merges(merges or ["\u0120 \u0120"])


def _write_pieces(backend: Mapping[str, Any], rows: int, writer: Any) -> None:
    """Adds a BPE that came from SentencePiece. Its pieces are in the order of their scores."""
    from gguf import TokenType

    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    tokens, types = _tokens(backend, rows)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    ranks = {"".join(each if isinstance(each, list) else each.split(" ")): n for n, each in _ranked(backend)}
    others = [UNMERGED if kind == TokenType.NORMAL else 0 for kind in types]
    scores = [ranks.get(token, other) for token, other in zip(tokens, others, strict=True)]
    writer.add_token_scores([-float(each) for each in scores])
    writer.add_add_space_prefix(_adds_space(backend))


def _is_of_characters(backend: Mapping[str, Any]) -> bool:
    """Returns whether each character of a text is a token by itself, as in tokenizers made by `tokenizer: characters`:
    there are no merges, and no step turns the text into bytes before."""
    model = backend["model"]
    plain = not backend["pre_tokenizer"] and not backend["normalizer"] and not model.get("byte_fallback")
    return plain and not model["merges"] and bool(model.get("unk_token"))


def _write_characters(backend: Mapping[str, Any], rows: int, writer: Any) -> None:
    """Adds characters as T5's kind of tokenizer, the only one of llama.cpp's that has a token for unknown characters:
    its byte-level BPE drops them. All scores are equal, as there is one way only to split a text into characters."""
    writer.add_tokenizer_model("t5")
    tokens, types = _tokens(backend, rows)
    writer.add_token_list([SPACE if token == " " else token for token in tokens])
    writer.add_token_types(types)
    writer.add_token_scores([-1.0] * rows)
    writer.add_add_space_prefix(False)
    writer.add_remove_extra_whitespaces(False)


def _ranked(backend: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yields merges from the last to the first, so that of two that make one token the earlier counts."""
    yield from reversed(list(enumerate(backend["model"]["merges"])))


def _adds_space(backend: Mapping[str, Any]) -> bool:
    steps = _steps(backend["normalizer"], "normalizers") + _steps(backend["pre_tokenizer"], "pretokenizers")
    return any(
        each["type"] == "Prepend" or (each["type"] == "Metaspace" and each.get("prepend_scheme", "always") != "never")
        for each in steps
    )


def _split_of(backend: Mapping[str, Any]) -> str:
    steps = _steps(backend["pre_tokenizer"], "pretokenizers")
    if any(each["type"] == "Digits" and each.get("individual_digits") for each in steps):
        return DIGITS_APART
    pattern = "".join(each["pattern"].get("Regex", "") for each in steps if each["type"] == "Split")
    if pattern not in SPLITS:
        why = f"llama.cpp has no name known here for how its tokenizer splits text: {pattern[:80]}"
        raise UserError([Problem("--to", why, "give transformers, and convert that by convert_hf_to_gguf.py")])
    return SPLITS[pattern]


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    return [] if step is None else list(step.get(inner, [step]))


def _tokens(backend: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Returns all tokens by id, and each one's type; rows of the embedding without a token are unused."""
    from gguf import TokenType

    tokens, types = [f"[UNUSED{number}]" for number in range(rows)], [int(TokenType.UNUSED)] * rows
    unknown = backend["model"].get("unk_token")
    for token, number in backend["model"]["vocab"].items():
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        kind = TokenType.UNKNOWN if token == unknown else TokenType.BYTE if is_byte else TokenType.NORMAL
        tokens[number], types[number] = token, int(kind)
    for added in backend["added_tokens"]:
        number, kind = added["id"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[number] = added["content"]
        if types[number] != TokenType.UNKNOWN:
            types[number] = int(kind)
    return tokens, types


def _write_special(tokenizer: Any, ends: frozenset[int], writer: Any) -> None:
    last = tokenizer.eos_token_id if tokenizer.eos_token_id in ends or not ends else min(ends)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, last),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_eot_token_id, next((each for each in sorted(ends) if each != last), None)),
    ):
        if number is not None:
            add(number)
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        # llama.cpp takes token 11 for the first one of a text where the file names none
        absent = "" if tokenizer.bos_token_id is not None else "{%- set bos_token = '' -%}"
        writer.add_chat_template(absent + tokenizer.chat_template)
