"""Feed-forward parts that compute SiLU once more in the backward pass instead of keeping it.

A block of Llama's form computes down_proj(silu(gate_proj(x)) * up_proj(x)) (Shazeer 2020, "GLU Variants Improve
Transformer", calls it SwiGLU). For the backward pass PyTorch keeps four tensors of (tokens, intermediate): the outputs
of gate_proj and of up_proj, silu of the first, and the product. Here SiLU and the product are one function of autograd,
which keeps two of the four (down_proj keeps the product). Its backward pass makes silu again and does what PyTorch's
own does, in the same order, so that losses and gradients are the same to the bit.

Transformers' modules stay as they are, but for the activation: RecomputedSiLU takes its place. Where gradients are
wanted it returns a SiLU that is not computed yet, and computes it together with the product when the block multiplies.
It holds no module and no weight, so that replicas and copies of a model need nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.models.llama_form import of_llamas_form

PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def recompute_silu(model: nn.Module) -> int:
    """Lets the feed-forward parts of a model with Llama's blocks compute SiLU again in the backward pass. Returns how
    many do; other models, and parts with another activation or with hooks on it, stay as they are."""
    known: list[Any] = [each for each in model.modules() if of_llamas_form(each) and each._modules.keys() >= PARTS]
    found = [each for each in known if _is_plain(each.act_fn) and _multiplies(each)]
    for part in found:
        part.act_fn = RecomputedSiLU(part.act_fn)
    return len(found)


def keep_silu(model: nn.Module) -> None:
    """Undoes `recompute_silu`."""
    for module in model.modules():
        for name, own in module._modules.items():
            if isinstance(own, RecomputedSiLU):
                module._modules[name] = own.usual()


class RecomputedSiLU(nn.Module):
    """SiLU before a product. Under a compiler, with tensors of tensor parallelism, or where something observes it, it
    is the plain one."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self._kind = type(plain)
        self.train(plain.training)

    def usual(self) -> nn.Module:
        """Returns the module that it took the place of."""
        return self._kind().train(self.training)

    def forward(self, input: Tensor) -> Tensor | _Activated:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not input.requires_grad:
            return F.silu(input)
        if _is_observed(self) or is_traceable_wrapper_subclass(input):
            return F.silu(input)
        return _Activated(input)


class _Activated:
    """SiLU of a gate, computed when it is multiplied."""

    def __init__(self, gate: Tensor) -> None:
        self._gate = gate

    def __mul__(self, up: Tensor) -> Tensor:
        gate = self._gate
        alike = (gate.dtype, gate.shape) == (up.dtype, up.shape)
        if not alike or not up.requires_grad or is_traceable_wrapper_subclass(up):
            return F.silu(gate) * up  # where up is frozen, PyTorch keeps two tensors as well
        found: Tensor = _SiLUProduct.apply(gate, up)
        return found


class _SiLUProduct(torch.autograd.Function):
    """silu(gate) * up, which keeps its two inputs alone; its gradient cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = F.silu(gate).mul_(upstream)
        of_silu = upstream * up
        torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=of_silu)  # into the memory of what it reads
        return of_silu, of_up


# --- where it may be done ---------------------------------------------------------------------------------------------


def _is_plain(activation: nn.Module) -> bool:
    """Returns whether it is SiLU, by PyTorch's or Transformers' code, and nothing observes it."""
    from transformers.activations import SiLUActivation

    is_silu = type(activation) is SiLUActivation or (type(activation) is nn.SiLU and not activation.inplace)
    return is_silu and "forward" not in vars(activation) and not _has_hooks(activation)


def _is_observed(module: nn.Module) -> bool:
    return modules._has_any_global_hook() or _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@dataclass(frozen=True)
class _Term:
    """Stands for a tensor, and is written as it was computed."""

    text: str

    def __mul__(self, other: _Term) -> _Term:
        return _Term(f"{self.text} * {other.text}")


def _multiplies(part: nn.Module) -> bool:
    """Returns whether the part's forward pass is the one above, in the code of the Transformers that is installed: it
    runs with terms for tensors."""

    def layer(name: str) -> Any:
        return lambda given: _Term(f"{name}({given.text})")

    try:
        found = type(part).forward(SimpleNamespace(**{name: layer(name) for name in PARTS}), _Term("x"))
    except (AttributeError, TypeError):  # it does more
        return False
    expected = "down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return "forward" not in vars(part) and found == _Term(expected)
