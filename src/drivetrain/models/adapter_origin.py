"""Records beside PEFT's files which base a checkpoint's adapters belong to, and what they compute."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import Problem, UserError, problem

FILE = "adapter_base.json"


@dataclass(frozen=True)
class Origin:
    fingerprint: str | None  # of the base's weights
    path: str | None  # the base's
    functions: dict[str, Any]  # adapter → what decides beside its weights what it computes
    quantised_base: dict[str, Any] | None

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def check(self, folder: Path) -> list[str]:
        """Raises UserError if a checkpoint's adapters are of another base, or would compute something else here.

        Returns remarks for the user.
        """
        check_base(folder, self.fingerprint, "workload.model")
        described, problems = description_in(folder), []
        for name, function in (described.get("functions") or {}).items():
            now = self.functions.get(name) or {}
            for key, value in (function or {}).items() if now else ():
                if now.get(key) != value:
                    why = f"{value} in {folder}, {now.get(key)} here: the same weights would compute something else"
                    problems.append(Problem(f"adapter.{key}", why, f"give {value}"))
        if problems:
            raise UserError(problems)
        if described and described.get("quantised_base") != self.quantised_base:
            before, now = _shown(described.get("quantised_base")), _shown(self.quantised_base)
            return [f"the adapter in {folder} was trained over {before}, and works over {now} here"]
        return []


def description_in(folder: Path) -> dict[str, Any]:
    """Reads the record. Empty if other software wrote the adapter, or the file cannot be read."""
    try:
        described = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def check_base(folder: Path, fingerprint: str | None, field: str) -> None:
    """Raises UserError if an adapter was trained on other weights than this run's. Files of other software do not state
    this."""
    described = description_in(folder)
    if fingerprint is not None and described.get("fingerprint") not in (None, fingerprint):
        base = described.get("path") or "another model"
        why = f"the adapter in {folder} was trained on {base}, whose weights are other ones"
        raise problem(field, why, "give the base it was trained on as workload.model.path")


def _shown(quantised_base: dict[str, Any] | None) -> str:
    return f"a base in {quantised_base['format']}" if quantised_base else "a whole base"
