"""Loads a model that answers requests: of a run, a checkpoint, an adapter's folder or Transformers' folder."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.run import RunConfig
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Message
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem
from drivetrain.generation.constraints import Constraints
from drivetrain.generation.local import LocalGenerator, MakeBatch
from drivetrain.generation.local_forward import LocalForward, cells_of, stores_of
from drivetrain.generation.requests import Generator, Sampling
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.inference.remote_places import here
from drivetrain.inference.run_sources import run_at
from drivetrain.inference.whole_model import loaded_model
from drivetrain.models.adapter_configs import output_layer_names
from drivetrain.models.adapter_switch import AdapterSwitch
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.generation_settings import generation_settings
from drivetrain.models.language_options import context_length
from drivetrain.models.merged_adapters import is_whole
from drivetrain.models.quantised_base import quantise
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.runtime.hardware import detect, torch_device

LOG = logging.getLogger(__name__)
FIELD = "workload.model"  # whose keys the messages about a model's folder name
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Dtype = Literal["float32", "bfloat16", "float16"]
Format = Literal["nf4", "int8", "int4", "int8-torchao"]


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers, and what turns texts into its tokens.

    template: None for a model without a chat template. context_length: the longest sequence that the model has
    positions for, if there is a bound. adapters: names that a request may give. sampling: the model's own settings.
    """

    name: str
    generator: Generator
    tokenizer: Any
    template: ChatTemplate | None
    context_length: int | None
    adapters: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Returns the tokens that get the reply to a conversation. Raises UserError without a chat template, and
        whatever a template raises for messages that it refuses."""
        if self.template is None:
            raise problem("messages", f"{self.name} has no chat template", "give it a text to continue")
        return tuple(self.template.prompt_ids(messages, tools))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that is continued. Those of an empty one are the token that begins texts, where
        the tokenizer has one."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        begin = self.tokenizer.bos_token_id
        return ids if ids or begin is None else (begin,)

    def close(self) -> None:
        """Ends all requests and gives memory back."""
        self.generator.close()


def load_model(
    source: str | Path,
    *,
    checkpoint: str = "best",
    adapters: Mapping[str, str | Path] | None = None,
    dtype: Dtype | None = None,
    quantised: Format | None = None,
    trust: bool = False,
    max_rows: int = 64,
) -> LoadedModel:
    """Returns a model that answers requests on a thread of this process.

    source: a run's folder or its run.yaml, the folder of a checkpoint, of an adapter (its base is loaded too), or a
    Transformers folder or hub id. checkpoint: "best", "last" or a folder, of a run. adapters: name → folder of adapters
    over this model, of which each request may name one. dtype: left out, the run's weights in fp32, others as their
    files have them. quantised: holds linear layers in so few bits. max_rows: answers at once.

    Raises UserError for a source that is none of these, for adapters of another base, and for Python that came with the
    source, unless trust is set.
    """
    found = _opened(here(source, [checkpoint], "model"), checkpoint, trust)
    model, names = found.model, tuple(adapters or ())
    if names:
        model = _with_adapters(found, {name: Path(folder) for name, folder in (adapters or {}).items()}, quantised)
        if not is_whole(model):
            raise problem("adapters", "virtual tokens cannot be switched", "give the adapter's folder as the model")
    elif quantised is not None:
        quantise(model, QuantisedBase(format=quantised), output_layer_names(model))
    model = model.to(torch_device(detect()), None if dtype is None else DTYPES[dtype]).eval().requires_grad_(False)
    settings = generation_settings(found.folder, model)
    template = ChatTemplate(found.tokenizer, None, "template") if found.tokenizer.chat_template else None
    ends = frozenset({*settings.ends, *_known(found.tokenizer.eos_token_id)})
    places = context_length(model.config)
    size = int(model.get_input_embeddings().num_embeddings)
    batches = _batches(model, AdapterSwitch(model) if names else None, max_rows)
    constraints = Constraints(found.tokenizer, ends, size)
    generator = LocalGenerator(batches, found.tokenizer, ends, places, size, constraints, names)
    return LoadedModel(found.name, generator, found.tokenizer, template, places, names, Sampling(**settings.drawn))


def _batches(model: Any, switch: AdapterSwitch | None, max_rows: int) -> MakeBatch:
    """Returns what makes the batch of an adapter's requests. The cache is tried here, on the model without adapters."""

    def forward(adapter: str | None) -> LocalForward:
        return LocalForward(model, None if switch is None else functools.partial(switch.choose, adapter))

    stores, cells = stores_of(forward(None), model), cells_of(model)
    return lambda adapter: RunningBatch(stores(forward(adapter)), max_rows, cells)


# --- sources ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opened:
    """folder: where its generation settings lie. base: the path that its adapters would name, if it can have some."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    base: str | None = None


def _opened(source: Path, checkpoint: str, trust: bool) -> _Opened:
    if (found := run_at(source, checkpoint)) is not None:
        return _of_run(*found, trust)
    place = source.expanduser()
    if (place / "adapter_config.json").is_file() and not (place / "config.json").is_file():
        return _of_adapter(place, trust)
    return _of_transformers(str(source), trust)


def _of_run(run: RunConfig, path: Path, trust: bool) -> _Opened:
    if run.workload.auto_class != "AutoModelForCausalLM":
        raise problem("model", f"the run in {run.folder} trains no model that writes texts", "give a language model's")
    keeps = run.quantised_base is not None  # merging would unpack the base
    model: Any = loaded_model(run, path, adapter="keep" if keeps else "merge", trust=trust, quantised=keeps)
    base = None if run.adapter is not None else str(path)
    return _Opened(run.name, model, model.tokenizer, path, base)


def _of_transformers(source: str, trust: bool) -> _Opened:
    model = build_classifier("AutoModelForCausalLM", source, None, (), FIELD, LOG.warning, trusted=trust)
    tokenizer = load_tokenizer(source, f"{FIELD}.path", trust)
    return _Opened(Path(source).name, model, tokenizer, Path(source), source)


def _of_adapter(folder: Path, trust: bool) -> _Opened:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if not isinstance(base, str):
        why = f"{folder} holds an adapter, and its adapter_config.json names no base"
        raise problem("model", why, "give the base, and this folder as one of its adapters")
    found = _of_transformers(base, trust)
    model = _with_adapters(found, {"default": folder}, None)
    has_own = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(folder), f"{FIELD}.path", trust) if has_own else found.tokenizer
    return _Opened(folder.name, model, tokenizer, found.folder)


def _with_adapters(found: _Opened, folders: Mapping[str, Path], quantised: Format | None) -> nn.Module:
    if found.base is None:
        why = f"{found.name} has an adapter of its own"
        raise problem("adapters", why, "give its base as the model, and its checkpoint as one of the adapters")
    base = None if quantised is None else QuantisedBase(format=quantised)
    blocks = [Adapter(name=name, path=folder, trained=False) for name, folder in folders.items()]
    fitted = AdapterSet(blocks, found.base, base)
    made = fitted.fit(found.model)
    if len(blocks) > 1 and fitted.replaced:
        why = f"they hold whole modules ({', '.join(fitted.replaced[:2])}), of which the model has one each"
        raise problem("adapters", why, "load one of them alone, as the model")
    return made


def _known(token: int | None) -> list[int]:
    return [] if token is None else [int(token)]
