"""The account of how the rows of a language model's data sets became samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain.data.bad_rows import BadRow
from drivetrain.errors import problem


@dataclass
class Account:
    """The fate of the rows of one data set. for_evaluation: of those meant for it."""

    name: str
    rows: int | None  # None: of a stream that was not counted
    bad: list[BadRow] = field(default_factory=list)
    samples: int = 0
    held_out: int = 0  # samples for evaluation, taken out of the training data
    truncated: int = 0
    too_long: int = 0
    without_target: int = 0
    alike: int = 0  # pairs whose sides do not differ within length
    paired: tuple[int, int] | None = None  # usable rows of several answers, and the pairs that they make
    for_evaluation: bool = False


def check_any_left(accounts: Sequence[Account], field: str) -> None:
    """Raises UserError if no sample is left of these data sets, with the fate of their rows."""
    if any(account.samples for account in accounts):
        return
    rows, names = sum(account.rows or 0 for account in accounts), ", ".join(account.name for account in accounts)
    held_out = sum(account.held_out for account in accounts)
    lost = ", ".join(filter(None, [lost_rows(accounts), f"{held_out} held out" if held_out else ""]))
    lost = lost or "their texts are too short"
    reasons = [f"{bad.where}: {bad.why}" for account in accounts for bad in account.bad[:1]]
    why = f"no sample is left of the {rows} rows of {names} ({lost})"
    raise problem(field, "; ".join([why, *reasons[:1]]), "correct the rows, raise workload.data.length, or give more")


def lost_rows(accounts: Sequence[Account]) -> str:
    """Returns why so many rows, or samples of them, are not trained on; empty if none are lost."""
    lost = {
        "cannot be used": sum(len(account.bad) for account in accounts),
        "too long": sum(account.too_long for account in accounts),
        "without a target within length": sum(account.without_target for account in accounts),
        "alike on both sides within length": sum(account.alike for account in accounts),
    }
    return ", ".join(f"{count:,} {what}" for what, count in lost.items() if count)
