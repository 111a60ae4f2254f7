"""Mutation testing: a seeded sample of small changes to src, each of which the nearest tests should notice.

    python -m bench.mutants                       twenty more of the sample
    python -m bench.mutants --number 50 --workers 2
    python -m bench.mutants --again survived      those that survived, once more
    python -m bench.mutants --again 1a2b3c4d5e --first 1a2b3c4d5e=tests/test_a.py::test_b
                                                  this one, and that test before the others

Results accumulate in bench/results/mutants.jsonl, the page beside it is made from them, and bench/mutants.toml holds
why a survivor was judged equivalent. Nothing is done to the working tree: tests run in a copy.

Why a tool of our own (looked at in November 2026):
- cosmic-ray 8.7 changes files on disk and runs any command, which suits tests that start processes; but it runs one
  command for all mutations and names a mutation by its place in the file, so that results end with the next edit. It
  knows no statement removal, no dropped argument and no forced condition, and swaps each operator for eleven others.
- mutmut 3.8 names the mutation in the environment, which reaches other processes; but it calls every function through
  a switch, which changes what torch traces, pickles and inspects, leaves module and class bodies as they are, and must
  run the whole suite first.
"""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.mutation import page, records
from bench.mutation.nearest import Nearest
from bench.mutation.operators import Mutation
from bench.mutation.records import Record
from bench.mutation.sample import of_project, ordered
from bench.mutation.tree import Tree
from bench.mutation.trial import tried

PROJECT = Path(__file__).resolve().parents[1]
SEED = 2026


def main(arguments: Sequence[str] | None = None, project: Path = PROJECT) -> None:
    parser = argparse.ArgumentParser(description="mutation testing")
    parser.add_argument("--number", type=int, help="further mutations of the sample to try: 20, or with --again none")
    parser.add_argument("--again", nargs="+", default=[], metavar="KEY", help="try these once more, or all 'survived'")
    parser.add_argument("--first", nargs="+", default=[], metavar="KEY=TEST", help="this test of a mutation at first")
    parser.add_argument("--workers", type=int, default=1, help="mutations tried at once")
    parser.add_argument("--seconds", type=float, default=240.0, help="of passing tests, the mirror's apart")
    parser.add_argument("--test-seconds", type=float, default=240.0, help="that one test may take")
    parser.add_argument("--nice", type=int, default=10, help="how far tests step back behind others' processes")
    parser.add_argument("--seed", type=int, default=SEED, help="another seed is another sample")
    options = parser.parse_args(arguments)

    path = project / "bench" / "results" / "mutants.jsonl"
    judgements = project / "bench" / "mutants.toml"
    sample = {mutation.key: mutation for mutation in ordered(project, of_project(project), options.seed)}
    known = records.current(records.read(path), sample)
    number = (0 if options.again else 20) if options.number is None else options.number
    chosen = _chosen(sample, known, options.again, number, records.equivalents(judgements, known))
    first: dict[str, list[str]] = {}
    for key, _, test in (each.partition("=") for each in options.first):
        first.setdefault(key, []).append(test)
    for record in _trials(project, chosen, options, first):
        before = known.get(record.key)
        known[record.key] = replace(record, first=before.first) if before else record
        records.write(path, known.values())
        print(f"{record.result:8} {record.key} {record.seconds:4.0f} s  {record.file}: {record.operator}", flush=True)
    records.write(path, known.values())
    setting = (
        f"Written by `make mutants` (`bench/mutants.py`), seed {options.seed}; {len(sample):,} mutations are possible."
    )
    equivalent = records.equivalents(judgements, known)
    path.with_suffix(".md").write_text(page.page(known, equivalent, setting))
    killed = sum(record.killed for record in known.values())
    print(f"{len(known)} tried, {killed} killed, {len(equivalent)} judged equivalent: {path.with_suffix('.md')}")


def _chosen(
    sample: dict[str, Mutation], known: dict[str, Record], again: Sequence[str], number: int, equivalent: dict[str, str]
) -> list[Mutation]:
    """Those asked for by name, and so many more of the sample. SystemExit for a name that no mutation has."""
    survived = [key for key, record in known.items() if not record.killed and key not in equivalent]
    keys = [key for name in again for key in (survived if name == "survived" else [name])]
    if missing := [key for key in keys if key not in sample]:
        sys.exit(f"no such mutation: {', '.join(missing)}; bench/results/mutants.jsonl has their keys")
    more = [key for key in sample if key not in known and key not in keys][:number]
    return [sample[key] for key in [*keys, *more]]


def _trials(
    project: Path, chosen: Sequence[Mutation], options: argparse.Namespace, first: dict[str, list[str]]
) -> Iterator[Record]:
    """Records as trials end. Each worker has its own copy of the project."""
    nearest = Nearest(project)
    trees: queue.Queue[Tree] = queue.Queue()
    made: list[Tree] = []

    def one(mutation: Mutation) -> Record:
        tree = trees.get()
        try:
            return tried(mutation, tree, nearest, options.seconds, first.get(mutation.key, ()))
        finally:
            trees.put(tree)

    with ExitStack() as stack:
        for _ in range(min(options.workers, len(chosen))):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            made.append(Tree(project, Path(folder), options.test_seconds, options.nice))
            trees.put(made[-1])
        pool = stack.enter_context(ThreadPoolExecutor(max(options.workers, 1)))
        try:
            for done in as_completed([pool.submit(one, mutation) for mutation in chosen]):
                yield done.result()
        finally:  # all done, or Ctrl-C: what runs ends, what waits does not begin
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in made:
                tree.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies and what runs in them go too
    main()
