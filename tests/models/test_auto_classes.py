"""Classes of Transformers are imported without passes of Python's collector, where a process runs nothing else."""

from __future__ import annotations

import gc

import pytest
import transformers

from drivetrain.memory import garbage
from drivetrain.models.auto_classes import imported_auto_class


@pytest.mark.parametrize("owns", [True, False])
def test_what_a_model_needs_is_set_apart_in_a_process_of_its_own(owns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_owns_process", owns)
    gc.unfreeze()
    try:
        assert imported_auto_class("AutoModelForCausalLM") is transformers.AutoModelForCausalLM
        assert (gc.get_freeze_count() > 0) is owns
    finally:
        gc.freeze()  # as conftest.py had it
