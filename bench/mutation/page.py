"""The records as a page: the score, where it comes from, and every survivor with its change and judgement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.mutation.records import Record
from bench.tables import markdown_table

TARGET, MOST_EQUIVALENT = 0.95, 0.1
LATER = "By a test that was added since, or by one that the first trial had no time for."


def page(records: Mapping[str, Record], equivalent: Mapping[str, str], setting: str) -> str:
    """Markdown."""
    parts = ["# Mutation testing", setting, _score(records, equivalent)]
    parts += [_table("operator", lambda record: record.operator, records, equivalent)]
    parts += [_table("folder", _folder, records, equivalent)]
    alive = [record for record in records.values() if not record.killed]
    parts += ["## Survivors", *(_change(each, _open(each)) for each in alive if each.key not in equivalent)]
    parts += [
        "## Judged equivalent",
        *(_change(each, equivalent[each.key]) for each in alive if each.key in equivalent),
    ]
    added = [record for record in records.values() if record.killed and record.first == "survived"]
    parts += ["## Killed at a later trial", LATER, *(_change(each, f"Killed by `{each.by}`.") for each in added)]
    return "\n\n".join(parts) + "\n"


def _score(records: Mapping[str, Record], equivalent: Mapping[str, str]) -> str:
    judged = [record for record in records.values() if record.key not in equivalent]
    at_first = [record for record in judged if record.first != "survived"]
    killed = [record for record in judged if record.killed]
    hung = [record for record in killed if record.result == "hung"]
    cut_short = [record for record in judged if not record.killed and not record.whole]
    seconds = sum(record.seconds for record in records.values())
    share, killed_share = _share(len(equivalent), len(records)), _share(len(killed), len(judged))
    return (
        f"{len(records)} mutations tried; {len(equivalent)} judged equivalent ({share}; at most {MOST_EQUIVALENT:.0%} "
        f"may be). Of the other {len(judged)}, {len(killed)} are killed: **{killed_share}**; the aim is {TARGET:.0%}. "
        f"A time limit killed {len(hung)} of them. For {len(cut_short)} of the survivors time ran out before all "
        "rounds of tests were run: a test further off may kill them (`AGAIN=survived`). At the first trial, which time "
        f"may have ended, and before tests were added for survivors it was {_share(len(at_first), len(judged))}: what "
        "mutations not yet tried would show at least. A trial took "
        f"{seconds / max(len(records), 1):.0f} s on average."
    )


def _table(
    head: str, group: Callable[[Record], str], records: Mapping[str, Record], equivalent: Mapping[str, str]
) -> str:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records.values():
        groups[group(record)].append(record)
    rows = []
    for name, each in sorted(groups.items()):
        judged = [record for record in each if record.key not in equivalent]
        killed = sum(record.killed for record in judged)
        rows.append([name, *map(str, (len(each), len(each) - len(judged), killed)), _share(killed, len(judged))])
    return markdown_table([head, "tried", "equivalent", "killed", "share"], rows)


def _folder(record: Record) -> str:
    parts = Path(record.file).parts[2:]
    return parts[0] if len(parts) > 1 else "(root)"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _open(record: Record) -> str:
    return f"Open; passed {record.tests} tests" + ("." if record.whole else ", then time ran out.")


def _change(record: Record, judgement: str) -> str:
    """The statement in one line, and what in it becomes what."""
    lines = [f"  {record.statement}", f"- {_line(record.before)}", f"+ {_line(record.after)}"]
    head = f"`{record.key}` {record.file}, {record.scope or 'module'}: {record.operator}"
    return "\n".join([head, "", "```diff", *lines, "```", "", judgement])


def _line(text: str) -> str:
    return " ".join(text.split())
