"""Defines what the tests of checkpoints that cross engines run: the layouts, a rank's part, and the same by hand in
plain PyTorch; the table of those that ran, for the docs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.engines import EngineConfig
from drivetrain.config.training import Loader, Optimizer, Schedule
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.optim.schedules import lr_factor
from drivetrain.workloads.base import Workload
from tests.parity.cases import CLIP
from tests.parity.mesh_cases import BATCH, IGNORED, MeshCase, logits_and_targets, workload
from tests.tiny_workload import tiny_engine

SAVED, STEPS, WARMUP = 3, 8, 2
ADAMW = Optimizer(name="adamw", lr=0.003, weight_decay=0.1)
COSINE = Schedule(name="cosine", warmup_steps=WARMUP)
LLAMA = MeshCase({})  # four layers, without dropout


@dataclass(frozen=True)
class Layout:
    """An engine on so many devices."""

    shown: str
    world: int
    engine: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.shown} x{self.world}".replace(" ", "-")

    @property
    def processes(self) -> int:
        return 1 if self.shown == "dp" else self.world


def mesh(**degrees: Any) -> Layout:
    sizes = [size for size in degrees.values() if size is not True]
    shown = ["mesh", *(key if size is True else f"{key}={size}" for key, size in degrees.items())]
    return Layout(" ".join(shown), math.prod(sizes), {"name": "mesh", **degrees})


def accelerated(driver: Any, world: int) -> Layout:
    return Layout(f"accelerate-{driver}", world, {"name": "accelerate", "driver": driver})


def zero(stage: int, world: int) -> Layout:
    return Layout(f"zero{stage}", world, {"name": "deepspeed", "stage": stage})


def plainly(name: str, world: int, **options: Any) -> Layout:
    return Layout(" ".join([name, *options]), world, {"name": name, **options})


SINGLE = plainly("single", 1)
DDP, FSDP = plainly("ddp", 2), plainly("fsdp", 4)
CUBE = mesh(pp=2, dp=2, tp=2, shard=True)
LAYOUTS = [
    SINGLE, plainly("ddp", 1), plainly("fsdp", 1), zero(2, 1),
    plainly("dp", 2), DDP, plainly("ddp", 2, shard_optimizer=True), plainly("fsdp", 2),
    *(zero(stage, 2) for stage in range(4)), *(accelerated(driver, 2) for driver in ("ddp", "fsdp", "zero3")),
    mesh(tp=2), mesh(pp=2), mesh(cp=2), mesh(dp=2, shard=True),
    plainly("dp", 4), plainly("ddp", 4), FSDP, plainly("fsdp", 4, hybrid=2), *(zero(stage, 4) for stage in (1, 2, 3)),
    accelerated("zero3", 4), mesh(tp=4), mesh(pp=4), mesh(cp=4), mesh(pp=2, tp=2), mesh(pp=2, dp=2, shard=True),
    mesh(dp=2, tp=2, shard=True), mesh(dp=2, cp=2), CUBE,
]  # fmt: skip


# --- a rank's part ---------------------------------------------------------------------------------------------------


def engine_of(layout: Layout, work: Workload) -> Engine:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # Accelerate sets it for the life of the process
    config = TypeAdapter(EngineConfig).validate_python(layout.engine)
    return tiny_engine(work, "fp32", ADAMW, config=config, max_grad_norm=CLIP, devices=layout.world)


def trained(engine: Engine, work: Workload, numbers: range) -> list[float]:
    """The losses of some steps of the run."""
    mine, factor = Slice(engine.data_rank, engine.data_world, 2), lr_factor(COSINE, STEPS)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    losses = []
    for window in training_windows(work.train, work.collate, order, numbers, mine, Loader()):
        losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        engine.optimizer_step(factor(window.step))
    return losses


def written(layout: Layout, root: Path) -> Path:
    """Three steps, and a checkpoint."""
    work = workload(LLAMA)
    engine = engine_of(layout, work)
    trained(engine, work, range(SAVED))
    path = save(root, SAVED, engine.state_dict(), {}, communicator=Communicator())
    engine.close()
    return path


def written_again(layout: Layout, saved: Path, root: Path) -> Path:
    """A checkpoint of what was loaded from one."""
    work = workload(LLAMA)
    engine = engine_of(layout, work)
    engine.load_state_dict(load(saved))
    path = save(root, SAVED, engine.state_dict(), {}, communicator=Communicator())
    engine.close()
    return path


def gone_on(layout: Layout, saved: Path) -> list[float]:
    """The losses of the steps that were left."""
    work = workload(LLAMA)
    engine = engine_of(layout, work)
    engine.load_state_dict(load(saved))
    losses = trained(engine, work, range(SAVED, STEPS))
    engine.close()
    return losses


# --- by hand ---------------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    losses: list[float]
    start: dict[str, Tensor]  # weights before the first step
    weights: dict[str, Tensor]  # as of the save, like the moments
    moments: dict[str, dict[str, Tensor]]


def plain() -> Plain:
    """One process, whole batches, torch's AdamW, clipping and scheduler."""
    work = workload(LLAMA)
    model = work.build_model()
    named = dict(model.named_parameters())
    matrices, vectors = [p for p in named.values() if p.ndim > 1], [p for p in named.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": ADAMW.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    updates = torch.optim.AdamW(groups, lr=ADAMW.lr)
    rates = torch.optim.lr_scheduler.LambdaLR(updates, rate)
    order, found = GlobalOrder(len(work.train), BATCH, seed=1), Plain([], copied(model), {}, {})
    for step in range(STEPS):
        if step == SAVED:
            found.weights = copied(model)
            found.moments = {
                name: {key: torch.as_tensor(value).clone() for key, value in updates.state[parameter].items()}
                for name, parameter in named.items()
            }
        epoch, indices = order.batch(step)
        batch = work.collate([work.train.load(int(index), epoch) for index in indices])
        logits, targets = logits_and_targets(model, batch)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        updates.step()
        rates.step()
        updates.zero_grad()
        found.losses.append(loss.item())
    return found


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rate(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


# --- the table -------------------------------------------------------------------------------------------------------

START, END = "<!-- crossing -->", "<!-- end -->"
HEAD = ["| saved by | ranks | resumed by | ranks | loss differs by |", "| --- | ---: | --- | ---: | ---: |"]
ROWS: list[str] = []


def add_row(saved: Layout, resumed: Layout, differs: float) -> None:
    """Rewrites the table of the page that CROSSING_TABLE names, of all rows so far."""
    ROWS.append(f"| {saved.shown} | {saved.world} | {resumed.shown} | {resumed.world} | {differs:.1e} |")
    if "CROSSING_TABLE" in os.environ:
        path = Path(os.environ["CROSSING_TABLE"])
        path.write_text(with_table(path.read_text(encoding="utf-8"), ROWS), encoding="utf-8")


def with_table(page: str, rows: Sequence[str]) -> str:
    """The page with these rows between the two marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return "\n".join([before + START, *HEAD, *rows, END + after])
