"""Paths of the run file that may one day be elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.adapter import Adapter
from drivetrain.config.load import load
from drivetrain.config.location import store_address
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
        ("output=file:///runs/one", "output", "without file://"),
        ("workload.data.cache=abfs://store/cache", "workload.data.cache", "of this machine"),
        ("workload.data.train=ftp://host/pictures", "workload.data.train", "cannot be read"),
        ("workload.data.train=https://user:word@host/pictures", "workload.data.train", "credentials come from"),
        ("workload.data.train=https://host/a?X-Amz-Signature=1", "workload.data.train", "with a query"),
        ("workload.data.train=s3://bucket/../a", "workload.data.train", "among its names"),
        ("workload.data.train=s3://", "workload.data.train", "no bucket"),
        ("workload.data.train=az://c/k?sv=1&sig=x", "workload.data.train", "with a query"),
        ("workload.data.train=s3://b/k?Signature=x", "workload.data.train", "with a query"),
        ("workload.data.train=s3://b/{..,a}/k", "workload.data.train", "among its names"),
        ("mirror=s3://b/*", "mirror", "wildcard"),
    ],
)
def test_an_address_of_no_use_is_refused_and_never_taken_for_a_folder(
    override: str, field: str, words: str, tmp_path: Path
) -> None:
    _, [problem] = loaded(tmp_path, override)
    assert problem.field == field
    assert words in str(problem)


def test_a_refused_address_is_shown_without_its_secrets(tmp_path: Path) -> None:
    for address in ("https://user:word@host/a", "https://host/a?X-Amz-Signature=word", "az://c/k?sig=word"):
        _, [problem] = loaded(tmp_path, f"workload.data.train={address}")
        assert "<...>" in str(problem)
        assert "word" not in str(problem).replace("password", "")


@pytest.mark.parametrize(
    "address", ["s3://b/k", "s3://b/part-?.csv", "gs://b/k", "az://c/k", "hf://datasets/o/n/f", "https://host/f"]
)
def test_data_may_lie_in_a_store(address: str, tmp_path: Path) -> None:
    run, problems = loaded(tmp_path, f"workload.data.train={address}")
    assert run is not None
    assert not problems
    assert run.workload.data.train == address  # type: ignore[union-attr]


def test_a_path_that_python_made_of_an_address_is_read_as_that_address() -> None:
    assert store_address(Path("s3://bucket/run/")) == "s3://bucket/run"
    adapter = Adapter.model_validate({"path": Path("s3://bucket/run")})
    assert adapter.model_dump(mode="json")["path"] == "s3://bucket/run"
    assert Adapter.model_validate_json(adapter.model_dump_json()) == adapter


@pytest.mark.parametrize("path", ["runs/one", "/runs/a:b", "C:/runs", "runs/s3://x", "~/runs"])
def test_paths_of_this_machine_are_taken_as_they_are(path: str, tmp_path: Path) -> None:
    run, problems = loaded(tmp_path, f"output={path}")
    assert run is not None
    assert not problems
    assert run.output == Path(path)
