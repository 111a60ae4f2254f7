"""Makes a WordPiece vocabulary of texts, for a BERT that is trained from scratch.

Schuster and Nakajima 2012, "Japanese and Korean Voice Search"; the learning by pair frequencies is the tokenizers
package's. As in BERT, each Chinese character is a token of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def vocabulary(texts: Iterable[str], size: int) -> list[str]:
    """Returns the tokens in the order of their ids, as in a vocab.txt: the special ones, then others, at most `size` in
    all."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(iter(texts), trainer)
    found = tokenizer.get_vocab()
    return sorted(found, key=lambda token: found[token])
