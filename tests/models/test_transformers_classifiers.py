from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging as transformers_logging

from drivetrain.errors import UserError
from drivetrain.models.transformers_classifiers import build_classifier

IMAGES, TEXTS = "AutoModelForImageClassification", "AutoModelForSequenceClassification"
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
BERT = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
CLASSES = ("cat", "dog", "fish")


def build(
    auto_class: str = IMAGES,
    path: Path | str | None = None,
    config: dict[str, Any] | None = None,
    labels: tuple[str, ...] = CLASSES,
    reported: list[str] | None = None,
) -> Any:
    warn = (reported if reported is not None else []).append
    return build_classifier(auto_class, None if path is None else str(path), config, labels, "workload.model", warn)


def problems(**given: Any) -> dict[str, str]:
    with pytest.raises(UserError) as error:
        build(**given)
    return {problem.field: f"{problem.why} | {problem.fix}" for problem in error.value.problems}


def save(model: nn.Module, folder: Path) -> Path:
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)  # type: ignore[operator]
    transformers_logging.enable_progress_bar()
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(build(config=RESNET), tmp_path_factory.mktemp("resnet"))


def test_a_model_from_a_config_is_the_one_transformers_makes() -> None:
    torch.manual_seed(1)
    ours = build(config=RESNET)
    torch.manual_seed(1)
    fields = {key: value for key, value in RESNET.items() if key != "model_type"}
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(**fields, num_labels=3))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


def test_the_classes_are_written_into_the_config() -> None:
    config = build(config=RESNET).config
    assert config.num_labels == 3
    assert config.id2label == {0: "cat", 1: "dog", 2: "fish"}
    assert config.label2id == {"cat": 0, "dog": 1, "fish": 2}


def test_a_saved_model_comes_back_with_its_weights_in_fp32(saved: Path) -> None:
    reported: list[str] = []
    model = build(path=saved, reported=reported)
    torch.manual_seed(0)
    original = build(config=RESNET)
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert reported == []


def test_on_the_meta_device_a_folder_gives_its_shapes_without_its_weights(saved: Path) -> None:
    """For plans, and for ranks that receive the weights from the first one."""
    loaded = build(path=saved, labels=("a", "b"))
    with torch.device("meta"):
        model = build(path=saved, labels=("a", "b"))
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = {name: (parameter.shape, parameter.dtype) for name, parameter in loaded.named_parameters()}
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()} == expected
    assert model.config.id2label == {0: "a", 1: "b"}


def test_without_weights_it_is_known_too_which_head_is_new(saved: Path) -> None:
    """Ranks that receive weights must train the same parts as the one that read them."""
    for labels in (("a", "b"), ("a", "b", "c", "d", "e")):
        loaded = build(path=saved, labels=labels)
        with torch.device("meta"):
            model = build(path=saved, labels=labels)
        assert model.starts_at_random == loaded.starts_at_random
    assert model.starts_at_random


def test_a_model_saved_in_half_precision_is_loaded_in_fp32(tmp_path: Path) -> None:
    folder = save(build(config=RESNET).half(), tmp_path)
    assert {parameter.dtype for parameter in build(path=folder).parameters()} == {torch.float32}


def test_a_head_over_other_classes_is_replaced_and_reported(saved: Path) -> None:
    reported: list[str] = []
    model = build(path=saved, labels=("a", "b"), reported=reported)
    assert model.config.num_labels == 2
    assert model.classifier[1].weight.shape == (2, 16)
    assert len(reported) == 1
    assert "classifier.1.weight" in reported[0]
    assert "starts at random" in reported[0]


def test_the_same_classes_in_another_order_are_reported(saved: Path) -> None:
    reported: list[str] = []
    build(path=saved, labels=("fish", "dog", "cat"), reported=reported)
    assert reported == ["the head was trained for the classes cat, dog, fish; it now stands for fish, dog, cat"]


def test_a_missing_head_is_reported_for_texts_too(tmp_path: Path) -> None:
    folder = save(build(TEXTS, config=BERT).bert, tmp_path)
    reported: list[str] = []
    build(TEXTS, path=folder, reported=reported)
    assert len(reported) == 1
    assert "classifier.bias, classifier.weight" in reported[0]


def test_values_that_do_not_go_together_are_reported() -> None:
    found = problems(auto_class=TEXTS, config={**BERT, "hidden_size": 33})
    assert "33" in found["workload.model.config"]


def test_a_value_that_breaks_inside_the_architecture_is_reported() -> None:
    assert (
        "'no_such_activation'"
        in problems(config={**RESNET, "hidden_act": "no_such_activation"})["workload.model.config"]
    )


def test_a_folder_that_is_no_model_is_reported(tmp_path: Path, saved: Path) -> None:
    def words(path: Path | str, **more: Any) -> str:
        return problems(path=path, **more)["workload.model.path"]

    assert "does not exist" in words(tmp_path / "nowhere")
    assert "holds no config.json" in words(tmp_path)
    assert "is a file" in words(saved / "config.json")
    assert "is a resnet, which has no SequenceClassification head" in words(saved, auto_class=TEXTS)
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be loaded" in words(broken)
    (broken / "model.safetensors").unlink()
    assert "no file named model.safetensors" in words(broken)
    (broken / "config.json").write_text("{")
    assert "not a valid JSON file" in words(broken)


def test_weights_that_belong_to_another_config_are_no_replaced_head(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_sizes": [8, 24]}))
    assert "do not fit its own config" in problems(path=folder)["workload.model.path"]


def test_an_unreachable_hub_names_the_way_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "give the folder's path" in problems(path="someone/some-model")["workload.model.path"]


def test_transformers_is_as_talkative_after_as_before(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()
    build(path=saved, labels=("a", "b"))
    problems(config={"model_type": "resnet", "depths": "x"})
    assert transformers_logging.get_verbosity() == transformers_logging.WARNING
    assert transformers_logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
