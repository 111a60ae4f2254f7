"""Texts of tokens as they come: whole characters, nothing of a stop string, and joined the decoded whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.generation.text_stream import TextStream
from tests.small_tokenizers import made

BYTES = byte_tokenizer(["<|end|>"])
TEXTS = st.text(st.sampled_from("ab é房😀\n "), max_size=12)


def pieces(ids: Sequence[int], stops: Sequence[str] = (), tokenizer: object = BYTES) -> list[str]:
    stream = TextStream(lambda each: tokenizer.decode(each), stops)  # type: ignore[attr-defined]
    found = []
    for each in ids:
        found.append(stream.push(each))
        if stream.stopped:
            break
    return [*found, stream.flush()]


@given(TEXTS)
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    found = pieces(list(text.encode()))
    assert "".join(found) == text
    expected = [each for character in text for each in [*[""] * (len(character.encode()) - 1), character]]
    assert found == [*expected, ""]


@given(TEXTS, st.lists(TEXTS.filter(bool), max_size=3))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    """The first that is complete; of several that are complete with one character, the one that begins first."""
    begun = (text[:length] for length in range(1, len(text) + 1))
    ended = ([each.find(stop) for stop in stops if stop in each] for each in begun)
    expected = next((text[: min(places)] for places in ended if places), text)
    assert "".join(pieces(list(text.encode()), stops)) == expected


def test_what_may_begin_a_stop_string_waits() -> None:
    assert pieces(list(b"one\n\ntwo"), ["\n\n"]) == ["o", "n", "e", "", "", ""]
    assert pieces(list(b"one\ntwo"), ["\n\n"]) == ["o", "n", "e", "", "\nt", "w", "o", ""]
    assert pieces(list(b"one\n"), ["\n\n"]) == ["o", "n", "e", "", "\n"]


@given(st.binary(max_size=12))
def test_bytes_that_are_no_text_are_marked_and_none_is_lost(given: bytes) -> None:
    assert "".join(pieces(list(given))) == given.decode(errors="replace")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "sentencepiece unigram", "bert"])
def test_the_pieces_of_each_kind_of_tokenizer_are_its_text(kind: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer("word7 good hôtel, it's 房间 word299! good")["input_ids"]
    assert "".join(pieces(ids, (), tokenizer)) == tokenizer.decode(ids)
