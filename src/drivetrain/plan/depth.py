"""The costs of a deep model's step, from traces of the same model with fewer blocks.

A model of many blocks that are alike does the same for each of them. So its step is traced with a few blocks, and then
with one more: the changes of memory that the second trace has beside the first are those of one block, and are
repeated as often as the model has blocks more. Where a stretch of the step is not made of such repeats (an update of
all parameters at once), its highest level lies on a line through both traces. Operations and messages do the same.

A third depth shows whether that is so: it is predicted from the other two, and what is traced there has to be the
same. If it is not, the costs do not grow evenly with the depth, and the whole model has to be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from drivetrain.plan.lines import on_line, totals
from drivetrain.plan.memory import Levels, thinned
from drivetrain.plan.step_costs import MemoryPart, StepCosts, StepMemory

DEPTHS = (2, 3, 4, 5)  # blocks, of which the first three in a row are taken that lie on a line
NEAR = 0.005  # of the predicted figure, by which the check may be off
# bytes that one call counts as: what a device moves, or a link sends, in about the time that it takes to start. Engines
# that fill buckets of one size make a call more now and then, which says nothing beside the gigabytes of a bucket
CALL_BYTES = {"operations": 2**25, "messages": 2**22}
NONE = 0.0, 0.0, 0.0


class NotLinear(ValueError):
    """The costs do not grow evenly with the number of blocks; the message says which."""


@dataclass(frozen=True)
class DepthTrace:
    """The trace of one step with so many blocks."""

    depth: int
    costs: StepCosts
    levels: Levels


@dataclass(frozen=True)
class _Stretch:
    """A stretch of one phase: the bytes alive before it, and after each of its changes."""

    phase: str
    start: int  # its place among the points
    before: int
    levels: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        return np.diff(self.levels, prepend=self.before)


def check_linear(lowest: DepthTrace, lower: DepthTrace, upper: DepthTrace, depth: int) -> None:
    """Raises NotLinear unless the first two traces predict the third one, as far as costs at `depth` show it."""
    predicted = extrapolated(lowest, lower, upper.depth)
    # a wrong slope counts as often as there are blocks beyond the traced ones
    scale = (depth - upper.depth) / (upper.depth - lower.depth)
    final = extrapolated(lower, upper, depth)
    off = abs(predicted.memory.allocated - upper.costs.memory.allocated) * scale
    if off > NEAR * final.memory.allocated:
        raise NotLinear(f"its memory ({off / final.memory.allocated:.1%} off)")
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
        memory=replace(_memory(lower, upper, depth), window=below.memory.window),
        operations=on_line(below.operations, above.operations, share),
        messages=on_line(below.messages, above.messages, share),
        trained_parameters=_on_line(below.trained_parameters, above.trained_parameters, share),
        tokens=below.tokens,
        origin="traced",
        seconds_taken=below.seconds_taken + above.seconds_taken,
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(lower: DepthTrace, upper: DepthTrace, depth: int) -> StepMemory:
    first, second = _stretches(lower.levels), _stretches(upper.levels)
    if [each.phase for each in first] != [each.phase for each in second]:
        raise NotLinear("the phases of its step")
    times, share = depth - lower.depth, (depth - lower.depth) / (upper.depth - lower.depth)
    step = upper.depth - lower.depth
    points: list[tuple[str, int]] = []
    peak = -1
    for below, above in zip(first, second, strict=True):
        levels, place = _deeper(below, above, times // step if times % step == 0 else 0, share)
        if levels.size and (highest := int(levels.max())) > peak:
            at = int(levels.argmax())
            low, high = place(at)
            peak, where = highest, (below.start + low, above.start + high)
        points += [(below.phase, int(level)) for level in levels]
    parts = _parts(lower.levels.parts_at(where[0]), upper.levels.parts_at(where[1]), share, peak)
    return StepMemory(peak, peak, parts, thinned(points))


def _stretches(levels: Levels) -> list[_Stretch]:
    """Returns the stretches of a step, one for each run of changes in the same phase."""
    found: list[_Stretch] = []
    start, points = 0, levels.points
    for place in range(1, len(points) + 1):
        if place == len(points) or points[place][0] != points[start][0]:
            own = np.array([size for _, size in points[start:place]], dtype=np.int64)
            before = points[start - 1][1] if start else int(own[0])
            found.append(_Stretch(points[start][0], start, before, own))
            start = place
    return found


def _deeper(
    below: _Stretch, above: _Stretch, repeats: int, share: float
) -> tuple[np.ndarray, Callable[[int], tuple[int, int]]]:
    """Returns the levels of a stretch at the depth asked for, and which change of each trace a place among them is
    like. repeats: how often what the second has beside the first is repeated; 0 where it is not in whole blocks."""
    before = _on_line(below.before, above.before, share)
    one, two = below.changes, above.changes
    more = len(two) - len(one)
    if more > 0 and repeats > 0:
        alike_in_front, alike_behind = _alike(one, two), _alike(one[::-1], two[::-1])
        if alike_in_front + alike_behind >= len(one):
            # anywhere between the two, the same change follows a repeat and precedes it
            at = (len(one) - alike_behind + alike_in_front) // 2
            own = np.tile(two[at : at + more], repeats)
            levels = before + np.cumsum(np.concatenate([one[:at], own, one[at:]]))
            return levels, lambda place: _like(place, len(levels), len(one), len(two))
    if more == 0 and (one == two).all():
        return before + np.cumsum(one), lambda place: (place, place)
    low, high = int(below.levels.argmax()), int(above.levels.argmax())
    return np.array([_on_line(int(below.levels[low]), int(above.levels[high]), share)]), lambda _: (low, high)


def _alike(one: np.ndarray, two: np.ndarray) -> int:
    """Returns how many values are the same from the start on."""
    shorter = min(len(one), len(two))
    differ = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(differ[0]) if differ.size else shorter


def _like(place: int, length: int, below: int, above: int) -> tuple[int, int]:
    """Returns the changes that stand at the same distance from the nearer end of their stretch."""
    behind = length - place
    if place < behind:
        return min(place, below - 1), min(place, above - 1)
    return max(0, below - behind), max(0, above - behind)


def _parts(
    below: Mapping[MemoryPart, int], above: Mapping[MemoryPart, int], share: float, peak: int
) -> dict[MemoryPart, int]:
    names = dict.fromkeys([*below, *above])
    parts = {name: max(0, _on_line(below.get(name, 0), above.get(name, 0), share)) for name in names}
    rest = peak - sum(parts.values())
    takes: MemoryPart = "temporaries" if parts.get("temporaries", 0) >= -rest else "activations"
    parts[takes] = max(0, parts.get(takes, 0) + rest)
    return parts


def _on_line(first: int, second: int, share: float) -> int:
    return round(first + (second - first) * share)
