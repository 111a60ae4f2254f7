"""A tutorial's script as a workload: the same lines, without the loop."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
y = x @ torch.arange(10.0).unsqueeze(1) + 3

model = nn.Linear(10, 1)
loss = nn.MSELoss()
train_data = TensorDataset(x[:800], y[:800])
evaluation_data = TensorDataset(x[800:], y[800:])
