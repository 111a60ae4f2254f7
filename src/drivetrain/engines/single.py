"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from drivetrain.engines.autograd import AutogradEngine
from drivetrain.memory.shortage import Undo


class AloneEngine(AutogradEngine):
    """One process: a window that does not fit concerns no other rank, and can be undone."""

    _undo: Undo | None = None

    @property
    def is_alone(self) -> bool:
        return True

    def savepoint(self) -> Callable[[], None]:
        if self._undo is None:
            assert self._optimizer is not None, "set up for evaluation only"
            self._undo = Undo(self._model, self._optimizer, self.statistics)
        self._undo.mark()
        return self._undo


class SingleEngine(AloneEngine):
    _copies_weights = True

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model
