"""Comparisons made of made-up reports, so that tables and plots can be tested without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drivetrain.compare.outcome import Outcome, Status
from drivetrain.compare.result_rows import Comparison, Result, Row
from drivetrain.tracking.events import StepDone
from drivetrain.training.report import RunReport


def report(rate: float = 100.0, accuracy: float = 0.9, memory: int = 2**20, **changes: Any) -> RunReport:
    fields: dict[str, Any] = {
        "name": "made",
        "status": "completed",
        "precision": "fp32",
        "emulated": False,
        "engine": "single",
        "device": "a CPU",
        "engaged": {},
        "steps": 10,
        "skipped_steps": 0,
        "epochs": 1.0,
        "samples": 100,
        "metrics": {"accuracy": accuracy, "loss": 1 - accuracy},
        "best": {"step": 10, "metric": "accuracy", "value": accuracy},
        "seconds": 1000 / rate,
        "seconds_by_part": {"data": 0.5, "forward": 3.0, "backward": 6.0, "optimizer": 0.5},
        "samples_per_second": rate,
        "peak_memory": {"tensor": memory, "resident": 10 * memory},
        "utilisation": {"mean": 0.8, "peak": 0.9, "samples": 3, "series": [[0.5, 0.7], [1.0, 0.8], [1.5, 0.9]]},
        "flops_per_sample": None,
        "flops_per_second": None,
        "matmul_flops_per_second": None,
        "data": {},
        "checkpoint": None,
        "best_checkpoint": None,
        "versions": {},
    }
    return RunReport(**(fields | changes))


def result(folder: Path, made: RunReport | None, losses: dict[int, float] | None = None) -> Result:
    """A completed run with a curve on disk; without a report, one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    points = [
        StepDone(step, step / 10, loss, 1.0, 1e-3, None, 0, 10 * step, 5.0, 2.0)
        for step, loss in (losses or {}).items()
    ]
    lines = [json.dumps(point.as_dict()) for point in points]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    status: Status = "failed" if made is None else "completed"
    return Result(Outcome(key="k", status=status, reason="" if made else "it broke <b>badly</b> | so"), folder, made)


def comparison(folder: Path, **rows: list[RunReport | None]) -> Comparison:
    """A row a keyword, a seed a report; curves fall from 1 to 0.5, each row's a hundredth above the one before."""
    found = []
    for number, (label, reports) in enumerate(rows.items()):
        losses = {step: 0.5 + 0.5 * math.exp(-step / 5) * (1 + number / 100) for step in range(1, 11)}
        results = [result(folder / f"{label}{seed}", made, losses) for seed, made in enumerate(reports)]
        found.append(Row(label, (label,), tuple(results)))
    return Comparison(
        "made", "train", ("precision",), tuple(found), {"device_name": "a CPU", "versions": {"torch": "2"}}
    )
