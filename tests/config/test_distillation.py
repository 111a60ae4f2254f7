"""Settings of learning from a teacher: what goes together, and what is refused and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.run import RunConfig

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))


def built(folder: Path, stage: str = "distill", **run: Any) -> RunConfig:
    distillation, model = run.pop("distillation", {"teacher": "a/b"}), run.pop("model", {})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    workload = {"type": "language_model", "stage": stage, "model": {"path": str(folder), **model}}
    workload |= {"distillation": distillation, "data": {"train": "owner/talks", "template": "chatml"}}
    found, problems = validate({"workload": workload, "batch_size": 8, "loop": {"steps": 10}, **run}, [])
    assert found is not None, problems
    return found


def refusals(run: RunConfig) -> str:
    return "\n".join(map(str, rules.check(run, CPU)))


@pytest.mark.parametrize(
    ("given", "losses"),
    [({}, {"js": 1.0}), ({"loss": "reverse_kl"}, {"reverse_kl": 1.0}), ({"loss": {"js": 1, "sft": 0.5}}, None)],
)
def test_a_loss_is_a_name_or_a_mixture_and_the_teacher_a_path(
    tmp_path: Path, given: dict[str, Any], losses: dict[str, float] | None
) -> None:
    run: Any = built(tmp_path, distillation={"teacher": "a/b", **given})
    assert refusals(run) == ""
    assert run.workload.distillation.losses == (losses or given["loss"])
    assert run.workload.distillation.teacher.path == "a/b"


@pytest.mark.parametrize(
    ("stage", "given", "why"),
    [
        ("distill", {}, "teacher.path: there is no teacher to learn from"),
        ("distill", {"teacher": "a/b", "loss": "sft"}, "loss: sft reads no teacher"),
        ("distill", {"teacher": "a/b", "loss": "forward_kl", "beta": 0.2}, "beta: forward_kl has none"),
        ("sft", {"teacher": "a/b"}, "teacher: only stage distill reads it, and workload.stage is sft"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, stage: str, given: dict[str, Any], why: str) -> None:
    assert f"workload.distillation.{why}" in refusals(built(tmp_path, stage, distillation=given))


def test_a_fused_loss_is_said_to_have_no_effect(tmp_path: Path) -> None:
    found = " ".join(notices(built(tmp_path, model={"fused_loss": True}), CPU))
    assert "workload.model.fused_loss" in found
    assert "reads whole distributions" in found
