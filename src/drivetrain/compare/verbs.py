"""`drivetrain compare` and `drivetrain report`: run cells, and write table, files and page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.compare.cell_process import Limits
from drivetrain.compare.files import as_csv, as_json, as_markdown
from drivetrain.compare.kept import PLOTS, ROWS, remember, remembered
from drivetrain.compare.live import MatrixView
from drivetrain.compare.matrix import Job, Matrix, build_matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.compare.page import as_html
from drivetrain.compare.plots import as_png, as_svg, plots
from drivetrain.compare.result_rows import Comparison, Result, Row
from drivetrain.compare.runner import Again, run_matrix
from drivetrain.config.axes import Axis, choices, read_axes
from drivetrain.config.files import read_yaml
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.packages import require
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, problem
from drivetrain.runtime import environment
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders

if TYPE_CHECKING:
    from drivetrain.compare.on_ray import RayCells


def compare(
    run_file: Path,
    arguments: Sequence[str],
    root: Path | None,
    num_seeds: int,
    job: Job,
    limits: Limits,
    again: Again,
    trust: bool = False,
    ray: str | None = None,
) -> tuple[Comparison, str]:
    """Runs the matrix and writes its files into the folder. Raises UserError before any cell starts.

    Returns also a sentence that names their place, and that of an earlier comparison's files. ray: the address of a Ray
    cluster over which the cells are spread; None runs them here, one after another.
    """
    fixed, axes = read_axes(arguments)
    read_yaml(run_file)  # a file that cannot be read is no cell's fault
    folder = root or Path("runs") / f"{run_file.stem}-compare"
    with _cluster(ray) as cluster:
        machine, versions, described = _here() if cluster is None else cluster.described(_runs(run_file, fixed, axes))
        matrix = build_matrix(run_file, fixed, axes, num_seeds, job, folder, machine, versions)
        if cluster is not None:
            matrix = cluster.fitted(matrix, limits)
        for cell in matrix.cells:
            if cell.run is not None:
                refuse_code_of_folders(cell.run, run_file, trust)
        if all(cell.run is None for cell in matrix.cells):
            raise UserError(list(dict.fromkeys(found for cell in matrix.cells for found in cell.problems)))
        with MatrixView(matrix) as view:
            outcomes = run_matrix(matrix, folder, limits, again, view, cluster)
    comparison = _comparison(matrix, outcomes, described)
    aside = remember(comparison, folder)
    write_files(comparison, folder)
    earlier = "" if aside is None else f"; those of the earlier comparison, which has other rows, are in {aside} now"
    return comparison, f"page, tables and plots in {folder}{earlier}"


def _cluster(ray: str | None) -> AbstractContextManager[RayCells | None]:
    if ray is None:
        return nullcontext()
    require("--ray", ["ray"])
    from drivetrain.compare.on_ray import on_ray

    return on_ray(ray)


def _here() -> tuple[Machine, dict[str, str], dict[str, Any]]:
    machine = detect()
    return machine, environment.versions(), environment.describe(machine)


def _runs(run_file: Path, fixed: Sequence[str], axes: Sequence[Axis]) -> list[RunConfig]:
    """Returns the runs of all cells whose settings can be read, before any machine is known."""
    loaded = (load(run_file, choice.overrides)[0] for choice in choices(fixed, axes))
    return [run for run in loaded if run is not None]


def report(folders: Sequence[Path]) -> Comparison:
    """Puts runs and comparisons of different times side by side: a row a run, the rows of each comparison."""
    rows: list[Row] = []
    problems: list[Problem] = []
    for folder in folders:
        if (folder / ROWS).is_file():
            rows += [_relabelled(row, folder) for row in remembered(folder)]
        elif RunFolder(folder).report.is_file():
            outcome = Outcome(key="", status="completed")
            rows.append(Row(folder.name, (), (Result.read(outcome, folder),)))
        else:
            why = f"{folder} holds neither a finished run nor a comparison"
            problems.append(Problem(str(folder), why, "give folders that train or compare left"))
    if problems:
        raise UserError(problems)
    return Comparison("side by side", "report", (), tuple(_distinct(rows)))


def write_report(comparison: Comparison, folder: Path) -> None:
    """Writes the files of runs side by side. Raises UserError if a comparison's own are in the folder."""
    if (folder / ROWS).exists():
        why = f"{folder} holds a comparison, whose page this one would replace"
        raise problem("--output", why, "give another folder")
    write_files(comparison, folder)


def write_files(comparison: Comparison, folder: Path) -> None:
    """Writes comparison.csv, .json, .md, .html and the plots as PNG and SVG."""
    try:
        (folder / PLOTS).mkdir(parents=True, exist_ok=True)
        drawn = plots(comparison)
        for name, text in (("csv", as_csv), ("json", as_json), ("md", as_markdown)):
            write_whole(folder / f"comparison.{name}", text(comparison))
        write_whole(folder / "comparison.html", as_html(comparison, drawn))
        for name, figure in drawn.items():
            write_whole(folder / PLOTS / f"{name}.svg", as_svg(figure))
            (folder / PLOTS / f"{name}.png").write_bytes(as_png(figure))
    except OSError as error:
        raise problem("--output", f"{folder} cannot be written: {error.strerror}", "give another folder") from None


def _comparison(matrix: Matrix, outcomes: Sequence[Outcome], machine: dict[str, Any]) -> Comparison:
    width = len(matrix.cells) // matrix.num_seeds
    results = [Result.read(outcome, cell.run_folder) for cell, outcome in zip(matrix.cells, outcomes, strict=True)]
    rows = tuple(
        Row(cell.choice.label, cell.choice.values, tuple(results[number::width]))
        for number, cell in enumerate(matrix.cells[:width])
    )
    return Comparison(matrix.name, matrix.job.verb, tuple(axis.key for axis in matrix.axes), rows, machine)


def _relabelled(row: Row, folder: Path) -> Row:
    return Row(f"{folder.name}: {row.label}", (), row.results)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Returns distinct names: folders of one name get a number."""
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        seen[row.label] = seen.get(row.label, 0) + 1
        number = seen[row.label]
        found.append(row if number == 1 else Row(f"{row.label} ({number})", row.values, row.results))
    return found
