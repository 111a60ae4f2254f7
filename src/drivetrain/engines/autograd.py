"""What single, dp, ddp and fsdp share: one nn.Module, PyTorch's autograd, gradients averaged over the ranks.

Losses are divided by the valid targets of the whole global batch and multiplied by the number of ranks, over which
the wrapped module averages: the same gradient on any number of ranks and in any number of pieces.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.shard import Shard, piece_of
from drivetrain.engines.base import Engaged, Engine, EngineOptions, State, StepGuard, StepResult
from drivetrain.engines.compiled import compile_model
from drivetrain.engines.guarded_update import update
from drivetrain.engines.inputs import Inputs
from drivetrain.engines.replaced_layers import computing_in, replaced
from drivetrain.engines.state import (
    gathered,
    held_bytes,
    kept,
    load_optimizer_state,
    load_weights,
    local_part,
    optimizer_state,
    optimizer_tensors,
)
from drivetrain.engines.warmup import rehearse
from drivetrain.engines.weight_copies import WeightCopies
from drivetrain.memory.offload import Offload, offload_activations
from drivetrain.memory.recompute import apply_recompute, repeated_blocks
from drivetrain.memory.statistics import Statistics
from drivetrain.memory.transfers import Later
from drivetrain.models.quantised_base import weights_of_codes
from drivetrain.numerics.torch_precision import autocast, dtype
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.workloads.base import Batch, Workload, few
from drivetrain.workloads.metrics import Metric


class AutogradEngine(Engine):
    """An engine of this kind says how the model is wrapped, and the little that follows from it."""

    _scaler_type: type[torch.amp.GradScaler] = torch.amp.GradScaler
    _offload: Offload | None = None
    _copies_weights = False  # where the precision asks for 16-bit copies; else what wraps the model makes them
    _compiles_by_block = False  # also where blocks are not alike

    def __init__(self, config: Any, options: EngineOptions, ranks: Communicator) -> None:
        self._config, self._options, self._ranks = config, options, ranks
        self._device, self._inputs = options.device, Inputs(options.device, options.precision)
        self._optimizer: torch.optim.Optimizer | None = None
        scaling = options.scaler.model_dump()
        self._scaler = self._scaler_type(self._device.type, enabled=options.precision.scaled, **scaling)
        self.data_rank, self.data_world, self.random_stream = ranks.rank, ranks.world, ranks.rank

    # --- what each of these engines decides -------------------------------------------------------------------------

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """The module that runs forward. The model is on the device, in its dtype, recomputing and compiled."""

    def _check_engaged(self) -> None:
        """RunError if `_wrap` did not do what the engine's name says."""

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; gradients travel with the window's last one."""
        del last
        return nullcontext()

    def _built(self, workload: Workload) -> nn.Module:
        return workload.build_model().to(self._device, dtype(self._options.precision.parameters))

    def _blocks(self) -> list[nn.Module]:
        """What repeats in the model, and is recomputed or gathered at once."""
        return repeated_blocks(self._model)

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        return build(self._model)

    @property
    def _inference(self) -> nn.Module:
        """Who runs forward in evaluation and prediction."""
        return self._forward

    # --- setting up --------------------------------------------------------------------------------------------------

    def setup(self, workload: Workload, build_optimizer: OptimizerFactory | None) -> None:
        self._workload, self._trains = workload, build_optimizer is not None
        self._model = computing_in(self._built(workload), self._options.precision)
        if self._options.recompute:
            apply_recompute(self._model, self._options.recompute == "selective", self._blocks())
        by_block = self._compiles_by_block or self._options.offload_activations  # compiled code offloads nothing
        self.compiled = compile_model(self._model, self._blocks(), self._options.compile, by_block)
        if self._options.offload_activations:
            self._offload = offload_activations(self._model, self._blocks())
        self._weight_copies = WeightCopies(self._model, self._options.precision if self._copies_weights else None)
        self._forward = self._wrap(self._model)
        if build_optimizer is not None:
            self._optimizer = self._build_optimizer(build_optimizer)
            for group in self._optimizer.param_groups:
                group["peak_lr"] = copy.deepcopy(group["lr"])  # torchao's is a tensor
        self._check_engaged()
        self.statistics = Statistics(self._model)
        if self._trains:
            self._warm_up()

    def _warm_up(self) -> None:
        """What must have happened once before the first step, for a resumed run to do the same as this one."""

    def _rehearse(self, backward: Callable[[Tensor], None]) -> None:
        """With a few samples."""
        batch = self._to_device(few(self._workload))

        def loss() -> Tensor:
            with autocast(self._options.precision, self._device):
                return self._workload.loss_sum(self._forward, batch)

        with self._weight_copies.in_place(self._weight_copies.made()):
            rehearse(self._model, loss, backward)

    def engaged(self) -> Engaged:
        parameters, stands = list(self._model.parameters()), weights_of_codes(self._model)
        return Engaged(
            wrapper=type(self._forward).__name__,
            world_size=self._ranks.world,
            local_parameters=sum(local_part(p).numel() * stands.get(id(p), 1) for p in parameters),
            global_parameters=sum(p.numel() * stands.get(id(p), 1) for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            linear_layers=replaced(self._model, self._options.precision, self._workload),
            compiled=self.compiled,
        )

    def measured(self) -> dict[str, Any]:
        held = {} if self._optimizer is None else {"held_bytes": held_bytes(self._model, self._optimizer)}
        return held if self._offload is None else {**held, "offloaded_bytes": self._offload.moved_bytes}

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._ready_to_train()
        count = self._global_count(micro_batches)  # travels during the first forward
        total = torch.zeros((), device=self._device)
        with self._weight_copies.in_place(self._weight_copies.made()):
            for number, batch in enumerate(micro_batches, 1):
                with self._exchange(last=number == len(micro_batches)):
                    total += self._micro_batch(batch, count, micro_batches[number:])
        return total

    def _micro_batch(
        self, batch: MicroBatch, count: Callable[[], Tensor | int], following: Sequence[MicroBatch]
    ) -> Tensor:
        """Adds its gradients; returns its part of the window's loss."""
        with self._options.part("forward"), autocast(self._options.precision, self._device):
            own = self._to_device(batch.tensors)
            self.expect(following)
            loss = self._loss_sum(self._forward, own) / count()
            if not batch.counts:
                loss = loss * 0
        with self._options.part("backward"):
            self._backward(loss * self._averaged_over if self._averaged_over > 1 else loss)
        return loss.detach()

    def _ready_to_train(self) -> None:
        if not self._model.training:  # asked first: telling every module takes a tenth of a millisecond
            self._model.train()

    def summed(self, losses: Tensor) -> Tensor:
        return self._ranks.sum(losses)

    def _loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._workload.loss_sum(model, batch)

    @property
    def _averaged_over(self) -> int:
        """Ranks over which the wrapped module averages gradients."""
        return self.data_world

    def _backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def _global_count(self, micro_batches: Sequence[MicroBatch]) -> Callable[[], Tensor | int]:
        """Valid targets of the whole global batch. On several GPUs it stays there, so that nobody waits for it."""
        count = sum(self._workload.count(batch.tensors) for batch in micro_batches if batch.counts)
        if self.data_world == 1:
            return lambda: max(1, count)
        summed = self._ranks.sum_soon(torch.full((), count, device=self._device))
        return lambda: summed().clamp(min=1)

    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        optimizer = self._at_rate(lr_factor)
        self._scaler.unscale_(optimizer)  # before the norm, so that clipping sees true gradients
        grad_norm = self._clip()
        scale = self._scale()
        refused, held = update(self._scaler, optimizer, grad_norm, judge)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scales = None if scale is None else Later(torch.stack([scale, cast(Tensor, self._scale())])).numbers
        return StepResult(grad_norm, refused, held, scales)

    def _scale(self) -> Tensor | None:
        """The loss scale of the next step, on the device; None where the loss is not scaled."""
        return self._scaler.scale(torch.ones((), device=self._device)) if self._scaler.is_enabled() else None

    def _at_rate(self, lr_factor: float) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "set up for evaluation only"
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        return self._optimizer

    def _clip(self) -> Tensor:
        """The global gradient norm in fp32 (a sum of squares overflows fp16 at 256), gradients clipped to the bound.

        Clipped as torch.nn.utils.clip_grad_norm_ does: by max_norm / (norm + 1e-6) where that is below 1.
        """
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        norms = torch.zeros(len(gradients), device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(self._device)
        norm = self._global_norm(norms, parameters)
        if self._options.max_grad_norm is not None and gradients:
            factor = torch.clamp(self._options.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def _global_norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of all gradients, from the norms of those that this rank holds, and whose they are."""
        del parameters
        return torch.linalg.vector_norm(norms)

    # --- evaluation and prediction -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric]) -> dict[str, float]:
        self._ready_for_inference()
        for metric in metrics.values():
            metric.reset()
            metric.to(self._device)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # loss, count
        with self._weight_copies.in_place(self._weight_copies.made()):
            for batch in batches:
                with autocast(self._options.precision, self._device):
                    outputs = self._workload.outputs(self._inference, self._to_device(batch.tensors))
                if batch.counts:
                    sums[0] += outputs.loss_sum
                    sums[1] += outputs.count
                    for metric in metrics.values():
                        metric.update(outputs.predictions, outputs.targets)
        loss_sum, count = self._ranks.sum(sums).tolist()
        values = {name: float(metric.compute()) for name, metric in metrics.items()}  # joins the ranks
        return {"loss": loss_sum / max(1, count), **values}

    @torch.no_grad()
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        self._ready_for_inference()
        copies = self._weight_copies.made()
        for batch in batches:  # a yield outside of the block: what takes the rows may look at the weights
            with self._weight_copies.in_place(copies), autocast(self._options.precision, self._device):
                rows = self._workload.predict(self._inference, self._to_device(batch.tensors))
            for dealt in self._ranks.gather(rows if batch.counts else []) or ():
                yield from dealt

    def _ready_for_inference(self) -> None:
        """Buffers that training fills on each rank alone (BatchNorm's statistics) are the first rank's."""
        self._ranks.copy_from_first(self._model.buffers())
        self._model.eval()

    def _to_device(self, batch: Batch) -> Batch:
        return self._inputs(batch)

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._inputs.expect(micro_batches)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        assert self._optimizer is not None, "set up for evaluation only"
        return {
            "model": self._own_weights(),
            "optimizer": self._optimizer_state(self._optimizer),
            "engine": {"scaler": self._scaler.state_dict()},
        }

    def _own_weights(self) -> dict[str, Tensor | Shard]:
        return {name: piece_of(held) for name, held in kept(self._model, self._model.state_dict()).items()}

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer_state(self._model, optimizer)

    def load_state_dict(self, state: State) -> None:
        assert self._optimizer is not None, "set up for evaluation only"
        self.load_weights(state["model"])
        self._load_optimizer_state(self._optimizer, state["optimizer"])
        if self._scaler.is_enabled() and state["engine"]["scaler"]:  # empty where the saved run did not scale
            self._scaler.load_state_dict(state["engine"]["scaler"])

    def _load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        load_optimizer_state(self._model, optimizer, saved)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in kept(self._model, self._model.state_dict()).items()}

    def weights(self) -> dict[str, Tensor]:
        state = kept(self._model, self._model.state_dict())
        whole = {name: self._gather(held) for name, held in state.items()}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def gradients(self) -> dict[str, Tensor]:
        return {name: gathered(p.grad) for name, p in self._model.named_parameters() if p.grad is not None}

    def _gather(self, held: Tensor) -> Tensor | None:
        """The whole tensor on the first rank, None elsewhere. A sharded one goes to CPU memory at once."""
        whole = gathered(held)
        if not self._ranks.is_first:
            return None
        return whole if whole is held else whole.cpu()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self._model, weights)

    def tensors(self) -> list[Tensor]:
        held = [*self._model.parameters(), *self._model.buffers()]
        if self._optimizer is not None:
            held += optimizer_tensors(self._optimizer)
        return [local_part(tensor) for tensor in held]

    def save_assets(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        self._workload.save_assets(self._model, folder)
        self._workload.write_parts(self._model, weights, folder)

    def check_base(self, folder: Path) -> list[str]:
        return [] if self._workload.adapters is None else self._workload.adapters.check(folder)

    def close(self) -> None:
        self._optimizer = None
