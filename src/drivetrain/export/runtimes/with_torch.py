"""Scores, greedy answers and digests of weights from a model that is a PyTorch module of Transformers'."""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked


def answered(model: Any, asked: Asked, software: tuple[str, ...], digests: bool) -> Answered:
    """Returns what the model and the files beside it answer. digests: whether the weights are plain tensors."""
    tokenizer = tokenizer_of(asked)
    with torch.no_grad():
        scores = [_scores(model, inputs, asked.keep) for inputs in asked.inputs]
        start = time.perf_counter()
        for inputs in asked.inputs:
            _scores(model, inputs, asked.keep)
        taken = time.perf_counter() - start
        answers = [_continued(model, prompt, asked.new_tokens) for prompt in asked.prompts]
    return Answered(
        scores=scores,
        answers=answers,
        dialogues=[rendered(tokenizer, dialogue) for dialogue in asked.dialogues],
        texts=[tokenised(tokenizer, text) for text in asked.texts],
        tensors=digests_of(model) if digests else {},
        seconds=taken,
        software={name: version(name) for name in software},
    )


def _scores(model: Any, inputs: dict[str, Tensor], keep: int | None) -> Tensor:
    logits: Tensor = model(**inputs).logits.float()
    return logits if keep is None else logits[0, -keep:]


def _continued(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns new ids by the model's own generate() and the generation settings in its folder."""
    ids = torch.tensor([prompt])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
    )
    return found[0, len(prompt) :].tolist()


def tokenizer_of(asked: Asked) -> Any:
    """Returns the tokenizer in the export's folder; None where nothing is asked of it."""
    if not asked.dialogues and not asked.texts:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(asked.folder), trust_remote_code=asked.trusts)


def rendered(tokenizer: Any, dialogue: dict[str, Any]) -> list[int]:
    """Returns the ids of a conversation by a tokenizer's own chat template."""
    text = tokenizer.apply_chat_template(
        dialogue["messages"], tools=dialogue["tools"] or None, add_generation_prompt=True, tokenize=False
    )
    return tokenised(tokenizer, text)


def tokenised(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def digests_of(model: Any) -> dict[str, list[str]]:
    """Returns the dtype and the SHA-256 of the bytes of each weight and each buffer that is saved."""
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def digest(tensor: Tensor) -> list[str]:
    """Returns a tensor's dtype and the SHA-256 of its numbers' bytes, row by row."""
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), hashlib.sha256(numbers.data).hexdigest()]
