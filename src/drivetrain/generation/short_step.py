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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from drivetrain.generation.prepacked_weights import Joined, Product, dtype_of_products
from drivetrain.generation.shared_prompts import SharedPrompts, attention
from drivetrain.memory.recompute import does_as_its_class
from drivetrain.models.llama_form import of_llamas_form
from drivetrain.models.read_places import waiting_hooks

if TYPE_CHECKING:
    from drivetrain.generation.cache import RowCache, RowLayer


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
        self._hooks = [hooks for each in (*self.passed_over, model) for hooks in _hooks_of(each)]
        waiting = [waiting_hooks(hooks) for each in self.passed_over for hooks in _hooks_of(each)]
        self._hooks_as_met = [*waiting, *map(len, _hooks_of(model))]
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
        if list(map(len, self._hooks)) != self._hooks_as_met:
            return False
        return all(held.get(name) is own for held, name, own in self._as_met)

    def __call__(
        self, cache: RowCache, ids: Tensor, positions: Tensor, mask: Tensor | None, shared: SharedPrompts
    ) -> Tensor:
        """Returns the logits behind each token, (rows, vocabulary), and writes its keys and values into the cache.

        ids, positions: (rows, 1). mask: (rows, columns) bool, the columns that each row sees; None: all.
        shared: prompts that rows see as well, which the cache does not hold.
        """
        hidden = self._embed(ids)
        *multiply, head = self._products.now(hidden.dtype)
        cache.reserve(1)  # what outlives the step is made outside of inference mode
        # not where modules run that may keep tensors
        with torch.inference_mode() if self._products.are_copies else torch.no_grad():
            return head(self._norm(self._through(hidden, cache, positions, mask, shared, multiply)))[:, -1]

    def _through(
        self,
        hidden: Tensor,
        cache: RowCache,
        positions: Tensor,
        mask: Tensor | None,
        shared: SharedPrompts,
        multiply: Sequence[Callable[[Tensor], Tensor]],
    ) -> Tensor:
        cos, sin = (each.unsqueeze(1) for each in self._rotary(hidden, positions))  # (rows, 1, 1, width)
        half = sin.shape[-1] // 2
        turns = cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
        added = None  # to scores
        if mask is not None:
            added = torch.zeros(mask.shape, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)[:, None, None]
        for number, block in enumerate(self._blocks):
            attend = _Attend(cache.layers[number], added, shared, number)
            hidden = block(hidden, multiply[4 * number : 4 * number + 4], turns, attend)
        return hidden


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


class _Products:
    """The products of a step, of groups of layers that multiply the same input."""

    def __init__(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        self._joined = [Joined(each) for each in groups]
        self._layers = [vars(layer) for each in groups for layer in each]
        self._forwards: list[Any] = []
        self._copies: list[Product | None] = []
        self.are_copies = False  # whether each of those that `now` returned last multiplies by a copy

    def now(self, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
        """Returns what multiplies for each group until a weight changes. dtype: of the inputs."""
        forwards = [each.get("forward") for each in self._layers]
        if forwards != self._forwards:  # weights were prepacked meanwhile, or are not any more
            self._forwards, self._copies = forwards, [each.product for each in self._joined]
        dtype = dtype_of_products(dtype)
        found = [
            None if copy is None or joined.has_hooks or not copy.is_current(dtype) else copy.times
            for joined, copy in zip(self._joined, self._copies, strict=True)
        ]
        self.are_copies = None not in found
        return [joined if times is None else times for joined, times in zip(self._joined, found, strict=True)]


@dataclass(frozen=True)
class _Attend:
    """Attention of one block over what its rows saw before."""

    layer: RowLayer
    added: Tensor | None  # to scores, (rows, 1, 1, columns); None: rows see all columns
    shared: SharedPrompts
    number: int

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Keeps keys and values, (rows, heads, 1, width), and returns attention's output, (rows, heads, n, width).

        queries: (rows, heads, n, width), those of the heads that share keys beside each other.
        """
        keys, values = self.layer.update(keys, values)
        queries, groups = queries.to(keys.dtype), queries.shape[2]
        mask = None if self.added is None else self.added[..., self.added.shape[-1] - keys.shape[2] :]
        if values.dtype == torch.bfloat16 and groups == 1:
            # PyTorch's kernel for 16 bits takes half of the time for two queries that it takes for one
            found, sums = attention(torch.cat((queries, queries), 2), keys, values, mask, scale)
            found, sums = found[:, :, :1], sums[:, :, :1]
        else:
            found, sums = attention(queries, keys, values, mask, scale)
        return self.shared.join(queries, found, sums, self.number, scale) if self.shared else found


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
        attend: _Attend,
    ) -> Tensor:
        """multiply: the block's products, as they stand in `products`."""
        project, out, widen, narrow = multiply
        hidden = hidden + out(self._attended(project(self._before(hidden)), turns, attend))
        gate, up = widen(self._between(hidden)).chunk(2, -1)
        return hidden + narrow(self._activate(gate) * up)

    def _attended(self, projected: Tensor, turns: tuple[Tensor, Tensor], attend: _Attend) -> Tensor:
        rows = projected.shape[0]
        every = projected.view(rows, -1, 1, self._width)
        own = every.shape[1] // (self._groups + 2)  # heads of keys, and of values
        of_queries = own * self._groups
        turned, values = every.split_with_sizes((of_queries + own, own), 1)
        if self._head_norms:
            apart = turned.split_with_sizes((of_queries, own), 1)
            turned = torch.cat([norm(each) for norm, each in zip(self._head_norms, apart, strict=True)], 1)
        queries, keys = _turned(turned, turns).split_with_sizes((of_queries, own), 1)
        # heads that share keys are queries of one head
        found = attend(queries.view(rows, own, self._groups, self._width), keys, values, self._scale)
        return found.reshape(rows, 1, -1)


class _Norm:
    """The norm of Zhang and Sennrich 2019 ("Root Mean Square Layer Normalization"), in few operations where all numbers
    have 32 bits."""

    def __init__(self, module: Any) -> None:
        self._module, self._hooks = module, (module._forward_pre_hooks, module._forward_hooks)
        self._is_own = of_llamas_form(module)  # and not an adapter in its place
        self._least = torch.tensor(module.variance_epsilon**0.5) if self._is_own else torch.zeros(())

    def __call__(self, given: Tensor) -> Tensor:
        module = self._module
        is_plain = self._is_own and "forward" not in vars(module) and not any(self._hooks)
        if not is_plain or not given.dtype == module.weight.dtype == torch.float32:
            found: Tensor = module(given)
            return found
        # √(mean of squares + ε), in half of the time that F.rms_norm takes for few rows
        size = torch.linalg.vector_norm(given, dim=-1, keepdim=True).mul_(given.shape[-1] ** -0.5)
        return given.div(size.hypot_(self._least)).mul_(module.weight)


def _turned(given: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates (rows, heads, 1, width) by its position (Su et al. 2021, "RoFormer"). turns: cosines, and sines of which
    the first half is negative, each (rows, 1, 1, width)."""
    cos, sin = turns
    return torch.addcmul(given * cos, given.roll(given.shape[-1] // 2, -1), sin)
