"""Tensors without numbers, made quickly: a FakeTensorMode that remembers the results of operators by little.

A trace is Python alone, and most of its time went into PyTorch's own cache of such results, which describes each tensor
by fourteen attributes. For the operators of ATen that a run without symbolic shapes calls, size, strides, type and
device are enough: what they return has no numbers, and depends on nothing else. A view is made by its own kernel, which
only computes sizes, so that it shares its storage as a real one does. All else is left to PyTorch: operators whose
result depends on numbers, that change a tensor's sizes, or that return a tensor with the storage of a given one; given
tensors that are complex, sparse, constant or have numbers; inference mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from drivetrain.measure.observer import DEVICE, tensors_in
from drivetrain.plan import grouped_products
from drivetrain.plan.trace_answers import answer_to_library

BATCH_NORM = torch.ops.aten.native_batch_norm.default
SCALAR = torch.ops.aten._local_scalar_dense.default
LEFT = {  # to PyTorch: a tensor of numbers becomes one without; its answers depend on numbers
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    SCALAR,
}
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
HASHED = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
MOST = 50_000  # results that are remembered
_RESIZE = torch.UntypedStorage.resize_  # itself: while memory is recorded, another function stands in its place

Make = Callable[["QuickFakeMode", Sequence[Any]], Any]  # a result, from the mode and the operator's arguments

# by operator and arguments, for all traces of a process; None: PyTorch makes it
_MAKERS: dict[bool, dict[tuple[Any, ...], Make | None]] = {False: {}, True: {}}


class Unusual(Exception):
    """An argument is of a kind that results are not remembered for."""


class QuickFakeMode(FakeTensorMode):
    def __init__(self, like_cpu: bool = False, **given: Any) -> None:
        """like_cpu: whether results lie in memory as a CPU's kernels have them, where that is not as others do."""
        super().__init__(**given)
        assert self._allow_unsafe_data_ptr_access, "as `fake` makes them"
        self._like_cpu = like_cpu
        self._makers = _MAKERS[like_cpu]
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does as its base, whose own is wrapped for torch.compile, which a trace has no use for."""
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "other" or torch.is_inference_mode_enabled():
            return self._by_pytorch(func, types, args, kwargs)
        try:
            key = (func, torch.get_default_dtype(), *self._described(args), *self._described(kwargs.values(), kwargs))
        except Unusual:
            return self._by_pytorch(func, types, args, kwargs)
        if kind == "view":
            return self._view(func, args, kwargs)
        if key in self._makers:
            make = self._makers[key]
            return self._by_pytorch(func, types, args, kwargs) if make is None else make(self, args)
        result = self._by_pytorch(func, types, args, kwargs)
        if len(self._makers) < MOST:
            self._makers[key] = _maker(result, args, kwargs)
        return result

    # --- what is remembered ------------------------------------------------------------------------------------------

    def _described(self, values: Any, names: Any = ()) -> list[Any]:
        """Returns what an operator's result depends on, of its arguments. Raises Unusual."""
        found: list[Any] = [*names, len(values)]
        for value in values:
            if type(value) is FakeTensor:
                self._check(value)
                found += (value.shape, value.stride(), value.dtype, value._fake_device)
            elif isinstance(value, HASHED):
                found += (type(value), value)  # 1, 1.0 and True are equal, and give other types
            elif isinstance(value, list | tuple):
                found += self._described(value)
            else:
                raise Unusual
        return found

    def _check(self, tensor: FakeTensor) -> None:
        usual = tensor.fake_mode is self and tensor.constant is None and tensor.layout is torch.strided
        if not usual or tensor.dtype.is_complex:
            raise Unusual

    def _view(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        device = args[0]._fake_device
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return self.fake(made, device)
        return type(made)(self.fake(each, device) for each in made)

    def fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Returns a tensor of PyTorch's meta device as one of this mode, as the constructor of FakeTensor does."""
        known = self._attributes.get(device)
        if known is None:
            made = FakeTensor(self, meta, device)
            self._attributes[device] = dict(made.__dict__)
            return made
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # as DeepSpeed reads it, of flat tensors
        fake.__dict__.update(known)
        return fake

    # --- what PyTorch makes ------------------------------------------------------------------------------------------

    def _by_pytorch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answers libraries that look at their own numbers (trace_answers.py) and products of groups, and does the rest
        as its base does."""
        if func is SCALAR and args[0].constant is None:
            answer = answer_to_library(args[0].dtype)
            if answer is not None:
                return answer
        if func is grouped_products.OPERATOR:
            layout = grouped_products.layout_of_result(*args, **kwargs)
            if layout is not None:
                made = torch.empty_strided(*layout, dtype=args[0].dtype, device="meta")
                return self.fake(made, args[0].device)
        result: Any = super().dispatch(func, types, args, kwargs)
        if self._like_cpu and func is BATCH_NORM and args[0].is_contiguous() and result[0].ndim == 4:
            # of maps of 1 x 1, whose layout is both, a CPU's kernel returns the usual one; PyTorch's rule for tensors
            # without numbers says channels-last
            size = [*result[0].shape]
            strides = [size[1] * size[2] * size[3], size[2] * size[3], size[3], 1]
            own = super().dispatch(torch.ops.aten.as_strided.default, types, (result[0], size, strides), {})
            return own, *result[1:]
        return result

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Puts storages back to their size after views of them that come from the cache of FakeTensorMode: such a view
        is made by `set_`, which enlarges a storage that is too small, as one that FSDP has freed."""
        if not (isinstance(func, OpOverload) and func.is_view and args and isinstance(args[0], Tensor)):
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        storage = args[0].untyped_storage()
        if not storage.resizable():  # of numbers that numpy holds: `set_` fails on it, whatever the size
            return self._dispatch_impl(func, types, args, kwargs)
        size = storage.nbytes()
        result = super()._cached_dispatch_impl(func, types, args, kwargs)
        if storage.nbytes() != size:
            _RESIZE(storage, size)
        return result


@functools.cache
def _kind(func: Any) -> Literal["view", "plain", "other"]:
    """Returns how the results of an operator are made: as a view, by what was remembered, or by PyTorch alone."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in LEFT or TAGS & {*func.tags}:
        return "other"
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
    if is_composite:
        return "other"
    is_view = func.is_view or func is torch.ops.aten._unsafe_view.default  # which shares its storage too
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta")
    return "plain" if not is_view else "view" if has_kernel and _takes_one_tensor(func) else "other"


def _takes_one_tensor(func: OpOverload) -> bool:
    arguments = func._schema.arguments
    return str(arguments[0].type) == "Tensor" and not any("Tensor" in str(each.type) for each in arguments[1:])


def _maker(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Make | None:
    """Returns what makes the same result of arguments that are described alike; None where that is not known."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    try:
        if type(result) in (tuple, list):
            kind, makers = type(result), [_part(each, args, given) for each in result]
            return lambda mode, args: kind(make(mode, args) for make in makers)
        return _part(result, args, given)
    except Unusual:
        return None


def _part(result: Any, args: Sequence[Any], given: set[int]) -> Make:
    """Returns what makes one of an operator's results. given: the storages of its arguments. Raises Unusual."""
    if not isinstance(result, Tensor):
        if isinstance(result, HASHED):
            return lambda _, __: result
        raise Unusual
    for place, value in enumerate(args):
        if value is result:  # of an operator that writes to it
            return lambda _, args: args[place]
    if not isinstance(result, FakeTensor) or result.constant is not None or result.layout is not torch.strided:
        raise Unusual
    storage = result.untyped_storage()
    if result.dtype.is_complex or storage._cdata in given or result.storage_offset():
        raise Unusual
    shape, strides, dtype, device = result.shape, result.stride(), result.dtype, result._fake_device
    if torch.empty_strided(shape, strides, dtype=dtype, device="meta").untyped_storage().nbytes() != storage.nbytes():
        raise Unusual
    return lambda mode, _: mode.fake(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)
