"""The part `bench-pretrain`: rows of a fixed number of tokens, all of them targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.language import SIZES, folder_of, models_of
from bench.gpu.setting import Setting
from bench.gpu.speed import in_turns

OURS = {"side": "ours", "run": {"precision": "bf16-mixed"}}
COMPILED = {"side": "ours", "run": {"precision": "bf16-mixed", "compile": True}}  # auto does from 1,000 passes on
LOGITS = {"side": "ours", "run": {"precision": "bf16-mixed", "fused_loss": False}}  # auto takes slabs of these
MASTER = {"side": "ours", "run": {"precision": "bf16-master"}}
PLAIN, TRAINER = {"side": "plain"}, {"side": "trainer"}
LOW_BIT = ("bitsandbytes",)


def cases(setting: Setting) -> list[Case]:
    if setting.small:
        sizes = [_setting("tiny", batch=2, length=64, first=1, last=3)]
        return [*models_of(sizes), *in_turns(sizes, "sides:trained", rounds=1, seconds=45)]
    sizes = [
        _setting("1B", batch=4, length=2048, first=5, last=25),
        _setting("0.5B", batch=8, length=2048, first=5, last=25),
    ]
    eight = {
        "name": "8B, all weights in bf16, 8-bit AdamW",
        "size": "8B",
        "task": "pretrain",
        "batch": 2,
        "length": 2048,
        "first": 3,
        "last": 13,
        "recompute": True,
        "low_bit": True,
        "needs": LOW_BIT,
        "after": ("model 8B",),
        "sides": {"ours": {"side": "ours", "run": {"precision": "bf16"}}, "trainer": {**TRAINER, "in_bf16": True}},
    }
    return [
        *models_of([*sizes, eight]),
        *in_turns(sizes, "sides:trained", rounds=2, seconds=100),
        *in_turns([eight], "sides:trained", rounds=1, seconds=200),
    ]


def _setting(size: str, **numbers: int) -> dict[str, Any]:
    sides = {
        "ours, bf16-mixed": OURS,
        "ours, bf16-mixed, all logits": LOGITS,
        "ours, bf16-mixed, compiled": COMPILED,
        "ours, bf16-master": MASTER,
        "plain loop": PLAIN,
        "trainer": TRAINER,
    }
    return {"name": size, "size": size, "task": "pretrain", **numbers, "after": (f"model {size}",), "sides": sides}


# --- the data of all sides -------------------------------------------------------------------------------------------


def write_data(given: dict[str, Any], setting: Setting, folder: Path) -> Path:
    """Documents of made words, as many as the steps read."""
    from sft_data import conversations, write_rows

    tokens = given["batch"] * given["length"] * (given["last"] + 1)
    documents = [{"text": f"{row['prompt']} {row['response']}"} for row in conversations([], tokens // 60 + 50, 1)]
    del setting
    return write_rows(folder / "text.jsonl", documents)


def tokenised(given: dict[str, Any], setting: Setting, data: Path) -> list[dict[str, list[int]]]:
    """The documents end to end with an end token after each, cut into rows of `length`."""
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(setting, given["size"]))
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    stream = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    length = given["length"]
    wanted = given["batch"] * given["last"]
    rows = [stream[start : start + length] for start in range(0, length * wanted, length)]
    assert len(rows[-1]) == length, "enough text was made"
    return [{"input_ids": row, "attention_mask": [1] * length, "labels": row} for row in rows]


def flops_per_token(given: dict[str, Any]) -> float:
    return SIZES[given["size"]].flops_per_token(given["length"])
