"""The runs that a search chooses among: engines, precisions, degrees of a mesh, recompute, micro-batches.

None of them changes the result of a step: the global batch is the user's, and the precision is one of those asked for.
What the run file or the command line sets is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.config import rules
from drivetrain.config.engines import ENGINE, EngineBlock
from drivetrain.config.machine import Machine
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem
from drivetrain.plan.derive import Cut, cuts_to_trace
from drivetrain.plan.whole_prompts import Prompts

# simplest first: of ways that are equally quick the first one is chosen
ENGINES: tuple[dict[str, Any], ...] = (
    {"name": "single"},
    {"name": "ddp"},
    {"name": "ddp", "shard_optimizer": True},
    {"name": "fsdp"},
    {"name": "fsdp", "reshard": False},
    *({"name": "deepspeed", "stage": stage} for stage in (1, 2, 3)),
)
SEARCHED = ("recompute", "offload_activations", "micro_batch_size", "processes", "nodes")
RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)


@dataclass(frozen=True)
class Space:
    """The open choices. engines: None stands for all that can be recommended. fixed: the fields of SEARCHED
    whose value is the user's, and is kept."""

    precisions: tuple[str, ...]
    engines: tuple[EngineBlock, ...] | None = None
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """A run whose micro-batch is open. rank: its place among ways that are equally quick: the simpler one comes
    first."""

    run: RunConfig
    samples: int  # of a rank, in a step
    sizes: tuple[int, ...]  # micro-batches to choose from
    rank: tuple[int, ...] = ()
    least: int = 1  # samples that the model takes at once

    @property
    def cuts(self) -> list[Cut]:
        """The cuts whose traces give those of every size, the smallest first."""
        return self.of_whole_prompts(cuts_to_trace(self.samples, self.run.engine.stages, self.least), self.least)

    def of_whole_prompts(self, cuts: Iterable[Cut], least: int) -> list[Cut]:
        """Returns cuts that a step can have in place of others: the same ones, unless the model makes the samples.
        least: the micro-batch that those of several small ones have."""
        return self._prompts.cuts(cuts, least)

    def own_cut(self, size: int) -> Cut:
        """Returns the cut that shows all that is held with a micro-batch, of few samples where that is enough."""
        _, whole = self.at(size)
        return self._prompts.with_size(whole.shortened(self.run.engine.stages)) or whole

    def from_least(self, least: int) -> Family | None:
        """Returns the family with micro-batches of at least so many samples, the last of a step included; None where
        there are none."""
        kept = tuple(size for size in self.sizes if size >= least and self.samples % size not in range(1, least))
        return replace(self, sizes=kept, least=least) if kept else None

    def at(self, size: int) -> tuple[RunConfig, Cut]:
        """Returns the run with a micro-batch, and how it cuts a rank's samples."""
        run = self.run.model_copy(update={"micro_batch_size": size})
        return run, Cut.of(self.samples, size)

    def traced_as(self, cut: Cut) -> RunConfig:
        """Returns the run that takes a cut which need not have all of a step's samples. Its batch is of prompts, where
        the model makes the samples."""
        batch = self._prompts.giving(cut.samples)
        return self.run.model_copy(update={"micro_batch_size": cut.size, "batch_size": batch})

    @property
    def _prompts(self) -> Prompts:
        return Prompts.of_run(self.run)

    @property
    def key(self) -> str:
        return self.run.model_dump_json(include={"engine", "precision", "processes", "nodes", *OPEN})

    def like(self, **changes: Any) -> str:
        """Returns the key of the family that differs from this one in these fields."""
        return replace(self, run=self.run.model_copy(update=changes)).key


OPEN = ("recompute", "offload_activations")


@dataclass(frozen=True)
class Refused:
    """A way that a rule refuses."""

    run: RunConfig
    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        return "; ".join(f"{each.field}: {each.why}" for each in self.problems)


@dataclass
class Families:
    possible: list[Family] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def families(base: RunConfig, space: Space, host: Machine, nodes: int, devices_per_node: int) -> Families:
    """Returns the ways of the space, those that rules refuse apart.

    base: the user's run, with the engine of its file. host: one of `nodes` machines with as many devices.
    """
    found = Families()
    base = with_global_batch(base, host)
    for place, (engine, processes, machines) in enumerate(_spread(base, space, host, nodes, devices_per_node)):
        for precision in space.precisions:
            for order, options in enumerate(_options(base, space)):
                update = {"engine": engine, "precision": precision, "processes": processes, "nodes": machines}
                run = base.model_copy(update={**update, **options, **_without_size(base, space)})
                run, problems = rules.judged(run, [], host)
                if problems:
                    found.refused.append(Refused(run, tuple(problems)))
                else:
                    found.possible.append(_family(run, space, (order, place)))
    return found


def with_global_batch(run: RunConfig, host: Machine) -> RunConfig:
    """Returns the run with its batch as a number over all of its own devices, since engines differ in how many share
    it. host: one machine, which decides the devices of a run that names none."""
    if run.batch_size is not None:
        return run
    own = resolved(run, host)
    if own.batch_size is None and own.batch_size_per_device is None:
        return run  # which the rules refuse
    return run.model_copy(update={"batch_size": own.global_batch, "batch_size_per_device": None})


def _without_size(base: RunConfig, space: Space) -> dict[str, Any]:
    return {} if "micro_batch_size" in space.fixed or base.micro_batch_tokens else {"micro_batch_size": None}


def _family(run: RunConfig, space: Space, rank: tuple[int, ...]) -> Family:
    samples = rank_samples(run)
    if "micro_batch_size" in space.fixed and run.micro_batch_limit is not None:
        return Family(run, samples, (min(run.micro_batch_limit, samples),), rank)
    return Family(run, samples, tuple(sizes(samples, run.engine.stages)), rank)


def rank_samples(run: RunConfig) -> int:
    """Returns the samples of a rank in a step, those that the model makes counted."""
    return -(-run.step_samples // run.data_parallel_size)


def sizes(samples: int, stages: int) -> list[int]:
    """Returns the micro-batches to choose from: powers of two and all samples; for a pipeline those that fill its
    stages."""
    largest = samples if stages == 1 else max(1, samples // stages)
    return [*(2**power for power in range((largest - 1).bit_length())), largest]


def _options(base: RunConfig, space: Space) -> Iterator[dict[str, Any]]:
    recompute = [base.recompute] if "recompute" in space.fixed else RECOMPUTE
    offload = base.offload_activations if "offload_activations" in space.fixed else False  # which no trace sees
    for again in recompute:
        yield {"recompute": again, "offload_activations": offload}


def _spread(
    base: RunConfig, space: Space, host: Machine, nodes: int, devices_per_node: int
) -> Iterator[tuple[EngineBlock, int | None, int]]:
    """Yields (engine, processes a node, nodes)."""
    is_fixed = "nodes" in space.fixed
    nodes = base.nodes if is_fixed else nodes
    for processes in _process_counts(base, space, host, devices_per_node):
        world = processes * nodes
        for engine in space.engines or (*_engines(nodes, processes), *meshes(world, processes)):
            if not engine.traits.spreads:
                if processes == max(_process_counts(base, space, host, devices_per_node)):
                    yield engine, None, nodes if is_fixed else 1
            elif world > 1 or space.engines is not None:
                yield engine, processes, nodes


def _process_counts(base: RunConfig, space: Space, host: Machine, devices_per_node: int) -> Sequence[int]:
    """Returns the ranks of a machine to try: one a device; on a CPU, whose ranks share its cores, powers of two."""
    if "processes" in space.fixed and base.processes is not None:
        return [base.processes]
    if host.device != "cpu":
        return [devices_per_node]
    return [2**power for power in range(1, host.cpu_cores.bit_length())] or [1]


def _engines(nodes: int, processes: int) -> Iterator[EngineBlock]:
    for block in ENGINES:
        yield ENGINE.validate_python(block)
    if nodes > 1 and processes > 1:
        yield ENGINE.validate_python({"name": "fsdp", "hybrid": processes})


def meshes(world: int, processes: int) -> Iterator[EngineBlock]:
    """Yields the meshes of tensor and pipeline degrees that are powers of two, tensor ranks within one machine, with
    replicas and with shards."""
    for tp, pp in _degrees(world, processes):
        dp = world // (tp * pp)
        for shard in (False, True) if dp > 1 else (False,):
            yield ENGINE.validate_python(
                {"name": "mesh", "pp": pp, "dp": dp if dp > 1 else None, "tp": tp, "shard": shard}
            )


def _degrees(world: int, processes: int) -> Iterator[tuple[int, int]]:
    powers = [2**power for power in range(world.bit_length())]
    for tp in (each for each in powers if each <= processes and processes % each == 0):
        for pp in (each for each in powers if tp * each > 1 and world % (tp * each) == 0):
            yield tp, pp
