from __future__ import annotations

from typing import Any

import pytest

from drivetrain.models.classifier_config import config_accepts, config_problems
from tests.models.test_transformers_classifiers import IMAGES, RESNET, TEXTS


def problems(auto_class: str, given: dict[str, Any]) -> dict[str, str]:
    found = config_problems(auto_class, given, "workload.model.config")
    return {problem.field: f"{problem.why} | {problem.fix}" for problem in found}


def test_all_unknown_keys_and_bad_values_are_reported_at_once() -> None:
    given = {**RESNET, "hiden_sizes": [8], "depths": "x", "layer_type": "y", "num_labels": 3, "max_length": 5}
    found = problems(IMAGES, given)
    start = "workload.model.config."
    assert set(found) == {start + key for key in ("hiden_sizes", "depths", "layer_type", "num_labels", "max_length")}
    assert "did you mean hidden_sizes?" in found[start + "hiden_sizes"]
    assert "'x' was given" in found[start + "depths"]
    assert "not one of basic,bottleneck" in found[start + "layer_type"]


def test_an_older_spelling_that_transformers_understands_is_no_unknown_key() -> None:
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "rope_theta": 5000.0}
    assert config_problems(TEXTS, llama, "config") == []
    assert [p.field for p in config_problems(TEXTS, {**llama, "rope_tetta": 1.0}, "config")] == ["config.rope_tetta"]


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("resnett", "did you mean resnet"), ("llama", "no ImageClassification head"), (None, "required")],
)
def test_a_model_type_that_cannot_classify_images_is_reported(model_type: str | None, words: str) -> None:
    assert words in problems(IMAGES, {"model_type": model_type})["workload.model.config.model_type"]


def test_config_accepts_says_which_fields_an_architecture_has() -> None:
    assert config_accepts({"model_type": "vit"}, "image_size")
    assert not config_accepts({"model_type": "resnet"}, "image_size")
    assert config_accepts({"model_type": "resnet"}, "num_channels")
    assert not config_accepts({"model_type": "no such"}, "num_channels")
