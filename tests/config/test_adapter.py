"""The adapter block: what a run leaves of it gives the same run again, and contradictions are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem
from tests.tiny_workload import CPU

BASE = {
    "workload": {"type": "language_model", "stage": "sft", "model": {"path": "base"}, "data": {"train": "rows.jsonl"}},
    "batch_size": 4,
    "loop": {"steps": 2},
}


def made(adapter: Any) -> tuple[RunConfig, list[Problem]]:
    run, problems = validate({**BASE, "adapter": adapter}, [])
    assert run is not None, problems
    return run, [each for each in rules.check(run, CPU) if each.field.startswith("adapter")]


METHODS: list[Any] = [
    "lora",
    {"dora": True, "rank": 4},
    {"pissa": True, "alpha": 3},
    {"method": "oft", "block_size": 64, "dropout": 0.1},
    "ia3",
    {"method": "ia3", "targets": ["q_proj", "up_proj"], "feedforward": ["up_proj"]},
    "prompt",
    {"method": "prefix", "hidden_size": 8},
    {"method": "p-tuning", "dropout": 0.1},
    [{"name": "a"}, {"name": "b", "rank": 2}],
]


@pytest.mark.parametrize("adapter", METHODS, ids=str)
def test_the_run_file_that_a_run_leaves_gives_the_same_run_again(adapter: Any) -> None:
    run, problems = made(adapter)
    assert not problems
    again, problems = made(run.model_dump(mode="json")["adapter"])
    assert not problems
    assert again.adapter == run.adapter


@pytest.mark.parametrize(
    ("adapter", "field"),
    [
        ({"method": "ia3", "rank": 4}, "adapter.rank"),
        ({"method": "oft", "rank": 4}, "adapter.rank"),
        ({"block_size": 16}, "adapter.block_size"),
        ({"method": "prompt", "train_also": ["head"]}, "adapter.train_also"),
        ({"method": "ia3", "feedforward": ["up_proj"]}, "adapter.feedforward"),
        ({"dora": True, "pissa": True}, "adapter.pissa"),
        ([{"name": "a", "dora": True}, {"name": "b", "pissa": True}], "adapter.pissa"),
    ],
)
def test_what_contradicts_itself_is_reported(adapter: Any, field: str) -> None:
    assert [each.field for each in made(adapter)[1]] == [field]


def test_what_a_saved_adapter_is_counts_too(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"use_dora": true}')
    saved = {"name": "old", "path": str(tmp_path), "trained": False}
    assert [each.field for each in made([saved, {"name": "new", "pissa": True}])[1]] == ["adapter.pissa"]
    assert not made([saved, {"name": "new"}])[1]
    run, _ = validate({**BASE, "adapter": saved | {"trained": True}, "quantisation_aware": "int4-weight"}, [])
    assert run is not None
    assert "adapter.dora" in [each.field for each in rules.check(run, CPU)]


@pytest.mark.parametrize("key", ["alpha", "lr_ratio"])
def test_numbers_are_finite(key: str) -> None:
    _, problems = validate({**BASE, "adapter": {key: float("inf")}}, [])
    assert [(each.field, each.why) for each in problems] == [
        (f"adapter.{key}", "inf was given; input should be a finite number")
    ]
