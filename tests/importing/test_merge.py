"""Several files as one, and the verb: contradictions, defaults that yield, what is written and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from drivetrain.errors import UserError
from tests.importing.made import FOLDER, SMALL, imported, notes_of, of_text, run_of, small

ARGUMENTS = '{"output_dir": "out", "learning_rate": 1e-3, "per_device_train_batch_size": 4}'


def refused(tmp_path: Path, *texts: tuple[str, str]) -> str:
    """Returns the report of files with these texts and endings."""
    with pytest.raises(UserError) as error:
        imported(tmp_path, *(of_text(tmp_path, text, ending) for text, ending in texts))
    return str(error.value)


def test_accelerate_and_arguments_become_one_run(tmp_path: Path) -> None:
    accelerate, arguments = FOLDER / "accelerate/fsdp1_by_block.yaml", of_text(tmp_path, ARGUMENTS, ".json")
    raw = imported(tmp_path, accelerate, arguments)[1]
    assert raw["engine"]["name"] == "fsdp"
    assert raw["processes"] == 2
    assert raw["batch_size_per_device"] == 4
    assert raw["precision"] == "bf16-master"
    assert raw["recompute"] is True


def test_what_contradicts_is_reported_with_both_files_and_keys(tmp_path: Path) -> None:
    deepspeed = '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}'
    words = refused(tmp_path, (ARGUMENTS, ".json"), (deepspeed, ".json"))
    assert "optimizer.lr" in words
    assert "0.001 (learning_rate)" in words
    assert "0.5 (optimizer.params.lr)" in words


def test_a_default_that_was_written_down_yields_to_another_files_word(tmp_path: Path) -> None:
    whole = '{"output_dir": "o", "bf16": false, "max_grad_norm": 1.0, "gradient_checkpointing": false, "optim": "sgd"}'
    deepspeed = '{"train_batch_size": 8, "bf16": {"enabled": true}, "gradient_clipping": 0.25, "zero_optimization": {}}'
    files = of_text(tmp_path, whole, ".json"), of_text(tmp_path, deepspeed, ".json")
    found, raw = imported(tmp_path, *files)
    assert raw["precision"] == "bf16-master"
    assert raw["loop"]["max_grad_norm"] == 0.25
    assert raw["batch_size"] == 8
    assert "batch_size_per_device" not in raw
    yielded = {note.key for label, note in found.notes if label == str(files[0]) and f"{files[1]} says" in note.why}
    assert yielded == {"bf16", "max_grad_norm"}


def test_accelerates_plain_defaults_yield_to_the_arguments(tmp_path: Path) -> None:
    plain = "distributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\nuse_cpu: false\n"
    arguments = '{"output_dir": "o", "bf16": true, "use_cpu": true, "ddp_find_unused_parameters": true}'
    raw = imported(tmp_path, of_text(tmp_path, plain), of_text(tmp_path, arguments, ".json"))[1]
    assert raw["precision"] == "bf16-mixed"
    assert raw["device"] == "cpu"


def test_the_same_note_twice_is_reported_once(tmp_path: Path) -> None:
    raw = run_of(
        tmp_path, ARGUMENTS, '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}', ending=".json"
    )
    assert raw["batch_size_per_device"] == 4
    assert raw["engine"] == {"name": "deepspeed", "stage": 1}


def test_a_whole_batch_has_to_fit_the_devices_and_their_share(tmp_path: Path) -> None:
    accelerate = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
    fits = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'
    files = [of_text(tmp_path, accelerate), of_text(tmp_path, ARGUMENTS, ".json"), of_text(tmp_path, fits, ".json")]
    assert imported(tmp_path, *files)[1]["batch_size"] == 8
    other = fits.replace("8", "16")
    words = refused(tmp_path, (accelerate, ".yaml"), (ARGUMENTS, ".json"), (other, ".json"))
    assert "16 (train_batch_size)" in words
    assert "on 2 devices" in words


def test_a_length_in_epochs_wins_over_a_schedules_number_of_steps(tmp_path: Path) -> None:
    arguments = '{"output_dir": "o", "num_train_epochs": 2}'
    deepspeed = (FOLDER / "deepspeed/full_bf16.json").read_text()
    files = [of_text(tmp_path, text, ".json") for text in (arguments, deepspeed)]
    found, raw = imported(tmp_path, *files)
    assert raw["loop"] == {"epochs": 2, "max_grad_norm": 1.0}
    words = {note.key: note.why for _, note in found.notes}
    assert words["scheduler.params.total_num_steps"].endswith("says the length, in epochs")


def test_two_warm_ups_are_refused(tmp_path: Path) -> None:
    words = refused(
        tmp_path,
        ('{"output_dir": "o", "warmup_ratio": 0.1}', ".json"),
        ('{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}', ".json"),
    )
    assert "schedule.warmup_steps and schedule.warmup_ratio" in words


def test_a_deepspeed_file_that_is_elsewhere_may_be_given_beside(tmp_path: Path) -> None:
    text = "stage: sft\ntemplate: x\ndeepspeed: examples/deepspeed/zero3_offload.json\n"
    path = of_text(tmp_path, text)
    raw = imported(tmp_path, path, FOLDER / "deepspeed/zero3_offload.json")[1]
    assert raw["engine"]["stage"] == 3


def test_the_run_file_below_keeps_what_no_file_sets(tmp_path: Path) -> None:
    below = tmp_path / "below.yaml"
    below.write_text(SMALL + "micro_batch_size: 4\nevaluation: {every_steps: 7}\nengine: zero2\nseed: 3\n")
    raw = run_of(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\n", onto=below)
    expected = YAML(typ="safe", pure=True).load(below.read_text())
    assert raw == {**expected, "engine": "ddp", "processes": 2}
    raw = run_of(tmp_path, ARGUMENTS, ending=".json", onto=below)
    assert raw["engine"] == "zero2"
    assert (raw["seed"], raw["evaluation"]) == (3, {"every_steps": 7})
    assert raw["batch_size_per_device"] == 4
    assert not {"batch_size", "micro_batch_size"} & raw.keys()


def test_a_broken_run_file_below_is_reported_with_its_own_name(tmp_path: Path) -> None:
    below = tmp_path / "below.yaml"
    below.write_text(SMALL + "batchsize: 3\n")
    with pytest.raises(UserError, match=r"below.yaml: batchsize"):
        run_of(tmp_path, ARGUMENTS, ending=".json", onto=below)


# --- recognition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ending", "why"),
    [
        ("", ".yaml", "the file is empty"),
        ("# only a comment\n\n", ".yaml", "the file is empty"),
        ("", ".json", "the file is empty"),
        ("", ".py", "the file is empty"),
        ("{}", ".json", "it has no keys"),
        ("a: [1,\nb: }", ".yaml", "broken YAML at line 2"),
        ('{"a": 1,}', ".json", "broken JSON"),
        ('{"a": 1, "a": 2}', ".json", "given twice"),
        ("a = (", ".py", "broken Python at line 1"),
        ("- 1\n- 2\n", ".yaml", "not a mapping"),
        ("just a word", ".yaml", "not a mapping"),
        ("tea: green\nsugar: no\n", ".yaml", 'its keys are "tea", "sugar"'),
        (SMALL, ".yaml", "run file of this project already"),
        ("learning_rate = 1", ".toml", "does not end in"),
        ("a: &x {stage: sft, b: *x}\n", ".yaml", "refers to itself"),
        ("stage: sft\n" + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9) if i else 0}]\n" for i in range(9)),
         ".yaml", "too large"),
        ('{"train_batch_size": NaN}', ".json", "NaN"),
        ('{"output_dir": "\\ud800"}', ".json", "surrogates not allowed"),
        ('{"train_batch_size": 8, "aio": {"\\u0085": 1}}', ".json", "read back as it was"),
        ("stage: sft\nx: " + "[" * 60 + "]" * 60 + "\n", ".yaml", "too large"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_refused_with_what_it_is(text: str, ending: str, why: str, tmp_path: Path) -> None:
    assert why in refused(tmp_path, (text, ending))


def test_a_folder_a_missing_file_and_a_binary_file_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x81")
    files = [tmp_path, tmp_path / "absent.yaml", tmp_path / "absent.py", tmp_path / "binary.json"]
    with pytest.raises(UserError) as error:
        imported(tmp_path, *files)
    assert [problem.field for problem in error.value.problems] == [str(file) for file in files]
    whys = " ".join(problem.why for problem in error.value.problems)
    for part in ("is a folder", "no such file", "cannot be read"):
        assert part in whys


@pytest.mark.parametrize(
    ("text", "ending", "title"),
    [
        ("num_processes: 2\nmixed_precision: fp16\n", ".yaml", "Accelerate"),
        ('{"distributed_type": "MULTI_GPU"}', ".json", "Accelerate"),
        ('{"train_batch_size": 8}', ".json", "DeepSpeed"),
        ('{"gradient_accumulation_steps": 8, "fp16": {}, "optimizer": {}}', ".json", "DeepSpeed"),
        ('{"learning_rate": 1}', ".json", "TrainingArguments"),
        ("learning_rate: 1\noutput_dir: x\n", ".yml", "TrainingArguments"),
        ('{"learning_rate": 1, "template": "x"}', ".json", "LLaMA-Factory"),
        ("learning_rate: 1\nlora_rank: 8\n", ".yaml", "LLaMA-Factory"),
        ("train_cfg = dict(max_epochs=1)", ".py", "XTuner"),
    ],
)
def test_a_file_is_recognised_by_its_keys(text: str, ending: str, title: str, tmp_path: Path) -> None:
    notes_of(tmp_path, text, ending)
    assert (
        title
        in (tmp_path / "new.yaml").read_text().splitlines()[0] + (tmp_path / "new.yaml").read_text().splitlines()[1]
    )


# --- the command line ------------------------------------------------------------------------------------------------

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.json").write_text(ARGUMENTS)
    small(tmp_path)
    return tmp_path


def test_the_command_line_lists_every_key_and_says_what_is_missing(here: Path, drivetrain: Call) -> None:
    code, out, err = drivetrain("import", "args.json")
    assert code == 1  # written, but it cannot train yet
    for key in json.loads(ARGUMENTS):
        assert key in out
    assert "optimizer.lr: 0.001" in out
    assert "missing workload" in err
    assert "--onto" in err
    assert "run file in args-run.yaml" in err
    assert (here / "args-run.yaml").exists()


def test_with_a_workload_nothing_is_missing_and_the_rules_are_asked(here: Path, drivetrain: Call) -> None:
    code, _, err = drivetrain("import", "args.json", "--onto", "small.yaml", "-o", "new.yaml")
    assert code == 0
    assert "missing" not in err
    (here / "args.json").write_text('{"output_dir": "o", "tf32": true, "use_cpu": true}')
    code, _, err = drivetrain("import", "args.json", "--onto", "small.yaml", "-o", "new.yaml", "--overwrite")
    assert code == 0
    assert "on this machine: precision: tf32 was given" in err


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("there.yaml", "exists already"),
        ("there.json", "does not end in .yaml"),
        ("absent/new.yaml", "no folder absent"),
        ("folder.yaml", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_is_refused_and_left_alone(output: str, why: str, here: Path, drivetrain: Call) -> None:
    (here / "there.yaml").write_text("mine: 1\n")
    (here / "folder.yaml").mkdir()
    code, _, err = drivetrain("import", "args.json", "-o", output)
    assert code == 2
    assert why in err
    assert (here / "there.yaml").read_text() == "mine: 1\n"


def test_overwrite_replaces_the_output_but_never_a_source(here: Path, drivetrain: Call) -> None:
    (here / "llama.yaml").write_text("stage: sft\ntemplate: x\n")
    (here / "there.yaml").write_text("mine: 1\n")
    assert drivetrain("import", "llama.yaml", "-o", "there.yaml", "--overwrite")[0] == 1
    assert "Imported from llama.yaml" in (here / "there.yaml").read_text()
    code, _, err = drivetrain("import", "llama.yaml", "-o", "llama.yaml", "--overwrite")
    assert code == 2
    assert "one of the files that are imported" in err


def test_a_refused_import_writes_nothing(here: Path, drivetrain: Call) -> None:
    (here / "args.json").write_text('{"output_dir": "o", "learning_rate": "quick"}')
    before = sorted(here.iterdir())
    code, _, err = drivetrain("import", "args.json", "absent.json")
    assert code == 2
    assert "2 problems" in err
    assert sorted(here.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_reported(
    here: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Call
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drivetrain.importing.write.os.replace", full)
    code, _, err = drivetrain("import", "args.json", "-o", "new.yaml")
    assert code == 2
    assert "No space left" in err
    assert not [path for path in here.iterdir() if "new" in path.name]
