"""Keys and values of prompts that several rows continue, kept once for all of them.

The answers to one prompt (a group in reinforcement learning, several samples of a request) look at the same keys and
values. Kept for each row, they are read anew for each: with eight answers of 128 tokens behind 600 of a prompt (4 heads
of 64, two cores of an AMD EPYC) attention took 0.52 ms a layer, and 0.29 where they are kept once. So attention over
the prompt is computed for all its rows at once, attention over a row's own positions apart, and both are joined by the
logarithms of their sums (as branches are in `models.sequence_operator`; for decoding: Juravsky et al. 2024,
"Hydragen").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    # imports Transformers, as building its model did
    from drivetrain.generation.cache import RowCache

LEAST = 48  # positions of a prompt: to read fewer for each row costs less than to join
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output, (rows, heads, queries, width), and the logarithms of sums, (rows, heads, queries) fp32, in
    the dtype of what is given, under autocast too. mask: added to scores, (rows, 1, 1, columns)."""
    found, sums = _KERNEL(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    return found, sums


@dataclass(frozen=True)
class _Prompt:
    """One prompt: each layer's keys and values, (1, heads, positions, width), and the rows that continue it."""

    layers: list[tuple[Tensor, Tensor]]
    rows: list[int]

    @property
    def place(self) -> slice | Tensor:
        """Returns what picks its rows of a batch."""
        first = self.rows[0]
        in_order = self.rows == list(range(first, first + len(self.rows)))
        return slice(first, first + len(self.rows)) if in_order else torch.tensor(self.rows)


class SharedPrompts:
    """The prompts that rows of a batch share. Rows that share none are among them."""

    def __init__(self) -> None:
        self._prompts: list[_Prompt] = []
        self._places: list[slice | Tensor] = []
        self.lengths: list[int] = []  # of each row: positions that it shares, 0 if none

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, cache: RowCache, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Adds rows that continue prompts of a cache. lengths: of the prompts. rows: the prompt of each new row."""
        first, of_prompt = len(self.lengths), defaultdict[int, list[int]](list)
        for place, row in enumerate(rows):
            of_prompt[row].append(first + place)
        for row, its_rows in of_prompt.items():
            layers = [
                (keys[row : row + 1, :, -lengths[row] :], values[row : row + 1, :, -lengths[row] :])
                for keys, values in (layer.kept() for layer in cache.layers)
            ]
            self._prompts.append(_Prompt(layers, its_rows))
        self.lengths += [lengths[row] for row in rows]
        self._find_places()

    def add_apart(self, count: int) -> None:
        """Adds rows that share nothing."""
        self.lengths += [0] * count
        self._find_places()

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        new = {row: place for place, row in enumerate(rows)}
        moved = [_Prompt(each.layers, sorted(new[row] for row in each.rows if row in new)) for each in self._prompts]
        self._prompts = [each for each in moved if each.rows]
        self._find_places()

    def _find_places(self) -> None:
        self._places = [each.place for each in self._prompts]

    def join(self, queries: Tensor, found: Tensor, sums: Tensor, layer: int, scale: float) -> Tensor:
        """Returns attention's output over shared and own positions, (rows, heads, queries, width).

        queries: (rows, heads, queries, width). found, sums: from `attention`, over the rows' own positions.
        """
        if len(self._prompts) == 1 and len(self._prompts[0].rows) == len(queries):
            shared, its_sums = _over(self._prompts[0].layers[layer], queries, scale)
        else:
            shared, its_sums = torch.zeros_like(found), torch.full_like(sums, -torch.inf)
            for prompt, place in zip(self._prompts, self._places, strict=True):
                shared[place], its_sums[place] = _over(prompt.layers[layer], queries[place], scale)
        share = (sums - its_sums).sigmoid_().unsqueeze(-1)  # of the weights, those on a row's own positions
        if found.dtype == torch.float32:
            return torch.lerp(shared, found, share)
        return torch.lerp(shared.float(), found.float(), share).to(found.dtype)

    def spread(self, cache: RowCache, own: Sequence[int]) -> RowCache:
        """Returns a cache in which each row has a copy of what it shares. own: positions that each row has in
        `cache`."""
        from drivetrain.generation.cache import RowCache

        of_row = {row: prompt.layers for prompt in self._prompts for row in prompt.rows}
        alone = []
        for row, count in enumerate(own):
            alone.append(RowCache([layer.window for layer in cache.layers]))
            for number, (layer, new) in enumerate(zip(cache.layers, alone[-1].layers, strict=True)):
                parts = [each[row : row + 1, :, each.shape[2] - count :] for each in layer.kept()]
                if row in of_row:
                    parts = [torch.cat(both, 2) for both in zip(of_row[row][number], parts, strict=True)]
                new.update(*parts)
        whole = RowCache([layer.window for layer in cache.layers])
        whole.join([(each, [0]) for each in alone])
        return whole


def pays(lengths: Sequence[int], rows: Sequence[int]) -> bool:
    """Returns whether rows that continue prompts of these lengths are quicker if they share them. rows: the prompt of
    each row."""
    prompts = set(rows)
    return len(rows) >= 2 * len(prompts) and min(lengths[each] for each in prompts) >= LEAST


def _over(prompt: tuple[Tensor, Tensor], queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention's output and logarithms of sums over a prompt, of all its rows' queries at once."""
    rows, heads, count, width = queries.shape
    if count == 1:
        found, sums = attention(queries.transpose(0, 2), *prompt, None, scale)
        return found.transpose(0, 2), sums.transpose(0, 2)
    together = queries.transpose(0, 1).reshape(1, heads, rows * count, width)
    found, sums = attention(together, *prompt, None, scale)
    return found.view(heads, rows, count, width).transpose(0, 1), sums.view(heads, rows, count).transpose(0, 1)
