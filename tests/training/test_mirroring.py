"""Runs that are mirrored to an object store: complete there or absent, whatever dies, fails or comes second."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.checkpoint.directory import load, steps
from drivetrain.checkpoint.mirror import index as index_module
from drivetrain.checkpoint.mirror import run_mirror
from drivetrain.checkpoint.mirror.index import Index, Lost, OwnIndex, read
from drivetrain.checkpoint.state import same
from drivetrain.config.training import Checkpoints
from drivetrain.errors import RunError, UserError
from drivetrain.runtime import object_store
from drivetrain.runtime.object_store import ObjectStore, StoreError
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training import mirroring
from tests import ranks
from tests.launch.test_start import losses
from tests.store_server import SECRET, Fault, FaultyProxy, StoreServer

MODULE = """
import torch
from torch import nn

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(64, 8, generator=generator)
train_data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
evaluation_data = train_data


def build_model():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))


loss = nn.MSELoss()
"""


def run_in(folder: Path, mirror: str, steps: int = 12, width: int = 16, **given: Any) -> dict[str, Any]:
    (folder / "module.py").write_text(MODULE.replace("WIDTH", str(width)))
    return {
        "name": "mirrored",
        "workload": {"type": "module", "path": str(folder / "module.py")},
        "output": str(folder / "disk"),
        **({"mirror": mirror} if mirror else {}),
        "batch_size": 8,
        "loop": {"steps": steps},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "evaluation": {"every_steps": 4},
        "checkpoints": {"every_steps": 2, "keep_last": 2},
        "tracking": {"log_every": 1, "trackers": []},
        **given,
    }


def train(run: dict[str, Any], **given: Any) -> Any:
    return drivetrain.train(run, quiet=True, **given)


def index_of(mirror: str) -> Index:
    found, _ = read(ObjectStore(mirror))
    assert found is not None
    return found


def prefixes_in(mirror: str) -> set[str]:
    return {each.path.split("/")[1] for each in ObjectStore(mirror).entries("checkpoints")}


def same_checkpoints(one: Path, other: Path) -> bool:
    first, second = load(one), load(other)
    return all(same(first[part], second[part]) for part in ("model", "optimizer"))


@pytest.fixture
def unbroken(tmp_path: Path) -> Callable[..., Path]:
    """The last checkpoint of the same run without a mirror and without a kill."""

    def made(**given: Any) -> Path:
        (tmp_path / "unbroken").mkdir()
        run = run_in(tmp_path / "unbroken", "", **given)
        train(run)
        return steps(tmp_path / "unbroken" / "disk" / "checkpoints")[-1]

    return made


def test_a_run_is_in_the_store_as_it_is_on_the_disk(bucket: str, tmp_path: Path) -> None:
    mirror = f"{bucket}/runs/one"
    train(run_in(tmp_path, mirror))
    disk, index, store = tmp_path / "disk", index_of(mirror), ObjectStore(mirror)
    local = [int(path.name.removeprefix("step-")) for path in steps(disk / "checkpoints")]
    assert [each.step for each in index.checkpoints] == local, "retention keeps the same ones"
    assert prefixes_in(mirror) == {each.prefix for each in index.checkpoints}, "nothing is left beside them"
    assert index.writer is None
    for each in index.checkpoints:
        for file in (disk / "checkpoints" / f"step-{each.step:08d}").iterdir():
            assert store.read(f"checkpoints/{each.prefix}/{file.name}")[0] == file.read_bytes()
    for name in ("run.yaml", "events.jsonl", "report.json", "environment.json"):
        assert store.read(name)[0] == (disk / name).read_bytes()
    events = [json.loads(line) for line in (disk / "events.jsonl").read_text().splitlines()]
    uploads = {each["step"] for each in events if each["event"] == "upload"}
    assert uploads <= {*range(2, 13, 2)}, "those of the time before the run's end, when events are closed"
    assert not (disk / ".mirror").exists() or not any((disk / ".mirror").iterdir())
    assert not [file for file in disk.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_a_run_goes_on_from_the_store_on_an_empty_disk_to_the_same_bits(
    bucket: str, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    train(run_in(tmp_path, bucket, steps=6, schedule={"name": "constant"}))
    shutil.rmtree(tmp_path / "disk")
    report = train(run_in(tmp_path, bucket, steps=12, schedule={"name": "constant"}), resume=True)
    assert report.status == "completed"
    losses = [json.loads(line) for line in (tmp_path / "disk" / "events.jsonl").read_text().splitlines()]
    assert [each["step"] for each in losses if each["event"] == "step"] == [*range(1, 13)], "one curve"
    [last] = steps(tmp_path / "disk" / "checkpoints")[-1:]
    assert same_checkpoints(last, unbroken(steps=12, schedule={"name": "constant"}))


def mirrored_main(folder: str, mirror: str, variables: dict[str, str], steps: int) -> None:
    os.environ.update(variables)
    train(run_in(Path(folder), mirror, steps), resume=True)


class Counting:
    """Makes uploads of checkpoints slow, and notices the one of this number."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.count, self.reached = wanted, 0, threading.Event()

    def __call__(self, method: str, path: str, _: int) -> Fault | None:
        if method not in ("PUT", "POST") or "/checkpoints/" not in path:
            return None
        self.count += 1
        if self.count == self.wanted:
            self.reached.set()
        return "slow"


def killed_and_resumed(kills: int, mirror: str, server: StoreServer, folder: Path) -> Path:
    """Kills a run `kills` times while it uploads, each time on a machine whose disk is empty, and each time
    with four more steps to train. Returns its last checkpoint, made without a kill."""
    chosen = random.Random(kills)
    for number in range(kills):
        machine = folder / f"machine-{number}"
        machine.mkdir()
        counting = Counting(chosen.randint(1, 6))
        with FaultyProxy(server.address, counting, 0.05).running() as proxy:
            process = ranks.start(mirrored_main, str(machine), mirror, server.through(proxy), 4 * number + 4)
            assert counting.reached.wait(60), "it uploads"
            time.sleep(chosen.random() * 0.1)
            process.kill()
            process.join(30)
    machine = folder / "last"
    machine.mkdir()
    process = ranks.start(mirrored_main, str(machine), mirror, server.variables, 4 * kills + 4)
    process.join(120)
    assert process.exitcode == 0
    return steps(machine / "disk" / "checkpoints")[-1]


def test_kills_in_uploads_lose_nothing_that_was_complete(
    bucket: str, store_server: StoreServer, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    last = killed_and_resumed(3, bucket, store_server, tmp_path)
    assert same_checkpoints(last, unbroken(steps=16))
    assert losses(last.parents[1]) == losses(tmp_path / "unbroken" / "disk"), "one curve, without a hole"
    index = index_of(bucket)
    assert index.checkpoints[-1].step == 16
    assert prefixes_in(bucket) == {each.prefix for each in index.checkpoints}, "orphans of killed uploads are gone"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and leases of fractions of a second."""
    for module, name, value in (
        *((object_store, "PAUSES", (0.01,)), (run_mirror, "PAUSE", 0.05)),
        *((index_module, "LEASE", 0.5), (index_module, "LOOKS", 0.05)),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(ObjectStore.__init__, "__defaults__", ((0.01,),))


@pytest.mark.usefixtures("hurried")
def test_a_store_that_fails_never_ends_the_training_and_resume_uploads_what_is_left(
    bucket: str,
    store_server: StoreServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fault(method: str, path: str, _: int) -> Fault | None:
        return "refuse" if method in ("PUT", "POST") and "/checkpoints/" in path else None

    with FaultyProxy(store_server.address, fault).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        with pytest.raises(RunError, match=r"step 10, step 12 could not.*resume"):
            train(run_in(tmp_path, bucket))
    disk = tmp_path / "disk"
    assert json.loads((disk / "report.json").read_text())["status"] == "completed"
    events = [json.loads(line) for line in (disk / "events.jsonl").read_text().splitlines()]
    warnings = [each["message"] for each in events if each["event"] == "warning"]
    # a training that is over before the store has refused has no events any more: then the terminal has it
    warned = [*warnings, *([] if warnings else capfd.readouterr().err.splitlines())]
    assert sum("failed: cannot write" in each for each in warned) == 1, "at once, and once"
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_server.address)
    assert index_of(bucket).checkpoints == []
    train(run_in(tmp_path, bucket), resume=True)
    assert [each.step for each in index_of(bucket).checkpoints][-2:] == [10, 12]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("fault", ["refuse", "throttle", "cut", "slow", "lose"])
def test_faults_now_and_then_leave_a_complete_mirror(
    fault: Fault, bucket: str, store_server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now_and_then(method: str, path: str, number: int) -> Fault | None:
        loses = fault != "lose" or (method == "PUT" and "safetensors" in path)
        return fault if loses and number % 5 == 3 else None

    with FaultyProxy(store_server.address, now_and_then, 0.05).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        train(run_in(tmp_path, bucket, steps=4))
    assert fault in {found for _, _, found in proxy.seen}
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_server.address)
    original = tmp_path / "disk" / "checkpoints" / "step-00000004"
    there = index_of(bucket).checkpoints[-1]
    assert there.step == 4
    for file in original.iterdir():
        assert ObjectStore(bucket).read(f"checkpoints/{there.prefix}/{file.name}")[0] == file.read_bytes()


def test_a_second_run_is_refused_and_an_overwriting_one_replaces_the_first(bucket: str, tmp_path: Path) -> None:
    train(run_in(tmp_path, bucket, steps=4))
    before = prefixes_in(bucket)
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(UserError, match="already holds a run"):
        train(run_in(tmp_path, bucket, steps=4))
    assert prefixes_in(bucket) == before
    assert index_of(bucket).writer is None
    train(run_in(tmp_path, bucket, steps=2), overwrite=True)
    assert [each.step for each in index_of(bucket).checkpoints] == [2]
    assert len(prefixes_in(bucket)) == 1


@pytest.mark.usefixtures("hurried")
def test_of_two_writers_the_second_is_refused_as_long_as_the_first_is_alive(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_system", lambda: "")  # as on two machines
    first, second = OwnIndex(ObjectStore(bucket), print), OwnIndex(ObjectStore(bucket), print)
    first.claim()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.1):
            first.renew()

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(UserError, match="a run is writing to"):
            second.claim()
    finally:
        ended.set()
        renewing.join()
    second.claim()  # nothing has renewed the first one's entry
    with pytest.raises(Lost, match="taken over"):
        first.change(lambda index: index.model_copy(update={"checkpoints": []}))
    second.renew()
    second.release()
    second.renew()  # a thread's that comes late
    assert index_of(bucket).writer is None


@pytest.mark.usefixtures("hurried")
def test_a_run_whose_mirror_is_taken_over_trains_on_and_reports_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_mirror.upload

    def taken(store: ObjectStore, *given: Any) -> Any:
        made = original(store, *given)
        _, version = store.read("index.json")
        store.put_if("index.json", Index().model_dump_json().encode(), version)
        return made

    monkeypatch.setattr(run_mirror, "upload", taken)
    with pytest.raises(RunError, match="taken over"):
        train(run_in(tmp_path, bucket, steps=4))
    assert json.loads((tmp_path / "disk" / "report.json").read_text())["status"] == "completed"
    assert index_of(bucket).checkpoints == [], "nothing is merged into another writer's run"


def test_what_a_killed_upload_left_goes_although_the_next_run_was_killed_before_it_could_remove_it(
    bucket: str, tmp_path: Path
) -> None:
    store = ObjectStore(bucket)
    first, second = OwnIndex(store, print), OwnIndex(store, print)
    first.claim()
    store.put_if(f"checkpoints/step-00000002-{first.token}-abc/model.safetensors", b"x", None)
    second.claim()  # and is killed
    store.put_if("checkpoints/step-00000002-of-another/model.safetensors", b"x", None)  # no writer's that is known
    train(run_in(tmp_path, bucket, steps=2))
    index = index_of(bucket)
    assert prefixes_in(bucket) == {*(each.prefix for each in index.checkpoints), "step-00000002-of-another"}


def test_a_checkpoint_whose_deletion_was_killed_goes_with_the_next_run_whoever_made_it(
    bucket: str, tmp_path: Path
) -> None:
    constant = {"schedule": {"name": "constant"}}
    train(run_in(tmp_path, bucket, steps=2, **constant))
    train(run_in(tmp_path, bucket, steps=4, **constant), resume=True)
    third, removed = OwnIndex(ObjectStore(bucket), print), index_of(bucket).checkpoints[0]
    assert removed.step == 2
    third.claim()
    third.change(lambda index: index.model_copy(update={"checkpoints": index.checkpoints[1:]}))  # and is killed
    assert removed.prefix in prefixes_in(bucket)
    train(run_in(tmp_path, bucket, steps=6, **constant), resume=True)
    assert prefixes_in(bucket) == {each.prefix for each in index_of(bucket).checkpoints}


def test_what_a_failed_upload_left_goes_with_the_next_run(bucket: str, tmp_path: Path) -> None:
    store = ObjectStore(bucket)
    first = OwnIndex(store, print)
    first.claim()
    store.put_if(f"checkpoints/step-00000002-{first.token}-abc/model.safetensors", b"x", None)
    first.release()
    train(run_in(tmp_path, bucket, steps=2))
    assert prefixes_in(bucket) == {each.prefix for each in index_of(bucket).checkpoints}


def test_the_curve_up_to_a_checkpoint_is_in_the_store_before_the_checkpoint_counts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a run that goes on from there after a kill would lack the steps in between."""
    change, saved, seen = OwnIndex.change, run_mirror.RunMirror.saved, dict[int, int]()

    def saved_and_uploaded(self: run_mirror.RunMirror, step: int, path: Path) -> None:
        saved(self, step, path)
        until = time.monotonic() + 30
        while self.waiting and time.monotonic() < until:  # training is no further when it is uploaded
            time.sleep(0.01)

    def changed(self: OwnIndex, by: Callable[[Index], Index]) -> Index:
        newest = by(self.index).newest
        if newest is not None and newest.step not in seen:
            lines = bytes(ObjectStore(bucket).read("events.jsonl")[0]).decode().splitlines()
            seen[newest.step] = max(event["step"] for event in map(json.loads, lines) if event["event"] == "step")
        return change(self, by)

    monkeypatch.setattr(OwnIndex, "change", changed)
    monkeypatch.setattr(run_mirror.RunMirror, "saved", saved_and_uploaded)
    train(run_in(tmp_path, bucket))
    assert [*seen] == [*range(2, 13, 2)]
    assert all(newest >= step for step, newest in seen.items())


def put(address: str, name: str, content: bytes = b"x") -> None:
    ObjectStore(address).put_if(name, content, None)


def test_overwriting_deletes_the_runs_own_objects_alone(bucket: str, tmp_path: Path) -> None:
    mirror = f"{bucket}/runs"
    train(run_in(tmp_path, mirror, steps=4))
    foreign = ["nested/index.json", "nested/checkpoints/step-00000002-a-b/w", "data.csv", "checkpoints/mine/w"]
    for name in foreign:
        put(mirror, name)
    put(mirror, "tensorboard/earlier")
    shutil.rmtree(tmp_path / "disk")
    train(run_in(tmp_path, mirror, steps=2), overwrite=True)
    names = {each.path for each in ObjectStore(mirror).entries()}
    assert names >= {*foreign}
    assert "tensorboard/earlier" not in names
    assert len(prefixes_in(mirror)) == 2
    restored = tmp_path / "restored"
    restored.mkdir()
    train(run_in(restored, mirror, steps=4), resume=True)
    assert not {"nested", "data.csv"} & {each.name for each in (restored / "disk").iterdir()}


@pytest.mark.parametrize("given", [{}, {"overwrite": True}])
def test_objects_of_no_run_are_refused_and_stay(given: dict[str, bool], bucket: str, tmp_path: Path) -> None:
    put(bucket, "data/train.csv")
    with pytest.raises(UserError, match=r"no index\.json"):
        train(run_in(tmp_path, bucket, steps=2), **given)
    assert [each.path for each in ObjectStore(bucket).entries()] == ["data/train.csv"]


@pytest.mark.usefixtures("hurried")
def test_a_checkpoint_that_was_chosen_for_its_upload_is_never_passed_over(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As newer ones are saved between the choice and the upload."""
    original = run_mirror.RunMirror._upload

    def superseded(self: run_mirror.RunMirror, step: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(self, "_kept", lambda _: [])
            self._pass_over()
        original(self, step)

    monkeypatch.setattr(run_mirror.RunMirror, "_upload", superseded)
    train(run_in(tmp_path, bucket, steps=2))
    assert [each.step for each in index_of(bucket).checkpoints] == [2]


@pytest.mark.usefixtures("hurried")
def test_an_unforeseen_error_of_the_uploads_fails_the_command(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError(4)

    monkeypatch.setattr(run_mirror, "upload", broken)
    with pytest.raises(RunError, match=r"not everything is in .*KeyError"):
        train(run_in(tmp_path, bucket, steps=2))


@pytest.mark.usefixtures("hurried")
def test_the_lease_is_renewed_before_the_uploads_start(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "RENEWED", 0.05)
    seen: list[int] = []

    def slow_restore(*_: Any) -> None:
        time.sleep(0.5)
        writer = index_of(bucket).writer
        seen.append(-1 if writer is None else writer.renewals)

    monkeypatch.setattr(mirroring, "restore", slow_restore)
    train(run_in(tmp_path, bucket, steps=2), resume=True)
    assert seen[0] > 1


@pytest.mark.usefixtures("hurried")
def test_a_writer_that_lost_the_run_leaves_the_files_of_the_new_one(bucket: str, tmp_path: Path) -> None:
    store, folder = ObjectStore(bucket), RunFolder(tmp_path / "disk")
    folder.path.mkdir()
    (folder.path / "events.jsonl").write_text("of the first writer")
    own, warnings = OwnIndex(store, print), []
    own.claim()
    mirror = run_mirror.RunMirror(store, own, folder, Checkpoints(), lambda *_: None, warnings.append)
    _, version = store.read("index.json")
    store.put_if("index.json", Index().model_dump_json().encode(), version)
    store.put_if("events.jsonl", b"of the second", None)
    mirror.start(False, True, "loss")
    with pytest.raises(RunError, match="taken over"):
        mirror.finish()
    assert store.read("events.jsonl")[0] == b"of the second"
    assert len(warnings) == 1


def test_a_put_that_was_done_without_an_answer_is_no_other_writer(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(bucket)
    own = OwnIndex(store, print)
    own.claim()
    put_if = store.put_if

    def unanswered(*given: Any) -> Any:
        put_if(*given)
        raise StoreError("no answer came")

    with monkeypatch.context() as patched:
        patched.setattr(store, "put_if", unanswered)
        with pytest.raises(StoreError, match="no answer"):
            own.renew()
    own.change(lambda index: index.model_copy(update={"checkpoints": []}))
    own.release()
    assert index_of(bucket).writer is None


def test_a_damaged_best_checkpoint_is_reported_and_the_run_goes_on(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_in(tmp_path, bucket, steps=4, checkpoints={"every_steps": 1, "keep_last": 1, "keep_best": 1}))
    index, store = index_of(bucket), ObjectStore(bucket)
    newest = index.newest
    assert newest is not None
    _, version = read(store)
    facts = {**newest.facts, "best": {**(newest.facts.get("best") or {}), "step": 1}}
    damaged = newest.model_copy(update={"step": 1, "prefix": "step-00000001-a-b"})
    changed = newest.model_copy(update={"facts": facts})
    store.put_if("index.json", Index(checkpoints=[damaged, changed]).model_dump_json().encode(), version)
    put(bucket, "checkpoints/step-00000001-a-b/manifest.json", b"{}")
    shutil.rmtree(tmp_path / "disk")
    report = train(run_in(tmp_path, bucket, steps=5), resume=True)
    assert report.status == "completed"
    assert "checkpoint skipped" in capsys.readouterr().err


def test_an_address_as_output_is_the_mirror_of_the_usual_folder() -> None:
    from drivetrain.config.run import RunConfig

    given = {"workload": {"type": "module", "path": "m.py"}, "batch_size": 1, "loop": {"steps": 1}, "name": "x"}
    run = RunConfig.model_validate({**given, "output": "s3://bucket/runs/x/"})
    assert run.mirror == "s3://bucket/runs/x"
    assert run.folder == Path("runs/x")
    with pytest.raises(ValueError, match="mirrored to"):
        RunConfig.model_validate({**given, "mirror": "https://host/x"})
