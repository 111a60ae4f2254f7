"""A small decoder as users write one: what the parts `parity` and `resume` train."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, LENGTH, WIDTH, HEADS, BLOCKS = 256, 32, 64, 4, 2
SAMPLES = 160

torch.manual_seed(0)
_text = torch.randint(TOKENS, (SAMPLES, LENGTH + 1)).cumsum(1) % 17  # a token follows from those before
train_data = [(row[:-1], row[1:]) for row in _text[16:]]
evaluation_data = [(row[:-1], row[1:]) for row in _text[:16]]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens. Flat: over (B, TOKENS, T) it has no deterministic kernel on a GPU."""
    return F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.attention(self.first(hidden)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.narrow(F.gelu(self.wide(self.second(hidden))))


class Decoder(nn.Module):
    """(B, T) token ids → logits (B, TOKENS, T), as classifiers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
        self.steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            _disturb(self.steps, ids)
        return self.head(self.norm(hidden)).transpose(1, 2)


def _disturb(step: int, ids: Tensor) -> None:
    """Returns what the part `resume` asks for: a hang at a step, in a kernel that does not end or on the second
    rank."""
    way = os.environ.get("BENCH_HANG", "")
    if way == "kernel" and step == 8:
        torch.cuda._sleep(2**38)  # minutes: what is queued behind it, NCCL's sums among it, waits
        torch.cuda.synchronize(ids.device)
    elif way == "rank" and step == 8 and os.environ.get("RANK") == "1":
        time.sleep(600)


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return Decoder()
