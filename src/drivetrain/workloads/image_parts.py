"""Reads the pictures of an image classification, divides them into training and evaluation, and checks both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import ImageClassification, ImageData
from drivetrain.data.array_store import default_root
from drivetrain.data.augment import Augmentation
from drivetrain.data.image_sources import read_pictures
from drivetrain.data.images import LabelledPictures
from drivetrain.data.picture_samples import MOST_KEPT_BYTES, PictureSamples
from drivetrain.data.split import limit_note, limited, stratified_split
from drivetrain.data.texts import class_names, encode
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.classifier_config import config_problems
from drivetrain.models.preprocessing import Preprocessing, expected_by

HEAD = "AutoModelForImageClassification"
MOST_NAMED_BAD = 5  # pictures


class ImageParts:
    """Training and evaluation pictures of a run file, as samples that are not looked at yet.

    classes: names, in the order of their numbers. expected: what the model takes. size: the side that pictures are
    resized to, in pixels, or None for theirs. notes: for the report.
    """

    def __init__(self, config: ImageClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self.notes: list[str] = []
        train, held_out, self.expected = self._read()
        self.classes = _classes(train)
        self._most_bad = most_dropped(config.data.bad_rows)
        self.size = config.data.image_size or self.expected.size
        self.train, self.evaluation = self._parts(train, held_out)

    def _read(self) -> tuple[LabelledPictures, LabelledPictures | None, Preprocessing]:
        """Reads the data and the model's expectations of them. Raises UserError with the problems of all of them."""
        data, model = self._config.data, self._config.model
        problems: list[Problem] = []
        train = held_out = None
        expected = Preprocessing()
        with _gathered(problems):
            expected = expected_by(model.path, "workload.model.path")
        if expected.group_norm and model.norm != "group":
            why = f"{model.path} was trained with GroupNorm in place of BatchNorm"
            problems.append(Problem("workload.model.norm", why, "give norm: group"))
        if model.config is not None:
            problems += config_problems(HEAD, model.config, "workload.model.config")
        with _gathered(problems):
            train = read_pictures(data, data.train, "workload.data.train", "train")
        if data.evaluation is not None:
            with _gathered(problems):
                held_out = read_pictures(data, data.evaluation, "workload.data.evaluation", "test")
        if problems:
            raise UserError(problems)
        assert train is not None
        self.notes += [note for part in (train, held_out) if part is not None for note in part.notes]
        return train, held_out, expected

    def _parts(
        self, train: LabelledPictures, held_out: LabelledPictures | None
    ) -> tuple[PictureSamples, PictureSamples]:
        data = self._config.data
        numbers = _encoded(train, self.classes, str(data.train), "workload.data.train")
        if held_out is None:
            ours, theirs = stratified_split(numbers, data.evaluation_fraction, self._seed, "workload.data.train")
            held_out, held_numbers = train, numbers
        else:
            held_numbers = _encoded(held_out, self.classes, str(data.evaluation), "workload.data.evaluation")
            ours, theirs = np.arange(len(numbers)), np.arange(len(held_numbers))
        augment = Augmentation(self._seed, data.crop_padding, data.flip)
        return (
            self._samples(train, numbers, self._limited(numbers, ours, "limit_train"), augment),
            self._samples(held_out, held_numbers, self._limited(held_numbers, theirs, "limit_evaluation"), None),
        )

    def _limited(self, numbers: np.ndarray, part: np.ndarray, key: str) -> np.ndarray:
        """Returns indices of the part's samples that are used. key: the field that limits them."""
        limit = getattr(self._config.data, key)
        if limit is None:
            return part
        kept = limited(numbers[part], limit, self._seed)
        note = limit_note(np.array(self.classes)[numbers[part]], kept, f"workload.data.{key}")
        self.notes += [note] if note else []
        return part[kept]

    def _samples(
        self, held: LabelledPictures, numbers: np.ndarray, part: np.ndarray, augment: Augmentation | None
    ) -> PictureSamples:
        cache = self._config.data.cache or default_root()
        return PictureSamples(held.pictures, numbers[part], part, self.size, augment, self._most_bad, cache)

    def prepared(self) -> tuple[tuple[int, ...], list[str]]:
        """Checks both parts: all pictures of one shape and of as many channels as the model takes. Returns the shape
        (height, width, channels), and notes for the report. Raises UserError."""
        channels = (self._config.model.config or {}).get("num_channels") or self.expected.channels
        if channels not in (None, 1, 3):
            raise problem("workload.model", f"it takes images of {channels} channels", "grey (1) and RGB (3) are read")
        problems: list[Problem] = []
        shape = None
        with _gathered(problems):
            shape = self.train.prepare("workload.data.train", channels)
        with _gathered(problems):
            left = MOST_KEPT_BYTES - self.train.kept_bytes
            self.evaluation.prepare("workload.data.evaluation", channels, shape, left)
        if problems:
            raise UserError(problems)
        assert shape is not None
        notes: list[str] = []
        for samples in (self.train, self.evaluation):
            notes += [] if samples.warning is None else [samples.warning]
            if samples.bad:
                why = f"{len(samples.bad):,} of {len(samples):,} pictures cannot be read and count for nothing"
                notes.append(f"{why}: {'; '.join(islice(samples.bad.values(), MOST_NAMED_BAD))}")
        return shape, notes


def pixel_statistics(data: ImageData, expected: Preprocessing, channels: int) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation a channel: the run file's, else the model's own, else 0.5."""
    problems: list[Problem] = []
    found = []
    for name, given, own in (("mean", data.mean, expected.mean), ("std", data.std, expected.std)):
        values = list(given or own or [0.5])
        values = values * channels if len(values) == 1 else values
        field = f"workload.data.{name}"
        if len(values) != channels:
            problems.append(Problem(field, f"{values} for {channels} channels", "give one a channel"))
        if max(values) > 1 or min(values) < 0 or (name == "std" and min(values) == 0):
            problems.append(Problem(field, f"{values} are not of pixels from 0 to 1", "divide by 255; no std is 0"))
        found.append(values)
    if problems:
        raise UserError(problems)
    return found[0], found[1]


def _classes(train: LabelledPictures) -> list[str]:
    """Returns the classes, in the source's own order, if it has one."""
    present = [str(train.label_names[number]) for number in np.unique(train.numbers)]
    found = class_names(present, "workload.data.train", len(train.numbers))
    return found if train.classes is None else list(train.classes)


def _encoded(held: LabelledPictures, classes: Sequence[str], path: str, field: str) -> np.ndarray:
    """Returns (N,) int64: numbers of classes. Raises UserError for labels that training does not know."""
    present, places = np.unique(held.numbers, return_inverse=True)
    return encode(np.array([held.label_names[number] for number in present]), classes, path, field)[places]


@contextmanager
def _gathered(problems: list[Problem]) -> Iterator[None]:
    """Collects problems, so that all can be reported at once."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
