"""The precision that `drivetrain init` writes, by the kind of data and by what the machine's device computes in."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from drivetrain.cli import main
from drivetrain.config.files import read_yaml
from drivetrain.config.load import load
from drivetrain.config.rules import check_anywhere
from drivetrain.init.write import Written, written

Answer = Callable[[str | None], None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def bfloat16_on(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sets the device with bfloat16 that init finds: "cpu", "cuda" or None."""
    return lambda device: monkeypatch.setattr("drivetrain.init.fitted.device_with_bfloat16", lambda _: device)


def conversations() -> Path:
    lines = [json.dumps({"instruction": f"{number}?", "output": f"{number}!"}) for number in range(40)]
    Path("talks.jsonl").write_text("\n".join(lines))
    return Path("talks.jsonl")


def preferences() -> Path:
    lines = [json.dumps({"prompt": f"Hi {n}", "chosen": f"Hello {n}.", "rejected": "What?"}) for n in range(40)]
    Path("pairs.jsonl").write_text("\n".join(lines))
    return Path("pairs.jsonl")


def documents() -> Path:
    Path("play.txt").write_text("What say you? A pox on it, quoth she.\n" * 80)
    return Path("play.txt")


def labelled_texts() -> Path:
    with Path("hotels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["text", "label"], *([f"{'good' if n % 2 else 'bad'} room {n}", n % 2] for n in range(40))]
        )
    return Path("hotels.csv")


def pictures() -> Path:
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (32, 32), (number, 20, 200)).save(Path("pets", name, f"{number}.png"))
    return Path("pets")


LANGUAGE = (conversations, preferences, documents)
CLASSIFIERS = (labelled_texts, pictures)


def line(file: str = "run.yaml") -> str:
    """Returns the line of the run file that names a precision, or nothing."""
    return "".join(re.findall(r"^precision:.*$", Path(file).read_text(), re.M))


def decided(made: Written) -> list[str]:
    return [each for each in made.decisions if "precision" in each]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", LANGUAGE)
@pytest.mark.parametrize(("device", "named"), [("cpu", "processor"), ("cuda", "GPU")])
def test_a_language_model_gets_bf16_mixed_where_the_device_computes_in_bfloat16(
    data: Callable[[], Path], device: str, named: str, bfloat16_on: Answer
) -> None:
    bfloat16_on(device)
    made = written(None, data(), Path("run.yaml"))
    assert re.fullmatch(r"precision: bf16-mixed +# products in bfloat16, weights in fp32; fp32 rounds least", line())
    assert len(decided(made)) == 1
    assert f"this machine's {named} computes in bfloat16" in decided(made)[0]
    assert f"# {decided(made)[0]}" in Path("run.yaml").read_text()
    run, problems = load(Path("run.yaml"))
    assert run is not None
    assert run.precision == "bf16-mixed"
    assert not [*problems, *check_anywhere(run)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", LANGUAGE)
def test_a_language_model_stays_at_fp32_without_bfloat16(data: Callable[[], Path], bfloat16_on: Answer) -> None:
    bfloat16_on(None)
    made = written(None, data(), Path("run.yaml"))
    assert not line()
    assert not decided(made)
    run, _ = load(Path("run.yaml"))
    assert run is not None
    assert run.precision == "fp32"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", CLASSIFIERS)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_classifier_stays_at_fp32_on_a_cpu(data: Callable[[], Path], device: str | None, bfloat16_on: Answer) -> None:
    bfloat16_on(device)
    made = written(None, data(), Path("run.yaml"))
    assert line() == "precision: fp32"
    assert not decided(made)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", CLASSIFIERS)
def test_a_classifier_gets_bf16_mixed_on_a_gpu_that_computes_in_bfloat16(
    data: Callable[[], Path], bfloat16_on: Answer
) -> None:
    bfloat16_on("cuda")
    made = written(None, data(), Path("run.yaml"))
    assert line().startswith("precision: bf16-mixed ")
    assert "this machine's GPU computes in bfloat16" in decided(made)[0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_a_recipe_that_names_a_precision_keeps_it(device: str | None, bfloat16_on: Answer) -> None:
    bfloat16_on(device)
    for name, data, own in (
        ("alpaca-qlora", conversations(), "precision: bf16-mixed"),
        ("cifar10-small", pictures(), "precision: fp32"),
    ):
        made = written(name, data, Path(f"{name}.yaml"))
        assert line(f"{name}.yaml") == own
        assert not decided(made)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["alpaca-sft", "distill", "rewards-grpo"])
def test_other_recipes_of_conversations_are_accepted_with_bf16_mixed(name: str, bfloat16_on: Answer) -> None:
    bfloat16_on("cpu")
    written(name, conversations(), Path("run.yaml"))
    run, problems = load(Path("run.yaml"))
    assert run is not None
    assert run.precision == "bf16-mixed"
    assert not [*problems, *check_anywhere(run)]


@pytest.mark.usefixtures("here")
def test_the_verb_prints_the_precision_and_the_run_file_trains(
    bfloat16_on: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    bfloat16_on("cpu")
    small = ["config.hidden_size=32", "config.num_hidden_layers=1", "config.intermediate_size=32"]
    few = ["loop.epochs=null", "loop.steps=2", "schedule.warmup_steps=0", "name=few", "--quiet"]
    for words in (["init", "--data", str(conversations())], ["train", "run.yaml", *small, *few]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "precision: bf16-mixed, since this machine's processor computes in bfloat16" in capsys.readouterr().out
    assert read_yaml(Path("runs/few/run.yaml"))["precision"] == "bf16-mixed"


@pytest.mark.usefixtures("here")
def test_on_a_machine_without_a_gpu_init_does_not_import_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from drivetrain.runtime import native_bfloat16;"
        "native_bfloat16._has_gpu_driver = lambda: False; from drivetrain.init.write import written;"
        f"written(None, Path({str(conversations())!r}), Path('run.yaml')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
