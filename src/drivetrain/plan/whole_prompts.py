"""Cuts of a step whose samples the model makes: each prompt gives several, so that a step has not any number of them.

A trace of two samples cannot be had where a prompt gives eight. So a cut that is asked for is made of whole prompts: it
has more micro-batches of its size, or larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Cut


@dataclass(frozen=True)
class Prompts:
    """made: samples that one prompt gives a step, 1 where the data are the samples. ranks: of data, which share them.
    most: prompts of a step."""

    made: Fraction
    ranks: int
    most: int

    @classmethod
    def of_run(cls, run: RunConfig) -> Prompts:
        made = Fraction(run.workload.samples_made).limit_denominator(100_000)
        return cls(made, run.data_parallel_size, run.global_batch)

    def giving(self, samples: int) -> int:
        """Returns the most prompts that give no rank more than so many samples, or else the fewest that give one rank
        as many. `samples` of 1 are no prompt's where each gives 8: one prompt gives 8."""
        fewest = math.floor((samples - 1) * self.ranks / self.made) + 1
        return max(math.floor(samples * self.ranks / self.made), fewest)

    def share(self, prompts: int) -> int:
        """Returns the samples of the rank that has most."""
        return math.ceil(Fraction(math.ceil(prompts * self.made), self.ranks))

    def with_size(self, cut: Cut) -> Cut | None:
        """Returns the smallest cut with micro-batches of this size and at least as many samples, though all of a
        rank's samples are divided evenly; None where there is none."""
        first = self.giving(cut.samples)
        for prompts in range(first, max(first, self.most) + 1):
            found = Cut.of(self.share(prompts), cut.size)
            if math.ceil(found.samples / found.count) == cut.size:
                return found
        return None

    def with_count(self, cut: Cut) -> Cut:
        """Returns the cut with as many micro-batches and at least as many samples."""
        samples = self.share(self.giving(cut.samples))
        return Cut(math.ceil(samples / cut.count), cut.count, samples)

    def cuts(self, asked: Iterable[Cut], least: int) -> list[Cut]:
        """Returns cuts of whole prompts in place of others, each another one as far as the step has prompts. least: the
        size of those with several micro-batches of the smallest kind, which is kept."""
        found: list[Cut] = []
        for cut in asked:
            keeps_size = cut.size == least and cut.count > 1
            whole = self._whole(cut, keeps_size)
            while whole in found and self.giving(whole.samples) < self.most:
                more = self.share(self.giving(whole.samples) + 1)
                whole = self._whole(Cut(cut.size, cut.count, more), keeps_size)
            found.append(whole)
        return list(dict.fromkeys(found))

    def _whole(self, cut: Cut, keeps_size: bool) -> Cut:
        return (self.with_size(cut) if keeps_size else None) or self.with_count(cut)
