"""Memory over a step, moment by moment, and what it is made of at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, get_args

import numpy as np

MemoryPart = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "engine", "temporaries"]
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
ACTIVATIONS, TEMPORARIES = PARTS.index("activations"), PARTS.index("temporaries")
POINTS, MOST = 240, 4000  # moments of a timeline that is shown, and of one that others are derived from


@dataclass(frozen=True, eq=False)
class Timeline:
    """The moments of a step in order.

    phases: of each moment. parts: bytes alive at each, [moments, PARTS], in the order of PARTS.
    """

    phases: tuple[str, ...]
    parts: np.ndarray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return self.phases == other.phases and np.array_equal(self.parts, other.parts)

    def __hash__(self) -> int:
        return hash(self.phases)

    @property
    def allocated(self) -> np.ndarray:
        """Bytes alive at each moment, [moments]."""
        return np.asarray(self.parts.sum(axis=1))

    @property
    def peak(self) -> int:
        """The first of the moments at which most is alive."""
        return int(self.allocated.argmax())

    def parts_at(self, moment: int) -> dict[MemoryPart, int]:
        """Returns the bytes of each part that is there at a moment."""
        return parts_of(self.parts[moment])

    def at(self, moments: Sequence[int]) -> Timeline:
        """Returns some of the moments."""
        return Timeline(tuple(self.phases[moment] for moment in moments), self.parts[list(moments)])

    def stretches(self) -> list[tuple[int, int]]:
        """Returns the first moment of each run of moments in one phase, and the one after its last."""
        found, start = [], 0
        for _, moments in groupby(self.phases):
            end = start + sum(1 for _ in moments)
            found.append((start, end))
            start = end
        return found

    def thinned(self, points: int = POINTS) -> Timeline:
        """Returns so many moments at the most, or one of each stretch of a phase: each stretch in equally many parts,
        of each part the highest moment. So two steps of the same stretches have moments that belong together, however
        many each had; a part that would be shorter than a moment has that one."""
        if len(self.phases) <= points:
            return self
        stretches = self.stretches()
        each = max(1, points // len(stretches))
        return self._highest([part for stretch in stretches for part in _parts(*stretch, each)])

    def highest_of_stretches(self) -> Timeline:
        """Returns the highest moment of each run of moments in one phase."""
        return self._highest(self.stretches())

    def highest_of_phases(self) -> Timeline:
        """Returns the highest moment of each phase, in the order in which phases first come."""
        allocated, found = self.allocated, dict[str, int]()
        for moment, phase in enumerate(self.phases):
            if phase not in found or allocated[moment] > allocated[found[phase]]:
                found[phase] = moment
        return self.at([*found.values()])

    def without_a_micro_batch(self) -> Timeline:
        """Returns a pipeline's timeline without the first forward pass that follows a backward pass, and without the
        backward pass after it: that of as many micro-batches less one. The same moments where there is none."""
        stretches = self.stretches()
        names = [self.phases[start] for start, _ in stretches]
        for place in range(1, len(names) - 1):
            if names[place - 1 : place + 2] == ["backward", "forward", "backward"]:
                kept = [*range(stretches[place][0]), *range(stretches[place + 1][1], len(self.phases))]
                return self.at(kept)
        return self

    def with_more(self, part: MemoryPart, size: int) -> Timeline:
        """Returns the same moments with so many bytes more of a part at each."""
        more = np.zeros(len(PARTS), dtype=np.int64)
        more[PARTS.index(part)] = size
        return Timeline(self.phases, self.parts + more)

    def as_object(self) -> dict[str, Any]:
        """Returns the moments as JSON holds them: {"phases": [...], "parts": {part: bytes at each moment}}."""
        columns = zip(PARTS, self.parts.T, strict=True)
        return {"phases": list(self.phases), "parts": {part: sizes.tolist() for part, sizes in columns if sizes.any()}}

    def _highest(self, cuts: Sequence[tuple[int, int]]) -> Timeline:
        allocated = self.allocated
        return self.at([start + int(allocated[start:end].argmax()) for start, end in cuts])


NOTHING = Timeline((), np.zeros((0, len(PARTS)), dtype=np.int64))


def _parts(start: int, end: int, number: int) -> list[tuple[int, int]]:
    """Returns the first moment of each of so many equal parts of a stretch, and the one after its last."""
    places = [start + (end - start) * place // number for place in range(number + 1)]
    return [(min(first, end - 1), max(after, first + 1)) for first, after in pairwise(places)]


def parts_of(sizes: np.ndarray) -> dict[MemoryPart, int]:
    """Returns the bytes of each part that is there, of [PARTS]."""
    return {part: int(size) for part, size in zip(PARTS, sizes, strict=True) if size}


def parts_on_line(below: np.ndarray, above: np.ndarray, share: float) -> np.ndarray:
    """Returns parts on the line through two moments' parts, or of several each: 0 is at the first, 1 at the second.

    Their sum lies on the line too, and is never negative: what parts that end at nothing would lack is taken from the
    activations, and then from the temporaries.
    """
    allocated = np.maximum(0, _between(below.sum(axis=-1), above.sum(axis=-1), share))
    parts = np.maximum(0, _between(below, above, share))
    for place in (ACTIVATIONS, TEMPORARIES):
        parts[..., place] = np.maximum(0, parts[..., place] + allocated - parts.sum(axis=-1))
    return parts


def _between(below: np.ndarray, above: np.ndarray, share: float) -> np.ndarray:
    return np.rint(below + (above - below) * share).astype(np.int64)
