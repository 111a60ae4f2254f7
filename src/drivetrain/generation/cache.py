"""Keys and values of several sequences of different lengths, one a row, which join and leave while others run.

All rows end in the same column, so that a token is written into one column for all of them, and a shorter row has
unused columns before its beginning, which the attention mask hides. This is the left padding that Transformers' masks
(causal, sliding window) and models are made for, with any attention implementation. Buffers have room on both sides and
for more rows: a row that joins or leaves costs a copy of that row, and a step costs a copy of one column; Transformers'
DynamicLayer, whose contract the layers here fulfil, copies all of it in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

SPARE_COLUMNS = 64  # at least, in a new buffer


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, heads, columns, width).

    window: positions that a query sees, itself included; None: all. Columns that no later query sees are forgotten.
    is_exact: under autocast keys and values keep the 32 bits in which keys are rotated.
    """

    def __init__(self, window: int | None, is_exact: bool = False) -> None:
        super().__init__()
        self.window, self.is_sliding, self.is_exact = window, window is not None, is_exact
        self.rows = self.columns = 0  # columns: those of the sequences, also the forgotten ones
        self.begin = self.end = 0  # the kept columns in the buffers

    # --- Transformers' contract ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # rotated keys come in fp32 under autocast, which multiplies them in the dtype of values: cast here, once
        self.dtype, self.device = value_states.dtype, key_states.device
        if self.is_exact:
            self.dtype = torch.promote_types(self.dtype, key_states.dtype)
        heads = key_states.shape[1]
        self.keys = key_states.new_zeros(0, heads, 0, key_states.shape[3], dtype=self.dtype)
        self.values = value_states.new_zeros(0, heads, 0, value_states.shape[3], dtype=self.dtype)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes new columns, (rows, heads, new, width), and returns those that their queries see."""
        del args, kwargs  # of layers that keep more than keys and values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        self._make_room(len(key_states), 0, new)
        self.rows = len(key_states)
        place = slice(self.end, self.end + new)
        self.keys[: self.rows, :, place] = key_states
        self.values[: self.rows, :, place] = value_states
        self.end, self.columns = self.end + new, self.columns + new
        seen = self.kept()
        self._forget()
        return seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of columns that the next `query_length` queries see, and the number before them."""
        kept = self._width(self.columns)
        return kept + query_length, self.columns - kept

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    # --- rows ---------------------------------------------------------------------------------------------------------

    def kept(self) -> tuple[Tensor, Tensor]:
        """Returns views of the kept keys and values."""
        keys, values = (buffer[: self.rows, :, self.begin : self.end] for buffer in (self.keys, self.values))
        return keys, values

    @property
    def is_plain(self) -> bool:
        """Returns whether each query sees all columns of its row."""
        return self.window is None and bool(self.is_initialized)

    def is_in(self, keys: Tensor) -> bool:
        """Returns whether this buffer is where the keys lie."""
        return bool(self.is_initialized) and self.keys is keys

    def reserve(self, columns: int) -> None:
        """Makes room for so many more columns."""
        self._make_room(self.rows, 0, columns)

    def move_to(self, keys: Tensor, values: Tensor) -> None:
        """Moves what is kept to the first columns of other buffers, which have room for it."""
        for buffer, kept in zip((keys, values), self.kept(), strict=True):
            buffer[: self.rows, :, : kept.shape[2]] = kept
        self.begin, self.end = 0, self.end - self.begin
        self.keys, self.values = keys, values

    def take_column(self) -> None:
        """Counts a column that was written into the buffers, behind those that are kept."""
        self.end, self.columns = self.end + 1, self.columns + 1

    def join(self, parts: Sequence[tuple[RowLayer, Sequence[int]]]) -> None:
        """Adds copies of rows of other caches behind the own ones."""
        if not self.is_initialized:
            self.lazy_initialization(*parts[0][0].kept())
        first, rows = self.rows, self.rows + sum(len(each) for _, each in parts)
        self.columns = max(self.columns, *(other.columns for other, _ in parts))
        width = self._width(self.columns)
        self._make_room(rows, width - (self.end - self.begin), 0)
        begin, self.rows = self.end - width, rows
        for buffer in (self.keys, self.values):
            buffer[:first, :, begin : self.begin] = 0  # finite: a masked value times 0 is added
        self.begin = begin
        for other, each in parts:
            self._copy(other, each, first)
            first += len(each)

    def _copy(self, other: RowLayer, rows: Sequence[int], first: int) -> None:
        """Writes rows of another cache into those from `first` on, which have room for them."""
        places, is_whole = slice(first, first + len(rows)), list(rows) == list(range(other.rows))
        for buffer, given in zip((self.keys, self.values), other.kept(), strict=True):
            begin = self.end - given.shape[2]
            buffer[places, :, self.begin : begin] = 0  # as above
            buffer[places, :, begin : self.end] = given if is_whole else given[list(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order. A row that moves comes from behind all kept places."""
        for kept in self.kept():
            for place, row in enumerate(rows):
                if place != row:
                    kept[place] = kept[row]
        self.rows = len(rows)

    def drop_columns(self, count: int) -> None:
        """Drops the first columns, which no row uses any more."""
        self.columns -= count
        self.begin = max(self.begin, self.end - self._width(self.columns))

    def _width(self, columns: int) -> int:
        return columns if self.window is None else min(columns, self.window - 1)

    def _forget(self) -> None:
        self.begin = max(self.begin, self.end - self._width(self.columns))

    def _make_room(self, rows: int, before: int, after: int) -> None:
        """Makes buffers of which `rows` rows, and so many columns before and after the kept ones, can be written."""
        there, _, columns, _ = self.keys.shape
        if rows <= there and before <= self.begin and self.end + after <= columns:
            return
        kept = self.end - self.begin
        needed = before + kept + after
        size = needed + max(SPARE_COLUMNS, needed // 2)
        more = there if rows <= there else max(rows, there + there // 2)
        self.keys, self.values = (self._moved(buffer, more, size, before) for buffer in (self.keys, self.values))
        self.begin, self.end = before, before + kept

    def _moved(self, buffer: Tensor, rows: int, columns: int, begin: int) -> Tensor:
        """Returns a larger buffer with the kept columns from `begin` on. Others are written before they are read."""
        larger = buffer.new_empty(rows, buffer.shape[1], columns, buffer.shape[3])
        kept = buffer[: self.rows, :, self.begin : self.end]
        larger[: self.rows, :, begin : begin + kept.shape[2]] = kept
        return larger


class RowCache(Cache):
    """The cache of a model's layers: pass it as past_key_values."""

    layers: list[RowLayer]

    def __init__(self, windows: Sequence[int | None], is_exact: bool = False) -> None:
        """windows: of each layer, as `windows_of` gives them. is_exact: as for each layer."""
        super().__init__(layers=[RowLayer(window, is_exact) for window in windows])

    @property
    def columns(self) -> int:
        """The length of the longest sequence."""
        return self.layers[0].columns

    def join(self, parts: Sequence[tuple[RowCache, Sequence[int]]]) -> None:
        """Adds copies of rows of other caches behind the own ones."""
        for number, own in enumerate(self.layers):
            others = [(other.layers[number], rows) for other, rows in parts]
            if others[0][0].is_initialized:  # a layer that uses another one's keys has none
                own.join(others)

    def reserve(self, columns: int) -> None:
        """Makes room for so many more columns."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.reserve(columns)

    def without_columns(self, rows: int) -> RowCache:
        """Returns a cache of so many rows, of the layers' heads and dtype, that holds nothing yet."""
        found = RowCache([layer.window for layer in self.layers], self.layers[0].is_exact)
        for own, new in zip(self.layers, found.layers, strict=True):
            new.lazy_initialization(*own.kept())
            new.update(*(each[:1, :, :0].expand(rows, -1, -1, -1) for each in own.kept()))
        return found

    def keep(self, rows: Sequence[int], longest: int) -> None:
        """Keeps these rows, of which a row that moves comes from behind all kept places.

        longest: the length of the longest sequence among them.
        """
        unused = self.columns - longest
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(rows)
                layer.drop_columns(unused)


class FixedLayer(CacheLayerMixin):
    """Keys and values in a buffer of which all columns are given to attention, under its mask."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._column = keys, values, column
        self.is_initialized = True

    # --- Transformers' contract ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        del key_states, value_states
        raise AssertionError("made with its buffers")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        del args, kwargs
        self.keys.index_copy_(2, self._column, key_states.to(self.keys.dtype))  # as RowLayer keeps them
        self.values.index_copy_(2, self._column, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2]) - 1

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class FixedCache(Cache):
    """The cache of layers of fixed buffers."""


def new_cache(past: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Returns Transformers' cache of all columns, filled with each layer's keys and values, (batch, heads, columns,
    width)."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(past):
        cache.update(keys, values, number)
    return cache


def windows_of(config: Any) -> list[int | None] | None:
    """Returns each layer's sliding window, or None for a layer without one; None if a layer keeps something else than
    keys and values (a recurrent state, an indexer's keys) or the model describes no layers.

    config: of a Transformers model.
    """
    windows: list[int | None] = []
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError):  # the config of a class of the user's own
        return None
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            return None
    return windows or None
