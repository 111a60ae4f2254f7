"""Runs that are killed and disturbed at random moments, and what they must come to all the same.

    python -m bench.chaos
    python -m bench.chaos --minutes 60
    python -m bench.chaos --engines ddp --seed 7 --run 3       that run alone, with the same faults

Engines take turns. Each has an undisturbed run, by the command as a user types it, and then runs with two dozen
faults each (faults.py): SIGKILL for one rank, all of them, the launching process (`--resume` after it), or a whole
node; a full disk; ranks that stand still for a while or for good; a wall clock that jumps. They come while a run steps,
starts, or saves (killing.py). A run is as it should be if it ends with the bits of the undisturbed one (weights,
optimizer, curve), no checkpoint that was whole at a fault is lost but by retention, each start goes on from the newest
one, in the surviving history every epoch has each sample once, and no time in its report is negative.

Every run adds a line to the record (chaos_record.py), of which the page is made. Four of five runs are started from
processes that have imported everything already (warm.py), which saves each rank some three seconds of a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import chaos_record
from bench.chaos_checks import BATCH, STEPS, check
from bench.chaos_machine import Clock, Disk
from bench.faults import FAULTS, HANG_SECONDS, Fault
from bench.killing import KEEP_BEST, KEEP_LAST, Disturbed
from bench.tables import machine_line, write
from bench.warm import Nursery
from tests.launch.history import VARIABLE

BENCH = Path(__file__).resolve().parent
REVIEWS = BENCH.parents[1] / "shared" / "data" / "ChnSentiCorp_htl_all.csv"
AT_ONCE = 24  # faults of one run
COLD = 0.2  # the share of runs that are started as a user does, importing everything

# of lengths without a common divisor, so that in a row of them each meets each
WHEN = ("saving", "stepping", "saving", "stepping", "starting")
STILL = ("stopped for a while", "stopped for a while", "stopped for good")
ALONE = (*["one rank"] * 9, *["launcher"] * 6, *["full disk"] * 3, *["clock jump"] * 2, *STILL)
TOGETHER = (*["one rank"] * 8, *["all ranks"] * 4, *["launcher"] * 4, *["full disk"] * 2, *["clock jump"] * 2, *STILL)
APART = (*["one rank"] * 6, *["all ranks"] * 3, *["other node"] * 5, *["first node"] * 2, "stopped for a while")


@dataclass(frozen=True)
class Kind:
    """A way to run."""

    settings: Sequence[str]
    faults: Sequence[str] = TOGETHER
    nodes: int = 1
    copies: int = 1  # ranks that take the same samples
    modules: Sequence[str] = ()  # that its ranks import besides


DATA = () if REVIEWS.exists() else ("sklearn.datasets",)
MESH = ("drivetrain.engines.mesh.engine", "torch.distributed.pipelining")
ENGINES = {
    "single": Kind([], ALONE),
    "ddp": Kind(["engine=ddp", "processes=2"], modules=["drivetrain.engines.ddp"]),
    "fsdp": Kind(["engine=fsdp", "processes=2"], modules=["drivetrain.engines.fsdp"]),
    "zero2": Kind(["engine=zero2", "processes=2"], modules=["deepspeed", "drivetrain.engines.deepspeed.engine"]),
    "mesh-tp2": Kind(["engine=mesh-tp2", "processes=2"], copies=2, modules=MESH),
    "mesh-pp2": Kind(["engine=mesh-pp2", "processes=2"], copies=2, modules=MESH),
    "mesh-dp2-tp2": Kind(["engine=mesh-dp2-tp2", "processes=4"], copies=2, modules=MESH),
    "ddp, two nodes": Kind(["engine=ddp", "processes=1"], APART, 2, modules=["drivetrain.engines.ddp"]),
    "fsdp, two nodes": Kind(["engine=fsdp", "processes=1"], APART, 2, modules=["drivetrain.engines.fsdp"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="runs that are killed and disturbed at random moments")
    parser.add_argument("--kills", type=int, default=100, help="at least so many, over all engines")
    parser.add_argument("--minutes", type=float, help="go on until they are over, however many kills that is")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--run", type=int, help="the run of this number alone, of each engine")
    parser.add_argument("--record", type=Path, default=BENCH / "results" / "chaos.jsonl")
    parser.add_argument("--keep", action="store_true", help="leave the runs' folders there")
    parser.add_argument("--page", action="store_true", help="make the page from the record, and run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is mounted goes
    failed = 0
    try:
        if not options.page:
            failed = in_folder(options)
    except KeyboardInterrupt:
        print("interrupted; the runs that had ended are kept", flush=True)
    write(options.record.with_suffix(".md"), chaos_record.page(chaos_record.read(options.record), head()))
    raise SystemExit(f"{failed} runs failed" if failed else 0)


def in_folder(options: argparse.Namespace) -> int:
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        return session(folder, options)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def session(folder: Path, options: argparse.Namespace) -> int:
    """Runs until there are enough kills, or the time is over. Returns how many runs failed."""
    until = time.monotonic() + 60 * (options.minutes or 10**6)
    with Session(folder, options.seed, options.keep) as found:
        for engine, number in turns(options):
            if time.monotonic() > until or (options.minutes is None and found.kills >= options.kills):
                break
            new = found.one_more(engine, number)
            chaos_record.add(options.record, new)
            text = f"{new['outcome']} after {len(new['order'])} faults, {new['seconds']:.0f} s, {new['start']}"
            print(f"{engine}, run {number}: {text} {new.get('why', '')}", flush=True)
    return found.failed


def turns(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yields (engine, its run's number from 0): all engines in each round, in an order of its own."""
    dice = random.Random(options.seed)
    for number in range(10**6) if options.run is None else [options.run]:
        engines = list(options.engines)
        dice.shuffle(engines)
        yield from ((engine, number) for engine in engines)
    while options.run is None:
        return


def deck(kind: Kind, seed: str, number: int, possible: Sequence[str] = tuple(FAULTS)) -> list[Fault]:
    """Returns the faults of a run. Over the runs of an engine each comes in its share, at every moment."""
    own = [what for what in kind.faults if what in possible]
    found = []
    for place in range(number * AT_ONCE, (number + 1) * AT_ONCE):
        order = random.Random(f"{seed} {place // len(own)}").sample(own, len(own))
        found.append(Fault(order[place % len(own)], WHEN[place % len(WHEN)]))
    return found


@dataclass
class Session:
    """Undisturbed runs, nurseries, and what the faults need, each made when it is first wanted."""

    folder: Path
    seed: int
    keep: bool = False
    kills: int = 0
    failed: int = 0
    nurseries: dict[str, Nursery] = field(default_factory=dict)
    whole: dict[str, Disturbed] = field(default_factory=dict)

    def __enter__(self) -> Session:
        self.clock = _or_none(lambda: Clock(self.folder / "clock"), "clock jump")
        self.disk = _or_none(lambda: Disk(self.folder / "disk"), "full disk")
        lacking = {"clock jump"} if self.clock is None else set()
        lacking |= {"full disk"} if self.disk is None else set()
        self.possible = [name for name in FAULTS if name not in lacking]
        return self

    def __exit__(self, *_: object) -> None:
        for nursery in self.nurseries.values():
            nursery.close()
        if self.disk is not None and not self.keep:
            self.disk.close()

    def one_more(self, engine: str, number: int) -> chaos_record.Line:
        """Returns the run's line for the record; a failure is one as well."""
        kind, seed = ENGINES[engine], f"{self.seed} {engine}"
        dice = random.Random(f"{seed} {number}")
        start = "cold" if dice.random() < COLD else "warm"
        faults = deck(kind, seed, number, self.possible)
        run, why, began = None, "", time.monotonic()
        try:
            if engine not in self.whole:
                undisturbed = self._disturbed(engine, "whole", dice, None, on_disk=False)
                undisturbed.run([])
                self.whole[engine] = undisturbed
            began = time.monotonic()
            on_disk = any(fault.what == "full disk" for fault in faults)
            nursery = self._nursery(kind) if start == "warm" else None
            run = self._disturbed(engine, f"run-{number}", dice, nursery, on_disk)
            run.run(faults)
            assert run.made, "the run is too short for any fault"
            check(self.whole[engine], run, kind.copies)
        except (AssertionError, OSError, ValueError, psutil.Error, subprocess.TimeoutExpired) as error:
            self.failed += 1
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            for path in (self.folder, BENCH.parent, sys.prefix):  # of this machine alone
                why = why.replace(f"{path}/", "")
        finally:
            if self.disk is not None and not self.keep:
                self.disk.empty()
        made = run.made if run is not None else []
        found = chaos_record.line(engine, self.seed, number, start, made, time.monotonic() - began, why)
        self.kills += chaos_record.kills([found])
        return found

    def _nursery(self, kind: Kind) -> Nursery:
        name = " ".join(kind.modules)
        if name not in self.nurseries:
            added = {"DS_ACCELERATOR": "cpu"} if "deepspeed" in kind.modules else {}
            self.nurseries[name] = Nursery(self._environment() | added, [*kind.modules, *DATA])
        return self.nurseries[name]

    def _disturbed(
        self, engine: str, name: str, dice: random.Random, nursery: Nursery | None, on_disk: bool
    ) -> Disturbed:
        """Returns a run that has not begun. TMPDIR: what killed launchers leave in it goes with the folder."""
        kind, folder = ENGINES[engine], self.folder / engine.replace(", ", "-").replace(" ", "-")
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(json.dumps(run_file()))
        if self.clock is not None:
            self.clock.set(0)
        added = {"TMPDIR": str(folder / "tmp"), VARIABLE: str(folder / f"{name}-samples")}
        output = self.disk.folder / f"{folder.name}-{name}" if on_disk and self.disk is not None else Path(name)
        arguments = ("run.yaml", *kind.settings)
        environment = self._environment() | added
        return Disturbed(folder, output, arguments, dice, environment, kind.nodes, nursery, self.disk, self.clock)

    def _environment(self) -> dict[str, str]:
        added = {"PYTHONPATH": os.pathsep.join([str(BENCH.parent), str(BENCH.parent / "src")]), "OMP_NUM_THREADS": "1"}
        added |= {"CHAOS_DATA": str(REVIEWS)} if REVIEWS.exists() else {}
        return {**os.environ, **added, **(self.clock.variables if self.clock is not None else {})}


def _or_none(make: Any, fault: str) -> Any:
    try:
        return make()
    except OSError as error:
        print(f"without {fault!r}: {error}", flush=True)
        return None


def run_file() -> dict[str, Any]:
    """A point of the curve and, several times a second, a checkpoint; JSON is YAML 1.2."""
    return {
        "workload": {"type": "module", "path": str(BENCH / "chaos_workload.py")},
        "batch_size": BATCH,
        "loop": {"steps": STEPS, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 50},
        "evaluation": {"every_steps": 60},
        "checkpoints": {"every_steps": 10, "keep_last": KEEP_LAST, "keep_best": KEEP_BEST},
        "tracking": {"log_every": 1},
        "hang_seconds": HANG_SECONDS,
    }


def head() -> str:
    data = "hotel reviews (ChnSentiCorp)" if REVIEWS.exists() else "scikit-learn's digits"
    setting = (
        f"A residual network of 130,000 parameters (the first 100 kills: 1.3 million) on {data}, {STEPS} steps (480), "
        "a checkpoint every 10 (20), dropout. A death of ranks is one restart, one of the launcher one --resume; "
        "nothing else died. Two launchers on one machine stand for two nodes."
    )
    return f"{(__doc__ or '').split(chr(10) * 2, 2)[2].strip()}\n\n{setting}\n\n{machine_line()}"


if __name__ == "__main__":
    main()
