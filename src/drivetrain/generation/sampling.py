"""Chooses tokens from logits: for each row of a batch by its own request, independently of the other rows.

The filters are those of Transformers' logits processors, in the order of its generate(): repetition penalty (Keskar et
al. 2019, section 4.1), temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drivetrain.generation.requests import Logprob, Request, Sampling

ALL_TOKENS = 2**31 - 1
BLOCK = 64  # places of an answer whose random numbers are made together
COLDEST = 1e-6  # a temperature below which the likeliest token is drawn with certainty; logits over less overflow


@dataclass(frozen=True)
class Choice:
    """The token that follows, with its log-probability where the request wants it."""

    token: int
    logprob: Logprob | None = None


class Chooser(Protocol):
    """A row of a batch, as choosing its next token needs it."""

    request: Request
    new: list[int]  # the answer's tokens so far

    def forbid(self, scores: Tensor) -> None:
        """Sets the scores, (vocabulary,), of tokens that may not follow to -inf."""


def choose(logits: Tensor, rows: Sequence[Chooser]) -> list[Choice]:
    """Returns a token for each row. logits: (rows, vocabulary)."""
    logits = logits.float()
    scores = _penalised(logits, rows)
    is_drawn = [row.request.sampling.temperature >= COLDEST for row in rows]
    found: list[int] = [] if all(is_drawn) else _likeliest(scores)
    if any(is_drawn):
        drawn = [row for row, wanted in zip(rows, is_drawn, strict=True) if wanted]
        chances = probabilities(_of_rows(scores, is_drawn), [row.request.sampling for row in drawn])
        tokens = iter(_drawn(chances, [_uniform(row) for row in drawn]).tolist())
        found = [next(tokens) if wanted else found[place] for place, wanted in enumerate(is_drawn)]
    logprobs = _logprobs(logits, found, rows)
    return [Choice(token, logprobs.get(place)) for place, token in enumerate(found)]


def _likeliest(scores: Tensor) -> list[int]:
    """Returns the first of equal ones, as argmax does on a CPU in three times as long."""
    found: list[int] = scores.max(-1).indices.tolist()
    return found


def _of_rows(given: Tensor, wanted: Sequence[bool]) -> Tensor:
    """Returns the rows that are wanted, without a copy where all are."""
    return given if all(wanted) else given[[place for place, each in enumerate(wanted) if each]]


def probabilities(scores: Tensor, by: Sequence[Sampling]) -> Tensor:
    """Returns the probability with which each token is drawn, (rows, vocabulary).

    scores: logits after the penalty. by: each row's request; temperatures are COLDEST at least.
    """
    if any(each.temperature != 1 for each in by):
        scores = scores / _column(scores, [each.temperature for each in by])
    known = scores.shape[1]
    kept = [min(known, each.top_k or ALL_TOKENS) for each in by]
    if min(kept) < known:
        largest = scores.topk(max(k for k in kept if k < known), dim=-1).values
        place = torch.tensor([min(k, largest.shape[1]) - 1 for k in kept], device=scores.device)
        least = largest.gather(1, place[:, None])
        least[[k == known for k in kept]] = -torch.inf
        scores = scores.masked_fill(scores < least, -torch.inf)
    if min(each.top_p for each in by) < 1:
        scores = _top_p(scores, _column(scores, [each.top_p for each in by]))
    chances = scores.softmax(-1)
    if max(each.min_p for each in by) > 0:
        least = _column(scores, [each.min_p for each in by]) * chances.amax(-1, keepdim=True)
        chances = chances.masked_fill(chances < least, 0)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def _top_p(scores: Tensor, share: Tensor) -> Tensor:
    """Keeps the fewest likeliest tokens whose probabilities reach the share; all where it is 1."""
    ordered, order = scores.sort(descending=False)
    out = ordered.softmax(-1).cumsum(-1) <= 1 - share
    out[:, -1] = False
    out &= share < 1  # at 1 rounding could leave the least likely out
    return scores.masked_fill(out.scatter(1, order, out), -torch.inf)


def _column(like: Tensor, numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]


def _penalised(logits: Tensor, rows: Sequence[Chooser]) -> Tensor:
    """Returns the logits after what requests forbid and penalise: the given tensor where there is nothing of that."""
    scores = logits
    for place, row in enumerate(rows):
        penalty, forbids = row.request.sampling.repetition_penalty, row.request.constraint is not None
        if scores is logits and (penalty != 1 or forbids):
            scores = logits.clone()
        if penalty != 1:
            seen = torch.tensor(sorted({*row.request.ids, *row.new}), device=logits.device)
            own = scores[place, seen]
            scores[place, seen] = torch.where(own < 0, own * penalty, own / penalty)
        if forbids:
            row.forbid(scores[place])
    return scores


def _uniform(row: Chooser) -> float:
    """Returns a number in [0, 1) that follows from the request's seed and draw and the token's place alone."""
    sampling, (block, place) = row.request.sampling, divmod(len(row.new), BLOCK)
    return _uniforms(sampling.seed % 2**64, sampling.draw % 2**64, block)[place]


@functools.lru_cache(maxsize=1024)
def _uniforms(seed: int, draw: int, block: int) -> list[float]:
    """Returns the numbers of BLOCK places that follow each other: to seed a generator for each took a third of the
    time in which tokens are chosen."""
    found: list[float] = np.random.default_rng([seed, draw, block]).random(BLOCK).tolist()
    return found


def _drawn(chances: Tensor, uniform: Sequence[float]) -> Tensor:
    """Returns for each row the token at which the cumulative probability, in the vocabulary's order, passes the
    number. In the vocabulary's order, in which rounding swaps no tokens."""
    reached = chances.cumsum(-1, dtype=torch.float64)
    at = torch.tensor(uniform, dtype=torch.float64, device=chances.device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, at, right=True)[:, 0].clamp(max=chances.shape[1] - 1)


def _logprobs(logits: Tensor, tokens: Sequence[int], rows: Sequence[Chooser]) -> dict[int, Logprob]:
    """Returns the log-probabilities of the rows that want them, by place."""
    is_wanted = [row.request.top_logprobs is not None for row in rows]
    wanted = [place for place, each in enumerate(is_wanted) if each]
    if not wanted:
        return {}
    given = [rows[place].request.top_logprobs or 0 for place in wanted]
    found = logprobs_of(
        _as_wanted(_of_rows(logits, is_wanted), [rows[place].request for place in wanted]),
        [tokens[place] for place in wanted],
        max(given),
    )
    return {
        place: Logprob(each.token, each.logprob, each.top[:count])
        for place, each, count in zip(wanted, found, given, strict=True)
    }


def _as_wanted(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Returns the logits of which requests want log-probabilities: at their temperature where those of the draws are
    wanted."""
    heat = [each.sampling.temperature if each.logprobs_as_drawn else 1.0 for each in requests]
    return logits if set(heat) == {1.0} else logits / _column(logits, heat)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Returns each token's log-probability and the `top` likeliest. logits: (N, vocabulary), a row a token."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not top:
        return [Logprob(token, value) for token, value in zip(tokens, own, strict=True)]
    best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [Logprob(token, value, each) for token, value, each in zip(tokens, own, tops, strict=True)]
