"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from drivetrain.engines.base import Engaged, Engine, EngineOptions, State, StepResult
from drivetrain.engines.state import load_named_optimizer_state, named_optimizer_state
from drivetrain.memory.recompute import apply_recompute
from drivetrain.optim import OptimizerFactory
from drivetrain.precision import autocast, dtype
from drivetrain.workloads.base import Batch, Workload


class SingleEngine(Engine):
    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._device = options.device
        self._optimizer: torch.optim.Optimizer | None = None
        scaler = options.scaler
        self._scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=scaler.init_scale,
            growth_factor=scaler.growth_factor,
            backoff_factor=scaler.backoff_factor,
            growth_interval=scaler.growth_interval,
            enabled=options.precision.scaled,
        )
        self.data_rank, self.data_world = 0, 1

    def setup(self, workload: Workload, build_optimizer: OptimizerFactory | None) -> None:
        self._workload = workload
        self._model = workload.build_model().to(self._device, dtype(self._options.precision.parameters))
        if self._options.recompute:
            apply_recompute(self._model)
        self._forward = cast(nn.Module, torch.compile(self._model)) if self._options.compile else self._model
        if build_optimizer is not None:
            self._optimizer = build_optimizer(self._model)
            for group in self._optimizer.param_groups:
                group["peak_lr"] = group["lr"]

    def engaged(self) -> Engaged:
        parameters = list(self._model.parameters())
        total = sum(p.numel() for p in parameters)
        return Engaged(
            wrapper=type(self._forward).__name__,
            world_size=1,
            local_parameters=total,
            global_parameters=total,
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        )

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        if not self._model.training:  # asked first: telling every module takes a tenth of a millisecond
            self._model.train()
        count = max(1, sum(self._workload.count(batch) for batch in micro_batches))
        total = torch.zeros((), device=self._device)
        part = self._options.part
        for batch in micro_batches:
            with part("forward"), autocast(self._options.precision, self._device):
                loss = self._workload.loss_sum(self._forward, self._to_device(batch)) / count
            with part("backward"):
                self._scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def optimizer_step(self, lr_factor: float) -> StepResult:
        optimizer = self._optimizer
        assert optimizer is not None, "set up for evaluation only"
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        self._scaler.unscale_(optimizer)  # before the norm, so that clipping sees true gradients
        grad_norm = self._clip()
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        skipped = scale is not None and self._scaler.get_scale() < scale
        return StepResult(grad_norm, scale, skipped)

    def _clip(self) -> Tensor:
        """The global gradient norm in fp32 (a sum of squares overflows fp16 at 256), gradients clipped to the bound."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self._device)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._options.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), self._options.max_grad_norm, norm)
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], metrics: Mapping[str, Metric]) -> dict[str, float]:
        self._model.eval()
        for metric in metrics.values():
            metric.reset()
            metric.to(self._device)
        loss_sum, count = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for batch in batches:
            with autocast(self._options.precision, self._device):
                outputs = self._workload.outputs(self._forward, self._to_device(batch))
            loss_sum += outputs.loss_sum
            count += outputs.count
            for metric in metrics.values():
                metric.update(outputs.predictions, outputs.targets)
        values = {name: float(metric.compute()) for name, metric in metrics.items()}
        return {"loss": float(loss_sum) / max(1, count), **values}

    @torch.no_grad()
    def predict(self, batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
        self._model.eval()
        for batch in batches:
            with autocast(self._options.precision, self._device):
                rows = self._workload.predict(self._forward, self._to_device(batch))
            yield from rows

    def _to_device(self, batch: Batch) -> Batch:
        """On the device; under a pure 16-bit precision floating inputs take the parameters' dtype."""
        kept = dtype(self._options.precision.parameters)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, kept if tensor.is_floating_point() else None, non_blocking=True)

        return {name: move(tensor) for name, tensor in batch.items()}

    def state_dict(self) -> State:
        assert self._optimizer is not None, "set up for evaluation only"
        return {
            "model": self.weights(),
            "optimizer": named_optimizer_state(self._model, self._optimizer),
            "engine": {"scaler": self._scaler.state_dict()},
        }

    def load_state_dict(self, state: State) -> None:
        assert self._optimizer is not None, "set up for evaluation only"
        self._model.load_state_dict(state["model"])
        load_named_optimizer_state(self._model, self._optimizer, state["optimizer"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["engine"]["scaler"])

    def weights(self) -> dict[str, Tensor]:
        return dict(self._model.state_dict())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(dict(weights))

    def tensors(self) -> list[Tensor]:
        held = [*self._model.parameters(), *self._model.buffers()]
        if self._optimizer is not None:
            states = self._optimizer.state.values()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return held

    def save_assets(self, folder: Path) -> None:
        self._workload.save_assets(self._model, folder)

    def close(self) -> None:
        self._optimizer = None
