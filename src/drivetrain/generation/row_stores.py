"""Sequences that a model continues together, one a row: with a cache of keys and values, or without one.

`CachedRows` runs each token through the model once. `WholeRows` runs whole sequences for each token: for models that
keep something else than keys and values, or count positions in their own way.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from drivetrain.generation.sampling import Choice
from drivetrain.generation.shared_prompts import SharedPrompts, pays

if TYPE_CHECKING:
    # import Transformers, which a training without answers need not
    from drivetrain.generation.cache import RowCache
    from drivetrain.generation.recorded_steps import RecordedSteps
    from drivetrain.generation.short_step import ShortStep

CHUNK = 2048  # tokens of prompts, padding included, that run forward at once on a CPU
# a pass on a CPU takes as long as so many tokens: to read the weights, and to start each layer's kernels as long as so
# many weights are multiplied by a token
PASS_TOKENS, PASS_WEIGHTS = 16, 10_000_000
LARGER_ON_GPU = 8  # on an H200 64 prompts in three groups had first tokens after 0.25 s, in one (generate) after 0.08
MOST_LOGITS = 2**26  # numbers, where those of all a prompt's places are wanted
Batch = dict[str, Tensor]
Choose = Callable[[Tensor], list[Choice]]
# places of the prompts' columns, and their logits, (rows, places, vocabulary)
Look = Callable[[range, Tensor], None]


class Forward(Protocol):
    """A forward pass of the model, wherever it runs."""

    def __call__(self, batch: Batch, work: Callable[[nn.Module, Batch], Tensor], choose: Choose) -> list[Choice]:
        """Returns choose(work(model, batch)); batch: on any device."""


def nothing(logits: Tensor) -> list[Choice]:
    """Chooses no token: more of the prompt follows."""
    del logits
    return []


class RowStore(ABC):
    """Sequences in rows. A store begins empty, is filled by `start`, and takes rows of other stores by `join`."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], choose: Choose, look: Look | None = None) -> list[Choice]:
        """Runs prompts through the model, into an empty store. Returns what `choose` chooses of the logits behind each,
        (prompts, vocabulary). look: gets the logits of all places; padding stands before the shorter prompts."""

    @abstractmethod
    def next(self, tokens: Sequence[int], choose: Choose) -> list[Choice]:
        """Continues each row by a token, and returns what is chosen of the logits behind it."""

    @abstractmethod
    def join(self, parts: Sequence[tuple[Self, Sequence[int]]]) -> None:
        """Adds copies of rows of other stores behind the own ones."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order. A row that moves comes from behind all kept places."""

    @abstractmethod
    def new(self) -> Self:
        """Returns an empty store of the same model."""

    @property
    def chunk(self) -> int:
        """Returns how many tokens of prompts, padding included, run forward at once."""
        return CHUNK

    @property
    def padding(self) -> int:
        """Returns how many tokens of padding cost less than another pass: prompts that need more run apart."""
        return self.chunk


class CachedRows(RowStore):
    def __init__(
        self,
        forward: Forward,
        model: Any,
        windows: Sequence[int | None],
        recorded: RecordedSteps | None = None,
        short: ShortStep | None = None,
    ) -> None:
        """model: Transformers', before any wrapping, for its configuration and what its forward pass accepts.

        recorded: what takes steps on a GPU at once. short: what takes them in few calls on a CPU."""
        self._forward, self._model, self._windows = forward, model, windows
        self._recorded, self._short = recorded, short
        self._cache = self._empty()
        self._lengths: list[int] = []
        self._shared = SharedPrompts()  # which the cache does not hold
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._extra = {"use_cache": True} if "use_cache" in accepted else {}
        self._skips = "logits_to_keep" in accepted
        # in place of the number of last places: a slice of them makes the head read its weights for each prompt
        takes_places = self._skips and "Tensor" in str(accepted["logits_to_keep"].annotation)
        self._last = torch.tensor([-1]) if takes_places and not self._is_on_gpu else 1

    @property
    def chunk(self) -> int:
        return CHUNK * (LARGER_ON_GPU if self._is_on_gpu else 1)

    @property
    def padding(self) -> int:
        if self._is_on_gpu:
            return self.chunk
        layers = self._model.config.get_text_config().num_hidden_layers
        weights = sum(each.numel() for each in self._model.parameters())  # under ZeRO-3 none, and a pass costs a lot
        return PASS_TOKENS + PASS_WEIGHTS * layers // max(1, weights)

    @property
    def _is_on_gpu(self) -> bool:
        return next(self._model.parameters()).is_cuda

    def new(self) -> CachedRows:
        return CachedRows(self._forward, self._model, self._windows, self._recorded, self._short)

    def start(self, prompts: Sequence[Sequence[int]], choose: Choose, look: Look | None = None) -> list[Choice]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, each in enumerate(prompts):
            ids[row, longest - len(each) :] = torch.tensor(each)
        unused = torch.tensor([longest - len(each) for each in prompts])
        positions = (torch.arange(longest)[None] - unused[:, None]).clamp(min=0)
        size = max(1, self.chunk // len(prompts))
        if look is not None:
            size = min(size, max(1, MOST_LOGITS // (len(prompts) * self._model.config.get_text_config().vocab_size)))
        found: list[Choice] = []
        for begin in range(0, longest, size):
            places = range(begin, min(begin + size, longest))
            used = [max(0, places.stop - count) for count in unused.tolist()]
            batch = {"ids": ids[:, places.start : places.stop], "positions": positions[:, places.start : places.stop]}
            last = places.stop == longest
            found = self._run(batch, used, choose if last else nothing, look and _of_places(places, look))
        self._lengths = [len(each) for each in prompts]
        self._shared.add_apart(len(prompts))
        return found

    def next(self, tokens: Sequence[int], choose: Choose) -> list[Choice]:
        lengths, cache = self._lengths, self._cache
        self._lengths = [length + 1 for length in lengths]
        step = None if self._recorded is None else self._recorded.of(cache, len(tokens))
        if step is None:
            batch = {"ids": torch.tensor(tokens)[:, None], "positions": torch.tensor(lengths)[:, None]}
            return self._run(batch, self._own_lengths, choose, None)
        extra = {**self._extra, **({"logits_to_keep": 1} if self._skips else {})}

        def work(model: nn.Module, batch: Batch) -> Tensor:
            return step.run(model, cache, batch["numbers"], **extra)[: len(tokens)]

        return self._forward({"numbers": step.numbers_of(tokens, lengths, cache)}, work, choose)

    def _run(
        self, batch: Batch, used: Sequence[int], choose: Choose, look: Callable[[Tensor], None] | None
    ) -> list[Choice]:
        """used: columns that each row uses, those of the batch included."""
        mask = _padding_mask(used, self._cache.columns + batch["ids"].shape[1])
        if mask is not None:
            batch = {**batch, "mask": mask}
        is_step = batch["ids"].shape[1] == 1 and look is None and bool(self._cache.columns or self._shared)
        short = self._short if is_step else None

        def work(model: nn.Module, batch: Batch) -> Tensor:
            if short is not None and short.is_possible():
                return short(self._cache, batch["ids"], batch["positions"], batch.get("mask"), self._shared)
            if self._shared:
                batch = {**batch, **self._spread()}
            inputs: dict[str, Any] = {"input_ids": batch["ids"], "attention_mask": batch.get("mask"), **self._extra}
            if self._takes_positions:
                inputs["position_ids"] = batch["positions"]
            if self._skips and look is None:
                inputs["logits_to_keep"] = self._last
            logits: Tensor = model(**inputs, past_key_values=self._cache).logits
            if look is not None:
                look(logits)
            return logits[:, -1]

        return self._forward(batch, work, choose)

    def _spread(self) -> Batch:
        """Gives each row a copy of the prompt that it shares, before a step of the model's own. Returns the step's
        mask."""
        self._cache = self._shared.spread(self._cache, [length - 1 for length in self._own_lengths])
        self._shared = SharedPrompts()
        self._shared.add_apart(len(self._lengths))
        mask = _padding_mask(self._lengths, self._cache.columns + 1)
        return {} if mask is None else {"mask": mask}

    def join(self, parts: Sequence[tuple[CachedRows, Sequence[int]]]) -> None:
        (other, rows), *more = parts
        if not (self._lengths or more) and list(rows) == list(range(len(other._lengths))):
            self._cache, self._shared = other._cache, other._shared
        else:
            self._cache.join([self._joining(other, rows) for other, rows in parts])
        self._lengths += [other._lengths[row] for other, rows in parts for row in rows]

    def _joining(self, other: CachedRows, rows: Sequence[int]) -> tuple[RowCache, Sequence[int]]:
        """Returns the cache, and its rows, that are copied for rows that join: one without columns where they share."""
        can_share = self._short is not None and self._short.is_possible() and not any(self._windows)
        if can_share and not other._shared and pays(other._lengths, rows):
            self._shared.add(other._cache, other._lengths, rows)
            return other._cache.without_columns(len(rows)), range(len(rows))
        self._shared.add_apart(len(rows))
        return other._shared.spread(other._cache, other._own_lengths) if other._shared else other._cache, rows

    @property
    def _own_lengths(self) -> list[int]:
        """The positions that the cache has of each row."""
        return [length - shared for length, shared in zip(self._lengths, self._shared.lengths, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._shared.keep(rows)
        if rows:
            self._cache.keep(rows, max(self._own_lengths))
        else:
            self._cache = self._empty()

    def _empty(self) -> RowCache:
        from drivetrain.generation.cache import RowCache

        return RowCache(self._windows, is_exact=self._short is not None)


class WholeRows(RowStore):
    def __init__(
        self,
        forward: Forward,
        work: Callable[[nn.Module, Batch], Tensor] | None = None,
        collate: Callable[[Sequence[Sequence[int]]], Batch] | None = None,
    ) -> None:
        """work: the model, and a batch that `collate` makes of sequences → the logits behind each, (rows, vocabulary).
        By default a plain pass over sequences that are padded at the end."""
        self._forward = forward
        self._work, self._collate = work or _behind, collate or padded
        self._sequences: list[list[int]] = []

    def new(self) -> WholeRows:
        return WholeRows(self._forward, self._work, self._collate)

    def start(self, prompts: Sequence[Sequence[int]], choose: Choose, look: Look | None = None) -> list[Choice]:
        self._sequences = [list(each) for each in prompts]
        if look is not None:
            self._forward(padded(prompts), functools.partial(_look_at, look), nothing)
        return self._run(choose)

    def next(self, tokens: Sequence[int], choose: Choose) -> list[Choice]:
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.append(token)
        return self._run(choose)

    def _run(self, choose: Choose) -> list[Choice]:
        return self._forward(self._collate(self._sequences), self._work, choose)

    def join(self, parts: Sequence[tuple[WholeRows, Sequence[int]]]) -> None:
        self._sequences += [list(other._sequences[row]) for other, rows in parts for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        self._sequences = [self._sequences[row] for row in rows]


def _of_places(places: range, look: Look) -> Callable[[Tensor], None]:
    return lambda logits: look(places, logits)


def padded(sequences: Sequence[Sequence[int]]) -> Batch:
    """Returns {"ids": (rows, longest) int64, padded at the end, which no place before looks at, "lengths": (rows,)}."""
    lengths = torch.tensor([len(each) for each in sequences])
    ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    for row, each in enumerate(sequences):
        ids[row, : len(each)] = torch.tensor(each)
    return {"ids": ids, "lengths": lengths}


def _behind(model: nn.Module, batch: Batch) -> Tensor:
    logits = _logits(model, batch)
    return logits[torch.arange(len(logits), device=logits.device), batch["lengths"] - 1]


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the logits of all places; not those of virtual tokens before them."""
    logits: Tensor = model(input_ids=batch["ids"]).logits
    return logits[:, logits.shape[1] - batch["ids"].shape[1] :]


def _look_at(look: Look, model: nn.Module, batch: Batch) -> Tensor:
    """Shows the logits of all places, moved to where padding stands before the shorter sequences."""
    logits = _logits(model, batch)
    longest = logits.shape[1]
    places = torch.arange(longest, device=logits.device)[None] - (longest - batch["lengths"])[:, None]
    look(range(longest), logits.gather(1, places.clamp(min=0)[..., None].expand_as(logits)))
    return logits[:, -1]


def _padding_mask(used: Sequence[int], columns: int) -> Tensor | None:
    """Returns which of the last `columns` columns each row uses, (rows, columns) bool; None if each uses all of them.

    used: the number of columns that each row uses.
    """
    if min(used) >= columns:
        return None
    unused = columns - torch.tensor(used)
    return torch.arange(columns)[None] >= unused[:, None]
