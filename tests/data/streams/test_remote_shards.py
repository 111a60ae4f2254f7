"""Streams from a store: the rows and the order of the disk, copied ahead, within the bound of the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drivetrain.data.rows import open_file
from drivetrain.data.streams import remote_shards, shard_copier
from drivetrain.data.streams.line_shards import LineShard
from drivetrain.data.streams.remote_shards import Copier, RemoteRowsShard, ShardCopy, copies, streams_root
from drivetrain.data.streams.shard_rows import ShardRows, open_shards
from drivetrain.errors import RunError, UserError
from drivetrain.runtime.object_store import ObjectStore
from tests.store_server import FaultyProxy

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


def test_several_shards_are_copied_at_once_where_the_cache_is_large(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four copies waits at the store until all four are asked for; the first shard is looked into before."""
    upload(folder, bucket)
    together, met = threading.Barrier(4), list[str]()

    def wait(method: str, path: str, _: int) -> None:
        if method == "GET" and "part-" in path and "part-0" not in path and len(met) < 4:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(30)
                met.append(path)

    expected = texts(open_shards(str(folder), FIELD, tmp_path / "one"), range(120))
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], wait).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        assert texts(open_shards(bucket, FIELD, tmp_path / "two"), range(120)) == expected
    assert len({*met}) == 4


def test_shards_that_would_fill_a_small_cache_are_copied_one_after_the_other(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(folder, bucket)
    largest = max(file.stat().st_size for file in folder.iterdir())
    for copies_held, ahead in ((3, 2), (12, 3), (1000, 8)):
        monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", repr(copies_held * largest / 1e9))
        assert shard_of(open_shards(bucket, FIELD, tmp_path / "two")).copier.ahead == ahead


def test_room_is_made_for_all_copies_that_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is being written counts once, whether its file is there already or not."""
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", repr(40 / 1e9))
    for number in range(3):
        file = tmp_path / f"{number}-shard"
        file.write_bytes(bytes(10))
        os.utime(file, (number, number))
    room = shard_copier.Room()
    with room.taken(tmp_path, 10):
        (tmp_path / f".3-shard.partial-{os.getpid()}-0").write_bytes(bytes(10))
        assert len(sizes_in(tmp_path)) == 4
        with room.taken(tmp_path, 10):
            assert not (tmp_path / "0-shard").exists()
            assert (tmp_path / "1-shard").exists()


def test_a_copier_that_fails_in_a_way_of_its_own_is_heard(bucket: str, folder: Path, tmp_path: Path) -> None:
    upload(folder, bucket)
    copy = shard_of(open_shards(bucket, FIELD, tmp_path / "two"))
    broken = ShardCopy(copy.copier, dataclasses.replace(copy.entry, bytes="many"), copy.file)  # type: ignore[arg-type]
    copy.file.unlink(missing_ok=True)
    with pytest.raises(RunError, match="has died"):
        broken.read(Path.read_bytes)


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


def shard_of(rows: ShardRows, number: int = 0) -> ShardCopy:
    shard = rows.shards[number]
    assert isinstance(shard, LineShard | RemoteRowsShard)
    assert shard.copy is not None
    return shard.copy


def test_copies_that_others_remove_meanwhile_are_made_again(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(folder, bucket)
    local = texts(open_shards(str(folder), FIELD, tmp_path / "one"), range(240))
    rows = open_shards(bucket, FIELD, tmp_path / "two")
    wait_for, count = Copier.wait_for, 0

    def removed_after(self: Copier, shard: ShardCopy) -> None:
        nonlocal count
        wait_for(self, shard)
        count += 1
        if count % 2:
            shard.file.unlink()

    monkeypatch.setattr(Copier, "wait_for", removed_after)
    assert texts(rows, range(240)) == local


def test_a_failure_ahead_does_not_end_the_run_once_the_store_answers(bucket: str, folder: Path, tmp_path: Path) -> None:
    upload(folder, bucket)
    copy = shard_of(open_shards(bucket, FIELD, tmp_path / "two"))
    copy.file.unlink(missing_ok=True)
    content = ObjectStore(bucket).read(copy.entry.path)[0]
    ObjectStore(bucket).delete([copy.entry.path])
    copy.ahead(0)
    while str(copy.file) not in copy.copier._failed:
        copy.copier._receive()
    (tmp_path / "again").write_bytes(content)
    ObjectStore(bucket).upload(copy.entry.path, tmp_path / "again")
    assert copy.read(Path.read_bytes) == content
    assert not copy.copier._failed


def test_a_folder_gives_the_files_that_the_disk_gives_in_their_order(bucket: str, folder: Path, tmp_path: Path) -> None:
    rows = b'{"text": "more"}\n'
    others = ("README.md", "a/z.jsonl", "a-b/a.jsonl", ".hidden/a.jsonl", "a/.part.jsonl", "B.JSONL")
    beside = ("dataset_info.json", "notes.pdf", "a/readme.MD")
    for name in (*others, *beside):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(rows)
        ObjectStore(f"{bucket}/deep").put_if(name, rows, None)
    for file in folder.glob("part-*"):
        ObjectStore(f"{bucket}/deep").upload(file.name, file)
    local = [shard.name for shard in open_shards(str(folder), FIELD, tmp_path / "one").shards]
    assert list(copies(f"{bucket}/deep", FIELD)) == local
    pattern = [shard.name for shard in open_shards(f"{folder}/**/*.jsonl", FIELD, tmp_path / "two").shards]
    assert list(copies(f"{bucket}/deep/**/*.jsonl", FIELD)) == pattern
    with pytest.raises(UserError, match="ends in none of"):
        copies(f"{bucket}/deep/*", FIELD)


def test_of_a_saved_data_set_the_files_that_it_names_are_read(bucket: str) -> None:
    store = ObjectStore(bucket)
    store.put_if("saved/state.json", b'{"_data_files": [{"filename": "data-1.arrow"}]}', None)
    for name in ("data-1.arrow", "cache-1.arrow"):
        store.put_if(f"saved/{name}", b"x", None)
    assert list(copies(f"{bucket}/saved", FIELD)) == ["data-1.arrow"]


def test_a_table_is_parsed_once_for_all_its_pieces(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"row {number}\n" for number in range(100)))
    ObjectStore(bucket).upload("rows.csv", tmp_path / "rows.csv")
    opened: list[Path] = []

    def counted(file: Path, *given: Any, **named: Any) -> Any:
        opened.append(file)
        return open_file(file, *given, **named)

    monkeypatch.setattr(remote_shards, "open_file", counted)
    rows = open_shards(f"{bucket}/rows.csv", FIELD, tmp_path / "two")
    assert len({*texts(rows, range(100))}) == 100
    assert len(opened) == 1
