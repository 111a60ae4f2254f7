"""Metrics of answers, against the libraries of the field and their own figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_chinese import Rouge
from rouge_score.rouge_scorer import RougeScorer
from torchmetrics.functional.text import squad

from drivetrain.config.generation_metrics import KINDS, metric_problems
from drivetrain.errors import RunError, UserError
from drivetrain.generation.text_metrics import OF_EACH, OVER_ALL, TextMetrics, words_of

ENGLISH = [
    ("The room was clean, and the staff were friendly.", "The room was clean and the staff friendly."),
    ("It is far from the station", "The hotel is far away from the station."),
    ("No.", "Breakfast was cold."),
    ("the the the the", "the cat"),
]
CHINESE = [
    ("房间很干净，服务态度也很好", "房间干净，服务很好，位置方便"),
    ("早餐一般，下次不会再来了", "早餐一般，房间太小，下次不来了"),
    ("好好好，很好", "很好"),
    ("交通方便", "位置在 Hilton 旁边，交通很方便"),
]


def scored(name: str, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    rows = [{"answer": answer, "reference": reference} for answer, reference in pairs]
    return TextMetrics([name]).of(rows)


def test_bleu_and_chrf_are_sacrebleus() -> None:
    for pairs, tokenizer in ((ENGLISH, "13a"), (CHINESE, "zh")):
        answers, references = ([pair[side] for pair in pairs] for side in (0, 1))
        expected = sacrebleu.BLEU(tokenize=tokenizer).corpus_score(answers, [references]).score
        assert scored("bleu", pairs)["bleu"] == expected > 0
        assert scored("chrf", pairs)["chrf"] == sacrebleu.CHRF().corpus_score(answers, [references]).score > 0


def test_rouge_is_that_of_rouge_score() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    found = [scorer.score(reference, answer) for answer, reference in ENGLISH]
    for name, kind in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL")):
        expected = sum(each[kind].fmeasure for each in found) / len(found)
        assert scored("rouge", ENGLISH)[name] == pytest.approx(expected)


def test_rouge_of_chinese_is_that_of_rouge_chinese() -> None:
    """Which counts repeated words as often as they come with exclusive=False, as ROUGE is defined."""
    answers, references = ([" ".join(words_of(pair[side].lower())) for pair in CHINESE] for side in (0, 1))
    expected = Rouge(exclusive=False).get_scores(answers, references, avg=True)
    found = scored("rouge", CHINESE)
    for name, kind in (("rouge_1", "rouge-1"), ("rouge_2", "rouge-2"), ("rouge_l", "rouge-l")):
        assert found[name] == pytest.approx(expected[kind]["f"], abs=1e-7)
        assert found[name] > 0


def test_token_f1_is_squads() -> None:
    answers, references = ([pair[side] for pair in ENGLISH] for side in (0, 1))
    predicted = [{"prediction_text": answer, "id": str(i)} for i, answer in enumerate(answers)]
    targets = [
        {"answers": {"answer_start": [0], "text": [reference]}, "id": str(i)} for i, reference in enumerate(references)
    ]
    expected = squad(predicted, targets)["f1"].item() / 100
    assert scored("token_f1", ENGLISH)["token_f1"] == pytest.approx(expected, rel=1e-5)
    # three of four characters, and three of three: F1 = 2 x 3 / 7
    assert scored("token_f1", [("很干净。", "很干净了")])["token_f1"] == pytest.approx(6 / 7)


def test_an_exact_match_is_the_same_text_but_for_white_space_around() -> None:
    pairs = [("yes\n", "yes"), ("Yes", "yes"), ("", ""), ("a  b", "a b")]
    assert scored("exact_match", pairs)["exact_match"] == 0.5


def test_rows_without_a_reference_do_not_count() -> None:
    rows = [{"answer": "a", "reference": "a"}, {"answer": "b", "reference": None}, {"answer": "c"}]
    assert TextMetrics(["exact_match"]).of(rows) == {"exact_match": 1.0}
    assert TextMetrics(["exact_match"]).of(rows[1:]) == {}


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=5))
def test_any_texts_have_figures_in_their_scale(pairs: list[tuple[str, str]]) -> None:
    rows = [{"answer": answer, "reference": reference} for answer, reference in pairs]
    for name, value in TextMetrics(list(KINDS)).of(rows).items():
        assert 0 <= value <= (100.0001 if name in ("bleu", "chrf") else 1.0001), name


def test_the_numbers_are_those_that_are_announced() -> None:
    assert OF_EACH.keys() | OVER_ALL.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert tuple(scored(name, ENGLISH)) == kind.numbers
        assert TextMetrics([name]).directions == dict.fromkeys(kind.numbers, True)


@pytest.fixture
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_metrics")

    def length(answers: Sequence[str], references: Sequence[str]) -> float:
        return sum(map(len, answers)) / sum(map(len, references))

    def broken(answers: Sequence[str], references: Sequence[str]) -> float:
        raise KeyError(answers[0], references[0])

    length.higher_is_better = False  # type: ignore[attr-defined]
    module.length, module.broken, module.number = length, broken, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_metrics", module)


@pytest.mark.usefixtures("own_metrics")
def test_a_users_function_is_a_metric() -> None:
    metrics = TextMetrics(["own_metrics:length", "exact_match"])
    assert metrics.of([{"answer": "ab", "reference": "abcd"}]) == {"exact_match": 0.0, "length": 0.5}
    assert metrics.directions == {"exact_match": True, "length": False}
    with pytest.raises(RunError, match=r"evaluation\.generation: broken failed on 1 answers: KeyError"):
        TextMetrics(["own_metrics.broken"]).of([{"answer": "ab", "reference": "abcd"}])
    with pytest.raises(UserError, match="own_metrics:number is no function"):
        TextMetrics(["own_metrics:number"])
    with pytest.raises(UserError, match="own_metrics has no lenght"):
        TextMetrics(["own_metrics:lenght"])


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("scores")

    def tokens(answers: Sequence[str], references: Sequence[str]) -> list[int]:
        return [len(each.split()) for each, _ in zip(answers, references, strict=True)]

    def few(answers: Sequence[str], references: Sequence[str]) -> list[float]:
        return [float(answers[0] == references[0])]

    tokens.higher_is_better = False  # type: ignore[attr-defined]
    module.tokens, module.few = tokens, few  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scores", module)


@pytest.mark.usefixtures("scores", "own_metrics")
def test_answers_beside_those_of_a_reference_model_have_a_win_rate_by_each_score_with_its_standard_error() -> None:
    answers = [("a", "b c"), ("a b c", "a"), ("x y", "z w"), ("q", "r s t")]  # the shorter wins: 1, 0, 0.5, 1
    rows = [{"answer": one, "reference_model": other, "reference": "a"} for one, other in answers]
    found = TextMetrics(["scores:tokens", "exact_match", "own_metrics:length"]).scored(rows)
    wins = np.array([1, 0, 0.5, 1])
    assert found.each["win_rate_tokens"] == wins.tolist()
    assert found.values["tokens"] == 1.75
    assert found.values["win_rate_tokens"] == wins.mean()
    assert found.values["win_rate_tokens_error"] == pytest.approx(np.std([*wins, 1, 0]) / 6**0.5)
    assert found.each["win_rate_exact_match"] == [1, 0, 0.5, 0.5]
    assert "win_rate_length" not in found.values, "it is one number over all answers"
    ties = TextMetrics(["scores:tokens"]).of([rows[2]] * 6)
    assert ties["win_rate_tokens_error"] == pytest.approx(2**-0.5 / 8), "and not 0"
    [alone] = [TextMetrics(["scores:tokens"]).of(rows[:1])]
    assert alone == {"tokens": 1.0, "win_rate_tokens": 1.0}
    without = [{"answer": "a", "reference": "a"}]
    assert TextMetrics(["scores:tokens"]).of(without) == {"tokens": 1.0}
    with pytest.raises(RunError, match="few returned 1 number for 4 answers"):
        TextMetrics(["scores:few"]).of(rows)


def test_names_that_are_unknown_twice_or_not_installed_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.config.generation_metrics.find_spec", lambda _: None)
    found = list(metric_problems(["blue", "bleu", "bleu", "rouge", "mine:f"], "evaluation.generation"))
    assert [(each.why, each.fix) for each in found] == [
        ("there is no metric 'blue'", "did you mean bleu?"),
        (
            "bleu needs sacrebleu, which is not installed",
            "pip install 'drivetrain[generation-metrics]', or leave it out",
        ),
        (
            "rouge needs rouge_score and jieba, which is not installed",
            "pip install 'drivetrain[generation-metrics]', or leave it out",
        ),
        ("bleu is there twice", "give each metric once"),
    ]
