"""Tests what the ranks of a run do together, and that one process does it alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import PeerError, RunError, UserError, problem
from tests.ranks import RankPool


def everything() -> dict[str, object]:
    ranks = Communicator()
    soon = ranks.sum_soon(torch.tensor(1.0 + ranks.rank))
    copied = torch.full((2,), float(ranks.rank))
    ranks.copy_from_first([copied])
    found: dict[str, object] = {
        "sum": ranks.sum(torch.tensor([1.0, float(ranks.rank)])).tolist(),
        "soon": [soon().item(), soon().item()],
        "copied": copied.tolist(),
        "gathered": ranks.gather(f"rank {ranks.rank}"),
        "all": ranks.all_gather(ranks.rank),
        "first": ranks.on_first(lambda: f"by {ranks.rank}"),
    }
    # the last rank asks at its third call
    found["asked"] = [ranks.any_asked(call == 2 and ranks.rank == ranks.world - 1) for call in range(5)]
    ranks.close()
    return found


def failing(kind: str) -> str:
    ranks = Communicator()

    def fail() -> None:
        raise problem("x", "is wrong", "correct it") if kind == "user" else RunError("the disk is full")

    try:
        ranks.on_first(fail)
    except (UserError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unforeseen(call: str) -> str:
    """One rank meets an error that was not foreseen."""
    ranks = Communicator()

    def fail() -> None:
        if ranks.rank == (0 if call == "on_first" else 1):
            raise MemoryError("of this rank")

    try:
        getattr(ranks, call)(fail)
    except (MemoryError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_one_process_alone() -> None:
    assert not dist.is_initialized()
    assert everything() == {
        "sum": [1.0, 0.0],
        "soon": [1.0, 1.0],
        "copied": [0.0, 0.0],
        "gathered": ["rank 0"],
        "all": [0],
        "first": "by 0",
        "asked": [False, False, True, False, False],
    }


def test_two_ranks_together(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(everything)
    together = {"sum": [2.0, 1.0], "soon": [3.0, 3.0], "copied": [0.0, 0.0], "all": [0, 1], "first": "by 0"}
    # answers come one call later, and are the same on both
    assert first == {**together, "gathered": ["rank 0", "rank 1"], "asked": [False, False, False, True, False]}
    assert second == {**together, "gathered": None, "asked": [False, False, False, True, False]}


@pytest.mark.parametrize(("kind", "words"), [("user", "UserError: x: is wrong"), ("run", "RunError: the disk is full")])
def test_what_the_first_rank_may_not_do_all_ranks_hear(kind: str, words: str, ranks: Callable[[int], RankPool]) -> None:
    assert all(reported.startswith(words) for reported in ranks(2).run(failing, kind))


def test_no_rank_waits_for_one_that_met_an_unforeseen_error(ranks: Callable[[int], RankPool]) -> None:
    own = "MemoryError: of this rank"
    assert ranks(2).run(unforeseen, "on_first") == [own, "PeerError: rank 0 failed: " + own]
    assert ranks(2).run(unforeseen, "on_each") == ["PeerError: rank 1 failed: " + own, own]
