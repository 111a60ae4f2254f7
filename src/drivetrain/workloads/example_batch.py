"""A workload that knows one batch alone: for a loop of the user's own, which reads the data itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.distributed.rng import seed_everything
from drivetrain.errors import problem
from drivetrain.workloads.base import Batch
from drivetrain.workloads.user_objects import PassedObjects, UserObjectsWorkload


class ExampleBatch(Sequence[int]):
    """The rows of a batch by number, repeated until there are `length` of them."""

    def __init__(self, batch: Batch, length: int) -> None:
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in batch.values()}
        self.batch, self._rows = batch, sizes.pop() if len(sizes) == 1 else 0
        self._length = max(length, self._rows) if self._rows else length

    @property
    def has_rows(self) -> bool:
        """Returns whether each tensor's first dimension is the sample."""
        return self._rows > 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return index

    def of(self, numbers: Sequence[int]) -> Batch:
        if not self.has_rows:
            return self.batch
        rows = [number % self._rows for number in numbers]
        return {name: tensor[rows] for name, tensor in self.batch.items()}


class ExampleWorkload(UserObjectsWorkload):
    def __init__(self, objects: Mapping[str, Any], batch: Batch, least: int, seed: int) -> None:
        """objects: model, loss or loss_sum and count, perhaps metrics. least: samples of a step."""
        seed_everything(seed)
        samples = ExampleBatch(batch, least)
        own = {"train_data": samples, "collate": samples.of}
        if not samples.has_rows:
            own["splits_batches"] = False
        self._use(PassedObjects({**own, **objects}, "drivetrain.engine()"), seed)


def batch_of(given: Any) -> Batch:
    """Returns a batch as engines take it: a dict of tensors, of which the model gets all but "target". Raises UserError
    for others."""
    if isinstance(given, list | tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given):
        return {"input": given[0], "target": given[1]}
    if isinstance(given, Mapping) and given and all(isinstance(part, Tensor) for part in given.values()):
        return dict(given)
    fix = 'give (input, target), or a dict of tensors such as {"input": ..., "target": ...}'
    raise problem("batches", f"a {type(given).__name__} was given as a batch", fix)
