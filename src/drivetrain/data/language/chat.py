"""Turns conversations into token ids, and finds which of them are targets: the assistant's.

The text comes from the chat template, through the tokenizer's own apply_chat_template, as it will at inference. The
speaker of each character is found by rendering again, once a reply: the template's text for the messages before a
reply, with the generation prompt, is the prompt at inference; the text that follows once the reply is there is what the
model should generate. A template that marks replies itself ({% generation %}) decides where they begin and end.

Some templates rewrite history (Qwen3 drops the reasoning of earlier turns): the prompt of a reply at inference is then
no longer in the rendering of the whole conversation. It becomes several samples, each as inference sees it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import jinja2
import numpy as np

from drivetrain.data.flat_encoding import encode
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.target_tokens import Rendered, Span, edges_of_targets, target_tokens, token_starts
from drivetrain.data.language.template_renderer import TemplateRenderer, Tools
from drivetrain.errors import UserError, problem

CONTROL = re.compile(r"<\|\w[\w.-]*\|>|<｜[^｜\s]+｜>|<(?:start|end)_of_turn>")  # ChatML and Llama, DeepSeek, Gemma
SERVES = "chatml has a place for it"
THOUGHT = "</think>"
AT_ONCE = 256  # texts a call of the tokenizer: their offsets are Python objects, which take much memory
CHECKED = 200  # conversations of which the prompts are rendered and tokenised again

TrainOn = Literal["responses", "last_response", "all"]


@dataclass(frozen=True)
class ConversationTokens:
    """Token ids of N samples, end to end, none of them cut short.

    ids: (total,) int32; targets: (total,) bool; offsets: (N + 1,) int64; origin: (N,) int64, index of the conversation.
    first, last: (N,) int32, place in the sample of its first and last target that has a token before it; NO_TARGET and
    0 where there is none.
    """

    ids: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    origin: np.ndarray
    first: np.ndarray
    last: np.ndarray
    problems: tuple[tuple[str, str], ...]  # where, why: conversations without a sample
    split_conversations: int  # that became several samples, because the template rewrites history
    boundary_checked: int  # replies whose prompt was tokenised by itself, as inference does
    boundary_mismatches: int  # of those, the ones where it has other ids there than in training
    unended: int  # samples whose last reply the template marks without the token that ends it


class ChatTemplate(TemplateRenderer):
    """A chat template with its tokenizer, which makes samples of conversations."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self._tokenizer, self._source, self._field)

    def rendered(self, conversation: Conversation, train_on: TrainOn = "responses") -> list[Rendered]:
        """Returns the samples of a conversation: one, or several if the template rewrites history.

        Text behind the last trained reply is left out unless everything is trained. Raises UserError if the template
        does not separate replies from prompts; other exceptions, the template's own among them, if this conversation
        does not suit.
        """
        replies = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        if train_on == "all":
            return [self._everything(conversation, replies)]
        wanted = replies[-1:] if train_on == "last_response" else replies
        trained = [reply for reply in wanted if conversation.messages[reply].trained]
        if not trained:
            raise _UnsuitableError("it has no reply to train on")
        samples: list[Rendered] = []
        for view in (self._view(conversation, reply) for reply in trained):
            if samples and view.text.startswith(samples[-1].text[: samples[-1].spans[-1].end]):
                view = replace(view, spans=samples.pop().spans + view.spans)  # the earlier reply, as it was
            samples.append(view)
        self._check_complete(conversation.messages[: trained[-1] + 1], conversation.tools)
        return samples

    def tokenised(
        self, conversations: Sequence[Conversation], train_on: TrainOn, checked: Container[int] | None = None
    ) -> ConversationTokens:
        """Tokenises each rendering once, as a whole. A token is a target if it starts within a target's characters, so
        a token that reaches from the prompt into the reply is none; `boundary_mismatches` counts those.

        checked: indices of the conversations whose prompts are tokenised by themselves; None for CHECKED of them.
        """
        samples, origin, problems = self._samples(conversations, train_on)
        checked = looked_at(len(conversations)) if checked is None else checked
        parts, prompts = [], []
        for begin in range(0, len(samples), AT_ONCE):
            batch = samples[begin : begin + AT_ONCE]
            encoded = encode(self._tokenizer, [sample.text for sample in batch], spans=True)
            targets = target_tokens(encoded, [sample.spans for sample in batch])
            parts.append((encoded.ids, targets, encoded.lengths))
            ends = np.cumsum(encoded.lengths)
            for place, (sample, end) in enumerate(zip(batch, ends.tolist(), strict=True)):
                if origin[begin + place] in checked and train_on != "all":
                    own = slice(end - int(encoded.lengths[place]), end)
                    starts = token_starts(encoded, own)
                    prompts += self._prompts_agree(
                        conversations[origin[begin + place]], sample, encoded.ids[own], starts
                    )
        empty = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.int64)
        ids, targets, lengths = (np.concatenate(each) for each in zip(empty, *parts, strict=True))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        first, last = edges_of_targets(targets, offsets)
        return ConversationTokens(
            ids=ids,
            targets=targets,
            offsets=offsets,
            origin=np.array(origin, dtype=np.int64),
            first=first,
            last=last,
            problems=tuple(problems),
            split_conversations=len({a for a, b in pairwise(origin) if a == b}),
            boundary_checked=len(prompts),
            boundary_mismatches=prompts.count(False),
            unended=sum(sample.unended for sample in samples),
        )

    def refused(self, conversations: Sequence[Conversation], train_on: TrainOn) -> list[tuple[str, str]]:
        """Returns the `problems` of `tokenised`, without tokenising."""
        return self._samples(conversations, train_on)[2]

    def _samples(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> tuple[list[Rendered], list[int], list[tuple[str, str]]]:
        samples: list[Rendered] = []
        origin: list[int] = []
        problems: list[tuple[str, str]] = []
        with self._of_many():
            for index, conversation in enumerate(conversations):
                try:
                    found = self.rendered(conversation, train_on)
                    for sample in found:
                        sample.text.encode()  # half of a surrogate pair fails here, not in a batch with others
                except (UserError, MemoryError, RecursionError, ImportError):  # no fault of the row's
                    raise
                except Exception as error:  # templates raise what they like
                    problems.append((conversation.where, self._reason(error)))
                    continue
                samples += found
                origin += [index] * len(found)
        return samples, origin, problems

    # --- one conversation --------------------------------------------------------------------------------------------

    def _view(self, conversation: Conversation, reply: int) -> Rendered:
        """Renders a conversation up to a reply, with that reply's characters."""
        before, tools = conversation.messages[:reply], conversation.tools
        if not before:
            raise _UnsuitableError("it begins with a reply, so that nothing prompts it")
        prompt = self._render(before, tools, prompt=True)
        text, marks = self._marked([*before, conversation.messages[reply]], tools)
        continues = text.startswith(prompt)
        shared = len(prompt) if continues else _first_difference(prompt, text)
        own = [(max(start, shared) if continues else start, end) for start, end in marks if end > shared]
        if not own and not continues:
            why = f"{self.name} does not tell replies from prompts: for {conversation.where or 'a conversation'}, what"
            why += f" it writes with reply {reply + 1} does not begin with what it writes before it, as a prompt"
            raise problem(self._field, why, "choose chatml or another, or mark replies in it with {% generation %}")
        own = own or [(shared, len(text))]
        own[-1] = (own[-1][0], self._end_of_turn(text, *own[-1]))
        trained_text = "".join(text[start:end] for start, end in own)
        if THOUGHT in conversation.messages[reply].content and THOUGHT not in trained_text:
            raise _UnsuitableError(f"{self.name} leaves out what a reply has before {THOUGHT}: {SERVES}")
        unended = bool(marks) and text[own[-1][1] :].lstrip().startswith(self._special)
        unended = unended and not trained_text.rstrip().endswith(self._special)
        return Rendered(text, tuple(Span(start, end, reply) for start, end in own), unended)

    def _everything(self, conversation: Conversation, replies: Sequence[int]) -> Rendered:
        text = self._render(conversation.messages, conversation.tools, prompt=False)
        self._check_complete(conversation.messages, conversation.tools)
        spans, start = [], 0
        for reply in replies:
            if conversation.messages[reply].trained:
                continue
            view = self._view(conversation, reply)
            if not text.startswith(view.text[: view.spans[-1].end]):
                raise _UnsuitableError(f"reply {reply + 1} is not to be trained, but {self.name} rewrites it later")
            for untrained in view.spans:
                spans.append(Span(start, untrained.start, -1))
                start = untrained.end
        return Rendered(text, (*spans, Span(start, len(text), -1)))

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Returns the end of a turn without the white space after a special token: inference stops at the token."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._special) else end

    def _check_complete(self, messages: Sequence[Message], tools: Tools) -> None:
        what = self._left_out.first(messages, tools)
        if what is not None:
            raise _UnsuitableError(f"{self.name} leaves out {what}: {SERVES}")

    def _reason(self, error: Exception) -> str:
        if isinstance(error, _UnsuitableError):
            return str(error)
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return f"{self.name} refuses it: {kind}{error}"

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _prompts_agree(
        self, conversation: Conversation, sample: Rendered, ids: np.ndarray, starts: np.ndarray
    ) -> list[bool]:
        """Returns for each reply whether inference would feed the ids before its first target."""
        agree: dict[int, bool] = {}
        for span in sample.spans:
            if span.message not in agree:
                fed = self.prompt_ids(conversation.messages[: span.message], conversation.tools)
                tokens = (span.start <= starts) & (starts < span.end)
                agree[span.message] = bool(tokens.any()) and fed == ids[: tokens.argmax()].tolist()
        return list(agree.values())


class _UnsuitableError(Exception):
    """A conversation that cannot be trained on with this template."""


def looked_at(count: int) -> range:
    """Returns the indices of CHECKED of so many conversations, or a few less, spread evenly."""
    return range(0, count, -(-count // CHECKED) or 1)


def _first_difference(one: str, other: str) -> int:
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


def missing_tokens(template: ChatTemplate, tokenizer: Any) -> list[str]:
    """Returns special tokens that the template writes out (<|im_start|> and the like) and the tokenizer does not have,
    so that it would split them. Tokens that a template joins from pieces are not found."""
    written = dict.fromkeys(CONTROL.findall(re.sub(r"\{#.*?#\}", "", template.text, flags=re.DOTALL)))
    known = tokenizer.get_vocab()
    return [token for token in written if token not in known]


def show(ids: np.ndarray, targets: np.ndarray, tokenizer: Any) -> list[tuple[str, bool]]:
    """Returns one sample's text in pieces, each with whether it is trained. ids, targets: (T,)."""
    edges = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(ids)] if len(ids) else []
    # from the start each time: by itself, a piece would lack the space that some tokenizers leave out at the start
    texts = [tokenizer.decode(ids[:edge].tolist(), clean_up_tokenization_spaces=False) for edge in edges]
    return [
        (after[len(before) :], bool(targets[edge]))
        for edge, (before, after) in zip(edges, pairwise(texts), strict=False)
    ]
