"""What the mesh scripts share: a small Llama, windows of bytes, a timed loop."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH, LR, CLIP = 128, 16, 1e-3, 1.0
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
)  # fmt: skip
TEXT = torch.frombuffer(bytearray(Path("README.md").read_bytes()), dtype=torch.uint8).long()


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def batches() -> list[tuple[Tensor, Tensor]]:
    """(input ids, targets), (BATCH, LENGTH) each, the same on every rank."""
    starts = torch.randint(0, len(TEXT) - LENGTH - 1, (STEPS, BATCH), generator=torch.Generator().manual_seed(1))
    windows = [torch.stack([TEXT[s : s + LENGTH + 1] for s in row]) for row in starts.tolist()]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(step_of: Callable[[Tensor, Tensor], float]) -> None:
    """step_of: one optimizer step on a global batch; returns a loss, where there is one."""
    warm_up, loss = 3, 0.0  # steps; drivetrain leaves as many out of its rate
    for step, (inputs, targets) in enumerate(batches()):
        if step == warm_up:
            start = time.perf_counter()
        loss = step_of(inputs, targets)
    rate = (STEPS - warm_up) * BATCH / (time.perf_counter() - start)
    if dist.get_rank() == dist.get_world_size() - 1:  # where a pipeline has its loss
        print(json.dumps({"samples_per_second": rate, "loss": loss}))
    dist.destroy_process_group()
