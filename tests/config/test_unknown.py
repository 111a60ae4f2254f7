"""Tests the message for a key that has no meaning where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.config.load import load
from drivetrain.config.rules import judged_anywhere
from drivetrain.errors import Problem, UserError

RUN = """
workload:
  type: image_classification
  model: {config: {model_type: resnet}}
  data: {source: digits}
batch_size: 4
loop: {steps: 1}
"""


def words(tmp_path: Path, *overrides: str) -> str:
    (tmp_path / "run.yaml").write_text(RUN)
    _, problems = load(tmp_path / "run.yaml", overrides)
    return "\n".join(map(str, problems))


def test_a_key_of_another_workload_is_called_that(tmp_path: Path) -> None:
    found = words(tmp_path, "workload.data.stream_buffer=5")
    assert "image_classification has no such key: it is of text_classification and language_model" in found
    assert "did you mean" not in found


def test_a_key_that_stands_at_the_top_of_the_run_file_is_reported_with_its_place(tmp_path: Path) -> None:
    assert "write adapter at the top of the run file" in words(tmp_path, "workload.adapter=lora")


def test_a_misspelt_key_is_reported_with_the_nearest_of_its_own_workload(tmp_path: Path) -> None:
    assert "did you mean image_size?" in words(tmp_path, "workload.data.image_sise=8")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("optimizer.learning_rate", "lr"), ("optimizer.lerning_rate", "lr"), ("loop.max_steps", "steps")],
)
def test_a_key_as_other_trainers_call_it_is_reported_with_its_name_here(tmp_path: Path, given: str, meant: str) -> None:
    found = words(tmp_path, "optimizer={name: adamw}", f"{given}=1")
    assert f"{given}: there is no such key\n    did you mean {meant}?" in found


def test_what_a_misspelt_stage_would_read_is_not_refused_for_the_usual_stage(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    stage = {"type": "language_model", "stage": "gpro", "reinforcement": {"rewards": "exact_match", "answers": 4}}
    more = {"model": {"config": {"model_type": "llama"}}, "data": {"train": str(tmp_path / "talk.jsonl")}}
    (tmp_path / "run.yaml").write_text(json.dumps({"workload": {**stage, **more}, "loop": {"steps": 1}}))
    run, problems = load(tmp_path / "run.yaml")
    assert run is not None
    found = "\n".join(map(str, judged_anywhere(run, problems)))
    assert "did you mean grpo?" in found
    assert "reinforcement" not in found


def test_an_option_of_another_engine_names_that_engine(tmp_path: Path) -> None:
    found = words(tmp_path, "engine=ddp", "engine.reshard=true")
    assert "ddp has no such key: it is of fsdp" in found


MISSPELT = [("fdsp", "fsdp"), ("zeroo2", "zero2"), ("acelerate-ddp", "accelerate-ddp")]


@pytest.mark.parametrize(("given", "meant"), MISSPELT)
def test_a_misspelt_engine_is_reported_with_the_nearest_of_the_long_and_the_short_names(
    tmp_path: Path, given: str, meant: str
) -> None:
    found = words(tmp_path, f"engine={given}")
    assert f"did you mean {meant}?" in found
    assert "zero1, zero2, zero3" in found


def test_a_wrong_choice_is_reported_once(tmp_path: Path) -> None:
    found = words(tmp_path, "data.source=folders")
    assert found.count("workload.data.source") == 1


def test_a_key_of_another_workload_is_reported_once_and_its_value_is_not_checked_as_another_key(tmp_path: Path) -> None:
    found = words(tmp_path, "workload.data.text_column=0.3")
    assert "image_classification has no such key: it is of text_classification" in found
    assert "did you mean label_column? Else leave it out" in found
    assert found.count("label_column") == 1


IN_ANOTHER_PLACE = [
    ("workload.lr", "did you mean optimizer.lr?"),
    ("workload.image_size", "did you mean workload.data.image_size?"),
    ("workload.packing", "workload.data.packing is of language_model"),
    ("workload.gradient_accumulation_steps", "give batch_size, the samples of a step"),
    ("num_train_epochs", "did you mean loop.epochs?"),
    ("bf16", "write precision=bf16-mixed"),
    ("gradient_accumulation_steps", "give batch_size, the samples of a step"),
]


@pytest.mark.parametrize(("given", "place"), IN_ANOTHER_PLACE)
def test_a_key_in_the_wrong_place_is_reported_with_where_it_is(tmp_path: Path, given: str, place: str) -> None:
    assert place in words(tmp_path, f"{given}=1")


CHOICES = [
    ("data.source=folders", "did you mean folder?"),
    ("precision=bf16-mix", "did you mean bf16-mixed?"),
    ("workload.type=text", "did you mean text_classification?"),
    ("engine=zero", "did you mean zero0, zero1, zero2 or zero3?"),
    ("precision=BF16-MIXED", "did you mean bf16-mixed?"),
    ("engine=horovod", "give one of them"),
    ("schedule=cosine", "write schedule.name=cosine on the command line, schedule: {name: cosine} in the run file"),
]


@pytest.mark.parametrize(("override", "meant"), CHOICES)
def test_a_wrong_choice_is_reported_with_the_nearest_one(tmp_path: Path, override: str, meant: str) -> None:
    assert meant in words(tmp_path, override)


def test_the_kinds_that_a_field_takes_are_listed_as_one_sentence(tmp_path: Path) -> None:
    found = words(tmp_path, "workload.loss.class_weights=heavy")
    assert "input should be 'balanced', or a mapping of keys, or a valid list" in found


@pytest.mark.parametrize("text", ["model_name_or_path: a\nstage: sft\n", "zero_optimization: {stage: 2}\n"])
def test_for_a_configuration_of_other_software_import_is_proposed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    _, (found,) = load(file, ["lr=3"])
    assert f"drivetrain import {file} --output run.yaml" in found.fix


def test_a_problem_that_several_parts_of_a_run_find_is_reported_once() -> None:
    twice = [Problem("registry", "is not there", "give it") for _ in range(2)]
    assert len(UserError(twice).problems) == 1
