"""The part `stages`: every way that a language model learns, on the device and on the CPU.

A tiny Llama trains a few steps by every stage and through paths that a GPU takes otherwise than a CPU: packed rows,
compiled code, recomputed and offloaded activations, adapters, bases in few bits. In fp32 the losses of both devices
agree; where products are in fewer bits, or answers are drawn, they are finite.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.language import folder_of, make_model
from bench.gpu.setting import Setting

STEPS, BATCH, LENGTH = 4, 4, 128
CLOSE = 1e-3  # of a loss, relative, between devices in fp32: their sums are in another order
LORA = {"adapter": {"method": "lora", "rank": 4}}
PREFER = {"preference": {"loss": "sigmoid", "beta": 0.1}}
REWARDED = {
    "reinforcement": {
        "rewards": [{"use": "length", "options": {"most": 24, "over": 16}}],
        "answers": 4,
        "max_new_tokens": 24,
    }
}


@dataclass(frozen=True)
class Way:
    """settings: of the run. workload: of its block. needs: packages. compares: whether losses are compared, in fp32."""

    stage: str = "sft"
    settings: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    compares: bool = True


def _rounded(needs: tuple[str, ...] = (), **settings: Any) -> Way:
    """Returns a fine-tuning whose products are in fewer bits."""
    return Way(settings=settings, needs=needs, compares=False)


def _quantised(base: str) -> Way:
    return _rounded(("peft", "bitsandbytes"), **LORA, quantised_base={"format": base}, precision="bf16-mixed")


ALONE = {"processes": 1}
WAYS = {
    "pretrain": Way("pretrain"),
    "sft, packed": Way(),
    "sft, packed, bf16-mixed": _rounded(precision="bf16-mixed"),
    "sft, packed, compiled": Way(settings={"compile": True}),
    "sft, packed, compiled, bf16-mixed": _rounded(compile=True, precision="bf16-mixed"),
    "sft, padded": Way(workload={"data": {"packing": False}}),
    "sft, recomputed": Way(settings={"recompute": True}),
    "sft, offloaded activations": Way(settings={"offload_activations": True}),
    "sft, fused_loss off": Way(workload={"model": {"fused_loss": False}}),
    "sft, fp16-mixed": _rounded(precision="fp16-mixed"),
    "sft, fp8-mixed": _rounded(("torchao",), precision="fp8-mixed"),
    "sft, LoRA": Way(settings=LORA, needs=("peft",)),
    "sft, QLoRA nf4": _quantised("nf4"),
    "sft, LoRA on int8": _quantised("int8"),
    "sft, 8-bit optimizer of bitsandbytes": _rounded(
        ("bitsandbytes",), optimizer={"name": "bnb-adamw8bit", "lr": 1e-4}
    ),
    "sft, 8-bit optimizer of torchao": _rounded(("torchao",), optimizer={"name": "adamw8bit", "lr": 1e-4}),
    "sft, fsdp": Way(settings={"engine": "fsdp", **ALONE}),
    "sft, fsdp, bf16-mixed, recomputed": _rounded(engine="fsdp", precision="bf16-mixed", recompute=True, **ALONE),
    "sft, zero2": Way(settings={"engine": "zero2", **ALONE}, needs=("deepspeed",)),
    "sft, zero3, bf16-mixed": _rounded(("deepspeed",), engine="zero3", precision="bf16-mixed", **ALONE),
    "sft, accelerate-ddp": Way(settings={"engine": "accelerate-ddp", **ALONE}, needs=("accelerate",)),
    "sft, mesh of one": Way(settings={"engine": {"name": "mesh", "tp": 1}, **ALONE}),
    "sft, OFT": Way(settings={"adapter": {"method": "oft", "block_size": 16}}, needs=("peft",)),
    "sft, DFT": Way(workload={"sft": {"loss": "dft"}}),
    "distill": Way("distill"),
    "dpo": Way("dpo", workload=PREFER),
    "dpo, reference cached": Way("dpo", workload={"preference": {**PREFER["preference"], "reference": "cached"}}),
    "kto": Way("kto"),
    "reward": Way("reward"),
    "grpo": Way("grpo", workload=REWARDED, compares=False),
    "ppo": Way("ppo", workload=REWARDED, compares=False),
}


def cases(setting: Setting) -> list[Case]:
    names = ("sft, packed", "sft, LoRA", "dpo", "grpo") if setting.small else WAYS
    return [Case(name, "stages:trained", {"name": name}, WAYS[name].needs, seconds=90) for name in names]


def trained(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Losses on the device, and how far those of the CPU are from them."""
    own = _own(setting, folder)
    make_model({"size": "tiny", "length": LENGTH}, own, folder)
    way = WAYS[given["name"]]
    if way.stage == "distill":
        make_model({"size": "tiny", "length": LENGTH, "seed": 1}, _teacher(own), folder)
    losses = _losses(given["name"], own, setting.device, folder)
    if len(losses) < STEPS or not all(map(math.isfinite, losses)):
        return {"losses": losses, "missed": f"the losses are {losses}"}
    if not way.compares or setting.small:
        return {"losses": losses}
    assert "precision" not in way.settings, "compared in fp32"
    expected = _losses(given["name"], own, "cpu", folder)
    difference = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
    found = {"losses": losses, "difference": difference}
    return (
        found if difference <= CLOSE else {**found, "missed": f"the losses differ by {difference:.1e} from the CPU's"}
    )


def _own(setting: Setting, folder: Path) -> Setting:
    """A place of the case's own for the model: cases run at once."""
    return Setting(setting.device, setting.device_name, setting.results, folder)


def _teacher(setting: Setting) -> Setting:
    """Returns the place of a second model, of other weights."""
    return Setting(setting.device, setting.device_name, setting.results, setting.scratch / "teacher")


def run_of(name: str, setting: Setting, device: str, folder: Path) -> dict[str, Any]:
    """The run file of a way."""
    stage, settings, workload = WAYS[name].stage, WAYS[name].settings, WAYS[name].workload
    if stage == "distill":
        workload = {**workload, "distillation": {"teacher": str(folder_of(_teacher(setting), "tiny"))}}
    rows = folder / f"{stage}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _rows(stage)))
    source: dict[str, Any] = {"path": str(rows)} if stage == "pretrain" else {"path": str(rows), **_FORMS[_form(stage)]}
    data = {"train": [source], "evaluation_fraction": 0, "length": LENGTH, "cache": str(folder / "cache")}
    return {
        "workload": {
            "type": "language_model",
            "stage": stage,
            **workload,
            "model": {"path": str(folder_of(setting, "tiny")), **workload.get("model", {})},
            "data": {**data, **workload.get("data", {})},
        },
        "device": device,
        "seed": 1,
        "batch_size": BATCH,
        "loop": {"steps": STEPS, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "tracking": {"log_every": 1},
        **settings,
    }


def _losses(name: str, setting: Setting, device: str, folder: Path) -> list[float]:
    from run_files import write_run

    from drivetrain.launch.job import Job
    from drivetrain.launch.prepare import checked
    from drivetrain.launch.start import start
    from drivetrain.tracking.jsonl import read_events

    output = folder / f"run-{device}"
    run = {**run_of(name, setting, device, folder), "output": str(output)}
    ready = checked(write_run(folder / f"{device}.yaml", run))
    assert start(Job(verb="train", run=ready.run, notices=ready.notices, quiet=True)).code == 0
    return [each["loss"] for each in read_events(output / "events.jsonl") if each["event"] == "step"]


# --- rows ------------------------------------------------------------------------------------------------------------

_FORMS: dict[str, dict[str, Any]] = {
    "rows": {"formatting": "alpaca", "columns": {"prompt": "prompt", "response": "response"}},
    "pairs": {
        "formatting": "alpaca",
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    "labelled": {
        "formatting": "alpaca",
        "columns": {"prompt": "prompt", "response": "response", "kto_tag": "good"},
    },
}


def _form(stage: str) -> str:
    return {"dpo": "pairs", "reward": "pairs", "kto": "labelled"}.get(stage, "rows")


def _rows(stage: str) -> list[dict[str, Any]]:
    from sft_data import conversations

    made = conversations([], 2 * BATCH * STEPS, 1)
    if stage == "pretrain":
        return [{"text": f"{row['prompt']} {row['response']}"} for row in made * 8]
    if _form(stage) == "pairs":
        pairs = zip(made, reversed(made), strict=True)
        return [
            {"prompt": row["prompt"], "chosen": row["response"], "rejected": other["response"]} for row, other in pairs
        ]
    if _form(stage) == "labelled":
        return [{**row, "good": number % 2 == 0} for number, row in enumerate(made)]
    return [dict(row) for row in made]
