"""The question to a runtime's process and its answer, as files of a folder: JSON, and tensors in safetensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ASKED, INPUTS, ANSWERED, SCORES = "asked.json", "inputs.safetensors", "answered.json", "scores.safetensors"


@dataclass(frozen=True)
class Asked:
    """The question: the passes to run and the texts to read with an export.

    inputs: keyword arguments of a forward pass, one mapping a batch. keep: how many of a sequence's last positions have
    their scores returned; None: the scores are of no sequence. prompts: ids to continue greedily by `new_tokens`
    tokens, or until one of the model's own end tokens. dialogues: {"messages", "tools"} to render by the export's own
    chat template. texts: to tokenise by its own tokenizer. auto_class: the Transformers class. base: PEFT's base model;
    base_config: the folder of its config.
    """

    folder: str
    inputs: list[dict[str, Tensor]]
    keep: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    new_tokens: int = 0
    dialogues: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    auto_class: str = ""
    base: str | None = None
    base_config: str | None = None
    adapters: list[str] = field(default_factory=list)  # folders of adapters within the export
    vocabulary: int | None = None  # number of tokens that each position is scored for
    trusts: bool = False  # whether Python that lies beside the model may run

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        others = asdict_without(self, "inputs")
        text = json.dumps({**others, "batches": len(self.inputs)})
        (folder / ASKED).write_text(text, encoding="utf-8")
        named = {f"{n}.{name}": t.contiguous() for n, batch in enumerate(self.inputs) for name, t in batch.items()}
        save_file(named, folder / INPUTS)

    @staticmethod
    def read(folder: Path) -> Asked:
        from safetensors.torch import load_file

        others = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        inputs: list[dict[str, Tensor]] = [{} for _ in range(others.pop("batches"))]
        for key, tensor in load_file(folder / INPUTS).items():
            number, _, name = key.partition(".")
            inputs[int(number)][name] = tensor
        return Asked(inputs=inputs, **others)


@dataclass(frozen=True)
class Answered:
    """The answer of a runtime.

    scores: of each batch (B, classes), or (kept positions, vocabulary) of a sequence. answers: new ids of each prompt.
    dialogues, texts: ids. tensors: name → [dtype, SHA-256 of its bytes] of weights that are plain tensors. seconds: of
    one pass over all inputs, after another one. software: name → version.
    """

    scores: list[Tensor]
    answers: list[list[int]] = field(default_factory=list)
    dialogues: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    tensors: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    software: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        text = json.dumps(asdict_without(self, "scores"))
        save_file({str(number): each.contiguous() for number, each in enumerate(self.scores)}, folder / SCORES)
        (folder / ANSWERED).write_text(text, encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Answered:
        from safetensors.torch import load_file

        others = json.loads((folder / ANSWERED).read_text(encoding="utf-8"))
        scores = load_file(folder / SCORES)
        return Answered(scores=[scores[str(number)] for number in range(len(scores))], **others)


def asdict_without(value: Any, name: str) -> dict[str, Any]:
    """Returns a dataclass as a dict, without the field that holds tensors."""
    shallow = {key: each for key, each in vars(value).items() if key != name}
    found: dict[str, Any] = json.loads(json.dumps(shallow))
    return found


def run(answer: Callable[[Asked], Answered]) -> None:
    """Answers the question in the folder that the command line names."""
    folder = Path(sys.argv[1])
    answer(Asked.read(folder)).write(folder)
