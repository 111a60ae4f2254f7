"""Images that a table names, with their labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drivetrain.config.workload import ImageData
from drivetrain.data import image_lists, table_listing
from drivetrain.data.image_sources import pictures_to_predict, read_pictures
from drivetrain.data.images import LabelledPictures
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures, each of one grey value: 0, 10, ... 50."""
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    for number in range(6):
        place = "deep/" if number == 5 else ""
        Image.fromarray(np.full((4, 4), 10 * number, np.uint8)).save(tmp_path / "pictures" / f"{place}{number}.png")
    return tmp_path


def read(folder: Path, text: str, **config: Any) -> tuple[list[int], list[str]]:
    """The grey values and the labels of what a table names."""
    (folder / "labels.csv").write_text(text)
    given = {"source": "table", "train": str(folder / "labels.csv"), "image_folder": str(folder / "pictures"), **config}
    found = read_pictures(ImageData.model_validate(given), given["train"], "workload.data.train", "train")
    greys = [int(found.pictures.pixels(index, None)[0, 0, 0]) for index in range(len(found.labels))]
    return greys, found.labels.tolist()


@pytest.mark.parametrize("names", [["3.png", "0.png", "deep/5.png"], ["3", "0", "deep/5"]])
def test_names_with_or_without_their_endings_find_their_files(folder: Path, names: list[str]) -> None:
    text = "image,label\n" + "".join(f"{name},{label}\n" for name, label in zip(names, "aba", strict=True))
    assert read(folder, text) == ([30, 0, 50], ["a", "b", "a"])


def test_a_table_may_call_its_columns_otherwise_and_lie_among_its_images(folder: Path) -> None:
    text = "id,breed\n1,pug\n2,collie\n"
    assert read(folder, text, image_column="id", label_column="breed") == ([10, 20], ["pug", "collie"])
    (folder / "pictures" / "labels.csv").write_text("image,label\n4.png,x\n")
    given = ImageData(source="table", train=str(folder / "pictures" / "labels.csv"))
    found = read_pictures(given, given.train, "workload.data.train", "train")
    assert found.pictures.pixels(0, None)[0, 0, 0] == 40


def test_files_that_are_not_there_and_rows_without_a_label_are_reported_together(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(folder, "image,label\n0.png,\n7.png,a\n8,b\n")
    words = str(caught.value)
    assert "1 row of" in words
    assert "2 of 3 images" in words
    assert "7.png, 8" in words


def test_an_image_with_two_labels_is_reported(folder: Path) -> None:
    with pytest.raises(UserError, match=r"gives 1 images two labels: 1\.png"):
        read(folder, "image,label\n1,a\n1.png,b\n2,b\n2,b\n")


def test_a_name_that_two_files_share_but_for_their_endings_is_none(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "pictures" / "1.bmp")
    with pytest.raises(UserError, match=r"1 of 2 images .*: 1\n"):
        read(folder, "image,label\n1,a\n2,b\n")


def test_wrong_columns_come_together_with_what_there_is(folder: Path) -> None:
    with pytest.raises(UserError, match="has no column 'image'") as caught:
        read(folder, "file,labels\n0.png,a\n")
    words = [each.field for each in caught.value.problems]
    assert words == ["workload.data.image_column", "workload.data.label_column"]
    assert caught.value.problems[1].fix.startswith("did you mean labels?")


def test_a_folder_of_loose_images_beside_a_table_is_reported_with_the_way(folder: Path) -> None:
    (folder / "pictures" / "deep" / "5.png").unlink()
    (folder / "pictures" / "train.csv").write_text("image,label\n")
    config = ImageData(source="folder", train=str(folder / "pictures"))
    with pytest.raises(UserError, match=r"source: table and train: .*train\.csv"):
        read_pictures(config, config.train, "workload.data.train", "train")


@pytest.mark.parametrize(
    ("name", "source"), [("labels.csv", "table"), ("all.parquet", "parquet"), ("shard.tar.gz", "webdataset")]
)
def test_a_file_in_place_of_a_folder_of_classes_is_answered_with_its_source(
    tmp_path: Path, name: str, source: str
) -> None:
    (tmp_path / name).write_text("image,label\n")
    config = ImageData(source="folder", train=str(tmp_path / name))
    with pytest.raises(UserError, match=f"is no folder(.|\n)*give source: {source}"):
        read_pictures(config, config.train, "workload.data.train", "train")


@pytest.mark.parametrize("source", ["table", "folder"])
def test_a_table_to_predict_for_names_its_images_and_needs_no_labels(folder: Path, source: str) -> None:
    (folder / "pictures" / "new.csv").write_text("image,other\n3.png,x\n0,y\n")
    config = ImageData.model_validate({"source": source, "train": str(folder)})
    found = pictures_to_predict(config, str(folder / "pictures" / "new.csv"), "--data")
    assert list(found.names) == ["3.png", "0"]
    assert [int(found.pixels(index, None)[0, 0, 0]) for index in range(2)] == [30, 0]
    (folder / "new.csv").write_text("image\n3.png\n")
    with pytest.raises(UserError, match=r"1 of 1 images .* are not in"):
        pictures_to_predict(config, str(folder / "new.csv"), "--data")


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ImageData:
    """A table that counts as large, of pictures in folders that have settled."""
    monkeypatch.setattr(table_listing, "LEAST", 1)
    (folder / "labels.csv").write_text("image,label\n3.png,b\n0.png,a\ndeep/5,b\n")
    settle(folder)
    table = str(folder / "labels.csv")
    given = {"source": "table", "train": table, "image_folder": str(folder / "pictures"), "cache": folder / "cache"}
    return ImageData.model_validate(given)


def settle(folder: Path) -> None:
    for each in (folder / "pictures", folder / "pictures" / "deep"):
        os.utime(each, (1e9, 1e9))


def looked(config: ImageData) -> LabelledPictures:
    return read_pictures(config, config.train, "workload.data.train", "train")


def test_a_large_table_is_read_once_a_machine_and_mapped(large: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    first = looked(large)

    def fail(*_: Any) -> None:
        raise AssertionError("the table was read again")

    monkeypatch.setattr(image_lists, "read_table", fail)
    second = looked(large)
    for found in (first, second):
        assert list(found.pictures.names) == ["3.png", "0.png", "deep/5"]
        assert found.labels.tolist() == ["b", "a", "b"]
        assert [int(found.pictures.pixels(index, None)[0, 0, 0]) for index in range(3)] == [30, 0, 50]
        assert isinstance(found.pictures.names, MappedTexts)


def test_a_picture_that_is_gone_or_a_label_that_changed_is_found_at_the_next_start(
    large: ImageData, folder: Path
) -> None:
    looked(large)
    file = folder / "pictures" / "deep" / "5.png"
    file.rename(folder / "elsewhere.png")
    with pytest.raises(UserError, match=r"1 of 3 images .*: deep/5"):
        looked(large)
    (folder / "elsewhere.png").rename(file)
    assert looked(large).labels.tolist() == ["b", "a", "b"]
    (folder / "labels.csv").write_text("image,label\n3.png,b\n0.png,c\ndeep/5,b\n")
    assert looked(large).labels.tolist() == ["b", "c", "b"]
