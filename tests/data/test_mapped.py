"""Mapped arrays: what was read of them does not count as memory for ever."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.config.training import Loader
from drivetrain.data import mapped as mapping
from drivetrain.data.loader import evaluation_batches
from drivetrain.data.mapped import ReadPages, mapped

PAGES = 64 << 20  # bytes of the mapped array


class Rows:
    """Samples that lie in a mapped array, read in any order; the most that files had of this process's memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.most = array.reshape(-1, 4096), 0
        self._order = np.random.default_rng(0).permutation(len(self._array))

    def __len__(self) -> int:
        return len(self._array)

    def load(self, index: int, epoch: int) -> int:
        del epoch
        found = int(self._array[self._order[index], 0])
        self.most = max(self.most, resident())
        return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * mmap.PAGESIZE


def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
    return {"first": torch.tensor(samples)}


def written(folder: Path) -> np.ndarray:
    np.arange(PAGES // 4, dtype=np.int32).view(np.uint8).tofile(folder / "array")
    return mapped(folder / "array", np.dtype(np.uint8))


def read_through(array: np.ndarray) -> tuple[Rows, list[int]]:
    rows = Rows(array)
    batches = evaluation_batches(rows, collate, 4, Loader(workers=0))
    return rows, [int(each) for batch in batches for each in batch.tensors["first"]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages by /proc")
def test_a_pass_over_a_mapped_array_holds_a_bounded_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = written(tmp_path)
    expected = np.arange(PAGES // 4, dtype=np.int32).view(np.uint8).reshape(-1, 4096)[:, 0]
    monkeypatch.setattr(mapping, "MOST", 8 << 20)
    before = resident()
    rows, found = read_through(array)
    assert rows.most - before < PAGES / 2
    assert sorted(found) == sorted(expected.tolist())
    np.testing.assert_array_equal(array[:8192].reshape(-1, 4096)[:, 0], expected[:2])  # it is read again as before
    monkeypatch.setattr(mapping, "MOST", 1 << 40)
    assert read_through(array)[0].most - before > 0.9 * PAGES


def test_weights_that_are_mapped_cost_no_release_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(100))
    released: list[int] = []

    class Map:
        def madvise(self, advice: int) -> None:
            released.append(advice)

    monkeypatch.setattr(mapping, "_maps", [Map()])
    monkeypatch.setattr(mapping, "MOST", 10)
    monkeypatch.setattr(ReadPages, "_bytes_of_files", lambda _: 5 if next(looks) == 0 else 1000)  # weights, once loaded
    pages = ReadPages()
    for _ in range(6):
        pages.release()
    assert len(released) == 1


def test_an_empty_file_is_an_empty_array(tmp_path: Path) -> None:
    (tmp_path / "array").touch()
    assert mapped(tmp_path / "array", np.dtype(np.int64)).tolist() == []


def test_a_mapping_ends_with_its_array(tmp_path: Path) -> None:
    program = (
        "import sys, gc, numpy as np; from pathlib import Path; from drivetrain.data import mapped as m\n"
        "array = m.mapped(Path(sys.argv[1]), np.dtype(np.uint8)); assert len(m._maps) == 1\n"
        "part = array[5:9]; del array; gc.collect(); assert part.tolist() == [5, 6, 7, 8]\n"
        "del part; gc.collect(); assert len(m._maps) == 0 and sys.argv[1] not in open('/proc/self/maps').read()\n"
    )
    file = tmp_path / "array"
    file.write_bytes(bytes(range(256)))
    subprocess.run([sys.executable, "-c", program, str(file)], check=True)
