"""The templates of pages that stand by themselves: a plan's and a profile's, which share their style."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup


def rendered(package: str, **values: Any) -> str:
    """Returns a package's page.html with these values. Its `style` is what all pages share; rules of its own follow
    it."""
    template = files(package).joinpath("page.html").read_text(encoding="utf-8")
    style = files("drivetrain.plan").joinpath("page_style.css").read_text(encoding="utf-8").rstrip()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(style=Markup(style), **values)
