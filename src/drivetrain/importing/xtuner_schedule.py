"""Translates mmengine's param_scheduler: a warm-up, then a shape. Both count iterations or epochs."""

from __future__ import annotations

from typing import Any

from drivetrain.config.translation import fated
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.translated_file import shown

SHAPES = {"CosineAnnealingLR": "cosine", "LinearLR": "linear"}
NEGLIGIBLE = 0.05  # a warm-up that starts below this share of the rate is the one from 0


def schedule(given: KeyReader, iterations: int) -> None:
    value = given.take("param_scheduler")
    parts = value if isinstance(value, list) else [value]
    if value is None:
        given.off("param_scheduler", why="the rate is constant")
        return
    length = _length(given)
    for position, part in enumerate(parts):
        prefix = f"{given.prefix}param_scheduler." + (f"{position}." if isinstance(value, list) else "")
        if not isinstance(part, dict):
            raise problem(prefix.rstrip("."), f"{shown(part)} was given", "give dict(type=..., ...)")
        _part(KeyReader(part, given.found, prefix), is_warmup=_is_warmup(part), length=length, iterations=iterations)


def _length(given: KeyReader) -> tuple[float | None, float | None]:
    """Returns epochs and iterations of the run, as far as they are stated."""
    loop = given.block("train_cfg")
    epochs = loop.number("max_epochs", 0) or None
    return epochs, loop.number("max_iters", 0) or None


def _is_warmup(part: dict[str, Any]) -> bool:
    """Returns whether it is a LinearLR that rises."""
    start = part.get("start_factor", 1 / 3)
    end = part.get("end_factor", 1.0)
    rises = isinstance(start, int | float) and isinstance(end, int | float) and start < end
    return _kind(part) == "LinearLR" and rises


def _kind(part: dict[str, Any]) -> str:
    return str(part.get("type", "")).rsplit(".", 1)[-1]


def _part(part: KeyReader, is_warmup: bool, length: tuple[float | None, float | None], iterations: int) -> None:
    kind = _kind(dict(part.raw))
    part.used.add("type")
    if kind not in SHAPES:
        part.lose("type", f"{kind}: there are {', '.join(SHAPES)}")
        part.rest(dict.fromkeys(part.raw, fated("refused", f"{kind} is not taken over")))
        return
    if is_warmup:
        _warmup(part, length, iterations)
    else:
        part.set("type", "schedule.name", SHAPES[kind])
        _lowest(part, kind)
    part.rest(dict.fromkeys(part.raw, fated("unneeded", "the shape follows the warm-up and lasts to the end")))


def _warmup(part: KeyReader, length: tuple[float | None, float | None], iterations: int) -> None:
    if not part.has("end"):
        part.lose("type", "a warm-up that never ends")
        return
    part.note("type", "mapped", "the warm-up")
    start, end = part.number("start_factor", 1 / 3), part.number("end", 0)
    if start > NEGLIGIBLE:
        part.note("start_factor", "changed", "the rate rises from 0")
    else:
        part.off("start_factor", why="the rate rises from 0")
    part.off("by_epoch", why="read with end")
    epochs, steps = length
    whole = epochs if part.switch("by_epoch", True) else steps
    if whole:
        part.set("end", "schedule.warmup_ratio", round(end / whole, 6))
    elif not part.switch("by_epoch", True):
        why = f"{end:g} iterations, {iterations} a step" if iterations > 1 else ""
        part.set("end", "schedule.warmup_steps", max(1, round(end / iterations)), why)
    else:
        part.lose("end", "a number of epochs; give schedule.warmup_ratio")


def _lowest(part: KeyReader, kind: str) -> None:
    """Sets where the shape ends, as a share of the peak."""
    settings = part.found.translation.settings
    if kind == "LinearLR" and part.has("end_factor"):
        part.set("end_factor", "schedule.final_lr_ratio", part.number("end_factor", 1.0))
    if kind == "CosineAnnealingLR" and part.has("eta_min_ratio"):
        part.set("eta_min_ratio", "schedule.final_lr_ratio", part.number("eta_min_ratio", 0.0))
    elif kind == "CosineAnnealingLR" and part.has("eta_min"):
        lowest, peak = part.number("eta_min", 0.0), settings.get("optimizer.lr")
        if lowest == 0:
            part.off("eta_min", why="it ends at 0")
        elif isinstance(peak, int | float) and peak > 0:
            part.set("eta_min", "schedule.final_lr_ratio", lowest / peak)
        else:
            part.lose("eta_min", "optimizer.lr is not known; give schedule.final_lr_ratio")
