"""The curve of a run as columns, read on from where it was read last.

A resumed run rewrites its file without the points past its first step; the file is then another one (its inode), and
a reader begins anew.
"""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from typing import Any

from drivetrain.runtime.strict_json import plain
from drivetrain.tracking.events import MOST_SHARES
from drivetrain.tracking.jsonl import parsed_lines

PARTS = (  # of a training's time
    *("data", "answers", "forward", "backward", "forward_backward", "optimizer"),
    *("statistics", "evaluation", "samples", "save"),
)
COLUMNS = {  # column → field of a step
    "step": "step",
    "epoch": "epoch",
    "samples": "samples",
    "tokens": "tokens",
    "seconds": "elapsed_seconds",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "samples_per_second": "samples_per_second",
    "utilisation": "utilisation",
}
SHARES = {f"time_{part}": part for part in PARTS}
MEASURED = (*COLUMNS, "memory", *SHARES)
OF_ANSWERS = ("reward", "groups_without_signal")  # means of a batch of answers that are learned from
NAN = float("nan")
MOST_MARKS = 2000
IN_WORDS = ("run_started", "warning", "trouble", "run_finished")  # events that say something in words
MOST_IN_WORDS = 200
BLOCK = 1 << 22  # bytes that are read at once


class Curve:
    """The curve of one run as far as it was read."""

    def __init__(self, file: Path, inode: int) -> None:
        self._file, self.inode, self.end = file, inode, 0
        self.columns = {name: array("d") for name in MEASURED}  # and, of several ranks, utilisation_0, ...
        self._by_rank: list[array[float]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.rollouts: list[dict[str, Any]] = []  # step and OF_ANSWERS of each batch of answers
        self.marks: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self.num_marks = 0  # of all time: the first ones are dropped
        self.in_words: deque[dict[str, Any]] = deque(maxlen=MOST_IN_WORDS)

    def read_on(self) -> None:
        """Reads the lines that came since; one that is not whole yet is left."""
        with self._file.open("rb") as opened:
            opened.seek(self.end)
            rest = b""
            while block := opened.read(BLOCK):
                lines = rest + block
                whole = lines.rfind(b"\n") + 1
                for event in parsed_lines(lines[:whole].splitlines()):
                    self._take(event)
                self.end += whole
                rest = lines[whole:]

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in IN_WORDS:
            self.in_words.append(plain(event))
        if kind == "step":
            self._add(event)
        elif kind == "evaluation":
            newest = {name: (self.columns[name] or [None])[-1] for name in ("epoch", "samples", "tokens", "seconds")}
            at = {name: value for name, value in newest.items() if value == value}  # no NaN
            fields = {name: event[name] for name in ("step", "metrics", "best")}
            self.evaluations.append({**at, **fields})
            if event["best"]:
                self._mark(event["step"], "best", "best evaluation so far")
        elif kind == "rollout":
            kept = {name: event["metrics"][name] for name in OF_ANSWERS if name in event["metrics"]}
            self.rollouts.append({"step": event["step"], "metrics": kept})
        elif kind == "checkpoint":
            self._mark(event["step"], "checkpoint", Path(event["path"]).name)
        elif kind == "run_started" and event["first_step"]:
            self._mark(event["first_step"], "restart", f"went on from step {event['first_step']}")
        elif kind == "trouble":
            self._mark(event["step"], "trouble", event["message"])
        elif kind == "warning":
            self._mark(int(self.columns["step"][-1]) if self.columns["step"] else 0, "warning", event["message"])

    def _add(self, event: dict[str, Any]) -> None:
        """Adds a point to every column. memory: bytes, of the kind that is largest; time_...: the part's share of the
        time since the point before."""
        columns = self.columns
        shares = event.get("utilisation_by_rank", [])[:MOST_SHARES]
        while len(self._by_rank) < len(shares):
            name = f"utilisation_{len(self._by_rank)}"
            self._by_rank.append(columns.setdefault(name, array("d", [NAN] * len(columns["step"]))))
        for rank, column in enumerate(self._by_rank):
            column.append(shares[rank] if rank < len(shares) else NAN)
        for name, key in COLUMNS.items():
            value = event.get(key)
            columns[name].append(NAN if value is None else value)
        columns["memory"].append(max(event.get("memory", {}).values(), default=NAN))
        seconds = event.get("seconds_by_part", {})
        total = sum(seconds.values())
        for name, part in SHARES.items():
            columns[name].append(seconds[part] / total if part in seconds and total else NAN)

    def _mark(self, step: int, kind: str, text: str) -> None:
        self.marks.append({"step": step, "kind": kind, "text": text})
        self.num_marks += 1

    def marks_after(self, seen: int) -> list[dict[str, Any]]:
        """Returns the marks that came after the first `seen` ones, as far as they are kept."""
        return list(self.marks)[max(0, seen - (self.num_marks - len(self.marks))) :]


def thinned(values: array[float], most: int) -> list[int]:
    """Returns places of at most about `most` points that look like all of them: the lowest and the highest of each
    stretch, NaN included, and the first and the last."""
    size = len(values)
    if size <= most:
        return list(range(size))
    stretches = max(1, most // 2)
    found = {0, size - 1}
    for number in range(stretches):
        first, last = number * size // stretches, (number + 1) * size // stretches
        own = range(first, last)
        found |= {min(own, key=values.__getitem__), max(own, key=values.__getitem__)}
    return sorted(found)
