"""Chooses samples to hold out or leave out, in the proportions of the classes and the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.errors import clipped, problem

MOST_OF_A_NAME = 40  # characters of a class that a message shows


def stratified_split(
    labels: np.ndarray, fraction: float, seed: int, field: str, class_names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices (train, evaluation), both sorted, with every class in the same proportion.

    labels: (N,) class numbers or names; class_names: names of the numbers, for errors. Raises UserError on `field` if a
    class is too small to be in both.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() < 2:
        small = [name if class_names is None else class_names[name] for name in classes[counts < 2]]
        names = few_names(small)
        raise problem(
            field,
            f"a class of one sample cannot be in both training and evaluation data: {names}",
            "give evaluation data of their own, or drop the class",
        )
    size = max(len(classes), round(fraction * len(labels)))
    if size > len(labels) - len(classes):
        raise problem(
            field,
            f"a share of {fraction:g} of {len(labels)} samples leaves no sample of each of {len(classes)} classes",
            "give another share, or more data",
        )
    evaluation = _drawn(labels, size, seed)
    return np.setdiff1d(np.arange(len(labels)), evaluation, assume_unique=True), evaluation


def few_names(names: Sequence[Any]) -> str:
    """Returns the first names of classes for a message, and of a long one its beginning: it may be a whole text."""
    first = (clipped(" ".join(str(each).split()), MOST_OF_A_NAME) for each in names[:5])
    return ", ".join(first) + (" ..." if len(names) > 5 else "")


def _drawn(labels: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns `size` sorted indices: those that scikit-learn's train_test_split(stratify=labels) holds out.

    Its own import takes a second, a fifth of the time in which a small run starts. Each class gives its share; what is
    left over of whole samples goes to the classes with the largest remainders, equal ones drawn for. The order of the
    draws is scikit-learn's: first for the number of training samples of each class, then for that of the others.
    """
    generator = np.random.RandomState(seed)
    classes = np.unique(labels, return_inverse=True)[1]
    counts = np.bincount(classes)
    to_train = _shares(counts, len(labels) - size, generator)
    held_out = _shares(counts - to_train, size, generator)
    chosen = []
    for number, (first, count) in enumerate(zip(to_train, held_out, strict=True)):
        members = np.flatnonzero(classes == number)
        chosen.append(members[generator.permutation(len(members))[first : first + count]])
    return np.sort(np.concatenate(chosen))


def _shares(counts: np.ndarray, total: int, generator: np.random.RandomState) -> np.ndarray:
    """Returns how many of each class make `total`, in proportion to their counts. (K,) → (K,)"""
    exact = counts / counts.sum() * total
    shares = np.floor(exact).astype(int)
    remainders, left = exact - np.floor(exact), total - int(np.floor(exact).sum())
    for remainder in np.unique(remainders)[::-1]:
        if left <= 0:
            break
        (equal,) = np.nonzero(remainders == remainder)
        given = generator.choice(equal, size=min(len(equal), left), replace=False)
        shares[given] += 1
        left -= len(given)
    return shares


def limited(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Returns at most `limit` sorted indices, drawn so that each class keeps its share of them to within one sample.

    labels: (N,) class numbers or names. Shares are rounded by the largest remainder; equal ones are drawn for.
    """
    if limit >= len(labels):
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    whole, rest = np.divmod(counts * limit, len(labels))
    most_left = np.lexsort((generator.permutation(len(classes)), -rest))[: limit - whole.sum()]
    whole[most_left] += 1
    return np.sort(
        np.concatenate([order[labels[order] == each][:kept] for each, kept in zip(classes, whole, strict=True)])
    )


def limit_note(labels: np.ndarray, kept: np.ndarray, field: str) -> str | None:
    """Returns a warning of classes of which no sample is left. labels: names; kept: indices."""
    lost = np.setdiff1d(labels, labels[kept])
    if not len(lost):
        return None
    names = few_names(lost.tolist())
    return f"{field}={len(kept)} leaves no sample of {len(lost)} of {len(np.unique(labels))} classes: {names}"
