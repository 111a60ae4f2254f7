"""Recommends in a few sentences what to choose, and why; and says what the runs do not show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from drivetrain.compare.chance import chance_level
from drivetrain.compare.equal_rows import groups
from drivetrain.compare.noise import ONE_RUN_VARIES, Difference, behind
from drivetrain.compare.quality import AS_GOOD, Quality
from drivetrain.compare.result_rows import Comparison, Row
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
STAND_IN = "dp on a CPU, whose replicas are threads; its speed does not predict a GPU's"


def advice(comparison: Comparison) -> str:
    """Returns the row to choose and the reasons; or that no row is ahead, and why not.

    A row is called better or quicker than another only beyond the noise of the runs (noise.py, quality.py).
    """
    return " ".join(sentences(comparison))


def sentences(comparison: Comparison) -> list[str]:
    """Returns the advice: the recommendation, then a remark each on what the runs do not show."""
    if not any(row.status == "completed" for row in comparison.completed):
        return ["No row can be recommended: none completed on every seed."]
    rows = with_rates(comparison)
    if not rows:
        return ["No row can be recommended: none ran for enough steps to have a steady rate (samples/s)."]
    verdict = judged(comparison)
    if not verdict.considered:
        return [f"No row can be recommended: {STAND_IN}."]
    return [_sentence(comparison, verdict), *_notes(comparison, verdict, rows)]


def chosen(comparison: Comparison) -> Row | None:
    """Returns the row that `advice` chooses or, where several are level, keeps; None if none can be recommended."""
    return judged(comparison).chosen


def _sentence(comparison: Comparison, verdict: Verdict) -> str:
    """Returns the recommendation."""
    if len(verdict.considered) == 1:
        return f"Choose {verdict.considered[0].label}: the only row that can be considered."
    first = verdict.chosen
    if first is None:
        return f"No row can be chosen: {_why_none(verdict)}."
    parts = _parts(comparison, verdict, first)
    if verdict.winner is not None:
        return f"Choose {first.label}: {'; '.join(parts)}."
    level = f"No winner: {_names(verdict.level)} are equally quick but for noise."
    return f"{level} Keep {first.label}, the first of them: {'; '.join(parts)}."


def _why_none(verdict: Verdict) -> str:
    quality, reasons = verdict.quality, []
    if quality is not None and quality.tells_apart and verdict.at_chance:
        row = verdict.at_chance[0]
        who = (
            "every row is" if len(verdict.at_chance) == len(verdict.considered) else f"{_names(verdict.at_chance)} are"
        )
        reasons.append(
            f"by {quality.metric} {who} at chance ({chance_level(row)}): nothing was learned that tells them apart"
        )
    if quality is not None and verdict.undecided:
        values = ", ".join(f"{row.label} {quality.of([row]):.4f}" for row in (quality.best[0], *verdict.undecided))
        reasons.append(f"how far {quality.metric} varies by chance is not known ({values})")
    if verdict.unjudged:
        reasons.append(
            f"other programs disturbed the runs of {_names(verdict.unjudged)}, so that its speed is not known"
        )
    return "; ".join(reasons) + _by_speed(verdict)


def _by_speed(verdict: Verdict) -> str:
    """Returns what speed alone shows, where it shows something."""
    rates, known = verdict.rates, verdict.rates.known
    if len(known) < 2:
        return ""
    first = rates.quickest(known)
    others = {row: rates.difference(first, row) for row in known if row is not first}
    slower = behind(others, verdict.error_level)
    if not slower:
        return ". Their speeds differ by no more than noise"
    return f". {first.label} is the quickest beyond noise" if len(slower) == len(others) else ""


def _parts(comparison: Comparison, verdict: Verdict, first: Row) -> list[str]:
    """Returns the reasons, the weightiest first."""
    reference, speed = comparison.reference, list(_speed(comparison, verdict, first))
    quality = [] if verdict.quality is None else list(_quality(verdict, verdict.quality, first))
    both = (
        quality + speed if _differing(verdict.considered) else speed + quality
    )  # no speed of another model is a reason
    memory = _memory(first, reference) if reference is not None and reference is not first else []
    return both + memory


def _speed(comparison: Comparison, verdict: Verdict, first: Row) -> Iterator[str]:
    reference = comparison.reference
    if first is reference and verdict.winner is first:
        yield "nothing as good is quicker"
    elif first is not reference and reference in verdict.rates.known and first in verdict.rates.known:
        difference = verdict.rates.difference(first, reference)
        yield f"{_times(difference, verdict.error_level)} the samples a second of {reference.label}"
    if verdict.slower:
        quickest = verdict.rates.quickest(verdict.level)
        behind = (f"{row.label} ({verdict.rates.difference(row, quickest).ratio:.2f} times)" for row in verdict.slower)
        yield f"slower: {', '.join(list(behind)[:MOST_NAMED])}"


def _times(difference: Difference, level: float) -> str:
    low, high = difference.ratios(level)
    return f"{difference.ratio:.2f} times ({low:.2f} to {high:.2f} with noise)"


def _quality(verdict: Verdict, quality: Quality, first: Row) -> Iterator[str]:
    value, best = quality.of([first]), quality.of(quality.best)
    assert value is not None
    assert best is not None
    group = quality.group_of(first)
    named = f"{quality.metric} {value:.4f}"
    if group is quality.best or value == best:
        yield named
    elif (limit := quality.limit(group)) is not None and abs(value - best) > AS_GOOD * abs(best):
        yield f"{named}; noise alone makes differences from the best ({best:.4f}) of up to {limit:.4f}"
    else:
        yield f"{named}, within {AS_GOOD:.0%} of the best ({best:.4f})"
    if verdict.worse:
        values = (f"{row.label} ({quality.of([row]):.4f})" for row in verdict.worse)
        yield f"worse by {quality.metric}: {', '.join(list(values)[:MOST_NAMED])}"


def _memory(first: Row, reference: Row) -> list[str]:
    kind = next(iter(first.reports[0].peak_memory), None)
    if kind is None:
        return []
    mine, other = (row.mean(lambda report: report.peak_memory.get(kind)) for row in (first, reference))
    if not mine or not other or abs(mine / other - 1) < WORTH_NAMING:
        return []
    return [f"{mine / other:.2f} times its peak {kind} memory"]


def _notes(comparison: Comparison, verdict: Verdict, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what the runs do not show, and what lies behind the figures."""
    differing = _differing(rows)
    if differing:
        yield f"The rows have different {' and '.join(differing)}: their speeds compare those, not settings."
    if len(verdict.considered) > 1:
        yield from _untested(verdict)
    equal = [group for group in groups(verdict.considered) if len(group) > 1]
    if equal and verdict.quality is not None:
        names = "; ".join(_names(group) for group in equal)
        metric = verdict.quality.metric
        yield f"Equal but for the engine, so {metric} does not choose between {names} (prove checks it)."
    if verdict.quality is not None and verdict.at_chance and verdict.chosen is not None:
        level = chance_level(verdict.at_chance[0])
        yield f"At chance by {verdict.quality.metric}: {_names(verdict.at_chance)} ({level})."
    yield from _disturbed(comparison)
    if any(report.emulated for row in rows for report in row.reports):
        yield "Rows marked emulated have the accuracy of 16-bit hardware but not its time and memory."
    if any(row.is_stand_in for row in rows):
        yield f"Not considered: {STAND_IN}."


def _untested(verdict: Verdict) -> Iterator[str]:
    alone = [row for row in verdict.considered if len(row.reports) == 1]
    if not alone:
        return
    who = "Each row is" if len(alone) == len(verdict.considered) else f"Of {_names(alone)} there is"
    what = f"speed and {verdict.quality.metric} vary" if verdict.quality is not None else "speed varies"
    yield (
        f"{who} one run of one seed: how {what} from run to run was not tested (rates are taken to vary by "
        f"{ONE_RUN_VARIES:.0%}); --seeds 5 tests it."
    )


def _disturbed(comparison: Comparison) -> Iterator[str]:
    """Yields the cells during which other programs took much of the machine."""
    found = [
        f"{row.label} (seed {result.seed(number)}: {result.outcome.foreign_share:.0%})"
        for row in comparison.completed
        for number, result in enumerate(row.results)
        if result.report is not None and result.outcome.is_disturbed
    ]
    if found:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        named = ", ".join(found[:MOST_NAMED]) + more
        yield f"Other programs took processor time during {named}: these rates mean little."


def _names(rows: Sequence[Row]) -> str:
    """Returns labels in words: a, b and c; of many the first ones and the number of the others."""
    labels = [row.label for row in rows[:MOST_NAMED]]
    if len(rows) > MOST_NAMED:
        labels.append(f"{len(rows) - MOST_NAMED} more")
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


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
