"""Tokens of texts on disk: those that the tokenizer gives of each text, whatever blocks, processes and kills."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from drivetrain.data import block_work
from drivetrain.data.text_rows import TextRows, open_text_rows
from drivetrain.data.token_blocks import stored_tokens
from drivetrain.data.tokenised import Tokens, tokenise_block
from tests.small_tokenizers import WORDS, made


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return made("bert")


LONG = {
    "words": " ".join(WORDS * 30),
    "one letter": "a" * 60_000,
    "spaces": " " * 60_000 + "end",
    "no spaces": "房间good" * 10_000,
    "marks that join": "e\u0301" * 30_000,
}


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama", "bert", "sentencepiece unigram"])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_text_far_over_the_length_has_the_tokens_of_the_whole(kind: str, text: str) -> None:
    tokenizer = made(kind)
    found = tokenise_block(tokenizer, [text, "good"], None, 32)
    whole = tokenizer([text, "good"], truncation=True, max_length=32)["input_ids"]
    assert [part.tolist() for part in np.split(found.ids, found.offsets[1:-1])] == whole
    assert found.cut.tolist() == [len(tokenizer(text)["input_ids"]) > 32, False]


def test_a_very_long_text_is_cut_before_it_is_tokenised(tokenizer: Any) -> None:
    lengths = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *rest: Any, **options: Any) -> Any:
            lengths.append(len(text) if isinstance(text, str) else max(map(len, text)))
            return super().__call__(text, *rest, **options)

    counting = Counting(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>", pad_token="<pad>")
    tokenise_block(counting, [" ".join(WORDS * 200)], None, 32)
    assert max(lengths) < 10_000


def written(folder: Path, count: int) -> TextRows:
    path = folder / "a.csv"
    path.write_text("text\n" + "".join(f'"{WORDS[n % 300]} {n}"\n' for n in range(count)), encoding="utf-8")
    return open_text_rows([path], str(path), "F", True, {"text_column": "text"}, folder / "cache")[0]


def parts(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("indices", [None, np.array([3, 50, 51, 199])], ids=["all", "some"])
def test_blocks_and_processes_give_what_one_call_of_the_tokenizer_gives(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, indices: np.ndarray | None
) -> None:
    rows = written(tmp_path, 200)
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    tokens, warning = stored_tokens(tokenizer, rows, indices, 16, tmp_path / "cache")
    texts = list(rows.first if indices is None else rows.first.taken(indices))
    assert parts(tokens) == tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    assert warning is None


@pytest.mark.parametrize(("pays_for", "all_here"), [(0.1, False), (1e9, True)], ids=["much work", "little work"])
def test_processes_start_once_the_rate_of_this_one_says_that_they_pay(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays_for: float, all_here: bool
) -> None:
    rows = written(tmp_path, 200)
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(block_work, "MEASURED", 0.1)
    monkeypatch.setattr(block_work, "PROCESS_SECONDS", pays_for)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    original, here = block_work.make_block, []
    # a process takes seconds to start where others have the cores: the last blocks here wait for its first
    deadline = time.monotonic() + 60

    def slow(work: Any, number: int) -> None:
        time.sleep(0.02)
        here.append(number)
        original(work, number)
        while len(here) == 30 and not all_here and time.monotonic() < deadline:
            if len(list(work.folder.glob("block-*.npz"))) > len(here):
                return
            time.sleep(0.02)

    monkeypatch.setattr(block_work, "make_block", slow)
    tokens, _ = stored_tokens(tokenizer, rows, None, 16, tmp_path / "cache")
    assert here
    assert (len(here) == 67) == all_here
    assert parts(tokens) == tokenizer(list(rows.first), truncation=True, max_length=16)["input_ids"]


KILLED = """
import pickle, sys, time
from pathlib import Path
from drivetrain.data import block_work, token_blocks
original = block_work.make_block
def slow(work, number):
    original(work, number)
    time.sleep(0.05)
block_work.make_block, block_work.BLOCK_TEXTS = slow, 3
rows, tokenizer = pickle.load(open(sys.argv[1] + "/given", "rb"))
token_blocks.stored_tokens(tokenizer, rows, None, 16, Path(sys.argv[1]) / "cache")
"""


def test_a_killed_builder_is_gone_on_from_and_the_arrays_are_the_same(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = written(tmp_path, 200)
    (tmp_path / "given").write_bytes(pickle.dumps((rows, tokenizer)))
    blocks = "tokens-*/block-*.npz"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as builder:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "cache").glob(blocks))) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        builder.kill()
    finished = len(list((tmp_path / "cache").glob(blocks)))
    assert 5 <= finished < 67
    (store,) = (tmp_path / "cache").glob("tokens-*/")
    (store / "block-66.npz.1.partial").write_bytes(b"half of a block")
    original, again = block_work.make_block, []

    def counted(work: Any, number: int) -> None:
        again.append(number)
        original(work, number)

    monkeypatch.setattr(block_work, "make_block", counted)
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 3)
    tokens, _ = stored_tokens(tokenizer, rows, None, 16, tmp_path / "cache")
    assert len(again) == 67 - finished
    assert parts(tokens) == tokenizer(list(rows.first), truncation=True, max_length=16)["input_ids"]
    assert not list((tmp_path / "cache").glob("tokens-*/block-*")), "nor what was left half written"
