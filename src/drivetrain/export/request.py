"""The request for an export, and everything that is wrong with it, before any work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from drivetrain.config.adapter import PROMPTS
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from drivetrain.export.formats import ELSEWHERE, FORMATS, OWN, PACKAGES, ROUNDED, Format, kind_of
from drivetrain.models.preprocessing import NORM_KEY
from drivetrain.runtime.new_folder import refuse_taken

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DEFAULT_SHARD = 5 * 10**9


@dataclass(frozen=True)
class Request:
    """format: a name of FORMATS. dtype, quantise: None for the format's first and for none. samples: how many of the
    evaluation data are compared. accept: whether an export over the bound is kept."""

    format: str
    output: Path
    checkpoint: str = "best"
    dtype: str | None = None
    quantise: str | None = None
    shard_size: str | None = None
    samples: int = 16
    accept: bool = False
    license: str | None = None
    trust: bool = False

    @property
    def of(self) -> Format:
        return FORMATS[self.format]

    @property
    def numbers(self) -> str:
        """The name of the numbers that the weights are kept in: fp32, bf16, int8, q4_0, ..."""
        return self.quantise or self.dtype or self.of.dtypes[0]

    @property
    def shard_bytes(self) -> int:
        return DEFAULT_SHARD if self.shard_size is None else _bytes(self.shard_size) or DEFAULT_SHARD


def check(request: Request, run: RunConfig) -> None:
    """Raises UserError with every problem that can be seen without the model."""
    problems = [*_of_format(request, run), *_of_output(request)]
    if problems:
        raise UserError(problems)


def _of_format(request: Request, run: RunConfig) -> Iterator[Problem]:
    named = {"--to": request.format, "--quantise": request.quantise}
    refused = [(option, each) for option, each in named.items() if each in ELSEWHERE]
    for option, each in refused:
        yield Problem(option, f"{each} is not written here", ELSEWHERE[each])
    if request.format not in FORMATS:
        if request.format not in ELSEWHERE:
            yield Problem("--to", f"{request.format} was given", f"give {', '.join(FORMATS)}")
        return
    chosen, kind = request.of, kind_of(run.workload)
    if kind in chosen.refuses:
        others = ", ".join(
            name for name, each in FORMATS.items() if kind not in each.refuses and not each.needs_adapter
        )
        yield Problem("--to", f"{request.format} takes no {kind}: {chosen.refuses[kind]}", f"give {others}")
    model_type = run.workload.known_config.get("model_type")
    if chosen.model_types and kind not in chosen.refuses and model_type not in (None, *chosen.model_types):
        known = ", ".join(chosen.model_types)
        yield Problem("--to", f"the model is a {model_type}, and {request.format} takes {known}", "give transformers")
    yield from _of_numbers(request)
    yield from _of_adapters(request, run)
    if request.shard_size is not None and not chosen.takes_shards:
        yield Problem("--shard-size", f"{request.format} is written in one piece", "leave it out")
    elif request.shard_size is not None and _bytes(request.shard_size) is None:
        yield Problem("--shard-size", f"{request.shard_size} was given", "give a size such as 2GB or 500MB")
    yield from _of_packages(request)


def _of_packages(request: Request) -> Iterator[Problem]:
    chosen = request.of
    wants = [(package, "--to", request.format) for package in chosen.packages]
    if request.quantise in ROUNDED and request.quantise in chosen.quantised:
        wants.append((ROUNDED[request.quantise], "--quantise", request.quantise))
    for package, option, value in wants:
        if find_spec(package) is None:
            why = f"{value} needs {package}, which is not installed"
            yield Problem(option, why, f"pip install 'drivetrain[{PACKAGES[package]}]'")


def _of_numbers(request: Request) -> Iterator[Problem]:
    chosen = request.of
    if request.dtype is not None and request.dtype not in chosen.dtypes:
        yield Problem("--dtype", f"{request.format} does not hold {request.dtype}", f"give {', '.join(chosen.dtypes)}")
    if request.quantise is None or request.quantise in ELSEWHERE:
        return
    if request.quantise not in chosen.quantised:
        fix = f"give {', '.join(chosen.quantised)}" if chosen.quantised else "leave it out"
        yield Problem("--quantise", f"{request.format} does not hold {request.quantise}", fix)


def _of_adapters(request: Request, run: RunConfig) -> Iterator[Problem]:
    prompts = [each.method for each in run.adapter or () if each.method in PROMPTS]
    if request.of.needs_adapter and run.adapter is None:
        yield Problem(
            "--to", f"{request.format} holds adapters, and the run trained the whole model", "give transformers"
        )
    elif prompts and not request.of.needs_adapter:
        why = f"the run trained {prompts[0]}, virtual tokens that are no part of any weight"
        yield Problem("--to", why, "give peft")
    is_whole = request.format == "transformers" and kind_of(run.workload) != OWN
    if is_whole and getattr(run.workload.described_model, "norm", None) == "group":
        why = f"the model's BatchNorm was replaced by GroupNorm ({NORM_KEY}), which plain Transformers does not build"
        yield Problem("--to", why, "load it by drivetrain.load")


def _of_output(request: Request) -> Iterator[Problem]:
    try:
        refuse_taken(request.output)
    except UserError as error:
        yield from error.problems


def _bytes(size: str) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)", size.strip().upper())
    count = 0 if found is None else int(float(found[1]) * UNITS[found[2]])
    return count or None
