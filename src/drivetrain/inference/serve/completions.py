"""POST /v1/completions: texts that are continued, and the log-probabilities of prompts (`echo`)."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from drivetrain.generation.requests import Answer, Logprob, Piece, Request
from drivetrain.inference.serve.answering import Group
from drivetrain.inference.serve.chat import usage
from drivetrain.inference.serve.fields import AnswerFields
from drivetrain.inference.serve.logprobs import TokenTexts, text_logprobs
from drivetrain.inference.serve.served import Served
from drivetrain.web.event_stream import event
from drivetrain.web.json_bodies import written_json
from drivetrain.web.refusals import Refusal

MOST_PROMPTS = 1024
DEFAULT_TOKENS = 16  # as OpenAI's
MOST_LOGPROBS = 1 << 18  # of the prompts of a request, which are kept until they are written

Ids = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1, fail_fast=True)]


class CompletionRequest(AnswerFields):
    """The body of a request for text completions."""

    prompt: (
        str
        | Annotated[
            list[Annotated[str, Field(strict=True)]], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)
        ]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @property
    def answers(self) -> int:
        """The number of answers: `choices` of each prompt."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return self.choices * (1 if is_one else len(self.prompt))


def prepared(served: Served, body: CompletionRequest) -> list[Request]:
    """Returns the requests, those of one prompt beside each other. Raises Refusal."""
    adapter = served.adapter(body.model)
    wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if wanted == 0 and not body.echo:
        raise Refusal(400, "max_tokens=0 is for echo=true", "invalid_request", "max_tokens")
    prompts = _prompts(served, body.prompt)
    asks = bool(body.echo) and body.logprobs is not None
    if asks:
        _check_logprobs(sum(map(len, prompts)) * body.choices * ((body.logprobs or 0) + 1))
    seed = body.seed_or_random()
    return [
        Request(
            ids=ids,
            max_new_tokens=served.room(len(ids), wanted, "max_tokens"),
            sampling=body.sampling(served.model.sampling, seed, draw),
            stop_strings=body.stops,
            top_logprobs=body.logprobs,
            prompt_logprobs=asks,
            adapter=adapter,
        )
        for draw, ids in enumerate(each for each in prompts for _ in range(body.choices))
    ]


def _check_logprobs(count: int) -> None:
    if count > MOST_LOGPROBS:
        why = f"echo asks for {count:,} log-probabilities of prompts (tokens x n x (logprobs + 1)), and the most are"
        raise Refusal(400, f"{why} {MOST_LOGPROBS:,}: ask for fewer at once", "too_many_logprobs", "logprobs")


def _prompts(served: Served, given: Any) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt."""
    if isinstance(given, str):
        return [_ids(served, given)]
    if isinstance(given[0], int):
        return [_known(served, given)]
    return [_ids(served, each) if isinstance(each, str) else _known(served, each) for each in given]


def _ids(served: Served, text: str) -> tuple[int, ...]:
    served.check_length([text], "prompt")
    found = tuple(served.model.text_ids(text))
    if not found:
        raise Refusal(400, "the prompt is empty", "invalid_request", "prompt")
    return found


def _known(served: Served, ids: Sequence[int]) -> tuple[int, ...]:
    count = len(served.model.tokenizer)
    unknown = next((each for each in ids if each >= count), None)
    if unknown is not None:
        raise Refusal(400, f"the vocabulary has no token {unknown}: it has {count:,}", "invalid_request", "prompt")
    return tuple(ids)


def whole(served: Served, body: CompletionRequest, requests: Sequence[Request], answers: Sequence[Answer]) -> Any:
    """Returns the body of the response."""
    texts = TokenTexts(served.model.tokenizer)
    choices = [
        _choice(served, body, texts, index, request, answer)
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    prompts = sum(len(request.ids) for request in requests[:: body.choices])
    count = sum(len(answer.tokens) for answer in answers)
    return {**_head(served, body), "choices": choices, "usage": usage(prompts, count)}


def _choice(
    served: Served, body: CompletionRequest, texts: TokenTexts, index: int, request: Request, answer: Answer
) -> dict[str, Any]:
    before = _text(served, request.ids) if body.echo else ""
    logprobs = None
    if body.logprobs is not None:
        first = list(zip(request.ids, answer.prompt_logprobs, strict=True)) if body.echo else []
        new: list[tuple[int, Logprob | None]] = [(each.token, each) for each in answer.logprobs]
        logprobs = text_logprobs([*first, *new], texts, 0)
    finish = answer.finish_reason
    return {"index": index, "text": before + answer.text, "logprobs": logprobs, "finish_reason": finish}


async def streamed(
    served: Served, body: CompletionRequest, requests: Sequence[Request], group: Group
) -> AsyncGenerator[bytes, None]:
    """Yields the events of the response."""
    head, texts = _head(served, body), TokenTexts(served.model.tokenizer)
    more = {"usage": None} if body.wants_usage else {}
    lengths = [0] * len(requests)

    def made(index: int, piece: Piece, is_first: bool) -> bytes:
        """Returns the event of a piece; b"" where it has nothing to show. is_first: the prompt is shown before it."""
        shown: list[tuple[int, Logprob | None]] = [(each.token, each) for each in piece.logprobs]
        text = piece.text
        if is_first:
            ids = requests[index].ids
            text = _text(served, ids) + text
            shown = [*zip(ids, piece.prompt_logprobs, strict=False), *shown]
        logprobs = text_logprobs(shown, texts, lengths[index]) if body.logprobs is not None else None
        lengths[index] += len(text)
        if not (text or shown or piece.finish_reason):
            return b""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        content = {**head, "choices": [choice], **more}
        return event(written_json(content).decode() if is_first else json.dumps(content))

    count = 0
    echoes = set(range(len(requests))) if body.echo else set()
    async with aclosing(group.pieces()) as pieces:
        async for index, piece in pieces:
            count += len(piece.tokens)
            if index in echoes:  # a whole prompt is written beside the event loop
                echoes.remove(index)
                found = await served.finished(functools.partial(made, index, piece, True))
            else:
                found = made(index, piece, False)
            if found:
                yield found
    if body.wants_usage:
        prompts = sum(len(request.ids) for request in requests[:: body.choices])
        yield event(json.dumps({**head, "choices": [], "usage": usage(prompts, count)}))
    yield event("[DONE]")


def _text(served: Served, ids: Sequence[int]) -> str:
    text: str = served.model.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _head(served: Served, body: CompletionRequest) -> dict[str, Any]:
    number = f"cmpl-{secrets.token_hex(12)}"
    return {"id": number, "object": "text_completion", "created": int(time.time()), "model": body.model or served.name}
