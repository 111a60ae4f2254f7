"""A run with smaller micro-batches, since memory ran out. The global batch, and with it the curve, stays."""

from __future__ import annotations

from typing import Any

from drivetrain.config.run import RunConfig

AUTO = "auto"  # of micro_batch_size
BOUNDS = ("micro_batch_size", "micro_batch_tokens")


def reduced(run: RunConfig, samples: int) -> RunConfig | None:
    """The run with half of `samples` as the most that a process has in a micro-batch; None if that is less than one.

    A bound in tokens is halved as well: it may be what held micro-batches at `samples`.
    """
    replicas = run.devices // run.world_size
    size = (samples // replicas + 1) // 2
    if samples <= replicas or (run.micro_batch_limit is not None and size >= run.micro_batch_limit):
        return None
    tokens = run.micro_batch_tokens and max(1, run.micro_batch_tokens // 2)
    return run.model_copy(update={"micro_batch_size": size, "micro_batch_tokens": tokens})


def reduction(given: RunConfig, now: RunConfig) -> dict[str, Any] | None:
    """What is kept of it, for a run that goes on to cut the same. None if it is no reduction."""
    of, to = ({name: getattr(run, name) for name in BOUNDS} for run in (given, now))
    return None if of == to else {"of": of, "to": to}


def again(run: RunConfig, kept: dict[str, Any] | None) -> RunConfig:
    """The run as a former part of it went on; as it is where its run file bounds micro-batches in another way now."""
    if kept is None or kept["of"] != {name: getattr(run, name) for name in BOUNDS}:
        return run
    return run.model_copy(update=kept["to"])
