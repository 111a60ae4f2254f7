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
from drivetrain.importing.trl_grpo import COUNTS, KEYS, NUMBERS, TOGETHER, USUAL
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
        ({"disable_dropout": True}, "the model's own dropout is taken"),
        ({"generation_batch_size": 64}, "it depends on the number of devices"),
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
        ({"reward_weights": [1.0]}, "1 were given for 2 rewards"),
        ({"reward_weights": ["high", 1.0]}, "'high' was given"),
        ({"reward_funcs": [{"a": "b"}]}, "{'a': 'b'} is not known"),
        ({"reward_funcs": [3.5]}, "3.5 is not known"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 was given\n    give 1 or more"),
        ({"num_generations": 0}, "num_generations: 0 was given\n    give 1 or more"),
        ({"steps_per_generation": -2}, "steps_per_generation: -2 was given\n    give 1 or more"),
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


def test_what_is_left_out_is_what_trl_does(tmp_path: Path) -> None:
    raw, notes = workload(tmp_path, learning_rate=None)
    assert raw["optimizer"]["lr"] == 1e-6
    assert (raw["precision"], raw["recompute"], raw["tracking"]["log_every"]) == ("bf16-mixed", True, 10)
    assert raw["workload"]["reinforcement"]["max_new_tokens"] == 512
    assert "the source's default" in notes["gradient_checkpointing"].why
    given, _ = workload(tmp_path, fp16=True, gradient_checkpointing=False, learning_rate=5e-5)
    assert (given["precision"], given["recompute"], given["optimizer"]["lr"]) == ("fp16-mixed", False, 5e-5)
    assert workload(tmp_path, bf16=False)[0]["precision"] == "fp32"


def test_the_defaults_are_those_of_the_installed_class() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {**USUAL, **{key: default for key, (_, default) in {**NUMBERS, **COUNTS}.items()}}
    assert {key: theirs[key] for key in ours} == ours
    assert theirs["bf16"] is None  # on, unless fp16 is


def test_nothing_is_held_out_and_an_evaluation_has_the_test_split(tmp_path: Path) -> None:
    data = workload(tmp_path, eval_strategy="no")[0]["workload"]["data"]
    assert data == {"train": "owner/questions", "evaluation_fraction": 0.0}
    given = {"dataset_train_split": "math", "dataset_test_split": "held", "eval_strategy": "epoch"}
    data = workload(tmp_path, **given)[0]["workload"]["data"]
    assert data["train"] == {"path": "owner/questions", "split": "math"}
    assert data["evaluation"] == {"path": "owner/questions", "split": "held"}
    assert "evaluation_fraction" not in data


def test_data_in_their_own_order_are_refused(tmp_path: Path) -> None:
    assert workload(tmp_path, shuffle_dataset=False)[1]["shuffle_dataset"].fate == "refused"
    assert workload(tmp_path, shuffle_dataset=True)[1]["shuffle_dataset"].fate == "unneeded"
    _, notes = workload(tmp_path, generation_batch_size=32, steps_per_generation=2)  # as GRPOConfig writes itself
    assert notes["generation_batch_size"].fate == "unneeded"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"use_vllm": True}, {"importance_cap": 3.0, "importance_correction": "sequence_mask"}),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2,
            },
            {"importance_cap": 2.0, "importance_correction": "token_truncate"},
        ),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_max": None,
                "vllm_importance_sampling_clip_min": 0.5,
            },
            {"importance_floor": 0.5, "importance_correction": "token_mask"},
        ),
        ({"use_vllm": True, "vllm_importance_sampling_cap": 4.0}, {"importance_cap": 4.0}),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {}),
        ({"vllm_importance_sampling_mode": "token_mask"}, {}),
    ],
    ids=str,
)
def test_weights_for_vllms_probabilities_are_kept_where_trl_has_them(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    raw, _ = workload(tmp_path, **given)
    learning = raw["workload"]["reinforcement"]
    assert {key: value for key, value in learning.items() if key.startswith("importance_")} == {
        **({"importance_correction": "sequence_mask"} if "importance_cap" in expected else {}),
        **expected,
    }


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"vllm_server_host": "gpu7", "vllm_server_port": 9000}, "http://gpu7:9000"),
        ({"vllm_server_base_url": "https://gpus/vllm", "vllm_server_port": 9000}, "https://gpus/vllm"),
        ({"vllm_mode": "colocate"}, None),
        ({"use_vllm": False}, None),
    ],
    ids=str,
)
def test_vllms_server_answers_here_too(tmp_path: Path, given: dict[str, Any], url: str | None) -> None:
    raw, notes = workload(tmp_path, **{"use_vllm": True, "vllm_mode": "server", **given})
    assert raw["workload"]["reinforcement"].get("server") == (None if url is None else {"url": url})
    assert notes["vllm_mode"].fate == ("unneeded" if url is None else "mapped")
    assert url is None or "VLLM_SERVER_DEV_MODE=1 vllm serve" in notes["vllm_mode"].why


@pytest.mark.parametrize(
    ("given", "key", "why"),
    [
        ({"vllm_importance_sampling_mode": "tokens"}, "vllm_importance_sampling_mode", "there are token_truncate"),
        ({"vllm_importance_sampling_clip_max": None}, "vllm_importance_sampling_mode", "within bounds"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
            "vllm_importance_sampling_mode",
            "vespo",
        ),
    ],
)
def test_weights_that_there_are_none_of_here_are_refused(
    tmp_path: Path, given: dict[str, Any], key: str, why: str
) -> None:
    _, notes = workload(tmp_path, use_vllm=True, **{"vllm_importance_sampling_mode": "token_mask", **given})
    assert notes[key].fate == "refused"
    assert why in notes[key].why
