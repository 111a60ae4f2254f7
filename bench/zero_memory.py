"""Measures what a rank holds at each stage of ZeRO, beside the closed forms.

    python bench/zero_memory.py

Rajbhandari et al. 2020, section 3, for fp32 and Adam: weights, gradients, and three more copies (DeepSpeed's own of the
weights, and the two moments). A model large enough, and a batch small enough, that activations do not hide it. Peak
resident memory of a rank, less that of the same run with a model of almost no weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from interleaved import child_environment
from tables import machine_line, markdown_table, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
WIDTH, LAYERS = 1024, 32  # 33.6 million parameters
LAYER = WIDTH * WIDTH + WIDTH  # elements
# what is whole for a moment: a layer or two, as in a large model under DeepSpeed's own bounds
BOUNDS = {
    "zero_optimization": {
        "reduce_bucket_size": LAYER,
        "sub_group_size": 2 * LAYER,
        "stage3_max_live_parameters": 2 * LAYER,
        "stage3_max_reuse_distance": 2 * LAYER,
        "stage3_prefetch_bucket_size": LAYER,
    }
}
WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
features, labels = torch.randn(64, {width}, generator=generator), torch.arange(64) % {width}
train_data = TensorDataset(features, labels)
loss = nn.CrossEntropyLoss()


def build_model():
    return nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers})))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="what a rank holds at each stage of ZeRO")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", type=Path, default=RESULTS / "zero_memory.md")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for stage in range(4):
            measured = peak(stage, ranks, WIDTH) - peak(stage, ranks, 8)
            wanted = expected(stage, ranks)
            row = [f"zero{stage}", str(ranks), mib(states(stage, ranks)), mib(wanted), mib(measured)]
            rows.append([*row, f"{measured / wanted:.2f}"])
            print(*rows[-1], flush=True)
    write(options.output, page(rows))


def parameters() -> int:
    return LAYERS * LAYER


def states(stage: int, ranks: int) -> float:
    """The paper's closed form, in bytes a rank: 4 a weight, 4 a gradient, 12 for the optimizer (8 at stage 0, which
    keeps no second copy), what the stage shards divided by the ranks."""
    gradients, weights = (1 if stage < 2 else 1 / ranks), (1 if stage < 3 else 1 / ranks)
    return 4 * parameters() * (weights + gradients + (2 if stage == 0 else 3 / ranks))


def expected(stage: int, ranks: int) -> float:
    """The closed form and what is there for a moment, which it leaves out.

    At stage 0 all gradients in the buffer they are summed in, later a layer of them (the bucket), at stage 3 two layers
    of weights as well. Stage 2 copies its share of the gradients into one piece before it updates. Then, gradients
    being freed, stages 1 and 2 gather the weights: in place between GPUs, with a copy of them all in gloo.
    """
    weights, layer = 4 * parameters(), 4 * LAYER
    held = states(stage, ranks)
    if stage == 0:
        return held + weights
    if stage == 1:
        return held + layer
    if stage == 2:
        return held - weights / ranks + max(weights * 2 / ranks + layer, weights)
    return held + 3 * layer


def peak(stage: int, ranks: int, width: int) -> float:
    """Peak resident bytes of the last rank: the first one gathers the whole state besides, to save it."""
    with tempfile.TemporaryDirectory(prefix="zero-memory-") as folder:
        workload = Path(folder) / "net.py"
        workload.write_text(WORKLOAD.format(width=width, layers=LAYERS))
        run = Path(folder) / "run.yaml"
        run.write_text(
            f"workload: {{type: module, path: {workload}}}\n"
            f"engine: {{name: deepspeed, stage: {stage}, config: {json.dumps(BOUNDS)}}}\n"
            f"processes: {ranks}\nbatch_size: {2 * ranks}\nloop: {{steps: 6}}\noptimizer: {{name: adamw, lr: 1.0e-4}}\n"
            "allocator: system\ncheckpoints: {every_steps: 1000}\n"
        )
        command = [sys.executable, "-m", "drivetrain", "train", str(run), f"output={folder}/out", "--quiet"]
        freed_at_once = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
        environment = child_environment() | freed_at_once
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "out" / "report.json").read_text())
    return float(report["ranks"][-1]["peak_memory"]["resident"])


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def page(rows: list[list[str]]) -> str:
    return "\n".join(
        [
            "# What a rank holds at each stage of ZeRO",
            "",
            f"A perceptron of {parameters() / 1e6:.1f} million parameters in fp32, AdamW, two samples a rank; peak "
            "resident MiB of a rank, less that of the same run with almost no weights. Closed form: weights, "
            "gradients, two moments and (from stage 1 on) DeepSpeed's own copy of the weights, what the stage shards "
            "divided by the ranks (Rajbhandari et al. 2020). Expected: and what is there for a moment, which it leaves "
            "out: all gradients again at stage 0, a layer of them later, at stage 2 the copy it makes of its share, or "
            "(later, if larger) gloo's copy of the weights that it gathers; at stage 3 two layers of weights. "
            "DeepSpeed's bounds (buckets, live parameters) are a layer or two. "
            "`python bench/zero_memory.py` repeats it.",
            "",
            machine_line(),
            "",
            markdown_table(["engine", "ranks", "closed form", "expected", "measured", "measured / expected"], rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
