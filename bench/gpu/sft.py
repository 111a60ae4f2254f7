"""The part `bench-sft`: conversations of uneven lengths, of which the replies are targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.language import SIZES, folder_of, models_of
from bench.gpu.setting import Setting
from bench.gpu.speed import in_turns

MIXED = {"precision": "bf16-mixed"}
PADDED = {**MIXED, "packing": False, "group_by_length": False}
LORA = {"adapter": {"method": "lora", "rank": 16}}
NF4 = {"quantised_base": {"format": "nf4"}}


def cases(setting: Setting) -> list[Case]:
    if setting.small:
        tiny = [_full("tiny", batch=4, length=256, first=1, last=3), _adapted("tiny", nf4=False, first=1, last=3)]
        return [*models_of(tiny[:1]), *in_turns(tiny, "sides:trained", rounds=1, seconds=45)]
    full = [
        _full("1B", batch=16, length=1024, first=5, last=25),
        _full("0.5B", batch=16, length=1024, first=5, last=25),
    ]
    adapted = [_adapted("8B", nf4=False, first=3, last=13), _adapted("8B", nf4=True, first=3, last=13)]
    return [
        *models_of([*full, adapted[0]]),
        *in_turns(full, "sides:trained", rounds=2, seconds=100),
        *in_turns(adapted, "sides:trained", rounds=1, seconds=200),
    ]


def _full(size: str, **numbers: int) -> dict[str, Any]:
    sides = {
        "ours, bf16-mixed": {"side": "ours", "run": MIXED},
        "ours, bf16-mixed, compiled": {"side": "ours", "run": {**MIXED, "compile": True}},
        "ours, bf16-master": {"side": "ours", "run": {"precision": "bf16-master"}},
        "ours, recomputed": {"side": "ours", "run": {**MIXED, "recompute": True}},
        "ours, padded": {"side": "ours", "run": PADDED},
        "plain loop, padded": {"side": "plain"},
        "trainer": {"side": "trainer"},
        "trl": {"side": "trl"},
    }
    return {
        "name": f"{size}, all weights",
        "size": size,
        "task": "sft",
        **numbers,
        "after": (f"model {size}",),
        "sides": sides,
    }


def _adapted(size: str, nf4: bool, **numbers: int) -> dict[str, Any]:
    kind = {"rank": 16, "nf4": nf4}
    run = {"precision": "bf16-mixed", **LORA, **(NF4 if nf4 else {})}
    return {
        "name": f"{size}, {'QLoRA' if nf4 else 'LoRA'}",
        "size": size,
        "task": "sft",
        "adapted": kind,
        "batch": 4 if size == "tiny" else 16,
        "length": 256 if size == "tiny" else 1024,
        **numbers,
        "recompute": size == "8B",
        "needs": ("peft", *(("bitsandbytes",) if nf4 else ())),
        "after": (f"model {size}",),
        "sides": {"ours": {"side": "ours", "run": run}, "trl": {"side": "trl"}},
    }


def write_data(given: dict[str, Any], setting: Setting, folder: Path) -> Path:
    from sft_data import conversations, write_rows

    del setting
    return write_rows(folder / "train.jsonl", conversations([], given["batch"] * given["last"], given["seed"]))


def tokenised(given: dict[str, Any], setting: Setting, data: Path) -> list[dict[str, list[int]]]:
    import json

    from hf_sft import tokenised as of_row
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(setting, given["size"]))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return [of_row(tokenizer, row, given["length"]) for row in rows]


def flops_per_token(given: dict[str, Any], rows: list[dict[str, list[int]]]) -> float:
    lengths = [len(row["input_ids"]) for row in rows]
    attended = sum(length**2 for length in lengths) / sum(lengths)
    return SIZES[given["size"]].flops_per_token(attended, trains_all="adapted" not in given)
