"""Results as Markdown, with the machine they hold for."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from drivetrain.runtime.hardware import detect


def machine_line() -> str:
    """Returns what the figures hold for."""
    machine = detect()
    native = ", ".join(sorted(machine.native_dtypes))
    threads = os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()
    return (
        f"Machine: {machine.device_name}, {machine.cpu_cores} CPU cores, {threads} torch threads, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, native {native}; {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, Transformers {transformers.__version__}."
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, figures to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_part(page: str, name: str, part: str) -> str:
    """Returns the page with the part of this name replaced, or added at its end."""
    parts = re.split(r"(?m)^(?=## )", page)
    heads = [each.split("\n")[0] for each in parts]
    if f"## {name}" in heads:
        parts[heads.index(f"## {name}")] = part
    else:
        parts.append(part)
    return "\n".join(each.strip() + "\n" for each in parts)


def write(path: Path, text: str) -> None:
    """To the file and the screen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"\n{text}\nwritten to {path}")
