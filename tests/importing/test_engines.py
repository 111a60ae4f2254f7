"""Accelerate's YAML and DeepSpeed's JSON as run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from tests.importing.made import FOLDER, imported, notes_of, run_of, small


def of(name: str, tmp_path: Path) -> dict[str, Any]:
    return imported(tmp_path, FOLDER / name)[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one_device", {"precision": "bf16-mixed", "engine": "single", "device": "auto"}),
        (
            "several_gpus",
            {
                "precision": "fp16-mixed",
                "engine": "ddp",
                "processes": 4,
                "nodes": 2,
                "device": "auto",
                "compile": True,
            },
        ),
        ("several_cpus", {"precision": "fp32", "engine": "ddp", "processes": 2, "device": "cpu"}),
        (
            "fsdp1_by_size",
            {
                "precision": "fp32",
                "engine": {
                    "name": "fsdp",
                    "reshard": True,
                    "offload": False,
                    "wrap": "size",
                    "wrap_min_parameters": 2000,
                },
                "processes": 2,
                "device": "auto",
                "recompute": False,
            },
        ),
        (
            "fsdp1_by_block",
            {
                "precision": "bf16-master",
                "engine": {"name": "fsdp", "reshard": False, "offload": True, "wrap": ["ResNetBasicLayer"]},
                "processes": 2,
                "device": "auto",
                "recompute": True,
            },
        ),
        (
            "fsdp2",
            {
                "precision": "bf16-master",
                "engine": {"name": "fsdp", "reshard": True, "hybrid": 2, "offload": False, "wrap": "block"},
                "processes": 4,
                "device": "auto",
                "recompute": False,
            },
        ),
        (
            "deepspeed_by_keys",
            {
                "precision": "bf16-master",
                "engine": {
                    "name": "deepspeed",
                    "stage": 3,
                    "offload_optimizer": "cpu",
                    "offload_parameters": "none",
                },
                "processes": 2,
                "device": "auto",
                "loop": {"max_grad_norm": 1.0},
            },
        ),
    ],
)
def test_an_accelerate_configuration_is_this_run_file(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert of(f"accelerate/{name}.yaml", tmp_path) == expected


def test_a_compiler_that_is_off_is_no_reason_to_refuse(tmp_path: Path) -> None:
    text = "distributed_type: 'NO'\nmixed_precision: 'no'\ndynamo_config: {dynamo_backend: %s}\n"
    found = {backend: notes_of(tmp_path, text % f"'{backend}'") for backend in ("NO", "EAGER")}
    assert {backend: notes["dynamo_config.dynamo_backend"].fate for backend, notes in found.items()} == {
        "NO": "unneeded", "EAGER": "refused",
    }  # fmt: skip


def test_accelerates_deepspeed_file_is_read_from_beside_it(tmp_path: Path) -> None:
    raw = of("accelerate/deepspeed_by_file.yaml", tmp_path)
    assert raw["engine"]["name"] == "deepspeed"
    assert raw["engine"]["stage"] == 3
    assert raw["processes"] == 2
    assert raw["engine"]["config"]["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_full_deepspeed_json_is_stated_once_in_fields_of_the_run_file(tmp_path: Path) -> None:
    assert of("deepspeed/full_bf16.json", tmp_path) == {
        "precision": "bf16-master",
        "engine": {
            "name": "deepspeed",
            "stage": 2,
            "offload_optimizer": "none",
            "config": {  # what is DeepSpeed's alone
                "zero_optimization": {"contiguous_gradients": True, "reduce_bucket_size": 200000000},
                "prescale_gradients": False,
                "dump_state": False,
                "comms_logger": {"enabled": False, "verbose": False},
            },
        },
        "batch_size_per_device": 32,
        "micro_batch_size": 8,
        "loop": {"steps": 1000, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 3e-5, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-6},
        "schedule": {"name": "linear", "warmup_steps": 50},
    }


def test_the_smallest_deepspeed_json_is_stage_0(tmp_path: Path) -> None:
    raw = run_of(tmp_path, '{"train_batch_size": 8}', ending=".json")
    assert raw == {"engine": {"name": "deepspeed", "stage": 0}, "batch_size": 8}


def test_loss_scaling_is_kept_and_its_default_written(tmp_path: Path) -> None:
    raw = of("deepspeed/fp16_scaled.json", tmp_path)
    assert raw["precision"] == "fp16-master"
    assert raw["scaler"] == {"init_scale": 4096.0, "growth_interval": 500}
    raw = run_of(tmp_path, '{"train_batch_size": 8, "fp16": {"enabled": true}}', ending=".json")
    assert raw["scaler"] == {"growth_interval": 1000}  # 2000 here


def test_deepspeeds_own_warm_up_is_written_out_and_its_logarithm_reported(tmp_path: Path) -> None:
    text = json.dumps(
        {"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}}
    )
    assert run_of(tmp_path, text, ending=".json")["schedule"] == {
        "name": "cosine",
        "warmup_steps": 1000,
        "final_lr_ratio": 1e-4,
    }
    assert notes_of(tmp_path, text, ".json")["scheduler.params.warmup_type"].fate == "changed"


def test_auto_is_left_to_the_run_file(tmp_path: Path) -> None:
    raw = imported(tmp_path, FOLDER / "deepspeed/zero2_auto.json", onto=small(tmp_path))[1]
    assert raw["batch_size"] == 16
    assert raw["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    assert raw["engine"]["stage"] == 2
    assert "precision" not in raw


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}},'
            ' "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}}, "train_batch_size": 8}',
            "optimizer.params.lr says 0.1, scheduler.params.warmup_max_lr says 0.2",
        ),
        (
            '{"fp16": {"enabled": true}, "bf16": {"enabled": true}, "train_batch_size": 8}',
            "fp16.enabled says fp16-master, bf16.enabled says bf16-master",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run_of(tmp_path, text, ending=".json")


def test_an_unknown_kind_of_accelerate_is_refused_and_names_those_there_are(tmp_path: Path) -> None:
    note = notes_of(tmp_path, "distributed_type: TPU\nnum_processes: 8\n")
    assert note["distributed_type"].fate == note["num_processes"].fate == "refused"
    assert "MULTI_GPU" in note["distributed_type"].why


def test_yes_and_no_are_what_yaml_1_1_took_them_for(tmp_path: Path) -> None:
    assert run_of(tmp_path, "distributed_type: MULTI_CPU\nuse_cpu: yes\n")["device"] == "cpu"
    assert run_of(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: no\n")["device"] == "auto"


@pytest.mark.parametrize(
    ("text", "ending", "field"),
    [
        ('{"zero_optimization": 3, "fp16": true}', ".json", "zero_optimization"),
        ('{"zero_optimization": {"stage": 2}, "optimizer": [1]}', ".json", "optimizer"),
        ("distributed_type: FSDP\nfsdp_config: full\n", ".yaml", "fsdp_config"),
        ("distributed_type: MULTI_GPU\nnum_processes: eight\n", ".yaml", "num_processes"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(text: str, ending: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run_of(tmp_path, text, ending=ending)
    assert refused.value.problems[0].field.endswith(field)
