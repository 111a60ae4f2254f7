"""Finds where a step would wait for a GPU, on a CPU.

Tensors that would lie on the device are marked by their storage: the model's, the optimizer's, and what the engine
sends. What is computed from them is marked too. Whatever then brings a number of a marked tensor to the host is a wait,
and so is a tensor that is built from numbers for the engine's device, which a copy from unpinned memory would be.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from drivetrain.engines import fsdp
from drivetrain.engines.base import Engine
from drivetrain.engines.state import local_part
from drivetrain.memory import transfers
from drivetrain.training import step_guard

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount"}
PYTHON_READS = {"tolist", "numpy", "cpu", "__array__"}
MAKERS = {"tensor", "as_tensor"}


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
        self.found: Counter[str] = Counter()  # what would wait, and the line in which it is

    def mark(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(local_part(tensor).untyped_storage())
            self._marked.setdefault(reference.cdata, reference)

    def is_marked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and local_part(value).untyped_storage()._cdata in self._marked

    def add(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        inner = next(f for f in reversed(frames) if not f.filename.endswith(("tests/waits.py", "transfers.py")))
        self.found[f"{what} in {inner.name} ({inner.filename.rpartition('/')[2]})"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.is_marked, tensors)):
            return result
        name = func._overloadpacket.__name__
        by_mask = name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
        if name in READS or (by_mask and name in ("index", "index_put", "index_put_")):
            self.add(name)
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        changed = [result, *(given.get(each) for each in written)]
        self.mark(*(leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)))
        return result


class _Python(TorchFunctionMode):
    """What reaches no operator on a CPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in PYTHON_READS and self._waits.is_marked(args[0]):
            self._waits.add(name)
        if name in MAKERS and (kwargs or {}).get("device") is not None and not isinstance(args[0], Tensor):
            self._waits.add(f"torch.{name} on the device")
        return func(*args, **(kwargs or {}))


class _Arrived:
    """An event of a copy to the host. It must not be waited for before the device has a window to go on with."""

    def __init__(self, waits: Waits, windows: list[int]) -> None:
        self._waits, self._windows, self._asked = waits, windows, windows[0]

    def synchronize(self) -> None:
        if self._windows[0] == self._asked:
            self._waits.add("a copy to the host is waited for at once")


@contextmanager
def watched(engine: Engine) -> Iterator[Waits]:
    """Everything that the engine does within; `found` says what would wait."""
    waits, windows = Waits(), [0]
    made: Any = engine

    def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        del device
        with _disable_current_modes():
            copy = tensor.to(dtype, copy=True)
        waits.mark(copy)
        return copy

    def fetched(tensor: Tensor) -> tuple[Tensor, Any]:
        with _disable_current_modes():
            copy = tensor.clone()
        return copy, _Arrived(waits, windows)

    def count(batch: Any) -> int:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # of a batch that was not sent yet
            return int(counted(batch))

    def forward_backward(micro_batches: Any) -> Tensor:
        loss: Tensor = through(micro_batches)
        windows[0] += 1
        return loss

    counted, through = made._workload.count, made.forward_backward
    with ExitStack() as stack:
        context = stack.enter_context(pytest.MonkeyPatch.context())
        context.setattr(transfers, "_moved", moved)
        context.setattr(transfers, "_fetched", fetched)
        for module in (fsdp, step_guard):
            context.setattr(module, "works_behind", lambda _: True)
        context.setitem(vars(made._workload), "count", count)
        context.setitem(vars(made), "forward_backward", forward_backward)
        waits.mark(*engine.tensors())
        stack.enter_context(waits)
        stack.enter_context(_Python(waits))
        yield waits
