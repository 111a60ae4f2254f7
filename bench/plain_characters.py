"""nanoGPT's training of characters by hand, in plain PyTorch: `python bench/plain_characters.py RUN.json RESULT.json`.

Text, characters, windows, model, schedule, decay and evaluation are all written here; from drivetrain it takes only the
order of the windows (which of them, begun where), so that both see the same ones, and malloc's setting.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from turns import Turns

from drivetrain.data.order import GlobalOrder
from drivetrain.memory.allocator import keep_freed_blocks

STEPS_A_TURN = 10
IGNORED = -100


def main(run_file: Path, result_file: Path) -> None:
    run = json.loads(run_file.read_text())
    data = run["workload"]["data"]
    keep_freed_blocks()
    text = Path(data["train"]).read_text(encoding="utf-8")
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    ids = np.array([number_of[character] for character in text])
    cut = len(ids) - round(len(ids) * data["evaluation_fraction"])
    torch.manual_seed(run["seed"])
    # one id more than there are characters: drivetrain's tokenizer has one for those it does not know
    config = AutoConfig.for_model(**run["workload"]["model"]["config"], vocab_size=len(characters) + 1)
    model = AutoModelForCausalLM.from_config(config)
    losses = train(model, ids[:cut], run)
    evaluation = evaluate(model, ids[cut:], data["length"])
    result_file.write_text(json.dumps({"losses": losses, "evaluation": evaluation}))


def train(model: nn.Module, ids: np.ndarray[Any, Any], run: dict[str, Any]) -> dict[int, float]:
    steps, length, peak = run["loop"]["steps"], run["workload"]["data"]["length"], run["optimizer"]["lr"]
    decay = run["optimizer"]["weight_decay"]
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": decay},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=tuple(run["optimizer"]["betas"]), fused=True)
    windows, turns, losses = Windows(ids, length, run), Turns(), []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * share(step, steps, run["schedule"])
        loss = cross_entropy(model, windows.batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run["loop"]["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % STEPS_A_TURN == 0:
            turns.take(step + 1)
    return {step: float(loss) for step, loss in enumerate(losses, 1)}


class Windows:
    """Every epoch goes through the text once, closed to a ring, and cuts it at another place than the one before."""

    def __init__(self, ids: np.ndarray[Any, Any], length: int, run: dict[str, Any]) -> None:
        self._ids, self._length, self._seed = ids, length, run["seed"]
        self._order = GlobalOrder(math.ceil((len(ids) - 1) / length), run["batch_size"], run["seed"])

    def batch(self, step: int) -> Tensor:
        """(B, length + 1), int64; where the text ends, IGNORED stands for what would come after."""
        epoch, numbers = self._order.batch(step)
        begin = int(np.random.default_rng([self._seed, epoch]).integers(self._length)) if epoch else 0
        places = numbers[:, None] * self._length + np.arange(self._length + 1)
        windows = np.where(places < len(self._ids), self._ids[(places + begin) % len(self._ids)], IGNORED)
        return torch.from_numpy(windows)


def share(step: int, steps: int, schedule: dict[str, Any]) -> float:
    """Of the peak learning rate: a linear warm-up, then a cosine down to the final ratio."""
    warmup, final = schedule["warmup_steps"], schedule["final_lr_ratio"]
    if step < warmup:
        return float((step + 1) / (warmup + 1))
    done = (step - warmup) / (steps - warmup)
    return float(final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


def cross_entropy(model: nn.Module, batch: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(input_ids=batch[:, :-1].clamp(min=0), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction, ignore_index=IGNORED)


@torch.no_grad()
def evaluate(model: nn.Module, ids: np.ndarray[Any, Any], length: int) -> float:
    """Nats a character over all that can be predicted: windows side by side, the last one shorter."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = torch.from_numpy(ids[start : start + length + 1])[None]
        total += float(cross_entropy(model, window, "sum"))
    return total / (len(ids) - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
