"""Streams from a store: the rows and the order of the disk, copied ahead, within the bound of the cache."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drivetrain.data.streams.remote_shards import streams_root
from drivetrain.data.streams.shard_rows import ShardRows, open_shards
from drivetrain.errors import RunError, UserError
from drivetrain.runtime.object_store import ObjectStore

FIELD = "workload.data.train"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six shards of three kinds, 20 rows each."""
    made = tmp_path / "shards"
    made.mkdir()
    for number in range(6):
        rows = [{"text": f"shard {number} row {row}"} for row in range(20)]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if number % 3 == 0:
            (made / f"part-{number}.jsonl").write_bytes(lines)
        elif number % 3 == 1:
            (made / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(lines))
        else:
            pq.write_table(pa.Table.from_pylist(rows), made / f"part-{number}.parquet")
    return made


def upload(folder: Path, address: str) -> None:
    store = ObjectStore(address)
    for file in folder.iterdir():
        store.upload(file.name, file)


def sizes_in(folder: Path) -> list[int]:
    """Sizes of the copies, some of which another process is removing."""
    sizes = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            sizes.append(0 if file.suffix == ".lock" else file.stat().st_size)
    return [size for size in sizes if size]


def texts(rows: ShardRows, draws: range) -> list[Any]:
    shuffled = rows.shuffled(0, None, 16, [3, 0])
    found = [shuffled.at(draw) for draw in draws]
    return [piece.row(index)["text"] for piece, index in found]


def test_a_store_gives_the_rows_of_the_disk_in_the_same_order_over_two_passes(
    bucket: str, folder: Path, tmp_path: Path
) -> None:
    upload(folder, f"{bucket}/deep")
    local = texts(open_shards(str(folder), FIELD, tmp_path / "one"), range(240))
    remote = open_shards(f"{bucket}/deep", FIELD, tmp_path / "two")
    assert texts(remote, range(240)) == local
    assert len({*local}) == 120


def test_a_stream_goes_on_in_the_middle_in_another_process_with_an_empty_cache(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(folder, bucket)
    local = texts(open_shards(str(folder), FIELD, tmp_path / "one"), range(100))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
    assert texts(open_shards(bucket, FIELD, tmp_path / "two"), range(50, 100)) == local[50:]


def test_copies_are_made_ahead_and_removed_beyond_the_bound(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(folder, bucket)
    largest = max(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", repr(3 * largest / 1e9))
    rows = open_shards(f"{bucket}/*", FIELD, tmp_path / "two")
    shuffled = rows.shuffled(0, None, 16, [3, 0])
    most = 0
    for draw in range(240):
        shuffled.at(draw)
        sizes = sizes_in(streams_root())
        most = max(most, len(sizes))
        assert sum(sizes) <= 4 * largest, "the bound, and one that is being written"
    assert most >= 2, "ahead of the one that is read"
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", repr(largest / 2e9))
    with pytest.raises(UserError, match="DRIVETRAIN_STORE_CACHE_GB"):
        open_shards(bucket, FIELD, tmp_path / "two")


def test_a_forked_reader_has_copies_made_by_a_process_of_its_own(bucket: str, folder: Path, tmp_path: Path) -> None:
    """Loader workers are forked, and obstore's threads do not survive it."""
    upload(folder, bucket)
    rows = open_shards(bucket, FIELD, tmp_path / "two")
    first = texts(rows, range(10))
    child = os.fork()
    if child == 0:
        os._exit(0 if texts(rows, range(10, 60)) and texts(rows, range(10)) == first else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_shard_that_cannot_be_copied_ends_the_run_with_the_reason(bucket: str, folder: Path, tmp_path: Path) -> None:
    upload(folder, bucket)
    rows = open_shards(bucket, FIELD, tmp_path / "two")
    ObjectStore(bucket).delete([file.name for file in folder.iterdir()])
    with pytest.raises(RunError, match="cannot be copied"):
        texts(rows, range(120))
