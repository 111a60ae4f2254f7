"""The record of all runs that chaos.py made, a line each in chaos.jsonl, and the page that is made of it.

    {"engine", "seed", "run", "start", "faults": {name: times}, "inside_save", "while_starting", "order": [...],
     "outcome": "as undisturbed" or "failed", "why", "seconds", "commit", "versions"}

Nothing is taken out of the record: a failure stays when the same run goes well later. A line {"cause_of": [engine,
seed, run], "cause": ...} says what was found of one. A line with "runs" sums up runs of which no more is known.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.faults import FAULTS
from bench.killing import Made
from bench.tables import markdown_table

GOOD, FAILED = "as undisturbed", "failed"
DEADLY = [name for name, does in FAULTS.items() if name not in ("full disk", "stopped for good") and does.ends]
Line = dict[str, Any]


def line(engine: str, seed: int, run: int, start: str, made: Sequence[Made], seconds: float, why: str = "") -> Line:
    """Returns what a run adds to the record. start: warm or cold."""
    from drivetrain.runtime.environment import versions

    return {
        "engine": engine,
        "seed": seed,
        "run": run,
        "start": start,
        "faults": dict(Counter(each.fault.what for each in made)),
        "inside_save": sum(each.inside_save for each in made),
        "while_starting": sum(each.fault.when == "starting" for each in made),
        "order": [[each.fault.what, each.fault.when, each.step] for each in made],
        "outcome": FAILED if why else GOOD,
        **({"why": why} if why else {}),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "versions": versions(),
    }


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def add(record: Path, new: Line) -> None:
    """Appends at once, so that an interruption costs none."""
    with record.open("a") as file:
        file.write(json.dumps(new) + "\n")


def read(record: Path) -> list[Line]:
    return [json.loads(text) for text in record.read_text().splitlines()] if record.exists() else []


def page(lines: Sequence[Line], head: str) -> str:
    """Returns the page. head: what is done and checked."""
    runs = [each for each in lines if "engine" in each]
    engines = list(dict.fromkeys(each["engine"] for each in runs))
    titles = ["engine", "runs", *FAULTS, "kills", "faults", "inside a save", "while starting", "failed runs"]
    rows = [_row(engine, [each for each in runs if each["engine"] == engine]) for engine in engines]
    rows.append(_row("all", runs))
    parts = [
        "# Chaos: runs killed and disturbed at random moments",
        head,
        sentence(runs),
        markdown_table(titles, rows),
    ]
    parts += [_failures(lines), _quiet(runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(name: str, runs: Sequence[Line]) -> list[str]:
    counts = [sum(each.get("runs", 1) for each in runs), *(_times(runs, fault) for fault in FAULTS)]
    counts += [kills(runs), faults(runs)]
    counts += [sum(each[key] for each in runs) for key in ("inside_save", "while_starting")]
    counts.append(sum(each["outcome"] == FAILED for each in runs))
    return [name, *map(str, counts)]


def _times(runs: Sequence[Line], *names: str) -> int:
    return sum(each["faults"].get(name, 0) for each in runs for name in names)


def kills(lines: Sequence[Line]) -> int:
    """Counts SIGKILLs at a chosen moment, however many processes each was for."""
    return _times([each for each in lines if "engine" in each], *DEADLY)


def faults(lines: Sequence[Line]) -> int:
    return _times([each for each in lines if "engine" in each], *FAULTS)


def sentence(lines: Sequence[Line]) -> str:
    """Returns the sum of all runs, in words."""
    runs = [each for each in lines if "engine" in each]
    bad = [each for each in runs if each["outcome"] == FAILED]
    good = sum(each.get("runs", 1) for each in runs) - len(bad)
    seeds = len({each["seed"] for each in runs})
    cold = sum(each.get("runs", 1) for each in runs if each["start"] == "cold")
    ended = (
        f"{good} runs ({cold} of them started as a user does) ended with the bits of the undisturbed one, and nothing "
        "was lost, repeated or left out"
    )
    other = f"; {len(bad)} did not (below)" if bad else "; none did not"
    return f"{kills(runs)} kills and {faults(runs) - kills(runs)} other faults, of {seeds} seeds: {ended}{other}."


def _failures(lines: Sequence[Line]) -> str:
    causes = {tuple(each["cause_of"]): each["cause"] for each in lines if "cause_of" in each}
    rows = []
    for each in lines:
        if each.get("outcome") == FAILED:
            name = (each["engine"], each["seed"], each["run"])
            why = " ".join(each["why"].split()).replace("|", "/")
            why = why if len(why) < 400 else f"{why[:150]} ... {why[-250:]}"
            rows.append([*map(str, name), each["commit"], why, causes.get(name, "open")])
    table = markdown_table(["engine", "seed", "run", "commit", "what was seen", "what it was"], rows)
    return f"## Runs that failed\n\n{table}" if rows else ""


def _quiet(runs: Sequence[Line]) -> str:
    """Returns figures of time, of runs that had the machine to themselves."""
    found = [each["quiet"] | {"engine": each["engine"]} for each in runs if "quiet" in each]
    titles = ["engine", "useful, s", "elapsed, s", "effective", "undisturbed", "a kill costs, s"]
    names = ["engine", "useful", "elapsed", "effective", "undisturbed", "a_kill_costs"]
    rows = [[str(each[name]) for name in names] for each in found]
    text = (
        "Time, of the first 100 kills (seed 28317), which had two cores to themselves and a model of 1.3 million "
        "parameters; later runs shared theirs, so that their seconds say nothing. Useful: seconds of steps, "
        "evaluations and saves that count in the end. Effective: useful / elapsed. A kill costs: what is neither "
        "useful nor part of the undisturbed run's own start and end, divided by the kills."
    )
    return f"## What a kill costs\n\n{text}\n\n{markdown_table(titles, rows)}" if rows else ""
