"""Tests that the stages which learn from preferences and rewards are planned as they are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.plan.machines import cluster
from drivetrain.plan.planning import planned as plan_of
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import step_costs
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import read_workload
from tests.plan.measured import LLAMA, measured_peak, read_run, write_run

PREFERENCES = [
    ["stage=dpo"],
    ["stage=dpo", "workload.preference.loss=bco_pair", "micro_batch_size=2"],  # compares with the whole batch
    ["stage=dpo", "workload.data.packing=false"],
    ["stage=dpo", "workload.preference.reference_every=1"],
    ["stage=dpo", "workload.preference.reference=cached"],
    ["stage=dpo", "workload.preference.likelihood_weights=true"],
    ["stage=orpo"],
    ["stage=simpo", "precision=bf16-mixed"],
    ["stage=kto"],
    ["stage=kto", "micro_batch_size=2"],
    ["stage=kto", "workload.data.packing=false"],
    ["stage=kto", "workload.preference.reference=cached"],
    ["stage=dpo", "workload.model.config.vocab_size=8192"],  # whose losses are made some rows at a time
]
TAUGHT = [["stage=distill"], ["stage=distill", "workload.distillation.loss={reverse_kl: 1, sft: 0.5}"]]
TAUGHT += [["stage=distill", "precision=bf16-mixed"]]
REWARDS = [["stage=grpo"], ["stage=grpo", "workload.reinforcement.temperature=0.7"], ["stage=rloo"], ["stage=ppo"]]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stages")
    pairs = [{"prompt": f"{n} {n}", "chosen": f"good {n * n}", "rejected": f"bad {n}"} for n in range(40)]
    labelled = [{"prompt": f"{n} {n}", "completion": f"this is {n * n}", "label": n % 2 == 0} for n in range(40)]
    answers = [{"instruction": f"{n} + {n}?", "output": str(2 * n)} for n in range(40)]
    for name, rows in (("pairs", pairs), ("labelled", labelled), ("answers", answers)):
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return write_run(folder, train=str(folder / "pairs.json"), template="plain", length=48)


def of_stage(run_file: str, overrides: list[str]) -> list[str]:
    """Returns the overrides, with data of the stage's kind."""
    data = {"stage=kto": "labelled", **dict.fromkeys(("stage=grpo", "stage=rloo", "stage=ppo"), "answers")}
    name = data.get(overrides[0], "pairs")
    words = [f"data.train={Path(run_file).parent / name}.json", f"workload.{overrides[0]}", *overrides[1:]]
    rewards = ["workload.reinforcement={rewards: [exact_match], answers: 4, max_new_tokens: 8}"]
    return [words[0], words[1], *(rewards if name == "answers" else []), *words[2:]]


def planned(run_file: str, overrides: list[str]) -> StepCosts:
    run = read_run(run_file, overrides)
    return step_costs(run, detect(), read_workload(run, training=True))


@pytest.mark.parametrize("overrides", PREFERENCES, ids=" ".join)
def test_the_planned_peak_of_a_stage_of_preferences_is_the_measured_one(run_file: str, overrides: list[str]) -> None:
    words = of_stage(run_file, overrides)
    assert planned(run_file, words).memory.allocated == measured_peak(read_run(run_file, words))[0]


@pytest.mark.parametrize("stage", ["sft", "dpo", "orpo", "kto", "reward", "grpo", "ppo"])
def test_activations_of_feed_forward_parts_that_compute_silu_again_are_planned(
    run_file: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of (tokens, intermediate) less for each block, and of the last one for the places that are read."""
    words = of_stage(run_file, [f"stage={stage}"])
    if stage == "sft":
        words = [f"data.train={Path(run_file).parent / 'answers.json'}", "workload.stage=sft"]
    found = planned(run_file, words)
    for builds in ("language_build", "reward_build"):
        monkeypatch.setattr(f"drivetrain.workloads.{builds}.recompute_silu", lambda _: 0)
    usual = planned(run_file, words)
    assert found.tokens == usual.tokens is not None
    inner = 4 * LLAMA["intermediate_size"] * found.tokens
    less = usual.memory.parts["activations"] - found.memory.parts["activations"]
    assert inner <= less <= 2 * inner


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_places_that_are_read_alone_since_they_are_few_are_planned(run_file: str, stage: str) -> None:
    """Long prompts with short answers: of the last block attention has the queries of these places alone."""
    data = Path(run_file).parent / "long.json"
    data.write_text(json.dumps([{"prompt": f"{n} " * 24, "chosen": "a", "rejected": "b"} for n in range(10, 40)]))
    words = [f"data.train={data}", f"workload.stage={stage}"]
    peak = measured_peak(read_run(run_file, words))[0]
    assert peak <= planned(run_file, words).memory.allocated <= 1.02 * peak


def test_a_pipeline_of_pairs_is_traced_stage_by_stage(run_file: str) -> None:
    words = of_stage(run_file, ["stage=orpo", "engine={name: mesh, pp: 2}", "processes=2"])
    run = read_run(run_file, words)
    stages = [step_costs(run, detect(), read_workload(run, training=True), rank).memory for rank in (0, 1)]
    alone = planned(run_file, of_stage(run_file, ["stage=orpo"])).memory
    assert sum(each.parts["parameters"] for each in stages) == pytest.approx(alone.parts["parameters"], rel=0.01)


@pytest.fixture(scope="module")
def teacher(run_file: str) -> str:
    """The run's model, saved with its tokenizer."""
    run = read_run(run_file, [f"data.train={Path(run_file).parent / 'answers.json'}", "workload.stage=sft"])
    folder, work = Path(run_file).parent / "teacher", read_workload(run, training=True)
    model: Any = work.build_model()
    model.save_pretrained(folder)
    work.save_assets(model, folder)
    return str(folder)


@pytest.mark.parametrize("overrides", TAUGHT, ids=" ".join)
def test_a_teacher_is_planned(run_file: str, teacher: str, overrides: list[str]) -> None:
    words = [f"data.train={Path(run_file).parent / 'answers.json'}", f"workload.{overrides[0]}", *overrides[1:]]
    words.append(f"workload.distillation.teacher={teacher}")
    run = read_run(run_file, words)
    alone = planned(run_file, [words[0], "workload.stage=sft", *(each for each in overrides[1:] if "prec" in each)])
    found = planned(run_file, words).memory.allocated
    assert found == pytest.approx(measured_peak(run)[0], rel=1e-4)
    assert found > alone.memory.allocated


def test_a_teacher_in_16_bits_is_planned_at_half_its_weights(run_file: str, teacher: str) -> None:
    words = [f"data.train={Path(run_file).parent / 'answers.json'}", "workload.stage=distill"]
    whole = planned(run_file, [*words, f"workload.distillation.teacher={teacher}"]).memory.allocated
    words.append(f"workload.distillation.teacher={{path: {teacher}, precision: bf16}}")
    run = read_run(run_file, words)
    halved = planned(run_file, words).memory.allocated
    assert halved == pytest.approx(measured_peak(run)[0], rel=1e-4)
    weights = sum(parameter.numel() for parameter in read_workload(run, training=True).build_model().parameters())
    assert whole - halved >= 1.9 * weights


def test_a_cached_reference_is_planned_without_a_second_model(run_file: str) -> None:
    words = of_stage(run_file, ["stage=dpo"])
    copied, cached = (
        planned(run_file, [*words, f"workload.preference.reference={name}"]).memory for name in ("copy", "cached")
    )
    model = read_workload(read_run(run_file, words), training=True).build_model()
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    assert copied.allocated - cached.allocated >= 0.99 * weights  # less what a batch carries


def test_a_reward_model_is_planned(run_file: str) -> None:
    """The plan of these padded rows has some 32 KB more than is measured."""
    words = of_stage(run_file, ["stage=reward"])
    peak = measured_peak(read_run(run_file, words))[0]
    assert peak <= planned(run_file, words).memory.allocated <= 1.02 * peak


@pytest.mark.parametrize("overrides", REWARDS, ids=" ".join)
def test_an_update_of_a_stage_of_rewards_is_planned(run_file: str, overrides: list[str]) -> None:
    costs = planned(run_file, of_stage(run_file, overrides))
    assert costs.origin == "traced"
    assert costs.tokens is not None
    assert costs.tokens > 8 * 4 * 8  # prompts, answers, and their tokens


def test_a_plan_of_rewards_says_that_answers_are_left_out(run_file: str) -> None:
    words = of_stage(run_file, ["stage=grpo"])
    notes = plan_of(Path(run_file), [*words, "engine=single,ddp"], "2xA100-80GB").notes
    assert any("the answers that the model gives before them" in each for each in notes)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_packed_rows_take_one_call_of_attention_a_layer_on_a_gpu(precision: str, run_file: str) -> None:
    """Whichever of the kernels for sequences end to end it is; on a CPU each sequence is a call."""
    words = [f"data.train={Path(run_file).parent / 'answers.json'}", "workload.stage=sft", f"precision={precision}"]
    run = read_run(run_file, [*words, "workload.model.config.num_attention_heads=2"])
    costs = step_costs(run, cluster("1xH100").host, read_workload(run, training=True))
    forward_and_backward = 2 * run.workload.model.config["num_hidden_layers"]
    assert sum(each.calls for each in costs.operations if each.kind == "attention") == forward_and_backward
