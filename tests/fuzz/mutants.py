"""Command lines that are almost right: which verb, what is wrong with its arguments, what with the files they name.

A mutant is a function of the seed and its number, so that one that fails can be made again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.field_paths import field_paths

# what is right: each verb's command lines, in the folder of place.py
LINES: dict[str, list[list[str]]] = {
    "train": [
        ["train", "run.yaml"],
        ["train", "run.yaml", "--resume"],
        ["train", "run.yaml", "--overwrite", "--quiet"],
    ],
    "check": [["check", "run.yaml"], ["check", "run.yaml", "--resume", "--json"], ["check", "run.yaml", "--overwrite"]],
    "evaluate": [["evaluate", "run.yaml"], ["evaluate", "run.yaml", "--checkpoint", "last"]],
    "predict": [
        ["predict", "run.yaml", "--checkpoint", "runs/run/checkpoints/step-00000002"],
        ["predict", "run.yaml", "--output", "new.csv"],
    ],
    "compare": [["compare", "run.yaml", "precision=fp32,bf16", "--output", "runs/c", "--seeds", "1"]],
    "report": [
        ["report", "runs/run"],
        ["report", "runs/run", "runs/run"],
        ["report", "runs/run", "--output", "page"],
    ],
    "data": [["data", "talks.yaml"], ["data", "talks.yaml", "--json"], ["data", "run.yaml"]],
    "prove": [["prove", "run.yaml", "--steps", "2"]],
    "launch": [["launch", "--slurm", "run.yaml", "--nodes", "2", "--time", "01:00:00", "--partition", "gpu"]],
    "import": [
        ["import", "accelerate.yaml", "ds.json", "--onto", "run.yaml", "--output", "made.yaml"],
        ["import", "factory.yaml", "--output", "made.yaml"],
        ["import", "arguments.json", "--onto", "run.yaml"],
        ["import", "xtuner.py", "--output", "made.yaml"],
    ],
    "fields": [["fields"]],
    "schema": [["schema"]],
    "doctor": [["doctor"], ["doctor", "--json"], ["doctor", "runs/run", "--bundle", "--output", "new.tar.gz"]],
    "version": [["version"]],
    "replay": [["replay", "runs/run", "--step", "2"], ["replay", "runs/run", "--step", "1", "--json"]],
    "checkpoint inspect": [["checkpoint", "inspect", "runs/run"], ["checkpoint", "inspect", "runs/run", "--json"]],
    "checkpoint verify": [["checkpoint", "verify", "runs/run"]],
    "checkpoint convert": [
        ["checkpoint", "convert", "runs/run", "--to", "dcp", "--output", "new"],
        ["checkpoint", "convert", "exported", "--run", "run.yaml", "--step", "5", "--weights-only"],
        ["checkpoint", "convert", "dcp", "--run", "run.yaml", "--from", "dcp", "--step", "5"],
    ],
}
VERBS = list(LINES)
# mutants of each hundred: what takes no files has few
SHARES = {verb: 1 if verb in ("fields", "schema", "doctor", "version") else 7 for verb in VERBS}
READS_ONLY = {
    *("check", "evaluate", "data", "launch", "fields", "schema", "version", "replay"),
    *("checkpoint inspect", "checkpoint verify"),
}
TAKES_OVERRIDES = {"train", "check", "evaluate", "predict", "compare", "data", "prove", "launch"}

LONG = "x" * 300
STEP = "runs/run/checkpoints/step-00000002"
NAMES = ["run.yaml", "linear.py", "ds.json", "talks.json", "talks.yaml", "accelerate.yaml", "text.txt", "a:b"]
FOLDERS = [".", "folder", "runs", "runs/run", "runs/run/checkpoints", STEP, "exported", "dcp", "~", "/proc/self"]
ODD = [
    *("", " ", "nowhere", "empty", "binary.bin", "latin.yaml", "deep.json", "bomb.yaml", "fifo", "loop", "nothing"),
    *("a\0b", "a\nb", "\udcff", "-", "[bold]", "[/]", "*.**", "run.yaml/child", LONG, "x" * 5000, "a/" * 3000),
]
PATHS = [
    *(*ODD, *NAMES, *FOLDERS, "..", "--", "zero", "/dev/null", "/dev/zero", "/proc/self/mem", "~nobody-there/x"),
    *("runs/run/report.json", "https://x.y/z", "fifo.yaml", "loop.yaml"),
]
# no device and no folder of the machine's among the places that are written to
PLACES = [
    *(*ODD, *NAMES, "folder/new", "runs/run", "new.jsonl", "x.csv", "x.CSV"),
    *("loop.csv", "loop.yaml", "fifo.csv", "fifo.yaml", "~nobody-there/x"),
]
WRITES_TO = {"--output", "-o"}
VALUES = [
    *("", "true", "null", "~", "nan", ".inf", "-.inf", "-1", "0", "1", "1.5", "2", "1e3", "1e400", "9" * 5000),
    *("[", "]", "[" * 500, "[1, 2]", "[[]]", "{}", "{a: b}", "{name: x}", "{a: 1, a: 2}", "*x", "&a [*a]", "!!bool x"),
    *("!!python/object:os.system x", "'", '"', "'5'", "text", "a\0b", "a\nb", "\udcff", '"\\ud800"', "2024-01-31", ","),
    *("auto", "best", "last", "single", "ddp", "zero3", "mesh-pp2", "fp32", "bf16", "cuda", "x" * 3000, "%YAML 9.9"),
    *("0x" + "f" * 5000, "---", "? a", "a,b"),
]
KEYS = [
    *(".".join(path) for path, _ in field_paths()),
    *("", ".", "..", "a.b", "lr.x", "optimizer.lr.x", "workload.options.x", "workload.options", "engine.config"),
    *("output", "workload.path", "workload.path", "batch_size", "precision", "optimizer.name", "seed", "engine"),
    *("path", "x" * 500),
]
# what would take long, or fill the machine, for what it is meant to
LEFT_ALONE = {"compile", "loader.workers", "grace_seconds", "max_restarts", "workload.data.cache"}
OPTIONS = [
    *("--nope", "--json", "--help", "-q", "--output", "-o", "--checkpoint", "--step", "--steps", "--nodes", "--seeds"),
    *("--node-rank", "--rendezvous", "--verb", "--cell-timeout", "--to", "--from", "--run", "--dtype", "--overwrite"),
    *("---", "--fresh"),
]


@dataclass(frozen=True)
class Mutant:
    number: int
    verb: str
    arguments: list[str]
    damage: list[tuple[str, str]]  # file, what was done to it

    def __str__(self) -> str:
        done = "".join(f"; {what} {file}" for file, what in self.damage)
        return f"mutant {self.number}: {[clipped(each) for each in self.arguments]}{done}"


def clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def mutant(seed: int, number: int, for_processes: bool = False) -> Mutant:
    """for_processes: without NUL characters, which no process can be given."""
    chance = random.Random(f"{seed}-{number}")
    verb = chance.choices(VERBS, [SHARES[each] for each in VERBS])[0]
    arguments = list(chance.choice(LINES[verb]))
    damage: list[tuple[str, str]] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        change = chance.choice(CHANGES[verb])
        if change is damaged:
            damage.append(damaged(chance, arguments))
        else:
            change(chance, arguments)
    if for_processes:
        arguments = [each.replace("\0", "") for each in arguments]
    return Mutant(number, verb, arguments, damage)


# --- changes of a command line ---------------------------------------------------------------------------------------


def another_path(chance: random.Random, arguments: list[str]) -> None:
    """In place of an argument or an option's value."""
    first = 2 if arguments[0] == "checkpoint" else 1
    places = [at for at in range(first, len(arguments)) if not arguments[at].startswith("--")]
    if places:
        at = chance.choice(places)
        arguments[at] = chance.choice(PLACES if arguments[at - 1] in WRITES_TO else PATHS)


def another_value(chance: random.Random, arguments: list[str]) -> None:
    places = [at for at in range(1, len(arguments)) if arguments[at - 1].startswith("--")]
    if places:
        at = chance.choice(places)
        arguments[at] = chance.choice(PLACES if arguments[at - 1] in WRITES_TO else VALUES)


def override(chance: random.Random, arguments: list[str]) -> None:
    key = chance.choice([each for each in KEYS if each not in LEFT_ALONE])
    values = PLACES if key == "output" else PATHS if chance.random() < 0.3 else VALUES
    arguments.append(f"{key}{chance.choice(['=', '=', '=', '=', '', '=='])}{chance.choice(values)}")


def option(chance: random.Random, arguments: list[str]) -> None:
    name = chance.choice(OPTIONS)
    arguments.append(name)
    if chance.random() < 0.7:
        arguments.append(chance.choice(PLACES if name in WRITES_TO else [*VALUES, *PATHS]))


def dropped(chance: random.Random, arguments: list[str]) -> None:
    if len(arguments) > 1:
        del arguments[chance.randrange(1, len(arguments))]


def repeated(chance: random.Random, arguments: list[str]) -> None:
    arguments.append(chance.choice(arguments))


# --- changes of files ------------------------------------------------------------------------------------------------

RUN_FILES = ["run.yaml", "environment.json", "events.jsonl", "report.json", "checkpoints"]
FILES = {
    "evaluate": ["run.yaml", "linear.py", STEP],
    "replay": [f"runs/run/{name}" for name in RUN_FILES],
    "report": [f"runs/run/{name}" for name in RUN_FILES],
    "data": ["talks.yaml", "talks.json", "dataset_info.json", "talks.json", "linear.py"],
    "import": ["accelerate.yaml", "ds.json", "factory.yaml", "arguments.json", "xtuner.py", "run.yaml"],
    "checkpoint inspect": [STEP, "runs/run/checkpoints", "runs/run"],
    "checkpoint verify": [STEP, "runs/run/checkpoints", "runs/run"],
    "checkpoint convert": [STEP, "exported", "dcp", "run.yaml", "linear.py"],
}
FILES |= {verb: [*FILES["evaluate"], "runs/run/events.jsonl", "runs/run/report.json"] for verb in ("train", "predict")}
FILES |= {verb: ["run.yaml", "linear.py"] for verb in ("compare", "prove", "launch")}


def damaged(chance: random.Random, arguments: list[str]) -> tuple[str, str]:
    verb = " ".join(arguments[:2]) if arguments[0] == "checkpoint" else arguments[0]
    file = chance.choice(FILES.get(verb, ["run.yaml"]))
    return f"{file}#{chance.randrange(1000)}", chance.choice(list(DAMAGES))


def _texts(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))


def _in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _typed(path: Path) -> None:
    """Numbers become texts, texts numbers."""
    text = path.read_text(encoding="utf-8", errors="replace")
    _texts(path, text.replace(": 8", ": eight").replace(': "', ': 1, "').replace(": {", ": [").replace(".0", ".x"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "less its last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "with rubbish in": lambda path: path.write_bytes(path.read_bytes()[:20] + bytes(range(256))),
    "with other types in": _typed,
    "not UTF-8": lambda path: path.write_bytes(path.read_bytes() + b"\xff\xfe"),
    "with a NUL in": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "made null": lambda path: path.write_text("null"),
    "made a list": lambda path: path.write_text("[1, 2]"),
    "made a number": lambda path: path.write_text("5"),
    "made a text": lambda path: path.write_text('"text"'),
    "made an object": lambda path: path.write_text('{"a": 1}'),
    "made deep": lambda path: path.write_text("[" * 50_000 + "]" * 50_000),
    "made a bomb": lambda path: path.write_text(Path("bomb.yaml").read_text()),
    "made a folder": _in_place(Path.mkdir),
    "made a pipe": _in_place(os.mkfifo),
    "made a loop": _in_place(lambda path: path.symlink_to(path.name)),
    "made a link to nothing": _in_place(lambda path: path.symlink_to("nowhere")),
    "made endless": _in_place(lambda path: path.symlink_to("/dev/zero")),
    "made nothing": _in_place(lambda path: path.symlink_to("/dev/null")),
    "exchanged": lambda path: shutil.copyfile("binary.bin", path),
}


def apply(found: Mutant) -> None:
    """Damage the files, in the current folder. A folder's share is one of its files."""
    for named, what in found.damage:
        file, _, lot = named.partition("#")
        path = Path(file)
        if path.is_dir():
            below = sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
            if not below:
                continue
            path = below[int(lot) % len(below)]
        if path.is_file() and not path.is_symlink():  # not damaged already
            DAMAGES[what](path)


Change = Callable[[random.Random, list[str]], object]
COMMON: list[Change] = [another_path, another_path, another_value, option, dropped, repeated]
CHANGES: dict[str, list[Change]] = {
    verb: [*COMMON, *([override] * 4 if verb in TAKES_OVERRIDES else []), *([damaged] * 4 if verb in FILES else [])]
    for verb in VERBS
}
