"""DeepSpeed's ZeRO, by stage: optimizer state, then gradients, then parameters sharded over the ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". DeepSpeed reduces,
shards, clips and updates; the window, the schedule, the loss scale and autocast are this project's, so that the curve
is that of every other engine. The optimizer is torch's: DeepSpeed's own would be compiled at the first start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.precision import Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.auxiliary import Companion
from drivetrain.engines.base import Engaged, HeldPart, StepGuard, StepResult
from drivetrain.engines.deepspeed import partitions
from drivetrain.engines.deepspeed.config import zero_json
from drivetrain.engines.deepspeed.native_build import deepspeed_ready, swap_folder
from drivetrain.engines.deepspeed.partitioned import PartitionedEngine
from drivetrain.engines.deepspeed.wrap import InAutocast, without_fused_sgd, wrap_deepspeed
from drivetrain.engines.state import refuse_scalars
from drivetrain.errors import RunError
from drivetrain.models.quantised_base import weights_of_codes
from drivetrain.numerics.torch_precision import autocast
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.runtime.scratch import Scratch

LOG = logging.getLogger(__name__)


class DeepspeedEngine(PartitionedEngine):
    _swap: Scratch | None = None  # what nvme means to this run
    _reported_idle = False
    _put_back: Callable[[], None]  # what DeepSpeed replaced

    # --- setting up --------------------------------------------------------------------------------------------------

    def _wrap(self, model: nn.Module) -> nn.Module:
        deepspeed_ready(self._device.type, self._config.keeps_on_disk)
        if self._config.stage:
            refuse_scalars(model, "ZeRO")
        precision = self._options.precision
        whole = InAutocast(model, lambda: autocast(precision, self._device)) if precision.autocast else model
        if not self._trains and self._config.stage == 3:
            self._zero = whole = self._initialised(whole, None)
        elif not self._trains and precision.cast:
            model.to(getattr(torch, precision.compute))
        return whole

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        """Returns torch's optimizer, over the flat partitions that ZeRO puts in place of the parameters."""
        made = build(self._model, without_fused_sgd)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._groups = [[names[id(p)] for p in group["params"]] for group in made.param_groups]
        self._forward = self._zero = self._initialised(self._forward, made)
        if self._scaled_by_zero:
            self._zero.optimizer.override_loss_scale(self._scaler.get_scale())
        return made

    def _initialised(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        self._put_back = partitions.replaced_parts(self._options.traced)
        try:
            return self._made(model, optimizer)
        except BaseException:
            self._put_back()
            raise

    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Returns the DeepSpeedEngine."""
        engine = wrap_deepspeed(model, optimizer, self._json(model, self._options.precision))
        partitions.share_masters(engine.optimizer)
        return engine

    def _wrap_auxiliary(self, model: nn.Module, precision: Precision) -> Callable[..., Any]:
        """Wraps an auxiliary model: under stage 3 sharded by a DeepSpeedEngine of its own, else whole on every rank."""
        if self._config.stage < 3:
            return super()._wrap_auxiliary(model, precision)
        whole = InAutocast(model, lambda: autocast(precision, self._device)) if precision.autocast else model
        forward: nn.Module = wrap_deepspeed(whole, None, self._json(whole, precision))
        forward.eval()
        return forward

    def _follow(self, companion: Companion) -> None:
        if self._config.stage < 3:
            super()._follow(companion)
        else:
            partitions.follow(companion.model, self._model, companion.settings.mixing)

    def _json(self, model: nn.Module, precision: Precision) -> dict[str, Any]:
        for parameter in model.parameters():  # DeepSpeed takes no channels-last filters, not even of one pixel
            held = parameter.data
            parameter.data = held.clone(memory_format=torch.contiguous_format) if held.dim() > 3 else held.contiguous()
        sizes = [p.numel() for p in model.parameters()]
        block, on_gpu = self._config, self._device.type == "cuda"
        if block.keeps_on_disk:
            self._swap = swap_folder(block.nvme_path, self._ranks)
            block = block.model_copy(update={"nvme_path": self._swap.path})
        return zero_json(block, precision, self._options.max_grad_norm, sizes, on_gpu)

    def _check_engaged(self) -> None:
        if self._zero is None:
            return
        from deepspeed import DeepSpeedEngine

        asked, world = self._config.stage, self._ranks.world
        if not isinstance(self._forward, DeepSpeedEngine) or self._zero.zero_optimization_stage() != asked:
            raise RunError(f"engine=deepspeed was asked for at stage {asked}, but {type(self._forward).__name__} runs")
        if self._zero.dp_world_size != world:
            raise RunError(f"engine=deepspeed joins {self._zero.dp_world_size} ranks, but the run has {world}")
        trained = [p for p in self._model.parameters() if p.requires_grad]
        total = sum(partitions.shape_of(p).numel() for p in trained)
        if self._trains and asked > 0:
            self._check_shards("master weights", partitions.num_masters(self._zero.optimizer), total)
        if asked == 3:
            self._check_shards("parameters", sum(partitions.shard(p).numel() for p in trained), total)

    def _check_shards(self, what: str, own: int, total: int) -> None:
        """Checks that the ranks together hold one copy, beside the padding of partitions."""
        if self._options.traced:
            return
        world = self._ranks.world
        together = int(self._ranks.sum(torch.tensor(own, device=self._device)))
        padding = world * world * 64 * (1 + len(list(self._model.parameters())))
        if not total <= together <= total + padding:
            raise RunError(f"engine=deepspeed: the ranks hold {together:,} {what} together, not {total:,}")

    @property
    def _scaled_by_zero(self) -> bool:
        """Returns whether DeepSpeed multiplies the loss and divides the gradients, by the scale it gets."""
        return self._scaler.is_enabled() and self._config.stage > 0

    @property
    def _inference(self) -> nn.Module:
        """Returns the module for inference. Up to stage 2 every rank holds the whole model, and runs as many batches as
        it has."""
        return self._forward if self._config.stage == 3 else self._model

    def engaged(self) -> Engaged:
        parameters = list(self._model.parameters())
        stands = weights_of_codes(self._model)
        shapes = {id(p): partitions.shape_of(p).numel() * stands.get(id(p), 1) for p in parameters}
        return replace(
            super().engaged(),
            wrapper=f"{type(self._forward).__name__}, stage {self._config.stage}",
            local_parameters=sum(partitions.held(p).numel() * stands.get(id(p), 1) for p in parameters),
            global_parameters=sum(shapes.values()),
            trained_parameters=sum(shapes[id(p)] for p in parameters if p.requires_grad),
        )

    def _held_bytes(self) -> dict[str, int]:
        assert self._optimizer is not None
        return partitions.held_bytes(self._model, self._zero.optimizer, self._optimizer)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        self._zero.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        if self._reported_idle:
            return super().forward_backward(micro_batches)
        used: set[str] = set()
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        hooks = [p.register_hook(lambda _, name=name: used.add(name)) for name, p in trained.items()]
        loss = super().forward_backward(micro_batches)
        for hook in hooks:
            hook.remove()
        self._tell_of_idle([name for name in trained if name not in used.union(*self._ranks.all_gather(used))])
        return loss

    def _tell_of_idle(self, names: list[str]) -> None:
        """Warns of parameters without a gradient: ZeRO uses zeros in place of a missing gradient, where other engines
        leave the parameter."""
        self._reported_idle = True
        if names and self._ranks.is_first:
            shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
            LOG.warning(
                "%s got no gradient in the first step. DeepSpeed takes that for a gradient of 0: weight decay and "
                "momentum still move them. Freeze them, or take engine=fsdp or ddp",
                shown,
            )

    def _backward(self, loss: Tensor) -> None:
        scaled = loss if self._scaled_by_zero else self._scaler.scale(loss)
        self._zero.backward(scaled, scale_wrt_gas=False)

    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        """DeepSpeed makes no update whose norm is not finite; the judge comes too late to refuse another."""
        if self._config.stage == 0:  # whole gradients, which DeepSpeed has averaged
            return super().optimizer_step(lr_factor, judge)
        self._at_rate(lr_factor)
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        self._zero.step()
        norm = torch.as_tensor(self._zero.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        skipped = bool(self._zero.optimizer.overflow)
        if scale is not None:
            self._rescale(skipped)
        if judge is not None:
            judge(norm)
        self._move_auxiliary()
        return StepResult(norm, skipped, scales=None if scale is None else lambda: (scale, scale))

    def _rescale(self, overflowed: bool) -> None:
        """Applies GradScaler's rule; DeepSpeed reports whether the step overflowed."""
        state = self._scaler.state_dict()
        good = 0 if overflowed else state["_growth_tracker"] + 1
        factor = 1.0
        if overflowed:
            factor = state["backoff_factor"]
        elif good == state["growth_interval"]:
            factor, good = state["growth_factor"], 0
        self._scaler.load_state_dict({**state, "scale": state["scale"] * factor, "_growth_tracker": good})
        self._zero.optimizer.override_loss_scale(self._scaler.get_scale())

    # --- state -------------------------------------------------------------------------------------------------------

    def _make_state(self) -> None:
        """Makes the optimizer create its state: a step at rate 0 of a loss of 0. A loaded state replaces it."""
        self._zero.set_gradient_accumulation_boundary(True)
        self._at_rate(0.0)
        self._rehearse(self._backward)
        self._zero.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._scaled_by_zero:
            self._zero.optimizer.override_loss_scale(self._scaler.get_scale())

    def held_tensors(self) -> dict[HeldPart, list[Tensor]]:
        parameters = [partitions.held(p) for p in self._model.parameters()]
        held: dict[HeldPart, list[Tensor]] = {"parameters": parameters, "buffers": list(self._model.buffers())}
        if self._optimizer is None:
            return held
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        held["parameters"] += partitions.masters_apart(self._zero.optimizer)
        held["gradients"] = partitions.gradient_buffers(self._zero.optimizer)
        return {**held, "optimizer": [value for value in states if isinstance(value, Tensor)]}

    def close(self) -> None:
        super().close()
        if self._zero is not None:
            self._zero.destroy()
            self._zero = None
            for companion in self._auxiliary.companions.values():
                if companion.forward is not companion.model:
                    forward: Any = companion.forward
                    forward.destroy()
            self._put_back()
        if self._swap is not None:
            self._swap.close()
            self._swap = None
