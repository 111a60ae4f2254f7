from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.data import cifar
from drivetrain.data.cifar import read_cifar10, stored_cifar10
from drivetrain.errors import UserError

NAMES = [b"airplane", b"automobile", b"bird"]


def as_python_2_wrote_it(data: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of the published files (`python -m pickletools data_batch_1`): str, numpy.core, integer flags."""
    raw = data.tobytes()
    rows = struct.pack("<H", data.shape[0])
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        + b"(K\x01(M"
        + rows
        + b"M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbI00\n"
        + b"T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"U\x0bbatch_labelU\x05batchu."


def write(root: Path, per_batch: int = 4, writer: Any = as_python_2_wrote_it) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(0)
    everything, labels = [], []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = generator.integers(0, 256, (per_batch, 3072), dtype=np.uint8)
        numbers = generator.integers(0, 3, per_batch).tolist()
        (root / name).write_bytes(writer(data, numbers))
        everything.append(data)
        labels += numbers
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": NAMES}, protocol=2))
    return np.concatenate(everything), labels


@pytest.mark.parametrize(
    "writer",
    [as_python_2_wrote_it, lambda data, labels: pickle.dumps({b"data": data, b"labels": labels}, protocol=2)],
    ids=["python 2", "numpy now"],
)
def test_the_five_batches_are_training_and_the_sixth_is_evaluation(tmp_path: Path, writer: Any) -> None:
    rows, numbers = write(tmp_path, writer=writer)
    images, labels, names = read_cifar10(tmp_path, "field", "train")
    assert images.shape == (20, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.tolist() == numbers[:20]
    assert names == ["airplane", "automobile", "bird"]
    images, labels, _ = read_cifar10(tmp_path, "field", "test")
    assert labels.tolist() == numbers[20:]
    assert len(images) == 4
    # red plane first, row by row
    assert images[1, 0, 0].tolist() == [rows[21, 0], rows[21, 1024], rows[21, 2048]]
    assert images[1, 2, 5].tolist() == [rows[21, 69], rows[21, 1024 + 69], rows[21, 2048 + 69]]


def test_the_folder_around_the_unpacked_one_will_do(tmp_path: Path) -> None:
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    write(inner)
    assert len(read_cifar10(tmp_path, "field", "train")[0]) == 20


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_asks_for_code_is_refused_and_not_run(tmp_path: Path) -> None:
    write(tmp_path)
    trap = tmp_path / "ran"
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(Malicious(trap), protocol=2))
    with pytest.raises(UserError, match="mkdir") as error:
        read_cifar10(tmp_path, "workload.data.train", "train")
    assert error.value.problems[0].field == "workload.data.train"
    assert "data_batch_3" in error.value.problems[0].why
    assert not trap.exists()


@pytest.mark.parametrize(
    "expression", ["numpy\nload\n", "builtins\neval\n", "numpy.core.multiarray\nscalar\n", "os\nsystem\n"]
)
def test_no_other_name_can_be_looked_up(tmp_path: Path, expression: str) -> None:
    write(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"\x80\x02c" + expression.encode() + b".")
    with pytest.raises(UserError, match="does not need"):
        read_cifar10(tmp_path, "field", "test")


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    held = {b"data": np.array([object.__name__, None], dtype=object), b"labels": [0, 1]}
    write(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(held, protocol=2))
    with pytest.raises(UserError, match="array of objects"):
        read_cifar10(tmp_path, "field", "test")


def test_missing_broken_and_foreign_files_are_reported(tmp_path: Path) -> None:
    def words() -> str:
        with pytest.raises(UserError) as error:
            read_cifar10(tmp_path, "field", "test")
        return error.value.problems[0].why

    assert "lacks test_batch, batches.meta" in words()
    write(tmp_path)
    whole = (tmp_path / "test_batch").read_bytes()
    (tmp_path / "test_batch").write_bytes(whole[: len(whole) // 2])
    assert "is no CIFAR-10 pickle" in words()
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"labels": [0]}, protocol=2))
    assert "not in CIFAR-10's python format" in words()
    (tmp_path / "test_batch").write_bytes(pickle.dumps([1, 2], protocol=2))
    assert "holds a list" in words()
    (tmp_path / "test_batch").write_bytes(as_python_2_wrote_it(np.zeros((2, 3072), dtype=np.uint8), [0, 3]))
    assert "labels outside 0 to 2" in words()
    (tmp_path / "test_batch").write_bytes(as_python_2_wrote_it(np.zeros((2, 3072), dtype=np.uint8), [0]))
    assert "2 images but 1 labels" in words()


def test_large_batches_are_mapped_from_the_cache_and_a_changed_one_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    expected = read_cifar10(tmp_path / "data", "field", "train")
    assert stored_cifar10(tmp_path / "data", "field", "train", tmp_path / "cache")[3] is None  # small: held in memory
    monkeypatch.setattr(cifar, "LEAST_STORED", 1)
    first = stored_cifar10(tmp_path / "data", "field", "train", tmp_path / "cache")
    with monkeypatch.context() as without:
        without.setattr(cifar, "read_cifar10", None)
        second = stored_cifar10(tmp_path / "data", "field", "train", tmp_path / "cache")
    for found in (first, second):
        np.testing.assert_array_equal(found[0], expected[0])
        assert (found[1].tolist(), found[2]) == (expected[1].tolist(), expected[2])
    write(tmp_path / "data", per_batch=3)
    assert len(stored_cifar10(tmp_path / "data", "field", "train", tmp_path / "cache")[0]) == 15
