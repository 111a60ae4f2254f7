"""Opens what `loading` loads: the model and tokenizer of a run, an adapter's or a Transformers folder, on the CPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.run import RunConfig
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem
from drivetrain.inference.run_sources import run_at
from drivetrain.inference.whole_model import loaded_model
from drivetrain.models.adapter_switch import AdapterSwitch, trained_whole
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.merged_adapters import is_whole
from drivetrain.models.transformers_classifiers import build_classifier

LOG = logging.getLogger(__name__)
ADAPTER = "adapter_config.json"
FIELD = "workload.model"  # whose keys the messages about a model's folder name
Format = Literal["nf4", "int8", "int4", "int8-torchao"]


@dataclass(frozen=True)
class Opened:
    """folder: where its generation settings lie. base: the path that its adapters would name, if it can have some.
    is_run: whether it is of a run, whose texts were tokenised without the tokenizer's own additions."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    base: str | None = None
    is_run: bool = False


def opened(source: Path, checkpoint: str, trust: bool, keeps_adapters: bool = False) -> Opened:
    if (found := run_at(source, checkpoint)) is not None:
        return _of_run(*found, trust, keeps_adapters)
    place = source.expanduser()
    if (place / ADAPTER).is_file() and not (place / "config.json").is_file():
        return _of_adapter(place, trust, keeps_adapters)
    return _of_transformers(str(source), trust)


def _of_run(run: RunConfig, path: Path, trust: bool, keeps_adapters: bool) -> Opened:
    refuse_other_tasks(run)
    if keeps_adapters and any(each.pissa for each in run.adapter or ()):
        why = "PiSSA lowered the weights under its adapter: without it they are not the base"
        raise problem("with_base", why, "load the base's own folder beside the run")
    is_quantised = run.quantised_base is not None  # merging would unpack the base
    kept = "keep" if is_quantised or keeps_adapters else "merge"
    model: Any = loaded_model(run, path, adapter=kept, trust=trust, quantised=is_quantised)
    base = None if run.adapter is not None else str(path)
    return Opened(run.name, model, model.tokenizer, path, base, is_run=True)


def refuse_other_tasks(run: RunConfig) -> None:
    if run.workload.auto_class != "AutoModelForCausalLM":
        raise problem("model", f"the run in {run.folder} trains no model that writes texts", "give a language model's")


def refuse_without_base(found: Opened) -> None:
    """Raises UserError for a model that has no base among its own weights."""
    if not is_whole(found.model):
        raise problem("with_base", "virtual tokens cannot be switched off", "load the base's own folder beside it")
    if not AdapterSwitch(found.model).names:
        raise problem("with_base", f"{found.name} has no adapter, and so no base", "leave it out")
    if whole := trained_whole(found.model):
        why = f"weights of the base itself were trained ({', '.join(whole[:2])}): it is not there any more"
        raise problem("with_base", why, "load the base's own folder beside it")


def _of_transformers(source: str, trust: bool) -> Opened:
    model = build_classifier("AutoModelForCausalLM", source, None, (), FIELD, LOG.warning, trusted=trust)
    tokenizer = load_tokenizer(source, f"{FIELD}.path", trust)
    return Opened(Path(source).name, model, tokenizer, Path(source), source)


def _of_adapter(folder: Path, trust: bool, keeps_adapters: bool) -> Opened:
    found = _of_transformers(base_of(folder), trust)
    model = with_adapters(found, {"default": folder}, None, switched=keeps_adapters)
    has_own = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(folder), f"{FIELD}.path", trust) if has_own else found.tokenizer
    return Opened(folder.name, model, tokenizer, found.folder)


def base_of(folder: Path) -> str:
    """Returns the base that an adapter's folder names. Raises UserError if it names none."""
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if not isinstance(base, str):
        why = f"{folder} holds an adapter, and its {ADAPTER} names no base"
        raise problem("model", why, "give the base, and this folder as one of its adapters")
    return base


def with_adapters(
    found: Opened, folders: Mapping[str, Path], quantised: Format | None, switched: bool = False
) -> nn.Module:
    """switched: whether requests choose among them and the base, which then stays as it is."""
    if found.base is None:
        why = f"{found.name} has an adapter of its own"
        raise problem("adapters", why, "give its base as the model, and its checkpoint as one of the adapters")
    base = None if quantised is None else QuantisedBase(format=quantised)
    blocks = [Adapter(name=name, path=folder, trained=False) for name, folder in folders.items()]
    fitted = AdapterSet(blocks, found.base, base)
    made = fitted.fit(found.model)
    if switched and fitted.replaced:
        names = ", ".join(fitted.replaced[:2])
        why = f"they hold whole modules ({names}), of which the model has one each: requests without them have it too"
        raise problem("adapters", why, "load one of them alone, as the model")
    return made
