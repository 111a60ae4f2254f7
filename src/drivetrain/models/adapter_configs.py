"""Turns the run file's adapter block into PEFT's config for a model, and reports everything that does not fit."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from drivetrain.config.adapter import Adapter
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.language_options import output_layer


def configured(block: Adapter, model: Any, whole: Sequence[str], base: str | None) -> Any:
    """Returns PEFT's config of a new adapter. whole: names of modules that are trained without an adapter.

    Raises UserError for targets that the model does not have, or that PEFT does not know.
    """
    import peft

    own: dict[str, Any] = {"task_type": _task(model), "base_model_name_or_path": base}
    if block.method == "lora":
        return peft.LoraConfig(
            r=block.rank,
            lora_alpha=2 * block.rank if block.alpha is None else block.alpha,
            lora_dropout=block.dropout,
            target_modules=_targets(block, model, whole),
            use_rslora=block.rslora,
            use_dora=block.dora,
            init_lora_weights="pissa" if block.pissa else True,
            **own,
        )
    if block.method == "oft":
        targets = _targets(block, model, whole)
        _check_blocks(block, model, targets)
        return peft.OFTConfig(
            r=0, oft_block_size=block.block_size, module_dropout=block.dropout, target_modules=targets, **own
        )
    if block.method == "ia3":
        return peft.IA3Config(**_ia3_modules(block, model, whole), **own)
    if own["task_type"] is None:
        why = f"{block.method} is of language models and text classifiers, and this is a {type(model).__name__}"
        raise problem("adapter.method", why, "give lora")
    own["num_virtual_tokens"] = block.virtual_tokens
    if block.method == "prompt":
        return peft.PromptTuningConfig(prompt_tuning_init="SAMPLE_VOCAB", **own)  # from embeddings of random tokens
    if block.method == "prefix":
        hidden = block.hidden_size
        return peft.PrefixTuningConfig(prefix_projection=hidden is not None, encoder_hidden_size=hidden, **own)
    width = block.hidden_size or model.config.get_text_config().hidden_size
    return peft.PromptEncoderConfig(encoder_hidden_size=width, encoder_dropout=block.dropout, **own)


def _task(model: Any) -> str | None:
    kinds = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}
    kinds |= {"ForTokenClassification": "TOKEN_CLS"}
    name = type(model).__name__
    return next((task for ending, task in kinds.items() if name.endswith(ending)), None)


# --- which modules ----------------------------------------------------------------------------------------------------


def output_layer_names(model: nn.Module) -> list[str]:
    head = output_layer(model)
    return [name for name, module in model.named_modules() if module is head and name]


def head_modules(model: Any) -> list[str]:
    """Returns the modules of a Transformers classifier beside its body, which have to be learnt for the classes at
    hand."""
    body = getattr(model, "base_model_prefix", "")
    if not body or not hasattr(model, body) or output_layer(model) is not None:
        return []
    return [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]


def ending_with(model: nn.Module, endings: Iterable[str], field: str) -> list[str]:
    """Returns full names of the modules whose names end so. Raises UserError with the nearest for endings that none
    has."""
    names = [name for name, _ in _outside_of_adapters(model)]
    found: list[str] = []
    problems = []
    for ending in endings:
        matching = [name for name in names if name == ending or name.endswith(f".{ending}")]
        found += matching
        if not matching:
            last = sorted({name.rpartition(".")[2] for name in names} - {""})
            near = difflib.get_close_matches(ending, [*last, *names], n=3, cutoff=0.5)
            linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)})
            fix = f"did you mean {' or '.join(near)}?" if near else f"its linear layers are {', '.join(linear)}"
            problems.append(Problem(field, f"{type(model).__name__} has no module {ending}", fix))
    if problems:
        raise UserError(problems)
    return found


def _targets(block: Adapter, model: nn.Module, whole: Sequence[str]) -> list[str] | str:
    if block.targets is not None and block.targets != "all-linear":
        given = list(block.targets)
        _refuse_whole(ending_with(model, given, "adapter.targets"), whole)
        return given
    head = output_layer(model)
    chosen = [
        name
        for name, module in _outside_of_adapters(model)
        if _is_linear(module) and module is not head and not any(_within(name, other) for other in whole)
    ]
    if not chosen:
        fix = "name its layers in adapter.targets (convolutions too)"
        raise problem("adapter.targets", f"{type(model).__name__} has no linear layer beside its head", fix)
    return _shortened(chosen, [name for name, _ in _outside_of_adapters(model)])


def _check_blocks(block: Adapter, model: nn.Module, targets: list[str] | str) -> None:
    """Raises UserError for targets whose inputs are no multiple of the block: PEFT would take another size for each."""
    ends = set(targets.replace("\\", "").split("|") if isinstance(targets, str) else targets)
    endings = tuple(f".{name}" for name in ends)
    meant = {name: each for name, each in _outside_of_adapters(model) if name in ends or name.endswith(endings)}
    if others := sorted(name for name, module in meant.items() if not _is_linear(module)):
        raise problem("adapter.targets", f"{others[0]} is no linear layer, and oft is of these", "leave it out")
    inputs = {name: _inputs(module) for name, module in meant.items()}
    if broken := {name: count for name, count in inputs.items() if count % block.block_size}:
        name, count = next(iter(broken.items()))
        why = f"{block.block_size} does not divide the {count} inputs of {name}"
        why += f" and those of {len(broken) - 1} other layers" if len(broken) > 1 else ""
        common = math.gcd(*inputs.values())
        largest = max(size for size in range(1, min(common, block.block_size) + 1) if common % size == 0)
        raise problem("adapter.block_size", why, f"{largest} divides those of all" if largest > 1 else "name targets")


def _inputs(module: Any) -> int:
    """Counts the inputs of a linear layer, adapted or not; Conv1D has them in the rows of its weight."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    bare: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return int(bare.in_features if isinstance(bare, nn.Linear) else bare.weight.shape[0])


def _ia3_modules(block: Adapter, model: Any, whole: Sequence[str]) -> dict[str, list[str]]:
    from peft.utils import constants

    if block.targets == "all-linear":
        why = "ia3 scales outputs of some layers and inputs of others, and needs their names"
        raise problem("adapter.targets", why, "name them, and those scaled at their inputs in adapter.feedforward")
    if block.targets is not None:
        _refuse_whole(ending_with(model, block.targets, "adapter.targets"), whole)
        others = sorted(set(block.feedforward) - set(block.targets))
        if others:
            raise problem("adapter.feedforward", f"{', '.join(others)} are no targets", "add them to adapter.targets")
        return {"target_modules": list(block.targets), "feedforward_modules": list(block.feedforward)}
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    if kind not in known:
        why = f"PEFT has no choice of modules for {kind or type(model).__name__}"
        raise problem("adapter.targets", why, "name them, and those scaled at their inputs in adapter.feedforward")
    inputs = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind]
    return {"target_modules": list(known[kind]), "feedforward_modules": list(inputs)}


def _refuse_whole(targets: Iterable[str], whole: Sequence[str]) -> None:
    both = sorted({name for name in targets for other in whole if _within(name, other)})
    if both:
        why = f"{', '.join(both[:5])} would be trained whole and have an adapter"
        raise problem("adapter.targets", why, "take them out of adapter.targets or of adapter.train_also")


def _outside_of_adapters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns modules as the model had them before; an adapted layer counts once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    inner = tuple(f"{name}." for name in adapted)
    return [(name, module) for name, module in model.named_modules() if name and not name.startswith(inner)]


def _is_linear(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    bare = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return isinstance(bare, nn.Linear | Conv1D)


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _shortened(chosen: Sequence[str], names: Sequence[str]) -> list[str] | str:
    """Returns the last parts of names, if they mean no other module too: an adapter's file is easier to read then.

    PEFT takes any name that ends in the text for the named module (1.0 for 0, of a Sequential in a Sequential), but a
    pattern as a whole.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    meant = [name for name in names if name.rpartition(".")[2] in last]
    if len(meant) == len(chosen):
        return sorted(last)
    ends = tuple(f".{name}" for name in chosen)
    if any(name.endswith(ends) for name in set(names) - set(chosen)):
        return "|".join(map(re.escape, chosen))
    return list(chosen)
