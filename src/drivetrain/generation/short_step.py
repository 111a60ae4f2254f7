"""A step that continues all rows of a cache by a token in few calls, for models of Llama's form on a CPU.

A step of few rows on a CPU computes for a moment and spends the rest of its time on the way there: Transformers'
modules make some 150 calls of PyTorch a block, each of a few microseconds, whatever the size of the model. The form of
Llama's blocks (Touvron et al. 2023, "LLaMA") is known, and takes half of them: queries, keys and values are one product
(`prepacked_weights`), a norm is one call, and queries and keys are rotated together. Whether copies of weights still
have the layers' numbers is looked at once a step. Layers without a copy are called as modules, so that adapters and
quantised weights go on as they are.

A model is taken only if its classes are Transformers' own and no hook hangs on what is passed over; and only after the
step gave the logits of the model's own pass once (`local_forward.stores_of`). Where a hook or another part comes later,
the model's own pass is taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from drivetrain.generation.prepacked_weights import Joined, Product
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
        self._root, self._embed, self._rotary = model, inner.embed_tokens, inner.rotary_emb
        self._norm = _Norm(inner.norm)
        self._blocks = [_Block(each) for each in inner.layers[: model.config.num_hidden_layers]]
        self._products = _Products([*(group for block in self._blocks for group in block.products), [model.lm_head]])
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
        *multiply, head = self._products.now(hidden.dtype)
        for number, block in enumerate(self._blocks):
            hidden = block(hidden, multiply[4 * number : 4 * number + 4], turns, seen, cache.layers[number])
        return head(self._norm(hidden))[:, -1]


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


class _Products:
    """The products of a step, of groups of layers that multiply the same input."""

    def __init__(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        self._joined = [Joined(each) for each in groups]
        self._layers = [vars(layer) for each in groups for layer in each]
        self._forwards: list[Any] = []
        self._copies: list[Product | None] = []

    def now(self, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
        """Returns what multiplies for each group until a weight changes. dtype: of the inputs."""
        forwards = [each.get("forward") for each in self._layers]
        if forwards != self._forwards:  # weights were prepacked meanwhile, or are not any more
            self._forwards, self._copies = forwards, [each.product for each in self._joined]
        return [
            joined if copy is None or joined.has_hooks or not copy.is_current(dtype) else copy.times
            for joined, copy in zip(self._joined, self._copies, strict=True)
        ]


class _Block:
    """One block. Its inputs and outputs are (rows, 1, hidden)."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.products: list[list[nn.Module]] = [
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ]
        self._before, self._between = _Norm(block.input_layernorm), _Norm(block.post_attention_layernorm)
        self._scale, self._width, self._activate = attention.scaling, attention.head_dim, mlp.act_fn
        self._groups = attention.num_key_value_groups
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]  # Qwen3's
        self._head_norms = [] if norms[0] is None else [_Norm(each) for each in norms]

    def __call__(
        self,
        hidden: Tensor,
        multiply: Sequence[Callable[[Tensor], Tensor]],
        turns: tuple[Tensor, Tensor],
        seen: Tensor | None,
        layer: Any,
    ) -> Tensor:
        """multiply: the block's products, as they stand in `products`."""
        project, out, widen, narrow = multiply
        hidden = hidden + out(self._attended(project(self._before(hidden)), turns, seen, layer))
        gate, up = widen(self._between(hidden)).chunk(2, -1)
        return hidden + narrow(self._activate(gate) * up)

    def _attended(self, projected: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor | None, layer: Any) -> Tensor:
        rows = len(projected)
        every = projected.view(rows, -1, 1, self._width)
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
