"""`drivetrain.compare`: the same run along any axes, as a table."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.settings import TAGS, plain
from drivetrain.compare import verbs
from drivetrain.compare.advice import advice, chosen
from drivetrain.compare.cell_process import Limits
from drivetrain.compare.columns import Column
from drivetrain.compare.figures import Figures
from drivetrain.compare.matrix import Job
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.compare.runner import Again
from drivetrain.errors import problem
from drivetrain.inference.remote_places import run_file_here


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """The result of `compare`: a row for each combination. `folder` has the page, the plots and the runs."""

    comparison: Comparison
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One mapping a row: a key for each axis, "status", "reason", and a number for each column (None if there is
        none), times in seconds and memory in bytes."""
        return [self._row(row) for row in self.comparison.rows]

    @property
    def advice(self) -> str:
        """Returns what to choose and why, or that nothing can be recommended."""
        return advice(self.comparison)

    @property
    def best(self) -> dict[str, Any] | None:
        """The row that `advice` chooses, or keeps where several are level; None where the runs decide nothing."""
        row = chosen(self.comparison)
        return None if row is None else self._row(row)

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    def _row(self, row: Row) -> dict[str, Any]:
        named = dict(zip(self.comparison.head, row.values or (row.label,), strict=True))
        figures = {column.key: column.value(row) for column in self._columns}
        reason = {"reason": row.reason} if row.reason else {}
        return {**named, "status": row.status, **reason, **figures}

    @property
    def _columns(self) -> list[Column]:
        return Figures(self.comparison).columns

    def _texts(self) -> Iterator[list[str]]:
        """Yields head and rows as texts."""
        columns = self._columns
        yield [*self.comparison.head, "status", *(column.name for column in columns)]
        for row in self.comparison.rows:
            yield [*row.names, row.status, *(column.text(row) for column in columns)]

    def __repr__(self) -> str:
        lines = list(self._texts())
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in table), *self._reasons(), self.advice])

    def _repr_html_(self) -> str:
        head, *rows = ([html.escape(text) for text in line] for line in self._texts())
        cells = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
        below = "".join(f"<p>{html.escape(line)}</p>" for line in [*self._reasons(), self.advice])
        return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>{below}"

    def _reasons(self) -> list[str]:
        return [f"{row.label}: {row.reason}" for row in self.comparison.rows if row.reason]


def compare(
    run_file: str | os.PathLike[str],
    *,
    seeds: int = 1,
    output: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    retry: bool = False,
    timeout: float | None = None,
    memory: float | None = None,
    trust: bool = False,
    ray: str | None = None,
    set: Mapping[str, Any] | None = None,
    **axes: Any,
) -> ComparisonTable:
    """Trains a run file once for each combination, each in a process of its own, one after another but with `ray`.

    run_file: its path, or its address in a store.

    axes: keys of the run file. A list has a run for each of its values (precision=["fp32", "bf16-mixed"]), any other
    value holds for all; a value that is a list itself is written within one (betas=[[0.9, 0.95]]). A mapping stands for
    the keys within (optimizer={"lr": [1e-3, 3e-3]}), unless it names a kind (engine={"name": "mesh", "tp": 2}). set:
    keys with dots. seeds: runs of each combination. output: the folder, runs/<file>-compare if left out. fresh: run all
    again; retry: those that did not complete. timeout: seconds a run may take; memory: MiB.

    A run that fails is a row with its reason. Raises UserError where no combination can work.
    """
    with as_a_caller_reads_them():
        file = run_file_here(os.fspath(run_file), "run_file")
        where = Path("runs") / f"{file.stem}-compare" if output is None else Path(output)
        arguments = [*_arguments({**axes, **(set or {})})]
        limits = Limits(timeout, None if memory is None else int(memory * 2**20))
        again = Again.ALL if fresh else Again.FAILED if retry else Again.UNFINISHED
        comparison, _ = verbs.compare(file, arguments, where, seeds, Job("train", None), limits, again, trust, ray)
    return ComparisonTable(comparison, where.absolute())


def _arguments(axes: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yields the axes as the command line writes them."""
    for key, value in axes.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and not set(TAGS) & value.keys():
            yield from _arguments(value, f"{name}.")
            continue
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise problem(name, "an empty list was given", "give at least one value")
        yield f"{name}={','.join(_text(each) for each in values)}"


def _text(value: Any) -> str:
    """Returns a value as YAML, whose commas and quotes no other reader takes apart."""
    found = plain(value)
    is_word = isinstance(found, str) and found.replace("-", "").replace("_", "").isalnum() and found[0].isalpha()
    if is_word and found.lower() not in ("true", "false", "null", "yes", "no", "on", "off"):
        return str(found)
    return json.dumps(found, ensure_ascii=False)
