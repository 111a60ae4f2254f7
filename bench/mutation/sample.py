"""The order in which mutations are tried: drawn by chance, fixed by a seed, and little moved by edits.

A file has the weight of its lines, shared by its statements, and a statement's share by its mutations; else long
tables of constants would take most of the sample. Every mutation draws its rank by itself, from the seed and its key
(Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006): so the first N are a weighted sample
without replacement, the next N continue it, and an edit moves the ranks of its own statement alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from pathlib import Path

from bench.mutation.operators import Mutation, mutations


def of_project(root: Path) -> dict[str, list[Mutation]]:
    """File (relative to `root`) → its mutations, for every file of root/src."""
    files = sorted((root / "src").rglob("*.py"))
    return {
        file.relative_to(root).as_posix(): mutations(file.relative_to(root).as_posix(), file.read_text())
        for file in files
    }


def ordered(root: Path, found: dict[str, list[Mutation]], seed: int) -> list[Mutation]:
    """All mutations, those to be tried first in front."""
    ranks: dict[Mutation, float] = {}
    for file, each in found.items():
        statements: dict[tuple[str, str], list[Mutation]] = defaultdict(list)
        for mutation in each:
            statements[mutation.scope, mutation.statement].append(mutation)
        lines = len((root / file).read_text().splitlines())
        for alike in statements.values():
            weight = lines / len(statements) / len(alike)
            ranks |= {mutation: -math.log(_draw(seed, mutation.key)) / weight for mutation in alike}
    return sorted(ranks, key=ranks.__getitem__)


def _draw(seed: int, key: str) -> float:
    """A number above 0 and up to 1."""
    return (int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest()[:13], 16) + 1) / 16**13
