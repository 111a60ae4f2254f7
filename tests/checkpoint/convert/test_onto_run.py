"""Tests how far another's checkpoint says that it is."""

from __future__ import annotations

import pytest
import torch

from drivetrain.checkpoint.convert.foreign import Moments, Note, Theirs
from drivetrain.checkpoint.convert.onto_run import _progress
from drivetrain.config.load import validate


@pytest.mark.parametrize(("updates", "expected"), [(2, 2), (4, 4)])
def test_the_schedule_goes_by_the_updates_that_adam_counted(updates: int, expected: int) -> None:
    """Steps that a loss scaler skipped are steps without an update."""
    raw = {"workload": {"type": "module", "path": "net.py"}, "loop": {"steps": 9}, "batch_size": 8}
    run, _ = validate(raw, [])
    assert run is not None
    moments = Moments({"first.weight": {"step": torch.tensor(float(updates))}})
    notes: list[Note] = []
    progress = _progress(Theirs({}, moments, step=4), run, None, notes)
    assert (progress.step, progress.updates, progress.samples) == (4, expected, 32)
    assert [note.item for note in notes] == ([] if updates == 4 else ["updates"])
