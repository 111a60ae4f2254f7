"""A text that is read in pieces has the tokens of the whole, whatever tokenizer it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data import block_work, long_text
from drivetrain.data.language import document_tokens, long_tokens
from drivetrain.data.language.document_tokens import stored_ids
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.data.long_text import LongText
from drivetrain.errors import UserError
from tests.properties import examples
from tests.small_tokenizers import WORDS, made

KINDS = ("gpt2", "bert", "llama", "sentencepiece unigram", "bytes")
TEXTS = {
    "words": " ".join(WORDS * 12),
    "lines": "\n".join(f"{word}\n\n  {word[::-1]}" for word in WORDS * 6),
    "no spaces": "房间hôtel" * 4_000,
    "one letter": "a" * 40_000,
    "marks that join": "e\u0301o\u0308 " * 5_000,
    "emoji": "👩\u200d👩\u200d👧 flag 🇩🇪 " * 2_000,
}
MIXED = [*WORDS[:9], " ", "\n", "\t ", "é", "房", "👩\u200d👧", "''s", "0", "a" * 900]


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with mock.patch.object(long_text, "PIECE", 12_011):
        yield


def tokenizer_of(kind: str) -> Any:
    return byte_tokenizer() if kind == "bytes" else made(kind)


def written(folder: Path, text: str) -> LongText:
    (folder / "long.txt").write_bytes(text.encode())
    return LongText(folder / "long.txt", "workload.data.train")


def whole(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    for number, text in enumerate(TEXTS.values()):
        ids, warning = stored_ids([written(tmp_path, text)], [], tokenizer, tmp_path / f"cache-{number}")
        assert ids.tolist() == whole(tokenizer, text)
        assert warning is None


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_ordinary_texts_are_never_tokenised_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was tokenised whole")

    monkeypatch.setattr(long_tokens, "_whole", fail)
    for number, name in enumerate(("words", "lines", "emoji")):
        stored_ids([written(tmp_path, TEXTS[name])], [], tokenizer_of(kind), tmp_path / f"cache-{number}")


@settings(max_examples=examples(20), deadline=None)
@given(parts=st.lists(st.sampled_from(MIXED), min_size=50, max_size=400))
def test_any_mixture_of_characters_has_them_too(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    folder, text = tmp_path_factory.mktemp("mixed"), "".join(parts * 60)
    tokenizer = made("gpt2")
    ids, _ = stored_ids([written(folder, text)], [], tokenizer, folder / "cache")
    assert ids.tolist() == whole(tokenizer, text)


def test_documents_end_with_the_token_given_whether_they_are_long_or_not(tmp_path: Path) -> None:
    tokenizer = made("gpt2")
    contents = ["short one", written(tmp_path, TEXTS["words"]), "short two"]
    ids, _ = stored_ids(contents, [1], tokenizer, tmp_path / "cache")
    texts = ["short one", TEXTS["words"], "short two"]
    assert ids.tolist() == [token for text in texts for token in [*whole(tokenizer, text), 1]]


def test_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    tokenizer = made("llama")
    ids, _ = stored_ids([written(tmp_path, TEXTS["words"])], [], tokenizer, tmp_path / "cache")
    assert ids.tolist() == whole(tokenizer, TEXTS["words"])


def test_a_second_start_reads_the_text_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("gpt2")
    first, _ = stored_ids([written(tmp_path, TEXTS["words"])], [], tokenizer, tmp_path / "cache")

    def fail(*_: Any) -> str:
        raise AssertionError("the text was read")

    monkeypatch.setattr(LongText, "span", fail)
    again, _ = stored_ids([LongText(tmp_path / "long.txt", "")], [], tokenizer, tmp_path / "cache")
    np.testing.assert_array_equal(first, again)
    assert isinstance(again.base, memoryview)
    assert not list((tmp_path / "cache").glob("*/block-*"))


def test_what_is_not_utf_8_is_reported_with_its_line(tmp_path: Path) -> None:
    text = written(tmp_path, "")
    text.path.write_bytes(b"line\n" * 20_000 + b"caf\xe9\n" + b"line\n" * 20_000)
    with pytest.raises(UserError, match="is not UTF-8: line 20001 cannot be read"):
        stored_ids([text], [], made("gpt2"), tmp_path / "cache")


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    tokenizer = made("gpt2")
    ids, _ = stored_ids([written(tmp_path, "\ufeff" + TEXTS["words"])], [], tokenizer, tmp_path / "cache")
    assert ids.tolist() == whole(tokenizer, TEXTS["words"])


def test_a_disk_without_room_for_the_tokens_of_a_text_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(tmp_path, TEXTS["words"])
    size = text.path.stat().st_size
    wanted = []
    monkeypatch.setattr(document_tokens, "check_room", lambda _, room, __: wanted.append(room))
    stored_ids([text], [], byte_tokenizer(), tmp_path / "bytes")
    stored_ids([text], [], made("gpt2"), tmp_path / "gpt2")
    assert wanted[0] == pytest.approx(size * (4 + 1))  # a token a byte: in the array, and in the pieces' files
    assert wanted[1] == pytest.approx(len(whole(made("gpt2"), TEXTS["words"])) * (4 + 2), rel=0.1)
