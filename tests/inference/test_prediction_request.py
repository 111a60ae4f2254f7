"""A message names what differs between the request that an unfinished file answers and a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.config.load import validate
from drivetrain.inference.prediction_request import MOST_NAMED, changes, request_of


def test_what_differs_from_an_interrupted_prediction_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("a")

    def request(step: int = 1, texts: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
        workload = {"type": "text_classification", "model": {"path": "bert"}, "data": {"train": "train.csv"}}
        run, problems = validate({"workload": workload, "batch_size": 2, "loop": {"steps": 1}, **settings}, [])
        assert run is not None, problems
        return request_of(run, tmp_path / f"step-{step}", None if texts else str(data), list(texts))

    first = request()
    assert json.loads(json.dumps(first)) == first, "as it is read again"
    assert changes(first, request(2)) == f'checkpoint was "{tmp_path}/step-1", now "{tmp_path}/step-2"'
    assert changes(first, request(batch_size=4)) == "batch_size was 2, now 4"
    assert changes(first, request(texts=("good", "bad"))) == (
        f'data was "{data}", now null; no texts given then, 2 texts now'
    )
    data.write_text("ab")
    assert changes(first, request()) == f"{data} was written anew since"
    many = request(batch_size=4, seed=1, precision="bf16", lr=1.0, loop={"steps": 2}, evaluation={"every_steps": 1})
    assert changes(first, many).count(";") == MOST_NAMED
    assert "more" in changes(first, many)
    for unknown in (None, 3, {"run": "a"}, {**first, "run": "digest"}):
        assert changes(unknown, first) == "what they answer is not known"
