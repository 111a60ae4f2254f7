"""Judges an export: what its own runtime answered against the run's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from drivetrain.export.bounds import BOUNDS, MERGE, TIES, Bound
from drivetrain.export.comparison import Answers, Difference, answers, difference, metrics
from drivetrain.export.questions import Questions, Reference
from drivetrain.export.runtimes.exchange import Answered
from drivetrain.export.written import Written

SHOWN = 3


@dataclass(frozen=True)
class Verdict:
    """failures: why the export does not count; empty where it does. before, after: metrics and seconds of the run's
    model and of the export, on the same samples."""

    numbers: str
    difference: Difference
    bound: Bound
    answers: Answers
    before: dict[str, float]
    after: dict[str, float]
    seconds: tuple[float, float]
    samples: int
    software: dict[str, str]
    merge: Difference | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Returns what export.json keeps."""
        return {
            "passed": self.holds,
            "failures": self.failures,
            "numbers": self.numbers,
            "samples": self.samples,
            "difference": self.difference.as_json(),
            "bound": asdict(self.bound),
            "merge": None if self.merge is None else self.merge.as_json(),
            "answers": asdict(self.answers),
            "metrics": {"before": self.before, "after": self.after},
            "seconds": {"before": self.seconds[0], "after": self.seconds[1]},
            "runtime": self.software,
        }


def judged(
    numbers: str,
    questions: Questions,
    reference: Reference,
    answered: Answered,
    written: Written,
    merge: Difference | None,
    classes: bool,
) -> Verdict:
    """Returns the verdict. merge: the merged model beside the same with its adapters apart. classes: whether scores are
    logits of alternatives."""
    bound = BOUNDS[numbers]
    found = difference(reference.scores, answered.scores, classes)
    tie = TIES * found.maximum
    compared = answers(reference.answers, reference.margins, answered.answers, tie)
    failures = [
        *_merge_failures(merge),
        *_weight_failures(written.weights, answered.tensors),
        *_tokenizer_failures(questions, answered, written.unknown),
        *_score_failures(found, bound, compared, numbers),
    ]
    sequences = questions.keep is not None
    return Verdict(
        numbers=numbers,
        difference=found,
        bound=bound,
        answers=compared,
        before=metrics(reference.scores, questions.labels, sequences) if classes else {},
        after=metrics(answered.scores, questions.labels, sequences) if classes and found.rows else {},
        seconds=(reference.seconds, answered.seconds),
        samples=questions.samples,
        software=answered.software,
        merge=merge,
        failures=failures,
    )


def merge_difference(apart: list[Tensor], merged: list[Tensor]) -> Difference:
    """Returns how far the merged model's scores are from those with adapters apart."""
    return difference(apart, merged, classes=True)


def _merge_failures(merge: Difference | None) -> list[str]:
    if merge is None or merge.relative <= MERGE:
        return []
    return [f"the merge changed the model: its logits differ by {merge.relative:.3g} of their spread ({MERGE:g})"]


def _weight_failures(expected: Mapping[str, list[str]] | None, found: Mapping[str, list[str]]) -> list[str]:
    if expected is None:
        return []
    names = sorted(expected.keys() ^ found.keys())
    dtypes = sorted(n for n in expected.keys() & found.keys() if expected[n][0] != found[n][0])
    others = sorted(
        n for n in expected.keys() & found.keys() if expected[n][0] == found[n][0] and expected[n] != found[n]
    )
    failures = []
    if names:
        failures.append(f"{len(names)} weights are only in the run or only in the export: {_some(names)}")
    if dtypes:
        first = dtypes[0]
        failures.append(
            f"{len(dtypes)} weights have another dtype, {first}: {found[first][0]} instead of {expected[first][0]}"
        )
    if others:
        failures.append(f"{len(others)} weights have other numbers than the run's: {_some(others)}")
    return failures


def _tokenizer_failures(questions: Questions, answered: Answered, unknown: int | None) -> list[str]:
    """Compares ids of texts and conversations. unknown: a token that counts once where it stands several times in a
    row."""
    asked: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "chat template": (questions.dialogues, answered.dialogues),
        "tokenizer": (questions.texts, answered.texts),
    }
    failures = [
        f"its {name} was not compared: {len(found)} of {len(wanted)} were answered"
        for name, (wanted, found) in asked.items()
        if len(found) != len(wanted)
    ]
    pairs = list(zip(questions.dialogues, answered.dialogues, strict=False))
    wrong = [ours for ours, theirs in pairs if _joined(ours.ids, unknown) != _joined(theirs, unknown)]
    if wrong:
        question = wrong[0].messages[-1]["content"]
        failures.append(
            f"its chat template renders {len(wrong)} of {len(pairs)} conversations otherwise: {question[:60]!r}"
        )
    texts = list(zip(questions.texts, questions.text_ids, answered.texts, strict=False))
    other = [text for text, ours, theirs in texts if _joined(ours, unknown) != _joined(theirs, unknown)]
    if other:
        failures.append(f"its tokenizer gives other ids for {len(other)} of {len(texts)} texts: {other[0][:60]!r}")
    return failures


def _joined(ids: Sequence[int], token: int | None) -> list[int]:
    """Returns the ids with each row of `token` as one."""
    return [each for number, each in enumerate(ids) if each != token or number == 0 or ids[number - 1] != token]


def _score_failures(found: Difference, bound: Bound, compared: Answers, numbers: str) -> list[str]:
    failures = []
    if not found.relative <= bound.relative:
        by = f"{found.relative:.3g} of their spread"
        failures.append(f"its scores differ from the run's by {by}; the bound for {numbers} is {bound.relative:g}")
    if found.kl_mean is not None and not found.kl_mean <= bound.kl:
        by = f"a mean KL divergence of {found.kl_mean:.3g} nats"
        failures.append(f"its distributions differ from the run's by {by}; the bound for {numbers} is {bound.kl:g}")
    if bound.answers and compared.other:
        failures.append(f"{compared.other} greedy answers differ where no two tokens were as likely")
    return failures


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
