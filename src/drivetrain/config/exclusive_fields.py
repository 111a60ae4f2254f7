"""Fields of which a run has one: the one that an override gives takes the place of the run file's other one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

PAIRS = (  # whose rules refuse both
    ("loop.epochs", "loop.steps"),
    ("batch_size", "batch_size_per_device"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("micro_batch_size", "micro_batch_tokens"),
)


@dataclass(frozen=True)
class Replaced:
    """A field that an override gave, and the other one, whose value in the run file it takes the place of."""

    given: str
    other: str
    value: Any

    def __str__(self) -> str:
        return f"{self.given} was given: it takes the place of the run file's {self.other} ({self.value})"


def replace_others(raw: dict[str, Any], given: Collection[tuple[str, ...]]) -> list[Replaced]:
    """Takes out of the keys of a run file the other field of each that an override gave. given: the paths of overrides,
    which the keys hold already. Both stay where overrides gave both, or none."""
    found = []
    for pair in PAIRS:
        if not _exclude_each_other(raw, *pair):
            continue
        of_overrides = [name for name in pair if any(tuple(name.split("."))[: len(path)] == path for path in given)]
        if len(of_overrides) == 1:
            (other,) = set(pair) - set(of_overrides)
            (block,) = _blocks(raw, other)
            found.append(Replaced(of_overrides[0], other, block.pop(other.rpartition(".")[2])))
    return found


def _exclude_each_other(raw: dict[str, Any], one: str, other: str) -> bool:
    """Returns whether both have a value; a micro-batch may have a bound in samples and one in tokens, unless the first
    is looked for."""
    values = [block.get(name.rpartition(".")[2]) for name in (one, other) for block in _blocks(raw, name)]
    return len(values) == 2 and all(values) and (one != "micro_batch_size" or values[0] == "auto")


def _blocks(raw: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yields the block that a field stands in, where there is one."""
    outer = name.rpartition(".")[0]
    block = raw.get(outer) if outer else raw
    if isinstance(block, dict):
        yield block
