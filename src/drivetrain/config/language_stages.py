"""The stages of a language model's training as data: what is learned, from which samples, by which workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """A stage of a language model's training.

    A new one is an entry of STAGES and, unless an existing workload trains it, a file in `drivetrain.workloads`.
    """

    name: str
    learns: str  # one line for the documentation of `stage`
    has_conversations: bool  # whether samples are conversations, whose replies are trained, rather than texts
    implementation: str = "drivetrain.workloads.language_model:LanguageModelWorkload"
    llama_factory: str | None = None  # its name in LLaMA-Factory's files


StageName = Literal["pretrain", "sft"]
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("pretrain", "the next token of texts", has_conversations=False, llama_factory="pt"),
        Stage(
            "sft",
            "the replies of conversations (supervised fine-tuning)",
            has_conversations=True,
            llama_factory="sft",
        ),
    )
}
