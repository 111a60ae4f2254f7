"""The run files that the benches give to both sides: whoever measures against drivetrain reads the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samples import Images, Texts

MEAN, STD = [0.491, 0.482, 0.447], [0.247, 0.243, 0.262]  # CIFAR-10's


def image_workload(data: Images, depths: list[int]) -> dict[str, Any]:
    """A half-width ResNet of basic blocks at 32 pixels, training images shifted and mirrored."""
    return {
        "type": "image_classification",
        "model": {
            "config": {
                "model_type": "resnet",
                "layer_type": "basic",
                "embedding_size": 32,
                "hidden_sizes": [32, 64, 128, 256],
                "depths": depths,
            }
        },
        "data": {
            "source": "folder",
            "train": str(data.train),
            "evaluation": str(data.evaluation),
            "crop_padding": 4,
            "flip": True,
            "mean": MEAN,
            "std": STD,
        },
    }


def text_workload(data: Texts, layers: int, width: int, max_length: int, cache: Path, **other: Any) -> dict[str, Any]:
    """A small BERT from scratch. other: further settings of the data.

    cache: where drivetrain keeps tokenised data; a fresh folder makes it tokenise.
    """
    return {
        "type": "text_classification",
        "model": {
            "tokenizer": str(data.vocab),
            "config": {
                "model_type": "bert",
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 64,
                "intermediate_size": 4 * width,
            },
        },
        "data": {
            "train": str(data.train),
            "evaluation": str(data.evaluation),
            "text_column": "text",
            "label_column": "label",
            "max_length": max_length,
            "cache": str(cache),
            **other,
        },
    }


def write_run(path: Path, run: dict[str, Any]) -> Path:
    """JSON is YAML 1.2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1))
    return path
