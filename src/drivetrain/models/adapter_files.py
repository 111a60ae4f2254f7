"""Reads and writes adapters as files, in the form of plain PEFT."""

from __future__ import annotations

import copy as copying
import errno
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drivetrain.errors import problem
from drivetrain.models import adapter_origin

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KINDS = ("LORA", "OFT", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
PROMPT = "prompt_embeddings"  # virtual tokens, which PEFT puts in place by itself
PREFIX = "base_model.model."  # how PEFT calls the model within its wrapper


@dataclass(frozen=True)
class Saved:
    folder: Path
    config: Any  # PEFT's
    tensors: dict[str, Tensor]  # by PEFT's names

    @property
    def replaced(self) -> list[str]:
        """Returns what it holds whole, in the place of the model's: modules that its config names, else weights."""
        marks = (
            "lora_",
            "oft_",
            "ia3_",
            ".base_layer.",
            PROMPT,
        )  # PEFT repeats an embedding that it adapts as base_layer
        whole = [name.removeprefix(PREFIX) for name in self.tensors if not any(mark in name for mark in marks)]
        return list(getattr(self.config, "modules_to_save", None) or whole)

    def check_base(self, fingerprint: str | None) -> None:
        adapter_origin.check_base(self.folder, fingerprint, "adapter.path")

    def load_into(self, model: nn.Module, name: str) -> None:
        """Loads the tensors. Raises UserError unless each finds its place."""
        from peft.utils import set_peft_model_state_dict

        own = model.state_dict()
        whole = {key.removeprefix(PREFIX): t for key, t in self.tensors.items() if key.removeprefix(PREFIX) in own}
        rest = {key: tensor for key, tensor in self.tensors.items() if key.removeprefix(PREFIX) not in whole}
        try:
            found: Any = set_peft_model_state_dict(model, rest, adapter_name=name)
            model.load_state_dict(whole, strict=False)
        except (RuntimeError, KeyError) as error:
            raise self._of_another_base(str(error).strip().splitlines()[-1].strip()) from error
        unknown = [key for key in found.unexpected_keys if key != PROMPT]
        missing = sorted(key for key in found.missing_keys if name in key.split(".") and "prompt_encoder" not in key)
        if unknown or missing:
            lacking = f"the model has no {unknown[0]}" if unknown else f"it lacks {missing[0]}"
            raise self._of_another_base(lacking)

    def _of_another_base(self, why: str) -> Exception:
        base = self.config.base_model_name_or_path
        fix = f"it names {base} as its base: give that as workload.model.path" if base else "give its base's path"
        return problem("adapter.path", f"the adapter in {self.folder} is of another model: {why}", fix)


def read(folder: Path) -> Saved:
    """Reads an adapter. Raises UserError for files that are missing, truncated or of an unknown kind."""
    import peft

    folder = folder.expanduser()
    file = folder / WEIGHTS
    if not file.is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("adapter_model*"))) or "none"
        fix = "save it with safe_serialization=True" if others != "none" else "give a complete folder"
        raise problem("adapter.path", f"{folder} holds no {WEIGHTS} (of adapter weights: {others})", fix)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        tensors = load_file(file)
    except (SafetensorError, json.JSONDecodeError) as error:
        why = f"{folder} holds a broken file, perhaps cut short: {error}"
        raise problem("adapter.path", why, "copy or save it again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise problem("adapter.path", f"PEFT cannot read {folder / CONFIG}: {error}", "correct it") from error
    _refuse_other_kinds(folder, config)
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise problem("adapter.path", f"{broken[0]} in {file} has numbers that are not finite", "give another")
    return Saved(folder, _trainable(config), tensors)


def _refuse_other_kinds(folder: Path, config: Any) -> None:
    kind = None if config.peft_type is None else config.peft_type.value
    if kind not in KINDS:
        raise problem(
            "adapter.path", f"the adapter in {folder} is {kind or 'of no kind'}", f"known: {', '.join(KINDS)}"
        )
    for key in ("trainable_token_indices", "alora_invocation_tokens", "megatron_config"):
        if getattr(config, key, None):
            raise problem("adapter.path", f"the adapter in {folder} has {key}, which is not known here", "give another")
    if getattr(config, "bias", "none") != "none":
        why = f"the adapter in {folder} trains the base's biases (bias: {config.bias}), which is not known here"
        raise problem("adapter.path", why, "give one without")


def _trainable(config: Any) -> Any:
    """Prepares virtual tokens for training: the file holds them without the encoder that made them, so they are trained
    directly.

    It also removes the reference to their source: PEFT would load the tokenizer that the file names, and ask at the
    terminal whether to run code that lies beside it.
    """
    import peft

    config.inference_mode = False
    if config.peft_type.value == "PROMPT_TUNING":
        config.prompt_tuning_init = peft.PromptTuningInit.RANDOM
        config.tokenizer_name_or_path = config.tokenizer_kwargs = config.prompt_tuning_init_text = None
    if config.peft_type.value == "P_TUNING":
        own = {"num_virtual_tokens": config.num_virtual_tokens, "task_type": config.task_type}
        return peft.PromptTuningConfig(**own, base_model_name_or_path=config.base_model_name_or_path)
    if config.peft_type.value == "PREFIX_TUNING":
        config.prefix_projection = False
    return config


def copy(source: Path, into: Path) -> None:
    """Copies the files. Raises OSError if they do not exist any more."""
    into.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS, adapter_origin.FILE):
        if (source.expanduser() / name).is_file():
            shutil.copyfile(source.expanduser() / name, into / name)
        elif name != adapter_origin.FILE:
            raise FileNotFoundError(errno.ENOENT, f"{name} is gone from the adapter {source}, which it is to hold too")


def write(
    model: Any,
    weights: Mapping[str, Tensor],
    adapter: str,
    into: Path,
    whole: Sequence[str],
    starts: Mapping[str, Tensor],
) -> None:
    """Writes one adapter, from whole weights by the model's names.

    whole: modules trained without an adapter. starts: PiSSA's first A and B, which were subtracted from the base.
    """
    config = copying.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    if config.is_prompt_learning:
        tensors = _prompt_tensors(config, weights, adapter)
    else:
        tensors = _tuner_tensors(model, config, weights, adapter, starts)
        tensors |= {PREFIX + n: t for n, t in weights.items() if any(n.startswith(f"{module}.") for module in whole)}
        config.modules_to_save = list(whole) or None
        if config.task_type in ("SEQ_CLS", "TOKEN_CLS") and not {"classifier", "score"} & set(whole):
            config.task_type = None  # PEFT would look for a trained head
    into.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, into / WEIGHTS, {"format": "pt"}
    )
    config.save_pretrained(str(into))


def _tuner_tensors(
    model: Any, config: Any, weights: Mapping[str, Tensor], adapter: str, starts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    from peft.utils import get_peft_model_state_dict

    own = {name: tensor for name, tensor in weights.items() if adapter in name.split(".")}
    if any(adapter in name.split(".") for name in starts):
        own = {name: _beside_its_start(name, tensor, starts[name]) for name, tensor in own.items()}
        config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
        config.r *= 2
        config.init_lora_weights = True
    found = get_peft_model_state_dict(model, own, adapter_name=adapter, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in found.items()}


def _beside_its_start(name: str, tensor: Tensor, start: Tensor) -> Tensor:
    """Expresses W - B0 A0 + B A as an adapter of W: [B, -B0] [A; A0]."""
    start = start.to(tensor)
    return torch.cat([tensor, start], dim=0) if ".lora_A." in name else torch.cat([tensor, -start], dim=1)


def _prompt_tensors(config: Any, weights: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """Returns the virtual tokens themselves, without the encoder that may have made them; and a classifier's head."""
    mark = f"prompt_encoder.{adapter}."
    encoder = {name.removeprefix(mark): tensor.cpu() for name, tensor in weights.items() if name.startswith(mark)}
    wrapped = f".modules_to_save.{adapter}."
    found = {name.replace(wrapped, "."): tensor for name, tensor in weights.items() if wrapped in name}
    return {**found, PROMPT: _virtual_tokens(config, encoder)}


@torch.no_grad()
def _virtual_tokens(config: Any, encoder: dict[str, Tensor]) -> Tensor:
    """Returns the virtual tokens, (tokens, width)."""
    import peft

    kinds = {"PREFIX_TUNING": peft.PrefixEncoder, "P_TUNING": peft.PromptEncoder}
    kind = kinds.get(config.peft_type.value)
    if kind is None:
        return encoder["embedding.weight"]
    config = copying.deepcopy(config)
    config.inference_mode = False
    made = kind(config).eval()
    made.load_state_dict(encoder)
    tokens = torch.arange(config.num_virtual_tokens * config.num_transformer_submodules)
    given: Tensor = made(tokens[None])
    return given[0]
