"""Checks manifests for Kubernetes offline: fields and types by the classes that Kubeflow publishes, and what these do
not cover: words that are known, names that refer to something, and settings that only work together.

A cluster takes many mistakes without a word: a field that it does not know is dropped, and a pod waits for ever.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from drivetrain.errors import Problem, UserError, last_line, problem
from drivetrain.launch.kubernetes import KEY, NAME, NODE

KINDS = {
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}
# the words that a field takes, by the field's name; from the API's reference, since the classes take any text
WORDS = {
    "restartPolicy": ("Never",),  # of those that exist: a failure policy of pods needs it
    "completionMode": ("Indexed",),
    "restartStrategy": ("Recreate", "BlockingRecreate"),
    "medium": ("", "Memory"),
}
ACTIONS = {
    "failurePolicy": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    "podFailurePolicy": ("FailJob", "FailIndex", "Ignore", "Count"),
}
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
MOST_NAME = 63
LEAST_GRACE = 31  # seconds; Kubernetes ends a pod after 30 where none are given


def check_manifests(path: Path) -> int:
    """Returns the number of objects in a YAML file. Raises UserError with all problems."""
    try:
        documents = [each for each in YAML(typ="safe", pure=True).load_all(path) if each is not None]
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise problem(str(path), f"cannot be read as YAML: {last_line(error)}", "give a manifest") from None
    found = [*manifest_problems(documents)]
    if found:
        raise UserError(found)
    return len(documents)


def manifest_problems(documents: Sequence[Any]) -> Iterator[Problem]:
    """Yields what a cluster would refuse, drop, or wait for without an end."""
    if not documents:
        yield Problem("manifests", "there are none", "write them with drivetrain launch --kubernetes")
    for document in documents:
        kind = _kind(document)
        if kind not in KINDS:
            known = ", ".join(f"{name} ({version})" for version, name in KINDS)
            yield Problem(str(kind[1] or "kind"), f"{kind[0]} {kind[1]} is not known here", f"known: {known}")
            continue
        yield from _fields(document, getattr(models, KINDS[kind]), kind[1])
        yield from _words(document, kind[1])
        yield from _name(document, kind[1])
    for document in documents:
        if isinstance(document, dict) and _kind(document) in KINDS:
            yield from _references(document, documents)


def _kind(document: Any) -> tuple[Any, Any]:
    return (document.get("apiVersion"), document.get("kind")) if isinstance(document, dict) else (None, None)


# --- fields and types ----------------------------------------------------------------------------------------------


def _fields(value: Any, wanted: Any, path: str) -> Iterator[Problem]:
    wanted = _bare(wanted)
    origin = typing.get_origin(wanted)
    if wanted is Any or value is None:
        return
    if origin is list:
        if not isinstance(value, list):
            yield _of_type(path, value, "a list")
            return
        for number, each in enumerate(value):
            yield from _fields(each, typing.get_args(wanted)[0], f"{path}[{number}]")
    elif origin is dict or wanted is dict:
        if not isinstance(value, dict):
            yield _of_type(path, value, "a mapping")
            return
        for key, each in value.items():
            yield from _fields(each, (typing.get_args(wanted) or (str, Any))[1], f"{path}.{key}")
    elif isinstance(wanted, type) and issubclass(wanted, BaseModel):
        yield from _object(value, wanted, path)
    elif isinstance(wanted, type) and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
        yield _of_type(path, value, wanted.__name__)


def _object(value: Any, wanted: type[BaseModel], path: str) -> Iterator[Problem]:
    if "one_of_schemas" in wanted.model_fields:  # a number or a text
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            yield _of_type(path, value, "a number or a text")
        return
    if not isinstance(value, dict):
        yield _of_type(path, value, "a mapping")
        return
    known = {field.alias or name: field for name, field in wanted.model_fields.items()}
    for key, each in value.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            yield Problem(f"{path}.{key}", "there is no such field: a cluster would drop it", fix)
        else:
            yield from _fields(each, known[key].annotation, f"{path}.{key}")
    for name, field in known.items():
        if field.is_required() and value.get(name) is None:
            yield Problem(f"{path}.{name}", "is required and was not given", "give it")


def _bare(wanted: Any) -> Any:
    """Returns a type without Optional and Annotated."""
    while True:
        origin = typing.get_origin(wanted)
        if origin is typing.Annotated:
            wanted = typing.get_args(wanted)[0]
        elif origin in (typing.Union, types.UnionType):
            wanted = next(each for each in typing.get_args(wanted) if each is not type(None))
        else:
            return wanted


def _of_type(path: str, value: Any, wanted: str) -> Problem:
    return Problem(path, f"{value!r} is not {wanted}", f"give {wanted}")


# --- words, names, references --------------------------------------------------------------------------------------


def _words(value: Any, path: str, within: str = "") -> Iterator[Problem]:
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _words(each, f"{path}[{number}]", within)
    if not isinstance(value, dict):
        return
    for key, each in value.items():
        within_key = key if key in ACTIONS else within
        allowed = ACTIONS.get(within, ()) if key == "action" else WORDS.get(key)
        if allowed and each not in allowed:
            yield Problem(f"{path}.{key}", f"{each!r} does not work here", f"known: {', '.join(map(repr, allowed))}")
        if key == "onJobFailureReasons" and isinstance(each, list):
            for reason in each:
                if reason not in REASONS:
                    yield Problem(f"{path}.{key}", f"{reason!r} is no reason", f"known: {', '.join(REASONS)}")
        yield from _words(each, f"{path}.{key}", within_key)


def _name(document: dict[str, Any], path: str) -> Iterator[Problem]:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > MOST_NAME:
        why = f"{name!r} is no name: small letters, digits and dashes, at most {MOST_NAME}"
        yield Problem(f"{path}.metadata.name", why, "rename it")
    data = document.get("data") if path == "ConfigMap" else None
    for key in data if isinstance(data, dict) else ():
        if not isinstance(key, str) or not KEY.fullmatch(key):
            why = f"{key!r} is no key: letters, digits, dots, dashes and underscores, at most 253"
            yield Problem(f"{path}.data", why, "rename it")


def _references(document: dict[str, Any], documents: Sequence[Any]) -> Iterator[Problem]:
    kind = document["kind"]
    spec = document.get("spec")
    if kind == "TrainJob":
        yield from _runtime(spec, documents)
    template = _at(spec, "template") if kind == "TrainingRuntime" else document
    jobs = [*_mappings(_at(template, "spec", "replicatedJobs"))]
    if kind in ("TrainingRuntime", "JobSet") and not jobs:
        yield Problem(f"{kind}.replicatedJobs", "there is none: nothing would run", "add the job of the nodes")
    if kind == "TrainingRuntime" and jobs and NODE not in [each.get("name") for each in jobs]:
        yield Problem(f"{kind}.replicatedJobs", f"none is called {NODE}", f"a TrainJob starts the one called {NODE}")
    for job in jobs:
        yield from _job(_at(job, "template", "spec"), f"{kind}.{job.get('name')}", documents)


def _runtime(spec: Any, documents: Sequence[Any]) -> Iterator[Problem]:
    named = _at(spec, "runtimeRef", "name")
    here = [_at(each, "metadata", "name") for each in documents if _kind(each)[1] == "TrainingRuntime"]
    if _at(spec, "runtimeRef", "kind") == "TrainingRuntime" and here and named not in here:
        yield Problem(
            "TrainJob.runtimeRef.name", f"{named!r} is not in this file", f"there is {', '.join(map(str, here))}"
        )
    if not isinstance(_at(spec, "trainer"), dict):
        yield Problem("TrainJob.trainer", "was left out: no pod learns where to meet", "give trainer with numNodes")


def _job(job: Any, path: str, documents: Sequence[Any]) -> Iterator[Problem]:
    pods, done = _at(job, "parallelism"), _at(job, "completions")
    if pods != done:
        yield Problem(
            path, f"parallelism {pods} and completions {done} differ: nodes would be missed", "make them equal"
        )
    if _at(job, "backoffLimit") != 0:
        yield Problem(f"{path}.backoffLimit", "is not 0: a pod would come back alone, and meet no other", "set it to 0")
    pod = _at(job, "template", "spec")
    given = [each.get("name") for each in _mappings(_at(pod, "volumes"))]
    for name in sorted({str(each) for each in given if given.count(each) > 1}):
        yield Problem(f"{path}.volumes", f"two are called {name}", "rename one of them, and its mounts")
    volumes = {each.get("name"): each for each in _mappings(_at(pod, "volumes"))}
    for container in _mappings(_at(pod, "containers")):
        mounted = {each.get("name") for each in _mappings(container.get("volumeMounts"))}
        for name in sorted(map(str, mounted - volumes.keys())):
            yield Problem(f"{path}.volumeMounts", f"no volume is called {name}", "add it to volumes")
        for name in sorted(map(str, volumes.keys() - mounted)):
            yield Problem(f"{path}.volumes", f"{name} is mounted nowhere", "mount it, or take it out")
    maps = {_at(each, "metadata", "name") for each in documents if _kind(each)[1] == "ConfigMap"}
    for volume in volumes.values():
        name = _at(volume, "configMap", "name")
        if name is not None and maps and name not in maps:
            yield Problem(
                f"{path}.volumes", f"the ConfigMap {name} is not in this file", f"there is {', '.join(map(str, maps))}"
            )
    grace = _at(pod, "terminationGracePeriodSeconds")
    if not isinstance(grace, int) or grace < LEAST_GRACE:
        why = f"is {grace}: a preempted run would be ended before it has saved"
        yield Problem(
            f"{path}.terminationGracePeriodSeconds", why, f"give at least {LEAST_GRACE}, longer than a save takes"
        )


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
