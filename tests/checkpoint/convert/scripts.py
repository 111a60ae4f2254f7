"""Scripts that train the same model with other software: three steps, a checkpoint of theirs, and three more steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from drivetrain.data.order import GlobalOrder
from tests.checkpoint.convert.net import SAMPLES, Net, x, y

BATCH, RATE, DECAY = 20, 0.01, 0.1
SAVED, END = 3, 6
RUN = f"""
workload: {{{{type: module, path: {{net}}}}}}
batch_size: {BATCH}
loop: {{{{steps: {END}}}}}
optimizer: {{{{name: adamw, lr: {RATE}, weight_decay: {DECAY}}}}}
checkpoints: {{{{every_steps: 100}}}}
tracking: {{{{log_every: 1}}}}
"""


def fresh() -> Net:
    torch.manual_seed(11)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns what decays, and what does not: as many scripts have it."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model), lr=RATE)


def loss_of(
    model: Callable[[Tensor], Tensor], step: int, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Of a rank's share of the batch that the run takes at the step, counted from 0."""
    _, indices = GlobalOrder(SAMPLES, BATCH, seed=0).batch(step)
    own = torch.from_numpy(indices[rank::world])
    return F.mse_loss(model(x[own].to(dtype)).float(), y[own])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> list[float]:
    """Losses of the steps, one process."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """After the first steps, and the losses of the others."""
    model = fresh()
    optimizer = adamw(model)
    trained(model, optimizer, range(SAVED))
    twin = fresh()
    twin.load_state_dict(model.state_dict())
    further = adamw(twin)
    further.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else they share their moments
    return model, optimizer, trained(twin, further, range(SAVED, END))


# --- on ranks --------------------------------------------------------------------------------------------------------


def save_on_ranks(folder: Path) -> dict[str, list[float]]:
    """Losses after what FSDP and DeepSpeed saved, each in a folder of its name."""
    losses = {"fsdp": list(_fsdp(folder / "fsdp"))}
    for stage in (2, 3):
        losses[f"zero{stage}"] = list(_zero(folder / f"zero{stage}", stage))
    return losses


def _fsdp(folder: Path) -> Iterator[float]:
    model = fresh()
    fully_shard(model.first)
    fully_shard(model)
    optimizer = adamw(model)
    for step in range(END):
        if step == SAVED:
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save({**state, "step": step}, checkpoint_id=folder)
        loss = loss_of(model, step, dist.get_rank(), dist.get_world_size())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= SAVED:
            yield _mean(loss)


def _zero(folder: Path, stage: int) -> Iterator[float]:
    with Engine(stage) as engine:
        for step in range(END):
            if step == SAVED:
                engine.save_checkpoint(str(folder))
            loss = loss_of(engine, step, dist.get_rank(), dist.get_world_size())
            engine.backward(loss)
            engine.step()
            if step >= SAVED:
                yield _mean(loss)


class Engine:
    """DeepSpeed's, of fresh weights; closed at the end."""

    def __init__(self, stage: int, build: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **config: Any) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        from drivetrain.engines.deepspeed.native_build import deepspeed_ready

        deepspeed_ready("cpu", nvme=False)
        get_accelerator().is_fp16_supported = lambda: True  # every processor computes it, the most in software
        self._linear, model = F.linear, fresh()
        json = {
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # left out, it is 1
            "steps_per_print": 1000,
            **config,
        }
        optimizer = build(model)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=json, dist_init_required=False)

    def __enter__(self) -> Any:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.destroy()
        F.linear = self._linear  # stage 3 puts one in its place


KINDS: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
    "bf16-1": (1, torch.bfloat16, {"bf16": {"enabled": True}}),
    "fp16-2": (2, torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "bf16-3": (3, torch.bfloat16, {"bf16": {"enabled": True}}),
    "fp16-3": (3, torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "none": (0, torch.float32, {}),
    "sgd": (2, torch.float32, {"build": lambda model: torch.optim.SGD(groups(model), lr=RATE, momentum=0.9)}),
}


def save_kinds(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns what DeepSpeed saved in a folder of each kind's name → its masters then."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for kind, (stage, dtype, config) in KINDS.items():
        with Engine(stage, **config) as engine:
            for step in range(SAVED):
                engine.backward(loss_of(engine, step, dist.get_rank(), dist.get_world_size(), dtype))
                engine.step()
            engine.save_checkpoint(str(folder / kind))
            masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
            plain = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
            found[kind] = {name: plain[name] if whole is None else whole for name, whole in masters.items()}
    return found


def save_accelerated(folder: Path) -> None:
    """Returns what Accelerate saves of FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = fresh()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for step in range(SAVED):
        accelerator.backward(loss_of(model, step, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))


def _mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def load_universal(folder: Path) -> dict[int, dict[str, Any]]:
    """Stage → what DeepSpeed has of each parameter after it loaded, and the loss of the step after it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for stage in (1, 2, 3):
        with Engine(stage, checkpoint={"load_universal": True}) as engine:
            engine.load_checkpoint(str(folder), load_lr_scheduler_states=False)
            of: dict[str, Any] = {"step": engine.global_steps}
            for name, parameter in engine.module.named_parameters():
                moments = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
                of[name] = {"weight": safe_get_full_fp32_param(parameter), **moments}
            inner = engine.optimizer.optimizer
            of["updates"] = max(int(state["step"]) for state in inner.state.values())
            of["rates"] = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
            found[stage] = of
    return found


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
