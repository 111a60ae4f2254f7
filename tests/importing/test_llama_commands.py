"""LLaMA-Factory's files of chat, predict and export: the commands that do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from drivetrain.cli.app import app
from drivetrain.importing.llama_commands import commands, only_answers, translated
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


@pytest.mark.parametrize("raw", [INFER, MERGE, PREDICT])
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
    raw = {**PREDICT, "dataset": "t.jsonl", "export_dir": "merged"}
    assert not only_answers(raw)
    YAML(typ="safe", pure=True).dump(raw, Path("file.yaml"))
    _, out, err = drivetrain("import", "file.yaml", "--output", "run.yaml")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("drivetrain ")] == [
        "predict", "predict", "export"
    ], err  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [("export_size", "many"), ("do_predict", "perhaps")])
def test_values_that_are_none_are_refused(
    key: str, value: str, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    YAML(typ="safe", pure=True).dump({**MERGE, key: value}, Path("file.yaml"))
    code, _, err = drivetrain("import", "file.yaml")
    assert code == 2
    assert f"'{value}' was given" in " ".join(err.split())
