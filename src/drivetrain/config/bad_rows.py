"""The share of a data set's rows that may be left out because they cannot be used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

MOST_DROPPED = 0.05  # share of a data set's rows that "drop" leaves out; more is seldom meant
BadRows = Literal["error", "drop"] | Annotated[float, Field(gt=0, le=1, strict=True)]


def most_dropped(bad_rows: BadRows) -> float:
    """Returns a field for the largest share of a data set's rows that may be left out."""
    if isinstance(bad_rows, float):
        return bad_rows
    return MOST_DROPPED if bad_rows == "drop" else 0.0
