"""The plain side of startup.py: a script as a user would write it, up to its first step.

python bench/plain_startup.py net|texts RUN.JSON, or under torchrun. RUN.JSON: the run file of the other side.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.utils.data import DataLoader

KIND, RUN = sys.argv[1], json.load(open(sys.argv[2]))  # noqa: SIM115  as short as such scripts are
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def net():  # type: ignore[no-untyped-def]
    from startup_net import build_model, loss, train_data

    return build_model(), train_data, None, lambda model, batch: loss(model(batch[0]), batch[1])


def texts():  # type: ignore[no-untyped-def]
    import csv

    from transformers import AutoConfig, AutoModelForSequenceClassification, BertTokenizerFast

    workload = RUN["workload"]
    with open(workload["data"]["train"], newline="") as file:
        rows = list(csv.DictReader(file))
    tokenizer = BertTokenizerFast(vocab_file=workload["model"]["tokenizer"])
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=workload["data"]["max_length"])
    samples = [(ids, int(row["label"])) for ids, row in zip(encoded["input_ids"], rows, strict=True)]
    settings = dict(workload["model"]["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), vocab_size=len(tokenizer), **settings)

    def collate(chosen):  # type: ignore[no-untyped-def]
        padded = tokenizer.pad({"input_ids": [ids for ids, _ in chosen]}, return_tensors="pt")
        return {**padded, "labels": torch.tensor([label for _, label in chosen])}

    return AutoModelForSequenceClassification.from_config(config), samples, collate, lambda m, b: m(**b).loss


torch.manual_seed(0)
model, data, collate, loss_of = {"net": net, "texts": texts}[KIND]()
sampler = None
if WORLD > 1:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    model, sampler = DistributedDataParallel(model), DistributedSampler(data)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(
    data, batch_size=RUN["batch_size"] // WORLD, shuffle=sampler is None, sampler=sampler, collate_fn=collate
)
for batch in loader:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    break

from first_step import stamp  # noqa: E402  the bench's own

stamp()
if WORLD > 1:
    dist.barrier()  # a rank that is gone first takes the other down with it
    dist.destroy_process_group()
