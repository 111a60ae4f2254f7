"""LLaMA-Factory v1's files: its own keys, its own defaults, and data sets named by a YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from drivetrain.importing import llama_v1, llama_v1_model
from drivetrain.importing.recognise import KINDS, kind_of
from drivetrain.importing.verb import import_files
from tests.importing.made import asked_to_give_up, imported, notes_of, of_text, run_of

SETS = """
identity: {path: data/identity.json, source: local, converter: alpaca}
chats: {path: org/chats, converter: sharegpt, split: train_sft, size: 500}
"""
LEAST = "model: org/model\ntrain_dataset: sets.yaml\n"
DEFAULTS = {  # of v1's argument classes and trainer, not version 0's
    "batch_size_per_device": 1,
    "loop": {"epochs": 3, "max_grad_norm": 1.0},
    "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.01},  # torch's AdamW
    "schedule": {"name": "constant"},
    "recompute": True,
    "seed": 42,
    "tracking": {"log_every": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sets.yaml").write_text(SETS)
    (tmp_path / "pairs.yaml").write_text("pairs: {path: org/pairs, converter: pair}\n")
    (tmp_path / "mixed.yaml").write_text(
        "pairs: {path: org/pairs, converter: pair}\nchats: {path: org/chats, converter: sharegpt}\n"
    )
    (tmp_path / "own.yaml").write_text("own: {path: own.jsonl, source: local}\n")
    (tmp_path / "weighed.yaml").write_text("one: {path: a.json, converter: alpaca, weight: 2.0}\n")
    return tmp_path


def test_a_file_that_hardly_says_anything_has_version_1s_defaults(folder: Path) -> None:
    raw = run_of(folder, LEAST)
    assert {name: raw[name] for name in DEFAULTS} == DEFAULTS
    assert raw["precision"] == "fp32"  # bf16 is read under dist_config alone
    assert raw["workload"] == {
        "type": "language_model",
        "stage": "sft",
        "model": {"path": "org/model", "attention": "sdpa"},
        "data": {
            "train": [
                {"path": "data/identity.json", "formatting": "alpaca"},
                {"path": "org/chats", "formatting": "sharegpt", "samples": 500, "split": "train_sft"},
            ],
            "evaluation_fraction": 0.0,
            "length": 2048,
        },
    }
    assert "adapter" not in raw  # all parameters are trained where there is no peft_config


def test_what_is_given_is_taken(folder: Path) -> None:
    text = LEAST + (
        "micro_batch_size: 2\nglobal_batch_size: 64\ncutoff_len: 512\nlearning_rate: 2e-5\nmax_steps: 10\n"
        "bf16: true\nflash_attn: flash_attention_2\ndist_config: {name: fsdp2, reshard_after_forward: false}\n"
        "save_steps: 5\nsave_total_limit: 3\nenable_activation_checkpointing: false\nlogging_steps: 2\nseed: 7\n"
        "batching_workers: 4\noutput_dir: out\nfull_determinism: true\nmax_grad_norm: 0.5\n"
    )
    raw = run_of(folder, text)
    assert (raw["batch_size"], raw["micro_batch_size"]) == (64, 2)
    assert raw["loop"] == {"steps": 10, "max_grad_norm": 0.5}
    assert raw["optimizer"]["lr"] == 2e-5
    assert raw["engine"] == {"name": "fsdp", "reshard": False}
    assert raw["precision"] == "bf16-master"
    assert raw["workload"]["model"]["attention"] == "flash"
    assert raw["workload"]["data"]["length"] == 512
    assert raw["checkpoints"] == {"every_steps": 5, "keep_last": 3}
    assert (raw["recompute"], raw["deterministic"], raw["seed"]) == (False, True, 7)
    assert (raw["tracking"]["log_every"], raw["loader"]["workers"], raw["output"]) == (2, 4, "out")


def test_an_adapter_and_a_base_in_few_bits_have_version_1s_defaults(folder: Path) -> None:
    raw = run_of(folder, LEAST + "peft_config: {name: lora}\nquant_config: {name: bnb}\n")
    assert raw["adapter"] == {"method": "lora", "targets": "all-linear", "rank": 8, "alpha": 16, "dropout": 0.05}
    assert raw["quantised_base"] == {"format": "nf4", "double": True}
    text = LEAST + "peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: [q_proj], use_dora: true}\n"
    adapter = run_of(folder, text)["adapter"]
    assert (adapter["rank"], adapter["alpha"], adapter["targets"], adapter["dora"]) == (16, 32, ["q_proj"], True)
    assert run_of(folder, LEAST + "peft_config: {name: lora, adapter_name_or_path: a}\n")["adapter"] == {"path": "a"}


PAIRS = "model: org/model\ntrain_dataset: pairs.yaml\n"


def test_pairs_are_learned_by_dpo_and_its_kin(folder: Path) -> None:
    """Their rows are those of TRL: lists of messages that begin alike."""
    raw = run_of(folder, PAIRS)
    assert raw["workload"]["stage"] == "dpo"
    assert raw["workload"]["data"]["train"] == [{"path": "org/pairs", "formatting": "trl"}]
    assert raw["workload"]["preference"] == {"loss": "sigmoid", "beta": 0.1}
    given = "pref_loss: sigmoid\npref_beta: 0.3\npref_ftx: 0.2\ndpo_label_smoothing: 0.1\nld_alpha: 0.5\n"
    wanted = {"loss": {"sigmoid": 1.0, "nll": 0.2}, "beta": 0.3, "label_smoothing": 0.1, "ld_alpha": 0.5}
    assert run_of(folder, PAIRS + given)["workload"]["preference"] == wanted
    simpo = run_of(folder, PAIRS + "pref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 1.0\n")["workload"]
    assert (simpo["stage"], simpo["preference"]) == ("simpo", {"loss": "simpo", "gamma": 1.0, "beta": 2.0})
    assert run_of(folder, PAIRS + "pref_loss: orpo\n")["workload"]["stage"] == "orpo"
    going_on = PAIRS + "peft_config: {name: lora, adapter_name_or_path: a}\n"
    assert run_of(folder, going_on)["workload"]["preference"]["reference"] == "adapters_off"


def test_a_reward_model_learns_from_pairs(folder: Path) -> None:
    workload = run_of(folder, PAIRS + "model_class: cls\npref_beta: 0.3\n")["workload"]
    assert workload["stage"] == "reward"
    assert "preference" not in workload


def test_the_last_blocks_alone_are_trained(folder: Path) -> None:
    text = LEAST + "peft_config: {name: freeze, freeze_trainable_layers: 3, freeze_trainable_modules: all}\n"
    assert run_of(folder, text)["workload"]["model"]["train_last_blocks"] == 3


def test_context_parallel_is_the_meshs_and_the_batch_is_of_groups(folder: Path) -> None:
    raw = run_of(folder, LEAST + "dist_config: {name: fsdp2}\ncp_size: 2\ncp_mode: ulysses\nmicro_batch_size: 4\n")
    assert raw["engine"] == {"name": "mesh", "cp": 2, "shard": True}
    assert raw["batch_size_per_device"] == 4
    assert raw["precision"] == "bf16-mixed"


def test_a_deepspeed_json_is_read_from_dist_config(folder: Path) -> None:
    (folder / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    raw = run_of(folder, LEAST + "dist_config: {name: deepspeed, config_file: zero3.json}\n")
    assert (raw["engine"]["name"], raw["engine"]["stage"]) == ("deepspeed", 3)
    assert raw["precision"] == "bf16-master"


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("batching_strategy: dynamic_batching\nmax_steps: 4\n", "batching_strategy"),
        ("batching_strategy: dynamic_padding_free\nmax_steps: 4\n", "batching_strategy"),
        ("optim_config: {name: muon, momentum: 0.9}\n", "optim_config.name"),
        ("lr_scheduler_config: {name: mine}\n", "lr_scheduler_config.name"),
        ("custom_chat_template: '{{ x }}'\n", "custom_chat_template"),
        ("model_class: cls\n", "model_class"),
        ("peft_config: {name: oft}\n", "peft_config.name"),
        ("peft_config: {name: freeze, freeze_trainable_layers: -1}\n", "peft_config.freeze_trainable_layers"),
        ("peft_config: {name: freeze, freeze_extra_modules: lm_head}\n", "peft_config.freeze_extra_modules"),
        ("peft_config: {name: lora, adapter_name_or_path: [a, b]}\n", "peft_config.adapter_name_or_path"),
        ("train_dataset: mixed.yaml\n", "train_dataset"),
        ("model_class: other\n", "model_class"),
        ("train_dataset: weighed.yaml\n", "train_dataset"),
        ("dist_config: {name: mine}\n", "dist_config.name"),
    ],
)
def test_what_would_train_something_else_is_not_written(lines: str, key: str, folder: Path) -> None:
    text = "".join(line for line in LEAST.splitlines(True) if line.split(":")[0] not in lines) + lines
    with pytest.raises(UserError) as refused:
        import_files([of_text(folder, text)], None, folder / "new.yaml")
    assert asked_to_give_up(refused.value) == [key]
    assert not (folder / "new.yaml").exists()


def test_a_quantised_base_of_another_kind_is_not_written(folder: Path) -> None:
    for block in ("{name: bnb, quantization_bit: 3}", "{name: gptq}", "{name: bnb, quantization_type: fp4}"):
        with pytest.raises(UserError, match="there are bitsandbytes"):
            import_files([of_text(folder, LEAST + f"quant_config: {block}\n")], None, folder / "new.yaml")
    with pytest.raises(UserError, match="nothing would be trained"):
        import_files([of_text(folder, LEAST + "quant_config: {name: bnb}\n")], None, folder / "new.yaml")


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        ("absent.yaml", "is neither here nor beside the file"),
        ("org/rows", "messages of typed parts"),
        ("own.yaml", "messages of typed parts"),
    ],
)
def test_data_that_cannot_be_read_leave_the_run_file_without_a_workload(dataset: str, why: str, folder: Path) -> None:
    file = of_text(folder, f"model: org/model\ntrain_dataset: {dataset}\npeft_config: {{name: lora, r: 4}}\n")
    found, raw = imported(folder, file)
    assert found.missing == ["workload"]
    assert "workload" not in raw
    assert "adapter" not in raw
    notes = {note.key: note for _, note in found.notes}
    assert why in notes["train_dataset"].why
    assert "no workload is written" in notes["peft_config.r"].why
    assert raw["batch_size_per_device"] == 1


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ({"model": "a", "peft_config": {"name": "lora"}}, "llama_factory_v1"),
        ({"model": "a", "train_dataset": "b", "cutoff_len": 9, "max_new_tokens": 1}, "llama_factory_v1"),
        ({"model": "a", "micro_batch_size": 1, "dist_config": {"name": "fsdp2"}}, "llama_factory_v1"),
        ({"cutoff_len": 9, "stage": "sft", "flash_attn": "auto"}, "llama_factory"),
        ({"cutoff_len": 9, "learning_rate": 1}, "llama_factory"),
        ({"flash_attn": "fa2", "pref_beta": 0.1}, "llama_factory"),
    ],
)
def test_the_two_versions_are_distinguished_by_keys_that_only_one_has(raw: dict[str, Any], kind: str) -> None:
    assert kind_of(raw, "a file") == kind


def test_every_key_has_one_fate(folder: Path) -> None:
    names = {*llama_v1.KEYS, *llama_v1.TOGETHER, *llama_v1_model.KEYS}
    assert names == KINDS["llama_factory_v1"].names
    assert {*llama_v1.OWN} <= names
    text = LEAST + "".join(f"{name}: null\n" for name in sorted(names - {"model", "train_dataset"}))
    notes = notes_of(folder, text)
    assert notes.keys() >= names
    assert not [note for note in notes.values() if "nothing reads" in note.why or "no such key" in note.why]
