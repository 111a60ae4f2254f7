"""The picture of the layers is the code's: its folders exist, and none imports one that stands above it."""

from __future__ import annotations

import pytest

from bench.architecture import FOLDER, LAYERS, THEMES, picture
from tests.test_layers import FILES, LEVEL, SOURCE, imported, relative

ROWS = {name: number for number, (_, boxes) in enumerate(LAYERS) for names, *_ in boxes for name in names.split(", ")}


@pytest.mark.parametrize("theme", THEMES)
def test_the_picture_in_docs_is_the_one_that_is_drawn(theme: str) -> None:
    assert (FOLDER / f"architecture-{theme}.svg").read_text() == picture(theme), "python -m bench.architecture"


def test_each_folder_in_the_picture_is_a_folder_of_the_package() -> None:
    assert set(ROWS) <= {path.name for path in SOURCE.iterdir()} & set(LEVEL)


def test_no_folder_imports_one_that_is_drawn_above_it() -> None:
    for file in FILES:
        own = relative(file).split("/")[0]
        if own not in ROWS or relative(file).startswith("checkpoint/convert"):
            continue
        others = {module.split(".")[1] for module in imported(file) if module.startswith("drivetrain.")}
        above = sorted(other for other in others if ROWS.get(other, ROWS[own]) < ROWS[own])
        assert not above, f"{relative(file)} imports {above}"
