"""Exports are verified with prompts that leave places for the answer, and with texts that each runtime answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from drivetrain.data.language.vocabularies import END_OF_TEXT, byte_tokenizer
from drivetrain.export.questions import NEW_TOKENS, Questions, _of_sequences
from drivetrain.export.runtimes.exchange import Answered, Asked
from drivetrain.export.runtimes.graphs import answered
from drivetrain.export.verification import _tokenizer_failures
from drivetrain.workloads.exporting import Dialogue


@pytest.mark.parametrize(("places", "length"), [(32, 32 - NEW_TOKENS), (1024, 40), (NEW_TOKENS, None)])
def test_prompts_leave_the_model_places_for_an_answer(places: int, length: int | None) -> None:
    ids = list(range(40))
    batch = SimpleNamespace(inputs={"input_ids": torch.tensor([ids[:8]])}, labels=torch.tensor([ids[:8]]))
    workload = SimpleNamespace(
        plain_batch=lambda *_: batch,
        prompts_for=lambda *_: {0: SimpleNamespace(ids=ids)},
        ends=frozenset(),
        dialogues=lambda _: [],
        encoded=lambda texts: [[] for _ in texts],
    )
    model = SimpleNamespace(config=GPT2Config(n_positions=places, vocab_size=50))
    found = _of_sequences(workload, model, cast(Any, None), [None], 8, 0).prompts
    assert found == ([] if length is None else [ids[-length:]])


def test_a_graph_is_asked_for_texts_by_the_tokenizer_beside_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer([END_OF_TEXT])
    tokenizer.save_pretrained(tmp_path)

    def graph(inputs: dict[str, Tensor]) -> Tensor:
        raise AssertionError(f"no passes were asked for: {inputs}")

    found = answered(graph, Asked(str(tmp_path), inputs=[], texts=["ab", "Ü"]), ("torch",))
    assert found.texts == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "Ü")]


def test_texts_and_conversations_without_an_answer_are_failures() -> None:
    dialogue = Dialogue([{"role": "user", "content": "hi"}], [], (1, 2))
    questions = Questions([], [], dialogues=[dialogue], texts=["ab"], text_ids=[[3]])
    assert len(_tokenizer_failures(questions, Answered([]), None)) == 2
    assert _tokenizer_failures(questions, Answered([], dialogues=[[1, 2]], texts=[[3]]), None) == []
    assert "gives other ids" in _tokenizer_failures(questions, Answered([], dialogues=[[1, 2]], texts=[[4]]), None)[0]


def test_only_rows_of_the_unknown_token_count_as_one() -> None:
    questions = Questions([], [], texts=["ab"], text_ids=[[7, 7, 3, 3, 7]])
    assert _tokenizer_failures(questions, Answered([], texts=[[7, 3, 3, 7]]), 7) == []
    assert _tokenizer_failures(questions, Answered([], texts=[[7, 7, 3, 7]]), 7)
    assert _tokenizer_failures(questions, Answered([], texts=[[7, 3, 3, 7]]), None)
