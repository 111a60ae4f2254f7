"""Exports to GGUF of models made from a config: llama.cpp reads texts by their tokenizers as the run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

import drivetrain as api
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.data.language.vocabularies import END_OF_TEXT, byte_tokenizer, character_tokenizer
from drivetrain.errors import UserError
from drivetrain.export import gguf_vocabulary
from drivetrain.export.exporting import export
from drivetrain.export.request import Request
from drivetrain.launch.prepare import run_file_of
from tests.small_tokenizers import made
from tests.tiny_language import LLAMA, ROWS, write_lines

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}


def trained(folder: Path, data: dict[str, Any], model: dict[str, Any], **stage: str) -> RunConfig:
    workload = {"type": "language_model", "model": model, "data": data, **stage}
    api.train({"workload": workload}, batch_size=8, steps=2, lr=1e-2, quiet=True, output=folder / "run")
    found, problems = load(*run_file_of(folder / "run", []))
    assert found is not None
    assert not problems
    return found


@pytest.mark.parametrize(
    "tokenizer",
    ["characters", pytest.param("bytes", marks=pytest.mark.long), pytest.param("bpe", marks=pytest.mark.long)],
)
def test_a_chat_model_with_a_tokenizer_made_from_its_data_answers_in_llama_cpp_as_in_the_run(
    tokenizer: str, tmp_path: Path
) -> None:
    data = {"train": write_lines(tmp_path / "rows.jsonl", ROWS), "template": "alpaca", "length": 128}
    model = {"tokenizer": tokenizer, "config": LLAMA}
    if tokenizer == "bpe":
        model["vocabulary_size"] = 300
    done = export(trained(tmp_path, data, model, stage="sft"), Request("gguf", tmp_path / "out", samples=2))
    assert done.report["passed"]
    assert done.verdict.answers.other == 0
    assert any("does not know" in note for note in done.report["notes"]) is (tokenizer == "characters")


@pytest.mark.long
@pytest.mark.parametrize("numbers", ["fp32", "q8_0"])
def test_texts_that_fill_all_places_of_a_model_are_compared(numbers: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. é\n" * 30, encoding="utf-8")
    data = {"train": str(tmp_path / "text.txt"), "length": GPT2["n_positions"]}
    run = trained(tmp_path, data, {"tokenizer": "characters", "config": GPT2})
    option = {} if numbers == "fp32" else {"quantise": numbers}
    done = export(run, Request("gguf", tmp_path / "out", samples=2, **option))
    assert done.report["passed"]
    assert done.verdict.difference.rows == 16


def test_characters_are_kept_in_a_kind_of_tokenizer_that_has_a_token_for_unknown_ones(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(["a é"], [END_OF_TEXT])
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    assert gguf_vocabulary.write_vocabulary(tokenizer, 6, frozenset({4}), writer) == tokenizer.unk_token_id == 3
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "vocabulary.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "t5"
    assert fields["tokenizer.ggml.tokens"].contents() == ["\u2581", "a", "é", "<unk>", END_OF_TEXT, "[UNUSED5]"]


def test_a_template_starts_with_nothing_where_the_tokenizer_has_no_token_for_it(tmp_path: Path) -> None:
    written = {}
    for first in (None, END_OF_TEXT):
        tokenizer = byte_tokenizer([END_OF_TEXT])
        tokenizer.bos_token, tokenizer.chat_template = first, "{{ bos_token }}{{ messages[0].content }}"
        writer = gguf.GGUFWriter(tmp_path / f"{first is None}.gguf", "llama")
        assert gguf_vocabulary.write_vocabulary(tokenizer, 257, frozenset({256}), writer) is None
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        fields = gguf.GGUFReader(tmp_path / f"{first is None}.gguf").fields
        written[first] = fields["tokenizer.chat_template"].contents()
    assert written[END_OF_TEXT] == "{{ bos_token }}{{ messages[0].content }}"
    assert written[None] == "{%- set bos_token = '' -%}" + written[END_OF_TEXT]


def test_wordpiece_has_no_place_in_the_file() -> None:
    with pytest.raises(UserError, match="of the kind WordPiece"):
        gguf_vocabulary.write_vocabulary(made("bert"), 400, frozenset(), None)
