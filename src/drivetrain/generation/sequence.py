"""One request that is being answered: its tokens so far, its text, and whether it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from drivetrain.generation.requests import FinishReason, FormError, Logprob, Piece, Receiver, Request
from drivetrain.generation.sampling import Choice
from drivetrain.generation.text_stream import TextStream


class Vocabulary(Protocol):
    """The part of a tokenizer that answers need."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Constraint(Protocol):
    """A form that an answer has, which it follows token by token."""

    def forbid(self, scores: Tensor) -> None:
        """Sets the scores, (vocabulary,), of tokens that may not follow to -inf."""

    def accept(self, token: int) -> None:
        """Takes the token that follows."""

    @property
    def is_complete(self) -> bool:
        """Returns whether nothing can follow but the end."""

    @property
    def error(self) -> str | None:
        """Returns why the form cannot be followed any further."""


class Running:
    """A request and its answer so far. ends: the model's end tokens. most: new tokens that there is room for."""

    def __init__(
        self,
        number: int,
        request: Request,
        receive: Receiver,
        decode: Callable[[Sequence[int]], str],
        ends: frozenset[int],
        most: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.number, self.request = number, request
        self.new: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._receive, self._ends, self._most = receive, ends | request.stop_ids, min(request.max_new_tokens, most)
        self._text = TextStream(decode, request.stop_strings)
        self._prompt_logprobs: tuple[Logprob | None, ...] = ()
        self._constraint = constraint

    @property
    def length(self) -> int:
        return len(self.request.ids) + len(self.new)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def forbid(self, scores: Tensor) -> None:
        if self._constraint is not None:
            self._constraint.forbid(scores)

    def read_prompt(self, logprobs: Sequence[Logprob | None]) -> None:
        """Takes the prompt's log-probabilities, which go with the first piece."""
        self._prompt_logprobs = tuple(logprobs)

    def accept(self, choice: Choice) -> None:
        """Takes the next token, and hands out what is complete; no token where none is wanted."""
        if not self._most:
            self.finish_reason = "length"
            self._hand_out("")
            return
        self.new.append(choice.token)
        ended = choice.token in self._ends
        text = "" if ended else self._text.push(choice.token)
        complete = self._constraint is not None and self._follows(self._constraint, choice.token)
        if self.is_over:
            return
        if ended or complete or self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.new) >= self._most:
            self.finish_reason = "length"
        if self.is_over:
            text += self._text.flush()
        logprobs = () if choice.logprob is None else (choice.logprob,)
        self._hand_out(text, (choice.token,), logprobs)

    def _follows(self, constraint: Constraint, token: int) -> bool:
        """Returns whether the form is complete with this token. Fails the request where it cannot be followed."""
        constraint.accept(token)
        if constraint.error is not None:
            self.fail(FormError(f"the answer's form cannot be followed any further: {constraint.error}"))
        return constraint.is_complete

    def cancel(self) -> None:
        self.finish_reason = "cancelled"
        self._hand_out(self._text.flush())

    def fail(self, error: Exception) -> None:
        self.finish_reason = "error"
        self._hand_out(self._text.flush(), error=error)

    def _hand_out(
        self,
        text: str,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
        error: Exception | None = None,
    ) -> None:
        prompt, self._prompt_logprobs = self._prompt_logprobs, ()
        self._receive(Piece(text, tokens, logprobs, prompt, self.finish_reason, error))
