"""The bench that kills runs that learn from rewards: runs pass it, and what is asked for again does not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.reward_kills import AIMS, Killed, counted, page

BENCH = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_run_that_is_killed_three_times_asks_for_nothing_twice_and_ends_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    words = ["--runs", name, "--kills", "3", "--seed", "5", "--output", str(tmp_path / "page.md")]
    command = [sys.executable, "-m", "bench.reward_kills", *words]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {name} | 3 |" in (tmp_path / "page.md").read_text()
    came = Counter(line.rpartition("came in ")[2] for line in done.stdout.splitlines() if ", kill " in line)
    assert came.total() == 3


def test_what_is_asked_for_again_is_seen_unless_it_was_under_way() -> None:
    whole = [(0, ["a", "b"]), (0, ["b"])]
    once = [(1, ["a", "b"]), (2, ["b"])]
    assert counted(whole, once, excused=[]) == (3, 0)
    twice = [(1, ["a", "b"]), (2, ["a", "b"]), (2, ["b"])]
    assert counted(whole, twice, excused=[1]) == (5, 2)
    with pytest.raises(AssertionError, match="asked for so often"):
        counted(whole, twice, excused=[])
    with pytest.raises(AssertionError, match="asked for so often"):
        counted(whole, [(1, ["a", "b"]), (1, ["b"]), (2, ["b"])], excused=[2])
    with pytest.raises(AssertionError, match="asked for so often"):
        counted(whole, once[:1], excused=[1])


def test_the_page_counts_kills_by_what_was_under_way() -> None:
    found = [Killed("grpo", ["rewards", "rewards", "update"], asked=9), Killed("dpo", ["saving"], cached=1)]
    lines = page(found, 3).splitlines()
    assert "All 4 kills came to the same bits." in " ".join(lines)
    assert "| rewards | 2 |  |" in lines
    assert "| all | 3 | 1 |" in lines
    assert set(AIMS) == {"grpo", "ppo", "dpo", "distill"}
