"""The engine's answers beside those of Transformers' generate()."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.generation.requests import Answer, Request, Sampling
from tests.generation.small_models import KINDS, PLACES, UNCACHED, generator_of, model_of, prompts

CLEAR = 1e-4  # where the two likeliest logits differ by less, either may follow


def generated(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """Transformers' greedy answer, and the logits of each token."""
    ids = torch.tensor([prompt])
    given = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


def compared(answers: Sequence[Answer], requests: Sequence[Request], model: Any) -> int:
    """Compares up to the first unclear step; returns the number of answers that have one."""
    unclear = 0
    for answer, request in zip(answers, requests, strict=True):
        tokens, logits = generated(model, request.ids, request.max_new_tokens)
        best = logits.topk(2).values
        steps = (best[:, 0] - best[:, 1] < CLEAR).nonzero()[:1, 0].tolist() or [len(tokens)]
        assert list(answer.tokens[: steps[0]]) == tokens[: steps[0]]
        assert len(answer.tokens) == request.max_new_tokens
        assert answer.finish_reason == "length"
        unclear += steps[0] < len(tokens)
    return unclear


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_any_batch_are_those_of_transformers(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """More requests than rows, of uneven prompts and answers: they join and leave in turn, through windows of 8."""
    model = model_of(kind)
    requests = [Request(ids, 5 + 3 * place) for place, ids in enumerate(prompts(12))]
    with caplog.at_level(logging.WARNING), closing(generator_of(model)) as generator:
        together, alone = generator.answers(requests), [generator.answers([each])[0] for each in requests[:4]]
    assert [each.tokens for each in alone] == [each.tokens for each in together[:4]]
    assert compared(together, requests, model) <= 1
    assert ("has no cache that works here" in caplog.text) == (kind in UNCACHED)


def test_a_batch_with_room_for_few_positions_gives_the_same_answers() -> None:
    model = model_of("llama")
    requests = [Request(ids, 9) for ids in prompts(8)]
    with closing(generator_of(model, rows=8)) as wide, closing(generator_of(model, rows=8, cells=90)) as narrow:
        assert narrow.answers(requests) == wide.answers(requests)


def test_a_prompt_longer_than_a_chunk_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts, so that a part of the shorter one is padding alone; windows are shorter than a part too."""
    monkeypatch.setattr("drivetrain.generation.row_stores.CHUNK", 20)
    for kind in ("llama", "mistral"):
        model = model_of(kind)
        long, short = prompts(1, 2)[0] * 50, prompts(2)[1]
        requests = [Request(long, 8, prompt_logprobs=True), Request(short, 8, prompt_logprobs=True)]
        with closing(generator_of(model)) as generator:
            found = generator.answers(requests)
        assert compared(found, requests, model) == 0


def test_the_head_runs_once_for_all_prompts_of_a_pass() -> None:
    """PyTorch multiplies by the head's weights for each row apart, where the rows do not lie behind each other."""
    model, together = model_of("llama"), []

    def see(_: Any, inputs: tuple[Tensor]) -> None:
        together.append((tuple(inputs[0].shape), inputs[0].is_contiguous()))

    with closing(generator_of(model)) as generator:
        model.lm_head.register_forward_pre_hook(see)
        generator.answers([Request(ids, 2) for ids in ((1, 2, 3, 4), (5, 6, 7), (8, 9))])
    assert together == [((3, 1, 32), True)] * 2


def test_bf16_logits_are_near_those_of_transformers() -> None:
    """Of the prompt and of each step, as log-probabilities: root mean square, relative."""
    model = model_of("llama").to(torch.bfloat16)
    requests = [Request(ids, 6, top_logprobs=5, prompt_logprobs=True) for ids in prompts(6)]
    with closing(generator_of(model)) as generator:
        found = generator.answers(requests)
    ours, theirs = [], []
    for answer, request in zip(found, requests, strict=True):
        whole = torch.tensor([[*request.ids, *answer.tokens]])
        with torch.no_grad():
            logprobs = model(whole).logits[0].float().log_softmax(-1)
        known = logprobs[:-1].gather(1, whole[0, 1:, None])[:, 0]
        theirs.append(known)
        every = [*answer.prompt_logprobs[1:], *answer.logprobs]
        ours.append(torch.tensor([each.logprob for each in every if each is not None]))
    one, other = torch.cat(ours), torch.cat(theirs)
    assert (one - other).square().mean().sqrt() < 1e-2 * other.square().mean().sqrt()


def test_log_probabilities_are_the_models() -> None:
    """Before sampling's filters; of the prompt, all tokens but the first."""
    model = model_of("qwen2")
    sampling = Sampling(temperature=2.0, top_k=3, repetition_penalty=1.5, seed=4)
    requests = [
        Request(ids, 6, sampling, top_logprobs=number, prompt_logprobs=number != 1)
        for number, ids in enumerate(prompts(3))
    ]
    with closing(generator_of(model)) as generator:
        found = generator.answers(requests)
    for number, (answer, request) in enumerate(zip(found, requests, strict=True)):
        whole = torch.tensor([[*request.ids, *answer.tokens]])
        with torch.no_grad():
            logprobs = model(whole).logits[0].log_softmax(-1)
        begin = len(request.ids)
        for place, each in enumerate(answer.logprobs, begin - 1):
            assert each.token == whole[0, place + 1]
            assert each.logprob == pytest.approx(float(logprobs[place, each.token]), abs=1e-4)
            best = logprobs[place].topk(number)
            assert [token for token, _ in each.top] == best.indices.tolist()
            assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        of_prompt = answer.prompt_logprobs
        assert len(of_prompt) == (begin if number != 1 else 0)
        if of_prompt:
            assert of_prompt[0] is None
            known = [float(logprobs[place, whole[0, place + 1]]) for place in range(begin - 1)]
            assert [each.logprob for each in of_prompt[1:] if each is not None] == pytest.approx(known, abs=1e-4)
    assert len(found[0].logprobs) == 6


def test_a_prompts_log_probabilities_are_given_without_an_answer() -> None:
    model = model_of("llama")
    with closing(generator_of(model)) as generator:
        [found] = generator.answers([Request((5, 6, 7), 0, prompt_logprobs=True)])
    assert (found.tokens, found.text, found.finish_reason, len(found.prompt_logprobs)) == ((), "", "length", 3)


def test_several_answers_to_a_prompt_differ_and_repeat_in_any_batch() -> None:
    model = model_of("llama")
    ids, others = prompts(1)[0], prompts(5, seed=3)
    asked = [Request(ids, 8, Sampling(temperature=1.5, seed=7, draw=draw)) for draw in range(5)]
    crowd = [Request(each, 4, Sampling(temperature=0.7, seed=1)) for each in others]
    with closing(generator_of(model, rows=6)) as generator:
        first, [alone] = generator.answers(asked), generator.answers(asked[3:4])
        mixed = generator.answers([*crowd, *asked[::-1]])[len(crowd) :][::-1]
    assert first == mixed
    assert first[3] == alone
    assert len({each.tokens for each in first}) == 5


def test_an_answer_ends_where_the_models_positions_do() -> None:
    model = model_of("llama")
    with closing(generator_of(model)) as generator:
        [answer] = generator.answers([Request((1,) * (PLACES - 3), 50)])
    assert (len(answer.tokens), answer.finish_reason) == (3, "length")
