"""Options of a language model: frozen blocks, noise on embeddings, longer contexts, tokens that end its answers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from drivetrain.errors import Problem, UserError, problem
from drivetrain.memory.recompute import repeated_blocks

ROPE = "workload.model.rope_scaling"
# what each kind of scaling takes beside its type and factor, in Transformers' names; defaults where it has none
SCALINGS: dict[str, dict[str, float | None]] = {
    "linear": {},
    "dynamic": {},
    "yarn": dict.fromkeys(
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
    ),
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": None},
}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While the block runs, all modules are in evaluation mode; each returns to its own."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def output_layer(model: Any) -> nn.Module | None:
    """Returns the layer that makes logits of tokens; None if a model names none, or has none."""
    asked: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    try:
        return asked()
    except NotImplementedError:
        return None


def language_part(model: nn.Module) -> Any:
    """Returns Transformers' model, or PEFT's with virtual tokens, within what an engine wrapped around it; None if
    there is none."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) or hasattr(module, "peft_config"):
            return module
    return None


def freeze_all_but_last(model: nn.Module, blocks: int) -> int:
    """Trains the last of the repeated blocks alone: embeddings, head and the norms around them are frozen too, as under
    LLaMA-Factory's finetuning_type=freeze. Returns the number of trained parameters.

    Raises UserError if the model has fewer blocks.
    """
    field, repeated = "workload.model.train_last_blocks", repeated_blocks(model)
    if not 0 < blocks <= len(repeated):
        has = f"{len(repeated)} repeated blocks" if repeated else "no repeated blocks"
        fix = f"give 1 to {len(repeated)}" if repeated else "leave it out"
        raise problem(field, f"{blocks} were asked for, and {type(model).__name__} has {has}", fix)
    model.requires_grad_(False)
    for block in repeated[-blocks:]:
        block.requires_grad_(True)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# --- noise on embeddings ----------------------------------------------------------------------------------------------


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """Adds uniform noise of at most alpha / sqrt(L * d) to the embeddings while training (NEFTune, Jain et al. 2023,
    algorithm 1), with L the length of the sequence and d their width.

    L is the sequence's own where several lie in one row (position_ids begin again at 0) or an attention mask of two
    dimensions marks padding; padding without a mask counts.

    model: before any wrapping, in which its embedding may be split over ranks.
    """
    noise = _Noise(alpha)
    model.register_forward_pre_hook(noise.look, with_kwargs=True)
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(noise.add)


class _Noise:
    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._seen = threading.local()  # replicas may run on threads

    def __deepcopy__(self, memo: Any) -> _Noise:
        del memo
        return _Noise(self._alpha)

    @torch.compiler.disable
    def look(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        del args
        if model.training:
            self._seen.lengths = _lengths(inputs.get("position_ids"), inputs.get("attention_mask"))

    @torch.compiler.disable
    def add(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Adds noise. output: (B, T, d), or a DTensor that is a sum over ranks: noise is added to the sum."""
        del args
        if not embedding.training:
            return None
        lengths = getattr(self._seen, "lengths", None)
        length = output.shape[1] if lengths is None else lengths[..., None]
        width = output.shape[-1]
        numbers = length * width if isinstance(length, Tensor) else torch.full((), length * width, device=output.device)
        bound = self._alpha / numbers.sqrt()
        if isinstance(output, DTensor):
            whole = [Replicate()] * output.device_mesh.ndim
            local = self._noisy(output.redistribute(placements=whole).to_local(), bound)
            return DTensor.from_local(local, output.device_mesh, whole, run_check=False)
        return self._noisy(output, bound)

    @staticmethod
    def _noisy(output: Tensor, bound: Tensor) -> Tensor:
        return output + torch.empty_like(output).uniform_(-1, 1) * bound.to(output.dtype)


def _lengths(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Returns the length of the sequence at each place, (B, T) or (B, 1). None: of the whole row."""
    if mask is not None and mask.ndim == 2:
        return mask.sum(1, keepdim=True)
    if positions is None or positions.ndim != 2:
        return None
    number = (positions == 0).cumsum(1)  # a row that continues a sequence begins with number 0
    counts = torch.zeros(len(number), positions.shape[1] + 1, dtype=number.dtype, device=number.device)
    return counts.scatter_add_(1, number, torch.ones_like(number)).gather(1, number)


# --- longer contexts --------------------------------------------------------------------------------------------------


def rope_scaling_config(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a Transformers config that scale its rotary positions, to replace its own.

    config: the present one. given: {type: linear, dynamic, yarn or llama3, factor: ..., and further fields of the
    type}.

    With linear, yarn and llama3 the context (max_position_embeddings) grows by the factor. With dynamic it stays: a
    longer sequence is scaled by the longest one seen so far, which suits inference but not training.

    Sources: Chen et al. 2023 (linear), bloc97 2023 (dynamic), Peng et al. 2023 (YaRN), Dubey et al. 2024 (llama3).
    Raises UserError for models without rotary positions, or with scaled ones, and for wrong fields.
    """
    own = config.get_text_config()
    held = getattr(own, "rope_parameters", None)
    kind, problems = _given_problems(given)
    if not held:
        why = f"{own.model_type} has no rotary positions that Transformers could scale"
        problems.append(Problem(ROPE, why, "leave it out"))
        raise UserError(problems)
    nested = {key: part for key, part in held.items() if isinstance(part, dict)}
    scaled = {key: part for key, part in nested.items() if not key.startswith("sliding")} if nested else {"": held}
    for part in scaled.values():
        if part.get("rope_type", "default") != "default":
            why = f"{own.model_type}'s positions are scaled already ({part['rope_type']}, {part.get('factor')})"
            problems.append(Problem(ROPE, why, "leave it out"))
    if problems:
        raise UserError(problems)
    context, factor = getattr(own, "max_position_embeddings", None), float(given["factor"])
    extra = {**SCALINGS[kind], "original_max_position_embeddings": context, **given}
    settings = {key: extra[key] for key in SCALINGS[kind] if extra[key] is not None}
    found = {key: {**part, "rope_type": kind, "factor": factor, **settings} for key, part in scaled.items()}
    overrides: dict[str, Any] = {"rope_parameters": {**nested, **found} if nested else found[""]}
    if kind != "dynamic" and context is not None:
        overrides["max_position_embeddings"] = round(settings.get("original_max_position_embeddings", context) * factor)
    return overrides


def _given_problems(given: Mapping[str, Any]) -> tuple[str, list[Problem]]:
    kind, factor = given.get("type", given.get("rope_type")), given.get("factor")
    problems = []
    if kind not in SCALINGS:
        why = f"{kind!r} is no known scaling" if kind else "it has no type"
        problems.append(Problem(f"{ROPE}.type", why, f"give {', '.join(SCALINGS)}"))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < float("inf"):
        why = f"{factor!r} makes no context longer" if "factor" in given else "it has no factor"
        problems.append(Problem(f"{ROPE}.factor", why, "give a number above 1"))
    taken = SCALINGS.get(str(kind), {})
    for key in sorted(given.keys() - taken.keys() - {"type", "rope_type", "factor"}) if kind in SCALINGS else ():
        fix = f"it takes {', '.join(taken)}" if taken else "leave it out"
        problems.append(Problem(f"{ROPE}.{key}", f"{kind} takes no {key}", fix))
    for key in sorted(given.keys() & taken.keys()):
        if isinstance(given[key], bool) or not isinstance(given[key], int | float) or given[key] <= 0:
            problems.append(Problem(f"{ROPE}.{key}", f"{given[key]!r} is no number above 0", "correct it"))
    return str(kind), problems


def context_length(config: Any) -> int | None:
    """Returns the longest sequence that a model's positions are made for; None if it has no such bound."""
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context


def is_scaled_dynamically(config: Any) -> bool:
    """Returns whether a sequence's result depends on earlier ones, if they were longer than `context_length`."""
    held = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [held.get("rope_type"), *(part.get("rope_type") for part in held.values() if isinstance(part, dict))]
    return "dynamic" in kinds


def generation_config(model: Any, ends: Set[int], tokenizer: Any) -> Any:
    """Returns the settings of Transformers' generate() for a model: its own, and every token that ends an answer. A
    chat template often has another one than the tokenizer's eos."""
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)
    found = GenerationConfig() if own is None else copy.deepcopy(own)
    known = found.eos_token_id
    if known is None:  # of a user's own config class nothing but its own fields is sure to be there
        known = getattr(model.config.get_text_config(), "eos_token_id", None)
    listed = known if isinstance(known, list) else [] if known is None else [known]
    found.eos_token_id = sorted({*listed, *ends}) or None
    if found.pad_token_id is None:
        found.pad_token_id = tokenizer.pad_token_id
    try:
        found.validate(strict=True)
    except ValueError:  # of published settings that contradict each other, and could not be saved again
        found = GenerationConfig(eos_token_id=found.eos_token_id, pad_token_id=found.pad_token_id)
    return found


# --- kernels ----------------------------------------------------------------------------------------------------------


def attention_choices() -> dict[str, str | None]:
    """Returns attention implementations: None if training can use it on this machine, else why not."""
    gpu = torch.cuda.is_available()
    flash = None if find_spec("flash_attn") else "the package flash-attn is not installed"
    return {
        "eager": None,
        "sdpa": None,
        "flash": flash if gpu else "it needs a GPU",
        "flex": None if gpu else "on a CPU it has no backward pass",
    }
