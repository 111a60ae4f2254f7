"""Samples that are drawn by number without end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from drivetrain.data.language.samples import JoinedSamples
from drivetrain.data.order import Order


class Endless(ABC):
    """Samples by draw: index i is a draw, the same sample for any reader; where one pass ends another begins. Its
    length is that of a pass, and may have to be counted: use `draws` for some of the first."""

    @abstractmethod
    def load(self, index: int, epoch: int) -> Any: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def identity(self) -> str:
        """Returns a short text for the files and settings that decide the order, beside the seed and the batch."""

    @abstractmethod
    def order(self, batch_size: int, seed: int, by_epochs: bool) -> Order:
        """Returns the order. by_epochs: whether the run's length is a number of epochs, for which a pass has to be
        counted."""

    def state_at(self, step: int) -> Any:
        """Returns what a checkpoint after so many steps keeps beside their number; None: nothing."""
        del step
        return None

    def restore(self, state: Any) -> None:
        """Restores what `state_at` returned."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state")


def draws(samples: Any, most: int) -> range:
    """Returns the first indices, up to so many; a stream is not counted for that."""
    return range(most if isinstance(samples, Endless) else min(most, len(samples)))


def known_length(samples: Any) -> int | None:
    """Returns how many there are; None for a stream."""
    return None if isinstance(samples, Endless) else len(samples)


def order_key(samples: Any, by_epochs: bool = False) -> dict[str, Any]:
    """Returns what decides the order of these samples, beside the seed and the batch."""
    if isinstance(samples, JoinedSamples):
        return {"num_samples": len(samples), "mixture": samples.drawn}
    if not isinstance(samples, Endless):
        return {"num_samples": len(samples)}
    return {"num_samples": 0, "stream": f"{samples.identity} by {'epochs' if by_epochs else 'steps'}"}


def state_of(samples: Any, step: int) -> Any:
    """Returns what a checkpoint keeps of the samples after so many steps; None if their number is enough."""
    return samples.state_at(step) if isinstance(samples, Endless) else None


def restore_state(samples: Any, state: Any) -> None:
    if isinstance(samples, Endless) and state is not None:
        samples.restore(state)
