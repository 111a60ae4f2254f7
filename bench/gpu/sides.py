"""One side of the language benches, in a process of its own: drivetrain, a plain loop, the Trainer or TRL.

Every side loads the same folder, reads the same file and makes as many steps of the same batch size. The time is that
of the steps between `first` and `last`; tokens are those of the data, without padding.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.language import folder_of
from bench.gpu.setting import Setting
from bench.gpu.speed import Clock, measured_memory, our_memory, our_steps, peak_flops, train_ours

LR = 1e-5
Rows = list[dict[str, list[int]]]


def trained(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Tokens a second, share of the device's peak, peak memory, losses."""
    task: Any = import_module(f"bench.gpu.{given['task']}")
    data = task.write_data(given, setting, folder)
    rows = task.tokenised(given, setting, data)
    side = {"ours": _ours, "plain": _plain, "trainer": _trainer, "trl": _trl}[given["side"]]
    found = side(given, setting, folder, data, rows)
    tokens = sum(len(row["input_ids"]) for row in rows) / len(rows) * given["batch"] * (given["last"] - given["first"])
    per_token = task.flops_per_token(given, rows) if given["task"] == "sft" else task.flops_per_token(given)
    rate, peak = tokens / found.pop("seconds"), peak_flops(setting.device_name)
    return {**found, "rate": rate, "unit": "tokens", "mfu": None if peak is None else rate * per_token / peak}


# --- drivetrain ------------------------------------------------------------------------------------------------------


def _ours(given: dict[str, Any], setting: Setting, folder: Path, data: Path, rows: Rows) -> dict[str, Any]:
    del rows
    memory = measured_memory(setting.device)
    output = train_ours(our_run(given, setting, folder, data), folder)
    seconds, _, losses = our_steps(output, given["first"], given["last"])
    return {"seconds": seconds, "loss": losses[-1], **(memory() if setting.small else our_memory(output))}


def our_run(given: dict[str, Any], setting: Setting, folder: Path, data: Path) -> dict[str, Any]:
    """The run file; what is not named here is drivetrain's default."""
    settings = dict(given["run"])
    reading = {key: settings.pop(key) for key in ("packing", "group_by_length") if key in settings}
    modelled = {key: settings.pop(key) for key in ("fused_loss",) if key in settings}
    source: dict[str, Any] = {"path": str(data)}
    if given["task"] == "sft":
        source |= {"formatting": "alpaca", "columns": {"prompt": "prompt", "response": "response"}}
    run = {
        "workload": {
            "type": "language_model",
            "stage": given["task"],
            "model": {"path": str(folder_of(setting, given["size"])), **modelled},
            "data": {
                "train": [source],
                "evaluation_fraction": 0,
                "length": given["length"],
                "cache": str(folder / "cache"),
                **reading,
            },
        },
        "device": setting.device,
        "seed": given["seed"],
        "batch_size": given["batch"],
        "loop": {"steps": given["last"], "max_grad_norm": 1.0},
        "optimizer": {"name": "bnb-adamw8bit" if given.get("low_bit") else "adamw", "lr": LR},
        "tracking": {"log_every": 1 if setting.small else given["first"]},
        **({"recompute": True} if given.get("recompute") else {}),
        **settings,
    }
    if run["precision"] == "bf16-master":
        run |= _engine_with_master()
    return run


def _engine_with_master() -> dict[str, Any]:
    """single where it keeps a second copy of the weights, else fsdp alone in its group."""
    from drivetrain.config.engines import ENGINES

    if "bf16-master" not in ENGINES["single"].lacks:
        return {}
    return {"engine": "fsdp", "processes": 1}


# --- the others ------------------------------------------------------------------------------------------------------


def _plain(given: dict[str, Any], setting: Setting, folder: Path, data: Path, rows: Rows) -> dict[str, Any]:
    """bf16 under autocast over fp32 weights, fused AdamW, batches padded to their longest row."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

    del folder, data
    path, device = folder_of(setting, given["size"]), setting.device
    collate = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(path))
    memory = measured_memory(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    clock = Clock(device, given["first"], given["last"])
    loader = DataLoader(rows, given["batch"], collate_fn=collate, pin_memory=device == "cuda")  # type: ignore[arg-type]
    for step, batch in enumerate(loader, 1):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**{key: value.to(device, non_blocking=True) for key, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_done(step)
    return {"seconds": clock.seconds, "loss": loss.item(), **memory()}


def common_arguments(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "theirs"),
        "per_device_train_batch_size": given["batch"],
        "max_steps": given["last"],
        "learning_rate": LR,
        "seed": given["seed"],
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": setting.small,
        "logging_steps": given["first"],
    }


def timed(trainer: Any, clock: Clock) -> float:
    """Trains; returns the mean loss."""
    from transformers import TrainerCallback

    class Timing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            clock.step_done(state.global_step)

    trainer.add_callback(Timing())
    return float(trainer.train().metrics["train_loss"])


def _trainer(given: dict[str, Any], setting: Setting, folder: Path, data: Path, rows: Rows) -> dict[str, Any]:
    """With its defaults, but bf16, which its users on GPUs set."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    del data
    path = folder_of(setting, given["size"])
    arguments = common_arguments(given, setting, folder) | {"bf16": True}
    if given.get("recompute"):
        arguments |= {"gradient_checkpointing": True}
    if given.get("low_bit"):
        arguments |= {"optim": "adamw_bnb_8bit"}
    memory = measured_memory(setting.device)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16 if given.get("in_bf16") else torch.float32
        ),
        args=TrainingArguments(**arguments),
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(path)),
    )
    clock = Clock(setting.device, given["first"], given["last"])
    loss = timed(trainer, clock)
    return {"seconds": clock.seconds, "mean_loss": loss, **memory()}


def _trl(given: dict[str, Any], setting: Setting, folder: Path, data: Path, rows: Rows) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults: bf16 and recomputed activations."""
    import torch
    from hf_sft import of_trl

    del rows
    memory = measured_memory(setting.device)
    dtype = {} if given.get("adapted") else {"model_init_kwargs": {"dtype": torch.float32}}
    run = {
        "arguments": common_arguments(given, setting, folder) | dtype,
        "model": str(folder_of(setting, given["size"])),
        "length": given["length"],
        "adapter": given.get("adapted"),
    }
    trainer = of_trl(run, [json.loads(line) for line in data.read_text().splitlines()])
    clock = Clock(setting.device, given["first"], given["last"])
    loss = timed(trainer, clock)
    return {"seconds": clock.seconds, "mean_loss": loss, **memory()}
