"""State by global parameter names and as whole tensors, so that what one engine saved fits any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.distributed.shard import piece_of
from drivetrain.engines import quantised
from drivetrain.errors import RunError, problem
from drivetrain.models.adapters import KEPT
from drivetrain.optim import low_bit, low_rank

T = TypeVar("T")

Describe = Callable[[Tensor], Any]  # a held tensor → as it is to be described: itself, this rank's piece, the whole


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_as(whole: Tensor, held: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor, sharded as `held` is, without communication."""
    if not isinstance(held, DTensor):
        return whole
    return distribute_tensor(whole.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


def refuse_scalars(model: nn.Module, engine: str) -> None:
    """Raises UserError for parameters without a dimension, which cannot be cut."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        why = f"{engine} cannot shard parameters without a dimension: {', '.join(scalars)}"
        raise problem("engine", why, "make them of shape (1,), or take engine=ddp")


def place_gradient(parameter: Tensor) -> None:
    """Shards a gradient as its parameter is, in place; DTensor leaves sums over ranks to its user."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        placed = gradient.redistribute(placements=parameter.placements)  # itself where they agree
        parameter.grad = cast(Tensor, placed)


def kept(model: nn.Module, state: Mapping[str, T]) -> dict[str, T]:
    """Returns the part of a state, by the model's names, that checkpoints hold: all, or what is trained beside a frozen
    base."""
    names: frozenset[str] | None = getattr(model, KEPT, None)
    return {name: value for name, value in state.items() if names is None or name in names}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads all that `kept` names."""
    held = kept(model, model.state_dict())
    if held.keys() != weights.keys():
        raise RunError(f"these weights are of another model: {', '.join(sorted(held.keys() ^ weights.keys())[:5])}")
    model.load_state_dict({name: placed_as(weights[name], held[name]) for name in weights}, strict=False)


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, describe: Describe = piece_of
) -> dict[str, Any]:
    """Returns optimizer.state_dict() with names for numbers: {"state": {name: ...}, "param_groups": [{"params":
    [name]}]}.

    Sharded tensors are this rank's pieces. A quantised moment is its parts (quantised.py).
    """
    names = _names_by_position(model, optimizer)
    saved = optimizer.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    state = {names[i]: _described_values(values, describe) for i, values in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Reverses `optimizer_state`; `optimizer` must hold the same parameters, on any engine, in groups and an order of
    its own. It keeps its own hyper-parameters. Raises UserError if others were trained."""
    positions = {name: i for i, name in _names_by_position(model, optimizer).items()}
    held = dict(model.named_parameters())
    check_trained(positions.keys(), held.keys(), saved["param_groups"])
    names = iter(positions)
    own = [(group, [next(names) for _ in group["params"]]) for group in optimizer.param_groups]
    groups = [
        {**group_with(saved["param_groups"], its), **chosen(optimizer, group), "params": [positions[n] for n in its]}
        for group, its in own
    ]
    state = {
        positions[name]: {key: _placed_value(value, held[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    low_bit.page_again(getattr(optimizer, "optim", optimizer))
    if hasattr(optimizer, "optim"):  # ZeroRedundancyOptimizer keeps a second state, in the parameters' dtype
        optimizer.state.clear()


def check_trained(own: Collection[str], here: Collection[str], saved: Iterable[Mapping[str, Any]]) -> None:
    """Raises UserError if these groups are of other parameters than this run trains. here: all of this rank's model."""
    before = {name for group in saved for name in group["params"]}
    frozen = [name for name in here if name in before and name not in own]
    added = [name for name in own if name not in before]
    mismatches = [
        f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("it was without", added), ("it had, and this run freezes,", frozen))
        if names
    ]
    if mismatches:
        why = f"the checkpoint's optimizer is of other parameters: {'; '.join(mismatches)}"
        fix = "train the same ones, or start a new run with the checkpoint's folder as model.path or as its weights"
        raise problem("--resume", why, fix)


def group_with(groups: Iterable[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Returns the saved group of these parameters: its counters are theirs."""
    return next((group for group in groups if names and names[0] in group["params"]), {})


def chosen(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Returns this run's own settings of a group, instead of the saved ones: its rate and other arguments, the kernels
    that update it.

    The rest (counters that some optimizers keep in their groups) is state.
    """
    arguments = inspect.signature(type(getattr(optimizer, "optim", optimizer))).parameters
    own = {"peak_lr", "fused", "foreach", "capturable", *arguments} - {"params"}
    return {key: value for key, value in group.items() if key in own}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the optimizer's tensors on this rank."""
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeroRedundancyOptimizer keeps one within
    values = [value for state in states for value in state.values()]
    found = [part for value in values if isinstance(value, Tensor) for part in quantised.held(value)]
    return found + [part for value in values if not isinstance(value, Tensor) for part in low_rank.tensors(value)]


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns the bytes on this rank between steps, without gradients: those exist at the end of a window."""
    parts = {"frozen": 0, "trained": 0, "gradients": 0}
    for parameter in model.parameters():
        size = local_part(parameter).nbytes
        parts["trained" if parameter.requires_grad else "frozen"] += size
        parts["gradients"] += size if parameter.requires_grad else 0
    return {**parts, "optimizer": sum(tensor.nbytes for tensor in optimizer_tensors(optimizer))}


HIDDEN = "__bnb_optimizer_quant_state__"  # where bitsandbytes' state_dict puts codes and scales, away from FSDP1


def _described_values(values: dict[str, Any], describe: Describe) -> dict[str, Any]:
    values = {**values, **values.get(HIDDEN, {})}
    values.pop(HIDDEN, None)
    return {key: _described_value(value, describe) for key, value in values.items()}


def _described_value(value: Any, describe: Describe) -> Any:
    if not isinstance(value, Tensor):
        return value
    return quantised.parts(value) if quantised.is_quantised(value) else describe(value)


def _placed_value(value: Any, parameter: Tensor) -> Any:
    """Shards moments as their parameter; counters stay whole."""
    if quantised.are_parts(value):
        return quantised.joined(value, parameter, lambda whole: placed_as(whole, parameter))
    is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
    return placed_as(value, parameter) if is_moment else value


def _names_by_position(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {position: name_of[id(parameter)] for position, parameter in enumerate(parameters)}
