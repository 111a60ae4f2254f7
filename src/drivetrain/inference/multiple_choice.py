"""Answers questions of multiple choice by log-probability: the choice whose letter the model finds likeliest.

As lm-evaluation-harness does it (Gao et al., `multiple_choice`): the tokens of a choice are those that its text adds to
the prompt's, and the sum of their log-probabilities decides, the first of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.data.language.choice_sets import LETTERS, Subject
from drivetrain.generation.requests import Answer, Request
from drivetrain.inference.loading import LoadedModel


@dataclass(frozen=True)
class Chosen:
    """right: (questions,) of bool. logprobs: (questions, choices). cut: prompts that the model had no room for, whose
    beginning was left out."""

    right: np.ndarray
    logprobs: np.ndarray
    cut: int


def choose(model: LoadedModel, subject: Subject, shots: int) -> Chosen:
    """Returns the model's choices. shots: answered examples before each question."""
    prompts = [subject.prompt(question, shots) for question in subject.questions]
    pairs = [_tokens(model, prompt, f" {letter}") for prompt in prompts for letter in LETTERS]
    room = model.context_length
    cut = [ids if room is None else ids[-room:] for ids, _ in pairs]
    requests = [Request(tuple(ids), 0, prompt_logprobs=True) for ids in cut]
    answers = model.generator.answers(requests)
    sums = [_sum(answer, count) for answer, (_, count) in zip(answers, pairs, strict=True)]
    logprobs = np.array(sums).reshape(len(prompts), len(LETTERS))
    right = logprobs.argmax(axis=1) == [question.right for question in subject.questions]
    short = sum(len(ids) < len(whole) for ids, (whole, _) in zip(cut, pairs, strict=True)) // len(LETTERS)
    return Chosen(right, logprobs, short)


def _tokens(model: LoadedModel, prompt: str, choice: str) -> tuple[Sequence[int], int]:
    """Returns the tokens of both, what the tokenizer puts before texts among them, and how many are the choice's."""
    whole = model.tokenizer(prompt + choice, verbose=False)["input_ids"]
    return whole, len(whole) - len(model.tokenizer(prompt, verbose=False)["input_ids"])


def _sum(answer: Answer, count: int) -> float:
    return sum(each.logprob for each in answer.prompt_logprobs[-count:] if each is not None)
