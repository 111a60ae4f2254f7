"""Answers of a language model: which prompts are answered, and how the tokens are chosen."""

from __future__ import annotations

from drivetrain.config.base import Frozen, doc


class Generation(Frozen):
    """Prompts that the model answers at each evaluation."""

    samples: int = doc("Prompts from the evaluation data: its first conversations or texts", 4, ge=0)
    prompts: list[str] = doc("Prompts of your own; for sft, user messages", [])
    prompt_tokens: int = doc("pretrain: the first tokens of a text that are its prompt", 32, gt=0)
    max_new_tokens: int = doc("Tokens of an answer, at most", 64, gt=0)
    temperature: float = doc("0 takes the likeliest token; above, tokens are drawn, by the run's seed", 0.0, ge=0)
