"""What `drivetrain plan` searches: the fields that the file and the command line leave open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from drivetrain.plan import planning
from drivetrain.plan.search_space import Space

RUN = """
workload: {type: module, path: own.py}
batch_size: 16
loop: {steps: 30}
optimizer: {name: sgd, lr: 0.5}
"""


@pytest.mark.parametrize(
    ("in_file", "arguments", "machine", "precisions", "engines"),
    [
        ("", [], "2xA100-80GB", ("fp32",), None),
        ("engine: ddp", [], "2xA100-80GB", ("fp32",), None),
        ("", ["engine=ddp"], "2xA100-80GB", ("fp32",), ["ddp"]),
        ("engine: auto\nprecision: auto", [], "2xA100-80GB", ("fp32", "tf32", "bf16-mixed"), None),
        ("", ["engine=auto", "precision=auto"], "4xP40", ("fp32",), None),
    ],
)
def test_a_plan_searches_what_is_left_open(
    in_file: str,
    arguments: Sequence[str],
    machine: str,
    precisions: tuple[str, ...],
    engines: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own.py").write_text("")
    (tmp_path / "run.yaml").write_text(RUN + in_file)
    monkeypatch.chdir(tmp_path)
    seen: list[Space] = []
    monkeypatch.setattr(planning, "searched", lambda _, space, *__: seen.append(space))
    planning.planned(Path("run.yaml"), arguments, machine)
    assert seen[0].precisions == precisions
    assert (None if seen[0].engines is None else [each.label for each in seen[0].engines]) == engines
