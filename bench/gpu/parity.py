"""The part `parity`: every precision on single, ddp and fsdp against the plain loop, on the device at hand.

One rank exchanges over NCCL (on a CPU gloo), two share the device over gloo, and as many as there are GPUs over NCCL.
The run and the plain loop see the same batches; what is compared are losses, gradient norms and weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.setting import Setting

STEPS, BATCH, MICRO_BATCH = 20, 16, 8
WORKLOAD = Path(__file__).with_name("workload.py")
PRECISIONS = (*("fp32", "tf32", "fp16", "bf16", "fp16-mixed", "bf16-mixed", "fp8-mixed", "fp16-master", "bf16-master"),)
# largest relative difference of a loss, of a gradient norm, and of how far the weights moved from where they began.
# With the same kernels the order of sums differs alone; products in fewer bits widen it: 2^-11 in tf32 and fp16, 2^-9
# in bf16
TOLERANCE = {
    "fp32": (1e-5, 1e-4, 1e-4),
    "tf32": (1e-3, 1e-2, 1e-2),
    "fp16": (1e-2, 5e-2, 1e-1),
    "bf16": (2e-2, 1e-1, 1e-1),
    "fp16-mixed": (2e-3, 1e-2, 1e-2),
    "bf16-mixed": (1e-2, 5e-2, 5e-2),
    "fp8-mixed": (5e-2, 2e-1, 2e-1),
    "fp16-master": (1e-2, 5e-2, 5e-2),
    "bf16-master": (1e-2, 5e-2, 5e-2),
}


def cases(setting: Setting) -> list[Case]:
    alone = "gloo" if setting.small else "nccl"
    precisions = ("fp32", "bf16-mixed", "bf16-master") if setting.small else PRECISIONS
    found = [_case(precision, "single", 1, "") for precision in precisions]
    found += [_case(precision, engine, 1, alone) for engine in ("ddp", "fsdp") for precision in precisions]
    shared = ("fp32",) if setting.small else ("fp32", "bf16-mixed")
    # gloo's reduce-scatter of a GPU's tensors, which FSDP asks for, ends the process (torch 2.11)
    engines = ("ddp", "fsdp") if setting.small else ("ddp",)
    found += [_case(precision, engine, 2, "gloo") for engine in engines for precision in shared]
    if (count := _gpus(setting)) > 1:
        found += [_case(p, engine, count, "nccl") for engine in ("ddp", "fsdp") for p in ("fp32", "bf16-mixed")]
    return found


def _gpus(setting: Setting) -> int:
    import torch

    return 0 if setting.small else torch.cuda.device_count()


def _case(precision: str, engine: str, world: int, backend: str) -> Case:
    given = {"precision": precision, "engine": engine, "world": world, "backend": backend}
    name = f"{engine} {precision}" + (f", {world} over {backend}" if backend else "")
    return Case(name, "parity:compared", given, ("torchao",) if precision == "fp8-mixed" else (), seconds=90)


def compared(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Largest differences of the run from the plain loop, with what they may be at most."""
    from bench.gpu import workload
    from drivetrain.config.engines import ENGINES
    from drivetrain.config.rules import precision_gap
    from drivetrain.numerics.emulation import fp32_products
    from drivetrain.runtime.hardware import detect

    machine, precision = detect(setting.device), given["precision"]
    lacks = dict(ENGINES[given["engine"]].lacks)
    if gaps := [*precision_gap(precision, machine), *([lacks[precision]] if precision in lacks else [])]:
        return {"not_here": gaps[0]}
    ours = _ours(given, setting, folder)
    with fp32_products(setting.small):
        theirs = _plain(precision, setting.device)
    return judged(ours, theirs, workload.build_model().state_dict(), TOLERANCE[precision])


def judged(ours: Any, theirs: Any, start: Any, tolerance: tuple[float, float, float]) -> dict[str, Any]:
    """The differences, and `missed` where one is larger than it may be, or nothing was learnt.

    ours, theirs: Curve. start: the weights before the first step.
    """
    found: dict[str, Any] = {
        "loss": largest(ours.losses, theirs.losses),
        "norm": largest(ours.norms, theirs.norms),
        "weights": _distance(ours.weights, theirs.weights) / _distance(start, theirs.weights),
    }
    over = [name for name, most in zip(found, tolerance, strict=True) if not found[name] <= most]
    if over:
        found["missed"] = f"{' and '.join(over)} differ by more than {tolerance}"
    if not theirs.losses[-1] < 0.9 * theirs.losses[0]:
        found["missed"] = "the plain loop did not learn: the comparison would show nothing"
    return {**found, "tolerance": tolerance, "last": theirs.losses[-1]}


def _distance(one: Any, other: Any) -> float:
    """The norm of the difference over all weights."""
    return sum(float((one[name].float().cpu() - weight).norm()) ** 2 for name, weight in other.items()) ** 0.5


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def _plain(precision: str, device: str) -> Any:
    from bench.gpu import plain, workload
    from drivetrain.data.order import GlobalOrder

    order = GlobalOrder(len(workload.train_data), BATCH, seed=1)
    batches = [_stacked([workload.train_data[int(i)] for i in order.batch(step)[1]]) for step in range(STEPS)]
    return plain.train(workload.build_model(), workload.loss, batches, precision, device)


def _stacked(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


def _ours(given: dict[str, Any], setting: Setting, folder: Path) -> Any:
    import torch

    if given["engine"] == "single":
        return trained(given["engine"], given["precision"], setting.device)
    torch.multiprocessing.spawn(_rank, (given, setting.device, str(folder)), nprocs=given["world"])
    return torch.load(folder / "curve.pt", weights_only=False)


def _rank(rank: int, given: dict[str, Any], device: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    world = given["world"]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    own = None
    if device == "cuda":
        own = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    bound = own if given["backend"] == "nccl" else None
    backend = "cpu:gloo,cuda:nccl" if given["backend"] == "nccl" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=bound)
    curve = trained(given["engine"], given["precision"], device)
    if rank == 0:
        torch.save(curve, f"{folder}/curve.pt")
    dist.barrier()
    dist.destroy_process_group()


def trained(engine_name: str, precision: str, device: str) -> Any:
    """This rank's part of the run, in micro-batches; the weights on the first rank only."""
    import torch
    from pydantic import TypeAdapter

    from bench.gpu.plain import CLIP, LR, MOMENTUM, Curve
    from drivetrain.config.engines import EngineConfig
    from drivetrain.config.precision import PRECISIONS as TABLE
    from drivetrain.config.training import Loader, Optimizer, Scaler
    from drivetrain.config.workload import UserModule
    from drivetrain.data.loader import training_windows
    from drivetrain.data.micro_batches import Slice
    from drivetrain.data.order import GlobalOrder
    from drivetrain.distributed.communicator import Communicator
    from drivetrain.engines import build_engine
    from drivetrain.engines.base import EngineOptions
    from drivetrain.numerics.torch_precision import arithmetic
    from drivetrain.optim.optimizers import optimizer_factory
    from drivetrain.runtime.hardware import detect, torch_device
    from drivetrain.workloads.user_module import UserModuleWorkload

    machine, ranks = detect(device), Communicator()
    options = EngineOptions(
        precision=TABLE[precision],
        scaler=Scaler(),
        machine=machine,
        device=torch_device(machine),
        devices=ranks.world,
        max_grad_norm=CLIP,
        recompute=False,
        compile=False,
    )
    with arithmetic(TABLE[precision], machine):
        work = UserModuleWorkload(UserModule(path=WORKLOAD), seed=0)
        engine = build_engine(TypeAdapter(EngineConfig).validate_python({"name": engine_name}), options, ranks)
        engine.setup(work, optimizer_factory(Optimizer(name="sgd", lr=LR, momentum=MOMENTUM, weight_decay=0.0)))
        mine = Slice(engine.data_rank, engine.data_world, MICRO_BATCH // engine.data_world)
        order = GlobalOrder(len(work.train), BATCH, seed=1)
        curve = Curve()
        for window in training_windows(work.train, work.collate, order, range(STEPS), mine, Loader()):
            value = engine.forward_backward(window.micro_batches)
            curve.losses.append(engine.summed(value).item())
            curve.norms.append(float(engine.optimizer_step(1.0).grad_norm))
        weights = engine.weights()
        curve.weights = {name: weight.detach().float().cpu().clone() for name, weight in weights.items()}
        engine.close()
    torch.set_float32_matmul_precision("highest")
    return curve
