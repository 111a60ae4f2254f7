from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from drivetrain.data.language.vocabularies import UNKNOWN, bpe_tokenizer, byte_tokenizer, character_tokenizer
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import UserError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["First Citizen:\nBefore we proceed any further, hear me speak .\n\n", "  What ? Don't  ...\té房🙂\r\n", ""]
MAKERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: byte_tokenizer(SPECIAL),
    "characters": lambda: character_tokenizer(TEXTS, SPECIAL),
    "bpe": lambda: bpe_tokenizer(TEXTS * 3, 300, SPECIAL),
}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}
everything = st.text(st.characters(exclude_categories=["Cs"]))
known = st.text(st.sampled_from(sorted(set("".join(TEXTS)))))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


@settings(deadline=None)
@given(everything)
def test_bytes_are_their_own_ids_and_come_back(text: str) -> None:
    ids = ids_of(TOKENIZERS["bytes"], text)
    assert ids == list(text.encode())
    assert TOKENIZERS["bytes"].decode(ids) == text


@settings(deadline=None)
@given(known)
def test_characters_are_numbered_in_their_order_and_come_back(text: str) -> None:
    order = sorted(set("".join(TEXTS)))
    ids = ids_of(TOKENIZERS["characters"], text)
    assert ids == [order.index(character) for character in text]
    assert TOKENIZERS["characters"].decode(ids) == text


@settings(deadline=None)
@given(st.one_of(everything, known))
def test_merged_bytes_come_back(text: str) -> None:
    assert TOKENIZERS["bpe"].decode(ids_of(TOKENIZERS["bpe"], text)) == text


def test_an_unknown_character_is_unknown_and_does_not_vanish() -> None:
    tokenizer = TOKENIZERS["characters"]
    ids = ids_of(tokenizer, "meß∂")
    assert ids[2:] == [tokenizer.unk_token_id] * 2 == [len(set("".join(TEXTS)))] * 2
    assert tokenizer.decode(ids) == "me" + UNKNOWN * 2


@pytest.mark.parametrize("name", MAKERS)
def test_special_tokens_come_last_and_the_first_ends_and_pads(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    last = len(tokenizer) - len(SPECIAL)
    assert ids_of(tokenizer, "".join(SPECIAL)) == [last, last + 1, last + 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == last
    assert tokenizer.decode([last + 1, *ids_of(tokenizer, "me"), last + 2], skip_special_tokens=True) == "me"


def test_without_special_tokens_there_are_none() -> None:
    assert len(byte_tokenizer()) == 256
    assert byte_tokenizer().eos_token is None
    assert len(character_tokenizer(["ab"])) == 3


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_tokenizer_loads_elsewhere_and_gives_the_same(name: str, tmp_path: Path) -> None:
    TOKENIZERS[name].save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    text = "<|im_start|>  hear me .\n\té房<|im_end|>\n"
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path), "f")):
        ids = ids_of(loaded, text)
        assert ids == ids_of(TOKENIZERS[name], text)
        assert loaded.decode(ids) == text
        assert (loaded.eos_token, loaded.pad_token, len(loaded)) == (SPECIAL[0], SPECIAL[0], len(TOKENIZERS[name]))


def test_merges_fill_the_vocabulary_and_are_made_the_same_way_twice() -> None:
    texts = ["the cat and the hat and the bat " * 20]
    tokenizer = bpe_tokenizer(texts, 270, SPECIAL)
    assert len(tokenizer) == 270
    assert "Ġthe" in tokenizer.get_vocab()
    assert tokenizer.get_vocab() == bpe_tokenizer(texts, 270, SPECIAL).get_vocab()
    assert len(bpe_tokenizer(["ab"], 1000)) < 300  # a text too short for more merges


def test_what_cannot_become_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"258 < 256 bytes \+ 3 special tokens\s+give 259 or more"):
        bpe_tokenizer(TEXTS, 258, SPECIAL)
    for make in (character_tokenizer, lambda texts, field: bpe_tokenizer(texts, 300, field=field)):
        for texts in ([], ["", ""]):
            with pytest.raises(UserError, match="all empty") as caught:
                make(texts, field="workload.here")  # type: ignore[operator]
            assert caught.value.problems[0].field == "workload.here"


def test_a_book_is_encoded_in_seconds_and_comes_back(shared_data: Path) -> None:
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()
    made = {
        "bytes": byte_tokenizer(SPECIAL),
        "characters": character_tokenizer([text], SPECIAL),
        "bpe": bpe_tokenizer([text[:100_000]], 1000, SPECIAL),
    }
    assert len(made["characters"]) == 65 + 1 + len(SPECIAL)
    text = text[:300_000]
    for name, tokenizer in made.items():
        before = time.process_time()
        ids = ids_of(tokenizer, text)
        seconds = time.process_time() - before
        assert seconds < 2, name  # about 0.35 s where this was written, and 1.1 to 1.3 s for the whole book
        assert tokenizer.decode(ids) == text
