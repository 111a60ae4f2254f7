"""Makes pairs of rows that hold several answers to a prompt, each with a score: the best is preferred to the worst.

As UltraFeedback has them, whose answers are objects, `{"response": ..., "overall_score": ...}`; or as two lists, of the
answers and of their scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.data.language.row_schema import RowError, RowSchema, kind

COMPLETIONS = ("completions", "responses", "answers")  # usual names of the column
CONTENTS, SCORES = ("response", "completion", "text"), ("overall_score", "score", "rating")  # of an answer's fields
PROMPTS = ("prompt", "instruction")


def scored_schema(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> RowSchema | None:
    """Returns how rows of scored answers are read, as their keys show; None if they hold none. columns: names known
    already."""
    keys = {key for row in rows for key in row}
    column = columns.get("completions") or next((name for name in COMPLETIONS if name in keys), None)
    if column is None or not any(isinstance(row.get(column), list) for row in rows):
        return None
    inside = {key for row in rows for each in _list(row.get(column)) if isinstance(each, Mapping) for key in each}
    if not set(SCORES) & inside and columns.get("scores", "scores") not in keys:
        return None
    prompt = {name: name for name in PROMPTS if name in keys}
    named = {"prompt": next(iter(prompt.values()), "prompt"), "completions": column, **columns}
    return RowSchema("trl", named, ranking=True, pairs=True, scored=True)


def with_best_and_worst(row: Mapping[str, Any], form: RowSchema) -> tuple[Mapping[str, Any], RowSchema]:
    """Returns the row with its best answer as `chosen` and its worst as `rejected`, and the schema that reads it.
    Raises RowError if it has no two answers with different scores."""
    column = form.required["completions"]
    given = row.get(column)
    if not isinstance(given, list):
        raise RowError(f"{column} is {kind(given)}, not a list of answers")
    beside = row.get(form.columns.get("scores", "scores"))
    if isinstance(beside, list) and len(beside) != len(given):
        raise RowError(f"it has {len(given)} answers and {len(beside)} scores")
    scores = [_score(each, beside[n] if isinstance(beside, list) else None, n) for n, each in enumerate(given)]
    if len(set(scores)) < 2:
        why = "the same score" if len(scores) > 1 else "nothing beside it to compare with"
        raise RowError(f"{column}: {len(scores)} answers with {why}: there is nothing to prefer")
    best, worst = (given[scores.index(pick(scores))] for pick in (max, min))
    plain = form.unscored
    sides = {plain.required["chosen"]: _content(best), plain.required["rejected"]: _content(worst)}
    return {**row, **sides}, plain


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _score(answer: Any, beside: Any, number: int) -> float:
    fields = answer if isinstance(answer, Mapping) else {}
    name = next((each for each in SCORES if fields.get(each) is not None), None)
    value = beside if name is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"the score of answer {number + 1} is {str(value)[:40]!r}, no finite number")
    return float(value)


def _content(answer: Any) -> Any:
    """Returns the answer's text, or its messages."""
    name = next((each for each in CONTENTS if isinstance(answer, Mapping) and each in answer), None)
    return answer if name is None else answer[name]
