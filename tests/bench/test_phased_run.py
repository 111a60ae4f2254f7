"""A process names the part of its work that is under way, and other processes read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import phased_run
from bench.phased_run import BETWEEN, REWARDS, STARTING, Shared


def test_another_process_reads_from_the_file_what_is_under_way_and_that_it_ended(tmp_path: Path) -> None:
    own, other = Shared(tmp_path / "phases"), Shared(tmp_path / "phases")
    assert other.now() == STARTING
    seen = _marked(lambda: other.now(), own)
    assert seen() == REWARDS
    assert (other.now(), other.begun(REWARDS)) == (BETWEEN, 1)


def test_what_an_error_ends_stays_under_way_since_it_has_not_done_its_work(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "phases")

    def lost() -> None:
        raise ConnectionError("the other rank is gone")

    with pytest.raises(ConnectionError):
        _marked(lost, shared)()
    assert shared.now() == REWARDS


def _marked(function, shared):  # type: ignore[no-untyped-def]
    return phased_run._marked(function, list(phased_run.PHASES).index(REWARDS), shared)
