"""Manifests: they survive failures, their commands train, and planted mistakes are found without a cluster."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from drivetrain.launch.cluster import checked_for_cluster
from drivetrain.launch.kubernetes import jobset, object_name, request, trainjob
from drivetrain.launch.manifest_check import manifest_problems
from tests.launch.test_start import free_port, prepared

Call = Callable[..., tuple[int, str, str]]


def manifests(folder: Path, drivetrain: Call, *more: str, name: str = "run.yaml") -> list[dict[str, Any]]:
    prepared(folder)
    (folder / "run.yaml").rename(folder / name)
    code, text, errors = drivetrain(
        "launch", str(folder / name), "engine=ddp", "processes=1", "device=cpu", "--nodes", "2",
        f"output={folder / 'run'}", f"workload.path={folder / 'workload.py'}",
        "--image", "example/drivetrain", "--volume", f"work:{folder}", *more,
    )  # fmt: skip
    assert code == 0, errors
    return list(YAML(typ="safe", pure=True).load_all(text))


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (jobset,) = [each for each in documents if each["kind"] in ("JobSet", "TrainingRuntime")]
    spec = jobset["spec"] if jobset["kind"] == "JobSet" else jobset["spec"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["called", "trained"])
@pytest.mark.parametrize("way", ["--kubernetes", "--jobset"])
def test_the_pods_commands_run_with_what_the_controller_puts_into_their_environment(
    way: str, trains: bool, tmp_path: Path, drivetrain: Call
) -> None:
    documents = manifests(tmp_path, drivetrain, way)
    assert not [*manifest_problems(documents)]
    config = tmp_path / "config"
    config.mkdir()
    for name, text in documents[0]["data"].items():
        (config / name).write_text(text)
    port = free_port()
    shell = pod_of(documents)["containers"][0]["command"]
    assert shell[:2] == ["sh", "-c"]
    line = shell[2].replace("/etc/drivetrain", str(config)).replace(":29500", f":{port}")
    line = line.replace("run-node-0-0.run", "127.0.0.1")  # the name that the JobSet's own service answers to
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    called = f'exec {sys.executable} -m drivetrain "$@"' if trains else f'echo "$@" >> {calls}'
    (programs / "drivetrain").write_text(f"#!/bin/sh\n{called}\n")
    (programs / "drivetrain").chmod(0o755)
    ranks = []
    for number in range(2):
        injected = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "JOB_COMPLETION_INDEX": str(number),
        }
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **injected}
        ranks.append(subprocess.Popen(["sh", "-c", line], env=environment, cwd=tmp_path))
    assert [each.wait(240) for each in ranks] == [0, 0]
    if trains:
        assert json.loads((tmp_path / "run" / "report.json").read_text())["engaged"]["world_size"] == 2
        return
    first, second = sorted(calls.read_text().splitlines(), key=lambda each: each[each.index("--node-rank") :])
    assert first.startswith(f"train {config / 'run.yaml'} engine=ddp processes=1")
    assert "--resume --node-rank 0" in first
    assert "--node-rank 1" in second
    assert f"127.0.0.1:{port}" in first


def test_a_pod_has_time_to_save_and_shared_memory_and_never_restarts_alone(tmp_path: Path, drivetrain: Call) -> None:
    pod = pod_of(manifests(tmp_path, drivetrain, "--jobset", "grace_seconds=500"))
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 500
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


@pytest.mark.parametrize("way", ["--kubernetes", "--jobset"])
def test_any_name_of_a_run_file_and_any_claim_give_manifests_that_a_cluster_takes(
    way: str, tmp_path: Path, drivetrain: Call
) -> None:
    more = ("--volume", "shared-memory:/data", "--volume", "run-file:/more", "--volume", "claim-1:/last")
    documents = manifests(tmp_path, drivetrain, way, *more, name="训练 (1).yaml")
    assert not [*manifest_problems(documents)]
    assert re.fullmatch("run-1-[0-9a-f]{6}", documents[-1]["metadata"]["name"])
    pod = pod_of(documents)
    [key] = documents[0]["data"]
    assert pod["volumes"][0]["configMap"]["items"] == [{"key": key, "path": "训练 (1).yaml"}]
    assert "train '/etc/drivetrain/训练 (1).yaml'" in pod["containers"][0]["command"][2]
    claims = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"][2:]}
    places = {each["mountPath"]: claims.get(each["name"]) for each in pod["containers"][0]["volumeMounts"]}
    assert {places[each] for each in ("/data", "/more", "/last")} == {"shared-memory", "run-file", "claim-1"}
    assert places["/dev/shm"] is None


def test_a_queue_memory_and_processors_are_asked_for(tmp_path: Path, drivetrain: Call) -> None:
    more = ("--kubernetes", "--queue", "gpu", "--memory", "64Gi", "--cpus", "16", "--namespace", "team")
    documents = manifests(tmp_path, drivetrain, *more)
    job = documents[-1]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpu"}
    assert job["metadata"]["namespace"] == "team"
    assert job["spec"]["trainer"]["resourcesPerNode"]["requests"] == {"cpu": "16", "memory": "64Gi"}
    assert not [*manifest_problems(documents)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), ["--image", "--volume"]),
        (("--image", "a", "--volume", "Work:/work"), ["--volume"]),
        (("--image", "a", "--volume", "work"), ["--volume"]),
        (("--image", "a", "--volume", "w:/a", "--volume", "w:/b", "--memory", "much"), ["--volume", "--memory"]),
        (("--image", "a", "--volume", "work:/elsewhere"), ["output"]),
        (("--image", "a", "--volume", "w:/dev/shm"), ["--volume"]),
        (("--image", "a", "--volume", "w:/a", "--volume", "v:/a/"), ["--volume"]),
    ],
)
def test_what_loses_a_run_is_refused_at_once(
    given: tuple[str, ...], named: list[str], tmp_path: Path, drivetrain: Call
) -> None:
    prepared(tmp_path)
    code, out, errors = drivetrain(
        "launch", "--jobset", str(tmp_path / "run.yaml"), "device=cpu", f"output={tmp_path / 'run'}",
        f"workload.path={tmp_path / 'workload.py'}", *given,
    )  # fmt: skip
    assert code == 2
    assert not out
    assert all(f"{name}:" in errors for name in named), errors


def at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[int(key)] if key.isdigit() else document[key]
    return document


JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
PLANTED: list[
    tuple[str, str, Any, str]
] = [  # of the JobSet: where, which key, its new value (None: taken out), the field
    ("", "kind", "Jobset", "is not known here"),
    ("", "apiVersion", "jobset.x-k8s.io/v1beta1", "is not known here"),
    ("metadata", "name", "My_Run", "metadata.name"),
    ("spec", "failurePolicys", {}, "spec.failurePolicys"),
    ("spec.failurePolicy", "maxRestarts", "3", "maxRestarts"),
    ("spec.failurePolicy", "restartStrategy", "Blocking", "restartStrategy"),
    ("spec.failurePolicy.rules.0", "action", "RestartSet", "action"),
    ("spec.failurePolicy.rules.0", "onJobFailureReasons", ["Preempted"], "onJobFailureReasons"),
    ("spec", "replicatedJobs", None, "replicatedJobs"),
    (JOB, "parallelism", 1, "parallelism"),
    (JOB, "backoffLimit", 3, "backoffLimit"),
    (JOB, "completionMode", "indexed", "completionMode"),
    (f"{JOB}.podFailurePolicy.rules.0", "action", "FailJobs", "action"),
    (f"{JOB}.podFailurePolicy.rules.0.onPodConditions.0", "type", None, "onPodConditions[0].type"),
    (POD, "restartPolicy", "OnFailure", "restartPolicy"),
    (POD, "terminationGracePeriodSeconds", None, "terminationGracePeriodSeconds"),
    (f"{POD}.containers.0", "command", "drivetrain train", "command"),
    (f"{POD}.containers.0", "volumeMount", [], "volumeMount"),
    (f"{POD}.containers.0.volumeMounts.0", "name", "runfile", "no volume is called runfile"),
    (f"{POD}.volumes.0.configMap", "name", "other", "the ConfigMap other"),
    (f"{POD}.volumes.1", "name", "run-file", "two are called run-file"),
    (f"{POD}.volumes.1.emptyDir", "medium", "memory", "medium"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = prepared(tmp_path_factory.mktemp("sound"))
    given = [f"workload.path={folder / 'workload.py'}", "device=cpu", "engine=ddp", "processes=1", "output=run"]
    job = checked_for_cluster(folder / "run.yaml", given, 2)
    asked = request("image", ["work:/work"], None, None, None, None, 3, None)
    return {made.__name__: made(folder / "run.yaml", job.overrides, job.run, asked) for made in (jobset, trainjob)}


@pytest.mark.parametrize(("place", "key", "value", "named"), PLANTED)
def test_a_planted_mistake_is_found(place: str, key: str, value: Any, named: str, sound: dict[str, Any]) -> None:
    documents = copy.deepcopy(sound["jobset"])
    target = at(documents[1], place) if place else documents[1]
    if value is None:
        del target[key]
    else:
        target[key] = value
    assert any(named in str(each) for each in manifest_problems(documents))


def test_mistakes_of_a_train_job_are_found(sound: dict[str, Any]) -> None:
    for path, key, value, named in (
        ("spec.runtimeRef", "name", "other", "runtimeRef.name"),
        ("spec", "runtimeRef", None, "runtimeRef"),
        ("spec", "trainer", None, "trainer"),
        ("spec.trainer", "numProcPerNode", "auto", "numProcPerNode"),
        ("spec.trainer", "numberOfNodes", 2, "numberOfNodes"),
    ):
        documents = copy.deepcopy(sound["trainjob"])
        target = at(documents[2], path)
        if value is None:
            del target[key]
        else:
            target[key] = value
        assert any(named in str(each) for each in manifest_problems(documents)), key


@pytest.mark.parametrize("text", ["", "- a: [", "just text", "a: 1\n---\n- 2\n"])
def test_what_is_no_manifest_is_refused(text: str, tmp_path: Path, drivetrain: Call) -> None:
    (tmp_path / "job.yaml").write_text(text)
    code, _, errors = drivetrain("launch", "--validate", str(tmp_path / "job.yaml"))
    assert code == 2
    assert "Traceback" not in errors


def test_a_runs_name_becomes_a_name_that_kubernetes_takes() -> None:
    assert object_name("Qwen2.5_7B SFT") == "qwen2-5-7b-sft"
    assert re.fullmatch("run-[0-9a-f]{6}", object_name("训练"))
    assert len({object_name(each) for each in ("训练", "评估", "Übung", "übung-2")}) == 4
    assert object_name("2024_run") == "run-2024-run", "a service's name begins with a letter"
    assert len(object_name("训" + "a" * 90)) <= 40
    assert len(object_name("a" * 90)) <= 40
    long = "a-run-file-whose-name-is-long-enough-to-be-cut-seed-"
    assert object_name(f"{long}1") != object_name(f"{long}2")


def test_relative_paths_belong_to_the_folder_of_the_cluster(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["launch", "--jobset", "run.yaml", "engine=ddp", "processes=1", "--image", "i", "--volume", "work:/work"]
    code, text, reported = drivetrain(*given)
    assert code == 0
    assert text
    begin = "relative paths begin in the work folder (--work-folder, or the first volume) and have to be there: "
    assert f"{begin}workload.py" in " ".join(reported.split())
    code, _, reported = drivetrain(*given, "workload.path=code/mine.py")
    assert code == 0, "it may be in the volume alone"
    assert "code/mine.py does not exist here; the cluster has to have it" in " ".join(reported.split())
    assert f"{begin}code/mine.py" in " ".join(reported.split())


def test_pods_that_save_with_a_preempted_one_are_not_counted_as_failures(sound: dict[str, Any]) -> None:
    job = at(sound["jobset"][1], JOB)
    rules = job["podFailurePolicy"]["rules"]
    assert all(rule["action"] == "FailJob" for rule in rules), (
        "the reason that the set's rule names is PodFailurePolicy"
    )
    container = job["template"]["spec"]["containers"][0]["name"]
    assert {"containerName": container, "operator": "In", "values": [143]} in [
        rule.get("onExitCodes") for rule in rules
    ]
    for documents in sound.values():
        assert not [*manifest_problems(documents)]
