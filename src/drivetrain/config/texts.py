"""Finds all texts in a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def texts(tree: Any) -> Iterator[str]:
    """Yields the texts within nested JSON-able values, paths among them; keys are left out."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(inner)
