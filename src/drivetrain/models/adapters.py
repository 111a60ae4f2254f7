"""Puts adapters into a model, through PEFT: all else is frozen, and a checkpoint holds only what is trained.

LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023), DoRA (Liu et al. 2024), PiSSA (Meng et al. 2024), OFT (Qiu et al.
2023), IA3 (Liu et al. 2022), prompt tuning (Lester et al. 2021), prefix tuning (Li and Liang 2021), P-tuning (Liu et
al. 2021).

LoRA, OFT and IA3 are put in place of the layers they adapt: the model keeps its class and all other names, so that
engines, packing and the head's hooks see the usual modules. Prompts stand before the model, in PEFT's own wrapper.
"""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.config.adapter import PROMPTS, Adapter
from drivetrain.config.quantised import QuantisedBase
from drivetrain.errors import last_line, problem
from drivetrain.models import adapter_files
from drivetrain.models.adapter_configs import configured, ending_with, head_modules, output_layer_names
from drivetrain.models.adapter_origin import Origin
from drivetrain.models.language_options import evaluating
from drivetrain.models.normalisation import is_batch_norm, keep_statistics
from drivetrain.models.quantised_base import check_installed, quantise
from drivetrain.models.transformers_classifiers import AT_RANDOM, QUANTISED_AS_LOADED

if TYPE_CHECKING:
    from drivetrain.models.streamed_base import Streaming

PEFTS_OWN = ("lora_", "oft_", "ia3_", "base_layer", "modules_to_save", "prompt_encoder")
KEPT = "checkpointed"  # a model's attribute: the names of its state that checkpoints hold, where those are not all


class AdapterSet:
    """The adapters of a run, put into each model that is built."""

    def __init__(
        self, blocks: Sequence[Adapter], base: str | None, quantised_base: QuantisedBase | None = None
    ) -> None:
        """base: path or hub id of the weights they are trained on. Raises UserError without PEFT, or for broken
        files."""
        if find_spec("peft") is None:
            raise problem("adapter", "it needs PEFT, which is not installed", "pip install 'drivetrain[adapters]'")
        if quantised_base is not None:
            check_installed(quantised_base)
        self._blocks, self._quantised = blocks, quantised_base
        self._base = str(Path(base).expanduser().resolve()) if base and Path(base).expanduser().is_dir() else base
        self._saved = {block.name: adapter_files.read(block.path) for block in blocks if block.path is not None}
        self._refuse_mixtures()
        self._starts: dict[str, Tensor] = {}  # PiSSA's: what the frozen weights were lowered by
        self._whole: list[str] = []  # modules trained as they are
        self._fingerprint: str | None = None  # of the model without adapters

    def fit(self, model: nn.Module) -> nn.Module:
        """Returns the model with its adapters, all else frozen. Raises UserError for adapters that do not fit it.

        Several adapters are active together: their contributions are summed.
        """
        self._check_names(model)
        as_loaded: Mapping[str, bytes] | None = getattr(model, QUANTISED_AS_LOADED, None)
        self._fingerprint = _fingerprint(model, getattr(model, AT_RANDOM, ()), as_loaded or {})
        for saved in self._saved.values():
            saved.check_base(self._fingerprint)
        model.requires_grad_(False)
        of_each = {block.name: self._whole_of(model, block) for block in self._blocks}
        whole = {name for block in self._blocks if block.trained for name in of_each[block.name]}
        self._whole = sorted(name for name in whole if not any(name.startswith(f"{other}.") for other in whole))
        _refuse_lost(model, list(chain(*of_each.values())), self._prompts())
        self._refuse_tied(model)
        statistics = _keep_still(model, self._whole)
        if self._quantised is not None and as_loaded is None:
            quantise(model, self._quantised, self._not_quantised(model))
        for block in self._blocks:
            model = self._put(model, block)
        self._choose(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        setattr(model, KEPT, frozenset(trained | statistics))
        return model

    def streaming(self) -> Streaming | None:
        """Returns the quantiser of a base whose files are being read, if the run file asks for one; `fit` then finds
        the base quantised."""
        if self._quantised is None:
            return None
        from drivetrain.models.streamed_base import Streaming

        return Streaming(self._quantised, self._not_quantised, _sample)

    def _not_quantised(self, model: nn.Module) -> list[str]:
        """Returns modules that any adapter trains without an adapter, and the output layer."""
        return [*chain(*(self._whole_of(model, block) for block in self._blocks)), *output_layer_names(model)]

    def _refuse_mixtures(self) -> None:
        kinds = {saved.config.peft_type.value for saved in self._saved.values()}
        kinds |= {block.method.upper() for block in self._blocks if block.path is None}
        if len(self._blocks) > 1 and (len(kinds) > 1 or kinds - {"LORA", "IA3"}):
            why = f"adapters of these kinds do not go together: {', '.join(sorted(kinds))}"
            raise problem("adapter.path", why, "give several of lora, or of ia3")

    def _check_names(self, model: nn.Module) -> None:
        """Checks names: an adapter's weights are distinguished from others by its name within theirs."""
        parts = {part for name, _ in model.named_modules() for part in name.split(".") if part}
        own = [block.name for block in self._blocks if block.name.startswith(PEFTS_OWN)]
        if own:
            raise problem("adapter.name", f"PEFT calls weights {own[0]}", "give the adapter another name")
        for block in self._blocks:
            if block.name in parts:
                why = f"{type(model).__name__} has modules called {block.name}"
                raise problem("adapter.name", why, "give the adapter another name")

    def _whole_of(self, model: nn.Module, block: Adapter) -> list[str]:
        """Returns modules that an adapter trains without an adapter. PEFT's files name heads that a model may have."""
        if block.train_also is not None:
            return ending_with(model, block.train_also, "adapter.train_also")
        saved = self._saved.get(block.name)
        whole = getattr(saved.config, "modules_to_save", None) if saved is not None else None
        named = [name for name, _ in model.named_modules() if name.endswith(tuple(whole or ()))]  # as PEFT matches them
        return named or head_modules(model)

    def _refuse_tied(self, model: nn.Module) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        own = {name for name in named if any(name.startswith(f"{module}.") for module in self._whole)}
        ids = {id(named[name]) for name in own}
        tied = sorted(name for name, parameter in named.items() if id(parameter) in ids and name not in own)
        if tied:
            why = f"{', '.join(self._whole)} would be trained whole, and {tied[0]} is the same weight"
            raise problem("adapter.train_also", why, "leave it out, or name an adapter's target instead")

    def _put(self, model: Any, block: Adapter) -> nn.Module:
        import peft

        saved = self._saved.get(block.name)
        config = configured(block, model, self._whole, self._base) if saved is None else copy.deepcopy(saved.config)
        config.base_model_name_or_path = self._base or config.base_model_name_or_path  # as it is trained from here on
        is_meta = next(model.parameters()).is_meta  # the rank that has the weights gives them
        config.modules_to_save = None  # PEFT would put a copy beside each
        try:
            with warnings.catch_warnings():
                # PEFT 0.21 asks Transformers by a name that is another since 5.23
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                if config.is_prompt_learning:
                    model = peft.get_peft_model(model, config, adapter_name=block.name)
                else:
                    peft.inject_adapter_in_model(config, model, block.name, low_cpu_mem_usage=is_meta)
        except (ValueError, TypeError) as error:
            reason = re.sub(r"Target module (\w+)\(.*?\) is not", r"a \1 is not", " ".join(str(error).split()))
            why = f"PEFT cannot put it into {type(model).__name__}: {reason[:300]}"
            raise problem("adapter", why, "give other targets or another method") from error
        if config.is_prompt_learning and not is_meta:
            _try(model, config)
        if saved is not None and not is_meta:
            saved.load_into(model, block.name)
        if block.pissa:
            self._starts |= _pissa_starts(model, block)
        return model

    def _choose(self, model: nn.Module) -> None:
        """Chooses the active and trained adapters."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                held = module._get_available_adapters()
                module.set_adapter([block.name for block in self._blocks if block.name in held])
        still = {block.name for block in self._blocks if not block.trained}
        for name, parameter in model.named_parameters():
            if still.intersection(name.split(".")):
                parameter.requires_grad_(False)
        for name in self._whole if not hasattr(model, "prompt_encoder") else ():  # PEFT's wrapper trains a head itself
            model.get_submodule(name).requires_grad_(True)

    def write(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes each adapter in the form that plain PEFT reads: into the folder, or several into folders of their
        names.

        weights: whole tensors by the model's names, of all trained parameters.
        """
        for block in self._blocks:
            into = folder if len(self._blocks) == 1 else folder / block.name
            if block.path is not None and not block.trained:
                adapter_files.copy(block.path, into)
            else:
                adapter_files.write(model, weights, block.name, into, self._whole, self._starts)
                self._origin.write(into)
        if len(self._blocks) > 1:
            self._origin.write(folder)
        config = folder / "config.json"
        if config.is_file():  # beside it Transformers would take the trained weights for a whole model's
            config.rename(folder / "base_config.json")

    @property
    def _origin(self) -> Origin:
        functions = {block.name: block.function for block in self._blocks}
        quantised = None if self._quantised is None else self._quantised.numbers
        return Origin(self._fingerprint, self._base, functions, quantised)

    def check(self, folder: Path) -> list[str]:
        """Raises UserError if a checkpoint's adapters are of another base, or computed something else. Returns
        notes."""
        return self._origin.check(folder)

    @property
    def replaced(self) -> list[str]:
        """Returns the modules and weights that saved adapters hold whole, in the place of the model's."""
        return [name for saved in self._saved.values() for name in saved.replaced]

    # --- virtual tokens ----------------------------------------------------------------------------------------------

    @property
    def in_hidden_states(self) -> int:
        """Returns the number of virtual tokens that the head sees before each sample; a prefix stands in attention
        alone."""
        return sum(count for is_prefix, count in self._prompts() if not is_prefix)

    @property
    def positions(self) -> int:
        """Returns the number by which the samples' own positions are moved."""
        return sum(count for _, count in self._prompts())

    def _prompts(self) -> Iterator[tuple[bool, int]]:
        for block in self._blocks:
            saved = self._saved.get(block.name)
            if saved is not None and saved.config.is_prompt_learning:
                yield saved.config.peft_type.value == "PREFIX_TUNING", saved.config.num_virtual_tokens
            elif saved is None and block.method in PROMPTS:
                yield block.method == "prefix", block.virtual_tokens


def _refuse_lost(model: nn.Module, whole: Sequence[str], prompts: Iterable[object]) -> None:
    """Refuses a head that starts at random and is in no file but the adapter's. PEFT's wrapper of prompts keeps it by
    itself."""
    drawn = sorted(getattr(model, AT_RANDOM, ()))
    lost = [name for name in drawn if not name.startswith(tuple(f"{module}." for module in whole))]
    if lost and not any(True for _ in prompts):
        why = f"{lost[0]} starts at random, and would be in no file: the parts trained beside it could not be loaded"
        raise problem("adapter.train_also", why, f"train {lost[0].partition('.')[0]} whole")


@torch.no_grad()
def _try(model: Any, config: Any) -> None:
    """Runs two real tokens: not every architecture takes virtual tokens."""
    kind, name = config.peft_type.value, type(model.get_base_model()).__name__
    embedding = model.get_base_model().get_input_embeddings().weight
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=embedding.device)
    try:
        with evaluating(model):
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    except Exception as error:  # each architecture fails in its own way
        why = f"{name} cannot take {kind}: {last_line(error)}"
        raise problem("adapter.method", why, "give lora") from error
    if kind != "PREFIX_TUNING" and embedding.shape[1] != config.token_dim:
        why = f"{name} embeds in {embedding.shape[1]} numbers, and PEFT's {kind} has {config.token_dim}"
        raise problem("adapter.method", why, "give lora")


def _keep_still(model: nn.Module, whole: Sequence[str]) -> set[str]:
    """Keeps statistics of normalisation fixed: no adapter's file could hold others. Returns the names of the buffers of
    modules trained without an adapter, which do change."""
    for name, module in model.named_modules():
        is_trained = any(name == each or name.startswith(f"{each}.") for each in whole)
        if is_batch_norm(module) and not is_trained:
            keep_statistics(module)
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    return {name for name in buffers if any(name.startswith(f"{each}.") for each in whole)}


@torch.no_grad()
def _pissa_starts(model: nn.Module, block: Adapter) -> dict[str, Tensor]:
    """Returns the first A and B, which are subtracted from the base. Raises UserError where PiSSA cannot start so."""
    found = {name: p for name, p in model.named_parameters() if "lora_" in name and block.name in name.split(".")}
    if any("lora_embedding" in name for name in found):
        raise problem("adapter.pissa", "it starts from linear layers, and embeddings are targets", "leave one out")
    low = [name for name, p in found.items() if ".lora_A." in name and p.shape[0] < block.rank]
    if low:
        why = f"{block.rank} > the smaller side of {low[0].partition('.lora_A')[0]}, it has fewer values"
        raise problem("adapter.rank", why, "give a lower rank, or leave pissa out")
    return {name: p.detach().clone() for name, p in found.items()}


@torch.no_grad()
def _fingerprint(model: nn.Module, drawn: Collection[str], quantised: Mapping[str, bytes]) -> str | None:
    """Returns a digest of names, shapes and some 64 numbers of each weight, which distinguishes bases of the same
    shapes; None for a model without numbers. drawn: weights that the base does not have, and that start at random.
    quantised: for weights that are codes already, `_sample` of the original ones."""
    digest = hashlib.sha256()
    scales = {name.removesuffix("weight") + "scales" for name in quantised}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return None
        if name not in drawn and name not in scales:
            digest.update(quantised[name] if name in quantised else _sample(name, parameter))
    return digest.hexdigest()


def _sample(name: str, weight: Tensor) -> bytes:
    """Returns a weight's name, its shape and some 64 of its numbers."""
    flat = weight.detach().flatten()
    some = flat[:: max(1, flat.numel() // 64)].float().cpu().contiguous()
    return f"{name} {tuple(weight.shape)}".encode() + some.numpy().tobytes()
