"""Tests why a model's folder cannot be loaded, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.models import model_folders
from drivetrain.models.model_folders import located, unloadable


def test_a_quantised_base_is_reported_that_it_is_one_and_not_to_install_what_would_not_help(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = unloadable(str(tmp_path), True, "workload.model.path", ImportError("pip install optimum")).problems
    assert found.why.endswith("are quantised (gptq) and cannot be trained here")
    assert "in 16 or 32 bits" in found.fix


def test_a_folder_without_a_readable_configuration_is_incomplete(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(text)
        (found,) = unloadable(str(tmp_path), True, "workload.model.path", OSError("no weights")).problems
        assert found.why == f"{tmp_path} cannot be loaded: no weights"
        assert found.fix == "give a complete model folder"


@pytest.mark.parametrize("begin", ["./", "runs/", "./runs/"])
def test_a_mistyped_run_is_no_name_on_a_hub(begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / begin
    for name in ("hotels", "digits"):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.yaml").write_text("batch_size: 8\n")
    monkeypatch.chdir(tmp_path)
    for typed, fix in (("hotelz", "did you mean {}hotels?"), ("xy", "there are {0}digits, {0}hotels")):
        with pytest.raises(UserError) as found:
            located(f"{begin}{typed}", "workload.model")
        [problem] = found.value.problems
        shown = begin.removeprefix("./")
        assert (problem.field, problem.why) == (f"{shown}{typed}", "there is no such folder")
        assert problem.fix == fix.format(shown)


def test_one_word_may_be_a_name_on_a_hub_beside_any_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2-mine").mkdir()
    (tmp_path / "gpt2-mine" / "run.yaml").write_text("batch_size: 8\n")
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(model_folders, "ask_hub", lambda name, _: asked.append(name))
    assert located("gpt2", "workload.model") == ("gpt2", False)
    assert located("openai/gpt2", "workload.model") == ("openai/gpt2", False)
    assert asked == ["gpt2", "openai/gpt2"]
