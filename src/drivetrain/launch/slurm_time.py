"""Writes time limits as Slurm takes them: its own formats as they are, and plain ones (12h, 1d12h) converted.

Formats of `sbatch --time`: https://slurm.schedmd.com/sbatch.html#OPT_time
"""

from __future__ import annotations

import re

from drivetrain.errors import problem, shown

# minutes, minutes:seconds, hours:minutes:seconds; days-hours, days-hours:minutes, days-hours:minutes:seconds
OWN = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
PLAIN = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
WORDS = {
    **dict.fromkeys(("week", "weeks"), "w"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
}
EACH = (7 * 86_400, 86_400, 3_600, 60, 1)  # seconds of the units of PLAIN
MOST_DIGITS = 9
FIX = "write --time 12h, 90m, 2d or 1d12h, or as Slurm does: minutes, HH:MM:SS, or D-HH:MM:SS as in --time 1-12:00:00"


def slurm_time(text: str, field: str = "--time") -> str:
    """Returns a time limit as Slurm writes it: 12h becomes 12:00:00, 1d12h 1-12:00:00. Raises UserError for another
    text, which Slurm would refuse, or take for another time."""
    given = text.strip()
    if max(map(len, re.findall(r"\d+", given)), default=0) > MOST_DIGITS:
        raise problem(field, f"{shown(text)} is longer than any job", FIX)
    if OWN.fullmatch(given):
        return given
    found = PLAIN.fullmatch(_with_units(given))
    if not given or found is None:
        raise problem(field, f"{shown(text)} is no time limit", FIX)
    seconds = sum(int(count or 0) * each for count, each in zip(found.groups(), EACH, strict=True))
    if not seconds:
        raise problem(field, f"{shown(text)} leaves the job no time", FIX)
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def seconds_of(limit: str) -> int | None:
    """Returns the seconds of a limit as Slurm writes it; None for no limit, which 0 stands for too."""
    if not limit[0].isdecimal():
        return None
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # of one number alone: minutes; of two: minutes and seconds; behind days: hours first
    hours, minutes, seconds = [*parts, 0, 0][:3] if dash or len(parts) == 3 else [0, *parts, 0][:3]
    return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or None


def _with_units(text: str) -> str:
    """Returns a text with each unit as a letter, without spaces: "1 day 12 hours" becomes 1d12h. Other words stay."""
    return re.sub(r"\s*([a-z]+)\s*", lambda word: WORDS.get(word[1], word[1]), text.lower())
