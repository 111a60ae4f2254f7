"""XTuner's configurations: values by hand, iterations as steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from drivetrain.config.adapter import Adapter
from drivetrain.config.translation import Note
from drivetrain.errors import UserError
from tests.importing.made import FOLDER, imported, notes_of, run_of

FILES = FOLDER / "xtuner"


def test_a_qlora_run_keeps_batch_rate_and_schedule(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, FILES / "internlm_qlora.py")
    assert raw == {
        "adapter": {"method": "lora", "targets": "all-linear", "rank": 32, "alpha": 64, "dropout": 0.1},
        "quantised_base": {"format": "nf4", "double": False},  # of Transformers' BitsAndBytesConfig, left out
        "precision": "fp16-mixed",
        "batch_size_per_device": 16,  # 2 at once, 8 times
        "micro_batch_size": 2,
        "loop": {"epochs": 3, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 2e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": {"name": "cosine", "warmup_ratio": 0.03},
        "checkpoints": {"every_steps": 50, "keep_last": 2},  # 400 iterations, 8 a step
        "tracking": {"log_every": 1},
        "loader": {"workers": 0},
        "deterministic": False,
    }
    refused = {note.key: note.why for _, note in found.notes if note.fate == "refused"}
    assert "workload.model.path" in refused["model.llm.pretrained_model_name_or_path"]
    assert "workload.data" in refused["train_dataloader.dataset.dataset_map_fn"]
    assert "workload.generate" in refused["custom_hooks.1.evaluation_inputs"]


def test_a_base_is_taken_in_and_iterations_become_steps(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "from_base.py")
    assert raw["loop"] == {"steps": 300}  # 1200 iterations, 4 a step
    assert raw["schedule"] == {"name": "cosine", "warmup_ratio": 0.05, "final_lr_ratio": pytest.approx(0.15)}
    assert raw["evaluation"] == {"every_steps": 75}
    assert raw["tracking"] == {"log_every": 10, "trackers": ["progress", "tensorboard"]}
    assert raw["optimizer"]["lr"] == 4e-5  # of the base
    assert raw["output"] == "./work_dirs/from_base_1200"
    assert (raw["seed"], raw["deterministic"]) == (11, True)


def test_an_old_base_is_changed_key_by_key(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "old_base.py")
    assert raw["precision"] == "fp32"
    assert raw["batch_size_per_device"] == 16
    assert raw["optimizer"] == {"name": "sgd", "lr": 0.05, "momentum": 0.9}
    assert raw["loop"] == {"epochs": 4, "max_grad_norm": 5.0}
    assert raw["evaluation"] == {"every_epochs": 2, "batch_size": 32}
    assert raw["tracking"]["log_every"] == 20  # the base's logger, beside this file's checkpoint


def test_torchs_own_weight_decay_is_written_out(tmp_path: Path) -> None:
    text = "from torch.optim import AdamW\noptim_wrapper = dict(optimizer=dict(type=AdamW, lr=1e-3))\n"
    assert run_of(tmp_path, text, ending=".py")["optimizer"] == {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01}


def test_a_class_of_another_package_gets_its_arguments_as_options(tmp_path: Path) -> None:
    text = (
        "from lion import Lion\noptim_wrapper = dict(optimizer=dict(type=Lion, lr=1e-4, betas=(0.9, 0.99), use=True))\n"
    )
    expected = {"name": "lion:Lion", "lr": 1e-4, "options": {"betas": [0.9, 0.99], "use": True}}
    assert run_of(tmp_path, text, ending=".py")["optimizer"] == expected


def test_with_a_deepspeed_json_16_bits_are_copies(tmp_path: Path) -> None:
    _, raw = imported(tmp_path, FILES / "from_base.py", FOLDER / "deepspeed" / "zero2_auto.json")
    assert raw["precision"] == "bf16-master"
    assert raw["engine"]["stage"] == 2


QLORA = """
from peft import LoraConfig
from transformers import BitsAndBytesConfig
train_cfg = dict(max_epochs=1)
model = dict(
    llm=dict(quantization_config=dict(type=BitsAndBytesConfig, {bits})),
    lora=dict(type=LoraConfig, {lora}),
)
"""


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none", "target_modules": ["q_proj", "v_proj"]},
        {"r": 4, "use_rslora": True, "modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
    ],
)
def test_an_adapter_is_what_pefts_class_makes_of_its_arguments(given: dict[str, Any], tmp_path: Path) -> None:
    text = QLORA.format(bits="", lora=", ".join(f"{key}={value!r}" for key, value in given.items()))
    block = Adapter.model_validate(run_of(tmp_path, text, ending=".py")["adapter"])
    theirs = LoraConfig(**given)
    assert (block.rank, block.alpha, block.dropout) == (theirs.r, theirs.lora_alpha, theirs.lora_dropout)
    assert (block.rslora, block.dora, block.pissa) == (
        *(theirs.use_rslora, theirs.use_dora),
        theirs.init_lora_weights == "pissa",
    )
    assert block.train_also == theirs.modules_to_save
    targets = theirs.target_modules
    assert block.targets == "all-linear" if targets is None else set(block.targets or ()) == targets


@pytest.mark.parametrize(
    "given",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "load_in_8bit": False},
        {"load_in_8bit": True, "llm_int8_threshold": 6.0},
        {"load_in_4bit": False},
        {"load_in_4bit": True},  # fp4
    ],
)
def test_a_quantised_base_is_what_transformers_class_makes_of_its_arguments(
    given: dict[str, Any], tmp_path: Path
) -> None:
    text = QLORA.format(bits=", ".join(f"{key}={value!r}" for key, value in given.items()), lora="r=8")
    theirs = BitsAndBytesConfig(**given)
    expected: dict[str, Any] | None = {"format": "int8"} if theirs.load_in_8bit else None
    if theirs.load_in_4bit and theirs.bnb_4bit_quant_type == "nf4":
        expected = {"format": "nf4", "double": theirs.bnb_4bit_use_double_quant}
    elif theirs.load_in_4bit:
        assert notes_of(tmp_path, text, ".py")["model.llm.quantization_config.load_in_4bit"].fate == "refused"
    assert run_of(tmp_path, text, ending=".py").get("quantised_base") == expected


def note(tmp_path: Path, text: str, key: str) -> Note:
    return notes_of(tmp_path, f"train_cfg = dict(max_epochs=1)\n{text}", ".py")[key]


BITS = "model.llm.quantization_config.load_in_8bit"
START = "model.lora.init_lora_weights"
UPDATE, SAMPLER = "optim_wrapper.optimizer.type", "train_dataloader.sampler.type"


@pytest.mark.parametrize(
    ("text", "key", "fate", "reason"),
    [
        ("optim_wrapper = dict(optimizer=dict(type='PagedAdamW32bit'))", UPDATE, "changed", "adamw; the"),
        ("import a.b\noptim_wrapper = dict(optimizer=dict(type=a.b.C))", UPDATE, "changed", "a.b:C"),
        ("optim_wrapper = dict(optimizer=dict(type='PagedAdamW8bit'))", UPDATE, "mapped", "bnb-paged-adamw8bit"),
        ("optim_wrapper = dict(optimizer=dict(type='AdamW8bit'))", UPDATE, "mapped", "bnb-adamw8bit"),
        ("model = dict(lora=dict(type='LoraConfig', bias='all'))", "model.lora.bias", "refused", "stay as they are"),
        ("model = dict(lora=dict(type='IA3Config'))", "model.lora.type", "refused", "read from LoraConfig"),
        ("model = dict(llm=dict(quantization_config=dict(load_in_8bit=True)))", BITS, "refused", "nothing would be"),
        ("model = dict(lora=dict(init_lora_weights='olora'))", START, "refused", "olora: there are PEFT's own start"),
        ("visualizer = None", "visualizer", "unneeded", "tracking.trackers names who else listens"),
        ("param_scheduler = dict(type='StepLR', gamma=2)", "param_scheduler.type", "refused", "StepLR"),
        ("train_dataloader = dict(sampler=dict(type='LengthGroupedSampler'))", SAMPLER, "refused", "random"),
        ("load_from = 'w.pth'", "load_from", "refused", "workload.model.path"),
        ("custom_hooks = [dict(type='MyHook')]", "custom_hooks.0.type", "refused", "MyHook"),
        ("optim_wraper = dict(x=1)", "optim_wraper.x", "refused", "did you mean optim_wrapper?"),
        ("note = 'mine'", "note", "unneeded", "nothing in the file reads it"),
        ("every = 3\ndefault_hooks = dict(a=every)", "every", "unneeded", "see default_hooks"),
        ("for i in range(3):\n    n = i", "line 2", "refused", "never run"),
        ("import os\nos.system('ls')", "line 3", "refused", "never run"),
        ("import os\nlimit = int(os.environ['N'])", "limit", "refused", "never run: int(os.environ['N'])"),
    ],
)
def test_a_name_has_its_fate_and_reason(text: str, key: str, fate: str, reason: str, tmp_path: Path) -> None:
    found = note(tmp_path, text, key)
    assert found.fate == fate
    assert reason in found.why


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("import os\ntrain_cfg = dict(max_epochs=int(os.environ['E']))", "train_cfg.max_epochs", "never run"),
        ("train_cfg = 3", "train_cfg", "3 was given"),
        ("x = 1", ".py", "no mmengine configuration"),
        ("trainer = TrainerConfig(global_batch_size=8)", ".py", "XTuner V1"),
        ("with read_base():\n    from .nowhere import *\ntrain_cfg = {}", "nowhere.py", "no such file"),
        ("with read_base():\n    from xtuner.configs.x import *\n", ".py", "installed package"),
        ("_base_ = 'mmengine::x.py'\n", ".py", "_base_"),
    ],
)
def test_what_cannot_be_known_is_refused(text: str, field: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run_of(tmp_path, text, ending=".py")
    assert refused.value.problems[0].field.endswith(field)
    assert why in refused.value.problems[0].why


def test_a_base_that_takes_in_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("_base_ = 'two.py'\ntrain_cfg = dict(max_epochs=1)\n")
    (tmp_path / "two.py").write_text("_base_ = 'one.py'\n")
    with pytest.raises(UserError, match="takes in itself"):
        imported(tmp_path, tmp_path / "one.py")
