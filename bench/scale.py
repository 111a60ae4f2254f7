"""Measures the work of rank 0 that grows with the number of ranks, from 8 to 10,000 of them, on this machine alone.

    python -m bench.scale [part ...]

The other ranks are fake: what they would send (an outline of a checkpoint, a row of a hang report, a text in the store)
is made beforehand, and the project's own functions then do rank 0's part with it. Seconds are processor time of this
process, so that other work on the machine does not count; the store's clients are part of it where `clients` says so.
Bytes are what rank 0 receives or writes. A part whose seconds or bytes grow faster than linearly ends the bench with
exit code 1.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.scale_parts import PARTS
from bench.tables import machine_line, markdown_table, write

RESULTS = Path(__file__).resolve().parent / "results" / "scale.md"
RANKS = (8, 64, 512, 4096, 10_000)
FITTED = 512  # ranks from which on the growth is fitted: below, what is constant hides it
LINEAR = 1.25  # the largest exponent that passes: n log n fits 1.1 here, n^1.5 1.5; measured times scatter by 0.1
LEAST_SECONDS, LEAST_BYTES = 0.002, 1000  # below, at the most ranks, nothing is fitted: the clock and a header
LEAST_REPEATS, REPEATS, ENOUGH_SECONDS = 3, 9, 3.0


@dataclass(frozen=True)
class Measured:
    ranks: int
    seconds: float
    bytes: int


def main() -> None:
    found = {}
    for name in sys.argv[1:] or PARTS:
        found[name] = [measured(PARTS[name].make, ranks) for ranks in RANKS]
        for each in found[name]:
            print(f"{name}: {each}", flush=True)
    wrong = too_steep(found)
    if set(found) == set(PARTS):
        write(RESULTS, page(found, wrong))
    if wrong:
        raise SystemExit("\n".join(wrong))


def measured(make: Callable[[int, Path], Callable[[], int]], ranks: int) -> Measured:
    """Returns the least of some repeats, each with a fresh preparation, which is not timed."""
    took, size, spent = list[float](), 0, time.monotonic()
    while len(took) < LEAST_REPEATS or (len(took) < REPEATS and time.monotonic() - spent < ENOUGH_SECONDS):
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            work = make(ranks, Path(folder))
            gc.collect()
            gc.freeze()  # what was prepared is other ranks' memory
            start = time.process_time()
            size = work()
            took.append(time.process_time() - start)
            gc.unfreeze()
    return Measured(ranks, min(took), size)


def exponent(ranks: Sequence[int], values: Sequence[float]) -> float:
    """Returns the slope of log(values) over log(ranks), by least squares: 1 for what is linear, 2 for a square."""
    return float(np.polyfit(np.log(ranks), np.log(values), 1)[0])


def exponents(row: Sequence[Measured]) -> tuple[float | None, float | None]:
    """Returns how seconds and bytes grow; None where they are too small to tell."""
    large = [each for each in row if each.ranks >= FITTED]
    at = [each.ranks for each in large]
    seconds = exponent(at, [each.seconds for each in large]) if large[-1].seconds >= LEAST_SECONDS else None
    sizes = exponent(at, [each.bytes for each in large]) if large[-1].bytes >= LEAST_BYTES else None
    return seconds, sizes


def too_steep(found: dict[str, list[Measured]]) -> list[str]:
    """Returns a sentence for each part that grows faster than linearly."""
    return [
        f"{name}: {what} grow with the number of ranks to the power {power:.2f}; at most {LINEAR} is allowed"
        for name, row in found.items()
        for what, power in zip(("seconds", "bytes"), exponents(row), strict=True)
        if power is not None and power > LINEAR
    ]


# --- the page --------------------------------------------------------------------------------------------------------


def page(found: dict[str, list[Measured]], wrong: Sequence[str]) -> str:
    head = ["rank 0's work", *(f"{ranks:,} ranks" for ranks in RANKS), "grows as ranks to the"]
    seconds = [
        [name, *(_seconds(each.seconds) for each in row), _power(exponents(row)[0])] for name, row in found.items()
    ]
    sizes = [[name, *(_size(each.bytes) for each in row), _power(exponents(row)[1])] for name, row in found.items()]
    linear = [
        f"- **{name}**: {_seconds(row[-1].seconds)} and {_size(row[-1].bytes)} at {RANKS[-1]:,} ranks. "
        f"{PARTS[name].what}"
        for name, row in found.items()
        if any(power is not None and power > 0.5 for power in exponents(row))
    ]
    others = [f"- **{name}**: {PARTS[name].what}" for name in found if not any(name in line for line in linear)]
    return (
        "\n\n".join(
            [
                "# Rank 0 at 10,000 ranks",
                "`python -m bench.scale`, with fake ranks: their messages are made beforehand, and the project's "
                "functions do rank 0's part. No device is in these figures; the store is asked over loopback.",
                machine_line(),
                "\n".join(wrong)
                or f"Nothing grows faster than linearly (fitted from {FITTED} ranks on; {LINEAR} passes).",
                "## Processor seconds",
                markdown_table(head, seconds),
                "## Bytes that rank 0 receives or writes",
                markdown_table(head, sizes),
                "## What grows linearly at rank 0",
                "\n".join(linear),
                "## What hardly grows",
                "\n".join(others),
            ]
        )
        + "\n"
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def _size(value: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value} B"


def _power(value: float | None) -> str:
    return "(too small)" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
