"""TRL's GRPO as JSON or YAML: each run file computes the loss that its trainer does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from drivetrain.importing.training_keys import KEYS as TRAINING
from drivetrain.importing.training_keys import TOGETHER as OF_TRAINING
from drivetrain.importing.trl_grpo import KEYS, TOGETHER
from tests.importing.made import imported

GIVEN = {
    "model_name_or_path": "a/b",
    "dataset_name": "owner/questions",
    "reward_funcs": ["accuracy_reward", "my_rewards.brevity"],
    "num_generations": 8,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-6,
}


def workload(folder: Path, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder / "given.json").write_text(json.dumps({**GIVEN, **given}))
    found, raw = imported(folder, folder / "given.json")
    return raw, {note.key: note for _, note in found.notes}


def test_a_short_one_keeps_batch_rewards_and_loss(tmp_path: Path) -> None:
    raw, _ = workload(tmp_path)
    assert (raw["batch_size_per_device"], raw["micro_batch_size"]) == (4, 16)
    learning = raw["workload"]["reinforcement"]
    assert raw["workload"]["stage"] == "grpo"
    assert learning["rewards"] == ["math", {"use": "my_rewards:brevity"}]
    assert (learning["answers"], learning["updates"]) == (8, 1)
    assert learning.get("loss", "dapo") == "dapo"


def test_settings_of_the_loss_are_kept(tmp_path: Path) -> None:
    given = {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.04, "num_iterations": 2}
    given |= {"importance_sampling_level": "sequence", "scale_rewards": False, "steps_per_generation": 4}
    given |= {"reward_weights": [1.0, 0.5], "use_peft": True, "lora_r": 8}
    raw, _ = workload(tmp_path, **given)
    learning = raw["workload"]["reinforcement"]
    expected = {"loss": "grpo", "clip": 0.1, "clip_high": 0.3, "beta": 0.04, "passes": 2, "importance": "sequence"}
    expected |= {"kl_ratio": True}
    assert {key: learning[key] for key in expected} == expected
    assert (learning["scale"], learning["updates"], raw["batch_size_per_device"]) == ("none", 2, 8)
    assert learning["rewards"] == [{"use": "math", "weight": 1.0}, {"use": "my_rewards:brevity", "weight": 0.5}]
    assert raw["adapter"]["rank"] == 8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"top_p": 0.9}, "all tokens are drawn from"),
        ({"entropy_coef": 0.1}, "there is no bonus for entropy"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "rewards are added up before"),
    ],
)
def test_what_would_train_something_else_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    _, notes = workload(tmp_path, **given)
    [note] = [notes[key] for key in given]
    assert note.fate == "refused"
    assert note.alters
    assert why in note.why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"per_device_train_batch_size": 3}, "are no whole number of groups of 8"),
        ({"reward_funcs": ["brevity"]}, "brevity is not known"),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    (tmp_path / "given.json").write_text(json.dumps({**GIVEN, **given}))
    with pytest.raises(UserError, match=why):
        imported(tmp_path, tmp_path / "given.json")


def test_every_field_of_the_installed_class_is_known() -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields - {*KEYS, *TOGETHER, *TRAINING, *OF_TRAINING} == set()
