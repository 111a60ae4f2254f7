"""The few short samples on which a spread model is compared with the whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drivetrain.data.loader import MicroBatch
from drivetrain.data.streams.endless import draws
from drivetrain.engines.mesh.topology import MeshPosition
from drivetrain.workloads.base import Batch, Workload

SHARES, SAMPLES, POSITIONS = 2, 2, 128  # data ranks that have samples in the trial, of how many positions at most


@dataclass(frozen=True)
class TrialSamples:
    """pieces: what the whole model computes one after the other. are_cut: each is one sample. own: the batch of this
    rank, which counts for nothing where the samples do not suffice for all ranks. counts: of each term, over all."""

    pieces: Sequence[MicroBatch]
    are_cut: bool
    own: MicroBatch
    counts: Mapping[str, int]


def trial_samples(workload: Workload, place: MeshPosition, sharded: bool) -> TrialSamples:
    """Takes training samples. sharded: parameters are, so that it matters which samples use which of them."""
    shares = min(place.dp, SHARES)
    loaded = [workload.train.load(index, 0) for index in draws(workload.train, SAMPLES * shares)]
    numbers = np.arange(len(loaded))
    dealt = [
        MicroBatch(_short(workload.collate(samples), workload), positions=numbers[rank::shares])
        for rank, samples in enumerate(loaded[rank::shares] for rank in range(shares))
        if samples
    ]
    pieces, are_cut = dealt, sharded and place.dp * place.cp > 1
    if are_cut:
        alone = [_short(workload.collate([sample]), workload) for sample in loaded]
        pieces = [MicroBatch(piece, positions=numbers[[number]]) for number, piece in enumerate(alone)]
    at = place.at["dp"]
    own = replace(dealt[at if at < len(dealt) else 0], counts=at < len(dealt))
    counts = [workload.counts(share.tensors) for share in dealt]
    return TrialSamples(
        pieces, are_cut, own, {name: max(1, sum(each[name] for each in counts)) for name in workload.terms}
    )


def _short(batch: Batch, workload: Workload) -> Batch:
    """Returns the piece of the samples with the most targets, if sequences may be cut."""
    pads = workload.by_position
    if not pads or any(t.ndim > 1 and name not in pads for name, t in batch.items()):
        return batch
    length = max(batch[name].shape[1] for name in pads)
    pieces = [
        {name: t[:, start : start + POSITIONS] if name in pads else t for name, t in batch.items()}
        for start in range(0, length, POSITIONS)
    ]
    return max(pieces, key=lambda piece: sum(workload.counts(piece).values()))
