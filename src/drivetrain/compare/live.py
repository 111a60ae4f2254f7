"""Shows the matrix filling: a live table on a terminal, a line a cell elsewhere. Writes to stderr."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drivetrain.compare.cell_process import Glance
from drivetrain.compare.matrix import Cell, Matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.tracking.jsonl import parsed
from drivetrain.tracking.quantities import rate_text

SHOWN_AROUND = 6  # cells before and after the running one: a matrix may be longer than the screen
TAIL_BYTES = 4096  # of the running cell's events


class MatrixView:
    """Receives the runner's events. `with` keeps the live table on the screen."""

    def __init__(self, matrix: Matrix, console: Console | None = None) -> None:
        self._matrix = matrix
        self._console = console or Console(stderr=True, highlight=False)
        self._numbers = {id(cell): number for number, cell in enumerate(matrix.cells)}
        self._outcomes: dict[int, tuple[Outcome, bool]] = {}
        self._running: dict[int, Glance | None] = {}  # by the number of the cell
        self._live: Live | None = None

    def __enter__(self) -> MatrixView:
        for note in self._matrix.notes:
            self._console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
        if self._console.is_terminal:
            self._live = Live(self._drawn(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, cell: Cell) -> None:
        self._running[self._number(cell)] = None
        self._refresh(f"cell {self._place(cell)}  {_name(cell)}")

    def glanced(self, cell: Cell, glance: Glance) -> None:
        self._running[self._number(cell)] = glance
        self._refresh()

    def lost(self, cell: Cell, why: str) -> None:
        self._running.pop(self._number(cell), None)
        line = f"cell {self._place(cell)}  {_name(cell)}: its machine was lost ({why}); it is started again"
        self._console.print(escape(line), soft_wrap=True)
        self._refresh()

    def ended(self, cell: Cell, outcome: Outcome, kept: bool) -> None:
        self._running.pop(self._number(cell), None)
        self._outcomes[self._number(cell)] = (outcome, kept)
        self._refresh(f"cell {self._place(cell)}  {_name(cell)}: {_described(outcome, kept)}")

    def _number(self, cell: Cell) -> int:
        return self._numbers[id(cell)]

    def _place(self, cell: Cell) -> str:
        return f"{self._number(cell) + 1}/{len(self._matrix.cells)}"

    def _refresh(self, line: str | None = None) -> None:
        if self._live is not None:
            self._live.update(self._drawn(), refresh=True)
        elif line is not None:
            self._console.print(escape(line), soft_wrap=True)

    def _drawn(self) -> Group:
        done, cells = len(self._outcomes), self._matrix.cells
        here = next((number for number in range(len(cells)) if number not in self._outcomes), len(cells))
        first = max(0, min(here - SHOWN_AROUND, len(cells) - 2 * SHOWN_AROUND))
        table = Table("cell", "seed", "", box=None, pad_edge=False)
        for number in range(first, min(len(cells), first + 2 * SHOWN_AROUND)):
            cell = cells[number]
            table.add_row(escape(cell.choice.label), str(cell.seed), self._state(number))
        states = Counter(outcome.status for outcome, _ in self._outcomes.values())
        counted = ", ".join(f"{number} {status}" for status, number in states.items())
        return Group(table, Text(f"{done} of {len(cells)} cells" + (f": {counted}" if counted else "")))

    def _state(self, number: int) -> str:
        if number in self._outcomes:
            outcome, kept = self._outcomes[number]
            colour = "green" if outcome.status == "completed" else "red"
            return f"[{colour}]{escape(_described(outcome, kept))}[/]"
        if number not in self._running:
            return "[dim]waiting[/]"
        glance = self._running[number]
        if glance is None:
            return "[bold]starting[/]"
        return (
            f"[bold]{_progress(self._matrix.cells[number].run_folder) or 'starting'}[/]  {glance.seconds:.0f} s  "
            f"resident {glance.resident_bytes / 2**20:,.0f} MiB  processor {glance.utilisation:.0%}{_devices()}"
        )


def _name(cell: Cell) -> str:
    return f"{cell.choice.label} (seed {cell.seed})" if cell.run is not None else cell.choice.label


def _described(outcome: Outcome, kept: bool) -> str:
    if outcome.status == "completed":
        return "there already" if kept else f"completed in {outcome.seconds:.1f} s"
    return f"{outcome.status}: {outcome.reason}"


def _progress(run_folder: Path) -> str:
    """Returns the newest point of the running cell's curve, from the end of its events."""
    try:
        with (run_folder / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # the last may be half-written
    except OSError:
        return ""
    for line in reversed(lines):
        event = parsed(line)
        if event is not None and event["event"] == "step":
            rate = rate_text(event["samples_per_second"])
            return f"step {event['step']}  loss {event['loss']:.4f}  {rate} samples/s"
    return ""


def _devices() -> str:
    """Returns memory and utilisation of each GPU, if there are any."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return "".join(
            f"  GPU {i}: {pynvml.nvmlDeviceGetUtilizationRates(handle).gpu}% "
            f"{pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20:,.0f} MiB"
            for i, handle in enumerate(handles)
        )
    except Exception:  # no driver, no permission: NVML has an error class for each
        return ""
