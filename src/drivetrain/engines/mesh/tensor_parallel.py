"""Tensor parallel: splits the linear layers of each block over ranks, two by two, so that each pair communicates only
once.

Shoeybi et al. 2019, "Megatron-LM": the first of a pair is split by its outputs (colwise), the second by its inputs
(rowwise). tensor_plan.py chooses the layers; a dry run at set-up checks that the split model computes the same results
and gradients as the whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # has no public name
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from drivetrain.engines.mesh.dropout_masks import own_masks
from drivetrain.engines.mesh.stage_split import Absent
from drivetrain.engines.mesh.tensor_adapters import fitted
from drivetrain.engines.mesh.tensor_plan import SUMMED, head_of, joints_of
from drivetrain.errors import problem
from drivetrain.models.adapted_layers import layers_of


def split(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Splits in place, over a mesh of one axis; names stay. Between the parts each rank has whole tensors, or with
    sequence_parallel its part of every sequence. With loss_parallel logits stay sharded while training.

    plan: may name modules that are absent, such as those of another pipeline stage.
    """
    modules, layers = dict(model.named_modules()), layers_of(model)
    here = {n: style for n, style in plan.items() if n in layers or (style == SUMMED and n in modules)}
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    head, joints, tied = head_of(model), joints_of(model, here), _tied(model)
    styles = {name: _style(style) for name, style in here.items() if style != SUMMED}
    if sequence_parallel:
        styles |= _over_sequences(model, here, joints, head)
    elif hasattr(model, "_tp_plan"):  # others may read what they are given in ways of their own
        styles |= {name: _Joint(Replicate()) for name in joints}
    if loss_parallel and head in styles:
        inputs = Shard(1) if sequence_parallel else Replicate()
        styles[head] = ColwiseParallel(input_layouts=inputs, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, fitted(styles, modules))
    _tie(tied)
    for name, parameter in model.named_parameters():  # SequenceParallel lets all require gradients
        parameter.requires_grad_(trains[name])
    if not sequence_parallel:  # under which ranks draw from streams of their own throughout
        own_masks(model, here, mesh.get_local_rank())
    for name in styles.keys() & layers.keys():
        if isinstance(layers[name], nn.Embedding):
            layers[name].register_forward_hook(_arrived)
    if loss_parallel and head in styles:
        modules[head].register_forward_hook(_whole_logits)


Places = list[tuple[str, nn.Module, str]]  # module name, module, name of a weight in it


def _tied(model: nn.Module) -> list[Places]:
    """Returns the weights that stand in several places; last those of a module of another pipeline stage."""
    places: dict[nn.Parameter, Places] = {}
    for name, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                places.setdefault(weight, []).append((name, module, key))
    return [sorted(several, key=_is_absent) for several in places.values() if len(several) > 1]


def _is_absent(place: tuple[str, nn.Module, str]) -> bool:
    return isinstance(place[1], Absent)


def _tie(tied: list[Places]) -> None:
    """Ties again a weight whose places were split apart, if all were split in one way."""
    for (name, module, key), *others in tied:
        weight = module._parameters[key]
        for other, its_module, its_key in others:
            its_weight = its_module._parameters[its_key]
            splits_apart = getattr(its_weight, "placements", None) != getattr(weight, "placements", None)
            if splits_apart and not isinstance(its_module, Absent):
                why = f"{name} and {other} are one weight (tied embeddings), of which the plan splits one"
                fix = "give workload.model.config.tie_word_embeddings=false where the model is made from a config, "
                fix += "or leave tp out"
                raise problem("engine.tp", why, fix)
            its_module._parameters[its_key] = weight


def _style(name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    if name == "rowwise":
        return RowwiseParallel()
    return RowwiseParallel(input_layouts=Replicate())  # of an embedding too


def _over_sequences(
    model: nn.Module, plan: Mapping[str, str], joints: Sequence[str], head: str
) -> dict[str, ParallelStyle]:
    """Makes parts gather their sequences and scatter their outputs; norms and sums between them work on parts."""
    styles: dict[str, ParallelStyle] = {name: _Joint(Shard(1)) for name in joints}
    styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name, style in plan.items() if style == "rowwise"}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{joint}.") for joint in joints)
        if "Norm" in type(module).__name__ and not inside:
            styles[name] = SequenceParallel(use_local_output=True)
        elif plan.get(name) == "embedding_rowwise":
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        elif isinstance(module, nn.Embedding):
            styles[name] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if head in plan:
        styles[head] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return styles


class _Joint(ParallelStyle):
    """Turns a part's hidden states, passed by position or by name, whole or as each rank's part of the sequence, into
    one DTensor for all layers that read them: their gradients are summed before they travel, once."""

    def __init__(self, layout: Placement) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def joined(hidden: Tensor) -> DTensor:
            return DTensor.from_local(hidden, device_mesh, [self._layout], run_check=False).redistribute(
                placements=[Replicate()]
            )

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (joined(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": joined(kwargs["hidden_states"])}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


def _arrived(module: nn.Module, args: Any, output: Any) -> Any:
    """Waits for a sum: one still on its way is a tensor of another class, whose gradient compiled blocks do not return;
    its own method of waiting would cut the gradient off."""
    del module, args
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _whole_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """Returns whole logits where there is no backward."""
    del module, args
    return output if torch.is_grad_enabled() else output.full_tensor()
