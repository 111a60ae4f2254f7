"""Pipeline, data, context and tensor parallel in any product, on one device mesh (pp, dp, cp, tp).

The order is the engines': cut the stage, split its layers, then shard or replicate it over the data ranks. Context
ranks hold parts of the same sequences: to parameters they are data ranks. The optimizer updates what this rank holds of
each parameter, as plain tensors, whatever they are sharded over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torchmetrics import Metric

from drivetrain.config.mesh import MeshEngine as Config
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Engaged, EngineOptions, StepResult
from drivetrain.engines.context_parallel import part_of
from drivetrain.engines.eager import EagerEngine
from drivetrain.engines.fsdp import ready_to_shard
from drivetrain.engines.gradient_sum import GradientSum
from drivetrain.engines.mesh_state import (
    Held,
    groups_of,
    joined_groups,
    load_own_state,
    optimizer_items,
    shards,
    stages_items,
)
from drivetrain.engines.pipeline import Pipeline, bubble
from drivetrain.engines.places import MeshScaler, Place
from drivetrain.engines.spread import spread
from drivetrain.engines.state import gathered, load_weights, local_part
from drivetrain.errors import RunError
from drivetrain.optim import OptimizerFactory
from drivetrain.precision import autocast, dtype
from drivetrain.ranks import Ranks
from drivetrain.workloads.base import Batch, Workload, few


class MeshEngine(EagerEngine):
    _config: Config
    _scaler_type = MeshScaler

    def __init__(self, config: Config, options: EngineOptions, ranks: Ranks) -> None:
        super().__init__(config, options, ranks)
        self._place = place = Place(config, ranks, self._device.type)
        self.data_rank, self.data_world = place.at["dp"], place.dp
        self.random_stream = ranks.rank // config.tp  # tensor ranks draw the same
        self.counts_samples = place.leads_samples

    @property
    def _averaged_over(self) -> int:
        return self._place.dp * self._place.cp if self._config.shard else 1  # replicas are summed

    # --- setting up --------------------------------------------------------------------------------------------------

    def _built(self, workload: Workload) -> nn.Module:
        model = workload.build_model().to(dtype(self._options.precision.parameters))
        self._part = spread(model, workload, self._config, self._place, self._options)
        self._pipeline, self._attention = self._part.pipeline, self._part.attention
        return model.to(self._device)

    def _blocks(self) -> list[nn.Module]:
        return self._part.blocks

    def _compile(self) -> None:
        for block in self._part.blocks:
            block.compile()

    def _wrap(self, model: nn.Module) -> nn.Module:
        root = model if self._pipeline is None else self._pipeline.stage
        mesh = self._place.axis("data")
        self._sum: GradientSum | None = None
        if mesh is not None and self._config.shard:
            ready_to_shard(model)
            for module in [*self._part.blocks, root]:
                later = self._pipeline is None  # a pipeline runs several forwards before a backward
                fully_shard(module, mesh=mesh, reshard_after_forward=later)
        elif mesh is not None:
            self._sum = GradientSum(model.parameters(), mesh.get_group())
        self._held = Held(model)
        return root

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        return build(self._held)

    def _check_engaged(self) -> None:
        self._check_pieces()
        self._model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            loss = self._through(MicroBatch(few(self._workload)), self._workload.loss_sum)
        total = torch.zeros((), device=self._device) if loss is None else self._place.sum(loss.detach(), "cp")
        self._part.check_loss(self._ranks.all_gather(float(total))[-1], self._options.precision)  # of the last stage

    def _check_pieces(self) -> None:
        pieces = sum(local_part(p).numel() / self._copies(p) for p in self._model.parameters())
        held = torch.tensor(pieces, dtype=torch.float64, device=self._device)
        total = sum(self._part.whole[name].numel() for name in self._part.trains)
        found = int(self._ranks.sum(held).round())
        if found != total:
            raise RunError(f"engine=mesh: the ranks hold {found:,} different parameters together, not {total:,}")

    def engaged(self) -> Engaged:
        sizes = {name: self._part.whole[name].numel() for name in self._part.trains}
        return Engaged(
            wrapper=f"{type(self._forward).__name__} on {self._place}",
            world_size=self._ranks.world,
            local_parameters=sum(p.numel() for p in self._held.parameters()),
            global_parameters=sum(sizes.values()),
            trained_parameters=sum(sizes[name] for name, trains in self._part.trains.items() if trains),
            parameter_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in self._held.parameters()})),
        )

    def measured(self) -> dict[str, Any]:
        """Of a pipeline: the share of its windows that this stage waits, and the least that the schedule allows."""
        if self._pipeline is None:
            return {}
        least = bubble(self._config.pp, self._pipeline.most_pieces) if self._config.schedule != "zero_bubble" else None
        return {"stage": self._place.at["pp"], "waiting_share": self._pipeline.waiting_share, "bubble": least}

    def _copies(self, parameter: Tensor) -> float:
        """Ranks that hold the same piece of a parameter."""
        return self._ranks.world / self._config.pp / shards(parameter)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        if self._averaged_over > 1:
            cast(FSDPModule, self._forward).set_requires_gradient_sync(last)
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        full = self._filled(micro_batches)
        if self._sum is not None:
            self._sum.expect(len(full))
        with loss_parallel() if self._config.loss_parallel else nullcontext():
            loss = super().forward_backward(full) if self._pipeline is None else self._window(self._pipeline, full)
        if self._sum is not None:
            self._sum.finish()
        self._held.take_gradients()
        return loss if self._place.tells_loss else loss * 0

    def _window(self, pipeline: Pipeline, full: Sequence[MicroBatch]) -> Tensor:
        if not self._model.training:
            self._model.train()
        count = self._global_count(full)
        batches = [self._to_device(batch.tensors) for batch in full]
        total = torch.zeros((), device=self._device)
        self._scaler.scale(total)  # makes the scale, on stages without a loss too

        def loss_of(model: nn.Module, number: int) -> Tensor:
            with autocast(self._options.precision, self._device):
                loss = self._loss_sum(model, batches[number]) / count()
            if not full[number].counts:
                loss = loss * 0
            total.add_(loss.detach())
            return self._scaler.scale(loss * self._averaged_over)

        with self._options.part("forward_backward"):
            pipeline.window(batches, loss_of)
        return total

    def _to_device(self, batch: Batch) -> Batch:
        cuts = self._attention is not None and not self._attention.has_whole_sequences
        ranks = self._config.cp if cuts else 1
        if ranks > 1 or self._length_share > 1:
            pads = self._workload.by_position
            batch = part_of(batch, pads, self._place.at["cp"] if cuts else 0, ranks, self._length_share)
        return super()._to_device(batch)

    @property
    def _length_share(self) -> int:
        """Tensor ranks that share each sequence between the layers."""
        return self._config.tp if self._config.sequence_parallel else 1

    def _loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super()._loss_sum(model, batch)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _filled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With micro-batches that do not count, where the schedule wants more: as many as stages, or a multiple."""
        stages, have = self._config.pp, len(micro_batches)
        if stages == 1:
            return list(micro_batches)
        wanted = {"gpipe": have, "1f1b": max(have, stages), "zero_bubble": -(-have // stages) * stages}
        missing = wanted[self._config.schedule] - have
        return [*micro_batches, *[MicroBatch(micro_batches[0].tensors, counts=False)] * missing]

    def _global_count(self, micro_batches: Sequence[MicroBatch]) -> Callable[[], Tensor | int]:
        count = sum(self._workload.count(batch.tensors) for batch in micro_batches if batch.counts)
        if self.data_world == 1:
            return lambda: max(1, count)
        own = count if self.counts_samples else 0
        summed = self._ranks.sum_soon(torch.tensor(own, device=self._device))
        return lambda: summed().clamp(min=1)

    def optimizer_step(self, lr_factor: float) -> StepResult:
        result = super().optimizer_step(lr_factor)
        self._held.clear_gradients()
        return result

    def _global_norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Each piece once, however many ranks hold it."""
        copies = torch.tensor([self._copies(p) for p in parameters], device=self._device)
        squares = (norms**2 / copies).sum()
        return self._ranks.sum(squares).sqrt()

    # --- evaluation and prediction -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """On the last stage, its data ranks together; the others are told."""
        self._ready_for_inference()
        data_ranks = self._place.group("data")
        for metric in metrics.values():
            metric.reset()
            metric.to(self._device)
            metric.process_group = data_ranks
            metric.distributed_available_fn = lambda: data_ranks is not None
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            outputs = self._through(batch, self._workload.outputs)
            if batch.counts and outputs is not None:
                sums[0] += outputs.loss_sum
                sums[1] += outputs.count
                for metric in metrics.values():
                    metric.update(outputs.predictions, outputs.targets)
        values: list[dict[str, float]] = [{}]
        if self._place.at["pp"] == self._config.pp - 1:
            loss_sum, count = self._place.sum(sums, "data").tolist()
            values = [{"loss": loss_sum / max(1, count), **{k: float(m.compute()) for k, m in metrics.items()}}]
        if self._config.pp > 1:
            dist.broadcast_object_list(values, group=self._place.group("pp"), group_src=self._config.pp - 1)
        return values[0]

    @torch.no_grad()
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        self._ready_for_inference()
        for batch in batches:
            with self._attention.whole_sequences() if self._attention else nullcontext():
                rows = self._through(batch, self._workload.predict) or []
            speaks = batch.counts and self._place.at["tp"] == self._place.at["cp"] == 0
            for dealt in self._ranks.gather(rows if speaks else []) or ():
                yield from dealt

    def _through(self, batch: MicroBatch, work: Callable[[nn.Module, Batch], Any]) -> Any:
        """What `work` makes of the model and a batch: on the last stage, None on others."""
        tensors = self._to_device(batch.tensors)

        def autocasted(model: nn.Module) -> Any:
            with autocast(self._options.precision, self._device):
                return work(model, tensors)

        if self._pipeline is None:
            return autocasted(self._forward)
        return self._pipeline.forward_only(tensors, autocasted)

    def _ready_for_inference(self) -> None:
        data_ranks = self._place.group("data")
        for buffer in self._model.buffers() if data_ranks is not None else ():
            dist.broadcast(buffer, group=data_ranks, group_src=0)
        self._model.eval()

    # --- state -------------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, torch.Size]:
        return dict(self._part.whole)

    def _of_all_stages(self, own: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return stages_items(self._ranks, self._config.pp, self._place.leads, own)

    def weights(self) -> dict[str, Tensor]:
        own = ((name, gathered(held)) for name, held in self._model.state_dict().items())
        found = self._of_all_stages((name, whole.cpu()) for name, whole in own)
        return {name: found[name] for name in self._part.whole if name in found}

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = self._of_all_stages(optimizer_items(self._held, optimizer))
        of_stages = self._ranks.gather(groups_of(optimizer, self._held) if self._place.leads else [])
        if of_stages is None:
            return {"state": {}, "param_groups": []}
        order = [name for name in self._part.whole if name in state]
        return {"state": {n: state[n] for n in order}, "param_groups": joined_groups(of_stages, self._part.whole)}

    def _load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        load_own_state(self._held, optimizer, saved)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = self._model.state_dict()
        load_weights(self._model, {name: weights[name] for name in own if name in weights})

    def gradients(self) -> dict[str, Tensor]:
        own = {n: gathered(p.grad).cpu() for n, p in self._model.named_parameters() if p.grad is not None}
        of_stages: list[dict[str, Tensor]] = [{}] * self._config.pp
        if self._config.pp == 1:
            return own
        dist.all_gather_object(of_stages, own, group=self._place.group("pp"))
        found = {name: gradient for stage in of_stages for name, gradient in stage.items()}
        return {name: found[name] for name in self._part.trains if name in found}
