"""Shards of numbered rows, in every form that is read, and the order of their rows written out plainly."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.data.streams.shard_rows import ShardRows, open_shards

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet", ".arrow")


def write_shard(path: Path, numbers: Sequence[int]) -> None:
    if path.suffix in (".parquet", ".arrow"):
        table = pa.table({"number": list(numbers)})
        if path.suffix == ".parquet":
            return pq.write_table(table, path, row_group_size=3)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            return writer.write_table(table, max_chunksize=3)
    content = "".join(json.dumps({"number": number}) + "\n" for number in numbers).encode()
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as opened:
            opened.write(content)
        return None
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return None


def write_shards(folder: Path, counts: Sequence[int], endings: Sequence[str] = ENDINGS) -> list[list[int]]:
    """Returns the numbers in each shard: 0, 1, 2, ... over all of them."""
    folder.mkdir()
    shards, start = [], 0
    for place, count in enumerate(counts):
        shards.append(list(range(start, start + count)))
        write_shard(folder / f"{place:04}{endings[place % len(endings)]}", shards[-1])
        start += count
    return shards


def opened(folder: Path, cache: Path | None = None) -> ShardRows:
    return open_shards(str(folder), "workload.data.train", cache or folder.parent / "cache")


def numbers_of(rows: ShardRows, buffer: int, seed: int = 0, start: int = 0, stop: int | None = None) -> StreamedRows:
    """Samples are the rows' numbers."""
    stream = rows.shuffled(start, stop, buffer, [seed, 0])
    return StreamedRows("numbers", stream, lambda row, _: row["number"], _refused, rows.identity)


def _refused(where: str, why: str) -> int:
    raise ValueError(f"{where}: {why}")


def plain_order(shards: Sequence[Sequence[int]], buffer: int, seed: int, turn: int) -> list[int]:
    """One pass: shards shuffled, end to end, and each block of `buffer` rows shuffled in itself."""
    shuffled = np.random.default_rng([seed, 0, turn]).permutation(len(shards))
    rows = [number for shard in shuffled for number in shards[shard]]
    taken = []
    for block, start in enumerate(range(0, len(rows), buffer)):
        part = rows[start : start + buffer]
        taken += [part[place] for place in np.random.default_rng([seed, 0, turn, block + 1]).permutation(len(part))]
    return taken
