"""DeepSpeed's JSON in this project's words, and what contradicts the run file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import deepspeed, rules
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.importing.translated_file import leaves

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}), frozenset({"deepspeed", "accelerate"}))
DIGITS = {"type": "image_classification", "model": {"config": {"model_type": "resnet"}}, "data": {"source": "digits"}}


def run(engine: Any, **changes: Any) -> RunConfig:
    raw = {"workload": DIGITS, "batch_size": 32, "loop": {"steps": 10}, "processes": 2, "engine": engine} | changes
    built, problems = validate(raw, [])
    assert not problems
    assert built is not None
    return built


def test_a_whole_json_becomes_fields_of_the_run_file() -> None:
    found = deepspeed.translate(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        }
    )
    assert found.settings == {
        "batch_size": 64,
        "micro_batch_size": 8,
        "loop.max_grad_norm": 1.0,
        "precision": "bf16-master",
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.weight_decay": 0.1,
        "schedule.name": "linear",
        "schedule.warmup_steps": 10,
        "loop.steps": 100,
        "engine.stage": 3,
        "engine.offload_optimizer": "cpu",
    }
    assert found.passed == {"zero_optimization": {"overlap_comm": True}}


def test_a_micro_batch_and_accumulation_give_the_batch_of_a_device() -> None:
    found = deepspeed.translate({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4})
    assert found.settings == {"micro_batch_size": 8, "batch_size_per_device": 32}


def test_the_engine_takes_its_stage_and_offloading_from_the_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    engine = run({"name": "deepspeed", "config": str(file)}).engine
    assert (engine.stage, engine.offload_parameters, engine.offload_optimizer) == (3, "cpu", "none")
    file.unlink()
    again, problems = validate(run({"name": "deepspeed", "config": engine.config}).model_dump(mode="json"), [])
    assert not problems
    assert again is not None
    assert again.engine == engine, "a run keeps what the file held"


CONTRADICTIONS = {
    "gradient_clipping": (1.0, "loop.max_grad_norm=1.0, but the run file says None"),
    "train_batch_size": (64, "batch_size=64, but the run file says 32"),
    "train_micro_batch_size_per_gpu": (4, "micro_batch_size=4, but the run file says 16"),
    "bf16": ({"enabled": True}, "precision=bf16-master, but the run file says fp32"),
    "optimizer": ({"type": "SGD", "params": {"lr": 0.1}}, "optimizer.name=sgd, but the run file says adamw"),
    "scheduler": ({"type": "WarmupCosineLR"}, "schedule.name=cosine, but the run file says constant"),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_what_contradicts_the_run_file_is_reported(key: str) -> None:
    value, words = CONTRADICTIONS[key]
    found = rules.check(run({"name": "deepspeed", "config": {key: value}}), CPU)
    assert any(words in str(problem) for problem in found), found


HUGGING_FACE = {  # the shape that Transformers' and LLaMA-Factory's users have
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 14, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
                          "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
}  # fmt: skip


def test_what_the_run_file_leaves_out_is_the_jsons() -> None:
    left = resolved(run({"name": "deepspeed", "config": HUGGING_FACE}), CPU)
    assert not rules.check(left, CPU)
    assert left.loop.max_grad_norm == 1.0
    assert left.scaler.growth_interval == 2000, "fp32 does not scale"
    assert any("engine.config gives loop.max_grad_norm=1.0" in text for text in notices(left, CPU))
    gpu = replace(CPU, device="cuda", compute_capability=(9, 0), native_dtypes=frozenset({"float32", "float16"}))
    scaled = resolved(run({"name": "deepspeed", "config": HUGGING_FACE}, precision="fp16-mixed"), gpu)
    assert (scaled.scaler.growth_interval, scaled.scaler.init_scale) == (1000, 2.0**14)
    half = {"name": "deepspeed", "config": {"bf16": {"enabled": True}}}
    assert resolved(run(half), CPU).precision == "bf16-master"
    kept = resolved(run(half, precision="fp32"), CPU)
    assert kept.precision == "fp32", "what the run file says stays"
    assert any("precision=bf16-master" in problem.why for problem in rules.check(kept, CPU))
    batch = run({"name": "deepspeed", "config": {"train_batch_size": 64}}, batch_size=None)
    assert resolved(batch, CPU).batch_size == 64


def test_all_contradictions_are_reported_at_once_and_auto_is_none() -> None:
    everything = {key: value for key, (value, _) in CONTRADICTIONS.items()}
    assert len(rules.check(run({"name": "deepspeed", "config": everything}), CPU)) >= len(everything)
    auto = {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    auto |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    assert not rules.check(run({"name": "deepspeed", "config": auto}), CPU)


def test_a_json_that_agrees_is_taken() -> None:
    agrees = {"train_batch_size": 32, "gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}
    assert not rules.check(run({"name": "deepspeed", "config": agrees}, loop={"steps": 1, "max_grad_norm": 0.5}), CPU)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_cliping": 1.0}, "no such key"),
        ({"amp": {"enabled": True}}, "Apex"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "changes what is computed"),
        ({"communication_data_type": "fp16"}, "summed in fp32"),
        ({"elasticity": {"enabled": True}}, "min_nodes and max_restarts say it"),
        ({"optimizer": {"type": "OneBitAdam"}}, "import path"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(config: dict[str, Any], words: str) -> None:
    (problem,) = rules.check(run({"name": "deepspeed", "config": config}), CPU)
    assert words in problem.why


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled says fp16-master, bf16.enabled says"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
            },
            "optimizer.params.lr says 0.1, scheduler.params.warmup_max_lr says 0.2",
        ),
    ],
)
def test_a_json_that_contradicts_itself_is_refused(config: dict[str, Any], words: str) -> None:
    assert any(words in problem.why for problem in rules.check(run({"name": "deepspeed", "config": config}), CPU))


EVERYWHERE = {
    "optimizer": {"type": "Lamb", "params": {"lr": 0.1, "max_coeff": 10}},
    "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0}},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    "bf16": {"enabled": False, "immediate_grad_update": True},
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "cpu", "nvme_path": "/ssd", "buffer_count": "auto"},
    },
}


def test_every_key_is_reported_with_what_became_of_it() -> None:
    words = {note.key for note in deepspeed.translate(EVERYWHERE).notes}
    assert words >= set(leaves(EVERYWHERE)), set(leaves(EVERYWHERE)) - words


def test_an_offload_block_gives_device_and_path_and_passes_on_the_rest() -> None:
    block = {"device": "nvme", "nvme_path": "/ssd", "buffer_count": 5, "max_in_cpu": "auto"}
    found = deepspeed.translate({"zero_optimization": {"stage": 3, "offload_param": block}})
    assert found.settings == {
        "engine.stage": 3, "engine.offload_parameters": "nvme", "engine.nvme_path": "/ssd",
    }  # fmt: skip
    assert found.passed == {"zero_optimization": {"offload_param": {"buffer_count": 5}}}


@pytest.mark.parametrize(("given", "expected"), [(True, "cpu"), (False, None)])
def test_offloading_in_deepspeeds_old_words_is_to_the_cpu(given: bool, expected: str | None) -> None:
    found = deepspeed.translate({"zero_optimization": {"stage": 2, "cpu_offload": given}})
    assert found.settings.get("engine.offload_optimizer") == expected


def test_an_optimizer_that_torch_has_is_taken_by_its_name() -> None:
    found = deepspeed.translate({"optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}})
    assert found.settings == {"optimizer.name": "sgd", "optimizer.lr": 0.5, "optimizer.momentum": 0.9}


def test_a_warm_up_by_the_logarithm_is_reported_to_rise_linearly() -> None:
    def words(**params: Any) -> list[str]:
        found = deepspeed.translate({"scheduler": {"type": "WarmupLR", "params": params}})
        return [note.key for note in found.with_fate("changed")]

    assert words() == words(warmup_type="log") == ["scheduler.params.warmup_type"]
    assert not words(warmup_type="linear")


def test_keys_without_effect_are_named_in_a_notice() -> None:
    reported = notices(
        run({"name": "deepspeed", "config": {"steps_per_print": 10, "wall_clock_breakdown": False}}), CPU
    )
    assert any("steps_per_print" in line for line in reported)
    assert not any("wall_clock_breakdown" in line for line in reported), "it goes on to DeepSpeed"


@pytest.mark.parametrize(
    ("engine", "changes", "field"),
    [
        ({"name": "deepspeed", "stage": 2, "offload_parameters": "cpu"}, {}, "engine.offload_parameters"),
        ({"name": "deepspeed", "stage": 0, "offload_optimizer": "cpu"}, {}, "engine.offload_optimizer"),
        ({"name": "deepspeed", "stage": 3, "offload_optimizer": "nvme"}, {}, "engine.nvme_path"),
        (
            {"name": "deepspeed", "stage": 3, "offload_parameters": "nvme", "nvme_path": "/ssd"},
            {},
            "engine.offload_parameters",
        ),
        ("zero0", {"precision": "bf16-master"}, "precision"),
        ("zero2", {"precision": "bf16"}, "precision"),
        ("zero2", {"precision": "fp16-master"}, "precision"),
        ("dp", {"precision": "bf16-master"}, "precision"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: Any, changes: dict[str, Any], field: str) -> None:
    assert [problem.field for problem in rules.check(run(engine, **changes), CPU)] == [field]


def test_a_package_that_is_not_there_is_named_with_its_extra() -> None:
    without = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}), frozenset())
    for engine, missing in (("zero1", 1), ("accelerate-ddp", 1), ("accelerate-zero2", 2)):
        found = rules.check(run(engine), without)
        assert len(found) == missing
        assert all("pip install 'drivetrain[" in problem.fix for problem in found)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"zero_optimization": 1, "zero_optimization": 2}', "\x00"])
def test_a_broken_file_is_reported_at_its_option(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    raw = {"workload": DIGITS, "batch_size": 32, "loop": {"steps": 1}}
    _, problems = validate(raw | {"engine": {"name": "deepspeed", "config": str(tmp_path / "ds.json")}}, [])
    assert problems
    assert problems[0].field.startswith("engine")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*deepspeed.KEYS, *deepspeed.BATCH, "no_such_key"]), JUNK, max_size=4))
def test_any_json_is_reported_key_by_key_or_refused_in_words(raw: dict[str, Any]) -> None:
    built, problems = validate(
        {"workload": DIGITS, "batch_size": 32, "loop": {"steps": 1}, "engine": {"name": "deepspeed", "config": raw}}, []
    )
    if built is not None and not problems:
        rules.check(built, CPU)
        notices(built, CPU)
