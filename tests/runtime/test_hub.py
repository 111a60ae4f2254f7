"""Models of the hub: one question, then the error, with what to do without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import UserError
from drivetrain.models.model_folders import config_of
from drivetrain.runtime import hub
from drivetrain.runtime.model_places import refuse_unknown_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Returns what was asked of a hub that does not answer."""
    questions: list[str] = []

    def model_info(_: Any, name: str, **__: Any) -> None:
        questions.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub._unreachable.cache_clear()
    yield questions
    hub._unreachable.cache_clear()


def test_a_hub_that_does_not_answer_is_asked_once_and_the_way_without_it_is_reported(asked: list[str]) -> None:
    for load in (
        lambda: hub.ask_hub("nobody/none", "F"),
        lambda: load_tokenizer("nobody/none", "F"),
        lambda: config_of("nobody/none", None, "workload.model"),
    ):
        with pytest.raises(UserError) as refused:
            load()
        (problem,) = refused.value.problems
        assert "nobody/none is no folder here, and the hub cannot be reached: no route to host" in problem.why
        assert "HF_HUB_OFFLINE=1" in problem.fix
    assert asked == ["nobody/none"]


def test_offline_nothing_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.ask_hub("nobody/none", "F")
    assert asked == []


def test_a_model_of_the_hub_is_asked_for_with_a_word_before_torch_is_imported(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gpt3").mkdir(parents=True)
    (tmp_path / "runs" / "gpt3" / "run.yaml").touch()
    with pytest.raises(UserError) as refused:
        refuse_unknown_model("gpt2", "MODEL")
    (problem,) = refused.value.problems
    assert problem.why == "gpt2 is no folder here, and the hub cannot be reached: no route to host"
    assert problem.fix.startswith("did you mean runs/gpt3? Else give a local folder")
    assert capsys.readouterr().err == "gpt2 is no folder here: asking the hub for it (did you mean runs/gpt3?)\n"
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    hub._unreachable.cache_clear()
    refuse_unknown_model("gpt2", "MODEL")  # a hub that knows it lets it pass, whatever lies among the runs
    (tmp_path / "cache" / "models--gpt2").mkdir(parents=True)
    capsys.readouterr()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuse_unknown_model("gpt2", "MODEL")
    assert capsys.readouterr().err == ""
    assert asked == ["gpt2"]


def test_a_folder_with_a_vocabulary_alone_is_refused_with_the_file_to_give(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    with pytest.raises(UserError, match=r"holds vocab.txt, and no file that names the kind") as refused:
        load_tokenizer(str(tmp_path), "F")
    assert str(tmp_path / "vocab.txt") in refused.value.problems[0].fix
