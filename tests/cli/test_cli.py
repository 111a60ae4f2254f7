"""The command line as a user meets it: what bad input is answered with, and what the verbs leave."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drivetrain.cli import main
from drivetrain.compare import verbs
from drivetrain.config.run import RunConfig

DIGITS = """
workload:
  type: image_classification
  model:
    norm: group
    config: {model_type: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8], depths: [1]}
  data: {source: digits, limit_train: 64, limit_evaluation: 40}
batch_size: 16
loop: {steps: 4}
"""
TEXTS = """
workload:
  type: text_classification
  model:
    tokenizer: vocab.txt
    config: {model_type: bert, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8}
  data: {train: reviews.csv, text_column: text, label_column: label, max_length: 8, cache: cache}
batch_size: 4
loop: {steps: 2}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a digits run, a text run with its data, and a folder of images; the current one."""
    monkeypatch.chdir(tmp_path)
    Path("digits.yaml").write_text(DIGITS)
    Path("texts.yaml").write_text(TEXTS)
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very"]))
    rows = [("good very good", 1), ("bad", 0), ("very bad bad", 0), ("good", 1)] * 10
    Path("reviews.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    for name in ("cat", "dog"):
        for i in range(12):
            folder = Path("images") / name
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 20 * i, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    Path("images.yaml").write_text(DIGITS.replace("source: digits", "source: folder, train: images, image_size: 8"))
    return tmp_path


def write(text: str) -> Callable[[], None]:
    return lambda: Path("digits.yaml").write_text(text) and None


def replace_in(file: str, old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        assert old in Path(file).read_text()
        Path(file).write_text(Path(file).read_text().replace(old, new))

    return change


def nothing() -> None:
    pass


REFUSED = {
    "missing run file": (nothing, ["digit.yaml"], ["no such file", "did you mean digits.yaml"]),
    "empty run file": (write(""), ["digits.yaml"], ["the file is empty"]),
    "broken YAML": (write("workload: [1,\nloop: }"), ["digits.yaml"], ["broken YAML at line 2"]),
    "a list for a mapping": (write("- 1"), ["digits.yaml"], ["not a mapping"]),
    "key given twice": (write(DIGITS + "batch_size: 3\n"), ["digits.yaml"], ["broken YAML", "batch_size"]),
    "unknown key": (nothing, ["digits.yaml", "batchsize=4"], ["batchsize", "did you mean batch_size"]),
    "unknown key in the file": (write(DIGITS + "optimiser: {}"), ["digits.yaml"], ["did you mean optimizer"]),
    "string for a number": (nothing, ["digits.yaml", "lr=quick"], ["optimizer.lr", "'quick' was given"]),
    "negative batch": (nothing, ["digits.yaml", "batch_size=-4"], ["-4 was given", "greater than 0"]),
    "no batch": (nothing, ["digits.yaml", "batch_size=null"], ["neither was given"]),
    "batch above the data": (nothing, ["digits.yaml", "batch_size=65"], ["the batch (65) > the training data (64"]),
    "unknown metric": (nothing, ["digits.yaml", "evaluation.metric=acuracy"], ["did you mean accuracy"]),
    "unknown tracker": (nothing, ["digits.yaml", "trackers=[tensorbord]"], ["did you mean tensorboard"]),
    "unknown model": (nothing, ["digits.yaml", "config.model_type=resnt"], ["did you mean resnet"]),
    "unknown model key": (nothing, ["digits.yaml", "config.dephts=[1]"], ["did you mean depths"]),
    "unknown optimizer": (nothing, ["digits.yaml", "optimizer.name=adan"], ["adamw"]),
    "optimizer that cannot be imported": (nothing, ["digits.yaml", "optimizer.name=nowhere:Best"], ["nowhere"]),
    "optimizer argument": (nothing, ["digits.yaml", "optimizer.options={lookahead: 3}"], ["lookahead"]),
    "unwritable output": (nothing, ["digits.yaml", "output=digits.yaml/runs"], ["output", "cannot be written"]),
    "missing data": (nothing, ["texts.yaml", "data.train=review.csv"], ["review.csv does not exist"]),
    "empty data": (lambda: Path("reviews.csv").write_text("") and None, ["texts.yaml"], ["reviews.csv", "empty"]),
    "wrong column": (nothing, ["texts.yaml", "text_column=txt"], ["'txt'", "text"]),
    "two wrong columns": (nothing, ["texts.yaml", "text_column=txt", "label_column=lable"], ["2 problems"]),
    "one class": (replace_in("reviews.csv", ",0\n", ",1\n"), ["texts.yaml"], ["one class"]),
    "no label": (replace_in("reviews.csv", ",0\n", ",\n"), ["texts.yaml"], ["label"]),
    "missing tokenizer": (nothing, ["texts.yaml", "tokenizer=voc.txt"], ["voc.txt"]),
    "too few positions": (nothing, ["texts.yaml", "config.max_position_embeddings=4"], ["max_position_embeddings"]),
    "corrupt image": (
        lambda: Path("images/cat/3.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing") and None,
        ["images.yaml"],
        ["cat/3.png", "cannot be read"],
    ),
    "no images": (nothing, ["images.yaml", "data.train=cache"], ["cache does not exist"]),
    "tf32 on a CPU": (nothing, ["digits.yaml", "device=cpu", "precision=tf32"], ["tf32 was given", "works here"]),
    "resume and overwrite": (nothing, ["digits.yaml", "--resume", "--overwrite"], ["--resume keeps the run"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_work_with_what_why_and_what_to_do(
    case: str, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    change, arguments, reported = REFUSED[case]
    change()
    code, out, err = drivetrain("train", *arguments)
    assert code == 2, err
    assert "Traceback" not in out + err
    for words in reported:
        assert words in err, err
    assert len(err) < 2000  # one screen
    assert not list(Path().glob("runs/*/checkpoints")), "work was started"


def test_all_problems_come_at_once(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = drivetrain(
        "train", "digits.yaml", "batch_size=-1", "lr=x", "sed=3", "precision=tf32", "device=cpu", "schedule.name=cosin"
    )
    assert code == 2
    for field in ("batch_size", "optimizer.lr", "did you mean seed", "schedule.name", "tf32"):
        assert field in err


def test_train_evaluate_and_predict_leave_what_they_say(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = drivetrain("train", "digits.yaml")
    assert code == 0, err
    assert "accuracy" in out
    folder = Path("runs/digits")
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == 4
    assert report["samples"] == 64
    assert report["peak_memory"].keys() == {"tensor", "resident"}
    assert report["samples_per_second"] > 0
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    code, out, err = drivetrain("evaluate", "digits.yaml")
    assert code == 0, err
    assert json.loads(out)["metrics"]["accuracy"] == pytest.approx(report["metrics"]["accuracy"])
    code, out, err = drivetrain("evaluate", str(folder))
    assert code == 0, err
    assert json.loads(out)["metrics"]["accuracy"] == pytest.approx(report["metrics"]["accuracy"]), "of the run's folder"
    code, _, err = drivetrain("predict", str(folder), "--output", "predictions.csv")
    assert code == 0, err
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert len(rows) == 40
    assert list(rows[0])[:4] == ["sample", "reference", "label", "probability"]
    every = [name for name in rows[0] if name.startswith("probabilities.")]
    assert len(every) == 10
    assert sum(float(rows[0][name]) for name in every) == pytest.approx(1, abs=1e-4)
    assert rows[0]["probability"] == rows[0][f"probabilities.{rows[0]['label']}"]
    code, _, err = drivetrain("predict", "digits.yaml", "--text", "seven")
    assert code == 2
    assert "samples are not texts" in err
    # the resolved run file says the whole of the run, and gives the same run again
    code, _, err = drivetrain("train", "runs/digits/run.yaml", "output=again", "--quiet")
    assert code == 0, err
    assert json.loads(Path("again/report.json").read_text())["metrics"] == report["metrics"]


def test_a_finished_run_is_not_overwritten_unasked(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    assert drivetrain("train", "digits.yaml", "--quiet")[0] == 0
    before = sorted(path.name for path in Path("runs/digits/checkpoints").iterdir())
    code, _, err = drivetrain("train", "digits.yaml", "--quiet")
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert sorted(path.name for path in Path("runs/digits/checkpoints").iterdir()) == before
    assert drivetrain("train", "digits.yaml", "--quiet", "--overwrite")[0] == 0


def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(
    drivetrain: Callable[..., tuple[int, str, str]],
) -> None:
    assert drivetrain("train", "digits.yaml", "--quiet", "checkpoints.every_steps=2")[0] == 0
    newest = Path("runs/digits/checkpoints/step-00000004/model.safetensors")
    newest.write_bytes(newest.read_bytes()[:-100])
    code, _, err = drivetrain("evaluate", "digits.yaml", "--checkpoint", str(newest.parent))
    assert code == 2
    assert "model.safetensors has" in err
    code, _, err = drivetrain("train", "digits.yaml", "--resume", "checkpoints.every_steps=2")
    assert code == 0, err
    assert "checkpoint skipped: step-00000004: model.safetensors has" in err
    assert "resumed after step 2" in err


def test_a_checkpoint_of_another_model_is_refused(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    assert drivetrain("train", "digits.yaml", "--quiet")[0] == 0
    for verb in (["evaluate"], ["train", "--resume"]):
        code, _, err = drivetrain(verb[0], "digits.yaml", "config.hidden_sizes=[12]", *verb[1:])
        assert code == 2
        assert "is of another model" in err


def test_a_resumed_run_may_not_change_the_order_of_the_data(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    assert drivetrain("train", "digits.yaml", "--quiet")[0] == 0
    code, _, err = drivetrain("train", "digits.yaml", "--resume", "batch_size=8", "steps=9")
    assert code == 2
    assert "batch_size was 16, now 8" in err


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
    drivetrain: Callable[..., tuple[int, str, str]],
) -> None:
    Path("nan.py").write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Linear(1, 1)\nloss = nn.MSELoss()\n"
        "train_data = [(torch.ones(1) * (float('inf') if i == 5 else 1), torch.ones(1)) for i in range(32)]\n"
    )
    Path("nan.yaml").write_text(
        "workload: {type: module, path: nan.py}\nbatch_size: 4\nloop: {steps: 8}\ncheckpoints: {every_steps: 1}\n"
    )
    code, _, err = drivetrain("train", "nan.yaml")
    assert code == 1
    assert "the loss is" in err
    assert "training samples" in err
    assert "5" in err.split("training samples")[1].split(". ")[0]
    named = re.search(r"step (\d+): the loss is", err)
    assert named is not None
    for checkpoint in Path("runs/nan/checkpoints").iterdir():
        assert json.loads((checkpoint / "manifest.json").read_text())["step"] < int(named[1])


def test_help_never_imports_torch() -> None:
    for arguments in (["--help"], ["train", "--help"], ["compare", "--help"], ["fields"], ["schema"], ["version"]):
        program = (
            "import sys; from drivetrain.cli import main\n"
            f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
            "assert not {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules), 'imported'"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_field_has_its_line_of_documentation(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    from drivetrain.config.field_paths import field_paths

    code, out, _ = drivetrain("fields")
    assert code == 0
    for path, info in field_paths():
        assert info.description, path
        assert path[-1] in out


def test_schema_is_a_json_schema_of_the_run_file(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = drivetrain("schema")
    schema = json.loads(out)
    assert code == 0
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
    assert "enum" in schema["properties"]["precision"]


def test_doctor_says_what_works_and_why_not(drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = drivetrain("doctor", "--json")
    engines = json.loads(out)["engines"]
    assert engines["single"][0] == engines["ddp"][0] == engines["fsdp"][0] == "yes"
    assert engines["dp"][0] == ("emulated" if json.loads(out)["device"] == "cpu" else "yes")
    findings = json.loads(out)
    assert code == 0
    assert findings["precisions"]["fp32"][0] == "yes"
    if findings["device"] == "cpu":
        assert findings["precisions"]["tf32"][0] == "no"
    code, out, _ = drivetrain("doctor")
    assert code == 0
    for words in ("NCCL", "NVIDIA GPU", "never tried", *(["not tried"] * (findings["device"] == "cpu"))):
        assert words in out


def test_an_interrupted_comparison_ends_with_130_and_how_to_go_on(
    drivetrain: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "compare", interrupted)
    code, out, err = drivetrain("compare", "digits.yaml", "precision=fp32,bf16")
    assert (code, out) == (130, "")
    assert "Finished cells are kept: the same command goes on with the others" in err


def test_an_occupied_folder_is_reported_before_any_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text((Path(__file__).resolve().parents[2] / "recipes" / "digits.yaml").read_text())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "events.jsonl").write_text("")
    (tmp_path / "taken" / "checkpoints" / "step-00000001").mkdir(parents=True)
    monkeypatch.setattr("drivetrain.launch.start.start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.yaml"), "engine=ddp", "processes=2", f"output={tmp_path / 'taken'}"])
    assert ended.value.code == 2
    assert "already holds a run" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_checkpoint_that_is_not_there_is_reported_before_any_rank_is_started(
    verb: str, monkeypatch: pytest.MonkeyPatch, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr("drivetrain.launch.start.start", lambda *_: pytest.fail("ranks were started"))
    for option, reported in (
        {(): "checkpoints holds no good checkpoint", ("--checkpoint", "ab"): "ab is no checkpoint"}
    ).items():
        code, _, err = drivetrain(verb, "digits.yaml", "engine=mesh-dp2", *option)
        assert code == 2, err
        assert reported in err
        assert "refused before any work" in err


def test_a_folder_without_a_run_is_named_with_what_it_lacks(
    tmp_path: Path, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    for verb in ("evaluate", "predict"):
        code, _, err = drivetrain(verb, str(tmp_path))
        assert code == 2
        assert "holds no run: it has no run.yaml" in err
