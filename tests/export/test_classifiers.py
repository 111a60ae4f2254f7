"""Classifiers exported as graphs: the script in the card prepares a picture or a text, and answers as the run does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain as api
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.export.exporting import export
from drivetrain.export.request import Request
from drivetrain.launch.prepare import run_file_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = ("good", "bad", "very", "room", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Colour pictures of several sizes, none of them the model's."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, number in (("train", 8), ("test", 3)):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, 255, (24 + i, 31, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    config = {
        "model_type": "resnet",
        "layer_type": "basic",
        "embedding_size": 8,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
    }
    data = {"source": "folder", "train": str(folder / "train"), "evaluation": str(folder / "test"), "image_size": 16}
    return trained(folder, {"type": "image_classification", "model": {"config": config}, "data": data})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    rows = ["label,text", *(f"{n % 2},{'very ' * (n % 5)}{('bad', 'good')[n % 2]} room" for n in range(40))]
    (folder / "rows.csv").write_text("\n".join(rows) + "\n")
    model = {
        "tokenizer": str(folder / "vocab.txt"),
        "config": {"model_type": "bert", **SMALL, "max_position_embeddings": 16},
    }
    data = {"train": str(folder / "rows.csv"), "evaluation_fraction": 0.25, "max_length": 5}
    return trained(folder, {"type": "text_classification", "model": model, "data": data})


def trained(folder: Path, workload: dict[str, object]) -> RunConfig:
    api.train({"workload": workload}, batch_size=8, steps=4, lr=1e-2, quiet=True, output=folder / "run")
    found, problems = load(*run_file_of(folder / "run", []))
    assert found is not None
    assert not problems
    return found


@pytest.mark.parametrize("format_", ["onnx", "torch-export"])
@pytest.mark.parametrize("kind", ["pictures", "texts"])
def test_the_script_in_the_card_answers_as_the_run_does(
    kind: str, format_: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: RunConfig = request.getfixturevalue(kind)
    done = export(run, Request(format_, tmp_path / "out", samples=4))
    assert done.report["passed"]
    assert done.verdict.difference.relative < 1e-5
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    script = card.split("```python\n")[1].split("```")[0]
    if kind == "pictures":
        assert "less the mean" in card
        [file] = (run.folder.parent / "test" / "dog").glob("2.png")
        given = str(file)
    else:
        given = "very very very very good room"  # longer than the run reads
    shown = subprocess.run(
        [sys.executable, "-c", script, given], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    [expected] = list(api.predict(run.folder, data=given if kind == "pictures" else [given]))
    assert found["label"] == expected["label"]
    probabilities = torch.tensor(found["scores"]).softmax(0).tolist()
    assert probabilities == pytest.approx(list(expected["probabilities"].values()), abs=1e-5)
