"""The folder of a run names its best checkpoint where a run file wants a model; all other places stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.config.language import LanguageModel
from drivetrain.config.load import load, validate
from drivetrain.config.models_of_runs import checkpoint_of_run, stage_of_checkpoint, with_checkpoints
from drivetrain.config.rules import check_anywhere
from tests.tiny_language import LLAMA, ROWS, write_lines


def run_folder(folder: Path, links: dict[str, str], file: str = "config.json") -> Path:
    folder.mkdir()
    (folder / "run.yaml").write_text("batch_size: 8\n")
    for name, step in links.items():
        (folder / "checkpoints" / step / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / step / file).write_text("{}")
        (folder / name).symlink_to(Path("checkpoints") / step)
    return folder


def test_the_best_checkpoint_takes_the_place_of_a_runs_folder_and_else_the_last(tmp_path: Path) -> None:
    both = run_folder(tmp_path / "both", {"best": "step-00000004", "last": "step-00000008"})
    last = run_folder(tmp_path / "last", {"last": "step-00000008"}, "adapter_config.json")
    assert checkpoint_of_run(str(both)) == str(both / "checkpoints" / "step-00000004")
    assert checkpoint_of_run(f"{last}/") == str(last / "checkpoints" / "step-00000008")


def test_a_home_folder_stays_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run_folder(tmp_path / "base", {"best": "step-00000004"})
    assert checkpoint_of_run("~/base") == "~/base/checkpoints/step-00000004"


def test_what_is_no_run_or_a_model_itself_stays_as_it_is(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "model", {"best": "step-00000004"})
    (model / "config.json").write_text("{}")
    plain = run_folder(tmp_path / "plain", {"best": "step-00000004"}, "model.safetensors")  # no model of Transformers
    unlinked = run_folder(tmp_path / "unlinked", {})
    for place in (model, plain, unlinked, model / "best", tmp_path / "nothing"):
        assert checkpoint_of_run(str(place)) == str(place)
    assert checkpoint_of_run("org/name") == "org/name"


def test_every_name_of_a_model_in_a_block_is_replaced_and_that_of_data_is_not(tmp_path: Path) -> None:
    base = str(run_folder(tmp_path / "base", {"best": "step-00000004"}))
    step = f"{base}/checkpoints/step-00000004"
    block = LanguageModel.model_validate(
        {
            "type": "language_model",
            "stage": "grpo",
            "model": {"path": base, "tokenizer": base},
            "data": {"train": base},
            "reinforcement": {"reference_model": base, "rewards": [{"model": base}, {"use": "length"}]},
        }
    )
    found = with_checkpoints(block).model_dump()
    assert (found["model"]["path"], found["model"]["tokenizer"]) == (step, step)
    assert found["data"]["train"][0]["path"] == base
    assert found["reinforcement"]["reference_model"]["path"] == step
    assert [each["model"] for each in found["reinforcement"]["rewards"]] == [step, None]


def test_every_reader_of_a_run_file_gets_the_checkpoint(tmp_path: Path) -> None:
    base = run_folder(tmp_path / "base", {"best": "step-00000004"})
    workload = {"type": "language_model", "model": {"path": str(base)}, "data": {"train": "a.txt"}}
    (tmp_path / "run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    run, problems = load(tmp_path / "run.yaml")
    assert run is not None
    assert not problems
    assert run.workload.base == str(base / "checkpoints" / "step-00000004")


def adapters(tmp_path: Path, adapter: object) -> tuple[list[str], list[str]]:
    """Returns the paths of a run file's adapters once it is read, and what is wrong with them, without the folder
    above."""
    workload = {"type": "language_model", "stage": "sft", "model": {"path": "base"}, "data": {"train": "a.jsonl"}}
    raw = {"workload": workload, "adapter": adapter, "batch_size": 8, "loop": {"steps": 2}}
    run, problems = validate(raw, [])
    assert run is not None
    assert run.adapter is not None
    assert not problems
    above = f"{tmp_path}/"
    wrong = [str(each).replace(above, "") for each in check_anywhere(run) if each.field.startswith("adapter")]
    return [str(each.path).replace(above, "") for each in run.adapter], wrong


def test_the_folder_of_a_run_that_trained_an_adapter_names_its_best_checkpoint(tmp_path: Path) -> None:
    file = "adapter_config.json"
    both = run_folder(tmp_path / "both", {"best": "step-00000004", "last": "step-00000008"}, file)
    last = run_folder(tmp_path / "last", {"last": "step-00000008"}, file)
    assert adapters(tmp_path, {"path": str(both)}) == (["both/checkpoints/step-00000004"], [])
    several = [{"name": "a", "path": f"{both}/last"}, {"name": "b", "path": str(last)}, {"name": "c"}]
    assert adapters(tmp_path, several) == (["both/last", "last/checkpoints/step-00000008", "None"], [])


def test_a_saved_adapter_that_lies_beside_a_run_file_is_the_one_that_is_meant(tmp_path: Path) -> None:
    own = run_folder(tmp_path / "own", {"best": "step-00000004"}, "adapter_config.json")
    (own / "adapter_config.json").write_text("{}")
    assert adapters(tmp_path, {"path": str(own)}) == (["own"], [])


def test_a_run_without_an_adapter_to_go_on_with_is_refused_by_its_folder(tmp_path: Path) -> None:
    run_folder(tmp_path / "begun", {})
    run_folder(tmp_path / "whole", {"best": "step-00000004"})
    run_folder(tmp_path / "two", {"last": "step-00000008"}, "old/adapter_config.json")
    (tmp_path / "two" / "last" / "new").mkdir()
    (tmp_path / "two" / "last" / "new" / "adapter_config.json").write_text("{}")
    for name, why, fix in (
        ("begun", "begun is a run without a checkpoint", "let it train until it saves one, or give another"),
        (
            "whole",
            "whole is a run that trained no adapter",
            "give it as workload.model.path, and leave adapter.path out",
        ),
        ("two", "two is a run that trained 2 adapters", "give two/last/new or two/last/old"),
    ):
        paths, wrong = adapters(tmp_path, {"path": str(tmp_path / name)})
        assert paths == [name]
        assert wrong == [f"adapter.path: {why}\n    {fix}"]


def test_the_stage_of_a_checkpoint_is_that_of_its_runs_file_where_one_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints/step-00000002"
    folder.mkdir(parents=True)
    assert stage_of_checkpoint(str(folder)) is None
    for text, stage in (
        ("workload: {stage: sft}", "sft"),
        ("workload: {}", None),
        ("workload: sft", None),
        ("workload: {stage: [sft]}", None),
        ("{", None),
    ):
        (tmp_path / "run/run.yaml").write_text(text)
        assert stage_of_checkpoint(str(folder)) == stage, text


def test_a_run_goes_on_from_another_runs_folder_as_from_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "train.jsonl", ROWS)
    data = {"train": "train.jsonl", "length": 64, "template": "chatml", "evaluation_fraction": 0.2}
    workload = {"type": "language_model", "stage": "sft", "data": data}
    given = {"batch_size": 4, "optimizer": {"name": "sgd", "lr": 0.1}, "loop": {"steps": 2}}

    def train(name: str, model: dict[str, object], *words: str) -> object:
        Path(f"{name}.yaml").write_text(json.dumps({"workload": {**workload, "model": model}, **given}))
        with pytest.raises(SystemExit) as ended:
            main(["train", f"{name}.yaml", *words])
        assert ended.value.code == 0
        return json.loads(Path(f"runs/{name}/report.json").read_text())["metrics"]

    begun = train("base", {"config": LLAMA})
    found = train("on", {"path": "runs/base"})
    assert found == train("by-step", {"path": "runs/base/best"}) != begun
    assert "path: runs/base/checkpoints/step-00000002" in Path("runs/on/run.yaml").read_text()
    whole = train("whole", {"path": "runs/base"}, "loop.steps=4")
    assert train("on", {"path": "runs/base"}, "loop.steps=4", "--resume") == whole != found
