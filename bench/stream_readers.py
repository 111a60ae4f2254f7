"""Reads the shards of a store to their end, by drivetrain's streams or by litdata (store_stream.py starts it)."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.stream_shards import NUM_SHARDS, row
from drivetrain.config.training import Loader
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.streams.mixture import Mix, StreamedMixture
from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.data.streams.shard_rows import open_shards

ROWS_A_SHARD, TEXT_WORDS, BATCH = 64, 250, 64
NUM_ROWS = NUM_SHARDS * ROWS_A_SHARD
Batches = Iterator[dict[str, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("reader", choices=[*READERS, "make"])
    parser.add_argument("address", help="of the shards, or of litdata's chunks; of make: the folder to write them to")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    if given.reader == "make":
        make_chunks(given.address)
        return
    seconds, began = [], time.perf_counter()
    for batches in READERS[given.reader](given.address, given.cache, given.workers):
        numbers = [number for batch in batches for number in batch["number"].tolist()]
        seconds.append(time.perf_counter() - began)
        assert sorted(numbers) == [*range(NUM_ROWS)], f"{given.reader}: {len(numbers)} rows, or some of them twice"
        began = time.perf_counter()
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # what threads of a library still do is no part of the reading


def collated(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    numbers, lengths = [each["number"] for each in samples], [len(each["text"]) for each in samples]
    return {"number": torch.tensor(numbers), "length": torch.tensor(lengths)}


def ours(address: str, cache: Path, workers: int) -> Iterator[Batches]:
    """Yields two passes, of which the second finds copies in the cache."""
    rows = open_shards(address, "workload.data.train", cache)
    stream = StreamedRows("rows", rows.shuffled(0, None, 10_000, [0, 0]), lambda found, _: dict(found), _refused)
    mixture, steps = StreamedMixture([stream], Mix()), NUM_ROWS // BATCH
    order, mine = mixture.order(BATCH, 0, by_epochs=False), Slice(0, 1, BATCH)
    windows = training_windows(mixture, collated, order, range(2 * steps), mine, Loader(workers=workers))
    for _ in range(2):
        yield (each.tensors for _ in range(steps) for each in next(windows).micro_batches)


def _refused(where: str, why: str) -> Any:
    raise ValueError(f"{where}: {why}")


def litdatas(address: str, cache: Path, workers: int) -> Iterator[Batches]:
    """Yields the same two passes by litdata's own data set and loader."""
    litdata = importlib.import_module("litdata")
    downloads = importlib.import_module("litdata.streaming.downloader")
    downloads._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its quick way takes https alone by default
    rows = litdata.StreamingDataset(address, cache_dir=str(cache), shuffle=True)
    loader = litdata.StreamingDataLoader(rows, batch_size=BATCH, num_workers=workers, collate_fn=collated)
    for _ in range(2):
        yield iter(loader)


def make_chunks(folder: str) -> None:
    """Writes litdata's chunks of the same rows, one for each shard."""
    litdata = importlib.import_module("litdata")
    make = functools.partial(row, words=TEXT_WORDS)
    litdata.optimize(make, [*range(NUM_ROWS)], folder, chunk_size=ROWS_A_SHARD, num_workers=1, verbose=False)


READERS = {"ours": ours, "litdata": litdatas}

if __name__ == "__main__":
    main()
