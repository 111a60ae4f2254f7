"""Makes micro-batches smaller after memory ran out. The global batch, and with it the curve, stays."""

from __future__ import annotations

from typing import Any

from drivetrain.config.run import RunConfig

AUTO = "auto"  # of micro_batch_size
BOUNDS = ("micro_batch_size", "micro_batch_tokens")


def reduced(run: RunConfig, samples: int, tokens: int | None = None) -> RunConfig | None:
    """Returns the run with micro-batches of at most half of `samples` a process; None if that is less than one.

    A bound in tokens is halved as well, since it may be what kept micro-batches at `samples`. tokens: the bound that
    held, where the run file gives none.
    """
    replicas = run.devices // run.world_size
    size = (samples // replicas + 1) // 2
    if samples <= replicas or (run.micro_batch_limit is not None and size >= run.micro_batch_limit):
        return None
    held = tokens or run.micro_batch_tokens
    return run.model_copy(update={"micro_batch_size": size, "micro_batch_tokens": held and max(1, held // 2)})


def reduction(given: RunConfig, now: RunConfig) -> dict[str, Any] | None:
    """Returns what a checkpoint keeps of a reduction, so that a resumed run divides batches alike. None if nothing was
    reduced."""
    of, to = ({name: getattr(run, name) for name in BOUNDS} for run in (given, now))
    return None if of == to else {"of": of, "to": to}


def again(run: RunConfig, kept: dict[str, Any] | None) -> RunConfig:
    """Returns the run with the reduction of its earlier part; unchanged if its run file now bounds micro-batches in
    another way."""
    if kept is None or kept["of"] != {name: getattr(run, name) for name in BOUNDS}:
        return run
    return run.model_copy(update=kept["to"])
