"""Renders messages by a chat template, through the tokenizer's own apply_chat_template, as at inference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.shape_renderings import ShapeRenderings
from drivetrain.data.language.template_coverage import LeftOut
from drivetrain.data.language.template_sources import template_text
from drivetrain.errors import problem

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Transformers' own, which keeps it to itself; without it each conversation is rendered alone
compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)

Tools = Sequence[Mapping[str, Any]]


class TemplateRenderer:
    """A chat template with its tokenizer. name: for errors; text: the Jinja source.

    source: None for the tokenizer's own, a shipped name, or the path of a .jinja file. Raises UserError on `field` if
    there is no such template, it does not compile, or the tokenizer cannot serve it.
    """

    def __init__(self, tokenizer: Any, source: str | None, field: str) -> None:
        if not tokenizer.is_fast:
            why = f"{type(tokenizer).__name__} is no fast tokenizer: it cannot map tokens to characters"
            raise problem(field, why, "give a tokenizer that has a tokenizer.json")
        self._tokenizer, self._source, self._field = tokenizer, source, field
        self.name, self.text = template_text(tokenizer, source, field)
        self._template = None if source is None else self.text  # None: Transformers picks one of several by the tools
        self._marks = MARK.search(self.text) is not None
        self._known_special: tuple[int, tuple[str, ...]] = -1, ()
        self._shapes: ShapeRenderings | None = None  # while many conversations are rendered
        self._last_shapes: tuple[dict[str, Any], ShapeRenderings | None] | None = None
        self._left_out = LeftOut(lambda messages, tools: self._render(messages, tools, prompt=False))
        try:
            self._render([Message("user", "a")], (), prompt=True)
        except jinja2.TemplateSyntaxError as error:
            why = f"{self.name} does not compile: line {error.lineno}: {error.message}"
            raise problem(field, why, "correct the template") from None
        except Exception:  # the template's errors are reported for each conversation
            pass

    def install(self) -> None:
        """Sets the template in the tokenizer, so that it is saved with it and inference renders the same."""
        if self._template is not None:
            self._tokenizer.chat_template = self._template

    def prompt_ids(self, conversation_so_far: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Returns the ids that inference feeds to get the next reply."""
        text = self._render(conversation_so_far, tools, prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @contextmanager
    def _of_many(self) -> Iterator[None]:
        """While the block runs, renderings are joined from those of conversations of the same shape."""
        self._shapes = self._shapes_of_now()
        try:
            yield
        finally:
            self._shapes = None

    @property
    def _special(self) -> tuple[str, ...]:
        count = len(self._tokenizer)  # asking for the tokens themselves takes longer than a rendering
        if self._known_special[0] != count:
            self._known_special = count, tuple(self._tokenizer.added_tokens_encoder)
        return self._known_special[1]

    def _render(self, messages: Sequence[Message], tools: Tools, prompt: bool) -> str:
        if self._shapes is not None and not tools:
            return self._shapes.text(messages, prompt)
        return self._rendered_by_template(messages, prompt, tools)

    def _shapes_of_now(self) -> ShapeRenderings | None:
        """Returns a way to join renderings, valid as long as the tokenizer's special tokens stay the same."""
        variables = dict(self._tokenizer.special_tokens_map)
        if self._last_shapes is None or self._last_shapes[0] != variables:
            shapes = None
            if compile_template is not None:
                source = self._tokenizer.get_chat_template(self._template, None)
                render = partial(self._rendered_by_template, tools=())
                shapes = ShapeRenderings(render, compile_template(source), variables, source)
            self._last_shapes = variables, shapes
        return self._last_shapes[1]

    def _rendered_by_template(self, messages: Sequence[Message], prompt: bool, tools: Tools) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [message.as_template() for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return text

    def _marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Renders without a generation prompt; returns the text and the characters that the template marks."""
        if not self._marks:
            return self._render(messages, tools, prompt=False), []
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(  # apply_chat_template gives tokens' masks only, made of these
            [[message.as_template() for message in messages]],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._tokenizer.get_chat_template(self._template, list(tools) or None),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], marks[0]
