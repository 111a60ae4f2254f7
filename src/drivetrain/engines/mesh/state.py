"""A mesh's state by global names: a rank's part of each parameter, and the state of all stages together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.shard import like
from drivetrain.engines.state import (
    load_optimizer_state,
    local_part,
    optimizer_state,
    place_gradient,
    placed_as,
)
from drivetrain.errors import RunError


class Held(nn.Module):
    """This rank's part of each parameter: a plain tensor in the same memory, under the same name.

    An optimizer over these takes its quickest kernels, whatever mixture of shards the parameters are.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._pairs = {
            name: (p, nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad))
            for name, p in model.named_parameters()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        del args, kwargs
        for name, (_, own) in self._pairs.items():
            yield name, own

    def whole(self, name: str) -> nn.Parameter:
        """The parameter itself."""
        return self._pairs[name][0]

    def take_gradients(self) -> None:
        for parameter, own in self._pairs.values():
            place_gradient(parameter)
            own.grad = None if parameter.grad is None else local_part(parameter.grad)

    def clear_gradients(self) -> None:
        for parameter, own in self._pairs.values():
            parameter.grad = own.grad = None


def shards(parameter: Tensor) -> int:
    """Returns the number of pieces that a parameter is in, over the axes of its mesh."""
    count = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                count *= parameter.device_mesh.size(axis)
    return count


def stages_items(
    communicator: Communicator, stages: int, speaks: bool, own: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """Returns the items of all stages on the first rank, one after the other; nothing elsewhere.

    own: this stage's, whose making may need all of its ranks. speaks: whether this rank sends them.
    """
    found: dict[str, Any] = {}
    twice: list[str] = []
    for name, value in own:
        if communicator.is_first:
            found[name] = value
        elif speaks:
            communicator.send_to_first((name, value))
    if communicator.is_first:
        for stage in range(1, stages):
            source = stage * (communicator.world // stages)
            while (item := communicator.receive(source)) is not None:
                twice += [item[0]] if item[0] in found else []
                found[item[0]] = item[1]
    elif speaks:
        communicator.send_to_first(None)
    if twice:
        raise RunError(f"two stages have {', '.join(twice)}, and one would be lost")
    return found


def joined_stages(own: dict[str, Tensor], stages: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Returns the tensors of all stages, on each rank."""
    if stages == 1:
        return own
    of_stages: list[dict[str, Tensor]] = [{}] * stages
    dist.all_gather_object(of_stages, own, group=group)
    return {name: tensor for stage in of_stages for name, tensor in stage.items()}


def check_stages(of_stages: Iterable[Iterable[str]], whole: Collection[str]) -> None:
    """Raises RunError unless the stages have all names together, and each only one."""
    found = Counter(name for names in of_stages for name in names)
    twice = [name for name, count in found.items() if count > 1]
    if twice:
        raise RunError(f"two stages have {', '.join(twice)}, and one would be lost")
    missing = [name for name in whole if name not in found]
    if missing:
        raise RunError(f"no stage has {', '.join(missing)}")


def own_state(held: Held, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Returns each parameter's state by name: for sharded ones this rank's pieces."""
    state: dict[str, dict[str, Any]] = optimizer_state(held, optimizer)["state"]
    return {
        name: {key: _piece(value, held.whole(name)) for key, value in values.items()} for name, values in state.items()
    }


def _piece(value: Any, parameter: Tensor) -> Any:
    return like(value, parameter) if isinstance(value, Tensor) and value.ndim > 0 else value


def groups_of(optimizer: torch.optim.Optimizer, held: Held) -> list[dict[str, Any]]:
    return list(optimizer_state(held, optimizer)["param_groups"])


def joined_groups(of_stages: Iterable[list[dict[str, Any]]], order: Mapping[str, torch.Size]) -> list[dict[str, Any]]:
    """Returns the groups of all stages as one process has them: matrices, then vectors, of each rate, each in the
    model's order."""
    position = {name: number for number, name in enumerate(order)}
    joined: dict[tuple[bool, float], dict[str, Any]] = {}
    for groups in of_stages:
        for group in groups:
            if not group["params"]:
                continue  # of a stage that trains nothing
            key = len(order[group["params"][0]]) < 2, float(group.get("peak_lr", 0))
            names = joined.setdefault(key, {**group, "params": []})["params"]
            names += [name for name in group["params"] if name not in names]  # a tied one is on two stages
    for group in joined.values():
        group["params"].sort(key=position.__getitem__)
    return [joined[key] for key in sorted(joined)]


def load_own_state(held: Held, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Loads this rank's part of a whole optimizer state."""
    names = dict(held.named_parameters())
    if not any(parameter.requires_grad for parameter in names.values()):
        return
    groups = [{**group, "params": [n for n in group["params"] if n in names]} for group in saved["param_groups"]]
    state = {
        name: {key: _own(value, held.whole(name)) for key, value in values.items()}
        for name, values in saved["state"].items()
        if name in names
    }
    load_optimizer_state(held, optimizer, {"state": state, "param_groups": [g for g in groups if g["params"]]})


def _own(value: Any, parameter: Tensor) -> Any:
    is_moment = isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
    return local_part(placed_as(value, parameter)) if is_moment else value
