"""The models that GGUF holds here: each one's settings and tensors, in llama.cpp's names and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import Problem, UserError

ROTARY_TYPES = ("default", "linear", "llama3")  # scale frequencies alone, which one tensor of factors can say


@dataclass(frozen=True)
class Architecture:
    """name: llama.cpp's. write_settings: adds the config's settings to a GGUFWriter. interleaved: whether llama.cpp
    turns neighbouring numbers of a head together, where Transformers turns its two halves. transposed: ends of the
    names of weights that Transformers keeps as (in, out). scales_rotary: whether it takes a tensor of factors."""

    name: str
    write_settings: Callable[[Any, Any], None]
    interleaved: bool = False
    transposed: tuple[str, ...] = ()
    scales_rotary: bool = False


def _write_rotary(config: Any, writer: Any) -> None:
    head = _head_size(config)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))


def _write_gpt2(config: Any, writer: Any) -> None:
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


_LLAMA = Architecture("llama", _write_rotary, interleaved=True, scales_rotary=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", _write_rotary),
    "qwen3": Architecture("qwen3", _write_rotary),
    "gpt2": Architecture(
        "gpt2", _write_gpt2, transposed=("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")
    ),
}


def architecture_of(config: Any) -> Architecture:
    """Returns the architecture of a model's text config. Raises UserError with everything that llama.cpp would compute
    in another way."""
    problems = list(_problems(config))
    if problems:
        raise UserError(problems)
    return ARCHITECTURES[config.model_type]


def _problems(config: Any) -> Iterator[Problem]:
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        yield Problem("--to", f"the model is a {config.model_type}, and gguf takes {known}", "give transformers")
        return
    wanted = {"gpt2": ("gelu_new", "gelu_pytorch_tanh")}.get(config.model_type, ("silu",))
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    if activation not in wanted:
        yield Problem("--to", f"llama.cpp computes {wanted[0]}, and the model's activation is {activation}", _ELSE)
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        yield Problem("--to", f"llama.cpp attends without the model's sliding window of {window} tokens", _ELSE)
    rotary = getattr(config, "rope_parameters", None) or {}
    kind = rotary.get("rope_type", "default")
    takes = ROTARY_TYPES if ARCHITECTURES[config.model_type].scales_rotary else ROTARY_TYPES[:1]
    if kind not in takes:
        yield Problem("--to", f"its rotary positions are scaled by {kind}, and gguf takes {', '.join(takes)}", _ELSE)


_ELSE = "give transformers, and convert that folder by llama.cpp's convert_hf_to_gguf.py if it knows the model"


def write_settings(config: Any, writer: Any) -> None:
    """Adds the settings of the model to a GGUFWriter."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    ARCHITECTURES[config.model_type].write_settings(config, writer)


def tensors_of(model: nn.Module, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields llama.cpp's name and layout of each weight; a tied one once."""
    import gguf

    chosen = ARCHITECTURES[config.model_type]
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == chosen.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if chosen.scales_rotary and (factors := _rotary_factors(model, config)) is not None:
        yield "rope_freqs.weight", factors
    for name, parameter in model.named_parameters():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            why = f"llama.cpp's {chosen.name} has no tensor for the model's {name}"
            raise UserError([Problem("--to", why, "give transformers")])
        yield known, _laid_out(name, parameter.detach(), config, chosen)


def _laid_out(name: str, weight: Tensor, config: Any, chosen: Architecture) -> Tensor:
    if name.endswith(chosen.transposed) and chosen.transposed:
        return weight.T
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    owner = name.rsplit(".", 2)[-2] if "." in name else ""
    if chosen.interleaved and owner in heads:
        return _interleaved(weight, heads[owner])
    return weight


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Puts the rows of each head's two halves in turn: row i of the first beside row i of the second."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _rotary_factors(model: nn.Module, config: Any) -> Tensor | None:
    """Returns the divisors of the rotary frequencies, (head size / 2,) in fp32; None where all are 1."""
    size = _head_size(config)
    theta = float(config.rope_parameters["rope_theta"])
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    own = next(buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    factors = (plain / own.double().cpu()).float()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-4) else factors


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
