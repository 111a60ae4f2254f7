"""Requests to a model on its own thread: streams, ends, cancelled and failed ones, and what is refused."""

from __future__ import annotations

import json
import queue
import threading
from contextlib import closing
from typing import Any

import pytest
import torch

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.generation.requests import FormError, Piece, Request, Sampling, joined
from tests.generation.small_models import PLACES, generator_of, model_of, prompts


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


def last(pieces: queue.Queue[Piece]) -> list[Piece]:
    found = [pieces.get(timeout=60)]
    while found[-1].finish_reason is None:
        found.append(pieces.get(timeout=60))
    return found


def test_pieces_joined_are_the_answer(model: Any) -> None:
    request = Request(prompts(1)[0], 12, top_logprobs=1, prompt_logprobs=True)
    with closing(generator_of(model)) as generator:
        [known] = generator.answers([request])
        pieces: queue.Queue[Piece] = queue.Queue()
        generator.submit(request, pieces.put)
        found = last(pieces)
    assert joined(found) == known
    assert len(found) == 12
    assert all(len(each.tokens) == len(each.logprobs) == 1 for each in found)
    assert len(found[0].prompt_logprobs) == len(request.ids)
    assert not any(each.prompt_logprobs for each in found[1:])


def test_passes_of_a_model_that_answers_keep_no_record_for_autograd(model: Any) -> None:
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    with closing(generator_of(model)) as generator:
        seen.clear()
        generator.answers([Request(ids, 3) for ids in prompts(6)])  # more than rows, which join and leave
    hook.remove()
    assert seen
    assert all(seen)


def test_an_answer_ends_with_its_token_or_before_its_string(model: Any) -> None:
    ids = prompts(1)[0]
    with closing(generator_of(model)) as generator:
        [whole] = generator.answers([Request(ids, 12)])
        third, text = whole.tokens[2], whole.text
        place = whole.tokens.index(third)
        [by_id] = generator.answers([Request(ids, 12, stop_ids=frozenset({third}))])
        [by_string] = generator.answers([Request(ids, 12, stop_strings=("never", text[6:9]))])
    with closing(generator_of(model, ends=frozenset({third}))) as generator:
        [by_model] = generator.answers([Request(ids, 12)])
    assert by_id == by_model
    assert (by_id.tokens, by_id.finish_reason) == (whole.tokens[: place + 1], "stop")
    assert by_id.text == "".join(each for each in text[: 2 * place])
    assert (by_string.text, by_string.finish_reason) == (text[: text.index(text[6:9])], "stop")


def test_a_form_that_is_too_complex_to_follow_ends_its_answer_alone(model: Any) -> None:
    one, other = prompts(2)
    pattern = "^" + "[^a]{0,1000}b?" * 50 + "$"
    with closing(generator_of(model, vocabulary=byte_tokenizer(["<|end|>"]), ends=frozenset({256}))) as generator:
        [known] = generator.answers([Request(other, 12)])
        pieces: queue.Queue[Piece] = queue.Queue()
        generator.submit(Request(other, 12), pieces.put)
        with pytest.raises(FormError, match="cannot be followed any further"):
            generator.answers([Request(one, 12, constraint={"type": "string", "pattern": pattern})])
        assert joined(last(pieces)) == known


def test_a_cancelled_request_ends_and_the_others_go_on(model: Any) -> None:
    one, other = prompts(2)
    with closing(generator_of(model)) as generator:
        [known] = generator.answers([Request(other, 40)])
        pieces: queue.Queue[Piece] = queue.Queue()
        others: queue.Queue[Piece] = queue.Queue()
        begun = threading.Event()

        def receive(piece: Piece) -> None:
            pieces.put(piece)
            begun.wait(60)  # the thread waits here, so that the request is not over before it is cancelled

        number = generator.submit(Request(one, 90), receive)
        generator.submit(Request(other, 40), others.put)
        generator.cancel(number)
        begun.set()
        found = last(pieces)
        assert joined(last(others)) == known
        generator.cancel(number)  # of one that is over: nothing
        generator.cancel(10**6)
        assert joined(found).finish_reason == "cancelled"
        assert len(joined(found).tokens) < 90


def test_close_ends_what_runs(model: Any) -> None:
    generator = generator_of(model)
    pieces: queue.Queue[Piece] = queue.Queue()
    generator.submit(Request((1, 2), 90), pieces.put)
    generator.close()
    assert joined(last(pieces)).finish_reason in ("cancelled", "length")
    with pytest.raises(UserError, match="is closed"):
        generator.submit(Request((1, 2), 3), pieces.put)


def test_a_model_that_fails_ends_its_requests_and_answers_the_next(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(generator_of(model)) as generator:
        [known] = generator.answers([Request((1, 2), 5)])

        def fails(*_: Any, **__: Any) -> None:
            raise MemoryError("no room for it")

        with monkeypatch.context() as broken:
            broken.setattr(type(model), "forward", fails)
            with pytest.raises(MemoryError, match="no room"):
                generator.answers([Request((1, 2), 5), Request((1, 2, 3), 5)])
        assert generator.answers([Request((1, 2), 5)]) == [known]
    assert "2 requests failed" in caplog.text


def test_an_adapter_that_cannot_begin_ends_its_requests_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(generator_of(model)) as generator:

        def fails(_: str | None) -> None:
            raise MemoryError("no room to begin")

        with monkeypatch.context() as broken:
            broken.setattr(generator, "_make_batch", fails)
            with pytest.raises(MemoryError, match="to begin"):
                generator.answers([Request((1, 2), 5)])
        assert len(generator.answers([Request((1, 2), 5)])[0].tokens) == 5
    assert "could not begin" in caplog.text


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request((), 5), "it has no tokens"),
        (Request((1,) * PLACES, 5), f"{PLACES} tokens, and the model's context of {PLACES} leaves no room"),
        (Request((1, 300), 5), "300 is no token of the model's 300"),
        (Request((1, -1), 5), "-1 is no token"),
        (Request((1,), 0), "0 was given"),
        (Request((1,), 5, adapter="x"), "x is not loaded"),
        (Request((1,), 5, Sampling(temperature=-1.0)), "temperature -1.0"),
        (Request((1,), 5, Sampling(temperature=float("nan"))), "temperature nan"),
        (Request((1,), 5, Sampling(top_p=0.0)), "top_p 0.0"),
        (Request((1,), 5, Sampling(top_k=-2)), "top_k -2"),
        (Request((1,), 5, Sampling(min_p=1.5)), "min_p 1.5"),
        (Request((1,), 5, Sampling(repetition_penalty=0.0)), "repetition_penalty 0.0"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_it_runs(request_: Request, why: str, model: Any) -> None:
    with closing(generator_of(model)) as generator, pytest.raises(UserError) as refused:
        generator.answers([Request((1,), 2), request_])
    assert why in str(refused.value)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def test_answers_obey_a_schema_or_an_expression_beside_free_ones(model: Any) -> None:
    tokenizer, ends = byte_tokenizer(["<|end|>"]), frozenset({256})
    with closing(generator_of(model, vocabulary=tokenizer, ends=ends)) as generator:
        drawn = Sampling(temperature=1.0, seed=3)
        free, schema, expression = generator.answers(
            [
                Request((65, 66), 8, stop_ids=frozenset()),
                Request((65, 66), 80, drawn, constraint=SCHEMA),
                Request((65, 66), 80, drawn, constraint="(yes|no), [a-c]{3}"),
            ]
        )
        [again] = generator.answers([Request((65, 66), 8)])
        for bad, why in [("((", "unclosed"), ({"type": "thing"}, "Invalid type"), ("(?=a)b", "look-ahead")]:
            with pytest.raises(UserError, match=why):
                generator.answers([Request((65,), 5, constraint=bad)])
    assert again == free
    found = json.loads(schema.text)
    assert (found["name"] in ("Ann", "Bo"), isinstance(found["old"], bool), schema.finish_reason) == (
        True,
        True,
        "stop",
    )
    answer, _, rest = expression.text.partition(", ")
    assert (answer in ("yes", "no"), len(rest), set(rest) <= set("abc")) == (True, 3, True)
