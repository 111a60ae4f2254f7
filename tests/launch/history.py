"""Defines which samples a run really took, step by step, whatever was killed on the way.

A process that called `record` writes down every sample that it loads for a step. A step that was made again after a
kill is in several records; what counts is what the last process of each rank took for it, since the weights come from
there: an earlier one that also took it died before a checkpoint had it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drivetrain.data import loader
from drivetrain.data.loader import Window
from drivetrain.training import windows as training

VARIABLE = "RECORDED_SAMPLES"  # names the folder for record_if_asked


def record_if_asked() -> None:
    """For a user's file, which every rank reads."""
    if VARIABLE in os.environ:
        record(Path(os.environ[VARIABLE]))


def recorded_main(arguments: list[str], folder: Path) -> None:
    """The command in this process, with its samples written down."""
    from drivetrain.cli import main

    record(folder)
    main(arguments)


def record(folder: Path, sample: Callable[[Any, int], int] = lambda _, index: index) -> None:
    """From now on this process writes a line (step from 1, epoch, samples) before each step, into a file of its own.

    Of runs without loader processes: what is loaded between two windows is then the second one's. sample: what a sample
    is called, by the data set and the index that it is asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken: list[tuple[int, int]] = []
    load, training_windows = loader._Keyed.__getitem__, loader.training_windows

    def loaded(self: Any, key: tuple[int, int]) -> Any:
        epoch, index = key
        taken.append((epoch, sample(self._samples, index)))
        return load(self, key)

    def windows(*given: Any, **options: Any) -> Iterator[Window]:
        name = f"{os.environ.get('RANK', '0')}-{time.monotonic_ns()}.jsonl"
        source = training_windows(*given, **options)
        with (folder / name).open("w", buffering=1) as file:
            while True:
                taken.clear()  # an evaluation may have come between
                window = next(source, None)
                if window is None:
                    return
                assert {epoch for epoch, _ in taken} == {window.epoch}
                file.write(json.dumps([window.step + 1, window.epoch, [index for _, index in taken]]) + "\n")
                yield window

    loader._Keyed.__getitem__ = loaded  # type: ignore[method-assign]
    training.training_windows = windows  # type: ignore[attr-defined]


def surviving(folder: Path, copies: int = 1) -> dict[int, tuple[int, list[int]]]:
    """Step → (epoch, samples in ascending order) of all that went into the weights that a finished run ended with.

    copies: ranks that take the same samples (those of a mesh that share a layer or are stages); AssertionError if they
    did not.
    """
    newest: dict[int, dict[str, tuple[int, list[int]]]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem.split("-")[1])):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # or it was cut off by a kill
                step, epoch, samples = json.loads(line)
                newest.setdefault(step, {})[path.stem.split("-")[0]] = (epoch, sorted(samples))
    found: dict[int, tuple[int, list[int]]] = {}
    for step, taken in sorted(newest.items()):
        shares = Counter(tuple(samples) for _, samples in taken.values())
        assert {*shares.values()} == {copies}, f"of step {step} {copies} ranks each should have the same: {taken}"
        found[step] = max(epoch for epoch, _ in taken.values()), sorted(sample for share in shares for sample in share)
    return found


def check_each_once(history: dict[int, tuple[int, list[int]]], steps: int, num_samples: int) -> None:
    """AssertionError unless every step is there, no epoch has a sample twice, and each whole epoch has all."""
    missing = set(range(1, steps + 1)) ^ history.keys()
    assert not missing, f"steps {sorted(missing)[:5]} are missing or too many"
    epochs: dict[int, list[int]] = {}
    for epoch, samples in history.values():
        epochs.setdefault(epoch, []).extend(samples)
    for epoch, samples in epochs.items():
        twice = [sample for sample, times in Counter(samples).items() if times > 1]
        assert not twice, f"epoch {epoch} repeats samples {twice[:5]}"
        if epoch < max(epochs):
            assert sorted(samples) == [*range(num_samples)], f"epoch {epoch} leaves samples out"
