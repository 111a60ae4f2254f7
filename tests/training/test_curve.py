"""Tests what points of a curve count: each token once, on any number of ranks, and how busy each rank's device was."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.tracking.jsonl import FILE_NAME, read_events
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.language_workload import IGNORED

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["good", "bad", "hotel", "room", "the", "was"]
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 32}  # fmt: skip
TEXTS = [("good hotel", 1), ("the bad bad room", 0), ("the room was good", 1), ("bad", 0)] * 6


def classifier(folder: Path) -> dict[str, Any]:
    (folder / "vocab.txt").write_text("\n".join([*MARKS, *WORDS]) + "\n")
    (folder / "reviews.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in TEXTS))
    model = {"tokenizer": str(folder / "vocab.txt"), "config": BERT}
    data = {"train": str(folder / "reviews.csv"), "evaluation": str(folder / "reviews.csv"), "max_length": 16}
    return {"type": "text_classification", "model": model, "data": data}


def trained(folder: Path, workload: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    """Returns the points of a run of two epochs."""
    file, output = folder / "run.yaml", folder / f"run-{len(overrides)}"
    own = {"batch_size": 8, "loop": {"epochs": 2}, "optimizer": {"name": "sgd", "lr": 0.1}, "device": "cpu"}
    file.write_text(json.dumps({"workload": workload, **own, "tracking": {"log_every": 2}}))
    output = next((folder / each.partition("=")[2] for each in overrides if each.startswith("name=")), output)
    words = [sys.executable, "-m", "drivetrain", "train", str(file), f"output={output}", "--quiet", *overrides]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return [each for each in read_events(output / FILE_NAME) if each["event"] == "step"]


@pytest.mark.long
def test_tokens_are_counted_without_padding_and_each_once_over_the_ranks(tmp_path: Path) -> None:
    workload = classifier(tmp_path)
    in_texts = sum(len(text.split()) + 2 for text, _ in TEXTS)  # [CLS] and [SEP]
    alone = trained(tmp_path, workload)
    spread = trained(tmp_path, workload, "engine=ddp", "processes=2", "micro_batch_size=2")
    assert alone[-1]["tokens"] == 2 * in_texts
    assert [each["tokens"] for each in spread] == [each["tokens"] for each in alone]
    assert "utilisation_by_rank" not in alone[-1]
    shares = [share for each in spread for share in each.get("utilisation_by_rank", [])]
    assert len(shares) == 2 * len(spread), "a share for each rank at each point, not known where none was sampled"
    assert all(math.isnan(share) or 0 <= share <= 1 for share in shares)


@pytest.mark.long
def test_a_resumed_run_goes_on_counting_its_tokens(tmp_path: Path) -> None:
    workload = classifier(tmp_path)
    first = trained(tmp_path, workload, "name=counted", "loop.epochs=1")
    both = trained(tmp_path, workload, "name=counted", "--resume")
    assert both[-1]["tokens"] == 2 * first[-1]["tokens"] > 0


def test_pictures_have_no_tokens(tmp_path: Path) -> None:
    config = {"model_type": "resnet", "layer_type": "basic", "embedding_size": 4, "hidden_sizes": [4], "depths": [1]}
    data = {"source": "digits", "limit_train": 16}
    workload = {"type": "image_classification", "model": {"norm": "group", "config": config}, "data": data}
    assert all("tokens" not in each for each in trained(tmp_path, workload))


def test_tokens_of_a_language_model_end_with_the_last_trained_one_of_each_row() -> None:
    """Behind it there is padding, which has no targets; a prompt before it counts."""
    no = IGNORED
    targets = torch.tensor([[5, 6, no, no], [no, no, 7, no], [no, no, no, no]])
    assert LanguageModelWorkload.tokens(None, {"targets": targets}) == 2 + 3  # type: ignore[arg-type]
