"""The scores that LLaMA-Factory's predict gives answers: BLEU-4 over characters, and ROUGE over the words of jieba.

Each answer has its own score, 0 to 100, and a metric is their mean: BLEU of a sentence with NLTK's smoothing 3 (NIST's;
Chen and Cherry 2014), F1 of rouge-chinese, which counts a word that is repeated once. They are other figures than those
of `text_metrics`, which follow sacrebleu and rouge-score.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from drivetrain.generation.text_metrics import words_of

PACKAGES = ("nltk", "rouge_chinese", "jieba")
ROUGE = ("rouge-1", "rouge-2", "rouge-l")


def similarity(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns "bleu-4", "rouge-1", "rouge-2" and "rouge-l"; of no pairs, none."""
    each = [{"bleu-4": _bleu(*pair), **_rouge(*pair)} for pair in zip(answers, references, strict=True)]
    return {name: statistics.fmean(scores[name] for scores in each) for name in ("bleu-4", *ROUGE)} if each else {}


def _bleu(answer: str, reference: str) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    score = sentence_bleu([list(reference)], list(answer), smoothing_function=SmoothingFunction().method3)
    return round(float(score) * 100, 4)


def _rouge(answer: str, reference: str) -> dict[str, float]:
    from rouge_chinese import Rouge

    mine, its = words_of(answer), words_of(reference)
    if not mine or not its:
        return dict.fromkeys(ROUGE, 0.0)
    (found,) = Rouge().get_scores(" ".join(mine), " ".join(its))
    return {name: round(float(found[name]["f"]) * 100, 4) for name in ROUGE}
