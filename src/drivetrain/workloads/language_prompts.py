"""Prompts of a language model at each evaluation, and what ends an answer to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from drivetrain.config.generation import Generation
from drivetrain.config.language import LanguageModel
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.language.samples import JoinedSamples, Sample
from drivetrain.errors import UserError, problem
from drivetrain.workloads.base import Samples
from drivetrain.workloads.exporting import Dialogue
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_data import LanguageReader, why_none

FIELD = "workload.generate"
_EACH_ROLE = (
    (Message("user", "What is 2 + 3?"),),
    (Message("user", "你好, wie geht's?\n"), Message("assistant", " Well, thanks. "), Message("user", "Good")),
    (Message("system", "Answer in a word."), Message("user", "Which day follows Monday?")),
)


def prompts_of(config: LanguageModel, reader: LanguageReader, evaluation: JoinedSamples | None) -> list[Prompt]:
    """Returns prompts of the evaluation data, then the user's own; none if none are configured.

    From a conversation it takes all before its last reply, as inference feeds it; from a text its first tokens. A
    prompt that would leave no room within the length is passed over. Raises UserError if nothing is left, or nothing
    evaluates.
    """
    asked = config.generate
    if asked is None:
        return []
    if evaluation is None:
        why = f"prompts are answered at each evaluation, and there are no evaluation data: {why_none(config.data)}"
        share = "evaluation_rows" if config.data.stream else "a larger evaluation_fraction"
        raise problem(FIELD, why, f"give workload.data.evaluation or {share}, or leave {FIELD} out")
    own = [own_prompt(text, reader, config, f"{FIELD}.prompts") for text in asked.prompts]
    found = [*_of_data(config, asked, reader, evaluation), *own]
    if not found:
        why = f"of the evaluation data, no prompt is shorter than length ({config.data.length})"
        raise problem(f"{FIELD}.samples", why, f"raise workload.data.length, or give {FIELD}.prompts")
    return found


def prompts_of_samples(samples: Samples, numbers: Iterable[int], tokenizer: Any) -> dict[int, Prompt]:
    """Returns sample's number → the tokens before its last reply, with that reply; samples that begin with it have
    none."""
    found = {number: prompt_of_sample(samples.load(number, 0), tokenizer) for number in numbers}
    return {number: prompt for number, prompt in found.items() if prompt is not None}


def prompt_of_sample(sample: Sample, tokenizer: Any) -> Prompt | None:
    """Returns the tokens before the sample's last reply, with that reply; None for one that begins with it."""
    ids, targets = sample
    end = int(np.flatnonzero(targets)[-1]) + 1 if targets.any() else 0
    before = np.flatnonzero(~targets[:end])
    if not len(before):
        return None
    start = int(before[-1]) + 1
    reply = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=True)
    given = ids[:start].tolist()
    return Prompt(text_of(tokenizer, given), tuple(given), reply)


class OwnSamples:
    """The first sample of each group of several: the chosen one of a pair, a labelled one's own."""

    def __init__(self, groups: Samples) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def load(self, index: int, epoch: int) -> Sample:
        first: Sample = self._groups.load(index, epoch)[0]
        return first


def dialogues_of(reader: LanguageReader, count: int) -> list[Dialogue]:
    """Returns conversations that wait for a reply, with the ids that the run's chat template makes of them: the first
    evaluation data, where these were kept, and some that ask for each role. Those that the template refuses are left
    out."""
    found: list[Dialogue] = []
    held = ((talk.messages[: _last_reply(talk)], talk.tools) for talk in reader.held)
    for messages, tools in chain(((each, ()) for each in _EACH_ROLE), held):
        if reader.template is None or len(found) == count:
            break
        with suppress(Exception):  # templates raise what they like
            ids = reader.template.prompt_ids(messages, tools)
            found.append(
                Dialogue([each.as_template() for each in messages], [dict(tool) for tool in tools], tuple(ids))
            )
    return found


def _last_reply(talk: Conversation) -> int:
    return max((place for place, message in enumerate(talk.messages) if message.role == "assistant"), default=0)


def _of_data(
    config: LanguageModel, asked: Generation, reader: LanguageReader, evaluation: JoinedSamples
) -> Iterator[Prompt]:
    if reader.template is None:
        for index in range(min(asked.samples, len(evaluation))):
            ids = evaluation.load(index, 0)[0][: asked.prompt_tokens].tolist()
            yield Prompt(text_of(reader.tokenizer, ids), tuple(ids))
        return
    given = 0
    for conversation in reader.held:
        prompt = _of_conversation(conversation, reader.template, reader.tokenizer)
        if given < asked.samples and prompt is not None and len(prompt.ids) < config.data.length:
            given += 1
            yield prompt


def _of_conversation(conversation: Conversation, template: ChatTemplate, tokenizer: Any) -> Prompt | None:
    messages, reference = split_at_reply(conversation)
    try:
        ids = template.prompt_ids(messages, conversation.tools)
    except Exception:  # templates raise what they like; the account of the data tells it
        return None
    return Prompt(text_of(tokenizer, ids), tuple(ids), reference)


def split_at_reply(conversation: Conversation) -> tuple[Sequence[Message], str | None]:
    """Returns the messages before the last reply, and this reply with its calls of tools. A conversation that ends with
    another message is a prompt as a whole, without a reference."""
    *before, last = conversation.messages
    if last.role != "assistant":
        return conversation.messages, None
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in last.tool_calls]
    return before, "\n".join([*([last.content] if last.content else []), *calls])


def own_prompt(text: str, reader: LanguageReader, config: LanguageModel, field: str) -> Prompt:
    """Returns the prompt that a user's text is: a message to answer, or a text to continue. Raises UserError on `field`
    for one that leaves no room for an answer, or that the template refuses."""
    system = [] if config.data.system is None else [Message("system", config.data.system)]
    try:
        ids = ids_of_prompt([*system, Message("user", text)], (), reader, config)
    except RowError as error:
        raise problem(field, str(error), "give a prompt that it takes, and that leaves room for an answer") from None
    return Prompt(text_of(reader.tokenizer, ids), ids)


def ids_of_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], reader: LanguageReader, config: LanguageModel
) -> tuple[int, ...]:
    """Returns the tokens that get the reply to messages; without a chat template, those of the last one, whose text is
    continued. Raises RowError if they leave no room for an answer, or the template refuses them."""
    text = messages[-1].content
    if reader.template is None:
        ids = reader.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        try:
            ids = reader.template.prompt_ids(messages, tools)
        except Exception as error:  # templates raise what they like
            raise RowError(f"{reader.template.name} refuses {text[:40]!r}: {error}") from None
    if not 0 < len(ids) < config.data.length:
        raise RowError(f"{text[:40]!r} has {len(ids)} tokens, of a length of {config.data.length}")
    return tuple(ids)


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of tokens, special ones among them."""
    text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return text


def behind(sequences: Sequence[Sequence[int]]) -> list[Sample]:
    """Returns samples with a token behind each sequence that is its only target: the place where logits are wanted."""
    targets = [np.arange(len(ids) + 1) == len(ids) for ids in sequences]
    tokens = [np.array([*ids, 0], dtype=np.int32) for ids in sequences]
    return list(zip(tokens, targets, strict=True))


def ends_of(reader: LanguageReader) -> frozenset[int]:
    """Returns the tokenizer's eos, and the special token with which the template ends a reply."""
    ends = set() if reader.tokenizer.eos_token_id is None else {int(reader.tokenizer.eos_token_id)}
    if reader.template is not None:
        with suppress(UserError):
            talk = Conversation((Message("user", "a"), Message("assistant", "b")))
            made = reader.template.tokenised([talk], "responses")
            last = made.ids[made.targets][-1:].tolist()
            ends |= {*last} & reader.tokenizer.added_tokens_decoder.keys()
    return frozenset(ends)
