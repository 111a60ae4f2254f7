"""The connection to a Ray cluster: how it is made, what is asked of it for a run, and how its actors answer.

Shared by `train --ray`, whose ranks it places, and `compare --ray`, whose cells it places.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from drivetrain.config.run import RunConfig
from drivetrain.errors import RankError, RunError

PLACE_SECONDS = 600  # in which the cluster has to have room; it may have to start machines
LOOK_SECONDS = 20  # in which an actor answers; one that does not is lost


@contextmanager
def connected(address: str, namespace: str | None = None) -> Iterator[None]:
    """Connects to a cluster while the block runs. address: "auto" for the one that this machine belongs to. namespace:
    of another process of ours, whose placement groups are found by name."""
    if ray.is_initialized():  # by the caller, who also ends it
        yield
        return
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        why = f"no Ray cluster answers at {address} ({first}): start one with `ray start --head`, or name another"
        raise RunError(why) from error
    try:
        yield
    finally:
        ray.shutdown()


def needs(run: RunConfig, devices: int = 1) -> dict[str, float]:
    """Returns what so many devices of a run are on a cluster: a core each, and a GPU. Ray gives a process as many
    threads as it has cores, unless OMP_NUM_THREADS is set."""
    return {name: float(devices) for name in (("CPU",) if run.device == "cpu" else ("CPU", "GPU"))}


def as_options(needed: Mapping[str, float]) -> dict[str, float]:
    """Returns the same as the options of a task or an actor."""
    return {f"num_{name.lower()}s": value for name, value in needed.items()}


def got(call: Any, seconds: float) -> Any:
    """Returns the answer to a call. Raises RunError if none comes in time."""
    try:
        return ray.get(call, timeout=seconds)
    except GetTimeoutError:
        free = as_text(ray.available_resources())
        raise RunError(f"the Ray cluster has not answered within {seconds:g} s; free there: {free}") from None


def answers(calls: Sequence[Any]) -> list[Any]:
    """Returns the answers of actors, or a RankError for each that is lost."""
    found = []
    until = time.monotonic() + LOOK_SECONDS
    for call in calls:
        try:
            found.append(ray.get(call, timeout=max(0.1, until - time.monotonic())))
        except RayError as error:
            found.append(RankError(first_line(error)))
    return found


def no_room(bundles: Sequence[Mapping[str, float]]) -> RunError:
    """Returns the error of a run whose machines the cluster has not found in time."""
    return RunError(
        f"the cluster has no room within {PLACE_SECONDS} s for {len(bundles)} machine{'s' * (len(bundles) > 1)} with "
        f"{as_text(bundles[0])} each; it has {as_text(ray.cluster_resources())} in all: give fewer processes or nodes, "
        "or wait until other work has ended"
    )


def as_text(resources: Mapping[str, float]) -> str:
    """Returns the devices and cores among the resources of a cluster."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "none"


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
