"""Metrics of generated texts: pairs of an answer and the reference in the data → one number each.

The known ones are those of the field's own libraries (sacrebleu: Post 2018, arXiv:1804.08771; chrF: Popović 2015;
ROUGE: Lin 2004), with their scales: bleu and chrf to 100, the others to 1. Chinese has no spaces between words: where a
text has Han characters BLEU is counted over characters, as sacrebleu's tokenizer zh does, and ROUGE over the words that
jieba finds. The library rouge-score alone would drop every Han character.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import re
import statistics
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.config.generation_metrics import KINDS
from drivetrain.errors import RunError, counted, problem
from drivetrain.numerics.win_rates import adjusted_win_rate
from drivetrain.trust.import_path import import_object

FIELD = "evaluation.generation"
WIN_RATE = "win_rate_"  # begins the names of shares of prompts that the model answers better than its reference
Texts = Sequence[str]
OfEach = Callable[[Texts, Texts], Mapping[str, list[float]]]
OverAll = Callable[[Texts, Texts], float]
HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class TextMetrics:
    """The metrics that a run asks for. Raises UserError if a user's own cannot be imported or used."""

    def __init__(self, asked: Sequence[str]) -> None:
        self._known = [name for name in asked if name in KINDS]
        paths = [name for name in asked if name not in KINDS]
        self._own = {_name(path): _function(path) for path in paths}

    @property
    def directions(self) -> dict[str, bool | None]:
        """Whether more is better, of each number that comes out; None if a user's function does not state it."""
        own = {name: getattr(function, "higher_is_better", None) for name, function in self._own.items()}
        return {**{number: True for name in self._known for number in KINDS[name].numbers}, **own}

    def of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Returns each metric over the rows that have a reference: {"answer", "reference"}; none if no row has one.

        Raises RunError if a user's function fails or gives no number.
        """
        return self.scored(rows).values

    def scored(self, rows: Sequence[Mapping[str, Any]]) -> ScoredAnswers:
        """Returns the same, and the scores of single answers."""
        pairs = [(str(row["answer"]), str(row["reference"])) for row in rows if row.get("reference") is not None]
        if not pairs:
            return ScoredAnswers({}, {}, [])
        answers, references = ([pair[side] for pair in pairs] for side in (0, 1))
        each = self._of_each(answers, references)
        values = dict[str, float]()
        for name in self._known:
            values |= {name: OVER_ALL[name](answers, references)} if name in OVER_ALL else {}
            values |= {number: statistics.fmean(each[number]) for number in KINDS[name].numbers if number in each}
        own = {name: _of_own(name, function, answers, references) for name, function in self._own.items()}
        each |= {name: found for name, found in own.items() if isinstance(found, list)}
        values |= {name: statistics.fmean(found) if isinstance(found, list) else found for name, found in own.items()}
        beside = [row.get("reference_model") for row in rows if row.get("reference") is not None]
        wins = {} if None in beside else self._wins(each, list(map(str, beside)), references)
        return ScoredAnswers({**values, **win_rates(wins)}, {**each, **wins}, references)

    def _of_each(self, answers: Texts, references: Texts) -> dict[str, list[float]]:
        """Returns the scores of single answers by the known metrics that have them."""
        found: dict[str, list[float]] = {}
        for name in self._known:
            found |= OF_EACH[name](answers, references) if name in OF_EACH else {}
        return found

    def _wins(self, each: Mapping[str, list[float]], others: Texts, references: Texts) -> dict[str, list[float]]:
        """Returns for each metric that scores single answers, as `win_rate_NAME`: 1 where the model's answer has the
        better score, 0 where the reference model's has it, 0.5 where both have the same. each: the scores of the
        model's answers. others: the reference model's answers."""
        theirs: dict[str, Any] = self._of_each(others, references)
        theirs |= {name: _of_own(name, self._own[name], others, references) for name in each if name in self._own}
        signs = {name: -1 if self.directions[name] is False else 1 for name in each}
        return {
            f"{WIN_RATE}{name}": [
                _win((one - other) * signs[name]) for one, other in zip(own, theirs[name], strict=True)
            ]
            for name, own in each.items()
            if isinstance(theirs[name], list)
        }


def _win(gain: float) -> float:
    return 0.5 * (1 + (gain > 0) - (gain < 0))


def win_rates(wins: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the mean of each and, for more than one prompt, its standard error under the name with `_error`, which is
    not 0 where all are alike (`adjusted_win_rate`)."""
    found = dict[str, float]()
    for name, values in wins.items():
        found[name] = statistics.fmean(values)
        if len(values) > 1:
            found[f"{name}_error"] = adjusted_win_rate(values).error
    return found


@dataclass(frozen=True)
class ScoredAnswers:
    """The metrics of answers. each: metric → the score of each answer that has a reference, where the metric is their
    mean."""

    values: dict[str, float]
    each: dict[str, list[float]]
    references: list[str]


def _name(path: str) -> str:
    return re.split("[:.]", path)[-1]


def _function(path: str) -> Callable[[Texts, Texts], Any]:
    found = import_object(path, FIELD)
    if not callable(found):
        raise problem(
            FIELD,
            f"{path} is no function",
            "give a function of (answers, references) that gives a number, or one for each",
        )
    function: Callable[[Texts, Texts], Any] = found
    return function


def _of_own(
    name: str, function: Callable[[Texts, Texts], Any], answers: Texts, references: Texts
) -> float | list[float]:
    """Returns a user's number over all answers, or a number for each."""
    try:
        found = function(answers, references)
        listed = found.tolist() if hasattr(found, "tolist") else found
        each = list(map(float, listed)) if isinstance(listed, list | tuple) else None
        whole = float(listed) if each is None else math.nan
    except Exception as error:  # the user's own code runs here
        raise RunError(f"{FIELD}: {name} failed on {len(answers)} answers: {type(error).__name__}: {error}") from error
    if each is not None and len(each) != len(answers):
        counts = f"{counted(len(each), 'number')} for {counted(len(answers), 'answer')}"
        raise RunError(f"{FIELD}: {name} returned {counts}: return one number, or one for each answer")
    return whole if each is None else each


# --- the known ones ---------------------------------------------------------------------------------------------------


def _exact_match(answers: Texts, references: Texts) -> dict[str, list[float]]:
    """Returns 1 for each answer that is the reference, but for white space around; else 0."""
    pairs = zip(answers, references, strict=True)
    return {"exact_match": [float(answer.strip() == reference.strip()) for answer, reference in pairs]}


def _token_f1(answers: Texts, references: Texts) -> dict[str, list[float]]:
    """Returns the F1 of the tokens that answer and reference share, as SQuAD counts them (Rajpurkar et al. 2016,
    section 6): lower case, without punctuation and articles. Han characters are tokens of their own (CMRC, Cui et al.
    2019)."""
    return {"token_f1": list(map(_shared, answers, references))}


def _shared(answer: str, reference: str) -> float:
    mine, its = _tokens(answer), _tokens(reference)
    same = sum((collections.Counter(mine) & collections.Counter(its)).values())
    if not mine or not its:
        return float(mine == its)
    return 2 * same / (len(mine) + len(its))


def _tokens(text: str) -> list[str]:
    bare = "".join(each for each in text.lower() if not unicodedata.category(each).startswith(("P", "S")))
    return HAN.sub(r" \g<0> ", _ARTICLES.sub(" ", bare)).split()


def _bleu(answers: Texts, references: Texts) -> float:
    """Returns BLEU over the corpus, 0 to 100."""
    import sacrebleu

    tokenizer = "zh" if any(map(HAN.search, references)) else "13a"
    return float(sacrebleu.corpus_bleu(answers, [references], tokenize=tokenizer).score)


def _chrf(answers: Texts, references: Texts) -> float:
    """Returns chrF over the corpus, 0 to 100: character n-grams, so that no words have to be found."""
    import sacrebleu

    return float(sacrebleu.corpus_chrf(answers, [references]).score)


def _rouge(answers: Texts, references: Texts) -> dict[str, list[float]]:
    """Returns the F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
    plain, chinese = (RougeScorer([*kinds.values()], tokenizer=each) for each in (None, _Words()))
    scores = []
    for answer, reference in zip(answers, references, strict=True):
        scorer = chinese if HAN.search(answer + reference) else plain
        scores.append(scorer.score(reference, answer))
    return {name: [float(score[kind].fmeasure) for score in scores] for name, kind in kinds.items()}


class _Words:
    """A tokenizer as rouge-score takes it."""

    def tokenize(self, text: str) -> list[str]:
        return words_of(text.lower())


def words_of(text: str) -> list[str]:
    """Returns the words of a text with Han characters, punctuation among them."""
    return [word for word in _jieba().lcut(text) if word.strip()]


@functools.cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel(logging.WARNING)  # it reports the loading of its dictionary
    return jieba


OF_EACH: Mapping[str, OfEach] = {"exact_match": _exact_match, "token_f1": _token_f1, "rouge": _rouge}
OVER_ALL: Mapping[str, OverAll] = {"bleu": _bleu, "chrf": _chrf}
