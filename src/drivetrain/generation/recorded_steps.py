"""Steps that continue all rows by a token, recorded as CUDA graphs.

A step of few rows starts hundreds of short kernels, and Python and the driver need longer to start them than a GPU to
run them. A graph starts them all at once (Gray 2019, "Getting Started with CUDA Graphs"), but only those that it
recorded, on the addresses that it recorded. So keys and values lie in buffers of a graph's own, of rows and columns
rounded up to powers of two, and what changes from step to step is read from one small tensor: tokens, positions, the
columns in which rows begin, and the column that is written.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.generation.cache import FixedCache, FixedLayer, RowCache

LOG = logging.getLogger(__name__)
LEAST_COLUMNS = 128
CHECKED = 2  # first steps of a graph, which are taken without it too and compared
# a pass → what repeats it, and the tensor into which each repetition writes what the pass returns
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def recorded_on_gpu(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records a CUDA graph. Raises RuntimeError for work that waits for the GPU, which no graph can."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries make their workspaces in a first pass
        work()
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")  # found before recording, which an error would leave half done
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return graph.replay, found


def unrecorded(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records nothing: for a store that is tried for one step."""
    return lambda: None, work()


class RecordedSteps:
    """The recorded steps of one model, by the size of their buffers. Those that no batch uses serve the next one.

    cells: rows times columns of all buffers together. tolerance: relative, of the logits of a graph's first steps.
    """

    def __init__(self, cells: int, tolerance: float, record: Record = recorded_on_gpu) -> None:
        self._cells, self._tolerance, self._record = cells, tolerance, record
        self._steps: list[RecordedStep] = []  # the one used last is the last
        self._works = True

    def of(self, cache: RowCache, rows: int) -> RecordedStep | None:
        """Returns the step that continues so many rows of a cache, whose keys and values it may move into its buffers;
        None where they are to be continued without one."""
        if not self._works or not cache.layers or not all(layer.is_plain for layer in cache.layers):
            return None
        layer = cache.layers[0]
        there = next((step for step in self._steps if step.holds(cache)), None)
        if there is not None and rows <= there.rows and layer.end < there.columns:
            return there
        size = _power(rows), max(LEAST_COLUMNS, _power(layer.end - layer.begin + 1))
        found = next((step for step in self._steps if (step.rows, step.columns) == size and step.is_free), None)
        if found is None:
            found = self._made(cache, *size)
            if found is None:
                return None
        else:
            self._steps.remove(found)
        self._steps.append(found)
        found.take(cache)
        return found

    def recorded(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor] | None:
        """Returns what repeats a pass and its result; None, from then on for all, if it cannot be recorded."""
        try:
            return self._record(work)
        except RuntimeError as error:
            self.give_up(f"{error}".splitlines()[0])
            return None

    def agree(self, found: Tensor, expected: Tensor) -> bool:
        """Returns whether a graph's logits are those of the pass that it recorded."""
        if bool((found - expected).abs().max() <= self._tolerance * expected.abs().max()):
            return True
        self.give_up("a recorded step gave other logits")
        return False

    def give_up(self, why: str) -> None:
        LOG.info("steps are not recorded as CUDA graphs: %s", why)
        self._works = False
        self._steps.clear()

    def _made(self, cache: RowCache, rows: int, columns: int) -> RecordedStep | None:
        if not self._make_room(rows * columns):
            return None
        try:
            return RecordedStep(self, cache, rows, columns)
        except torch.OutOfMemoryError:  # something else has taken it meanwhile
            return None

    def _make_room(self, wanted: int) -> bool:
        """Drops steps that no batch uses, those first that were used longest ago. Returns whether there is room."""
        for step in [step for step in self._steps if step.is_free]:
            if wanted + self._held() <= self._cells:
                break
            self._steps.remove(step)
        return wanted + self._held() <= self._cells

    def _held(self) -> int:
        return sum(step.rows * step.columns for step in self._steps)


class RecordedStep:
    """One graph, its buffers, and the cache whose keys and values lie in them."""

    def __init__(self, steps: RecordedSteps, cache: RowCache, rows: int, columns: int) -> None:
        self._all, self.rows, self.columns = steps, rows, columns
        kept = [layer.kept() for layer in cache.layers]
        device = kept[0][0].device
        self._numbers = torch.zeros(3 * rows + 1, dtype=torch.int64, device=device)
        self._column = self._numbers[-1:]
        self._layers = [
            FixedLayer(_buffer(keys, rows, columns), _buffer(values, rows, columns), self._column)
            for keys, values in kept
        ]
        self._cache = FixedCache(layers=self._layers)
        self._user: Callable[[], RowCache | None] = lambda: None
        self._repeat: Callable[[], None] | None = None
        self._logits, self._left = torch.zeros(0), CHECKED

    @property
    def is_free(self) -> bool:
        """Returns whether no batch has its keys and values here."""
        user = self._user()
        return user is None or not self.holds(user)

    def holds(self, cache: RowCache) -> bool:
        return cache.layers[0].is_in(self._layers[0].keys)

    def take(self, cache: RowCache) -> None:
        """Moves the cache's keys and values into the buffers."""
        for layer, own in zip(cache.layers, self._layers, strict=True):
            layer.move_to(own.keys.zero_(), own.values.zero_())  # finite: a masked value times 0 is added
        self._user = weakref.ref(cache)

    def numbers_of(self, tokens: Sequence[int], lengths: Sequence[int], cache: RowCache) -> Tensor:
        """Returns what the step reads, (3 * rows + 1,) int64. lengths: of the sequences that the tokens follow.

        A row that is not used sees the column that is written alone, of which a softmax is still a number.
        """
        column, spare = cache.layers[0].end, [0] * (self.rows - len(tokens))
        begins = [column - length for length in lengths] + [column] * len(spare)
        return torch.tensor([*tokens, *spare, *lengths, *spare, *begins, column])

    def run(self, model: Any, cache: RowCache, numbers: Tensor, **extra: Any) -> Tensor:
        """Takes the step; returns the logits behind it, (rows, vocabulary), those of rows not used among them. They are
        overwritten by the next step."""
        self._numbers.copy_(numbers)
        logits = self._result(lambda: self._pass(model, extra))
        for layer in cache.layers:
            layer.take_column()
        return logits

    def _result(self, work: Callable[[], Tensor]) -> Tensor:
        if not self._left:
            assert self._repeat is not None, "recorded in the first step"
            self._repeat()
            return self._logits
        expected = work()  # writes the same column that a repetition writes
        if self._repeat is None:
            found = self._all.recorded(work)
            if found is None:
                return expected
            self._repeat, self._logits = found
        self._repeat()
        if self._all.agree(self._logits, expected):
            self._left -= 1
        return expected

    def _pass(self, model: Any, extra: dict[str, Any]) -> Tensor:
        tokens, positions, begins = self._numbers[:-1].view(3, self.rows, 1)
        columns = torch.arange(self.columns, device=begins.device)
        seen = (columns >= begins) & (columns <= self._column)
        logits: Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=seen[:, None, None],  # in four dimensions Transformers passes it on unchanged
            past_key_values=self._cache,
            **extra,
        ).logits
        return logits[:, -1]


def _buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], columns, like.shape[3])


def _power(number: int) -> int:
    """Returns the power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
