"""A run's checkpoints: what is restored, what is skipped, and what a resumed run may not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.directory import load, read_manifest, steps
from drivetrain.checkpoint.saving import save
from drivetrain.checkpoint.state import same
from drivetrain.config.load import validate
from drivetrain.config.training import Optimizer
from drivetrain.data.language.samples import JoinedSamples
from drivetrain.data.mixture import Phase
from drivetrain.data.streams.mixture import Mix
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError, UserError
from drivetrain.tracking.events import CheckpointSaved, Event, Warned
from drivetrain.training import run_checkpoints
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.workloads.base import BestMetric
from tests.parity.cases import Case
from tests.ranks import RankPool
from tests.resumed_ranks import masks_after_a_resume
from tests.tiny_workload import Rows, TinyWorkload, perceptron, tiny_engine

ADAMW = Optimizer(lr=0.01)


class Training:
    """An engine with the checkpoints of one folder, and their messages."""

    def __init__(self, root: Path, precision: str = "fp32", samples: Any = range(40), **changes: Any) -> None:
        raw = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 8, "loop": {"steps": 9}}
        run, _ = validate(raw | {"precision": precision} | changes, [])
        assert run is not None
        optimizer = run.optimizer if "optimizer" in changes else ADAMW
        self.engine = tiny_engine(TinyWorkload(perceptron), precision, optimizer, scaler=run.scaler)
        self.events: list[Event] = []
        self.progress = Progress()
        metric = BestMetric("accuracy", higher_is_better=True)
        self.checkpoints = RunCheckpoints(root, run, self.engine, Communicator(), metric, samples, self.events.append)

    def train(self, progress: Progress, steps: int) -> Progress:
        for _ in range(steps):
            self.engine.forward_backward([Rows(40).micro(*range(progress.step, progress.step + 8))])
            progress.updates += not self.engine.optimizer_step(1.0).skipped
            progress.step += 1
        return progress

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16-mixed"])
def test_a_restored_run_goes_on_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    settings = {"scaler": {"growth_interval": 2}} if precision == "fp16-mixed" else {}
    first = Training(tmp_path, precision, **settings)
    progress = first.train(Progress(best={"step": 1, "metric": "accuracy", "value": 0.5}), 3)
    first.checkpoints.save(progress)
    first.train(progress, 4)
    second = Training(tmp_path, precision, **settings)
    again = second.checkpoints.restore()
    assert again.step == 3
    assert again.best == progress.best
    second.train(again, 4)
    assert same(first.engine.state_dict(), second.engine.state_dict())


def test_a_mixture_whose_weights_changed_is_not_resumed_under_way(tmp_path: Path) -> None:
    even, once = Mix([Phase(0, (1.0, 1.0))]), Mix()
    uneven = Mix([Phase(0, (1.0, 1.0)), Phase(5, (3.0, 1.0))])
    first = Training(tmp_path, samples=JoinedSamples([], even.in_words))
    first.checkpoints.save(first.train(Progress(), 3))
    first.checkpoints.finish()
    assert Training(tmp_path, samples=JoinedSamples([], even.in_words)).checkpoints.restore().step == 3
    for changed in (uneven, once, Mix(even.phases, most_passes=[2.0, None])):
        with pytest.raises(UserError, match=r"order of the data changed .* mixture was concat 1:1 from step 0, now"):
            Training(tmp_path, samples=JoinedSamples([], changed.in_words)).checkpoints.restore()


def test_a_resumed_run_takes_its_own_learning_rate_and_the_saved_moments(tmp_path: Path) -> None:
    first = Training(tmp_path, optimizer={"lr": 0.01, "weight_decay": 0.1})
    progress = first.train(Progress(), 3)
    first.checkpoints.save(progress)
    moments = {name: state["exp_avg"].clone() for name, state in states(first).items()}
    second = Training(tmp_path, optimizer={"lr": 1e-5, "weight_decay": 0.0, "betas": [0.8, 0.9]})
    again = second.checkpoints.restore()
    assert all(torch.equal(state["exp_avg"], moments[name]) for name, state in states(second).items())
    before = {name: weight.clone() for name, weight in second.engine.weights().items()}
    second.train(again, 1)
    moved = max(float((weight - before[name]).abs().max()) for name, weight in second.engine.weights().items())
    assert 0 < moved < 1e-4, "by the new rate"
    assert second.engine.state_dict()["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)


def states(training: Training) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = training.engine.state_dict()["optimizer"]["state"]
    return found


def test_another_length_is_reported_where_the_schedule_follows_it(tmp_path: Path) -> None:
    first = Training(tmp_path, schedule={"name": "linear"})
    first.checkpoints.save(first.train(Progress(), 3))
    words = []
    for loop, name in (({"steps": 9}, "linear"), ({"epochs": 1}, "linear"), ({"steps": 18}, "constant")):
        second = Training(tmp_path, loop=loop, schedule={"name": name})
        second.checkpoints.restore()
        words.append(second.warnings())
    [message] = words[1]
    assert (words[0], words[2]) == ([], [])
    assert message == (
        "the checkpoint is of a run of 9 steps, and this one has 1 epoch: the learning rate leaves the old schedule "
        "here and goes on along one of 1 epoch (linear)"
    )


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, optimizer={"name": "sgd", "lr": 0.1})
    training.checkpoints.save(training.train(Progress(), 1))
    with pytest.raises(UserError, match=r"the state of sgd, which adamw cannot take"):
        Training(tmp_path).checkpoints.restore()


def test_a_run_may_begin_to_scale_its_loss(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.checkpoints.save(training.train(Progress(), 2))
    assert Training(tmp_path, "fp16-mixed").checkpoints.restore().step == 2


def test_random_numbers_go_on_where_the_checkpoint_stood(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.checkpoints.save(training.train(Progress(), 1))
    expected = torch.rand(3)
    torch.rand(100)
    Training(tmp_path).checkpoints.restore()
    assert torch.equal(torch.rand(3), expected)


def test_each_rank_goes_on_with_its_own_random_numbers(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    case = Case("ddp", 2, model="dropout")
    (same_bits, first), (_, second) = ranks(2).run(masks_after_a_resume, case, tmp_path)
    for without_break, resumed in (first, second):
        assert resumed == without_break
    assert first != second, "two streams"
    assert all(same_bits)


def test_the_metric_of_its_own_evaluation_stands_in_the_manifest(tmp_path: Path) -> None:
    training = Training(tmp_path, checkpoints={"keep_last": 9})
    training.checkpoints.save(Progress(step=1, metrics={"accuracy": 0.5}, last_evaluation=1))
    training.checkpoints.save(Progress(step=2, metrics={"accuracy": 0.5}, last_evaluation=1))
    evaluated, not_evaluated = (read_manifest(path).facts for path in steps(tmp_path))
    assert evaluated["metric"] == 0.5
    assert "metric" not in not_evaluated
    assert (evaluated["precision"], evaluated["engine"]) == ("fp32", "single")


def evaluated_at(step: int, accuracy: float, best: int) -> Progress:
    return Progress(
        step=step,
        metrics={"accuracy": accuracy},
        last_evaluation=step,
        best={"step": best, "metric": "accuracy", "value": 0.9},
    )


def test_the_best_checkpoint_is_of_the_best_evaluation_or_there_is_none(tmp_path: Path) -> None:
    """Not saved, or damaged: another one is not called the best."""
    training = Training(tmp_path, checkpoints={"keep_last": 9})
    training.checkpoints.save(evaluated_at(1, 0.5, best=1))
    training.checkpoints.save(evaluated_at(3, 0.9, best=2))
    assert training.checkpoints.best(evaluated_at(3, 0.9, best=2)) is None, "equal, but later"
    third = evaluated_at(3, 0.9, best=3)
    assert training.checkpoints.best(third) == tmp_path / "step-00000003"
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"cut")
    assert training.checkpoints.best(third) is None
    assert training.checkpoints.best(Progress(step=3)) is None


def test_a_run_that_goes_back_to_a_metric_has_its_best_from_the_checkpoints(tmp_path: Path) -> None:
    training = Training(tmp_path, checkpoints={"keep_last": 9})
    training.checkpoints.save(evaluated_at(1, 0.9, best=1))
    between = {"step": 2, "metric": "loss", "value": 0.1}
    training.checkpoints.save(Progress(step=2, metrics={"accuracy": 0.2}, last_evaluation=0, best=between))
    again = Training(tmp_path, checkpoints={"keep_last": 9})
    progress = again.checkpoints.restore()
    assert "chosen by loss so far, and is by accuracy from here on" in again.warnings()[0]
    assert progress.best == {"step": 1, "metric": "accuracy", "value": 0.9}
    assert again.checkpoints.best(progress) == tmp_path / "step-00000001"


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, checkpoints={"keep_last": 2, "keep_best": 1})
    for step, accuracy in enumerate((0.1, 0.9, 0.3, 0.4, 0.5), 1):
        progress = evaluated_at(step, accuracy, best=2 if step > 1 else 1)
        training.checkpoints.save(progress)
    assert [path.name for path in steps(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    assert training.checkpoints.best(progress) == tmp_path / "step-00000002"
    assert training.checkpoints.newest() == tmp_path / "step-00000005"
    sizes = [event.bytes for event in training.events if isinstance(event, CheckpointSaved)]
    assert len(sizes) == 5
    assert min(sizes) > 0


ASYNCHRONOUS = {"checkpoints": {"asynchronous": True, "keep_last": 9}}


def test_an_asynchronous_save_holds_the_step_that_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while it is written: that does not get in."""
    go_on = threading.Event()

    def slow(*given: Any) -> Path:
        assert go_on.wait(60)
        return save(*given)

    monkeypatch.setattr(run_checkpoints, "save", slow)
    behind = Training(tmp_path / "behind", **ASYNCHRONOUS)
    with behind.checkpoints:
        progress = behind.train(Progress(), 2)
        behind.checkpoints.save(progress)
        behind.train(progress, 2)
        assert not steps(tmp_path / "behind"), "nobody waited for it"
        go_on.set()
        behind.checkpoints.save(progress)
    at_once = Training(tmp_path / "at-once", checkpoints={"keep_last": 9})
    for _ in range(2):
        at_once.checkpoints.save(at_once.train(at_once.progress, 2))
    for one, other in zip(steps(tmp_path / "behind"), steps(tmp_path / "at-once"), strict=True):
        ours, theirs = load(one), load(other)
        assert same(ours["model"], theirs["model"])
        assert same(ours["optimizer"], theirs["optimizer"])
    assert [path.name for path in steps(tmp_path / "behind")] == ["step-00000002", "step-00000004"]


def test_what_goes_wrong_behind_the_training_is_reported_by_the_next_save_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Path:
        raise RunError("the disk is full")

    training = Training(tmp_path, **ASYNCHRONOUS)
    training.checkpoints.save(training.train(Progress(), 1))
    training.checkpoints.finish()
    monkeypatch.setattr(run_checkpoints, "save", failing)
    training.checkpoints.save(Progress(step=2))
    with pytest.raises(RunError, match="the disk is full"):
        training.checkpoints.save(Progress(step=3))
    with pytest.raises(RunError, match="the disk is full"), training.checkpoints:
        training.checkpoints.save(Progress(step=4))
    assert [path.name for path in steps(tmp_path)] == ["step-00000001"]


def test_nothing_to_resume_is_a_start_that_says_so(tmp_path: Path) -> None:
    training = Training(tmp_path / "none")
    assert training.checkpoints.restore() == Progress()
    assert "starting from the beginning" in training.warnings()[0]


def test_a_damaged_newest_is_skipped_and_only_damaged_ones_are_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for step in (1, 2):
        training.checkpoints.save(Progress(step=step))
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"cut")
    other = Training(tmp_path)
    assert other.checkpoints.restore().step == 1
    assert "step-00000002: model.safetensors has 3 bytes" in other.warnings()[0]
    (tmp_path / "step-00000001" / "optimizer.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* verifies"):
        Training(tmp_path).checkpoints.restore()


@pytest.mark.parametrize(
    ("change", "reported"), [({"batch_size": 4}, "batch_size was 8, now 4"), ({"seed": 1}, "seed was 0")]
)
def test_a_resumed_run_keeps_the_order_of_the_data(change: dict[str, Any], reported: str, tmp_path: Path) -> None:
    Training(tmp_path).checkpoints.save(Progress(step=1))
    with pytest.raises(UserError, match=reported):
        Training(tmp_path, **change).checkpoints.restore()


def test_steps_that_no_resumed_run_makes_again_are_those_before_the_oldest_of_the_newest_checkpoints(
    tmp_path: Path,
) -> None:
    first, covered = Training(tmp_path, checkpoints={"keep_last": 2, "asynchronous": False}), []
    progress = Progress()
    for _ in range(3):
        first.checkpoints.save(first.train(progress, 2))
        covered.append(first.checkpoints.covered())
    assert covered == [0, 2, 4]
    second = Training(tmp_path, checkpoints={"keep_last": 2, "asynchronous": False})
    again = second.checkpoints.restore()
    assert second.checkpoints.covered() == 0, "that of step 4 may be damaged, and none before it is known"
    second.checkpoints.save(second.train(again, 1))
    assert second.checkpoints.covered() == 6
