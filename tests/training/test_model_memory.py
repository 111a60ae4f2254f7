"""A model that cannot fit is refused before it is built, by counts that those of the built model confirm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.models.parameter_count import count_parameters
from drivetrain.training import model_memory

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPU = Machine("cuda", "a GPU", 1, 2**30, 1, (9, 0), frozenset({"float32"}))
CPU = Machine("cpu", "a CPU", 1, 2**30, 1, None, frozenset({"float32"}))


def run_of(model: dict[str, Any], **given: Any) -> RunConfig:
    data = {"train": ["rows.jsonl"]}
    workload = {"type": "language_model", "stage": "sft", "model": model, "data": data}
    return RunConfig.model_validate({"workload": workload, "batch_size": 64, "loop": {"steps": 1}, **given})


def test_parameters_are_counted_as_the_built_model_has_them(tmp_path: Path) -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    built = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    whole = sum(p.numel() for p in built.parameters())
    before = torch.get_rng_state()
    count = count_parameters(run_of({"config": LLAMA}).workload)
    assert torch.equal(torch.get_rng_state(), before)
    assert count is not None
    assert count.all == whole, "an embedding that is the head as well counts once"
    built.config.save_pretrained(tmp_path)
    assert count_parameters(run_of({"path": str(tmp_path)}).workload) == count
    unsaid = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    found = count_parameters(run_of({"config": unsaid}).workload)
    assert found is not None
    assert found.all == whole - 96 * 32, "the tokenizer decides how many rows the embedding has"
    assert count_parameters(run_of({"path": "owner/name"}).workload) is None
    assert count_parameters(run_of({"config": {**LLAMA, "model_type": "nothing"}}).workload) is None


def test_ranks_whose_copies_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    big = {**LLAMA, "vocab_size": 2**20, "hidden_size": 2**8}  # a GiB of embedding
    monkeypatch.setattr(model_memory, "attainable_memory", lambda: 3 * 2**30)

    def refused(given: dict[str, Any], machine: Machine = CPU, **run: Any) -> str:
        try:
            found = run_of(given, **run)
            model_memory.refuse_too_large(found, machine, True, model_memory.counted(found))
        except UserError as error:
            return str(error)
        return ""

    model = {"config": big}
    spread = {"engine": {"name": "fsdp"}, "processes": 16}
    words = refused(model, **spread)
    assert (
        "engine: 16 ranks would each build 1.0 GiB of weights in CPU memory, 16 GiB; this machine has 3.0 GiB" in words
    )
    assert "engine.meta=true (one copy, 1.0 GiB), or processes=2 at most" in words
    assert not refused(model, engine={"name": "fsdp", "meta": True}, processes=16)
    assert not refused(model, engine={"name": "ddp"}, processes=2)
    assert not refused(model, engine={"name": "ddp"}, processes=2, nodes=8), "each machine builds its own ranks'"
    monkeypatch.setattr(model_memory, "attainable_memory", lambda: 2**29)
    assert "parameters take 1.0 GiB of CPU memory while they are built; this machine has 0.5 GiB free" in refused(model)
    transformers.LlamaConfig(**{k: v for k, v in big.items() if k != "model_type"}).save_pretrained(tmp_path)
    assert "an adapter with quantised_base=nf4" in refused({"path": str(tmp_path)}), "weights from a folder"
    (tmp_path / "model.safetensors").touch()
    assert not refused({"path": str(tmp_path)}, GPU, engine={"name": "fsdp"}), (
        "weights in fp32 are mapped, and go to the GPU from there"
    )
    assert refused({"path": str(tmp_path)}), "updates write to them where they were mapped"


def test_a_device_smaller_than_the_weights_is_refused_where_the_engine_puts_them_there_whole() -> None:
    large = {"config": {**LLAMA, "vocab_size": 2**20, "hidden_size": 2**9}}  # two GiB, one in 16 bits

    def check(engine: str, machine: Machine) -> None:
        run = run_of(large, engine={"name": engine})
        model_memory.refuse_too_large(run, machine, True, model_memory.counted(run))

    with pytest.raises(UserError, match=r"engine=ddp puts 2\.0 GiB of weights on each device; a GPU has 1\.0 GiB"):
        check("ddp", GPU)
    check("fsdp", GPU)
    check("ddp", CPU)


def test_a_training_of_a_model_larger_than_the_machine_is_refused_before_it_is_built(
    tmp_path: Path, drivetrain: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "workload: {type: image_classification, data: {source: digits}, "
        f"model: {{config: {{model_type: vit, hidden_size: {2**20}, intermediate_size: {2**21}, "
        "num_hidden_layers: 4, num_attention_heads: 4, patch_size: 2}}}\n"
        "batch_size: 8\nloop: {steps: 1}\n"
    )
    code, _, words = drivetrain("train", "run.yaml")
    assert code == 2
    assert "of CPU memory while they are built; this machine has" in words
    assert not list(tmp_path.glob("runs/*/run.yaml"))
