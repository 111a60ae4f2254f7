"""Mixes the data sets of a language model: weights, their changes by step, bounds, an epoch's length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.config.language_data import LanguageData
from drivetrain.data.mixture import Phase, phases_of
from drivetrain.data.streams.mixture import Mix
from drivetrain.errors import Problem, UserError

TRAIN, EVALUATION, MIX = "workload.data.train", "workload.data.evaluation", "workload.data.mix"


def mix_of(data: LanguageData) -> Mix:
    """Reads the mixture off the data sets. Raises UserError with everything that does not fit together.

    Without weights each sample comes once an epoch; under interleave_under and interleave_over all weights are then 1.
    """
    schedules = _schedules(data)
    problems = [*_problems(data), *(_of_schedules(data, schedules) if schedules else [])]
    if problems:
        raise UserError(problems)
    if not schedules:
        return Mix()
    return Mix(phases_of(schedules), data.mix, [each.max_passes for each in data.train])


def distinct(names: Sequence[str]) -> list[str]:
    """Numbers repeated names: a, b, a (2)."""
    return [
        name if not (before := names[:place].count(name)) else f"{name} ({before + 1})"
        for place, name in enumerate(names)
    ]


def _schedules(data: LanguageData) -> list[dict[int, float]]:
    """Returns weights by step of each data set that has any, or of all if the way of mixing makes them equal."""
    given = [each.weight for each in data.train if each.weight is not None]
    if not given and data.mix != "concat" and len(data.train) > 1:
        return [{0: 1.0} for _ in data.train]
    return [weight if isinstance(weight, dict) else {0: weight} for weight in given]


def _problems(data: LanguageData) -> Iterator[Problem]:
    if data.evaluation_rows and not data.stream:
        why = "only a stream holds its first rows out; other data hold out evaluation_fraction"
        yield Problem("workload.data.evaluation_rows", why, "give evaluation_fraction, or stream: true")
    elif data.evaluation_rows and data.evaluation is not None:
        why = "evaluation data are given, so that no row need be held out"
        yield Problem("workload.data.evaluation_rows", why, "leave one of them out")
    if any(each.weight is not None or each.max_passes is not None for each in data.evaluation or []):
        fix = "leave it out, or give samples"
        yield Problem(EVALUATION, "evaluation data have no weight: each sample is taken once", fix)
    without = [each.path for each in data.train if each.weight is None]
    if 0 < len(without) < len(data.train):
        why = f"some data sets have a weight, but not {', '.join(without)}"
        yield Problem(TRAIN, why, "give all of them a weight, or none")
    if without and data.mix == "concat" and any(each.max_passes is not None for each in data.train):
        why = "each row comes once an epoch, so that max_passes has no effect"
        yield Problem(TRAIN, why, "give all of them a weight, or leave max_passes out")
    if data.mix != "concat" and len(data.train) < 2:
        yield Problem(MIX, f"{data.mix} mixes several data sets, and there is one", "leave it out")


def _of_schedules(data: LanguageData, schedules: list[dict[int, float]]) -> Iterator[Problem]:
    weighted = [each for each in data.train if each.weight is not None] or data.train
    for source, schedule in zip(weighted, schedules, strict=True):
        if 0 not in schedule:
            why = f"the weight of {source.path} begins at step {min(schedule, default=0)}"
            yield Problem(TRAIN, why, "state it from step 0 on: {0: ...}")
    if all(0 in schedule for schedule in schedules):
        yield from (_nothing_left(phase) for phase in phases_of(schedules) if not any(phase.weights))


def _nothing_left(phase: Phase) -> Problem:
    return Problem(TRAIN, f"from step {phase.start} on all weights are 0", "give one of them a weight")
