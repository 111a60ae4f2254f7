from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.config.training import Loader
from drivetrain.data import picture_samples
from drivetrain.data.augment import Augmentation
from drivetrain.data.images import ArrayPictures, EncodedPictures, file_pictures
from drivetrain.data.loader import evaluation_batches
from drivetrain.data.picture_samples import UNREADABLE, PictureSamples
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


def words(samples: PictureSamples, most_kept_bytes: int = 2**20) -> list[str]:
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
def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path, most_kept_bytes: int) -> None:
    found = words(files(tmp_path, [None, (4, 4), None, (4, 5), (4, 4), (6, 4)]), most_kept_bytes)
    assert len(found) == 3
    assert "0.png cannot be read" in found[0]
    assert "2.png cannot be read" in found[1]
    assert found[2].startswith("workload.data.image_size: images differ in size: 3.png is 5 x 4 where others are 4 x 4")
    assert found[2].endswith("and 1 more")


def test_many_broken_files_are_counted_not_all_listed(tmp_path: Path) -> None:
    found = words(files(tmp_path, [(4, 4)] + [None] * 70))
    assert len(found) == 6
    assert found[-1].endswith("65 more cannot be read")
    assert len(words(files(tmp_path, [None] * 3))) == 3


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
    assert "0.png cannot be read" in words(samples_of([str(tmp_path / "0.png"), str(tmp_path / "1.png")], None))[0]


def test_only_samples_with_augmentation_change_with_the_epoch() -> None:
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    pictures, one = ArrayPictures(image, ["0"]), np.zeros(1, dtype=int)
    still = PictureSamples(pictures, one, one, None)
    moving = PictureSamples(pictures, one, one, None, Augmentation(0, crop_padding=3, flip=True))
    assert len({still.load(0, epoch)[0].tobytes() for epoch in range(10)}) == 1
    assert len({moving.load(0, epoch)[0].tobytes() for epoch in range(10)}) > 5


# --- pictures that cannot be read ------------------------------------------------------------------------------------


def lenient(folder: Path, sizes: list[tuple[int, int] | None], most_bad: float, kept: int) -> PictureSamples:
    strict = files(folder, sizes)
    samples = PictureSamples(strict._pictures, strict.labels, strict._indices, None, most_bad=most_bad)
    samples.prepare("workload.data.train", most_kept_bytes=kept)
    return samples


@pytest.mark.parametrize("kept", [2**20, 0])
def test_a_bad_picture_stays_in_its_place_and_counts_for_nothing(tmp_path: Path, kept: int) -> None:
    samples = lenient(tmp_path, [(4, 4), None, (4, 4), (4, 4)], 0.25, kept)
    assert [samples.load(index, 0)[1] for index in range(4)] == [0, UNREADABLE, 2, 3]
    assert not samples.load(1, 0)[0].any()
    assert list(samples.bad) == [1]
    assert "1.png cannot be read" in samples.bad[1]


def test_more_bad_pictures_than_may_be_are_refused_with_what_would_allow_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        lenient(tmp_path, [(4, 4), None, None, (4, 4)], 0.25, 0)
    assert "bad_rows=0.5" in error.value.problems[0].fix


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_breaks_during_the_run_is_named_once_and_too_many_end_it(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = lenient(tmp_path, [(4, 4)] * 8, 0.25, 0)

    def collate(loaded: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {"labels": torch.tensor([label for _, label in loaded])}

    def labels() -> list[int]:
        batches = evaluation_batches(samples, collate, 4, Loader(workers=workers))
        return [int(label) for batch in batches for label in batch.tensors["labels"]]

    (tmp_path / "5.png").write_bytes(b"broken")
    assert labels() == labels() == [0, 1, 2, 3, 4, UNREADABLE, 6, 7]
    assert [record.message for record in caplog.records if "5.png cannot be read" in record.message] == [
        "5.png cannot be read as an image: cannot identify image file it; it counts for nothing"
    ]
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(b"broken")
    with pytest.raises(RunError, match=r"3 of 8 pictures cannot be read, more than .*bad_rows"):
        labels()


def test_a_picture_that_is_gone_is_not_one_that_cannot_be_read(tmp_path: Path) -> None:
    samples = lenient(tmp_path, [(4, 4)] * 4, 0.5, 0)
    (tmp_path / "2.png").unlink()
    with pytest.raises(RunError, match=r"2\.png cannot be read as an image: No such file"):
        samples.load(2, 0)


# --- decoded once a machine ------------------------------------------------------------------------------------------


def on_disk(folder: Path, cache: Path, most_bad: float = 0.0) -> PictureSamples:
    paths = sorted(str(path) for path in folder.glob("*.png"))
    names, everything = [Path(path).name for path in paths], np.arange(len(paths))
    samples = PictureSamples(file_pictures(paths, names), everything, everything, None, None, most_bad, cache)
    samples.prepare("workload.data.train")
    return samples


def test_many_decoded_pictures_are_mapped_from_the_cache_and_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = files(tmp_path, [(5, 3)] * 70)
    held.prepare("field")
    monkeypatch.setattr(picture_samples, "LEAST_SHARED", 1)
    on_disk(tmp_path, tmp_path / "cache")
    monkeypatch.setattr(EncodedPictures, "pixels", lambda *_: np.zeros((3, 5, 3), np.uint8))  # decodes nothing now
    again = on_disk(tmp_path, tmp_path / "cache")
    order = sorted(range(70), key=str)
    assert [again.load(i, 0)[0].tolist() for i in range(70)] == [held.load(i, 0)[0].tolist() for i in order]
    assert again._kept is not None
    assert not again._kept.flags.writeable
    assert again.kept_bytes == held.kept_bytes


def test_a_picture_that_was_written_anew_is_decoded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_samples, "LEAST_SHARED", 1)
    files(tmp_path, [(5, 3)] * 3)
    on_disk(tmp_path, tmp_path / "cache")
    Image.new("RGB", (5, 3), (99, 0, 0)).save(tmp_path / "1.png")
    assert int(on_disk(tmp_path, tmp_path / "cache").load(1, 0)[0][0, 0, 0]) == 99


def test_bad_pictures_are_known_from_the_cache_and_refused_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_samples, "LEAST_SHARED", 1)
    files(tmp_path, [(5, 3), None, (5, 3), (5, 3)])
    with pytest.raises(UserError, match=r"1\.png cannot be read"):
        on_disk(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/pixels"))  # of what was refused nothing is left
    for _ in range(2):
        samples = on_disk(tmp_path, tmp_path / "cache", most_bad=0.25)
        assert samples.load(1, 0)[1] == UNREADABLE
    with pytest.raises(UserError, match=r"1\.png cannot be read"):
        on_disk(tmp_path, tmp_path / "cache")


def test_of_many_pictures_a_sample_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_samples, "MOST_LOOKED_AT", 4)
    samples, looked = files(tmp_path, [(4, 4)] * 16), []
    look = EncodedPictures.dimensions
    monkeypatch.setattr(EncodedPictures, "dimensions", lambda self, i: looked.append(i) or look(self, i))
    samples.prepare("field", most_kept_bytes=0)
    assert looked == [0, 4, 8, 12]


def in_memory(**more: Any) -> PictureSamples:
    images = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 1), dtype=np.uint8)
    pictures = ArrayPictures(images, [str(number) for number in range(12)])
    return PictureSamples(pictures, np.arange(9) * 10, np.arange(9) + 2, **{"size": None, **more})


@pytest.mark.parametrize("size", [None, 8])
def test_pictures_that_are_taken_together_are_those_taken_one_by_one(size: int | None) -> None:
    samples = in_memory(size=size)
    samples.prepare("field")
    found = samples.load_together([5, 0, 5])
    assert found is not None
    for (image, label), index in zip(found, [5, 0, 5], strict=True):
        wanted, wanted_label = samples.load(index, 0)
        np.testing.assert_array_equal(image, wanted)
        assert label == wanted_label


def test_pictures_that_are_changed_one_by_one_are_not_taken_together() -> None:
    drawn, coloured = in_memory(augment=Augmentation(0, flip=True)), in_memory()
    drawn.prepare("field")
    coloured.prepare("field", channels=3)
    assert drawn.load_together([0, 1]) is None
    assert coloured.load_together([0, 1]) is None
    assert coloured.load(0, 0)[0].shape == (4, 4, 3)
