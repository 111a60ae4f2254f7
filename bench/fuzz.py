"""Almost right command lines, counted by verb and exit code.

    python -m bench.fuzz
    python -m bench.fuzz --mutants 5000 --processes 0 --seed 7

Mutants of every verb's command lines (tests/fuzz/mutants.py): other paths, values, options and overrides, and files
that are cut off, of other types, exchanged, endless. Most run in this process, where several ranks, long trainings and
a comparison's cells are not started; some through the real command. A fault is a traceback, an exit code that is not
promised, a time-out, or a file of the user's that was changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.tables import machine_line, markdown_table, write
from tests.fuzz.mutants import VERBS, mutant
from tests.fuzz.performed import CODES, Answer, in_a_process, in_process
from tests.fuzz.place import furnish
from tests.fuzz.test_fuzz import IN_PROCESS, REAL, SEED

PAGE = Path(__file__).resolve().parent / "results" / "fuzz.md"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--mutants", type=int, default=IN_PROCESS, help="in this process")
    asked.add_argument("--processes", type=int, default=REAL, help="through the real command")
    asked.add_argument("--seed", type=int, default=SEED)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answers = answered(Path(folder), given.mutants, given.processes, given.seed)
    bad = [answer for answer in answers if answer.faults]
    for answer in bad:
        print(f"seed {given.seed}, {answer}\n", file=sys.stderr)
    write(PAGE, page(answers, given.mutants, given.processes, given.seed))
    sys.exit(1 if bad else 0)


def answered(root: Path, in_here: int, in_processes: int, seed: int) -> list[Answer]:
    template, before = root / "template", Path.cwd()
    template.mkdir()
    furnish(template)
    os.chdir(root)
    os.environ["HOME"] = str(root / "home")
    answers = [in_process(mutant(seed, each), template, root / "here") for each in range(in_here)]
    for each in range(in_here, in_here + in_processes):
        answers.append(in_a_process(mutant(seed, each, for_processes=True), template, root / "here"))
    os.chdir(before)
    return answers


def page(answers: list[Answer], in_here: int, in_processes: int, seed: int) -> str:
    codes = sorted(CODES)
    counts = Counter((answer.mutant.verb, answer.code) for answer in answers)
    bad = Counter(answer.mutant.verb for answer in answers if answer.faults)
    rows = []
    for verb in (*VERBS, "all"):
        of_code = [sum(counts[each, code] for each in VERBS if verb in (each, "all")) for code in codes]
        total = sum(number for (each, _), number in counts.items() if verb in (each, "all"))
        faults = bad.total() if verb == "all" else bad[verb]
        rows.append([verb, str(total), *map(str, of_code), str(faults)])
    assert __doc__ is not None
    about = __doc__.split("\n\n")[2].strip()
    made = f"Seed {seed}: {in_here} in one process, {in_processes} through the real command."
    table = markdown_table(["verb", "mutants", *(f"exit {code}" for code in codes), "faults"], rows)
    return f"# Fuzz: almost right command lines\n\n{about}\n\n{made}\n\n{machine_line()}\n\n{table}\n"


if __name__ == "__main__":
    main()
