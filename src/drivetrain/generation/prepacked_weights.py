"""Copies of linear layers' weights in the order in which a CPU's kernels read them.

A step of few rows reads every weight for few products. PyTorch's kernels take a weight as it lies and bring it into
their own order in each step; that can be done once, for any number of rows (what torch.compile's Inductor calls
prepacking; `packed_products` has the kernels). On an AMD EPYC the products of a step of 1 to 16 rows took a half to a
third of the time, of 64 rows a half, and of a prompt three quarters (bench/prepacked.py). The order costs a copy of the
weights, so only as many are copied as a share of the free memory holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import last_line
from drivetrain.generation.packed_products import Multiply, packed
from drivetrain.memory.limit import attainable_memory
from drivetrain.models.language_head import LossHead
from drivetrain.models.llama_form import of_llamas_form
from drivetrain.models.read_places import waiting_hooks

LOG = logging.getLogger(__name__)
SHARE = 0.25  # of the memory that is free, which the copies may take
LEAST = 2**16  # numbers of a weight: smaller ones stay in a core's cache as they are
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of such blocks: they multiply the same input
DTYPES = (torch.float32, torch.bfloat16)
Key = tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]  # addresses, shapes and strides of weights


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model's linear layers multiply by prepacked copies of their weights."""
    undo = prepack(model)
    try:
        yield
    finally:
        undo()


def prepack(model: nn.Module) -> Callable[[], None]:
    """Lets the model's linear layers multiply by prepacked copies of their weights where no gradient is wanted, as far
    as they lie in this process' memory whole. Layers that multiply the same input in Llama's blocks do so at once. A
    layer whose weight has changed since goes on without its copy. Returns a function that undoes it."""
    free, done = SHARE * attainable_memory(), list[nn.Module]()
    copies: dict[Key, Multiply] = {}  # a tied weight is copied once
    for layers, weights in _products(model):
        dtype = dtype_of_products(weights[0].dtype)
        needed = 0 if _key(weights) in copies else sum(each.numel() for each in weights) * dtype.itemsize
        if needed > free:
            continue
        try:
            product = Product(layers, weights, dtype, copies)
        except (RuntimeError, AttributeError, NotImplementedError) as error:  # a build of PyTorch without these kernels
            LOG.info("weights are not prepacked: %s", last_line(error))
            break
        for number, layer in enumerate(layers):
            layer.forward = _Alone(layer, product) if len(layers) == 1 else _Sibling(layer, product, number)
        free -= needed
        done += layers

    def undo() -> None:
        for layer in done:
            vars(layer).pop("forward", None)

    return undo


class Joined:
    """Layers that multiply the same input: their outputs stand one behind another in the last dimension. Layers that
    have one copy of their weights make one product."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._hooks = [hooks for each in layers for hooks in (each._forward_pre_hooks, each._forward_hooks)]

    def __call__(self, given: Tensor) -> Tensor:
        product = self.product
        found = None if product is None or self.has_hooks else product.of(given)
        if found is not None:
            return found
        apart = [layer(given) for layer in self._layers]
        return apart[0] if len(apart) == 1 else torch.cat(apart, -1)

    @property
    def has_hooks(self) -> bool:
        """Whether a layer has hooks, but for those that wait for a pass that reads places."""
        return any(hooks and len(hooks) > waiting_hooks(hooks) for hooks in self._hooks)

    @property
    def product(self) -> Product | None:
        """The product by one copy of all these layers' weights, if they have one."""
        first: Any = vars(self._layers[0]).get("forward")
        if type(first) is _Alone:
            is_whole = len(self._layers) == 1
        else:
            is_whole = type(first) is _Sibling and first.product.is_of(self._layers)
        return first.product if is_whole else None


def _products(model: nn.Module) -> Iterator[tuple[list[nn.Module], list[Tensor]]]:
    """Yields the layers that multiply the same input, with their weights as (outputs, inputs)."""
    found: dict[nn.Module, Tensor] = {}
    for layer in model.modules():
        weight = _weight_of(layer)
        if weight is not None and "forward" not in vars(layer):
            found[layer] = weight
    for parent in filter(of_llamas_form, model.modules()):
        for names in SIBLINGS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            # different ones of one dtype, and all with a bias or none
            is_group = all(each in found for each in layers) and len(set(layers)) == len(layers)
            if is_group and len({_kind(each) for each in layers}) == 1:
                yield layers, [found.pop(each) for each in layers]
    for layer, weight in found.items():
        yield [layer], [weight]


def _kind(layer: Any) -> tuple[torch.dtype, bool]:
    return layer.weight.dtype, layer.bias is not None


def _weight_of(layer: nn.Module) -> Tensor | None:
    """Returns the weight of a linear layer as (outputs, inputs), where it is a plain tensor of this process; None of
    other layers, of shards, of quantised weights and of tensors without numbers."""
    # a head that makes losses in place of logits makes them of logits meanwhile
    is_plain = type(layer) in (nn.Linear, LossHead)
    weight: Any = layer.weight if is_plain or _is_transposed(layer) else None
    if type(weight) not in (nn.Parameter, Tensor) or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    if weight.layout is not torch.strided or weight.dim() != 2 or weight.numel() < LEAST:
        return None
    return weight.detach() if is_plain else weight.detach().t()


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether it is Transformers' linear layer of GPT-2, whose weight is (inputs, outputs)."""
    module = sys.modules.get("transformers.pytorch_utils")  # not imported for it: a model that has one did
    return module is not None and type(layer) is module.Conv1D


def _key(weights: Sequence[Tensor]) -> Key:
    return tuple((weight.data_ptr(), tuple(weight.shape), weight.stride()) for weight in weights)


def dtype_of_products(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which inputs of a dtype are multiplied."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype


class Product:
    """The product by one copy of the weights of one layer, or of several that multiply the same input."""

    def __init__(
        self, layers: Sequence[Any], weights: Sequence[Tensor], dtype: torch.dtype, copies: dict[Key, Multiply]
    ) -> None:
        """weights: (outputs, inputs) each. dtype: of the products. copies: of others, to which this one is added."""
        self._dtype, self.widths = dtype, [len(each) for each in weights]
        self._known = [known for each in layers for known in _known(each)]
        self.kept: _Kept | None = None
        key = _key(weights)
        if key not in copies:
            with torch.no_grad():
                whole = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).to(dtype).contiguous()
                copies[key] = packed(whole)
        self._multiply = copies[key]
        biases = [each.bias.detach().to(dtype) for each in layers if each.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def is_of(self, layers: Sequence[nn.Module]) -> bool:
        """Returns whether these layers, in this order, still multiply by this copy."""
        forwards = [vars(each).get("forward") for each in layers]
        return all(type(each) is _Sibling and each.is_number(n, self) for n, each in enumerate(forwards))

    def of(self, given: Tensor) -> Tensor | None:
        """Returns the product; None where it has to be made without the copy."""
        return self.times(given) if self.fits(given) else None

    def times(self, given: Tensor) -> Tensor:
        """Returns the product by the copy, which fits."""
        return self._multiply(given.to(self._dtype), self._bias)

    def fits(self, given: Tensor) -> bool:
        """Returns whether an input can be multiplied by the copy."""
        return given.is_floating_point() and bool(given.numel()) and self.is_current(dtype_of_products(given.dtype))

    def is_current(self, dtype: torch.dtype) -> bool:
        """Returns whether the copy has the layers' numbers, in the dtype of a product; gradients are not made by it."""
        if dtype != self._dtype or torch.is_grad_enabled():
            return False
        for held, name, tensor, address, version in self._known:
            if held.get(name) is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True


@dataclass(frozen=True)
class _Kept:
    """The product of an input, of which the layer with the number `next` takes its part."""

    given: Tensor
    version: int
    parts: Sequence[Tensor]
    next: int


def _known(layer: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor, int, int]]:
    """Yields where a layer holds its weight and its bias, and what changes with their numbers."""
    for name in ("weight", "bias"):
        held: dict[str, Any] = next(each for each in (layer._parameters, layer._buffers, vars(layer)) if name in each)
        tensor = held[name]
        if tensor is not None:
            yield held, name, tensor, tensor.data_ptr(), tensor._version


class _Alone:
    """The forward pass of a layer that has a copy of its own."""

    def __init__(self, layer: nn.Module, product: Product) -> None:
        self._plain, self.product = layer.forward, product

    def __call__(self, input: Tensor) -> Tensor:
        found = self.product.of(input)
        if found is None:
            found = self._plain(input)
        return found


class _Sibling:
    """The forward pass of a layer that multiplies the same input as others. The first makes the product for all, and
    those that follow with the same input take their parts of it, each once."""

    def __init__(self, layer: nn.Module, product: Product, number: int) -> None:
        self._plain, self.product, self._number = layer.forward, product, number

    def is_number(self, number: int, product: Product) -> bool:
        return self._number == number and self.product is product

    def __call__(self, input: Tensor) -> Tensor:
        product, number = self.product, self._number
        if not product.fits(input):
            found: Tensor = self._plain(input)
            return found
        kept = product.kept if number else None  # read once: another thread may replace it
        version = 0 if input.is_inference() else input._version
        if kept is None or kept.given is not input or (kept.next, kept.version) != (number, version):
            whole = product.of(input)
            assert whole is not None, "fits"
            kept = _Kept(input, version, whole.split(product.widths, -1), number)
        is_last = number == len(product.widths) - 1
        product.kept = None if is_last else replace(kept, next=number + 1)
        return kept.parts[number]
