"""One mutation against its nearest tests, round after round.

It is killed when a test fails with it and passes without it, so that a test that fails anyway does not count; one that
starts processes must fail with it once more, for a busy machine may have disturbed it. A test that hangs with it and
passes without it kills it too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from bench.mutation.nearest import Nearest
from bench.mutation.operators import Mutation
from bench.mutation.records import Record
from bench.mutation.tree import Outcome, Tree

PATIENCE = 4  # a test that fails at once with a mutation may take long without it
CHUNK = 8  # files
SLOW_ROUNDS = 2  # nearest rounds whose slow tests are run as well, after all others


def tried(mutation: Mutation, tree: Tree, nearest: Nearest, seconds: float, first: Sequence[str] = ()) -> Record:
    """`seconds`: for tests that pass, beyond those of the mirror, which may take three times as long; a survivor's
    record has `whole` where they were enough for all rounds. `first`: tests to run before all others."""
    begun, left, count, whole = time.monotonic(), seconds, 0, True
    for files, marker, is_mirror in _asked(mutation, nearest, first):
        outcome, spent = _round(mutation, tree, nearest, files, 3 * seconds if is_mirror else left, marker)
        left, count = left - (0 if is_mirror else spent), count + outcome.started
        if outcome.verdict in ("failed", "hung"):
            result = "killed" if outcome.verdict == "failed" else "hung"
            return Record.of(mutation, result, outcome.tests[0], count, time.monotonic() - begun)
        if outcome.verdict == "out of time":
            whole = False
            break
    return Record.of(mutation, "survived", None, count, time.monotonic() - begun, whole)


def _asked(mutation: Mutation, nearest: Nearest, first: Sequence[str]) -> Iterator[tuple[Sequence[str], str, bool]]:
    """Tests to run one lot after another: which, pytest's marker expression, and whether they count as the mirror's."""
    rounds = nearest.rounds(mutation)
    near = [test for files in rounds[:SLOW_ROUNDS] for test in files]
    yield first, "", True
    yield nearest.naming(mutation, near), "not slow", True
    yield rounds[0], "not slow", True
    for files in rounds[1:]:
        yield from ((chunk, "not slow", False) for chunk in _chunks(files, nearest))
    yield near, "slow", False


def _chunks(files: Sequence[str], nearest: Nearest) -> list[Sequence[str]]:
    """Quick files a few at a time, since pytest imports all of them before the first test; the others at once, since
    they share processes."""
    quick = [file for file in files if not nearest.starts_processes(file)]
    others = [file for file in files if nearest.starts_processes(file)]
    return [*(quick[i : i + CHUNK] for i in range(0, len(quick), CHUNK)), *([others] if others else [])]


def _round(
    mutation: Mutation, tree: Tree, nearest: Nearest, files: Sequence[str], seconds: float, marker: str
) -> tuple[Outcome, float]:
    """The outcome, failures that are not the mutation's left out, and the seconds it took."""
    spent = 0.0
    while True:
        chosen = [file for file in files if file not in tree.failing]
        if not chosen:
            return Outcome("passed"), spent
        begun = time.monotonic()
        with tree.mutated(mutation):
            outcome = tree.run(chosen, max(seconds - spent, 0), marker)
        spent += time.monotonic() - begun
        if outcome.verdict in ("passed", "out of time"):
            return outcome, spent
        patience = tree.test_seconds * (1 if outcome.verdict == "hung" else PATIENCE)
        if not tree.passes(outcome.tests, patience):
            continue
        if outcome.verdict == "hung" or not nearest.starts_processes(outcome.tests[0]):
            return outcome, spent
        with tree.mutated(mutation):
            again = tree.run(outcome.tests, math.inf)
        if again.verdict in ("failed", "hung"):
            return outcome, spent
        tree.failing |= set(outcome.tests)  # now it fails and now it does not
