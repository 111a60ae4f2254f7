"""TrainingArguments as JSON, compared with what the Trainer does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from transformers import TrainingArguments

from drivetrain.importing.training_keys import KEYS, TOGETHER
from tests.importing.made import FOLDER, imported, notes_of, of_text, run_of

FILES = FOLDER / "training_arguments"


def of(tmp_path: Path, **given: Any) -> dict[str, Any]:
    return run_of(tmp_path, json.dumps({"output_dir": "out", **given}), ending=".json")


def test_a_short_one_keeps_every_setting(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "short.json")
    assert raw == {
        "output": "out/digits",
        "batch_size_per_device": 16,
        "loop": {"epochs": 2, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_ratio": 0.1},
        "evaluation": {"every_epochs": 1, "batch_size": 64, "metric": "accuracy"},
        "checkpoints": {"keep_last": 1},
        "tracking": {"log_every": 5},
        "seed": 7,
    }


def test_a_whole_one_as_the_trainer_writes_it(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, FILES / "whole.json")
    assert raw["precision"] == "bf16-mixed"
    assert (raw["batch_size_per_device"], raw["micro_batch_size"]) == (32, 4)
    assert raw["loop"] == {"steps": 400, "max_grad_norm": 1.0}
    assert raw["optimizer"] == {"name": "adamw", "lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.98], "eps": 1e-8}
    assert raw["schedule"] == {"name": "constant", "warmup_steps": 20}
    assert raw["evaluation"] == {"every_steps": 100, "batch_size": 8}
    assert raw["checkpoints"] == {"every_steps": 200, "keep_last": 3}
    assert raw["recompute"] is True
    assert raw["loader"] == {"workers": 2}
    refused = {note.key for _, note in found.notes if note.fate == "refused"}
    assert refused == {"label_smoothing_factor"}
    assert "<HUB_TOKEN>" not in found.output.read_text()


def test_every_field_of_the_installed_class_is_known() -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} - {*KEYS, *TOGETHER} == set()


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"bf16": True}, "bf16-mixed"),
        ({"fp16": True}, "fp16-mixed"),
        ({"tf32": True}, "tf32"),
        ({"bf16": True, "tf32": True}, "bf16-mixed"),
        ({"bf16": False, "fp16": False}, "fp32"),
        ({"bf16": "true"}, "bf16-mixed"),
        ({"bf16": True, "fsdp": "full_shard auto_wrap"}, "bf16-master"),
        ({"fp16": True, "fsdp": "full_shard auto_wrap"}, "fp16-mixed"),
        ({"fp16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "fp16-master"),
    ],
)
def test_a_precision_is_what_the_trainer_makes_of_it(given: dict[str, Any], precision: str, tmp_path: Path) -> None:
    assert of(tmp_path, **given)["precision"] == precision


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({}, {"name": "linear"}),
        ({"warmup_steps": 10, "warmup_ratio": 0.5}, {"name": "linear", "warmup_steps": 10}),
        ({"warmup_steps": 0.2}, {"name": "linear", "warmup_ratio": 0.2}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"name": "constant"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, {"name": "constant", "warmup_steps": 10}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.25}},
            {"name": "cosine", "final_lr_ratio": 0.25},
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5}},
            {"name": "polynomial", "power": 2.0, "final_lr_ratio": 0.2},
        ),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10}, {"name": "inverse_sqrt", "warmup_steps": 10}),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 8}},
            {"name": "wsd", "decay_steps": 8, "decay_shape": "cosine"},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
            },
            {"name": "wsd", "decay_steps": 8, "decay_shape": "sqrt", "final_lr_ratio": 0.1},
        ),
    ],
)
def test_a_schedule_is_what_the_trainer_makes_of_it(
    given: dict[str, Any], schedule: dict[str, Any], tmp_path: Path
) -> None:
    assert of(tmp_path, **given)["schedule"] == schedule


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        ({"fsdp": True}, "fsdp"),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, {"name": "fsdp", "reshard": False, "wrap": "block"}),
        ({"fsdp": "full_shard"}, {"name": "fsdp", "reshard": True, "wrap": []}),
        (
            {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 1000}},
            {"name": "fsdp", "reshard": True, "wrap": "size", "wrap_min_parameters": 1000},
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, {"name": "fsdp", "offload": True}),
        ({"fsdp": "", "fsdp_config": None}, None),
        ({"ddp_bucket_cap_mb": 50}, {"name": "ddp", "bucket_mb": 50}),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, {"name": "deepspeed", "stage": 1}),
        ({"deepspeed": {"gradient_clipping": "auto"}}, {"name": "deepspeed", "stage": 0}),
    ],
)
def test_an_engine_is_named_only_where_the_arguments_name_one(
    given: dict[str, Any], engine: Any, tmp_path: Path
) -> None:
    assert of(tmp_path, **given).get("engine") == engine


def test_recomputing_that_is_on_in_one_place_is_on(tmp_path: Path) -> None:
    given = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": False}
    assert of(tmp_path, **given)["recompute"] is True


def test_activations_that_trl_moves_to_cpu_memory_are_moved(tmp_path: Path) -> None:
    assert of(tmp_path, activation_offloading=True)["offload_activations"] is True


def test_evaluating_by_steps_without_eval_steps_takes_the_logging_steps(tmp_path: Path) -> None:
    assert of(tmp_path, eval_strategy="steps", logging_steps=50)["evaluation"] == {"every_steps": 50}
    assert of(tmp_path, eval_strategy="steps")["evaluation"] == {"every_steps": 500}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eval_strategy": "steps", "eval_steps": 100, "save_steps": 500}, True),
        ({"eval_strategy": "steps", "eval_steps": 300, "save_steps": 200}, True),
        ({"eval_strategy": "steps", "logging_steps": 50, "save_steps": 500}, True),
        ({"evaluation_strategy": "epoch", "save_steps": 500}, True),
        ({"eval_strategy": "steps", "eval_steps": 400, "save_steps": 200}, False),
        ({"eval_strategy": "steps", "eval_steps": 100, "save_strategy": "epoch", "save_steps": 500}, False),
        ({"eval_strategy": "no", "save_steps": 500}, False),
    ],
)
def test_a_best_that_may_not_be_saved_is_reported(given: dict[str, Any], words: bool, tmp_path: Path) -> None:
    """A run evaluates and saves at the same steps unless checkpoints.every_steps says otherwise."""
    note = notes_of(tmp_path, json.dumps({"output_dir": "out", **given}), ending=".json")["save_steps"]
    assert ("best of evaluations that fall on a save" in note.why) is words
    assert (note.fate == "changed") is words


def test_values_are_reported_as_the_run_file_has_them(tmp_path: Path) -> None:
    given = {"gradient_checkpointing": True, "max_grad_norm": 0, "report_to": ["tensorboard"], "run_name": "a/b"}
    text = json.dumps({"output_dir": "out", **given, "adam_beta1": 0.8})
    found, raw = imported(tmp_path, of_text(tmp_path, text, ".json"))
    words = [note for _, note in found.notes if note.to]
    assert {note.to for note in words} > {"recompute", "loop.max_grad_norm", "tracking.trackers", "name", "seed"}
    for note in words:
        value = raw
        for name in note.to.split("."):
            value = value[name]
        assert YAML(typ="safe", pure=True).load(note.why.split("; ")[0]) == {note.to: value}
    renoted = {note.key: note.why for note in words}
    assert renoted["gradient_checkpointing"] == "recompute: true"
    assert renoted["max_grad_norm"] == "loop.max_grad_norm: null"
    assert renoted["report_to"] == "tracking.trackers: [progress, tensorboard]"
    assert renoted["run_name"] == "name: a-b; a name holds no slash"


@pytest.mark.parametrize(
    ("given", "key", "why"),
    [
        (None, "accelerator_config", "it is off"),
        (
            {"split_batches": False, "dispatch_batches": True},
            "accelerator_config.dispatch_batches",
            "fixed by the seed",
        ),
    ],
)
def test_how_accelerate_deals_samples_is_without_need(given: Any, key: str, why: str, tmp_path: Path) -> None:
    note = notes_of(tmp_path, json.dumps({"output_dir": "out", "accelerator_config": given}), ending=".json")[key]
    assert note.fate == "unneeded"
    assert why in note.why


def test_old_names_of_keys_are_known(tmp_path: Path) -> None:
    raw = of(tmp_path, evaluation_strategy="epoch", per_gpu_train_batch_size=3, no_cuda=True)
    assert raw["evaluation"] == {"every_epochs": 1}
    assert raw["batch_size_per_device"] == 3
    assert raw["device"] == "cpu"


def test_a_secret_is_neither_printed_nor_written(tmp_path: Path) -> None:
    text = json.dumps({"output_dir": "out", "hub_token": "hf_very_secret", "learning_rate": 1e-3})
    assert "hf_very_secret" not in "".join(note.why for note in notes_of(tmp_path, text, ".json").values())
    assert "hf_very_secret" not in (tmp_path / "new.yaml").read_text()
