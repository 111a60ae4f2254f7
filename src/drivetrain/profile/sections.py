"""A profile as tables of texts: the screen and the page show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.plan.rows import WORDS, gib
from drivetrain.plan.timeline import PARTS, MemoryPart
from drivetrain.profile.breakdown import NO_MODULE

MILLISECOND = 1e-3
LEAST_SHARE = 0.002  # of a step: shorter operators and modules are left out
NAMES = {  # of the loop's parts
    "data": "waiting for samples",
    "answers": "drawing and rewarding answers",
    "forward": "forward pass",
    "backward": "backward pass",
    "forward_backward": "forward and backward pass",
    "optimizer": "optimizer's update",
    "statistics": "statistics of the batch",
    "samples": "samples for the eye",
    "between": "between the parts",
}


@dataclass(frozen=True)
class Section:
    """A table. explained: a sentence about its columns."""

    title: str
    explained: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def sections(profile: dict[str, Any]) -> Iterator[Section]:
    """Yields the tables of a profile as profile.json holds it, the most telling one first."""
    slowest = max(profile["ranks"], key=lambda rank: rank["step"])
    yield _summary(profile)
    yield _parts(profile["ranks"])
    yield _modules(slowest)
    yield _operators(slowest)
    if profile["planned_memory"] is not None:
        yield _memory(profile["planned_memory"]["phases"])
    if profile["suggestions"]:
        yield _suggestions(profile)


def _summary(profile: dict[str, Any]) -> Section:
    plain, profiled = profile["plain_seconds"], profile["profiled_seconds"]
    rows = [
        ("a step without the profiler", milliseconds(plain)),
        ("a step with it", f"{milliseconds(profiled)} ({profiled / plain - 1:+.0%})"),
        ("samples a second without it", f"{profile['samples'] / plain:,.1f}"),
    ]
    where = f"{profile['ranks_number']} ranks" if profile["ranks_number"] > 1 else "one process"
    title = f"{profile['engine']}, {profile['precision']}, {where} on {profile['device']}: {profile['steps']} steps"
    return Section(title, "Seconds are those of the slowest rank.", ("", "time"), rows)


def _parts(ranks: list[dict[str, Any]]) -> Section:
    names = shown_parts(ranks)
    columns = ("part", *(f"rank {number}" for number in range(len(ranks))), "share of the slowest")
    slowest = max(range(len(ranks)), key=lambda number: ranks[number]["step"])
    step = ranks[slowest]["step"]
    by_part = {NAMES.get(name, name): [rank["parts"].get(name, 0.0) for rank in ranks] for name in names}
    outside = [rank["step"] - sum(rank["parts"].values()) for rank in ranks]
    rows = [_row(name, seconds, slowest, step) for name, seconds in {**by_part, NAMES["between"]: outside}.items()]
    for title, key in (
        ("computing", "computing"),
        ("exchanging", "exchange"),
        ("exchanging only", "exposed_exchange"),
        ("neither: Python", "idle"),
    ):
        if any(rank[key] for rank in ranks):
            rows.append(_row(f"· {title}", [rank[key] for rank in ranks], slowest, step))
    explained = (
        "The loop's parts, one after another. The lines with a dot cut the same step in another way: what computes "
        "while it exchanges is hidden; exchanging only is what could be hidden."
    )
    return Section("where a step's time goes", explained, columns, rows)


def shown_parts(ranks: list[dict[str, Any]]) -> list[str]:
    """Returns the loop's parts that take a share of a step worth showing, in their order."""
    names = dict.fromkeys(name for rank in ranks for name in rank["parts"])
    least = LEAST_SHARE * max(rank["step"] for rank in ranks)
    return [name for name in names if any(rank["parts"].get(name, 0.0) >= least for rank in ranks)]


def _row(name: str, seconds: list[float], slowest: int, step: float) -> tuple[str, ...]:
    """slowest: the rank whose step lasts `step` seconds, of which the share is."""
    return name, *map(milliseconds, seconds), f"{seconds[slowest] / step if step else 0.0:.0%}"


def _modules(rank: dict[str, Any]) -> Section:
    rows = [
        (each["name"], *(milliseconds(each[key]) for key in ("seconds", "forward", "backward")), _share(each, rank))
        for each in rank["modules"]
        if each["seconds"] >= LEAST_SHARE * rank["step"]
    ]
    explained = (
        "Seconds of the processor in the operators that each module calls itself, without those of the modules within "
        f"it; * stands for the numbers of blocks alike. {NO_MODULE}: the loss, the optimizer, the loop. Shares, here "
        "and below, are of the slowest rank's step; exchange and Python take the rest."
    )
    if rank["on_gpu"]:
        explained += " They are the processor's, which starts kernels; the kernels' own time is in the table below."
    return Section("by module", explained, ("module", "time", "forward", "backward", "share"), rows)


def _operators(rank: dict[str, Any]) -> Section:
    rows = [
        (each["name"], milliseconds(each["seconds"]), f"{each['calls']:.0f}", _share(each, rank))
        for each in rank["operators"]
        if each["seconds"] >= LEAST_SHARE * rank["step"]
    ]
    title = "by kernel of the GPU" if rank["on_gpu"] else "by operator"
    return Section(title, "Without what an operator calls.", ("name", "time", "calls", "share"), rows)


def _memory(phases: dict[str, dict[MemoryPart, int]]) -> Section:
    """phases: what is alive where each part of the step holds most."""
    shown = [part for part in PARTS if any(part in parts for parts in phases.values())]
    columns = ("part of the step", "memory", *(WORDS.get(part, part) for part in shown))
    rows = []
    for phase, parts in phases.items():
        sizes = (gib(parts.get(part, 0)) for part in shown)
        rows.append((NAMES.get(phase, phase), gib(sum(parts.values())), *sizes))
    explained = (
        "Tensors alive at the fullest moment of each part of the step, on the fullest rank: planned by a trace, not "
        "measured. A backward pass is often fullest at its beginning, before there are gradients. Temporaries are what "
        "is made and freed within a part."
    )
    return Section("memory by category, as planned", explained, columns, rows)


def _suggestions(profile: dict[str, Any]) -> Section:
    tried = {tuple(each["overrides"]): each for each in profile["trials"]}
    rows = []
    for each in profile["suggestions"]:
        most = "at most " if each["basis"] == "profile" else ""
        changes = "changes the result" if each["changes_result"] else "same result"
        trial = tried.get(tuple(each["overrides"]))
        rows.append(
            (
                " ".join(each["overrides"]),
                each["why"],
                f"{most}{each['gain']:.0%}",
                changes,
                *((_gave(trial, profile["plain_seconds"]),) if tried else ()),
            )
        )
    columns = ("override", "why", "should save", "result", *(("saved",) if tried else ()))
    explained = "By the profile, at most what it shows; else by the plan of this machine."
    return Section("what to try next", explained, columns, rows)


def _gave(trial: dict[str, Any] | None, plain: float) -> str:
    if trial is None:
        return "not tried"
    if trial["plain_seconds"] is None:
        return f"failed: {trial['failure']}"
    return f"{1 - trial['plain_seconds'] / plain:.0%}"


def _share(each: dict[str, Any], rank: dict[str, Any]) -> str:
    return f"{each['seconds'] / rank['step']:.1%}"


def milliseconds(seconds: float) -> str:
    """Returns a duration for a table."""
    return f"{seconds / MILLISECOND:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
