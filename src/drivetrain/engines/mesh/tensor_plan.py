"""Plans which layers of a model tensor parallelism splits, and how; checks that the plan fits the model.

The plan is the model's own where Transformers has one, the workload's where it declares one, else derived from the
names that architectures give their layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from drivetrain.config.engines.mesh import DROPS_APART, HEADS
from drivetrain.engines.mesh.dropout_masks import drops
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.adapted_layers import adapted_layers, layers_of, variants
from drivetrain.models.quantised_linear import QuantisedLinear

# as Transformers names them
SPLIT = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise")
SUMMED = "replicated_with_grad_allreduce"  # whole, but works on what is split; the trial step finds such parts too
SAME = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input", "replicate": None}

# What layers are called within their attention or feed-forward part: split by outputs, split by inputs.
FIRST = r"(q|k|v|query|key|value)(_proj|_lin)?|q_proj|fc1|lin1|(gate|up)_proj|intermediate\.dense|w1|w3"
SECOND = r"(o|out|down)_proj|out_lin|fc2|lin2|output\.dense|w2"


def plan_of(model: nn.Module, declared: Mapping[str, str] | None) -> dict[str, str]:
    """Returns module name → style, for every module that has one. Raises UserError if there is no plan."""
    if is_derived(model, declared):
        return _derived(model)
    patterns = declared or getattr(model, "_tp_plan", None) or {}
    modules = dict(model.named_modules())
    split = list(layers_of(model))
    whole = [name for name, module in modules.items() if next(module.parameters(recurse=False), None) is not None]
    found: dict[str, str] = {}
    for pattern, given in patterns.items():
        style = SAME.get(given, given)
        if style is None:
            continue
        if style not in (*SPLIT, SUMMED):
            why = f"{type(model).__name__} splits {pattern} as {given}, which is not done here"
            raise problem("engine.tp", why, "leave tp out")
        found |= {name: style for name in (whole if style == SUMMED else split) if matches(pattern, name)}
    if not found:
        raise problem("engine.tp", f"the plan of {type(model).__name__} names none of its modules", "correct the plan")
    return found


def matches(pattern: str, name: str) -> bool:
    """Returns whether a module's name matches a pattern, in which * is one part of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def is_derived(model: nn.Module, declared: Mapping[str, str] | None) -> bool:
    return not (declared or getattr(model, "_tp_plan", None))


def _derived(model: nn.Module) -> dict[str, str]:
    """Derives a plan from the layers' names; a feed-forward or attention part counts only if it has both kinds."""
    found: dict[str, str] = {}
    for name in (name for name, layer in layers_of(model).items() if isinstance(layer, nn.Linear)):
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
            f"{type(model).__name__} has no plan for tensor parallelism, and its layers' names suggest none",
            "declare one in a workload file of your own (tensor_parallel, docs/reference/workloads.md), "
            "or leave tp out",
        )
    return found


def check_fits(
    model: nn.Module, plan: Mapping[str, str], ranks: int, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Raises UserError with all heads and features that cannot be split evenly, and options that the model is not made
    for."""
    problems = list(
        dict.fromkeys(
            [
                *_uneven(model, plan, ranks),
                *_options(model, plan, sequence_parallel, loss_parallel),
                *_adapters(model, plan, sequence_parallel),
            ]
        )
    )
    if problems:
        raise UserError(problems)


def _uneven(model: nn.Module, plan: Mapping[str, str], ranks: int) -> Iterator[Problem]:
    for config in _configs(model, plan):
        for field in HEADS:
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % ranks:
                yield Problem(
                    "engine.tp", f"{field} ({heads}) is no multiple of tp ({ranks})", f"give a divisor of {heads}"
                )
    layers = layers_of(model)
    for name, style in plan.items():
        if style == SUMMED:
            continue
        layer, dim = layers[name], 0 if style in ("colwise", "colwise_gather_output", "embedding_rowwise") else 1
        sizes = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else layer.weight.shape
        if sizes[dim] % ranks:
            yield _indivisible(model, name, sizes[dim], ranks)
        elif isinstance(layer, QuantisedLinear) and (why := layer.whole_because(dim, ranks)):
            fix = "give quantised_base.format=int8, or a smaller tp"
            yield Problem("engine.tp", f"{name} cannot be split over tp ({ranks}): {why} on a rank", fix)


def _indivisible(model: nn.Module, name: str, size: int, ranks: int) -> Problem:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None or size != embedding.weight.shape[0]:
        return Problem("engine.tp", f"{name} has {size} features, no multiple of tp ({ranks})", "give a divisor")
    fix = (
        f"round it up to {-(-size // ranks) * ranks}: vocab_size in workload.model.config, or vocabulary_size of a bpe "
    )
    fix += "tokenizer; with resize_vocabulary, add tokens to the tokenizer"
    return Problem("engine.tp", f"the vocabulary ({size} tokens) is no multiple of tp ({ranks})", fix)


def _configs(model: nn.Module, plan: Mapping[str, str]) -> Iterator[object]:
    """Yields Transformers' configurations of the parts that hold planned layers: for each layer the nearest one."""
    modules, seen = dict(model.named_modules()), set[int]()
    for name in plan:
        while name:
            name = name.rpartition(".")[0]
            config = getattr(modules[name], "config", None)
            if any(isinstance(getattr(config, field, None), int) for field in HEADS):
                if id(config) not in seen:
                    yield config
                seen.add(id(config))
                break


def head_of(model: nn.Module) -> str:
    """Returns the name of the layer that makes logits; empty if a model does not name it."""
    asked = getattr(model, "get_output_embeddings", None)
    layer = asked() if asked is not None else None
    return next((name for name, module in model.named_modules() if module is layer), "") if layer is not None else ""


def _options(
    model: nn.Module, plan: Mapping[str, str], sequence_parallel: bool, loss_parallel: bool
) -> Iterator[Problem]:
    head = head_of(model)
    if loss_parallel and plan.get(head) != "colwise_gather_output":
        why = f"the plan of {type(model).__name__} does not split its logits over the vocabulary"
        yield Problem("engine.loss_parallel", why, "leave it out")
    firsts = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    if sequence_parallel and not (head and firsts and firsts <= set(joints_of(model, plan))):
        why = f"{type(model).__name__} is no decoder whose parts take and give sequences"
        yield Problem("engine.sequence_parallel", why, "leave it out")


def _adapters(model: nn.Module, plan: Mapping[str, str], sequence_parallel: bool) -> Iterator[Problem]:
    adapted = {name: layer for name, layer in adapted_layers(model).items() if name in plan}
    others = sorted({variant for layer in adapted.values() for variant in variants(layer)})
    if others:
        why = f"{', '.join(others)} computes with whole weights, of which each rank has a part"
        yield Problem("engine.tp", why, "leave tp out, or train plain LoRA")
    embeddings = [name for name, layer in adapted.items() if isinstance(layer.get_base_layer(), nn.Embedding)]
    if sequence_parallel and embeddings:
        why = f"{', '.join(embeddings)} has an adapter, which gives whole sequences"
        yield Problem("engine.sequence_parallel", why, "leave it out, or the embedding out of adapter.targets")
    if sequence_parallel and any(drops(part) for layer in adapted.values() for part in layer.modules()):
        yield Problem("engine.sequence_parallel", DROPS_APART, "leave it or adapter.dropout out")


def joints_of(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Returns the parts that hold both layers of a pair (attention, feed-forward) and no weights but the plan's: in
    these only its layers read the hidden states."""
    parents: dict[str, set[str]] = {}
    for name, style in plan.items():
        parents.setdefault(name.rpartition(".")[0], set()).add(style)
    found: list[str] = []
    for joint, styles in parents.items():
        if joint and {"colwise", "rowwise"} <= styles:
            planned = tuple(f"{name}." for name in plan if name.startswith(f"{joint}."))
            weights = [name for name, _ in model.get_submodule(joint).named_parameters()]
            if all(f"{joint}.{name}".startswith(planned) for name in weights):
                found.append(joint)
    return found
