"""Tests which name is suggested in place of a misspelt one."""

from __future__ import annotations

import pytest

from drivetrain.config.near_names import suggestion

STAGES = ("pretrain", "sft", "dpo", "orpo", "simpo", "cpo", "ppo")


@pytest.mark.parametrize(
    ("given", "names", "meant"),
    [
        ("DPO", STAGES, "did you mean dpo?"),  # not cpo and ppo, which are one mistake off
        ("Pretrian", STAGES, "did you mean pretrain?"),
        ("gdpo", STAGES, "did you mean dpo?"),
        ("adamw", ("AdamW", "SGD"), "did you mean AdamW?"),
        ("pre", STAGES, "did you mean pretrain?"),
        ("dp", ("dp", "dpo"), "did you mean dp?"),
        ("d", ("dp", "dpo", "ddp"), "did you mean dp, dpo or ddp?"),
        ("", STAGES, ""),
        ("helpfulness", STAGES, ""),
    ],
)
def test_the_names_that_are_probably_meant_are_asked_for(given: str, names: tuple[str, ...], meant: str) -> None:
    assert suggestion(given, names) == meant
