"""How long plans of large models take: a 70B model on 512 devices, and a search for an 8B one on 64.

    python bench/plan_scale.py [large] [search] [derived]

large: the memory and time of Llama 3's 70B over 512 H100, as `drivetrain plan` finds it. search: the quickest way for
its 8B over 64 H100. derived: what the search derives for 30 random candidates beside a trace of each. Both models are
described by a config alone, over made data. Seconds are wall time and, of all processes, processor time; on a machine
that does other work the second is the one to read.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.tables import machine_line, markdown_table, write
from drivetrain.config.load import load
from drivetrain.errors import UserError
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.derive import Derivation
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import cluster
from drivetrain.plan.search_space import Family, Space, families, with_global_batch
from drivetrain.plan.stand_ins import with_made_data
from drivetrain.plan.trace_processes import tracing_processes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/plan_scale.md"
KEPT = RESULTS.with_suffix(".json")  # of each part, so that one can be repeated alone
SAMPLES, LENGTH, CANDIDATES = 50_000, 2048, 30
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
# https://github.com/meta-llama/llama-models/blob/main/models/llama3/MODEL_CARD.md
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
LARGE = {  # ways to run the 70B
    "FSDP": ["engine=fsdp", "recompute=true", "micro_batch_size=1"],
    "FSDP 64 x TP 8": ["engine={name: mesh, dp: 64, tp: 8, shard: true}", "recompute=true", "micro_batch_size=1"],
}


def main() -> None:
    parts: dict[str, Callable[[Path], Any]] = {"large": large, "search": searched, "derived": derived}
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in sys.argv[1:] or parts:
        with tempfile.TemporaryDirectory(prefix="plan-scale-") as folder:
            kept[name] = parts[name](Path(folder))
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        write(RESULTS, page(kept))


def run_file(folder: Path, size: str, batch: int) -> Path:
    workload = {"type": "language_model", "model": {"config": {**LLAMA, **SIZES[size]}}, "data": {"train": "none.txt"}}
    run = {"workload": workload, "precision": "bf16-mixed", "batch_size": batch, "loop": {"epochs": 1}}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


# --- the parts -------------------------------------------------------------------------------------------------------


def large(folder: Path) -> dict[str, Any]:
    file = run_file(folder, "70B", 512)
    return {name: planned(file, "64x8xH100-80GB", words) for name, words in LARGE.items()}


def searched(folder: Path) -> dict[str, Any]:
    return planned(run_file(folder, "8B", 512), "8x8xH100-80GB", [])


def planned(file: Path, machine: str, words: list[str]) -> dict[str, Any]:
    """Returns what a plan found and took, in a process of its own."""
    command = [sys.executable, "-m", "drivetrain", "plan", str(file), "--machine", machine, "--json"]
    command += ["--samples", str(SAMPLES), "--length", str(LENGTH), *words]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=file.parent, env=dict(os.environ))
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    best = found["choice"] or found["rows"][0]
    return {
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": after.ru_maxrss * 1024,  # of the largest child
        "candidates": len(found["rows"]),
        "traces": found["traces"],
        "origins": Counter(row["origin"] or "ruled out" for row in found["rows"]),
        "choice": " ".join(best["overrides"]),
        "allocated_bytes": best["allocated_bytes"],
        "step_seconds": best["step_seconds"],
        "notes": found["notes"],
    }


def derived(folder: Path) -> list[dict[str, Any]]:
    chance = random.Random(0)
    with tracing_processes() as processes, with_made_data(run_file(folder, "8B", 512), SAMPLES, LENGTH) as file:
        estimator = Traced(cluster("8x8xH100-80GB", catalogue()), processes)
        base, problems = load(file)
        assert base is not None, problems
        whole = with_global_batch(base, estimator.host)
        space = Space((base.precision,))
        ways = families(whole, space, estimator.host, estimator.nodes, estimator.devices_per_node).possible
        chance.shuffle(ways)
        found: list[dict[str, Any]] = []
        for row in compared(ways, estimator, chance):
            found.append(row)
            print(json.dumps(row), flush=True)
            if len(found) == CANDIDATES:
                break
    return found


def compared(ways: list[Family], estimator: Traced, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yields of each way a random micro-batch's derived memory and time, beside what a trace of it gives."""
    for family in ways:
        stages = family.run.engine.stages
        cuts = family.cuts
        _, cut = family.at(chance.choice(family.sizes))
        own = cut.shortened(stages)
        if own in cuts:  # it is one of those that are traced, and has nothing derived
            continue
        estimator.expect((family.traced_as(each) for each in (*cuts, own)), quick=True)
        try:
            traced = {each: estimator.costs(family.traced_as(each), quick=True) for each in cuts}
            whole = estimator.costs(family.traced_as(own), quick=True)
        except (UserError, NotPlanned):
            continue
        costs = Derivation(traced, stages).at(own)
        run = family.traced_as(own)
        yield {
            "way": " ".join([run.engine.label, f"recompute={run.recompute}", f"offload={run.offload_activations}"]),
            "micro_batch": own.size,
            "traced_bytes": whole.memory.allocated,
            "derived_bytes": costs.memory.allocated,
            "traced_seconds": estimator.time(run, whole).seconds,
            "derived_seconds": estimator.time(run, costs).seconds,
        }


# --- the page --------------------------------------------------------------------------------------------------------


def page(kept: dict[str, Any]) -> str:
    lines = ["# What plans of large models take", "", "Made by `python bench/plan_scale.py`.", machine_line(), ""]
    plans = {f"70B on 512 H100, {name}": each for name, each in kept.get("large", {}).items()}
    if "search" in kept:
        plans["8B on 64 H100, searched"] = kept["search"]
    head = ["plan", "wall s", "processor s", "memory of the planner", "rows", "traces", "planned peak", "planned step"]
    rows = [
        [
            name,
            f"{each['seconds']:.0f}",
            f"{each['processor_seconds']:.0f}",
            f"{each['peak_bytes'] / 1e9:.2f} GB",
            str(each["candidates"]),
            str(each["traces"]),
            f"{each['allocated_bytes'] / 2**30:.1f} GiB",
            f"{each['step_seconds']:.3g} s",
        ]
        for name, each in plans.items()
    ]
    lines += [markdown_table(head, rows), ""]
    lines += [f"- {name}: {note}" for name, each in plans.items() for note in each["notes"]]
    if "derived" in kept:
        lines += ["", "## Derived beside traced", "", *_derived(kept["derived"])]
    return "\n".join([*lines, ""])


def _derived(found: list[dict[str, Any]]) -> list[str]:
    def off(row: dict[str, Any], name: str) -> float:
        return float(row[f"derived_{name}"] / row[f"traced_{name}"] - 1)

    rows = [
        [
            row["way"],
            str(row["micro_batch"]),
            f"{row['traced_bytes'] / 2**30:.2f} GiB",
            f"{off(row, 'bytes'):+.2%}",
            f"{row['traced_seconds']:.3g} s",
            f"{off(row, 'seconds'):+.2%}",
        ]
        for row in found
    ]
    worst = [max(abs(off(row, name)) for row in found) for name in ("bytes", "seconds")]
    head = ["way", "micro-batch", "traced memory", "derived", "traced step", "derived"]
    summary = (
        f"{len(found)} random candidates: memory is off by {worst[0]:.2%} at most, the step's time by {worst[1]:.2%}."
    )
    return [summary, "", markdown_table(head, rows)]


if __name__ == "__main__":
    main()
