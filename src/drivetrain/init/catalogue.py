"""The recipes that come with the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from drivetrain.errors import problem

LONG = 100  # characters: a sentence of more is cut where it goes into detail
FOLDER = Path(str(files("drivetrain").joinpath("recipes")))


def recipes() -> Iterator[tuple[str, str]]:
    """Yields name and first sentence of each recipe, in alphabetical order."""
    for file in sorted(FOLDER.glob("*.yaml")):
        yield file.stem, _first_sentence(file.read_text(encoding="utf-8"))


def recipe(name: str) -> Path:
    """Returns the file of a recipe. Raises UserError with the nearest name if there is none."""
    file = FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    if file.parent != FOLDER or not file.is_file():  # a name with .. or / is none
        known = [each for each, _ in recipes()]
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise problem("RECIPE", f"there is no recipe {name}", fix)
    return file


def _first_sentence(text: str) -> str:
    """Returns the comment that a recipe begins with, up to its first full stop."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    sentence, _, _ = " ".join(lines).partition(". ")
    sentence = sentence.partition(" (pip ")[0].removesuffix(".").removesuffix(":")
    return sentence if len(sentence) <= LONG else sentence.partition(": ")[0].partition(", which")[0]
