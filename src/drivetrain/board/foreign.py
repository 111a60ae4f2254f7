"""Finds Python and foreign files in run files of operators, who may name neither: the user who started the board would
run the one and read the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from drivetrain.board.places import Places
from drivetrain.config.load import resolve_key
from drivetrain.config.run import RunConfig
from drivetrain.data.language.registry import read_registry
from drivetrain.errors import Problem, UserError
from drivetrain.trust.named_code import named_code

FIX = "ask the administrator, who can start the board with --operators-code"
PLAIN_VALUES = re.compile(r"[\w,+-]*|[\d.,e+-]*")  # words and numbers: neither paths nor import paths
REGISTRY = "workload.data.registry"


def named_places(values: dict[str, Any], places: Places) -> list[Problem]:
    """Returns problems of the values of a run file, before anything reads a file that it names: places, and the file of
    a module."""
    workload = values.get("workload")
    module = workload.get("path") if isinstance(workload, dict) else None
    code = [Problem("workload.path", f"names Python code, {module}", FIX)] if isinstance(module, str) else []
    return code + places.problems({key: value for key, value in values.items() if key not in ("name", "output")})


def foreign_problems(run: RunConfig, places: Places) -> list[Problem]:
    """Returns problems of a run: Python that it names, and places that the files it names lead to."""
    problems = [Problem(each.field, f"names Python code, {each.name}", FIX) for each in named_code(run)]
    problems += places.problems(run.model_dump(mode="json", exclude={"name", "output"}))
    return problems + places.problems({REGISTRY: list(_registered(run))})


def axes_problems(axes: Sequence[str], places: Places) -> list[Problem]:
    """Returns problems of the axes of a plan, KEY=VALUE,VALUE: they change the run after its file was checked."""
    problems = []
    for axis in axes:
        key, _, values = axis.partition("=")
        with suppress(UserError):  # for unknown keys, which the plan refuses
            key = ".".join(resolve_key(key))
        if key.split(".")[0] in ("workload", "output") or PLAIN_VALUES.fullmatch(values) is None:
            why = f"{axis} changes the model or the data, or has values that are neither words nor numbers"
            problems.append(Problem("axes", why, f"change the run file instead; or {FIX}"))
        problems += places.problems({key: values.split(",")})
    return problems


def _registered(run: RunConfig) -> Iterator[str]:
    """Yields the files behind names that the run takes from a registry of data sets."""
    if run.workload.registry is None:
        return
    with suppress(UserError):  # for a registry that cannot be read, which the run refuses
        registry = read_registry(str(run.workload.registry), REGISTRY)
        yield from (registry[path].path for path, _ in run.workload.sources if path in registry)
