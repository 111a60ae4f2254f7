"""Compares what `engine=auto precision=auto` chooses with the time that each engine is measured to take.

    python bench/choices.py --folder work        # work/data, work/models: as the recipes name them

A case is a recipe, and of some a limit to a process' memory that one process breaks. The search plans it for this
machine, which `drivetrain calibrate` has measured; then the choice and every engine take real steps under the same
limit (planned_ranks.py): without one with all else as the run file has it, under one as the plan says that the engine
is quickest of what fits; and the choice's engine in each other precision that the search may choose from.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planned import ALONE, RESULTS, ROOT, SHORTER, TOGETHER, measured, settings
from planned import latest as planned_rows
from tables import machine_line, markdown_table, write

from drivetrain.config.load import load
from drivetrain.errors import UserError
from drivetrain.memory.shortage import names_shortage
from drivetrain.plan.planning import planned
from drivetrain.plan.rows import Plan, Row
from drivetrain.runtime.hardware import detect

CASES: tuple[tuple[str, float | None], ...] = (  # GiB that a process may take
    ("linear", None),
    ("digits", None),
    ("digits-small-lr", None),
    ("shakespeare-char", None),
    ("hotel-bert", None),
    ("cifar10-small", None),
    ("shakespeare-mesh", 0.7),
    ("shakespeare-char", 1.03),
    ("hotel-bert", 1.45),
    ("cifar10-small", 0.995),
    ("shakespeare-mesh", 1.25),
    ("alpaca-sft", None),
    ("rewards-grpo", None),
    ("shakespeare-mesh", None),
    ("cifar10-resnet50-224", None),
    ("alpaca-qlora", None),
    ("distill", None),
    ("preferences-dpo", None),
)
NEAR = 0.05  # of the best
CAUSES = {  # of choices that are wrong
    ("cifar10-small", 0.995): "one process fits, for which the plan counts 1.009 GiB, with the most that no trace sees",
}
LARGER = {  # the model, where memory has a limit: of the recipe's own, libraries would take nearly all
    ("shakespeare-char", 1.03): [f"workload.model.config.{word}" for word in ("n_embd=512", "n_layer=8", "n_head=8")],
    ("hotel-bert", 1.45): [
        *("workload.model.config.hidden_size=512", "workload.model.config.intermediate_size=2048"),
        *("workload.model.config.num_hidden_layers=8", "workload.model.config.num_attention_heads=8", "batch_size=16"),
    ],
    ("cifar10-small", 0.995): [
        *("workload.model.config.hidden_sizes=[128,256,512,1024]", "workload.model.config.embedding_size=64"),
        "workload.data.limit_train=2000",
    ],
    ("shakespeare-mesh", 1.25): [
        *("workload.model.config.hidden_size=512", "workload.model.config.intermediate_size=1376"),
        *("workload.model.config.num_hidden_layers=8", "workload.model.config.num_attention_heads=8"),
        *("workload.model.config.num_key_value_heads=8", "workload.model.config.max_position_embeddings=1024"),
        *("workload.data.length=1024", "batch_size=2", "precision=fp32"),
    ],
}
INTRODUCTION = f"""Made by `python bench/choices.py`. Each recipe is planned with `engine=auto precision=auto`; then the
choice, every engine on one and two ranks, and the choice's engine in other precisions are measured, a new process a
rank, under the same limit to the memory of each process (`memory_limit`, of which libraries take the most). Under a
limit each engine runs as the plan says that it is quickest of what fits; where nothing fits, as the recipe has it.
Without a limit, engines' times are those of [planned](planned.md) where that has them in this precision, and
the quickest is measured anew beside the choice, by turns, twice; where the choice is that very way, it has its time.
Models are larger than the recipes' own where memory has a limit
(`LARGER`). A choice counts as right if its step takes at most {NEAR:.0%} longer
than the quickest that was measured. Recipes whose step takes a minute are cut as in [planned](planned.md)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT, help="where the recipes find data and models")
    parser.add_argument("--rows", type=lambda text: Path(text).resolve(), default=RESULTS / "choices.jsonl")
    parser.add_argument("--planned", type=lambda text: Path(text).resolve(), default=RESULTS / "planned.jsonl")
    parser.add_argument("--again", action="store_true", help="measure all again")
    parser.add_argument("--page", action="store_true", help="only write the table")
    options = parser.parse_args()
    os.chdir(options.folder)
    options.memory, options.prefix = False, ""
    known = {} if options.again else latest(options.rows)
    for recipe, limit in () if options.page else CASES:
        if (recipe, limit) not in known:
            found = case(recipe, limit, options)
            with options.rows.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(line(found), flush=True)
    write(RESULTS / "choices.md", page(list(latest(options.rows).values())))


def latest(rows: Path) -> dict[tuple[str, float | None], dict[str, Any]]:
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def case(recipe: str, limit: float | None, options: argparse.Namespace) -> dict[str, Any]:
    file, own = ROOT / "recipes" / f"{recipe}.yaml", [*SHORTER.get(recipe, [])]
    if limit is not None:
        own += [*LARGER.get((recipe, limit), []), f"memory_limit={limit}"]
    fixed = any(word.startswith("precision=") for word in own)
    plan = planned(file, [*own, "engine=auto", *([] if fixed else ["precision=auto"])], "this machine")
    assert plan.choice is not None, f"{recipe}: no way fits in {limit} GiB"
    choice = plan.choice
    own_way = way_of(choice)
    others = list(engines(recipe, own, choice))
    if limit is not None:
        others = [fitting(plan, way) or way for way in others]
    for way in (own_way, *others):
        way["planned"] = planned_seconds(plan, way)
    others += other_precisions(plan, choice)
    if limit is None:
        from_table(file, own_way, others, recipe, options)
    else:
        for way in (own_way, *others):
            way["measured"] = measured(file, way["ranks"], way["words"], options, imports=False)
    machine = detect().device_name
    return {"recipe": recipe, "limit": limit, "machine": machine, "choice": own_way, "others": others}


def from_table(
    file: Path, choice: dict[str, Any], others: list[dict[str, Any]], recipe: str, options: argparse.Namespace
) -> None:
    """Takes the engines' times from bench/planned.py's table; the quickest and the choice are measured anew, by turns,
    unless they are the same way."""
    table, precision = planned_rows(options.planned), settled(file, choice["words"])[2]
    for way in others:
        row = table.get((recipe, way["engine"], way["ranks"]))
        own = way.get("precision", precision)
        alike = row is not None and row["planned"].get("precision") in (None, own)
        way["measured"] = row["measured"] if row and alike else measured(file, way["ranks"], way["words"], options)
    quickest = min(others, key=lambda way: way["measured"].get("seconds", math.inf))
    if settled(file, choice["words"]) == settled(file, quickest["words"]):
        choice["measured"] = quickest["measured"]
        return
    rounds = [
        {id(way): measured(file, way["ranks"], way["words"], options) for way in (choice, quickest)} for _ in "12"
    ]
    for way in (choice, quickest):
        found = [each[id(way)] for each in rounds]
        way["measured"] = min(found, key=lambda each: each.get("seconds", math.inf))


def settled(file: Path, words: list[str]) -> tuple[Any, ...]:
    """Returns what of a run's settings a plan may choose."""
    run, problems = load(file, words)
    assert run is not None, problems
    return (run.engine.label, run.world_size, run.precision, run.micro_batch, run.recompute, run.offload_activations)


def way_of(row: Row) -> dict[str, Any]:
    return {"engine": row.run.engine.label, "ranks": row.run.world_size, "words": list(row.overrides)}


def fitting(plan: Plan, way: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the engine's quickest way that the plan says fits; None where there is none, or none was looked at."""
    quickest = quickest_of(of_engine(plan, way))
    return None if quickest is None else way_of(quickest)


def quickest_of(rows: list[Row]) -> Row | None:
    fits = [row for row in rows if row.fits in ("yes", "tight")]
    return min(fits, key=lambda row: row.seconds or math.inf, default=None)


def other_precisions(plan: Plan, choice: Row) -> Iterator[dict[str, Any]]:
    """Yields the quickest way of the choice's engine in each other precision of the plan."""
    alike = [row for row in of_engine(plan, way_of(choice)) if row.run.precision != choice.run.precision]
    for precision in sorted({row.run.precision for row in alike}):
        rows = [row for row in alike if row.run.precision == precision]
        found = quickest_of(rows) or next((row for row in rows if row.at_best is not None), None)
        if found is not None:  # neither out of memory nor refused
            yield {**way_of(found), "precision": precision, "planned": found.seconds}


def of_engine(plan: Plan, way: dict[str, Any]) -> list[Row]:
    label = way["engine"].replace(".", "-")
    return [row for row in plan.rows if row.run.engine.label == label and row.run.world_size == way["ranks"]]


def engines(recipe: str, own: list[str], choice: Row) -> Iterator[dict[str, Any]]:
    """Yields every engine but those that rules refuse, as bench/planned.py runs them."""
    precision = f"precision={choice.run.precision}"
    for name in (*ALONE, *TOGETHER):
        ranks = 1 if name in ALONE else 2
        words = [*settings(recipe, name, ranks), *own, precision]
        yield {"engine": name, "ranks": ranks, "words": list(dict.fromkeys(words))}


def planned_seconds(plan: Plan, way: dict[str, Any]) -> float | None:
    """Returns the least time of the engine's ways in the plan."""
    return min((row.seconds for row in of_engine(plan, way) if row.seconds is not None), default=None)


def outcome(found: dict[str, Any]) -> tuple[float | None, float | None]:
    """Returns the measured seconds of the choice, and of the quickest way."""
    own = found["choice"]["measured"].get("seconds")
    times = [
        each["measured"]["seconds"] for each in (found["choice"], *found["others"]) if "seconds" in each["measured"]
    ]
    return own, min(times, default=None)


def line(found: dict[str, Any]) -> str:
    own, best = outcome(found)
    return f"{found['recipe']} {found['limit']}: {' '.join(found['choice']['words'])}: {own}, best {best}"


def page(cases: list[dict[str, Any]]) -> str:
    head = [
        "recipe",
        "limit, GiB",
        "machine",
        "the plan's choice",
        "its step",
        "the quickest",
        "its step",
        "choice / quickest",
        "",
    ]
    right = [case for case in cases if is_right(case)]
    winners = {case["choice"]["engine"] for case in right if case["limit"] is not None}
    parts = [
        "# The plan's choice beside the quickest",
        INTRODUCTION,
        f"{machine_line()} The times of one recipe are of one machine, which the table names.",
        f"Right: {len(right)} of {len(cases)}; of those with a limit by {len(winners)} different engines.",
        markdown_table(head, [cells(case) for case in cases]),
        *(f"{' in '.join(name(case))} GiB: {CAUSES[key]}." for case in cases if (key := key_of(case)) in CAUSES),
        *unmeasured(cases),
        "All that was measured, milliseconds a step:",
        markdown_table(["recipe", "limit, GiB", "engines"], [[*name(case), all_of(case)] for case in cases]),
    ]
    return "\n\n".join(parts) + "\n"


def key_of(case: dict[str, Any]) -> tuple[str, float | None]:
    return case["recipe"], case["limit"]


def unmeasured(cases: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence that names the cases without a row, if there are any."""
    known = {key_of(case) for case in cases}
    left = [
        recipe if limit is None else f"{recipe} in {limit:g} GiB"
        for recipe, limit in CASES
        if (recipe, limit) not in known
    ]
    return [f"Not measured yet: {', '.join(left)}."] if left else []


def is_right(found: dict[str, Any]) -> bool:
    own, best = outcome(found)
    return own is not None and best is not None and own <= best * (1 + NEAR)


def name(found: dict[str, Any]) -> list[str]:
    return [found["recipe"], "-" if found["limit"] is None else f"{found['limit']:g}"]


def cells(found: dict[str, Any]) -> list[str]:
    own, best = outcome(found)
    ways = [found["choice"], *found["others"]]
    quickest = next((label(each) for each in ways if each["measured"].get("seconds") == best), "-")
    larger = LARGER.get(key_of(found), [])
    chosen = [each for each in found["choice"]["words"] if each not in larger and not each.startswith("memory_limit")]
    words = " ".join(chosen)
    ratio = "-" if own is None or best is None else f"{own / best:.2f}"
    verdict = "right" if is_right(found) else "wrong"
    return [
        *name(found),
        found["machine"],
        f"`{words}`",
        milliseconds(own),
        quickest,
        milliseconds(best),
        ratio,
        verdict,
    ]


def all_of(found: dict[str, Any]) -> str:
    return ", ".join(f"{label(each)} {time_of(each)}" for each in found["others"])


def label(way: dict[str, Any]) -> str:
    return " ".join([way["engine"], *([way["precision"]] if "precision" in way else [])])


def time_of(way: dict[str, Any]) -> str:
    seconds, failed = way["measured"].get("seconds"), str(way["measured"].get("failed", ""))
    if seconds is not None:
        return f"{1000 * seconds:,.1f}"
    return "out of memory" if names_shortage(failed) else "refused"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"{error}") from error
