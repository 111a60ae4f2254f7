"""Steps that are not finite, or spike: refused, left out, reported, and the same on every engine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.cli import main
from drivetrain.config.engines import EngineConfig, block_of
from drivetrain.config.rules import check
from drivetrain.config.run import RunConfig
from drivetrain.config.training import Loader
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.base import Engine, StepResult
from drivetrain.errors import RunError
from drivetrain.optim.schedules import lr_factor
from drivetrain.tracking.jsonl import read_events
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.inspect_step import inspected
from drivetrain.training.loop import train
from drivetrain.training.progress import Progress
from drivetrain.training.step_guard import Anomaly, Batch, PendingNumbers, Recent, Usual, Watch, end_if_stopped
from drivetrain.workloads.base import BestMetric
from drivetrain.workloads.shown import in_words
from tests.ranks import RankPool
from tests.tiny_workload import CLASSES, CPU, FEATURES, IGNORED, Rows, TinyWorkload, perceptron, tiny_engine
from tests.training.test_loop import InfiniteGradients, Ride, config

BAD, BATCH = 13, 16


class Rough(Rows):
    """One sample is multiplied, from an epoch on."""

    def __init__(self, factor: float, from_epoch: int = 0, number: int = 40) -> None:
        super().__init__(number)
        self._factor, self._from = factor, from_epoch

    def load(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        features, label = super().load(index, epoch)
        rough = index == BAD and epoch >= self._from
        return (features * self._factor if rough else features), label

    def is_rough(self, order: GlobalOrder, step: int) -> bool:
        epoch, indices = order.batch(step)
        return BAD in indices and epoch >= self._from


def plain() -> nn.Module:
    """Without normalisation, which would hide large inputs."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES))


ROUGH: dict[str, Callable[[], Rough]] = {
    "not finite": lambda: Rough(math.nan),
    "spikes": lambda: Rough(-1e4, from_epoch=14),
}


def run_of(kind: str, **changes: Any) -> RunConfig:
    skip = {"not finite": True, "spikes": "spikes"}[kind]
    raw: dict[str, Any] = {
        "batch_size": BATCH,
        "loop": {"steps": 12 if kind == "not finite" else 54, "max_grad_norm": 0.5},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 3},
        "numerics": {"skip": skip},
        "tracking": {"log_every": 5},
    }
    return config(**{**raw, **changes})


def without_them(run: RunConfig, rows: Rough) -> tuple[dict[str, Tensor], list[int]]:
    """A plain PyTorch loop over the same batches that leaves out the rough ones; which those are, counted from 1."""
    model = plain()
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.optimizer.lr)
    assert run.loop.steps is not None
    order = GlobalOrder(len(rows), BATCH, run.seed)
    left_out: list[int] = []
    for step in range(run.loop.steps):
        if rows.is_rough(order, step):
            left_out.append(step + 1)
            continue
        for group in optimizer.param_groups:
            factor = lr_factor(run.schedule, run.loop.steps - len(left_out))  # of a run without those
            group["lr"] = run.optimizer.lr * factor(step - len(left_out))
        batch = rows.batch(*order.batch(step)[1].tolist())
        optimizer.zero_grad()
        F.cross_entropy(model(batch["features"]), batch["labels"], ignore_index=IGNORED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict(), left_out


class Timeless:
    """Meters that measure nothing."""

    def begin(self, _: int) -> None:
        """Nobody asks which step it is."""

    def batch(self, _: object) -> None:
        """Nor of which samples."""

    def part(self, _: str) -> Any:
        return nullcontext()

    def step(self, _: object) -> Any:
        return nullcontext()

    def step_done(self, _: int) -> None:
        """Nothing is counted."""

    def recent_rate(self, _: int) -> float:
        return 0.0

    def recent_utilisation(self) -> None:
        """It is not known."""

    def recent(self) -> dict[str, Any]:
        return {}


def trained(engine: Engine, run: RunConfig, work: TinyWorkload, progress: Progress, until: int) -> list[Anomaly]:
    """The loop on an engine, from where it is; what it was troubled by."""
    order, found = GlobalOrder(len(work.train), BATCH, run.seed), []
    mine = Slice(engine.data_rank, engine.data_world, 4)
    windows = training_windows(work.train, work.collate, order, range(progress.step, until), mine, Loader())

    def troubled(trouble: Anomaly) -> None:
        found.append(trouble)
        end_if_stopped(trouble)

    around = LoopHooks(
        evaluate=None,
        save=lambda _: None,
        send=lambda _: None,
        stop=lambda: progress.step >= until,
        best_metric=BestMetric("loss", higher_is_better=False),
        meters=Timeless(),  # type: ignore[arg-type]
        troubled=troubled,
    )
    assert run.loop.steps is not None
    train(engine, windows, run, run.loop.steps, order.steps_per_epoch, progress, around)
    return found


def engine_for(name: str, run: RunConfig, work: TinyWorkload, devices: int = 1) -> Engine:
    block = TypeAdapter(EngineConfig).validate_python(block_of(name))
    clip = run.loop.max_grad_norm
    return tiny_engine(work, "fp32", run.optimizer, config=block, max_grad_norm=clip, devices=devices)


def skipping(name: str, kind: str, devices: int) -> tuple[dict[str, Tensor], list[int], int]:
    """Weights (on the first rank), the steps that were skipped, and the updates that were made."""
    run, work, progress = run_of(kind), TinyWorkload(plain, ROUGH[kind]()), Progress()
    engine = engine_for(name, run, work, devices)
    found = trained(engine, run, work, progress, run.loop.steps or 0)
    assert {trouble.action for trouble in found} == {"skipped"}
    weights = {key: weight.clone() for key, weight in engine.weights().items()}
    engine.close()
    return weights, [trouble.step for trouble in found], progress.updates


def assert_left_out(found: tuple[dict[str, Tensor], list[int], int], kind: str) -> None:
    run, rows = run_of(kind), ROUGH[kind]()
    weights, left_out = without_them(run, rows)
    assert left_out
    assert found[1] == left_out
    assert found[2] == (run.loop.steps or 0) - len(left_out)
    for name, weight in weights.items():
        assert torch.allclose(found[0][name], weight, rtol=1e-4, atol=1e-5), name


# --- left out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROUGH)
def test_skipping_is_the_plain_loop_that_leaves_the_steps_out(kind: str) -> None:
    assert_left_out(skipping("single", kind, 1), kind)


SPREAD = {"not finite": ["ddp", "fsdp", "zero2", "zero3", "mesh-dp2-shard"], "spikes": ["ddp", "fsdp"]}
FEW = {"not finite": ["ddp", "fsdp", "zero2"], "spikes": ["fsdp"]}


def skipping_on(names: dict[str, list[str]]) -> dict[tuple[str, str], tuple[dict[str, Tensor], list[int], int]]:
    return {(name, kind): skipping(name, kind, 2) for kind, engines in names.items() for name in engines}


@pytest.mark.parametrize("names", [FEW, pytest.param(SPREAD, marks=pytest.mark.slow)], ids=["few", "all"])
def test_all_ranks_leave_out_the_same_steps_on_every_engine(
    ranks: Callable[[int], RankPool], names: dict[str, list[str]]
) -> None:
    first, second = ranks(2).run(skipping_on, names)
    for (name, kind), found in first.items():
        assert_left_out(found, kind)
        assert found[1:] == second[name, kind][1:]


def normalised() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, CLASSES))


def statistics_of(name: str, devices: int) -> bool:
    """Returns whether BatchNorm counts the micro-batches of the good steps alone, and has finite numbers."""
    run, work, progress = run_of("not finite"), TinyWorkload(normalised, Rough(math.nan)), Progress()
    engine = engine_for(name, run, work, devices)
    assert trained(engine, run, work, progress, 12)
    order, mine = GlobalOrder(len(work.train), BATCH, run.seed), Slice(engine.data_rank, engine.data_world, 4)
    assert isinstance(work.train, Rough)
    good = [step for step in range(12) if not work.train.is_rough(order, step)]
    pieces = sum(len(list(mine.pieces(order.batch(step)[1]))) for step in good)
    held = {name: buffer for tensor in [engine.state_dict()["model"]] for name, buffer in tensor.items()}
    engine.close()
    finite = all(bool(held[f"1.{name}"].isfinite().all()) for name in ("running_mean", "running_var"))
    return finite and int(held["1.num_batches_tracked"]) == pieces


def statistics_on(names: list[str]) -> list[bool]:
    return [statistics_of(name, 2) for name in names]


def test_batch_norm_does_not_see_a_step_that_is_left_out(ranks: Callable[[int], RankPool]) -> None:
    assert statistics_of("single", 1)
    names = ["ddp", "fsdp", "zero2"]
    assert ranks(2).run(statistics_on, names) == [[True] * 3] * 2


def test_more_bad_steps_than_allowed_end_the_run() -> None:
    run = run_of("not finite", numerics={"skip": True, "most_skips": 2})
    ride = Ride(run, TinyWorkload(plain, Rough(math.nan)))
    _, left_out = without_them(run, Rough(math.nan))
    with pytest.raises(RunError, match=rf"step {left_out[2]}: .* more than numerics.most_skips=2 of the last 100"):
        ride.go()
    assert ride.progress.step == left_out[2]


@pytest.mark.parametrize(
    ("skips", "stopped"),
    [
        ([1, 2], False),  # as many as may be
        ([1, 2, 3], True),
        ([1, 50, 100], True),  # the first of a hundred steps, and the last
        ([1, 50, 101], False),  # a hundred and one
        ([1, 50, 101, 149], True),
        ([1, 50, 101, 150, 201], False),
    ],
)
def test_as_many_steps_as_allowed_are_skipped_among_any_hundred(skips: list[int], stopped: bool) -> None:
    watch = Watch(config(numerics={"skip": True, "most_skips": 2}).numerics, False, Recent(), lambda tensor: tensor)
    found = []
    for step in skips:
        loss, norm = torch.tensor(1.0), torch.tensor(math.nan)
        assert watch.judge(step, loss)(norm) is True
        result = StepResult(norm, refused=True)
        trouble = watch.read(PendingNumbers(step, Batch(np.arange(3), [None]), loss, result), 1.0, math.nan)
        assert trouble is not None
        found.append(trouble.action)
    assert found == ["skipped"] * (len(skips) - 1) + ["stopped" if stopped else "skipped"]


def test_a_resumed_run_skips_what_the_uninterrupted_one_skips() -> None:
    """The medians are of steps before the interruption, and so is half of what may be skipped."""
    run = run_of("spikes", numerics={"skip": "spikes"})
    work = TinyWorkload(plain, ROUGH["spikes"]())
    through, progress = engine_for("single", run, work), Progress()
    whole = [trouble.step for trouble in trained(through, run, work, progress, 54)]
    engine, first = engine_for("single", run, work), Progress()
    found = trained(engine, run, work, first, 44)
    resumed = Progress(**json.loads(json.dumps(dataclasses.asdict(first))))
    found += trained(engine, run, work, resumed, 54)
    assert [trouble.step for trouble in found] == whole
    assert resumed.recent == progress.recent
    assert all(torch.equal(weight, through.weights()[name]) for name, weight in engine.weights().items())


# --- not left out ----------------------------------------------------------------------------------------------------


def test_a_bad_step_is_the_last_that_is_tried_and_its_update_is_not_made() -> None:
    rows = Rough(math.nan)
    run = run_of("not finite", numerics={}, tracking={"log_every": 100})
    order = GlobalOrder(len(rows), BATCH, run.seed)
    bad = next(step for step in range(12) if rows.is_rough(order, step)) + 1
    troubles: list[Anomaly] = []
    work, progress = TinyWorkload(plain, rows), Progress()
    engine = engine_for("single", run, work)
    with pytest.raises(RunError, match=rf"step {bad}: the loss is nan"):
        troubles = trained(engine, run, work, progress, 12)
    assert not troubles
    assert progress.step == bad
    before, earlier = engine_for("single", run, work), Progress()
    trained(before, run, work, earlier, bad - 1)
    ours, theirs = engine.state_dict(), before.state_dict()
    assert json.dumps(ours["engine"]) == json.dumps(theirs["engine"])
    for name, weight in before.weights().items():
        assert torch.equal(engine.weights()[name], weight), name


def test_spikes_are_reported_and_trained_on_by_default() -> None:
    run, rows = run_of("spikes", numerics={}), ROUGH["spikes"]()
    work, progress = TinyWorkload(plain, rows), Progress()
    found = trained(engine_for("single", run, work), run, work, progress, 54)
    _, rough = without_them(run, rows)
    assert [trouble.step for trouble in found] == rough
    assert {(trouble.kind, trouble.action, trouble.update_made) for trouble in found} == {("spike", "told", True)}
    assert "times its recent median" in str(found[0])
    assert BAD in found[0].batch.indices
    assert progress.updates == 54


def test_no_spikes_are_reported_where_they_are_off_nor_for_losses_below_zero() -> None:
    run = run_of("spikes", numerics={"spike_factor": None})
    work = TinyWorkload(plain, ROUGH["spikes"]())
    assert not trained(engine_for("single", run, work), run, work, Progress(), 54)
    watch = Watch(config().numerics, False, Recent(losses=[-3.0] * 50, norms=[1.0] * 50), lambda tensor: tensor)
    assert watch._limit(-3.0) == math.inf


def test_a_loss_that_crosses_zero_has_no_usual_size() -> None:
    """As those of rewards: most are 0 but for rounding, to either side."""
    usual = Usual([])
    for number in range(200):
        usual.add(1e-9 * (-1 if number % 3 == 0 else 1))
    assert usual.median is None
    for _ in range(200):
        usual.add(2.0)
    assert usual.median == 2.0, "those of long ago are forgotten"


@pytest.mark.slow
def test_a_recipe_with_a_high_rate_has_no_spikes(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "digits.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), f"output={tmp_path / 'out'}", "--quiet"])
    assert ended.value.code == 0
    kinds = {event["event"] for event in read_events(tmp_path / "out" / "events.jsonl")}
    assert "step" in kinds
    assert "trouble" not in kinds


def test_a_gradient_that_is_not_finite_is_left_out_too() -> None:
    run = config(loop={"steps": 3}, numerics={"skip": True})
    ride = Ride(run, TinyWorkload(InfiniteGradients))
    assert ride.go() == "completed"
    assert ride.progress.updates == 0
    fresh = tiny_engine(TinyWorkload(InfiniteGradients)).weights().keys()
    assert all(bool(weight.isfinite().all()) for weight in ride.engine.weights().values())
    assert fresh == ride.engine.weights().keys()


def test_deepspeed_cannot_leave_out_spikes_and_says_so() -> None:
    words = check(run_of("spikes", engine="zero2", processes=2), CPU)
    assert [found.field for found in words if found.field == "numerics.skip"] == ["numerics.skip"]
    assert not [f for f in check(run_of("not finite", engine="zero2", processes=2), CPU) if "numerics" in f.field]
    assert [f.field for f in check(run_of("spikes", numerics={"skip": "spikes", "spike_factor": None}), CPU)][:1] == [
        "numerics.skip"
    ]


# --- the answer on the device ----------------------------------------------------------------------------------------


def latched(engine: Engine, work: TinyWorkload, steps: range) -> tuple[list[bool], list[Tensor]]:
    """The judge's answer stays a tensor, as on a GPU: whether each step was held, and the norms."""
    bad: list[Tensor] = []

    def judge(norm: Tensor) -> Tensor:
        bad.append(~norm.isfinite() | (bad[-1] if bad else torch.tensor(False)))
        return bad[-1]

    order, held, norms = GlobalOrder(len(work.train), BATCH, 0), [], []
    mine = Slice(engine.data_rank, engine.data_world, BATCH)
    for window in training_windows(work.train, work.collate, order, steps, mine, Loader()):
        engine.forward_backward(window.micro_batches)
        result = engine.optimizer_step(1.0, judge)
        held.append(result.held)
        norms.append(result.grad_norm)
    return held, norms


def held_back(name: str, optimizer: str, devices: int = 1) -> bool:
    """From the first bad step on, weights and the optimizer's state stay as they were."""
    run = run_of("not finite", optimizer={"name": optimizer, "lr": 0.05, "momentum": 0.9} | _of(optimizer))
    work = TinyWorkload(plain, Rough(math.nan, from_epoch=1))
    engine, before = engine_for(name, run, work, devices), engine_for(name, run, work, devices)
    order = GlobalOrder(40, BATCH, 0)
    assert isinstance(work.train, Rough)
    bad = next(step for step in range(9) if work.train.is_rough(order, step))
    latched(before, work, range(bad))
    held, norms = latched(engine, work, range(bad + 3))
    assert all(held)
    assert not norms[bad].isfinite()
    assert len(norms) == bad + 3
    states = [
        [tensor for part, held in each.held_tensors().items() if part != "gradients" for tensor in held]
        for each in (engine, before)
    ]
    return all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def _of(optimizer: str) -> dict[str, Any]:
    return {} if optimizer == "sgd" else {"momentum": 0.0}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_device_a_bad_step_and_those_after_it_change_nothing(optimizer: str) -> None:
    assert held_back("single", optimizer)


def held_back_on_ranks() -> list[bool]:
    return [held_back("ddp", "adamw", 2), held_back("fsdp", "adamw", 2)]


def test_on_devices_of_several_ranks_too(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(held_back_on_ranks) == [[True, True]] * 2


def test_an_optimizer_without_such_kernels_says_that_it_held_nothing() -> None:
    run = run_of("not finite", optimizer={"name": "adafactor", "lr": 0.01})
    work = TinyWorkload(plain)
    held, _ = latched(engine_for("single", run, work), work, range(1))
    assert held == [False]


# --- where -----------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    """sqrt(0): the value is finite, its derivative is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.zero, self.last = nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.zero(self.last(self.first(x)) * 0))


def looked_at(build: Callable[[], nn.Module], rows: Rows, poison: bool = False) -> Any:
    work = TinyWorkload(build, rows)
    engine = tiny_engine(work)
    if poison:
        engine.load_weights({**engine.weights(), "3.bias": torch.tensor([0.0, math.nan, 0.0])})
    batches = [rows.micro(0, 1, 2), rows.micro(BAD, 4)]
    return inspected(engine, work, batches)[0]


def test_the_first_module_that_gives_a_bad_number_is_named() -> None:
    rows = Rows(20)
    rows.features[BAD, 2] = math.inf
    found = looked_at(perceptron, rows)
    assert str(found.culprit) == "the first output that is not finite is of 0 (Linear)"
    assert found.micro_batch == 1
    assert [layer.not_finite for layer in found.layers.values()] == [16, 16, 16, 3, 3]
    assert math.isfinite(found.losses[0])
    assert math.isnan(found.losses[1])


def test_a_bad_gradient_of_good_numbers_is_found_where_it_arrives() -> None:
    found = looked_at(Root, Rows(20))
    assert str(found.culprit).startswith("all outputs are finite; the first gradient that is not arrives at the output")
    assert found.culprit.where == "zero"


def test_weights_that_are_bad_before_the_step_are_named_first() -> None:
    found = looked_at(perceptron, Rows(20), poison=True)
    assert str(found.culprit) == "weights of 3 (Linear) are not finite before the step"


def test_a_look_leaves_no_hooks_and_finds_the_largest_numbers() -> None:
    rows, work = Rows(20), TinyWorkload(perceptron, Rows(20))
    engine = tiny_engine(work)
    found, share = inspected(engine, work, [rows.micro(0, 1, 2)])
    model = perceptron()
    batch = rows.batch(0, 1, 2)
    first = model[0](batch["features"])  # type: ignore[index]
    assert found.layers["0"].largest == pytest.approx(first.detach().abs().max().item())
    loss = F.cross_entropy(model(batch["features"]), batch["labels"])
    assert found.losses == pytest.approx([loss.item()])
    assert share.item() == pytest.approx(loss.item())
    assert "loss_sum" not in vars(work)
    assert not any(module._forward_hooks for module in engine._model.modules())  # type: ignore[attr-defined]


def test_a_sample_is_described_in_words() -> None:
    sample = (torch.tensor([1.0, math.nan]), torch.tensor(3), {"name": "x" * 200})
    words = in_words(sample)
    assert words.startswith("float32 2 from 1 to 1, 1 of 2 not finite, 3, name: 'xxx")
    assert len(words) < 200
