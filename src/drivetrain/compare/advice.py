"""Recommends in a few sentences what to choose, and why; and says what the runs do not show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from drivetrain.compare.chance import chance_level
from drivetrain.compare.equal_rows import groups
from drivetrain.compare.noise import ONE_RUN_VARIES, Difference, behind
from drivetrain.compare.quality import AS_GOOD, Quality
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.compare.statements import Statement, Value, listed, stated
from drivetrain.compare.verdict import Verdict, judged, with_rates

WORTH_NAMING = 0.05  # relative differences of memory above this are mentioned
MODEL = ("path", "config", "tokenizer", "vocabulary_size", "norm")
SAMPLES = (
    "source",
    "registry",
    "train",
    "evaluation",
    "limit_train",
    "limit_evaluation",
)  # keys of data that choose them
MOST_NAMED = 6  # rows
STAND_IN = stated("stand_in")


def advice(comparison: Comparison) -> str:
    """Returns the row to choose and the reasons; or that no row is ahead, and why not.

    A row is called better or quicker than another only beyond the noise of the runs (noise.py, quality.py).
    """
    return " ".join(map(str, sentences(comparison)))


def sentences(comparison: Comparison) -> list[Statement]:
    """Returns the advice: the recommendation, then a remark each on what the runs do not show."""
    if not any(row.status == "completed" for row in comparison.completed):
        return [stated("none_completed")]
    rows = with_rates(comparison)
    if not rows:
        return [stated("none_steady")]
    verdict = judged(comparison)
    if not verdict.considered:
        return [stated("only_stand_ins", stand_in=STAND_IN)]
    return [_sentence(comparison, verdict), *_notes(comparison, verdict, rows)]


def chosen(comparison: Comparison) -> Row | None:
    """Returns the row that `advice` chooses or, where several are level, keeps; None if none can be recommended."""
    return judged(comparison).chosen


def _sentence(comparison: Comparison, verdict: Verdict) -> Statement:
    """Returns the recommendation."""
    if len(verdict.considered) == 1:
        return stated("only_row", row=verdict.considered[0].label)
    first = verdict.chosen
    if first is None:
        return _none_chosen(verdict)
    reasons = listed("semicolon", _parts(comparison, verdict, first))
    if verdict.winner is not None:
        return stated("choose", row=first.label, reasons=reasons)
    return stated("keep", rows=_names(verdict.level), row=first.label, reasons=reasons)


def _none_chosen(verdict: Verdict) -> Statement:
    """Returns why no row can be chosen, and what speed alone shows, where it shows something."""
    reasons = listed("semicolon", list(_why_none(verdict)))
    rates, known = verdict.rates, verdict.rates.known
    if len(known) < 2:
        return stated("none_chosen", reasons=reasons)
    first = rates.quickest(known)
    others = {row: rates.difference(first, row) for row in known if row is not first}
    slower = behind(others, verdict.error_level)
    if not slower:
        return stated("none_chosen_by_noise", reasons=reasons)
    if len(slower) == len(others):
        return stated("none_chosen_but_quick", reasons=reasons, row=first.label)
    return stated("none_chosen", reasons=reasons)


def _why_none(verdict: Verdict) -> Iterator[Statement]:
    quality, at_chance = verdict.quality, verdict.at_chance
    if quality is not None and quality.tells_apart and at_chance:
        known: dict[str, Value] = {"metric": quality.metric, "level": chance_level(at_chance[0])}
        if len(at_chance) == len(verdict.considered):
            yield stated("all_at_chance", **known)
        else:
            says = "one_at_chance" if len(at_chance) == 1 else "some_at_chance"
            yield stated(says, **known, rows=_names(at_chance))
    if quality is not None and verdict.undecided:
        rows = (quality.best[0], *verdict.undecided)
        values = [stated("row_value", row=row.label, value=f"{quality.of([row]):.4f}") for row in rows]
        yield stated("noise_unknown", metric=quality.metric, values=listed("comma", values))
    if verdict.unjudged:
        yield stated("unjudged", rows=_names(verdict.unjudged))


def _parts(comparison: Comparison, verdict: Verdict, first: Row) -> list[Statement]:
    """Returns the reasons, the weightiest first."""
    reference, speed = comparison.reference, list(_speed(comparison, verdict, first))
    quality = [] if verdict.quality is None else list(_quality(verdict, verdict.quality, first))
    both = (
        quality + speed if _differing(verdict.considered) else speed + quality
    )  # no speed of another model is a reason
    memory = _memory(first, reference) if reference is not None and reference is not first else []
    return both + memory


def _speed(comparison: Comparison, verdict: Verdict, first: Row) -> Iterator[Statement]:
    reference = comparison.reference
    if first is reference and verdict.winner is first:
        yield stated("nothing_quicker")
    elif first is not reference and reference in verdict.rates.known and first in verdict.rates.known:
        difference = verdict.rates.difference(first, reference)
        yield stated("times_the_samples", **_times(difference, verdict.error_level), row=reference.label)
    if verdict.slower:
        quickest = verdict.rates.quickest(verdict.level)
        ratios = ((row, verdict.rates.difference(row, quickest).ratio) for row in verdict.slower[:MOST_NAMED])
        slower = [stated("row_times", row=row.label, ratio=f"{ratio:.2f}") for row, ratio in ratios]
        yield stated("slower", rows=listed("comma", slower))


def _times(difference: Difference, level: float) -> dict[str, Value]:
    low, high = difference.ratios(level)
    return {"ratio": f"{difference.ratio:.2f}", "low": f"{low:.2f}", "high": f"{high:.2f}"}


def _quality(verdict: Verdict, quality: Quality, first: Row) -> Iterator[Statement]:
    value, best = quality.of([first]), quality.of(quality.best)
    assert value is not None
    assert best is not None
    group = quality.group_of(first)
    own: dict[str, Value] = {"metric": quality.metric, "value": f"{value:.4f}"}
    if group is quality.best or value == best:
        yield stated("best_metric", **own)
    elif (limit := quality.limit(group)) is not None and abs(value - best) > AS_GOOD * abs(best):
        yield stated("metric_within_noise", **own, best=f"{best:.4f}", limit=f"{limit:.4f}")
    else:
        yield stated("metric_within", **own, best=f"{best:.4f}", share=f"{AS_GOOD:.0%}")
    if verdict.worse:
        worse = verdict.worse[:MOST_NAMED]
        values = [stated("row_in_brackets", row=row.label, value=f"{quality.of([row]):.4f}") for row in worse]
        yield stated("worse", metric=quality.metric, rows=listed("comma", values))


def _memory(first: Row, reference: Row) -> list[Statement]:
    kind = next(iter(first.reports[0].peak_memory), None)
    if kind is None:
        return []
    mine, other = (row.mean(lambda report: report.peak_memory.get(kind)) for row in (first, reference))
    if not mine or not other or abs(mine / other - 1) < WORTH_NAMING:
        return []
    return [stated(f"memory_{kind}", ratio=f"{mine / other:.2f}")]


def _notes(comparison: Comparison, verdict: Verdict, rows: Sequence[Row]) -> Iterator[Statement]:
    """Yields what the runs do not show, and what lies behind the figures."""
    quality = verdict.quality
    differing = _differing(rows)
    if differing:
        yield stated(f"different_{'_and_'.join(differing)}")
    if len(verdict.considered) > 1:
        yield from _untested(verdict)
    equal = [group for group in groups(verdict.considered) if len(group) > 1]
    if equal and quality is not None:
        names = listed("semicolon", [_names(group) for group in equal])
        yield stated("equal_but_for_engine", metric=quality.metric, groups=names)
    if quality is not None and verdict.at_chance and verdict.chosen is not None:
        level = chance_level(verdict.at_chance[0])
        yield stated("at_chance", metric=quality.metric, rows=_names(verdict.at_chance), level=level)
    yield from _disturbed(comparison)
    if any(report.emulated for row in rows for report in row.reports):
        yield stated("emulated")
    if any(row.is_stand_in for row in rows):
        yield stated("not_considered", stand_in=STAND_IN)


def _untested(verdict: Verdict) -> Iterator[Statement]:
    alone = [row for row in verdict.considered if len(row.reports) == 1]
    if not alone:
        return
    is_each, quality = len(alone) == len(verdict.considered), verdict.quality
    yield stated(
        "untested",
        rows=stated("each_row_is") if is_each else stated("of_rows_there_is", rows=_names(alone)),
        what=stated("speed_varies") if quality is None else stated("speed_and_metric_vary", metric=quality.metric),
        share=f"{ONE_RUN_VARIES:.0%}",
    )


def _disturbed(comparison: Comparison) -> Iterator[Statement]:
    """Yields the cells during which other programs took much of the machine."""
    found = [
        stated(
            "row_disturbed", row=row.label, seed=str(result.seed(number)), share=f"{result.outcome.foreign_share:.0%}"
        )
        for row in comparison.completed
        for number, result in enumerate(row.results)
        if result.report is not None and result.outcome.is_disturbed
    ]
    if found:
        yield stated("disturbed", runs=listed("and", found, MOST_NAMED))


def _names(rows: Sequence[Row]) -> Value:
    """Returns labels in words: a, b and c; of many the first ones and the number of the others."""
    return listed("and", [row.label for row in rows], MOST_NAMED)


def _differing(rows: Sequence[Row]) -> list[str]:
    """Returns which of models and data are not the same in all rows, as far as their run files show."""
    workloads = [config.get("workload", {}) for row in rows if (config := row.results[0].config) is not None]
    models = {
        json.dumps(
            [each.get("type"), each.get("path"), *((each.get("model") or {}).get(key) for key in MODEL)], sort_keys=True
        )
        for each in workloads
    }
    data = {json.dumps([(each.get("data") or {}).get(key) for key in SAMPLES], sort_keys=True) for each in workloads}
    return [name for name, found in (("models", models), ("data", data)) if len(found) > 1]
