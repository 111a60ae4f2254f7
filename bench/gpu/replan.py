"""Plans again, as if the device were not there, the runs that `make gpu PART=plan` measured on it.

    python -m bench.gpu.replan

Needs no GPU: what was measured lies in bench/results/gpu/<device>/plan.json, and of the models their configs suffice.
Writes bench/results/planned-gpu.md.
"""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.language import TOKENS, config_of, folder_of, tokenizer_of
from bench.gpu.planned import RUNS, planned, sizes
from bench.gpu.report import planned_row
from bench.gpu.setting import RESULTS, Setting
from bench.gpu.sides import our_run
from bench.tables import markdown_table

HEAD = ["run", "memory planned, GiB", "allocated", "error", "reserved", "step planned, ms", "measured", "error"]
INTRODUCTION = """# Planned without the device, measured on it

Made by `python -m bench.gpu.replan` on a machine without a GPU: plans of today's code with the catalogue's figures,
beside what `make gpu PART=plan` measured on the device. Runs are short, so that their blocks are not compiled. The time
from one operator to the next was fitted to the rows marked so."""
FITTED = ("0.5B, pretrain, bf16-mixed", "0.5B, pretrain, bf16-mixed, recomputed")


def main() -> None:
    parts = [INTRODUCTION]
    for file in sorted((RESULTS / "gpu").glob("*/plan.json")):
        read = json.loads(file.read_text())
        device = read["stamp"]["device"]
        found = {name: case["found"] for name, case in read["cases"].items() if "plans" in case["found"]}
        rows = [row_of(name, measured, device) for name, measured in found.items() if name in RUNS]
        parts += [f"## {device}", markdown_table(HEAD, rows)]
    (RESULTS / "planned-gpu.md").write_text("\n\n".join(parts) + "\n")


def row_of(name: str, measured: dict[str, Any], device: str) -> list[str]:
    import run_files

    from drivetrain.plan.catalogue import catalogue

    known = catalogue().named_by_driver(device)
    assert known is not None, f"{device} is in no catalogue"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        setting = Setting("cuda", device, RESULTS, folder)
        given = {**RUNS[name], **sizes(setting)}
        described(setting, given)
        task: Any = import_module(f"bench.gpu.{given['task']}")
        run = our_run(given, setting, folder, task.write_data(given, setting, folder))
        file = run_files.write_run(folder / "run.yaml", {**run, "output": str(folder / "run")})
        plan = planned(file, f"1x{known[0]}")
    shown = f"{name} (fitted)" if name in FITTED else name
    return planned_row(shown, {**measured, "plans": {"catalogue": plan}}, ("catalogue",))


def described(setting: Setting, given: dict[str, Any]) -> None:
    """Writes a model's folder without its weights."""
    target = folder_of(setting, given["size"])
    tokenizer = tokenizer_of(given["length"])
    assert len(tokenizer) <= TOKENS
    config_of(given["size"], given["length"], tokenizer).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
