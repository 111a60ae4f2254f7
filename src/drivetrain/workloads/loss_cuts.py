"""Checks that a user's loss is a sum over samples: the same samples at once and in uneven cuts must give the same.

A mean weighted by class, or over the targets that are not ignored, is none, yet two samples may not show it: those of a
sorted data set are of one class. Therefore samples are taken from all over the data set, varied in their targets, and
cut in the order of these, where such a fault is largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.data.streams.endless import draws, known_length
from drivetrain.errors import problem
from drivetrain.workloads.base import Batch, Samples
from drivetrain.workloads.user_file import FIELD

Collate = Callable[[Sequence[Any]], Batch]

LOOKED_AT = 48  # samples whose targets are compared, spread over the data set
MOST = 16  # samples that are run, whatever the global batch: a loss that splits does so at any size
FEWEST = 2  # that can be cut
# Both keep the check to seconds and to the memory of a few samples: 16 images of 224 x 224 through a ResNet-50, four
# texts through a BERT, and two, the fewest that can be cut, of what is larger.
MOST_NUMBERS = 2**22  # in all samples together
MOST_PARAMETERS = 2**29  # of the model, times samples
BEHIND = (2, 5, 9)  # samples after which they are cut: parts of 2, 3, 4 and 7
TARGETS = ("target", "targets", "labels", "label", "y")

# Of fp32: sums of the same terms in another order differ by 1e-7 to 1e-6 of the parts, a mean over classes whose
# weights differ by a hundredth by 1e-3. A model that runs samples in other company rounds its outputs in another way.
OF_A_LOSS, OF_A_MODEL = 1e-4, 1e-3
DRAWS = 5  # of a loss that draws random numbers


def varied_samples(samples: Samples, collate: Collate, model: nn.Module, most: int = MOST) -> list[Any]:
    """Returns up to `most` samples from all over the data set, in the order of their targets; several of each if these
    are few."""
    last = (len(draws(samples, LOOKED_AT)) if known_length(samples) is None else len(samples)) - 1
    spread = np.unique(np.linspace(0, last, LOOKED_AT).round().astype(int)).tolist()
    first = _pair(samples, collate, spread[0])
    numbers = sum(value.numel() for value in first.values()) // 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    most = max(FEWEST, min(most, MOST_NUMBERS // max(1, numbers), MOST_PARAMETERS // max(1, parameters)))
    name = next((name for name in TARGETS if name in first), None)
    if name is None:
        chosen = _evenly(spread, most)
    else:  # one by one: all of them may not fit into memory together
        chosen = _of_each({index: _key(_pair(samples, collate, index)[name]) for index in spread}, most)
    return [samples.load(index, 0) for index in chosen]


def _pair(samples: Samples, collate: Collate, index: int) -> Batch:
    """Returns a batch of one sample twice: some data sets cannot make one of a single sample."""
    return collate([samples.load(index, 0)] * 2)


def _key(target: Tensor) -> float:
    """Returns a key that orders targets: a class, or of many numbers their mean, which padding changes."""
    return float(target.double().mean()) if target.numel() else 0.0


def _of_each(keys: dict[int, float], most: int) -> list[int]:
    """Returns `most` samples in the order of their keys: spread over the keys if these are many, else of each in
    turn."""
    groups: dict[float, list[int]] = {}
    for index in keys:
        groups.setdefault(keys[index], []).append(index)
    ordered = [groups[key] for key in sorted(groups)]
    if len(ordered) >= most:
        return [group[0] for group in _evenly(ordered, most)]
    ranks = sorted((rank, number) for number, group in enumerate(ordered) for rank in range(len(group)))[:most]
    return [ordered[number][rank] for number, rank in sorted((number, rank) for rank, number in ranks)]


def _evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Returns the first, the last, and some between."""
    return [values[at] for at in np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)]


@contextmanager
def off_zero(model: nn.Module) -> Iterator[None]:
    """Moves parameters that are all zero while the block runs: a head that starts there gives each target the same
    loss."""
    parameters = [each for each in model.parameters() if each.is_floating_point() and not each.any()]
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.normal_(std=0.1)
        yield
    finally:
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()


def cuts(count: int) -> list[slice]:
    """Returns uneven cuts of so many samples, of two or more if possible: some models take no single sample."""
    behind = [place for place in BEHIND if place <= count - 2] or [1]
    return [slice(start, stop) for start, stop in zip([0, *behind], [*behind, count], strict=True)]


def check_adds_up(what: str, count: int, value: Callable[[slice], float], rounding: float, fix: str) -> None:
    """Raises UserError unless the values of the cuts of `count` samples add up to that of all.

    what: the function, for the error. rounding: the difference that it explains, as a share of the sizes of the cuts'
    values.
    """
    everything, parts = slice(0, count), cuts(count)
    whole, values = value(everything), [value(part) for part in parts]
    total, near = sum(values), rounding * max(abs(whole), sum(map(abs, values)))
    if not math.isfinite(whole) or abs(whole - total) <= near:  # the run itself tells of a first loss that is NaN
        return
    if not abs(whole - value(everything)) <= near:  # it draws random numbers: only a mean for a sum can be seen
        drawn = np.array([[value(everything), sum(map(value, parts))] for _ in range(DRAWS)])
        whole, total = drawn.mean(axis=0)
        if abs(whole - total) <= max(abs(whole), abs(total)) / 4 + 3 * drawn.std(axis=0).sum():
            return
    sizes = " + ".join(str(part.stop - part.start) for part in parts)
    why = f"{what} {count} samples ({whole:.6g}) is not the sum of each one's: cut into {sizes} it is {total:.6g}"
    raise problem(FIELD, f"{why}, so results would depend on micro-batches and the number of devices", fix)
