"""Cases run over ranks, several in one spawn, and looked up one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from tests.parity.cases import Curve
from tests.ranks import RankPool

Case = TypeVar("Case")


def curves(
    request: pytest.FixtureRequest,
    ranks: Callable[[int], RankPool],
    run: Callable[[Sequence[Any]], list[Curve]],
    world_of: Callable[[Any], int],
    at_once: int,
) -> Callable[[Any], Curve]:
    """Case → the first rank's curve. The cases of a world run when the first of them is asked for.

    request: of a module's fixture, whose tests have the parameter `case`.
    """
    items = [item for item in request.session.items if item.fspath == request.fspath]
    chosen = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]

    @functools.cache
    def of_world(world: int) -> dict[str, Curve]:
        cases, found = [case for case in chosen if world_of(case) == world], []
        for start in range(0, len(cases), at_once):
            found += ranks(world).run(run, cases[start : start + at_once])[0]
        return {case.name: curve for case, curve in zip(cases, found, strict=True)}

    return lambda case: of_world(world_of(case))[case.name]
