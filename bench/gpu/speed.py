"""The common part of four benches: cases in turns, a device's peak rate, peak memory, and time without the first
steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case

# dense bf16 FLOP/s of a device by a part of its name, from its maker's data sheet (half of the figure with sparsity);
# the first that fits. Other devices have no utilisation in the tables.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
SIDES = {"trainer": (), "trl": ("trl", "datasets", "peft"), "plain": (), "ours": ()}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device, or None where the table has none."""
    return next((rate for name, rate in PEAK_FLOPS.items() if name in device_name), None)


def in_turns(settings: Sequence[dict[str, Any]], work: str, rounds: int, seconds: float) -> list[Case]:
    """A case for each setting, round and side; the order of the sides swaps from round to round.

    settings: each with `name`, `sides` (label → what the side is given, `side` among it), and perhaps `needs` and
    `after`. What speeds of one machine drift by over minutes then meets all sides alike.
    """
    found = []
    for setting in settings:
        for number in range(rounds):
            sides = list(setting["sides"].items())
            for label, given in sides if number % 2 == 0 else reversed(sides):
                needs = (*SIDES[given["side"]], *setting.get("needs", ()), *given.get("needs", ()))
                common = {key: value for key, value in setting.items() if key not in ("sides", "needs", "after")}
                name = f"{setting['name']} | {label} | {number + 1}"
                asked = {**common, **given, "seed": number}
                found.append(
                    Case(name, work, asked, tuple(dict.fromkeys(needs)), seconds, tuple(setting.get("after", ())))
                )
    return found


class Clock:
    """Seconds between two steps, each waited for on the device."""

    def __init__(self, device: str, first: int, last: int) -> None:
        """first: number of the step after which the time begins, counted from 1; last: after which it ends."""
        self.device, self.first, self.last = device, first, last
        self.seconds: float | None = None
        self._begun = 0.0

    def step_done(self, step: int) -> None:
        if step not in (self.first, self.last):
            return
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        if step == self.first:
            self._begun = time.perf_counter()
        else:
            self.seconds = time.perf_counter() - self._begun


def measured_memory(device: str) -> Callable[[], dict[str, int]]:
    """Asks for the peak from now on: of a GPU what its allocator gave and reserved, of a CPU the process's growth."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return lambda: {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    from memory import Resident

    resident = Resident()
    return lambda: {"peak_bytes": resident.added()}


def our_memory(run: Path) -> dict[str, int]:
    """Returns the peak bytes of a run on a GPU from its report: a run resets the allocator's own peak at each point of
    its curve."""
    found = json.loads((run / "report.json").read_text())["peak_memory"]
    return {f"{'peak' if name == 'allocated' else name}_bytes": found[name] for name in ("allocated", "reserved")}


def our_steps(run: Path, first: int, last: int) -> tuple[float, float, list[float]]:
    """Of a run's record: seconds between two points of the curve, samples between them, and all losses."""
    from drivetrain.tracking.jsonl import read_events

    points = {each["step"]: each for each in read_events(run / "events.jsonl") if each["event"] == "step"}
    begun, ended = points[first], points[last]
    seconds = ended["elapsed_seconds"] - begun["elapsed_seconds"]
    return seconds, ended["samples"] - begun["samples"], [points[step]["loss"] for step in sorted(points)]


def train_ours(run: dict[str, Any], folder: Path) -> Path:
    """Trains as `drivetrain train` does, but saves nothing: the other sides save nothing either. Returns the folder."""
    from unittest.mock import patch

    import run_files

    from drivetrain.launch.job import Job
    from drivetrain.launch.prepare import checked
    from drivetrain.launch.start import start
    from drivetrain.training import preflight
    from drivetrain.training import run as story

    output = folder / "run"
    ready = checked(run_files.write_run(folder / "run.yaml", {**run, "output": str(output)}))
    with patch.object(story, "_save", lambda *_: None), patch.object(preflight, "disk", lambda *_: []):
        result = start(Job(verb="train", run=ready.run, notices=ready.notices, quiet=True))
    assert result.code == 0, "the run was interrupted"
    return output
