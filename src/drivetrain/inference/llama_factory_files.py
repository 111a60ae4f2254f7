"""The files that LLaMA-Factory's predict leaves, from a file of predictions, so that scripts that read them go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain.config.generation_metrics import EXTRA
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from drivetrain.generation.similarity import PACKAGES, similarity
from drivetrain.runtime.atomic_file import replacing, writing

FIELD = "--llama-factory"
ROWS = "predictions.jsonl"  # ours, where no other file was named
THEN = "give another folder"
PREDICTIONS, RESULTS = "generated_predictions.jsonl", "predict_results.json"


def check_request(run: RunConfig, output: Path, has_texts: bool) -> None:
    """Raises UserError if the files cannot be made of this run's predictions."""
    problems = []
    if not run.workload.answers_prompts and not has_texts:
        why = "this run lets its model answer no prompts, so that there is nothing to write"
        problems.append(Problem(FIELD, why, "add workload.generate={} to a language model"))
    if output.suffix != ".jsonl":
        problems.append(Problem(FIELD, f"its files are made of {output}, which is no .jsonl", "give a .jsonl file"))
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        why = f"its scores need {' and '.join(missing)}, which is not installed"
        problems.append(Problem(FIELD, why, f"pip install 'drivetrain[{EXTRA}]'"))
    if problems:
        raise UserError(problems)


def write_files(predictions: Path, folder: Path, run: RunConfig, seconds: float) -> dict[str, float]:
    """Writes generated_predictions.jsonl and predict_results.json, and returns the content of the latter.

    predictions: JSON Lines of `drivetrain predict`, read a row at a time. seconds: how long they took.
    """
    pairs: list[tuple[str, str]] = []
    count = 0
    file = folder / PREDICTIONS
    folder.mkdir(parents=True, exist_ok=True)
    with writing(file, THEN), replacing(file) as aside, aside.open("w", encoding="utf-8") as out:
        for row in _answered(predictions):
            count += 1
            line = {"prompt": row["prompt"], "predict": row["answer"], "label": row["reference"] or ""}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            pairs += [] if row["reference"] is None else [(row["answer"], row["reference"])]
    steps = math.ceil(count / (run.evaluation_batch * run.world_size))
    scores = similarity([answer for answer, _ in pairs], [reference for _, reference in pairs])
    results = {
        **{f"predict_{name}": value for name, value in scores.items()},
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round(count / seconds, 3),
        "predict_steps_per_second": round(steps / seconds, 3),
    }
    with writing(folder / RESULTS, THEN), replacing(folder / RESULTS) as aside:
        aside.write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")
    return results


def _answered(predictions: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows that have an answer: a sample may have no prompt."""
    with predictions.open(encoding="utf-8") as lines:
        yield from (row for row in map(json.loads, lines) if row.get("answer") is not None)
