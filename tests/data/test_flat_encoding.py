"""Ids and places of tokens against the tokenizer's own, over vocabularies of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from drivetrain.data.byte_lengths import table_of
from drivetrain.data.flat_encoding import encode
from drivetrain.data.language.vocabularies import byte_tokenizer
from tests.small_tokenizers import WORDS, made

TEXTS = [
    "<|im_start|>user\nwho is it?<|im_end|>\n<|im_start|>assistant\nword7 good<|im_end|>\n",
    "",
    "hôtel 房间 🙂🙂 " + "e\u0301 \u2028\ufeff x",
    "<|im_end|>  \n\n  it's\t<|im_start|>12345 ,, hôtel<|im_start|>",
    "ASCII alone, again and again",
]


def byte_level(change: Any = lambda _: None, alphabet: bool = True, **added: Any) -> PreTrainedTokenizerFast:
    """As Qwen's and Llama 3's: byte-level BPE behind a split by a pattern."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(pattern=" ?[^\\s]+|\\s+", behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(each, **added) for each in ("<|im_start|>", "<|im_end|>")])
    change(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|im_end|>")


def with_nfc(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def with_lower_case(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def with_trimmed_offsets(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def with_prefix_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


SUMMED = {
    "plain": byte_level(),
    "NFC": byte_level(with_nfc),
    "bytes": byte_tokenizer(["<|im_start|>", "<|im_end|>"]),
    "bytes alone": byte_tokenizer(),
}
ASKED = {
    "lower case": byte_level(with_lower_case),
    "trimmed offsets": byte_level(with_trimmed_offsets),
    "prefix space": byte_level(with_prefix_space),
    "added tokens that strip": byte_level(lstrip=True),
    "few letters": byte_level(alphabet=False),
    **{kind: made(kind) for kind in ("bert", "sentencepiece unigram", "llama", "gpt2")},
}


def agrees(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    wanted = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    found = encode(tokenizer, texts, spans=True)
    assert found.ids.tolist() == [token for each in wanted["input_ids"] for token in each]
    assert found.lengths.tolist() == [len(each) for each in wanted["input_ids"]]
    assert found.spans is not None
    assert found.spans.tolist() == [list(span) for each in wanted["offset_mapping"] for span in each]
    np.testing.assert_array_equal(encode(tokenizer, texts).ids, found.ids)


@pytest.mark.parametrize("kind", SUMMED)
def test_byte_level_tokens_stand_where_the_tokenizer_says(kind: str) -> None:
    assert table_of(SUMMED[kind]) is not None
    agrees(SUMMED[kind], TEXTS)
    agrees(SUMMED[kind], TEXTS[-1:])
    agrees(SUMMED[kind], [""])


def test_texts_whose_tokens_are_their_bytes_are_not_given_to_the_tokenizer() -> None:
    table = table_of(SUMMED["bytes"])
    assert table is not None
    ids, lengths = table.encoded(["aé", "", "b"]) or ([], [])
    assert (list(ids), list(lengths)) == ([*"aéb".encode()], [3, 0, 1])
    assert table.encoded(["a", "b<|im_end|>"]) is None  # a token of its own, which the tokenizer finds
    merged = table_of(SUMMED["plain"])
    assert merged is not None
    assert merged.encoded(["a"]) is None


@pytest.mark.parametrize("kind", ASKED)
def test_other_tokenizers_are_asked(kind: str) -> None:
    assert table_of(ASKED[kind]) is None
    agrees(ASKED[kind], TEXTS)


def test_tokens_that_are_added_later_are_counted() -> None:
    tokenizer = byte_level()
    agrees(tokenizer, ["hôtel <|new|> good"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    agrees(tokenizer, ["hôtel <|new|> good"])


def test_a_length_that_an_earlier_call_left_with_the_tokenizer_does_not_count() -> None:
    tokenizer = byte_level()
    encode(tokenizer, TEXTS)
    tokenizer(TEXTS, max_length=2, truncation=True, padding=True)
    agrees(tokenizer, TEXTS)


def test_special_tokens_that_are_to_be_split_are_split() -> None:
    tokenizer = byte_level()
    encode(tokenizer, TEXTS)
    tokenizer.split_special_tokens = True
    agrees(tokenizer, TEXTS)


class Backwards(PreTrainedTokenizerFast):
    """A tokenizer with code of its own, as `trust_tokenizer_code` runs it."""

    def _encode_plus(self, text: Any, *rest: Any, **options: Any) -> Any:
        return super()._encode_plus([each[::-1] for each in text], *rest, **options)


def test_a_tokenizer_with_code_of_its_own_is_asked() -> None:
    plain = byte_level()
    own = Backwards(tokenizer_object=plain.backend_tokenizer, pad_token="<|im_end|>")
    assert table_of(own) is None
    agrees(own, TEXTS)
    assert encode(own, ["abc good"]).ids.tolist() == plain("doog cba", add_special_tokens=False)["input_ids"]
