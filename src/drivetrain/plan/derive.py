"""Derives the costs of a step from traces of the same run with other micro-batches.

Memory: each stretch of the step's timeline holds bytes that do not depend on the micro-batch, and bytes in proportion
to it. So two traces give a line for each stretch, and the peak is the highest of them: piecewise linear, as the peak
moves from the optimizer's update to the backward pass. (Extrapolating the peak itself is badly wrong there.)

Operations and messages: a share of a step (the update), a share of each micro-batch (weights are read, blocks are
gathered), a share of each sample, and one of each sample for each other of its micro-batch: a fused loss cuts the
vocabulary into as many more slabs as there are samples, and reads all samples for each slab. Four traces give the four.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory
from drivetrain.plan.timeline import NOTHING, PARTS, Timeline, parts_of, parts_on_line

Key = tuple[str, ...]
Item = TypeVar("Item", Operations, Messages)


@dataclass(frozen=True)
class Cut:
    """A rank's samples of a step: `count` micro-batches of at most `size` samples, `samples` in all."""

    size: int
    count: int
    samples: int

    @classmethod
    def of(cls, samples: int, size: int) -> Cut:
        return cls(size, math.ceil(samples / size), samples)

    def shortened(self, stages: int) -> Cut:
        """Returns a cut of the same micro-batch, with no more of them than show all that is held at once."""
        full = full_count(stages)
        return self if self.count <= full else Cut(self.size, full, self.size * full)


def full_count(stages: int) -> int:
    """Returns how many micro-batches show all that a step holds at once: as many as a pipeline has under way, and one
    more, in whose forward pass the first one's gradients are there."""
    return stages + 1


def cuts_to_trace(samples: int, stages: int, least: int = 1) -> list[Cut]:
    """Returns the cuts whose traces give those of `samples` samples a rank: at most four. least: samples that the model
    takes at once.

    """
    full = full_count(stages)
    if samples < full * least:
        return [Cut(1, samples, samples) if least == 1 else Cut(samples, 1, samples)]
    large = samples // full
    cuts = [Cut(least, full, least * full), Cut(large, full, large * full)]
    cuts.append(Cut(samples, 1, samples) if stages == 1 else Cut(least, full + 1, least * (full + 1)))
    if stages == 1:
        cuts.append(Cut(least, 1, least))
    elif large == least:  # the first two are one
        cuts.append(Cut(2 * least, full, 2 * least * full))
    return list(dict.fromkeys(cuts))


class Derivation:
    """The costs of one run at any cut, from its traces at some."""

    def __init__(self, traced: Mapping[Cut, StepCosts], stages: int = 1) -> None:
        self._traced = dict(traced)
        ranks = set.intersection(*({*costs.by_rank} for costs in traced.values()))
        self._ranks = {rank: _OfOneRank({cut: traced[cut].by_rank[rank] for cut in traced}, stages) for rank in ranks}
        self._one = _OfOneRank(self._traced, stages)

    def at(self, cut: Cut) -> StepCosts:
        """Returns the traced costs where this cut was traced, else derived ones: stages of a pipeline have lines of
        their own, and at another micro-batch another one may be the fullest."""
        if cut in self._traced:
            return self._traced[cut]
        found = {rank: self._ranks[rank].at(cut) for rank in sorted(self._ranks)}
        fullest = max(found.values(), key=lambda costs: costs.memory.allocated, default=None)
        return self._one.at(cut) if fullest is None else replace(fullest, by_rank=found)


class _OfOneRank:
    """The costs of one rank at any cut, from its traces at some."""

    def __init__(self, traced: Mapping[Cut, StepCosts], stages: int) -> None:
        self._traced, self._full = dict(traced), full_count(stages)

    def at(self, cut: Cut) -> StepCosts:
        nearest = min(self._traced, key=lambda each: abs(math.log(each.samples / each.count * cut.count / cut.samples)))
        like = self._traced[nearest]
        tokens = None if like.tokens is None else round(like.tokens * cut.samples / nearest.samples)
        return StepCosts(
            memory=self._memory(cut, like.memory.window / nearest.samples),
            operations=self._operations(cut, like.operations),
            messages=self._messages(cut, like.messages),
            trained_parameters=like.trained_parameters,
            tokens=tokens,
            origin="derived",
            seconds_taken=0.0,
            stage_depths=like.stage_depths,
        )

    def _memory(self, cut: Cut, sample: float) -> StepMemory:
        """A step's samples are there from its beginning, and a pipeline has buffers for each micro-batch: a trace of
        one micro-batch more than are under way shows the bytes of both. sample: bytes of one."""
        alike = {each: costs for each, costs in self._traced.items() if self._depth(each) == self._depth(cut)}
        memories = {each: costs.memory for each, costs in (alike or self._traced).items()}
        each = sample
        for one, two in itertools.permutations(memories, 2):
            if one.size == two.size and self._full <= one.count < two.count:
                each = (memories[two].allocated - memories[one].allocated) / (two.samples - one.samples)
        fewest = {known.size: known for known in sorted(memories, key=lambda known: -known.count)}
        memory = self._on_its_line(cut, {size: memories[known] for size, known in fewest.items()})
        there = _value_at(cut.size, {size: self._beyond_depth(known) for size, known in fewest.items()})
        more = max(0.0, self._beyond_depth(cut) - there)
        if 1 < cut.count == self._full - 1 and all(known.count > cut.count for known in memories):
            memory, more = _without_a_micro_batch(memory), -cut.size - there
        return self._with_samples(cut, memory, round(each * more), sample)

    @staticmethod
    def _on_its_line(cut: Cut, sizes: Mapping[int, StepMemory]) -> StepMemory:
        """sizes: the memory of one rank by micro-batch."""
        if cut.size in sizes or len(sizes) == 1:
            return sizes.get(cut.size) or next(iter(sizes.values()))
        below, above = _around(cut.size, sorted(sizes))
        return between(sizes[below], sizes[above], (cut.size - below) / (above - below))

    @staticmethod
    def _with_samples(cut: Cut, memory: StepMemory, more: int, sample: float) -> StepMemory:
        """Adds the bytes of samples beyond those that were traced. sample: the bytes of one itself."""
        return StepMemory(
            allocated=memory.allocated + more,
            reserved=memory.reserved + more,
            parts={**memory.parts, "activations": memory.parts.get("activations", 0) + more},
            timeline=memory.timeline.with_more("activations", more),
            window=round(sample * cut.samples),
            host=memory.host,
        )

    def _depth(self, cut: Cut) -> int:
        """Returns how many micro-batches show all that the step holds at once."""
        return min(cut.count, self._full)

    def _beyond_depth(self, cut: Cut) -> int:
        """Returns the samples of a step beyond those of the micro-batches that show all that it holds at once."""
        return max(0, cut.samples - self._depth(cut) * cut.size)

    def _operations(self, cut: Cut, like: Sequence[Operations]) -> tuple[Operations, ...]:
        found: list[Operations] = []
        for key, group in _grouped(like).items():
            calls, flops, moved = self._rates(cut, key, group, ("calls", "flops", "bytes"))
            found += [
                replace(each, calls=_times(each.calls, calls), flops=each.flops * flops, bytes=each.bytes * moved)
                for each in group
            ]
        return tuple(found)

    def _messages(self, cut: Cut, like: Sequence[Messages]) -> tuple[Messages, ...]:
        found: list[Messages] = []
        for key, group in _grouped(like).items():
            calls, sent = self._rates(cut, key, group, ("calls", "bytes"))
            found += [replace(each, calls=_times(each.calls, calls), bytes=each.bytes * sent) for each in group]
        return tuple(found)

    def _rates(self, cut: Cut, key: Key, group: Sequence[Item], quantities: Sequence[str]) -> list[float]:
        """Returns for each quantity the derived total over that of the group, which stands for it. Updates are made
        once a step, whatever the cut."""
        if key[0] == "optimizer":
            return [1.0 for _ in quantities]
        return [self._rate(cut, key, sum(getattr(each, name) for each in group), name) for name in quantities]

    def _rate(self, cut: Cut, key: Key, held: float, quantity: str) -> float:
        if not held:
            return 1.0
        rows = np.array([_shared_by(each) for each in self._traced])
        if np.linalg.matrix_rank(rows) < rows.shape[1]:  # too few traces to tell the last one apart
            rows = rows[:, :-1]
        values = np.array([_total(costs, key, quantity) for costs in self._traced.values()])
        shares, *_ = np.linalg.lstsq(rows, values, rcond=None)
        return max(0.0, float(shares @ _shared_by(cut)[: rows.shape[1]])) / held


def _shared_by(cut: Cut) -> list[float]:
    """Returns what the work of a step is a sum of shares of: the step, micro-batches, samples, and samples for each one
    of their micro-batch."""
    return [1.0, cut.count, cut.samples, cut.samples * cut.size]


def _without_a_micro_batch(memory: StepMemory) -> StepMemory:
    """Returns the memory of a pipeline that has as many micro-batches as stages, from that of one more: no forward pass
    comes after a backward pass on its first stage, and so none where there are gradients."""
    timeline = memory.timeline.without_a_micro_batch()
    if len(timeline.phases) == len(memory.timeline.phases):
        return memory
    parts = timeline.parts_at(timeline.peak)
    allocated = sum(parts.values())
    reserved = max(allocated, round(allocated * memory.reserved / max(1, memory.allocated)))
    return replace(memory, allocated=allocated, reserved=reserved, parts=parts, timeline=timeline)


def between(below: StepMemory, above: StepMemory, share: float) -> StepMemory:
    """Returns the memory on the line through two traces: `share` is 0 at the first and 1 at the second; others lie
    beyond.

    Stretch by stretch where both timelines have the same; else by their phases; else on the chord, which convexity
    makes an upper bound between them.
    """
    slack = _on_ratio(below.reserved / max(1, below.allocated), above.reserved / max(1, above.allocated), share)
    whole = below.timeline, above.timeline
    for one, two in (whole, tuple(each.highest_of_stretches() for each in whole)):
        if one.phases and one.phases == two.phases:
            timeline = Timeline(one.phases, parts_on_line(one.parts, two.parts, share))
            parts = timeline.parts_at(timeline.peak)
            break
    else:
        timeline = NOTHING
        one_peak, other_peak = (np.array([each.parts.get(part, 0) for part in PARTS]) for each in (below, above))
        parts = parts_of(parts_on_line(one_peak, other_peak, share))
    allocated = sum(parts.values())
    host = max(0, round(below.host + (above.host - below.host) * share))
    return StepMemory(allocated, max(allocated, round(allocated * slack)), parts, timeline, host=host)


def _on_ratio(first: float, second: float, share: float) -> float:
    return max(1.0, first + (second - first) * min(1.0, max(0.0, share)))


def _value_at(size: int, known: Mapping[int, float]) -> float:
    """Returns the value at a size, on the line through those of its neighbours among the known sizes."""
    if size in known or len(known) == 1:
        return known.get(size, next(iter(known.values())))
    below, above = _around(size, sorted(known))
    return known[below] + (known[above] - known[below]) * (size - below) / (above - below)


def _around(size: int, known: Sequence[int]) -> tuple[int, int]:
    """Returns the neighbours among the known sizes; beyond them the last two."""
    place = min(max(1, int(np.searchsorted(known, size))), len(known) - 1)
    return known[place - 1], known[place]


def _key(each: Operations | Messages) -> Key:
    if isinstance(each, Operations):
        return each.kind, each.dtype
    return each.collective, each.axis, str(each.ranks), str(each.stride)


def _grouped(items: Iterable[Item]) -> dict[Key, list[Item]]:
    found: dict[Key, list[Item]] = {}
    for each in items:
        found.setdefault(_key(each), []).append(each)
    return found


def _total(costs: StepCosts, key: Key, quantity: str) -> float:
    items: list[Operations | Messages] = [*costs.operations, *costs.messages]
    return float(sum(getattr(each, quantity) for each in items if _key(each) == key))


def _times(calls: int, rate: float) -> int:
    return max(1, round(calls * rate))
