"""Conversations, a tokenizer and a model folder for bench/sft.py: real ones cut to size, or made here.

Made conversations are questions and answers of words with log-normal lengths, like those of instruction data: most are
short, a few are as long as the context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain.data.language.vocabularies import bpe_tokenizer

WORDS = 2000
END = "<|endoftext|>"
# what the alpaca template that drivetrain ships makes of one turn, for all sides alike
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '### Instruction:\\n' + m.content + '\\n\\n' }}"
    "{% else %}{{ '### Response:\\n' + m.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
Row = dict[str, str]


def conversations(sources: Sequence[Path], least: int, seed: int = 0) -> list[Row]:
    """Rows of prompt and response in random order: all of the alpaca files, or `least` made ones."""
    rng = np.random.default_rng(seed)
    if not sources:
        return [_made(rng) for _ in range(least)]
    rows = [_row(each) for source in sources for each in json.loads(source.read_text(encoding="utf-8"))]
    rows = [rows[index] for index in rng.permutation(len(rows)) if rows[index]["response"]]
    if least > len(rows):
        raise SystemExit(f"{least} conversations are asked for; {', '.join(map(str, sources))} hold {len(rows)}")
    return rows


def _row(alpaca: dict[str, str]) -> Row:
    prompt = "\n".join(filter(None, [alpaca["instruction"], alpaca.get("input")]))
    return {"prompt": prompt.strip(), "response": alpaca["output"].strip()}


def _made(rng: np.random.Generator) -> Row:
    """Medians of 20 and 100 words."""

    def words(median: int, most: int) -> str:
        count = int(np.clip(rng.lognormal(np.log(median), 0.9), 2, most))
        return " ".join(f"w{int(word)}" for word in rng.zipf(1.3, count) % WORDS)

    return {"prompt": words(20, 100), "response": words(100, 400)}


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def model_folder(
    path: Path, rows: Sequence[Row], tokens: int, vocabulary: int, width: int, blocks: int, length: int
) -> Path:
    """A Llama with random weights and a tokenizer of at most `tokens` tokens made from the rows, as users have one.

    vocabulary: rows of the embedding, at least `tokens`; those without a token cost what others cost.
    """
    tokenizer = bpe_tokenizer([text for row in rows for text in row.values()], tokens, [END])
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = length
    config: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": round(width * 8 / 3 / 8) * 8,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
