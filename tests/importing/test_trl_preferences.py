"""TRL's DPO, KTO and reward models as JSON or YAML: each run file computes the loss that its trainer does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.distillation import distillation_problems
from drivetrain.config.language import LanguageModel
from drivetrain.errors import UserError
from drivetrain.importing.training_keys import KEYS as TRAINING
from drivetrain.importing.training_keys import TOGETHER as OF_TRAINING
from drivetrain.importing.trl_preferences import KEYS, LENGTH, TRAINERS
from tests.importing.made import imported

MODEL = {"model_name_or_path": "a/b", "dataset_name": "owner/pairs"}
CLASSES = {"trl_dpo": "DPOConfig", "trl_kto": "KTOConfig", "trl_reward": "RewardConfig", "trl_gkd": "GKDConfig"}
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports


def class_of(kind: str) -> Any:
    """TRL's configuration of a kind."""
    place = "trl.experimental.gkd" if kind == "trl_gkd" else "trl"
    return getattr(pytest.importorskip(place), CLASSES[kind])


def run_of(folder: Path, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder / "given.json").write_text(json.dumps({**MODEL, **given}))
    found, raw = imported(folder, folder / "given.json")
    LanguageModel.model_validate(raw["workload"])
    return raw, {note.key: note for _, note in found.notes}


@pytest.mark.parametrize(
    ("given", "stage", "expected"),
    [
        ({"loss_type": "hinge"}, "dpo", {"loss": "hinge", "beta": 0.1}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}, "dpo", {"loss": {"sigmoid": 0.8, "sft": 0.2}}),
        ({"loss_type": "ipo", "loss_weights": 0.5}, "dpo", {"loss": {"ipo": 0.5}}),
        ({"loss_type": ["sigmoid", "sigmoid"]}, "dpo", {"loss": {"sigmoid": 2.0}}),
        ({"loss_type": "robust", "label_smoothing": 0.2}, "dpo", {"loss": "robust", "label_smoothing": 0.2}),
        ({"f_divergence_type": "js_divergence"}, "dpo", {"divergence": "js"}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
            "dpo",
            {"divergence": "alpha", "divergence_alpha": 0.3},
        ),
        ({"loss_type": "discopop", "discopop_tau": 0.1}, "dpo", {"discopop_tau": 0.1}),
        ({"loss_type": "ipo", "use_weighting": True}, "dpo", {"loss": "ipo", "likelihood_weights": True}),
        ({"ld_alpha": 0.4, "beta": 0.3}, "dpo", {"ld_alpha": 0.4, "beta": 0.3}),
        ({"loss_type": "ipo", "precompute_ref_log_probs": True}, "dpo", {"reference": "cached"}),
        (
            {"loss_type": "ipo", "sync_ref_model": True, "ref_model_sync_steps": 9},
            "dpo",
            {"reference": "copy", "reference_every": 9, "reference_mixing": 0.6},
        ),
        ({"loss_type": "kto", "desirable_weight": 1.3}, "kto", {"loss": "kto", "desirable_weight": 1.3}),
        ({"loss_type": "apo_zero_unpaired"}, "kto", {"loss": "apo_zero_unpaired"}),
        ({"center_rewards_coefficient": 0.01}, "reward", {"centring": 0.01}),
    ],
    ids=str,
)
def test_settings_of_the_loss_are_kept(
    tmp_path: Path, given: dict[str, Any], stage: str, expected: dict[str, Any]
) -> None:
    raw, _ = run_of(tmp_path, **given)
    assert raw["workload"]["stage"] == stage
    assert {key: raw["workload"]["preference"].get(key) for key in expected} == expected


def test_a_smoothing_that_the_loss_does_not_read_there_is_not_read_here(tmp_path: Path) -> None:
    raw, notes = run_of(tmp_path, loss_type="sigmoid", label_smoothing=0.1)
    assert "label_smoothing" not in raw["workload"]["preference"]
    assert notes["label_smoothing"].fate == "unneeded"


@pytest.mark.parametrize(
    ("given", "key", "why"),
    [
        ({"loss_type": "ipo", "truncation_mode": "keep_end"}, "truncation_mode", "loses the beginning"),
        ({"loss_type": "ipo", "max_length": None}, "max_length", "give workload.data.length"),
        ({"loss_type": ["robust", "sigmoid"], "label_smoothing": 0.1}, "label_smoothing", "there robust alone"),
        ({"loss_type": "new", "ld_alpha": 1.0}, "loss_type", "new: there are sigmoid"),
        ({"loss_type": "ipo", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef", "no loss of routers"),
        ({"center_rewards_coefficient": 0.0, "eos_token": "x"}, "eos_token", "the tokenizer's own"),
    ],
    ids=str,
)
def test_what_would_train_something_else_is_refused(tmp_path: Path, given: dict[str, Any], key: str, why: str) -> None:
    (tmp_path / "given.json").write_text(json.dumps({**MODEL, **given}))
    found, _ = imported(tmp_path, tmp_path / "given.json")
    [note] = [note for _, note in found.notes if note.key == key]
    assert (note.fate, note.alters) == ("refused", True)
    assert why in note.why


@pytest.mark.parametrize(
    ("given", "key", "why"),
    [
        ({"loss_type": "ipo", "loss_weights": [1.0, 0.5]}, "loss_weights", "2 were given for 1 loss"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": 0.5}, "loss_weights", "1 were given for 2 losses"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": ["high", 1.0]}, "loss_weights", "'high' was given"),
        ({"loss_type": [], "ld_alpha": 1.0}, "loss_type", "it names no loss"),
    ],
    ids=str,
)
def test_losses_and_weights_that_do_not_belong_together_are_refused(
    tmp_path: Path, given: dict[str, Any], key: str, why: str
) -> None:
    (tmp_path / "given.json").write_text(json.dumps({**MODEL, **given}))
    with pytest.raises(UserError) as refused:
        imported(tmp_path, tmp_path / "given.json")
    [found] = refused.value.problems
    assert found.field.endswith(f": {key}")
    assert why in found.why


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_field_of_the_installed_class_is_known(kind: str) -> None:
    trl = pytest.importorskip("trl")
    classes = class_of(kind), trl.ModelConfig, trl.ScriptArguments
    fields = {field.name for each in classes for field in dataclasses.fields(each)}
    assert fields - {*KEYS, *TRAINERS[kind].together, *TRAINING, *OF_TRAINING} == set()


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_defaults_are_those_of_the_installed_class(kind: str) -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(class_of(kind))}
    trainer = TRAINERS[kind]
    ours = {**trainer.usual, **{key: usual for key, (_, usual) in trainer.numbers.items()}, "max_length": LENGTH}
    assert {key: theirs[key] for key in ours} == ours
    assert theirs["bf16"] is None  # on, unless fp16 is


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_the_class_itself_writes_is_read(kind: str, tmp_path: Path) -> None:
    made = class_of(kind)(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False)
    raw, notes = run_of(tmp_path, **json.loads(made.to_json_string()))
    assert raw["workload"]["stage"] == TRAINERS[kind].stage
    assert raw["optimizer"]["lr"] == made.learning_rate
    assert raw["workload"]["data"]["length"] == LENGTH
    assert {note.key for note in notes.values() if note.alters} == set()


def test_what_is_left_out_is_what_trl_does(tmp_path: Path) -> None:
    raw, _ = run_of(tmp_path, loss_type="sigmoid")
    assert raw["optimizer"]["lr"] == 1e-6
    assert (raw["precision"], raw["recompute"], raw["tracking"]["log_every"]) == ("bf16-mixed", True, 10)
    assert raw["workload"]["data"]["length"] == 1024
    assert raw["batch_size_per_device"] == 8


def test_a_file_that_may_be_of_any_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text(json.dumps({**MODEL, "beta": 0.2}))
    with pytest.raises(UserError, match="it may be of any of TRL's trainers"):
        imported(tmp_path, tmp_path / "given.json")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lmbda": 0.7}, {"loss": "js", "beta": 0.5, "own_answers": 0.7, "drawing_temperature": 0.9}),
        ({"beta": 0.0, "seq_kd": False}, {"loss": "forward_kl", "own_answers": 0.5, "max_new_tokens": 128}),
        ({"beta": 1, "lmbda": 1.0, "temperature": 1.0}, {"loss": "reverse_kl", "drawing_temperature": 1.0}),
        ({"lmbda": 0.0, "max_new_tokens": 9}, {"own_answers": 0.0, "max_new_tokens": 128}),
    ],
    ids=str,
)
def test_gkd_keeps_its_divergence_and_the_share_of_own_replies(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    raw, _ = run_of(tmp_path, teacher_model_name_or_path="a/teacher", **given)
    block = LanguageModel.model_validate(raw["workload"]).distillation
    assert (raw["workload"]["stage"], block.teacher.path) == ("distill", "a/teacher")
    found = {**block.model_dump(), "loss": "".join(block.losses)}
    assert {key: found[key] for key in expected} == expected
    assert [*distillation_problems(block, "distill")] == []


def test_replies_of_the_teacher_are_refused_with_the_way_to_make_them(tmp_path: Path) -> None:
    _, notes = run_of(tmp_path, teacher_model_name_or_path="a/teacher", seq_kd=True)
    assert notes["seq_kd"].fate == "refused"
    assert "drivetrain predict" in notes["seq_kd"].why
