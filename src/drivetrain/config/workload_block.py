"""The base of all workloads' blocks: its properties answer for the workload, so that rules need not ask its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.config.base import Frozen
from drivetrain.config.files import read_json
from drivetrain.errors import UserError


class WorkloadBlock(Frozen):
    """The block `workload` of a run file: the model, its data and the task."""

    @property
    def implementation(self) -> str:
        """The key of `drivetrain.workloads.build.WORKLOADS`: the type, or one of its training stages."""
        own: Any = self
        return str(own.type)

    @property
    def known_config(self) -> dict[str, Any]:
        """The model's Transformers config as far as it is known without the hub; otherwise empty.

        A folder that cannot be read is reported when the model is built.
        """
        model: Any = getattr(self, "model", None)
        if model is None or model.path is None:
            return getattr(model, "config", None) or {}
        file = Path(model.path).expanduser() / "config.json"
        try:
            return read_json(file) if file.is_file() else {}
        except UserError:
            return {}

    @property
    def lengths_vary(self) -> bool:
        """Whether the lengths of batches vary, as those of texts do."""
        return False

    @property
    def is_packed(self) -> bool:
        """Whether several samples may share a row."""
        return False

    @property
    def may_fuse_loss(self) -> bool:
        """Whether head and loss may be computed in one operation."""
        return False
