"""Evaluate and predict with what a run left."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.config.training import Loader
from drivetrain.errors import Interrupted, UserError
from drivetrain.inference.prediction_file import PredictionFile
from drivetrain.inference.verbs import evaluate, predict
from drivetrain.launch.job import Job, Node
from drivetrain.launch.start import start_at_terminal
from drivetrain.runtime.hardware import detect
from drivetrain.training.run import run

OWN = """
import torch
from torch import nn
generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 4, generator=generator)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loss = nn.CrossEntropyLoss()
train_data = torch.utils.data.TensorDataset(x[:150], y[:150])
evaluation_data = torch.utils.data.TensorDataset(x[150:], y[150:])
"""
RUN = """
workload: {type: module, path: own.py}
device: cpu
batch_size: 16
loop: {steps: 30}
optimizer: {name: sgd, lr: 0.5}
evaluation: {every_steps: 10}
checkpoints: {keep_last: 3}
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("run.yaml").write_text(RUN)
    config, problems = load(Path("run.yaml"))
    assert not problems
    assert config is not None
    run(config, detect("cpu"), quiet=True)
    return config


def test_evaluating_a_checkpoint_gives_what_the_run_measured(trained: RunConfig) -> None:
    events = [json.loads(line) for line in (trained.folder / "events.jsonl").read_text().splitlines()]
    measured = {event["step"]: event["metrics"] for event in events if event["event"] == "evaluation"}
    for step in (10, 20, 30):
        checkpoint = trained.folder / "checkpoints" / f"step-{step:08d}"
        result = evaluate(trained, detect("cpu"), str(checkpoint))
        assert result["metrics"] == pytest.approx(measured[step])
        assert result["samples"] == 50


def test_best_and_last_are_found(trained: RunConfig) -> None:
    report = json.loads((trained.folder / "report.json").read_text())
    assert evaluate(trained, detect("cpu"), "last")["checkpoint"].endswith("step-00000030")
    best = evaluate(trained, detect("cpu"), "best")
    assert best["checkpoint"] == report["best_checkpoint"]
    assert best["metrics"][report["best"]["metric"]] == pytest.approx(report["best"]["value"])


def test_predictions_are_those_of_the_weights_in_order(trained: RunConfig) -> None:
    from safetensors.torch import load_file

    rows = list(predict(trained, detect("cpu"), "last", None))
    weights = load_file(trained.folder / "checkpoints" / "step-00000030" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator)[150:]
    hidden = torch.relu(x @ weights["0.weight"].T + weights["0.bias"])
    expected = (hidden @ weights["2.weight"].T + weights["2.bias"]).argmax(1).tolist()
    assert [row["prediction"] for row in rows] == expected
    assert len({row["sample"] for row in rows}) == 50


@pytest.mark.parametrize(("given", "said"), [("nowhere", "is no checkpoint folder"), (".", "has no manifest.json")])
def test_what_is_no_checkpoint_is_reported(given: str, said: str, trained: RunConfig) -> None:
    with pytest.raises(UserError, match=said):
        evaluate(trained, detect("cpu"), given)


def damage(file: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_weights_are_passed_over_and_a_damaged_optimizer_is_of_no_account(trained: RunConfig) -> None:
    last = trained.folder / "checkpoints" / "step-00000030"
    damage(last / "optimizer.safetensors")
    assert evaluate(trained, detect("cpu"), "last")["checkpoint"] == str(last)
    damage(last / "model.safetensors")
    assert evaluate(trained, detect("cpu"), "last")["checkpoint"].endswith("step-00000020")
    with pytest.raises(UserError, match=r"model.safetensors does not have its checksum(.|\n)*step-00000020"):
        evaluate(trained, detect("cpu"), str(last))


def test_before_training_there_is_nothing_to_evaluate(trained: RunConfig) -> None:
    other = trained.model_copy(update={"output": Path("elsewhere")})
    with pytest.raises(UserError, match="holds no good checkpoint"):
        evaluate(other, detect("cpu"), "best")


MANY = """
import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((64,), float(index)), index % 2


model = nn.Linear(64, 2)
loss = nn.CrossEntropyLoss()
train_data = evaluation_data = Data()
"""


@pytest.mark.long
@pytest.mark.parametrize("samples", [1_200, pytest.param(12_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_samples_that_are_predicted_or_evaluated(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(MANY.replace("SAMPLES", str(samples)))
    Path("run.yaml").write_text(RUN.replace("steps: 30", "steps: 1"))
    config, _ = load(Path("run.yaml"))
    assert config is not None
    config = config.model_copy(update={"loader": Loader(workers=0)})
    run(config, detect("cpu"), quiet=True)
    held, early, late = dict[int, int](), samples // 6, samples - 100

    def counted() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(predict(config, detect("cpu"), "last", None)):
            if number in {early, late}:
                gc.collect()
                held[number] = tracemalloc.get_traced_memory()[0]
            yield row

    tracemalloc.start()
    try:
        assert PredictionFile(tmp_path / "rows.jsonl").write(counted()) == samples
        assert held[late] - held[early] < 50_000  # the rows alone are a tenth of a megabyte, or a whole one
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        evaluate(config, detect("cpu"), "last")
        assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
    finally:
        tracemalloc.stop()


def test_an_interrupted_prediction_says_what_it_keeps_and_where_it_goes_on(
    trained: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path("rows.jsonl")

    def some(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        yield from islice(rows, 8)
        raise KeyboardInterrupt

    def interrupted(*_: Any) -> None:
        file = PredictionFile(output)
        file.write(some(predict(trained, detect("cpu"), "best", None, begin=file.begin)))

    monkeypatch.setattr("drivetrain.launch.start.start", interrupted)
    job = Job(verb="predict", run=trained, output=output, checkpoint="best")
    with pytest.raises(Interrupted, match=r"^Interrupted: 8 rows are kept in .*partial, and the same command goes on$"):
        start_at_terminal(job, Node())
    assert "going on" not in capsys.readouterr().err
    file = PredictionFile(output)
    other = trained.model_copy(update={"seed": 1})
    with pytest.raises(UserError, match=r"8 rows .* this is another one: seed was 0, now 1"):
        file.write(predict(other, detect("cpu"), "best", None, begin=file.begin))
    file = PredictionFile(output)
    assert file.write(predict(trained, detect("cpu"), "best", None, begin=file.begin)) == 50
    assert "going on at row 9 of 50" in capsys.readouterr().err
    assert [json.loads(line)["sample"] for line in output.read_text().splitlines()] == [
        f"evaluation sample {number}" for number in range(50)
    ]
