"""The table of the parity cases that ran, for the docs: written where PARITY_TABLE says.

Rows of a table that is there already stay where this run has none of theirs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

ROWS: list[Row] = []
HEAD = ["| engine | precision | ranks | cases | loss | gradient norm |", "| --- | --- | ---: | ---: | ---: | ---: |"]


@dataclass(frozen=True)
class Row:
    engine: str
    precision: str
    world: int
    loss: float
    norm: float


def add_row(row: Row) -> None:
    ROWS.append(row)
    if "PARITY_TABLE" in os.environ:
        path = Path(os.environ["PARITY_TABLE"])
        path.write_text(page(earlier(path.read_text()) if path.exists() else {}))


def earlier(page: str) -> dict[tuple[str, ...], str]:
    """The lines of a page's table, by engine, precision and ranks."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and line not in HEAD]
    return {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in lines}


def page(found: dict[tuple[str, ...], str]) -> str:
    """The worst of each engine, options, precision and world over accumulation, optimizer and model."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in ROWS:
        groups[row.engine, row.precision, row.world].append(row)
    for (engine, precision, world), rows in groups.items():
        loss, norm = max(row.loss for row in rows), max(row.norm for row in rows)
        line = f"| {engine} | {precision} | {world} | {len(rows)} | {loss:.1e} | {norm:.1e} |"
        found[engine, precision, str(world)] = line
    lines = [
        "# Parity: every engine against plain PyTorch",
        "",
        "The largest relative difference of loss and gradient norm over twelve steps with clipping active, from plain "
        "PyTorch in one process on the same global batches; the worst of all cases of a row (accumulation 1 and 3, SGD "
        "with momentum and AdamW, a perceptron with ignored targets and a Transformer with uneven lengths, the last "
        "batch of an epoch ragged; mesh: a Llama on text, BERT on texts of uneven lengths, ViT, a module with a "
        "plan of its own). Allowed: 1e-5 in fp32 (1e-4 from four pipeline stages), 1e-2 in bf16-mixed and bf16-master "
        "(emulated on this CPU). "
        f"`make parity` repeats it. torch {torch.__version__}, gloo, CPU ranks.",
        "",
        *HEAD,
        *found.values(),
    ]
    return "\n".join([*lines, ""])
