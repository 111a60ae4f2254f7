"""Classifies images: any AutoModelForImageClassification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import ImageClassification
from drivetrain.data.array_store import default_root
from drivetrain.data.augment import Augmentation
from drivetrain.data.image_sources import pictures_to_predict, read_pictures
from drivetrain.data.images import LabelledPictures, png_url
from drivetrain.data.picture_samples import MOST_KEPT_BYTES, UNREADABLE, GatheredPictures, PictureSamples
from drivetrain.data.split import limit_note, limited, stratified_split
from drivetrain.data.texts import class_names, encode
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.classifier_config import config_accepts, config_problems
from drivetrain.models.model_folders import save_description
from drivetrain.models.normalisation import batch_norm_to_group_norm, has_batch_norm
from drivetrain.models.preprocessing import NORM_KEY, Preprocessing, expected_by, write_preprocessing
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.workloads.base import Batch, NamedSamples
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.classification import Classifier
from drivetrain.workloads.exporting import Exportable
from drivetrain.workloads.metrics import Accuracy, MacroF1, Metric

HEAD = "AutoModelForImageClassification"
MOST_NAMED_BAD = 5  # pictures
BATCH_NORM = (
    "the model has BatchNorm: its statistics are those of one device's micro-batch, so results depend on "
    "micro_batch_size and the number of devices; workload.model.norm=group does not"
)


class ImageClassificationWorkload(Classifier, Exportable):
    train: PictureSamples
    evaluation: PictureSamples

    def __init__(self, config: ImageClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self._warnings: list[str] = []
        train, held_out, self._expected = self._read()
        self._classes = _classes(train)
        self._most_bad = most_dropped(config.data.bad_rows)
        self._size = config.data.image_size or self._expected.size
        self.train, self.evaluation = self._parts(train, held_out)
        self._loss = ClassificationLoss(config.loss, self._classes, self.train.labels)
        self._warnings += self._class_warnings()
        self._shape = self._prepare()
        self._mean, self._std = self._statistics()
        self._scale = _pixel_scale(self._shape, self._mean, self._std)
        self._derived = self._derived_config()

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
        self._warnings += [note for part in (train, held_out) if part is not None for note in part.notes]
        return train, held_out, expected

    def _parts(
        self, train: LabelledPictures, held_out: LabelledPictures | None
    ) -> tuple[PictureSamples, PictureSamples]:
        data = self._config.data
        numbers = _encoded(train, self._classes, str(data.train), "workload.data.train")
        if held_out is None:
            ours, theirs = stratified_split(numbers, data.evaluation_fraction, self._seed, "workload.data.train")
            held_out, held_numbers = train, numbers
        else:
            held_numbers = _encoded(held_out, self._classes, str(data.evaluation), "workload.data.evaluation")
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
        note = limit_note(np.array(self._classes)[numbers[part]], kept, f"workload.data.{key}")
        self._warnings += [note] if note else []
        return part[kept]

    def _samples(
        self, held: LabelledPictures, numbers: np.ndarray, part: np.ndarray, augment: Augmentation | None
    ) -> PictureSamples:
        cache = self._config.data.cache or default_root()
        return PictureSamples(held.pictures, numbers[part], part, self._size, augment, self._most_bad, cache)

    def _prepare(self) -> tuple[int, ...]:
        """Checks both parts: all pictures of one shape and of as many channels as the model takes."""
        channels = (self._config.model.config or {}).get("num_channels") or self._expected.channels
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
        for samples in (self.train, self.evaluation):
            self._warnings += [] if samples.warning is None else [samples.warning]
            if samples.bad:
                why = f"{len(samples.bad):,} of {len(samples):,} pictures cannot be read and count for nothing"
                self._warn(f"{why}: {'; '.join(islice(samples.bad.values(), MOST_NAMED_BAD))}")
        return shape

    def _statistics(self) -> tuple[list[float], list[float]]:
        """Returns mean and standard deviation a channel: the run file's, else the model's own, else 0.5."""
        data, channels = self._config.data, self._shape[-1]
        problems: list[Problem] = []
        found = []
        for name, given, own in (("mean", data.mean, self._expected.mean), ("std", data.std, self._expected.std)):
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

    def _derived_config(self) -> dict[str, Any]:
        """Returns the fields that follow from the data for a model made from a config, where the run file leaves them
        out."""
        given = self._config.model.config
        if given is None:
            return {}
        height, width, channels = self._shape
        derived = {"num_channels": channels, "image_size": height if height == width else [height, width]}
        return {key: value for key, value in derived.items() if key not in given and config_accepts(given, key)}

    def build_model(self) -> nn.Module:
        model_config = self._config.model
        config = None if model_config.config is None else {**model_config.config, **self._derived}
        trusted, warn = model_config.trust_remote_code, self._warn
        model = build_classifier(
            HEAD,
            model_config.path,
            config,
            self._classes,
            "workload.model",
            warn,
            trusted=trusted,
            adapters=self.adapters,
        )
        if model_config.norm == "group":
            self._replace_batch_norm(model)
        elif has_batch_norm(model):
            self._warn(BATCH_NORM)
        self._try(model)
        return self._adapted(model.to(memory_format=self._memory_format))  # type: ignore[call-overload]

    def _replace_batch_norm(self, model: nn.Module) -> None:
        path = self._config.model.path
        replaced = batch_norm_to_group_norm(model)
        if not replaced:
            self._warn("workload.model.norm has no effect: the model has no BatchNorm")
        elif path is not None and not self._expected.group_norm:
            self._warn(f"{replaced} BatchNorms of {path} became GroupNorm: its accuracy must be regained by training")
        if replaced:
            setattr(model.config, NORM_KEY, "group")

    def _try(self, model: nn.Module) -> None:
        """Runs one image forward, so that a model that cannot take these images is reported before training."""
        if next(model.parameters()).is_meta:
            return
        height, width, channels = self._shape
        training = model.training
        try:
            with torch.no_grad():
                model.eval()(pixel_values=torch.zeros(1, channels, height, width))
        except Exception as error:  # each architecture fails in its own way
            reason = " ".join(str(error).split())[:300]
            raise problem(
                "workload.model",
                f"it cannot take images of {height} x {width} x {channels}: {reason}",
                "give workload.data.image_size, or a model for this size",
            ) from error
        finally:
            model.train(training)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:  # a model may be built more than once
            self._warnings.append(message)

    @property
    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self._config.channels_last else torch.contiguous_format

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Returns pixel_values: (B, C, H, W) fp32, normalised; labels: (B,) int64."""
        height, width, channels = self._shape
        if isinstance(samples, GatheredPictures):
            # a view, such as one with mirrored columns, has no rows of pixels to take at once
            images, numbers = np.ascontiguousarray(samples.pixels), samples.labels
        else:
            images, numbers = np.stack([image for image, _ in samples]), np.array([label for _, label in samples])
        pixels, labels = torch.from_numpy(images), torch.from_numpy(numbers.astype(np.int64))
        factor, shift = self._scale
        # whole rows of pixels at a time: broadcasting over the channels alone is three times slower
        values = torch.addcmul(shift, pixels.view(len(samples), height, width * channels).float(), factor)
        values = values.view(len(samples), height, width, channels).permute(0, 3, 1, 2)  # channels-last in memory
        return {
            "pixel_values": values.contiguous(memory_format=self._memory_format),
            "labels": labels,
        }

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(pixel_values=batch["pixel_values"]).logits
        return logits

    def count(self, batch: Batch) -> int:
        """Counts the pictures that could be read."""
        labels = batch["labels"]
        return int((labels != UNREADABLE).sum()) if self._most_bad else labels.numel()

    def metrics(self) -> Mapping[str, Metric]:
        if not self._most_bad:
            return super().metrics()
        return {"accuracy": Accuracy(UNREADABLE), "macro_f1": MacroF1(len(self._classes), UNREADABLE)}

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Predicts; rows of pictures that could not be read have no values."""
        rows = super().predict(model, batch)
        for number in (batch["labels"] == UNREADABLE).nonzero().flatten().tolist() if self._most_bad else ():
            rows[number] = {key: dict.fromkeys(v) if isinstance(v, dict) else None for key, v in rows[number].items()}
        return rows

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        data = self._config.data
        return {
            "source": data.source if data.train is None else f"{data.source} {data.train}",
            "evaluation": data.evaluation or f"{data.evaluation_fraction:g} of the training data",
            "train_samples": len(self.train),
            "evaluation_samples": len(self.evaluation),
            "classes": len(self._classes),
            "image": " x ".join(map(str, self._shape)),
            "mean": self._mean,
            "std": self._std,
            "decoded_images_bytes": self.train.kept_bytes + self.evaluation.kept_bytes,
            **({"unreadable": len(self.train.bad) + len(self.evaluation.bad)} if self._most_bad else {}),
            "model_config_from_data": self._derived,
            **self._largest_class(),
            **self._weighted(),
        }

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def preview(self, samples: PictureSamples, index: int) -> dict[str, Any]:
        """Returns the picture as it is trained on, augmented if it is a training sample."""
        pixels, label = samples.load(index, 0)
        if label == UNREADABLE:
            return {"text": samples.bad.get(index, "cannot be read")}
        return {"picture": png_url(pixels), **self.described(samples, index)}

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is None:
            return self.evaluation
        pictures = pictures_to_predict(self._config.data, path, "--data")
        height, width, _ = self._shape
        everything = np.arange(len(pictures.names))
        unknown = np.full(len(everything), -1)
        size = height if height == width else self._size
        samples = PictureSamples(pictures, unknown, everything, size, most_bad=self._most_bad)
        samples.prepare("--data", shape=self._shape, most_kept_bytes=0)  # each is used once: nothing to keep
        return samples

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        height, width, _ = self._shape
        write_preprocessing(folder, height, width, self._mean, self._std)


def _classes(train: LabelledPictures) -> list[str]:
    """Returns the classes, in the source's own order, if it has one."""
    present = [str(train.label_names[number]) for number in np.unique(train.numbers)]
    found = class_names(present, "workload.data.train", len(train.numbers))
    return found if train.classes is None else list(train.classes)


def _encoded(held: LabelledPictures, classes: Sequence[str], path: str, field: str) -> np.ndarray:
    """Returns (N,) int64: numbers of classes. Raises UserError for labels that training does not know."""
    present, places = np.unique(held.numbers, return_inverse=True)
    return encode(np.array([held.label_names[number] for number in present]), classes, path, field)[places]


def _pixel_scale(shape: tuple[int, ...], mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns factor, shift: (W x C,) each, so that pixels x factor + shift = (pixels / 255 - mean) / std."""
    _, width, _ = shape
    deviation = torch.tensor(std, dtype=torch.float64)
    factor, shift = 1 / (255 * deviation), -torch.tensor(mean, dtype=torch.float64) / deviation
    return factor.float().repeat(width), shift.float().repeat(width)


@contextmanager
def _gathered(problems: list[Problem]) -> Iterator[None]:
    """Collects problems, so that all can be reported at once."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
