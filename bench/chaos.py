"""Runs that are killed at random moments, and what they must come to all the same.

    python -m bench.chaos
    python -m bench.chaos --kills 8 --engines ddp --seed 7

Under each engine an undisturbed run, then runs that are killed (SIGKILL) until the engine's share of the kills is
spent: one rank, all of them, or the launching process with `--resume` after it; while it steps, starts, or saves
(killing.py). AssertionError, with the seed, unless every run finishes with the bits of the undisturbed one (weights,
optimizer, curve), no checkpoint that was whole at a kill is lost but by retention, each start goes on from the newest
one, and in the surviving history every epoch has each sample once.

Useful: seconds of steps, evaluations and saves that count in the end. Effective: useful / elapsed. A kill costs: what
is neither useful nor part of the undisturbed run's own start and end, divided by the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.killing import KEEP_BEST, KEEP_LAST, Disturbed, Kill, Made
from bench.tables import machine_line, markdown_table, write
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import same_end
from tests.launch.history import VARIABLE, check_each_once, surviving

BENCH = Path(__file__).resolve().parent
REVIEWS = BENCH.parents[1] / "shared" / "data" / "ChnSentiCorp_htl_all.csv"
STEPS, BATCH, SAMPLES = 480, 64, 1498  # twenty epochs of the workload's samples
AT_ONCE = 13  # kills of one run
ENGINES = {
    "single": [],
    "ddp": ["engine=ddp", "processes=2"],
    "fsdp": ["engine=fsdp", "processes=2"],
    "zero2": ["engine=zero2", "processes=2"],
}
# of lengths without a common divisor, so that in a row of them each meets each
WHO = {True: ("one rank", "launcher", "one rank"), False: ("one rank", "all ranks", "launcher", "one rank")}
WHEN = ("saving", "stepping", "saving", "stepping", "starting")


@dataclass
class Found:
    """What an engine's runs came to."""

    runs: int
    made: list[Made]
    useful: float
    elapsed: float
    undisturbed: tuple[float, float]  # the same of the undisturbed run


def main() -> None:
    parser = argparse.ArgumentParser(description="runs that are killed at random moments")
    parser.add_argument("--kills", type=int, default=100, help="over all engines")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "chaos.md")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    found = {}
    for engine in options.engines:
        dice = random.Random(f"{options.seed} {engine}")  # an engine's kills are the same with and without others
        with tempfile.TemporaryDirectory(prefix=f"chaos-{engine}-") as folder:
            kills = deck(options.kills // len(options.engines), engine == "single", dice)
            found[engine] = chaos(Path(folder), engine, kills, dice)
        print(" | ".join(row(engine, found[engine])), flush=True)
    write(options.output, page(found, options.seed))


def deck(count: int, alone: bool, dice: random.Random) -> list[Kill]:
    """Every kind of kill in its share, shuffled. alone: of one rank, which is all of them."""
    kills = [Kill(WHO[alone][i % len(WHO[alone])], WHEN[i % len(WHEN)]) for i in range(count)]
    dice.shuffle(kills)
    return kills


def chaos(folder: Path, engine: str, kills: list[Kill], dice: random.Random) -> Found:
    whole, seconds = one_run(folder, engine, "whole", [], dice)
    found = Found(0, [], 0.0, 0.0, (useful(folder / "whole"), seconds))
    while kills:
        found.runs += 1
        name, own = f"killed-{found.runs}", kills[:AT_ONCE]
        left = kills[len(own) :]
        run, seconds = one_run(folder, engine, name, own, dice)
        assert run.made, "the run is too short for any kill"
        kills = own + left  # a run that ended early leaves some
        check(folder, whole, run)
        found.made += run.made
        found.useful += useful(folder / name)
        found.elapsed += seconds
        print(f"{engine}, {name}: as undisturbed after {len(run.made)} kills, {seconds:.0f} s", flush=True)
    return found


def one_run(folder: Path, engine: str, name: str, kills: list[Kill], dice: random.Random) -> tuple[Disturbed, float]:
    """A run into folder/name. TMPDIR: what killed launchers leave in it goes with the folder."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(json.dumps(run_file()))
    path = os.pathsep.join([str(BENCH.parent), str(BENCH.parent / "src")])
    added = {"PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), VARIABLE: str(folder / f"{name}-samples")}
    added |= {"CHAOS_DATA": str(REVIEWS)} if REVIEWS.exists() else {}
    run = Disturbed(folder, Path(name), ("run.yaml", *ENGINES[engine]), dice, {**os.environ, **added})
    return run, run.run(kills)


def run_file() -> dict[str, Any]:
    """A point of the curve and, twice a second or so, a checkpoint; JSON is YAML 1.2."""
    return {
        "workload": {"type": "module", "path": str(BENCH / "chaos_workload.py")},
        "batch_size": BATCH,
        "loop": {"steps": STEPS, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 50},
        "evaluation": {"every_steps": 120},
        "checkpoints": {"every_steps": 20, "keep_last": KEEP_LAST, "keep_best": KEEP_BEST},
        "tracking": {"log_every": 1},
    }


def check(folder: Path, whole: Disturbed, run: Disturbed) -> None:
    """AssertionError unless a killed run came to what the undisturbed one did."""
    same_end(folder / whole.output, folder / run.output)
    taken = [surviving(folder / f"{each.output}-samples") for each in (whole, run)]
    check_each_once(taken[1], STEPS, SAMPLES)
    assert taken[0] == taken[1], "a step took other samples"
    report = json.loads((folder / run.output / "report.json").read_text())
    assert report["status"] == "completed"
    last = [made.kill.who == "launcher" for made in run.made][::-1]
    deaths = last.index(True) if True in last else len(last)  # since the last launch
    assert len(report["restarts"]) == deaths, f"{deaths} kills, but {report['restarts']}"
    ended = [e["status"] for e in read_events(folder / run.output / "events.jsonl") if e["event"] == "run_finished"]
    assert ended[-1] == "completed"


def useful(output: Path) -> float:
    return float(json.loads((output / "report.json").read_text())["seconds"])


def page(found: dict[str, Found], seed: int) -> str:
    head = ["engine", "runs", "kills", "of one rank", "of all ranks", "of the launcher", "inside a save"]
    head += ["while starting", "useful, s", "elapsed, s", "effective", "undisturbed", "a kill costs, s"]
    rows = [row(engine, each) for engine, each in found.items()]
    data = "hotel reviews (ChnSentiCorp)" if REVIEWS.exists() else "scikit-learn's digits"
    text = __doc__.split("\n\n", 2)[2]
    setting = (
        f"A residual network of 1.3 million parameters on {data}, {STEPS} steps, a checkpoint every 20, two ranks but "
        f"for single; seed {seed}. Nothing was lost, repeated or left out; every run ended with the undisturbed one's "
        "bits. A kill of ranks is one restart, a kill of the launcher one --resume; nothing else died."
    )
    table = markdown_table(head, rows)
    return f"# Chaos: runs killed at random moments\n\n{text}\n{setting}\n\n{machine_line()}\n\n{table}\n"


def row(engine: str, found: Found) -> list[str]:
    who = [made.kill.who for made in found.made]
    own_useful, own_elapsed = found.undisturbed
    cost = (found.elapsed - found.useful - found.runs * (own_elapsed - own_useful)) / len(who)
    counts = [len(who), *(who.count(each) for each in ("one rank", "all ranks", "launcher"))]
    counts += [sum(made.inside_save for made in found.made), sum(made.kill.when == "starting" for made in found.made)]
    shares = [found.useful / found.elapsed, own_useful / own_elapsed]
    seconds = [f"{found.useful:.0f}", f"{found.elapsed:.0f}", *(f"{share:.0%}" for share in shares), f"{cost:.1f}"]
    return [engine, str(found.runs), *map(str, counts), *seconds]


if __name__ == "__main__":
    main()
