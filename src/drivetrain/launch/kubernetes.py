"""Writes manifests for Kubernetes: a JobSet, or Kubeflow Trainer's TrainJob with a runtime of its own.

A pod a node, each of which starts that node's ranks. A pod that fails restarts all of them together, since one that
comes back alone meets no other: the run goes on from its newest checkpoint. A preempted pod gets SIGTERM and time to
save, and its restart is not counted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from drivetrain.launch.slurm import PORT, SAVED

CONFIG = PurePosixPath("/etc/drivetrain")  # the folder of the run file in a pod
SHARED_MEMORY = PurePosixPath("/dev/shm")
NODE = "node"  # the name of the pods' group, which Kubeflow Trainer prescribes
SPARE_SECONDS = 30  # after the time for a save, until Kubernetes ends a pod
MOST_NAME = 40  # of the 63 characters that a pod's name may have: JobSet adds group, numbers and a random end
PREEMPTED = "PodFailurePolicy"  # the reason of a job that a pod's disruption failed
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"  # by this label a TrainJob finds the pods that train
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # of an object of Kubernetes
KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")  # of a ConfigMap
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTP]i?)?")
MOST_RUN_FILE = 900_000  # bytes
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Holds what the cluster is asked for. volumes: a claim for each place in the containers. cpus, memory: of a node,
    as Kubernetes writes them ("16", "200Gi")."""

    image: str
    volumes: Mapping[str, str]
    work_folder: str
    queue: str | None = None  # of Kueue
    cpus: int | None = None
    memory: str | None = None
    restarts: int = 10
    namespace: str | None = None


def request(
    image: str | None,
    volumes: Sequence[str],
    work_folder: str | None,
    queue: str | None,
    cpus: int | None,
    memory: str | None,
    restarts: int,
    namespace: str | None,
) -> Request:
    """Returns the request of command-line options. Raises UserError with all problems.

    volumes: CLAIM:/place each. work_folder: None for the first volume's place.
    """
    found, problems = dict[str, str](), list[Problem]()
    taken = {CONFIG: "the run file", SHARED_MEMORY: "the shared memory"}
    if not image:
        problems.append(Problem("--image", "was not given", "name an image with drivetrain in it"))
    for each in volumes:
        claim, _, place = each.partition(":")
        if not NAME.fullmatch(claim) or not place.startswith("/"):
            problems.append(Problem("--volume", f"{each!r} is no CLAIM:/place", "as in --volume datasets:/data"))
        elif claim in found:
            problems.append(Problem("--volume", f"the claim {claim} is named twice", "mount a claim once"))
        elif PurePosixPath(place) in taken:
            why = f"{place} is mounted already: by {taken[PurePosixPath(place)]}"
            problems.append(Problem("--volume", why, "give each claim a place of its own"))
        else:
            found[claim] = str(PurePosixPath(place))
            taken[PurePosixPath(place)] = f"the claim {claim}"
    if not volumes:
        why = "was not given: checkpoints would be lost with the pod"
        problems.append(Problem("--volume", why, "mount a claim for runs and data: --volume CLAIM:/place"))
    if memory is not None and not QUANTITY.fullmatch(memory):
        problems.append(Problem("--memory", f"{memory!r} is no amount of memory", "as in --memory 200Gi"))
    if problems or image is None:
        raise UserError(problems)
    return Request(image, found, work_folder or next(iter(found.values())), queue, cpus, memory, restarts, namespace)


def _refuse(run: RunConfig, asked: Request, run_file: Path) -> None:
    """Raises UserError for what would lose a run, or never start a pod."""
    problems = list[Problem]()
    folder = PurePosixPath(asked.work_folder) / run.folder.as_posix()
    if not any(folder.is_relative_to(place) for place in asked.volumes.values()):
        why = f"{folder} lies in the pod, and its checkpoints are lost with it"
        problems.append(Problem("output", why, "name a place in one of the volumes (output=/place/x)"))
    if run.processes is None and run.engine.takes_processes:
        problems.append(Problem("processes", "was left out: it is what a pod asks for", "give the devices of ONE node"))
    size = run_file.stat().st_size
    if size > MOST_RUN_FILE:
        problems.append(Problem(str(run_file), f"has {size:,} bytes; a ConfigMap holds a megabyte", "shorten it"))
    if problems:
        raise UserError(problems)


def object_name(name: str) -> str:
    """Returns a run's name as Kubernetes takes names: small letters, digits and dashes, a letter first. A name that
    loses letters so, Chinese ones or those beyond the fortieth, ends in a number made of the whole name, so that no two
    runs share one."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    if name.isascii() and len(plain) <= MOST_NAME:
        return plain
    number = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=3).hexdigest()
    return f"{plain[: MOST_NAME - len(number) - 1].strip('-')}-{number}"


def jobset(run_file: Path, overrides: Sequence[str], run: RunConfig, asked: Request) -> list[Manifest]:
    """Returns a ConfigMap with the run file, and a JobSet."""
    _refuse(run, asked, run_file)
    name = object_name(run.name)
    first = f"{name}-{NODE}-0-0.{name}"
    command = _command(run_file, overrides, run, rank="$JOB_COMPLETION_INDEX", meeting=f"{first}:{PORT}")
    labels = {} if asked.queue is None else {"kueue.x-k8s.io/queue-name": asked.queue}
    found = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, asked, labels),
        "spec": _jobset_spec(name, run_file, run, asked, command, {}),
    }
    return [_run_file(name, run_file, asked), found]


def trainjob(run_file: Path, overrides: Sequence[str], run: RunConfig, asked: Request) -> list[Manifest]:
    """Returns a ConfigMap with the run file, a TrainingRuntime and a TrainJob.

    A TrainJob cannot say what happens after a failure: the runtime says it.
    """
    _refuse(run, asked, run_file)
    name = object_name(run.name)
    command = _command(run_file, overrides, run, rank="$PET_NODE_RANK", meeting="$PET_MASTER_ADDR:$PET_MASTER_PORT")
    labels = {} if asked.queue is None else {"kueue.x-k8s.io/queue-name": asked.queue}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(name, asked, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": run.nodes, "torch": {}},
            **(
                {} if asked.queue is not None else {"podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": 600}}}
            ),
            "template": {"spec": _jobset_spec(name, run_file, run, asked, command, {STEP: "trainer"})},
        },
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, asked, labels),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            # without this block no rendezvous is put into the pods' environment
            "trainer": {"numNodes": run.nodes, "numProcPerNode": 1, "resourcesPerNode": _resources(run, asked)},
        },
    }
    return [_run_file(name, run_file, asked), runtime, job]


def _metadata(name: str, asked: Request, labels: Mapping[str, str]) -> Manifest:
    place = {} if asked.namespace is None else {"namespace": asked.namespace}
    return {"name": name, **place, **({"labels": dict(labels)} if labels else {})}


def _run_file(name: str, run_file: Path, asked: Request) -> Manifest:
    text = run_file.read_text(encoding="utf-8")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, asked, {}),
        "data": {_key(run_file): text},
    }


def _key(run_file: Path) -> str:
    """Returns the run file's key in its ConfigMap: its name, where that can be one."""
    name = run_file.name
    return name if KEY.fullmatch(name) and not name.startswith("..") else "run.yaml"


def _command(run_file: Path, overrides: Sequence[str], run: RunConfig, rank: str, meeting: str) -> list[str]:
    """Returns the pods' command. exec: the run itself is the container's first process, which gets SIGTERM."""
    line = [
        "exec",
        "drivetrain",
        "train",
        shlex.quote(str(CONFIG / run_file.name)),
        *map(shlex.quote, overrides),
        "--resume",
    ]
    if run.nodes > 1:  # nodes is among the overrides
        line += ["--node-rank", f'"{rank}"', "--rendezvous", f'"{meeting}"']
    return ["sh", "-c", " ".join(line)]


def _jobset_spec(
    name: str, run_file: Path, run: RunConfig, asked: Request, command: list[str], labels: Mapping[str, str]
) -> Manifest:
    job = {
        "parallelism": run.nodes,
        "completions": run.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a failed pod fails the job at once, and the set restarts
        "podFailurePolicy": {"rules": [_disrupted(), _saved()]},
        "template": {
            "metadata": {"labels": {"drivetrain/run": name}},
            "spec": _pod(name, run_file, run, asked, command),
        },
    }
    uncounted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": [PREEMPTED],
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": asked.restarts,
            "restartStrategy": "BlockingRecreate",  # no new pod before all old ones are gone: two would write one run
            "rules": [uncounted],
        },
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {
                    **({"metadata": {"labels": dict(labels)}} if labels else {}),
                    "spec": job,
                },
            }
        ],
    }


def _disrupted() -> Manifest:
    """Returns the rule for the pod that is preempted or whose node is drained."""
    return {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _saved() -> Manifest:
    """Returns the rule for the pods of other nodes, which save with it and end the same way, perhaps before it."""
    codes = {"containerName": NODE, "operator": "In", "values": [SAVED]}
    return {"action": "FailJob", "onExitCodes": codes}


def _pod(name: str, run_file: Path, run: RunConfig, asked: Request, command: list[str]) -> Manifest:
    # numbered, since a claim may be called as another volume is
    numbered = [(f"claim-{number}", *each) for number, each in enumerate(asked.volumes.items(), start=1)]
    mounts = [{"name": volume, "mountPath": place} for volume, _, place in numbered]
    volumes = [{"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in numbered]
    file = {"name": name, "items": [{"key": _key(run_file), "path": run_file.name}]}
    return {
        "restartPolicy": "Never",  # OnFailure would restart a pod alone
        "terminationGracePeriodSeconds": run.grace_seconds + SPARE_SECONDS,
        "containers": [
            {
                "name": NODE,
                "image": asked.image,
                "command": command,
                "workingDir": asked.work_folder,
                "resources": _resources(run, asked),
                "volumeMounts": [
                    {"name": "run-file", "mountPath": str(CONFIG), "readOnly": True},
                    {"name": "shared-memory", "mountPath": str(SHARED_MEMORY)},
                    *mounts,
                ],
            }
        ],
        "volumes": [
            {"name": "run-file", "configMap": file},
            # loader workers and NCCL hand tensors over in it; a container has 64 MB of it otherwise
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *volumes,
        ],
    }


def _resources(run: RunConfig, asked: Request) -> Manifest:
    wanted: dict[str, Any] = {}
    if asked.cpus is not None:
        wanted["cpu"] = str(asked.cpus)
    if asked.memory is not None:
        wanted["memory"] = asked.memory
    gpus = {} if run.device == "cpu" else {"nvidia.com/gpu": str(run.processes or 1)}
    return {"requests": {**wanted, **gpus}, "limits": {**gpus, **({"memory": asked.memory} if asked.memory else {})}}


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """Returns the manifests as `kubectl apply -f` reads them."""
    yaml, text = YAML(), StringIO()
    yaml.explicit_start = True
    yaml.width = 4096
    yaml.dump_all([_shown(each) for each in manifests], text)
    return text.getvalue()


def _shown(value: Any) -> Any:
    """Marks texts of several lines, so that a run file stays readable."""
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value
