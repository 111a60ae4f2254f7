"""Tests why a model's folder cannot be loaded, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.models.model_folders import unloadable


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
