"""Questions of multiple choice to several models: one that is not there, or fails, takes nothing from the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drivetrain.compare import choice_evaluations as module
from drivetrain.compare.choice_evaluations import choice_evaluations
from drivetrain.errors import RunError, UserError
from tests.choice_files import mmlu

MODELS = [("a", Path("a"), "best"), ("b", Path("b"), "best")]


def chosen(*_: object) -> SimpleNamespace:
    return SimpleNamespace(cut=0, right=np.array([True, False, True]))


def test_a_place_without_a_model_is_refused_before_any_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(module, "load_model", never)
    places = [("one", tmp_path / "not-there", "best"), ("two", tmp_path / "nor-there", "best")]
    with pytest.raises(UserError) as error:
        choice_evaluations(places, mmlu(tmp_path, ["law"]), 0, [], False, lambda _: None)
    assert [each.field.split(":")[0] for each in error.value.problems] == ["one", "two"]


def test_a_model_that_fails_has_its_reason_in_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(place: Path, **_: object) -> SimpleNamespace:
        if place == Path("b"):
            raise RunError("its weights are broken")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(module, "check_source", lambda *_: None)
    monkeypatch.setattr(module, "load_model", load)
    monkeypatch.setattr(module, "choose", chosen)
    folder = mmlu(tmp_path, ["law"])
    found = choice_evaluations(MODELS, folder, 0, [], False, lambda _: None)
    assert {each.model for each in found if each.failure is None} == {"a"}
    assert {each.failure for each in found if each.model == "b"} == {"its weights are broken"}
    assert len([each for each in found if each.model == "a"]) == len([each for each in found if each.model == "b"])
    with pytest.raises(RunError, match="broken"):
        choice_evaluations(MODELS[1:], folder, 0, [], False, lambda _: None)
