"""Runs that learn from rewards, preferences and a teacher, killed with SIGKILL at random instants again and again.

    python -m bench.reward_kills
    python -m bench.reward_kills --engines ddp --kills 20 --seed 7      the part of that engine alone

Four runs, each killed and resumed until it has ended: grpo and ppo with rewards by a function, dpo with
log-probabilities of the reference computed once and cached, and distillation on the model's own answers. A kill is
aimed at what a run does (drawing answers, rewards, an update, caching, a save, its start), by turns, and comes at a
random instant in it; what was really under way then is what is counted.

Each run is of one process, and of two ranks by ddp and by fsdp. There a rank drawn at random is killed, after which the
launcher starts all of them again; or the launcher alone, and `--resume` is typed at once, while its ranks still notice;
or the launcher and all ranks. What was under way is then what the drawn rank did.

Each start has to go on from the newest checkpoint. The reward's function and the drawing of answers keep account of
what they are asked for, by each rank: nothing may be asked for again but what was under way in a process when it ended.
Log-probabilities of the reference are computed again only if that was under way. In the end the curve, the answers with
their rewards, and the bits of weights and optimizer have to be those of a run that was never touched, on as many ranks,
and no unfinished file may be left. Where anything of this does not hold, the bench ends with it.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.launch_kills import ENGINES, RANKS, VICTIMS, killed_launches
from bench.phased_run import BETWEEN, CACHING, PHASES, STARTING, PhasedRun, imported
from bench.reward_aims import AIMS, PATIENCE, STEPS_A_KILL, aimed_at, reached
from bench.reward_checks import Killed, check
from bench.reward_runs import Place
from bench.tables import machine_line, markdown_table, with_part, write

RESULTS = Path(__file__).resolve().parent / "results"
SINGLE = "single"
MOMENTS = (STARTING, *PHASES, BETWEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=AIMS, default=list(AIMS))
    parser.add_argument("--engines", nargs="+", choices=[SINGLE, *ENGINES], default=[SINGLE, *ENGINES])
    parser.add_argument("--kills", type=int, default=12, help="of each run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, default=RESULTS / "reward-kills.md")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    imported()
    found = []
    with tempfile.TemporaryDirectory(prefix="reward-kills-") as folder:
        for engine in given.engines:
            for name, place, dice in _runs(given, engine, Path(folder)):
                if engine == SINGLE:
                    found.append(killed_run(name, place, given.kills, dice))
                else:
                    found.append(killed_launches(name, engine, place, given.kills, dice))
    before = given.output.read_text() if given.output.exists() else ""
    write(given.output, page(before, found, given.seed))


def _runs(given: argparse.Namespace, engine: str, folder: Path) -> Iterator[tuple[str, Path, random.Random]]:
    """Yields each run's name, an empty folder for it, and its dice."""
    for name in given.runs:
        place = folder / f"{engine}-{name}"
        place.mkdir()
        yield (
            name,
            place,
            random.Random(f"{given.seed} {name}" if engine == SINGLE else f"{given.seed} {engine} {name}"),
        )


# --- a run of one process ---------------------------------------------------------------------------------------------


def killed_run(name: str, folder: Path, kills: int, dice: random.Random) -> Killed:
    """Kills a run so many times, and lets it end. AssertionError if anything is lost, asked for again, or different."""
    began = time.monotonic()
    whole, disturbed = (Place(folder / each, name, STEPS_A_KILL * kills) for each in ("whole", "killed"))
    usual = _started(whole, 0)
    assert usual.wait(PATIENCE) == 0, whole.log
    found, starts = Killed(name), 0
    for number in range(kills):
        before = disturbed.newest
        run = _started(disturbed, starts := number + 1)
        aim = aimed_at(name, number, disturbed)
        if not reached(run.shared, lambda run=run: run.poll() is None, aim, usual.shared, dice):  # type: ignore[misc]
            assert run.poll() == 0, disturbed.log
            break
        run.kill()
        found.moments.append(run.shared.now())
        found.cached += run.shared.begun(CACHING)
        print(f"{name}, kill {number + 1}: aimed at {aim}, came in {found.moments[-1]}", flush=True)
        if run.shared.begun("update"):  # else it may not have reported yet that it started
            assert disturbed.first_step == before, f"start {starts} went on from {disturbed.first_step}: {before}"
    last = _started(disturbed, starts + 1)
    assert last.wait(PATIENCE) == 0, disturbed.log
    found.cached += last.shared.begun(CACHING)
    check(found, whole, disturbed, dict(enumerate(found.moments, 1)), found.moments.count(CACHING))
    found.seconds = time.monotonic() - began
    return found


def _started(place: Place, number: int) -> PhasedRun:
    return PhasedRun(place.command, place.folder, number, place.environment)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(before: str, found: Sequence[Killed], seed: int) -> str:
    """Returns the page with a part for each engine that has runs here; the others as they are in the page before."""
    about = "\n".join((__doc__ or "").splitlines()[5:]).strip()
    parts = "".join(re.split(r"(?m)^(?=## )", before)[1:])
    made = "\n\n".join(("# Runs that are killed while they answer, are rewarded, and fill a cache", about, parts))
    for engine in dict.fromkeys(each.engine for each in found):
        title = f"{RANKS} ranks, {engine}" if engine else "One process"
        made = with_part(made, title, _part(title, [each for each in found if each.engine == engine], seed))
    return made


def _part(title: str, found: Sequence[Killed], seed: int) -> str:
    head = ("run", "kills", "answers drawn", "again, under way at a kill", "rewards asked for",
            "again, under way at a kill", "passes that fill the cache", "minutes")  # fmt: skip
    rows = [
        (each.name, f"{len(each.moments)}", *(f"{number:,}" if number else "" for number in
         (each.drawn, each.drawn_again, each.asked, each.asked_again, each.cached)), f"{each.seconds / 60:.1f}")
        for each in found
    ]  # fmt: skip
    titles = ("under way", *(each.name for each in found))
    moments = [(kind, *(f"{each.moments.count(kind) or ''}" for each in found)) for kind in MOMENTS]
    moments = [row for row in moments if any(row[1:])]
    moments.append(("all", *(f"{len(each.moments)}" for each in found)))
    total = sum(len(each.moments) for each in found)
    same = f"All {total} kills came to the same bits (seed {seed})."
    tables = [same, machine_line(), markdown_table(head, rows), markdown_table(titles, moments)]
    if any(each.victims for each in found):
        victims = [(each, *(f"{one.victims.count(each) or ''}" for one in found)) for each in dict.fromkeys(VICTIMS)]
        tables.append(markdown_table(("killed", *titles[1:]), victims))
    return "\n\n".join((f"## {title}", *tables)) + "\n"


if __name__ == "__main__":
    main()
