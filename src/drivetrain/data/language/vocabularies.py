"""Makes tokenizers from the data, for models that are trained from scratch: bytes, characters, or byte-level BPE.

Each is a fast Transformers tokenizer, so it is saved as tokenizer.json and loads wherever AutoTokenizer does. Bytes and
characters are BPE models without merges and without pre-tokenisation: a word-level model over split characters gives
the same ids, but takes some times as long.

decode(encode(text)) == text for every text of the first and the third, and for texts of known characters of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drivetrain.data.byte_lengths import BYTES, characters_of_bytes
from drivetrain.errors import problem

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"


def byte_tokenizer(special: Sequence[str] = ()) -> Any:
    """Returns a tokenizer whose ids 0 to 255 are the bytes of the text's UTF-8. `special` tokens follow; the first is
    eos and pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, special)


def character_tokenizer(
    texts: Iterable[str], special: Sequence[str] = (), field: str = "workload.model.tokenizer"
) -> Any:
    """Returns a tokenizer whose ids are positions among the texts' distinct characters, sorted; then "<unk>"; then the
    `special` tokens, of which the first is eos and pad.

    "<unk>" is always there: without it a character that the texts lack would silently vanish from a prompt. Raises
    UserError if the texts are empty.
    """
    from tokenizers import Tokenizer, decoders, models

    _check_not_empty(texts, field)
    found: set[str] = set()
    for text in texts:
        found.update(text)
    characters = sorted(found)
    vocabulary = {character: number for number, character in enumerate([*characters, UNKNOWN])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()  # without a decoder, spaces would be put between tokens
    return _finished(tokenizer, special, unk_token=UNKNOWN)


def bpe_tokenizer(
    texts: Iterable[str], vocabulary_size: int, special: Sequence[str] = (), field: str = "workload.model.tokenizer"
) -> Any:
    """Returns a byte-level BPE (Radford et al. 2019, section 2.2), trained on the texts. vocabulary_size counts the 256
    bytes, the merges and the `special` tokens, which come last and of which the first is eos and pad.

    Texts too short for that many merges give a smaller vocabulary. Raises UserError if the texts are empty, or if the
    bytes and the special tokens alone are more than vocabulary_size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    _check_not_empty(texts, field)
    least = BYTES + len(special)
    if vocabulary_size < least:
        why = f"a vocabulary of {vocabulary_size} < {BYTES} bytes + {len(special)} special tokens"
        raise problem(field, why, f"give {least} or more; each token above that is a merge of two others")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer, special)


def restored(saved: str, special: Sequence[str]) -> Any:
    """Restores such a tokenizer from its JSON: `backend_tokenizer.to_str()`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(saved)
    unknown = {"unk_token": UNKNOWN} if tokenizer.model.unk_token else {}
    return _finished(tokenizer, special, **unknown)


def _finished(tokenizer: Any, special: Sequence[str], **named: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    if special:
        tokenizer.add_special_tokens(list(special))  # here and not below, where their order would be another
        named = {**named, "eos_token": special[0], "pad_token": special[0]}
    # cleaning up would turn "a ." into "a."
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(special[1:]),
        **named,
    )


def _check_not_empty(texts: Iterable[str], field: str) -> None:
    if not any(texts):
        raise problem(field, "a vocabulary cannot be made of texts that are all empty", "give texts with characters")
