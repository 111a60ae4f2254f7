"""Plans beside measurements: the shipped recipes on every engine that this machine has, at 1, 2 and 4 ranks.

    python bench/planned.py --folder work           # work/data, work/models: as the recipes name them
    python bench/planned.py --folder work --memory  # quicker: memory alone
    python bench/planned.py --folder work --times   # again those whose time other programs disturbed
    python bench/planned.py --folder work --replan  # what was measured, by today's code and calibration
    python bench/planned.py --page                  # the table of what was measured so far

A row is one way to run a recipe: the plan of it, and real steps of the same, in as many new processes as it has ranks
(planned_ranks.py). Rows are kept in results/planned.jsonl as they are found, and are not measured again: the bench goes
on where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interleaved import child_environment
from planned_page import is_disturbed, page
from tables import write

from drivetrain.errors import UserError
from drivetrain.plan.as_asked import plan_as_asked
from drivetrain.plan.calibration import kept
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.room import library_bytes
from drivetrain.plan.rows import Row
from drivetrain.runtime.hardware import detect

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
RECIPES = (  # the smallest first; those that differ in the engine alone are rows of one
    "linear",
    "digits",
    "digits-small-lr",
    "shakespeare-char",
    "shakespeare-mesh",
    "hotel-bert",
    "alpaca-sft",
    "cifar10-small",
    "preferences-dpo",
    "alpaca-qlora",
    "distill",
    "rewards-grpo",
    "cifar10-resnet50-224",
)
SHORTER = {  # of recipes whose step takes a minute on a processor, planned and measured so
    "preferences-dpo": ["batch_size=4"],
    "alpaca-qlora": ["batch_size=4"],
    "distill": ["batch_size=4"],
    "cifar10-resnet50-224": ["batch_size=8", "micro_batch_size=8", "precision=fp32"],
    "rewards-grpo": ["batch_size=4", "workload.reinforcement.answers=2", "workload.reinforcement.max_new_tokens=32"],
}
ALONE, TOGETHER = ("single",), ("ddp", "fsdp", "zero1", "zero2", "zero3", "mesh.tp2", "mesh.pp2")
RANKS = (1, 2, 4)
RANK = Path(__file__).resolve().with_name("planned_ranks.py")
LIMIT_SECONDS = 900
STEPS, FEW = 9, 1  # that are timed at least, and where memory is what is asked


def main() -> None:
    options = arguments()
    os.chdir(options.folder)
    if options.replan:
        for row in latest(options.rows).values():
            if row["recipe"] in options.recipes and row["ranks"] in options.ranks and "tensor" in row["measured"]:
                words = settings(row["recipe"], row["engine"], row["ranks"])
                row["planned"] = plan_of(ROOT / "recipes" / f"{row['recipe']}.yaml", words)
                append(options.rows, row)
                print(summary(row), flush=True)
    elif not options.page:
        for recipe, ranks, engines in open_cases(options):
            for row in rows_of(recipe, ranks, engines, options):
                append(options.rows, row)
                print(summary(row), flush=True)
    write(RESULTS / "planned.md", page(list(latest(options.rows).values())))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT, help="where the recipes find data and models")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--engines", nargs="+", default=[*ALONE, *TOGETHER])
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--rows", type=lambda text: Path(text).resolve(), default=RESULTS / "planned.jsonl")
    parser.add_argument("--prefix", default="", help="a command before those that measure, such as nice")
    parser.add_argument("--memory", action="store_true", help="time one step alone: memory needs no quiet machine")
    parser.add_argument("--times", action="store_true", help="measure again where other programs were at work")
    parser.add_argument("--again", action="store_true", help="measure all that is asked for again")
    parser.add_argument("--replan", action="store_true", help="plan again what was measured")
    parser.add_argument("--page", action="store_true", help="only write the table")
    return parser.parse_args()


# --- cases ---


def open_cases(options: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """Yields what is left to measure: recipe, ranks, engines."""
    known = latest(options.rows)
    for ranks in options.ranks:
        for recipe in options.recipes:
            engines = []
            for engine in (each for each in (ALONE if ranks == 1 else TOGETHER) if each in options.engines):
                found = known.get((recipe, engine, ranks))
                if found is None or options.again or (options.times and wants_time(found)):
                    engines.append(engine)
            if engines:
                yield recipe, ranks, engines


def wants_time(row: dict[str, Any]) -> bool:
    cores = os.cpu_count() or 1
    few = row["measured"].get("steps", STEPS) == FEW
    return "foreign_cores" in row["measured"] and row["ranks"] <= cores and (few or is_disturbed(row))


def latest(rows: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {(row["recipe"], row["engine"], row["ranks"]): row for row in map(json.loads, lines)}


def append(rows: Path, row: dict[str, Any]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


def settings(recipe: str, engine: str, ranks: int) -> list[str]:
    """Returns the words of the command line."""
    shorter = SHORTER.get(recipe, [])
    if not engine.startswith("mesh."):
        return [*shorter, f"engine={engine}", f"processes={'null' if ranks == 1 else ranks}"]
    axis, degree = engine[5:7], int(engine[7:])
    data = f", dp: {ranks // degree}" if ranks > degree else ""
    return [*shorter, f"engine={{name: mesh, {axis}: {degree}{data}}}", f"processes={ranks}"]


# --- rows ---


def rows_of(recipe: str, ranks: int, engines: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each engine."""
    file = ROOT / "recipes" / f"{recipe}.yaml"
    for engine in engines:
        words = settings(recipe, engine, ranks)
        planned = plan_of(file, words)
        found = {} if "refused" in planned else measured(file, ranks, words, options)
        yield {"recipe": recipe, "engine": engine, "ranks": ranks, "planned": planned, "measured": found}


def measured(
    file: Path, ranks: int, words: list[str], options: argparse.Namespace, imports: bool = True
) -> dict[str, Any]:
    """Returns what the ranks measured, or how they failed. imports: all that plans have imported so far is imported
    beforehand, so that memory counts without it; not where a process' memory has a limit, of which that would take."""
    steps = FEW if options.memory or ranks > (os.cpu_count() or 1) else STEPS
    with tempfile.TemporaryDirectory(prefix="planned-") as folder:
        log = Path(folder) / "log"
        modules = Path(folder) / "modules"
        modules.write_text("\n".join(name for name in list(sys.modules) if imports and name != "__main__"))
        given = f"{folder}/store {shlex.quote(str(file))} {shlex.quote(json.dumps(words))} {steps} {modules}"
        each = f"{shlex.quote(sys.executable)} -W ignore {shlex.quote(str(RANK))}"
        # one command, so that a prefix holds for all of them
        text = " & ".join(f"{each} {rank} {ranks} {given} 2>{log}.{rank}" for rank in range(ranks))
        command = [*shlex.split(options.prefix), "timeout", str(LIMIT_SECONDS), "sh", "-c", f"{text}; wait"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=child_environment(), check=False)
        found = next((line for line in ended.stdout.splitlines() if line.startswith("{")), None)
        if found is not None:
            return dict(json.loads(found))
        return {"failed": f"the ranks ended with code {ended.returncode}: {last(Path(f'{log}.0').read_text())}"}


def last(text: str) -> str:
    return " ".join(text.split())[-300:]


def plan_of(recipe: Path, words: list[str]) -> dict[str, Any]:
    """Returns the plan's row. refused: why rules do not allow the run, which then is not measured."""
    try:
        found = plan_as_asked(recipe, [words], Traced(cluster("this machine")))
    except UserError as error:
        return {"refused": "; ".join(f"{each.field}: {each.why}" for each in error.problems)}
    [row] = found.rows
    if row.costs is None:
        return {"failed": row.reason}
    return {
        "tensor": row.costs.memory.allocated,
        "resident": row.costs.memory.reserved + libraries(row),
        "messages": sum(each.calls for each in row.costs.messages),
        "seconds": row.seconds,
        "bound_by": None if row.timing is None else row.timing.bound_by,
        "precision": row.run.precision,
        "notes": list(found.notes),
    }


def libraries(row: Row) -> int:
    """Returns what libraries take beyond their import; 0 where this machine was not calibrated."""
    known = kept(detect())
    if known is None or row.costs is None:
        return 0
    return library_bytes(row.costs.operations, known.of(row.run.world_size))


def summary(row: dict[str, Any]) -> str:
    return f"{row['recipe']} {row['engine']} {row['ranks']}: planned {row['planned']}, measured {row['measured']}"


if __name__ == "__main__":
    main()
