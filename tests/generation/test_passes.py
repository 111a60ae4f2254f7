"""Answers to each rank's own prompts, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.answering import Answering
from drivetrain.generation.passes import Passes
from tests.generation.test_prompts import workload
from tests.tiny_workload import tiny_engine


def test_a_prompt_gets_the_answer_of_its_own_draw(tmp_path: Path) -> None:
    work = workload(tmp_path, generate={"prompts": ["say 1", "say 2"], "max_new_tokens": 6, "temperature": 1.0})
    engine = tiny_engine(work)
    passes, (one, other) = Passes(engine, work, Communicator(), 2), work.prompts[-2:]
    found = passes.answers([one, other], [0, 1])
    known = Answering(engine, work, Communicator(), 1).dealt({0: one, 1: other})
    assert [each.tokens for each in found] == [list(known[0].tokens), list(known[1].tokens)]
    [alone] = passes.answers([other], [1])
    assert alone.tokens == found[1].tokens
    assert alone.logprobs == pytest.approx(found[1].logprobs, rel=1e-5)
    with pytest.raises(ValueError, match="2 prompts have 1 different draws"):
        passes.answers([one, other], [7, 7])
