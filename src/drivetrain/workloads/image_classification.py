"""Images into classes: any AutoModelForImageClassification."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from drivetrain.config.workload import ImageClassification
from drivetrain.data.images import LabelledPictures, pictures_to_predict, read_pictures
from drivetrain.data.picture_samples import Augmentation, PictureSamples
from drivetrain.data.split import evenly, stratified_split
from drivetrain.data.texts import class_names, encode
from drivetrain.errors import problem
from drivetrain.models.normalisation import batch_norm_to_group_norm, has_batch_norm
from drivetrain.models.transformers_classifiers import build_classifier, config_accepts
from drivetrain.workloads.base import Batch, BestMetric, NamedSamples, Outputs, Workload
from drivetrain.workloads.classification import (
    BEST,
    classification_metrics,
    classification_outputs,
    classification_rows,
    cross_entropy_sum,
)


class ImageClassificationWorkload(Workload):
    def __init__(self, config: ImageClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self._warnings: list[str] = []
        data = config.data
        train = read_pictures(data, data.train, "workload.data.train", "train")
        self._classes = class_names(train.labels.tolist(), "workload.data.train")
        self.train, self.evaluation = self._parts(train)
        self._shape = self.train.decode_all("workload.data.train")
        if self.evaluation.decode_all("workload.data.evaluation") != self._shape:
            raise problem(
                "workload.data.image_size", "training and evaluation images differ in size", "give image_size"
            )
        self._scale = self._normalisation()

    def _parts(self, train: LabelledPictures) -> tuple[PictureSamples, PictureSamples]:
        data = self._config.data
        numbers = encode(train.labels, self._classes, str(data.train), "workload.data.train")
        if data.evaluation is None:
            ours, theirs = stratified_split(numbers, data.evaluation_fraction, self._seed, "workload.data")
            held_out, held_numbers = train, numbers
        else:
            held_out = read_pictures(data, data.evaluation, "workload.data.evaluation", "test")
            held_numbers = encode(held_out.labels, self._classes, data.evaluation, "workload.data.evaluation")
            ours, theirs = np.arange(len(numbers)), np.arange(len(held_numbers))
        return (
            self._samples(train, numbers, ours, data.limit_train, Augmentation(data.crop_padding, data.flip)),
            self._samples(held_out, held_numbers, theirs, data.limit_evaluation, Augmentation()),
        )

    def _samples(
        self, held: LabelledPictures, numbers: np.ndarray, part: np.ndarray, limit: int | None, augment: Augmentation
    ) -> PictureSamples:
        if limit is not None:
            part = part[evenly(numbers[part], limit, self._seed)]
        return PictureSamples(held.pictures, numbers[part], part, self._config.data.image_size, augment, self._seed)

    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation a channel, each (1, C, 1, 1), for pixels from 0 to 255."""
        data, channels = self._config.data, self._channels
        own = _preprocessor(self._config.model.path)
        found = {}
        for name, given in (("mean", data.mean), ("std", data.std)):
            values = given or own.get(f"image_{name}") or [0.5]
            values = list(values) * channels if len(values) == 1 else list(values)
            if len(values) != channels or (name == "std" and min(values) <= 0):
                raise problem(f"workload.data.{name}", f"{values} given for {channels} channels", "one each, std > 0")
            found[name] = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) * 255
        return found["mean"], found["std"]

    @property
    def _channels(self) -> int:
        assert self._shape is not None
        return self._shape[-1]

    def build_model(self) -> nn.Module:
        model = build_classifier(
            "AutoModelForImageClassification",
            self._config.model.path,
            self._completed_config(),
            self._classes,
            "workload.model",
        )
        if self._config.model.norm == "group":
            batch_norm_to_group_norm(model)
        elif has_batch_norm(model):
            message = (
                "the model has BatchNorm: its statistics are those of what one device runs at once, so results depend on "
                "micro_batch_size and the number of devices; workload.model.norm=group does not"
            )
            if message not in self._warnings:
                self._warnings.append(message)
        return model.to(memory_format=self._memory_format)  # type: ignore[call-overload, no-any-return]

    def _completed_config(self) -> dict[str, Any] | None:
        given = self._config.model.config
        if given is None:
            return None
        assert self._shape is not None
        derived = {"num_channels": self._channels, "image_size": self._shape[0]}
        return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}

    @property
    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self._config.channels_last else torch.contiguous_format

    def collate(self, samples: Sequence[Any]) -> Batch:
        """pixel_values: (B, C, H, W) fp32; labels: (B,) int64."""
        pixels = torch.from_numpy(np.stack([image for image, _ in samples])).permute(0, 3, 1, 2)
        mean, std = self._scale
        values = pixels.to(torch.float32, memory_format=self._memory_format).sub_(mean).div_(std)
        return {"pixel_values": values, "labels": torch.tensor([label for _, label in samples])}

    def count(self, batch: Batch) -> int:
        return batch["labels"].numel()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy_sum(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return classification_outputs(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return classification_rows(model(pixel_values=batch["pixel_values"]).logits, self._classes)

    def metrics(self) -> Mapping[str, Metric]:
        return classification_metrics(len(self._classes))

    @property
    def best_metric(self) -> BestMetric:
        return BEST

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "train_samples": len(self.train),
            "evaluation_samples": len(self.evaluation),
            "classes": len(self._classes),
            "image": " x ".join(map(str, self._shape or ())),
        }

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is None:
            return self.evaluation
        assert self._shape is not None
        pictures = pictures_to_predict(self._config.data, path, "--data")
        everything = np.arange(len(pictures.names))
        unknown = np.full(len(everything), -1)
        return PictureSamples(pictures, unknown, everything, self._shape[0], Augmentation(), self._seed)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        assert self._shape is not None
        mean, std = ((values / 255).flatten().tolist() for values in self._scale)
        processor = {
            "image_mean": mean,
            "image_std": std,
            "size": {"height": self._shape[0], "width": self._shape[1]},
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def _preprocessor(path: str | None) -> dict[str, Any]:
    """The model's own image statistics, if its folder has them."""
    file = Path(path or "") / "preprocessor_config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if path is not None and file.is_file() else {}
    return found
