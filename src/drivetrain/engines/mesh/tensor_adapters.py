"""Tensor parallel under adapters, and of layers whose weights are codes.

The product is y = W x + s B A x over ranks that each have a part of W, with A thin (rank x in) and B thin (out x rank):

    colwise   W and B by outputs; A whole, for x is. A gradient of A x is a sum over ranks before it goes on to A and x.
    rowwise   W and A by inputs, A x summed over ranks; B whole, for A x is then: so are its gradients, on every rank.

A whole one is a plain parameter with whole gradients, or replicated by DTensor, which knows that a gradient is a part
of a sum. IA3 multiplies by a vector, which is split as the features that it multiplies are. Names stay, and with them
what a checkpoint holds. Between the layers of a pair each rank drops features of its own, a rowwise A's inputs too;
what a colwise layer's adapter drops of x is the same on all ranks, or their copies of A would diverge
(dropout_masks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from drivetrain.models.adapted_layers import is_ia3
from drivetrain.models.quantised_linear import QuantisedLinear

Linear = ColwiseParallel | RowwiseParallel
FEATURES = Shard(-1)


def fitted(styles: Mapping[str, ParallelStyle], modules: Mapping[str, nn.Module]) -> dict[str, ParallelStyle]:
    """Adapts the plan to layers that are no plain ones."""
    return {name: _fitted(style, modules[name]) for name, style in styles.items()}


def _fitted(style: ParallelStyle, module: nn.Module) -> ParallelStyle:
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return style
    if isinstance(module, QuantisedLinear):
        return _Codes(style)
    if isinstance(module, nn.Linear | nn.Embedding):
        return style
    return _Ia3(style) if is_ia3(module) else _Lora(style)


def _takes(style: Linear) -> Placement:
    """Returns how a layer of the style takes its input."""
    return FEATURES if isinstance(style, RowwiseParallel) else Replicate()


def _placed(x: Tensor, style: Linear, mesh: DeviceMesh) -> DTensor:
    """Places a layer's input as the layer takes it."""
    given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
    placed: DTensor = given.redistribute(placements=[_takes(style)])
    return placed


def _given(style: Linear, y: DTensor) -> Tensor:
    """Places a layer's output as the style returns it."""
    laid: DTensor = y.redistribute(placements=style.output_layouts)
    return laid.to_local() if style.use_local_output else laid


def _gives(style: Linear, layout: Placement, local: bool) -> Linear:
    """Returns the style for a layer within, which places its output so."""
    kind = RowwiseParallel if isinstance(style, RowwiseParallel) else ColwiseParallel
    made: Linear = kind(input_layouts=style.input_layouts[0], output_layouts=layout, use_local_output=local)
    return made


class _Lora(ParallelStyle):
    def __init__(self, style: Linear) -> None:
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        base, style = layer.get_base_layer(), self._style
        parallelize_module(base, device_mesh, _fitted(style, base))
        if isinstance(base, nn.Embedding):
            return layer  # gives whole rows, to which the adapter adds whole ones
        for name in layer.lora_A:
            if isinstance(style, RowwiseParallel):
                self._rowwise(layer.lora_A[name], layer.lora_B[name], device_mesh)
            else:
                layer.lora_dropout[name].register_forward_pre_hook(self._whole(device_mesh))
                thin = ColwiseParallel(output_layouts=style.output_layouts[0], use_local_output=style.use_local_output)
                parallelize_module(layer.lora_B[name], device_mesh, thin)
        return layer

    def _rowwise(self, down: nn.Module, up: nn.Module, mesh: DeviceMesh) -> None:
        layout = self._style.output_layouts[0]
        parallelize_module(down, mesh, _gives(self._style, layout, local=True))
        if layout != Replicate():  # each rank goes on with its part of every sequence
            parallelize_module(up, mesh, SequenceParallel(use_local_output=True))

    def _whole(self, mesh: DeviceMesh) -> Any:
        """Passes x as a plain tensor before a colwise layer's adapter, which begins with its dropout."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            is_whole = self._style.input_layouts == (Replicate(),) and not isinstance(args[0], DTensor)
            return args if is_whole else (_placed(args[0], self._style, mesh).to_local(), *args[1:])

        return before


class _Ia3(ParallelStyle):
    def __init__(self, style: Linear) -> None:
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        base, style = layer.get_base_layer(), self._style
        if layer.is_feedforward:  # scales what the layer is given

            def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
                return (_placed(args[0], style, device_mesh), *args[1:])

            layer.register_forward_pre_hook(before)
            parallelize_module(base, device_mesh, _fitted(style, base))
            placement = Shard(1) if isinstance(style, RowwiseParallel) else Replicate()
        else:
            layout = style.output_layouts[0] if isinstance(style, RowwiseParallel) else FEATURES
            parallelize_module(base, device_mesh, _fitted(_gives(style, layout, local=False), base))
            layer.register_forward_hook(lambda _module, _args, y: _given(style, y))
            placement = Replicate() if isinstance(style, RowwiseParallel) else Shard(0)
        for name, factors in layer.ia3_l.items():
            split = distribute_tensor(factors.data, device_mesh, [placement])
            layer.ia3_l[name] = nn.Parameter(split, requires_grad=factors.requires_grad)
        return layer


class _Codes(ParallelStyle):
    """The layer computes with its own rows or columns, on plain tensors."""

    def __init__(self, style: Linear) -> None:
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, QuantisedLinear)
        style, by_inputs = self._style, isinstance(self._style, RowwiseParallel)
        module.keep_share(1 if by_inputs else 0, device_mesh.get_local_rank(), device_mesh.size())
        for name in ("weight", "scales"):
            own = DTensor.from_local(module.get_parameter(name).data, device_mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(own, requires_grad=False))
        if module.bias is not None:
            split = distribute_tensor(module.bias.data, device_mesh, [Replicate() if by_inputs else Shard(0)])
            module.bias = nn.Parameter(split, requires_grad=module.bias.requires_grad)

        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            """Prepares the input: a colwise layer's own outputs give a part of the gradient of x, which is summed
            before it travels."""
            grads = None if by_inputs else [Partial()]
            return (_placed(args[0], style, device_mesh).to_local(grad_placements=grads), *args[1:])

        def after(_module: nn.Module, _args: Any, y: Tensor) -> Tensor:
            made: Any = DTensor.from_local(y, device_mesh, [Partial() if by_inputs else FEATURES], run_check=False)
            if by_inputs and module.bias is not None:
                made = made.redistribute(placements=style.output_layouts) + module.bias.to(y.dtype)
            return _given(style, made)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module
