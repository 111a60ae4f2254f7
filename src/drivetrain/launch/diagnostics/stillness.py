"""Measures how long nothing has changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any


class Stillness:
    """Seconds since values changed. Gaps between looks do not count: this process was stopped as well."""

    MOST_UNSEEN = 10.0

    def __init__(self, now: float) -> None:
        self._looked = self._since = now
        self._values: dict[Hashable, tuple[object, float]] = {}

    def look(self, now: float, values: Mapping[Any, object]) -> float:
        """Returns the seconds since the last change of any."""
        if now - self._looked > self.MOST_UNSEEN:
            self._since = now
            self._values = {key: (value, now) for key, (value, _) in self._values.items()}
        for key, value in values.items():
            if key not in self._values or self._values[key][0] != value:
                self._values[key] = value, now
                self._since = now
        self._looked = now
        return now - self._since

    def of(self, key: Hashable, now: float) -> float:
        return now - self._values[key][1] if key in self._values else 0.0
