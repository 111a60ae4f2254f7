"""Exports to GGUF: llama.cpp itself answers as the run does, for each architecture and kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import drivetrain as api
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.export import gguf_architectures, gguf_vocabulary
from drivetrain.export.exporting import RefusedExport, export
from drivetrain.export.formats import DTYPES, FORMATS, GGML
from drivetrain.export.gguf_vocabulary import SPLITS
from drivetrain.export.request import Request
from drivetrain.launch.prepare import run_file_of
from tests.small_tokenizers import WORDS
from tests.tiny_language import ROWS, write_lines

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**WIDE, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {**ROTARY, "tie_word_embeddings": False}, "llama-bpe"),
    "scaled llama": ("llama", {**ROTARY, "rope_parameters": LLAMA3}, "sentencepiece"),
    "mistral": ("mistral", {**ROTARY, "sliding_window": None, "head_dim": 32}, "sentencepiece"),
    "qwen2": ("qwen2", {**ROTARY, "tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("qwen3", {**ROTARY, "head_dim": 32}, "qwen2"),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}, "gpt-2"),
}


SLOW = {"llama", "mistral", "qwen3"}  # their parts are in the others' too


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A small tokenizer that splits text as the family's public one does."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "sentencepiece":
        built = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(steps)
        special += [f"<0x{number:02X}>" for number in range(256)]
    else:
        built = Tokenizer(models.BPE())
        pattern = next((each for each, name in SPLITS.items() if name == kind), "")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        built.pre_tokenizer = pre_tokenizers.Sequence([split, whole]) if pattern else whole
        built.decoder = decoders.ByteLevel()
    alphabet = [] if kind == "sentencepiece" else pre_tokenizers.ByteLevel.alphabet()
    words = [word.replace(" ", "▁") for word in WORDS] if kind == "sentencepiece" else WORDS
    trainer = trainers.BpeTrainer(
        special_tokens=special, vocab_size=800, show_progress=False, initial_alphabet=alphabet
    )
    built.train_from_iterator(words, trainer)
    if kind == "sentencepiece":  # its bytes are tokens of the model, and no text
        built = without_added(built, special[3:])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def without_added(built: Tokenizer, contents: list[str]) -> Tokenizer:
    parts = json.loads(built.to_str())
    parts["added_tokens"] = [each for each in parts["added_tokens"] if each["content"] not in contents]
    return Tokenizer.from_str(json.dumps(parts))


def trained(folder: Path, kind: str, **changed: Any) -> RunConfig:
    """Trains a model of two layers for two steps."""
    model_type, fields, tokenizer_kind = MODELS[kind]
    own = tokenizer(tokenizer_kind)
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**{**fields, **changed, "vocab_size": len(own) + 3})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    own.save_pretrained(folder / "base")
    data = {"train": write_lines(folder / "rows.jsonl", ROWS), "template": "alpaca", "length": 128}
    workload = {"type": "language_model", "stage": "sft", "model": {"path": str(folder / "base")}, "data": data}
    api.train({"workload": workload}, batch_size=8, steps=2, lr=1e-3, quiet=True, output=folder / "run")
    found, problems = load(*run_file_of(folder / "run", []))
    assert found is not None
    assert not problems
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in MODELS]
)
def test_llama_cpp_answers_as_the_run_does(kind: str, tmp_path: Path) -> None:
    done = export(trained(tmp_path, kind), Request("gguf", tmp_path / "out", samples=2))
    assert done.report["passed"]
    # llama.cpp takes GPT-2's GELU from a table in half precision
    assert done.verdict.difference.relative < (1e-3 if kind == "gpt2" else 1e-4)
    assert done.verdict.answers.other == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return trained(tmp_path_factory.mktemp("gguf"), "llama")


def test_weights_in_blocks_are_those_of_the_published_format(run: RunConfig, tmp_path: Path) -> None:
    done = export(run, Request("gguf", tmp_path / "out", quantise="q4_0", samples=2))
    assert done.report["passed"]
    assert done.verdict.difference.relative > 1e-3, "four bits are not the run's own weights"
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "Q4_0"
    assert tensors["output.weight"].tensor_type.name == "Q8_0"
    weight = api.load(run.folder).get_parameter("model.layers.0.mlp.up_proj.weight")
    # Q4_0: per 32 numbers, the one of largest magnitude lies at -8 times the scale, the others at whole multiples of it
    largest = weight.detach().reshape(-1, 32).gather(1, weight.reshape(-1, 32).abs().argmax(1, keepdim=True))
    scale = (largest / -8).half().float()
    steps = (weight.detach().reshape(-1, 32) / scale + 8.5).floor().clamp(0, 15) - 8
    stored = gguf.quants.dequantize(tensors["blk.0.ffn_up.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    differs = torch.from_numpy(stored).reshape(-1, 32) - steps * scale
    assert (differs.abs() > 1e-6).float().mean() < 0.01, "a number may lie between two steps"
    assert 'PARAMETER stop "</s>"' in (tmp_path / "out" / "Modelfile").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [*DTYPES[1:], *GGML])
def test_every_kind_of_numbers_is_within_its_bound(run: RunConfig, numbers: str, tmp_path: Path) -> None:
    option = {"quantise": numbers} if numbers in GGML else {"dtype": numbers}
    assert export(run, Request("gguf", tmp_path / "out", samples=4, **option)).report["passed"]


def test_a_wrong_layout_of_heads_and_another_split_of_texts_are_refused(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_architectures, "_interleaved", lambda weight, _: weight)
    monkeypatch.setattr(gguf_vocabulary, "_split_of", lambda _: "qwen2")
    with pytest.raises(RefusedExport, match=r"other ids for 1 of 5 texts(.|\n)*scores differ"):
        export(run, Request("gguf", tmp_path / "out", samples=2))
    assert not (tmp_path / "out").exists()


def test_models_that_llama_cpp_would_compute_otherwise_are_refused_with_every_reason() -> None:
    rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.MistralConfig(**ROTARY, sliding_window=32, hidden_act="gelu", rope_parameters=rotary)
    with pytest.raises(UserError) as refused:
        gguf_architectures.architecture_of(config)
    assert [word in str(refused.value) for word in ("gelu", "sliding window of 32", "yarn")] == [True] * 3
    with pytest.raises(UserError, match="the model is a mamba, and gguf takes llama, mistral"):
        gguf_architectures.architecture_of(transformers.MambaConfig())


def test_k_quants_are_left_to_the_tool_that_makes_them(run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run llama-quantize"):
        export(run, Request("gguf", tmp_path / "out", quantise="q4_k_m"))


def test_the_table_of_formats_names_the_architectures_that_the_writer_knows() -> None:
    assert FORMATS["gguf"].model_types == tuple(gguf_architectures.ARCHITECTURES)
