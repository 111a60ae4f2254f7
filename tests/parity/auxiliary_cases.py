"""Defines what the tests of auxiliary models run: a small model with a trained head, a reference that follows it and a
frozen teacher, on an engine's ranks and in plain PyTorch, saved and resumed in the middle."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.training import Loader
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_contract import Auxiliary, LossContext
from tests.parity.mesh_cases import OPTIMIZERS, Declared, MeshCase, columns, engine_of
from tests.tiny_workload import CLASSES, Rows

STEPS, SAVED, BATCH, EVERY, MIXING = 6, 3, 10, 2, 0.3
TERMS = {"loss": 1.0, "value": 0.5, "near": 2.0, "taught": 1.0}


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # on the first rank


def head() -> nn.Module:
    torch.manual_seed(21)
    return nn.Linear(CLASSES, 1)


def teacher() -> nn.Module:
    torch.manual_seed(22)
    return copy.deepcopy(columns())


def sums(logits: Tensor, value: Tensor, reference: Tensor, taught: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Cross-entropy; how far the head is off the label; distances to the reference and to the teacher."""
    return {
        "loss": F.cross_entropy(logits, labels, reduction="sum"),
        "value": (value[:, 0] - labels.float()).square().sum(),
        "near": (logits - reference).square().sum(),
        "taught": (logits - taught).abs().sum(),
    }


class Accompanied(Declared):
    """Three classes distinguished beside all three kinds of auxiliary models."""

    def __init__(self, source: str = "seed 22") -> None:
        super().__init__(columns, Rows(62), Rows(37, seed=9))
        self._source = source

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {
            "head": Auxiliary("trained", head),
            "reference": Auxiliary("moved", every=EVERY, mixing=MIXING),
            "teacher": Auxiliary(build=teacher, source=self._source),
        }

    @property
    def terms(self) -> Mapping[str, float]:
        return TERMS

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return {name: len(batch["labels"]) * (CLASSES if name in ("near", "taught") else 1) for name in TERMS}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        logits, beside = model(batch["features"]), context.auxiliary
        others = beside["reference"](batch["features"]), beside["teacher"](batch["features"])
        return sums(logits, beside["head"](logits), *others, batch["labels"])


def trained(engine: Engine, work: Accompanied, numbers: range, run: Run) -> None:
    mine = Slice(engine.data_rank, engine.data_world, 2)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for window in training_windows(work.train, work.collate, order, numbers, mine, Loader()):
        run.losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        run.norms.append(engine.optimizer_step(1.0).grad_norm.item())


def run_case(case: MeshCase, root: Path) -> tuple[Run, Run]:
    """The whole run, and one that goes on in new objects from what the first had saved in the middle."""
    work, whole, resumed = Accompanied(), Run(), Run()
    engine = engine_of(case, work)
    trained(engine, work, range(SAVED), whole)
    path = save(root, SAVED, engine.state_dict(), {}, communicator=Communicator())
    trained(engine, work, range(SAVED, STEPS), whole)
    whole.weights = copied(engine)
    engine.close()
    work = Accompanied()
    engine = engine_of(case, work)
    engine.load_state_dict(load(path))
    trained(engine, work, range(SAVED, STEPS), resumed)
    resumed.weights = copied(engine)
    engine.close()
    return whole, resumed


def copied(engine: Engine) -> dict[str, Tensor]:
    return {name: weight.cpu().clone() for name, weight in engine.weights().items()}


def run_cases(cases: Sequence[MeshCase], root: Path) -> list[tuple[Run, Run]]:
    return [run_case(case, root / case.name) for case in cases]


def gone_on(case: MeshCase, saved: Path, source: str) -> Any:
    """A state that another layout saved, taken up: the losses, or why not."""
    work, run = Accompanied(source), Run()
    engine = engine_of(case, work)
    try:
        engine.load_state_dict(load(saved))
        trained(engine, work, range(SAVED, STEPS), run)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return run.losses


def plain(clip: float) -> Run:
    """One process, whole batches, plain PyTorch."""
    work, run = Accompanied(), Run()
    model, value, other = work.build_model(), head(), teacher()
    reference = copy.deepcopy(model).requires_grad_(False)
    trained_ones = [*model.parameters(), *value.parameters()]
    updates = torch.optim.SGD(trained_ones, lr=OPTIMIZERS["sgd"].lr, momentum=0.9)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for step in range(STEPS):
        epoch, indices = order.batch(step)
        batch = work.collate([work.train.load(int(index), epoch) for index in indices])
        features, labels = batch["features"], batch["labels"]
        logits = model(features)
        with torch.no_grad():
            others = reference(features), other(features)
        found, counts = sums(logits, value(logits), *others, labels), work.counts(batch)
        loss = torch.stack([found[name] / counts[name] * weight for name, weight in TERMS.items()]).sum()
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(nn.utils.clip_grad_norm_(trained_ones, clip).item())
        updates.step()
        updates.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for mine, its in zip(reference.parameters(), model.parameters(), strict=True):
                    mine.copy_((1 - MIXING) * mine + MIXING * its)
    return run
