"""Runs that learn from rewards, preferences and a teacher, killed with SIGKILL at random instants again and again.

    python -m bench.reward_kills
    python -m bench.reward_kills --runs grpo dpo --kills 20 --seed 7

Four runs, each killed and resumed until it has ended: grpo and ppo with rewards by a function, dpo with
log-probabilities of the reference computed once and cached, and distillation on the model's own answers. A kill is
aimed at what a run does (drawing answers, rewards, an update, caching, a save, its start), by turns, and comes at a
random instant in it; what was really under way then is what is counted.

Each start has to go on from the newest checkpoint. The reward's function and the drawing of answers keep account of
what they are asked for: nothing may be asked for again but what was under way at a kill. Log-probabilities of the
reference are computed again only if that was under way. In the end the curve, the answers with their rewards, and the
bits of weights and optimizer have to be those of a run that was never touched, and no unfinished file may be left.
Where anything of this does not hold, the bench ends with it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.phased_run import BETWEEN, PHASES, STARTING, PhasedRun, Shared, imported
from bench.tables import machine_line, markdown_table, write
from drivetrain.checkpoint.directory import newest_good
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import same_end
from tests.tiny_language import LLAMA, write_lines

RESULTS = Path(__file__).resolve().parent / "results"
PATIENCE = 180.0
STARTING_SECONDS = 1.5
STEPS_A_KILL = 8  # so that a run outlasts its kills
MOST_ENTRIES = 4  # a kill comes the first to fourth time that what it is aimed at is under way
CACHING, DRAWING, REWARDS = "caching the reference", "drawing answers", "rewards"
ROLLOUTS = (DRAWING, REWARDS, "log-probabilities of answers", "update", REWARDS, DRAWING, "saving", STARTING)
# run → what its kills are aimed at, in turns
AIMS: Mapping[str, Sequence[str]] = {
    "grpo": ROLLOUTS,
    "ppo": ROLLOUTS,
    "dpo": (CACHING, CACHING, CACHING, CACHING, CACHING, CACHING, "update", "saving", "update", STARTING),
    "distill": (DRAWING, "update", DRAWING, "saving", STARTING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=AIMS, default=list(AIMS))
    parser.add_argument("--kills", type=int, default=12, help="of each run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, default=RESULTS / "reward-kills.md")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    imported()
    found = []
    with tempfile.TemporaryDirectory(prefix="reward-kills-") as folder:
        for name in given.runs:
            place = Path(folder) / name
            place.mkdir()
            found.append(killed_run(name, place, given.kills, random.Random(f"{given.seed} {name}")))
    write(given.output, page(found, given.seed))


@dataclass
class Killed:
    """A run that was killed and came to its end as it should. moments: what was under way at each kill."""

    name: str
    moments: list[str] = field(default_factory=list)
    drawn: int = 0  # answers
    drawn_again: int = 0
    asked: int = 0  # rewards
    asked_again: int = 0
    cached: int = 0  # how often the pass over the data began that computes what is cached
    seconds: float = 0.0


# --- the run ----------------------------------------------------------------------------------------------------------


def killed_run(name: str, folder: Path, kills: int, dice: random.Random) -> Killed:
    """Kills a run so many times, and lets it end. AssertionError if anything is lost, asked for again, or different."""
    began = time.monotonic()
    whole, disturbed = (_Place(folder / each, name, STEPS_A_KILL * kills) for each in ("whole", "killed"))
    usual = whole.start(0)
    assert usual.wait(PATIENCE) == 0, whole.log
    found, starts = Killed(name), 0
    for number in range(kills):
        before = disturbed.newest
        run = disturbed.start(starts := number + 1)
        aim = AIMS[name][number % len(AIMS[name])]
        aim = "update" if aim == CACHING and disturbed.has_cached else aim
        if not _reached(run, aim, usual.shared, dice):
            assert run.poll() == 0, disturbed.log
            break
        run.kill()
        found.moments.append(run.shared.now())
        found.cached += run.shared.begun(CACHING)
        print(f"{name}, kill {number + 1}: aimed at {aim}, came in {found.moments[-1]}", flush=True)
        if run.shared.begun("update"):  # else it may not have reported yet that it started
            assert disturbed.first_step == before, f"start {starts} went on from {disturbed.first_step}: {before}"
    last = disturbed.start(starts + 1)
    assert last.wait(PATIENCE) == 0, disturbed.log
    found.cached += last.shared.begun(CACHING)
    _check(found, whole, disturbed)
    found.seconds = time.monotonic() - began
    return found


def _reached(run: PhasedRun, aim: str, usual: Shared, dice: random.Random) -> bool:
    """Waits for a random instant in what is aimed at. Returns whether the run still goes on then."""
    if aim == STARTING:
        time.sleep(dice.uniform(0, STARTING_SECONDS))
        return run.poll() is None
    wanted, until = 1 if aim == CACHING else dice.randint(1, MOST_ENTRIES), time.monotonic() + PATIENCE
    while run.shared.begun(aim) < wanted:
        if run.poll() is not None:
            return False
        assert time.monotonic() < until, f"{aim} does not come"
        time.sleep(0.0005)
    time.sleep(dice.uniform(0, usual.mean_seconds(aim)))  # it may be over then, which the counts show
    return run.poll() is None


class _Place:
    """A run's folder with its data, what was asked for, and what it left."""

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "run.json").write_text(json.dumps(_run_file(name, folder, steps)))
        self._environment = {"REWARD_CALLS": str(folder / "rewards"), "ANSWER_CALLS": str(folder / "answers")}

    def start(self, number: int) -> PhasedRun:
        return PhasedRun(["train", "run.json", "--quiet", "--resume"], self.folder, number, self._environment)

    @property
    def has_cached(self) -> bool:
        return any((self.folder / "cache").glob("reference-*.npy"))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that is good; 0 if there is none."""
        path, _ = newest_good(self.folder / "run" / "checkpoints")
        return 0 if path is None else int(path.name.removeprefix("step-"))

    @property
    def first_step(self) -> int | None:
        """The step that the last start which came so far went on from."""
        return next((e["first_step"] for e in reversed(self.events) if e["event"] == "run_started"), None)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def calls(self, name: str) -> list[tuple[int, list[str]]]:
        """Returns (start, what was asked for) of each call."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(start, [json.dumps(each) for each in asked]) for start, asked in map(json.loads, lines)]


def _run_file(name: str, folder: Path, steps: int) -> dict[str, Any]:
    data = {"train": _rows(name, folder), "template": "chatml", "length": 64, "evaluation_fraction": 0}
    workload: dict[str, Any] = {
        "type": "language_model", "stage": name, "model": {"config": LLAMA},
        "data": {**data, "cache": str(folder / "cache")},
    }  # fmt: skip
    learning = {"rewards": "bench.killed_rewards:letters", "max_new_tokens": 16, "beta": 0.05}
    workload |= {
        "grpo": {"reinforcement": {**learning, "answers": 4, "updates": 2}},
        "ppo": {"reinforcement": {**learning, "updates": 2}},
        "dpo": {"preference": {"reference": "cached"}},
        "distill": {"distillation": {"teacher": str(folder / "teacher"), "own_answers": 0.5, "max_new_tokens": 16}},
    }[name]
    if name == "distill":
        _teacher(folder / "teacher")
    return {
        "workload": workload,
        "batch_size": {"grpo": 4, "ppo": 12}.get(name, 8),
        "micro_batch_size": 8,
        "loop": {"steps": steps, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "checkpoints": {"every_steps": 3, "keep_last": 2},
        "tracking": {"log_every": 1, "trackers": []},
        "output": str(folder / "run"),
    }


def _rows(name: str, folder: Path) -> str:
    if name == "dpo":  # so many that a pass over them takes a while
        sides = [{"prompt": f"say {n}", "chosen": f"{n} " * (1 + n % 5), "rejected": f"no {n}"} for n in range(1, 1201)]
        return write_lines(folder / "rows.jsonl", sides)
    return write_lines(folder / "rows.jsonl", [{"instruction": f"say {n}", "output": str(n)} for n in range(60)])


def _teacher(folder: Path) -> None:
    """Writes a model of other weights than the one that is trained."""
    import torch

    from drivetrain.config.language import LanguageModel
    from drivetrain.workloads.language_model import LanguageModelWorkload

    data = {"train": _rows("sft", folder.parent), "template": "chatml", "length": 64, "cache": str(folder / "cache")}
    block = {"stage": "sft", "model": {"config": {**LLAMA, "hidden_size": 48}}, "data": data}
    made = LanguageModelWorkload(LanguageModel.model_validate(block), 0)
    torch.manual_seed(5)
    model: Any = made.build_model()
    model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)


# --- what must hold ---------------------------------------------------------------------------------------------------


def _check(found: Killed, whole: _Place, disturbed: _Place) -> None:
    same_end(disturbed.folder / "run", whole.folder / "run")
    assert rollouts(disturbed) == rollouts(whole), "answers or their rewards differ"
    killed_in = {phase: {n for n, each in enumerate(found.moments, 1) if each == phase} for phase in (DRAWING, REWARDS)}
    both = whole.calls("answers"), disturbed.calls("answers")
    found.drawn, found.drawn_again = counted(*both, killed_in[DRAWING])
    both = whole.calls("rewards"), disturbed.calls("rewards")
    found.asked, found.asked_again = counted(*both, killed_in[REWARDS])
    if found.name == "dpo":
        wanted = 1 + found.moments.count(CACHING)
        assert found.cached == wanted, f"what is cached was computed {found.cached} times, for {wanted - 1} kills in it"
    left = [path.name for path in disturbed.folder.rglob("*partial*")]
    assert not left, f"unfinished files are left: {left}"


def rollouts(place: _Place) -> dict[int, list[Any]]:
    """Returns for each step the means that were reported last of its answers, with the answers themselves."""
    found = {event["step"]: [event["metrics"]] for event in place.events if event["event"] == "rollout"}
    path = place.folder / "run" / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for step, means in found.items():
        means += sorted({json.dumps(line, sort_keys=True) for line in lines if line.get("step") == step})
    return found


def counted(
    whole: Sequence[tuple[int, Sequence[str]]], calls: Sequence[tuple[int, Sequence[str]]], excused: Iterable[int]
) -> tuple[int, int]:
    """Returns how much was asked for, and how much of it again.

    whole: the calls of the undisturbed run. excused: starts that were killed while a call was under way, whose last
    call a later start may make again. AssertionError if anything else was asked for again, or never.
    """
    pardoned, last = set(excused), {start: items for start, items in calls}
    wanted = Counter(each for _, items in whole for each in items)
    asked, spare, wrong = Counter[str](), Counter[str](), set[str]()
    for start in sorted(last):
        own = [each for number, items in calls if number == start for each in items]
        asked.update(own)
        wrong |= {each for each in own if asked[each] > wanted[each] + spare[each]}
        if start in pardoned:
            spare.update(last[start])
    wrong |= {each for each in wanted if asked[each] < wanted[each]}
    often = {each: (asked[each], wanted[each]) for each in wrong}
    assert not wrong, f"asked for so often, and by an undisturbed run: {often}"
    return asked.total(), asked.total() - wanted.total()


def page(found: Sequence[Killed], seed: int) -> str:
    head = ("run", "kills", "answers drawn", "again, under way at a kill", "rewards asked for",
            "again, under way at a kill", "passes that fill the cache", "minutes")  # fmt: skip
    rows = [
        (each.name, f"{len(each.moments)}", *(f"{number:,}" if number else "" for number in
         (each.drawn, each.drawn_again, each.asked, each.asked_again, each.cached)), f"{each.seconds / 60:.1f}")
        for each in found
    ]  # fmt: skip
    kinds = [kind for kind in (STARTING, *PHASES, BETWEEN) if any(kind in each.moments for each in found)]
    moments = [(kind, *(f"{each.moments.count(kind) or ''}" for each in found)) for kind in kinds]
    moments.append(("all", *(f"{len(each.moments)}" for each in found)))
    title = "# Runs that are killed while they answer, are rewarded, and fill a cache"
    about = "\n".join((__doc__ or "").splitlines()[5:]).strip()
    total = sum(len(each.moments) for each in found)
    under_way = f"All {total} kills came to the same bits. What was under way at them (seed {seed}):"
    by_kind = markdown_table(("under way", *(each.name for each in found)), moments)
    return "\n\n".join((title, about, machine_line(), markdown_table(head, rows), under_way, by_kind)) + "\n"


if __name__ == "__main__":
    main()
