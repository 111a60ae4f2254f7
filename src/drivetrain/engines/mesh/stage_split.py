"""Cutting a model into pipeline stages, with all parameter names kept.

A stage keeps the model's whole skeleton. Blocks of other stages become pass-throughs without weights: the one before
the stage's own returns the received tensor, the one after it ends the forward pass with the tensor to send. Modules
before the blocks (embeddings) are kept by the first stage, those after them (norm, head, loss) by the last. A weight
that stands in both places (tied embeddings) is kept by both, under all its names. So a workload calls the model as it
always does, on every stage, and no architecture has to be known.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.engines.mesh.block_discovery import Anatomy, within
from drivetrain.errors import problem


def cut(model: nn.Module, anatomy: Anatomy, own: range, link: Link) -> set[str]:
    """Leaves one stage's part in place: the blocks of `own`. Returns the names of the state that this stage saves.

    State that several stages hold (tied weights, statistics of a layer without weights that runs before the blocks,
    buffers of the model itself) is saved by the first one: later stages run such layers on what they received, and the
    results are not read.
    """
    tied, idle = _tied(model, anatomy), _idle(model, anatomy)
    _pass_through(model, anatomy, own, link)
    is_first, is_last = own.start == 0, own.stop == len(anatomy.blocks)
    if not is_first:
        for name in anatomy.before:
            if _has_weights(model.get_submodule(name)):
                model.set_submodule(name, Unbuilt(model.get_submodule(name), link))
    if not is_last:
        for name in [*anatomy.after, *idle]:
            model.set_submodule(name, Absent())
    if is_first or is_last:
        for name, weight in tied.items():
            _keep(model, name, weight)
    apart = [*(anatomy.blocks[number] for number in own), *anatomy.after, *idle]
    return {name for name in model.state_dict() if is_first or (within(name, apart) and name not in tied)}


def _pass_through(model: nn.Module, anatomy: Anatomy, own: range, link: Link) -> None:
    """Replaces the blocks of other stages."""
    container = model.get_submodule(anatomy.container)
    for number, name in enumerate(anatomy.blocks):
        key = name.rpartition(".")[2]
        block, tupled = container._modules[key], anatomy.gives_tuple
        assert block is not None
        if number == own.start - 1:
            container._modules[key] = Entrance(block, tupled, link)
        elif number == own.stop:
            container._modules[key] = Exit(block, tupled)
        elif number not in own:
            container._modules[key] = Passing(block, tupled)


def _tied(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """Returns the weights that both ends hold, under each of their names."""
    wanted = {id(model.get_parameter(name)) for name in anatomy.tied}
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in wanted}


def _keep(model: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Puts a weight under its name, in a stage's own module or in the stand-in for another stage's."""
    *path, own_name = name.split(".")
    module = model
    for part in path:
        inner = module._modules.get(part)
        inner = Absent() if inner is None else inner
        module._modules[part] = inner
        module = inner
    module._parameters[own_name] = weight  # where Unbuilt answers for the same name


def _idle(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Returns the outermost modules with weights that no forward pass calls."""
    known = [*anatomy.blocks, *anatomy.before, *anatomy.after]
    found: list[str] = []
    for name, module in model.named_modules():
        holds_known = not name or any(
            other == name or other.startswith(f"{name}.") for other in [anatomy.container, *known]
        )
        if not holds_known and not within(name, [*known, *found]) and _has_weights(module):
            found.append(name)
    return found


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class Absent(nn.Module):
    """Stands for a module of another stage; may hold a weight that this stage shares with that one.

    A stage comes to call it only if the model left out the block at which the stage ends, and reports that then.
    """

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return hidden


class Reached(Exception):
    """Raised when a stage has computed what the next one needs."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the end of a pipeline stage")
        self.hidden = hidden


class Link:
    """Holds the tensor that a stage received."""

    received: Tensor | None = None
    was_read = False  # whether the model came to where it goes on


class Passing(nn.Module):
    """Stands for a block of another stage."""

    def __init__(self, block: nn.Module, gives_tuple: bool) -> None:
        super().__init__()
        self._gives_tuple = gives_tuple
        plain = (str, int, float, bool, type(None))  # what a model may ask its blocks: attention_type, layer_idx
        own = {k: v for k, v in vars(block).items() if isinstance(v, plain) and not k.startswith("_")}
        self.__dict__.update({key: value for key, value in own.items() if key != "training"})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._hidden(args[0] if args else kwargs["hidden_states"])
        return (hidden,) if self._gives_tuple else hidden

    def _hidden(self, hidden: Tensor) -> Tensor:
        return hidden


class Entrance(Passing):
    def __init__(self, block: nn.Module, gives_tuple: bool, link: Link) -> None:
        super().__init__(block, gives_tuple)
        self._link = link

    def _hidden(self, hidden: Tensor) -> Tensor:
        del hidden
        assert self._link.received is not None
        self._link.was_read = True
        return self._link.received


class Exit(Passing):
    def _hidden(self, hidden: Tensor) -> Tensor:
        raise Reached(hidden)


class Elsewhere(Tensor):
    """Stands for a weight of another stage: has its dtype and its sizes, and no numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = (t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, Elsewhere))
        if next(others, None) is not None:
            why = "a weight of the layers before the blocks is used after them, on another stage"
            raise problem("engine.pp", why, "leave pp out")
        return super().__torch_function__(func, types, args, kwargs or {})


def _elsewhere(weight: Tensor) -> Tensor:
    with real_numbers():  # a fake tensor can have no other class
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta").as_subclass(Elsewhere)


class Unbuilt(Absent):
    """Stands for a module before the blocks: returns a tensor of the right shape, which is never read.

    Models ask such a module for its dtype or sizes: the module itself answers, without its weights.
    """

    def __init__(self, part: nn.Module, link: Link) -> None:
        super().__init__()
        self._link = link
        for module in part.modules():
            module._buffers = {
                name: None if held is None else held.to("meta") for name, held in module._buffers.items()
            }
            for name, weight in module._parameters.items():
                if weight is not None:  # kernels for the CPU take tensors without storage for what they are not
                    module._parameters[name] = cast(nn.Parameter, _elsewhere(weight))
        self.__dict__["_emptied"] = part  # no submodule of this one: its parameters are another stage's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_emptied"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        assert self._link.received is not None
        return self._link.received
