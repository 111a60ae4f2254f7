"""What tokens are drawn with: the probabilities of Transformers' logits processors, and each request's own numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.utils import GenerationMixin

from drivetrain.generation.requests import Request, Sampling
from drivetrain.generation.sampling import choose, probabilities

SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.3, top_k=5),
    Sampling(1.0, top_k=1000),
    Sampling(2.0, top_p=0.6),
    Sampling(0.5, top_p=0.01),
    Sampling(1.0, min_p=0.2),
    Sampling(1.5, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(1.0, repetition_penalty=1.4),
    Sampling(0.9, top_k=7, repetition_penalty=0.8),
]


@dataclass
class Row:
    request: Request
    new: list[int] = field(default_factory=list)

    def forbid(self, scores: Tensor) -> None:
        scores[1:] = -torch.inf


def of_transformers(logits: Tensor, sampling: Sampling, seen: list[int]) -> Tensor:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: getattr(sampling, name) for name in names}
    config = GenerationConfig(
        do_sample=True, **{**given, "top_k": given["top_k"] or 0, "min_p": given["min_p"] or None}
    )

    class Maker(GenerationMixin):
        def __init__(self) -> None:
            self.config = PreTrainedConfig()

    processors = Maker()._get_logits_processor(config, input_ids_seq_length=len(seen), device="cpu")
    return processors(torch.tensor([seen]), logits[None].clone()).softmax(-1)[0]


@pytest.mark.parametrize("peaked", [0.5, 4.0])
def test_tokens_are_drawn_with_the_probabilities_of_transformers(peaked: float) -> None:
    """All of them in one batch, so that no row's filters reach another."""
    logits = torch.randn(len(SAMPLINGS), 50, generator=torch.Generator().manual_seed(0)) * peaked
    rows = [Row(Request((3, 4, 4), 9, each), [7, 9]) for each in SAMPLINGS]
    seen: list[Tensor] = []
    real = probabilities

    def spied(scores: Tensor, by: list[Sampling]) -> Tensor:
        seen.append(real(scores, by))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("drivetrain.generation.sampling.probabilities", spied)
        choose(logits, rows)
    known = torch.stack([of_transformers(*each, [3, 4, 4, 7, 9]) for each in zip(logits, SAMPLINGS, strict=True)])
    torch.testing.assert_close(seen[0], known, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-300])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature: float) -> None:
    """Logits divided by it are infinite, and what is drawn of these is no token that anything made likely."""
    logits = torch.tensor([[-80.0, 60.0, 61.0, 3.0]] * 5)
    rows = [Row(Request((1,), 9, Sampling(temperature, seed=seed))) for seed in range(5)]
    assert [each.token for each in choose(logits, rows)] == [2] * 5


def test_of_equally_likely_tokens_the_first_follows() -> None:
    """As Transformers' generate() chooses, whose argmax does."""
    logits = torch.zeros(3, 1000)
    logits[1, [70, 300, 900]] = 2.0
    logits[2, [999, 998]] = 1.0
    found = choose(logits, [Row(Request((1,), 4)) for _ in logits])
    assert [each.token for each in found] == logits.argmax(-1).tolist() == [0, 70, 998]


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = [Row(Request((1,), 9, Sampling(1.0, seed=seed))) for seed in range(4000)]
    tokens = torch.tensor([each.token for each in choose(logits.expand(4000, 4), rows)])
    shares = tokens.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, logits.softmax(-1), rtol=0, atol=0.025)  # three standard deviations


def test_a_draw_depends_on_seed_answer_and_place_alone() -> None:
    logits = torch.zeros(1, 10_000)

    def token(seed: int, draw: int, place: int) -> int:
        return choose(logits, [Row(Request((1, 2), 9, Sampling(1.0, seed=seed, draw=draw)), [0] * place)])[0].token

    found = {token(*each) for each in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)]}
    assert len(found) == 5
    assert token(3, 4, 5) == token(3, 4, 5)


def test_what_a_form_forbids_is_not_chosen() -> None:
    rows = [Row(Request((1,), 9, Sampling(t), constraint="x")) for t in (0.0, 1.0)] + [Row(Request((1,), 9))]
    logits = torch.arange(5.0).expand(3, 5)
    assert [each.token for each in choose(logits, rows)] == [0, 0, 4]
