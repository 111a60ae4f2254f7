"""A workload of which each sample takes a given number of MiB while it is computed: for runs that find no memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Hungry(nn.Module):
    def __init__(self, sample_mib: int) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(4, 1), sample_mib * 2**18

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs)
        return output + output.expand(-1, self.numbers).exp().mean(1, keepdim=True) * 0


def build_model(sample_mib: int) -> nn.Module:
    return Hungry(sample_mib)


torch.manual_seed(0)
train_data = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
loss = nn.MSELoss()
