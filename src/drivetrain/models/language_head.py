"""Computes logits only at targets: the positions of a prompt and of padding have no next token to predict.

While a loss is computed, the layer that makes logits has the positions that count: a hook before it passes it their
hidden states alone, as one row (1, N, H). So the model runs as usual, however it is wrapped, and operations of its own
on logits (softcapping, scaling) apply to (1, N, vocabulary). `fused` goes further: the layer computes the summed loss
itself (fused_loss.py), if the model passes the layer's output on unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.errors import RunError
from drivetrain.memory.transfers import on_host, sent_array
from drivetrain.models.cross_entropy import IGNORED, cross_entropies, cross_entropy_of_each, cross_entropy_sum
from drivetrain.models.fused_loss import (
    AUTO_FROM,
    are_many,
    linear_argmax_and_losses,
    linear_cross_entropies,
    linear_cross_entropy_sum,
)
from drivetrain.models.language_options import evaluating, output_layer
from drivetrain.models.read_places import WaitsForPlaces, read_alone

Wanted = Literal["logits", "loss", "losses", "predictions"]


@dataclass
class _Call:
    """One forward pass: the request to the head, and its result."""

    wanted: Wanted
    shape: torch.Size  # (B, T)
    count: int  # N
    places: Tensor | None  # (N,), of the targets in the flattened batch; None: every position has one
    targets: Tensor  # (N,), at those places
    selected: bool = False  # the head saw the hidden states of those places
    fused: bool = False  # and gave the loss, or the predictions
    hidden: Tensor | None = None  # (N, width), of those places

    @classmethod
    def of(cls, targets: Tensor, wanted: Wanted) -> _Call:
        """Returns a call. Without any target one ignored position stands for them: the head takes part in the backward
        pass, with gradients of 0, and no kernel gets a batch of no rows."""
        flat = targets.flatten()
        found = _found(targets)
        count = len(found)
        if count == len(flat):
            return cls(wanted, targets.shape, count, None, flat)
        places = sent_array(found if count else np.zeros(1, dtype=np.int64), targets.device)
        return cls(wanted, targets.shape, count, places, flat[places])


def places_of_targets(targets: Tensor) -> Tensor:
    """Returns where the flattened batch has targets, (N,) int64. The host knows it of a batch that it sent, so that it
    does not wait for the device, as it does for targets != -100."""
    return sent_array(_found(targets), targets.device)


def _found(targets: Tensor) -> np.ndarray:
    return np.flatnonzero(on_host(targets) != IGNORED)


@dataclass
class _Current:
    """The forward pass that runs now. Copies of a model share it, since one of them runs at a time: the head of a
    reference is called for the head of the model that it was copied from."""

    call: _Call | None = None

    def read(self) -> tuple[torch.Size, Tensor] | None:
        """Returns the shape of the batch and the places that are read; None where all are."""
        call = self.call
        return None if call is None or call.places is None else (call.shape, call.places)

    def __deepcopy__(self, memo: Any) -> _Current:
        del memo
        return self


class TargetHead(WaitsForPlaces):
    """The head of a Transformers causal language model. No parameter is renamed and no module replaced.

    fallback: why the requested way is not used, or None.
    """

    def __init__(self, model: nn.Module, fused: bool | Literal["auto"], before: int = 0) -> None:
        """model: before any wrapping, so that the hook runs before those of tensor parallelism. fused: auto fuses if
        logits are many (`fused_loss.are_many`). before: positions that the model puts before those of each sample."""
        self._before, self.always = before, fused is True
        self.fallback: str | None = None
        self.current = _Current()
        head = output_layer(model)
        if head is None:
            self.fallback = f"{type(model).__name__} names no layer that gives its logits: all of them are computed"
            return
        head.register_forward_pre_hook(self._select, with_kwargs=True)
        if not before:
            read_alone(model, self.current.read)
        wants = fused is True or (fused == "auto" and vocabulary_of(head) >= AUTO_FROM)
        if wants:
            self.fallback = _why_not_fused(model, head)
        if wants and self.fallback is None:
            head.__class__ = LossHead  # as fully_shard does it: the module stays what it is, and has another forward
            head.owner = self  # type: ignore[assignment]

    def loss_sum(self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        """Returns the cross-entropy summed over the targets, in fp32, scalar.

        model: the module that runs forward, perhaps wrapped. targets: (B, T) int64, for each position the token after
        it, or -100.
        """
        given, call = self._forward(model, inputs, _Call.of(targets, "loss"))
        if call.fused:
            return given.sum()
        rows = call.targets if call.selected else targets.flatten()
        return cross_entropy_sum(given.flatten(0, 1), rows)

    def losses(self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        """Returns the cross-entropy of each target, (N,) fp32, with gradients, in the order of targets[targets !=
        -100]. Arguments as in `loss_sum`."""
        given, call = self._forward(model, inputs, _Call.of(targets, "losses"))
        rows = _rows(given, call)
        return rows if call.fused else cross_entropies(rows, call.targets[: call.count])

    def logits_at_targets(self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        """Returns (N, vocabulary), in the order of targets[targets != -100]."""
        given, call = self._forward(model, inputs, _Call.of(targets, "logits"))
        return _rows(given, call)

    def logits_and_hidden(self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (N, vocabulary), as `logits_at_targets`, and the hidden states that they were made of, (N, width).
        Raises RunError where the head does not get those of whole sequences."""
        given, call = self._forward(model, inputs, _Call.of(targets, "logits"))
        if call.hidden is None:
            raise RunError(f"no hidden states reach the head as a whole: {self.fallback}; try engine=ddp or fsdp")
        return _rows(given, call), call.hidden

    def losses_and_argmax(self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for evaluation each target's loss, (N,) fp32, and the likeliest token, (N,) int64. No gradients."""
        with torch.no_grad():
            given, call = self._forward(model, inputs, _Call.of(targets, "predictions"))
            found = _rows(given, call)
            if call.fused:
                return found[:, 0], found[:, 1].long()
            return cross_entropy_of_each(found, call.targets[: call.count]), found.argmax(-1)

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any], call: _Call) -> tuple[Tensor, _Call]:
        self.current.call = call
        try:
            given = model(**inputs).logits
        finally:
            self.current.call = None
        if not call.selected:
            given = given[:, self._before :]
        if not call.selected and self.fallback is None:
            self.fallback = "the head is given a part of the hidden states at a time: all logits are computed"
        return given, call

    def _select(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Selects hidden states. A state of another batch shape (a part of its sequences, a replica's share) passes
        unchanged."""
        del head
        call, hidden = self.current.call, args[0] if args else None
        if call is None or not isinstance(hidden, Tensor) or isinstance(hidden, DTensor):
            return None
        samples, length = call.shape
        if hidden.ndim != 3 or hidden.shape[:2] != (samples, self._before + length):
            return None
        call.selected = True
        hidden = hidden[:, self._before :]
        if call.places is not None:
            hidden = hidden.flatten(0, 1).index_select(0, call.places)[None]
        call.hidden = hidden.flatten(0, 1)[: call.count]
        return (hidden, *args[1:]), kwargs


def _rows(given: Tensor, call: _Call) -> Tensor:
    """Returns (N, ...), one row a target."""
    rows = given.flatten(0, 1)
    if not call.selected and call.places is not None:
        rows = rows[call.places]
    return rows[: call.count]


class LossHead(nn.Linear):
    """A linear head that returns what the call requests: for logits a tensor with dimensions, which replicas can join,
    and no view, of which FSDP warns."""

    owner: TargetHead

    def forward(self, input: Tensor) -> Tensor:
        call = self.owner.current.call
        if call is None or not call.selected or call.wanted == "logits":
            return super().forward(input)
        if isinstance(self.weight, DTensor) or isinstance(input, DTensor):
            self.owner.fallback = "the head's weight is split over ranks"
            return super().forward(input)
        rows = input.flatten(0, 1)
        if not self.owner.always and not are_many(rows, self.weight):
            return super().forward(input)
        call.fused = True
        if call.wanted == "losses":
            return linear_cross_entropies(rows, self.weight, self.bias, call.targets)[None]
        if call.wanted == "loss":
            return torch.stack([linear_cross_entropy_sum(rows, self.weight, self.bias, call.targets)])
        argmax, losses = linear_argmax_and_losses(rows, self.weight, self.bias, call.targets)
        return torch.stack([losses[None], argmax.float()[None]], dim=2)  # tokens up to 2^24 are exact in fp32


# --- whether the loss may take the place of the logits ----------------------------------------------------------------


def vocabulary_of(head: nn.Module) -> int:
    """Returns the number of tokens of a head; 0 if its weight is no matrix of one row a token."""
    weight = getattr(head, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else 0


_HANDS_ON: dict[tuple[Any, ...], bool] = {}  # by model, without its weights: what `_hands_on` found


def _why_not_fused(model: nn.Module, head: nn.Module) -> str | None:
    """Returns None if the model passes its head's output on unchanged, which a forward pass without numbers shows; else
    the reason."""
    name = type(model).__name__
    if type(head) is not nn.Linear:
        what = "has an adapter" if hasattr(head, "base_layer") else f"is a {type(head).__name__}, no plain linear layer"
        return f"the head of {name} {what}: its logits are computed"
    like = type(model), repr(model), str(getattr(model, "config", ""))
    try:
        if like not in _HANDS_ON:  # a plan builds the same model a hundred times
            _HANDS_ON[like] = _hands_on(model, head)
    except Exception as error:  # whatever a model does that cannot be done without numbers
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"whether {name} changes its logits cannot be seen: {reason}"
    return None if _HANDS_ON[like] else f"{name} changes its logits after its head (scaling, softcapping)"


def _hands_on(model: nn.Module, head: nn.Module) -> bool:
    """Returns whether the model's logits are its head's very result: the same tensor, not written to since."""
    given: list[tuple[Tensor, int]] = []
    hook = head.register_forward_hook(lambda _, __, output: given.append((output, output._version)))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = {tensor_name: torch.empty_like(tensor, device="meta") for tensor_name, tensor in held.items()}
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta")}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = True  # without a cache Transformers reads the positions, to see if sequences are packed
    try:
        with torch.no_grad(), evaluating(model):
            logits = torch.func.functional_call(model, empty, kwargs=inputs).logits
    finally:
        hook.remove()
    return len(given) == 1 and logits is given[0][0] and logits._version == given[0][1]
