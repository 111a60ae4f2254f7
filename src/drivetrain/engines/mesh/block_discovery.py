"""Discovers how a model can be cut into pipeline stages, from a forward pass of the whole model.

No architecture has to be known: the pass shows which modules run before and after the blocks, what they pass on, and
what each part costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.errors import problem
from drivetrain.memory.recompute import repeated_blocks


@dataclass(frozen=True)
class HiddenShape:
    """The shape of tensors between stages as a function of a batch: (samples, a length of some input, ...)."""

    length_of: str | None  # the input whose second dimension is the second one here
    rest: tuple[int, ...]  # the other dimensions, which do not change; the second too if length_of is None
    dtype: torch.dtype

    def of(self, batch: dict[str, Tensor]) -> tuple[int, ...]:
        samples = next(iter(batch.values())).shape[0]
        length = () if self.length_of is None else (batch[self.length_of].shape[1],)
        return (samples, *length, *self.rest)


@dataclass(frozen=True)
class Anatomy:
    """The findings of a forward pass of the whole model."""

    container: str  # name of what holds the blocks
    blocks: list[str]
    before: list[str]  # outermost modules with weights or statistics that run before the blocks
    after: list[str]
    gives_tuple: bool
    tied: list[str]  # weights that stand both before and after the blocks, by the model's names of its parameters
    costs: list[int]  # operations of each block; what runs before counts to the first, what runs after to the last
    hidden: HiddenShape


def dissect(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], forward: Callable[[nn.Module, Any], Any]
) -> Anatomy:
    """Runs two batches of different shape forward, and returns the findings. Raises UserError for models that cannot be
    cut.

    forward: (model, batch) → anything, as the workload calls it.
    """
    blocks = _chain(model)
    names = {id(module): name for name, module in model.named_modules()}
    own = [names[id(block)] for block in blocks]
    seen = [_watched(model, blocks, batch, forward) for batch in batches]
    shapes = [tuple(entry.shape) for entry in (run.hidden for run in seen)]
    before, after = _parts(model, blocks, seen[0].called)
    tied = _tied(model, blocks, before, after)
    return Anatomy(
        container=own[0].rpartition(".")[0],
        blocks=own,
        before=before,
        after=after,
        gives_tuple=seen[0].gives_tuple,
        tied=tied,
        costs=_costs(seen[0].operations, own, before, after),
        hidden=_hidden_shape(shapes, batches, seen[0].hidden.dtype),
    )


def _chain(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that are divided among stages: those that repeat in one container."""
    repeated = {id(block) for block in repeated_blocks(model)}
    for container in model.modules():
        chain = [child for child in container.children() if id(child) in repeated]
        if chain:
            return chain
    why = f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential"
    raise problem("engine.pp", why, "leave pp out")


@dataclass
class Seen:
    called: list[tuple[str, int]]  # module name, blocks that were entered before it
    hidden: Tensor  # what the second block was given
    gives_tuple: bool
    operations: dict[str, int]


def _watched(
    model: nn.Module, blocks: Sequence[nn.Module], batch: dict[str, Tensor], forward: Callable[[nn.Module, Any], Any]
) -> Seen:
    called: list[tuple[str, int]] = []
    inputs: list[Any] = []
    outputs: list[Any] = []

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        del block
        inputs.append(args[0] if args else kwargs.get("hidden_states"))

    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(lambda _m, _a, output: outputs.append(output)) for block in blocks]
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _m, _a, name=name: called.append((name, len(inputs)))))
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    firsts = [output[0] if isinstance(output, tuple) else output for output in outputs]
    alike = len(inputs) == len(blocks) and all(isinstance(x, Tensor) for x in [*inputs, *firsts])
    chained = alike and all(out is into for out, into in zip(firsts, inputs[1:], strict=False))
    if not chained or any(x.shape != inputs[0].shape for x in firsts):
        raise problem(
            "engine.pp",
            f"the blocks of {type(model).__name__} do not hand one tensor of one shape from each to the next",
            "leave pp out",
        )
    operations = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    return Seen(called, firsts[0], isinstance(outputs[0], tuple), operations)


def _around(model: nn.Module, blocks: Sequence[nn.Module]) -> set[str]:
    """Returns the modules that hold the blocks: the model, its body, the container."""
    wanted = {id(block) for block in blocks}
    return {
        name
        for name, module in model.named_modules()
        if id(module) not in wanted and any(id(part) in wanted for part in module.modules())
    }


def _parts(
    model: nn.Module, blocks: Sequence[nn.Module], called: Sequence[tuple[str, int]]
) -> tuple[list[str], list[str]]:
    """Returns the outermost modules that have a state (weights, statistics) and run before and after the blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    around, modules = _around(model, blocks), dict(model.named_modules())
    before: list[str] = []
    after: list[str] = []
    for name, entered in called:
        module = modules[name]
        if id(module) in inside or name in around or not module.state_dict():
            continue
        if 0 < entered < len(blocks):
            raise problem("engine.pp", f"{name} runs between the blocks, and has weights or statistics", "leave pp out")
        taken = before if entered == 0 else after
        if not within(name, taken):
            taken.append(name)
    twice = [name for name in after if within(name, before)]
    if twice:
        raise problem("engine.pp", f"{', '.join(twice)} run before and after the blocks", "leave pp out")
    return before, after


def _tied(model: nn.Module, blocks: Sequence[nn.Module], before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Returns the weights that the first and the last stage share. Raises UserError for others that belong to several
    stages."""
    around = _around(model, blocks)
    loose = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in around]
    if loose:
        raise problem("engine.pp", f"{', '.join(loose[:3])} belong to no layer of their own", "leave pp out")
    owners: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = "before" if within(name, before) else "after" if within(name, after) else name
        owners.setdefault(id(parameter), {}).setdefault(place, name)
    several = [places for places in owners.values() if len(places) > 1]
    for places in several:
        if not places.keys() <= {"before", "after"}:
            why = f"{' and '.join(places.values())} are one weight, which stages would share"
            raise problem("engine.pp", why, "leave pp out")
    return [next(iter(places.values())) for places in several]


def within(name: str, modules: Sequence[str]) -> bool:
    """Returns whether a name is one of the modules', or of something in them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _costs(operations: dict[str, int], blocks: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[int]:
    def of(name: str) -> int:
        return next((count for known, count in operations.items() if known.endswith(f".{name}")), 0)

    costs = [of(name) for name in blocks]
    costs[0] += sum(map(of, before))
    costs[-1] += sum(map(of, after))
    return [cost + 1 for cost in costs]  # a block without any products is still one


def _hidden_shape(
    shapes: Sequence[tuple[int, ...]], batches: Sequence[dict[str, Tensor]], dtype: torch.dtype
) -> HiddenShape:
    lengths = [shape[1] for shape in shapes if len(shape) > 2]
    for name in batches[0]:
        given = [batch[name].shape[1] for batch in batches if batch[name].ndim > 1]
        if lengths and given == lengths:
            return HiddenShape(name, shapes[0][2:], dtype)
    if len({shape[1:] for shape in shapes}) > 1:
        raise problem("engine.pp", "the length of the blocks' output follows from no input", "leave pp out")
    return HiddenShape(None, shapes[0][1:], dtype)


def balanced(costs: Sequence[int], stages: int) -> list[range]:
    """Returns contiguous parts whose most expensive one is as cheap as possible; none is empty. Dynamic programming."""
    total = [0, *itertools.accumulate(costs)]
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for stage in range(1, stages + 1):
        for end in range(stage, len(costs) + 1):
            choices = [
                (max(best[stage - 1, start][0], total[end] - total[start]), [*best[stage - 1, start][1], end])
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(choices)
    ends = best[stages, len(costs)][1]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
