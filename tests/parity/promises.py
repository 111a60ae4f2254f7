"""Defines what the other promises are tested with: one rank's part of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.training import Loader, Optimizer, Scaler
from drivetrain.data import micro_batches
from drivetrain.data.loader import MicroBatch, evaluation_batches, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import seed_rank
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.base import Engine
from drivetrain.engines.deepspeed import engine
from drivetrain.engines.deepspeed.engine import DeepspeedEngine
from drivetrain.errors import RunError, UserError
from drivetrain.workloads.sample_scores import SampleScores
from tests.parity.cases import BATCH, SAMPLES, Case, Curve, engine_of, run_case, workload
from tests.tiny_workload import FEATURES, Rows, TinyWorkload, tiny_engine


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# --- evaluation and prediction ---------------------------------------------------------------------------------------


def evaluated(
    case: Case, batch_size: int
) -> tuple[dict[str, float], list[dict[str, Any]], tuple[int, dict[str, list[np.ndarray]]]]:
    """Metrics, this rank's predicted rows, and the scores of the samples of its data rank."""
    work = workload("perceptron")
    engine = engine_of(case, work)
    assert work.evaluation is not None

    def batches() -> Iterator[MicroBatch]:
        assert work.evaluation is not None
        return evaluation_batches(
            work.evaluation, work.collate, batch_size, Loader(), engine.data_rank, engine.data_world
        )

    scores = SampleScores(by_class=True)
    metrics = engine.evaluate(batches(), work.metrics(), scores)
    return metrics, list(engine.predict(batches())), (engine.data_rank, scores.parts())


def engaged(case: Case) -> dict[str, Any]:
    return asdict(engine_of(case, workload(case.model)).engaged())


# --- exact resume ----------------------------------------------------------------------------------------------------


def steps(engine: Engine, work: TinyWorkload, numbers: range) -> list[float]:
    mine = Slice(engine.data_rank, engine.data_world, 4)
    windows = training_windows(work.train, work.collate, GlobalOrder(SAMPLES, BATCH, seed=1), numbers, mine, Loader())
    losses = []
    for window in windows:
        losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        engine.optimizer_step(1.0)
    return losses


def interrupted(case: Case, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after eight steps in one go, and after four, a save, a fresh engine and four more (first rank only).

    The model draws dropout, so that each rank's generator matters.
    """
    file = folder / case.name
    work = workload(case.model)
    through = engine_of(case, work)
    seed_rank(0, rank())
    steps(through, work, range(4))
    saved = save(file, 4, through.state_dict(), {}, communicator=Communicator())
    generator = torch.get_rng_state()
    steps(through, work, range(4, 8))
    resumed = engine_of(case, work)
    resumed.load_state_dict(load(saved))
    torch.set_rng_state(generator)
    steps(resumed, work, range(4, 8))
    whole = {name: weight.clone() for name, weight in through.weights().items()}
    return whole, {name: weight.clone() for name, weight in resumed.weights().items()}


def saved_after(case: Case, file: Path) -> list[float]:
    """Four steps, the state into a file; the losses of four more."""
    work = workload(case.model)
    engine = engine_of(case, work)
    steps(engine, work, range(4))
    save(file, 4, engine.state_dict(), {}, communicator=Communicator())
    return steps(engine, work, range(4, 8))


def gone_on(case: Case, file: Path) -> list[float]:
    """The losses of four steps from a saved state, of whatever engine."""
    work = workload(case.model)
    engine = engine_of(case, work)
    engine.load_state_dict(load(file / "step-00000004"))
    return steps(engine, work, range(4, 8))


# --- models that not every rank can train alike ----------------------------------------------------------------------


class Routed(nn.Module):
    """Which of two layers runs depends on the batch: not the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        alone = self.calls > 2 and rank() % 2  # the warm-up of ddp is alike
        return (self.second if alone else self.first)(x) + 0 * (0 if self.calls > 2 else self.second(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(FEATURES, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(FEATURES, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


ODD = {"routed": Routed, "unused": Unused, "scaled": Scaled}


def odd(case: Case) -> str:
    """Returns what training an odd model comes to: its error, or "trained" and what it was warned of."""
    work = TinyWorkload(ODD[case.model], Rows(SAMPLES))
    with mock.patch.object(engine.LOG, "warning") as warned:
        try:
            steps(engine_of(case, work), work, range(4))
        except (UserError, RunError) as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(["trained", *(call.args[0] % call.args[1:] for call in warned.call_args_list)])


# --- overflow --------------------------------------------------------------------------------------------------------


def overflowing(case: Case) -> list[tuple[bool, float | None]]:
    """Skipped and scale of four steps, of which the second overflows by a sample that only one rank sees."""
    rows = Rows(16)
    order = GlobalOrder(16, 4, seed=0)
    rows.features[order.batch(1)[1][-1]] *= 1e6
    work = TinyWorkload(workload("perceptron")._build, rows)
    engine = tiny_engine(
        work,
        "fp16-mixed",
        Optimizer(name="sgd", lr=0.1),
        config=engine_config(case),
        scaler=Scaler(init_scale=128.0),
        devices=case.world,
    )
    mine, found = Slice(engine.data_rank, engine.data_world, 4), []
    for window in training_windows(rows, work.collate, order, range(4), mine, Loader()):
        engine.forward_backward(window.micro_batches)
        result = engine.optimizer_step(1.0)
        found.append((result.skipped, result.scale))
    return found


def engine_config(case: Case) -> Any:
    from pydantic import TypeAdapter

    from drivetrain.config.engines import EngineConfig

    return TypeAdapter(EngineConfig).validate_python({"name": case.engine, **case.options})


# --- mutations: what the suite must notice ---------------------------------------------------------------------------


@contextmanager
def halved_gradients() -> Iterator[None]:
    with ExitStack() as stack:
        for engine in (AutogradEngine, DeepspeedEngine):
            stack.enter_context(mock.patch.object(engine, "_backward", _halving(engine._backward)))
        yield


def _halving(whole: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    return lambda self, loss: whole(self, loss * 0.5)


@contextmanager
def dropped_shard() -> Iterator[None]:
    whole = AutogradEngine.forward_backward

    def losing(self: AutogradEngine, batches: list[MicroBatch]) -> Tensor:
        return whole(self, [MicroBatch(b.tensors, counts=rank() == 0) for b in batches])

    with mock.patch.object(AutogradEngine, "forward_backward", losing):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    def local(self: AutogradEngine, batches: list[MicroBatch]) -> Callable[[], list[int]]:
        count = self.data_world * sum(self._workload.count(b.tensors) for b in batches if b.counts)
        return lambda: [count]

    with mock.patch.object(AutogradEngine, "_global_counts", local):
        yield


@contextmanager
def sample_reused() -> Iterator[None]:
    def same_share(indices: np.ndarray, _: int, data_world: int) -> np.ndarray:
        return indices[0::data_world]

    with mock.patch.object(micro_batches, "rank_share", same_share):
        yield


@contextmanager
def scaler_on_one_rank() -> Iterator[None]:
    step = torch.amp.GradScaler.step

    def only_first(self: Any, optimizer: Any) -> Any:
        return step(self, optimizer) if rank() == 0 else None

    def other_scale(self: DeepspeedEngine, _: bool) -> None:  # whose step is one of all ranks
        if rank() == 0:
            self._zero.optimizer.override_loss_scale(2 * self._scaler.get_scale())

    with (
        mock.patch.object(torch.amp.GradScaler, "step", only_first),
        mock.patch.object(DeepspeedEngine, "_rescale", other_scale),
    ):
        yield


@contextmanager
def nothing_wrong() -> Iterator[None]:
    yield


MUTATIONS: dict[str, Callable[[], Any]] = {
    "nothing wrong": nothing_wrong,
    "halved gradients": halved_gradients,
    "dropped shard": dropped_shard,
    "mean of means": mean_of_means,
    "sample reused": sample_reused,
    "scaler on one rank": scaler_on_one_rank,
}


def mutated(case: Case) -> dict[str, Curve]:
    found = {}
    for name, mutation in MUTATIONS.items():
        with mutation():
            found[name] = run_case(case)
    return found
