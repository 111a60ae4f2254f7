"""What the scripts here train, as a workload too: a small convolutional network on handwritten digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
labels = torch.tensor(digits.target)

train_data = TensorDataset(images[:1536], labels[:1536])
evaluation_data = TensorDataset(images[1536:], labels[1536:])
loss = nn.CrossEntropyLoss()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.convolution = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(self.norm(x).relu())


def build_model() -> nn.Module:
    width = 128
    blocks = nn.Sequential(*(Block(width) for _ in range(4)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), blocks, head)
