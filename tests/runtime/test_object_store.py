"""Objects in an S3 store on loopback, also through a proxy that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.runtime import object_store
from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import Conflict, NotThere, ObjectStore, StoreError, Version, scrubbed
from tests.store_server import SECRET, FaultyProxy, StoreServer

SOON = (0.01, 0.01, 0.01, 0.01)


def proxied(proxy: FaultyProxy, address: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    return ObjectStore(address, SOON)


def test_a_file_comes_back_as_it_was_uploaded(bucket: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(20 * 2**20))  # three parts
    store = ObjectStore(f"{bucket}/folder")
    store.upload("deep/file", file)
    [entry] = store.entries()
    assert (entry.path, entry.bytes) == ("deep/file", 20 * 2**20)
    counted: list[int] = []
    download(store, entry, tmp_path / "copy", counted.append)
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert sum(counted) == entry.bytes


def check_second_writer(first: ObjectStore, second: ObjectStore) -> Version:
    """Checks that the second writer of an object is refused. Returns the object's version."""
    version = first.put_if("index", b"of the first", None)
    with pytest.raises(Conflict):
        second.put_if("index", b"of the second", None)
    newer = first.put_if("index", b"again", version)
    with pytest.raises(Conflict):
        second.put_if("index", b"of the second", version)
    assert second.read("index")[0] == b"again"
    return newer


def test_a_conditional_put_refuses_the_second_writer(bucket: str) -> None:
    first, second = ObjectStore(bucket), ObjectStore(bucket)
    newer = check_second_writer(first, second)
    assert second.read("index") == (b"again", newer)


def test_a_put_whose_answer_was_lost_counts_as_done(
    bucket: str, store_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultyProxy(
        store_server.address, lambda method, _, number: "cut" if (method, number) == ("PUT", 0) else None
    )
    with proxy.running():
        store = proxied(proxy, bucket, monkeypatch)
        version = store.put_if("index", b"mine", None)
    assert [method for method, _, _ in proxy.seen].count("PUT") >= 1
    assert version


@pytest.mark.parametrize("fault", ["refuse", "throttle", "cut", "slow"])
def test_a_store_that_fails_for_a_while_loses_nothing(
    fault: object_store.Any, bucket: str, store_server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(18 * 2**20))
    proxy = FaultyProxy(store_server.address, lambda _, __, number: fault if number % 4 == 1 else None, 0.05)
    with proxy.running():
        store = proxied(proxy, bucket, monkeypatch)
        store.upload("file", file)
        entry = store.entry("file")
        assert entry is not None
        download(store, entry, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert fault in {found for _, _, found in proxy.seen}


def test_a_part_that_was_lost_is_noticed(
    bucket: str, store_server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(18 * 2**20))
    proxy = FaultyProxy(store_server.address, lambda _, path, __: "lose" if "partNumber=2" in path else None)
    with proxy.running():
        store = proxied(proxy, bucket, monkeypatch)
        with pytest.raises(StoreError):
            store.upload("file", file)
        assert store.entry("file") is None, "no half object is published"


def test_what_cannot_pass_is_not_tried_again(
    bucket: str, store_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultyProxy(store_server.address, lambda *_: "deny")
    with proxy.running():
        store = proxied(proxy, bucket, monkeypatch)
        with pytest.raises(StoreError, match="403"):
            store.read("file")
    assert len(proxy.seen) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_server.address)
    with pytest.raises(NotThere):
        ObjectStore(bucket).read("nothing")


def test_credentials_stand_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = scrubbed(f"GET https://host/x?X-Amz-Signature=abc123&a=1 with {SECRET}")
    assert SECRET not in text
    assert "abc123" not in text
    assert "a=1" in text


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(object_store.importlib.sys.modules, "obstore", None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"pip install 'drivetrain\[store\]'"):
        ObjectStore("s3://bucket")
