"""A whole model made into one rank's part: its stage cut out, the layers of that split, attention traded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.config.mesh import MeshEngine
from drivetrain.engines import tensor_parallel
from drivetrain.engines.base import EngineOptions
from drivetrain.engines.context_parallel import Ulysses, use_ulysses
from drivetrain.engines.cut import Anatomy, Link, balanced, cut, dissect
from drivetrain.engines.pipeline import Pipeline
from drivetrain.engines.places import Place
from drivetrain.errors import problem
from drivetrain.memory.recompute import repeated_blocks
from drivetrain.precision import autocast, dtype
from drivetrain.rng import restore_rng_state, rng_state
from drivetrain.workloads.base import Batch, Workload, few

# how far the loss of a spread model may be from that of the whole one: sums in another order, and rounded
NEAR = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Part:
    """What one rank has of a model."""

    model: nn.Module
    blocks: list[nn.Module]  # its own of those that repeat
    whole: dict[str, torch.Size]  # of all weights, those of other ranks too
    trains: dict[str, bool]  # of all parameters
    expected: float  # loss of `few` samples by the whole model
    pipeline: Pipeline | None = None
    attention: Ulysses | None = None

    def check_loss(self, found: float, precision: Any) -> None:
        """UserError unless the spread model computes what the whole one did. found: its loss of the same samples."""
        near = NEAR["tf32" if precision.tf32 else precision.compute]
        if math.isclose(found, self.expected, rel_tol=near) or not math.isfinite(self.expected):
            return
        why = f"the loss of the model spread over the mesh is {found:.6g}, of the whole one {self.expected:.6g}"
        raise problem("engine.tp", why, "declare the right plan in the workload's layout, or leave tp, cp or pp out")


def spread(model: nn.Module, workload: Workload, config: MeshEngine, place: Place, options: EngineOptions) -> Part:
    """In place. model: on the CPU, in its dtype. UserError for what cannot be cut or split so."""
    whole = {name: tensor.shape for name, tensor in model.state_dict().items()}
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    probe = _Probe(workload, options)
    expected = probe.loss(model)
    blocks, pipeline, attention = repeated_blocks(model), None, None
    plan = _plan(model, workload, config) if config.tp > 1 else {}
    if config.pp > 1:
        anatomy = probe.anatomy(model)
        if len(anatomy.blocks) < config.pp:
            why = f"{type(model).__name__} has {len(anatomy.blocks)} blocks, fewer than pp ({config.pp})"
            raise problem("engine.pp", why, f"give at most {len(anatomy.blocks)} stages")
        own = balanced(anatomy.costs, config.pp)[place.at["pp"]]
        mine = {anatomy.blocks[number] for number in own}
        blocks = [block for name, block in model.named_modules() if name in mine]
        pipeline = _pipeline(model, anatomy, own, config, place, options)
    if config.cp > 1:
        if not workload.by_position:
            why = f"the samples of {type(workload).__name__} are no sequences that can be cut"
            raise problem("engine.cp", why, "leave cp out")
        attention = use_ulysses(model, place.required("cp").get_group(), config.tp)
    if plan:
        parallel = {"sequence_parallel": config.sequence_parallel, "loss_parallel": config.loss_parallel}
        tensor_parallel.split(model, place.required("tp"), plan, **parallel)
    return Part(model, blocks, whole, trains, expected, pipeline, attention)


def _plan(model: nn.Module, workload: Workload, config: MeshEngine) -> dict[str, str]:
    plan = tensor_parallel.plan_of(model, workload.layout.tensor_parallel)
    tensor_parallel.check_divisible(model, plan, config.tp)
    tensor_parallel.check_options(model, plan, config.sequence_parallel, config.loss_parallel)
    return plan


def _pipeline(
    model: nn.Module, anatomy: Anatomy, own: range, config: MeshEngine, place: Place, options: EngineOptions
) -> Pipeline:
    link = Link()
    cut(model, anatomy, own, link)
    return Pipeline(
        model,
        link,
        anatomy.hidden,
        schedule=config.schedule,
        group=place.required("pp").get_group(),
        device=options.device,
        transport=dtype(options.precision.parameters),
        length_share=config.tp if config.sequence_parallel else 1,
    )


class _Probe:
    """Forward passes of a few samples by the whole model, on the CPU, as the run will compute them but for dropout."""

    def __init__(self, workload: Workload, options: EngineOptions) -> None:
        self._workload, self._precision = workload, options.precision

    def loss(self, model: nn.Module) -> float:
        with self._aside(model), torch.no_grad():
            return float(self._forward(model, self._batch(2)))

    def anatomy(self, model: nn.Module) -> Anatomy:
        """From the passes of two samples and of three."""
        with self._aside(model):
            return dissect(model, [self._batch(2), self._batch(3)], self._forward)

    def _forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with autocast(self._precision, torch.device("cpu")):
            return self._workload.loss_sum(model, batch)

    def _batch(self, count: int) -> Batch:
        kept = dtype(self._precision.parameters)
        batch = few(self._workload, count)
        return {name: t.to(kept) if t.is_floating_point() else t for name, t in batch.items()}

    @contextmanager
    def _aside(self, model: nn.Module) -> Iterator[None]:
        """Generators end as they were."""
        state = rng_state()
        model.eval()
        try:
            yield
        finally:
            restore_rng_state(state)
