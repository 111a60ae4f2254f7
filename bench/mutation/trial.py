"""One mutation against its nearest tests, round after round.

It is killed when a test fails with it and passes without it, so that a test that fails anyway does not count; one that
starts processes must fail with it once more, for a busy machine may have disturbed it. A test that hangs with it and
passes without it kills it too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from bench.mutation.nearest import Nearest
from bench.mutation.operators import Mutation
from bench.mutation.records import Record
from bench.mutation.tree import Outcome, Tree

PATIENCE = 4  # a test that fails at once with a mutation may take long without it
SLOW_ROUNDS = 2  # nearest rounds whose slow tests are run as well, after all others


def tried(mutation: Mutation, tree: Tree, nearest: Nearest, seconds: float) -> Record:
    """`seconds`: for tests that pass, beyond those of the mirror, which are always run; a survivor's record has `whole`
    where they were enough for all rounds."""
    begun = time.monotonic()
    rounds = nearest.rounds(mutation)
    near = [test for files in rounds[:SLOW_ROUNDS] for test in files]
    asked = [*((files, "not slow") for files in rounds), (near, "slow")]
    left, count, whole = seconds, 0, True
    for number, (files, marker) in enumerate(asked):
        outcome, spent = _round(mutation, tree, nearest, files, left if number else math.inf, marker)
        left, count = left - (spent if number else 0), count + outcome.started
        if outcome.verdict in ("failed", "hung"):
            result = "killed" if outcome.verdict == "failed" else "hung"
            return Record.of(mutation, result, outcome.tests[0], count, time.monotonic() - begun)
        if outcome.verdict == "out of time":
            whole = False
            break
    return Record.of(mutation, "survived", None, count, time.monotonic() - begun, whole)


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
