"""Hugging Face Accelerate: its `prepare` wraps the model and the optimizer, by the driver that the run file names.

The drivers are PyTorch's DDP and FSDP2, and DeepSpeed's engine: each is our engine of that kind with the wrapping
replaced, and checked as strictly, because Accelerate itself silently goes on where a driver did not engage.

Between CPUs Accelerate supports DDP alone. For the others its `PartialState`, which holds the ranks, is made for CPUs
and then declares the ranks to be GPUs; from there on the ways are the same as on GPUs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config import engines as config
from drivetrain.engines.ddp import DdpEngine, wrap_ddp
from drivetrain.engines.deepspeed.engine import DeepspeedEngine
from drivetrain.engines.fsdp import (
    CodesMayBeSharded,
    FsdpEngine,
    gathered_apart,
    mixed_precision,
    ready_to_shard,
    refuse_cast_codes,
)
from drivetrain.errors import RunError

HOOKS = {"none": "NO", "fp16": "FP16", "bf16": "BF16"}


def accelerator(device: torch.device, world: int, *, as_gpus: bool = False, **plugins: Any) -> Any:
    """Returns a fresh Accelerator among the ranks of the joined group; raises RunError if it sees other ranks."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which Accelerate imports, warns of its guess
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)  # it is kept for the life of the process otherwise
    on_cpu = device.type == "cpu"
    state = PartialState(cpu=on_cpu)
    if on_cpu and as_gpus:
        state.distributed_type = DistributedType.MULTI_GPU
    made = Accelerator(cpu=on_cpu and not as_gpus, mixed_precision="no", device_placement=False, **plugins)
    if made.num_processes != world:
        raise RunError(f"engine=accelerate: Accelerate sees {made.num_processes} ranks, but the run has {world}")
    return made


class AccelerateDdp(DdpEngine):
    def _wrap(self, model: nn.Module) -> nn.Module:
        if not self._trains:
            return model
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(
            bucket_cap_mb=self._config.bucket_mb,
            find_unused_parameters=self._config.find_unused,
            static_graph=self._config.static_graph,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            comm_hook=DDPCommunicationHookType[HOOKS[self._config.gradient_compression]],
        )
        made = accelerator(self._device, self._ranks.world, kwargs_handlers=[handler])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)  # torch 2.12 renamed it
            wrapped = made.prepare(model)
        if self._ranks.world == 1 and wrapped is model:  # for one GPU Accelerate wraps nothing
            return wrap_ddp(model, self._device, self._config)
        assert isinstance(wrapped, nn.Module)
        return wrapped

    def _check_engaged(self) -> None:
        super()._check_engaged()
        if self._trains and not isinstance(self._forward, DistributedDataParallel):
            raise RunError(f"engine=accelerate-ddp was asked for, but Accelerate made a {type(self._forward).__name__}")


class AccelerateFsdp(FsdpEngine):
    def _wrap(self, model: nn.Module) -> nn.Module:
        """Wraps beside an optimizer that is discarded: Accelerate prepares no model without one."""
        from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

        ready_to_shard(model)
        refuse_cast_codes(model, self._options.precision)
        world, options = self._ranks.world, self._config
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=options.reshard,
            cpu_offload=CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if options.offload else False,
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=mixed_precision(self._options.precision),
            **_policy(model, options),
        )
        axes = {}
        if options.hybrid is not None:
            sizes = {"dp_replicate_size": world // options.hybrid, "dp_shard_size": options.hybrid}
            axes = {"parallelism_config": ParallelismConfig(**sizes)}
        made = accelerator(self._device, world, as_gpus=True, fsdp_plugin=plugin, **axes)
        with _embeddings_answered(model), CodesMayBeSharded():
            wrapped, _ = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(wrapped, nn.Module)
        return wrapped


@contextmanager
def _embeddings_answered(model: nn.Module) -> Iterator[None]:
    """Answers for a model's embeddings: Accelerate asks every model for them, and Transformers' vision models
    refuse."""
    names = [name for name in ("get_input_embeddings", "get_output_embeddings") if not _answers(model, name)]
    model.__dict__.update(dict.fromkeys(names, lambda: None))
    try:
        yield
    finally:
        for name in names:
            del model.__dict__[name]


def _answers(model: nn.Module, name: str) -> bool:
    try:
        getattr(model, name, lambda: None)()
    except NotImplementedError:
        return False
    return True


def _policy(model: nn.Module, options: config.FsdpEngine) -> dict[str, Any]:
    """Returns which modules are gathered separately, in the form that Accelerate takes: by size, or by class."""
    if options.wrap == "size":
        return {"auto_wrap_policy": "size_based_wrap", "min_num_params": options.wrap_min_parameters}
    names = sorted({type(module).__name__ for module in gathered_apart(model, options)})
    if not names:
        return {"auto_wrap_policy": "no_wrap"}
    return {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": names}


class AccelerateDeepspeed(DeepspeedEngine):
    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        from accelerate.utils import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(hf_ds_config=self._json(model, self._options.precision))
        made = accelerator(self._device, self._ranks.world, as_gpus=True, deepspeed_plugin=plugin)
        engine = made.prepare(model) if optimizer is None else made.prepare(model, optimizer)[0]
        plugin.dschf = None  # as long as it lives Transformers builds models in pieces, those of a later engine too
        return engine
