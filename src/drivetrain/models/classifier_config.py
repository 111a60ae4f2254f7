"""Checks the config of a Transformers model before the model is built: its type, its keys and their values."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.model_folders import one_line

# What the data and the run file decide elsewhere: not to be given twice.
DECIDED_ELSEWHERE = {
    "num_labels": "the data decide it",
    "id2label": "the data decide it",
    "label2id": "the data decide it",
    "dtype": "the run's precision decides it",
    "torch_dtype": "the run's precision decides it",
}


def config_problems(auto_class: str, given: Mapping[str, Any], field: str) -> list[Problem]:
    """Returns everything that is wrong with a model config, without building the model."""
    import transformers

    try:
        config_class = _config_class(getattr(transformers, auto_class), auto_class, given.get("model_type"), field)
    except UserError as error:
        return list(error.problems)
    fields = {key: value for key, value in given.items() if key != "model_type"}
    own = {key: value for key, value in fields.items() if key not in DECIDED_ELSEWHERE}
    twice = [Problem(f"{field}.{k}", DECIDED_ELSEWHERE[k], "leave it out") for k in fields if k in DECIDED_ELSEWHERE]
    with quiet():
        return [*twice, *_unknown_keys(config_class, own, field), *_bad_values(config_class, own, field)]


def config_accepts(config: Mapping[str, Any], key: str) -> bool:
    """Returns whether the config of `config["model_type"]` has the field `key`; False for an unknown model type."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    return model_type in CONFIG_MAPPING and key in _declared_keys(CONFIG_MAPPING[model_type])


def _config_class(auto: Any, auto_class: str, model_type: Any, field: str) -> type:
    from transformers import CONFIG_MAPPING

    fitting = list(auto._model_mapping._model_mapping)  # model types with this head; Transformers has no public list
    if model_type not in CONFIG_MAPPING:
        why = "is required and was not given" if model_type is None else f"Transformers knows no {model_type!r}"
        raise problem(f"{field}.model_type", why, _nearest(str(model_type), fitting))
    config_class: type = CONFIG_MAPPING[model_type]
    if config_class not in auto._model_mapping:
        raise problem(
            f"{field}.model_type", f"{model_type} has no {auto_class.removeprefix('AutoModelFor')} head", _some(fitting)
        )
    return config_class


def _unknown_keys(config_class: type, given: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Yields keys that Transformers would silently accept and never read.

    Beside the fields a config declares it understands older spellings (rope_theta), which it takes out of the keyword
    arguments. The rest it stores unread: those are the unknown ones. Generation settings it drops.
    """
    from transformers import GenerationConfig

    known = _declared_keys(config_class)
    undeclared = {key: value for key, value in given.items() if key not in known}
    if not undeclared:
        return
    stored, generation = vars(config_class(**undeclared)), vars(GenerationConfig())
    for key in undeclared:
        if key in stored or key in generation:
            model_type = getattr(config_class, "model_type", config_class.__name__)
            yield Problem(f"{field}.{key}", f"a {model_type} config has no such key", _nearest(key, sorted(known)))


def _declared_keys(config_class: Any) -> set[str]:
    signatures = (inspect.signature(cls.__init__) for cls in config_class.__mro__ if "__init__" in vars(cls))
    named = {
        name
        for signature in signatures
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and name != "self"
    }
    return named | set(config_class.attribute_map) | {"attn_implementation"}


def _bad_values(config_class: type, given: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Yields each value that the config refuses by itself; if there is none, its error about all values together."""
    together = _refusal(config_class, given)
    if together is None:
        return
    alone = {key: refusal for key, value in given.items() if (refusal := _refusal(config_class, {key: value}))}
    for key, refusal in alone.items():
        yield Problem(f"{field}.{key}", f"{given[key]!r} was given; {refusal}", "correct the value")
    if not alone:
        yield Problem(field, f"these values do not go together: {together}", "correct one of them")


def _refusal(config_class: type, given: Mapping[str, Any]) -> str | None:
    try:
        config_class(**given)
    except Exception as error:  # each architecture validates in its own way
        return one_line(error)
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Transformers' bars and tables while the block runs; our own messages report what matters."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _nearest(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else _some(known)


def _some(names: Iterable[str]) -> str:
    return f"there are: {', '.join(sorted(names))}"
