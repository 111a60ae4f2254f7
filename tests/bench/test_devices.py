"""The page of devices is the catalogue's."""

from __future__ import annotations

from bench.devices import PAGE, page
from drivetrain.plan.catalogue import catalogue


def test_the_page_is_made_from_the_catalogue() -> None:
    assert PAGE.read_text() == page(catalogue()), "run python bench/devices.py"
