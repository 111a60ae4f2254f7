"""Reports ranks that do not go on: a row for each place where they stand, and which of them the others wait for."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drivetrain.launch.diagnostics.process_state import Standing
from drivetrain.runtime.heartbeat import Pulse

# waits: it beats. silent: it runs and does not beat, since a call holds Python's lock
State = Literal["waits", "silent", "stopped", "traced", "disk", "gone"]
STATES: dict[State, str] = {
    "waits": "waits",
    "silent": "holds Python's lock",
    "stopped": "stopped (T)",
    "traced": "stopped by a debugger (t)",
    "disk": "waits for a disk (D)",
    "gone": "gone",
}
_BLAMED: tuple[State, ...] = ("gone", "stopped", "traced", "disk", "silent")
WIDTH = 160
FEW = 4  # ranks of one place whose processes and samples are listed
MOST_RANGES = 24  # of ranks, in a cell


@dataclass(frozen=True)
class Row:
    """One rank, as its launching process sees it."""

    pulse: Pulse
    host: str
    state: State
    seconds: float  # since something went on
    standing: Standing = field(default_factory=Standing)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Row:
        return cls(**{**found, "pulse": Pulse(**found["pulse"]), "standing": Standing.of(found["standing"])})

    @property
    def rank(self) -> int:
        return self.pulse.rank


def blame(rows: Sequence[Row]) -> str:
    """Returns one sentence: which rank keeps the others waiting, as far as can be seen."""
    for state in _BLAMED:
        found = [row for row in rows if row.state == state]
        if found:
            return _of_state(state, found)
    behind = _behind(rows)
    if behind is not None:
        return behind
    places = Counter(row.standing.place for row in rows)
    (common, most), *others = places.most_common()
    if not others:
        together = " in the same place" if len(rows) > 1 else ""
        return f"{ranks(rows)} wait{_s(rows)}{together}{_in(rows[0])}"
    if most > others[0][1]:
        odd, rest = _split(rows, lambda row: row.standing.place != common)
        others_wait = f"{ranks(rest)} wait{_s(rest)}{_in(rest[0])}"
        return f"{ranks(odd)} {_are(odd)} not where the others are: {_each(odd)}; {others_wait}"
    return f"the ranks are not in the same place: {_each(rows)}"


def _of_state(state: State, found: Sequence[Row]) -> str:
    what = {
        "gone": "ended without an error",
        "stopped": f"{_are(found)} stopped by a signal (SIGSTOP)",
        "traced": f"{_are(found)} stopped by a debugger",
        "disk": f"wait{_s(found)} for a disk or a file system",
        "silent": f"{_are(found)} in a call that holds Python's lock",
    }[state]
    why = "by an exit of its own, or by the kernel because memory ran out"
    ended = f" ({why}{last_sizes([row.pulse for row in found])})" if state == "gone" else ""
    return f"{ranks(found)} {what}: {_each(found)}{ended}"


def last_sizes(pulses: Sequence[Pulse]) -> str:
    """Returns the last known size of each process, to end a sentence with; "" where none is known."""
    sizes = [f"{pulse.resident / 2**30:.1f} GiB" for pulse in pulses if pulse.resident]
    return f"; last resident size: {', '.join(sizes)}" if sizes else ""


def _behind(rows: Sequence[Row]) -> str | None:
    """Returns ranks that have not reached a collective which others wait in, by the numbers of torch's record."""
    members: dict[str, list[Row]] = {}  # of each group, those that have begun one of its collectives
    for row in rows:
        for group, begun in row.standing.begun.items():
            if begun > 0:
                members.setdefault(group, []).append(row)
    late_for: dict[tuple[str, int], tuple[list[Row], dict[str, int]]] = {}  # thousands may wait in the same one
    for row in rows:
        waits_for = row.standing.waits_for
        if waits_for is None:
            continue
        group, number = waits_for.group, waits_for.number
        if (group, number) not in late_for:
            late = [each for each in members.get(group, ()) if each.standing.begun[group] < number]
            late_for[group, number] = late, _wanted(late)
        late, wanted = late_for[group, number]
        # a late rank that waits in turn for this one leaves unknown which of the two went wrong
        if late and all(row.standing.begun.get(other, 0) >= newest for other, newest in wanted.items()):
            others = [each for each in rows if each.standing.place == row.standing.place]
            whose = f"{ranks(others)} wait{_s(others)} in{_at(row)}"
            return f"{ranks(late)} {_have(late)} not come to the {waits_for} that {whose}: {_each(late)}"
    return None


def _wanted(rows: Iterable[Row]) -> dict[str, int]:
    """Returns the newest collective of each group that one of these ranks waits in."""
    found: dict[str, int] = {}
    for each in (row.standing.waits_for for row in rows):
        if each is not None:
            found[each.group] = max(each.number, found.get(each.group, 0))
    return found


def _split(rows: Sequence[Row], is_first: Any) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if is_first(row)], [row for row in rows if not is_first(row)]


def _each(rows: Sequence[Row]) -> str:
    reported = []
    for row in rows[:4]:
        who = f"process {row.pulse.process} on {row.host}"
        reported.append(f"{who if len(rows) == 1 else f'rank {row.rank} ({who})'}, in {row.pulse.where}{_in(row)}")
        reported += row.standing.children
    return "; ".join(reported)


def _in(row: Row) -> str:
    waits_in = f" in {row.standing.waits_in}" if row.standing.waits_in else ""
    return f"{waits_in}{_at(row)}"


def _at(row: Row) -> str:
    return f" at {row.standing.own}" if row.standing.own else ""


def ranks(rows: Sequence[Row], most: int = 8) -> str:
    """Returns "rank 3", or "ranks 0-63, 65 and 9 more" where there are more than so many ranges."""
    found = _ranges(sorted(row.rank for row in rows))
    left = sum(last - first + 1 for first, last in found[most:])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found[:most])
    return f"rank{'s' if len(rows) > 1 else ''} {shown}" + (f" and {left} more" if left else "")


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and last of each run of three or more consecutive numbers, and each other number twice."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    pairs = ([(run[0], run[-1])] if len(run) > 2 else [(each, each) for each in run] for run in runs)
    return [pair for each in pairs for pair in each]


def _are(rows: Sequence[Row]) -> str:
    return "are" if len(rows) > 1 else "is"


def _have(rows: Sequence[Row]) -> str:
    return "have" if len(rows) > 1 else "has"


def _s(rows: Sequence[Row]) -> str:
    return "" if len(rows) > 1 else "s"


def table(rows: Sequence[Row]) -> str:
    """Returns a table of which ranks wait where, as text: a row for each place, with all ranks that stand there."""
    drawn = Table(show_lines=True)
    for name in ("ranks", "process", "state", "where", "samples of the batch", "waits in", "at", "innermost", "still"):
        drawn.add_column(name, overflow="fold", justify="right" if name in ("ranks", "still") else "left")
    for group in _alike(rows, _place):
        first, found = group[0], group[0].standing
        numbers = ranks(group, MOST_RANGES).partition(" ")[2]
        cells = [numbers, _processes(group), STATES[first.state], first.pulse.where, _samples(group)]
        cells += [found.waits_in, found.own, found.inner, _still(group)]
        drawn.add_row(*(Text(cell) for cell in cells))
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(drawn)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _alike(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    """Returns the rows of each key, in the order of their first ones."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _place(row: Row) -> Hashable:
    found = row.standing
    return row.state, row.pulse.where, found.waits_in, found.own, found.inner


def _processes(group: Sequence[Row]) -> str:
    if len(group) <= FEW:
        return "\n".join(f"{row.pulse.process} on {row.host}" for row in group)
    hosts = len({row.host for row in group})
    return f"{len(group):,} on {f'{hosts:,} machines' if hosts > 1 else group[0].host}"


def _samples(group: Sequence[Row]) -> str:
    """Returns the first samples of each rank's batch, a line a rank; those of many ranks would hide the places."""
    if len(group) > FEW:
        return ""
    lines = []
    for pulse in (row.pulse for row in group):
        more = f", … ({pulse.batch_size})" if pulse.batch_size > len(pulse.batch) else ""
        lines.append(", ".join(map(str, pulse.batch)) + more)
    return "\n".join(lines)


def _still(group: Sequence[Row]) -> str:
    shortest, longest = (f"{chosen(row.seconds for row in group):.0f}" for chosen in (min, max))
    return f"{longest} s" if shortest == longest else f"{shortest} to {longest} s"


def in_full(rows: Sequence[Row]) -> str:
    """Returns the table, for each place its stacks and all collectives under way, and the process of each rank."""
    reported = [blame(rows), "", table(rows)]
    for group in _alike(rows, lambda row: (_place(row), *row.standing.pending, *row.standing.children, _stacks(row))):
        first = group[0]
        reported += [f"{ranks(group, len(group))}, {STATES[first.state]}, in {first.pulse.where}"]
        reported += [f"under way: {each}" for each in first.standing.pending]
        reported += [*first.standing.children, _stacks(first), ""]
    reported += [f"rank {row.rank}: process {row.pulse.process} on {row.host}" for row in rows]
    return "\n".join(reported)


def _stacks(row: Row) -> str:
    return row.standing.stacks or "it did not answer with its stack"
