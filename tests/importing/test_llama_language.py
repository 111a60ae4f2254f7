"""LLaMA-Factory's model and data as a workload: what each key becomes, and that what comes of it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from drivetrain.config import language
from drivetrain.data.language.vocabularies import END_OF_TEXT
from drivetrain.errors import UserError
from tests.importing.made import TALKS, Run, given, imported, notes_of, of_text, run_of, trained

SFT = "stage: sft\nfinetuning_type: full\nmodel_name_or_path: a/b\ndataset: one\n"
PT = SFT.replace("sft", "pt")


def workload_of(folder: Path, text: str) -> dict[str, Any]:
    """Returns what the run file says of it; and that this is a workload."""
    found: dict[str, Any] = run_of(folder, text)["workload"]
    language.LanguageModel.model_validate(found)
    return found


def test_what_is_left_out_is_what_llama_factory_does(tmp_path: Path) -> None:
    assert workload_of(tmp_path, SFT) == {
        "type": "language_model",
        "stage": "sft",
        "model": {"path": "a/b"},
        "data": {
            "train": ["one"],
            "evaluation_fraction": 0.0,  # all rows are trained on
            "registry": "data",
            "length": 2048,
            "bad_rows": "drop",
        },
    }


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("use_dft_loss: true\n", {"loss": "dft"}),
        ("use_eaft_loss: true\n", {"loss": "eaft", "alpha": 1.0}),
        ("use_eaft_loss: true\neaft_alpha: 0.5\n", {"loss": "eaft", "alpha": 0.5}),
        ("use_asft_loss: true\nasft_alpha: 0.3\n", {"loss": "asft", "alpha": 0.3}),
        ("use_dft_loss: true\nuse_asft_loss: true\n", {"loss": "dft"}),  # the first that is on counts there
    ],
)
def test_losses_of_fine_tuning_are_kept(tmp_path: Path, lines: str, expected: dict[str, Any]) -> None:
    assert workload_of(tmp_path, SFT + lines)["sft"] == expected


def test_losses_of_fine_tuning_are_off_elsewhere(tmp_path: Path) -> None:
    assert "sft" not in workload_of(tmp_path, PT + "use_dft_loss: true\n")


@pytest.mark.parametrize(
    ("lines", "block", "expected"),
    [
        ("resize_vocab: true\n", "model", {"resize_vocabulary": True}),
        ("flash_attn: fa2\n", "model", {"attention": "flash"}),
        ("flash_attn: disabled\n", "model", {"attention": "eager"}),
        ("enable_liger_kernel: true\n", "model", {"fused_loss": True}),
        ("neftune_noise_alpha: 5\n", "model", {"neftune_alpha": 5.0}),
        ("dataset_dir: elsewhere\n", "data", {"registry": "elsewhere"}),
        ("cutoff_len: 512\n", "data", {"length": 512}),
        ("cutoff_len: 512\npacking: true\n", "data", {"length": 511, "packing": True}),
        ("neat_packing: true\n", "data", {"length": 2047, "packing": True}),
        ("packing: false\n", "data", {"packing": False}),
        ("eval_dataset: two,three\n", "data", {"evaluation": ["two", "three"]}),
        ("val_size: 0.2\n", "data", {"evaluation_fraction": 0.2}),
        ("max_samples: 9\n", "data", {"train": [{"path": "one", "samples": 9}]}),
        ("train_on_prompt: true\n", "data", {"train_on": "all"}),
        ("mask_history: true\n", "data", {"train_on": "last_response"}),
        ("streaming: true\nmax_steps: 9\n", "data", {"stream": True, "stream_buffer": 16_384}),
        ("streaming: true\nmax_steps: 9\nbuffer_size: 7\n", "data", {"stream_buffer": 7}),
        ("streaming: true\nmax_steps: 9\nval_size: 100\n", "data", {"evaluation_rows": 100}),
        ("tokenized_path: kept\n", "data", {"cache": "kept"}),
        ("group_by_length: true\n", "data", {"group_by_length": True}),
        ("template: chatml\n", "data", {"template": "chatml"}),
        ("template: qwen\ndefault_system: Be kind.\n", "data", {"system": "Be kind."}),
        ("template: gemma3\n", "data", {"template": None, "system": None}),
        ("template: llama4\n", "data", {"template": None, "system": None}),
        ("template: mistral_small\ndefault_system: Be kind.\n", "data", {"template": None, "system": "Be kind."}),
        (
            "template: qwen\n",
            "data",
            {"system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
        ),
    ],
)
def test_a_key_becomes_the_field_of_the_same_meaning(
    lines: str, block: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = workload_of(tmp_path, SFT + lines)[block]
    assert {key: found.get(key) for key in expected} == expected


def test_the_last_blocks_are_trained_two_by_default(tmp_path: Path) -> None:
    freeze = SFT.replace("full", "freeze")
    assert workload_of(tmp_path, freeze)["model"]["train_last_blocks"] == 2
    assert workload_of(tmp_path, freeze + "freeze_trainable_layers: 3\n")["model"]["train_last_blocks"] == 3


@pytest.mark.parametrize(
    ("lines", "weights"),
    [
        ("", [None, None]),
        ("mix_strategy: interleave_under\ninterleave_probs: 0.7, 0.3\n", [0.7, 0.3]),
        ("mix_strategy: interleave_over\n", [1.0, 1.0]),
        ("mix_strategy: interleave_once\ninterleave_probs: 0.7,0.3\n", [None, None]),  # each sample comes once
    ],
)
def test_data_sets_are_mixed_as_they_are_there(lines: str, weights: list[float | None], tmp_path: Path) -> None:
    data = workload_of(tmp_path, SFT.replace("one", "one, two") + lines)["data"]
    assert data.get("mix") == (None if weights[0] is None else lines.split()[1])
    found = data["train"]
    named = [{"path": each} if isinstance(each, str) else each for each in found]
    assert [each["path"] for each in named] == ["one", "two"]
    assert [each.get("weight") for each in named] == weights


def test_names_are_ids_of_the_hub_where_the_folder_is_online(tmp_path: Path) -> None:
    assert "registry" not in workload_of(tmp_path, SFT + "dataset_dir: ONLINE\n")["data"]


def test_texts_are_windows_of_all_of_them_and_not_streamed(tmp_path: Path) -> None:
    text = PT + "streaming: true\nmax_steps: 9\ncutoff_len: 512\ntemplate: default\n"
    found, notes = workload_of(tmp_path, text), notes_of(tmp_path, text)
    assert found["stage"] == "pretrain"
    assert found["data"]["length"] == 512
    assert not {"stream", "template", "packing"} & found["data"].keys()
    assert notes["streaming"].fate == "changed"
    assert notes["template"].fate == "unneeded"
    streamed = workload_of(tmp_path, text + "packing: false\n")["data"]
    assert streamed["stream"] is True  # there too each text is a sample then


@pytest.mark.parametrize(
    ("lines", "key", "fate", "reason"),
    [
        ("template: default\n", "template", "refused", "default: the tokenizer's own is taken"),
        ("template: llama3\n", "template", "changed", "give the tokenizer of a model that llama3 is made for"),
        *(
            (f"template: {name}\n", "template", "changed", f"Of texts it makes what {name} makes; pictures, which")
            for name in ("gemma3", "gemma3n", "llama4")
        ),
        (
            "template: mistral_small\ndefault_system: Be kind.\n",
            "template",
            "changed",
            "give the tokenizer of a model that mistral_small is made for",
        ),
        ("template: mistral_small\ndefault_system: ''\n", "template", "refused", "one with the day's date"),
        ("template: mistral_small\n", "template", "refused", "one with the day's date; give default_system"),
        ("template: alpaca\n", "template", "changed", "the end of a reply is not trained"),
        ("cutoff_len: 9\n", "cutoff_len", "changed", "share the cut"),
        ("packing: true\n", "packing", "changed", "counts packs of cutoff_len tokens"),
        ("max_samples: 9\n", "max_samples", "changed", "there the first"),
        ("val_size: 100\n", "val_size", "refused", "a number of samples"),
        ("rope_scaling: yarn\n", "rope_scaling", "refused", "no config.json is here"),
        ("flash_attn: fa3\n", "flash_attn", "refused", "fa3: there are auto"),
        ("trust_remote_code: true\n", "trust_remote_code", "changed", "own classes are taken"),
        ("model_revision: v1\n", "model_revision", "refused", "the newest is taken"),
        ("model_revision: main\n", "model_revision", "unneeded", "the newest"),
        ("add_tokens: a,b\n", "add_tokens", "refused", "add them to the tokenizer"),
        ("upcast_layernorm: true\n", "upcast_layernorm", "refused", "precision"),
        ("preprocessing_num_workers: 16\n", "preprocessing_num_workers", "unneeded", "the cores there are"),
        ("overwrite_cache: true\n", "overwrite_cache", "unneeded", "made again"),
    ],
)
def test_where_the_meaning_differs_it_is_reported(lines: str, key: str, fate: str, reason: str, tmp_path: Path) -> None:
    note = notes_of(tmp_path, SFT + lines)[key]
    assert note.fate == fate
    assert reason in note.why


@pytest.mark.parametrize(
    ("text", "key", "fate", "reason"),
    [
        (SFT.replace("sft", "grpo"), "stage", "refused", "there are pt, sft"),
        (SFT.replace("full", "bone"), "finetuning_type", "refused", "bone: there are full, freeze, lora"),
        (SFT.replace("full", "bitfit"), "finetuning_type", "refused", "there are full, freeze"),
        (SFT + "quantization_bit: 4\n", "quantization_bit", "refused", "nothing would be trained without lora"),
        (
            SFT.replace("full", "freeze") + "freeze_trainable_layers: -2\n",
            "freeze_trainable_layers",
            "refused",
            "not the",
        ),
        (SFT.replace("full", "freeze") + "use_llama_pro: true\n", "use_llama_pro", "refused", "LLaMA Pro"),
        (SFT + "dataset_dir: REMOTE:a/b\n", "dataset_dir", "refused", "download a/b"),
        (
            SFT.replace("dataset: one\n", "template: qwen\n"),
            "model_name_or_path",
            "refused",
            "no workload",
        ),
        (SFT + "train_from_scratch: true\n", "train_from_scratch", "refused", "a/b is no folder here"),
    ],
)
def test_what_cannot_be_trained_here_becomes_no_workload_and_says_why(
    text: str, key: str, fate: str, reason: str, tmp_path: Path
) -> None:
    found, raw = imported(tmp_path, of_text(tmp_path, text))
    assert "workload" not in raw
    assert found.missing[0] == "workload"
    notes = {note.key: note for _, note in found.notes}
    assert notes[key].fate == fate
    assert reason in notes[key].why
    others = {
        note.why for name, note in notes.items() if name in ("model_name_or_path", "template", "stage") and name != key
    }
    assert len(others) == 1
    assert others.pop().startswith("no workload is written: ")


@pytest.mark.parametrize(
    ("lines", "field", "why"),
    [
        ("mix_strategy: interleave_under\ninterleave_probs: 0.7\n", "interleave_probs", "1 were given for 2"),
        ("mix_strategy: interleave_under\ninterleave_probs: much,0.3\n", "interleave_probs", "'much' was given"),
        ("mix_strategy: interleave_under\ninterleave_probs: 1.0,0\n", "interleave_probs", "'0' was given"),
        ("mix_strategy: stirred\n", "mix_strategy", "stirred was given"),
        ("train_on_prompt: true\nmask_history: true\n", "mask_history", "both on"),
        ("cutoff_len: many\n", "cutoff_len", "'many' was given"),
        ("cutoff_len: 1\n", "cutoff_len (workload.data.length)", "greater than 1"),
    ],
)
def test_values_that_cannot_be_are_refused_under_their_own_key(
    lines: str, field: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        run_of(tmp_path, SFT.replace("one", "one,two") + lines)
    assert refused.value.problems[0].field.endswith(field)
    assert why in refused.value.problems[0].why


def test_a_workload_takes_the_place_of_the_whole_one_below_it(tmp_path: Path) -> None:
    below = tmp_path / "below.yaml"
    below.write_text("workload: {type: module, path: own.py}\nbatch_size: 2\nloop: {steps: 1}\n")
    _, raw = imported(tmp_path, of_text(tmp_path, SFT), onto=below)
    assert raw["workload"]["type"] == "language_model"
    assert "path" not in raw["workload"]


# --- what comes of it trains ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_imported_fine_tuning_trains_on_every_row_that_has_a_reply(drivetrain: Run) -> None:
    given(stage="sft", dataset="talks", template="alpaca")
    report = trained(drivetrain)
    assert report["data"]["train_samples"] == len(TALKS)
    assert (report["data"]["evaluation_samples"], report["data"]["rows_dropped"]) == (0, 1)
    assert report["samples"] == 2 * 4
    _, words, _ = drivetrain("data", "new.yaml", "workload.data.cache=cache", "--json")
    pieces = json.loads(words)["sample"]["pieces"]
    first = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    prompt = f"{first}\n\n### Instruction:\nsay 0\n\n### Response:\n"
    assert pieces == [{"text": prompt, "trained": False}, {"text": f"it is 0{END_OF_TEXT}", "trained": True}]


@pytest.mark.usefixtures("here")
def test_imported_pre_training_trains_on_windows_of_all_texts(drivetrain: Run) -> None:
    given(stage="pt", dataset="texts", cutoff_len=32)
    tokens = sum(len(f"text {n} " * 9) + 1 for n in range(20))
    assert trained(drivetrain)["data"]["train_samples"] == -(-(tokens - 1) // 32)


@pytest.mark.usefixtures("here")
def test_an_imported_run_of_the_last_block_leaves_the_others_as_they_are(drivetrain: Run) -> None:
    given(
        stage="sft",
        dataset="talks",
        template="vicuna",
        finetuning_type="freeze",
        freeze_trainable_layers=1,
        val_size=0.25,
    )
    report = trained(drivetrain)
    assert report["data"]["evaluation_samples"] == 3
    before, after = (LlamaForCausalLM.from_pretrained(each).state_dict() for each in ("model", report["checkpoint"]))
    assert {".".join(name.split(".")[:3]) for name in before if not before[name].equal(after[name])} == {
        "model.layers.1"
    }


@pytest.mark.usefixtures("here")
def test_imported_from_scratch_it_is_the_config_with_other_weights(drivetrain: Run) -> None:
    given(stage="sft", dataset="talks", template="alpaca", train_from_scratch="true")
    report = trained(drivetrain)
    before, after = (LlamaForCausalLM.from_pretrained(each) for each in ("model", report["checkpoint"]))
    assert before.config.hidden_size == after.config.hidden_size
    difference = before.lm_head.weight - after.lm_head.weight
    assert difference.abs().mean() > 0.01  # two steps at 1e-3 move none that far


def test_an_imported_scaling_of_positions_has_the_factor_that_cutoff_len_asks_for(drivetrain: Run, here: Path) -> None:
    given(stage="sft", dataset="talks", template="alpaca", rope_scaling="linear", cutoff_len=1300)  # the context is 512
    report = trained(drivetrain)
    config = json.loads((Path(report["checkpoint"]) / "config.json").read_text())
    assert config["max_position_embeddings"] == 3 * 512
    assert config["rope_parameters"]["factor"] == 3.0
    assert notes_of(here, Path("lf.yaml").read_text().replace("1300", "99"))["rope_scaling"].fate == "unneeded"


@pytest.mark.usefixtures("here")
def test_llama_factorys_demonstration_data_train_by_their_names(drivetrain: Run, shared_data: Path) -> None:
    given(
        stage="sft",
        dataset="identity,alpaca_en_demo",
        template="alpaca",
        max_samples=20,
        dataset_dir=shared_data / "sft",
    )
    assert trained(drivetrain)["data"]["train_samples"] == 40


def test_a_number_of_held_out_samples_is_given_up_by_name(tmp_path: Path) -> None:
    assert notes_of(tmp_path, SFT + "val_size: 1000\n")["val_size"].alters
