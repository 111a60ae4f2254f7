"""The costs of a deep model's step, from traces of the same model with fewer blocks.

A model of many blocks that are alike does the same for each of them. So its step is traced with a few blocks, and then
with one more: the changes of memory that the second trace has beside the first are those of one block, and are
repeated as often as the model has blocks more. Where a stretch of the step is not made of such repeats (an update of
all parameters at once), its highest level lies on a line through both traces. Operations and messages do the same.

A third depth shows whether that is so: it is predicted from the other two, and what is traced there has to be the
same. If it is not, the costs do not grow evenly with the depth, and the whole model has to be traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from drivetrain.plan.lines import on_line, totals
from drivetrain.plan.memory import memory_of
from drivetrain.plan.step_costs import StepCosts, StepMemory
from drivetrain.plan.timeline import Timeline, parts_on_line

DEPTHS = (2, 3, 4, 5)  # blocks, of which the first three in a row are taken that lie on a line
NEAR = 0.005  # of the predicted figure, by which the check may be off
# bytes that one call counts as: what a device moves, or a link sends, in about the time that it takes to start. Engines
# that fill buckets of one size make a call more now and then, which says nothing beside the gigabytes of a bucket
CALL_BYTES = {"operations": 2**25, "messages": 2**22}
NONE = 0.0, 0.0, 0.0


class NotLinear(ValueError):
    """The costs do not grow evenly with the number of blocks; the message names those that few do not predict."""


@dataclass(frozen=True)
class DepthTrace:
    """The trace of one step with so many blocks. timeline: a moment for each change of memory. whole: blocks of the
    whole model, or of the whole pipeline stage."""

    depth: int
    costs: StepCosts
    timeline: Timeline
    whole: int


@dataclass(frozen=True)
class _Stretch:
    """A stretch of one phase. before: bytes of each part alive before it, [PARTS]; levels: after each of its changes,
    [changes, PARTS]."""

    phase: str
    before: np.ndarray
    levels: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """Bytes that each change adds to each part, [changes, PARTS]."""
        return np.diff(self.levels, axis=0, prepend=self.before[np.newaxis])

    @property
    def highest(self) -> np.ndarray:
        """The parts where most is alive, [PARTS]."""
        return np.asarray(self.levels[self.levels.sum(axis=1).argmax()])


def check_linear(lowest: DepthTrace, lower: DepthTrace, upper: DepthTrace) -> None:
    """Raises NotLinear unless the first two traces predict the third one, as far as costs of the whole show it."""
    predicted = extrapolated(lowest, lower, upper.depth)
    # a wrong slope counts as often as there are blocks beyond the traced ones
    scale = (upper.whole - upper.depth) / (upper.depth - lower.depth)
    final = extrapolated(lower, upper, upper.whole)
    off = abs(predicted.memory.allocated - upper.costs.memory.allocated) * scale
    if off > NEAR * final.memory.allocated:
        raise NotLinear(f"its memory (it would have been {off / final.memory.allocated:.1%} off)")
    for name, call in CALL_BYTES.items():
        found, ends = totals(getattr(upper.costs, name)), totals(getattr(final, name))
        whole = sum(calls * call + moved for calls, _, moved in ends.values())
        for key, values in totals(getattr(predicted, name)).items():
            apart = [abs(own - other) * scale for own, other in zip(values, found.get(key, NONE), strict=True)]
            _, flops, moved = ends.get(key, values)
            if apart[0] * call > NEAR * whole or apart[1] > NEAR * max(flops, 1.0) or apart[2] > NEAR * max(moved, 1.0):
                raise NotLinear(f"its {name} ({' '.join(map(str, key[:2]))})")


def extrapolated(lower: DepthTrace, upper: DepthTrace, depth: int) -> StepCosts:
    """Returns the costs with `depth` blocks. Raises NotLinear where the steps of the two have other phases."""
    share = (depth - lower.depth) / (upper.depth - lower.depth)
    below, above = lower.costs, upper.costs
    return StepCosts(
        memory=replace(
            _memory(lower, upper, depth),
            window=below.memory.window,
            host=_on_line(below.memory.host, above.memory.host, share),
        ),
        operations=on_line(below.operations, above.operations, share),
        messages=on_line(below.messages, above.messages, share),
        trained_parameters=_on_line(below.trained_parameters, above.trained_parameters, share),
        tokens=below.tokens,
        stage_depths=below.stage_depths,
        origin="traced",
        seconds_taken=below.seconds_taken + above.seconds_taken,
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(lower: DepthTrace, upper: DepthTrace, depth: int) -> StepMemory:
    first, second = _stretches(lower.timeline), _stretches(upper.timeline)
    if [each.phase for each in first] != [each.phase for each in second]:
        raise NotLinear("the phases of its step")
    times, step = depth - lower.depth, upper.depth - lower.depth
    repeats = times // step if times % step == 0 else 0
    deeper = [_deeper(below, above, repeats, times / step) for below, above in zip(first, second, strict=True)]
    phases = [each.phase for each, levels in zip(first, deeper, strict=True) for _ in levels]
    return memory_of(Timeline(tuple(phases), np.concatenate(deeper)))


def _stretches(timeline: Timeline) -> list[_Stretch]:
    """Returns the stretches of a step, one for each run of changes in the same phase."""
    phases, parts = timeline.phases, timeline.parts
    return [_Stretch(phases[start], parts[max(0, start - 1)], parts[start:end]) for start, end in timeline.stretches()]


def _deeper(below: _Stretch, above: _Stretch, repeats: int, share: float) -> np.ndarray:
    """Returns the levels of a stretch at the depth asked for, [changes, PARTS]. repeats: how often what the second has
    beside the first is repeated; 0 where it is not in whole blocks."""
    before = parts_on_line(below.before, above.before, share)
    one, two = below.changes, above.changes
    more = len(two) - len(one)
    if more > 0 and repeats > 0:
        sizes = one.sum(axis=1), two.sum(axis=1)
        alike_in_front, alike_behind = _alike(*sizes), _alike(*(each[::-1] for each in sizes))
        if alike_in_front + alike_behind >= len(one):
            # anywhere between the two, the same change follows a repeat and precedes it
            at = (len(one) - alike_behind + alike_in_front) // 2
            own = np.tile(two[at : at + more], (repeats, 1))
            return np.asarray(before + np.concatenate([one[:at], own, one[at:]]).cumsum(axis=0))
    if more == 0 and (one.sum(axis=1) == two.sum(axis=1)).all():
        return np.asarray(before + one.cumsum(axis=0))
    return parts_on_line(below.highest, above.highest, share)[np.newaxis]


def _alike(one: np.ndarray, two: np.ndarray) -> int:
    """Returns how many values are the same from the start on."""
    shorter = min(len(one), len(two))
    differ = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(differ[0]) if differ.size else shorter


def _on_line(first: int, second: int, share: float) -> int:
    return round(first + (second - first) * share)
