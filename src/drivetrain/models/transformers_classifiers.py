"""Builds Transformers classifiers: from a folder or the hub with their weights, or from a config with a random
start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.errors import UserError, problem
from drivetrain.memory.shortage import is_shortage
from drivetrain.models.auto_classes import imported_auto_class
from drivetrain.models.classifier_config import config_problems, quiet
from drivetrain.models.model_folders import config_at, located, one_line, shapes_of_weights, unloadable

if TYPE_CHECKING:
    from drivetrain.models.adapters import AdapterSet
    from drivetrain.models.streamed_base import Streaming

Warn = Callable[[str], None]
LOG = logging.getLogger(__name__)


def build_classifier(
    auto_class: str,
    path: str | None,
    config: Mapping[str, Any] | None,
    labels: Sequence[str],
    field: str,
    warn: Warn = LOG.warning,
    overrides: Mapping[str, Any] | None = None,
    trusted: bool = False,
    adapters: AdapterSet | None = None,
) -> nn.Module:
    """Returns a Transformers classifier over `labels`, in fp32, in evaluation mode if loaded and training mode if made.

    auto_class: AutoModelForImageClassification, AutoModelForSequenceClassification, ...
    path: a local folder or a hub id to start from; or else
    config: `model_type` and the fields of its Transformers config, for a random start from torch's global generator.
    field: the run-file path of the model block (workload.model), which problems name.
    warn: receives a remark on the parts of a loaded model that start at random, such as a head over other classes.
    overrides: fields of a loaded model's config that are to be others.
    trusted: whether Python code that lies beside the model at `path` may run.
    adapters: those that will be put into it: where they want its linear layers quantised, that is done while a model
        is loaded, weight by weight. (Of one that is made they do it themselves.)

    Raises UserError with everything that is wrong with the path or the config.
    """
    assert (path is None) != (config is None), "rules.check lets exactly one of path and config pass"
    if path is not None:
        streaming = None if adapters is None else adapters.streaming()
        return _load(auto_class, path, labels, f"{field}.path", warn, overrides or {}, trusted, streaming)
    return _make(auto_class, config or {}, labels, f"{field}.config")


# --- from a config ---------------------------------------------------------------------------------------------------


def _make(auto_class: str, given: Mapping[str, Any], labels: Sequence[str], field: str) -> nn.Module:
    import transformers

    problems = config_problems(auto_class, given, field)
    if problems:
        raise UserError(problems)
    auto, model_type = imported_auto_class(auto_class), given["model_type"]
    fields = {key: value for key, value in given.items() if key != "model_type"}
    with quiet():
        config = transformers.CONFIG_MAPPING[model_type](**fields, **_label_maps(labels))
        try:
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:  # whatever a config's combination breaks inside the architecture
            if is_shortage(error):
                raise
            raise problem(
                field, f"{model_type} cannot be built from it: {one_line(error)}", "correct the value it names"
            ) from error


AT_RANDOM = "starts_at_random"  # a model's attribute: names of the parameters that its folder did not have
QUANTISED_AS_LOADED = "quantised_as_loaded"  # a model's attribute: Streaming.seen of its weights


# --- from weights ----------------------------------------------------------------------------------------------------


def _load(
    auto_class: str,
    path: str,
    labels: Sequence[str],
    field: str,
    warn: Warn,
    overrides: Mapping[str, Any],
    trusted: bool,
    streaming: Streaming | None,
) -> nn.Module:
    auto = imported_auto_class(auto_class)
    path, local = located(path, field)
    with quiet():
        try:
            # read apart, because ours replaces the classes it was trained on
            trained_config = config_at(path, field, trusted)
            own_code = auto_class in (getattr(trained_config, "auto_map", None) or {})
            if not own_code and type(trained_config) not in auto._model_mapping:
                head = auto_class.removeprefix("AutoModelFor")
                raise problem(
                    field, f"{path} is a {trained_config.model_type}, which has no {head} head", "give another"
                )
            given = {**_label_maps(labels), **overrides}
            if torch.get_default_device().type == "meta":
                return _without_weights(auto, path, trained_config, given, trusted)
            model, info = _quantised(auto, path, trusted, given, streaming) or _loaded(auto, path, trusted, given)
        except UserError:
            raise
        except Exception as error:  # OSError for what is missing, others for what is broken
            if is_shortage(error):
                raise
            raise unloadable(path, local, field, error) from error
    _say_what_is_new(model, info, path, field, warn, whole=auto_class == "AutoModelForCausalLM")
    _say_if_classes_differ(trained_config, labels, info, warn)
    return model


def _without_weights(auto: Any, path: str, config: Any, given: Mapping[str, Any], trusted: bool) -> nn.Module:
    """Returns the model of a folder on PyTorch's meta device: for plans, and for ranks that get their weights from the
    first one. Transformers loads no weights onto that device."""
    for key, value in given.items():
        setattr(config, key, value)
    model: Any = auto.from_config(config, dtype=torch.float32, trust_remote_code=trusted)
    there = shapes_of_weights(path)
    heads = {
        name: p.shape for name, p in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")
    }
    new = frozenset(name for name, shape in heads.items() if there is not None and there.get(name) != tuple(shape))
    setattr(model, AT_RANDOM, new)
    made: nn.Module = model
    return made


def _loaded(auto: Any, path: str, trusted: bool, given: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Returns the model, and the names that the folder did not have."""
    found: tuple[Any, Mapping[str, Any]] = auto.from_pretrained(
        path,
        dtype=torch.float32,
        trust_remote_code=trusted,
        ignore_mismatched_sizes=True,  # a head over other classes is replaced, with a warning
        output_loading_info=True,
        **given,
    )
    return found


def _quantised(
    auto: Any, path: str, trusted: bool, given: Mapping[str, Any], streaming: Streaming | None
) -> tuple[Any, Mapping[str, Any]] | None:
    """Returns the same with linear weights quantised as they were read; None if this is not requested, or if only the
    whole model shows why it cannot be quantised."""
    if streaming is None:
        return None
    try:
        model, info = _loaded(auto, path, trusted, {**given, "quantization_config": streaming})
    except UserError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        return None
    if not streaming.is_complete:
        return None
    setattr(model, QUANTISED_AS_LOADED, streaming.seen)
    return model, info


def _say_what_is_new(model: Any, info: Mapping[str, Any], path: str, field: str, warn: Warn, whole: bool) -> None:
    """Warns of new weights. whole: a model without a new head to learn must have all others."""
    body = f"{model.base_model_prefix}."
    mismatched = {entry[0]: (tuple(entry[1]), tuple(entry[2])) for entry in info["mismatched_keys"]}
    in_body = sorted(name for name in mismatched if name.startswith(body))
    if in_body:
        there, here = mismatched[in_body[0]]
        raise problem(
            field,
            f"{len(in_body)} weights in {path} do not fit its own config, {in_body[0]} first: {there} against {here}",
            "give a folder whose config.json belongs to its weights",
        )
    parameters = {name for name, _ in model.named_parameters()}
    new = sorted(parameters & {*mismatched, *info["missing_keys"]})
    head = [name for name in new if not name.startswith(body)]
    rest = [name for name in new if name.startswith(body)]
    setattr(model, AT_RANDOM, frozenset(head))
    if head:
        kind = "head" if whole else "classification head"
        warn(f"the {kind} of {path} is replaced and starts at random: {_listed(head)}")
    if rest and whole:
        raise problem(field, f"{path} lacks weights: {_listed(rest)}", "give a complete model folder")
    if rest:
        warn(f"{path} lacks weights, which start at random: {_listed(rest)}")


def _say_if_classes_differ(trained: Any, labels: Sequence[str], info: Mapping[str, Any], warn: Warn) -> None:
    """Warns if classes differ. A head of the right size is kept: its outputs may still mean other classes, or the same
    ones in another order."""
    before = [str(trained.id2label[i]) for i in sorted(trained.id2label)]
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(before))
    if len(before) == len(labels) and not info["missing_keys"] and not unnamed and before != list(labels):
        warn(f"the head was trained for the classes {_listed(before)}; it now stands for {_listed(list(labels))}")


def _label_maps(labels: Sequence[str]) -> dict[str, Any]:
    if not labels:  # a head over no classes: a language model's
        return {}
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
