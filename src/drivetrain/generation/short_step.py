"""A step that continues all rows of a cache by a token in few calls, for models of Llama's form on a CPU.

A step of few rows on a CPU computes for a moment and spends the rest of its time on the way there: Transformers'
modules make some 150 calls of PyTorch a block, each of a few microseconds, whatever the size of the model. The form of
Llama's blocks (Touvron et al. 2023, "LLaMA") is known, and takes half of them: queries, keys and values are one product
(`prepacked_weights`), a norm is one call, and queries and keys are rotated together. Layers that multiply are called as
modules, so that adapters and quantised weights go on as they are.

A model is taken only if its classes are Transformers' own and no hook hangs on what is passed over; and only after the
step gave the logits of the model's own pass once (`local_forward.stores_of`). Where a hook or another part comes later,
the model's own pass is taken again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from drivetrain.generation.prepacked_weights import Joined
from drivetrain.memory.recompute import does_as_its_class
from drivetrain.models.llama_form import of_llamas_form
from drivetrain.models.read_places import waiting_hooks

if TYPE_CHECKING:
    from drivetrain.generation.cache import RowCache


def short_step_of(model: nn.Module) -> ShortStep | None:
    """Returns the step of a model that has Llama's form and lies on a CPU; None of others. model: Transformers' own,
    whatever its linear layers have become."""
    known: Any = model
    if not of_llamas_form(model) or not hasattr(known, "lm_head") or not hasattr(known.model, "layers"):
        return None
    if any(each.device.type != "cpu" or type(each) not in (nn.Parameter, Tensor) for each in model.parameters()):
        return None
    step = ShortStep(known)
    is_own = all(map(of_llamas_form, step.passed_over)) and all(map(does_as_its_class, (model, *step.passed_over)))
    return step if is_own and step.is_possible() else None


class ShortStep:
    def __init__(self, model: Any) -> None:
        inner = model.model
        self._root, self._embed, self._rotary, self._head = model, inner.embed_tokens, inner.rotary_emb, model.lm_head
        self._norm = _Norm(inner.norm)
        self._blocks = [_Block(each) for each in inner.layers[: model.config.num_hidden_layers]]
        parts = [part for each in inner.layers for part in (each, each.self_attn, each.mlp)]
        self.passed_over: list[nn.Module] = [inner, *parts]
        # hooks that do nothing here, and the model's own, which the pass that the step is compared with has run
        self._hooks = [(_hooks_of(each), waiting_hooks(each)) for each in self.passed_over]
        self._hooks.append((_hooks_of(model), sum(map(len, _hooks_of(model)))))
        # what is read of the model, by the name under which it is found, and forward passes that replace a class's
        holders = (model, inner.layers, *self.passed_over)
        within = [(each._modules, name, own) for each in holders for name, own in each._modules.items()]
        own_code: list[tuple[dict[str, Any], str, Any]] = [
            (vars(each), "forward", vars(each).get("forward")) for each in holders
        ]
        self._as_met = [*within, *own_code]

    def is_possible(self) -> bool:
        """Returns whether nothing that the model does now is left out: dropout, a hook, or a part in another's
        place."""
        if self._root.training or modules._has_any_global_hook():
            return False
        if any(len(before) + len(behind) != known for (before, behind), known in self._hooks):
            return False
        return all(held.get(name) is own for held, name, own in self._as_met)

    def __call__(self, cache: RowCache, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the logits behind each token, (rows, vocabulary), and writes its keys and values into the cache.

        ids, positions: (rows, 1). mask: (rows, columns) bool, the columns that each row sees; None: all.
        """
        hidden = self._embed(ids)
        cos, sin = (each.unsqueeze(1) for each in self._rotary(hidden, positions))  # (rows, 1, 1, width)
        half = sin.shape[-1] // 2
        turns = cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
        seen = None if mask is None else mask[:, None, None]
        for number, block in enumerate(self._blocks):
            hidden = block(hidden, turns, seen, cache.layers[number])
        logits: Tensor = self._head(self._norm(hidden))
        return logits[:, -1]


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


class _Block:
    """One block. Its inputs and outputs are (rows, 1, hidden)."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._before, self._between = _Norm(block.input_layernorm), _Norm(block.post_attention_layernorm)
        self._project = Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out, self._scale, self._width = attention.o_proj, attention.scaling, attention.head_dim
        self._groups = attention.num_key_value_groups
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]  # Qwen3's
        self._head_norms = [] if norms[0] is None else [_Norm(each) for each in norms]
        self._widen, self._activate, self._narrow = Joined([mlp.gate_proj, mlp.up_proj]), mlp.act_fn, mlp.down_proj

    def __call__(self, hidden: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor | None, layer: Any) -> Tensor:
        hidden = hidden + self._out(self._attended(self._before(hidden), turns, seen, layer))
        gate, up = self._widen(self._between(hidden)).chunk(2, -1)
        found: Tensor = hidden + self._narrow(self._activate(gate) * up)
        return found

    def _attended(self, hidden: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor | None, layer: Any) -> Tensor:
        rows = len(hidden)
        every = self._project(hidden).view(rows, -1, 1, self._width)
        own = every.shape[1] // (self._groups + 2)  # heads of keys, and of values
        turned, values = every.split([every.shape[1] - own, own], 1)
        if self._head_norms:
            apart = turned.split([turned.shape[1] - own, own], 1)
            turned = torch.cat([norm(each) for norm, each in zip(self._head_norms, apart, strict=True)], 1)
        queries, keys = _turned(turned, turns).split([turned.shape[1] - own, own], 1)
        keys, values = layer.update(keys, values)
        # heads that share keys are queries of one head
        queries = queries.view(rows, own, self._groups, self._width)
        mask = None if seen is None else seen[..., seen.shape[-1] - keys.shape[2] :]
        if values.dtype == torch.bfloat16 and self._groups == 1:
            # PyTorch's kernel for 16 bits takes half of the time for two queries that it takes for one
            queries = torch.cat((queries, queries), 2)
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self._scale)
        return found[:, :, : self._groups].reshape(rows, 1, -1)


class _Norm:
    """The norm of Zhang and Sennrich 2019 ("Root Mean Square Layer Normalization"), in one operation where all numbers
    have 32 bits."""

    def __init__(self, module: Any) -> None:
        self._module, self._hooks = module, (module._forward_pre_hooks, module._forward_hooks)
        self._is_own = of_llamas_form(module)  # and not an adapter in its place

    def __call__(self, given: Tensor) -> Tensor:
        module = self._module
        is_plain = self._is_own and "forward" not in vars(module) and not any(self._hooks)
        if not is_plain or not given.dtype == module.weight.dtype == torch.float32:
            found: Tensor = module(given)
            return found
        return F.rms_norm(given, module.weight.shape, module.weight, module.variance_epsilon)


def _turned(given: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates (rows, heads, 1, width) by its position (Su et al. 2021, "RoFormer"). turns: cosines, and sines of which
    the first half is negative, each (rows, 1, 1, width)."""
    cos, sin = turns
    return torch.addcmul(given * cos, given.roll(given.shape[-1] // 2, -1), sin)
