"""The loop against the same training written by hand, and when it evaluates, saves, stops and refuses to go on."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.config.training import Loader
from drivetrain.data.loader import Window, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.errors import OutOfMemory, RunError
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.optim.schedules import lr_factor
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.signals import StopRequest
from drivetrain.tracking.events import Evaluated, Event, StepDone
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.loop import train
from drivetrain.training.progress import Progress
from drivetrain.training.report import Status
from drivetrain.workloads.base import BestMetric
from tests.device import on
from tests.tiny_workload import CLASSES, CPU, FEATURES, IGNORED, Rows, TinyWorkload, perceptron, tiny_engine


def config(**changes: Any) -> RunConfig:
    raw = {
        "workload": {"type": "module", "path": "tiny.py"},
        "batch_size": 16,
        "loop": {"steps": 12},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "tracking": {"log_every": 1},
    }
    built, problems = validate(raw | changes, [])
    assert not problems
    assert built is not None
    return built


@dataclass
class Ride:
    """One training, with all events and calls of the loop."""

    run: RunConfig
    workload: TinyWorkload
    scores: list[float] | None = None  # what successive evaluations give; None: there are no evaluation data
    evaluation: Callable[[], dict[str, float]] | None = None  # in place of scores
    on_event: Callable[[Event, StopRequest], None] = lambda *_: None
    precision: str = "fp32"
    device: str = "cpu"
    events: list[Event] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def go(self) -> Status:
        self.engine = tiny_engine(
            self.workload,
            self.precision,
            self.run.optimizer,
            max_grad_norm=self.run.loop.max_grad_norm,
            scaler=self.run.scaler,
            device=self.device,
        )
        order = GlobalOrder(len(self.workload.train), self.run.global_batch, self.run.seed)
        total = self.run.loop.steps or order.steps_per_epoch * (self.run.loop.epochs or 0)
        mine = Slice(0, 1, self.run.micro_batch)
        train_data, collate = self.workload.train, self.workload.collate

        def windows_from(step: int) -> Iterator[Window]:
            return training_windows(train_data, collate, order, range(step, total), mine, Loader())

        stop = StopRequest()
        scores = iter(self.scores or ())

        def send(event: Event) -> None:
            self.events.append(event)
            self.on_event(event, stop)

        around = LoopHooks(
            evaluate=self.evaluation if self.scores is None else lambda: {"accuracy": next(scores), "loss": 1.0},
            save=lambda progress: self.saves.append(progress.step),
            send=send,
            stop=lambda: stop.signal_number is not None,
            best_metric=BestMetric("accuracy", higher_is_better=True),
            meters=Meters(
                CPU if self.device == "cpu" else detect(self.device),
                self.run.precision_spec,
                self.engine,
                instrument=False,
                stopwatch=Stopwatch(torch.device(self.device)),
            ),
            cut_smaller=lambda progress, _: windows_from(progress.step),
        )
        with around.meters:
            windows = windows_from(self.progress.step)
            return train(self.engine, windows, self.run, total, order.steps_per_epoch, self.progress, around)

    def gone(self) -> Ride:
        self.go()
        return self

    def curve(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    def evaluations(self) -> list[Evaluated]:
        return [event for event in self.events if isinstance(event, Evaluated)]


def by_hand(run: RunConfig, rows: Rows, steps: int, device: str) -> tuple[nn.Module, list[float], list[float]]:
    """The plain PyTorch loop of a tutorial over the same order: model, losses, gradient norms."""
    model = perceptron().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.optimizer.lr)
    order, factor = GlobalOrder(len(rows), run.global_batch, run.seed), lr_factor(run.schedule, steps)
    losses, norms = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = run.optimizer.lr * factor(step)
        batch = on(device, rows.batch(*order.batch(step)[1].tolist()))
        loss = F.cross_entropy(model(batch["features"]), batch["labels"], ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), run.loop.max_grad_norm or math.inf).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


@pytest.mark.parametrize("micro", [16, 5, 1])
def test_a_run_is_the_hand_written_loop_however_its_batches_are_cut(micro: int, device: str) -> None:
    rows = Rows(40, ignored_share=0.3)  # the last batch of an epoch has 8, and valid targets differ a piece
    run = config(
        micro_batch_size=micro,
        loop={"steps": 12, "max_grad_norm": 0.5},
        schedule={"name": "cosine", "warmup_steps": 3},
    )
    ride = Ride(run, TinyWorkload(perceptron, rows), device=device)
    assert ride.go() == "completed"
    model, losses, norms = by_hand(run, rows, 12, device)
    assert [point.loss for point in ride.curve()] == pytest.approx(losses, rel=1e-5)
    assert [point.grad_norm for point in ride.curve()] == pytest.approx(norms, rel=1e-5)
    for name, weight in model.state_dict().items():
        assert torch.allclose(ride.engine.weights()[name], weight, rtol=1e-5, atol=1e-6), name
    assert ride.progress.samples == 4 * 40


def test_evaluation_and_saving_follow_their_cadences_and_the_end(device: str) -> None:
    run = config(loop={"steps": 10}, evaluation={"every_steps": 4}, checkpoints={"every_steps": 3})
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.1, 0.3, 0.2], device=device)
    ride.go()
    assert [event.step for event in ride.evaluations()] == [4, 8, 10]
    assert [event.best for event in ride.evaluations()] == [True, True, False]
    assert ride.saves == [3, 6, 9, 10]
    assert ride.progress.best == {"step": 8, "metric": "accuracy", "value": 0.3}


def starved() -> dict[str, float]:
    raise MemoryError


def broken() -> dict[str, float]:
    raise ZeroDivisionError("a metric of one's own")


@pytest.mark.parametrize(
    ("evaluation", "error", "words"),
    [
        (starved, OutOfMemory, r"in the evaluation .* smaller evaluation.batch_size"),
        (broken, ZeroDivisionError, "a metric of one's own"),
    ],
)
def test_an_evaluation_that_fails_leaves_what_was_trained(
    evaluation: Callable[[], dict[str, float]], error: type[Exception], words: str
) -> None:
    run = config(loop={"steps": 10}, evaluation={"every_steps": 4})
    ride = Ride(run, TinyWorkload(perceptron), evaluation=evaluation)
    with pytest.raises(error, match=words):
        ride.go()
    assert ride.saves == [4]


def test_epochs_end_with_an_evaluation_and_a_save() -> None:
    ride = Ride(config(loop={"epochs": 3}), TinyWorkload(perceptron, Rows(40)), scores=[0.1, 0.2, 0.3])
    ride.go()
    assert [event.step for event in ride.evaluations()] == ride.saves == [3, 6, 9]


def test_points_of_the_curve_come_at_their_cadence_and_before_an_evaluation(device: str) -> None:
    run = config(loop={"steps": 25}, tracking={"log_every": 10}, evaluation={"every_steps": 15})
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.1, 0.2], device=device)
    ride.go()
    assert [point.step for point in ride.curve()] == [10, 15, 20, 25]


def test_the_time_of_a_point_counts_what_the_device_still_had_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ride = Ride(config(loop={"steps": 2}, tracking={"log_every": 2}), TinyWorkload(perceptron))
    summed = AutogradEngine.summed

    def late(engine: AutogradEngine, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return summed(engine, value)

    monkeypatch.setattr(AutogradEngine, "summed", late)
    ride.go()
    assert ride.curve()[-1].elapsed_seconds >= 0.5


def test_of_equal_evaluations_the_first_is_the_best() -> None:
    run = config(loop={"steps": 8}, evaluation={"every_steps": 2})
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.1, 0.3, 0.3, 0.3])
    ride.go()
    assert [event.best for event in ride.evaluations()] == [True, True, False, False]
    assert ride.progress.best == {"step": 4, "metric": "accuracy", "value": 0.3}
    assert ride.progress.evaluations_without_gain == 2


def test_patience_ends_the_run_after_a_save() -> None:
    run = config(
        loop={"steps": 100}, evaluation={"every_steps": 2, "early_stopping": {"patience": 2, "min_delta": 0.05}}
    )
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.1, 0.3, 0.32, 0.34, 0.9])
    assert ride.go() == "stopped_early"
    assert ride.progress.step == 8
    assert ride.saves[-1] == 8
    assert ride.progress.best["value"] == 0.34  # type: ignore[index]


def patient(patience: int | None) -> RunConfig:
    stopping = None if patience is None else {"patience": patience}
    return config(loop={"steps": 12}, evaluation={"every_steps": 2, "early_stopping": stopping})


def test_a_run_that_ended_early_goes_on_only_with_more_patience_or_without_any() -> None:
    ended = Ride(patient(2), TinyWorkload(perceptron), scores=[0.5, 0.4, 0.3])
    assert ended.go() == "stopped_early"
    assert ended.progress.step == 6

    def again(patience: int | None) -> tuple[Status, Ride]:
        ride = Ride(patient(patience), TinyWorkload(perceptron), [0.4, 0.4, 0.4], progress=replace(ended.progress))
        return ride.go(), ride

    status, ride = again(2)
    assert (status, ride.progress.step, ride.events, ride.saves) == ("stopped_early", 6, [], [])
    status, ride = again(3)
    assert (status, ride.progress.step, ride.saves) == ("stopped_early", 8, [8])
    status, ride = again(None)
    assert (status, ride.progress.step) == ("completed", 12)


def test_patience_counts_on_over_a_resume_and_at_evaluations_alone() -> None:
    scores = [0.5, 0.4, 0.3, 0.2, 0.1]
    through = Ride(patient(3), TinyWorkload(perceptron), scores=scores)
    assert through.go() == "stopped_early"
    first = Ride(patient(3), TinyWorkload(perceptron), scores=scores, on_event=stop_at(5))
    assert first.go() == "interrupted"
    assert (first.progress.step, first.progress.evaluations_without_gain) == (6, 1)
    rest = Ride(patient(3), TinyWorkload(perceptron), scores=scores[2:], progress=first.progress)
    assert rest.go() == "stopped_early"
    assert rest.progress.step == through.progress.step + 2, "the interrupted step was not evaluated"


def test_a_run_that_took_all_its_steps_is_completed_whatever_its_patience() -> None:
    ride = Ride(patient(2), TinyWorkload(perceptron), scores=[0.1, 0.2, 0.3, 0.4, 0.3, 0.2])
    assert ride.go() == "completed"
    assert ride.progress.evaluations_without_gain == 2


def stop_at(step: int) -> Callable[[Event, StopRequest], None]:
    def stop(event: Event, request: StopRequest) -> None:
        if isinstance(event, StepDone) and event.step == step:
            request.signal_number = signal.SIGTERM

    return stop


def test_a_signal_saves_after_the_step_under_way_without_evaluating() -> None:
    run = config(evaluation={"every_steps": 6}, checkpoints={"every_steps": 100})
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.1, 0.2], on_event=stop_at(5))
    assert ride.go() == "interrupted"
    assert ride.saves == [6]
    assert not ride.evaluations()


def test_a_run_goes_on_from_its_step(device: str) -> None:
    whole = Ride(config(), TinyWorkload(perceptron), device=device)
    whole.go()
    rest = Ride(config(), TinyWorkload(perceptron), device=device, progress=Progress(step=7, updates=7, samples=100))
    rest.go()
    assert [point.step for point in rest.curve()] == [8, 9, 10, 11, 12]
    assert rest.curve()[0].lr == whole.curve()[7].lr


# --- what is not finite ----------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_step_and_samples_and_nothing_is_saved_after_it(device: str) -> None:
    rows = Rows(40)
    rows.features[13] = math.nan
    run = config(loop={"steps": 3}, tracking={"log_every": 3}, checkpoints={"every_steps": 1})
    ride = Ride(run, TinyWorkload(perceptron, rows), device=device)
    order = GlobalOrder(40, 16, run.seed)
    guilty = next(step for step in range(3) if 13 in order.batch(step)[1])
    with pytest.raises(RunError, match=rf"step {guilty + 1}: the loss is nan.*\b13\b.*lower learning rate"):
        ride.go()
    assert ride.saves == list(range(1, guilty + 1))


class Infinite(torch.autograd.Function):
    """A finite value with a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad * math.inf


class InfiniteGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return Infinite.apply(self.layer(features))  # type: ignore[no-any-return]


def test_a_gradient_that_is_not_finite_stops_the_run_too(device: str) -> None:
    ride = Ride(config(), TinyWorkload(InfiniteGradients), device=device)
    with pytest.raises(RunError, match=r"step 1: the gradient norm is (nan|inf) though the loss"):
        ride.go()
    assert not ride.saves


def test_an_evaluation_that_is_not_finite_ends_the_run_and_leaves_what_was_trained_without_it() -> None:
    run = config(evaluation={"every_steps": 4})
    ride = Ride(run, TinyWorkload(perceptron), scores=[0.5, math.nan])
    with pytest.raises(RunError, match="step 8: the evaluation's accuracy is nan"):
        ride.go()
    assert ride.saves == [4, 8]
    assert ride.progress.last_evaluation == 4


def test_skipped_steps_are_seen_and_do_not_advance_the_schedule() -> None:
    run = config(precision="fp16-mixed", scaler={"init_scale": 2.0**22}, schedule={"name": "linear", "warmup_steps": 4})
    ride = Ride(run, TinyWorkload(perceptron), precision="fp16-mixed")
    ride.go()
    skipped = ride.progress.skipped
    assert 0 < skipped < 12
    assert ride.curve()[-1].skipped_steps == skipped
    assert ride.curve()[skipped - 1].lr == ride.curve()[0].lr
    assert ride.curve()[skipped + 1].lr > ride.curve()[skipped].lr
    assert [point.scale for point in ride.curve()][:skipped] == [2.0**22 / 2**k for k in range(skipped)]


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_schedule_ends_with_the_run_however_many_steps_are_skipped(warmup: int) -> None:
    schedule = {"name": "linear", "warmup_steps": warmup, "final_lr_ratio": 0.2}
    run = config(precision="fp16-mixed", scaler={"init_scale": 2.0**22}, schedule=schedule, loop={"steps": 20})
    ride = Ride(run, TinyWorkload(perceptron), precision="fp16-mixed")
    ride.go()
    made, skipped = ride.progress.updates, ride.progress.skipped
    assert skipped > 3
    whole = Ride(config(schedule=schedule, loop={"steps": made}), TinyWorkload(perceptron))
    whole.go()
    assert [point.lr for point in ride.curve()[skipped:]] == [point.lr for point in whole.curve()]
    assert ride.progress.samples == Ride(config(loop={"steps": 20}), TinyWorkload(perceptron)).gone().progress.samples


def test_a_loss_scale_that_falls_without_end_is_reported() -> None:
    run = config(precision="fp16-mixed", loop={"steps": 100}, scaler={"init_scale": 2.0**-10})
    ride = Ride(run, TinyWorkload(InfiniteGradients), precision="fp16-mixed")
    with pytest.raises(RunError, match=r"the loss scale fell to .* and the gradients still overflow"):
        ride.go()
    assert len(ride.curve()) == 15  # 2 ** -24 is the last that is tried


# --- memory that runs out --------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Draws a mask in each forward; memory runs out in those of the numbers given, once the mask is drawn."""

    def __init__(self, short: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.short, self.calls = nn.Linear(FEATURES, CLASSES), short, 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(self.layer(features), 0.5, self.training)
        self.calls += 1
        if self.calls in self.short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dropped


@pytest.mark.parametrize("short", [(4,), (5, 8)])
def test_a_window_that_is_made_again_draws_what_it_would_have_drawn(short: tuple[int, ...]) -> None:
    """Two micro-batches a step: the fourth is the second one of its window, whose first has drawn already."""

    def ridden(short: tuple[int, ...]) -> Ride:
        def build() -> nn.Module:
            torch.manual_seed(7)
            return Dropping(short)

        run = config(batch_size=8, micro_batch_size=4, loop={"steps": 5})
        torch.manual_seed(1)
        return Ride(run, TinyWorkload(build)).gone()

    roomy, made_again = ridden(()), ridden(short)
    assert [point.loss for point in made_again.curve()] == [point.loss for point in roomy.curve()]
    assert all(
        torch.equal(weight, roomy.engine.weights()[name]) for name, weight in made_again.engine.weights().items()
    )
