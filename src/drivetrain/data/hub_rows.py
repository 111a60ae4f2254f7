"""Reads rows of data sets on the Hugging Face hub, through the optional package datasets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from drivetrain.data.arrow_rows import without_inner_nulls
from drivetrain.data.tables import load_from_hub
from drivetrain.errors import RunError, problem


def open_hub(
    name: str, field: str, subset: str | None, split: str, folder: str | None, stream: bool
) -> HubRows | StreamedHubRows:
    """Opens one split. Raises UserError if it is not available, is empty, or, streamed, does not state how many rows it
    has."""
    dataset = load_from_hub(name, field, subset, split, data_dir=folder, streaming=stream)
    if not stream:
        if not len(dataset):
            raise problem(field, f"{name} has no rows in its split {split}", "choose another split or data set")
        return HubRows(name, dataset)
    listed = (dataset.info.splits or {}).get(split)
    if listed is None or not listed.num_examples:
        fix = "download it (stream: false), or name a whole split"
        raise problem(field, f"{name} does not state how many rows its split {split} has, which a stream needs", fix)
    return StreamedHubRows(name, dataset, listed.num_examples)


class HubRows:
    """Rows of a data set that was downloaded; datasets maps its files into memory."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name, self._dataset = name, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        columns: dict[str, list[Any]] = self._dataset[start : min(stop, len(self))]
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return list(map(without_inner_nulls, rows))

    def where(self, index: int) -> str:
        return f"{self._name} row {index + 1}"


class StreamedHubRows:
    """Rows of a data set that comes over the network while it is read. A step back starts anew and skips to the
    place."""

    def __init__(self, name: str, dataset: Any, length: int) -> None:
        self._name, self._dataset, self._length = name, dataset, length
        self._coming: Iterator[dict[str, Any]] | None = None
        self._place = 0  # of the row that comes next

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Reads rows. Raises RunError if the network fails or the stream ends too early."""
        stop = max(start, min(stop, self._length))
        rows: list[dict[str, Any]] = []
        try:
            if self._coming is None or self._place > start:
                self._place = start
                self._coming = iter(self._dataset.skip(start))
            for row in islice(self._coming, stop - self._place):
                if self._place >= start:
                    rows.append(row)
                self._place += 1
        except Exception as error:  # network errors have no class in common
            self._coming = None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise RunError(f"{self.where(self._place)} did not come: {reason}") from error
        if self._place < stop:
            raise RunError(f"{self._name} says that it has {self._length} rows, and ended after {self._place}")
        return list(map(without_inner_nulls, rows))

    def where(self, index: int) -> str:
        return f"{self._name} row {index + 1}"
