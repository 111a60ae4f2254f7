"""This process among the ranks of the run, and the operations they do together. With one process every call is trivial.

Tensors travel through the default group (NCCL between GPUs, gloo between CPUs). Python objects and requests to stop
travel through a gloo group of their own, so that they never wait for a GPU nor mix with the model's collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import PeerError, RunError, UserError

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # the others wait while the first rank tokenises or saves


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@functools.cache
def _control_group(world: dist.ProcessGroup | None, purpose: str) -> dist.ProcessGroup:
    """Returns one group for a world, for all its engines: the threads of a gloo group poll for messages all the
    time."""
    del world, purpose
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Communicator:
    def __init__(self, purpose: str = "control") -> None:
        """Finds the process group that was made before. purpose: names a thread whose calls must not mix with this
        one's; all ranks make it."""
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        self._control = _control_group(dist.group.WORLD, purpose) if self.world > 1 else None
        self._asking: tuple[dist.Work, Tensor] | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_soon(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to sum over the ranks, in place; the returned function waits for the sum."""
        if self.world == 1:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def summed() -> Tensor:
            work.wait()
            return tensor

        return summed

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, value: T) -> list[T] | None:
        """Returns every rank's picklable value in order on the first rank, None on the others."""
        if self._control is None:
            return [value]
        values: list[T] | None = [value] * self.world if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values

    def all_gather(self, value: T) -> list[T]:
        if self._control is None:
            return [value]
        values = [value] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values

    def send_to_first(self, value: Any) -> None:
        """Sends a picklable value, which the first rank has to receive."""
        dist.send_object_list([value], dst=0, group=self._control)

    def receive(self, source: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self._control)
        return box[0]

    def on_first(self, do: Callable[[], T]) -> T:
        """Calls a function on the first rank; all get its (picklable) result, or the same UserError or RunError. Other
        errors stay on the first rank, and the others get a PeerError."""
        if self._control is None:
            return do()
        box: list[Any] = [None, None]
        own: Exception | None = None
        if self.is_first:
            try:
                box[0] = do()
            except Exception as error:  # or the others would wait for ever
                own, box[1] = error, self._described(error, UserError, RunError)
                if isinstance(error, OSError):  # a full disk
                    box[1] = RunError(str(error))
        dist.broadcast_object_list(box, src=0, group=self._control)
        result, failure = box
        if failure is not None:
            raise own if own is not None and isinstance(failure, PeerError) else failure
        return cast(T, result)

    def _described(self, error: Exception, *known: type[Exception]) -> Exception:
        """Returns the error that the other ranks get, in a form that can be pickled."""
        if isinstance(error, known):
            return error
        return PeerError(f"rank {self.rank} failed: {type(error).__name__}: {error}")

    def on_each(self, do: Callable[[], T]) -> list[T]:
        """Calls a function on every rank; all get the (picklable) results in order, or the error of the first rank that
        failed: as a PeerError if it is neither a UserError nor a RunError."""
        if self._control is None:
            return [do()]
        outcome: tuple[T | None, Exception | None]
        own: Exception | None = None
        try:
            outcome = do(), None
        except Exception as error:  # or the others would wait for ever
            own = error
            outcome = None, self._described(error, OSError, TypeError, ValueError, UserError, RunError)
        outcomes = self.all_gather(outcome)
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise own if own is not None and rank == self.rank else failure
        return [cast(T, result) for result, _ in outcomes]

    def any_asked(self, flag: bool) -> bool:
        """Returns whether any rank's flag was set: the same answer on all ranks, to be called once a step.

        On several ranks it answers for the previous call, so that no rank waits for the slowest.
        """
        if self._control is None:
            return flag
        asked = self._answer()
        tensor = torch.tensor(int(flag))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None
        self._asking = (work, tensor)
        return asked

    def close(self) -> None:
        """Completes the calls that are under way."""
        self._answer()

    def _answer(self) -> bool:
        if self._asking is None:
            return False
        work, tensor = self._asking
        self._asking = None
        work.wait()
        return bool(tensor)
