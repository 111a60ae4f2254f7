"""Statements about a comparison as data: which sentence, and the values in it. A page has the sentences in its reader's
language; the English ones are here.

A value is a text that is the same in every language (a row's name, a figure), a statement of its own, or several of
them in a row. {metric} is the name of a metric, which languages have words for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PLACE = re.compile(r"\{(\w+)\}")

TEXTS = {
    # what to choose
    "none_completed": "No row can be recommended: none completed on every seed.",
    "none_steady": "No row can be recommended: none ran for enough steps to have a steady rate (samples/s).",
    "only_stand_ins": "No row can be recommended: {stand_in}.",
    "stand_in": "dp on a CPU, whose replicas are threads; its speed does not predict a GPU's",
    "only_row": "Choose {row}: the only row that can be considered.",
    "choose": "Choose {row}: {reasons}.",
    "keep": "No winner: {rows} are equally quick but for noise. Keep {row}, the first of them: {reasons}.",
    "none_chosen": "No row can be chosen: {reasons}.",
    "none_chosen_by_noise": "No row can be chosen: {reasons}. Their speeds differ by no more than noise.",
    "none_chosen_but_quick": "No row can be chosen: {reasons}. {row} is the quickest beyond noise.",
    # why none
    "all_at_chance": "by {metric} every row is at chance ({level}): nothing was learned that tells them apart",
    "one_at_chance": "by {metric} {rows} is at chance ({level}): nothing was learned that tells them apart",
    "some_at_chance": "by {metric} {rows} are at chance ({level}): nothing was learned that tells them apart",
    "noise_unknown": "how far {metric} varies by chance is not known ({values})",
    "unjudged": "other programs disturbed the runs of {rows}, whose speed is therefore not known",
    "constant_answer": "always answering {answer} has {share}",
    # why this one
    "nothing_quicker": "nothing as good is quicker",
    "times_the_samples": "{ratio} times ({low} to {high} with noise) the samples a second of {row}",
    "slower": "slower: {rows}",
    "best_metric": "{metric} {value}",
    "metric_within_noise": ("{metric} {value}; noise alone makes differences from the best ({best}) of up to {limit}"),
    "metric_within": "{metric} {value}, within {share} of the best ({best})",
    "worse": "worse by {metric}: {rows}",
    "memory_tensor": "{ratio} times its peak tensor memory",
    "memory_allocated": "{ratio} times its peak allocated memory",
    "memory_reserved": "{ratio} times its peak reserved memory",
    "memory_resident": "{ratio} times its peak resident memory",
    # what the runs do not show
    "different_models": "The rows have different models: their speeds compare those, not settings.",
    "different_data": "The rows have different data: their speeds compare those, not settings.",
    "different_models_and_data": "The rows have different models and data: their speeds compare those, not settings.",
    "untested": (
        "{rows} one run of one seed: how {what} from run to run was not tested (rates are taken to vary by {share}); "
        "--seeds 5 tests it."
    ),
    "each_row_is": "Each row is",
    "of_rows_there_is": "Of {rows} there is",
    "speed_varies": "speed varies",
    "speed_and_metric_vary": "speed and {metric} vary",
    "equal_but_for_engine": (
        "Equal but for the engine, so {metric} does not choose between {groups} (prove checks it)."
    ),
    "at_chance": "At chance by {metric}: {rows} ({level}).",
    "disturbed": "Other programs took processor time during {runs}: these rates mean little.",
    "emulated": "Rows marked emulated have the accuracy of 16-bit hardware but not its time and memory.",
    "not_considered": "Not considered: {stand_in}.",
    # parts of them
    "row_value": "{row} {value}",
    "row_times": "{row} ({ratio} times)",
    "row_in_brackets": "{row} ({value})",
    "row_disturbed": "{row} (seed {seed}: {share})",
    "more": "{count} more",
}
JOINTS = {"and": (", ", " and "), "comma": (", ", ", "), "semicolon": ("; ", "; ")}  # between items, before the last


@dataclass(frozen=True)
class Listed:
    """Values in a row, by a name of JOINTS."""

    by: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Statement:
    """A sentence, or a part of one: a key of TEXTS, and a value for each of its places."""

    says: str
    values: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        return english(self)


Value = str | Statement | Listed


def stated(says: str, **values: Value) -> Statement:
    """Returns a statement. says: a key of TEXTS, whose places are the names of the values."""
    assert set(PLACE.findall(TEXTS[says])) == values.keys(), f"{says} has other places than {sorted(values)}"
    return Statement(says, values)


def listed(by: str, items: Sequence[Value], most: int | None = None) -> Value:
    """Returns values in a row. most: of them that are named; the number of the others stands for them."""
    named = tuple(items[:most])
    if len(items) > len(named):
        named = (*named, stated("more", count=str(len(items) - len(named))))
    return named[0] if len(named) == 1 else Listed(by, named)


def english(value: Value) -> str:
    """Returns a value in English."""
    if isinstance(value, str):
        return value
    if isinstance(value, Statement):
        return PLACE.sub(lambda place: english(value.values[place[1]]), TEXTS[value.says])
    between, last = JOINTS[value.by]
    texts = [*map(english, value.items)]
    return last.join(filter(None, (between.join(texts[:-1]), *texts[-1:])))


def as_data(value: Value) -> Any:
    """Returns a value as JSON has it: a text, {"says", "values"} or {"by", "items"}."""
    if isinstance(value, str):
        return value
    if isinstance(value, Statement):
        return {"says": value.says, "values": {name: as_data(each) for name, each in value.values.items()}}
    return {"by": value.by, "items": [as_data(each) for each in value.items]}
