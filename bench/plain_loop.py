"""The training loop that one writes by hand: `python bench/plain_loop.py RUN.yaml RESULT.json`.

What it shares with drivetrain is the work: the run file's data in the run file's order, malloc's setting, and on a CPU
without 16-bit arithmetic its emulation. The loop itself is plain PyTorch, without meters, files, signals or checks. It
keeps its losses, so that the bench can show that both sides did the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from ours import checked
from torch.utils.data import DataLoader, Dataset
from turns import Turns

from drivetrain.config.run import RunConfig
from drivetrain.config.workload import ImageClassification, TextClassification, UserModule
from drivetrain.data.order import GlobalOrder
from drivetrain.memory.allocator import keep_freed_blocks
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.runtime.hardware import detect
from drivetrain.workloads.base import Workload
from drivetrain.workloads.build import build_workload

AUTO_CLASSES = {
    "image_classification": transformers.AutoModelForImageClassification,
    "text_classification": transformers.AutoModelForSequenceClassification,
}


def main(run_file: Path, result_file: Path) -> None:
    config = checked(run_file)
    machine = detect(config.device)
    if config.allocator != "system" and machine.device == "cpu":
        keep_freed_blocks()
    with arithmetic(config.precision_spec, machine):
        losses = train(config, torch.device(machine.device), Turns())
    result_file.write_text(json.dumps({"losses": losses}))


def train(config: RunConfig, device: torch.device, turns: Turns) -> dict[int, float]:
    """The losses of all steps. A turn is as long as drivetrain's: from one point of the curve to the next."""
    assert config.loop.max_grad_norm is not None, "the bench's run files clip"
    workload = build_workload(config.workload, config.seed)
    torch.manual_seed(config.seed)
    model = build_model(config, workload).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.0, fused=True)
    precision = config.precision_spec
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scaled)
    losses = []

    for step, batch in enumerate(batches(config, workload), 1):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        with torch.autocast(device.type, dtype=getattr(torch, precision.compute), enabled=precision.autocast):
            logits = model(**batch).logits
            loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.loop.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % config.tracking.log_every == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()  # the turn is over when its work is done
            turns.take(step)

    return {step: float(loss) for step, loss in enumerate(losses, 1)}


def build_model(config: RunConfig, workload: Workload) -> torch.nn.Module:
    assert not isinstance(config.workload, UserModule), "AUTO_CLASSES has no class for it"
    given = dict(config.workload.model.config or {})
    if isinstance(config.workload, TextClassification):
        words = Path(config.workload.model.tokenizer or "").read_text(encoding="utf-8").rstrip("\n").split("\n")
        given |= {"vocab_size": len(words), "pad_token_id": words.index("[PAD]")}
    built = transformers.AutoConfig.for_model(**given, num_labels=workload.facts["classes"])
    model = AUTO_CLASSES[config.workload.type].from_config(built)
    if isinstance(config.workload, ImageClassification) and config.workload.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model


class Keyed(Dataset[Any]):
    def __init__(self, workload: Workload) -> None:
        self.samples = workload.train

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        return self.samples.load(index, epoch)


def batches(config: RunConfig, workload: Workload) -> Iterator[dict[str, torch.Tensor]]:
    order = GlobalOrder(len(workload.train), config.global_batch, config.seed)
    keys = []
    assert config.loop.steps is not None, "the bench's run files count steps"
    for step in range(config.loop.steps):
        epoch, indices = order.batch(step)
        keys.append([(epoch, int(index)) for index in indices])
    return iter(
        DataLoader(
            Keyed(workload),
            batch_sampler=keys,
            collate_fn=workload.collate,
            num_workers=0 if config.loader.workers == "auto" else config.loader.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),  # or it would draw from the generator that dropout uses
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
