"""A checkpoint of this project, with the names that others use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.convert.foreign import Moments, Note
from drivetrain.checkpoint.directory import MANIFEST, load, newest_good, read_manifest, steps
from drivetrain.checkpoint.run_state import verify
from drivetrain.errors import problem

KERNELS = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}  # the defaults


@dataclass(frozen=True)
class Ours:
    path: Path
    step: int
    facts: dict[str, Any]
    weights: dict[str, Tensor]
    groups: list[dict[str, Any]]  # of the optimizer, with the names of their parameters
    moments: Moments  # what has a form elsewhere
    training: dict[str, Any]
    notes: list[Note]  # what has none

    @property
    def trained(self) -> list[str]:
        """Returns the trained weights in the model's order."""
        names = {name for group in self.groups for name in group["params"]}
        return [name for name in self.weights if name in names]

    @property
    def untied(self) -> dict[str, Tensor]:
        """Returns each tensor once, by the first of its names."""
        found: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in self.weights.items():
            found.setdefault((tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape)), name)
        return {name: self.weights[name] for name in found.values()}

    @property
    def untrained(self) -> list[str]:
        """Returns buffers, and weights that are frozen."""
        trained = set(self.trained)
        return [name for name in self.untied if name not in trained]

    def arguments(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a group's arguments by others' names. Which kernels make the update is left to them."""
        return {key: KERNELS.get(key, value) for key, value in group.items() if key not in ("params", "peak_lr")}

    @property
    def shared_arguments(self) -> dict[str, Any]:
        """Returns the arguments that all groups share."""
        first, *others = map(self.arguments, self.groups)
        return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def find(path: Path) -> tuple[Path, list[str]]:
    """Returns a checkpoint (the folder itself, or the newest good one of a run), and why newer ones were skipped.
    Raises UserError if there is none."""
    if (path / MANIFEST).is_file():
        return path, []
    for root in (path / "checkpoints", path):
        if steps(root):
            newest, skipped = newest_good(root, verify)
            if newest is None:
                why = f"no checkpoint in {root} verifies: {'; '.join(skipped[:3])}"
                raise problem("PATH", why, "give another folder")
            return newest, skipped
    raise problem("PATH", f"{path} holds no checkpoint", "give a folder step-..., or the folder of a run")


def all_of(path: Path) -> list[Path]:
    """Returns every checkpoint of a run, or the one at the path."""
    if not steps(path / "checkpoints") and not steps(path):
        return [path] if (path / MANIFEST).is_file() or path.name.startswith("step-") else [find(path)[0]]
    return steps(path / "checkpoints") or steps(path)


def ours(path: Path) -> Ours:
    """Reads a checkpoint of this project. Raises UserError unless it verifies."""
    parts = load(path, verify)
    manifest, optimizer = read_manifest(path), parts["optimizer"]
    moments, notes = _with_form(optimizer["state"])
    return Ours(
        path,
        manifest.step,
        manifest.facts,
        parts["model"],
        optimizer["param_groups"],
        moments,
        parts["training"],
        notes,
    )


def is_adapter(path: Path) -> bool:
    return any(path.glob("adapter_config.json")) or any(path.glob("*/adapter_config.json"))


def _with_form(state: Moments) -> tuple[Moments, list[Note]]:
    """Keeps all or nothing of a parameter: an optimizer cannot go on from half of its state."""
    formless = {name for name, values in state.items() if any(map(_is_own, values.values())) or "qmap1" in values}
    notes = []
    if formless:
        what = (
            f"of {len(formless)} parameters they are codes, or projections, that only this optimizer reads: "
            "they begin anew there"
        )
        notes.append(Note("optimizer's states", carried=False, what=what))
    return {name: values for name, values in state.items() if name not in formless}, notes


def _is_own(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
