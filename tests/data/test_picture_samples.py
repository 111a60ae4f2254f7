from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drivetrain.data.augment import Augmentation
from drivetrain.data.images import ArrayPictures, file_pictures
from drivetrain.data.picture_samples import PictureSamples
from drivetrain.errors import RunError, UserError


def files(folder: Path, sizes: list[tuple[int, int] | None]) -> PictureSamples:
    """An image for each size, a broken file for each None."""
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.png"
        if size is None:
            path.write_bytes(b"broken")
        else:
            Image.new("RGB", size, (number, 0, 0)).save(path)
        paths.append(str(path))
    return samples_of(paths, None)


def samples_of(paths: list[str], size: int | None) -> PictureSamples:
    everything = np.arange(len(paths))
    return PictureSamples(file_pictures(paths, [Path(path).name for path in paths]), everything, everything, size)


def told(samples: PictureSamples, most_kept_bytes: int = 2**20) -> list[str]:
    with pytest.raises(UserError) as error:
        samples.prepare("workload.data.train", most_kept_bytes=most_kept_bytes)
    return [f"{problem.field}: {problem.why}" for problem in error.value.problems]


@pytest.mark.parametrize("most_kept_bytes", [2**20, 0])
def test_samples_are_the_same_whether_kept_or_decoded_each_time(tmp_path: Path, most_kept_bytes: int) -> None:
    samples = files(tmp_path, [(5, 3)] * 4)
    assert samples.prepare("field", most_kept_bytes=most_kept_bytes) == (3, 5, 3)
    assert samples.kept_bytes == (3 * 5 * 3 * 4 if most_kept_bytes else 0)
    for index in range(4):
        image, label = samples.load(index, 0)
        assert image.shape == (3, 5, 3)
        assert (int(image[0, 0, 0]), label) == (index, index)
    assert samples.names == ["0.png", "1.png", "2.png", "3.png"]


def test_a_part_holds_its_indices_only() -> None:
    images = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1)
    pictures = ArrayPictures(images, [f"picture {i}" for i in range(10)])
    part = PictureSamples(pictures, np.array([1, 0]), np.array([7, 3]), None)
    part.prepare("field")
    assert part.names == ["picture 7", "picture 3"]
    assert [(int(image[0, 0, 0]), label) for image, label in (part.load(0, 0), part.load(1, 0))] == [(7, 1), (3, 0)]
    assert part.kept_bytes == 0  # they are in memory as it is


def test_decoded_images_that_need_no_change_are_not_copied_but_resized_ones_are_kept() -> None:
    pictures = ArrayPictures(np.zeros((6, 4, 4, 1), dtype=np.uint8), [str(i) for i in range(6)])
    samples = PictureSamples(pictures, np.zeros(6, dtype=int), np.arange(6), 8)
    assert samples.prepare("field", channels=3) == (8, 8, 3)
    assert samples.kept_bytes == 6 * 8 * 8 * 3
    assert samples.load(0, 0)[0].shape == (8, 8, 3)


@pytest.mark.parametrize("most_kept_bytes", [2**20, 0])
def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, most_kept_bytes: int) -> None:
    found = told(files(tmp_path, [None, (4, 4), None, (4, 5), (4, 4), (6, 4)]), most_kept_bytes)
    assert len(found) == 3
    assert "0.png cannot be read" in found[0]
    assert "2.png cannot be read" in found[1]
    assert found[2].startswith("workload.data.image_size: images differ in size: 3.png is 5 x 4 where others are 4 x 4")
    assert found[2].endswith("and 1 more")


def test_many_broken_files_are_counted_not_all_listed(tmp_path: Path) -> None:
    found = told(files(tmp_path, [(4, 4)] + [None] * 70))
    assert len(found) == 6
    assert found[-1].endswith("65 more cannot be read")
    assert len(told(files(tmp_path, [None] * 3))) == 3


def test_an_image_that_breaks_after_it_was_looked_at_is_named(tmp_path: Path) -> None:
    samples = files(tmp_path, [(4, 4)] * 2)
    samples.prepare("field", most_kept_bytes=0)
    Image.new("RGB", (5, 5)).save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"")
    with pytest.raises(RunError, match=r"0\.png is 5 x 5 where others are 4 x 4"):
        samples.load(0, 0)
    with pytest.raises(RunError, match=r"1\.png cannot be read"):
        samples.load(1, 0)


def test_a_truncated_image_is_found_by_decoding(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(tmp_path / "0.png")
    whole = (tmp_path / "0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (40, 40)).save(tmp_path / "1.png")
    assert "0.png cannot be read" in told(samples_of([str(tmp_path / "0.png"), str(tmp_path / "1.png")], None))[0]


def test_only_samples_with_augmentation_change_with_the_epoch() -> None:
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    pictures, one = ArrayPictures(image, ["0"]), np.zeros(1, dtype=int)
    still = PictureSamples(pictures, one, one, None)
    moving = PictureSamples(pictures, one, one, None, Augmentation(0, crop_padding=3, flip=True))
    assert len({still.load(0, epoch)[0].tobytes() for epoch in range(10)}) == 1
    assert len({moving.load(0, epoch)[0].tobytes() for epoch in range(10)}) > 5
