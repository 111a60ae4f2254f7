"""The tokenizer of a language model, with its chat template: loaded, or made from the training data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

from drivetrain.config.language import LanguageModel
from drivetrain.data.array_store import Writer, default_root, stored
from drivetrain.data.language.chat import ChatTemplate, missing_tokens
from drivetrain.data.language.contents import Contents
from drivetrain.data.language.template_sources import template_text
from drivetrain.data.language.vocabularies import (
    END_OF_TEXT,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    restored,
)
from drivetrain.data.long_text import LongText
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem

FIELD, SIZE, TEMPLATE = "workload.model.tokenizer", "workload.model.vocabulary_size", "workload.data.template"
MADE = ("bytes", "characters", "bpe")


@dataclass(frozen=True)
class MadeTokenizer:
    """A tokenizer. template: None for texts. added: tokens that the template needs and the tokenizer lacked."""

    tokenizer: Any
    template: ChatTemplate | None
    added: list[str]


def num_ids(tokenizer: Any) -> int:
    """The rows that an embedding needs: one more than the largest id, even if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def make_tokenizer(config: LanguageModel, contents: Contents) -> MadeTokenizer:
    """Loads or makes the tokenizer. contents: all texts of the training data, for one made of them; none of a
    stream."""
    model, chats = config.model, config.has_conversations
    given = model.tokenizer or model.path or "bytes"
    if model.vocabulary_size is not None and given != "bpe":
        raise problem(SIZE, f"the tokenizer is {given}", "leave it out, or give tokenizer=bpe")
    if given in MADE:
        tokenizer = _made(given, config, contents)
    else:
        field = FIELD if model.tokenizer else "workload.model.path"
        trusted = model.trust_tokenizer_code if model.tokenizer else model.trust_remote_code
        tokenizer = load_tokenizer(given, field, trusted)
    if not chats:
        if config.data.template is not None:
            raise problem(TEMPLATE, "texts have no chat template", "leave it out, or give workload.stage=sft")
        return MadeTokenizer(tokenizer, None, [])
    template = ChatTemplate(tokenizer, config.data.template, TEMPLATE)
    added = missing_tokens(template, tokenizer)
    if added:
        tokenizer.add_special_tokens({"extra_special_tokens": added}, replace_extra_special_tokens=False)
    template.install()
    return MadeTokenizer(tokenizer, template, added)


class Pieces:
    """Texts, long ones in pieces, which can be iterated several times."""

    def __init__(self, *contents: Iterable[str | LongText]) -> None:
        self._contents = contents

    def __iter__(self) -> Iterator[str]:
        for content in chain(*self._contents):
            yield from content.pieces() if isinstance(content, LongText) else (content,)


def _made(kind: str, config: LanguageModel, contents: Contents) -> Any:
    """Makes a tokenizer, with a token that ends a text, unless all is one text."""
    special = [END_OF_TEXT] if config.has_conversations or len(list(islice(contents, 2))) != 1 else []
    if kind == "bytes":
        return byte_tokenizer(special)
    if config.data.stream:
        why = f"a stream is not read before it is trained on, so that {kind} cannot be made of it"
        raise problem(FIELD, why, "give bytes, or a tokenizer's folder")
    if kind == "bpe" and config.model.vocabulary_size is None:
        raise problem(SIZE, "is required for tokenizer=bpe", "give e.g. 8000")
    if not contents.are_large:
        return _trained(kind, config, contents, special)
    root = config.data.cache or default_root()
    held = [*contents.identities(root), *_of_template(config.data.template, special)]
    key = blake2b(json.dumps([kind, config.model.vocabulary_size, special, held]).encode(), digest_size=20).hexdigest()

    def build(folder: Path) -> None:
        print(f"making a tokenizer ({kind}) of the texts, which the next start need not", file=sys.stderr, flush=True)
        made = _trained(kind, config, contents, special)
        with Writer(folder) as writer:
            writer.finish({"tokenizer": made.backend_tokenizer.to_str()})

    found, _ = stored(root, f"tokenizer-{key}", build)  # a warning comes with the tokens too
    return restored(found.facts["tokenizer"], special)


def _trained(kind: str, config: LanguageModel, contents: Contents, special: Sequence[str]) -> Any:
    if kind == "characters":
        return character_tokenizer(Pieces(contents, _of_template(config.data.template, special)), special, FIELD)
    assert config.model.vocabulary_size is not None
    return bpe_tokenizer(Pieces(contents), config.model.vocabulary_size, special, FIELD)


def _of_template(source: str | None, special: Sequence[str]) -> list[str]:
    """Returns a chat template's text beside the contents: a vocabulary without these characters would read them as
    unknown ones."""
    if source is None:
        return []
    _, text = template_text(byte_tokenizer(special), source, TEMPLATE)
    return [text, "\n"]  # a source writes it as two characters
