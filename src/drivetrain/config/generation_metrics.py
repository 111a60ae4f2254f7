"""Metrics of generated answers, by name: their numbers, and the packages that compute them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from drivetrain.errors import Problem

EXTRA = "generation-metrics"


@dataclass(frozen=True)
class GenerationMetric:
    """numbers: what the report has of it. packages: modules that it needs."""

    numbers: tuple[str, ...]
    packages: tuple[str, ...] = ()


KINDS = {
    "exact_match": GenerationMetric(("exact_match",)),
    "token_f1": GenerationMetric(("token_f1",)),
    "bleu": GenerationMetric(("bleu",), ("sacrebleu",)),
    "chrf": GenerationMetric(("chrf",), ("sacrebleu",)),
    "rouge": GenerationMetric(("rouge_1", "rouge_2", "rouge_l"), ("rouge_score", "jieba")),
}


def metric_problems(asked: Sequence[str], field: str) -> Iterator[Problem]:
    """Yields what is wrong with the names of metrics, import paths among them, and what is not installed."""
    for name in dict.fromkeys(asked):
        if name in KINDS:
            missing = [package for package in KINDS[name].packages if find_spec(package) is None]
            if missing:
                why = f"{name} needs {' and '.join(missing)}, which is not installed"
                yield Problem(field, why, f"pip install 'drivetrain[{EXTRA}]', or leave it out")
        elif not set(name) & set(".:"):
            near = difflib.get_close_matches(name, KINDS, n=1)
            known = f"known: {', '.join(KINDS)}; your own as package.module:function"
            yield Problem(field, f"there is no metric {name!r}", f"did you mean {near[0]}?" if near else known)
    twice = sorted({name for name in asked if asked.count(name) > 1})
    if twice:
        yield Problem(field, f"{', '.join(twice)} is there twice", "give each metric once")
