"""docs/reference/compatibility.md: what goes together, asked of the rules that refuse runs.

Each cell asks the rules about a run that has one thing more than a plain one; what they add is the cell's reason.

    python -m bench.compatibility        # writes the page
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from drivetrain.config.adapter import Method
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import KINDS as OPTIMIZERS
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.rules import check
from drivetrain.errors import Problem

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "compatibility.md"
DTYPES = frozenset({"float32", "float16", "bfloat16"})
GPUS = Machine("cuda", "an H100", 8, 80 << 30, 32, (9, 0), DTYPES)
OLD_GPUS = Machine("cuda", "a V100", 8, 32 << 30, 32, (7, 0), frozenset({"float32", "float16"}))
CPU = Machine("cpu", "a CPU", 1, 64 << 30, 32, None, frozenset({"float32"}))
MACHINES = {"NVIDIA, 9.0 (H100)": GPUS, "NVIDIA, 7.0 (V100)": OLD_GPUS, "CPU": CPU}

MESH: dict[str, dict[str, Any]] = {
    "mesh, dp": {"name": "mesh"},
    "mesh, dp, shard": {"name": "mesh", "shard": True},
    "mesh, tp": {"name": "mesh", "tp": 2},
    "mesh, pp": {"name": "mesh", "pp": 2},
    "mesh, cp": {"name": "mesh", "cp": 2},
}
ENGINES: dict[str, Any] = {
    name: name for name in ("single", "dp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
} | {"accelerate-ddp": "accelerate-ddp", "accelerate-fsdp": "accelerate-fsdp", "accelerate-zero2": "accelerate-zero2"}

Wish = Mapping[str, Any]
FEATURES: dict[str, Wish] = {
    "`recompute: true`": {"recompute": True},
    "`recompute: selective`": {"recompute": "selective"},
    "`offload_activations: true`": {"offload_activations": True},
    "`compile: true`": {"compile": True},
    "`micro_batch_size: auto`": {"micro_batch_size": "auto"},
    "`numerics.skip: true`": {"numerics": {"skip": True}},
    "`numerics.skip: spikes`": {"numerics": {"skip": "spikes"}},
    "`nodes: 2`": {"nodes": 2},
    "`max_restarts: 3`": {"max_restarts": 3},
    "`quantisation_aware`": {"quantisation_aware": "int4-weight"},
}
ADAPTERS: dict[str, Wish] = {f"`adapter: {method}`": {"adapter": method} for method in get_args(Method)} | {
    f"`quantised_base: {format}`, LoRA": {"adapter": "lora", "quantised_base": format}
    for format in get_args(QuantisedBase.model_fields["format"].annotation)
}


def problems(engine: Any, wish: Wish, machine: Machine = GPUS) -> set[tuple[str, str]]:
    """Field and reason of everything that the rules say against a run of a small language model."""
    run: dict[str, Any] = {
        "workload": {
            "type": "language_model",
            "stage": "sft",
            "model": {"path": "organisation/model"},
            "data": {"train": "conversations.json"},
        },
        "engine": engine,
        "batch_size": 16,
        "loop": {"steps": 10},
        **({} if engine in ("single", "dp") else {"processes": 2}),
        **wish,
    }
    config, found = validate(run, [])
    assert config is not None, found
    asked = [name for value in wish.values() for name in (value, *(value.values() if isinstance(value, dict) else ()))]
    names = [str(name) for name in asked if isinstance(name, str)]
    return {(problem.field, why(problem, config.engine.label, names)) for problem in [*found, *check(config, machine)]}


def why(problem: Problem, engine: str, asked: list[str]) -> str:
    """The reason without the names of the engine and of what was asked, so that like ones share a note."""
    text = problem.why.replace(f"engine={engine}", "the engine")
    for end in (" cannot have it: ", *(f" has no {name}: " for name in asked)):
        text = text.removeprefix(f"the engine{end}")
    for name in asked:
        text = text.removeprefix(f"{name} was given, but ").replace(f" ({name})", "")
        text = re.sub(rf"^{re.escape(name)}(?: of bitsandbytes)? ", "it ", text)
    return text


class Notes:
    """Reasons below a table, numbered as they come up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, reasons: Iterable[str]) -> str:
        found = sorted({self.numbers.setdefault(reason, len(self.numbers) + 1) for reason in sorted(reasons)})
        return f"no [{', '.join(map(str, found))}]" if found else "yes"

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self.numbers.items()]


def table(engines: Mapping[str, Any], wishes: Mapping[str, Wish]) -> list[str]:
    """A column an engine, a row a wish, and the reasons below."""
    notes = Notes()
    lines = ["| | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
    for name, wish in wishes.items():
        cells = []
        for engine in engines.values():
            added = problems(engine, wish) - problems(engine, {})
            cells.append(notes(reason for _, reason in added))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *notes.lines()]


def on_machines() -> list[str]:
    """A row a precision, a column a kind of machine."""
    notes = Notes()
    lines = ["| | " + " | ".join(MACHINES) + " |", "|---|" + "---|" * len(MACHINES)]
    for name in PRECISIONS:
        cells = []
        for machine in MACHINES.values():
            added = problems("single", {"precision": name}, machine) - problems("single", {}, machine)
            emulated = PRECISIONS[name].compute not in machine.native_dtypes and machine.device == "cpu"
            cells.append(notes(reason for _, reason in added) + (", emulated" if emulated and not added else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *notes.lines()]


def page() -> str:
    """The page's text."""
    precisions = {name: {"precision": name} for name in PRECISIONS}
    optimizers = {f"`{name}`": {"optimizer": {"name": name}} for name in OPTIMIZERS}
    sections = {
        "Precisions by engine": precisions,
        "Options by engine": FEATURES,
        "Optimizers by engine": optimizers,
        "Adapters and quantised bases by engine": ADAPTERS,
    }
    lines = [
        "# What goes together",
        "",
        "Written by `python -m bench.compatibility` from the rules that refuse runs; a test fails where they differ.",
        "Each cell is the answer to a run of a language model with two processes that has this one thing more than a",
        "plain run, on NVIDIA GPUs of compute capability 9.0. *no* is refused before any work, for the reason of that",
        "number.",
        "",
        "The rules see the run file, not the model and the data: a model that cannot be split, or a loss that needs",
        "the whole batch, is refused when it is built. *yes* means that nothing forbids it; what was compared with",
        "plain PyTorch is in [parity](../background/parity.md), and what never ran on a GPU in",
        "[gpu](../how-to/gpu.md).",
        "",
        "## Precisions by machine",
        "",
        *on_machines(),
    ]
    for title, wishes in sections.items():
        lines += [
            "",
            f"## {title}",
            "",
            *table(ENGINES, wishes),
            "",
            "On a mesh, by its axes:",
            "",
            *table(MESH, wishes),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
