"""A plan as a folder: a page that loads nothing from a server, the chart of questions, and all rows as JSON."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from markupsafe import Markup

from drivetrain.errors import counted, last_line, problem
from drivetrain.plan.columns import columns, held_beside, shown_rows
from drivetrain.plan.page_bars import bars, memory_over_a_step
from drivetrain.plan.page_chart import chart
from drivetrain.plan.page_template import rendered
from drivetrain.plan.questions import FIGURES, path_of
from drivetrain.plan.rows import Plan
from drivetrain.plan.timeline import NOTHING, Timeline
from drivetrain.runtime.atomic_file import write_whole, writing
from drivetrain.runtime.strict_json import dumps

MOST_BARS = 12
THEN = "plan again, into a folder that can be written"


def write_page(plan: Plan, folder: Path, name: str, command: str) -> None:
    """Writes plan.html, path.svg and plan.json. Raises RunError if there is no room.

    name: of the run. command: `drivetrain train run.yaml ...`, which takes the choice; "" where there is none.
    """
    with writing(folder, THEN):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.html", as_html(plan, name, command))
        write_whole(folder / "path.svg", chart(path_of(plan)) + "\n")
        write_whole(folder / "plan.json", dumps(plan.as_object(), indent=2) + "\n")


def prepare(folder: Path) -> None:
    """Makes the folder of a page, before a plan that takes minutes. Raises UserError where nothing can be written
    there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{folder} cannot be a folder with a page: {last_line(error)}"
        raise problem("--output", why, "give a folder that is new, or one that can be written") from None


def as_html(plan: Plan, name: str, command: str) -> str:
    """Returns the page."""
    path, shown = path_of(plan), columns(plan)
    rows, left_out = shown_rows(plan)
    return rendered(
        "drivetrain.plan",
        name=name,
        machine=plan.machine,
        model=_model(plan),
        looked=f"{counted(len(plan.rows), 'way')}, {counted(plan.traces, 'trace')} in {plan.seconds:.0f} s.",
        outcome=path.outcome,
        command=command,
        notes=[*plan.notes, *plan.offers],
        figures=FIGURES,
        chart=Markup(chart(path)),
        columns=shown,
        rows=[{"chosen": row is plan.choice, "texts": [column.text(plan, row) for column in shown]} for row in rows],
        beside=held_beside(plan),
        left_out=left_out,
        bars=Markup(bars([row for row in rows if row.costs is not None][:MOST_BARS])),
        timeline=Markup(memory_over_a_step(_timeline(plan))),
    )


def _model(plan: Plan) -> str:
    known = next((row.costs for row in plan.rows if row.costs is not None), plan.base)
    return "" if known is None else f"{counted(known.trained_parameters, 'trained parameter')}"


def _timeline(plan: Plan) -> Timeline:
    return NOTHING if plan.choice is None or plan.choice.costs is None else plan.choice.costs.memory.timeline.thinned()
