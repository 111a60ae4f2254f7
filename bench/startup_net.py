"""The model and data of the start-up bench, on both sides: a small convolutional network on random pictures."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
images = torch.randn(512, 1, 8, 8, generator=generator)
labels = torch.randint(0, 10, (512,), generator=generator)
train_data = TensorDataset(images, labels)
loss = nn.CrossEntropyLoss()


def build_model() -> nn.Module:
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
