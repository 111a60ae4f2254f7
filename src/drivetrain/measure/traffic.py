"""Counts the bytes that a rank sends to others, by kind of exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from drivetrain.measure.observer import Observer, tensors_in

# how an operator's name begins → kind, and what each rank of n sends in a ring for each byte that it gives:
# Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"
KINDS: dict[str, tuple[str, Callable[[int], float]]] = {
    "allreduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
    "allgather": ("all_gather", lambda n: n - 1),
    "reducescatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
    "broadcast": ("broadcast", lambda _: 1),
    "send": ("send", lambda _: 1),
}
GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "tensors")  # what operators call what a rank gives


class Traffic(Observer):
    """`sent` after the block: kind → bytes, as the usual ring algorithms send them. For one step, like FlopCount."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}
        self._one_at_a_time = threading.Lock()

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        del result
        if func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._see(func._opname.replace("_", ""), {**dict(zip(names, args, strict=False)), **kwargs})

    def _see(self, operator: str, given: dict[str, Any]) -> None:
        for start, (kind, share) in KINDS.items():
            if operator.startswith(start):
                tensors = [tensor for name in GIVEN for tensor in tensors_in(given.get(name))]
                ranks = group_of(given).size()
                with self._one_at_a_time:
                    sent = sum(t.numel() * t.element_size() for t in tensors) * share(ranks)
                    self.sent[kind] = self.sent.get(kind, 0) + round(sent)


def group_of(given: dict[str, Any]) -> dist.ProcessGroup:
    """Returns the group that an operator with these arguments exchanges among."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group: Any = given["group_name"]
    return _resolve_process_group(cast(Any, group)) if isinstance(group, str) else group
