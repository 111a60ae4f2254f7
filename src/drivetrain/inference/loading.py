"""Loads a model that answers requests: of a run, a checkpoint, an adapter's folder or Transformers' folder."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from drivetrain.config.machine import Machine
from drivetrain.config.quantised import QuantisedBase
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Message
from drivetrain.data.tokenised import keep_no_texts
from drivetrain.errors import problem
from drivetrain.generation.constraints import Constraints
from drivetrain.generation.local import LocalGenerator, MakeBatch
from drivetrain.generation.local_forward import LocalForward, cells_of, stores_of
from drivetrain.generation.prepacked_weights import prepack
from drivetrain.generation.requests import Generator, Sampling
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.inference.opened_models import (
    ADAPTER,
    FIELD,
    Format,
    base_of,
    opened,
    refuse_other_tasks,
    refuse_without_base,
    with_adapters,
)
from drivetrain.inference.remote_places import here
from drivetrain.inference.run_sources import run_at
from drivetrain.models.adapter_configs import output_layer_names
from drivetrain.models.adapter_switch import AdapterSwitch
from drivetrain.models.generation_settings import generation_settings
from drivetrain.models.language_options import context_length
from drivetrain.models.merged_adapters import is_whole
from drivetrain.models.model_folders import config_of
from drivetrain.models.quantised_base import quantise
from drivetrain.runtime.hardware import detect, torch_device

BASE = "base"  # the name by which requests ask the model without its adapters
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers, and what turns texts into its tokens.

    template: None for a model without a chat template. context_length: the longest sequence that the model has
    positions for, if there is a bound. adapters: names that a request may give. sampling: the model's own settings.
    begins: the tokens that the tokenizer puts before texts, of a model that is of no run.
    """

    name: str
    generator: Generator
    tokenizer: Any
    template: ChatTemplate | None
    context_length: int | None
    adapters: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    begins: tuple[int, ...] = ()

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Returns the tokens that get the reply to a conversation. Raises UserError without a chat template, and
        whatever a template raises for messages that it refuses."""
        if self.template is None:
            raise problem("messages", f"{self.name} has no chat template", "give it a text to continue")
        return tuple(self.template.prompt_ids(messages, tools))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that is continued, behind `begins`. Those of an empty one are the token that
        begins texts, where the tokenizer has one."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if ids[: len(self.begins)] != self.begins:  # else the text has them
            ids = self.begins + ids
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
    with_base: bool = False,
) -> LoadedModel:
    """Returns a model that answers requests on a thread of this process.

    source: a run's folder or its run.yaml, the folder of a checkpoint, of an adapter (its base is loaded too), or a
    Transformers folder or hub id. checkpoint: "best", "last" or a folder, of a run. adapters: name → folder of adapters
    over this model, of which each request may name one. dtype: left out, the run's weights in fp32, others as their
    files have them. quantised: holds linear layers in so few bits. max_rows: answers at once. with_base: whether
    requests may name "base" too, which the same weights answer with the source's own adapters switched off.

    Raises UserError for a source that is none of these, for adapters of another base, and for Python that came with the
    source, unless trust is set. So it does for weights that the device cannot hold.
    """
    found = opened(here(source, [checkpoint], "model"), checkpoint, trust, with_base)
    model, names = found.model, tuple(adapters or ())
    keep_no_texts(found.tokenizer)
    if with_base:
        refuse_without_base(found)
        names = (BASE,)
    elif names:
        folders = {name: Path(folder) for name, folder in (adapters or {}).items()}
        model = with_adapters(found, folders, quantised, switched=True)
        if not is_whole(model):
            raise problem("adapters", "virtual tokens cannot be switched", "give the adapter's folder as the model")
    elif quantised is not None:
        quantise(model, QuantisedBase(format=quantised), output_layer_names(model))
    machine, wanted = detect(), None if dtype is None else DTYPES[dtype]
    _refuse_too_large(found.name, model, wanted, machine)
    model = model.to(torch_device(machine), wanted).eval().requires_grad_(False)
    prepack(model)
    settings = generation_settings(found.folder, model)
    template = ChatTemplate(found.tokenizer, None, "template") if found.tokenizer.chat_template else None
    ends = frozenset({*settings.ends, *_known(found.tokenizer.eos_token_id)})
    places = context_length(model.config)
    size = int(model.get_input_embeddings().num_embeddings)
    switch = AdapterSwitch(model) if names else None
    active: dict[str | None, Collection[str]] = {None: (), **{name: (name,) for name in names}}
    if with_base and switch is not None:
        active = {None: switch.names, BASE: ()}
    batches = _batches(model, switch, active, max_rows)
    constraints = Constraints(found.tokenizer, ends, size)
    generator = LocalGenerator(batches, found.tokenizer, ends, places, size, constraints, names)
    drawn, begins = Sampling(**settings.drawn), () if found.is_run else _begins(found.tokenizer)
    return LoadedModel(found.name, generator, found.tokenizer, template, places, names, drawn, begins)


def check_source(source: Path, checkpoint: str = "best", trust: bool = False) -> None:
    """Raises UserError for a source that `load_model` does not find, or that writes no texts, without reading weights
    of anything but a run."""
    if (found := run_at(source, checkpoint)) is not None:
        refuse_other_tasks(found[0])
        return
    place = source.expanduser()
    if (place / ADAPTER).is_file() and not (place / "config.json").is_file():
        config_of(base_of(place), None, FIELD, trust)
    else:
        config_of(str(source), None, FIELD, trust)


def _refuse_too_large(name: str, model: nn.Module, dtype: torch.dtype | None, machine: Machine) -> None:
    """Raises UserError for weights that the device cannot hold. They are on the CPU still."""
    needed = 0
    for each in (*model.parameters(), *model.buffers()):
        kept = dtype if dtype is not None and each.is_floating_point() else each.dtype
        needed += each.numel() * kept.itemsize
    if needed > machine.memory_bytes:
        sizes = f"{needed / 2**30:.1f} GiB of weights, and {machine.device_name} has {machine.memory_bytes / 2**30:.1f}"
        fix = (
            "answer a run with drivetrain predict under engine=fsdp processes=N, or with drivetrain export --to "
            "transformers --dtype bf16, and serve that, with --backend vllm or sglang on several devices"
        )
        raise problem("model", f"{name} has {sizes}", fix)


def _begins(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer puts before each text: Llama's and Gemma's one, with which they were
    trained. What it puts behind texts is left out, for they go on."""
    whole, bare = (tokenizer("a", add_special_tokens=each, verbose=False)["input_ids"] for each in (True, False))
    places = range(len(whole) - len(bare) + 1)
    start = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
    return tuple(whole[:start])


def _batches(
    model: Any, switch: AdapterSwitch | None, active: Mapping[str | None, Collection[str]], max_rows: int
) -> MakeBatch:
    """Returns what makes the batch of the requests that name the same adapter. The cache is tried here.

    active: the adapters that work for each name of requests; each name has its part of rows and memory.
    """

    def forward(name: str | None) -> LocalForward:
        return LocalForward(model, None if switch is None else functools.partial(switch.choose, active[name]))

    rows, cells = max(1, max_rows // len(active)), max(1, cells_of(model) // len(active))
    stores = stores_of(forward(None), model, cells)
    return lambda name: RunningBatch(stores(forward(name)), rows, cells)


def _known(token: int | None) -> list[int]:
    return [] if token is None else [int(token)]
