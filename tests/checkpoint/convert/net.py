"""A user's file: a small model with a buffer, its data and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, FEATURES = 200, 10

x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
y = x @ torch.arange(float(FEATURES)).unsqueeze(1) / 10


class Net(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        self.register_buffer("shift", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, FEATURES) → (B, 1)."""
        return self.last(self.norm(torch.relu(self.first(x)))) + self.shift


model = Net()
loss = nn.MSELoss()
train_data = TensorDataset(x, y)
