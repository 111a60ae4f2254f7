"""Rules: what cannot work is refused with all reasons at once; what works without effect is said."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.data_paths import looks_like_hub_id
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
T4 = Machine("cuda", "Tesla T4", 1, 2**34, 2, (7, 5), frozenset({"float32", "float16"}))
MI250 = Machine("cuda", "AMD Instinct MI250X", 8, 2**36, 16, None, frozenset({"float32", "float16", "bfloat16"}))
H100 = Machine("cuda", "NVIDIA H100", 8, 2**36, 16, (9, 0), frozenset({"float32", "float16", "bfloat16"}))

DIGITS = {"type": "image_classification", "model": {"config": {"model_type": "resnet"}}, "data": {"source": "digits"}}
TEXTS = {
    "type": "text_classification",
    "model": {"path": "owner/model"},
    "data": {"train": "owner/texts"},
}


def config(**changes: Any) -> RunConfig:
    raw = {"workload": DIGITS, "batch_size": 8, "loop": {"steps": 10}} | changes
    built, problems = validate({key: value for key, value in raw.items() if value is not None}, [])
    assert not problems
    assert built is not None
    return built


def workload(base: dict[str, Any], model: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    return base | {"data": base["data"] | data, "model": base["model"] if model is None else model}


FROM_SCRATCH = {"config": {"model_type": "bert"}}
REFUSED = {
    "no batch": ({"batch_size": None}, "batch_size", "neither"),
    "two batches": ({"batch_size_per_device": 8}, "batch_size", "both"),
    "no length": ({"loop": {}}, "loop", "neither"),
    "two lengths": ({"loop": {"steps": 1, "epochs": 1}}, "loop", "both"),
    "two warm-ups": ({"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "schedule", "both"),
    "long warm-up": ({"schedule": {"warmup_steps": 11}}, "schedule.warmup_steps", "(11) > loop.steps (10)"),
    "no model": ({"workload": workload(DIGITS, {})}, "workload.model", "neither"),
    "no model type": ({"workload": workload(DIGITS, {"config": {}})}, "workload.model.config", "model_type"),
    "no tokenizer": ({"workload": workload(TEXTS, FROM_SCRATCH)}, "workload.model.tokenizer", "is required"),
    "digits with a path": ({"workload": workload(DIGITS, train="digits.csv")}, "workload.data.train", "bundled"),
    "no training data": ({"workload": workload(DIGITS, source="folder")}, "workload.data.train", "is required"),
    "missing data": ({"workload": workload(TEXTS, train="./no.csv")}, "workload.data.train", "does not exist"),
    "missing test": ({"workload": workload(TEXTS, evaluation="no.csv")}, "workload.data.evaluation", "does not exist"),
    "missing user file": ({"workload": {"type": "module", "path": "no.py"}}, "workload.path", "does not exist"),
    "an optimizer of whole tensors": (
        {"optimizer": {"name": "torch.optim.Adafactor"}, "engine": "zero1"},
        "optimizer.name",
        "needs whole tensors",
    ),
    "a GPU that is not there": ({"device": "cuda"}, "device", "no GPU"),
    "more ranks than samples": ({"engine": "ddp", "processes": 9}, "batch_size", "(8) < the devices that share it (9)"),
    "recompute under dp": ({"engine": "dp", "recompute": True}, "recompute", "engine=dp cannot have it"),
    "offloading under dp": (
        {"engine": "dp", "offload_activations": True},
        "offload_activations",
        "engine=dp cannot have it",
    ),
    "compile under dp": ({"engine": "dp", "compile": True}, "compile", "engine=dp cannot have it"),
    "dp on two nodes": ({"engine": "dp", "nodes": 2}, "nodes", "engine=dp runs in one process"),
    "uneven shards": (
        {"engine": {"name": "fsdp", "hybrid": 3}, "processes": 4},
        "engine.hybrid",
        "(4) is no multiple of the shards (3)",
    ),
    "bf16 gradients on a CPU": (
        {"engine": {"name": "ddp", "gradient_compression": "bf16"}},
        "engine.gradient_compression",
        "between GPUs only",
    ),
    "tf32 on a CPU": ({"precision": "tf32"}, "precision", "exists on cuda only and this is a CPU"),
}


@pytest.mark.parametrize(
    ("given", "meant"),
    [("dpp", "dp or ddp"), ("fspd", "fsdp"), ("sinlge", "single"), ("zero", "zero0, zero1, zero2 or zero3")],
)
def test_every_engine_that_is_one_mistake_off_is_suggested(given: str, meant: str) -> None:
    raw = {"workload": DIGITS, "batch_size": 8, "loop": {"steps": 10}, "engine": given}
    _, [found] = validate(raw, [])
    assert found.fix == f"did you mean {meant}?"


@pytest.mark.parametrize("given", [{"name": "fspd", "hybrid": 3}, "fspd", "nothing-like-it"])
def test_an_engine_that_is_not_known_is_the_only_problem_of_a_run_that_needs_one(given: Any) -> None:
    """No rule, and no remark, is on the engine that stands in for it; others are reported beside it."""
    raw = {"workload": DIGITS, "batch_size": 8, "loop": {"steps": 10}, "nodes": 2, "processes": 4, "engine": given}
    run, problems = validate(copy.deepcopy(raw), [])
    assert run is not None
    judged, found = rules.judged(run, problems, CPU)
    assert [each.field for each in found] == ["engine"]
    assert ("did you mean fsdp?" in found[0].fix) == (given != "nothing-like-it")
    assert notices(judged, CPU, found) == []
    run, problems = validate({**raw, "optimizer": {"name": "bnb-paged-adamw8bit"}, "loop": {}}, [])
    assert run is not None
    assert {each.field for each in rules.judged(run, problems, CPU)[1]} >= {"engine", "loop", "optimizer.name"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_field_reason_and_cure(case: str) -> None:
    changes, field, why = REFUSED[case]
    (found,) = rules.check(config(**changes), CPU)
    assert found.field == field
    assert why in found.why
    assert found.fix


def test_the_cure_for_what_an_engine_cannot_have_names_the_engines_that_can() -> None:
    (found,) = rules.check(config(engine="dp", recompute=True), CPU)
    assert found.fix.startswith("leave it out, or take engine=single or ddp or fsdp or deepspeed or accelerate or mesh")
    (found,) = rules.check(config(engine="dp", precision="bf16-master"), H100)
    assert found.fix.startswith("take another precision, or engine=single or ddp or fsdp or deepspeed or accelerate")


@pytest.mark.parametrize("precision", ["tf32", "bf16", "bf16-mixed"])
def test_an_older_gpu_is_refused_what_came_after_it(precision: str) -> None:
    (found,) = rules.check(config(precision=precision), T4)
    assert found.why == f"{precision} was given, but Tesla T4 has compute capability 7.5; it needs 8.0"
    assert found.fix == "works here: fp32, fp16, fp16-mixed, fp16-master"
    assert not rules.check(config(precision="fp16-mixed"), T4)


@pytest.mark.parametrize("precision", ["tf32", "fp8-mixed"])
def test_what_only_nvidias_gpus_have_is_refused_on_others(precision: str) -> None:
    (found,) = rules.check(config(precision=precision), MI250)
    assert found.why == f"{precision} was given, but it works on NVIDIA's GPUs only and this is AMD Instinct MI250X"
    assert not rules.check(config(precision="bf16-mixed"), MI250)
    assert not rules.check(config(precision=precision), H100)


def test_all_reasons_come_at_once() -> None:
    run = config(batch_size=None, loop={}, precision="tf32", device="cuda", workload=workload(DIGITS, {}, train="x"))
    assert {found.field for found in rules.check(run, CPU)} == {
        "batch_size", "loop", "precision", "device", "workload.model", "workload.data.train",
    }  # fmt: skip


def test_processes_left_out_are_one_a_gpu_and_never_more() -> None:
    assert resolved(config(engine="fsdp"), H100).processes == 8
    assert resolved(config(engine="fsdp", processes=2), H100).processes == 2
    assert resolved(config(engine="ddp"), CPU).processes == 1
    assert resolved(config(), H100).processes is None
    (found,) = rules.check(config(engine="ddp", processes=16, batch_size=64), H100)
    assert (found.field, found.why) == ("processes", "16 were given, but the machine has 8 GPUs")


def test_the_global_batch_is_over_all_devices_of_all_nodes() -> None:
    each = {"batch_size": None, "batch_size_per_device": 4, "processes": 2}
    assert config(**each).global_batch == 4
    assert config(**each, engine="dp").global_batch == 8
    assert config(**each, engine="ddp", nodes=3).global_batch == 24
    assert config(**each, engine={"name": "dp", "replicas": 5}).global_batch == 20
    assert config(**each, engine="ddp", nodes=3).world_size == 6


def test_more_workers_than_cores_are_reported_in_one_notice() -> None:
    words = "loader.workers=3 starts more processes than the 2 cores here run at once"
    assert sum(words in each for each in notices(config(loader={"workers": 3}), CPU)) == 1
    for workers in (2, "auto"):
        assert not any("workers" in each for each in notices(config(loader={"workers": workers}), CPU))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_h100_takes_every_precision(precision: str) -> None:
    spread = {"engine": "zero2", "processes": 2} if PRECISIONS[precision].cast else {}
    run = config(precision=precision, optimizer={"name": "sgd"}, **spread)
    assert not rules.check(run, H100)
    words = [notice for notice in notices(run, H100) if "precision=bf16-master" not in notice]
    assert not words


@pytest.mark.parametrize(
    ("machine", "changes", "words"),
    [
        (H100, {}, True),
        (H100, {"precision": "bf16-master"}, False),
        (H100, {"engine": "dp"}, False),
        (CPU, {}, False),
    ],
    ids=["mixed", "master", "an engine without", "cpu"],
)
def test_on_a_gpu_bf16_mixed_is_offered_what_casts_once_a_step(
    machine: Machine, changes: dict[str, Any], words: bool
) -> None:
    reported = notices(config(**{"precision": "bf16-mixed", **changes}), machine)
    assert any("precision=bf16-master casts them once a step" in notice for notice in reported) is words


@pytest.mark.parametrize(
    ("precision", "emulated"), [("fp32", False), ("bf16", True), ("fp16-mixed", True), ("bf16-mixed", True)]
)
def test_a_cpu_without_16_bit_arithmetic_says_that_it_emulates(precision: str, emulated: bool) -> None:
    reported = " ".join(notices(config(precision=precision), CPU))
    assert ("emulated" in reported) == emulated
    native = replace(CPU, native_dtypes=frozenset({"float32", "bfloat16", "float16"}))
    assert "emulated" not in " ".join(notices(config(precision=precision), native))


WITHOUT_EFFECT = {
    "processes": {"processes": 2},
    "scaler": {"scaler": {"init_scale": 8.0}},
    "optimizer.momentum": {"optimizer": {"name": "adamw", "momentum": 0.9}},
    "optimizer.betas": {"optimizer": {"name": "sgd", "betas": [0.9, 0.99]}},
    "optimizer.eps": {"optimizer": {"name": "sgd", "eps": 1e-6}},
    "schedule.final_lr_ratio": {"schedule": {"final_lr_ratio": 0.1}},
    "evaluation.every_epochs": {"evaluation": {"every_steps": 5, "every_epochs": 2}},
    "loader.prefetch": {"loader": {"workers": 0, "prefetch": 2}},
    "micro_batch_size": {"micro_batch_size": 8},
}


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_reported(field: str) -> None:
    (reported,) = notices(config(**WITHOUT_EFFECT[field]), CPU)
    assert reported.startswith(f"{field} has no effect")


def test_one_process_is_what_a_single_engine_has() -> None:
    """As the resolved run file of another engine says it."""
    assert not notices(config(processes=1), CPU)


def test_a_length_set_twice_is_reported_with_how_to_take_one_back() -> None:
    [problem] = rules.check(config(loop={"steps": 1, "epochs": 1}), CPU)
    assert "loop.epochs=null" in problem.fix


def test_a_split_that_is_not_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test.csv").touch()
    data = workload(TEXTS, evaluation=str(tmp_path / "test.csv"), evaluation_fraction=0.2)
    (reported,) = notices(config(workload=data), CPU)
    assert reported.startswith("workload.data.evaluation_fraction has no effect")


def test_a_resolved_run_file_with_all_defaults_spelled_out_is_not_commented_on() -> None:
    for run in (config(), config(workload=TEXTS, optimizer={"name": "sgd"}, evaluation={"every_steps": 3})):
        spelled_out, problems = validate(run.model_dump(mode="json"), [])
        assert not problems
        assert spelled_out is not None
        assert not notices(spelled_out, CPU)


def test_settings_that_have_an_effect_are_not_mentioned() -> None:
    run = config(
        precision="fp16-mixed",
        scaler={"init_scale": 8.0},
        optimizer={"name": "sgd", "momentum": 0.9},
        schedule={"name": "cosine", "final_lr_ratio": 0.1},
        evaluation={"every_steps": 5},
        loader={"workers": 1, "prefetch": 2},
        micro_batch_size=4,
    )
    assert not notices(run, H100)


def test_adams_eps_that_vanishes_in_fp16_is_reported() -> None:
    for optimizer, reported in (
        ({"name": "adamw"}, True),
        ({"name": "adamw", "eps": 1e-6}, False),
        ({"name": "sgd"}, False),
    ):
        assert ("eps" in " ".join(notices(config(precision="fp16", optimizer=optimizer), H100))) == reported


@pytest.mark.parametrize(
    ("path", "hub"),
    [
        ("owner/name", True),
        ("reviews.csv", False),
        ("folder/reviews.csv", False),
        ("/owner/name", False),
        ("a/b/c", False),
    ],
)
def test_a_hub_id_is_distinguished_from_a_path_that_is_not_there(path: str, hub: bool) -> None:
    assert looks_like_hub_id(path) == hub


def test_rules_are_free_of_torch() -> None:
    program = "import sys, drivetrain.config.rules, drivetrain.config.load; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "changes", [{"offload_activations": True}, {"engine": {"name": "fsdp", "offload": True}, "processes": 2}]
)
def test_what_a_cpu_run_offloads_is_reported_to_save_nothing(changes: dict[str, Any]) -> None:
    (reported,) = notices(config(**changes), CPU)
    assert reported.startswith("offloading saves nothing here")
    assert not any("offloading" in notice for notice in notices(config(**changes), H100))


@pytest.mark.parametrize("more", [{"packing": False}, {"stream": True}])
def test_one_length_of_rows_that_are_not_packed_is_reported_to_have_no_effect(more: dict[str, Any]) -> None:
    talks = {"type": "language_model", "stage": "sft", "model": {"config": {"model_type": "llama"}}}
    data = {"train": "talks.jsonl", "fixed_rows": True}
    assert not any("fixed_rows" in reported for reported in notices(config(workload={**talks, "data": data}), CPU))
    reported = notices(config(workload={**talks, "data": {**data, **more}}), CPU)
    assert any(each.startswith("workload.data.fixed_rows has no effect") for each in reported)


NOT_UNPADDED: list[dict[str, Any]] = [
    {"engine": {"name": "dp", "replicas": 2}},
    {"engine": {"name": "mesh", "tp": 2}, "processes": 2},
    {"compile": True},
]


@pytest.mark.parametrize("changes", NOT_UNPADDED)
def test_texts_are_padded_where_rows_are_dealt_out_or_compiled_and_true_is_refused_there(
    changes: dict[str, Any],
) -> None:
    assert resolved(config(workload=TEXTS, **changes), CPU).workload.data.unpadded is False  # type: ignore[union-attr]
    asked = {**TEXTS, "data": {**TEXTS["data"], "unpadded": True}}
    found = [each.field for each in rules.check_anywhere(config(workload=asked, **changes))]
    assert "workload.data.unpadded" in found


def test_settings_without_effect_on_a_stream_or_without_one_are_refused() -> None:
    named = {**TEXTS, "data": {**TEXTS["data"], "classes": ["a", "b"]}}
    model = {"config": {"model_type": "llama"}}
    data = {"train": "x.txt", "stream": True, "documents": "blank_line"}
    parts = {"type": "language_model", "stage": "pretrain", "model": model, "data": data}
    for workload, field in ((named, "classes"), (parts, "documents")):
        assert f"workload.data.{field}" in [each.field for each in rules.check_anywhere(config(workload=workload))]
        other = {**workload, "data": {**workload["data"], "stream": not workload["data"].get("stream", False)}}
        assert f"workload.data.{field}" not in [each.field for each in rules.check_anywhere(config(workload=other))]


def test_texts_end_to_end_are_left_to_the_model_on_a_cpu_and_off_on_a_gpu() -> None:
    run = config(workload=TEXTS)
    assert resolved(run, CPU).workload.data.unpadded == "auto"  # type: ignore[union-attr]
    assert resolved(run, H100).workload.data.unpadded is False  # type: ignore[union-attr]
