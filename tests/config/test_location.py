"""Paths of the run file that may one day be elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

RUN: dict[str, Any] = {
    "workload": {"type": "image_classification", "model": {"path": "resnet"}, "data": {"source": "digits"}},
    "batch_size": 8,
    "loop": {"steps": 1},
}


def loaded(folder: Path, override: str) -> tuple[RunConfig | None, list[Problem]]:
    file = folder / "run.yaml"
    file.write_text(json.dumps(RUN))  # which is YAML too
    return load(file, [override])


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("output=s3://bucket/run", "output", "not supported yet"),
        ("output=gs://bucket/run", "output", "mount the store"),
        ("output=file:///runs/one", "output", "without file://"),
        ("workload.data.cache=abfs://store/cache", "workload.data.cache", "not supported yet"),
        ("workload.data.train=s3://bucket/pictures", "workload.data.train", "not supported yet"),
    ],
)
def test_an_address_is_refused_and_never_taken_for_a_folder(
    override: str, field: str, words: str, tmp_path: Path
) -> None:
    _, [problem] = loaded(tmp_path, override)
    assert problem.field == field
    assert words in str(problem)
    assert "s3:/b" not in str(problem).replace("s3://", "")


def test_a_path_that_python_made_of_an_address_is_refused_too() -> None:
    with pytest.raises(ValueError, match="not supported yet"):
        RunConfig.model_validate({**RUN, "output": Path("s3://bucket/run")})


@pytest.mark.parametrize("path", ["runs/one", "/runs/a:b", "C:/runs", "runs/s3://x", "~/runs"])
def test_paths_of_this_machine_are_taken_as_they_are(path: str, tmp_path: Path) -> None:
    run, problems = loaded(tmp_path, f"output={path}")
    assert run is not None
    assert not problems
    assert run.output == Path(path)
