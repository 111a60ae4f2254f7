"""Small tokenizers of the kinds that model families have, trained on a few words."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [f"word{number} good hôtel, it's 房间 {number * 7919}!" for number in range(300)]


def made(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of the kind that a model family has."""
    special: dict[str, Any] = {"special_tokens": ["<unk>", "<pad>"], "vocab_size": 400, "show_progress": False}
    if kind == "bert":
        tokenizer, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer(**special)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    elif kind == "sentencepiece unigram":
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **special)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "llama":  # merges run over the whole text: there are no words
        tokenizer, trainer = Tokenizer(models.BPE(unk_token="<unk>")), trainers.BpeTrainer(**special)
        replaced = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    else:
        tokenizer, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(**special)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2")
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(WORDS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
