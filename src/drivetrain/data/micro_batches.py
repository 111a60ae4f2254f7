"""How a global batch is cut: into the ranks' shares, and each share into micro-batches.

Any cut gives the same step, because losses are sums divided by the count of the whole batch. So a cut may follow the
samples' lengths: micro-batches of like length need little padding, while the batch stays a random one. (Batches made of
like lengths need as little, but are no random ones: docs/speed.md says what that costs in accuracy.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MOST_MORE = 12  # micro-batches beyond those that the bound asks for
MOST_CANDIDATES = 256  # places at which a share may be cut; more would take longer than they win


def rank_share(indices: np.ndarray, data_rank: int, data_world: int) -> np.ndarray:
    """The samples of a global batch that one data rank takes: every world-th one, so that lengths spread evenly."""
    return indices[data_rank::data_world]


@dataclass(frozen=True)
class Lengths:
    """Of each sample, and what a micro-batch costs beside its (padded) tokens, in tokens."""

    tokens: np.ndarray
    overhead: int


@dataclass(frozen=True)
class Slice:
    """One rank's part of each global batch, in micro-batches of at most micro_batch_size samples.

    All ranks get as many; where a ragged batch leaves a rank short of a sample, one may be empty.
    """

    data_rank: int
    data_world: int
    micro_batch_size: int
    lengths: Lengths | None = None

    def pieces(self, indices: np.ndarray) -> list[np.ndarray]:
        """Of near-equal size, or by length."""
        if self.lengths is None:
            share = rank_share(indices, self.data_rank, self.data_world)
            return np.array_split(share, self._fewest(len(indices)))
        tokens = self.lengths.tokens
        by_length = indices[np.argsort(tokens[indices], kind="stable")]
        first, mine = (rank_share(by_length, rank, self.data_world) for rank in (0, self.data_rank))
        count = self._best_count(tokens[first], self._fewest(len(indices)))
        found = best_cuts(tokens[mine], count, self.micro_batch_size).get(count)
        return np.array_split(mine, count) if found is None else np.split(mine, found.cuts)

    def _fewest(self, num_samples: int) -> int:
        """Micro-batches that the largest share needs at least."""
        return math.ceil(math.ceil(num_samples / self.data_world) / self.micro_batch_size)

    def _best_count(self, tokens: np.ndarray, fewest: int) -> int:
        """How many cost least; read off the first rank's share, which every rank knows."""
        assert self.lengths is not None
        found = best_cuts(tokens, fewest + MOST_MORE, self.micro_batch_size)
        costs = {count: cut.padded_tokens + count * self.lengths.overhead for count, cut in found.items()}
        return min(costs, key=lambda count: costs[count], default=fewest)


@dataclass(frozen=True)
class BestCut:
    padded_tokens: int  # each piece padded to its longest
    cuts: list[int]


def best_cuts(tokens: np.ndarray, most: int, bound: int) -> dict[int, BestCut]:
    """Ascending lengths → for each number of pieces up to `most`, where to cut for the fewest padded tokens.

    No piece is empty or has more than `bound` samples; numbers for which that cannot be had are left out. Dynamic
    programming over the pieces.
    """
    total = len(tokens)
    if not total:
        return {}
    ends = np.unique([*range(0, total, math.ceil(total / MOST_CANDIDATES)), total])
    sizes = ends[None, :] - ends[:, None]  # (start, end)
    allowed = (sizes > 0) & (sizes <= bound)
    piece = np.where(allowed, sizes * tokens[np.maximum(ends, 1) - 1][None, :], np.inf)
    cost = piece[0]
    starts: list[np.ndarray] = []
    found: dict[int, BestCut] = {}
    for count in range(1, most + 1):
        if np.isfinite(cost[-1]):
            found[count] = BestCut(int(cost[-1]), _traced(ends, starts))
        through = cost[:, None] + piece
        starts.append(through.argmin(0))
        cost = through.min(0)
    return found


def _traced(ends: np.ndarray, starts: list[np.ndarray]) -> list[int]:
    """The cuts, from the last piece's start back to the first's."""
    end, cuts = len(ends) - 1, []
    for start in reversed(starts):
        end = int(start[end])
        cuts.append(int(ends[end]))
    return cuts[::-1]
