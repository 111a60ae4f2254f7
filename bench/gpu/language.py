"""Models of Llama's shape with random weights, a tokenizer and data for them, made here: nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.setting import Setting

VOCABULARY = 128_256  # Llama 3's; the tokenizer that is made has fewer tokens, and the other rows cost what rows cost
TOKENS = 4_000


@dataclass(frozen=True)
class Size:
    """saved: dtype of the weights on the disk, which the sides load."""

    width: int
    inner: int
    blocks: int
    heads: int
    kv_heads: int
    tied: bool
    saved: str = "float32"
    vocabulary: int = VOCABULARY

    def parameters(self) -> int:
        """Those in matrix products: all but the embedding, where it is no head as well."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        return self.blocks * (attention + 3 * self.width * self.inner) + self.width * self.vocabulary

    def flops_per_token(self, attended: float, trains_all: bool = True) -> float:
        """Forward and backward, without what is recomputed (Chowdhery et al. 2022, "PaLM", appendix B).

        attended: tokens of the sequence that a token lies in, on average; what the causal mask hides is counted, as is
        usual. trains_all: False where the weights are frozen, which need no gradient of their own.
        """
        return (6 if trains_all else 4) * self.parameters() + 12 * self.blocks * self.width * attended


SIZES = {
    "tiny": Size(64, 176, 2, 4, 2, tied=True, vocabulary=5_000),
    "0.5B": Size(896, 4864, 24, 14, 2, tied=True),  # Qwen2.5-0.5B's
    "1B": Size(2048, 8192, 16, 32, 8, tied=True),  # Llama-3.2-1B's
    "8B": Size(4096, 14336, 32, 32, 8, tied=False, saved="bfloat16"),  # Llama-3.1-8B's
}


def folder_of(setting: Setting, size: str) -> Path:
    return setting.scratch / "models" / size


def tokenizer_of(length: int) -> Any:
    from sft_data import END, TEMPLATE, conversations

    from drivetrain.data.language.vocabularies import bpe_tokenizer

    made = bpe_tokenizer([text for row in conversations([], 400) for text in row.values()], TOKENS, [END])
    made.chat_template, made.model_max_length = TEMPLATE, length
    return made


def config_of(name: str, length: int, tokenizer: Any) -> Any:
    """Returns the Transformers config of a size, by its name."""
    from transformers import AutoConfig

    size = SIZES[name]
    return AutoConfig.for_model(
        "llama",
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=size.tied,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(4096, length),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def models_of(settings: list[dict[str, Any]]) -> Iterator[Case]:
    """Yields the cases that make the models of these settings."""
    for each in settings:
        given = {"size": each["size"], "length": each["length"]}
        yield Case(f"model {each['size']}", "language:make_model", given, seconds=20 if each["size"] == "tiny" else 150)


def make_model(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """A case: the model's folder, unless it is there from an earlier part."""
    import torch
    from transformers import AutoModelForCausalLM

    size, target = SIZES[given["size"]], folder_of(setting, given["size"])
    if not (target / "made.json").exists():
        tokenizer = tokenizer_of(given["length"])
        config = config_of(given["size"], given["length"], tokenizer)
        torch.manual_seed(given.get("seed", 0))
        with torch.device(setting.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, size.saved))
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        (target / "made.json").write_text(json.dumps({"parameters": numbers}))
    del folder
    return dict(json.loads((target / "made.json").read_text()))
