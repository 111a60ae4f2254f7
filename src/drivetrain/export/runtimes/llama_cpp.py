"""Loads model.gguf by llama.cpp, through the wheel xllamacpp: its server, in this process and on loopback.

The server shows log-probabilities of next tokens, after a softmax, one position at a time; what it computed for the
beginning of a sequence it keeps for the next position.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked, run


class Model:
    """A GGUF file in llama.cpp's server."""

    def __init__(self, file: Path, context: int) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_parallel, settings.warmup, settings.ui = context, 1, False, False
        # half precision is the default of its cache, and would hide differences of the weights
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._key = secrets.token_hex(16)
        settings.api_keys = [self._key]
        self._server = xllamacpp.Server(settings)
        self._letter = self.tokens("a")[-1]

    def log_probabilities(self, ids: list[int], count: int) -> dict[int, float]:
        """Returns the `count` likeliest next tokens with their log-probabilities."""
        # a sampled end token, or the first byte of a character, comes without probabilities: those of the model, before
        # sampling, are asked for while a plain letter is always the one sampled
        settings = {"temperature": 0, "logit_bias": [[self._letter, 1e6]], "cache_prompt": True}
        found = self._server.handle_completions({"prompt": ids, "max_tokens": 1, "n_probs": count, **settings})
        if "choices" not in found or not found["choices"][0].get("logprobs"):
            raise SystemExit(f"llama.cpp answered {json.dumps(found)[:500]}")
        [position] = found["choices"][0]["logprobs"]["content"]
        return {each["id"]: each["logprob"] for each in position["top_logprobs"]}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self._posted("/tokenize", {"content": text, "add_special": False})["tokens"]
        return found

    def rendered(self, dialogue: dict[str, Any]) -> list[int]:
        body = {"messages": dialogue["messages"], **({"tools": dialogue["tools"]} if dialogue["tools"] else {})}
        return self.tokens(self._posted("/apply-template", body)["prompt"])

    def _posted(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        url = self._server.listening_address + path
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.loads(answer.read())


def answer(asked: Asked) -> Answered:
    longest = max([batch["input_ids"].shape[1] for batch in asked.inputs] + [len(ids) for ids in asked.prompts])
    model = Model(Path(asked.folder) / "model.gguf", longest + asked.new_tokens + 8)
    start = time.perf_counter()
    scores = [_scores(model, batch["input_ids"][0].tolist(), asked) for batch in asked.inputs]
    return Answered(
        scores=scores,
        seconds=time.perf_counter() - start,
        answers=[_continued(model, prompt, asked) for prompt in asked.prompts],
        dialogues=[model.rendered(dialogue) for dialogue in asked.dialogues],
        texts=[model.tokens(text) for text in asked.texts],
        software={"llama.cpp (xllamacpp)": version("xllamacpp")},
    )


def _scores(model: Model, ids: list[int], asked: Asked) -> Tensor:
    """Returns (kept positions, vocabulary)."""
    assert asked.keep is not None
    assert asked.vocabulary is not None
    found = torch.full((min(asked.keep, len(ids)), asked.vocabulary), float("-inf"))
    for row, end in enumerate(range(len(ids) - len(found) + 1, len(ids) + 1)):
        for token, value in model.log_probabilities(ids[:end], asked.vocabulary).items():
            found[row, token] = value
    return found


def _continued(model: Model, prompt: list[int], asked: Asked) -> list[int]:
    new: list[int] = []
    while len(new) < asked.new_tokens and not (new and new[-1] in asked.ends):
        [token] = model.log_probabilities([*prompt, *new], 1)
        new.append(token)
    return new


if __name__ == "__main__":
    run(answer)
