"""Learning-rate schedules: the factor of the peak rate as a function of the updates made and the steps skipped.

A skipped step makes no update and does not advance the schedule. It takes one update from those that are still to come,
over which the rest of the schedule is spread: it ends with the run, however many steps are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from drivetrain.config import training
from drivetrain.errors import problem
from drivetrain.trust.import_path import import_object

TRIED = 100  # updates at which a user's schedule is called before the run begins
# OneCycleLR's defaults: the cycle starts at 1/25 of the peak rate and ends at 1e-4 of where it started
START_OF_CYCLE, END_OF_CYCLE = 1 / 25, 1 / 25e4
RISE = 0.3  # the share of the run in which one cycle rises, where the run file gives no warm-up
TIMESCALE = 10_000  # updates after which an inverse square root without warm-up has fallen to 0.71

Shape = Callable[[training.Schedule, float], float]


class LrFactor(Protocol):
    def __call__(self, updates: int, skipped: int = 0) -> float:
        """Returns the factor of the peak learning rate for the next update, after so many updates and skipped steps."""


def lr_factor(config: training.Schedule, total_steps: int) -> LrFactor:
    """Returns the learning-rate schedule of a run of `total_steps`.

    The warm-up rises linearly, from 1 / (warmup + 1) for the first update to 1 after `warmup` updates. The rest is
    spread over the remaining updates, and reaches its end after the last of them, so that no update is made at a rate
    of 0. `onecycle` and the user's functions cover the whole run themselves.

    Raises UserError if the user's function cannot be called, or returns anything but a finite number of at least 0.
    """
    if config.own:
        return _own(config, total_steps)
    if config.name == "onecycle":
        return _one_cycle(config, total_steps)
    warmup = _warmup(config, total_steps)

    def factor(updates: int, skipped: int = 0) -> float:
        if updates < warmup:
            return (updates + 1) / (warmup + 1)
        if config.name == "inverse_sqrt":
            slowness = warmup or TIMESCALE
            return max(config.final_lr_ratio, math.sqrt(slowness / (updates - warmup + slowness)))
        left = max(1, total_steps - skipped - warmup)
        if config.name == "wsd":
            decay = min(left, config.decay_steps or round(config.decay_ratio * (total_steps - skipped)))
            return _fallen(config, max(0.0, (updates - warmup - (left - decay)) / max(1, decay)), config.decay_shape)
        return _fallen(config, (updates - warmup) / left, config.name)

    return factor


def _warmup(config: training.Schedule, total_steps: int) -> int:
    return config.warmup_steps or round(config.warmup_ratio * total_steps)


def _fallen(config: training.Schedule, progress: float, shape: str) -> float:
    """Returns the factor after a share `progress` of the way from the peak to final_lr_ratio."""
    progress = min(1.0, progress)
    if shape == "constant":
        return 1.0
    left = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "polynomial": (1 - progress) ** config.power,
        "sqrt": 1 - math.sqrt(progress),
    }[shape]
    return config.final_lr_ratio + (1 - config.final_lr_ratio) * left


def _one_cycle(config: training.Schedule, total_steps: int) -> LrFactor:
    """Returns the shape of torch's OneCycleLR with half waves of a cosine (Smith and Topin, 2017), from 4 steps on."""

    def factor(updates: int, skipped: int = 0) -> float:
        total = total_steps - skipped
        peak = max(1.0, (_warmup(config, total) or RISE * total)) - 1
        last = max(peak + 1, total - 1)
        if updates <= peak:
            return _half_wave(START_OF_CYCLE, 1.0, updates / peak if peak else 1.0)
        return _half_wave(1.0, config.final_lr_ratio or END_OF_CYCLE, min(1.0, (updates - peak) / (last - peak)))

    return factor


def _half_wave(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


def _own(config: training.Schedule, total_steps: int) -> LrFactor:
    given = import_object(config.name, "schedule.name")
    if not callable(given):
        raise problem("schedule.name", f"{config.name} is a {type(given).__name__}, no function", "name a function")

    def called(updates: int, skipped: int) -> Any:
        return given(updates, max(1, total_steps - skipped), **config.options)

    def factor(updates: int, skipped: int = 0) -> float:
        return _checked(config.name, updates, called(updates, skipped))

    for updates in range(0, total_steps, max(1, total_steps // TRIED)):
        try:
            value = called(updates, 0)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, NameError) as error:
            why = f"{config.name} fails for update {updates} of {total_steps}: {type(error).__name__}: {error}"
            raise problem("schedule.name", why, "let it take (updates, total_updates) and schedule.options") from error
        _checked(config.name, updates, value)
    return factor


def _checked(name: str, updates: int, value: Any) -> float:
    try:
        factor = float(value)
    except (TypeError, ValueError, RuntimeError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        why = f"{name} gives {value!r} for update {updates}"
        raise problem("schedule.name", why, "let it give the factor of optimizer.lr, a number of at least 0")
    return factor
