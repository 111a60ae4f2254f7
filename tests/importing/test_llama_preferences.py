"""LLaMA-Factory's keys of preferences: each run file computes the loss that its trainers do, and trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.importing.llama_preferences import KEYS
from tests.importing.made import FOLDER, imported, read

DPO = "stage: dpo\nmodel_name_or_path: a/b\nfinetuning_type: full\ndataset: one\ntemplate: qwen\n"


def workload(folder: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder / "given.yaml").write_text(text)
    found, raw = imported(folder, folder / "given.yaml")
    return raw["workload"], {note.key: note for _, note in found.notes}


@pytest.mark.parametrize(
    ("lines", "stage", "expected"),
    [
        ("", "dpo", {"loss": "sigmoid", "beta": 0.1}),
        ("pref_beta: 0.3\ndpo_label_smoothing: 0.1\n", "dpo", {"beta": 0.3, "label_smoothing": 0.1}),
        ("pref_loss: hinge\nld_alpha: 0.5\n", "dpo", {"loss": "hinge", "ld_alpha": 0.5}),
        ("pref_loss: ipo\npref_ftx: 0.2\n", "dpo", {"loss": {"ipo": 1.0, "nll": 0.2}}),
        ("pref_bco_weight: 0.3\n", "dpo", {"loss": {"sigmoid": 1.0, "bco_pair": 0.3}}),
        ("pref_loss: kto_pair\n", "dpo", {"loss": "kto_pair"}),
        ("pref_loss: orpo\npref_beta: 0.2\n", "orpo", {"loss": "orpo", "beta": 0.2}),
        ("pref_loss: simpo\nsimpo_gamma: 0.7\n", "simpo", {"loss": "simpo", "beta": 0.1, "gamma": 0.7}),
        ("pref_loss: simpo\n", "simpo", {"gamma": 0.5}),
    ],
)
def test_pairs_keep_their_loss(tmp_path: Path, lines: str, stage: str, expected: dict[str, Any]) -> None:
    made, notes = workload(tmp_path, DPO + lines)
    assert made["stage"] == stage
    assert {key: made["preference"].get(key) for key in expected} == expected
    assert all(notes[line.split(":")[0]].fate in ("mapped", "changed") for line in lines.splitlines())


def test_labels_and_rewards_keep_theirs(tmp_path: Path) -> None:
    made, _ = workload(tmp_path, DPO.replace("dpo", "kto") + "kto_chosen_weight: 1.5\npref_beta: 0.2\n")
    assert made["stage"] == "kto"
    assert made["preference"] == {"desirable_weight": 1.5, "undesirable_weight": 1.0, "beta": 0.2}
    made, notes = workload(tmp_path, DPO.replace("dpo", "rm"))
    assert made["stage"] == "reward"
    assert "sequence classifier" in notes["stage"].why


def test_an_adapter_that_goes_on_is_held_to_the_base_as_there(tmp_path: Path) -> None:
    lora = DPO.replace("full", "lora")
    made, _ = workload(tmp_path, lora)
    assert "reference" not in made["preference"]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    made, _ = workload(tmp_path, lora + f"adapter_name_or_path: {tmp_path / 'adapter'}\n")
    assert made["preference"]["reference"] == "adapters_off"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("pref_loss: best\n", "best was given"),
        ("pref_loss: ipo\ndpo_label_smoothing: 0.1\n", "it is of the loss sigmoid, and pref_loss is ipo"),
        ("pref_beta: much\n", "'much' was given"),
    ],
)
def test_what_would_be_another_loss_is_refused(tmp_path: Path, lines: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        workload(tmp_path, DPO + lines)
    assert why in str(refused.value)


@pytest.mark.parametrize("stage", ["sft", "kto", "rm", "dpo"])
def test_every_key_of_preferences_has_a_fate_in_every_stage(tmp_path: Path, stage: str) -> None:
    keys = [key for key in KEYS if not key.startswith("ref_") and key not in ("pref_loss", "pref_beta")]
    lines = [f"{key}: {1 if key.startswith('kto_') else 0}\n" for key in keys]
    _, notes = workload(tmp_path, DPO.replace("dpo", stage) + "".join(lines))
    assert set(keys) <= notes.keys()


def test_the_published_file_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer(["<|endoftext|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '<|endoftext|>' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    answers = {side: {"from": "gpt", "value": text} for side, text in (("chosen", "Yes."), ("rejected", "No."))}
    rows = [{"conversations": [{"from": "human", "value": f"What is {n}?"}], **answers} for n in range(24)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dpo_en_demo.json").write_text(json.dumps(rows))
    entry = {"file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt"}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"dpo_en_demo": entry}))
    text = (FOLDER / "llama_factory" / "dpo.yaml").read_text().replace("Qwen/Qwen2.5-7B-Instruct", "model")
    (tmp_path / "dpo.yaml").write_text(text)
    code, _, told = drivetrain("import", "dpo.yaml", "-o", "new.yaml")
    assert code == 0, told
    made = read(tmp_path / "new.yaml")
    assert made["workload"]["preference"] == {"loss": "sigmoid", "beta": 0.1}
    code, _, told = drivetrain("train", "new.yaml", "loop={steps: 2}", "precision=fp32", "output=run", "--quiet")
    assert code == 0, told
    report = json.loads(Path("run/report.json").read_text())
    assert report["status"] == "completed"
    assert report["samples"] == 16


PPO = DPO.replace("dpo", "ppo").replace("full", "lora") + "reward_model: saves/reward\n"


def test_ppo_keeps_its_reward_model_passes_and_sampling(tmp_path: Path) -> None:
    lines = "reward_model_type: full\nppo_epochs: 2\nmax_new_tokens: 64\ntop_k: 0\ntop_p: 0.9\n"
    made, notes = workload(tmp_path, PPO + lines)
    assert made["stage"] == "ppo"
    expected = {"rewards": [{"model": "saves/reward"}], "passes": 2, "beta": 0.2, "max_new_tokens": 64}
    assert made["reinforcement"] == {**expected, "temperature": 0.95}
    assert notes["top_p"].fate == "changed"


def test_a_file_that_lacks_what_it_trains_by_is_written_and_ends_with_1(
    drivetrain: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ppo.yaml").write_text(PPO)
    code, out, words = drivetrain("import", "ppo.yaml", "--without", "reward_model")
    assert code == 1
    lacking = "workload.reinforcement.rewards: answers need a reward, and none is given"
    assert f"cannot train yet {lacking}" in words
    assert f"on this machine: {lacking}" not in words
    assert "drivetrain train" not in out + words
    assert f"# It cannot train yet. {lacking}" in Path("ppo-run.yaml").read_text()
    Path("whole.yaml").write_text(PPO + "reward_model_type: full\n")
    code, _, words = drivetrain("import", "whole.yaml")
    assert code == 0, words
    assert words.endswith("next: drivetrain train whole-run.yaml")
    assert "on this machine: " in words, "a model that is not here may be on another machine"


@pytest.mark.parametrize(
    ("lines", "key", "why"),
    [
        ("", "reward_model", "export it merged"),
        ("reward_model_type: full\nppo_buffer_size: 4\n", "ppo_buffer_size", "as workload.reinforcement.updates"),
        ("reward_model_type: full\nppo_score_norm: true\n", "ppo_score_norm", "not normalised"),
        ("reward_model_type: full\nreward_model_adapters: a\n", "reward_model_adapters", "its folder's"),
    ],
)
def test_what_ppo_has_only_there_is_refused(tmp_path: Path, lines: str, key: str, why: str) -> None:
    _, notes = workload(tmp_path, PPO + lines)
    assert notes[key].fate == "refused"
    assert notes[key].alters
    assert why in notes[key].why
