"""Traces the ranks of a run, with few of a deep model's blocks where that shows what all of them cost (depth.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, UserError
from drivetrain.plan.depth import DEPTHS, DepthTrace, NotLinear, check_linear, extrapolated
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import step_costs, step_trace
from drivetrain.plan.trace_batches import fullest_context_rank, shapes_of_batches
from drivetrain.plan.trace_model import alike_blocks
from drivetrain.workloads.base import Workload

FEW = 12  # blocks of a model that is traced whole: three shallow traces would take as long
# fields that change how large a step's tensors are and how often they are made, but not what is done for each block
SIZES = {"batch_size", "batch_size_per_device", "micro_batch_size", "micro_batch_tokens", "processes", "nodes"}
IRRELEVANT = {"name", "output", "tracking", "checkpoints", "evaluation", "loop", "schedule"}  # to the costs of a step
Pairs = dict[str, tuple[int, int] | None]  # by way of running: depths to extrapolate from; None: trace all blocks


class Tracer:
    """Traces runs, and remembers in which ways of running their costs grow evenly with the model's depth."""

    def __init__(self, depths: Sequence[int] = DEPTHS, few: int = FEW, pairs: Pairs | None = None) -> None:
        """pairs: what another tracer of the same workload found."""
        self._depths, self._few = tuple(depths), few
        self._blocks: tuple[Workload, int] | None = None  # of the latest workload
        self.pairs: Pairs = dict(pairs or {})
        self.found: dict[tuple[str, int], StepCosts] = {}  # by run and rank, of the latest workload
        self.notes: dict[str, None] = {}  # in order, each once

    def fullest_step_costs(
        self, run: RunConfig, machine: Machine, workload: Workload, quick: bool = False
    ) -> StepCosts:
        """Returns the costs on the rank that takes most memory, and those of unlike ones. Raises as `step_trace` does.

        quick: traces the ranks of largest shards alone, of which samples may be shorter than others'; of the stages
        without embedding and head only the first of those that have most blocks.
        """
        context = fullest_context_rank(run, machine, workload) * run.engine.axes.get("tp", 1)
        first = self.step_costs(run, machine, workload, context)
        ranks = _unlike(run, machine, workload, first.stage_depths, quick)
        found = {rank: self.step_costs(run, machine, workload, rank) for rank in (each + context for each in ranks)}
        fullest = max(found.values(), key=lambda costs: costs.memory.allocated)
        return replace(fullest, by_rank=found)

    def step_costs(self, run: RunConfig, machine: Machine, workload: Workload, rank: int = 0) -> StepCosts:
        """Returns the costs of one step on one rank, from a trace of the whole model if it has few blocks or its costs
        do not grow evenly with them. What was traced once is not traced again."""
        blocks = self._blocks_of(workload)
        key = run.model_dump_json(exclude=IRRELEVANT), rank
        if key not in self.found:
            self.found[key] = self._traced(run, machine, workload, rank, blocks)
        return self.found[key]

    def _traced(self, run: RunConfig, machine: Machine, workload: Workload, rank: int, blocks: int) -> StepCosts:
        stages = run.engine.stages
        stage = rank * stages // run.world_size
        way = f"{run.model_dump_json(exclude=SIZES | IRRELEVANT)} stage {stage}"
        pair = self.pairs.get(way, self._depths[:2])
        if blocks // stages <= self._few or pair is None:
            return step_costs(run, machine, workload, rank)

        def at(depth: int) -> DepthTrace:
            found = step_trace(run, machine, workload, rank, depth)
            depths = found.costs.stage_depths
            return DepthTrace(depth, found.costs, found.timeline, depths[stage] if depths else blocks)

        try:
            lower, upper = (at(pair[0]), at(pair[1])) if way in self.pairs else self._checked(at)
            costs = extrapolated(lower, upper, upper.whole)
        except (UserError, RunError, NotLinear) as error:
            self.pairs[way] = None
            costs = step_costs(run, machine, workload, rank)  # raises for its own reason where it cannot be traced
            few = f"did not predict {error}" if isinstance(error, NotLinear) else "could not be traced alone"
            note = f"its figures are of all {blocks} blocks; a few blocks, tried first as a short cut, {few}"
            self.notes[f"engine={run.engine.label}: {note} and were not used"] = None
            return costs
        if way not in self.pairs:
            self.pairs[way] = lower.depth, upper.depth
            few, of = f"{lower.depth - 1}, {lower.depth} and {upper.depth}", "a stage" if stages > 1 else "the model"
            self.notes[f"traced with {few} of {of}'s {upper.whole} blocks, in even steps of which its costs grow"] = (
                None
            )
        return costs

    def _checked(self, at: Callable[[int], DepthTrace]) -> tuple[DepthTrace, DepthTrace]:
        """Returns the traces of the first two depths in turn whose line the depth before them lies on. Raises NotLinear
        if there are none: an engine that keeps the blocks that it used last shows what it does with many from three or
        four on."""
        traces = [at(depth) for depth in self._depths[:2]]
        for depth in self._depths[2:]:
            traces.append(at(depth))
            try:
                check_linear(*traces[-3:])
            except NotLinear:
                if depth == self._depths[-1]:
                    raise
            else:
                break
        return traces[-2], traces[-1]

    def learn(
        self, workload: Workload, found: Mapping[tuple[str, int], StepCosts], pairs: Pairs, notes: Iterable[str]
    ) -> None:
        """Takes what another tracer found of the workload."""
        self._blocks_of(workload)  # forgets what was found of another one
        self.found.update(found)
        self.pairs.update(pairs)
        self.notes.update(dict.fromkeys(notes))

    def _blocks_of(self, workload: Workload) -> int:
        if self._blocks is None or self._blocks[0] is not workload:
            try:
                found = alike_blocks(workload)
            except Exception:  # code of models: the trace itself reports why it cannot be built
                found = 0
            self._blocks, self.found = (workload, found), {}
        return self._blocks[1]


def _unlike(
    run: RunConfig, machine: Machine, workload: Workload, stage_depths: Sequence[int], quick: bool
) -> list[int]:
    """Returns a rank of each kind: the first one, which has the largest shards; one of the last data rank, if its
    samples are of other lengths; the first one of each pipeline stage. quick: without the one of the last data rank,
    and of stages those that `Tracer.fullest_step_costs` names."""
    world, stages = run.world_size, run.engine.stages
    inner = stage_depths[1:-1]
    among = {0, stages - 1, *([1 + inner.index(max(inner))] if inner else [])} if quick else range(stages)
    first = {stage * (world // stages) for stage in among}
    share = run.data_parallel_size
    if not (quick or share == 1 or _same_batches(run, machine, workload, share)):
        first.add(world - world // (stages * share))
    return sorted(first)


def _same_batches(run: RunConfig, machine: Machine, workload: Workload, share: int) -> bool:
    """Returns whether the first and the last data rank have batches of the same shapes."""
    first, last = (shapes_of_batches(run, machine, workload, rank, share) for rank in (0, share - 1))
    return first is not None and first == last
