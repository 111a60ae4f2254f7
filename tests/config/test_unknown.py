"""What a user is told of a key that stands where it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.config.load import load

RUN = """
workload:
  type: image_classification
  model: {config: {model_type: resnet}}
  data: {source: digits}
batch_size: 4
loop: {steps: 1}
"""


def told(tmp_path: Path, *overrides: str) -> str:
    (tmp_path / "run.yaml").write_text(RUN)
    _, problems = load(tmp_path / "run.yaml", overrides)
    return "\n".join(map(str, problems))


def test_a_key_of_another_workload_is_called_that(tmp_path: Path) -> None:
    found = told(tmp_path, "workload.data.bad_rows=drop")
    assert "image_classification has no such key: it is of text_classification and language_model" in found
    assert "did you mean" not in found


def test_a_key_that_stands_at_the_top_of_the_run_file_is_told_its_place(tmp_path: Path) -> None:
    assert "write adapter at the top of the run file" in told(tmp_path, "workload.adapter=lora")


def test_a_misspelt_key_is_told_the_nearest_of_its_own_workload(tmp_path: Path) -> None:
    assert "did you mean image_size?" in told(tmp_path, "workload.data.image_sise=8")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("optimizer.learning_rate", "lr"), ("optimizer.lerning_rate", "lr"), ("loop.max_steps", "steps")],
)
def test_a_key_as_other_trainers_call_it_is_told_its_name_here(tmp_path: Path, given: str, meant: str) -> None:
    found = told(tmp_path, "optimizer={name: adamw}", f"{given}=1")
    assert f"{given}: there is no such key\n    did you mean {meant}?" in found


def test_an_option_of_another_engine_names_that_engine(tmp_path: Path) -> None:
    found = told(tmp_path, "engine=ddp", "engine.reshard=true")
    assert "ddp has no such key: it is of fsdp" in found


MISSPELT = [("fdsp", "fsdp"), ("zeroo2", "zero2"), ("acelerate-ddp", "accelerate-ddp")]


@pytest.mark.parametrize(("given", "meant"), MISSPELT)
def test_a_misspelt_engine_is_told_the_nearest_of_the_long_and_the_short_names(
    tmp_path: Path, given: str, meant: str
) -> None:
    found = told(tmp_path, f"engine={given}")
    assert f"did you mean {meant}?" in found
    assert "zero1, zero2, zero3" in found


def test_a_wrong_choice_is_told_once(tmp_path: Path) -> None:
    found = told(tmp_path, "data.source=folders")
    assert found.count("workload.data.source") == 1
