"""Makes pairs of rows that hold several answers to a prompt, each with a score or a rank: of the best and the worst, or
of every two that differ in it.

As UltraFeedback has them, whose answers are objects, `{"response": ..., "overall_score": ...}`; or as two lists, of the
answers and of their scores. A rank is 1 for the best, as in Nectar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from drivetrain.data.language.row_schema import RowError, RowSchema, finite, kind

COMPLETIONS = ("completions", "responses", "answers")  # usual names of the column
CONTENTS = ("response", "completion", "text", "answer")  # of an answer's fields
SCORES, RANKS = ("overall_score", "score", "rating"), ("rank",)
PROMPTS = ("prompt", "instruction")
BESIDE = {
    "scores": 1.0,
    "ranks": -1.0,
}  # columns beside that of the answers → the sign of what is higher for the better


def scored_schema(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> RowSchema | None:
    """Returns how rows of scored answers are read, as their keys show; None if they hold none. columns: names known
    already."""
    keys = {key for row in rows for key in row}
    column = columns.get("completions") or next((name for name in COMPLETIONS if name in keys), None)
    if column is None or not any(isinstance(row.get(column), list) for row in rows):
        return None
    inside = {key for row in rows for each in _list(row.get(column)) if isinstance(each, Mapping) for key in each}
    if not {*SCORES, *RANKS} & inside and not any(columns.get(name, name) in keys for name in BESIDE):
        return None
    prompt = {name: name for name in PROMPTS if name in keys}
    named = {"prompt": next(iter(prompt.values()), "prompt"), "completions": column, **columns}
    return RowSchema("trl", named, ranking=True, pairs=True, scored=True)


def pairs_of_scored(row: Mapping[str, Any], form: RowSchema) -> Iterator[Mapping[str, Any]]:
    """Yields the row with a better answer as `chosen` and a worse one as `rejected`, as `form.unscored` reads it: the
    best and the worst, or all pairs (`form.every_pair`), the best answer's first. Answers with the same score make no
    pair. Raises RowError if there are no two answers with different scores."""
    column = form.required["completions"]
    given = row.get(column)
    if not isinstance(given, list):
        raise RowError(f"{column} is {kind(given)}, not a list of answers")
    scores = _scores(row, given, form)
    if len(set(scores)) < 2:
        why = "the same score" if len(scores) > 1 else "nothing beside it to compare with"
        raise RowError(f"{column}: {len(scores)} answers with {why}: there is nothing to prefer")
    names = form.unscored.required
    ends = [(scores.index(max(scores)), scores.index(min(scores)))]
    for better, worse in _all_pairs(scores) if form.every_pair else ends:
        yield {**row, names["chosen"]: _content(given[better]), names["rejected"]: _content(given[worse])}


def _all_pairs(scores: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yields (better, worse) of all answers whose scores differ."""
    ranked = sorted(range(len(scores)), key=lambda number: -scores[number])
    return ((better, worse) for better, worse in combinations(ranked, 2) if scores[better] != scores[worse])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _scores(row: Mapping[str, Any], answers: Sequence[Any], form: RowSchema) -> list[float]:
    """Returns a number for each answer, higher for the better one."""
    beside = {name: row.get(form.columns.get(name, name)) for name in BESIDE}
    listed = {name: given for name, given in beside.items() if isinstance(given, list)}
    for name, values in listed.items():
        if len(values) != len(answers):
            raise RowError(f"it has {len(answers)} answers and {len(values)} {name}")
    name = next(iter(listed), "scores")
    values = listed.get(name, [None] * len(answers))
    return [_score(each, value, name, n) for n, (each, value) in enumerate(zip(answers, values, strict=True), start=1)]


def _score(answer: Any, beside: Any, name: str, number: int) -> float:
    """beside: the answer's value in the column `name`, which is read where the answer itself has none."""
    fields = answer if isinstance(answer, Mapping) else {}
    own = next((each for each in (*SCORES, *RANKS) if fields.get(each) is not None), None)
    if own is not None:
        name, beside = "ranks" if own in RANKS else "scores", fields[own]
    found = finite(beside)
    if found is None:
        raise RowError(f"the {name[:-1]} of answer {number} is {str(beside)[:40]!r}, no finite number")
    return BESIDE[name] * found


def _content(answer: Any) -> Any:
    """Returns the answer's text, or its messages."""
    name = next((each for each in CONTENTS if isinstance(answer, Mapping) and each in answer), None)
    return answer if name is None else answer[name]
