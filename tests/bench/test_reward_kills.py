"""The bench that kills runs that learn from rewards: runs pass it, and what is asked for again does not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.reward_aims import AIMS
from bench.reward_checks import Killed, counted
from bench.reward_kills import page

BENCH = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_run_that_is_killed_three_times_asks_for_nothing_twice_and_ends_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    killed_three_times(name, "single", tmp_path)


@pytest.mark.slow  # the hour of all that has to pass is nearly full; tests/rewards/test_asking.py has what it found
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_two_ranks_that_are_killed_three_times_with_and_without_their_launcher_ask_for_nothing_twice(
    name: str, tmp_path: Path
) -> None:
    printed = killed_three_times(name, "ddp", tmp_path)
    assert [printed.count(f": {victim}, aimed") for victim in ("one rank", "the launcher")] == [2, 1]


def killed_three_times(name: str, engine: str, folder: Path) -> str:
    words = ["--runs", name, "--engines", engine, "--kills", "3", "--seed", "5", "--output", str(folder / "page.md")]
    command = [sys.executable, "-m", "bench.reward_kills", *words]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {name} | 3 |" in (folder / "page.md").read_text()
    came = Counter(line.rpartition("came in ")[2] for line in done.stdout.splitlines() if ", kill " in line)
    assert came.total() == 3
    return done.stdout


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


def test_processes_are_judged_in_the_order_in_which_they_first_asked_whatever_their_numbers() -> None:
    whole = [(0, ["a"])]
    assert counted(whole, [(90, ["a"]), (7, ["a"])], excused=[90]) == (2, 1)
    with pytest.raises(AssertionError, match="asked for so often"):
        counted(whole, [(90, ["a"]), (7, ["a"])], excused=[7])


def test_the_page_has_a_part_for_each_engine_and_what_was_killed_there() -> None:
    alone = Killed("grpo", ["update"])
    found = [alone, Killed("grpo", ["rewards", "update"], ["one rank", "the launcher"], "fsdp")]
    one, two = page("", found, 3).split("## ")[1:]
    assert one.startswith("One process")
    assert "killed" not in one
    assert two.startswith("2 ranks, fsdp")
    assert "| rewards | 1 |" in two.splitlines()
    assert "| the launcher | 1 |" in two.splitlines()


def test_parts_of_engines_that_were_not_run_stay_in_the_page() -> None:
    before = page("", [Killed("grpo", ["update"]), Killed("dpo", ["saving"], engine="ddp")], 3)
    after = page(before, [Killed("ppo", ["rewards"], engine="ddp")], 4)
    assert [part.split("\n")[0] for part in after.split("## ")[1:]] == ["One process", "2 ranks, ddp"]
    assert after.split("## ")[1] == before.split("## ")[1]
    assert "(seed 4)" in after
    assert "dpo" not in after.split("## ")[2]


def test_the_page_counts_kills_by_what_was_under_way() -> None:
    found = [Killed("grpo", ["rewards", "rewards", "update"], asked=9), Killed("dpo", ["saving"], cached=1)]
    lines = page("", found, 3).splitlines()
    assert "All 4 kills came to the same bits (seed 3)." in lines
    assert "| rewards | 2 |  |" in lines
    assert "| all | 3 | 1 |" in lines
    assert set(AIMS) == {"grpo", "ppo", "dpo", "distill"}
