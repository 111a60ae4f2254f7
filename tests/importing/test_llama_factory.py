"""LLaMA-Factory's YAML, compared with what each key means there."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.errors import UserError
from tests.importing.made import FOLDER, imported, notes_of, of_text, run_of, small

FILES = FOLDER / "llama_factory"
FIRST = "model_name_or_path: gpt2\nstage: sft\ntemplate: default\n"


def test_a_lora_run_keeps_adapter_batch_rate_schedule_and_cadences(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "qwen_lora_sft.yaml")
    assert raw == {
        "output": "saves/qwen2.5-1.5b/support",
        "workload": {
            "type": "language_model",
            "stage": "sft",
            "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"},
            "data": {
                "train": [{"path": "company_support", "samples": 5000}, {"path": "identity", "samples": 5000}],
                "evaluation_fraction": 0.05,
                "registry": "data",
                "length": 1024,
                "system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                "bad_rows": "drop",
            },
        },
        "adapter": {"method": "lora", "targets": "all-linear", "rank": 16, "alpha": 32, "dropout": 0.05},
        "precision": "bf16-mixed",
        "batch_size_per_device": 16,  # 2 at once, 8 times
        "micro_batch_size": 2,
        "loop": {"epochs": 2, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 2e-4, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup_ratio": 0.05},
        "evaluation": {"every_steps": 250, "batch_size": 4},
        "checkpoints": {"every_steps": 250},
        "tracking": {"log_every": 20},
        "recompute": True,  # LLaMA-Factory recomputes unless told not to
        "seed": 42,
    }


def test_with_a_deepspeed_file_16_bits_are_copies_of_fp32_weights(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, FILES / "llama_full_zero3.yaml")
    assert raw["precision"] == "bf16-master"
    assert raw["engine"]["name"] == "deepspeed"
    assert raw["engine"]["stage"] == 3
    assert raw["engine"]["offload_optimizer"] == raw["engine"]["offload_parameters"] == "cpu"
    assert raw["batch_size_per_device"] == 16
    assert raw["optimizer"] == {"name": "adamw", "lr": 1e-5, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert raw["schedule"] == {"name": "constant", "warmup_steps": 100}
    assert raw["loop"] == {"epochs": 3, "max_grad_norm": 0.5}
    assert raw["name"] == "llama31-medical-full"
    assert raw["seed"] == 1234
    labels = {label for label, _ in found.notes}
    assert labels == {str(FILES / "llama_full_zero3.yaml"), str(FOLDER / "deepspeed" / "zero3_offload.json")}


def test_pure_bf16_is_bf16_and_a_lowest_rate_is_a_share(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "pretrain_corpus.yaml")
    assert raw["precision"] == "bf16"
    assert raw["schedule"] == {"name": "cosine", "warmup_ratio": 0.01, "final_lr_ratio": pytest.approx(0.1)}
    assert raw["loop"] == {"steps": 20000, "max_grad_norm": 1.0}
    assert raw["tracking"] == {"log_every": 50, "trackers": ["progress", "tensorboard"]}


def test_pure_bf16_under_deepspeed_keeps_fp32_weights_and_says_so(tmp_path: Path) -> None:
    text = FIRST + "pure_bf16: true\ndeepspeed: {zero_optimization: {stage: 2}}\n"
    assert run_of(tmp_path, text)["precision"] == "bf16-master"
    assert notes_of(tmp_path, text)["pure_bf16"].fate == "changed"


def test_what_hardly_says_anything_gets_the_defaults_of_the_source_and_says_so(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, FILES / "small_and_short.yaml")
    assert raw.pop("workload")["data"]["train"] == ["identity"]
    assert raw == {
        "adapter": {"method": "lora", "targets": "all-linear", "rank": 8, "alpha": 16},
        "output": "saves/first-try",
        "batch_size_per_device": 8,
        "loop": {"epochs": 3, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 5e-5, "weight_decay": 0.0},
        "schedule": {"name": "linear"},
        "recompute": False,
        "seed": 42,
    }
    written = {note.key for _, note in found.notes if "the source's default" in note.why}
    assert written == {
        *("per_device_train_batch_size", "num_train_epochs", "max_grad_norm", "optim", "learning_rate"),
        *("weight_decay", "lr_scheduler_type", "seed", "finetuning_type", "lora_rank", "lora_alpha", "lora_target"),
        *("dataset_dir", "cutoff_len", "val_size"),
    }


def test_fsdp_in_words_shards_offloads_and_wraps_the_named_class(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "freeze_fsdp.yaml")
    assert raw["engine"] == {"name": "fsdp", "reshard": True, "offload": True, "wrap": ["LlamaDecoderLayer"]}
    assert raw["precision"] == "bf16-master"


def test_gradients_that_some_parameters_lack_mean_ddp(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "tuned_sft.yaml")
    assert raw["engine"] == {"name": "ddp", "find_unused": True}
    assert raw["precision"] == "tf32"
    assert raw["loop"] == {"epochs": 5, "max_grad_norm": None}  # 0 means that nothing is clipped
    assert raw["evaluation"]["early_stopping"] == {"patience": 2}
    assert raw["evaluation"]["metric"] == "loss"


@pytest.mark.parametrize(
    ("lines", "key", "fate", "reason"),
    [
        ("stage: grpo\n", "stage", "refused", "there are pt, sft"),
        ("use_galore: true\n", "use_galore", "refused", "lora and GaLore together"),
        ("use_apollo: true\n", "use_apollo", "refused", "import path"),
        ("use_badam: true\n", "use_badam", "refused", "import path"),
        ("use_galore: false\n", "use_galore", "unneeded", "off"),
        ("optim: paged_adamw_32bit\n", "optim", "changed", "adamw; the optimizer's state stays"),
        ("optim: paged_adamw_8bit\n", "optim", "mapped", "bnb-paged-adamw8bit"),
        ("optim: adamw_torch_xla\n", "optim", "refused", "import path"),
        ("optim: lion\n", "optim", "refused", "import path"),
        ("lr_scheduler_type: reduce_lr_on_plateau\n", "lr_scheduler_type", "refused", "linear, cosine"),
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1\n", "warmup_ratio", "unneeded", "constant_with_warmup"),
        ("num_train_epochs: 0.5\n", "num_train_epochs", "refused", "0.5 is no whole number"),
        ("dataloader_drop_last: true\n", "dataloader_drop_last", "refused", "every sample counts"),
        ("report_to: none\n", "report_to", "unneeded", "names no tracker"),
        ("plot_loss: true\n", "plot_loss", "unneeded", "drivetrain report draws the loss"),
        ("report_to: comet_ml\n", "report_to", "refused", "tracking.trackers"),
        ("cutof_len: 3\n", "cutof_len", "refused", "did you mean cutoff_len?"),
        ("my_own_key: 3\n", "my_own_key", "refused", "no such key is known"),
    ],
)
def test_a_key_has_its_fate_and_reason(lines: str, key: str, fate: str, reason: str, tmp_path: Path) -> None:
    first = "".join(line + "\n" for line in FIRST.splitlines() if line.split(":")[0] not in lines)
    note = notes_of(tmp_path, first + lines)[key]
    assert note.fate == fate
    assert reason in note.why


def test_optimizers_that_have_a_class_are_named_by_its_path(tmp_path: Path) -> None:
    raw = run_of(tmp_path, FIRST + "optim: adafactor\n")
    assert raw["optimizer"]["name"] == "transformers.optimization:Adafactor"
    assert raw["optimizer"]["options"] == {"scale_parameter": False, "relative_step": False}


@pytest.mark.parametrize(
    ("optim", "name"),
    [
        ("adamw_bnb_8bit", "bnb-adamw8bit"),
        ("adamw_8bit", "bnb-adamw8bit"),
        ("paged_adamw_8bit", "bnb-paged-adamw8bit"),
        ("adamw_torch_8bit", "adamw8bit"),
        ("adamw_torch_4bit", "adamw4bit"),
    ],
)
def test_an_optimizer_of_few_bits_has_its_short_name_and_betas_of_its_own(
    optim: str, name: str, tmp_path: Path
) -> None:
    raw = run_of(tmp_path, FIRST + f"optim: {optim}\nadam_beta2: 0.95\nadam_epsilon: 1e-6\n")
    expected = {"name": name, "lr": 5e-5, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-6}
    assert raw["optimizer"] == expected


def test_imported_onto_a_run_file_the_files_own_settings_win_and_the_rest_stays(tmp_path: Path) -> None:
    raw = run_of(tmp_path, FIRST + "learning_rate: 1.0e-3\nnum_train_epochs: 4\n", onto=small(tmp_path))
    assert raw["workload"]["type"] == "image_classification"
    assert raw["batch_size"] == 16  # of the run file: the source does not say one
    assert "batch_size_per_device" not in raw
    assert raw["loop"] == {"epochs": 4, "max_grad_norm": 1.0}  # no steps beside the epochs
    # one optimizer, not half of each: no momentum of the run file's sgd
    assert raw["optimizer"] == {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("lines", "field", "why"),
    [
        ("learning_rate: -1\n", "learning_rate (optimizer.lr)", "greater than 0"),
        ("per_device_train_batch_size: many\n", "per_device_train_batch_size", "'many' was given"),
        ("gradient_accumulation_steps: 0\n", "gradient_accumulation_steps", "0 was given"),
        ("warmup_ratio: 2\n", "warmup_ratio (schedule.warmup_ratio)", "less than 1"),
        ("bf16: true\nfp16: true\n", "bf16", "both on"),
        ("deepspeed: nowhere/ds.json\n", "deepspeed", "neither in"),
        ("seed: [1]\n", "seed", "[1] was given"),
    ],
)
def test_a_value_that_cannot_be_is_refused_under_its_own_key(lines: str, field: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run_of(tmp_path, FIRST + lines)
    problem = refused.value.problems[0]
    assert problem.field.endswith(field)
    assert why in problem.why
    assert not (tmp_path / "new.yaml").exists()


def test_all_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run_of(tmp_path, FIRST + "learning_rate: x\nseed: y\nmax_steps: z\n", "distributed_type: FSDP\nuse_cpu: w\n")
    assert len(refused.value.problems) == 4


def test_defaults_are_reported_as_the_run_file_has_them(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, of_text(tmp_path, FIRST))
    words = {note.key: note.why for _, note in found.notes}
    assert raw["recompute"] is True
    assert words["disable_gradient_checkpointing"] == "recompute: true; not given: the source's default"
    assert "#   recompute: true\n" in found.output.read_text()


def test_unsloths_recompute_keeps_its_inputs_in_cpu_memory(tmp_path: Path) -> None:
    raw = run_of(tmp_path, FIRST + "use_unsloth_gc: true\n")
    assert (raw["recompute"], raw["offload_activations"]) == (True, True)
    without = run_of(tmp_path, FIRST + "use_unsloth_gc: true\ndisable_gradient_checkpointing: true\n")
    assert "offload_activations" not in without
