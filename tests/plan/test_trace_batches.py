"""Tests that a plan's batches are the fullest that a run has, cut as on the device that is planned for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drivetrain.config.run import RunConfig
from drivetrain.data.fixed_rows import cheapest_rows
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.plan.deep_trace import Tracer
from drivetrain.plan.machines import cluster
from drivetrain.plan.trace import step_costs
from drivetrain.plan.trace_batches import LOOKED_AT, fullest_context_rank, fullest_step
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import read_workload
from tests.plan.measured import read_run, write_run

SAMPLES, BATCH = 80, 4
ORDER = GlobalOrder(SAMPLES, BATCH, 0)
TOKENS = np.full(SAMPLES, 5)


def with_a_long_one(step: int) -> np.ndarray:
    tokens = TOKENS.copy()
    tokens[ORDER.batch(step)[1][0]] = 50
    return tokens


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_with_the_largest_micro_batch_is_traced(packed: bool) -> None:
    for step in (0, 3, 11):
        mine = Slice(0, 1, 2, Lengths(with_a_long_one(step), 10**6, packed))
        assert fullest_step(ORDER, mine, 20) == step


def test_steps_that_the_run_does_not_make_or_that_are_far_away_do_not_count() -> None:
    mine = Slice(0, 1, 2, Lengths(with_a_long_one(11), 10**6))
    assert fullest_step(ORDER, mine, 11) == 0
    assert fullest_step(ORDER, Slice(0, 1, 2, Lengths(TOKENS, 10**6)), 10**9) == 0
    assert LOOKED_AT < 100


def test_where_all_micro_batches_have_as_many_tokens_the_first_step_is() -> None:
    tokens = with_a_long_one(3)
    rows = cheapest_rows([[tokens]], 50, BATCH, 0, None)
    assert fullest_step(ORDER, Slice(0, 1, 4, Lengths(tokens, 0, True, None, rows)), 20) == 0
    assert fullest_step(ORDER, Slice(0, 1, 4), 20) == 0


@pytest.fixture
def texts(tmp_path: Path) -> RunConfig:
    """Four of five answers are short, and a GPU is done with all of them before it could start a second pass."""
    words = ["a", "few", "words"]
    rows = [{"instruction": "say", "output": " ".join(words * (16 if n % 5 == 0 else 1))} for n in range(60)]
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    given = write_run(tmp_path, train=str(tmp_path / "answers.json"), template="plain", length=128, packing=False)
    return read_run(given, ["workload.stage=sft", "workload.model.config.max_position_embeddings=128", "batch_size=40"])


def test_batches_are_cut_as_on_the_device_that_is_planned_for(texts: RunConfig) -> None:
    workload = read_workload(texts, training=True)
    here = step_costs(texts, detect("cpu"), workload)
    there = step_costs(texts, cluster("1xH100").host, workload)
    assert here.tokens is not None
    assert there.tokens is not None
    assert workload.lengths is not None
    assert there.tokens == 40 * max(workload.lengths)
    assert here.tokens < 0.7 * there.tokens


def test_of_context_ranks_the_one_that_has_the_targets_is_traced(tmp_path: Path) -> None:
    """Targets lie at the end of each row, behind a long instruction: the first rank's part has none."""
    rows = [{"instruction": "say it again " * 6, "output": "a few words"} for _ in range(16)]
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    given = write_run(tmp_path, train=str(tmp_path / "answers.json"), template="plain", length=128, packing=False)
    more = ["workload.stage=sft", "workload.model.config.max_position_embeddings=128", "processes=2"]
    run = read_run(given, [*more, "engine={name: mesh, cp: 2}"])
    workload = read_workload(run, training=True)
    assert fullest_context_rank(run, detect("cpu"), workload) == 1
    found = Tracer().fullest_step_costs(run, detect("cpu"), workload, quick=True)
    first = step_costs(run, detect("cpu"), workload, rank=0)
    assert {*found.by_rank} == {1}
    assert found.memory.allocated > first.memory.allocated
