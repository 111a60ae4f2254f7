"""Answers in a form: a JSON schema, or a regular expression, by llguidance."""

from __future__ import annotations

import json
import threading
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import problem

Form = dict[str, Any] | str
WHITESPACE = {
    "whitespace_pattern": r"[ \n]{0,12}"
}  # between JSON's signs; without a bound models go on with it forever


MOST_PROPERTIES = 500  # of one object: the time to compile grows with their square, and 8,000 take minutes
MOST_MEMBERS = 5_000  # keys of objects and members of lists, of the whole schema
# forms after which the library's view of the vocabulary is made anew: each new form leaves 700 bytes there
RENEWED = 4096
MOST_CHARACTERS = 200_000  # of all texts in it: a pattern of two million takes a second and 200 MB


class Constraints:
    """Makes the constraints of one model's answers.

    tokenizer: a fast one of Transformers'. ends: tokens that end an answer. size: ids that the model gives logits for.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int], size: int) -> None:
        self._tokenizer, self._ends, self._size = tokenizer, ends, size
        self._lock = threading.Lock()
        self._made = 0
        self._vocabulary: Any = None

    def started(self, form: Form) -> TokenConstraint:
        """Returns a constraint for one answer. form: a JSON schema, or a regular expression as a text.

        Raises UserError for one that cannot be followed, and without llguidance.
        """
        if find_spec("llguidance") is None:
            why = "answers in a form need llguidance, which is not installed"
            raise problem("constraint", why, "pip install 'drivetrain[constraints]'")
        from llguidance import LLMatcher

        if (large := _too_large(form)) is not None:
            raise problem("constraint", large, "give a smaller schema")
        kind = "regular expression" if isinstance(form, str) else "JSON schema"
        try:
            grammar = LLMatcher.grammar_from_regex(form) if isinstance(form, str) else _of_schema(form)
            with self._lock:
                matcher = LLMatcher(self._known_vocabulary(), grammar, log_level=0)
            started = TokenConstraint(matcher, self._size)
            refused = started.error or started.no_beginning()
        except (ValueError, TypeError, RecursionError) as error:
            refused = str(error)
        if refused:
            shown = json.dumps(form, ensure_ascii=False)[:80]
            why = f"the {kind} {shown} cannot be followed: {refused[:300]}"
            raise problem("constraint", why, "correct or simplify it")
        return started

    def _known_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        self._made += 1
        if self._vocabulary is not None and self._made % RENEWED:
            return self._vocabulary
        if not getattr(self._tokenizer, "is_fast", False):
            why = f"{type(self._tokenizer).__name__} is no fast tokenizer"
            raise problem("constraint", why, "give a model whose tokenizer has a tokenizer.json")
        ends = sorted(self._ends) or None
        self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=self._size, eos_token=ends)
        return self._vocabulary


def _too_large(form: Form) -> str | None:
    """Returns why a form would take too long to compile, if it would."""
    count, characters, left = 0, 0, [form]
    while left:
        each: Any = left.pop()
        members = list(each.values()) if isinstance(each, dict) else each if isinstance(each, list) else []
        count += len(members)
        characters += len(each) if isinstance(each, str) else sum(map(len, each)) if isinstance(each, dict) else 0
        left += members
        if isinstance(each, dict) and len(each) > MOST_PROPERTIES:
            return f"an object of the JSON schema has {len(each):,} keys, more than {MOST_PROPERTIES}"
        if count > MOST_MEMBERS:
            return f"the JSON schema has more than {MOST_MEMBERS:,} members"
        if characters > MOST_CHARACTERS:
            return f"its texts have more than {MOST_CHARACTERS:,} characters"
    return None


def _of_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
    return grammar


class TokenConstraint:
    """The state of one answer under a constraint."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._allowed = np.zeros((1, (size + 31) // 32), dtype=np.int32)

    def no_beginning(self) -> str | None:
        """Returns why no answer can begin, if none can: nothing fulfils {"$ref": "#"}, which asks for itself."""
        self._find_allowed()
        return "no answer fulfils it" if self._matcher.is_error() else None

    def _find_allowed(self) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._allowed)

    def forbid(self, scores: Tensor) -> None:
        """Sets the scores, (vocabulary,), of tokens that may not follow to -inf."""
        self._find_allowed()
        bits = np.unpackbits(self._allowed.view(np.uint8), bitorder="little")[: len(scores)]
        scores.masked_fill_(torch.from_numpy(bits == 0).to(scores.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Takes the token that follows."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Returns whether nothing can follow but the end."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Returns why the form cannot be followed any further, where a limit of the library was met."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else None
