"""The part `bench-texts`: BERT-base that classifies texts of uneven lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.classifiers import SIDES
from bench.gpu.setting import Setting
from bench.gpu.speed import in_turns

WIDTH, BLOCKS = 768, 12
MAX_LENGTH = 256


def cases(setting: Setting) -> list[Case]:
    sizes: dict[str, Any] = {"batch": 8, "number": 64, "first": 1, "last": 3}
    if not setting.small:
        sizes = {"batch": 128, "number": 12_800, "first": 10, "last": 50}
    name = "tiny BERT" if setting.small else "BERT-base"
    sides = {**SIDES, "ours, unpadded": {"side": "ours", "unpadded": True}}
    task = {"name": name, "task": "texts", "needs": ("pandas",), **sizes, "sides": sides}
    return in_turns(
        [task], "classifiers:trained", rounds=1 if setting.small else 2, seconds=30 if setting.small else 110
    )


def make_data(given: dict[str, Any], setting: Setting) -> Path:
    """Two CSV files and a vocabulary; those that are there are kept."""
    import samples

    folder = setting.scratch / "data" / f"texts-{given['number']}"
    if not (folder / "made").exists():
        samples.texts(None, None, folder, given["number"], 32)
        (folder / "made").touch()
    return folder


def workload(given: dict[str, Any], setting: Setting, data: Path, cache: Path) -> dict[str, Any]:
    import run_files
    from samples import Texts

    files = Texts(data / "train.csv", data / "evaluation.csv", data / "vocab.txt")
    width, blocks = (64, 2) if setting.small else (WIDTH, BLOCKS)
    found = run_files.text_workload(files, blocks, width, MAX_LENGTH, cache)
    found["data"] |= {"unpadded": True} if given.get("unpadded") else {}
    return found


def flops_per_sample(given: dict[str, Any], setting: Setting, data: Path) -> float | None:
    """Forward and backward of a text of average length, padding left out: 6 operations a weight of the blocks and
    token, and 12 of attention for each block, its width and pair of tokens."""
    import pandas as pd

    del given
    if setting.small:
        return None
    lengths = pd.read_csv(data / "train.csv")["text"].str.split().str.len().add(2).clip(upper=MAX_LENGTH)
    weights = 12 * BLOCKS * WIDTH**2
    return float(6 * weights * lengths.mean() + 12 * BLOCKS * WIDTH * (lengths**2).mean())
