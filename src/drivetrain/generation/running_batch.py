"""Requests answered together, which join the batch when there is room and leave it when their answer is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from drivetrain.generation.requests import Logprob
from drivetrain.generation.row_stores import RowStore
from drivetrain.generation.sampling import Choice, choose, logprobs_of
from drivetrain.generation.sequence import Running


class RunningBatch:
    """A batch over a store of rows.

    max_rows: answers at once. max_cells: rows times the columns of the longest, prompts and answers at their longest;
    one that is longer by itself runs alone.
    """

    def __init__(self, store: RowStore, max_rows: int, max_cells: int) -> None:
        self._store, self._max_rows, self._max_cells = store, max_rows, max_cells
        self._waiting: deque[Running] = deque()
        self._rows: list[Running] = []
        self._joining: list[Running] = []  # whose prompts run just now

    def add(self, running: Running) -> None:
        """Queues a request."""
        self._waiting.append(running)

    @property
    def requests(self) -> list[Running]:
        """Those that run and those that wait."""
        return [*self._rows, *self._joining, *self._waiting]

    def step(self) -> None:
        """Lets waiting requests join, as many prompts as run forward at once, and continues all rows by a token."""
        self._leave()
        left = self._store.chunk
        begun: list[tuple[RowStore, list[int]]] = []
        while self._next_group(left):
            left -= self._begin(self._joining, begun)
            self._joining = []
        if begun:  # at once: each time it has to grow, the store is copied
            self._store.join(begun)
        if self._rows:
            tokens = [each.new[-1] for each in self._rows]
            self._take(self._rows, self._store.next(tokens, lambda logits: choose(logits, self._rows)))

    def clear(self) -> None:
        """Forgets all requests."""
        self._waiting.clear()
        self._rows, self._joining = [], []
        self._store = self._store.new()

    def _next_group(self, tokens: int) -> list[Running]:
        """Takes waiting requests that run forward together: the one that waits longest, and of those for which there is
        room too those of the nearest lengths. tokens: the most that may run; a prompt longer than a chunk runs
        alone."""
        group, waiting = self._joining, self._with_room()
        if waiting and (len(waiting[0].request.ids) <= tokens or tokens == self._store.chunk):
            group += self._alike(waiting, tokens)
        taken = {each.number for each in group}
        self._waiting.extendleft(each for each in reversed(waiting) if each.number not in taken)
        return group

    def _with_room(self) -> list[Running]:
        """Takes the requests that wait, in their order, until one has no room. Drops those that are over."""
        found: list[Running] = []
        while self._waiting and (self._waiting[0].is_over or self._has_room(found, self._waiting[0])):
            running = self._waiting.popleft()
            if not running.is_over:
                found.append(running)
        return found

    def _alike(self, waiting: Sequence[Running], tokens: int) -> list[Running]:
        """Returns the first and those of the nearest lengths: different prompts of at most so many tokens, padding
        included, and no more padding than another pass costs."""
        first, most = waiting[0], self._store.padding
        group, prompts = [first], {first.request.ids}
        for each in sorted(waiting[1:], key=lambda each: _distance(each, first)):
            different = prompts | {each.request.ids}
            area = len(different) * max(map(len, different))
            fits = area <= tokens and area - sum(map(len, different)) <= most
            if fits and each.request.prompt_logprobs == first.request.prompt_logprobs:
                prompts = different
                group.append(each)
        return group

    def _has_room(self, group: Sequence[Running], running: Running) -> bool:
        together = [*self._rows, *group, running]
        if len(together) == 1:
            return True
        return len(together) <= self._max_rows and len(together) * max(map(_end, together)) <= self._max_cells

    def _begin(self, group: list[Running], begun: list[tuple[RowStore, list[int]]]) -> int:
        """Runs the prompts of a group. Adds its store, and those of its rows that go on, to `begun`. Returns how many
        tokens ran, padding included."""
        prompts = list(dict.fromkeys(each.request.ids for each in group))
        number = {ids: place for place, ids in enumerate(prompts)}
        rows = [number[each.request.ids] for each in group]
        store = self._store.new()
        look = None
        if group[0].request.prompt_logprobs:
            look = _PromptLogprobs(prompts, max(each.request.top_logprobs or 0 for each in group))
        choices = store.start(prompts, lambda logits: choose(logits[rows], group), look)
        if look is not None:
            for running, row in zip(group, rows, strict=True):
                running.read_prompt(look.found(row, running.request.top_logprobs or 0))
        for running, choice in zip(group, choices, strict=True):
            running.accept(choice)
        going = [(running, row) for running, row in zip(group, rows, strict=True) if not running.is_over]
        if going:
            begun.append((store, [row for _, row in going]))
            self._rows += [running for running, _ in going]
        return len(prompts) * max(map(len, prompts))

    def _take(self, rows: Sequence[Running], choices: Sequence[Choice]) -> None:
        for running, choice in zip(rows, choices, strict=True):
            running.accept(choice)
        self._leave()

    def _leave(self) -> None:
        """Removes rows that are over; the last rows take their places."""
        going = [place for place, running in enumerate(self._rows) if not running.is_over]
        if len(going) == len(self._rows):
            return
        behind = [place for place in going if place >= len(going)]
        kept = set(going)
        order = [place if place in kept else behind.pop() for place in range(len(going))]
        self._store.keep(order)
        self._rows = [self._rows[place] for place in order]


def _distance(one: Running, other: Running) -> tuple[int, tuple[int, ...]]:
    """Returns how far apart the lengths of two prompts are; then the first one's tokens, which put equal prompts beside
    each other."""
    return abs(len(one.request.ids) - len(other.request.ids)), one.request.ids


def _end(running: Running) -> int:
    return len(running.request.ids) + running.request.max_new_tokens


class _PromptLogprobs:
    """Collects the log-probabilities of prompts' own tokens from the logits of their places."""

    def __init__(self, prompts: Sequence[Sequence[int]], top: int) -> None:
        self._prompts, self._top, self._longest = prompts, top, max(map(len, prompts))
        self._found: list[list[Logprob | None]] = [[None] for _ in prompts]

    def __call__(self, places: range, logits: Tensor) -> None:
        for row, ids in enumerate(self._prompts):
            unused = self._longest - len(ids)
            seen = range(max(places.start, unused), min(places.stop, self._longest - 1))
            if len(seen):
                tokens = ids[seen.start + 1 - unused : seen.stop + 1 - unused]
                own = logits[row, seen.start - places.start : seen.stop - places.start]
                self._found[row] += logprobs_of(own, tokens, self._top)

    def found(self, row: int, top: int) -> list[Logprob | None]:
        return [each and Logprob(each.token, each.logprob, each.top[:top]) for each in self._found[row]]
