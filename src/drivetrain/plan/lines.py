"""Operations and messages of a step on a line through two traces of it, of which the second has more of the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from drivetrain.plan.step_costs import Messages, Operations

Item = TypeVar("Item", Operations, Messages)
Quantities = tuple[float, float, float]


def on_line(below: Sequence[Item], above: Sequence[Item], share: float) -> tuple[Item, ...]:
    """Returns the items at a place of the line: at 0 those below, at 1 those above. Calls of one size are as many as
    their line says, where both have some; what else there is of a kind (one call over all parameters, which grows with
    them) is put together."""
    if share == 1.0:
        return tuple(above)
    found: list[Item] = []
    first: dict[tuple[object, ...], list[Item]] = _grouped(below)
    second: dict[tuple[object, ...], list[Item]] = _grouped(above)
    for key in dict.fromkeys([*first, *second]):
        low, high = first.get(key, []), second.get(key, [])
        if len(low) == len(high) and all(_same_size(a, b) for a, b in zip(low, high, strict=True)):
            found += [_line(a, b, share) for a, b in zip(low, high, strict=True)]
        elif low and high:
            found.append(_line(_sum(low), _sum(high), share))
        else:
            found += [each for each in (low or high)]
    return tuple(found)


def _same_size(one: Item, two: Item) -> bool:
    """Returns whether the calls of both are of one size."""
    sizes = [(_quantities(each)[1] + _quantities(each)[2]) / max(1, each.calls) for each in (one, two)]
    return max(sizes) <= 2 * max(1.0, min(sizes))


def _line(below: Item, above: Item, share: float) -> Item:
    pairs = zip(_quantities(below), _quantities(above), strict=True)
    return _with(below, [max(0.0, one + (two - one) * share) for one, two in pairs])


def _sum(items: Sequence[Item]) -> Item:
    return _with(items[0], [sum(each) for each in zip(*map(_quantities, items), strict=True)])


def _with(each: Item, quantities: Sequence[float]) -> Item:
    calls, flops, moved = quantities
    more: dict[str, Any] = {"flops": flops} if isinstance(each, Operations) else {}
    return replace(each, calls=max(1, round(calls)), bytes=moved, **more)


def _quantities(each: Operations | Messages) -> Quantities:
    return each.calls, each.flops if isinstance(each, Operations) else 0.0, each.bytes


def _key(each: Operations | Messages) -> tuple[object, ...]:
    if isinstance(each, Operations):
        return each.kind, each.dtype
    return each.collective, each.axis, each.ranks, each.stride


def _grouped(items: Iterable[Item]) -> dict[tuple[object, ...], list[Item]]:
    found: dict[tuple[object, ...], list[Item]] = {}
    for each in items:
        found.setdefault(_key(each), []).append(each)
    return found


def totals(items: Sequence[Item]) -> dict[tuple[object, ...], Quantities]:
    return {key: _quantities(_sum(group)) for key, group in _grouped(items).items()}
