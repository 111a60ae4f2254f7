from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drivetrain.errors import UserError
from drivetrain.models.preprocessing import Preprocessing, expected_by, write_preprocessing


def model_folder(folder: Path, config: dict[str, Any], processor: dict[str, Any] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_no_path_expects_nothing() -> None:
    assert expected_by(None, "workload.model.path") == Preprocessing()


def test_size_and_statistics_come_from_the_processor(tmp_path: Path) -> None:
    processor = {"size": {"height": 96, "width": 96}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    found = expected_by(model_folder(tmp_path, {"num_channels": 3, "image_size": 224}, processor), "field")
    assert found == Preprocessing(channels=3, size=96, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), sides=(96, 96))


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": 128}, 128),
        ({"size": {"shortest_edge": 64}}, 64),
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, 224),
        ({}, 32),
        (None, 32),
    ],
)
def test_a_size_is_read_in_every_form(tmp_path: Path, processor: dict[str, Any] | None, size: int) -> None:
    assert expected_by(model_folder(tmp_path, {"image_size": 32}, processor), "field").size == size


def test_a_model_that_does_not_normalise_gets_plain_pixels(tmp_path: Path) -> None:
    processor = {"do_normalize": False, "image_mean": [0.5], "image_std": [0.5]}
    found = expected_by(model_folder(tmp_path, {}, processor), "field")
    assert (found.mean, found.std) == ((0.0,), (1.0,))


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "broken", {}, {})
    Path(folder, "preprocessor_config.json").write_text("{")
    for path in (folder, str(tmp_path / "nowhere")):
        with pytest.raises(UserError) as error:
            expected_by(path, "workload.model.path")
        assert error.value.problems[0].field == "workload.model.path"


def test_pixels_scaled_otherwise_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {}, {"rescale_factor": 1 / 127.5})
    with pytest.raises(UserError, match="not 1/255"):
        expected_by(folder, "workload.model.path")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"num_channels": 3})
    write_preprocessing(tmp_path, 32, 32, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    written = Preprocessing(3, 32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), sides=(32, 32), crops=True)
    assert expected_by(folder, "field") == written


@pytest.mark.parametrize(("shape", "channels"), [((20, 20), 3), ((33, 47), 3), ((50, 31), 3), ((8, 8), 1)])
def test_transformers_own_processor_gives_the_pixels_we_train_on(
    tmp_path: Path, shape: tuple[int, int], channels: int
) -> None:
    from transformers import AutoImageProcessor

    from drivetrain.data.images import resized

    size = 16
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, channels), dtype=np.uint8)
    image = Image.fromarray(pixels.squeeze())
    write_preprocessing(tmp_path, size, size, [0.4] * channels, [0.2] * channels)
    try:
        processor = AutoImageProcessor.from_pretrained(tmp_path)
    except ImportError:  # Transformers 5.17
        assert importlib.util.find_spec("torchvision") is None
        pytest.skip("the image processors of this version of Transformers need torchvision")
    ours = (np.asarray(resized(image, size), dtype=np.float64).reshape(size, size, channels) / 255 - 0.4) / 0.2
    theirs = processor(
        np.asarray(image).reshape(*shape, channels), input_data_format="channels_last", return_tensors="np"
    )
    np.testing.assert_allclose(theirs["pixel_values"][0].transpose(1, 2, 0), ours, atol=1e-5)
