"""Stores of Google, Azure and the hub, as servers on loopback stand for them: read, listed, written conditionally."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import PART, NotThere, ObjectStore
from tests.other_store_servers import Azure, FakeStore, Google, Hub, serving
from tests.runtime.test_object_store import check_second_writer
from tests.training.test_mirroring import index_of, run_in, train

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.fixture(params=["gs", "az"])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, FakeStore]]:
    """The address of an empty bucket, and what lies in it."""
    store = FakeStore()
    account = {"gcs_base_url": "", "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    with serving(Google if request.param == "gs" else Azure, store) as address:
        (tmp_path / "account.json").write_text(json.dumps({**account, "gcs_base_url": address}))
        variables = {
            "gs": {"GOOGLE_BASE_URL": address, "GOOGLE_SERVICE_ACCOUNT": str(tmp_path / "account.json")},
            "az": {
                "AZURE_ENDPOINT": address,
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ACCOUNT_KEY": "a2V5LW9mLXRlc3Rz",
            },
        }[request.param]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield f"{request.param}://bucket", store


def test_objects_are_uploaded_in_parts_listed_read_in_ranges_and_deleted(
    place: tuple[str, FakeStore], tmp_path: Path
) -> None:
    address, kept = place
    store = ObjectStore(f"{address}/folder", ())
    assert store.is_empty()
    (tmp_path / "file").write_bytes(os.urandom(2 * PART + 100))
    (tmp_path / "small").write_bytes(b"small")
    store.upload("deep/file", tmp_path / "file")
    store.upload("small", tmp_path / "small")
    assert [(entry.path, entry.bytes) for entry in store.entries()] == [("deep/file", 2 * PART + 100), ("small", 5)]
    assert sorted(kept.objects) == ["folder/deep/file", "folder/small"]
    [large] = store.entries("deep")
    download(store, large, tmp_path / "copy", lambda _: None)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert bytes(store.read_range("small", 1, 3)) == b"ma"
    store.delete(["small", "absent"])
    assert store.entry("small") is None
    with pytest.raises(NotThere):
        store.read("small")


def test_a_second_writer_is_refused_by_the_store(place: tuple[str, FakeStore]) -> None:
    first, second = ObjectStore(place[0], ()), ObjectStore(place[0], ())
    newer = check_second_writer(first, second)
    assert second.put_if("index", b"of the second, who read it", newer)


def test_a_run_is_mirrored_and_goes_on_where_nothing_is_left_of_it(
    place: tuple[str, FakeStore], tmp_path: Path
) -> None:
    run = run_in(tmp_path, f"{place[0]}/runs/one", steps=4)
    train(run)
    assert index_of(str(run["mirror"])).newest is not None
    elsewhere = {**run, "output": str(tmp_path / "other"), "loop": {"steps": 6}}
    report = train(elsewhere, resume=True)
    assert report.steps == 6
    assert (tmp_path / "other" / "checkpoints" / "step-00000004").exists(), "brought from the mirror"


READING = """
from pathlib import Path
from drivetrain.runtime.downloads import download
from drivetrain.runtime.store_cache import store_of
store = store_of("hf://datasets/somebody/rows")
print([(each.path, each.bytes) for each in store.entries()], store.entry("absent.csv"))
download(store, store.entry("data/a.csv"), Path("copy"), lambda _: None)
print(Path("copy").read_text())
"""


def test_a_data_set_of_the_hub_is_listed_and_read(tmp_path: Path) -> None:
    store = FakeStore()
    store.put("data/a.csv", b"text,label")
    store.put("README.md", b"rows")
    with serving(Hub, store) as address:
        kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        variables = {**kept, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", READING]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[('README.md', 4), ('data/a.csv', 10)] None", "text,label"]
