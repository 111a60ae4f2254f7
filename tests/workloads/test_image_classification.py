from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score
from torch import nn

from drivetrain.config.training import Loader
from drivetrain.config.workload import ClassLoss, ImageClassification, ImageData, ImageModel
from drivetrain.data.loader import evaluation_batches
from drivetrain.data.picture_samples import GatheredPictures
from drivetrain.errors import UserError
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.image_classification import ImageClassificationWorkload

RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
VIT = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
}


def workload(
    model: dict[str, Any] | None = None, seed: int = 0, channels_last: bool = True, **data: Any
) -> ImageClassificationWorkload:
    data = {"source": "digits", **data}
    config = ImageClassification(
        model=ImageModel(**(model or {"config": RESNET})), data=ImageData(**data), channels_last=channels_last
    )
    return ImageClassificationWorkload(config, seed)


def problems(**given: Any) -> dict[str, str]:
    with pytest.raises(UserError) as error:
        workload(**given).build_model()
    return {problem.field: f"{problem.why} | {problem.fix}" for problem in error.value.problems}


def class_folder(root: Path, classes: dict[str, int], size: tuple[int, int] = (8, 8), mode: str = "RGB") -> str:
    """Noise around another grey for each class."""
    generator = np.random.default_rng(0)
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            noise = generator.integers(0, 60, (size[1], size[0], 3)) + number * 60
            Image.fromarray(noise.astype(np.uint8)).convert(mode).save(root / name / f"{index}.png")
    return str(root)


# --- data ------------------------------------------------------------------------------------------------------------


def test_digits_are_split_with_every_class_in_proportion() -> None:
    split = workload(evaluation_fraction=0.2)
    assert (len(split.train), len(split.evaluation)) == (1438, 359)
    parts = np.bincount(split.evaluation.labels) / np.bincount(split.train.labels)
    np.testing.assert_allclose(parts, 0.25, atol=0.02)
    assert not set(split.train.names) & set(split.evaluation.names)


def test_the_split_and_the_limits_follow_the_seed() -> None:
    def chosen(seed: int) -> list[str]:
        return list(workload(seed=seed, limit_train=40, limit_evaluation=20).train.names)

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_limits_are_drawn_evenly_over_the_classes() -> None:
    limited = workload(limit_train=50, limit_evaluation=30)
    assert np.bincount(limited.train.labels).tolist() == [5] * 10
    assert np.bincount(limited.evaluation.labels).tolist() == [3] * 10


def test_evaluation_labels_mean_the_same_classes_as_training_labels(tmp_path: Path) -> None:
    train = class_folder(tmp_path / "train", {"ant": 3, "bee": 3, "cat": 3})
    evaluation = class_folder(tmp_path / "evaluation", {"cat": 2})
    assert workload(source="folder", train=train, evaluation=evaluation).evaluation.labels.tolist() == [2, 2]


def test_a_class_that_training_does_not_know_is_reported(tmp_path: Path) -> None:
    train = class_folder(tmp_path / "train", {"ant": 3, "bee": 3})
    evaluation = class_folder(tmp_path / "evaluation", {"bee": 2, "wasp": 1})
    assert "'wasp'" in problems(source="folder", train=train, evaluation=evaluation)["workload.data.evaluation"]


def test_a_single_class_is_reported(tmp_path: Path) -> None:
    train = class_folder(tmp_path, {"ant": 4})
    assert "one class" in problems(source="folder", train=train)["workload.data.train"]


def test_the_problems_of_data_and_model_come_together(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    model = {"config": {**RESNET, "hiden_sizes": [3]}}
    found = problems(model=model, source="folder", train=nowhere, evaluation=nowhere)
    assert set(found) == {"workload.model.config.hiden_sizes", "workload.data.train", "workload.data.evaluation"}


def test_images_of_different_sizes_need_an_image_size(tmp_path: Path) -> None:
    train = class_folder(tmp_path, {"ant": 3, "bee": 3})
    class_folder(tmp_path, {"cat": 3}, size=(9, 8))
    assert " is 8 x 9 where others are 8 x 8" in str(problems(source="folder", train=train))
    assert workload(source="folder", train=train, image_size=8, evaluation_fraction=0.34).facts["image"] == "8 x 8 x 3"


def test_a_broken_image_is_named_before_training(tmp_path: Path) -> None:
    train = class_folder(tmp_path, {"ant": 3, "bee": 3})
    (tmp_path / "bee" / "1.png").write_bytes(b"")
    evaluation = class_folder(tmp_path / "other", {"ant": 1})
    found = problems(source="folder", train=train, evaluation=evaluation)
    assert "bee/1.png cannot be read" in found["workload.data.train"]


def test_bad_pictures_within_the_rule_count_for_nothing_and_are_named(tmp_path: Path) -> None:
    train = class_folder(tmp_path, {"ant": 10, "bee": 10})
    plain = workload(source="folder", train=train, evaluation_fraction=0.2)
    name = plain.train.names[3]
    (tmp_path / name).write_bytes(b"broken")
    work = workload(source="folder", train=train, evaluation_fraction=0.2, bad_rows="drop")
    assert list(work.train.names) == list(plain.train.names)
    assert f"1 of 16 pictures cannot be read and count for nothing: {name} cannot be read" in work.warnings[0]
    assert work.facts["unreadable"] == 1
    rows = range(6)
    batch = work.collate([work.train.load(index, 0) for index in rows])
    model = work.build_model().eval()
    without = plain.collate([plain.train.load(index, 0) for index in rows if index != 3])
    assert (work.count(batch), plain.count(without)) == (5, 5)
    torch.testing.assert_close(work.loss_sum(model, batch), plain.loss_sum(model, without))
    outputs = work.outputs(model, batch)
    assert outputs.count == 5
    for (_, metric), right in zip(work.metrics().items(), plain.metrics().values(), strict=True):
        metric.update(outputs.predictions, outputs.targets)
        expected = plain.outputs(model, without)
        right.update(expected.predictions, expected.targets)
        assert float(metric.compute()) == float(right.compute())
    rows_of = work.predict(model, batch)
    assert rows_of[3] == {"label": None, "probability": None, "probabilities": {"ant": None, "bee": None}}
    assert rows_of[2]["label"] in {"ant", "bee"}


def test_focal_loss_by_class_leaves_bad_pictures_out_too() -> None:
    loss = ClassificationLoss(ClassLoss(focal_gamma=2.0, class_weights=[1.0, 3.0]), ["a", "b"], np.array([0, 1]))
    logits, labels = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, -100, 1])
    torch.testing.assert_close(loss(logits, labels), loss(logits[[0, 2]], labels[[0, 2]]))


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [True, False])
def test_pixels_are_normalised_and_laid_out_as_asked(tmp_path: Path, channels_last: bool) -> None:
    train = class_folder(tmp_path, {"ant": 4, "bee": 4}, size=(6, 5))
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    data = {"source": "folder", "train": train, "mean": mean, "std": std, "evaluation_fraction": 0.25}
    work = workload(channels_last=channels_last, **data)
    batch = work.collate([work.train.load(index, 0) for index in range(3)])
    pixels = batch["pixel_values"]
    assert pixels.shape == (3, 3, 5, 6)
    assert pixels.dtype == torch.float32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert pixels.is_contiguous(memory_format=layout)
    assert batch["labels"].dtype == torch.int64
    for row in range(3):
        image = np.asarray(Image.open(tmp_path / work.train.names[row]), dtype=np.float64)
        expected = (image / 255 - mean) / std
        np.testing.assert_allclose(pixels[row].permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_a_view_of_pixels_is_a_batch_like_its_copy() -> None:
    work = workload()
    samples = [work.train.load(index, 0) for index in range(3)]
    mirrored = np.stack([image for image, _ in samples])[:, :, ::-1]
    labels = np.array([label for _, label in samples])
    expected = work.collate([(image.copy(), label) for image, label in zip(mirrored, labels, strict=True)])
    found = work.collate(GatheredPictures(mirrored, labels))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_training_images_are_augmented_and_evaluation_images_are_not() -> None:
    work = workload(crop_padding=2, flip=True)
    assert any(not np.array_equal(work.train.load(i, 0)[0], work.train.load(i, 1)[0]) for i in range(5))
    assert all(np.array_equal(work.evaluation.load(i, 0)[0], work.evaluation.load(i, 1)[0]) for i in range(5))


def test_workers_load_what_one_process_loads() -> None:
    work = workload(crop_padding=2, flip=True, limit_train=32)

    def batches(workers: int) -> list[torch.Tensor]:
        loaded = evaluation_batches(work.train, work.collate, 8, Loader(workers=workers))
        return [batch.tensors["pixel_values"] for batch in loaded]

    assert all(torch.equal(a, b) for a, b in zip(batches(0), batches(2), strict=True))


# --- model, loss and metrics -----------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Gives the logits it was made with."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, pixel_values: torch.Tensor) -> Any:
        assert len(pixel_values) == len(self.logits)
        return self


def test_the_loss_is_the_sum_of_cross_entropies_in_fp32() -> None:
    work, labels = workload(), torch.tensor([3, 1, 9])
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": torch.zeros(3, 1, 8, 8), "labels": labels}
    expected = -sum(logits[i].log_softmax(0)[label] for i, label in enumerate(labels.tolist()))
    torch.testing.assert_close(work.loss_sum(Fixed(logits), batch), expected)
    assert work.count(batch) == 3
    half = work.loss_sum(Fixed(logits.bfloat16()), batch)
    torch.testing.assert_close(half, -logits.bfloat16().float().log_softmax(1)[range(3), labels].sum())


def test_metrics_agree_with_scikit_learn_over_ragged_batches() -> None:
    work = workload()
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(25, 10, generator=generator), torch.randint(0, 10, (25,), generator=generator)
    metrics = work.metrics()
    for part in (slice(0, 10), slice(10, 20), slice(20, 25)):
        batch = {"pixel_values": torch.zeros(len(labels[part]), 1, 8, 8), "labels": labels[part]}
        outputs = work.outputs(Fixed(logits[part]), batch)
        for metric in metrics.values():
            metric.update(outputs.predictions, outputs.targets)
    guesses = logits.argmax(1)
    assert float(metrics["accuracy"].compute()) == pytest.approx(accuracy_score(labels, guesses))
    assert float(metrics["macro_f1"].compute()) == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert (work.best_metric.name, work.best_metric.higher_is_better) == ("accuracy", True)


def test_a_small_resnet_learns_digits() -> None:
    torch.manual_seed(0)
    work = workload({"config": RESNET, "norm": "group"}, image_size=16, limit_train=512)
    model = work.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(64):
        batch = work.collate([work.train.load((step * 32 + i) % 512, 0) for i in range(32)])
        (work.loss_sum(model, batch) / 32).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = work.collate([work.evaluation.load(i, 0) for i in range(len(work.evaluation))])
    with torch.no_grad():
        outputs = work.outputs(model.eval(), batch)
    assert (outputs.predictions == outputs.targets).float().mean() > 0.8


def test_the_model_takes_what_the_data_have_unless_the_run_file_says_otherwise() -> None:
    work = workload()
    assert work.build_model().config.num_channels == 1  # type: ignore[union-attr]
    assert work.facts["model_config_from_data"] == {"num_channels": 1}
    vit = workload({"config": VIT}, image_size=16)
    assert vit.build_model().config.image_size == 16  # type: ignore[union-attr]
    assert vit.facts["model_config_from_data"] == {"num_channels": 1, "image_size": 16}


def test_grey_images_are_repeated_for_a_model_of_three_channels_and_colours_made_grey_for_one(tmp_path: Path) -> None:
    work = workload({"config": {**RESNET, "num_channels": 3}})
    batch = work.collate([work.train.load(0, 0)])
    assert batch["pixel_values"].shape == (1, 3, 8, 8)
    assert work.build_model().eval()(pixel_values=batch["pixel_values"]).logits.shape == (1, 10)
    train = class_folder(tmp_path, {"ant": 4, "bee": 4})
    grey = workload({"config": {**RESNET, "num_channels": 1}}, source="folder", train=train, evaluation_fraction=0.25)
    assert grey.collate([grey.train.load(0, 0)])["pixel_values"].shape == (1, 1, 8, 8)


def test_a_model_that_cannot_take_the_images_is_reported_before_training() -> None:
    assert "8 x 8 x 1" in problems(model={"config": {**VIT, "image_size": 32}})["workload.model"]


def test_building_twice_gives_the_same_model_and_says_everything_once() -> None:
    work = workload()
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(work.build_model().state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert len(work.warnings) == 1
    assert "BatchNorm" in work.warnings[0]


def test_group_norm_silences_the_warning_and_has_no_effect_without_batch_norm() -> None:
    grouped = workload({"config": RESNET, "norm": "group"})
    grouped.build_model()
    assert grouped.warnings == []
    vit = workload({"config": VIT, "norm": "group"})
    vit.build_model()
    assert vit.warnings == ["workload.model.norm has no effect: the model has no BatchNorm"]


def test_weights_are_channels_last_where_that_is_asked() -> None:
    for channels_last in (True, False):
        model = workload(channels_last=channels_last).build_model()
        weight = next(parameter for parameter in model.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1)
        assert weight.is_contiguous(memory_format=torch.channels_last) is channels_last


@pytest.mark.parametrize(
    ("data", "field", "why"),
    [
        ({"mean": [127.5]}, "workload.data.mean", "from 0 to 1"),
        ({"std": [0.0]}, "workload.data.std", "no std is 0"),
        ({"mean": [0.5, 0.5, 0.5]}, "workload.data.mean", "for 1 channels"),
    ],
)
def test_statistics_that_cannot_be_are_reported(data: dict[str, Any], field: str, why: str) -> None:
    assert why in problems(**data)[field]


# --- saved and loaded ------------------------------------------------------------------------------------------------


def saved_model(folder: Path, **model: Any) -> ImageClassificationWorkload:
    work = workload({"config": RESNET, **model}, image_size=12, mean=[0.3], std=[0.2])
    built = work.build_model()
    work.save_assets(built, folder)
    torch.save(built.state_dict(), folder / "pytorch_model.bin")
    return work


def test_assets_hold_the_classes_and_the_preprocessing(tmp_path: Path) -> None:
    saved_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {str(i): str(i) for i in range(10)}
    assert config["num_channels"] == 1
    again = workload({"path": str(tmp_path)})
    assert again.facts["image"] == "12 x 12 x 1"
    assert (again.facts["mean"], again.facts["std"]) == ([0.3], [0.2])
    given = workload({"path": str(tmp_path)}, image_size=10, mean=[0.5])
    assert given.facts["image"] == "10 x 10 x 1"
    assert (given.facts["mean"], given.facts["std"]) == ([0.5], [0.2])


def test_a_saved_model_predicts_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    for norm in ("as_is", "group"):
        folder = tmp_path / norm
        folder.mkdir()
        torch.manual_seed(0)
        work = workload({"config": RESNET, "norm": norm}, image_size=12)
        model = work.build_model().eval()
        work.save_assets(model, folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        again = workload({"path": str(folder), "norm": norm})
        loaded = again.build_model().eval()
        batch = work.collate([work.evaluation.load(i, 0) for i in range(5)])
        torch.testing.assert_close(
            loaded(pixel_values=batch["pixel_values"]).logits, model(pixel_values=batch["pixel_values"]).logits
        )
        assert [w for w in again.warnings if "BatchNorm has" not in w and "has BatchNorm" not in w] == []


def test_a_model_trained_with_group_norm_is_not_loaded_with_batch_norm(tmp_path: Path) -> None:
    saved_model(tmp_path, norm="group")
    assert "norm: group" in problems(model={"path": str(tmp_path)})["workload.model.norm"]


def test_group_norm_in_a_trained_model_is_reported_to_cost_its_accuracy(tmp_path: Path) -> None:
    saved_model(tmp_path)
    work = workload({"path": str(tmp_path), "norm": "group"})
    work.build_model()
    assert any("must be regained" in warning for warning in work.warnings)


# --- predictions -----------------------------------------------------------------------------------------------------


def test_rows_hold_the_likeliest_class_and_its_probability() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 7], logits[1, 2] = 3.0, 1.0
    rows = workload().predict(Fixed(logits), {"pixel_values": torch.zeros(2, 1, 8, 8)})
    assert [row["label"] for row in rows] == ["7", "2"]
    expected = [float(row.softmax(0).max()) for row in logits]
    assert [row["probability"] for row in rows] == pytest.approx(expected, abs=1e-6)
    json.dumps(rows)


def test_images_to_predict_for_are_resized_to_the_size_of_training(tmp_path: Path) -> None:
    work = workload()
    class_folder(tmp_path, {"x": 2}, size=(30, 20))
    samples = work.prediction_samples(str(tmp_path))
    assert list(samples.names) == ["x/0.png", "x/1.png"]
    assert work.collate([samples.load(0, 0), samples.load(1, 0)])["pixel_values"].shape == (2, 1, 8, 8)


def test_a_broken_image_to_predict_for_is_reported_before_any_work(tmp_path: Path) -> None:
    class_folder(tmp_path, {"x": 2})
    (tmp_path / "x" / "1.png").write_text("no image")
    with pytest.raises(UserError, match=r"x/1\.png cannot be read"):
        workload().prediction_samples(str(tmp_path))


def test_without_a_path_the_evaluation_samples_are_predicted_for() -> None:
    work = workload(limit_evaluation=20)
    samples = work.prediction_samples(None)
    assert samples is work.evaluation
    assert len(samples.names) == 20
    assert samples.names[0].startswith("digit ")
