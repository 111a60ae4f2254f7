from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from drivetrain.config.workload import ImageData
from drivetrain.data import image_tables
from drivetrain.data.image_sources import pictures_to_predict, read_pictures
from drivetrain.data.image_tables import hub_images, parquet_images
from drivetrain.errors import UserError

CONFIG = ImageData(source="parquet")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(value: int) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(held, "PNG")
    return held.getvalue()


def write(
    path: Path, labels: Any, raw: bool = False, names: list[str] | None = None, values: list[int] | None = None
) -> Path:
    """A file as the hub keeps it: images as {bytes, path}, names of classes in the metadata."""
    encoded = [png(value) for value in values or range(len(labels))]
    images = (
        pa.array(encoded) if raw else pa.array([{"bytes": b, "path": f"{i}.png"} for i, b in enumerate(encoded)], IMAGE)
    )
    table = pa.table({"image": images, "label": labels})
    if names is not None:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
    pq.write_table(table, path)
    return path


def words(path: Path, **more: Any) -> dict[str, str]:
    with pytest.raises(UserError) as error:
        parquet_images(path, "workload.data.train", ImageData(source="parquet", **more), "train")
    return {problem.field: f"{problem.why} | {problem.fix}" for problem in error.value.problems}


@pytest.mark.parametrize("raw", [False, True])
def test_images_and_labels_are_read_from_structs_and_from_bytes(tmp_path: Path, raw: bool) -> None:
    path = write(tmp_path / "a.parquet", pa.array([1, 0, 1]), raw=raw, values=[10, 20, 30])
    found = read_pictures(CONFIG, str(path), "field", "train")
    assert found.labels.tolist() == ["1", "0", "1"]
    assert found.classes is None
    assert [int(found.pictures.pixels(i, None)[0, 0, 0]) for i in range(3)] == [10, 20, 30]
    assert list(found.pictures.names) == ["row 1", "row 2", "row 3"]


def test_integer_classes_take_the_names_that_the_file_declares_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([1, 0, 1]), names=["zebra", "ant"])
    found = read_pictures(CONFIG, str(path), "field", "train")
    assert found.labels.tolist() == ["ant", "zebra", "ant"]
    assert found.classes == ("zebra", "ant")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (pa.array(["b", "a"]), ["b", "a"]),
        (pa.array(["b", "a"], pa.large_string()), ["b", "a"]),
        (pa.array(["b", "a"]).dictionary_encode(), ["b", "a"]),
        (pa.array([True, False]), ["1", "0"]),
        (pa.array([3, 7], pa.uint8()), ["3", "7"]),
    ],
)
def test_labels_may_be_strings_categories_booleans_or_integers(tmp_path: Path, labels: Any, names: list[str]) -> None:
    table = parquet_images(write(tmp_path / "a.parquet", labels), "field", CONFIG, "train")
    assert table.labels is not None
    assert table.labels.tolist() == names


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", pa.array([0, 1]))
    write(tmp_path / "train-00001-of-00002.parquet", pa.array([1]))
    write(tmp_path / "validation-00000-of-00001.parquet", pa.array([0]))

    def labels(split: str) -> Any:
        table = parquet_images(tmp_path, "field", CONFIG, split)
        assert table.labels is not None
        return table.labels.tolist()

    assert labels("train") == ["0", "1", "1"]
    assert labels("test") == ["0"]


def test_training_files_alone_do_not_serve_for_evaluation(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", pa.array([0, 1]))
    with pytest.raises(UserError, match="no test split"):
        parquet_images(tmp_path, "field", CONFIG, "test")


def test_files_of_other_names_are_all_read(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", pa.array([1]))
    write(tmp_path / "a.parquet", pa.array([0]))
    table = parquet_images(tmp_path, "field", CONFIG, "train")
    assert table.labels is not None
    assert table.labels.tolist() == ["0", "1"]


def test_both_wrong_columns_are_reported_with_the_nearest_name(tmp_path: Path) -> None:
    found = words(write(tmp_path / "a.parquet", pa.array([0, 1])), image_column="imge", label_column="labels")
    assert "did you mean image?" in found["workload.data.image_column"]
    assert "did you mean label?" in found["workload.data.label_column"]


@pytest.mark.parametrize(
    ("labels", "names", "why"),
    [
        (pa.array([0, -1, 1, -1]), None, "labels -1 in rows 2, 4"),
        (pa.array([0, 2]), ["a", "b"], "labels run from 0 to 1"),
        (pa.array([0, None]), None, "no label in rows 2"),
        (pa.array([0.5, 1.0]), None, "labels are double"),
    ],
)
def test_labels_that_cannot_be_classes_are_reported(tmp_path: Path, labels: Any, names: Any, why: str) -> None:
    assert why in str(words(write(tmp_path / "a.parquet", labels, names=names)))


def test_what_holds_no_images_is_reported(tmp_path: Path) -> None:
    assert "does not exist" in str(words(tmp_path / "nowhere"))
    assert "holds no parquet files" in str(words(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read" in str(words(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "a.parquet")
    assert "holds string, no image bytes" in str(words(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"image": pa.array([{"path": "a.png"}], IMAGE), "label": [0]}), tmp_path / "a.parquet")
    assert "no image bytes in rows 1" in str(words(tmp_path / "a.parquet"))
    write(tmp_path / "a.parquet", pa.array([], pa.int64()))
    assert "has no rows" in str(words(tmp_path / "a.parquet"))


def test_prediction_needs_no_labels(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array([png(5)])}), tmp_path / "a.parquet")
    for path in (tmp_path, tmp_path / "a.parquet"):
        assert pictures_to_predict(CONFIG, str(path), "--data").pixels(0, None)[0, 0, 0] == 5


# --- hub -------------------------------------------------------------------------------------------------------------


class HubSplit:
    """As much of datasets.Dataset as is used."""

    column_names = ("image", "label")

    def __init__(self) -> None:
        self.features = {"label": SimpleNamespace(names=["zebra", "ant"])}

    def cast_column(self, column: str, feature: str) -> HubSplit:
        assert (column, feature) == ("image", "encoded")
        return self

    def with_format(self, kind: str) -> HubSplit:
        assert kind == "arrow"
        return self

    def __getitem__(self, _: slice) -> pa.Table:
        images = pa.array([{"bytes": png(value), "path": None} for value in (1, 2)], IMAGE)
        return pa.table({"image": images, "label": [1, 0]})


def test_a_hub_data_set_takes_its_validation_split_where_it_has_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str) -> dict[str, HubSplit]:
        asked.append(name)
        return {"train": HubSplit(), "validation": HubSplit()}

    fake = SimpleNamespace(load_dataset=load_dataset, Image=lambda decode: "decoded" if decode else "encoded")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    table = hub_images("someone/animals", "field", ImageData(source="hub"), "test")
    assert asked == ["someone/animals"]
    assert table.labels is not None
    assert table.labels.tolist() == ["ant", "zebra"]
    assert np.asarray(Image.open(table.open(1)))[0, 0, 0] == 2


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"drivetrain\[hub\]"):
        hub_images("someone/animals", "field", ImageData(source="hub"), "train")


def test_an_unreachable_hub_names_the_way_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match="source: parquet"):
        hub_images("someone/animals", "field", ImageData(source="hub"), "train")


# --- large files ------------------------------------------------------------------------------------------------------


def test_large_files_are_copied_once_and_their_pictures_are_those_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, start in (("a", 0), ("b", 300)):
        write(tmp_path / f"{name}.parquet", pa.array([number % 3 for number in range(start, start + 300)]))
    config = ImageData(source="parquet", cache=tmp_path / "cache")
    held = read_pictures(config, str(tmp_path), "field", "train")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(image_tables, "LEAST_STORED", 1)
    first = read_pictures(config, str(tmp_path / "{a,b}.parquet"), "field", "train")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)  # nothing is copied again
    second = read_pictures(config, str(tmp_path), "field", "train")
    for found in (first, second):
        assert found.labels.tolist() == held.labels.tolist()
        assert list(found.pictures.names) == list(held.pictures.names)
        for index in (0, 255, 256, 299, 300, 599):
            np.testing.assert_array_equal(found.pictures.pixels(index, None), held.pictures.pixels(index, None))


def test_a_large_file_with_a_row_that_has_no_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_tables, "LEAST_STORED", 1)
    images = pa.array([b"x"] * 300 + [None], pa.binary())
    pq.write_table(pa.table({"image": images, "label": pa.array([0] * 301)}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no image bytes in rows 301"):
        read_pictures(ImageData(source="parquet", cache=tmp_path / "cache"), str(tmp_path), "field", "train")
