"""Classifies images: any AutoModelForImageClassification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import ImageClassification
from drivetrain.data.image_sources import pictures_to_predict
from drivetrain.data.images import png_url
from drivetrain.data.picture_samples import UNREADABLE, GatheredPictures, PictureSamples
from drivetrain.errors import problem
from drivetrain.models.classifier_config import config_accepts
from drivetrain.models.model_folders import save_description
from drivetrain.models.normalisation import batch_norm_to_group_norm, has_batch_norm
from drivetrain.models.preprocessing import NORM_KEY, write_preprocessing
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.workloads.base import Batch, NamedSamples
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.classification import Classifier
from drivetrain.workloads.exporting import Exportable
from drivetrain.workloads.image_parts import HEAD, ImageParts, pixel_statistics
from drivetrain.workloads.metrics import Accuracy, MacroF1, Metric

BATCH_NORM = (
    "the model has BatchNorm: its statistics are those of one device's micro-batch, so results depend on "
    "micro_batch_size and the number of devices; workload.model.norm=group does not"
)


class ImageClassificationWorkload(Classifier, Exportable):
    train: PictureSamples
    evaluation: PictureSamples

    def __init__(self, config: ImageClassification, seed: int) -> None:
        self._config = config
        self._most_bad = most_dropped(config.data.bad_rows)
        parts = ImageParts(config, seed)
        self._size, self._expected, self._classes = parts.size, parts.expected, parts.classes
        self.train, self.evaluation = parts.train, parts.evaluation
        self._loss = ClassificationLoss(config.loss, self._classes, self.train.labels)
        self._warnings = [*parts.notes, *self._class_warnings()]
        self._shape, notes = parts.prepared()
        self._warnings += notes
        self._mean, self._std = pixel_statistics(config.data, self._expected, self._shape[-1])
        self._scale = _pixel_scale(self._shape, self._mean, self._std)
        self._derived = self._derived_config()

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


def _pixel_scale(shape: tuple[int, ...], mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns factor, shift: (W x C,) each, so that pixels x factor + shift = (pixels / 255 - mean) / std."""
    _, width, _ = shape
    deviation = torch.tensor(std, dtype=torch.float64)
    factor, shift = 1 / (255 * deviation), -torch.tensor(mean, dtype=torch.float64) / deviation
    return factor.float().repeat(width), shift.float().repeat(width)
