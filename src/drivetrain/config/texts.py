"""What is written in a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def texts(tree: Any) -> Iterator[str]:
    """Of JSON-able values within one another, those that are texts, paths among them; not the keys."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(inner)
