"""Evaluates models on questions of multiple choice: a row a subject and model, and one over all subjects."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.compare.evaluating import located
from drivetrain.compare.evaluations import Evaluation
from drivetrain.compare.scores import Scores
from drivetrain.data.language.choice_sets import Subject, read_subjects
from drivetrain.errors import Problem, RunError, UserError
from drivetrain.inference.loading import check_source, load_model
from drivetrain.inference.multiple_choice import choose

Notify = Callable[[str], None]
ALL = "all"


def choice_evaluations(
    models: Sequence[tuple[str, Path, str]], folder: Path, shots: int, only: Sequence[str], trust: bool, notify: Notify
) -> list[Evaluation]:
    """Returns the evaluations subject by subject, each of all models in turn; last those over all subjects, and over
    each category where the folder names some.

    models: (label, place as load_model takes it, checkpoint). only: subjects, all if empty. notify: gets a line of
    progress. Raises UserError before any work, with the places that hold no model; of several models, one that fails
    later has its reason in its rows.
    """
    subjects = read_subjects(folder, only, shots)
    _check_places(models, trust)
    alone = len(models) == 1
    by_model = [_of_model_or_failed(*model, subjects, shots, trust, notify, alone) for model in models]
    return [found for same_data in zip(*by_model, strict=True) for found in same_data]


def _check_places(models: Sequence[tuple[str, Path, str]], trust: bool) -> None:
    """Raises UserError with all places that hold neither a run nor a model, and checkpoints that are not there."""
    problems: list[Problem] = []
    for label, place, checkpoint in models:
        try:
            check_source(place, checkpoint, trust)
        except UserError as error:
            problems += [located(label, each) for each in error.problems]
    if problems:
        raise UserError(list(dict.fromkeys(problems)))


def _of_model_or_failed(
    label: str,
    place: Path,
    checkpoint: str,
    subjects: Sequence[Subject],
    shots: int,
    trust: bool,
    notify: Notify,
    is_alone: bool,
) -> list[Evaluation]:
    """Returns a model's evaluations; those of one that fails have the reason, unless it is the only one."""
    try:
        return _of_model(label, place, checkpoint, subjects, shots, trust, notify)
    except (UserError, RunError) as error:
        if is_alone:
            raise
        notify(f"{label}: {error}")
        names = [*(subject.name for subject in subjects), *_groups(subjects)]
        return [Evaluation(label, name, None, {}, str(error)) for name in names]


def _of_model(
    label: str, place: Path, checkpoint: str, subjects: Sequence[Subject], shots: int, trust: bool, notify: Notify
) -> list[Evaluation]:
    try:
        model = load_model(place, checkpoint=checkpoint, trust=trust)
    except UserError as error:
        raise UserError([located(label, each) for each in error.problems]) from None
    try:
        found = []
        for subject in subjects:
            begun = time.perf_counter()
            chosen = choose(model, subject, shots)
            if chosen.cut:
                notify(
                    f"{label}: {subject.name}: the beginning of {chosen.cut} prompts is cut: the context is too short"
                )
            seconds = time.perf_counter() - begun
            found.append(_evaluation(label, subject.name, [_scores(chosen.right, subject)], seconds))
            notify(f"{label}: {subject.name}: {chosen.right.mean():.4f}")
    finally:
        model.close()
    return [*found, *_together(label, subjects, found)]


def _together(label: str, subjects: Sequence[Subject], found: Sequence[Evaluation]) -> Iterator[Evaluation]:
    for name in _groups(subjects):
        parts = [each for subject, each in zip(subjects, found, strict=True) if name in (ALL, subject.category)]
        seconds = sum(each.result["seconds"] for each in parts if each.result is not None)
        yield _evaluation(label, name, [each.scores["accuracy"] for each in parts], seconds)


def _groups(subjects: Sequence[Subject]) -> list[str]:
    """Returns the names of the rows that put subjects together: their categories, and all."""
    return [*sorted({subject.category for subject in subjects if subject.category is not None}), ALL]


def _scores(right: np.ndarray, subject: Subject) -> Scores:
    return Scores(right.astype(np.float64), np.ones(len(right)), f"{subject.name}: {len(right)} questions")


def _evaluation(label: str, data: str, parts: Sequence[Scores], seconds: float) -> Evaluation:
    sums = np.concatenate([part.sums for part in parts])
    joined = Scores(sums, np.ones_like(sums), "; ".join(part.samples for part in parts))
    result: dict[str, Any] = {
        "checkpoint": None,
        "metrics": {"accuracy": float(sums.mean())},
        "samples": len(sums),
        "seconds": seconds,
    }
    return Evaluation(label, data, result, {"accuracy": joined}, errors={"accuracy": pooled_error(parts)})


def pooled_error(parts: Sequence[Scores]) -> float | None:
    """Returns the standard error of the mean over all parts, by the variance within each (Cohen 1988, Statistical Power
    Analysis, 2.3): as lm-evaluation-harness has it for a group of tasks. None if each part is one question."""
    total = sum(len(part.sums) for part in parts)
    if total == len(parts):
        return None
    within = sum(float(((part.sums - part.sums.mean()) ** 2).sum()) for part in parts)
    return math.sqrt(within / (total - len(parts)) / total)
