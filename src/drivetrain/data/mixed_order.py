"""The order of one or several data sets whose samples are all there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from drivetrain.data.mixture import Phase, epoch_of
from drivetrain.data.order import GlobalOrder, MixturePart, Order, PhasedOrder
from drivetrain.data.streams.mixture import Mix


def mixed_order(sizes: Sequence[int], mix: Mix, batch_size: int, seed: int) -> Order:
    """Returns the order. sizes: samples of each data set. Without weights each sample comes once an epoch."""
    if mix.phases is None:
        return GlobalOrder(sum(sizes), batch_size, seed)
    epoch = epoch_of(sizes, mix.phases[0].weights, mix.kind, mix.most_passes)
    ends = pairwise([0, *accumulate(sizes)])
    parts = [MixturePart(start, stop, count) for (start, stop), count in zip(ends, epoch.counts, strict=True)]
    if len(mix.phases) == 1:
        return GlobalOrder(epoch.samples, batch_size, seed, parts)
    phases = [Phase(0, tuple(map(float, epoch.counts))), *mix.phases[1:]]
    return PhasedOrder(parts, phases, batch_size, seed, epoch.samples)
