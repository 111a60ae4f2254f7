"""Language models of next to nothing, and conversations whose tokens can be written down by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.language import LanguageModel
from drivetrain.workloads.language_model import LanguageModelWorkload

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}
ROBERTA = {"model_type": "roberta", **SIZES, "is_decoder": True, "max_position_embeddings": 130}
END, START_OF_TURN, END_OF_TURN = 256, 257, 258  # after the bytes, as the vocabulary's end and ChatML's tokens follow
IGNORED = -100
# a chat template that forgets what earlier replies said
REWRITING = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + \
(m.content if loop.last or m.role == 'user' else '...') + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

Row = Mapping[str, Any]


def talk(question: str, answer: str) -> dict[str, str]:
    """As alpaca has it."""
    return {"instruction": question, "output": answer}


ROWS = [talk(f"say {number}", "hello " * (number % 4) + str(number)) for number in range(20)]


def chatml(question: str, answer: str) -> tuple[list[int], list[bool]]:
    """The bytes and marks of a conversation in ChatML, and whether each is of the reply or ends it."""
    prompt = [START_OF_TURN, *f"user\n{question}".encode(), END_OF_TURN, *b"\n", START_OF_TURN, *b"assistant\n"]
    reply = [*answer.encode(), END_OF_TURN]
    return [*prompt, *reply, *b"\n"], [False] * len(prompt) + [True] * len(reply) + [False]


def write_lines(path: Path, rows: Iterable[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(folder: Path, rows: Sequence[Row] | None = None, stage: str = "sft", **given: Any) -> LanguageModel:
    """Of these rows, in bytes and ChatML, by default. model: a block; all else is of the data."""
    model = {"config": LLAMA, **given.pop("model", {})}
    if model.get("path"):
        model.pop("config")
    data = {"cache": folder / "cache", "length": 64, **given}
    if rows is not None:
        data["train"] = write_lines(folder / "train.jsonl", rows)
    if stage == "sft":
        data.setdefault("template", "chatml")
    return LanguageModel.model_validate({"stage": stage, "model": model, "data": data})


def workload(folder: Path, rows: Sequence[Row] | None = None, seed: int = 0, **given: Any) -> LanguageModelWorkload:
    return LanguageModelWorkload(config(folder, rows, **given), seed)


def loaded(samples: Any, epoch: int = 0) -> list[tuple[list[int], list[bool]]]:
    found = (samples.load(index, epoch) for index in range(len(samples)))
    return [(ids.tolist(), targets.tolist()) for ids, targets in found]


def plain_loss(model: nn.Module, ids: Sequence[int], trained: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """One sample through Transformers' forward and PyTorch's loss: of each target its loss, the logits and itself."""
    tokens = torch.tensor(np.asarray(ids, dtype=np.int64))
    places = torch.tensor(np.asarray(trained)[1:])
    logits = model(input_ids=tokens[None, :-1]).logits[0][places]
    return F.cross_entropy(logits, tokens[1:][places], reduction="none"), logits, tokens[1:][places]
