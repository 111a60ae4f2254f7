"""A model whose answers a test writes down: a generator on a thread of its own, with a tokenizer of bytes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Message
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import problem
from drivetrain.generation.requests import Answer, FinishReason, Logprob, Piece, Receiver, Request, Sampling

Script = Callable[[Request], str]


def parrot(request: Request) -> str:
    """Answers with a few words that depend on the seed and the draw alone."""
    return f"answer {request.sampling.seed % 1000} {request.sampling.draw}."


@dataclass
class ScriptedGenerator:
    """Sends one token after another. seconds: between tokens; fails: the error that ends each answer."""

    tokenizer: Any
    script: Script = parrot
    seconds: float = 0.0
    fails: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def submit(self, request: Request, receive: Receiver) -> int:
        if isinstance(request.constraint, dict) and request.constraint.get("type") == "impossible":
            raise problem("constraint", "the schema has the unknown type impossible", "correct it")
        self.requests.append(request)
        number = next(self._numbers)
        self.running.add(number)
        threading.Thread(target=self._run, args=(number, request, receive), daemon=True).start()
        return number

    def _run(self, number: int, request: Request, receive: Receiver) -> None:
        whole = self.script(request)
        stops = [place for stop in request.stop_strings if (place := whole.find(stop)) >= 0]
        text = whole[: min(stops, default=len(whole))]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: request.max_new_tokens]
        prompt = tuple(None if n == 0 else _logprob(request, token) for n, token in enumerate(request.ids))
        first = prompt if request.prompt_logprobs else ()
        is_cut = len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) > len(ids)
        held: list[int] = []
        for token in ids:
            if self.seconds:
                time.sleep(self.seconds)
            if number in self.cancelled:
                break
            held.append(token)
            shown = self.tokenizer.decode(held)
            done = "" if shown.endswith("�") else shown
            held = held if shown.endswith("�") else []
            logprobs = (_logprob(request, token),) if request.top_logprobs is not None else ()
            receive(Piece(done, (token,), logprobs, first))
            first = ()
        self.running.discard(number)
        if number in self.cancelled:
            receive(Piece("", (), finish_reason="cancelled"))
        else:
            finish: FinishReason = "error" if self.fails else "length" if is_cut else "stop"
            receive(Piece("", (), (), first, finish, self.fails))

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        raise AssertionError(f"{len(requests)} requests: the server submits them")

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def close(self) -> None:
        self.cancelled += self.running


def _logprob(request: Request, token: int) -> Logprob:
    top = tuple((other, -1.0 - place) for place, other in enumerate((token, 65)[: request.top_logprobs or 0]))
    return Logprob(token, -0.5, top)


@dataclass
class ScriptedModel:
    """Stands for inference.loading.LoadedModel."""

    generator: ScriptedGenerator
    tokenizer: Any
    template: ChatTemplate | None
    name: str = "scripted"
    context_length: int | None = 4096
    adapters: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        assert self.template is not None
        return tuple(self.template.prompt_ids(messages, tools))

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        self.generator.close()


def scripted(script: Script = parrot, template: str | None = "chatml", **given: Any) -> ScriptedModel:
    """Returns a model with a byte tokenizer and ChatML (template=None: none)."""
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    generator = {name: given.pop(name) for name in ("seconds", "fails") if name in given}
    made = None if template is None else ChatTemplate(tokenizer, template, "template")
    return ScriptedModel(ScriptedGenerator(tokenizer, script, **generator), tokenizer, made, **given)
