"""Puts 16-bit copies of a model's fp32 weights in their place while it computes (Micikevicius et al. 2018, section
3.1).

The parameters stay fp32, in the optimizer and in checkpoints. A copy is cast from its parameter once a window, as an
operation that autograd knows: its gradient comes back through the cast, so gradients accumulate over micro-batches and
travel between ranks in fp32, as under FSDP2's MixedPrecisionPolicy. Beside fp32 weights, gradients and optimizer state
a window holds 2 bytes more a parameter; between windows none.

Modules find the copies in place of their parameters until the backward pass is over, since recomputed blocks read them
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from drivetrain.config.precision import Precision
from drivetrain.errors import RunError, problem
from drivetrain.numerics.torch_precision import dtype


class WeightCopies:
    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        """model: its fp32 parameters are copied, others (quantised ones, say) stay, and so do those of normalisation
        that keeps running statistics, whose kernels take 16-bit inputs beside fp32 weights. Tied weights share a copy.

        Nothing is copied if the precision computes in its parameters' dtype, or is None.
        """
        casts = precision is not None and precision.cast
        if casts:
            _refuse_uncopied(model)
        modules = [module for module in model.modules() if casts and not _keeps_statistics(module)]
        self._compute = torch.float32 if precision is None else dtype(precision.compute)
        self._slots = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.dtype == torch.float32
        ]
        self._recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]

    def made(self) -> Sequence[Tensor]:
        """Returns fresh copies of the present weights, with gradients that reach the weights if those are enabled."""
        copies: dict[int, Tensor] = {}
        for _, _, parameter in self._slots:
            if id(parameter) not in copies:
                copies[id(parameter)] = parameter.to(self._compute)
        return [copies[id(parameter)] for _, _, parameter in self._slots]

    @contextmanager
    def in_place(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """Lets the modules compute with `copies`, which `made` returned. Raises RunError if the model wrote to one of
        them, since that would be lost."""
        try:
            for (module, name, _), copy in zip(self._slots, copies, strict=True):
                module._parameters[name] = copy  # type: ignore[assignment]  # a parameter's place, and no parameter
            self._refresh()
            yield
            _check_unwritten(self._slots, copies)
        finally:
            for module, name, parameter in self._slots:
                module._parameters[name] = parameter
            self._refresh()

    def _refresh(self) -> None:
        """Refreshes recurrent layers, which keep a list of their weights beside them."""
        for module in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _check_unwritten(slots: Sequence[tuple[nn.Module, str, nn.Parameter]], copies: Sequence[Tensor]) -> None:
    for (module, name, _), copy in zip(slots, copies, strict=True):
        if copy._version:  # counts what was done in place
            raise RunError(
                f"{type(module).__name__}.{name} was changed by the model while it computed (max_norm, a momentum "
                "encoder): under this precision that is a 16-bit copy, and the change would be lost. Give bf16-mixed"
            )


def _refuse_uncopied(model: nn.Module) -> None:
    """Raises UserError for layers that cannot compute with a 16-bit copy."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            why = f"{name} has sparse gradients, which cannot come back through a 16-bit copy"
            raise problem("precision", why, "give bf16-mixed, or sparse=False")
        computed = isinstance(module, ParametrizationList)
        if computed and any(buffer.dtype == torch.float32 for buffer in module.buffers()):
            why = f"{name} is computed from its weight and fp32 buffers (spectral_norm, orthogonal), of unlike types"
            raise problem("precision", why, "give bf16-mixed")


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
