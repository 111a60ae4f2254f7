"""The last block of a language model computes only the places that are read of it.

A loss reads the places whose next token it knows, a reward model the last token of each answer. Up to the last block
every place is needed, since later ones attend to it; of the last block they need its keys and values alone. So its
feed-forward part, and the product behind its attention, get the places that are read as one row, (1, N, width), and
their outputs return to where they belong; elsewhere the block adds nothing. Where few places are read, attention has
their queries alone too (`packed_attention`).

A block that recomputes, is compiled or drops out computes every place: it runs again when what was read is not known
any more, would be compiled apart from the others (`compute_every_place`), or draws for each place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.memory.transfers import on_host, sent
from drivetrain.models.llama_form import last_block

FEW = 8  # a place in so many, at most, lets attention have their queries alone
NAME = "read_places"  # an attribute of the last block's attention
Read = Callable[[], tuple[torch.Size, Tensor] | None]


class ReadPlaces:
    """Tells what the pass that runs now reads of the block. read: gives the shape of its batch, (B, T), and the places
    in the flattened batch, (N,) int64; None where every place is read."""

    def __init__(self, read: Read, block: nn.Module) -> None:
        self._read, self._block = read, block

    def of(self, shape: torch.Size) -> Tensor | None:
        """Returns the places, where hidden states of this shape are those of the whole batch."""
        if torch.compiler.is_compiling() or "forward" in vars(self._block):  # the second: it recomputes
            return None
        found = self._read()
        return None if found is None or found[0] != shape or _drops_out(self._block) else found[1]

    def few_of(self, shape: torch.Size) -> Tensor | None:
        """Returns them where a single row is read at few places."""
        places = self.of(shape)
        return places if places is not None and shape[0] == 1 and len(places) * FEW <= shape[1] else None


def _drops_out(block: nn.Module) -> bool:
    return block.training and any(isinstance(each, nn.Dropout) and each.p > 0 for each in block.modules())


class WaitsForPlaces:
    """An object whose hooks do nothing unless a pass names the places that are read of it."""


class _Part(WaitsForPlaces):
    """Hooks around a part of the block that computes each place by itself."""

    def __init__(self, places: ReadPlaces) -> None:
        self._places = places
        self._picked: tuple[torch.Size, Tensor] | None = None

    def pick(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        hidden, self._picked = args[0], None
        if any(isinstance(each, DTensor) for each in (hidden, *module.parameters(recurse=False))):
            return None  # parts of it lie on other ranks
        places = self._places.of(hidden.shape[:-1])
        if places is None:
            return None
        self._picked = hidden.shape[:-1], places
        return (hidden.flatten(0, 1).index_select(0, places)[None], *args[1:])

    def put_back(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        del module, args
        picked, self._picked = self._picked, None
        if picked is None:
            return None
        shape, places = picked
        return at_places(output[0], places, shape)


def read_alone(model: nn.Module, read: Read) -> None:
    """Lets the model's last block compute the places alone that `read` gives, where its form is known."""
    block = last_block(model)
    if block is None:
        return
    places = ReadPlaces(read, block)
    setattr(block.self_attn, NAME, places)
    for part in (block.self_attn.o_proj, block.mlp):
        hooks = _Part(places)
        part.register_forward_pre_hook(hooks.pick)
        part.register_forward_hook(hooks.put_back)


def compute_every_place(model: nn.Module) -> None:
    """Undoes `read_alone`."""
    for module in model.modules():
        vars(module).pop(NAME, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in _hooks_of(hooks, _Part):
                del hooks[key]


def waiting_hooks(hooks: Mapping[int, Any]) -> int:
    """Returns how many hooks of a module do nothing unless a pass names the places that it reads."""
    return len(_hooks_of(hooks, WaitsForPlaces))


def _hooks_of(hooks: Mapping[int, Any], owner: type) -> list[int]:
    return [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), owner)]


def places_read(attention: nn.Module, shape: torch.Size) -> Tensor | None:
    """Returns the few places at which the attention of a block is read, (N,); None: it is read everywhere. shape: (B,
    T) of the batch."""
    found: ReadPlaces | None = getattr(attention, NAME, None)
    return None if found is None else found.few_of(shape)


def at_places(rows: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor (B, T, ...) with rows (N, ...) at these places of the flattened batch, and 0 elsewhere."""
    whole = rows.new_zeros(shape.numel(), *rows.shape[1:]).index_copy(0, places, rows)
    return whole.view(*shape, *rows.shape[1:])


def keys_seen(bounds: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Returns which positions of a packed row each of the places sees, (N, T) bool. bounds: from
    `packed_attention.bounds_of`, of one row."""
    own, chosen = on_host(bounds)[0, :, 0], on_host(places)
    begins, firsts = own[0], own[1] if len(own) == 2 else np.zeros_like(own[0])
    number = np.searchsorted(begins, chosen, side="right") - 1  # of each place's sequence
    roots = np.maximum.accumulate(np.where(firsts == 0, np.arange(len(firsts)), 0))
    columns = np.arange(begins[-1])
    begin, trunk, shared = (each[:, None] for each in (begins[number], begins[roots[number]], firsts[number]))
    ahead = chosen[:, None] - columns
    seen = (columns >= begin) & (ahead >= 0)
    if window is not None:
        seen &= ahead < window
    seen |= (columns >= trunk) & (columns < trunk + shared)
    return sent(torch.from_numpy(seen), places.device)
