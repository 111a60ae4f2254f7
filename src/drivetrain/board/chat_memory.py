"""Checks before a chat begins that its weights have room: in the memory that is free, or on the largest GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from drivetrain.board.board import Board
from drivetrain.board.devices import gpus
from drivetrain.board.run_summary import config_of
from drivetrain.run_page.record import json_of
from drivetrain.web.refusals import Refusal

WHOLE = 4  # bytes of a weight: chats hold a run's weights in fp32
PACKED = {
    "nf4": 0.5,
    "int4": 0.5,
    "int8": 1.0,
    "int8-torchao": 1.0,
}  # of a weight of a base that the run keeps in codes


def refuse_without_room(board: Board, run: str, loading: Sequence[str]) -> None:
    """Raises Refusal (409) where the weights of a run are larger than the memory that a chat would find. loading: runs
    of chats whose weights are on their way into it. A run that says nothing of its size is let through: its process
    checks again, with the weights before it."""
    needed = weights_bytes(board.runs.folder(run))
    if needed is None:
        return
    on_gpu = board.machine.machine().device == "cuda"
    if on_gpu:
        room = max((each.memory_bytes for each in gpus()), default=None)
    else:
        room = psutil.virtual_memory().available - sum(weights_bytes(board.runs.folder(each)) or 0 for each in loading)
    if room is not None and needed > room:
        where = "the largest GPU here has" if on_gpu else "this machine has free"
        why = f"the weights of {run} take {_gib(needed)}; {where} {_gib(max(room, 0))}"
        fix = "unload another chat, or end what else works"
        raise Refusal(409, f"{why}: {fix if not on_gpu else 'serve an export of it on several'}", "no_memory")


def weights_bytes(folder: Path) -> int | None:
    """Returns the bytes of a run's weights in a chat, by its report; None for a run without one."""
    engaged = (json_of(folder / "report.json") or {}).get("engaged")
    count = engaged.get("global_parameters") if isinstance(engaged, dict) else None
    if not isinstance(count, int):
        return None
    return int(count * PACKED.get(_format(config_of(folder)), WHOLE))


def _format(run: dict[str, Any]) -> str:
    base = run.get("quantised_base")
    return str(base.get("format", "nf4") if isinstance(base, dict) else base)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
