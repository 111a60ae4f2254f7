"""Turns answers that are marked step by step into samples: the prompt's tokens, then those of each step and of what
ends it, whose last token carries the step's label.

Each step is tokenised by itself, and so is the text that separates it from the next: a step ends at a token of its own,
whatever follows, and a model that scores an unfinished answer reads the same tokens (Uesato et al. 2022, "Solving math
word problems with process- and outcome-based feedback"; the layout of TRL's trainer of that name).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import FIELD, SHOWN, Cut, places_of
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import StepSamples, TokenSamples
from drivetrain.data.token_cache import Arrays, cached, content_key
from drivetrain.errors import Problem, UserError

ARRAYS = ("ids", "ends", "labels", "offsets", "prompts", "origin")


def step_samples(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    tokenizer: Any,
    data: LanguageData,
    separator: str = "\n",
) -> Cut[StepSamples]:
    """Makes samples. Raises UserError for those longer than `data.length` if that is an error, naming the first.

    A long one loses the beginning of its prompt, of which at least half of the length (or all) stays, then its last
    steps. separator: the text behind each step.
    """
    header = ["steps", template.text, tokenizer.chat_template, tokenizer.special_tokens_map, separator]
    key = content_key(header, tokenizer, chain.from_iterable(map(_texts, conversations)))
    made, warning = cached(
        data.cache, key, lambda: _tokenised(conversations, template, tokenizer, separator), _is_whole
    )
    whole, prompts = np.diff(made["offsets"]), made["prompts"]
    too_long = whole > data.length
    if data.too_long == "error" and too_long.any():
        raise UserError([*_problems(places_of(conversations, made["origin"][too_long]), whole[too_long], data.length)])
    left_out = prompts - np.minimum(prompts, np.maximum(data.length - whole + prompts, data.length // 2))
    starts, lengths = made["offsets"][:-1] + left_out, np.minimum(whole - left_out, data.length)
    fits = ~too_long if data.too_long == "drop" else np.ones(len(whole), dtype=bool)
    ended = np.concatenate([[0], np.cumsum(made["ends"])])
    trained = ended[starts + lengths] > ended[starts]
    kept = np.flatnonzero(fits & trained)
    places = places_of(conversations, made["origin"][kept])
    own = TokenSamples(made["ids"], made["ends"], starts[kept], lengths[kept], places)
    return Cut(
        StepSamples(own, made["labels"]),
        [BadRow(where, why) for where, why in json.loads(made["problems"].tobytes())],
        truncated=int((too_long & fits & trained).sum()),
        too_long=int((~fits).sum()),
        without_target=int((fits & ~trained).sum()),
        warning=warning,
    )


def _texts(conversation: Conversation) -> list[str]:
    """Returns everything that decides a conversation's tokens and labels, and its place, which problems name."""
    prompt = [each.as_template() for each in conversation.messages[:-1]]
    return [conversation.where, json.dumps([prompt, list(conversation.tools), conversation.steps])]


def _tokenised(
    conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Any, separator: str
) -> dict[str, np.ndarray]:
    behind = _ids(tokenizer, [separator])[0] if separator else []
    parts: list[tuple[list[int], list[bool], list[bool]]] = []
    prompts, origin, problems = [], [], []
    for number, talk in enumerate(conversations):
        try:
            prompt = list(template.prompt_ids(talk.messages[:-1], talk.tools))
        except Exception as error:  # templates raise what they like
            problems.append((talk.where, f"{template.name} refuses it: {error}"))
            continue
        steps = [[*ids, *behind] for ids in _ids(tokenizer, [step for step, _ in talk.steps])]
        if empty := next((n for n, ids in enumerate(steps, start=1) if not ids), None):
            problems.append((talk.where, f"step {empty} has no token"))
            continue
        ends = [place == len(ids) for ids in steps for place in range(1, len(ids) + 1)]
        labels = [label for ids, (_, label) in zip(steps, talk.steps, strict=True) for _ in ids]
        nothing = [False] * len(prompt)
        parts.append(([*prompt, *chain.from_iterable(steps)], [*nothing, *ends], [*nothing, *labels]))
        prompts.append(len(prompt))
        origin.append(number)
    ids, ends_of_all, labels_of_all = ([part[place] for part in parts] for place in range(3))
    return {
        "ids": _joined(ids, np.int32),
        "ends": _joined(ends_of_all, bool),
        "labels": _joined(labels_of_all, bool),
        "offsets": np.cumsum([0, *map(len, ids)], dtype=np.int64),
        "prompts": np.array(prompts, dtype=np.int64),
        "origin": np.array(origin, dtype=np.int64),
        "problems": np.frombuffer(json.dumps(problems).encode(), dtype=np.uint8),
    }


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _joined(parts: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype=dtype)


def _is_whole(held: Arrays) -> bool:
    fits = len(held["ids"]) == len(held["ends"]) == len(held["labels"]) == held["offsets"][-1]
    return bool(fits and len(held["prompts"]) == len(held["origin"]) == len(held["offsets"]) - 1)


def _problems(places: Sequence[str], lengths: np.ndarray, length: int) -> Iterator[Problem]:
    """Yields problems of the first samples that are too long, and how many more there are."""
    fix = f"raise {FIELD}.length, or give {FIELD}.too_long=truncate or drop"
    for where, count in zip(places[:SHOWN], lengths[:SHOWN].tolist(), strict=True):
        yield Problem(f"{FIELD}.length", f"{where} has {count} tokens > {length}", fix)
    if len(lengths) > SHOWN:
        yield Problem(f"{FIELD}.length", f"and {len(lengths) - SHOWN} more samples are too long", fix)
