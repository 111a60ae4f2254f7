"""Tables of reports, translations and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drivetrain.config.translation import Fate, Note
from drivetrain.tracking.quantities import flops_text, rate_text, set_text, size_text
from drivetrain.training.report import RunReport

FATES: dict[Fate, str] = {  # in the order of the table, with the name of each
    "mapped": "mapped",
    "changed": "[yellow]changed[/]",
    "passed": "passed on",
    "unneeded": "[dim]without need[/]",
    "later": "[yellow]still to come[/]",
    "refused": "[red]refused[/]",
}


def report_table(report: RunReport) -> Table:
    """Returns a table of one run, a line a fact."""
    table = Table(title=f"{report.name}: {report.status.replace('_', ' ')}", show_header=False)
    rows = {
        "precision": report.precision + (" (emulated)" if report.emulated else ""),
        "engine": _engine(report),
        "device": report.device,
        "parameters": _parameters(report.engaged),
        "steps": f"{report.steps:,} ({_epochs(report.epochs)}{report.samples:,} samples)",
        "skipped steps": str(report.skipped_steps),
        "time": seconds(report.seconds),
        f"of which{_since(report)}": ", ".join(
            f"{name} {seconds(value)}" for name, value in report.seconds_by_part.items()
        ),
        "restarts": _restarts(report),
        "samples/s": "" if report.samples_per_second is None else rate_text(report.samples_per_second, 1),
        "peak memory": _memory(report),
        "held": _held(report),
        "utilisation": _utilisation(report),
        "model FLOP/s": _flops(report),
        "sent a step": _sent(report),
        "stages wait": _waiting(report),
        **{name: f"{value:.4f}" for name, value in report.metrics.items()},
        "answers": report.answered,
        "chance": escape(report.chance),
        "planned": "" if report.planned is None else escape(report.planned.way),
        "departs from its plan": escape("\n".join(report.departures)),
        "mixture": escape("\n".join(map(set_text, report.mixture))),
        "checkpoint": report.checkpoint or "none",
        "best": ""
        if report.best is None
        else f"{report.best_checkpoint or 'not kept'} ({report.best['metric']} "
        f"{report.best['value']:.4f} at step {report.best['step']})",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _epochs(number: float) -> str:
    """Returns the epochs with a comma behind; empty for a stream, whose epochs are not counted."""
    return "1 epoch, " if number == 1 else f"{number:.4g} epochs, " if number else ""


def _utilisation(report: RunReport) -> str:
    mean, peak = (report.utilisation[key] for key in ("mean", "peak"))
    return "" if mean is None else f"mean {mean:.0%}, peak {peak:.0%}"


def _restarts(report: RunReport) -> str:
    """Returns the line of restarts, if there were any; without them the share is that of starting up."""
    if not report.restarts or report.effective_share is None:
        return ""
    return f"{len(report.restarts)}; {report.effective_share:.0%} of the time since the launch counts"


def _parameters(engaged: dict[str, Any]) -> str:
    trained, total = engaged["trained_parameters"], engaged["global_parameters"]
    share = f"trained: {trained:,} of {total:,} ({trained / total:.2%})"
    return f"{total:,}" if trained == total else share


def show_notes(notes: Sequence[tuple[str, Note]], console: Console) -> None:
    if console.is_terminal:
        console.print(notes_table(notes))
    else:
        console.file.writelines(f"{line}\n" for line in note_lines(notes))


def notes_table(notes: Sequence[tuple[str, Note]]) -> Table:
    """Returns what became of every key; keys with the same fate and reason share a row. notes: with the file of
    each."""
    files = ["file"] if len({file for file, _ in notes}) > 1 else []
    table = Table(*files, "", "key", "what became of it", box=None, pad_edge=False)
    for file, fate, keys, why in _note_rows(notes):
        table.add_row(*map(escape, [file][: len(files)]), FATES[fate], escape(keys), escape(why))
    return table


def note_lines(notes: Sequence[tuple[str, Note]]) -> list[str]:
    """Returns the notes for files and pipes: one line a row, as long as it is, its columns separated by tabs."""
    files = len({file for file, _ in notes}) > 1
    return [
        "\t".join([*([file] if files else []), Text.from_markup(FATES[fate]).plain, keys, " ".join(why.split())])
        for file, fate, keys, why in _note_rows(notes)
    ]


def _note_rows(notes: Sequence[tuple[str, Note]]) -> Iterator[tuple[str, Fate, str, str]]:
    for file in dict.fromkeys(file for file, _ in notes):
        for fate in FATES:
            rows: dict[str, list[str]] = {}
            for of, note in notes:
                if (of, note.fate) == (file, fate):
                    rows.setdefault(note.why, []).append(note.key)
            yield from ((file, fate, ", ".join(keys), why) for why, keys in rows.items())


def verdicts_table(verdicts: Sequence[tuple[str, bool | None, str]]) -> Table:
    """Returns a table that states for each promise whether it holds (None: it was not tested), and the evidence."""
    table = Table("promise", "", "what was seen", box=None, pad_edge=False)
    marks = {True: "[green]PASS[/]", False: "[bold red]FAIL[/]", None: "-"}
    for promise, holds, why in verdicts:
        table.add_row(promise, marks[holds], escape(why))
    return table


def _memory(report: RunReport) -> str:
    shown = ", ".join(f"{name} {size_text(value)}" for name, value in report.peak_memory.items())
    return shown + (" (of the rank that needs most)" if len(report.ranks) > 1 else "")


def _held(report: RunReport) -> str:
    """Returns the memory of each kind of tensor where only a part is trained, beside that of training everything."""
    held = report.ranks[0].get("held_bytes") if report.ranks else None
    if held is None or report.share_of_full_training is None:
        return ""
    shown = ", ".join(f"{name} {size_text(value)}" for name, value in held.items())
    return f"{shown} ({report.share_of_full_training:.0%} of what training all would hold)"


def _sent(report: RunReport) -> str:
    """Returns the traffic of the rank that sends most."""
    most = max(
        (rank.get("sent_bytes_per_step") or {} for rank in report.ranks), key=lambda s: sum(s.values()), default={}
    )
    shown = ", ".join(f"{kind.replace('_', '-')} {size_text(value)}" for kind, value in sorted(most.items()))
    return shown and f"{shown} (by the rank that sends most)"


def _waiting(report: RunReport) -> str:
    """Returns how long a pipeline's stages wait, as the mean over stages."""
    shares: dict[int, list[float]] = {}
    for rank in report.ranks:
        if rank.get("waiting_share") is not None:
            shares.setdefault(rank["stage"], []).append(rank["waiting_share"])
    if not shares:
        return ""
    least = report.ranks[0]["bubble"]
    shown = ", ".join(f"{sum(of) / len(of):.0%}" for _, of in sorted(shares.items()))
    return f"{shown} of each window" + (f" ({least:.0%} is the schedule's bubble)" if least is not None else "")


def _since(report: RunReport) -> str:
    """Returns since when the time is divided: a process knows its own alone."""
    return f" since step {report.first_step:,}" if report.first_step else ""


def _engine(report: RunReport) -> str:
    ranks = f", {len(report.ranks)} ranks" if len(report.ranks) > 1 else ""
    emulated = ", CPU emulation" if report.engaged.get("emulated") else ""
    return f"{report.engine} ({report.engaged.get('wrapper', '')}{ranks}{emulated})"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else f"{value / 60:.1f} min"


def _flops(report: RunReport) -> str:
    if report.flops_per_second is None:
        return ""
    share = "" if report.flops_share is None else f" ({report.flops_share:.0%} of the device's measured matmul rate)"
    why = f" ({report.why_no_flops_share})" if report.why_no_flops_share else share
    return f"{flops_text(report.flops_per_second)}{why}"
