"""Saves, resumes and evaluates a language model of real size as a script with Transformers does.

    python bench/plain_loading.py save|resume|evaluate MODEL TEXT FOLDER

`save` trains a step and writes weights and optimizer; `resume` reads them and trains two more; `evaluate` reads the
weights and prints the mean loss over the same samples as drivetrain.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from plain_real_size import GLOBAL_BATCH, LR, batches, loaded, loss_of
from real_size_tracker import note


def main(verb: str, model: str, text: str, where: str) -> None:
    folder = Path(where)
    {"save": save, "resume": resume, "evaluate": evaluate}[verb](model, text, folder)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    note(step, float(loss.detach()))


def save(model: str, text: str, folder: Path) -> None:
    trained = loaded(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, fused=True)
    train(trained, optimizer, next(batches(text, 0, 1)), 1)
    trained.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def resume(_: str, text: str, folder: Path) -> None:
    trained = loaded(str(folder))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, fused=True)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", mmap=True))
    for step, ids in enumerate(batches(text, 0, 1), 1):
        if 1 < step <= 3:
            train(trained, optimizer, ids, step)


@torch.no_grad()
def evaluate(_: str, text: str, folder: Path) -> None:
    model = loaded(str(folder)).eval()
    losses = []
    for ids in batches(text, 0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(model, ids))
    note(len(losses) * GLOBAL_BATCH, float(torch.stack(losses).mean()))


if __name__ == "__main__":
    main(*sys.argv[1:])
