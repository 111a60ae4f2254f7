"""Cuts a global batch into the ranks' shares, and each share into micro-batches.

Any cut gives the same step, because losses are sums divided by the count of the whole batch. So a cut may follow the
samples' lengths: micro-batches of like length need little padding, while the batch stays a random one. (Batches made of
like lengths need as little, but are no random ones: docs/background/speed.md has the cost in accuracy.)
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from drivetrain.data.fixed_rows import best_fit
from drivetrain.data.row_shape import Rows

MOST_MORE = 12  # micro-batches beyond those that the bound asks for
MOST_WEIGHED = 64  # micro-batches of one share; of more, each is short, and weighing them takes longer than it wins
MOST_CANDIDATES = 256  # places at which a share may be cut; more would take longer than they win


def rank_share(indices: np.ndarray, data_rank: int, data_world: int) -> np.ndarray:
    """Returns the samples of a global batch that one data rank takes: every world-th one, so that lengths spread
    evenly."""
    return indices[data_rank::data_world]


@dataclass(frozen=True)
class Lengths:
    """The length of each sample, and a micro-batch's cost beside its (padded) tokens, in tokens.

    packed: samples are laid end to end, so that a micro-batch has as many tokens as they have together. most: tokens of
    a micro-batch, unless one sample has more. rows: the length that packed rows are filled up to, if any.
    """

    tokens: np.ndarray
    overhead: int
    packed: bool = False
    most: int | None = None
    rows: Rows | None = None


@dataclass(frozen=True)
class Slice:
    """One rank's part of each global batch, in micro-batches of at most micro_batch_size samples.

    All ranks get as many; where a ragged batch leaves a rank short of a sample, one may be empty.

    most_made: tokens of a micro-batch of samples that the model makes, whose lengths are known only then.
    """

    data_rank: int
    data_world: int
    micro_batch_size: int
    lengths: Lengths | None = None
    most_made: int | None = None

    def pieces(self, indices: np.ndarray) -> list[np.ndarray]:
        """Returns the samples of each micro-batch, from a global batch of these samples."""
        return [indices[positions] for positions in self.positions(indices)]

    def positions(self, indices: np.ndarray) -> list[np.ndarray]:
        """Returns each micro-batch's positions in the global batch: pieces of near-equal size, or by length."""
        if self.lengths is None:
            share = rank_share(np.arange(len(indices)), self.data_rank, self.data_world)
            return np.array_split(share, self._fewest(len(indices)))
        tokens = self.lengths.tokens[indices]
        by_length = np.argsort(tokens, kind="stable")
        shares = [rank_share(by_length, rank, self.data_world) for rank in range(self.data_world)]
        mine = shares[self.data_rank]
        if self.lengths.rows is not None:
            return self._rows(self.lengths.rows, tokens, mine, shares)
        if self.lengths.packed:
            count = max(fewest_packs(tokens[share], self.micro_batch_size, self.lengths.most) for share in shares)
            return [mine[pack] for pack in packs(tokens[mine], count, self.micro_batch_size)]
        count = self._best_count([tokens[share] for share in shares], self._fewest(len(indices)))
        found = best_cuts(tokens[mine], count, self.micro_batch_size, self._most_tokens).get(count)
        return np.array_split(mine, count) if found is None else np.split(mine, found.cuts)

    def _rows(self, rows: Rows, tokens: np.ndarray, mine: np.ndarray, shares: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the positions of each row's samples, for as many rows as the rank runs that needs most: on others
        some may be empty. tokens: of each sample of the global batch."""
        bound = min(self.micro_batch_size, rows.samples)
        count = max(len(best_fit(tokens[share], rows.tokens, bound)) for share in shares)
        filled = [mine[row] for row in best_fit(tokens[mine], rows.tokens, bound)]
        return filled + [mine[:0]] * (count - len(filled))

    def _fewest(self, num_samples: int) -> int:
        """Returns the fewest micro-batches that the largest share needs."""
        return math.ceil(math.ceil(num_samples / self.data_world) / self.micro_batch_size)

    @property
    def _most_tokens(self) -> float:
        return math.inf if self.lengths is None or self.lengths.most is None else self.lengths.most

    def _best_count(self, shares: list[np.ndarray], fewest: int) -> int:
        """Returns the number of micro-batches that costs least, computed from the first rank's share, which every rank
        knows. shares: lengths, by rank.

        All of them have to keep a bound in tokens, which may need more.
        """
        assert self.lengths is not None
        first, others = shares[0], shares[1:] if self.lengths.most is not None else []
        filled = (len(filled_cuts(share, self.micro_batch_size, self._most_tokens)) + 1 for share in shares)
        for least in range(max(fewest, *filled), len(first) + 1, MOST_MORE):
            found = best_cuts(first, least + MOST_MORE, self.micro_batch_size, self._most_tokens)
            costs = {count: cut.padded_tokens + count * self.lengths.overhead for count, cut in found.items()}
            for other in others:
                can = best_cuts(other, least + MOST_MORE, self.micro_batch_size, self._most_tokens)
                costs = {count: cost for count, cost in costs.items() if count in can}
            if costs:
                return min(costs, key=lambda count: costs[count])
        return max(fewest, len(first) if others else fewest)


@dataclass(frozen=True)
class BestCut:
    padded_tokens: int  # each piece padded to its longest
    cuts: list[int]


def best_cuts(tokens: np.ndarray, most: int, bound: int, most_tokens: float = math.inf) -> dict[int, BestCut]:
    """Returns for ascending lengths and each number of pieces up to `most` where to cut for the fewest padded tokens.

    No piece is empty, has more than `bound` samples, or more than `most_tokens` padded tokens unless it is one sample;
    numbers for which that is impossible are left out. It uses dynamic programming over the pieces, unless they are many
    and so short that nothing is gained: then each is filled.
    """
    total = len(tokens)
    if not total:
        return {}
    filled = filled_cuts(tokens, bound, most_tokens)
    if len(filled) >= MOST_WEIGHED:
        return _of_filled(tokens, filled, most)
    ends = np.unique([*range(0, total, math.ceil(total / MOST_CANDIDATES)), *filled, total])
    sizes = ends[None, :] - ends[:, None]  # (start, end)
    padded = sizes * tokens[np.maximum(ends, 1) - 1][None, :]
    allowed = (sizes > 0) & (sizes <= bound) & ((padded <= most_tokens) | (sizes == 1))
    piece = np.where(allowed, padded, np.inf)
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


def filled_cuts(tokens: np.ndarray, bound: int, most_tokens: float) -> list[int]:
    """Returns for ascending lengths where to cut for the fewest pieces: each takes as many samples as the bounds
    allow."""
    cuts: list[int] = []
    start = 0
    for place, length in enumerate(tokens.tolist()):
        size = place - start + 1
        if size > 1 and (size > bound or size * length > most_tokens):
            cuts.append(place)
            start = place
    return cuts


def _of_filled(tokens: np.ndarray, filled: list[int], most: int) -> dict[int, BestCut]:
    """Returns cuts for each number of pieces from that of the filled ones up to `most`: the largest is halved for each
    one more."""
    found: dict[int, BestCut] = {}
    ends = [0, *filled, len(tokens)]
    while len(ends) - 1 <= most:
        sizes = np.diff(ends)
        padded = int((sizes * tokens[np.array(ends[1:]) - 1]).sum())
        found[len(sizes)] = BestCut(padded, ends[1:-1])
        largest = int(sizes.argmax())
        if sizes[largest] == 1:
            break
        ends = [*ends[: largest + 1], ends[largest] + int(sizes[largest]) // 2, *ends[largest + 1 :]]
    return found


def _traced(ends: np.ndarray, starts: list[np.ndarray]) -> list[int]:
    """Returns the cuts, from the last piece's start back to the first's."""
    end, cuts = len(ends) - 1, []
    for start in reversed(starts):
        end = int(start[end])
        cuts.append(int(ends[end]))
    return cuts[::-1]


def packs(tokens: np.ndarray, count: int, bound: int) -> list[np.ndarray]:
    """Assigns positions to `count` packs of at most `bound` samples and nearly equal tokens.

    The longest first, each to the pack that has least (Graham 1969, LPT).
    """
    loads: list[tuple[int, int]] = [(0, number) for number in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for position in np.argsort(-tokens, kind="stable").tolist():
        load, number = heapq.heappop(loads)
        members[number].append(position)
        if len(members[number]) < bound:
            heapq.heappush(loads, (load + int(tokens[position]), number))
    return [np.array(sorted(each), dtype=np.int64) for each in members]


def fewest_packs(tokens: np.ndarray, bound: int, most: int | None) -> int:
    """Returns the least number for which `packs` keeps both bounds, except for samples that alone have more tokens."""
    count = max(1, math.ceil(len(tokens) / bound))
    if most is None or not len(tokens):
        return count
    count = max(count, math.ceil(int(tokens.sum()) / most))
    while count < len(tokens):
        loads = [(len(pack), int(tokens[pack].sum())) for pack in packs(tokens, count, bound)]
        if all(load <= most or size == 1 for size, load in loads):
            break
        count += 1
    return count
