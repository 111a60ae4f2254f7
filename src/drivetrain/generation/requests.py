"""A request for an answer, and the answer: what predictions, chat, the server and training all pass to generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from drivetrain.errors import RunError

FinishReason = Literal["stop", "length", "cancelled", "error"]


class FormError(RunError):
    """The form of an answer, which its request asked for, is too complex to be followed to the end."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    draw: int = 0  # the number of the answer among those of one seed: both decide what is drawn, other requests do not


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted for it."""

    ids: tuple[int, ...]  # the prompt, at least one token
    max_new_tokens: int  # 0 where only the prompt's log-probabilities are wanted
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()  # besides the model's own end tokens
    stop_strings: tuple[str, ...] = ()  # the answer's text ends before the first of them
    skip_special_tokens: bool = True  # in the text
    top_logprobs: int | None = None  # None: none are returned; 0: those of the chosen tokens; n: n alternatives too
    logprobs_as_drawn: bool = False  # those of the answer's tokens at the temperature, not at 1
    prompt_logprobs: bool = False
    constraint: dict[str, Any] | str | None = None  # a JSON schema, or a regular expression, that the answer obeys
    adapter: str | None = None  # the name of a loaded adapter; None: the model as it was loaded


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model (before sampling's filters), and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an answer, as it is streamed. A token whose characters are incomplete, or may begin a stop string, has
    its text in a later piece."""

    text: str  # whole characters only
    tokens: tuple[int, ...]  # the token that ends an answer is one of them, and has no text
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()  # in the first piece: one a prompt token; the first has none
    finish_reason: FinishReason | None = None  # of the last piece
    error: Exception | None = None  # why the model failed, where the reason is "error"


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()  # one a prompt token; the first has none


def joined(pieces: Sequence[Piece]) -> Answer:
    """Returns the answer of these pieces. Raises the error with which it ended, if there is one."""
    last = pieces[-1]
    if last.error is not None:
        raise last.error
    assert last.finish_reason is not None, "the last piece has the reason"
    return Answer(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        last.finish_reason,
        tuple(each for piece in pieces for each in piece.logprobs),
        tuple(each for piece in pieces for each in piece.prompt_logprobs),
    )


class Receiver(Protocol):
    """Called with each piece of one answer, from the thread that generates. It must return at once."""

    def __call__(self, piece: Piece) -> None: ...


class Generator(Protocol):
    """A loaded model that answers requests, many at once."""

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers in the order of the requests. Raises UserError for one that cannot be answered."""

    def submit(self, request: Request, receive: Receiver) -> int:
        """Queues a request and returns its number; `receive` gets its pieces. Never blocks.

        Raises UserError for a request that cannot be answered.
        """

    def cancel(self, number: int) -> None:
        """Ends a request; its receiver gets a last piece with "cancelled"."""

    def close(self) -> None:
        """Ends all requests and gives memory back."""
