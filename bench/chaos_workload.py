"""What the runs of chaos.py train: a classifier of hotel reviews, character by character; or, where these are not at
hand, of scikit-learn's handwritten digits, pixel by pixel. Dropout, so that random generators matter.

Each rank writes down which samples it takes (tests/launch/history.py).
"""

import csv
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.launch.history import record_if_asked

TOKENS, LENGTH, WIDTH = 4000, 64, 256
TRAINED, SAMPLES = 1498, 1700  # the last batch of an epoch has 26


def samples():
    """(SAMPLES, LENGTH) ids, (SAMPLES,) labels."""
    path = os.environ.get("CHAOS_DATA")
    if path:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        rows = rows[:: len(rows) // SAMPLES][:SAMPLES]  # sorted by label
        ids = [[1 + ord(c) % (TOKENS - 1) for c in row["review"][:LENGTH]] for row in rows]
        return torch.tensor([line + [0] * (LENGTH - len(line)) for line in ids]), [int(row["label"]) for row in rows]
    from sklearn.datasets import load_digits

    digits = load_digits()
    places = torch.arange(LENGTH) * 17
    return places + torch.from_numpy(digits.data[:SAMPLES]).long(), digits.target[:SAMPLES].tolist()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop, self.head = nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 10)

    def forward(self, ids):
        hidden = self.tokens(ids).mean(1)
        for layer in self.layers:
            hidden = hidden + self.drop(torch.relu(layer(hidden)))
        return self.head(self.norm(hidden))


def build_model():
    return Classifier()


record_if_asked()
order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
inputs, labels = samples()
inputs, labels = inputs[order], torch.tensor(labels)[order]
train_data = TensorDataset(inputs[:TRAINED], labels[:TRAINED])
evaluation_data = TensorDataset(inputs[TRAINED:], labels[TRAINED:])
loss = nn.CrossEntropyLoss()
