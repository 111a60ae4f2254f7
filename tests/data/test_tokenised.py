from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from drivetrain.data import tokenised
from drivetrain.data.tokenised import Tokens, load_tokenizer, tokenise
from drivetrain.errors import UserError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# real vocabularies hold U+2028 and the like, which str.splitlines takes for line ends
VOCABULARY = [*SPECIAL, "\u2028", "\x85", "good", "bad", "hotel", "##s", "房", "间", "好"]
TEXTS = ["Good HOTELS", "房间好", "bad bad bad bad", "good"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return file


@pytest.fixture
def tokenizer(vocabulary: Path) -> Any:
    return load_tokenizer(str(vocabulary), "F")


@pytest.fixture
def tokenised_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that texts were tokenised rather than read from the cache."""
    calls: list[int] = []
    original = tokenised._tokenise

    def counted(tokenizer: Any, texts: Any, pairs: Any, max_length: int) -> Tokens:
        calls.append(len(texts))
        return original(tokenizer, texts, pairs, max_length)

    monkeypatch.setattr(tokenised, "_tokenise", counted)
    return calls


def rows(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])]


def test_a_bare_vocabulary_gives_the_ids_of_its_lines(tokenizer: Any) -> None:
    line = {token: number for number, token in enumerate(VOCABULARY)}
    expected = [line[t] for t in ["[CLS]", "good", "hotel", "##s", "房", "间", "[SEP]"]]
    assert tokenizer("Good hotels 房间")["input_ids"] == expected
    assert len(tokenizer) == len(VOCABULARY)


def test_the_chinese_vocabulary_gives_what_tokenizers_own_word_piece_gives(shared_data: Path) -> None:
    file = shared_data / "vocab" / "bert-base-chinese" / "vocab.txt"
    ours, reference = load_tokenizer(str(file), "F"), BertWordPieceTokenizer(str(file), lowercase=True)
    assert len(ours) == 21_128
    for text in ("房间很好，服务不错 ABC hello É", "１２３ Ⅳ", "距离川沙公路较近,但是公交指示不对"):
        assert ours(text)["input_ids"] == reference.encode(text).ids
    assert ours.convert_tokens_to_ids(["[PAD]", "[CLS]", "我"]) == [0, 101, 2769]  # published with bert-base-chinese


def test_a_vocabulary_with_capitals_keeps_case(tmp_path: Path) -> None:
    (tmp_path / "cased.txt").write_text("\n".join([*SPECIAL, "Good", "good"]))
    assert load_tokenizer(str(tmp_path / "cased.txt"), "F")("Good good")["input_ids"] == [2, 5, 6, 3]


def test_tokens_lie_end_to_end(tokenizer: Any, tmp_path: Path) -> None:
    tokens, warning = tokenise(tokenizer, TEXTS, None, 16, tmp_path / "cache")
    assert warning is None
    assert rows(tokens) == tokenizer(TEXTS)["input_ids"]
    assert tokens.lengths.tolist() == [5, 5, 6, 3]
    assert tokens.ids.dtype == np.int32
    assert tokens.segments is None


def test_pairs_carry_which_text_a_token_is_of(tokenizer: Any, tmp_path: Path) -> None:
    tokens, _ = tokenise(tokenizer, ["good", "bad"], ["房 间", "好"], 16, tmp_path)
    assert tokens.segments is not None
    assert tokens.segments.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]


def test_only_texts_that_lose_tokens_count_as_truncated(tokenizer: Any, tmp_path: Path) -> None:
    tokens, _ = tokenise(tokenizer, TEXTS, None, 5, tmp_path)
    assert tokens.lengths.max() == 5
    assert tokens.truncated == 1  # the two of exactly five tokens lost none


def test_texts_are_tokenised_once(vocabulary: Path, tmp_path: Path, tokenised_anew: list[int]) -> None:
    first, _ = tokenise(load_tokenizer(str(vocabulary), "F"), TEXTS, None, 5, tmp_path / "cache")
    again, warning = tokenise(load_tokenizer(str(vocabulary), "F"), TEXTS, None, 5, tmp_path / "cache")
    assert tokenised_anew == [4]
    assert warning is None
    assert rows(again) == rows(first)
    assert again.truncated == first.truncated


def test_a_used_tokenizer_finds_what_a_fresh_one_cached(
    tokenizer: Any, vocabulary: Path, tmp_path: Path, tokenised_anew: list[int]
) -> None:
    for texts in (TEXTS, TEXTS[:2]):
        tokenise(tokenizer, texts, None, 5, tmp_path / "cache")
    tokenise(load_tokenizer(str(vocabulary), "F"), TEXTS[:2], None, 5, tmp_path / "cache")
    assert tokenised_anew == [4, 2]


CHANGES: dict[str, Callable[[Any, Path], tuple[Any, list[str], list[str] | None, int]]] = {
    "another text": (lambda tokenizer, _: (tokenizer, [*TEXTS[:-1], "bad"], None, 16)),
    "the same letters cut otherwise": (
        lambda tokenizer, _: (tokenizer, ["Good HOTELS房", "间好", *TEXTS[2:]], None, 16)
    ),
    "another length": (lambda tokenizer, _: (tokenizer, TEXTS, None, 5)),
    "pairs": (lambda tokenizer, _: (tokenizer, TEXTS[:2], TEXTS[2:], 16)),
    "another vocabulary": (lambda _, folder: (other_tokenizer(folder), TEXTS, None, 16)),
}


def other_tokenizer(folder: Path) -> Any:
    (folder / "other.txt").write_text("\n".join([*SPECIAL, "bad", "good"]))
    return load_tokenizer(str(folder / "other.txt"), "F")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_cache_answers_only_for_the_same_content(
    tokenizer: Any, tmp_path: Path, tokenised_anew: list[int], change: Callable[..., Any]
) -> None:
    tokenise(tokenizer, TEXTS, None, 16, tmp_path / "cache")
    tokenise(*change(tokenizer, tmp_path), tmp_path / "cache")
    assert len(tokenised_anew) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_cache_is_made_again_and_reported(
    tokenizer: Any, tmp_path: Path, tokenised_anew: list[int], damage: str
) -> None:
    expected, _ = tokenise(tokenizer, TEXTS, None, 16, tmp_path)
    (file,) = tmp_path.glob("*.npz")
    whole = bytearray(file.read_bytes())
    place = whole.index(expected.ids.tobytes())
    whole[place] ^= 1
    file.write_bytes({"cut": bytes(whole[:200]), "flipped": bytes(whole), "emptied": b""}[damage])
    tokens, warning = tokenise(tokenizer, TEXTS, None, 16, tmp_path)
    assert rows(tokens) == rows(expected)
    assert warning is not None
    assert "was damaged" in warning
    assert tokenise(tokenizer, TEXTS, None, 16, tmp_path)[1] is None
    assert tokenised_anew == [4, 4]


def test_a_cache_that_cannot_be_written_costs_a_warning_only(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tokens, warning = tokenise(tokenizer, TEXTS, None, 16, tmp_path / "file" / "cache")
    assert len(tokens.lengths) == 4
    assert warning is not None
    assert "could not be cached" in warning


def test_the_cache_lies_where_the_desktop_standard_says(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    tokenise(tokenizer, TEXTS, None, 16, None)
    (file,) = (tmp_path / "xdg" / "drivetrain" / "tokenised").iterdir()
    assert file.suffix == ".npz"  # and nothing half-written beside it


def test_a_saved_folder_gives_the_same_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), "F")(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocab.txt", None, "does not exist"),
        ("./folder", None, "does not exist"),
        ("vocab.txt", b"good\nbad\n", r"lacks \[CLS\], \[PAD\]"),
        ("vocab.txt", "房".encode("gbk"), "not UTF-8"),
        ("vocab.txt", "\n".join([*SPECIAL, "a", "a"]).encode(), "'a' twice"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UserError, match=f"workload.model.tokenizer: .*{words}"):
        load_tokenizer(name, "workload.model.tokenizer")


def test_gpt2s_files_as_openai_published_them_give_its_published_ids(shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "vocab" / "gpt2-bpe"), "F")
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]  # OpenAI's encoder.py gives these
    assert tokenizer.decode(tokenizer("  a\n\tb é 你").input_ids) == "  a\n\tb é 你"
    assert tokenizer.eos_token_id == 50256 == len(tokenizer) - 1


def test_a_folder_without_a_tokenizer_is_reported_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"holds no tokenizer\n.*or workload\.model\.tokenizer"):
        load_tokenizer(str(tmp_path), "workload.model.path")
    checkpoint = tmp_path / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is the folder of a run\n.*step-00000005"):
        load_tokenizer(str(tmp_path), "workload.model.path")
