"""The block of a language model: its weights, its tokenizer, and options of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from drivetrain.config.base import PathOrId, decides_memory, doc
from drivetrain.config.workload_block import ModelBlock
from drivetrain.errors import Problem


class LanguageModelModel(ModelBlock):
    path: PathOrId | None = doc("Transformers causal language model to start from: a local folder or a hub id", None)
    tokenizer: PathOrId | None = doc(
        "A folder or hub id; bytes, characters or bpe are made from the training data. "
        "Left out, model.path's, or bytes from scratch",
        None,
    )
    trust_tokenizer_code: bool = doc("Run Python code beside the tokenizer (docs/reference/security.md)", False)
    vocabulary_size: int | None = doc("Tokens of a bpe tokenizer", None, gt=256)
    resize_vocabulary: bool = doc("Add rows to the embedding for tokens that the tokenizer has beyond them", False)
    attention: Literal["auto", "eager", "sdpa", "flash", "flex"] = doc(
        "Attention kernel; auto takes the quickest that is installed", "auto"
    )
    rope_scaling: dict[str, Any] | None = doc(
        "Longer contexts: {type: linear, dynamic, yarn or llama3, factor: ...}", None
    )
    train_last_blocks: int | None = doc("Train the last blocks only, so many, and freeze the rest", None, gt=0)
    add_blocks: int | None = doc(
        "Add so many blocks, copies without effect at first, and train them alone (LLaMA Pro)",
        None,
        gt=0,
        json_schema_extra=decides_memory,
    )
    neftune_alpha: float | None = doc("Noise on the embeddings while training (NEFTune); 5 is usual", None, gt=0)
    fused_loss: bool | Literal["auto"] = doc(
        "Compute head and loss in pieces, without ever holding all logits; auto does so where they are many", "auto"
    )


def expansion_problems(model: LanguageModelModel, stage: str, is_causal: bool) -> Iterator[Problem]:
    """Yields why no blocks can be added to a model. is_causal: whether its head gives the next token's logits."""
    if model.add_blocks is None:
        return
    field = "workload.model.add_blocks"
    if model.train_last_blocks is not None:
        yield Problem(field, "the added blocks alone are trained", "leave it or train_last_blocks out")
    if not is_causal:
        why = f"stage {stage} trains its score too, which is new"
        yield Problem(field, why, "add blocks in stage sft, and start from what it leaves")
