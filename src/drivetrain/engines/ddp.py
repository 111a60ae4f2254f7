"""DistributedDataParallel: a process and a whole model for each device, gradients averaged during the backward pass.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; with shard_optimizer,
ZeRO-1: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config import engines as config
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.base import HeldPart
from drivetrain.engines.state import optimizer_state
from drivetrain.engines.traced_ddp import TracedDdp
from drivetrain.errors import RunError, problem
from drivetrain.optim.optimizers import OptimizerFactory

NO_BUFFERS = "forward_sync_buffers"  # before torch 2.12 it had another name
if NO_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    NO_BUFFERS = "broadcast_buffers"
COMPRESSION = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def wrap_ddp(model: nn.Module, device: torch.device, options: config.DdpEngine) -> DistributedDataParallel:
    """Wraps the model, which is on `device`. Buffers are not copied in every forward: the engine does it before they
    are used."""
    no_buffers: dict[str, Any] = {NO_BUFFERS: False}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_mb,
        find_unused_parameters=options.find_unused,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
        **no_buffers,
    )
    if options.gradient_compression != "none":
        wrapped.register_comm_hook(dist.group.WORLD, COMPRESSION[options.gradient_compression])
    return wrapped


class DdpEngine(AutogradEngine):
    _config: config.DdpEngine
    _copies_weights = True
    _buckets: Sequence[Tensor] = ()  # of gradients, which DDP keeps for the whole run

    def _wrap(self, model: nn.Module) -> nn.Module:
        if not self._trains:
            return model
        if self._options.traced:
            stand_in = TracedDdp(model, self._config)
            self._buckets = stand_in.buckets
            return stand_in
        return wrap_ddp(model, self._device, self._config)

    def _check_engaged(self) -> None:
        if not dist.is_initialized():
            raise RunError("engine=ddp was asked for, but this process belongs to no group of ranks")
        if isinstance(self._forward, DistributedDataParallel):
            joined = self._forward.process_group.size()
            if joined != self._ranks.world:
                raise RunError(f"engine=ddp joins {joined} ranks, but the run has {self._ranks.world}")

    @property
    def _inference(self) -> nn.Module:
        return self._model  # every rank holds the whole of it, and runs as many batches as it has

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else cast(DistributedDataParallel | TracedDdp, self._forward).no_sync()

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        if not self._config.shard_optimizer:
            return build(self._model)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # brings torch.jit along, which is slow to import

        return build(self._model, lambda cls, groups, options: ZeroRedundancyOptimizer(groups, cls, **options))

    def _warm_up(self) -> None:
        """Runs forward and backward and discards the results, so that every step sums gradients in one order.

        DDP orders its buckets anew after the first backward pass, and with them the order in which gradients are
        summed; a resumed run must not do that one step later than the run it goes on from. With static_graph its first
        exchange comes after the whole backward pass, also in another order, and only the second pass rebuilds.
        """

        for _ in range(2):
            self._rehearse(lambda loss: loss.backward())
            self._check_used()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]  # views of the buckets
        self._buckets = list({gradient.untyped_storage()._cdata: gradient for gradient in gradients}.values())
        self._model.zero_grad(set_to_none=True)

    def held_tensors(self) -> dict[HeldPart, list[Tensor]]:
        """Returns also a view of each bucket."""
        held = super().held_tensors()
        return {**held, "gradients": [*held["gradients"], *self._buckets]}

    def _check_used(self) -> None:
        """Raises UserError if a parameter got no gradient: DDP would wait for it in the next step."""
        parameters = self._model.named_parameters()
        unused = [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]
        if unused and not self._config.find_unused and not self._config.static_graph:
            why = f"{', '.join(unused[:5])} got no gradient"
            raise problem("engine.find_unused", why, "give engine.find_unused=true, or freeze these parameters")

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        try:
            return super().forward_backward(micro_batches)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise RunError(
                "some parameters got no gradient in this step, and DDP waits for all of them. Give "
                "engine={name: ddp, find_unused: true}"
            ) from error

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state; with shard_optimizer the moments of this rank's parameters, with the groups of
        all."""
        if not self._config.shard_optimizer:
            return super()._optimizer_state(optimizer)
        own = optimizer_state(self._model, cast(Any, optimizer).optim)["state"]
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        return {"state": own, "param_groups": groups}
