"""Code that lies beside a model runs where the run file allows it for that path, and nothing asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.data.tables import load_from_hub, without_code
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import UserError
from drivetrain.inference.weights import check_fits
from drivetrain.models.model_folders import config_of
from drivetrain.models.transformers_classifiers import build_classifier
from tests.tiny_language import LLAMA
from tests.trust.stranger import MODEL_MAP, model_with_code, tokenizer_with_code

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, marker: Path) -> list[str]:
    """Words that train a step of a model with its own code, up to its permission."""
    (tmp_path / "train.txt").write_text("all the world's a stage, " * 20)
    model = model_with_code(tmp_path / "net", marker)
    (tmp_path / "run.yaml").write_text(
        f"workload: {{type: language_model, model: {{path: {model}, tokenizer: bytes}},\n"
        f"  data: {{train: {tmp_path / 'train.txt'}, length: 16, cache: {tmp_path / 'cache'}}}}}\n"
        "batch_size: 2\nloop: {steps: 1}\n"
    )
    return [str(tmp_path / "run.yaml"), f"output={tmp_path / 'out'}"]


def test_a_model_with_code_of_its_own_is_refused_with_what_asks_for_it(
    drivetrain: Command, run: list[str], marker: Path
) -> None:
    code, _, err = drivetrain("train", *run, "--quiet")
    assert code == 2
    assert "config.json names configuration_net.NetConfig (AutoConfig of auto_map)" in err
    assert "modeling_net.Net (AutoModelForCausalLM of auto_map)" in err
    assert "workload.model.trust_remote_code=true" in err
    assert not marker.exists()


def test_with_permission_the_model_trains_is_saved_with_its_code_and_evaluated(
    drivetrain: Command, run: list[str], marker: Path, tmp_path: Path
) -> None:
    given = [*run, "trust_remote_code=true"]
    code, _, err = drivetrain("train", *given, "--quiet")
    assert code == 0, err
    assert marker.exists()
    [saved] = (tmp_path / "out" / "checkpoints").iterdir()
    assert {"configuration_net.py", "modeling_net.py", "config.json"} <= {path.name for path in saved.iterdir()}
    code, out, err = drivetrain("evaluate", *given)
    assert code == 0, err
    assert json.loads(out)["metrics"]["loss"] > 0


def test_a_models_own_class_learns_as_it_does_in_plain_transformers(tmp_path: Path, marker: Path) -> None:
    folder = model_with_code(tmp_path / "net", marker)
    model: Any = build_classifier("AutoModelForCausalLM", str(folder), None, (), "workload.model", trusted=True)
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    check_fits({name: t.shape for name, t in plain.state_dict().items()}, model.state_dict(), folder)
    tokens = torch.arange(6)[None]
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_a_tokenizer_with_code_of_its_own_is_refused_and_allowed_by_its_own_permission(
    tmp_path: Path, marker: Path
) -> None:
    folder = tokenizer_with_code(tmp_path / "words", marker)
    with pytest.raises(UserError, match=r"tokenization_net.NetTokenizer \(AutoTokenizer of auto_map\)") as caught:
        load_tokenizer(str(folder), "workload.model.tokenizer")
    assert "workload.model.trust_tokenizer_code=true" in str(caught.value)
    assert not marker.exists()
    assert load_tokenizer(str(folder), "workload.model.tokenizer", trusted=True)("a")["input_ids"]
    assert marker.exists()


def test_a_tokenizer_without_code_beside_a_model_with_it_is_loaded_without_a_question(
    tmp_path: Path, marker: Path
) -> None:
    folder = model_with_code(tmp_path / "net", marker)
    tokenizer_with_code(folder, marker)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    del described["auto_map"]
    plain = {**described, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain))
    assert load_tokenizer(str(folder), "workload.model.path")("a")["input_ids"]
    assert not marker.exists()


def test_a_permission_is_not_for_code_of_another_repository(tmp_path: Path, marker: Path) -> None:
    folder = model_with_code(tmp_path / "net", marker)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {key: f"someone/else--{code}" for key, code in MODEL_MAP.items()}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="names code of someone/else, another repository"):
        config_of(str(folder), None, "workload.model", trusted=True)


def test_a_kernel_of_the_hub_in_a_models_configuration_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    folder.mkdir()
    config = {**LLAMA, "attn_implementation": "someone/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="someone/kernel, compiled code of the hub"):
        config_of(str(folder), None, "workload.model")


@pytest.mark.parametrize("key", ["trust_remote_code", "trust_tokenizer_code"])
def test_a_permission_without_a_path_is_a_problem(drivetrain: Command, tmp_path: Path, key: str) -> None:
    (tmp_path / "train.txt").write_text("a b c")
    (tmp_path / "run.yaml").write_text(
        f"workload: {{type: language_model, model: {{config: {{model_type: llama}}, {key}: true}},\n"
        f"  data: {{train: {tmp_path / 'train.txt'}}}}}\nbatch_size: 2\nloop: {{steps: 1}}\n"
    )
    code, _, err = drivetrain("train", str(tmp_path / "run.yaml"), f"output={tmp_path / 'out'}")
    assert code == 2
    assert f"workload.model.{key}" in err


def test_a_data_set_never_brings_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets before 4 asks at the terminal where the argument is left out; later ones do not know it."""
    given: dict[str, Any] = {}

    def old(name: str, subset: str | None, split: str, trust_remote_code: bool | None = None) -> str:
        given.update(name=name, subset=subset, split=split, trust_remote_code=trust_remote_code)
        return "rows"

    datasets = SimpleNamespace(load_dataset=old, config=SimpleNamespace(HF_DATASETS_CACHE="/"))
    monkeypatch.setattr("drivetrain.data.tables.import_datasets", lambda *_: datasets)
    monkeypatch.setattr("drivetrain.data.tables._check_reachable", lambda *_: None)
    assert load_from_hub("someone/rows", "workload.data.train", None, "train") == "rows"
    assert given["trust_remote_code"] is False
    assert without_code(SimpleNamespace(load_dataset=lambda path, **config_kwargs: None)) == {}  # noqa: ARG005
