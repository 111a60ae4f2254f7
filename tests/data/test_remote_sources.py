"""Runs whose data and models lie in stores: the same curve as from a disk, and a run file with addresses."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import drivetrain
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.errors import UserError
from drivetrain.runtime.object_store import ObjectStore
from drivetrain.runtime.store_cache import local_path

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "book"]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = {"model_type": "bert", **SIZES, "vocab_size": len(VOCABULARY), "max_position_embeddings": 16}


def write_files(folder: Path) -> None:
    folder.mkdir()
    rows = [
        f"{'good' if number % 2 else 'bad'} {'film' if number % 3 else 'book'},{number % 2}" for number in range(24)
    ]
    (folder / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")


def run_over(place: str, output: Path) -> dict[str, Any]:
    return {
        "workload": {
            "type": "text_classification",
            "model": {"config": CONFIG, "tokenizer": f"{place}/vocab.txt"},
            "data": {"train": f"{place}/train.csv", "max_length": 8},
        },
        "output": str(output),
        "batch_size": 8,
        "loop": {"steps": 4},
        "tracking": {"log_every": 1},
    }


def upload(folder: Path, address: str) -> None:
    store = ObjectStore(address)
    for file in folder.iterdir():
        store.upload(file.name, file)


def losses(folder: Path) -> list[float]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def test_data_of_a_store_train_as_those_of_a_disk_and_the_run_file_keeps_the_address(
    bucket: str, tmp_path: Path
) -> None:
    write_files(tmp_path / "files")
    upload(tmp_path / "files", f"{bucket}/deep")
    drivetrain.train(run_over(str(tmp_path / "files"), tmp_path / "disk"))
    drivetrain.train(run_over(f"{bucket}/deep", tmp_path / "store"))
    assert losses(tmp_path / "store") == losses(tmp_path / "disk") != []
    written = YAML(typ="safe").load(tmp_path / "store" / "run.yaml")
    assert written["workload"]["data"]["train"] == f"{bucket}/deep/train.csv"
    assert written["workload"]["model"]["tokenizer"] == f"{bucket}/deep/vocab.txt"


def test_all_that_cannot_be_fetched_is_reported_at_once(bucket: str, tmp_path: Path) -> None:
    run = RunConfig.model_validate(run_over(f"{bucket}/absent", tmp_path / "run"))
    with pytest.raises(UserError) as raised:
        fetched(run)
    assert {each.field for each in raised.value.problems} == {"workload.data.train", "workload.model.tokenizer"}


def test_a_model_alone_is_fetched_where_the_data_are_not_needed(bucket: str, tmp_path: Path) -> None:
    write_files(tmp_path / "files")
    upload(tmp_path / "files", bucket)
    run = fetched(RunConfig.model_validate(run_over(bucket, tmp_path / "run")), data=False)
    assert run.workload.model.tokenizer == str(local_path(f"{bucket}/vocab.txt"))  # type: ignore[union-attr]
    assert run.workload.data.train == f"{bucket}/train.csv"  # type: ignore[union-attr]


def test_files_of_a_web_server_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    write_files(tmp_path / "files")
    handler = functools.partial(_Quiet, directory=str(tmp_path / "files"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_address[1]}"
        run = fetched(RunConfig.model_validate(run_over(place, tmp_path / "run")))
        server.shutdown()
    train = Path(str(run.workload.data.train))  # type: ignore[union-attr]
    assert train.read_bytes() == (tmp_path / "files" / "train.csv").read_bytes()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
