"""Samples held out and samples left out, evenly over the classes and the same every time."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import train_test_split

from drivetrain.errors import problem


def stratified_split(labels: np.ndarray, fraction: float, seed: int, field: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, evaluation), both sorted, with every class in the same proportion.

    labels: (N,) class numbers or names. UserError on `field` if a class is too small to be in both.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() < 2:
        names = ", ".join(str(name) for name in classes[counts < 2][:5]) + (" ..." if (counts < 2).sum() > 5 else "")
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
    train, evaluation = train_test_split(np.arange(len(labels)), test_size=size, random_state=seed, stratify=labels)
    return np.sort(train), np.sort(evaluation)


def evenly(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """At most `limit` sorted indices, as many of each class as the classes' sizes allow."""
    if limit >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(seed).permutation(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)  # how many of its class come before a sample
    for number in np.unique(labels):
        of_class = order[labels[order] == number]
        rank[of_class] = np.arange(len(of_class))
    return np.sort(order[np.argsort(rank[order], kind="stable")[:limit]])
