"""Fields that requests of OpenAI's API share, and what becomes of those that no model here can heed."""

from __future__ import annotations

import difflib
import secrets
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drivetrain.errors import shown
from drivetrain.generation.requests import Sampling

# labels for OpenAI's own accounts and caches, which change no answer
LABELS = {
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
    *("include_obfuscation",),
}
# what no model here does, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "verbosity": ("medium",),
    "n": (1,),
    "background": (False,),
    "include": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
STORED = "no conversation is stored here: send all of it with each request"
REASONS = {
    "store": STORED,
    "previous_response_id": STORED,
    "conversation": STORED,
    "prompt": "no prompt templates are stored here: send the messages",
    "background": "answers are sent while they are made, and stored nowhere",
    "parallel_tool_calls": "a model decides how many functions it calls",
}
DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters: each new token is compared with all beginnings of a text that may end an answer
MOST_ANSWERS = 128
MOST_NAMED = 5  # fields of a request that an error names
MOST_COMPARED = 50  # characters of a name that are compared with those of fields


class Body(BaseModel):
    """The body of a request. Unknown fields, and fields that could not be heed, are refused with a reason."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Body:
        unheeded = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if not (name in LABELS or value is None or _asks_for_nothing(name, value))
        }
        if unheeded:
            first = islice(unheeded.items(), MOST_NAMED)
            whys = [
                f"{shown(name)[1:-1]}={shown(value)} is not supported: {self._reason(name)}" for name, value in first
            ]
            more = [f"and {len(unheeded) - MOST_NAMED:,} more"] if len(unheeded) > MOST_NAMED else []
            raise ValueError("; ".join([*whys, *more]))
        return self

    def _reason(self, name: str) -> str:
        if name in REASONS or name in NEUTRAL:
            return REASONS.get(name, "leave it out")
        near = difflib.get_close_matches(name[:MOST_COMPARED], type(self).model_fields, n=1)
        return f"no such field is known{f': did you mean {near[0]}?' if near else ''}"


def _asks_for_nothing(name: str, value: Any) -> bool:
    neutral = NEUTRAL.get(name, ())
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


class StreamOptions(Body):
    include_usage: bool = False


StopText = Annotated[str, Field(max_length=LONGEST_STOP)]
Stop = Annotated[
    StopText
    | Annotated[list[Annotated[StopText, Field(min_length=1)]], Field(max_length=MOST_STOPS, fail_fast=True)]
    | None,
    Field(description="The answer ends before the first of these texts."),
]


class SamplingFields(Body):
    """How tokens are drawn. Beside OpenAI's fields there are those of vLLM: top_k, min_p, repetition_penalty. What is
    left out is taken from the model's own generation settings; without any, the likeliest token is taken."""

    model: str | None = Field(None, max_length=1000, description="A name of /v1/models; left out, the model served.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)

    def sampling(self, own: Sampling, seed: int, draw: int) -> Sampling:
        """Returns how the answer of this number is drawn. own: the model's settings, for what the request leaves
        out."""
        given = {name: value for name in DRAWN if (value := getattr(self, name)) is not None}
        return replace(own, **given, seed=seed, draw=draw)


class AnswerFields(SamplingFields):
    """Fields of chat and text completions."""

    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> AnswerFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(each for each in given if each)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def seed_or_random(self) -> int:
        return secrets.randbits(62) if self.seed is None else self.seed & ((1 << 63) - 1)
