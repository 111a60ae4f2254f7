"""A GPU played by tensors without numbers: where a tensor lies on the wrong device, or a step asks for a number.

PyTorch's dispatch key for devices of others is set up for a backend in Python (`fakegpu`), and FakeTensorMode computes
shapes, dtypes and devices on it, with autograd. An operation over tensors of two devices is refused as on a GPU, and so
is what brings a number to the host. Registering the device changes the process for good: this file runs in its own.

    python -m tests.fake_gpu FOLDER   prints, as JSON, for each case "" or what went wrong
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from drivetrain.config.adapter import Adapter
from drivetrain.config.training import Optimizer
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.inputs import Inputs
from drivetrain.engines.weight_copies import WeightCopies
from drivetrain.memory import transfers
from drivetrain.models import fused_loss
from drivetrain.models.adapters import AdapterSet
from drivetrain.optim.optimizers import optimizer_factory
from drivetrain.training.step_guard import Recent, Watch
from drivetrain.workloads.base import Batch, Workload, few
from drivetrain.workloads.build import build_workload
from drivetrain.workloads.loss_contract import LossContext
from tests.test_waits import WORKLOADS, run_of
from tests.tiny_workload import tiny_engine

T = TypeVar("T")
NAME = "fakegpu"
PRECISIONS = ["fp16-mixed", "bf16-master"]  # with autocast and a scaler, without either
# how many answers a row of pairs holds is read from numbers that the host sent, of which there are none here
OTHERS = {"pairs", "pairs, over the batch", "pairs, cached"}
ADAPTED = {"packed, lora": "packed", "padded, fused loss, lora": "packed, fused loss"}
KINDS = [*sorted(WORKLOADS.keys() - OTHERS), *ADAPTED]


class _Module(ModuleType):
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class Moved:
    """An engine of one process whose model lies on the device without numbers, as `_built` would have put it there."""

    def __init__(self, workload: Workload, precision: str, device: torch.device, mode: FakeTensorMode) -> None:
        optimizer = Optimizer(name="adamw")
        self.workload, self.device = workload, device
        self.engine: Any = tiny_engine(workload, precision, optimizer, max_grad_norm=1.0)
        with mode:
            for model in (self.engine._model, *(each.model for each in self.engine._auxiliary.companions.values())):
                _replace(model, lambda tensor: torch.empty_like(tensor, device=device))
            self.engine._device = device
            self.engine._inputs = Inputs(device, self.engine._options.precision)
            self.engine._optimizer = optimizer_factory(optimizer)(self.engine._model)
            for group in self.engine._optimizer.param_groups:
                group["peak_lr"] = group["lr"]
            scaled = self.engine._options.precision.scaled
            self.engine._scaler = torch.amp.GradScaler(NAME, enabled=scaled)
            copied = self.engine._options.precision if self.engine._copies_weights else None
            self.engine._weight_copies = WeightCopies(self.engine._model, copied)
        vars(workload)["count"] = _on_the_host(workload.count)
        vars(workload)["counts"] = _on_the_host(workload.counts)


def _replace(model: nn.Module, by: Callable[[Tensor], Tensor]) -> None:
    """Parameters and buffers, in place; what is tied stays tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = made.setdefault(id(parameter), nn.Parameter(by(parameter.detach()), parameter.requires_grad))
                module._parameters[name] = fresh
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else by(buffer)


def _on_the_host(count: Callable[[Batch], T]) -> Callable[[Batch], T]:
    """A count of what the host sent, from the numbers that it has."""

    def counted(batch: Batch) -> T:
        with unset_fake_temporarily():
            return count({name: transfers._ON_HOST.get(tensor, tensor) for name, tensor in batch.items()})

    return counted


def _sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Returns what `transfers._moved` does, without the numbers, which FakeTensorMode would take along for small
    tensors."""
    return torch.empty_like(tensor, device=device, dtype=dtype)


def trained(moved: Moved, steps: int = 2) -> None:
    """Steps of two micro-batches, clipped, judged and updated."""
    engine = moved.engine
    scaled = engine._options.precision.scaled
    watch = Watch(run_of({"type": "module", "path": "x.py"}, "fp32").numerics, scaled, Recent(), engine.summed)
    for step in range(1, steps + 1):
        loss = engine.forward_backward(BATCHES)
        assert loss.device == moved.device
        result = engine.optimizer_step(1.0, watch.judge(step, loss))
        assert result.grad_norm.device == moved.device
    for name, parameter in engine._model.named_parameters():
        assert parameter.device == moved.device, name


def evaluated(moved: Moved) -> None:
    metrics = moved.workload.metrics()
    for metric in metrics.values():
        metric.to(moved.device)
    with torch.no_grad():
        batch = moved.engine._to_device(BATCHES[0].tensors)
        context = LossContext(moved.engine.auxiliary)
        outputs = moved.workload.outputs_in(moved.engine._model.eval(), batch, context)
    assert outputs.loss_sum.device == moved.device
    for metric in metrics.values():
        metric.update(outputs.predictions, outputs.targets)


BATCHES: list[Any] = []  # in CPU memory, of the case that runs


def run_case(
    folder: Path, kind: str, precision: str, plant: Callable[[Moved], None] = lambda _: None, trains: bool = True
) -> None:
    """Raises where a tensor lies on the wrong device or, in training, where a number of the device is asked for."""
    torch.manual_seed(0)
    workload = build_workload(run_of(WORKLOADS[ADAPTED.get(kind, kind)](folder), precision).workload, 0)
    if kind in ADAPTED:
        workload.adapters = AdapterSet([Adapter.model_validate({"rank": 4, "targets": "all-linear"})], None)
    BATCHES[:] = []
    shapes = None if trains else ShapeEnv()  # an evaluation may wait for the device: numbers it asks for are symbols
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    moved = Moved(workload, precision, torch.device(NAME, 0), mode)
    BATCHES.extend(MicroBatch(few(workload, count)) for count in (3, 2))
    if kind == "text classes":  # else Transformers asks whether a mask hides anything (docs/background/speed.md)
        moved.engine._model.set_attn_implementation("eager")
    plant(moved)
    with mode:
        (trained if trains else evaluated)(moved)


def wrong_device(moved: Moved) -> None:
    """A loss that adds a tensor in CPU memory."""
    whole: Any = moved.workload.loss_sum
    vars(moved.workload)["loss_sum"] = lambda model, batch: (whole(model, batch) + torch.zeros(2)).sum()


def asks_for_a_number(moved: Moved) -> None:
    whole: Any = moved.workload.loss_sum

    def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = whole(model, batch)
        return loss * float(loss.item() > 0)

    vars(moved.workload)["loss_sum"] = loss_sum


PLANTED = {"wrong device": wrong_device, "a number asked for": asks_for_a_number}


def outcome(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames if "/torch/" not in f.filename]
        return f"{type(error).__name__}: {error} ({' < '.join(reversed(own[-4:]))})"
    return ""


def main(folder: Path) -> None:
    _setup_privateuseone_for_python_backend(NAME, _Module(NAME))
    library = torch.library.Library("_", "IMPL")  # lives as long as this function
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # casts nothing: devices count here
    torch.set_num_threads(1)
    transfers._moved = _sent
    fused_loss.SLAB_BYTES, fused_loss.LEAST_COLUMNS = 1, 64
    found = {}
    for kind, precision in itertools.product(KINDS, PRECISIONS):
        own = folder / f"{len(found)}"
        own.mkdir()
        found[f"{kind}, {precision}"] = outcome(lambda kind=kind, own=own, p=precision: run_case(own, kind, p))
    for kind in KINDS:
        own = folder / f"{len(found)}"
        own.mkdir()
        found[f"{kind}, evaluated"] = outcome(lambda k=kind, own=own: run_case(own, k, "fp32", trains=False))
    for name, plant in PLANTED.items():
        own = folder / f"{len(found)}"
        own.mkdir()
        found[name] = outcome(lambda own=own, plant=plant: run_case(own, "packed", "fp32", plant))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
