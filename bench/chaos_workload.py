"""The workload of the runs of chaos.py: a classifier of hotel reviews, character by character; or, where these are
not at hand, of scikit-learn's handwritten digits, pixel by pixel. Dropout, so that random generators matter. Its blocks
can be split over ranks and dealt to stages (engine: mesh).

Each rank writes down which samples it takes (tests/launch/history.py).
"""

import csv
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.launch.history import record_if_asked

TOKENS, LENGTH, WIDTH = 1000, 64, 64
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
    places = torch.arange(LENGTH) * 15
    return places + torch.from_numpy(digits.data[:SAMPLES]).long(), digits.target[:SAMPLES].tolist()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.drop(self.down(torch.relu(self.up(self.norm(hidden)))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids).mean(1))))


def build_model():
    return Classifier()


torch.set_num_threads(1)  # more ranks than cores, and the same bits whatever started them
record_if_asked()
tensor_parallel = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
inputs, labels = samples()
inputs, labels = inputs[order], torch.tensor(labels)[order]
train_data = TensorDataset(inputs[:TRAINED], labels[:TRAINED])
evaluation_data = TensorDataset(inputs[TRAINED:], labels[TRAINED:])
loss = nn.CrossEntropyLoss()
