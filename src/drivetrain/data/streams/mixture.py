"""Streamed data sets as the samples of a training: one, or several in a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from drivetrain.data.mixture import Phase, epoch_of
from drivetrain.data.order import DrawnOrder
from drivetrain.data.streams.endless import Endless


class StreamedSet(Protocol):
    """Samples of one data set by draw. known: the number of samples of a pass, if it is known."""

    @property
    def title(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def count(self) -> int: ...

    def load(self, draw: int) -> Any: ...


@dataclass(frozen=True)
class Mix:
    """The way several sets are drawn. phases: None if each sample comes once an epoch."""

    phases: Sequence[Phase] | None = None
    kind: str = "concat"
    most_passes: Sequence[float | None] | None = None

    @property
    def in_words(self) -> str:
        """Returns a text of everything that decides the order beside the samples, the seed and the batch."""
        if self.phases is None:
            return "each sample once an epoch"
        weights = [f"{':'.join(f'{each:g}' for each in own.weights)} from step {own.start}" for own in self.phases]
        passes = [most for most in self.most_passes or [] if most is not None]
        return f"{self.kind} {', '.join(weights)}" + (f", max_passes {list(self.most_passes or [])}" if passes else "")


class StreamedMixture(Endless):
    def __init__(self, sets: Sequence[StreamedSet], mix: Mix) -> None:
        self.sets, self._mix = sets, mix

    def __len__(self) -> int:
        return sum(each.count() for each in self.sets)

    def load(self, index: int, epoch: int) -> Any:
        del epoch
        draw, number = divmod(index, len(self.sets))
        return self.sets[number].load(draw)

    @property
    def identity(self) -> str:
        return blake2b(repr([*(each.identity for each in self.sets), self._mix]).encode(), digest_size=6).hexdigest()

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> DrawnOrder:
        """Returns the order. Sets without weights are counted in any case: the share of each is its share of the
        samples."""
        if len(self.sets) == 1:
            return DrawnOrder([Phase(0, (1.0,))], batch_size, seed, len(self) if by_epochs else None)
        phases = self._mix.phases
        if phases is None or by_epochs:
            sizes = [each.count() for each in self.sets]
            first = phases[0].weights if phases else [float(size) for size in sizes]
            epoch = epoch_of(sizes, first, self._mix.kind, self._mix.most_passes)
            taken = Phase(0, tuple(map(float, epoch.counts)))
            return DrawnOrder([taken, *(phases or [])[1:]], batch_size, seed, epoch.samples if by_epochs else None)
        return DrawnOrder(phases, batch_size, seed, None)
