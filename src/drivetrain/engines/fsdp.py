"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered block by block when needed.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; the sharding is ZeRO-3's, or
ZeRO-2's where gathered parameters are kept until the backward pass (Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from drivetrain.config import engines as config
from drivetrain.config.precision import Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.auxiliary import attached
from drivetrain.engines.base import State
from drivetrain.engines.state import local_part, refuse_scalars
from drivetrain.errors import RunError, problem
from drivetrain.memory.recompute import repeated_blocks
from drivetrain.memory.transfers import Later, sent, works_behind
from drivetrain.numerics.torch_precision import dtype
from drivetrain.workloads.base import Workload

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def fsdp_mesh(device_type: str, world: int, options: config.FsdpEngine) -> DeviceMesh:
    """Returns a mesh (shard,), or (replicate, shard) for hybrid sharding."""
    sizes = (world,) if options.hybrid is None else (world // options.hybrid, options.hybrid)
    with real_numbers():
        return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Returns the policy: copies of the parameters in 16 bits if the precision has them; gradients are always summed in
    fp32."""
    if not precision.cast:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype(precision.compute), reduce_dtype=torch.float32)


def wrap_fsdp(model: nn.Module, mesh: DeviceMesh, options: config.FsdpEngine, precision: Precision) -> None:
    """Shards in place, innermost modules first; parameter names stay. Parameters move to the mesh's device."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard,
        "mp_policy": mixed_precision(precision),
    }
    if options.offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    ready_to_shard(model)
    refuse_cast_codes(model, precision)
    # trained auxiliary models are called after the model's forward pass, when what goes with it is freed already
    apart = list(dict.fromkeys([*gathered_apart(model, options), *attached(model).values()]))
    _check_shared(model, apart)
    for module in apart:
        shard(module, settings)
    shard_outermost(model, bool(apart), settings)


def shard(module: nn.Module, settings: dict[str, Any]) -> None:
    """Calls fully_shard, which in torch 2.11 fails at parameters of whole numbers."""
    with CodesMayBeSharded():
        fully_shard(module, **settings)


class CodesMayBeSharded(TorchFunctionMode):
    """While the block runs, torch 2.11's fully_shard takes parameters of whole numbers: the codes of a quantised base.

    It makes a parameter of each shard with requires_grad=True at first, which torch refuses for them, and only then
    asks the original for the right value (`FSDPParam._init_sharded_param`). Later versions pass that value on.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function is Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return function(*args, **(kwargs or {}))


def shard_outermost(model: nn.Module, has_inner: bool, settings: dict[str, Any]) -> None:
    """Shards the root. What the model holds outside of the modules within (has_inner) is needed again as soon as
    backward begins: as by fully_shard's own default it is kept until then, unless no backward will follow."""
    if settings["reshard_after_forward"] is True and has_inner:
        settings = {**settings, "reshard_after_forward": None}
    shard(model, settings)
    model.register_forward_hook(_free_without_backward)


def _free_without_backward(model: nn.Module, args: Any, output: Any) -> None:
    del args, output
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


def _check_shared(model: nn.Module, apart: list[nn.Module]) -> None:
    """Raises UserError if a weight is in two modules that are gathered separately, or in one of them and outside of
    it."""
    known = {id(module) for module in apart}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in known]
    places: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        first, its_place = places.setdefault(id(parameter), (name, place))
        if place != its_place:
            why = f"{first} and {name} are one weight (tied embeddings?), of which one would be gathered apart"
            raise problem("engine.wrap", why, "leave its class out, or take wrap=block")


def ready_to_shard(model: nn.Module) -> None:
    """Raises UserError if a parameter cannot be cut."""
    refuse_scalars(model, "fsdp")
    for parameter in model.parameters():  # channels-last filters: fully_shard takes none
        parameter.data = parameter.data.contiguous()


def refuse_cast_codes(model: nn.Module, precision: Precision) -> None:
    """Raises UserError if 16-bit copies of the parameters would be made of a quantised base's codes too: torch before
    2.13 makes them of whole numbers (`FSDPParam.init_dtype_attrs`)."""
    if precision.cast and TORCH < (2, 13) and not all(p.is_floating_point() for p in model.parameters()):
        why = f"under fsdp, torch {torch.__version__} would turn the codes of the quantised base into 16-bit floats"
        raise problem("precision", why, "give bf16-mixed, or install torch 2.13 or newer")


def gathered_apart(model: nn.Module, options: config.FsdpEngine) -> list[nn.Module]:
    """Returns the modules that are gathered and freed on their own, innermost first; the rest goes with the model."""
    if options.wrap == "block":
        return repeated_blocks(model)
    inner_first = [module for module in reversed(list(model.modules())) if module is not model]
    if options.wrap == "size":
        return list(_large_enough(inner_first, options.wrap_min_parameters))
    known = {type(module).__name__ for module in inner_first}
    unknown = sorted(set(options.wrap) - known)
    if unknown:
        raise problem("engine.wrap", f"the model has no {', '.join(unknown)}", f"it has: {', '.join(sorted(known))}")
    return [module for module in inner_first if type(module).__name__ in options.wrap]


def _large_enough(inner_first: list[nn.Module], least: int) -> Iterator[nn.Module]:
    """Yields modules with at least so many parameters beside those of chosen ones within them (containers are never
    called)."""
    taken: set[int] = set()
    for module in inner_first:
        own = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in own) >= least and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            taken.update(map(id, own))
            yield module


@torch.no_grad()
def give_memory(model: nn.Module, parameters_on: torch.device, buffers_on: torch.device) -> None:
    """Replaces meta tensors by empty ones. If FSDP offloads, only parameters are kept in CPU memory: buffers lie on the
    device on every rank, or ranks would exchange them through different backends and wait for ever."""
    model.to_empty(device=parameters_on)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=buffers_on)


class SameParameters:
    """Raises RunError if a parameter gets a gradient on some ranks only.

    FSDP reduces parameters that have a gradient, in order: with other parameters on another rank it would sum gradients
    of different ones, silently if their sizes agree.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device, fix: str) -> None:
        """fix: remedies other than letting every batch use all parameters."""
        self._named, self._group, self._device, self._fix = dict(model.named_parameters()), group, device, fix
        self._uneven: Later | None = None  # a parameter → not 0 if only some ranks had its gradient in the last window

    def look(self) -> None:
        """Checks after a window. On a GPU the window before is checked, which has completed."""
        got = sent(torch.tensor([p.grad is not None for p in self._named.values()], dtype=torch.int32), self._device)
        dist.all_reduce(got, group=self._group)
        before, self._uneven = self._uneven, Later(got % dist.get_world_size(self._group))
        self._refuse(before if works_behind(self._device) else self._uneven)

    def check(self) -> None:
        """Checks the last window too, before anything is saved."""
        self._refuse(self._uneven)

    def _refuse(self, uneven: Later | None) -> None:
        differs = [] if uneven is None else uneven.numbers()
        some = [name for name, each in zip(self._named, differs, strict=False) if each]
        if some:
            raise RunError(
                f"{', '.join(some[:5])} got a gradient on some ranks only, and FSDP then sums gradients of different "
                f"parameters. Let every batch use all of them, or {self._fix}"
            )


class FsdpEngine(AutogradEngine):
    _config: config.FsdpEngine
    _compiles_by_block = True  # gathering stays between the compiled parts
    _same: SameParameters | None = None

    def _built(self, workload: Workload) -> nn.Module:
        """Builds on the CPU: sharding moves each piece to the device."""
        builds = self._ranks.is_first or not self._config.meta
        with nullcontext() if builds else torch.device("meta"):
            return self._with_auxiliary(workload.build_model()).to(dtype(self._options.precision.parameters))

    def _wrap(self, model: nn.Module) -> nn.Module:
        return self._sharded(model, self._config, self._options.precision)

    def _wrap_auxiliary(self, model: nn.Module, precision: Precision) -> nn.Module:
        """Wraps an auxiliary model, sharded by its own blocks, whatever the trained model's classes."""
        return FsdpEngine._sharded(self, model, self._config.model_copy(update={"wrap": "block"}), precision)

    def _sharded(self, model: nn.Module, options: config.FsdpEngine, precision: Precision) -> nn.Module:
        mesh = fsdp_mesh(self._device.type, self._ranks.world, options)
        whole = dict(model.state_dict()) if self._config.meta else None
        buffers = [buffer.clone() for buffer in model.buffers()] if self._config.meta else []
        wrap_fsdp(model, mesh, options, precision)
        if whole is not None:
            self._fill(model, whole, buffers)
        return model

    @torch.no_grad()
    def _fill(self, model: nn.Module, whole: dict[str, Tensor], buffers: list[Tensor]) -> None:
        """Fills each rank's shards, from the only rank that has built the weights."""
        if not self._ranks.is_first:
            give_memory(model, torch.device("cpu") if self._config.offload else self._device, self._device)
        for name, held in model.state_dict().items():
            if isinstance(held, DTensor):
                given = whole[name] if self._ranks.is_first else torch.empty(held.shape, dtype=held.dtype)
                held.copy_(distribute_tensor(given.to(self._device), held.device_mesh, held.placements))
        for held, own in zip(model.buffers(), buffers, strict=True):  # also those that no state_dict names
            if self._ranks.is_first:
                held.copy_(own)
        self._ranks.copy_from_first(model.buffers())

    def _check_engaged(self) -> None:
        parameters = dict(self._model.named_parameters())
        whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
        if not isinstance(self._forward, FSDPModule) or whole:
            raise RunError(f"engine=fsdp was asked for, but not sharded: {', '.join(whole[:3]) or 'the model'}")
        if not self._options.traced:
            self._check_numbers(list(parameters.values()))

    def _check_numbers(self, parameters: Sequence[nn.Parameter]) -> None:
        """Checks that the ranks hold all parameters together, and begins to check that their gradients agree."""
        held = torch.tensor(sum(local_part(p).numel() for p in parameters), device=self._device)
        copies = self._ranks.world // (self._config.hybrid or self._ranks.world)
        total = sum(p.numel() for p in parameters) * copies
        if int(self._ranks.sum(held)) != total:
            raise RunError(f"engine=fsdp: the ranks hold {int(held):,} parameters together, not {total:,}")
        fix = "take engine={name: ddp, find_unused: true}"
        self._same = SameParameters(self._model, None, self._device, fix)

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        cast(FSDPModule, self._forward).set_requires_gradient_sync(last)
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        loss = super().forward_backward(micro_batches)
        if self._same is not None:
            self._same.look()
        return loss

    def state_dict(self) -> State:
        if self._same is not None:
            self._same.check()
        return super().state_dict()

    def _global_norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        squares = super()._global_norm(norms, parameters) ** 2
        mesh = cast(DTensor, next(self._model.parameters())).device_mesh  # its last axis is the one that shards
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        return squares.sqrt()
