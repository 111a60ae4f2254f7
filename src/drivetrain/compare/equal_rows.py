"""Finds the rows whose results are equal by promise: what differs between them is only how a run is spread, kept in
memory or recorded, so that their metrics cannot tell them apart (`drivetrain prove` checks that on the run itself)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drivetrain.compare.result_rows import Row

PLACEMENT = frozenset(
    {
        *(
            "name",
            "output",
            "mirror",
            "tracking",
            "checkpoints",
            "loader",
            "device",
            "allocator",
            "compile",
            "deterministic",
        ),
        *("nodes", "min_nodes", "max_restarts", "grace_seconds", "hang_seconds", "memory_limit"),
        *("micro_batch_size", "micro_batch_tokens", "recompute", "offload_activations"),
    }
)
SPREAD = frozenset({"engine", "processes"})


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows, those together whose results are equal by promise. A row without a run file is alone."""
    found: dict[str, list[Row]] = {}
    for number, row in enumerate(rows):
        config = row.results[0].config
        found.setdefault(str(number) if config is None else _result_keys(config), []).append(row)
    return list(found.values())


def _result_keys(config: dict[str, Any]) -> str:
    """Returns the part of a run file that decides results. Engine and processes are part of it where the batch is
    stated for one device."""
    left_out = PLACEMENT if config.get("batch_size") is None else PLACEMENT | SPREAD
    return json.dumps({key: value for key, value in config.items() if key not in left_out}, sort_keys=True)
