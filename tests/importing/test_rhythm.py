"""Intervals and limits where -1, 0 or a share means something of its own, against what the software does with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_callback import TrainerState

from drivetrain.errors import UserError
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.training_rhythm import evaluation
from drivetrain.importing.translated_file import Source, TranslatedFile
from tests.importing.made import notes_of, run_of

XTUNER = """
train_cfg = dict({length})
optim_wrapper = dict(accumulative_counts=4)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', {saving}))
"""


@pytest.mark.parametrize("saving", ["by_epoch=False, interval=-1", "by_epoch=False, interval=0", "interval=-1", ""])
def test_a_checkpoint_interval_of_xtuner_that_never_comes_saves_at_the_end(saving: str, tmp_path: Path) -> None:
    text = XTUNER.format(length="max_iters=1200", saving=saving)
    assert run_of(tmp_path, text, ending=".py")["checkpoints"] == {"every_steps": 300}  # the run's 300 steps
    text = XTUNER.format(length="max_epochs=2", saving=saving)
    assert "checkpoints" not in run_of(tmp_path, text, ending=".py")
    if "interval" in saving:
        note = notes_of(tmp_path, text, ".py")["default_hooks.checkpoint.interval"]
        assert note.fate == "changed"
        assert "there at the end only" in note.why


def test_a_checkpoint_interval_of_xtuner_counts_iterations(tmp_path: Path) -> None:
    text = XTUNER.format(length="max_iters=1200", saving="by_epoch=False, interval=40, max_keep_ckpts=-1")
    assert run_of(tmp_path, text, ending=".py")["checkpoints"] == {"every_steps": 10}


@pytest.mark.parametrize("key", ["val_interval", "logger"])
@pytest.mark.parametrize("every", [0, -1])
def test_other_intervals_of_xtuner_are_above_0(key: str, every: int, tmp_path: Path) -> None:
    logger = f"default_hooks = dict(logger=dict(interval={every}))\ntrain_cfg = dict(max_iters=9)"
    text = logger if key == "logger" else f"train_cfg = dict(max_iters=9, val_interval={every})"
    with pytest.raises(UserError, match=f"{every} was given"):
        run_of(tmp_path, text, ending=".py")


def arguments(**keys: Any) -> str:
    return json.dumps({"output_dir": "o", "max_steps": 210, **keys})


@pytest.mark.parametrize("share", [0.1, 0.25, 0.333, 0.999])
def test_a_share_of_all_steps_is_as_many_as_the_trainer_counts(share: float, tmp_path: Path) -> None:
    class Arguments:
        logging_steps = eval_steps = save_steps = share

    state = TrainerState()
    state.compute_steps(Arguments(), 210)
    keys = {"eval_strategy": "steps", "eval_steps": share, "save_steps": share, "logging_steps": share}
    raw = run_of(tmp_path, arguments(**keys), ending=".json")
    assert raw["evaluation"]["every_steps"] == state.eval_steps == math.ceil(210 * share)
    assert raw["checkpoints"]["every_steps"] == state.save_steps
    assert raw["tracking"]["log_every"] == state.logging_steps


def test_a_share_of_unknown_steps_is_refused(tmp_path: Path) -> None:
    text = arguments(max_steps=-1, num_train_epochs=2, eval_strategy="steps", eval_steps=0.5, save_steps=0.5)
    notes = notes_of(tmp_path, text, ".json")
    assert notes["eval_steps"].fate == notes["save_steps"].fate == "refused"
    assert "a share of all steps" in notes["save_steps"].why


@pytest.mark.parametrize("never", [0, -1])
def test_saving_that_never_comes_is_saving_at_the_end(never: int, tmp_path: Path) -> None:
    assert run_of(tmp_path, arguments(save_steps=never), ending=".json")["checkpoints"] == {"every_steps": 210}
    text = arguments(save_steps=never, max_steps=-1)
    assert "checkpoints" not in run_of(tmp_path, text, ending=".json")
    assert notes_of(tmp_path, text, ".json")["save_steps"].fate == "changed"


@pytest.mark.parametrize("key", ["logging_steps", "eval_steps"])
def test_what_the_trainer_cannot_count_by_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{key}: -1 was given"):
        run_of(tmp_path, arguments(eval_strategy="steps", **{key: -1}), ending=".json")


def test_eval_steps_of_0_are_the_logging_steps(tmp_path: Path) -> None:
    text = arguments(eval_strategy="steps", eval_steps=0, logging_steps=7)
    assert run_of(tmp_path, text, ending=".json")["evaluation"]["every_steps"] == 7


@pytest.mark.parametrize("norm", [0, -1])
def test_a_norm_that_clips_nothing_is_none(norm: float, tmp_path: Path) -> None:
    assert run_of(tmp_path, arguments(max_grad_norm=norm), ending=".json")["loop"]["max_grad_norm"] is None
    deepspeed = '{"train_batch_size": 8, "gradient_clipping": 0}'
    assert run_of(tmp_path, deepspeed, ending=".json")["loop"] == {"max_grad_norm": None}
    accelerate = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 0}\n"
    assert run_of(tmp_path, accelerate)["loop"] == {"max_grad_norm": None}


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_on_checkpoints_is_reported(limit: int, tmp_path: Path) -> None:
    assert notes_of(tmp_path, arguments(save_total_limit=limit), ".json")["save_total_limit"].fate == "changed"


def test_the_metric_keeps_its_capitals(tmp_path: Path) -> None:
    found = TranslatedFile(
        Source("given.json", "training_arguments", {"metric_for_best_model": "eval_Brier"}, tmp_path)
    )
    evaluation(KeyReader(found.source.raw, found))
    assert found.translation.settings["evaluation.metric"] == "Brier"
