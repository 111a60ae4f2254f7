"""LLaMA-Factory's files of chat, predict and export: the commands that do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from drivetrain.cli.app import app
from drivetrain.errors import UserError
from drivetrain.importing.llama_commands import commands, only_answers, translated
from drivetrain.importing.recognise import KINDS
from drivetrain.importing.translated_file import Source
from drivetrain.importing.verb import import_files

Run = Callable[..., tuple[int, str, str]]
MODEL = {"model_name_or_path": "base", "adapter_name_or_path": "saves/lora", "template": "llama3"}
INFER = {**MODEL, "infer_backend": "vllm", "trust_remote_code": True}
MERGE = {**MODEL, "export_dir": "out/merged", "export_size": 5, "export_device": "cpu", "export_quantization_bit": 8}
PREDICT = {
    **MODEL,
    "stage": "sft",
    "do_predict": True,
    "eval_dataset": "a,b",
    "output_dir": "saves/predict",
    "predict_with_generate": True,
    "max_new_tokens": 128,
    "per_device_eval_batch_size": 1,
    "cutoff_len": 512,
}
QUESTIONS = {**MODEL, "task": "mmlu_test", "lang": "en", "save_dir": "saves/eval", "batch_size": 4}
DRAWN = "workload.generate.max_new_tokens=128 workload.generate.temperature=0.95"
LIKELIEST = "workload.generate.max_new_tokens=1024 workload.generate.temperature=0"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (INFER, ["drivetrain chat saves/lora --trust", "drivetrain serve saves/lora --trust"]),
        ({"model_name_or_path": "a b", "infer_backend": "x"}, ["drivetrain chat 'a b'", "drivetrain serve 'a b'"]),
        (MERGE, ["drivetrain export RUN --to transformers --output out/merged --shard-size 5GB --quantise int8"]),
        (
            PREDICT,
            [
                f"drivetrain predict RUN {DRAWN} --data a --llama-factory saves/predict/a",
                f"drivetrain predict RUN {DRAWN} --data b --llama-factory saves/predict/b",
            ],
        ),
        (
            {**MERGE, "export_quantization_bit": 4},
            ["drivetrain export RUN --to transformers --output out/merged --shard-size 5GB --quantise int4"],
        ),
        (
            {**MERGE, "export_size": None, "export_quantization_bit": None, "trust_remote_code": True},
            ["drivetrain export RUN --to transformers --output out/merged --trust"],
        ),
        (
            {**MODEL, "do_predict": True, "do_sample": False, "trust_remote_code": True},
            [f"drivetrain predict RUN {LIKELIEST} --llama-factory predict --trust"],
        ),
        (
            {**INFER, "temperature": 0.5, "default_system": "brief"},
            [
                "drivetrain chat saves/lora --system brief --temperature 0.5 --trust",
                "drivetrain serve saves/lora --trust",
            ],
        ),
        (
            {
                **MODEL,
                "export_dir": "out",
                "adapter_folder": "last",
                "infer_dtype": "float16",
                "export_hub_model_id": "me/x",
            },
            ["drivetrain export RUN --to transformers --output out --dtype fp16 --push me/x"],
        ),
        (
            {**MODEL, "do_predict": True, "do_sample": False, "dataset": "a", "dataset_dir": "sets"},
            [f"drivetrain predict RUN workload.data.registry=sets {LIKELIEST} --data a --llama-factory predict"],
        ),
        (
            {**MODEL, "do_eval": True, "eval_dataset": ["a", "b"], "dataset_dir": "sets"},
            ["drivetrain evaluate RUN workload.data.registry=sets --data a --data b"],
        ),
        (
            {**MODEL, "adapter_folder": "last", "infer_backend": "x"},
            ["drivetrain chat saves/lora/last", "drivetrain serve saves/lora/last"],
        ),
        (QUESTIONS, ["drivetrain evaluate saves/lora --multiple-choice evaluation/mmlu --shots 5"]),
        (
            {**QUESTIONS, "task": "ceval", "task_dir": "sets", "n_shot": 0},
            ["drivetrain evaluate saves/lora --multiple-choice sets/ceval --shots 0"],
        ),
        ({**MODEL, "dataset": "identity"}, []),
    ],
)
def test_each_kind_of_file_has_its_command(raw: dict[str, Any], expected: list[str]) -> None:
    assert commands(raw) == expected
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for command in expected:
        _, verb, *arguments = command.split()
        options = {name for parameter in verbs[verb].params for name in parameter.opts}
        assert {each for each in arguments if each.startswith("--")} <= options


def test_an_adapter_in_a_run_here_is_taken_from_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = Path("runs/mine/checkpoints/step-00000004")
    step.mkdir(parents=True)
    Path("runs/mine/run.yaml").write_text("{}")
    for adapter, middle in (("runs/mine", ""), (str(step), f"--checkpoint {step} ")):
        raw = {"model_name_or_path": "base", "adapter_name_or_path": adapter, "export_dir": "merged"}
        assert commands(raw) == [f"drivetrain export runs/mine {middle}--to transformers --output merged"]


@pytest.mark.parametrize("raw", [INFER, MERGE, PREDICT, QUESTIONS])
def test_a_file_that_trains_nothing_gives_its_commands_and_no_run_file(
    raw: dict[str, Any], drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    YAML(typ="safe", pure=True).dump(raw, Path("file.yaml"))
    code, out, err = drivetrain("import", "file.yaml")
    assert code == 0, err
    assert out.splitlines()[-len(commands(raw)) :] == commands(raw)
    told = {key.strip() for line in out.splitlines() if line.count("\t") == 2 for key in line.split("\t")[1].split(",")}
    assert told == raw.keys()
    assert "no such key" not in out
    assert not Path("file-run.yaml").exists()
    assert ("RUN: the folder of a run" in err) == any(" RUN " in each for each in commands(raw))


def test_keys_that_decide_answers_are_listed_as_such(tmp_path: Path) -> None:
    given = {**PREDICT, "top_p": 0.9, "num_beams": 4, "do_sample": True, "default_system": "brief", "top_k": 0}
    notes = translated(Source("file.yaml", "llama_factory", given, tmp_path), given).notes
    fates = {note.key: note.fate for note in notes}
    refused = {"top_p", "num_beams", "default_system"}
    assert {key for key, fate in fates.items() if fate == "refused"} == refused
    assert {key: fates[key] for key in ("cutoff_len", "do_predict", "do_sample", "top_k")} == {
        "cutoff_len": "changed",
        "do_predict": "changed",  # there from the likeliest tokens, by default
        "do_sample": "mapped",
        "top_k": "unneeded",
    }


# values at which a key asks for something that the commands do not do, or for nothing
ASKED: dict[str, Any] = {
    "adapter_name_or_path": "saves/one,saves/two", "quantization_bit": 4, "rope_scaling": "yarn", "resize_vocab": True,
    "add_tokens": "<a>", "add_special_tokens": "<b>", "model_revision": "v2", "infer_dtype": "bfloat16",
    "skip_special_tokens": False, "eval_num_beams": 4, "num_beams": 4, "length_penalty": 2.0, "top_p": 0.7, "top_k": 50,
    "repetition_penalty": 1.1, "enable_thinking": False, "split_special_tokens": True,
}  # fmt: skip
IDLE: dict[str, Any] = {
    "adapter_name_or_path": "saves/one", "rope_scaling": None, "resize_vocab": False, "add_tokens": None,
    "add_special_tokens": None, "model_revision": "main", "skip_special_tokens": True, "eval_num_beams": 1,
    "num_beams": 1, "length_penalty": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "enable_thinking": True,
    "split_special_tokens": False,
}  # fmt: skip


def fates_of(raw: dict[str, Any], folder: Path) -> dict[str, str]:
    known = KINDS["llama_factory"].names
    return {note.key: note.fate for note in translated(Source("file.yaml", "llama_factory", raw, folder), known).notes}


@pytest.mark.parametrize("task", [{"infer_backend": "huggingface"}, {"do_predict": True, "eval_dataset": "a"}])
def test_what_the_commands_do_not_do_is_refused_by_name_and_what_asks_for_nothing_is_not(
    task: dict[str, Any], tmp_path: Path
) -> None:
    asked = fates_of({**task, **ASKED}, tmp_path)
    assert {key for key, fate in asked.items() if fate == "refused"} == ASKED.keys()
    idle = fates_of({**task, **IDLE}, tmp_path)
    assert not {key for key, fate in idle.items() if fate == "refused"}


def test_what_an_export_does_otherwise_is_told(tmp_path: Path) -> None:
    given = {
        "export_legacy_format": True,
        "export_device": "auto",
        "export_hub_model_id": "me/x",
        "infer_dtype": "auto",
    }
    calibration = {"export_quantization_dataset": "c4.json", "export_quantization_nsamples": 8}
    assert fates_of({**MODEL, "export_dir": "out", **given, **calibration}, tmp_path) == {
        "model_name_or_path": "unneeded",  # the adapter names it
        "adapter_name_or_path": "mapped",
        "template": "changed",
        "export_dir": "mapped",
        "export_legacy_format": "refused",
        "export_device": "unneeded",
        "export_hub_model_id": "changed",
        "infer_dtype": "changed",
        "export_quantization_dataset": "unneeded",
        "export_quantization_nsamples": "unneeded",
    }


def test_a_file_that_predicts_for_a_data_set_without_do_train_trains_nothing() -> None:
    """LLaMA-Factory trains with do_train alone."""
    predicts = {**MODEL, "do_predict": True, "dataset": "a"}
    assert only_answers(predicts)
    assert not only_answers({**predicts, "do_train": True})
    assert not only_answers({**MODEL, "dataset": "a", "export_dir": "out"})


def test_a_run_file_that_would_not_be_written_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    YAML(typ="safe", pure=True).dump(INFER, Path("file.yaml"))
    Path("file-run.yaml").write_text("mine")
    found = import_files([Path("file.yaml")], None, None)
    assert (found.output, found.commands) == (None, commands(INFER))
    assert Path("file-run.yaml").read_text() == "mine"


def test_a_training_that_predicts_and_exports_has_a_run_file_and_the_commands(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = {**PREDICT, "do_train": True, "dataset": "t.jsonl", "export_dir": "merged"}
    assert not only_answers(raw)
    YAML(typ="safe", pure=True).dump(raw, Path("file.yaml"))
    _, out, err = drivetrain("import", "file.yaml", "--output", "run.yaml")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("drivetrain ")] == [
        "predict", "predict", "export"
    ], err  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({**INFER, "temperature": 5}, {"temperature": "5 was given, and drivetrain chat takes 0 to 2"}),
        ({**INFER, "max_new_tokens": 0, "temperature": -1}, {"max_new_tokens": "1 or more", "temperature": "0 to 2"}),
        ({**INFER, "max_new_tokens": 2.5}, {"max_new_tokens": "2.5 was given"}),
        ({**PREDICT, "max_new_tokens": 0}, {"max_new_tokens": "drivetrain predict takes 1 or more"}),
        ({**PREDICT, "temperature": -0.5}, {"temperature": "drivetrain predict takes 0 or more"}),
        ({**QUESTIONS, "n_shot": -5}, {"n_shot": "-5 was given, and drivetrain evaluate takes 0 or more"}),
        ({**MERGE, "export_size": 0}, {"export_size": "0 was given, and drivetrain export takes 1 or more"}),
    ],
)
def test_numbers_that_the_verbs_refuse_give_no_command(raw: dict[str, Any], told: dict[str, str]) -> None:
    with pytest.raises(UserError) as refused:
        commands(raw)
    assert {each.field for each in refused.value.problems} == told.keys()
    assert all(told[each.field] in each.why for each in refused.value.problems)


@pytest.mark.parametrize("raw", [{**PREDICT, "temperature": 5}, {**INFER, "temperature": -1, "do_sample": False}])
def test_a_temperature_that_a_verb_takes_or_does_not_read_is_not_refused(raw: dict[str, Any]) -> None:
    assert commands(raw)


@pytest.mark.parametrize(("key", "value"), [("export_size", "many"), ("do_predict", "perhaps")])
def test_values_that_are_none_are_refused(
    key: str, value: str, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    YAML(typ="safe", pure=True).dump({**MERGE, key: value}, Path("file.yaml"))
    code, _, err = drivetrain("import", "file.yaml")
    assert code == 2
    assert f"'{value}' was given" in " ".join(err.split())
