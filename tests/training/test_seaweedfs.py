"""The same promises on a second store, a server of its own kind: SeaweedFS. Skipped where its program is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import ObjectStore
from tests.runtime.test_object_store import check_second_writer
from tests.store_server import StoreServer, weed_server
from tests.training.test_mirroring import (
    index_of,
    killed_and_resumed,
    prefixes_in,
    run_in,
    same_checkpoints,
    train,
    unbroken,
)

__all__ = ["unbroken"]


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with weed_server(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def place(seaweedfs: StoreServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in seaweedfs.variables.items():
        monkeypatch.setenv(name, value)
    return seaweedfs.make(f"b{abs(hash(request.node.nodeid)) % 10**12}")


def test_a_file_comes_back_as_it_was_uploaded_in_parts(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(20 * 2**20))
    store = ObjectStore(place)
    store.upload("deep/file", tmp_path / "file")
    [entry] = store.entries()
    download(store, entry, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_conditional_put_refuses_the_second_writer(place: str) -> None:
    check_second_writer(ObjectStore(place), ObjectStore(place))


def test_a_second_run_is_refused(place: str, tmp_path: Path) -> None:
    train(run_in(tmp_path, place, steps=2))
    with pytest.raises(UserError, match="already holds a run"):
        train(run_in(tmp_path, place, steps=2, output=str(tmp_path / "other")))


@pytest.mark.long
def test_a_run_that_is_killed_in_its_uploads_goes_on_where_nothing_is_left_of_it(
    place: str, seaweedfs: StoreServer, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    last = killed_and_resumed(3, place, seaweedfs, tmp_path)
    assert same_checkpoints(last, unbroken(steps=16))
    assert prefixes_in(place) == {each.prefix for each in index_of(place).checkpoints}
