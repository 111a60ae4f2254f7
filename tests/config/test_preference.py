"""Settings of learning from pairs: what goes together, what is refused and why, and the reference that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from drivetrain.config import rules
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.preference import LOSSES, STAGES, USUAL, LossName
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
LORA = {"method": "lora"}


def built(folder: Path, stage: str = "dpo", data: dict[str, Any] | None = None, **run: Any) -> RunConfig:
    preference = run.pop("preference", {})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    workload = {"type": "language_model", "stage": stage, "model": {"path": str(folder)}, "preference": preference}
    workload["data"] = {"train": "owner/pairs", "template": "chatml", **(data or {})}
    found, problems = validate({"workload": workload, "batch_size": 8, "loop": {"steps": 10}, **run}, [])
    assert found is not None, problems
    return resolved(found, CPU)


def refusals(run: RunConfig) -> str:
    return "\n".join(map(str, rules.check(run, CPU)))


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_a_usual_loss_that_needs_no_setting(tmp_path: Path, stage: str) -> None:
    run: Any = built(tmp_path, stage)
    assert refusals(run) == ""
    assert run.workload.preference.losses(stage) == USUAL[stage]
    assert run.workload.preference.reference == ("copy" if stage in ("dpo", "kto") else "none")


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.stages == ("dpo",)])
def test_every_loss_of_dpo_is_accepted_with_what_it_needs(tmp_path: Path, name: str) -> None:
    needed = {"label_smoothing": 0.1} if LOSSES[name].smoothed else {}
    assert refusals(built(tmp_path, preference={"loss": name, **needed})) == ""
    assert set(get_args(LossName)) == LOSSES.keys()


@pytest.mark.parametrize(
    ("adapter", "reference"),
    [
        (LORA, "adapters_off"),
        ({"method": "ia3"}, "adapters_off"),
        ({**LORA, "pissa": True}, "copy"),
        ({**LORA, "train_also": ["lm_head"]}, "copy"),
        ({"method": "prefix"}, "copy"),
        (None, "copy"),
    ],
)
def test_the_reference_is_the_base_where_adapters_start_without_effect(
    tmp_path: Path, adapter: Any, reference: str
) -> None:
    run: Any = built(tmp_path, **({} if adapter is None else {"adapter": adapter}))
    assert run.workload.preference.reference == reference


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"loss": "orpo"}, "orpo is a loss of stage orpo"),
        ({"loss": "sft"}, "sft learns from the chosen answers alone"),
        ({"loss": "apo_zero", "label_smoothing": 0.1}, "label_smoothing: the loss apo_zero has none"),
        ({"loss": {"sigmoid": 1.0, "apo_zero": 1.0}, "divergence": "js"}, "divergence: the loss apo_zero has none"),
        ({"loss": "cdpo"}, "cdpo needs the share of labels that are wrong, above 0"),
        ({"loss": ["robust", "exo_pair"]}, "robust needs the share"),
        ({"gamma": 1.0}, "gamma: the loss sigmoid has none"),
        ({"discopop_tau": 0.1}, "discopop_tau: the loss sigmoid has none"),
        ({"divergence_alpha": 0.3}, "the divergence is reverse_kl"),
        ({"loss": "bco_pair", "reference": "none"}, "bco_pair measures each answer against the reference"),
        ({"reference": "adapters_off"}, "there are no adapters to put off"),
        ({"reference_every": 5}, ""),
        ({"reference_every": 5, "reference": "none"}, "the reference is none"),
        ({"reference_mixing": 0.3}, "no copy follows the model"),
        ({"likelihood_weights": True}, ""),
        ({"loss": "aot", "likelihood_weights": True}, "the loss aot has none"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    found = refusals(built(tmp_path, preference=given))
    assert why in found
    assert bool(why) == bool(found)


def test_what_a_stage_does_not_read_is_refused(tmp_path: Path) -> None:
    assert "stage simpo has no such weight" in refusals(built(tmp_path, "simpo", preference={"ld_alpha": 0.5}))
    assert "simpo has no reference" in refusals(built(tmp_path, "simpo", preference={"reference": "copy"}))
    assert "only stages that learn from preferences read it" in refusals(
        built(tmp_path, "sft", preference={"beta": 0.5})
    )
    assert "stage dpo reads its data whole" in refusals(built(tmp_path, data={"stream": True}))


def test_adapters_that_cannot_be_put_off_need_a_copy(tmp_path: Path) -> None:
    found = built(tmp_path, adapter={**LORA, "train_also": ["lm_head"]}, preference={"reference": "adapters_off"})
    assert "modules trained whole" in refusals(found)


def test_settings_without_effect_on_pairs_are_reported(tmp_path: Path) -> None:
    words = " ".join(notices(built(tmp_path, data={"train_on": "last_response"}), CPU))
    assert "of preferences the answers are trained on" in words
    labelled = notices(built(tmp_path, "kto", data={"pairs": "all"}), CPU)
    assert "stage kto learns from no pairs" in " ".join(labelled)


@pytest.mark.parametrize("given", [{"loss": "best"}, {"loss": {"sigmoid": 0}}, {"loss": []}, {"label_smoothing": 0.5}])
def test_a_block_that_no_loss_can_read_is_refused_when_it_is_loaded(given: dict[str, Any]) -> None:
    workload = {"type": "language_model", "stage": "dpo", "model": {"path": "a/b"}, "data": {"train": "a/b"}}
    _, problems = validate({"workload": {**workload, "preference": given}, "batch_size": 8, "loop": {"steps": 1}}, [])
    assert any("workload.preference" in str(each) for each in problems)


@pytest.mark.parametrize(
    ("stage", "preference", "more", "why"),
    [
        ("dpo", {"reference": "cached"}, {}, ""),
        ("kto", {"reference": "cached"}, {"adapter": LORA}, ""),
        ("dpo", {"reference_model": "a/b"}, {"adapter": LORA}, ""),
        ("orpo", {"reference": "cached"}, {}, "reference: orpo has no reference"),
        ("orpo", {"reference_model": "a/b"}, {}, "reference_model: the reference is none"),
        ("dpo", {"reference": "cached", "reference_model": "a/b"}, {}, ""),
        (
            "dpo",
            {"reference": "cached", "reference_model": {"path": "a/b", "precision": "bf16"}},
            {},
            "reference_model.precision: the reference is cached",
        ),
        ("dpo", {"reference_model": {"precision": "bf16"}}, {}, "precision: no other model lies beside"),
        (
            "dpo",
            {"reference_model": {"path": "a/b", "precision": "bf16"}},
            {"engine": {"name": "mesh", "tp": 2}},
            "reference_model.precision: the trial step compares",
        ),
        ("dpo", {"reference": "cached", "reference_every": 3}, {}, "reference_every: the reference is cached"),
        ("dpo", {"reference_model": "a/b", "reference_every": 3}, {}, "another model cannot follow"),
        ("dpo", {"reference": "cached"}, {"engine": {"name": "mesh", "pp": 2}}, "engine.pp: pp ranks run no pass"),
    ],
)
def test_a_reference_is_computed_once_or_another_model(
    tmp_path: Path, stage: str, preference: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    run = built(tmp_path, stage, preference=preference, **more)
    found = refusals(run)
    assert why in found if why else found == ""
    if preference.get("reference_model") and not why:
        given = preference.get("reference", "copy")
        assert run.workload.preference.reference == given  # type: ignore[union-attr]


@pytest.mark.parametrize("loss", ["dpo", "DPO", ["dpo", "nll"], {"dpo": 1.0}])
def test_the_loss_dpo_is_refused_with_the_name_that_dpos_own_loss_has(tmp_path: Path, loss: Any) -> None:
    workload = {"type": "language_model", "stage": "dpo", "model": {"path": str(tmp_path)}}
    workload |= {"data": {"train": "owner/pairs", "template": "chatml"}, "preference": {"loss": loss}}
    _, [found] = validate({"workload": workload, "batch_size": 8, "loop": {"steps": 10}}, [])
    assert found.field == "workload.preference.loss"
    assert "dpo is the name of a stage, and of no loss" in found.why
    assert found.fix == "DPO's own loss is called sigmoid: write sigmoid, or leave it out at stage dpo"


def test_a_stage_in_capital_letters_is_reported_with_its_name(tmp_path: Path) -> None:
    workload = {
        "type": "language_model",
        "stage": "DPO",
        "model": {"path": str(tmp_path)},
        "data": {"train": "o/pairs"},
    }
    _, [found] = validate({"workload": workload, "batch_size": 8, "loop": {"steps": 10}}, [])
    assert found.fix == "did you mean dpo?"
