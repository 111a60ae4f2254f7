"""The loss of one window: counts of the whole global batch, statistics of it, and each micro-batch's part of the mean.

Each term's local sum is divided by its own count over the whole global batch, which was all-reduced over the data
ranks; the parts of all micro-batches and ranks then add up to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from drivetrain.data.loader import MicroBatch
from drivetrain.data.streams.endless import draws
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError
from drivetrain.memory.transfers import sent
from drivetrain.workloads.base import Workload, few
from drivetrain.workloads.loss_contract import Partial, Statistics

Counts = Callable[[], "Sequence[int] | Tensor"]  # one number a term, in the order of the workload's terms


def own_counts(workload: Workload, micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Returns this rank's count of each term, over a window's micro-batches."""
    found = [workload.counts(batch.tensors) for batch in micro_batches if batch.counts]
    return [sum(counts[name] for counts in found) for name in workload.terms]


def global_counts(
    own: Sequence[int], data_world: int, counts: bool, ranks: Communicator, device: torch.device
) -> Counts:
    """Returns each term's count over the global batch. The sum runs in the background; on several GPUs it stays there,
    so that the host does not wait for it. counts: whether this rank's samples are its alone to count."""
    if data_world == 1:
        return lambda: [max(1, count) for count in own]
    mine = sent(torch.tensor(own if counts else [0] * len(own)), device)
    summed = ranks.sum_soon(mine)
    return lambda: summed().clamp(min=1)


class WindowLoss:
    """Divides the sums of a window's micro-batches."""

    def __init__(self, workload: Workload, counts: Counts, device: torch.device) -> None:
        self._weights, self._counts = workload.terms, counts
        self.shares = torch.zeros(len(self._weights), device=device) if len(self._weights) > 1 else None

    def part(self, sums: Mapping[str, Tensor], counts: bool) -> Tensor:
        """Returns a micro-batch's part of the loss (scalar). counts: False for a filler, whose gradient is 0."""
        divisors = self._counts()
        means = [sums[name] / divisors[number] for number, name in enumerate(self._weights)]
        if self.shares is not None and counts:
            self.shares += torch.stack([mean.detach().float() for mean in means])
        weighted = [
            mean if weight == 1 else mean * weight for mean, weight in zip(means, self._weights.values(), strict=True)
        ]
        loss = weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()
        return loss if counts else loss * 0


Joined = tuple[dict[str, Tensor], dict[str, Tensor], list[int]]  # sums, rows, and where the rows stand


def gathered_statistics(
    partials: Sequence[Partial],
    micro_batches: Sequence[MicroBatch],
    counts: bool,
    ranks: Communicator,
    device: torch.device,
) -> list[Statistics]:
    """Returns statistics of the global batch for each micro-batch's loss. All ranks call it together.

    counts: whether this rank's samples are its alone to count.
    """
    own = joined_partials(partials, micro_batches) if counts else ({}, {}, [])
    return combined(ranks.all_gather(own), micro_batches, device)


def joined_partials(partials: Sequence[Partial], micro_batches: Sequence[MicroBatch]) -> Joined:
    """Returns one rank's sums, in double precision, and its rows one below the other."""
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    positions: list[int] = []
    for partial, batch in zip(partials, micro_batches, strict=True):
        if not batch.counts:
            continue
        for name, value in partial.sums.items():
            value = value.detach().double().cpu()
            sums[name] = value if name not in sums else sums[name] + value
        for name, value in partial.rows.items():
            rows.setdefault(name, []).append(value.detach().cpu())
        if batch.positions is not None:
            positions += batch.positions.tolist()
    return sums, {name: torch.cat(values) for name, values in rows.items()}, positions


def combined(everyone: Sequence[Joined], micro_batches: Sequence[MicroBatch], device: torch.device) -> list[Statistics]:
    """Joins the statistics of all ranks. Raises RunError if a workload returns no row for a sample.

    Sums are added in the order of the ranks, so that all have the same bits; rows come in that of the global batch.
    """
    sums: dict[str, Tensor] = {}
    for summed, _, _ in everyone:
        for name, value in summed.items():
            sums[name] = value if name not in sums else sums[name] + value
    order = torch.tensor([place for _, _, positions in everyone for place in positions], dtype=torch.int64)
    rows = {}
    for name in next((gathered for _, gathered, _ in everyone if gathered), {}):
        found = torch.cat([gathered[name] for _, gathered, _ in everyone if gathered])
        if len(found) != len(order):
            raise RunError(f"the statistic {name} has {len(found)} rows, of a global batch of {len(order)} samples")
        rows[name] = found[order.argsort()]
    whole = {name: sent(value.float(), device) for name, value in sums.items()}
    ordered = {name: sent(value, device) for name, value in rows.items()}
    return [Statistics(whole, ordered, _own(batch, device)) for batch in micro_batches]


def _own(batch: MicroBatch, device: torch.device) -> Tensor | None:
    """Returns the positions; a filler repeats any sample of the global batch."""
    if not batch.counts:
        return torch.zeros(len(next(iter(batch.tensors.values()))), dtype=torch.int64, device=device)
    return None if batch.positions is None else sent(torch.from_numpy(batch.positions), device)


def few_samples(workload: Workload, count: int = 2) -> MicroBatch:
    """Returns the first samples as a micro-batch, each one also a sample of the global batch."""
    tensors = few(workload, count)
    return MicroBatch(tensors, positions=np.arange(len(draws(workload.train, count))))
