"""One rank's part of what the other promises are tested with on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.load import validate
from drivetrain.config.training import Loader, Scaler
from drivetrain.data.loader import evaluation_batches, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import seed_rank
from drivetrain.engines.base import Engine
from drivetrain.engines.mesh import topology
from drivetrain.engines.mesh.engine import MeshEngine
from drivetrain.tracking.events import Event, Warned
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.workloads.base import BestMetric, Workload
from drivetrain.workloads.sample_scores import SampleScores
from tests.parity.cases import Curve
from tests.parity.mesh_cases import BATCH, LLAMA, MeshCase, engine_of, run_case, text, workload


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def evaluated(
    case: MeshCase, batch_size: int
) -> tuple[dict[str, float], list[dict[str, Any]], tuple[int, dict[str, list[np.ndarray]]]]:
    """Metrics after two steps, this rank's predicted rows, and the scores of the samples of its data rank."""
    work = workload(case)
    engine = engine_of(case, work)
    steps(engine, work, range(2))

    def batches() -> Any:
        samples = work.evaluation
        assert samples is not None
        return evaluation_batches(samples, work.collate, batch_size, Loader(), engine.data_rank, engine.data_world)

    scores = SampleScores(by_class=False)
    metrics = engine.evaluate(batches(), work.metrics(), scores)
    return metrics, list(engine.predict(batches())), (engine.data_rank, scores.parts())


def engaged(case: MeshCase) -> dict[str, Any]:
    return asdict(engine_of(case, workload(case)).engaged())


def steps(engine: Engine, work: Workload, numbers: range) -> list[float]:
    mine = Slice(engine.data_rank, engine.data_world, 2)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    losses = []
    for window in training_windows(work.train, work.collate, order, numbers, mine, Loader()):
        losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        engine.optimizer_step(1.0)
    return losses


def interrupted(case: MeshCase, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after six steps in one go, and after three, a save, a fresh engine and three more (first rank only)."""
    file, work = folder / case.name, workload(case)
    through = engine_of(case, work)
    seed_rank(0, through.random_stream)
    steps(through, work, range(3))
    saved = save(file, 3, through.state_dict(), {}, communicator=Communicator())
    generator = torch.get_rng_state()
    steps(through, work, range(3, 6))
    resumed = engine_of(case, work)
    resumed.load_state_dict(load(saved))
    torch.set_rng_state(generator)
    steps(resumed, work, range(3, 6))
    whole = {name: weight.clone() for name, weight in through.weights().items()}
    return whole, {name: weight.clone() for name, weight in resumed.weights().items()}


def saved_after(case: MeshCase, file: Path) -> list[float]:
    """Three steps, the state into a file; the losses of three more."""
    work = workload(case)
    engine = engine_of(case, work)
    steps(engine, work, range(3))
    save(file, 3, engine.state_dict(), {}, communicator=Communicator())
    return steps(engine, work, range(3, 6))


def gone_on(case: MeshCase, file: Path) -> list[float]:
    """The losses of three steps from a saved state, of whatever engine."""
    work = workload(case)
    engine = engine_of(case, work)
    engine.load_state_dict(load(file / "step-00000003"))
    return steps(engine, work, range(3, 6))


def drawn(case: MeshCase, root: Path, restores: bool) -> tuple[float, list[str]]:
    """A random number after a checkpoint was saved or restored, and what was warned of."""
    work, events = workload(case), list[Event]()
    engine = engine_of(case, work)
    seed_rank(0, engine.random_stream)
    block = {"type": "language_model", "model": {"config": LLAMA}, "data": {"train": str(text())}}
    run, _ = validate({"workload": block, "batch_size": BATCH, "loop": {"steps": 9}, "optimizer": {"name": "sgd"}}, [])
    assert run is not None
    metric = BestMetric("loss", higher_is_better=False)
    checkpoints = RunCheckpoints(root, run, engine, Communicator(), metric, work.train, events.append)
    if restores:
        checkpoints.restore()
    else:
        checkpoints.save(Progress(step=3))
    return torch.rand(1).item(), [event.message for event in events if isinstance(event, Warned)]


def overflowing(case: MeshCase, bad: int) -> list[tuple[bool, float | None, float]]:
    """Skipped, scale and a weight's sum after each of four steps, where one gradient of rank `bad` is infinite once."""
    work = workload(case)
    engine = engine_of(case, work, Scaler(init_scale=128.0))
    mine, found = Slice(engine.data_rank, engine.data_world, 2), []
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for window in training_windows(work.train, work.collate, order, range(4), mine, Loader()):
        engine.forward_backward(window.micro_batches)
        if window.step == 1 and rank() == bad:
            held = next(p for p in engine._held.parameters() if p.grad is not None)  # type: ignore[attr-defined]
            held.grad.view(-1)[0] = math.inf
        result = engine.optimizer_step(1.0)
        sums = sum(float(tensor.double().abs().sum()) for tensor in engine.tensors() if tensor.is_floating_point())
        found.append((result.skipped, result.scale, sums))
    return found


# --- mutations: what the suite must notice ---------------------------------------------------------------------------


@contextmanager
def halved_on_one_rank() -> Iterator[None]:
    whole = MeshEngine.optimizer_step

    def halving(self: MeshEngine, lr_factor: float) -> Any:
        for parameter in self._held.parameters() if rank() == 1 else ():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        return whole(self, lr_factor)

    with mock.patch.object(MeshEngine, "optimizer_step", halving):
        yield


@contextmanager
def copies_not_reported_apart() -> Iterator[None]:
    def norm(self: MeshEngine, norms: Tensor, _: Any) -> Tensor:
        return self._ranks.sum((norms**2).sum()).sqrt()

    with mock.patch.object(MeshEngine, "_global_norm", norm):
        yield


@contextmanager
def losses_reported_by_all() -> Iterator[None]:
    with mock.patch.object(topology.MeshPosition, "tells_loss", True):
        yield


@contextmanager
def samples_counted_by_all() -> Iterator[None]:
    with mock.patch.object(topology.MeshPosition, "leads_samples", True):
        yield


@contextmanager
def a_micro_batch_lost() -> Iterator[None]:
    forward_backward = MeshEngine.forward_backward

    def fewer(self: MeshEngine, batches: Any) -> Tensor:
        *kept, last = batches
        return forward_backward(self, [*kept, replace(last, counts=False)] if kept else batches)

    with mock.patch.object(MeshEngine, "forward_backward", fewer):
        yield


MUTATIONS: dict[str, Callable[[], Any]] = {
    "halved on one rank": halved_on_one_rank,
    "copies not reported apart": copies_not_reported_apart,
    "losses reported by all": losses_reported_by_all,
    "samples counted by all": samples_counted_by_all,
    "a micro-batch lost": a_micro_batch_lost,
}


def mutated(case: MeshCase) -> dict[str, Curve]:
    found = {"nothing wrong": run_case(case)}
    for name, mutation in MUTATIONS.items():
        with mutation():
            found[name] = run_case(case)
    return found
