"""The record of mutations that were tried, a line of JSON each, and the judgements on survivors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.mutation.operators import Mutation


@dataclass(frozen=True)
class Record:
    """`result`: killed, hung (killed by a time limit) or survived. `first`: the result of the first trial, before any
    test was added for it. `by`: the test that killed it. `tests`: how many were begun. `whole`: False where time ran
    out before all rounds were run."""

    key: str
    file: str
    scope: str
    operator: str
    statement: str
    before: str
    after: str
    result: str
    first: str
    by: str | None
    tests: int
    seconds: float
    whole: bool

    @classmethod
    def of(
        cls, mutation: Mutation, result: str, by: str | None, tests: int, seconds: float, whole: bool = True
    ) -> Record:
        return cls(
            mutation.key, mutation.file, mutation.scope, mutation.operator, mutation.statement, mutation.before,
            mutation.after, result, result, by, tests, round(seconds, 1), whole,
        )  # fmt: skip

    @property
    def killed(self) -> bool:
        return self.result != "survived"


def read(path: Path) -> dict[str, Record]:
    """Key → record; nothing where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record.key: record for record in (Record(**json.loads(line)) for line in lines)}


def write(path: Path, records: Collection[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records))
    aside.replace(path)


def current(records: dict[str, Record], keys: Collection[str]) -> dict[str, Record]:
    """Without the stale ones, whose statement is no longer in the source."""
    return {key: record for key, record in records.items() if key in keys}


def equivalents(path: Path, records: dict[str, Record]) -> dict[str, str]:
    """Key → why no test can tell the mutated program from the original.

    ValueError for a judgement without a reason, or of a mutation that a test killed all the same.
    """
    judged = tomllib.loads(path.read_text())["equivalent"] if path.exists() else {}
    for key, reason in judged.items():
        if not reason.strip():
            raise ValueError(f"{path}: {key} has no reason; say why no test can tell it from the original")
        if key in records and records[key].killed:
            raise ValueError(f"{path}: {key} is judged equivalent, but {records[key].by} kills it; take the line out")
    return {key: reason for key, reason in judged.items() if key in records}
