"""Trackers of other makers: what each one recorded is read back by its own library, also after a resume.

W&B's library has no reader of its offline files: they are LevelDB's log format around its own protocol buffers.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.curves import curves_of, has_key
from drivetrain.tracking.events import Evaluated, Event, RolledOut, RunFinished, RunStarted, StepDone

Curve = list[tuple[int, float]]
LOSSES: Curve = [(1, 3.0), (2, 2.5), (3, 2.25), (4, 2.0)]
WHOLE, LAST, HEADER, BLOCK = 1, 4, 7, 32768  # of LevelDB's log format
# services' own code warns of what it uses itself
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "ResourceWarning")]


def step(number: int, loss: float) -> StepDone:
    return StepDone(
        step=number,
        epoch=number / 10,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        scale=None,
        skipped_steps=0,
        samples=8 * number,
        samples_per_second=100.0,
        elapsed_seconds=float(number),
    )


def started(first: int, folder: Path) -> RunStarted:
    return RunStarted("mine", str(folder), 4, first, 80, {"precision": "fp32", "engine": "single"})


def send(service: str, folder: Path, events: list[Event]) -> None:
    stream = EventStream(build_trackers([service], folder))
    for event in events:
        stream.send(event)
    stream.close()


def record(service: str, folder: Path) -> None:
    """Records a run of four steps that is ended after the second one and resumed, each time in a process of its own."""
    ends = [Evaluated(4, {"accuracy": 0.75}, 0.1, True), RunFinished("completed", 4, "")]
    for events in (
        [started(0, folder), *(step(*point) for point in LOSSES[:2])],
        [started(2, folder), *(step(*point) for point in LOSSES[2:]), *ends],
    ):
        process = multiprocessing.get_context("spawn").Process(target=send, args=(service, folder, events))
        process.start()
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow  # a database of forty tables is made
def test_mlflow_has_one_record_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("drivetrain").experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.params["precision"] == "fp32"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in points) == LOSSES
    assert run.data.metrics["evaluation/accuracy"] == 0.75


def test_trackio_has_one_record_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    record("trackio", tmp_path)
    assert SQLiteStorage.get_runs("drivetrain") == ["mine"]
    logs = SQLiteStorage.get_logs("drivetrain", "mine")
    assert [(each["step"], each["train/loss"]) for each in logs if "train/loss" in each] == LOSSES
    assert SQLiteStorage.get_run_config("drivetrain", "mine")["engine"] == "single"


def test_wandb_keeps_an_offline_record_with_one_id_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    name = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    assert [point for file in files for point in wandb_points(file, "train/loss")] == LOSSES
    assert [point for file in files for point in wandb_points(file, "evaluation/accuracy")] == [(4, 0.75)]


def wandb_points(file: Path, name: str) -> Iterator[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    for data in leveldb_records(file.read_bytes()):
        found = wandb_internal_pb2.Record.FromString(data)
        for item in found.history.item:
            if name in (item.key, ".".join(item.nested_key)):
                yield found.history.step.num, json.loads(item.value_json)


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Reads LevelDB's log format: blocks of 32 KiB, records of 7 bytes of header (checksum, length, kind) and data."""
    place, pending = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += HEADER
        pending += data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield pending
            pending = b""


def test_swanlab_keeps_an_offline_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record("swanlab", tmp_path)
    kept = b""
    for file in sorted((tmp_path / "swanlab").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        kept += b"".join(reader)
        reader.close()
    assert kept.count(b"train/loss") >= len(LOSSES)
    assert b"evaluation/accuracy" in kept


def test_prometheus_reads_the_newest_values_and_the_outcome(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    record("prometheus", tmp_path)
    text = (tmp_path / "metrics.prom").read_text()
    found = {
        sample.name: sample.value for each in parser.text_string_to_metric_families(text) for sample in each.samples
    }
    assert found["drivetrain_train_loss"] == 2.0
    assert found["drivetrain_evaluation_accuracy"] == 0.75
    assert (found["drivetrain_step"], found["drivetrain_total_steps"]) == (4, 4)
    assert (found["drivetrain_status_running"], found["drivetrain_status_completed"]) == (0, 1)


def test_opentelemetrys_own_reader_finds_the_newest_values_and_the_outcome(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from drivetrain.tracking.opentelemetry import OpenTelemetryTracker

    read = list[dict[tuple[str, str], float]]()

    class Reader(InMemoryMetricReader):
        def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
            found = self.get_metrics_data()
            assert found is not None
            [of_run] = found.resource_metrics
            assert of_run.resource.attributes["drivetrain.run"] == "mine"
            metrics = [each for scope in of_run.scope_metrics for each in scope.metrics]
            points = [(each.name, point) for each in metrics for point in each.data.data_points]
            read.append({(name, point.attributes.get("status", "")): point.value for name, point in points})
            super().shutdown(timeout_millis)

    stream = EventStream([OpenTelemetryTracker(tmp_path, Reader())])
    ends = [Evaluated(4, {"accuracy": 0.75}, 0.1, True), RunFinished("completed", 4, "")]
    for event in (started(0, tmp_path), *(step(*point) for point in LOSSES), *ends):
        stream.send(event)
    stream.close()
    [found] = read
    assert found["drivetrain.train.loss", ""] == 2.0
    assert found["drivetrain.evaluation.accuracy", ""] == 0.75
    assert (found["drivetrain.step", ""], found["drivetrain.total_steps", ""]) == (4, 4)
    assert (found["drivetrain.status", "running"], found["drivetrain.status", "completed"]) == (0, 1)


def test_opentelemetry_sends_what_a_run_ends_with_to_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    arrived = list[bytes]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        ends: list[Event] = [RunFinished("completed", 4, "")]
        send("opentelemetry", tmp_path, [started(0, tmp_path), *(step(*point) for point in LOSSES), *ends])
        server.shutdown()
    last = ExportMetricsServiceRequest.FromString(arrived[-1])
    [of_run] = last.resource_metrics
    found = {each.name: each.gauge.data_points[-1].as_double for each in of_run.scope_metrics[0].metrics}
    assert found["drivetrain.train.loss"] == 2.0


def test_a_service_whose_package_is_missing_is_refused_with_the_command_that_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    monkeypatch.delitem(sys.modules, "drivetrain.tracking.swanlab", raising=False)
    with pytest.raises(UserError, match="swanlab"):
        build_trackers(["swanlab"], tmp_path)


def test_curves_of_scaled_steps_and_several_losses_have_names_of_their_own() -> None:
    event = step(1, 2.0)
    plain = curves_of(event)
    assert plain["train/loss"] == 2.0
    assert "train/scale" not in plain
    scaled = curves_of(StepDone(**{**vars(event), "scale": 8.0, "skipped_steps": 2, "terms": {"sft": 1.0}}))
    assert {key: scaled[key] for key in scaled.keys() - plain.keys()} == {
        "train/scale": 8.0,
        "train/skipped_steps": 2.0,
        "train/loss_sft": 1.0,
    }
    device = {"memory": {"allocated": 1024}, "utilisation": 0.5, "seconds_by_part": {"data": 0.25}}
    measured = curves_of(StepDone(**{**vars(event), **device}))
    assert {key: measured[key] for key in measured.keys() - plain.keys()} == {
        "device/allocated_bytes": 1024.0,
        "device/utilisation": 0.5,
        "seconds/data": 0.25,
    }
    assert curves_of(RolledOut(3, {"reward": 0.5}, [{"answer": "a"}])) == {"answers/reward": 0.5}
    assert curves_of(RunFinished("completed", 1, "")) == {}


def test_a_key_is_found_in_the_environment_or_in_the_file_that_a_login_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    file = tmp_path / ".netrc"
    assert not has_key("SOME_KEY", [file], ["api.example.org"])
    file.write_text("machine api.example.org login user password secret\n")
    file.chmod(0o600)
    assert has_key("SOME_KEY", [file], ["api.example.org"])
    assert not has_key("SOME_KEY", [file], ["other.example.org"])
    monkeypatch.setenv("SOME_KEY", "secret")
    assert has_key("SOME_KEY", [], [])
