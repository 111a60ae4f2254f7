"""Tensor parallel: the linear layers of each block split over ranks, two by two, so that each pair joins but once.

Shoeybi et al. 2019, "Megatron-LM": the first of a pair is split by its outputs (colwise), the second by its inputs
(rowwise). The plan is the model's own where Transformers has one, the workload's where it declares one, else derived
from the names that architectures give their layers, and then checked: the split model has to compute what the whole
one did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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

from drivetrain.errors import problem

# as Transformers names them
STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise")
SAME = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input", "replicate": None}

# What layers are called within their attention or feed-forward part: split by outputs, split by inputs.
FIRST = r"(q|k|v|query|key|value)(_proj|_lin)?|q_proj|fc1|lin1|(gate|up)_proj|intermediate\.dense|w1|w3"
SECOND = r"(o|out|down)_proj|out_lin|fc2|lin2|output\.dense|w2"


def plan_of(model: nn.Module, declared: Mapping[str, str] | None) -> dict[str, str]:
    """Module name → style, for every module that is split. UserError where there is no plan to be had."""
    patterns = declared or getattr(model, "_tp_plan", None) or {}
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    if not patterns:
        return _derived(model)
    found: dict[str, str] = {}
    for pattern, given in patterns.items():
        style = SAME.get(given, given)
        if style is None:
            continue
        if style not in STYLES:
            why = f"{type(model).__name__} splits {pattern} as {given}"
            raise problem("engine.tp", why, f"known are {', '.join(STYLES)}; leave tp out")
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        found |= {name: style for name in names if regex.fullmatch(name)}
    if not found:
        raise problem("engine.tp", f"the plan of {type(model).__name__} names none of its modules", "correct the plan")
    return found


def _derived(model: nn.Module) -> dict[str, str]:
    """From the layers' names; a feed-forward or attention part counts only if it has both kinds."""
    found: dict[str, str] = {}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in linear:
        within = re.search(r"\.\d+\.(.+)$", name)  # of a repeated block
        if within is None:
            continue
        if re.fullmatch(rf"(.*\.)?({FIRST})", within.group(1)):
            found[name] = "colwise"
        elif re.fullmatch(rf"(.*\.)?({SECOND})", within.group(1)):
            found[name] = "rowwise"
    if len(set(found.values())) < 2:
        raise problem(
            "engine.tp",
            f"{type(model).__name__} has no plan for tensor parallelism, and its layers' names say none",
            "declare one in the workload's layout, or leave tp out",
        )
    return found


def check_divisible(model: nn.Module, plan: Mapping[str, str], ranks: int) -> None:
    """UserError where heads or features cannot be split evenly."""
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise problem(
                "engine.tp", f"{field} ({heads}) is no multiple of tp ({ranks})", f"give a divisor of {heads}"
            )
    modules = dict(model.named_modules())
    for name, style in plan.items():
        weight = modules[name].weight
        assert isinstance(weight, torch.Tensor)
        size = weight.shape[0 if style in ("colwise", "colwise_gather_output", "embedding_rowwise") else 1]
        if size % ranks:
            raise problem("engine.tp", f"{name} has {size} features, no multiple of tp ({ranks})", "give a divisor")


def split(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> None:
    """In place, over a mesh of one axis; names stay. Between the parts each rank has whole tensors, or with
    sequence_parallel its part of every sequence. With loss_parallel logits stay sharded while training.

    plan: may name modules that are not there, such as those of another pipeline stage.
    """
    modules = dict(model.named_modules())
    here = {name: style for name, style in plan.items() if isinstance(modules.get(name), nn.Linear | nn.Embedding)}
    styles = {name: _style(style) for name, style in here.items()}
    head = _head(model)
    if sequence_parallel:
        styles |= _over_sequences(model, here, head)
    elif hasattr(model, "_tp_plan"):  # in whose parts only the layers of the plan read the hidden states
        styles |= {name: _Joint(Replicate()) for name in _joints(here)}
    if loss_parallel and head in styles:
        inputs = Shard(1) if sequence_parallel else Replicate()
        styles[head] = ColwiseParallel(input_layouts=inputs, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, styles)
    for name in styles:
        if isinstance(modules[name], nn.Embedding):
            modules[name].register_forward_hook(_arrived)
    if loss_parallel and head in styles:
        modules[head].register_forward_hook(_whole_logits)


def _style(name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    if name == "rowwise":
        return RowwiseParallel()
    return RowwiseParallel(input_layouts=Replicate())  # of an embedding too


def _head(model: nn.Module) -> str:
    """Name of the layer that gives logits; empty where a model does not say."""
    asked = getattr(model, "get_output_embeddings", None)
    layer = asked() if asked is not None else None
    return next((name for name, module in model.named_modules() if module is layer), "") if layer is not None else ""


def check_options(model: nn.Module, plan: Mapping[str, str], sequence_parallel: bool, loss_parallel: bool) -> None:
    """UserError where a model has not what an option works on."""
    head = _head(model)
    if loss_parallel and plan.get(head) != "colwise_gather_output":
        why = f"the plan of {type(model).__name__} does not split its logits over the vocabulary"
        raise problem("engine.loss_parallel", why, "leave it out")
    if sequence_parallel and (not head or not _joints(plan) or "rowwise" not in plan.values()):
        why = f"{type(model).__name__} is no decoder whose parts take and give sequences"
        raise problem("engine.sequence_parallel", why, "leave it out")


def _joints(plan: Mapping[str, str]) -> list[str]:
    """The parts that hold both layers of a pair: attention, feed-forward."""
    parents: dict[str, set[str]] = {}
    for name, style in plan.items():
        parents.setdefault(name.rpartition(".")[0], set()).add(style)
    return [name for name, styles in parents.items() if {"colwise", "rowwise"} <= styles]


def _over_sequences(model: nn.Module, plan: Mapping[str, str], head: str) -> dict[str, ParallelStyle]:
    """Parts gather their sequences and scatter what they give; norms and sums between them work on parts."""
    joints = _joints(plan)
    styles: dict[str, ParallelStyle] = {name: _Joint(Shard(1)) for name in joints}
    styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name, style in plan.items() if style == "rowwise"}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{joint}.") for joint in joints)
        if "Norm" in type(module).__name__ and not inside:
            styles[name] = SequenceParallel(use_local_output=True)
        elif isinstance(module, nn.Embedding):
            styles[name] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if head in plan:
        styles[head] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return styles


class _Joint(ParallelStyle):
    """A part's hidden states come by position or by name, whole or as each rank's part of the sequence, and are made
    one DTensor for all layers that read them: their gradients are summed before they travel, once."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
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
    """A sum still on its way is a tensor of another class, whose gradient compiled blocks do not give back; waiting
    for it by its own method would cut the gradient off."""
    del module, args
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _whole_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """Outside of training whoever reads logits gets whole ones."""
    del args
    return output if module.training else output.full_tensor()
